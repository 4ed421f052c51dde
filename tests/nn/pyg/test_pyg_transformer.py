"""pyg.TransformerConv beside torch_geometric's with the same parameters: outputs, attention, gradients."""

import copy
import itertools
import pickle

import pytest
import torch
from pyg_compare import (
    assert_same_dropout_distribution,
    compare,
    compare_low_precision,
    edges,
    inject_dropout,
    pair,
    sparse_forms,
    torch_geometric,
)

from dfgnn.nn.pyg import TransformerConv

PyGConv = torch_geometric.nn.TransformerConv
N = 50  # nodes of the graph "random"

OPTIONS = [
    dict(zip(("concat", "beta", "bias", "root_weight", "edge_dim"), values))
    for values in itertools.product(*[(True, False)] * 4, (None, 4))
]


def features(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_constructor_options(options, dtype):
    turn = OPTIONS.index(options)
    theirs, ours = pair(PyGConv, TransformerConv, 6, 5, (1, 3, 2)[turn % 3], dtype=dtype, **options)
    edge_attr = None if options["edge_dim"] is None else features(400, 4, dtype=dtype)
    x = features(N, 6, dtype=dtype)
    compare(theirs, ours, x, edges(), edge_attr, return_attention_weights=turn % 2 == 0)
    assert ours._alpha is None


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["duplicates", "self_loops", "isolated", "super_row", "power_law", "sorted"])
def test_graphs(name, index_dtype):
    edge_index = edges(name)
    n = int(edge_index.max()) + 3
    dtype = torch.float32 if index_dtype == torch.int32 else torch.float64
    theirs, ours = pair(PyGConv, TransformerConv, 9, 5, 2, dtype=dtype)
    x = features(n, 9, dtype=dtype)
    compare(theirs, ours, x, edge_index, our_args=(x, edge_index.to(index_dtype)))


@pytest.mark.parametrize("in_channels", [(9, 6), 9], ids=str)
@pytest.mark.parametrize("name", ["fewer_sources", "fewer_destinations"])
def test_bipartite(in_channels, name):
    num_src, num_dst = (30, 80) if name == "fewer_sources" else (80, 30)
    x = features(num_src, 9), features(num_dst, 9 if in_channels == 9 else 6)
    theirs, ours = pair(PyGConv, TransformerConv, in_channels, 5, 2, edge_dim=3, beta=True)
    compare(theirs, ours, x, edges(name), features(400, 3), return_attention_weights=False)


@pytest.mark.parametrize("shape", [(400, 2, 5), (400, 1, 5), (400, 2, 1), (2, 5), (5,)], ids=str)
def test_edge_attributes_without_a_projection(shape):
    """In a layer without edge_dim they are added to the values, as they are."""
    theirs, ours = pair(PyGConv, TransformerConv, 9, 5, 2)
    compare(theirs, ours, features(N, 9), edges(), features(*shape), return_attention_weights=True)


def test_one_attribute_for_each_edge():
    theirs, ours = pair(PyGConv, TransformerConv, 7, 5, 2, edge_dim=1)
    x, attr = features(N, 7), features(400, 1)
    compare(theirs, ours, x, edges(), attr)
    torch.testing.assert_close(ours(x, edges(), attr[:, 0]), theirs(x, edges(), attr))


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_sparse_adjacency(layout, edge_dim):
    edge_index = torch.unique(edges("fewer_sources"), dim=1)
    values = None if edge_dim is None else features(edge_index.shape[1], edge_dim)
    theirs, ours = pair(PyGConv, TransformerConv, (9, 6), 5, 2, edge_dim=edge_dim)
    adjacency = sparse_forms(edge_index, 30, 80, values)[layout]
    compare(theirs, ours, (features(30, 9), features(80, 6)), adjacency, return_attention_weights=True)


def test_edge_index_class():
    edge_index = torch_geometric.EdgeIndex(edges(), sparse_size=(N, N)).sort_by("row").values
    theirs, ours = pair(PyGConv, TransformerConv, 9, 5, 2)
    compare(theirs, ours, features(N, 9), edge_index, return_attention_weights=True)


