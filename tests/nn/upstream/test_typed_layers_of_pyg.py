"""What is particular to layers of dfgnn.nn.pyg with types of nodes or edges, and to aggregations, beside
torch_geometric's."""

import copy

import pytest
import torch
from beside import accelerated, assert_same, compare, compare_low_precision, features, pair, run
from of_pyg import (
    MECHANISMS,
    METADATA,
    NUM_RELATIONS,
    RELATIONS,
    WIDTHS,
    edges,
    inject_dropout,
    sparse_forms,
    torch_geometric,
    typed_edges,
    typed_features,
)
from of_pyg import NODES as SIZES
from of_pyg import HANConv as HAN
from of_pyg import HGTConv as HGT
from of_pyg import RGATConv as RGAT
from of_pyg import edge_types as types

from dfgnn import reference
from dfgnn.nn import FallbackWarning, pyg
from dfgnn.nn.pyg import HGTConv, RGATConv

nn = torch_geometric.nn
N, R = 50, NUM_RELATIONS  # nodes of the graph "random", relations


# ---- HGTConv --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_channels", [8, WIDTHS], ids=str)
def test_types_that_do_not_occur(in_channels):
    """A node type without features, and edge types without edges, in one call."""
    theirs, ours = HGT().pair(in_channels, 8, METADATA, 2)
    x = typed_features(in_channels)
    edges = {edge_type: index for edge_type, index in typed_edges().items() if "c" not in edge_type}
    compare(theirs, ours, {name: x[name] for name in ("a", "b", "d")}, edges)


def test_results_are_of_the_destination_types():
    theirs, ours = HGT().pair()
    expected, actual = theirs(typed_features(), typed_edges()), ours(typed_features(), typed_edges())
    assert list(actual) == list(expected) == ["a", "b", "d"]
    inputs = typed_features(WIDTHS)
    before = copy.deepcopy(inputs)
    HGTConv(-1, 8, METADATA, 2).double()(inputs, typed_edges())
    assert all(torch.equal(inputs[name], before[name]) for name in SIZES)


def test_order_of_edge_types():
    """Whatever the order of the edge types in the dictionary, each takes its own weights."""
    theirs, ours = HGT().pair()
    x, edges = typed_features(), typed_edges()
    turned = dict(reversed(edges.items()))
    assert_same(run(ours, x, turned), run(theirs, x, edges), 1e-10)


@pytest.mark.parametrize("layout", ["csc", "mixed"])
def test_sparse_adjacency(layout):
    theirs, ours = HGT().pair()
    edges, given = {}, {}
    for edge_type, index in typed_edges().items():
        index = torch.unique(index, dim=1)
        sizes = SIZES[edge_type[0]], SIZES[edge_type[2]]
        forms = sparse_forms(index, *sizes) | {"mixed": index}
        forms["csc"] = torch_geometric.utils.to_torch_csc_tensor(index.flip(0), size=sizes[::-1])
        edges[edge_type], given[edge_type] = index, forms[layout]
    if layout == "mixed":
        given["a", "x", "b"] = sparse_forms(edges["a", "x", "b"], 20, 15)["coo"]
    x = typed_features()
    compare(theirs, ours, x, given)
    compare(theirs, ours, x, edges, our_args=(x, given))


def test_no_edges_of_some_types():
    theirs, ours = HGT().pair()
    nothing = dict.fromkeys(RELATIONS, torch.zeros(2, 0, dtype=torch.long))
    compare(theirs, ours, typed_features(), nothing | {("a", "z", "a"): torch.tensor([[0, 1], [2, 2]])})
    compare(theirs, ours, typed_features(sizes=SIZES | {"c": 0, "d": 0}), nothing)


def test_keys_are_made_per_source_of_a_relation():
    """The kernels get one graph of all relations, with a row per (source, relation) pair. Of type c only the
    few nodes with edges have a row."""
    ours, seen = HGTConv(8, 8, METADATA, 2), []

    def attention(graph, query, key, value, **options):
        seen.append((graph.num_edges, query.shape, key.shape, value.shape))
        return reference.dot_attention(graph, query, key, value, **options)

    ours.attention = attention
    ours(typed_features(dtype=torch.float32), typed_edges())
    num_rows = sum(5 if src == "c" else SIZES[src] for src, _, _ in RELATIONS)
    assert seen == [(360, (42, 2, 4), (num_rows, 2, 4), (num_rows, 2, 4))]


def test_autocast_of_a_projected_result():
    """Where out_channels differ from in_channels the layer has no skip connection, and the result is the
    projection alone."""
    theirs, ours = HGT().pair(12, 8, METADATA, 2, dtype=torch.float32)
    compare_low_precision(theirs, ours, typed_features(12, torch.float32), typed_edges(), autocast=True)


# ---- RGATConv -------------------------------------------------------------------------------------------


KIND = pytest.mark.parametrize(
    "kind",
    RGAT.kinds,
    ids=["additive within", "additive across", "multiplicative within", "multiplicative across"],
)


