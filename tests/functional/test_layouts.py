"""Every function with tensors of any strides, and with every subset of tensors that require gradients."""

import itertools

import pytest
import torch
from covering import some
from every_function import CASES
from graphs import tiny_graph

from dfgnn import Graph, functional, reference

# Cases that run most of the code; all of them exhaustively.
FEW = [
    *("gat edges", "gat sink, attention", "gatv2", "gatv2 projected", "dot sink, attention"),
    *("products returned", "score at edges", "flex edges", "softmax"),
]


def weighted(x):
    return (x * torch.linspace(-1, 1, x.numel()).to(x).view(x.shape)).sum()


def derivatives(case, graph, leaves, wanted, module=functional, create_graph=False, results=slice(None)):
    """The gradients of some tensors, 0 for None; with ``create_graph`` also those of their squares' sum."""
    outs = case(graph, leaves, module)[results]
    of = [x for x in outs if x.requires_grad]
    xs = [leaves[name] for name in wanted]
    found = [torch.zeros_like(x) for x in xs] * (2 if create_graph else 1)
    if not of:
        return found
    first = torch.autograd.grad(sum(map(weighted, of)), xs, create_graph=create_graph, allow_unused=True)
    second = ()
    if create_graph:
        again = [weighted(x.square()) for x in first if x is not None and x.requires_grad]
        second = torch.autograd.grad(sum(again), xs, allow_unused=True) if again else (None,) * len(xs)
    return [zero if x is None else x.detach() for x, zero in zip((*first, *second), found)]


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
    right = derivatives(
        case, graph, {n: x.clone().requires_grad_() for n, x in given.items()}, names, create_graph=True
    )
    for layout, one in itertools.product(LAYOUTS, [*names, None]):
        leaves = {
            n: (layout(x) if one in (n, None) else x.clone()).requires_grad_() for n, x in given.items()
        }
        got = derivatives(case, graph, leaves, names, create_graph=True)
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
        got, right = (
            derivatives(
                case,
                graph,
                {n: f(x).requires_grad_() for n, x in given.items()},
                list(given),
                create_graph=True,
            )
            for f in (torch.Tensor.detach, lambda x: x.detach().clone())
        )
        torch.testing.assert_close(got, right)


def subsets(names):
    """All of few tensors; of many those of one, of two, and of all but one."""
    sizes = range(1, len(names) + 1) if len(names) < 5 else (1, 2, len(names) - 1, len(names))
    return [chosen for size in sizes for chosen in itertools.combinations(names, size)]


@pytest.mark.parametrize("edges", [0, 17])
@some(FEW, CASES)
def test_subsets_that_require_gradients(device, name, edges, monkeypatch):
    """Of every subset, of a loss over all results, the first or the others, with and without create_graph."""
    case = CASES[name]
    case.choose(monkeypatch)
    generator = torch.Generator().manual_seed(edges)
    src, dst = torch.randint(4, (2, edges), generator=generator).to(device)
    graph = Graph.from_coo(src, dst, num_src=5, num_dst=5)
    given = case.tensors(graph, batch=False)
    with torch.no_grad():
        parts = [slice(None)] if len(case(graph, given)) == 1 else [slice(None), slice(0, 1), slice(1, None)]
    for wanted, results, create_graph in itertools.product(subsets(list(given)), parts, (False, True)):
        got, right = (
            derivatives(
                case, graph, {n: x.clone().requires_grad_(n in wanted) for n, x in given.items()}, wanted,
                module, create_graph, results,
            )
            for module in (functional, reference)
        )  # fmt: skip
        where = f"{wanted}, {results}, create_graph={create_graph}"
        torch.testing.assert_close(got, right, msg=lambda text, where=where: f"{where}: {text}")
