"""Every function with tensors of any strides, and with every subset of tensors that require gradients."""

import itertools

import pytest
import torch
from attention import derivatives
from covering import some
from every_function import CASES
from graphs import tiny_graph

from dfgnn import Graph, functional, reference

# Cases that run most of the code; all of them exhaustively.
FEW = [
    *("gat edges", "gat sink, attention", "gatv2", "gatv2 projected", "dot sink, attention"),
    *("products returned", "score at edges", "flex edges", "softmax"),
]


def by_columns(x):
    """x with the strides of a transposed tensor."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def every_second(x):
    return torch.stack([x, x + 1], -1)[..., 0]


def unaligned(x):
    """x, contiguous, but behind the first number of its memory."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def with_gaps(x):
    """x as the view of a wider tensor, whose rows have gaps."""
    return torch.cat([x, x], -1)[..., x.shape[-1] :]


LAYOUTS = [by_columns, every_second, unaligned, with_gaps]


@some(FEW, CASES)
def test_strides(device, name, monkeypatch):
    case = CASES[name]
    case.choose(monkeypatch)
    graph = tiny_graph(device)
    given = case.tensors(graph, 8, 8, 3, batch=False)
    names = list(given)
    leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
    right = derivatives(case(graph, leaves), [*leaves.values()], 2)
    for layout, one in itertools.product(LAYOUTS, [*names, None]):
        leaves = {
            n: (layout(x) if one in (n, None) else x.clone()).requires_grad_() for n, x in given.items()
        }
        got = derivatives(case(graph, leaves), [*leaves.values()], 2)
        where = f"{layout.__name__} of {one}"
        torch.testing.assert_close(got, right, msg=lambda text, where=where: f"{where}: {text}")


def test_an_expanded_tensor(device):
    """One row for all nodes or edges, with a stride of 0."""
    graph = tiny_graph(device)
    for name in (
        "gat edges",
        "gatv2 vectors",
        "dot edges",
        "terms shared",
        "products returned",
        "spmm",
        "softmax",
    ):
        case = CASES[name]
        given = {n: x[:1].expand_as(x) for n, x in case.tensors(graph, 8, 8, 3, batch=False).items()}
        found = []
        for of in (torch.Tensor.detach, lambda x: x.detach().clone()):
            leaves = {n: of(x).requires_grad_() for n, x in given.items()}
            found.append(derivatives(case(graph, leaves), [*leaves.values()], 2))
        torch.testing.assert_close(*found)


def subsets(names):
    """All of few tensors; of many those of one, of two, and of all but one."""
    sizes = range(1, len(names) + 1) if len(names) < 5 else (1, 2, len(names) - 1, len(names))
    return [chosen for size in sizes for chosen in itertools.combinations(names, size)]


@pytest.mark.parametrize("edges", [0, 17])
@some(FEW, CASES)
def test_subsets_that_require_gradients(device, name, edges, monkeypatch):
    """Gradients of every subset of the inputs, for a loss over all results, the first or the others, with and
    without create_graph."""
    case = CASES[name]
    case.choose(monkeypatch)
    generator = torch.Generator().manual_seed(edges)
    src, dst = torch.randint(4, (2, edges), generator=generator).to(device)
    graph = Graph.from_coo(src, dst, num_src=5, num_dst=5)
    given = case.tensors(graph, batch=False)
    with torch.no_grad():
        parts = [slice(None)] if len(case(graph, given)) == 1 else [slice(None), slice(0, 1), slice(1, None)]
    for wanted, results, orders in itertools.product(subsets(list(given)), parts, (1, 2)):
        found = []
        for module in (functional, reference):
            leaves = {n: x.clone().requires_grad_(n in wanted) for n, x in given.items()}
            outs = case(graph, leaves, module)[results]
            found.append(derivatives(outs, [leaves[n] for n in wanted], orders))
        where = f"{wanted}, {results}, {orders} orders"
        torch.testing.assert_close(*found, msg=lambda text, where=where: f"{where}: {text}")
