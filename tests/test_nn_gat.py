"""GATConv beside dgl.nn.GATConv with the same parameters: outputs, attention, every gradient, every quirk."""

import copy
import gc
import itertools
import math
import pickle
import weakref

import pytest
import torch
from graphs import make_graph
from torch.nn.utils import parametrizations

from dfgnn import Graph, reference
from dfgnn.nn import GATConv, ZeroInDegreeError
from dfgnn.nn import _graph as nn_graph

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
DGLConv = dgl.nn.pytorch.GATConv
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def dgl_graph(name="random", index_dtype=torch.int64):
    """A square graph as DGLGraph, in which every node has an in-edge."""
    graph = make_graph(name)
    g = dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_src, idtype=index_dtype)
    return dgl.add_self_loop(g)


def pair(*args, dtype=torch.float32, **kwargs):
    """DGL's layer and ours with its state_dict; biases are given a value, for they start at zero."""
    theirs = DGLConv(*args, **kwargs).to(dtype)
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    ours = GATConv(*args, **kwargs).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def assert_close(one, other, tolerance, what):
    """Norm-wise and element-wise, against the largest element."""
    assert one.shape == other.shape and one.dtype == other.dtype, what
    if one.numel():
        scale = max(other.abs().max().item(), 1e-30)
        assert (one - other).abs().max().item() <= tolerance * max(scale, 1.0), what


def compare(theirs, ours, graph, feat, edge_weight=None, our_graph=None):
    """Run both layers forward and backward with the same random gradients."""
    dtype = (feat[0] if isinstance(feat, tuple) else feat).dtype
    results = []
    for layer, g in ((theirs, graph), (ours, graph if our_graph is None else our_graph)):
        leaves = [x.clone().requires_grad_() for x in (feat if isinstance(feat, tuple) else (feat,))]
        weight = None if edge_weight is None else edge_weight.clone().requires_grad_()
        layer.zero_grad()
        args = (tuple(leaves) if isinstance(feat, tuple) else leaves[0], weight)
        plain = layer(g, *args)
        out, attention = layer(g, *args, get_attention=True)
        torch.testing.assert_close(plain, out)
        generator = torch.Generator().manual_seed(3)
        grads = [torch.randn(x.shape, dtype=dtype, generator=generator) for x in (out, attention, plain)]
        torch.autograd.backward([out, attention, plain], grads)
        found = {"out": out.detach(), "attention": attention.detach()}
        found |= {f"feat{k}": x.grad for k, x in enumerate(leaves)}
        found |= {name: p.grad for name, p in layer.named_parameters()}
        if weight is not None:
            found["edge_weight"] = weight.grad
        results.append(found)
    expected, actual = results
    assert expected.keys() == actual.keys()
    for name in expected:
        # DGL leaves None where no edge exists, which is zero.
        zeros = torch.zeros_like(actual[name])
        assert_close(
            actual[name], zeros if expected[name] is None else expected[name], TOLERANCE[dtype], name
        )


