"""pyg.GATConv beside torch_geometric's with the same parameters: outputs, attention, all gradients."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from pyg_compare import (
    assert_same_dropout_distribution,
    compare,
    compare_low_precision,
    edges,
    inject_dropout,
    pair,
    run,
    sparse_forms,
    torch_geometric,
)
from torch.nn.utils import parametrizations

from dfgnn.nn.pyg import GATConv

PyGConv = torch_geometric.nn.GATConv
N = 50  # nodes of the graph "random"

OPTIONS = [
    dict(zip(("concat", "residual", "bias", "add_self_loops", "edge_dim"), values))
    for values in itertools.product((True, False), (False, True), (True, False), (True, False), (None, 4))
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_constructor_options(options):
    turn = random.Random(OPTIONS.index(options))
    heads, slope, in_channels = turn.choice([1, 2, 3]), turn.choice([0.2, 0.05]), turn.choice([6, 40])
    dtype = (torch.float32, torch.float64)[sum(map(bool, options.values())) % 2]
    theirs, ours = pair(PyGConv, GATConv, in_channels, 5, heads, negative_slope=slope, dtype=dtype, **options)
    x, edge_index = torch.randn(N, in_channels, dtype=dtype), edges()
    edge_attr = torch.randn(edge_index.shape[1], 4, dtype=dtype)  # ignored without edge_dim
    compare(theirs, ours, x, edge_index, edge_attr, return_attention_weights=True)
    compare(theirs, ours, x, edge_index)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "name", ["duplicates", "self_loops", "isolated", "super_row", "mixed_degrees", "power_law", "sorted"]
)
@pytest.mark.parametrize("add_self_loops", [True, False])
def test_graphs(name, index_dtype, add_self_loops):
    edge_index = edges(name)
    n = int(edge_index.max()) + 3
    dtype = torch.float32 if index_dtype == torch.int32 else torch.float64
    theirs, ours = pair(PyGConv, GATConv, 9, 5, 2, residual=True, add_self_loops=add_self_loops, dtype=dtype)
    x = torch.randn(n, 9, dtype=dtype)
    compare(theirs, ours, x, edge_index, our_args=(x, edge_index.to(index_dtype)))


@pytest.mark.parametrize(
    "fill_value",
    ["mean", "add", "min", "max", "mul", 0.5, 2, None, torch.tensor(0.3), torch.tensor([0.5, -1.0, 2.0])],
    ids=str,
)
@pytest.mark.parametrize("name", ["duplicates", "isolated"])
def test_fill_value(fill_value, name):
    edge_index = edges(name)
    n = int(edge_index.max()) + 2
    if not isinstance(fill_value, torch.Tensor) or fill_value.dim() == 1:
        edge_attr = torch.randn(edge_index.shape[1], 3, dtype=torch.float64)
        theirs, ours = pair(PyGConv, GATConv, 7, 5, 2, edge_dim=3, fill_value=fill_value)
        compare(theirs, ours, torch.randn(n, 7, dtype=torch.float64), edge_index, edge_attr)
    if not isinstance(fill_value, torch.Tensor) or fill_value.dim() == 0:
        edge_attr = torch.randn(edge_index.shape[1], dtype=torch.float64)
        theirs, ours = pair(PyGConv, GATConv, 7, 5, 2, edge_dim=1, fill_value=fill_value)
        compare(theirs, ours, torch.randn(n, 7, dtype=torch.float64), edge_index, edge_attr)


# Inputs


@pytest.mark.parametrize("in_channels", [(9, 6), (40, 40), 9], ids=str)
@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("name", ["fewer_sources", "fewer_destinations"])
def test_bipartite(in_channels, add_self_loops, name):
    edge_index, (num_src, num_dst) = edges(name), (30, 80) if name == "fewer_sources" else (80, 30)
    src_size, dst_size = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
    x_src = torch.randn(num_src, src_size, dtype=torch.float64)
    x_dst = torch.randn(num_dst, dst_size, dtype=torch.float64)
    edge_attr = torch.randn(edge_index.shape[1], 3, dtype=torch.float64)
    theirs, ours = pair(
        PyGConv, GATConv, in_channels, 5, 2, residual=True, edge_dim=3, fill_value=0.7,
        add_self_loops=add_self_loops,
    )  # fmt: skip
    compare(theirs, ours, (x_src, x_dst), edge_index, edge_attr, return_attention_weights=True)
    compare(theirs, ours, (x_src, x_dst), edge_index, size=(num_src, num_dst))
    compare(theirs, ours, (x_src, None), edge_index, size=(num_src, num_dst), return_attention_weights=True)


@pytest.mark.parametrize("residual", [False, True])
def test_sources_alone(residual):
    theirs, ours = pair(PyGConv, GATConv, 9, 5, 2, residual=residual)
    x = torch.randn(N, 9, dtype=torch.float64)
    compare(theirs, ours, (x, None), edges())
    compare(theirs, ours, (x, x), edges(), return_attention_weights=True)


def test_one_tensor_for_two_projections():
    theirs, ours = pair(PyGConv, GATConv, (9, 9), 5, 2, residual=True)
    compare(theirs, ours, torch.randn(N, 9, dtype=torch.float64), edges())


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_loops_of_more_destinations_than_sources(reduction):
    """torch_geometric reduces over destinations that are sources, too, and cannot where there are others."""
    edge_index = torch.tensor([[0, 1, 2, 0], [1, 2, 4, 3]])
    attr = torch.randn(4, 3, dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    theirs, ours = pair(PyGConv, GATConv, (6, 6), 5, 2, edge_dim=3, fill_value=reduction)
    without = copy.copy(theirs)
    without.add_self_loops = False
    reduce = torch_geometric.utils.scatter(attr, edge_index[1], 0, 5, reduction)[:3]
    kept = edge_index[0] != edge_index[1]
    loops = torch.arange(3).repeat(2, 1)
    expected = without(x, torch.cat([edge_index[:, kept], loops], 1), torch.cat([attr[kept], reduce]))
    torch.testing.assert_close(ours(x, edge_index, attr), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_sparse_adjacency(layout, add_self_loops, edge_dim):
    edge_index = torch.unique(edges(), dim=1)
    values = None if edge_dim is None else torch.randn(edge_index.shape[1], edge_dim, dtype=torch.float64)
    theirs, ours = pair(PyGConv, GATConv, 9, 5, 2, edge_dim=edge_dim, add_self_loops=add_self_loops)
    adjacency = sparse_forms(edge_index, N, N, values)[layout]
    x = torch.randn(N, 9, dtype=torch.float64)
    compare(theirs, ours, x, adjacency)
    if edge_dim is None:  # torch_geometric fails to put attention into a matrix of several values
        compare(theirs, ours, x, adjacency, return_attention_weights=True)
    elif add_self_loops:
        _, (matrix, alpha) = ours(x, adjacency, return_attention_weights=True)
        assert matrix.shape == (N, N, 2) and torch.equal(matrix.values(), alpha)


def test_sparse_bipartite():
    edge_index = torch.unique(edges("fewer_destinations"), dim=1)
    theirs, ours = pair(PyGConv, GATConv, (9, 6), 5, 2)
    x = torch.randn(80, 9, dtype=torch.float64), torch.randn(30, 6, dtype=torch.float64)
    for adjacency in sparse_forms(edge_index, 80, 30).values():
        compare(theirs, ours, x, adjacency, return_attention_weights=True)
        compare(theirs, ours, (x[0], None), adjacency, return_attention_weights=True)


@pytest.mark.parametrize("sort_order", [None, "row", "col"])
@pytest.mark.parametrize("add_self_loops", [True, False])
def test_edge_index_class(sort_order, add_self_loops):
    edge_index = torch_geometric.EdgeIndex(edges(), sparse_size=(N, N))
    if sort_order is not None:
        edge_index = edge_index.sort_by(sort_order).values
    theirs, ours = pair(PyGConv, GATConv, 9, 5, 2, add_self_loops=add_self_loops, edge_dim=3)
    x, attr = torch.randn(N, 9, dtype=torch.float64), torch.randn(400, 3, dtype=torch.float64)
    compare(theirs, ours, x, edge_index, attr, return_attention_weights=True)
    _, (returned, _) = ours(x, edge_index, attr, return_attention_weights=True)
    assert isinstance(returned, torch_geometric.EdgeIndex)


def test_attention_is_returned_for_truth():
    _, ours = pair(PyGConv, GATConv, 9, 5, 2)
    x = torch.randn(N, 9, dtype=torch.float64)
    assert isinstance(ours(x, edges(), return_attention_weights=False), torch.Tensor)
    _, (edge_index, alpha) = ours(x, edges(), return_attention_weights=1)
    assert torch.equal(edge_index[:, -N:], torch.arange(N).repeat(2, 1)) and alpha.shape == (
        edge_index.shape[1],
        2,
    )


@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("num_nodes", [0, 4])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_no_edges(add_self_loops, num_nodes, edge_dim):
    theirs, ours = pair(
        PyGConv, GATConv, 9, 5, 2, residual=True, add_self_loops=add_self_loops, edge_dim=edge_dim
    )
    x, edge_index = torch.randn(num_nodes, 9, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.long)
    edge_attr = torch.zeros(0, 3, dtype=torch.float64)
    compare(theirs, ours, x, edge_index, edge_attr, return_attention_weights=True)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda x, e, a: (x[:, None], e, a), ValueError, r"x: expected shape \[N, F\]"),
        (lambda x, e, a: (None, e, a), TypeError, "x: expected a tensor"),
        (lambda x, e, a: (x, e[:1], a), ValueError, r"edge_index: expected shape \[2, \*\]"),
        (lambda x, e, a: (x, e.double(), a), TypeError, "edge_index: expected dtype"),
        (lambda x, e, a: (x, e.tolist(), a), TypeError, "edge_index: expected a .* got list"),
        (lambda x, e, a: (x[:10], e, a), ValueError, r"edge_index\[0\]: expected values in"),
        (lambda x, e, a: (x, e - 1, a), ValueError, "got -1"),
        (lambda x, e, a: (x, e, a[1:]), ValueError, "edge_attr: expected shape"),
        (lambda x, e, a: (x, e, a[:, :, None]), ValueError, "edge_attr: expected shape"),
        (lambda x, e, a: (x, e, 3.0), TypeError, "edge_attr: expected a tensor, got float"),
        (lambda x, e, a: (x, e, a, (N, N + 1)), ValueError, "x: expected 51 destination rows"),
        (lambda x, e, a: ((x, x[:9]), e, a, (N, N)), ValueError, "x: expected 50 destination rows"),
    ],
)
def test_errors(change, error, match):
    _, ours = pair(PyGConv, GATConv, 9, 5, 2, edge_dim=3)
    x, attr = torch.randn(N, 9, dtype=torch.float64), torch.randn(400, 3, dtype=torch.float64)
    with pytest.raises(error, match=match):
        ours(*change(x, edges(), attr))


# State


@pytest.mark.parametrize("in_channels", [9, (9, 6)], ids=str)
def test_state_and_initialisation(in_channels):
    layers = []
    for cls in (PyGConv, GATConv):
        torch.manual_seed(5)
        layers.append(cls(in_channels, 5, 2, edge_dim=3, residual=True))
    theirs, ours = layers
    assert repr(ours) == repr(theirs) and isinstance(ours, PyGConv)
    assert theirs.__dict__.keys() == ours.__dict__.keys()
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    theirs.load_state_dict(actual)


@pytest.mark.parametrize("in_channels", [-1, (-1, -1)], ids=str)
def test_lazy(in_channels):
    layers = []
    x, attr = torch.randn(N, 9), torch.randn(400, 3)
    for cls in (PyGConv, GATConv):
        torch.manual_seed(5)
        layers.append(cls(in_channels, 5, 2, edge_dim=-1, residual=True))
        layers[-1](x, edges(), attr)
    compare(*layers, x, edges(), attr)


def test_assigning_the_class():
    """An instance of torch_geometric's becomes ours and its own again, with everything that it has."""
    theirs, _ = pair(PyGConv, GATConv, 9, 5, 2, residual=True)
    layer, x = copy.deepcopy(theirs), torch.randn(N, 9, dtype=torch.float64)
    layer.__class__ = GATConv
    compare(theirs, layer, x, edges(), return_attention_weights=True)
    other = pickle.loads(pickle.dumps(layer))
    assert type(other) is GATConv
    layer.__class__ = PyGConv
    assert torch.equal(layer(x, edges()), theirs(x, edges()))


