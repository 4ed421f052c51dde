"""Gradients of scores on the CPU in rows of several blocks of 64 edges and in split rows: their sum over a
row is 0, however the output was rounded (csrc/cpu/kernels/long_rows.h)."""

import pytest
import torch
from attention import EDGES, function

from dfgnn import Graph, functional, reference

ROWS, HEADS, DIM = 3, 2, 32
# A row of one block; of two, the second with one edge; of two full ones; of several; a split row.
DEGREES = [64, 65, 128, 300, 4097]


def make(score, degree, dtype, grads=(), **options):
    """Returns run(module, dtype), which computes the gradients with dfgnn's or the reference's attention. The
    values and keys of a row have a large common part."""
    torch.manual_seed(degree)
    src = torch.randint(500, (ROWS * degree,))
    graph = Graph.from_coo(src, torch.arange(ROWS).repeat_interleave(degree), num_src=500, num_dst=ROWS)
    common = 3 + 0.1 * torch.randn(500, HEADS, DIM)
    if score == "dot":
        tensors = [torch.randn(ROWS, HEADS, DIM), 3 + 0.1 * torch.randn(500, HEADS, DIM), common]
    else:
        tensors = [torch.randn(ROWS, HEADS, DIM) - 3, common, torch.randn(HEADS, DIM)]
    shapes = {"edge_key": (HEADS, DIM), "edge_both": (HEADS, DIM)}
    edges = {name: torch.rand(graph.num_edges, *shapes.get(name, (HEADS,))) for name in grads}
    tensors, grad = (
        [x.to(dtype) for x in (*tensors, *edges.values())],
        torch.randn(ROWS, HEADS, DIM).to(dtype),
    )

    def run(module, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        out = function(score, module)(graph, *leaves[:3], **dict(zip(grads, leaves[3:])), **options)
        return torch.autograd.grad(out, leaves, grad.to(dtype))

    return run


def errors(found, exact):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact)]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("score", ["dot", "gatv2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_row_has_in_common_cancels(score, degree, dtype):
    """The common part cancels in the gradients; only their own rounding is left."""
    run = make(score, degree, dtype)
    worst = max(errors(run(functional, dtype), run(reference, torch.float64)))
    assert worst < (3e-3 if dtype == torch.bfloat16 else 2e-5)


@pytest.mark.parametrize("degree", DEGREES)
def test_equal_keys_give_the_query_no_gradient(degree):
    torch.manual_seed(0)
    src = torch.randint(500, (ROWS * degree,))
    graph = Graph.from_coo(src, torch.arange(ROWS).repeat_interleave(degree), num_src=500, num_dst=ROWS)
    query = torch.randn(ROWS, HEADS, 128).bfloat16().requires_grad_()
    key = torch.randn(1, HEADS, 128).expand(500, -1, -1).bfloat16()
    out = functional.dot_attention(graph, query, key, torch.randn(500, HEADS, 128).bfloat16())
    (found,) = torch.autograd.grad(out, query, torch.randn_like(out))
    assert found.abs().max() < 1e-6


OPTIONS = {
    "dropout": ((), {"dropout_p": 0.5}),
    "weight": (("weight",), {"dropout_p": 0.5}),
    "bias": (("bias",), {}),
    "gate": (("gate", "bias", "weight"), {}),
    "features": (("edge",), {}),
}


@pytest.mark.parametrize("degree", [65, 300, 4097])
@pytest.mark.parametrize("score", ["dot", "gatv2"])
@pytest.mark.parametrize("name", OPTIONS)
def test_with_options_on_edges(score, degree, name):
    grads, options = OPTIONS[name]
    grads = tuple(EDGES[score] if grad == "edge" else grad for grad in grads)
    if "dropout_p" in options:
        options = options | {"generator": torch.tensor([5])}
    if score == "dot":
        options = options | {"negative_slope": 0.2}
    run = make(score, degree, torch.float32, grads, **options)
    found, exact = run(functional, torch.float32), run(reference, torch.float64)
    plain = errors(run(reference, torch.float32), exact)
    for error, allowed in zip(errors(found, exact), plain):
        assert error < 2 * allowed + 1e-5
