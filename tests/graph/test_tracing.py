"""A graph that is used while something traces or transforms keeps plain tensors, and works afterwards."""

import pickle
from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dfgnn import Graph, functional
from dfgnn.runtime.tracing import is_plain


def make(device="cpu") -> Graph:
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(50, (2, 400), generator=generator).to(device)
    return Graph.from_coo(src, dst, num_nodes=50)


def make_inputs(device="cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(50, 4, 8), (50, 4), (50, 4)]
    return [torch.randn(size, generator=generator).to(device).requires_grad_() for size in sizes]


def step(graph: Graph) -> list[torch.Tensor]:
    inputs = make_inputs(graph.device)
    out = functional.gat_attention(graph, *inputs)
    return [out, *torch.autograd.grad(out.sin().sum(), inputs)]


def tensors_of(x, seen: set[int]):
    """All tensors that an object of dfgnn holds."""
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from tensors_of(value, seen)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from tensors_of(value, seen)
    elif type(x).__module__.startswith("dfgnn"):
        names = [
            *getattr(x, "__dict__", ()),
            *(n for c in type(x).__mro__ for n in getattr(c, "__slots__", ())),
        ]
        for name in names:
            yield from tensors_of(getattr(x, name, None), seen)


def derive(graph: Graph) -> None:
    """Makes everything that a graph caches."""
    graph.reverse_csr(), graph.reverse_csr(need_eids=True), graph.edge_index
    graph.degree_stats(), graph.degree_stats(reverse=True), graph.has_zero_in_degree
    graph.plan(4, 8), graph.plan(4, 8, reverse=True), graph.plan(4, 8, layer="gatv2", edges=True)
    for edges in (False, True):
        graph._planner.arguments(4, 8, torch.float32, "gat", schedule="auto", edges=edges, backward=True)


def check(graph: Graph, expected: Graph | None = None) -> None:
    held = list(tensors_of(graph, set()))
    assert len(held) >= 3 and all(map(is_plain, held))
    expected = make(graph.device) if expected is None else expected
    for one in (pickle.loads(pickle.dumps(graph)), graph):
        assert all(map(torch.equal, step(one), step(expected)))
    assert torch.equal(graph.edge_index, expected.edge_index)
    assert graph.degree_stats() == expected.degree_stats()


class Failure(Exception):
    pass


def under_fake_mode(function, x):
    with FakeTensorMode():
        function(None)


def under_fake_inputs(function, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        function(mode.from_tensor(x))


def under_make_fx(function, x):
    make_fx(function)(x)


def under_symbolic_make_fx(function, x):
    make_fx(function, tracing_mode="symbolic")(x)


def under_grad(function, x):
    torch.func.grad(lambda x: [function(x), x.sum()][1])(x)


def under_jvp_of_grad(function, x):
    torch.func.jvp(torch.func.grad(lambda x: [function(x), x.sin().sum()][1]), (x,), (x,))


def under_jvp(function, x):
    torch.func.jvp(lambda x: [function(x), x.sin().sum()][1], (x,), (x,))


def under_vmap_of_grad(function, x):
    torch.func.vmap(torch.func.grad(lambda x: [function(x), x.sum()][1]))(x[None])


def under_vmap(function, x):
    torch.func.vmap(lambda x: [function(x), x][1])(x[None])


def under_functionalize(function, x):
    torch.func.functionalize(lambda x: [function(x), x.sin()][1])(x)


def under_inference_mode(function, x):
    with torch.inference_mode():
        function(x)


WAYS = [
    under_fake_mode,
    under_fake_inputs,
    under_make_fx,
    under_symbolic_make_fx,
    under_grad,
    under_jvp_of_grad,
    under_jvp,
    under_vmap_of_grad,
    under_vmap,
    under_functionalize,
    under_inference_mode,
]
ways = pytest.mark.parametrize("under", WAYS, ids=lambda way: way.__name__)


@ways
def test_what_is_derived_is_plain(under, device):
    graph = make(device)
    under(lambda x: derive(graph), make_inputs(device)[0].detach())
    check(graph)


@ways
def test_after_a_failure(under):
    graph = make()

    def fails(x):
        derive(graph)
        raise Failure

    with pytest.raises(Failure):
        under(fails, make_inputs()[0].detach())
    check(graph)


@ways
def test_after_attention(under, device):
    """The graph works after attention was tried under a transform, whether that call raised or not."""
    graph = make(device)
    feat, *terms = [x.detach() for x in make_inputs(device)]
    bias = torch.ones(graph.num_edges, 4, device=device)
    options = (
        {},
        {"bias": bias, "return_attention": True},
        {"bias": bias.double()},
    )  # the last one is an error

    def attention(x):
        for given in options:
            with suppress(Exception):
                functional.gat_attention(graph, feat if x is None else x, *terms, **given)

    under(attention, feat)
    check(graph)


@ways
def test_graphs_that_are_made_there(under, device):
    """Graphs made under a transform, by every constructor, hold plain tensors."""
    base, made = make(device), []

    def construct(x):
        made.append(base.reverse().reverse())
        made.append(Graph.from_edge_index(base.edge_index, 50))
        made.append(Graph.from_pyg(base.edge_index, 50))
        made.append(base.add_self_loops())
        made.append(base.reorder("degree").graph)
        made.append(Graph.batch([base, base]))
        csr = base.csr()
        made.append(Graph.from_csr(csr.indptr, csr.indices, 50, eids=csr.eids))
        for graph in made:
            derive(graph)

    under(construct, make_inputs(device)[0].detach())
    for graph in made:
        assert all(map(is_plain, tensors_of(graph, set())))
        pickle.dumps(graph)
    traced = made.copy()
    made.clear()
    construct(None)
    for k in (1, 2, -1):
        check(traced[k], made[k])


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp])
def test_an_edge_index_that_a_transform_has_wrapped(transform):
    """torch.func wraps every argument of a transformed function. Edges have no gradient: a graph takes the
    plain tensor within."""
    base, made = make(), []

    def function(x, edge_index):
        made.append(Graph.from_edge_index(edge_index, 50))
        derive(made[0])
        return x.sum()

    inputs = make_inputs()[0].detach(), base.edge_index
    if transform is torch.func.grad:
        transform(function)(*inputs)
    else:
        transform(lambda x: function(x, base.edge_index), inputs[0])
    check(made[0])