@KIND
@pytest.mark.parametrize("num_src, num_dst", [(30, 80), (80, 30)])
def test_size(kind, num_src, num_dst):
    theirs, ours = RGAT().pair(6, 5, R, mod="scaled", **kind)
    edge_index = edges("fewer_sources" if num_src == 30 else "fewer_destinations")
    x = torch.randn(num_src, 6, dtype=torch.float64), torch.randn(num_dst, 6, dtype=torch.float64)
    compare(theirs, ours, x, edge_index, types(400), size=(num_src, num_dst), return_attention_weights=True)


@KIND
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_types_of_a_sparse_adjacency(kind, layout):
    edge_index = torch.unique(edges(), dim=1)
    num_edges = edge_index.shape[1]
    x = torch.randn(N, 6, dtype=torch.float64)
    theirs, ours = RGAT().pair(6, 5, R, **kind)
    adjacency = sparse_forms(edge_index, N, N, types(num_edges))[layout]
    for asked in (None, True):
        # torch_geometric documents that the matrix's values may be the types, but fails with that: it gets
        # them as an argument.
        compare(
            theirs, ours, x, adjacency, adjacency.values(), return_attention_weights=asked,
            our_args=(x, adjacency),
        )  # fmt: skip


@KIND
def test_forms_of_edge_attr(kind):
    x = torch.randn(N, 6, dtype=torch.float64)
    theirs, ours = RGAT().pair(6, 5, R, edge_dim=1, **kind)
    compare(theirs, ours, x, edges(), types(400), torch.randn(400, dtype=torch.float64))
    compare(theirs, ours, x, edges(), types(400), torch.randn(1, 1, dtype=torch.float64))
    compare(theirs, ours, x, edges(), types(400))  # edge attributes may be left out


def test_every_parameter_is_initialised():
    """torch_geometric leaves l2, which mod="scaled" multiplies by, as its memory happens to be."""
    layer = RGATConv(6, 5, R, heads=2, mod="scaled")
    for reset in (False, True):
        if reset:
            with torch.no_grad():
                layer.l2.fill_(float("nan"))
            layer.reset_parameters()
        assert torch.equal(layer.l2, torch.full((5, 5), 1 / 5))


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


def test_types_that_are_the_values_of_a_matrix_may_change():
    """The graph of a sparse matrix is cached by its indices. Its values, here the types, may change in place
    without a new version counter: they must be read at each call."""
    _, ours = RGAT().pair(6, 5, R)
    edge_index = torch.unique(edges(), dim=1)
    matrix = sparse_forms(edge_index, N, N, types(edge_index.shape[1]))["coo"].coalesce()
    x = torch.randn(N, 6, dtype=torch.float64)
    for _ in range(2):
        expected = ours(x, matrix, matrix.values().clone())
        assert torch.equal(ours(x, matrix), expected)
        matrix.values().numpy()[:] = matrix.values().numpy()[::-1].copy()
    assert not torch.equal(ours(x, matrix), expected)


def test_no_dropout_with_a_mod():
    """`dropout` is set after construction, because the constructor refuses it together with `mod`: it has no
    effect then."""
    theirs, ours = RGAT().pair(6, 5, R, mod="f-scaled")
    theirs.dropout = ours.dropout = 0.5
    compare(theirs, ours, torch.randn(N, 6, dtype=torch.float64), edges(), types(400))


def test_attention_that_underflows():
    """mod="f-additive" adds one to attention weights above zero; weights that underflow to zero stay zero."""
    theirs, ours = RGAT().pair(6, 5, R, mod="f-additive", dtype=torch.float32)
    with torch.no_grad():
        theirs.k.mul_(1e3), ours.k.mul_(1e3)
    x = torch.randn(N, 6)
    _, (_, alpha) = theirs(x, edges(), types(400), return_attention_weights=True)
    assert 0.1 < (alpha == 0).float().mean().item() < 0.9
    torch.testing.assert_close(
        ours(x, edges(), types(400)), theirs(x, edges(), types(400)), rtol=1e-3, atol=1e-3
    )


# ---- HANConv --------------------------------------------------------------------------------------------


def test_han_lazy_and_sparse():
    theirs, ours = HAN().pair(WIDTHS, 8, METADATA, heads=2)
    x, ends = typed_features(WIDTHS), {e: torch.unique(i, dim=1) for e, i in typed_edges().items()}
    assert ours(x, ends)["c"] is None
    sparse = {e: sparse_forms(i, len(x[e[0]]), len(x[e[2]]))["csr"].double() for e, i in ends.items()}
    compare(theirs, ours, x, ends, our_args=(x, sparse))
    found = []
    for cls in (nn.HANConv, pyg.HANConv):
        torch.manual_seed(0)
        found.append(run(cls(-1, 8, METADATA, heads=2).double(), x, ends))
    assert_same(found[1], found[0], 1e-10)