def test_pickle_and_deepcopy():
    layer = GATConv(9, 5, 2, dropout=0.5, residual=True).eval()
    x = torch.randn(N, 9)
    expected = layer(x, edges())
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(other) is GATConv and torch.equal(other(x, edges()), expected)


# Dropout


@pytest.mark.parametrize("concat", [True, False])
def test_injected_mask(monkeypatch, concat):
    edge_index = edges()
    theirs, ours = pair(PyGConv, GATConv, 9, 5, 2, dropout=0.4, residual=True, concat=concat)
    num_edges = int((edge_index[0] != edge_index[1]).sum()) + N
    inject_dropout(monkeypatch, ours, num_edges, 2)
    compare(theirs, ours, torch.randn(N, 9, dtype=torch.float64), edge_index, return_attention_weights=True)


def test_dropout_distribution():
    theirs, ours = pair(PyGConv, GATConv, 9, 5, 2, dropout=0.4)
    x = torch.randn(6, 9, dtype=torch.float64)
    assert_same_dropout_distribution(theirs, ours, x, edges("duplicates"))
    compare(theirs.eval(), ours.eval(), x, edges("duplicates"))


def test_attention_is_returned_after_dropout():
    layer = GATConv(9, 5, 4, dropout=0.5)
    _, (_, attention) = layer(torch.randn(N, 9), edges(), return_attention_weights=True)
    assert 0.4 < (attention == 0).float().mean().item() < 0.6