OPTIONS = [
    dict(zip(("residual", "bias", "activation", "negative_slope"), values))
    for values in itertools.product(
        (False, True), (False, True), (None, torch.nn.functional.elu), (0.2, 0.05)
    )
]


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(str(getattr(v, "__name__", v)) for v in o.values())
)
@pytest.mark.parametrize("in_feats", [6, 12, 40], ids=["narrow", "identity", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_constructor_options(options, in_feats, dtype):
    theirs, ours = pair(in_feats, 4, 3, dtype=dtype, **options)
    graph = dgl_graph(index_dtype=torch.int32 if in_feats == 12 else torch.int64)
    edge_weight = torch.rand(graph.num_edges(), dtype=dtype)
    compare(theirs, ours, graph, torch.randn(graph.num_nodes(), in_feats, dtype=dtype), edge_weight)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "name", ["duplicates", "self_loops", "super_row", "super_source", "mixed_degrees", "power_law"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_graphs(name, index_dtype, dtype):
    graph = make_graph(name)
    n = max(graph.num_src, graph.num_dst)
    g = dgl.add_self_loop(dgl.graph(tuple(graph.edge_index), num_nodes=n, idtype=index_dtype))
    theirs, ours = pair(9, 5, 2, residual=True, dtype=dtype)
    feat = torch.randn(n, 9, dtype=dtype)
    compare(theirs, ours, g, feat)
    src, dst = g.edges(order="eid")
    compare(
        theirs,
        ours,
        g,
        feat,
        torch.rand(g.num_edges(), dtype=dtype),
        Graph.from_coo(src, dst, num_src=n, num_dst=n),
    )


@pytest.mark.parametrize("residual", [False, True])
def test_zero_in_degree(residual):
    graph = make_graph("isolated")
    g = dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_src)
    theirs, ours = pair(9, 5, 2, residual=residual)
    feat = torch.randn(graph.num_src, 9)
    for layer in (theirs, ours):
        with pytest.raises(dgl.DGLError, match="in-?(edges|degree)"):
            layer(g, feat)
        layer.set_allow_zero_in_degree(True)
    compare(theirs, ours, g, feat)
    theirs, ours = pair(9, 5, 2, residual=residual, allow_zero_in_degree=True)
    compare(theirs, ours, g, feat)
    with pytest.raises(ZeroInDegreeError, match="allow_zero_in_degree"):
        GATConv(9, 5, 2)(graph, feat)
    assert issubclass(ZeroInDegreeError, ValueError)


@pytest.mark.parametrize("options", [{}, {"residual": True}, {"residual": True, "bias": False}], ids=str)
def test_no_edges(options):
    empty = torch.zeros(0, dtype=torch.int64)
    theirs, ours = pair(9, 5, 2, allow_zero_in_degree=True, **options)
    compare(theirs, ours, dgl.graph((empty, empty), num_nodes=5), torch.randn(5, 9))


def test_no_nodes():
    empty = torch.zeros(0, dtype=torch.int64)
    g = dgl.graph((empty, empty), num_nodes=0)
    compare(*pair(9, 5, 2), g, torch.randn(0, 9))
    # DGL's own layer cannot view the residual of no nodes.
    assert GATConv(9, 5, 2, residual=True)(g, torch.randn(0, 9)).shape == (0, 2, 5)


@pytest.mark.parametrize("in_feats", [9, 40])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_block(dtype, residual, in_feats):
    """A sampled block, with one tensor whose first rows are the destinations, and with a pair."""
    g = dgl_graph()
    frontier = dgl.in_subgraph(g, torch.arange(0, 50, 3))
    block = dgl.to_block(frontier, torch.arange(0, 50, 3))
    theirs, ours = pair(in_feats, 5, 2, residual=residual, dtype=dtype)
    feat = torch.randn(block.num_src_nodes(), in_feats, dtype=dtype)
    edge_weight = torch.rand(block.num_edges(), dtype=dtype)
    compare(theirs, ours, block, feat, edge_weight)
    compare(theirs, ours, block, (feat, feat[: block.num_dst_nodes()]), edge_weight)
    assert block.num_dst_nodes() < block.num_src_nodes()


@pytest.mark.parametrize("in_feats", [(9, 6), (9, 10), (40, 6), (6, 40)], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bipartite(dtype, residual, in_feats):
    graph = make_graph("fewer_sources")
    src, dst = graph.edge_index
    src, dst = torch.cat([src, torch.arange(80) % 30]), torch.cat([dst, torch.arange(80)])
    g = dgl.heterograph({("a", "to", "b"): (src, dst)}, num_nodes_dict={"a": 30, "b": 80})
    theirs, ours = pair(in_feats, 5, 2, residual=residual, dtype=dtype)
    feat = torch.randn(30, in_feats[0], dtype=dtype), torch.randn(80, in_feats[1], dtype=dtype)
    compare(theirs, ours, g, feat, torch.rand(len(src), dtype=dtype))
    compare(theirs, ours, g, feat, our_graph=Graph.from_coo(src, dst, num_src=30, num_dst=80))
    with pytest.raises(ValueError, match="feat"):
        ours(g, feat[0])


@pytest.mark.parametrize("in_feats", [9, 40])
@pytest.mark.parametrize("residual", [False, True])
def test_leading_dimensions(residual, in_feats):
    """Inputs ``[N, *, F]``; DGL takes them with more than one dimension in place of the star, too."""
    g = dgl_graph()
    theirs, ours = pair(in_feats, 5, 2, residual=residual)
    compare(theirs, ours, g, torch.randn(g.num_nodes(), 3, in_feats))
    compare(theirs, ours, g, torch.randn(g.num_nodes(), 2, 4, in_feats))
    pair_of = torch.randn(g.num_nodes(), 3, in_feats), torch.randn(g.num_nodes(), 3, in_feats)
    compare(theirs, ours, g, pair_of)


def test_leading_dimensions_are_independent():
    g = dgl_graph()
    layer = GATConv(9, 5, 2)
    feat, weight = torch.randn(g.num_nodes(), 3, 9), torch.rand(g.num_edges())
    out, attention = layer(g, feat, weight, get_attention=True)
    for k in range(3):
        one = layer(g, feat[:, k], weight, get_attention=True)
        torch.testing.assert_close(out[:, k], one[0])
        torch.testing.assert_close(attention[:, k], one[1])


# State


@pytest.mark.parametrize("in_feats", [6, 10, (6, 6), (6, 10), (10, 6)], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_state_and_initialisation(in_feats, residual, bias):
    torch.manual_seed(5)
    theirs = DGLConv(in_feats, 5, 2, residual=residual, bias=bias)
    torch.manual_seed(5)
    ours = GATConv(in_feats, 5, 2, residual=residual, bias=bias)
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == actual.keys()
    # The same numbers are drawn in the same order.
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    theirs.load_state_dict(actual)
    torch.manual_seed(6)
    theirs.reset_parameters()
    torch.manual_seed(6)
    ours.reset_parameters()
    assert all(torch.equal(expected[name], x) for name, x in ours.state_dict().items())


def test_initialisation_distribution():
    layer = GATConv(200, 30, 10, residual=True)
    fan_sum = {"fc.weight": 500, "res_fc.weight": 500}
    for name, width in fan_sum.items():
        std = math.sqrt(2) * math.sqrt(2 / width)
        assert abs(layer.state_dict()[name].std().item() / std - 1) < 0.02
    # The fans of a (1, H, D) parameter are (H D, D).
    assert abs(layer.attn_l.std().item() / (math.sqrt(2) * math.sqrt(2 / (300 + 30))) - 1) < 0.2
    assert layer.res_fc.bias.eq(0).all() and layer.bias is None


def test_pickle_and_deepcopy():
    g = dgl_graph()
    layer = GATConv(9, 5, 2, 0.1, 0.1, residual=True, activation=torch.nn.functional.elu).eval()
    feat = torch.randn(g.num_nodes(), 9)
    expected = layer(g, feat)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(other(g, feat), expected)


# Dropout


def test_injected_masks(monkeypatch):
    """Both layers with the same masks of features and attention."""
    g = dgl_graph()
    theirs, ours = pair(9, 5, 2, 0.3, 0.4, residual=True, dtype=torch.float64)
    seed = torch.tensor([21])
    feat_mask = torch.bernoulli(torch.full((g.num_nodes(), 9), 0.7, dtype=torch.float64)) / 0.7
    mask = reference.dropout_mask(int(seed), g.num_edges(), 2, 0.4)[..., None]
    theirs.feat_drop.forward = ours.feat_drop.forward = lambda x: x * feat_mask
    theirs.attn_drop.forward = lambda a: a * mask
    attention = GATConv.attention
    monkeypatch.setattr(GATConv, "attention", staticmethod(lambda *a, **k: attention(*a, **k, _seed=seed)))
    compare(theirs, ours, g, torch.randn(g.num_nodes(), 9, dtype=torch.float64))


def test_dropout_distribution():
    """Mean and deviation of many draws agree with DGL's, and eval mode has no dropout."""
    g, copies, draws = dgl_graph("duplicates"), 500, 3000
    batch = dgl.batch([g] * copies)
    theirs, ours = pair(9, 5, 2, 0.2, 0.4, dtype=torch.float64)
    feat = torch.randn(g.num_nodes(), 9, dtype=torch.float64)
    sample = {}
    with torch.no_grad():
        for layer in (theirs, ours):
            outs = [layer(batch, feat.repeat(copies, 1)) for _ in range(draws // copies)]
            sample[layer] = torch.cat(outs).view(draws, g.num_nodes(), 2, 5)
    deviation = sample[theirs].std(0)
    mean_difference = (sample[theirs].mean(0) - sample[ours].mean(0)).abs() / deviation
    assert mean_difference.max().item() < 5 * math.sqrt(2 / draws)
    assert (sample[ours].std(0) / deviation - 1).abs().max().item() < 0.1
    theirs.eval(), ours.eval()
    compare(theirs, ours, g, feat)


def test_attention_is_returned_after_dropout():
    g = dgl_graph("duplicates")
    layer = GATConv(9, 5, 2, attn_drop=0.5)
    _, attention = layer(g, torch.randn(g.num_nodes(), 9), get_attention=True)
    assert 0.3 < (attention == 0).float().mean().item() < 0.7


# The projection


@pytest.mark.parametrize(
    "change",
    [
        lambda fc: fc.register_forward_hook(lambda module, args, out: 2 * out),
        lambda fc: fc.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        parametrizations.weight_norm,
    ],
    ids=["forward hook", "forward pre-hook", "parametrization"],
)
@pytest.mark.parametrize("in_feats", [9, (9, 9)], ids=str)
def test_changes_of_the_projection_take_effect(change, in_feats):
    g = dgl_graph()
    theirs, ours = pair(in_feats, 5, 2)
    for layer in (theirs, ours):
        change(layer.fc if in_feats == 9 else layer.fc_src)
    feat = torch.randn(g.num_nodes(), 9)
    compare(theirs, ours, g, feat if in_feats == 9 else (feat, feat.flip(0)))


@pytest.mark.parametrize("in_feats", [9, 40])
def test_a_replaced_projection_takes_effect(in_feats):
    g = dgl_graph()
    theirs, ours = pair(in_feats, 5, 2)
    theirs.fc = ours.fc = torch.nn.Sequential(torch.nn.Linear(in_feats, 10), torch.nn.Tanh())
    compare(theirs, ours, g, torch.randn(g.num_nodes(), in_feats))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision(dtype):
    g = dgl_graph()
    layer = GATConv(9, 5, 2, residual=True).to(dtype)
    feat = torch.randn(g.num_nodes(), 9, dtype=dtype)
    out = layer(g, feat)
    out.sum().backward()
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), copy.deepcopy(layer).double()(g, feat.double()), rtol=0.05, atol=0.05
    )
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_autocast():
    g = dgl_graph()
    layer = GATConv(9, 5, 2, residual=True)
    feat = torch.randn(g.num_nodes(), 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(g, feat)
        out.float().sum().backward()
    torch.testing.assert_close(out.float(), layer(g, feat), rtol=0.05, atol=0.05)
    assert all(p.grad.isfinite().all() for p in layer.parameters())


# Graphs of DGL


def test_conversion_is_kept_as_long_as_dgls_graph():
    g = dgl_graph()
    first = nn_graph.as_graph(g)
    assert nn_graph.as_graph(g) is first and nn_graph.as_graph(g.local_var()) is first
    before = len(nn_graph._from_dgl)
    g.add_edges([0, 1], [2, 3])
    second = nn_graph.as_graph(g)
    assert second is not first and second.num_edges == first.num_edges + 2
    kept = weakref.ref(second)
    del g, first, second
    gc.collect()
    assert kept() is None and len(nn_graph._from_dgl) == before - 1


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="graph"):
        GATConv(9, 5, 2)(torch.zeros(2, 3), torch.randn(3, 9))


def test_inside_hetero_graph_conv():
    g = dgl.heterograph({("a", "x", "b"): ([0, 1, 2, 2], [0, 1, 1, 0]), ("b", "y", "b"): ([0, 1], [1, 0])})
    feats = {"a": torch.randn(3, 9), "b": torch.randn(2, 9)}
    x, y = pair((9, 9), 5, 2), pair(9, 5, 2)
    outs = [dgl.nn.pytorch.HeteroGraphConv({"x": x[k], "y": y[k]})(g, feats)["b"] for k in range(2)]
    torch.testing.assert_close(outs[0], outs[1])
