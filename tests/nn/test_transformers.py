"""The transformer layers of dfgnn's own, compared with their formulas in plain PyTorch: GraphTransformerConv,
GraphTransformerLayer, EdgeGraphTransformerConv and EdgeGraphTransformerLayer."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from graphs import make_graph

from dfgnn import reference
from dfgnn.functional import EdgeTerm
from dfgnn.nn import (
    EdgeGraphTransformerConv,
    EdgeGraphTransformerLayer,
    GraphTransformerConv,
    GraphTransformerLayer,
)


def gradients(outputs, wanted):
    """Of tensors by name, for random gradients of the outputs; without those that the outputs do not use."""
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    found = torch.autograd.grad(outputs, list(wanted.values()), grads, allow_unused=True)
    return {name: g for name, g in zip(wanted, found) if g is not None}


def drawn(device, dtype, **shapes):
    return {name: torch.randn(s).to(device, dtype).requires_grad_() for name, s in shapes.items()}


def linear(p, name, x):
    """The linear module ``name`` of these parameters."""
    bias = p.get(f"{name}.bias")
    return x @ p[f"{name}.weight"].T + (0 if bias is None else bias)


def norm(p, name, x, over=0):
    mean, var = x.mean(over, keepdim=True), x.var(over, keepdim=True, unbiased=False)
    return (x - mean) / torch.sqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


# ---- GraphTransformerConv --------------------------------------------------------------------------------


def expected_of_conv(layer, graph, h_src, h_dst, edge_attr=None, **options):
    p = dict(layer.named_parameters())
    query, key, value = (
        linear(p, name, h).view(len(h), layer.num_heads, layer.out_feats)
        for name, h in (("fc_query", h_dst), ("fc_key", h_src), ("fc_value", h_src))
    )
    if edge_attr is not None:
        feat = linear(p, "fc_edge", edge_attr).view(-1, layer.num_heads, layer.out_feats)
        options["edge"] = EdgeTerm(feat, feat)
    return reference.dot_attention(graph, query, key, value, return_attention=True, **options)


CONV_GRAPHS = (
    *("no_nodes", "duplicates", "super_row", "fewer_sources", "fewer_destinations", "mixed_degrees"),
    "isolated",
)
WITH_EDGES = "mixed_degrees", "fewer_sources", "no_edges"
CONV_CASES = [
    *itertools.product(CONV_GRAPHS, [{"bias": False}, {"bias": True}], [torch.float32, torch.float64]),
    # Fewer features of edges than a head has, and more.
    *itertools.product(WITH_EDGES, [{"edge_dim": 2}, {"edge_dim": 7}], [torch.float64]),
]


@pytest.mark.parametrize("name, options, dtype", CONV_CASES, ids=str)
def test_conv(device, name, options, dtype):
    graph, tolerance = make_graph(name, device), 2e-5 if dtype == torch.float32 else 1e-10
    layer = GraphTransformerConv((6, 9), 5, 3, allow_zero_in_degree=True, **options).to(device, dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    shapes = {"edge_bias": (graph.num_edges, 3), "edge_weight": (graph.num_edges,)}
    if "edge_dim" in options:
        shapes = {"edge_attr": (graph.num_edges, options["edge_dim"])}
    inputs = drawn(device, dtype, h_src=(graph.num_src, 6), h_dst=(graph.num_dst, 9), **shapes)
    h_src, h_dst = inputs["h_src"], inputs["h_dst"]
    given = {name: inputs[name] for name in shapes}
    out, attention = layer(graph, (h_src, h_dst), **given, return_attention=True)
    assert out.shape == (graph.num_dst, 3, 5) and attention.shape == (graph.num_edges, 3, 1)
    torch.testing.assert_close(layer(graph, (h_src, h_dst), **given), out)
    found = gradients([out, attention], dict(layer.named_parameters()) | inputs)
    actual = {"out": out, "attention": attention[..., 0], **found}
    # The reference is float64: two float32 sums over many edges would differ by the errors of both.
    exact = copy.deepcopy(layer).double()
    inputs = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    renamed = {"h_src": "h_src", "h_dst": "h_dst", "edge_bias": "bias", "edge_weight": "weight"}
    out, attention = expected_of_conv(exact, graph, **{renamed.get(k, k): x for k, x in inputs.items()})
    found = gradients([out, attention[..., None]], dict(exact.named_parameters()) | inputs)
    expected = {"out": out, "attention": attention, **found}
    assert actual.keys() == expected.keys() >= inputs.keys()
    for key, x in expected.items():
        # The gradient of the keys' bias is 0 by theory, a sum of cancelling terms of the size of those of the
        # weight's gradient: hence the weight's scale.
        sizes = (x, expected[key.replace("bias", "weight")])
        scale = max([1.0] + [y.abs().max().item() for y in sizes if y.numel()])
        torch.testing.assert_close(
            actual[key].double(), x, rtol=0.0, atol=tolerance * scale, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_dropout_of_conv(device):
    graph = make_graph("self_loops", device)
    layer = GraphTransformerConv(6, 5, 3, attn_drop=0.4).to(device)
    feat = torch.randn(20, 6, device=device)
    draws = torch.stack([layer(graph, feat, return_attention=True)[1] for _ in range(200)])
    # On a self-loop the attention is 1: what is left is the mask.
    torch.testing.assert_close(draws[draws > 0], torch.full_like(draws[draws > 0], 1 / 0.6))
    assert abs((draws > 0).float().mean().item() - 0.6) < 5 * math.sqrt(0.24 / draws.numel())
    layer.eval()
    attention = layer(graph, feat, return_attention=True)[1]
    torch.testing.assert_close(attention, torch.ones(20, 3, 1, device=device))
    layer = GraphTransformerConv(6, 5, 3, feat_drop=1.0).to(device)
    assert layer(graph, feat).eq(0).all()


def test_state_of_conv():
    layer = GraphTransformerConv((60, 90), 50, 3)
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    assert shapes == {
        "fc_query.weight": (150, 90), "fc_query.bias": (150,), "fc_key.weight": (150, 60),
        "fc_key.bias": (150,), "fc_value.weight": (150, 60), "fc_value.bias": (150,),
    }  # fmt: skip
    without = GraphTransformerConv(6, 5, 3, bias=False)
    assert list(without.state_dict()) == [name for name in shapes if "weight" in name]
    for fc in (layer.fc_query, layer.fc_key, layer.fc_value):
        bound = math.sqrt(6 / sum(fc.weight.shape))
        assert 0.98 * bound < fc.weight.abs().max().item() <= bound and fc.bias.eq(0).all()


# ---- GraphTransformerLayer -------------------------------------------------------------------------------

FEATS, HEADS = 12, 3


def expected_of(layer, graph, feat, edge_bias=None, masks=None):
    """The layer's formula for one set of features [N, F], with a loop over destinations; masks: dropout masks
    of the attention."""
    p = dict(layer.named_parameters())

    def normed(name, x):
        over = 0 if isinstance(layer.norm1, torch.nn.BatchNorm1d) else 1
        return norm(p, name, x, over) if f"{name}.weight" in p else x

    size = layer.feats // HEADS
    x = normed("norm1", feat) if layer.norm_first else feat
    query, key, value = (
        linear(p, f"conv.fc_{kind}", x).view(-1, HEADS, size) for kind in ("query", "key", "value")
    )
    src, dst = graph.edge_index
    rows = []
    for i in range(graph.num_dst):
        edges = (dst == i).nonzero().squeeze(1)
        score = (query[i] * key[src[edges]]).sum(-1) / math.sqrt(size)
        if edge_bias is not None:
            score = score + edge_bias[edges]
        weight = score.softmax(0)
        if masks is not None:
            weight = weight * masks[edges]
        rows.append((weight[:, :, None] * value[src[edges]]).sum(0).flatten())
    attended = torch.stack(rows) if rows else x[:0]
    h = linear(p, "fc_out", attended) + (feat[: graph.num_dst] if layer.residual else 0)
    if not layer.norm_first:
        h = normed("norm1", h)
    x = normed("norm2", h) if layer.norm_first else h
    h = linear(p, "ffn2", layer.activation(linear(p, "ffn1", x))) + (h if layer.residual else 0)
    return h if layer.norm_first else normed("norm2", h)


def make_layer(dtype=torch.float64, **options):
    layer = GraphTransformerLayer(FEATS, HEADS, allow_zero_in_degree=True, **options).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.2, std=0.4)
    return layer


OPTIONS = [
    dict(zip(("norm", "norm_first", "residual", "bias"), values))
    for values in itertools.product(("batch", "layer", None), (False, True), (True, False), (False, True))
]
GRAPHS = ["random", "duplicates", "isolated", "fewer_destinations", "self_loops"]


@pytest.mark.parametrize("case", range(len(OPTIONS)), ids=lambda k: str(OPTIONS[k]))
def test_layer(case):
    """Graphs, edge biases and precisions take turns."""
    options = dict(OPTIONS[case], activation=F.gelu if case % 5 == 0 else F.relu)
    dtype, tolerance = ((torch.float32, 2e-5), (torch.float64, 1e-10))[case % 2]
    if options["norm"] is not None and dtype == torch.float32:
        tolerance *= 4  # a normalisation divides by what may be small
    graph = make_graph(GRAPHS[case % len(GRAPHS)])
    layer = make_layer(dtype, ffn_feats=None if case % 3 else 7, **options)
    shapes = {"feat": (graph.num_src, FEATS), "edge_bias": (graph.num_edges, HEADS)}
    if case % 4 == 0:
        del shapes["edge_bias"]
    inputs = drawn("cpu", dtype, **shapes)
    out, expected = layer(graph, **inputs), expected_of(layer, graph, **inputs)
    assert out.shape == (graph.num_dst, FEATS) and out.dtype == dtype
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(out, expected, rtol=0.0, atol=tolerance * scale)
    wanted, actual = (gradients([x], dict(layer.named_parameters()) | inputs) for x in (expected, out))
    assert wanted.keys() == actual.keys()
    scale = max(1.0, *(g.abs().max().item() for g in wanted.values()))
    for name, g in wanted.items():  # the gradient of a bias may be a sum of what cancels
        assert (actual[name] - g).abs().max() <= tolerance * scale, name


def test_batch_norm_is_over_all_sets():
    graph, layer = make_graph("random"), make_layer(norm="batch", norm_first=True)
    feat = torch.randn(4, graph.num_src, FEATS, dtype=torch.float64)
    layer(graph, feat)
    torch.testing.assert_close(layer.norm1.running_mean, 0.1 * feat.mean((0, 1)))
    layer.eval()
    torch.testing.assert_close(layer(graph, feat)[2], layer(graph, feat[2]))


def test_sets_are_one_call():
    graph, layer = make_graph("random"), make_layer()
    calls = []

    def attention(graph, query, *args, **kwargs):
        calls.append(query.shape)
        return reference.dot_attention(graph, query, *args, **kwargs)

    layer.conv.attention = attention
    layer(graph, torch.randn(5, graph.num_src, FEATS, dtype=torch.float64))
    assert calls == [(graph.num_dst, 5 * HEADS, FEATS // HEADS)]


def test_attention_dropout():
    graph, layer = make_graph("random"), make_layer(norm="layer", attn_drop=0.4)
    seed = torch.tensor([5])
    layer.conv.attention = lambda *args, **kwargs: reference.dot_attention(*args, **kwargs, generator=seed)
    feat = torch.randn(graph.num_src, FEATS, dtype=torch.float64)
    masks = reference.dropout_mask(int(seed), graph.num_edges, HEADS, 0.4)
    torch.testing.assert_close(layer(graph, feat), expected_of(layer, graph, feat, masks=masks))
    torch.testing.assert_close(layer.eval()(graph, feat), expected_of(layer, graph, feat))


def assert_dropped(ratio):
    """About half of the elements are dropped, the others doubled."""
    kept = (ratio - 2).abs() < 1e-6
    assert (kept | (ratio.abs() < 1e-6)).all() and 0.4 < kept.double().mean() < 0.6


def test_dropout():
    """Dropout acts on what is added to a residual, and inside the feed-forward network: with p = 1 only the
    residuals are left."""
    graph = make_graph("random")
    feat = torch.randn(graph.num_src, FEATS, dtype=torch.float64)
    assert torch.equal(make_layer(norm=None, dropout=1.0)(graph, feat), feat)
    layer = make_layer(norm=None, dropout=0.5)
    torch.testing.assert_close(layer.eval()(graph, feat), expected_of(layer, graph, feat))
    layer.train()
    torch.nn.init.zeros_(layer.ffn2.weight), torch.nn.init.zeros_(layer.ffn2.bias)
    added = layer.fc_out(layer.conv(graph, feat).flatten(1))
    assert_dropped((layer(graph, feat) - feat) / added)
    seen = []
    layer.ffn1.register_forward_hook(lambda module, args, out: seen.append(out.relu()))
    layer.ffn2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layer(graph, feat)
    assert_dropped((seen[1] / seen[0])[seen[0] > 0])


@pytest.mark.filterwarnings("ignore:var")  # the formula takes a variance over no rows
@pytest.mark.parametrize("name", ["no_nodes", "no_edges"])
def test_empty_graphs(name):
    graph, layer = make_graph(name), make_layer(norm="layer")
    feat = torch.randn(max(graph.num_src, graph.num_dst), FEATS, dtype=torch.float64, requires_grad=True)
    if graph.num_dst > graph.num_src:
        graph = graph.reverse()
    out = layer(graph, feat)
    assert out.shape == (graph.num_dst, FEATS)
    torch.testing.assert_close(out, expected_of(layer, graph, feat))
    out.sum().backward()
    assert feat.grad.shape == feat.shape


def test_state():
    layer = GraphTransformerLayer(FEATS, HEADS, norm="layer").eval()
    names = ("conv.fc_query", "conv.fc_key", "conv.fc_value", "fc_out", "ffn1", "ffn2", "norm1", "norm2")
    shapes = {key: tuple(x.shape) for key, x in layer.state_dict().items()}
    biases = {f"{n}.bias" for n in names[3:]}
    assert shapes.keys() == {f"{n}.weight" for n in names} | biases
    assert shapes["ffn1.weight"] == (2 * FEATS, FEATS) and shapes["ffn2.weight"] == (FEATS, 2 * FEATS)
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    changed = {key for key, x in layer.state_dict().items() if not torch.equal(x, before[key])}
    assert changed >= {f"{n}.weight" for n in names[:6]}
    assert "feats=12" in repr(layer)


# ---- EdgeGraphTransformerConv and EdgeGraphTransformerLayer -----------------------------------------------

EDGE_GRAPHS = ["mixed_degrees", "fewer_sources", "fewer_destinations", "isolated", "duplicates", "no_edges"]


def published(conv, graph, h_src, h_dst, edge_attr):
    """The layer as the published code computes it, edge by edge: exponentials of clamped scores, then two
    sums."""
    heads, dim = conv.num_heads, conv.out_feats
    src, dst = graph.edge_index
    q, k, v, e = (
        fc(x).view(-1, heads, dim)
        for fc, x in (
            (conv.fc_query, h_dst), (conv.fc_key, h_src), (conv.fc_value, h_src), (conv.fc_edge, edge_attr)
        )
    )  # fmt: skip
    products = q[dst] * k[src] / dim**0.5 * e
    score = products.sum(-1)
    if conv.clamp is not None:
        score = score.clamp(-conv.clamp, conv.clamp)
    weight = score.exp()
    total = weight.new_zeros(graph.num_dst, heads).index_add(0, dst, weight)
    sums = v.new_zeros(graph.num_dst, heads, dim).index_add(0, dst, weight[:, :, None] * v[src])
    total = torch.where(total == 0, 1.0, total)
    return sums / total[:, :, None], products, weight / total[dst]


@pytest.mark.parametrize("edge_out", [True, False])
@pytest.mark.parametrize("clamp", [0.5, None])
@pytest.mark.parametrize("name", EDGE_GRAPHS)
def test_edge_conv(device, name, clamp, edge_out):
    graph = make_graph(name, device)
    options = dict(clamp=clamp, edge_out=edge_out, allow_zero_in_degree=True)
    conv = EdgeGraphTransformerConv(6, 4, 5, 3, **options).to(device, torch.float64)
    sizes = dict(h_src=(graph.num_src, 6), h_dst=(graph.num_dst, 6), edge_attr=(graph.num_edges, 4))
    inputs = drawn(device, torch.float64, **sizes)
    h_src, h_dst, edge_attr = inputs.values()
    out, *more = conv(graph, (h_src, h_dst), edge_attr, return_attention=True)
    expected = published(conv, graph, **inputs)
    expected = expected if edge_out else (expected[0], expected[2])
    torch.testing.assert_close((out, *more), tuple(expected))
    wanted = inputs | dict(conv.named_parameters())
    found, exact = gradients([out, *more], wanted), gradients(expected, wanted)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-10)
    alone = conv(graph, (h_src, h_dst), edge_attr)
    torch.testing.assert_close(alone[0] if edge_out else alone, out)


def expected_block(block, x, update):
    p = dict(block.named_parameters())
    x = norm(p, "norm1", x + linear(p, "fc_out", update))
    return norm(p, "norm2", x + linear(p, "ffn2", torch.relu(linear(p, "ffn1", x))))


@pytest.mark.parametrize("edge_dim", [None, 4])
@pytest.mark.parametrize("edge_out", [True, False])
def test_edge_layer(device, edge_dim, edge_out):
    graph = make_graph("random", device)
    layer = EdgeGraphTransformerLayer(12, 3, edge_dim, edge_out, allow_zero_in_degree=True)
    layer = layer.to(device, torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.2, std=0.4)
    feat, attr = drawn(device, torch.float64, feat=(50, 12), attr=(400, edge_dim or 12)).values()
    h, e = layer(graph, feat, attr)
    attended, products, _ = published(layer.conv, graph, feat, feat, attr)
    torch.testing.assert_close(h, expected_block(layer.node, feat, attended.flatten(1)))
    if edge_out:
        torch.testing.assert_close(e, expected_block(layer.edge, attr, products.flatten(1)))
    else:
        assert e is attr
    assert layer(graph, feat, attr, return_attention=True)[2].shape == (400, 3)


def test_parameters_of_edge_layer_are_drawn_anew_as_each_module_draws_them():
    """The attention's own initialisation is not that of its linear modules."""
    layer = EdgeGraphTransformerLayer(6, 3, 4, bias=True)
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, 5.0)
    layer.reset_parameters()
    assert not any(parameter.eq(5).any() for parameter in layer.parameters())
    projections = [layer.conv.fc_query, layer.conv.fc_key, layer.conv.fc_value, layer.conv.fc_edge]
    assert not any(linear.bias.any() for linear in projections)


def test_dropout_of_edge_conv():
    graph, feat, attr = make_graph("self_loops"), torch.randn(20, 6), torch.randn(20, 4)
    conv = EdgeGraphTransformerConv(6, 4, 5, 3, attn_drop=1.0)
    assert conv(graph, feat, attr)[0].eq(0).all() and conv.eval()(graph, feat, attr)[0].ne(0).any()
