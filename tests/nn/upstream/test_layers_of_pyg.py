"""What is particular to single layers of dfgnn.nn.pyg that take one kind of nodes and edges, beside
torch_geometric's."""

import copy

import pytest
import torch
from beside import assert_same, compare, compare_low_precision, features, pair, run
from of_pyg import AGNNConv as AGNN
from of_pyg import SuperGATConv as SuperGAT
from of_pyg import WithLoss, edges, inject_dropout, sparse_forms, torch_geometric

import dfgnn
from dfgnn import Graph, reference
from dfgnn.nn import FallbackWarning, pyg
from dfgnn.nn.fused import gated as _gated
from dfgnn.nn.fused import operator_call as _operator_call
from dfgnn.nn.fused import traced as _traced
from dfgnn.nn.pyg import GATConv, GATv2Conv, SuperGATConv, TransformerConv

nn = torch_geometric.nn
N, E = 50, 400  # of the graph "random"


# ---- AGNNConv -------------------------------------------------------------------------------------------


def test_a_row_of_zeros():
    x = features(N, 9)
    x[3] = 0
    theirs, ours = AGNN().pair()
    with torch.no_grad():
        torch.testing.assert_close(ours(x, edges()), theirs(x, edges()), rtol=1e-10, atol=1e-10)


def test_low_precision_features_under_autocast():
    """A layer before this one gives bfloat16 under autocast; beta stays float32, and so is the result."""
    args = torch.randn(N, 9).bfloat16(), edges()
    compare_low_precision(*AGNN().pair(dtype=torch.float32), *args, autocast=True)


# ---- GATConv --------------------------------------------------------------------------------------------


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
        theirs, ours = pair(nn.GATConv, GATConv, 7, 5, 2, edge_dim=3, fill_value=fill_value)
        compare(theirs, ours, torch.randn(n, 7, dtype=torch.float64), edge_index, edge_attr)
    if not isinstance(fill_value, torch.Tensor) or fill_value.dim() == 0:
        edge_attr = torch.randn(edge_index.shape[1], dtype=torch.float64)
        theirs, ours = pair(nn.GATConv, GATConv, 7, 5, 2, edge_dim=1, fill_value=fill_value)
        compare(theirs, ours, torch.randn(n, 7, dtype=torch.float64), edge_index, edge_attr)


@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("name", ["fewer_sources", "fewer_destinations"])
def test_size(add_self_loops, name):
    num_src, num_dst = (30, 80) if name == "fewer_sources" else (80, 30)
    x = torch.randn(num_src, 9, dtype=torch.float64)
    theirs, ours = pair(nn.GATConv, GATConv, 9, 5, 2, edge_dim=3, add_self_loops=add_self_loops)
    size = num_src, num_dst
    compare(theirs, ours, (x, torch.randn(num_dst, 9, dtype=torch.float64)), edges(name), size=size)
    compare(theirs, ours, (x, None), edges(name), size=size, return_attention_weights=True)


@pytest.mark.parametrize("residual", [False, True])
def test_sources_alone(residual):
    theirs, ours = pair(nn.GATConv, GATConv, 9, 5, 2, residual=residual)
    x = torch.randn(N, 9, dtype=torch.float64)
    compare(theirs, ours, (x, None), edges())
    compare(theirs, ours, (x, x), edges(), return_attention_weights=True)