def test_han_dropout(monkeypatch):
    metadata = (["n"], [("n", "to", "n")])
    theirs, ours = pair(nn.HANConv, pyg.HANConv, 9, 8, metadata, heads=2, dropout=0.4)
    inject_dropout(monkeypatch, ours, 400, 2)
    compare(theirs, ours, {"n": features(N, 9)}, {("n", "to", "n"): edges()})


# ---- GENConv and aggregations ---------------------------------------------------------------------------


def test_gen_without_destinations_and_errors():
    theirs, ours = pair(nn.GENConv, pyg.GENConv, (5, 5), 5)
    x, edge_index = features(80, 5), edges("fewer_destinations")
    compare(theirs, ours, (x, None), edge_index, None, (80, 30), tolerance=1e-9)
    with pytest.raises(ValueError, match="edge_attr: expected 5 columns"):
        ours((x, None), edge_index, features(edge_index.shape[1], 3), (80, 30))
    with pytest.warns(FallbackWarning, match="aggr='mean'"):
        pyg.GENConv(5, 5, aggr="mean").double()(x, torch.randint(80, (2, 9)))


GROUPS = {
    "sorted": torch.arange(40) // 7,
    "unsorted": torch.randint(9, (40,), generator=torch.Generator().manual_seed(0)),
    "one": torch.zeros(40, dtype=torch.int64),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("options", [{}, {"t": 0.3}, {"learn": True}, {"semi_grad": True}], ids=str)
def test_softmax_aggregation(groups, options):
    theirs, ours = nn.aggr.SoftmaxAggregation(**options), pyg.SoftmaxAggregation(**options)
    x = features(40, 6)
    for size in (None, 11):
        results = [run(module, x, groups, dim_size=size) for module in (ours, theirs)]
        assert_same(*results, 1e-6 if "learn" in options else 1e-10)


def test_softmax_aggregation_of_channels():
    options = dict(learn=True, channels=6)
    theirs, ours = nn.aggr.SoftmaxAggregation(**options), pyg.SoftmaxAggregation(**options)
    x = features(40, 6)
    for given in (dict(index=GROUPS["sorted"]), dict(ptr=torch.tensor([0, 3, 3, 20, 40]))):
        assert_same(run(ours, x, **given), run(theirs, x, **given), 1e-6)
    with pytest.warns(FallbackWarning, match="of 3"):
        three = features(40, 2, 6)
        plain = pyg.SoftmaxAggregation()
        expected = nn.aggr.SoftmaxAggregation()(three, GROUPS["sorted"], dim=0)
        torch.testing.assert_close(plain(three, GROUPS["sorted"], dim=0), expected)


@pytest.mark.parametrize("gates", [1, 6])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_attentional_aggregation(groups, gates):
    def make(cls):
        torch.manual_seed(0)
        gate, inner = torch.nn.Linear(9, gates), torch.nn.Sequential(torch.nn.Linear(9, 6), torch.nn.ReLU())
        return cls(gate, inner).double()

    theirs, ours = make(nn.aggr.AttentionalAggregation), make(pyg.AttentionalAggregation)
    x = features(40, 9)
    for size in (None, 11):
        results = [run(module, x, groups, dim_size=size) for module in (ours, theirs)]
        assert_same(*results, 1e-10)
    assert_same(run(accelerated(theirs), x, groups), run(theirs, x, groups), 1e-10)
    mlp = nn.MLP([9, 4, 1], norm="layer").double()
    theirs, ours = (cls(mlp) for cls in (nn.aggr.AttentionalAggregation, pyg.AttentionalAggregation))
    assert_same(run(ours, x, groups), run(theirs, x, groups), 1e-10)
    wide = pyg.AttentionalAggregation(torch.nn.Linear(9, 3)).double()
    with pytest.raises(ValueError, match="gate_nn: expected"):
        wide(x, groups)


ROWS = 5000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by", ["index", "ptr"])
@pytest.mark.parametrize("kind", ["softmax", "gate", "gates"])
def test_compiled_aggregations_in_16_bits(kind, by, dtype):
    """Of many rows, compiled: as exact as eager."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
    index = torch.arange(ROWS) * 3 // ROWS
    gate = torch.nn.Linear(4, 1 if kind == "gate" else 4)
    module = pyg.SoftmaxAggregation() if kind == "softmax" else pyg.AttentionalAggregation(gate)
    module = module.to(dtype)
    x = x.to(dtype)
    options = (
        {"index": index, "dim_size": 3} if by == "index" else {"ptr": torch.tensor([0, 1667, 3334, ROWS])}
    )
    torch._dynamo.reset()
    got = torch.compile(lambda x: module(x, **options), backend="aot_eager", fullgraph=True)(x)
    score = (x if kind == "softmax" else module.gate_nn(x)).double()
    right = torch.stack([(score[index == k].softmax(0) * x[index == k].double()).sum(0) for k in range(3)])
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), right, rtol=0, atol=4 * torch.finfo(dtype).eps)
