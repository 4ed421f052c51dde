"""GraphTransformerLayer, compared with the same formula in plain PyTorch."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from graphs import make_graph

from dfgnn import reference
from dfgnn.nn import GraphTransformerLayer

FEATS, HEADS = 12, 3


def expected_of(layer, graph, feat, edge_bias=None, masks=None):
    """The layer's formula for one set of features [N, F], with a loop over destinations; masks: dropout masks
    of the attention."""
    p = dict(layer.named_parameters())

    def linear(name, x):
        bias = p.get(f"{name}.bias")
        return x @ p[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(name, x):
        if f"{name}.weight" not in p:
            return x
        over = 0 if isinstance(layer.norm1, torch.nn.BatchNorm1d) else 1
        mean, var = x.mean(over, keepdim=True), x.var(over, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    size = layer.feats // HEADS
    x = norm("norm1", feat) if layer.norm_first else feat
    query, key, value = (
        linear(f"conv.fc_{kind}", x).view(-1, HEADS, size) for kind in ("query", "key", "value")
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
    h = linear("fc_out", attended) + (feat[: graph.num_dst] if layer.residual else 0)
    if not layer.norm_first:
        h = norm("norm1", h)
    x = norm("norm2", h) if layer.norm_first else h
    h = linear("ffn2", layer.activation(linear("ffn1", x))) + (h if layer.residual else 0)
    return h if layer.norm_first else norm("norm2", h)


def make_layer(dtype=torch.float64, **options):
    layer = GraphTransformerLayer(FEATS, HEADS, allow_zero_in_degree=True, **options).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.2, std=0.4)
    return layer


def gradients(layer, out, inputs):
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    wanted = {**dict(layer.named_parameters()), **inputs}
    grads = torch.autograd.grad(out, list(wanted.values()), grad, allow_unused=True)
    return {name: g for name, g in zip(wanted, grads) if g is not None}


def assert_close(actual, expected, tolerance, what):
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual, expected, rtol=0.0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}"
    )


OPTIONS = [
    dict(zip(("norm", "norm_first", "residual", "bias"), values))
    for values in itertools.product(("batch", "layer", None), (False, True), (True, False), (False, True))
]
GRAPHS = ["random", "duplicates", "isolated", "fewer_destinations", "self_loops"]


@pytest.mark.parametrize("case", range(len(OPTIONS)), ids=lambda k: str(OPTIONS[k]))
def test_matches_the_formula(case):
    """Graphs, edge biases and precisions take turns."""
    options = dict(OPTIONS[case], activation=F.gelu if case % 5 == 0 else F.relu)
    dtype, tolerance = ((torch.float32, 2e-5), (torch.float64, 1e-10))[case % 2]
    if options["norm"] is not None and dtype == torch.float32:
        tolerance *= 4  # a normalisation divides by what may be small
    graph = make_graph(GRAPHS[case % len(GRAPHS)])
    layer = make_layer(dtype, ffn_feats=None if case % 3 else 7, **options)
    inputs = {"feat": torch.randn(graph.num_src, FEATS), "edge_bias": torch.randn(graph.num_edges, HEADS)}
    inputs = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    if case % 4 == 0:
        del inputs["edge_bias"]
    out = layer(graph, inputs["feat"], inputs.get("edge_bias"))
    expected = expected_of(layer, graph, inputs["feat"], inputs.get("edge_bias"))
    assert out.shape == (graph.num_dst, FEATS) and out.dtype == dtype
    assert_close(out, expected, tolerance, "out")
    wanted = gradients(layer, expected, inputs)
    actual = gradients(layer, out, inputs)
    assert wanted.keys() == actual.keys()
    scale = max(1.0, *(g.abs().max().item() for g in wanted.values()))
    for name, g in wanted.items():  # the gradient of a bias may be a sum of what cancels
        assert (actual[name] - g).abs().max() <= tolerance * scale, name


# ---- sets of features on one graph -----------------------------------------------------------------------


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


# ---- options ---------------------------------------------------------------------------------------------


def test_attention_dropout():
    graph, layer = make_graph("random"), make_layer(norm="layer", attn_drop=0.4)
    seed = torch.tensor([5])
    layer.conv.attention = lambda *args, **kwargs: reference.dot_attention(*args, **kwargs, generator=seed)
    feat = torch.randn(graph.num_src, FEATS, dtype=torch.float64)
    masks = reference.dropout_mask(int(seed), graph.num_edges, HEADS, 0.4)
    torch.testing.assert_close(layer(graph, feat), expected_of(layer, graph, feat, masks=masks))
    torch.testing.assert_close(layer.eval()(graph, feat), expected_of(layer, graph, feat))


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
    ratio = (layer(graph, feat) - feat) / added
    kept = (ratio - 2).abs() < 1e-6
    assert (kept | (ratio.abs() < 1e-6)).all() and 0.4 < kept.double().mean() < 0.6
    seen = []
    layer.ffn1.register_forward_hook(lambda module, args, out: seen.append(out.relu()))
    layer.ffn2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layer(graph, feat)
    ratio = (seen[1] / seen[0])[seen[0] > 0]
    kept = (ratio - 2).abs() < 1e-6
    assert (kept | (ratio == 0)).all() and 0.4 < kept.double().mean() < 0.6


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


# ---- state and errors ------------------------------------------------------------------------------------


def test_state():
    layer = GraphTransformerLayer(FEATS, HEADS, norm="layer").eval()
    names = ("conv.fc_query", "conv.fc_key", "conv.fc_value", "fc_out", "ffn1", "ffn2", "norm1", "norm2")
    shapes = {key: tuple(x.shape) for key, x in layer.state_dict().items()}
    assert shapes.keys() == {f"{n}.{x}" for n in names for x in ("weight", "bias")} - {
        f"{n}.bias" for n in names[:3]
    }
    assert shapes["ffn1.weight"] == (2 * FEATS, FEATS) and shapes["ffn2.weight"] == (FEATS, 2 * FEATS)
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    changed = {key for key, x in layer.state_dict().items() if not torch.equal(x, before[key])}
    assert changed >= {f"{n}.weight" for n in names[:6]}
    assert "feats=12" in repr(layer)
