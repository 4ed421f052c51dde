"""Sets of features on one graph, [B, N, H, D]: as one call for each, with all gradients."""

import pytest
import torch
from graphs import make_graph

from dfgnn import functional, reference

B, H, D = 3, 2, 4


def tensors(graph, *names, generator, device):
    """name -> shape by its dimensions: b, n (sources), m (destinations), e, h, d, k (attributes)."""
    sizes = dict(b=B, n=graph.num_src, m=graph.num_dst, e=graph.num_edges, h=H, d=D, k=3)
    return {
        name: torch.randn([sizes[x] for x in dims], dtype=torch.float64, generator=generator).to(device)
        for name, dims in (text.split(":") for text in names)
    }


def scores(q, k, e, w):
    """Of heads that w tells apart."""
    score = (q * k * w).sum(-1)
    return score.tanh() if e is None else score.tanh() + e.sum(-1)


# function, tensors, options. Those without b are alike for all.
CASES = {
    "gat": ("gat_attention", "feat:bnhd alpha_src:bnh alpha_dst:bmh", {}),
    "gat shared": ("gat_attention", "feat:bnhd alpha_src:nh alpha_dst:mh edge_bias:eh out_bias:hd", {}),
    "gat edges": (
        "gat_attention",
        "feat:bnhd alpha_src:bnh alpha_dst:bmh edge_bias:beh edge_gate:beh edge_weight:e edge_feat:behd "
        "out_bias:bhd",
        {},
    ),
    "gat without sources": ("gat_attention", "feat:bnhd alpha_dst:bmh edge_weight:eh", {"alpha_src": None}),
    "gatv2": ("gatv2_attention", "x_src:bnhd x_dst:bmhd attn:hd edge_feat:ehd edge_gate:e", {}),
    "gatv2 vectors": ("gatv2_attention", "x_src:bnhd x_dst:bmhd attn:bhd edge_bias:eh", {}),
    "dot": ("dot_attention", "query:bmhd key:bnhd value:bnhd", {"scale": 0.7}),
    "dot edges": ("dot_attention", "query:bmhd key:nhd value:bnhd edge_feat:behd edge_weight:beh", {}),
    "dot projected": (
        "dot_attention",
        "query:bmhd key:bnhd value:bnhd edge_attr:ek",
        {"edge_proj": "hd,k", "edge_proj_bias": "hd"},
    ),
    "agnn": ("agnn_attention", "x_src:bnhd x_dst:bmhd", {"beta": 0.5}),
    "flex": ("flex_attention", "query:bmhd key:bnhd value:bnhd", {"score_fn": scores}),
    "flex edges": ("flex_attention", "query:bmhd key:bnhd value:bnhd edge_feat:ehd", {"score_fn": scores}),
    "sddmm": ("sddmm", "query:bmhd key:bnhd", {}),
    "spmm": ("spmm", "feat:bnhd edge_weight:beh", {}),
    "spmm shared": ("spmm", "feat:bnhd edge_weight:e", {}),
}


def make(name, graph, device):
    generator = torch.Generator().manual_seed(0)
    function, text, options = CASES[name]
    inputs = tensors(graph, *text.split(), generator=generator, device=device)
    has_batch = {part.split(":")[0] for part in text.split() if ":b" in part}
    options = dict(options)
    if "projected" in name:
        for key, shape in (("edge_proj", (H * D, 3)), ("edge_proj_bias", (H * D,))):
            inputs[key] = torch.randn(shape, dtype=torch.float64, generator=generator).to(device)
            del options[key]
    if "flex" in name:
        w = torch.randn(H, D, dtype=torch.float64, generator=generator).to(device)
        options["params"] = (w,)
    return function, inputs, has_batch, options


def gradients(out, inputs):
    outs = out if isinstance(out, tuple) else (out,)
    return torch.autograd.grad(sum(x.sin().sum() for x in outs), list(inputs.values()))