# Projections


@pytest.mark.parametrize(
    "change",
    [
        lambda lin: lin.register_forward_hook(lambda module, args, out: 2 * out),
        lambda lin: lin.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        parametrizations.weight_norm,
    ],
    ids=["forward hook", "forward pre-hook", "parametrization"],
)
@pytest.mark.parametrize("name", ["lin", "lin_src", "lin_dst", "lin_edge"])
def test_changes_of_a_projection_take_effect(change, name):
    in_channels = 9 if name in ("lin", "lin_edge") else (9, 9)
    theirs, ours = pair(PyGConv, GATConv, in_channels, 5, 2, edge_dim=3)
    for layer in (theirs, ours):
        change(getattr(layer, name))
    x, attr = torch.randn(N, 9, dtype=torch.float64), torch.randn(400, 3, dtype=torch.float64)
    compare(theirs, ours, x if in_channels == 9 else (x, x.flip(0)), edges(), attr)


def test_no_projection_of_destinations_where_it_is_not_needed():
    layer = GATConv((9, 6), 5, 2)
    assert run(layer, (torch.randn(30, 9), torch.randn(80, 6)), edges("fewer_sources"))[
        "grad lin_dst.weight"
    ].any()
    with Linears() as seen:
        layer((torch.randn(30, 9), torch.randn(80, 6)), edges("fewer_sources"))
    assert (80, 10) not in seen.shapes and (30, 10) in seen.shapes


class Linears(torch.overrides.TorchFunctionMode):
    """The shapes of what linear returns."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear:
            self.shapes.append(tuple(out.shape))
        return out


# Precision


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("dtype", ["autocast", torch.float16, torch.bfloat16], ids=str)
def test_low_precision(concat, edge_dim, dtype):
    theirs, ours = pair(
        PyGConv, GATConv, 9, 8, 2, concat=concat, residual=True, edge_dim=edge_dim, dtype=torch.float32
    )
    options = {"autocast": True} if dtype == "autocast" else {"dtype": dtype}
    args = torch.randn(N, 9), edges(), torch.randn(400, 3)
    compare_low_precision(theirs, ours, *args, return_attention_weights=True, **options)