def test_one_tensor_for_two_projections():
    theirs, ours = pair(nn.GATConv, GATConv, (9, 9), 5, 2, residual=True)
    compare(theirs, ours, torch.randn(N, 9, dtype=torch.float64), edges())


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_loops_of_more_destinations_than_sources(reduction):
    """torch_geometric fills in the attributes of loops only if every destination is a source, too; dfgnn also
    where it is not."""
    edge_index = torch.tensor([[0, 1, 2, 0], [1, 2, 4, 3]])
    attr = torch.randn(4, 3, dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    theirs, ours = pair(nn.GATConv, GATConv, (6, 6), 5, 2, edge_dim=3, fill_value=reduction)
    without = copy.copy(theirs)
    without.add_self_loops = False
    reduce = torch_geometric.utils.scatter(attr, edge_index[1], 0, 5, reduction)[:3]
    kept = edge_index[0] != edge_index[1]
    loops = torch.arange(3).repeat(2, 1)
    expected = without(x, torch.cat([edge_index[:, kept], loops], 1), torch.cat([attr[kept], reduce]))
    torch.testing.assert_close(ours(x, edge_index, attr), expected, rtol=1e-10, atol=1e-10)


def test_sparse_sources_alone():
    edge_index = torch.unique(edges("fewer_destinations"), dim=1)
    theirs, ours = pair(nn.GATConv, GATConv, (9, 6), 5, 2)
    x = torch.randn(80, 9, dtype=torch.float64)
    for adjacency in sparse_forms(edge_index, 80, 30).values():
        compare(theirs, ours, (x, None), adjacency, return_attention_weights=True)


def test_attention_is_returned_with_edges_as_they_were_given():
    edge_index, x = torch.unique(edges(), dim=1).contiguous(), torch.randn(N, 9)
    layer = GATConv(9, 5, 2, edge_dim=3)
    attr = torch.randn(edge_index.shape[1], 3)
    given = torch_geometric.EdgeIndex(edge_index, sparse_size=(N, N))
    _, (returned, _) = layer(x, given, attr, return_attention_weights=True)
    assert isinstance(returned, torch_geometric.EdgeIndex)
    for adjacency in sparse_forms(edge_index, N, N, attr).values():
        _, (matrix, alpha) = layer(x, adjacency, return_attention_weights=True)
        assert matrix.shape == (N, N, 2) and torch.equal(matrix.values(), alpha)


def test_no_projection_of_destinations_where_it_is_not_needed():
    layer = GATConv((9, 6), 5, 2)
    assert run(layer, (torch.randn(30, 9), torch.randn(80, 6)), edges("fewer_sources"))[
        "grad lin_dst.weight"
    ].any()
    pair = torch.randn(30, 9), torch.randn(80, 6)
    assert layer(pair, edges("fewer_sources")).grad_fn.name() == "LayerBackward"
    with torch.profiler.profile(record_shapes=True) as seen:
        layer(pair, edges("fewer_sources"), return_attention_weights=True)
    shapes = [event.input_shapes[:2] for event in seen.events() if event.name == "aten::linear"]
    assert [[30, 9], [10, 9]] in shapes and [[80, 6], [10, 6]] not in shapes


def test_attributes_of_edges_at_fixed_capacity():
    """The layer is one operator there, too, and unused edges and nodes, whatever their rows hold, have no
    part in results and gradients."""
    layer, edge_index = (
        GATConv(6, 4, 2, edge_dim=3, add_self_loops=False).double(),
        torch.randint(20, (2, 70)),
    )
    buffer = Graph.with_capacity((30, 30), 100)
    x, attr = torch.randn(30, 6).double(), torch.randn(100, 3).double()
    attr[70:] = float("nan")
    for count in (70, 40):
        buffer.copy_(edge_index[:, :count], (20, 20))
        exact = Graph.from_edge_index(edge_index[:, :count], num_nodes=20)
        found = []
        for graph, nodes, edges_in_use in ((buffer, 30, 100), (exact, 20, count)):
            leaves = x[:nodes].clone().requires_grad_(), attr[:edges_in_use].clone().requires_grad_()
            out = layer(leaves[0], graph, leaves[1])
            assert out.grad_fn.name() == "LayerBackward"
            grads = torch.autograd.grad(out[:20].sin().sum(), [*leaves, *layer.parameters()])
            found.append((out[:20], grads[0][:20], grads[1][:count], *grads[2:]))
            assert not grads[1][count:].any()
        torch.testing.assert_close(*found)
        attr[count:] = float("nan")


# ---- GATv2Conv ------------------------------------------------------------------------------------------


def test_one_attribute_for_each_edge_of_gatv2():
    theirs, ours = pair(nn.GATv2Conv, GATv2Conv, 7, 5, 2, edge_dim=1)
    compare(theirs, ours, features(N, 7), edges(), features(400))
    compare(theirs, ours, features(N, 7), edges())  # edge attributes may be left out


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("name", ["lin_l", "lin_r"])
def test_one_of_two_shared_projections_was_replaced(name, pairs):
    """lin_l and lin_r are one module; an adapter (as of LoRA) may replace it under one of these names
    only."""
    theirs, ours = pair(nn.GATv2Conv, GATv2Conv, 7, 5, 2, share_weights=True)
    other = torch.nn.Linear(7, 10).double()
    setattr(theirs, name, other)
    setattr(ours, name, other)
    x = features(N, 7)
    compare(theirs, ours, (x, x) if pairs else x, edges())


# ---- TransformerConv ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(400, 2, 5), (400, 1, 5), (400, 2, 1), (2, 5), (5,)], ids=str)
def test_edge_attributes_without_a_projection(shape):
    """In a layer without edge_dim, attributes are added to the values without a projection."""
    theirs, ours = pair(nn.TransformerConv, TransformerConv, 9, 5, 2)
    compare(theirs, ours, features(N, 9), edges(), features(*shape), return_attention_weights=True)


def test_one_attribute_for_each_edge():
    theirs, ours = pair(nn.TransformerConv, TransformerConv, 7, 5, 2, edge_dim=1)
    x, attr = features(N, 7), features(400, 1)
    compare(theirs, ours, x, edges(), attr)
    torch.testing.assert_close(ours(x, edges(), attr[:, 0]), theirs(x, edges(), attr))


def test_dropped_attributes_without_a_projection(monkeypatch):
    """Edge attributes that are added to the values without a projection are dropped together with the
    values."""
    theirs, ours = pair(nn.TransformerConv, TransformerConv, 9, 5, 2, dropout=0.4)
    inject_dropout(monkeypatch, ours, 400, 2)
    attr = features(400, 2, 5)
    compare(theirs, ours, features(N, 9), edges(), attr, return_attention_weights=True)
    compare(theirs, ours, features(N, 9), edges(), attr)


@pytest.fixture
def counts(count_calls):
    """A list that grows with every layer that is computed as one function."""
    return count_calls(_operator_call.Call, "run")


def test_large_attributes_are_folded(monkeypatch, counts):
    """Edge attributes that are fewer than a head's channels, or have gradients, are projected up to a number
    of elements and folded beyond it; others are always projected."""
    x, edge_index = features(N, 9), edges()
    for edge_dim, learns, is_folded in ((3, False, True), (5, False, False), (5, True, True)):
        layer = TransformerConv(9, 5, 2, edge_dim=edge_dim).double()
        attr = features(400, edge_dim).requires_grad_(learns)
        counts.clear()
        monkeypatch.setitem(_traced.MOST_UNFOLDED, "cpu", 400 * 10)
        expected = layer(x, edge_index, attr)
        assert len(counts) == 1
        monkeypatch.setitem(_traced.MOST_UNFOLDED, "cpu", 400 * 10 - 1)
        torch.testing.assert_close(layer(x, edge_index, attr), expected)
        assert len(counts) == (1 if is_folded else 2)


def test_what_is_not_computed_at_once(counts):
    """Attributes of another dtype raise as without the fused layer; under autocast they are cast."""
    layer, x, edge_index = TransformerConv(9, 5, 2, edge_dim=3), features(N, 9).float(), edges()
    attr = features(400, 3)
    with pytest.raises((RuntimeError, TypeError)):
        layer(x, edge_index, attr)
    expected = layer(x, edge_index, attr.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert len(counts) == 1
        torch.testing.assert_close(
            layer(x, edge_index, attr.bfloat16()), expected.bfloat16(), rtol=0.05, atol=0.05
        )
        assert len(counts) == 2
        layer(x, edge_index, attr)  # autocast does not cast float64: this call is not fused
        assert len(counts) == 2


# ---- SuperGATConv ---------------------------------------------------------------------------------------


def compare_training(theirs, ours, *args, our_args=None, **kwargs):
    SuperGAT().check_training((theirs, ours), args, our_args, **kwargs)


TYPES = pytest.mark.parametrize("attention_type", ["MX", "SD"])


@TYPES
def test_all_pairs_are_positive(attention_type):
    """A complete graph has no negative samples."""
    theirs, ours = pair(nn.SuperGATConv, SuperGATConv, 9, 5, 2, attention_type=attention_type)
    compare_training(theirs, ours, torch.randn(24, 9, dtype=torch.float64), edges("complete"))
    assert len(ours.att_x) == 24**2


@TYPES
def test_no_loss_in_evaluation(attention_type):
    theirs, ours = pair(nn.SuperGATConv, SuperGATConv, 9, 5, 2, attention_type=attention_type)
    x = torch.randn(N, 9, dtype=torch.float64)
    compare(theirs.eval(), ours.eval(), x, edges())
    assert torch.equal(ours.get_attention_loss(), theirs.get_attention_loss())


@TYPES
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_given_negatives_and_batches(attention_type, ratio):
    edge_index, batch = edges("duplicates"), torch.arange(12) // 6
    edge_index = torch.cat([edge_index, edge_index + 6], 1)
    theirs, ours = pair(
        nn.SuperGATConv, SuperGATConv, 9, 5, 2, attention_type=attention_type, edge_sample_ratio=ratio,
        add_self_loops=False,
    )  # fmt: skip
    x = torch.randn(12, 9, dtype=torch.float64)
    negatives = torch.tensor([[0, 3, 3, 11], [2, 5, 5, 0]])
    compare_training(theirs, ours, x, edge_index, negatives)
    compare_training(theirs, ours, x, edge_index, batch=batch)
    compare_training(theirs, ours, x, edge_index, neg_edge_index=torch.zeros(2, 0, dtype=torch.long))
    batched = torch.randperm(edge_index.shape[1])[:20]
    compare_training(theirs, ours, x, edge_index[:, batched], batch=batch)
    assert len(ours.att_x) > ours.att_y.sum() > 0


def test_overridden_sampling_counts():
    class Doubled(SuperGATConv):
        def positive_sampling(self, edge_index):
            return edge_index.repeat(1, 2)

    layer = Doubled(9, 5, 2, add_self_loops=False)
    layer(torch.randn(N, 9), edges(), torch.zeros(2, 3, dtype=torch.long))
    assert len(layer.att_x) == 803 and torch.equal(layer.att_x[:400], layer.att_x[400:800])


@TYPES
@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_samples_of_a_sparse_adjacency(attention_type, add_self_loops, layout):
    edge_index = torch.unique(edges(), dim=1)
    theirs, ours = pair(
        nn.SuperGATConv, SuperGATConv, 9, 5, 2, attention_type=attention_type, add_self_loops=add_self_loops
    )
    x, adjacency = torch.randn(N, 9, dtype=torch.float64), sparse_forms(edge_index, N, N)[layout]
    # torch_geometric cannot sample from a sparse matrix: its layer gets the edge_index. The positive samples
    # are all edges, with a matrix in its order.
    found = []
    for layer, edges_ in ((theirs, edge_index), (ours, adjacency)):
        out, loss, logits, labels = WithLoss(layer.train())(x, edges_, torch.tensor([[1], [2]]))
        gradients = torch.autograd.grad(out.square().sum() + loss, list(layer.parameters()))
        found.append(dict(enumerate((out, loss, logits.sort(0).values, labels, *gradients))))
    assert_same(*found, 1e-10)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda x, e: (x, e, e + 1), ValueError, r"neg_edge_index\[.\]: expected values in"),
        (lambda x, e: (x, e, e[0]), ValueError, r"neg_edge_index: expected shape \[2, \*\]"),
    ],
)
def test_errors(change, error, match):
    with pytest.raises(error, match=match):
        SuperGATConv(9, 5, 2)(*change(torch.randn(N, 9), edges()))


