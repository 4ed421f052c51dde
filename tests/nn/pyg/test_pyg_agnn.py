"""pyg.AGNNConv beside torch_geometric's with the same parameter: outputs and all gradients."""

import copy
import pickle

import pytest
import torch
from pyg_compare import compare, compare_low_precision, edges, pair, sparse_forms, torch_geometric

from dfgnn.nn.pyg import AGNNConv

PyGConv = torch_geometric.nn.AGNNConv
N = 50  # nodes of the graph "random"


def features(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def agnn_pair(beta=1.7, dtype=torch.float64, **options):
    layers = pair(PyGConv, AGNNConv, dtype=dtype, **options)
    for layer in layers:
        layer.beta.data.fill_(beta)
    return layers


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "name", ["random", "duplicates", "self_loops", "isolated", "super_row", "power_law", "sorted"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_options_and_graphs(name, requires_grad, add_self_loops, index_dtype, dtype):
    edge_index = edges(name)
    n = int(edge_index.max()) + 3
    theirs, ours = agnn_pair(requires_grad=requires_grad, add_self_loops=add_self_loops, dtype=dtype)
    x = features(n, 9, dtype=dtype)
    compare(theirs, ours, x, edge_index, our_args=(x, edge_index.to(index_dtype)))


@pytest.mark.parametrize("beta", [0.0, -2.0])
def test_beta(beta):
    compare(*agnn_pair(beta), features(N, 9), edges())


def test_a_row_of_zeros():
    x = features(N, 9)
    x[3] = 0
    theirs, ours = agnn_pair()
    with torch.no_grad():
        torch.testing.assert_close(ours(x, edges()), theirs(x, edges()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("add_self_loops", [True, False])
def test_sparse_adjacency_and_edge_index_class(add_self_loops):
    edge_index = torch.unique(edges(), dim=1).contiguous()
    theirs, ours = agnn_pair(add_self_loops=add_self_loops)
    forms = sparse_forms(edge_index, N, N)
    forms["EdgeIndex"] = torch_geometric.EdgeIndex(edge_index, sparse_size=(N, N), sort_order="row")
    for form in forms.values():
        compare(theirs, ours, features(N, 9), form)


@pytest.mark.parametrize("num_nodes", [0, 4])
@pytest.mark.parametrize("add_self_loops", [True, False])
def test_no_edges(num_nodes, add_self_loops):
    theirs, ours = agnn_pair(add_self_loops=add_self_loops)
    compare(theirs, ours, features(num_nodes, 9), torch.zeros(2, 0, dtype=torch.long))


def test_errors():
    with pytest.raises(ValueError, match=r"x: expected shape \[N, F\], got \[2, 50, 9\]"):
        AGNNConv()(torch.randn(2, N, 9), edges())
    with pytest.raises(TypeError, match=r"x: expected a tensor \[N, F\], got tuple"):
        AGNNConv()((torch.randn(N, 9), torch.randn(N, 9)), edges())


@pytest.mark.parametrize("requires_grad", [True, False])
def test_state(requires_grad):
    theirs, ours = PyGConv(requires_grad), AGNNConv(requires_grad)
    assert repr(ours) == repr(theirs) and isinstance(ours, PyGConv)
    assert theirs.__dict__.keys() == ours.__dict__.keys()
    assert theirs.state_dict() == ours.state_dict()
    assert isinstance(ours.beta, torch.nn.Parameter) == requires_grad


def test_assigning_the_class_pickle_and_deepcopy():
    theirs, _ = agnn_pair()
    layer, x = copy.deepcopy(theirs), features(N, 9)
    layer.__class__ = AGNNConv
    compare(theirs, layer, x, edges())
    expected = layer(x, edges())
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(other) is AGNNConv and torch.equal(other(x, edges()), expected)
    layer.__class__ = PyGConv
    assert torch.equal(layer(x, edges()), theirs(x, edges()))


@pytest.mark.parametrize("dtype", ["autocast", torch.float16, torch.bfloat16], ids=str)
def test_low_precision(dtype):
    options = {"autocast": True} if dtype == "autocast" else {"dtype": dtype}
    compare_low_precision(*agnn_pair(dtype=torch.float32), torch.randn(N, 9), edges(), **options)


def test_low_precision_features_under_autocast():
    """A layer before this one gives bfloat16 under autocast; beta stays float32, and so is the result."""
    args = torch.randn(N, 9).bfloat16(), edges()
    compare_low_precision(*agnn_pair(dtype=torch.float32), *args, autocast=True)
