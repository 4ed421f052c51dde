"""Derivatives of derivatives, of functions and layers. A cotangent is the gradient that comes into a backward
pass: here that of a gradient which the first backward pass has returned."""

import pytest
import torch
from attention import DTYPES, SCORES, TERMS, function, make_inputs
from covering import covered
from graphs import GRAPHS, make_graph, tiny_graph

from dfgnn import functional, reference
from dfgnn.bench.measure import peak_extra

OPTIONS = {"plain": {}, "bias": {"term": True, "weight": 1}, "gate": {"gate": 1, "weight": "H", "edge": True}}

MORE_OPTIONS = {**OPTIONS, "all": {"term": True, "gate": "H", "weight": "H", "edge": True}}
U = torch.finfo(torch.float32).eps
HARD = [name for name in GRAPHS if name not in ("power_law", "complete")]


def penalty(attention, graph, inputs, weight=1.0, **options):
    """Gradients of L + |dL/dx|^2."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    loss = weight * attention(graph, **leaves, **options).square().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    return torch.autograd.grad(loss + sum(g.square().sum() for g in grads), list(leaves.values()))


def test_third_derivative(device):
    graph = tiny_graph(device)
    inputs = make_inputs("dot", graph, 1, 2, torch.float64)

    def third(attention):
        x = inputs["query"].clone().requires_grad_()
        out = attention(graph, x, inputs["key"], inputs["value"]).pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
            out = grad.square().sum()
        return grad

    torch.testing.assert_close(third(functional.dot_attention), third(reference.dot_attention))


@pytest.mark.parametrize("score", SCORES)
def test_grad_of_grad(device, score):
    """torch.func.grad of grad gives the values of plain operations, without their tensors of E x H x D."""
    graph = make_graph("complete", device)
    inputs = make_inputs(score, graph, 2, 64, torch.float64)
    name, x = next(iter(inputs.items()))

    def second(module):
        def loss(x):
            return function(score, module)(graph, **{**inputs, name: x}).sin().sum()

        return torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x)

    torch.testing.assert_close(second(functional), second(reference))
    on = torch.device(device)
    ours, plain = (peak_extra(lambda m=m: second(m), 0, on) for m in (functional, reference))
    assert ours < plain / 4


def test_create_graph_does_not_change_the_gradient(device):
    graph = make_graph("mixed_degrees", device)
    inputs = {n: x.requires_grad_() for n, x in make_inputs("gat", graph, 4, 8).items()}
    loss = function("gat")(graph, **inputs).square().sum()
    one = torch.autograd.grad(loss, list(inputs.values()), create_graph=True)
    two = torch.autograd.grad(loss, list(inputs.values()))
    assert all(torch.equal(a, b) for a, b in zip(one, two))


def apart(score, dst, num_dst, sink=None, softmax=reference.softmax_by):
    """The softmax's values as if each depended on its own score alone."""
    weight = softmax(score, dst, num_dst, sink).detach()
    return weight * (score - score.detach()).exp()


@covered(
    score=SCORES,
    dtype=DTYPES,
    options=MORE_OPTIONS,
    hard=HARD,
    shape=[(1, 1), (3, 7), (3, 33), (8, 8), (1, 300)],
)
def test_as_exact_as_plain_operations(device, score, dtype, options, hard, shape, monkeypatch):
    """Heads that fill vectors and those that do not, rows of 0 to 9000 edges, compared with float64.

    The softmax of equal edges is constant: terms of its derivatives cancel, and what plain operations happen
    to leave of them is no measure. They are as large as the same derivatives of weights that depend on their
    own scores alone, to which errors are relative. Over all combinations, twice, errors beyond twice those
    of plain operations were at most 12.5 eps of it in float32, and 0.6 in 16 bits.
    """
    graph = make_graph(hard, device)
    inputs = make_inputs(score, graph, *shape, dtype, **options)
    exact = {n: x.double() for n, x in inputs.items()}
    more = {"weight": 2**-10}  # so that float16 holds the gradients
    if options:
        more.update(dropout_p=0.3, generator=torch.tensor([5], device=device))
        more["mask"] = torch.rand(graph.num_edges, device=device) < 0.8
    found = penalty(function(score), graph, inputs, **more)
    expected = penalty(function(score, reference), graph, exact, **more)
    plain = penalty(function(score, reference), graph, inputs, **more)
    monkeypatch.setattr(reference, "softmax_by", apart)
    terms = penalty(function(score, reference), graph, exact, **more)
    # In float64, the exact one's dtype, only the order of sums differs; where weights are constant both leave
    # rounding of numbers of about 1.
    band = {torch.float64: 1e-12, torch.float32: 32 * U}.get(dtype, torch.finfo(dtype).eps)
    rounding = 1e-12 if dtype == torch.float64 else 0.0
    for name, one, other, low, term in zip(inputs, found, expected, plain, terms):
        assert one.dtype == dtype and one.isfinite().all()
        allowed = 2 * (low.double() - other).norm() + band * max(other.norm(), term.norm()) + rounding
        assert (one.double() - other).norm() <= allowed, name


@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_large_scores(device, score):
    """A shift of all scores changes nothing but their rounding."""
    graph = make_graph("isolated", device)
    inputs = make_inputs(score, graph, 2, 4, term=True)
    one = penalty(function(score), graph, inputs)
    two = penalty(function(score), graph, inputs | {"bias": inputs["bias"] + 2.0**16})
    for x, y in zip(one, two):
        assert (x - y).norm() <= 0.05 * x.norm() + 1e-6


@pytest.mark.parametrize("score", SCORES)
def test_only_edge_of_a_row(device, score):
    """The gradient of its score is exactly 0, and so are those of that gradient."""
    alone = make_graph("self_loops", device)
    inputs = make_inputs(score, alone, 2, 4, term=True)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    out = function(score)(alone, **leaves).square().sum()
    (first,) = torch.autograd.grad(out, leaves[{"gat": "value", "gatv2": "key", "dot": "value"}[score]],
                                   create_graph=True)  # fmt: skip
    (bias,) = torch.autograd.grad(first.pow(3).sum(), leaves[TERMS[score]])
    assert not bias.any()


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_memory_of_the_operator(device, score, edge):
    """Beyond inputs and results: a few numbers per edge and head."""
    graph = make_graph("complete", device)
    heads, dim = 2, 64
    inputs = make_inputs(score, graph, heads, dim, edge=edge)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    out = function(score)(graph, **leaves).square().sum()
    grads = torch.autograd.grad(out, list(leaves.values()), create_graph=True)
    cotangents = [torch.ones_like(g) for g in grads]
    results = sum(x.numel() * x.element_size() for x in leaves.values())

    def second():
        return torch.autograd.grad(grads, list(leaves.values()), cotangents, retain_graph=True)

    second()
    row = 4 * heads * dim
    # The second pass holds gradients that come through the output and through the first pass: 2 x results.
    more = 4 * row * graph.num_dst + row // 4 * graph.num_edges
    # GATv2 on GPUs also stores partial sums of the gradient of att, one per sub-warp.
    more += 0 if device == "cpu" else row * 4 * graph.num_dst
    assert peak_extra(second, 0, torch.device(device)) < 2 * results + more