def test_attention_can_be_replaced():
    _, ours = pair(nn.SuperGATConv, SuperGATConv, 9, 5, 2)
    x = torch.randn(N, 9, dtype=torch.float64)
    expected = ours.eval()(x, edges())
    ours.attention = reference.gat_attention
    torch.testing.assert_close(ours(x, edges()), expected)


# ---- ResGatedGraphConv ----------------------------------------------------------------------------------


NAMES = "random", "isolated", "duplicates", "self_loops", "super_row", "mixed_degrees", "sorted"


def inputs(name="random"):
    edge_index = edges(name)
    return features(int(edge_index.max()) + 2, 9), edge_index


@pytest.fixture(params=[False, True], ids=["by rows", "by heads"])
def calls(request, monkeypatch, count_calls):
    """A list with one element per forward pass of the fused layer; the test runs with the CPU's and the GPU's
    code path of it."""
    monkeypatch.setattr(_gated, "_by_heads", lambda x: request.param)
    return count_calls(_gated._Gated, "forward")


@pytest.mark.parametrize("aggr", ["add", "mean"])
def test_res_gated_at_once(aggr, calls):
    theirs, ours = pair(nn.ResGatedGraphConv, pyg.ResGatedGraphConv, 9, 5, aggr=aggr)
    for name in NAMES:
        compare(theirs, ours, *inputs(name))
    assert len(calls) == len(NAMES)
    x, edge_index = inputs()
    assert torch.equal(ours(x, edge_index), ours(x, edge_index))


