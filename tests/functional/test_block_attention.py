"""Attention among all pairs within blocks: numbers, derivatives, offsets. What every function promises is in
test_every_function.py; attention of the force fields PET and DPA1, in tests/bench/test_force_fields.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from covering import exhaustive
from torch import library

from dfgnn import Graph, functional, reference
from dfgnn.runtime.cuda_graphs import capturing

# The error may be twice that of the plain computation in the same precision, or this.
LEAST = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SIZES = {
    "short": ([3, 0, 1, 63, 64, 65, 5], None),
    "pairs": ([3, 0, 1, 64, 65, 5], [0, 4, 1, 130, 300, 2]),
    "long": ([511, 20, 130], None),
    "few queries": ([1] * 13, [37, 0, 90] * 4 + [5]),
}


def offsets_of(sizes, device="cpu", dtype=torch.int64):
    return F.pad(torch.tensor(sizes, dtype=dtype).cumsum(0), (1, 0)).to(device, dtype)


def make(sizes, key_sizes, heads, dim, value_dim, dtype, device, options):
    """Tensors by name, with options also key_bias and sink; and the offsets by name."""
    generator = torch.Generator().manual_seed(len(sizes))
    acc = torch.promote_types(dtype, torch.float32)

    def random(*shape, of=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, of)

    rows, keys = sum(sizes), sum(sizes if key_sizes is None else key_sizes)
    tensors = dict(query=random(rows, heads, dim), key=random(keys, heads, dim))
    tensors["value"] = random(keys, heads, value_dim)
    if options:
        tensors |= dict(key_bias=random(keys, heads, of=acc), sink=random(heads, of=acc))
        tensors["key_bias"][keys // 3 : keys // 3 + 4] = -math.inf
    of_keys = None if key_sizes is None else offsets_of(key_sizes, device)
    return tensors, dict(offsets=offsets_of(sizes, device), key_offsets=of_keys)


def results(module, tensors, more, dtype=None):
    """What the function returns, its gradients, and those of a linear function of these. more: the offsets
    and options."""
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()}
    found = module.block_attention(**leaves, **more)
    found = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(2)

    def weighted(every):
        weights = (torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in every)
        return sum((x * w).sum() for x, w in zip(every, weights))

    grads = torch.autograd.grad(weighted(found), [*leaves.values()], create_graph=True)
    second = torch.autograd.grad(weighted(grads), [*leaves.values()], materialize_grads=True)
    return [x.detach().double() for x in (*found, *grads, *second)]


def compared(tensors, more):
    """For each result ours, the one in float64, and that of plain PyTorch in the tensors' dtype."""
    found = results(functional, tensors, more)
    right, plain = (results(reference, tensors, more, dtype) for dtype in (torch.float64, None))
    return zip(found, right, plain, strict=True)


def error(found, right):
    scale = right.abs().max() if right.numel() else 0
    return float((found - right).abs().max() / max(float(scale), 1e-6)) if right.numel() else 0.0


@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", LEAST)
def test_numbers_and_two_derivatives(device, dtype, name, options):
    sizes, key_sizes = SIZES[name]
    heads, dim, value_dim = (3, 33, 8) if options else (1, 7, 16)
    tensors, offsets = make(sizes, key_sizes, heads, dim, value_dim, dtype, device, options)
    if not options:
        offsets["offsets"] = offsets["offsets"].int()
    for k, (found, whole, rough) in enumerate(compared(tensors, offsets)):
        # The gradients of a sink are sums over all rows, which nearly cancel.
        least = LEAST[dtype] * (1 if whole.dim() > 1 else 32)
        assert error(found, whole) <= max(2 * error(rough, whole), least), k


@pytest.mark.parametrize("dim", [1, 64, 128, 300])
@pytest.mark.parametrize("scale", [None, -0.1])
def test_sizes_of_heads_and_scales(device, dim, scale):
    if device == "cuda" and dim > 128:
        pytest.skip("CUDA refuses them")
    tensors, offsets = make(*SIZES["pairs"], 2, dim, 1, torch.float32, device, True)
    for found, whole, rough in compared(tensors, dict(offsets, scale=scale)):
        least = 1e-5 if whole.dim() > 1 else 1e-4
        assert error(found, whole) <= max(4 * error(rough, whole), least)


