"""pyg.RGATConv beside torch_geometric's with the same parameters: outputs, attention, all gradients."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from pyg_compare import (
    assert_same,
    assert_same_dropout_distribution,
    compare,
    compare_low_precision,
    edges,
    inject_dropout,
    run,
    sparse_forms,
    torch_geometric,
)
from pyg_compare import pair as plain_pair
from torch.nn.utils import parametrizations

from dfgnn import reference
from dfgnn.nn import _fallback
from dfgnn.nn.pyg import FallbackWarning, RGATConv
from dfgnn.nn.pyg._relations import relations_of

PyGConv = torch_geometric.nn.RGATConv
N, R = 50, 6  # nodes of the graph "random", relations
MODES = {"additive": "additive-self-attention", "multiplicative": "multiplicative-self-attention"}
MECHANISMS = {"within": "within-relation", "across": "across-relation"}
KINDS = [
    {"attention_mode": mode, "attention_mechanism": mechanism}
    for mode, mechanism in itertools.product(MODES.values(), MECHANISMS.values())
]
KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))


def pair(*args, **kwargs):
    """torch_geometric leaves the parameter l2 uninitialised."""
    theirs, ours = plain_pair(PyGConv, RGATConv, *args, **kwargs)
    torch.nn.init.normal_(theirs.l2)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def types(num_edges, dtype=torch.int64):
    """Of relations 0, 1, 3 and 4; few edges are of the last."""
    generator = torch.Generator().manual_seed(0)
    edge_type = torch.tensor([0, 1, 1, 3])[torch.randint(4, (num_edges,), generator=generator)]
    edge_type[:3] = 4
    return edge_type.to(dtype)


OPTIONS = [
    kind | {"mod": mod, "edge_dim": edge_dim} | decomposition
    for kind, mod, edge_dim, decomposition in itertools.product(
        KINDS,
        (None, "additive", "scaled", "f-additive", "f-scaled"),
        (None, 4),
        ({}, {"num_bases": 3}, {"num_blocks": 2}),
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_constructor_options(options):
    turn = OPTIONS.index(options)
    dtype = (torch.float32, torch.float64)[turn % 2]
    options = options | {
        "concat": turn // 2 % 2 == 0,
        "heads": (1, 3, 2)[turn // 4 % 3],
        "dim": 1 if options["attention_mode"] == MODES["additive"] else (1, 3)[turn // 3 % 2],
        "bias": turn % 5 != 0,
        "negative_slope": (0.2, 0.05)[turn // 7 % 2],
    }
    theirs, ours = pair(8, 4, R, dtype=dtype, **options)
    x, edge_index = torch.randn(N, 8, dtype=dtype), edges()
    edge_attr = None if options["edge_dim"] is None else torch.randn(400, 4, dtype=dtype)
    compare(theirs, ours, x, edge_index, types(400), edge_attr, return_attention_weights=turn % 3 == 0)
    if turn % 4 == 0:
        compare(theirs, ours, x, edge_index, types(400), None)


NAMES = "duplicates", "self_loops", "isolated", "mixed_degrees", "power_law", "sorted"


@KIND
@pytest.mark.parametrize("name", NAMES)
def test_graphs(kind, name):
    index_dtype = (torch.int32, torch.int64)[(KINDS.index(kind) + NAMES.index(name)) % 2]
    edge_index = edges(name)
    n, num_edges = int(edge_index.max()) + 3, edge_index.shape[1]
    dtype = torch.float32 if index_dtype == torch.int32 else torch.float64
    theirs, ours = pair(6, 5, R, heads=2, dtype=dtype, **kind)
    x = torch.randn(n, 6, dtype=dtype)
    compare(
        theirs, ours, x, edge_index, types(num_edges), return_attention_weights=True,
        our_args=(x, edge_index, types(num_edges, index_dtype)),
    )  # fmt: skip
    compare(
        theirs,
        ours,
        x,
        edge_index,
        types(num_edges),
        our_args=(x, edge_index.to(index_dtype), types(num_edges)),
    )


# Inputs


@KIND
@pytest.mark.parametrize("name", ["fewer_sources", "fewer_destinations"])
def test_bipartite(kind, name):
    edge_index, (num_src, num_dst) = edges(name), (30, 80) if name == "fewer_sources" else (80, 30)
    theirs, ours = pair(6, 5, R, heads=2, mod="scaled", **kind)
    x = torch.randn(num_src, 6, dtype=torch.float64), torch.randn(num_dst, 6, dtype=torch.float64)
    compare(theirs, ours, x, edge_index, types(400), size=(num_src, num_dst), return_attention_weights=True)
    compare(theirs, ours, x, edge_index, types(400))


@KIND
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_adjacency(kind, layout):
    edge_index = torch.unique(edges(), dim=1)
    num_edges = edge_index.shape[1]
    x = torch.randn(N, 6, dtype=torch.float64)
    theirs, ours = pair(6, 5, R, heads=2, **kind)
    adjacency = sparse_forms(edge_index, N, N, types(num_edges))[layout]
    for asked in (None, True):
        compare(theirs, ours, x, adjacency, types(num_edges).flip(0), return_attention_weights=asked)
        # torch_geometric documents that types may be the values, and fails where they are
        compare(
            theirs, ours, x, adjacency, adjacency.values(), return_attention_weights=asked,
            our_args=(x, adjacency),
        )  # fmt: skip
    theirs, ours = pair(6, 5, R, heads=2, edge_dim=3, **kind)
    adjacency = sparse_forms(edge_index, N, N, torch.randn(num_edges, 3, dtype=torch.float64))[layout]
    compare(theirs, ours, x, adjacency, types(num_edges))


def test_values_of_a_sparse_adjacency_are_read_again():
    edge_index = torch.unique(edges(), dim=1)
    theirs, ours = pair(6, 5, R)
    x = torch.randn(N, 6, dtype=torch.float64)
    adjacency = sparse_forms(edge_index, N, N, types(edge_index.shape[1]))["coo"]
    before = ours(x, adjacency)
    adjacency.values().fill_(2)
    compare(theirs, ours, x, adjacency, adjacency.values(), our_args=(x, adjacency))
    assert not torch.allclose(ours(x, adjacency), before)


@pytest.mark.parametrize("sort_order", [None, "row", "col"])
def test_edge_index_class(sort_order):
    edge_index = torch_geometric.EdgeIndex(edges(), sparse_size=(N, N))
    if sort_order is not None:
        edge_index = edge_index.sort_by(sort_order).values
    theirs, ours = pair(6, 5, R, heads=2)
    x = torch.randn(N, 6, dtype=torch.float64)
    compare(theirs, ours, x, edge_index, types(400), return_attention_weights=True)


@KIND
def test_forms_of_edge_attr(kind):
    x = torch.randn(N, 6, dtype=torch.float64)
    theirs, ours = pair(6, 5, R, heads=2, edge_dim=1, **kind)
    compare(theirs, ours, x, edges(), types(400), torch.randn(400, dtype=torch.float64))
    compare(theirs, ours, x, edges(), types(400), torch.randn(1, 1, dtype=torch.float64))


@KIND
@pytest.mark.parametrize(
    "options", [{}, {"mod": "additive", "num_bases": 2}, {"mod": "scaled", "num_blocks": 2}], ids=str
)
def test_no_edges(kind, options):
    theirs, ours = pair(6, 4, R, heads=2, edge_dim=3, **kind, **options)
    edge_index, edge_type = torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    edge_attr = torch.zeros(0, 3, dtype=torch.float64)
    for num_nodes in (0, 4):
        x = torch.randn(num_nodes, 6, dtype=torch.float64)
        compare(theirs, ours, x, edge_index, edge_type, edge_attr, return_attention_weights=True)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda x, e, t, a: (x[:, None], e, t, a), ValueError, r"x: expected shape \[N, F\]"),
        (lambda x, e, t, a: ((x, None), e, t, a), ValueError, "x: expected features of the destinations"),
        (lambda x, e, t, a: (x, e[:1], t, a), ValueError, r"edge_index: expected shape \[2, \*\]"),
        (lambda x, e, t, a: (x, e.double(), t, a), TypeError, "edge_index: expected dtype"),
        (lambda x, e, t, a: (x, e.tolist(), t, a), TypeError, "edge_index: expected a .* got list"),
        (lambda x, e, t, a: (x[:10], e, t, a), ValueError, r"edge_index\[0\]: expected values in"),
        (lambda x, e, t, a: (x, e, None, a), ValueError, "edge_type: expected a tensor"),
        (lambda x, e, t, a: (x, e, t.tolist(), a), TypeError, "edge_type: expected a torch.Tensor, got list"),
        (lambda x, e, t, a: (x, e, t.double(), a), TypeError, "edge_type: expected dtype"),
        (lambda x, e, t, a: (x, e, t[1:], a), ValueError, r"edge_type: expected shape \[400\], got \[399\]"),
        (lambda x, e, t, a: (x, e, t[:, None], a), ValueError, "edge_type: expected shape"),
        (lambda x, e, t, a: (x, e, t + 2, a), ValueError, r"edge_type: expected values in .*=6\), got 6"),
        (lambda x, e, t, a: (x, e, t - 1, a), ValueError, "got -1"),
        (lambda x, e, t, a: (x, e, t, a[1:]), ValueError, r"edge_attr: expected shape \[400, 3\], got \[399"),
        (lambda x, e, t, a: (x, e, t, a[:, 1:]), ValueError, "edge_attr: expected shape"),
        (lambda x, e, t, a: (x, e, t, a[:, 0]), ValueError, "edge_attr: expected shape"),
        (lambda x, e, t, a: (x, e, t, 3.0), TypeError, "edge_attr: expected a tensor, got float"),
        (lambda x, e, t, a: (x, e, t, a, (N, N + 1)), ValueError, "x: expected 51 destination rows"),
    ],
)
def test_errors(change, error, match):
    x, attr = torch.randn(N, 6), torch.randn(400, 3)
    with pytest.raises(error, match=match):
        RGATConv(6, 5, R, edge_dim=3)(*change(x, edges(), types(400), attr))
    with pytest.raises(ValueError, match="edge_attr: expected None"):
        RGATConv(6, 5, R)(x, edges(), types(400), attr)


# Rows and caches


@KIND
def test_features_are_made_per_pair(kind):
    """The engine gets a row for each (source, relation) pair, once, however many edges come from it."""
    ours = RGATConv(6, 5, R, heads=2, **kind)
    edge_index, edge_type, seen = edges("super_source"), types(9000), []

    def attention(graph, feat, *args, **kwargs):
        seen.append((graph.num_src, graph.num_dst, feat.shape))
        return reference.gat_attention(graph, feat, *args, **kwargs)

    ours.attention = attention
    ours(torch.randn(300, 6), edge_index, edge_type)
    num_dst = 300 if kind["attention_mechanism"] == MECHANISMS["across"] else 300 * 3 + 3
    pairs = torch.stack([edge_index[1], edge_type]).unique(dim=1).shape[1]
    assert seen == [(4, 300 if num_dst == 300 else pairs, (4, 2, 5))]


@KIND
def test_no_tensor_of_edges_and_features(kind):
    layer = RGATConv(16, 32, R, heads=8, **kind)
    x, edge_index, edge_type = torch.randn(300, 16, requires_grad=True), edges("super_row"), types(9000)
    with torch.profiler.profile(profile_memory=True) as profile:
        layer(x, edge_index, edge_type).sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 9000 * 8 * 32 * 4 / 2


def test_relations_are_kept_with_their_tensors():
    edge_index, edge_type = edges(), types(400)

    def relations(**options):
        options = {"within": False, "per_edge": True} | options
        return relations_of(edge_index, edge_type, N, N, R, **options)

    first = relations()
    assert relations() is first and relations(within=True) is not first
    edge_type[0] = 5
    second = relations()
    assert second is not first and second.src.sizes[5] == 1
    watched = weakref.ref(second.graph)
    del first, second
    assert watched() is not None
    edge_type = edge_type.clone()
    gc.collect()
    assert watched() is None


# State


@KIND
@pytest.mark.parametrize("decomposition", [{}, {"num_bases": 2}, {"num_blocks": 2}], ids=str)
def test_state_and_initialisation(kind, decomposition):
    layers = []
    for cls in (PyGConv, RGATConv):
        torch.manual_seed(5)
        layers.append(cls(6, 4, R, heads=2, edge_dim=3, **kind, **decomposition))
    theirs, ours = layers
    assert repr(ours) == repr(theirs) and isinstance(ours, PyGConv)
    assert theirs.__dict__.keys() == ours.__dict__.keys()
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == actual.keys()
    # torch_geometric leaves l2 as it finds it.
    assert all(torch.equal(expected[name], actual[name]) for name in expected if name != "l2")
    theirs.load_state_dict(actual)


@KIND
def test_assigning_the_class(kind):
    theirs, _ = pair(6, 5, R, heads=2, **kind)
    layer, x = copy.deepcopy(theirs), torch.randn(N, 6, dtype=torch.float64)
    layer.__class__ = RGATConv
    compare(theirs, layer, x, edges(), types(400), return_attention_weights=True)
    assert layer._alpha is None and type(pickle.loads(pickle.dumps(layer))) is RGATConv
    layer.__class__ = PyGConv
    assert torch.equal(layer(x, edges(), types(400)), theirs(x, edges(), types(400)))


def test_pickle_and_deepcopy():
    layer = RGATConv(6, 5, R, dropout=0.5, edge_dim=3).eval()
    x, attr = torch.randn(N, 6), torch.randn(400, 3)
    expected = layer(x, edges(), types(400), attr)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(other) is RGATConv and torch.equal(other(x, edges(), types(400), attr), expected)


def test_fallback(monkeypatch):
    monkeypatch.setattr(_fallback, "_warned", set())
    theirs, ours = pair(6, 5, R, aggr="mean")
    x = torch.randn(N, 6, dtype=torch.float64)
    with pytest.warns(FallbackWarning, match="RGATConv .* aggr='mean'"):
        found = run(ours, x, edges(), types(400), return_attention_weights=True)
    assert_same(found, run(theirs, x, edges(), types(400), return_attention_weights=True), 0)


# Dropout


@KIND
@pytest.mark.parametrize("concat", [True, False])
def test_injected_mask(monkeypatch, kind, concat):
    """The returned attention is that before dropout."""
    dim = 1 if kind["attention_mode"] == MODES["additive"] else 2
    theirs, ours = pair(6, 5, R, heads=2, dim=dim, dropout=0.4, concat=concat, edge_dim=3, **kind)
    inject_dropout(monkeypatch, ours, 400, 2 * dim)
    x, attr = torch.randn(N, 6, dtype=torch.float64), torch.randn(400, 3, dtype=torch.float64)
    compare(theirs, ours, x, edges(), types(400), attr)
    compare(theirs, ours, x, edges(), types(400), attr, return_attention_weights=True)
    compare(theirs.eval(), ours.eval(), x, edges(), types(400), attr, return_attention_weights=True)


def test_no_dropout_with_a_mod():
    """An attribute that was set later, for the constructor refuses both."""
    theirs, ours = pair(6, 5, R, mod="f-scaled")
    theirs.dropout = ours.dropout = 0.5
    compare(theirs, ours, torch.randn(N, 6, dtype=torch.float64), edges(), types(400))


def test_dropout_distribution():
    theirs, ours = pair(6, 5, R, heads=2, dropout=0.4, attention_mechanism="within-relation")
    x = torch.randn(6, 6, dtype=torch.float64)
    edge_type = types(135)

    def typed(layer):
        return lambda x, edge_index: layer(x, edge_index, edge_type.repeat(edge_index.shape[1] // 135))

    assert_same_dropout_distribution(typed(theirs), typed(ours), x, edges("duplicates"))
    compare(theirs.eval(), ours.eval(), x, edges("duplicates"), edge_type)


# Edge projection and precision


@pytest.mark.parametrize(
    "change",
    [
        lambda lin: lin.register_forward_hook(lambda module, args, out: 2 * out),
        lambda lin: lin.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        parametrizations.weight_norm,
    ],
    ids=["forward hook", "forward pre-hook", "parametrization"],
)
def test_changes_of_the_edge_projection_take_effect(change):
    theirs, ours = pair(6, 5, R, heads=2, edge_dim=3)
    for layer in (theirs, ours):
        change(layer.lin_edge)
    x, attr = torch.randn(N, 6, dtype=torch.float64), torch.randn(400, 3, dtype=torch.float64)
    compare(theirs, ours, x, edges(), types(400), attr)


def test_attention_that_underflows():
    """f-additive adds one to weights above zero, and not to those that are zero in the given precision."""
    theirs, ours = pair(6, 5, R, mod="f-additive", dtype=torch.float32)
    with torch.no_grad():
        theirs.k.mul_(1e3), ours.k.mul_(1e3)
    x = torch.randn(N, 6)
    _, (_, alpha) = theirs(x, edges(), types(400), return_attention_weights=True)
    assert 0.1 < (alpha == 0).float().mean().item() < 0.9
    torch.testing.assert_close(
        ours(x, edges(), types(400)), theirs(x, edges(), types(400)), rtol=1e-3, atol=1e-3
    )


@KIND
@pytest.mark.parametrize("mod", [None, "additive", "scaled", "f-additive"])
def test_autocast(kind, mod):
    theirs, ours = pair(8, 8, R, heads=2, mod=mod, edge_dim=8, dtype=torch.float32, **kind)
    args = torch.randn(N, 8), edges(), types(400), torch.randn(400, 8)
    compare_low_precision(theirs, ours, *args, autocast=True, return_attention_weights=True)


@KIND
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision(kind, dtype):
    theirs, ours = pair(6, 8, R, heads=2, edge_dim=3, dtype=torch.float32, **kind)
    args = torch.randn(N, 6), edges(), types(400), torch.randn(400, 3)
    compare_low_precision(theirs, ours, *args, dtype=dtype)
