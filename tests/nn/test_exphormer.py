"""ExphormerAttention, compared with its formula in plain PyTorch."""

import pytest
import torch

from dfgnn import Graph
from dfgnn.nn import ExphormerAttention
from dfgnn.nn.fused import typed as _typed

N, E, T = 40, 300, 3


def plain(layer, edge_index, types, x, type_feat):
    heads = layer.num_heads
    query, key, value = (x @ layer.project.weight.T).view(len(x), 3, heads, -1).unbind(1)
    factor = (type_feat @ layer.edge.weight.T)[types].view(len(types), heads, -1)
    (src, dst), size = edge_index, query.shape[-1]
    score = (query[dst] * key[src] * factor).sum(-1) / size**0.5
    if layer.clamp is not None:
        score = score.clamp(-layer.clamp, layer.clamp)
    score = score.exp()
    total = torch.zeros_like(score[: len(x)]).index_add(0, dst, score)
    return (
        torch.zeros_like(value).index_add(0, dst, value[src] * (score / total[dst]).unsqueeze(-1)).flatten(1)
    )


def made(device, dtype=torch.float64, size=6, heads=2, type_dim=None, clamp=5.0, sharp=1.0):
    layer = ExphormerAttention(size * heads, heads, type_dim, clamp).to(device, dtype)
    edge_index, types = torch.randint(N, (2, E)).to(device), torch.randint(T, (E,)).to(device)
    edge_index[1][edge_index[1] == 3] = 4  # a node without in-edges
    x = sharp * torch.randn(N, size * heads, device=device, dtype=dtype)
    type_feat = torch.randn(T, layer.type_dim, device=device, dtype=dtype)
    graph = layer.typed_graph(edge_index, types, N, T)
    return layer, graph, (edge_index, types), x.requires_grad_(), type_feat.requires_grad_()


def gradients(out, layer, *inputs):
    factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return torch.autograd.grad((out * factor).sum(), (*layer.parameters(), *inputs))


def assert_same(out, want, layer, *inputs, **tolerance):
    """Results and gradients."""
    torch.testing.assert_close(out, want, **tolerance)
    found, expected = (gradients(x, layer, *inputs) for x in (out, want))
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.fixture
def calls(count_calls):
    return count_calls(_typed._Typed, "forward")


@pytest.mark.parametrize("size", [4, 6, 16])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("clamp, sharp", [(5.0, 1.0), (0.3, 1.0), (5.0, 8.0), (None, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_formula(device, dtype, size, heads, clamp, sharp, calls):
    layer, graph, edges, x, type_feat = made(device, dtype, size, heads, 5, clamp, sharp)
    out, want = layer(graph, x, type_feat), plain(layer, *edges, x, type_feat)
    tolerance = (
        dict(rtol=1e-9, atol=1e-9) if dtype is torch.float64 else dict(rtol=2e-3, atol=2e-4 * sharp**2)
    )
    assert not out[3].any() and len(calls) == 1
    assert_same(out, want, layer, x, type_feat, **tolerance)
    if clamp == 0.3:  # some scores exceed this clamp: without it the result is another
        loose = ExphormerAttention(size * heads, heads, 5, None).to(device, dtype)
        loose.load_state_dict(layer.state_dict())
        assert not torch.allclose(loose(graph, x, type_feat), out, rtol=1e-2)


@pytest.mark.parametrize("fixed", [False, True])
def test_heads_that_kernels_want_padded(monkeypatch, fixed):
    """Heads are padded as on a GPU, where kernels load 16 bytes at a time."""
    monkeypatch.setattr(_typed.Rows, "on", lambda _, heads, size, *__: _typed.Rows(heads, size, 3))
    layer, graph, edges, x, type_feat = made("cpu", heads=3)
    mask = torch.ones(E, dtype=torch.bool) if fixed else None
    out = layer(layer.typed_graph(*edges, N, T, edge_mask=mask), x, type_feat)
    assert_same(out, plain(layer, *edges, x, type_feat), layer, x, type_feat)


def test_a_graph_of_fixed_capacity(device):
    layer, graph, edges, x, type_feat = made(device)
    (edge_index, types), want = edges, layer(graph, x, type_feat)
    padded = torch.cat([edge_index[:, :100], edge_index.new_full((2, 50), N - 1), edge_index[:, 100:]], 1)
    kinds = torch.cat([types[:100], types.new_zeros(50), types[100:]])
    mask = torch.ones(E + 50, dtype=torch.bool, device=device)
    mask[100:150] = False
    graph = layer.typed_graph(padded, kinds, N, T, edge_mask=mask)
    assert_same(layer(graph, x, type_feat), want, layer, x, type_feat)


def test_gradients_of_some_and_in_place(device, calls):
    layer, graph, edges, x, type_feat = made(device)
    layer.project.requires_grad_(False)
    (alone,) = torch.autograd.grad(layer(graph, x.detach(), type_feat).mul_(2).sum(), type_feat)
    both = torch.autograd.grad(2 * layer(graph, x, type_feat).sum(), (x, type_feat))
    torch.testing.assert_close(alone, both[1])
    with torch.no_grad():
        torch.testing.assert_close(layer(graph, x, type_feat), plain(layer, *edges, x, type_feat))
    assert len(calls) == 3


def test_second_derivatives():
    layer = ExphormerAttention(4, 2).double()
    edge_index, types = torch.randint(5, (2, 12)), torch.randint(2, (12,))
    graph = layer.typed_graph(edge_index, types, 5, 2)
    inputs = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 2)]
    assert torch.autograd.gradcheck(lambda *args: layer(graph, *args), inputs)
    assert torch.autograd.gradgradcheck(lambda *args: layer(graph, *args), inputs, fast_mode=True)


def test_compiled():
    layer, graph, edges, x, type_feat = made("cpu", torch.float32)
    want = layer(graph, x, type_feat)
    got = torch.compile(layer, backend="aot_eager", fullgraph=True)(graph, x, type_feat)
    assert_same(got, want, layer, x, type_feat)


def test_autocast_and_half(device, calls):
    layer, graph, edges, x, type_feat = made(device, torch.float32, 8)
    want = layer(graph, x, type_feat)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = layer(graph, x, type_feat)
    assert got.dtype is torch.bfloat16 and len(calls) == 1
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)
    got = layer.bfloat16()(graph, x.bfloat16(), type_feat.bfloat16())
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)
    assert all(g.isfinite().all() for g in gradients(got, layer)) and len(calls) == 2


