"""EdgeGraphTransformerConv and its layer, compared with the published formulas in plain PyTorch."""

import pytest
import torch
from graphs import make_graph

from dfgnn.nn import EdgeGraphTransformerConv, EdgeGraphTransformerLayer

GRAPHS = ["mixed_degrees", "fewer_sources", "fewer_destinations", "isolated", "duplicates", "no_edges"]


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


def gradients(outs, leaves):
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) for x in outs]
    return torch.autograd.grad(outs, leaves, grads)


@pytest.mark.parametrize("edge_out", [True, False])
@pytest.mark.parametrize("clamp", [0.5, None])
@pytest.mark.parametrize("name", GRAPHS)
def test_conv(device, name, clamp, edge_out):
    graph = make_graph(name, device)
    options = dict(clamp=clamp, edge_out=edge_out, allow_zero_in_degree=True)
    conv = EdgeGraphTransformerConv(6, 4, 5, 3, **options).to(device, torch.float64)
    sizes = (graph.num_src, 6), (graph.num_dst, 6), (graph.num_edges, 4)
    inputs = [torch.randn(s, dtype=torch.float64, device=device).requires_grad_() for s in sizes]
    h_src, h_dst, edge_attr = inputs
    out, *more = conv(graph, (h_src, h_dst), edge_attr, return_attention=True)
    expected = published(conv, graph, h_src, h_dst, edge_attr)
    expected = expected if edge_out else (expected[0], expected[2])
    torch.testing.assert_close((out, *more), tuple(expected))
    leaves = [*inputs, *conv.parameters()]
    found, wanted = gradients([out, *more], leaves), gradients(expected, leaves)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    alone = conv(graph, (h_src, h_dst), edge_attr)
    torch.testing.assert_close(alone[0] if edge_out else alone, out)


def expected_block(block, x, update, p):
    def linear(name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(name, x):
        mean, var = x.mean(0, keepdim=True), x.var(0, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    x = norm("norm1", x + linear("fc_out", update))
    return norm("norm2", x + linear("ffn2", torch.relu(linear("ffn1", x))))


@pytest.mark.parametrize("edge_dim", [None, 4])
@pytest.mark.parametrize("edge_out", [True, False])
def test_layer(device, edge_dim, edge_out):
    graph = make_graph("random", device)
    layer = EdgeGraphTransformerLayer(12, 3, edge_dim, edge_out, allow_zero_in_degree=True)
    layer = layer.to(device, torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.2, std=0.4)
    feat = torch.randn(50, 12, dtype=torch.float64, device=device).requires_grad_()
    attr = torch.randn(400, edge_dim or 12, dtype=torch.float64, device=device).requires_grad_()
    h, e = layer(graph, feat, attr)
    attended, products, _ = published(layer.conv, graph, feat, feat, attr)
    expected = expected_block(layer.node, feat, attended.flatten(1), dict(layer.node.named_parameters()))
    torch.testing.assert_close(h, expected)
    if edge_out:
        p = dict(layer.edge.named_parameters())
        torch.testing.assert_close(e, expected_block(layer.edge, attr, products.flatten(1), p))
    else:
        assert e is attr
    assert layer(graph, feat, attr, return_attention=True)[2].shape == (400, 3)


def test_parameters_are_drawn_anew_as_each_module_draws_them():
    """The attention's own initialisation is not that of its linear modules."""
    layer = EdgeGraphTransformerLayer(6, 3, 4, bias=True)
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, 5.0)
    layer.reset_parameters()
    assert not any(parameter.eq(5).any() for parameter in layer.parameters())
    projections = [layer.conv.fc_query, layer.conv.fc_key, layer.conv.fc_value, layer.conv.fc_edge]
    assert not any(linear.bias.any() for linear in projections)


def test_dropout():
    graph, feat, attr = make_graph("self_loops"), torch.randn(20, 6), torch.randn(20, 4)
    conv = EdgeGraphTransformerConv(6, 4, 5, 3, attn_drop=1.0)
    assert conv(graph, feat, attr)[0].eq(0).all() and conv.eval()(graph, feat, attr)[0].ne(0).any()