@pytest.mark.parametrize("dtype", LEAST)
def test_biases_that_are_extreme(device, dtype):
    """Keys that are hidden from a whole block, and biases of 10,000 and -10,000."""
    tensors, offsets = make([70, 5, 130], None, 2, 16, 16, dtype, device, False)
    acc = torch.promote_types(dtype, torch.float32)
    bias = torch.zeros(205, dtype=acc, device=device)
    bias[70:75] = -math.inf
    bias[75:100], bias[100:] = 1e4, -1e4
    found = list(compared({**tensors, "key_bias": bias}, offsets))
    for k, (x, whole, rough) in enumerate(found):
        assert error(x, whole) <= max(4 * error(rough, whole), 4 * LEAST[dtype]), k
    assert not any(found[k][0][70:75].any() for k in (0, 1, 3))


def test_a_scale_that_is_learned(device):
    tensors, offsets = make([5, 0, 9], None, 2, 16, 16, torch.float64, device, False)
    scale = torch.tensor(0.3, dtype=torch.float64, device=device, requires_grad=True)
    for more in ({}, dict(softcap=2.0)):
        found, right = (
            torch.autograd.grad(
                module.block_attention(**tensors, **offsets, scale=scale, **more).sin().sum(), scale
            )
            for module in (functional, reference)
        )
        torch.testing.assert_close(found, right)


def test_many_keys_and_many_queries(device):
    """Blocks of 100,000 rows on one side: no pair is stored, or this would take a GiB."""
    for sizes, key_sizes in (([2, 1], [100_000, 3]), ([100_000, 3], [2, 1])):
        for found, whole, rough in compared(*make(sizes, key_sizes, 1, 8, 8, torch.float32, device, True)):
            assert error(found, whole) <= max(4 * error(rough, whole), 1e-6 if device == "cpu" else 1e-5)


