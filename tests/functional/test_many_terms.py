"""Sums of very many terms in float32: each against a bound, which docs/numerics.md states.

A sum of float32 that adds one term after another stops growing at 2**24 equal terms, and before that its
error grows with their number.
"""

import pytest
import torch
from covering import EXHAUSTIVE

from dfgnn import Graph, functional
from dfgnn.engine import by_index

U = 2.0**-24
#: Terms per group; the exhaustive tests have as many as memory allows.
MANY = 2**26 if EXHAUSTIVE else 2**21


def terms(count, columns, kind):
    """[count, columns]: equal terms (whose roundings all have the same direction), or random ones."""
    if kind == "equal":
        return torch.full((count, columns), 0.1)
    return torch.rand(count, columns, generator=torch.Generator().manual_seed(0)) + 0.5


def index_of(count, order):
    """Nearly all rows in group 1 of 4; some in each of the others."""
    index = torch.ones(count, dtype=torch.int64)
    if order == "rising":
        index[:1000], index[-1000:] = 0, 3
    else:
        index[:: count // 999] = 0
        index[1 :: count // 99] = 3
    return index


@pytest.mark.parametrize("order", ["rising", "mixed"])
@pytest.mark.parametrize("kind", ["equal", "random"])
@pytest.mark.parametrize("columns", [1, 2, 4, 11])
def test_sums_by_index(columns, kind, order, threads):
    count = MANY // (1 if columns < 4 else columns // 2)
    rows, index = terms(count, columns, kind), index_of(count, order)
    right = torch.zeros(4, columns, dtype=torch.float64)
    for group in range(4):
        right[group] = rows[index == group].sum(0, dtype=torch.float64)
    found = []
    for number in (1, 2):
        threads(number)
        found.append(by_index.sums(rows, index, 4))
    assert torch.equal(*found)
    assert ((found[0] - right).abs() <= 2**14 * U * right).all()
    if columns < 3 or columns == 4 and order == "rising":
        assert ((found[0] - right).abs() <= 2 * U * right).all()


@pytest.mark.parametrize("order", ["rising", "mixed"])
@pytest.mark.parametrize("kind", ["equal", "random"])
def test_softmax(kind, order):
    """Weights whose sum is 1, and gradients whose sum is 0."""
    index = index_of(MANY, order)
    score = (torch.zeros(MANY, 1) if kind == "equal" else terms(MANY, 1, kind)).requires_grad_()
    out = by_index.softmax(score, index, 4, masked=True)
    total = torch.zeros(4, dtype=torch.float64).index_add_(0, index, out.detach().double()[:, 0])
    assert abs(total[[0, 1, 3]] - 1).max() < 4 * U + 1e-6
    with torch.no_grad():
        exact = score.double()[index == 1].softmax(0)
        torch.testing.assert_close(out[index == 1].double(), exact, rtol=1e-6, atol=0)
    grad = torch.rand(MANY, 1, generator=torch.Generator().manual_seed(1))
    (got,) = torch.autograd.grad(out, score, grad)
    with torch.no_grad():
        g, a = grad[index == 1].double(), exact
        torch.testing.assert_close(
            got[index == 1].double(), a * (g - (a * g).sum()), rtol=1e-4, atol=1e-6 / MANY
        )


@pytest.mark.parametrize("kind", ["equal", "random"])
def test_attention_and_products_of_one_long_row(device, kind):
    """A row of all edges, which the kernels cut into items: forward, and sums over the edges of a source."""
    count = MANY // 8
    edges = torch.zeros(2, count, dtype=torch.int64, device=device)
    graph = Graph.from_edge_index(edges, num_nodes=1)
    weight, bias = (terms(count, 1, k).to(device) for k in (kind, "random"))
    bound = 2**13 * U
    one = torch.full((1, 1, 4), 0.7, device=device, requires_grad=True)
    out = functional.spmm(graph, weight, one)
    right = weight.sum(dtype=torch.float64)
    assert (out.double() / (right * 0.7) - 1).abs().max() < bound
    out.sum().backward()
    assert (one.grad.double() / right - 1).abs().max() < bound
    one.grad = None
    zero = torch.zeros(1, 1, device=device)
    out, attention = functional.gat_attention(
        graph, one, zero, zero, negative_slope=1.0, bias=bias, return_attention=True
    )
    assert abs(attention.sum(dtype=torch.float64) - 1) < bound
    assert (out.double() - 0.7).abs().max() < bound
    out.sum().backward()
    assert (one.grad.double() - 1).abs().max() < bound
    assert (functional.edge_softmax(graph, weight).sum(dtype=torch.float64) - 1).abs() < bound
