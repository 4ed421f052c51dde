"""GraphTransformerConv, compared with the same formula written with the reference function."""

import copy
import math

import pytest
import torch
from graphs import make_graph

from dfgnn import reference
from dfgnn.functional import EdgeTerm
from dfgnn.nn import GraphTransformerConv

GRAPHS = [
    "no_nodes",
    "duplicates",
    "super_row",
    "fewer_sources",
    "fewer_destinations",
    "mixed_degrees",
    "isolated",
]


def expected_of(layer, graph, h_src, h_dst, **options):
    def project(fc, h):
        projected = h @ fc.weight.T + (0 if fc.bias is None else fc.bias)
        return projected.view(len(h), layer.num_heads, layer.out_feats)

    query, key, value = (
        project(layer.fc_query, h_dst),
        project(layer.fc_key, h_src),
        project(layer.fc_value, h_src),
    )
    return reference.dot_attention(graph, query, key, value, **options)


def gradients(layer, outputs, inputs):
    layer.zero_grad()
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]
    wanted = {**dict(layer.named_parameters()), **inputs}
    return dict(zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), grads)))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float64, 1e-10)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_matches_the_formula(device, name, bias, dtype, tolerance):
    graph = make_graph(name, device)
    layer = GraphTransformerConv((6, 9), 5, 3, bias=bias, allow_zero_in_degree=True).to(device, dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    inputs = {
        "h_src": torch.randn(graph.num_src, 6),
        "h_dst": torch.randn(graph.num_dst, 9),
        "edge_bias": torch.randn(graph.num_edges, 3),
        "edge_weight": torch.rand(graph.num_edges),
    }
    inputs = {k: x.to(device, dtype).requires_grad_() for k, x in inputs.items()}
    h_src, h_dst, edge_bias, edge_weight = inputs.values()
    out, attention = layer(graph, (h_src, h_dst), edge_bias, edge_weight, return_attention=True)
    assert out.shape == (graph.num_dst, 3, 5) and attention.shape == (graph.num_edges, 3, 1)
    torch.testing.assert_close(layer(graph, (h_src, h_dst), edge_bias, edge_weight), out)
    actual = {"out": out, "attention": attention[..., 0], **gradients(layer, [out, attention], inputs)}
    # The reference is float64: two float32 sums over many edges would differ by the errors of both.
    exact = copy.deepcopy(layer).double()
    inputs = {k: x.detach().double().requires_grad_() for k, x in inputs.items()}
    options = {**inputs, "return_attention": True}
    options["bias"], options["weight"] = options.pop("edge_bias"), options.pop("edge_weight")
    expected = expected_of(exact, graph, options.pop("h_src"), options.pop("h_dst"), **options)
    wanted = [expected[0], expected[1][..., None]]
    expected = {"out": expected[0], "attention": expected[1], **gradients(exact, wanted, inputs)}
    for key, x in expected.items():
        # The gradient of the keys' bias is 0 by theory, a sum of cancelling terms of the size of those of the
        # weight's gradient: hence the weight's scale.
        sizes = (x, expected[key.replace("bias", "weight")])
        scale = max([1.0] + [y.abs().max().item() for y in sizes if y.numel()])
        torch.testing.assert_close(
            actual[key].double(), x, rtol=0.0, atol=tolerance * scale, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("edge_dim", [2, 7])  # fewer than a head has, and more
@pytest.mark.parametrize("name", ["mixed_degrees", "fewer_sources", "no_edges"])
def test_edge_features(device, name, edge_dim):
    graph = make_graph(name, device)
    layer = GraphTransformerConv(6, 5, 3, allow_zero_in_degree=True, edge_dim=edge_dim)
    layer = layer.to(device, torch.float64)
    double = dict(dtype=torch.float64, device=device)
    inputs = {
        "h_src": torch.randn(graph.num_src, 6, **double),
        "h_dst": torch.randn(graph.num_dst, 6, **double),
        "edge_attr": torch.randn(graph.num_edges, edge_dim, **double),
    }
    inputs = {k: x.requires_grad_() for k, x in inputs.items()}
    h_src, h_dst, edge_attr = inputs.values()
    result = layer(graph, (h_src, h_dst), edge_attr=edge_attr, return_attention=True)
    edge_feat = (edge_attr @ layer.fc_edge.weight.T).view(-1, 3, 5)
    edge = EdgeTerm(edge_feat, edge_feat)
    expected = expected_of(layer, graph, h_src, h_dst, edge=edge, return_attention=True)
    expected = expected[0], expected[1][..., None]
    torch.testing.assert_close(result, expected)
    found, wanted = (gradients(layer, list(x), inputs) for x in (result, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer(graph, (h_src, h_dst), edge_attr=edge_attr), expected[0])


def test_dropout(device):
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


def test_state_and_initialisation():
    layer = GraphTransformerConv((60, 90), 50, 3)
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    assert shapes == {
        "fc_query.weight": (150, 90), "fc_query.bias": (150,), "fc_key.weight": (150, 60),
        "fc_key.bias": (150,), "fc_value.weight": (150, 60), "fc_value.bias": (150,),
    }  # fmt: skip
    assert list(GraphTransformerConv(6, 5, 3, bias=False).state_dict()) == [
        k for k in shapes if "weight" in k
    ]
    for fc in (layer.fc_query, layer.fc_key, layer.fc_value):
        bound = math.sqrt(6 / sum(fc.weight.shape))
        assert 0.98 * bound < fc.weight.abs().max().item() <= bound and fc.bias.eq(0).all()