@exhaustive
@pytest.mark.slow
def test_one_long_block(device):
    """All pairs of 100,000 rows on a GPU, and of fewer on a CPU; a few rows are compared with the plain
    formula."""
    count = 100_000 if device == "cuda" else 12_000
    tensors, offsets = make([count], None, 1, 4, 4, torch.float32, device, True)
    leaves = [x.requires_grad_() for x in tensors.values()]
    out = functional.block_attention(**tensors, **offsets)
    some = torch.tensor([0, 1, count // 2, count - 1], device=device)
    found = torch.autograd.grad(out[some].square().sum(), leaves)
    whole = [x.detach().double().requires_grad_() for x in leaves]
    ends = torch.tensor([0, 4], device=device), torch.tensor([0, count], device=device)
    plain = reference.block_attention(whole[0][some], *whole[1:3], *ends, key_bias=whole[3], sink=whole[4])
    for x, y in zip((out[some], *found), (plain, *torch.autograd.grad(plain.square().sum(), whole))):
        assert error(x.double(), y) <= (1e-5 if y.dim() > 1 else 1e-3)  # a sink's nearly cancels


def test_is_attention_over_the_graph_of_all_pairs(device):
    sizes = [4, 0, 7, 1]
    tensors, offsets = make(sizes, None, 2, 8, 8, torch.float64, device, False)
    node = torch.arange(12, device=device)
    block = torch.bucketize(node, offsets["offsets"][1:], right=True)
    src, dst = (block[:, None] == block).nonzero().T
    graph = Graph.from_coo(src, dst, num_nodes=12)
    found = functional.block_attention(**tensors, **offsets)
    torch.testing.assert_close(found, functional.dot_attention(graph, **tensors))


def test_rows_outside_of_blocks_get_zero(device):
    tensors, _ = make([20], None, 2, 16, 16, torch.float32, device, False)
    leaves = [x.requires_grad_() for x in tensors.values()]
    offsets = torch.tensor([3, 7, 15], device=device)
    out = functional.block_attention(*leaves, offsets)
    inside = functional.block_attention(*(x[3:15] for x in leaves), offsets - 3)
    assert torch.equal(out[3:15], inside) or device == "cuda"
    torch.testing.assert_close(out[3:15], inside)
    assert not out[:3].any() and not out[15:].any()
    for grad in torch.autograd.grad(out.square().sum(), leaves):
        assert not grad[:3].any() and not grad[15:].any() and grad[3:15].any()


def test_strided_inputs(device):
    tensors, offsets = make([5, 9], None, 2, 16, 16, torch.float32, device, False)
    (query, key, value), offsets = tensors.values(), offsets["offsets"]
    rows = torch.stack([query, key, value], 1)  # as a linear layer of all three gives them
    found = functional.block_attention(*rows.unbind(1), offsets)
    assert torch.equal(found, functional.block_attention(query, key, value, offsets))
    odd = F.pad(query, (1, 0))[..., 1:]
    assert torch.equal(found, functional.block_attention(odd, key, value, offsets.repeat(2)[:3]))


def test_export_with_dynamic_sizes():
    class Model(torch.nn.Module):
        def forward(self, rows, offsets):
            return functional.block_attention(*rows.unbind(1), offsets)

    rows, offsets = torch.randn(14, 3, 2, 16), torch.tensor([0, 5, 14])
    dims = {0: torch.export.Dim("n", min=2)}, {0: torch.export.Dim("b", min=2)}
    program = torch.export.export(Model(), (rows, offsets), dynamic_shapes=dims)
    more, ends = torch.randn(30, 3, 2, 16), torch.tensor([0, 5, 5, 30])
    torch.testing.assert_close(program.module()(more, ends), Model()(more, ends))


def test_operators_keep_their_contracts():
    tensors, offsets = make([3, 4], [2, 5], 2, 4, 3, torch.float32, "cpu", True)
    *leaves, bias, _ = (x.requires_grad_() for x in tensors.values())
    arguments = (*leaves, *offsets.values(), bias, 0.5)
    library.opcheck(torch.ops.dfgnn.block_attention_forward.default, arguments)
    out, stats = torch.ops.dfgnn.block_attention_forward(*arguments)
    more = (torch.ones_like(out), None, *arguments[:-1], out.detach(), stats.detach(), 0.5, True)
    library.opcheck(torch.ops.dfgnn.block_attention_backward.default, more)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_windows_of_tokens(softcap):
    """WeatherGenerator's: the queries of a cell see its tokens, and a softcap bounds the scores."""
    torch.manual_seed(0)
    queries, tokens = [2, 3, 0, 4], [6, 0, 5, 30]
    query, *others = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (9, 41, 41))
    found = functional.block_attention(
        query, *others, offsets_of(queries), offsets_of(tokens), softcap=softcap
    )
    for q, k, v, out in zip(
        *(x.split(n) for x, n in zip((query, *others, found), (queries, tokens, tokens, queries)))
    ):
        score = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(8)
        score = score if softcap is None else softcap * (score / softcap).tanh()
        torch.testing.assert_close(out, torch.einsum("hij,jhd->ihd", score.softmax(2), v))


@pytest.mark.gpu
def test_a_captured_step_takes_other_offsets():
    tensors, offsets = make([50, 60, 70, 20], None, 2, 32, 32, torch.float32, "cuda", False)
    outs = []

    def run():
        leaves = [x.detach().requires_grad_() for x in tensors.values()]
        out = functional.block_attention(*leaves, **offsets)
        outs[:] = out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream=stream):
        run()
    captured = list(outs)
    offsets["offsets"].copy_(offsets_of([3, 0, 190, 7]))
    graph.replay()
    torch.cuda.synchronize()
    run()
    assert all(map(torch.equal, captured, outs))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [[0, 150, 20, 400], [-7, 3, 10**9, 5], [90, 90, 90, 90]])
def test_wrong_offsets_on_a_gpu_read_nothing_beyond_the_rows(bad):
    tensors, _ = make([200], None, 2, 32, 32, torch.float32, "cuda", False)
    leaves = [x.requires_grad_() for x in tensors.values()]
    out = functional.block_attention(*leaves, torch.tensor(bad, device="cuda"))
    torch.autograd.grad(out.sum(), leaves)
    torch.cuda.synchronize()


def test_third_derivatives_are_refused():
    leaf = torch.randn(4, 1, 2, dtype=torch.float64, requires_grad=True)
    out = functional.block_attention(leaf, leaf, leaf, torch.tensor([0, 4]))
    (first,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivatives"):
        torch.autograd.grad(second.sum(), leaf)