@pytest.mark.parametrize("module", [functional, reference], ids=["functional", "reference"])
@pytest.mark.parametrize("shape", ["random", "fewer_sources"])
@pytest.mark.parametrize("name", CASES)
def test_as_one_call_for_each(device, name, shape, module):
    if module is reference and "projected" in name:
        pytest.skip("the reference has edge_feat alone")
    graph = make_graph(shape, device)
    function, inputs, has_batch, options = make(name, graph, device)
    function = getattr(module, function)
    inputs = {n: x.requires_grad_() for n, x in inputs.items()}
    if "sddmm" not in name and "spmm" not in name:
        options["return_attention"] = True
    found = function(graph, **inputs, **options)
    each = [
        function(graph, **{n: x[k] if n in has_batch else x for n, x in inputs.items()}, **options)
        for k in range(B)
    ]
    pair = isinstance(found, tuple)
    expected = tuple(torch.stack(xs) for xs in zip(*each)) if pair else torch.stack(each)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("beta", [(1,), (H, 1), (1, H, D), (B, 1, H, 1)], ids=str)
def test_beta(device, beta):
    graph = make_graph("random", device)
    x = torch.randn(B, graph.num_src, H, D, dtype=torch.float64, device=device)
    beta = torch.rand(beta, dtype=torch.float64, device=device)
    betas = beta if beta.dim() == 4 else [beta] * B
    each = [functional.agnn_attention(graph, x[k], beta=betas[k]) for k in range(B)]
    torch.testing.assert_close(functional.agnn_attention(graph, x, beta=beta), torch.stack(each))


def test_kinds_of_edges(device):
    graph = make_graph("random", device)
    x = torch.randn(B, graph.num_src, H, D, dtype=torch.float64, device=device)
    options = {
        "edge_type": torch.arange(graph.num_edges, device=device) % 3,
        "edge_table": torch.randn(3, H, D, dtype=torch.float64, device=device),
    }
    each = [functional.dot_attention(graph, x[k], x[k], x[k], **options) for k in range(B)]
    torch.testing.assert_close(functional.dot_attention(graph, x, x, x, **options), torch.stack(each))


def test_masks(device):
    graph = make_graph("random", device)
    x = torch.randn(B, graph.num_src, H, D, dtype=torch.float64, device=device)
    for shape in ((graph.num_edges,), (graph.num_edges, H), (B, graph.num_edges, H), (B, graph.num_edges, 1)):
        mask = torch.rand(shape, device=device) < 0.5
        each = [
            functional.dot_attention(
                graph, x[k], x[k], x[k], edge_mask=mask[k].expand(-1, H) if mask.dim() == 3 else mask
            )
            for k in range(B)
        ]
        found = functional.dot_attention(graph, x, x, x, edge_mask=mask)
        torch.testing.assert_close(found, torch.stack(each))


def test_dropout_is_another_for_each_set(device):
    graph = make_graph("random", device)
    x = torch.randn(1, graph.num_src, H, D, device=device).expand(B, -1, -1, -1)
    out, attention = functional.dot_attention(graph, x, x, x, dropout_p=0.5, return_attention=True)
    assert not torch.equal(attention[0], attention[1])
    kept = (attention > 0).double().mean((1, 2))
    assert ((kept - 0.5).abs() < 0.2).all()


def test_in_place_and_second_order(device):
    graph = make_graph("random", device)
    x = torch.randn(B, graph.num_src, H, D, dtype=torch.float64, device=device, requires_grad=True)

    def penalty(attention):
        (grad,) = torch.autograd.grad(attention().square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    found = penalty(lambda: functional.dot_attention(graph, x, x, x).relu_())
    expected = penalty(lambda: torch.stack([functional.dot_attention(graph, y, y, y).relu() for y in x]))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"alpha_src": (B + 1, 50, H)}, r"gat_attention: alpha_src: expected a batch of 3"),
        ({"edge_feat": (2, B, 450, H, D)}, r"gat_attention: edge_feat: expected a batch of 3"),
        ({"feat": (B, 49, H, D)}, r"gat_attention: feat: expected shape"),
    ],
)
def test_errors(change, message):
    graph = make_graph("random")
    shapes = {"feat": (B, 50, H, D), "alpha_src": (B, 50, H), "alpha_dst": (50, H)} | change
    inputs = {n: torch.randn(shape) for n, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        functional.gat_attention(graph, **inputs)