def test_a_graph_of_fixed_capacity(calls):
    _, ours = pair(nn.ResGatedGraphConv, pyg.ResGatedGraphConv, 9, 5, aggr="mean")
    graph = dfgnn.Graph.with_capacity(60, 500)
    for count in (400, 300):
        x, edge_index = inputs()
        x = torch.cat([x[:50], torch.full((10, 9), 3.0, dtype=x.dtype)])
        edge_index = edge_index[:, :count] % 50
        graph.copy_(edge_index, num_nodes=50)
        found = [run(ours, x, edges) for edges in (graph.edge_index, edge_index)]
        assert_same(*found, 1e-10)
    assert len(calls) == 4


def test_gradients_of_some_and_what_is_modified(calls):
    theirs, ours = pair(nn.ResGatedGraphConv, pyg.ResGatedGraphConv, 9, 5, aggr="mean")
    x, edge_index = inputs()
    for layer in (theirs, ours):
        layer.lin_query.requires_grad_(False)
        layer.bias.requires_grad_(False)
    assert_same(run(ours, x, edge_index), run(theirs, x, edge_index), 1e-10)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    assert len(calls) == 2


# ---- GATEConv, HEATConv, GeneralConv, FAConv ------------------------------------------------------------


def test_a_hook_on_the_attention_of_heat():
    layer = pyg.HEATConv(9, 5, 3, 4, 7, 6, 2, heads=2).double()
    layer.att.register_forward_hook(lambda *a: None)
    with pytest.warns(FallbackWarning, match="att or lin"):
        layer(features(N, 9), edges(), torch.randint(3, (N,)), torch.randint(4, (E,)), features(E, 6))