@pytest.mark.parametrize("num_nodes", [0, 4])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_no_edges(num_nodes, edge_dim):
    theirs, ours = pair(PyGConv, TransformerConv, 9, 5, 2, edge_dim=edge_dim)
    attr = None if edge_dim is None else features(0, 3)
    edge_index = torch.zeros(2, 0, dtype=torch.long)
    compare(theirs, ours, features(num_nodes, 9), edge_index, attr, return_attention_weights=True)


def test_errors():
    layer, x = TransformerConv(9, 5, 2).double(), features(N, 9)
    with pytest.raises(ValueError, match=r"got None for x\[1\]"):
        layer((x, None), edges())
    with pytest.raises(ValueError, match=r"edge_attr: .* broadcasts to \[400, 2, 5\], got \[400, 3\]"):
        layer(x, edges(), features(400, 3))
    with pytest.raises(ValueError, match=r"edge_attr: expected \[E, 3\] in a layer with edge_dim, got None"):
        TransformerConv(9, 5, 2, edge_dim=3).double()(x, edges())
    with pytest.raises(ValueError, match="edge_attr: expected shape"):
        TransformerConv(9, 5, 2, edge_dim=3).double()(x, edges(), features(399, 3))


# State


@pytest.mark.parametrize("in_channels", [9, (9, 6), -1], ids=str)
def test_state_and_initialisation(in_channels):
    layers = []
    x = (torch.randn(N, 9), torch.randn(N, 6)) if isinstance(in_channels, tuple) else torch.randn(N, 9)
    attr = torch.randn(400, 3)
    for cls in (PyGConv, TransformerConv):
        torch.manual_seed(5)
        layers.append(cls(in_channels, 5, 2, edge_dim=3 if in_channels != -1 else -1, beta=True))
        layers[-1](x, edges(), attr)
    theirs, ours = layers
    assert repr(ours) == repr(theirs) and isinstance(ours, PyGConv)
    assert theirs.__dict__.keys() == ours.__dict__.keys()
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_assigning_the_class_pickle_and_deepcopy():
    theirs, _ = pair(PyGConv, TransformerConv, 9, 5, 2, beta=True)
    layer, x = copy.deepcopy(theirs), features(N, 9)
    layer.__class__ = TransformerConv
    compare(theirs, layer, x, edges(), return_attention_weights=True)
    expected = layer(x, edges())
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(other) is TransformerConv and torch.equal(other(x, edges()), expected)
    layer.__class__ = PyGConv
    assert torch.equal(layer(x, edges()), theirs(x, edges()))


# Dropout and precision


@pytest.mark.parametrize("edge_attr", [None, "projected", "raw"])
def test_injected_mask(monkeypatch, edge_attr):
    """The attention that is returned is that before dropout, with its gradient."""
    theirs, ours = pair(
        PyGConv, TransformerConv, 9, 5, 2, dropout=0.4, edge_dim=3 if edge_attr == "projected" else None
    )
    inject_dropout(monkeypatch, ours, 400, 2)
    # Only the first call drops; a second one is for the attention.
    attr = {None: None, "projected": features(400, 3), "raw": features(400, 2, 5)}[edge_attr]
    compare(theirs, ours, features(N, 9), edges(), attr, return_attention_weights=True)
    compare(theirs, ours, features(N, 9), edges(), attr)


def test_dropout_distribution():
    theirs, ours = pair(PyGConv, TransformerConv, 9, 5, 2, dropout=0.4)
    assert_same_dropout_distribution(theirs, ours, features(6, 9), edges("duplicates"))
    compare(theirs.eval(), ours.eval(), features(6, 9), edges("duplicates"), return_attention_weights=True)


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("dtype", ["autocast", torch.float16, torch.bfloat16], ids=str)
def test_low_precision(concat, edge_dim, dtype):
    theirs, ours = pair(
        PyGConv, TransformerConv, 9, 8, 2, concat=concat, beta=concat, edge_dim=edge_dim, dtype=torch.float32
    )
    options = {"autocast": True} if dtype == "autocast" else {"dtype": dtype}
    args = torch.randn(N, 9), edges(), None if edge_dim is None else torch.randn(400, 3)
    compare_low_precision(theirs, ours, *args, return_attention_weights=True, **options)