def test_bad_input():
    with pytest.raises(ValueError, match="feats: expected a multiple of num_heads = 4, got 6"):
        ExphormerAttention(6, 4)
    with pytest.raises(ValueError, match="clamp: expected a number above 0"):
        ExphormerAttention(8, 4, clamp=0)
    layer, graph, edges, x, type_feat = made("cpu", torch.float32)
    edge_index, types = edges
    with pytest.raises(TypeError, match=r"graph: expected a dfgnn.Graph, got Tensor"):
        layer(edge_index, x, type_feat)
    with pytest.raises(ValueError, match=r"feat: expected shape \[any, 12\], got \[40, 11\]"):
        layer(graph, x[:, 1:], type_feat)
    with pytest.raises(ValueError, match="graph: expected 80 sources, one for each type and node, and 40"):
        layer(graph, x, type_feat[1:])
    with pytest.raises(ValueError, match=r"edge_type: expected shape \[300\], got \[299\]"):
        layer.typed_graph(edge_index, types[1:], N, T)
    with pytest.raises(ValueError, match=r"edge_type: expected values in \[0, 2\)"):
        layer.typed_graph(edge_index, types, N, 2)
    with pytest.raises(ValueError, match=r"edge_index\[0\]: expected values in \[0, 30\)"):
        layer.typed_graph(edge_index, types, 30, T)
    with pytest.raises(ValueError, match=r"edge_mask: expected bool \[300\], got torch.int64 \[300\]"):
        layer.typed_graph(edge_index, types, N, T, edge_mask=types)
    assert isinstance(graph, Graph) and "num_heads=2" in repr(layer)


@pytest.mark.parametrize("hung", ["hook", "weight_norm", "bias", "replaced"])
def test_what_hangs_on_the_projection_is_called(device, hung, calls):
    layer, graph, edges, x, type_feat = made(device)
    feats, want = layer.feats, 2 * layer.project.weight.detach()
    if hung == "hook":
        layer.project.register_forward_hook(lambda module, args, out: 2 * out)
    elif hung == "weight_norm":  # which makes the weight anew in a hook before forward
        torch.nn.utils.weight_norm(layer.project)
        layer.project.weight_g.data.mul_(2)
    elif hung == "bias":
        layer.project = torch.nn.Linear(feats, 3 * feats).to(x)
        want = layer.project.weight.detach()
    else:
        layer.project = torch.nn.Sequential(layer.project, torch.nn.Linear(3 * feats, 3 * feats).to(x))
        want = layer.project[1].weight.detach() @ layer.project[0].weight.detach()
    plain_one = ExphormerAttention(feats, layer.num_heads).to(x)
    plain_one.edge = layer.edge
    bias = None
    if hung in ("bias", "replaced"):  # a bias acts as the weight of one more feature, which is 1
        bias = (layer.project if hung == "bias" else layer.project[1]).bias.detach()
    for _ in range(2):  # twice, because weight_norm makes a new weight at each step
        out = layer(graph, x, type_feat)
        out.sum().backward()
    query = x.detach() if bias is None else torch.cat([x.detach(), torch.ones_like(x[:, :1])], 1)
    plain_one.project.weight = torch.nn.Parameter(
        want if bias is None else torch.cat([want, bias[:, None]], 1)
    )
    torch.testing.assert_close(out, plain(plain_one, *edges, query, type_feat))
    assert not calls


def test_types_in_few_bits(device):
    layer, graph, edges, x, type_feat = made(device)
    edge_index, types, x = 10 * edges[0], edges[1], x.detach().repeat_interleave(10, 0)  # ids beyond 255
    out = [
        layer(layer.typed_graph(edge_index, types.to(dtype), 10 * N, T), x, type_feat)
        for dtype in (torch.int64, torch.uint8, torch.int32)
    ]
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])
    with pytest.raises(TypeError, match=r"edge_type: expected integers, got torch.float32"):
        layer.typed_graph(edge_index, types.float(), 10 * N, T)