def test_attentive_fp():
    """The whole model, of GATEConv and GATConv."""
    theirs = nn.AttentiveFP(9, 16, 3, edge_dim=4, num_layers=3, num_timesteps=2).double()
    ours = copy.deepcopy(theirs)
    assert {x.after for x in dfgnn.accelerate(ours).replaced} == {pyg.GATEConv, pyg.GATConv}
    batch = torch.arange(N) // 10
    args = features(N, 9), edges(), features(E, 4), batch
    assert_same(run(ours, *args), run(theirs, *args), 1e-9)


def test_general_without_the_attributes_that_it_was_made_for():
    theirs, ours = pair(nn.GeneralConv, pyg.GeneralConv, 9, 5, 3, heads=2, attention=True)
    compare(theirs, ours, features(N, 9), edges())


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(attention=False), "attention=False"),
        (dict(attention=True, attention_type="dot_product", in_edge_channels=3), "dot_product"),
        (dict(attention=True, attention_type="dot_product", directed_msg=False), "dot_product"),
    ],
)
def test_general_falls_back(options, reason):
    theirs, ours = pair(nn.GeneralConv, pyg.GeneralConv, 9, 5, **options)
    args = (features(N, 9), edges()) + ((features(E, 3),) if "in_edge_channels" in options else ())
    with pytest.warns(FallbackWarning, match=reason):
        found = run(ours, *args)
    assert_same(found, run(theirs, *args), 0)
    assert not dfgnn.accelerate(theirs).replaced


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"eps": 0.0}], ids=str)
def test_fa_again_and_compiled(options):
    """The same bits at every call; the attention is asked for by position."""
    theirs, ours = pair(nn.FAConv, pyg.FAConv, 9, **options)
    compiled = copy.deepcopy(ours)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for graph in ("random", "isolated", "self_loops"):
        edge_index = edges(graph)
        args = features(int(edge_index.max()) + 2, 9), features(int(edge_index.max()) + 2, 9), edge_index
        compare(theirs, ours, *args, None, True)
        assert torch.equal(ours(*args), ours(*args))
        compare(theirs, compiled, *args)


def test_fa_with_weights_and_sparse_edges():
    theirs, ours = pair(nn.FAConv, pyg.FAConv, 9, normalize=False)
    x = features(N, 9), features(N, 9)
    compare(theirs, ours, *x, edges(), features(E))
    with pytest.raises(ValueError, match="edge_weight: expected a tensor"):
        ours(*x, edges())
    theirs, ours = pair(nn.FAConv, pyg.FAConv, 9, dropout=1.0)
    compare(theirs, ours, *x, edges())
    with pytest.raises(ValueError, match="edge_weight: expected None"):
        ours(*x, edges(), features(E))
    matrix = sparse_forms(torch.unique(edges(), dim=1), N, N)["coo"].double()
    theirs, ours = pair(nn.FAConv, pyg.FAConv, 9, normalize=False)
    with pytest.warns(FallbackWarning, match="sparse tensor"):
        torch.testing.assert_close(ours(*x, matrix, matrix.values()), theirs(*x, matrix, matrix.values()))
