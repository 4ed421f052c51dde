"""In captured steps compiled graphs get what comes of integers alone from before, where it is known."""

import pytest
import torch
from plain_training import plain_step
from torch import nn

import dfgnn
from dfgnn.compiling import backend
from dfgnn.compiling.integers_first import integers_first
from dfgnn.runtime import torch_internals as internals


class Loops(nn.Module):
    """GraphMVP's loops behind the edges, and SimpleHGN's branch on whether types are in order."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3).double()

    def forward(self, x, edges, kinds):
        loops = torch.arange(len(x), device=x.device).expand(2, -1)
        edges = torch.cat([edges, loops + edges[:1, :1] * 0], 1)
        h = self.lin(x)
        if (kinds[1:] < kinds[:-1]).any():
            h = h + 1
        src, dst = edges
        score = (h[dst] * h[src]).sum(-1)
        weights = (score - score.detach().max()).exp()
        return h.new_zeros(h.shape).index_add(0, dst, weights[:, None] * h[src]), edges[0] + 1


def test_integers_of_compiled_models_are_known(monkeypatch):
    """The compiler's code is hidden from the step, as Inductor's is."""

    def hidden(graph_module, inputs, options, ours):
        def run(*given):
            with internals.disable_current_modes():
                return graph_module(*given)

        return run

    monkeypatch.setattr(internals, "compile_fx", hidden)
    generator = torch.Generator().manual_seed(0)
    x, edges = (
        torch.randn(40, 4, generator=generator).double(),
        torch.randint(37, (2, 160), generator=generator),
    )
    kinds = torch.arange(160) % 4
    losses = []
    for compiled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Loops()
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        if compiled:
            model.compile(backend=backend)

        def loss_fn(model=model):
            out, ends = model(x, edges, kinds)
            return out[ends.unique() - 1].square().sum().log1p()

        step = (
            dfgnn.capture(loss_fn, model, optimizer, debug=True)
            if compiled
            else plain_step(loss_fn, optimizer)
        )
        losses.append(torch.stack([step() for _ in range(6)]))
        assert not compiled or not next(iter(step._same.values()))[1]._constants.waited
    torch.testing.assert_close(*losses)


def of_tuples(x, edges, kinds):
    order = torch.sort(kinds)
    low, high = edges.unbind()
    loops = torch.stack([low.clone(), high])[:, order.indices]
    return x[loops[0]] * order.values[:, None], kinds.max(), (kinds > 2)[None]


def of_writes(x, edges, kinds):
    count = torch.zeros(40, dtype=torch.long)
    count[kinds] += 1
    return x * count[:, None], edges + 1


def of_random_numbers(x, edges, kinds):
    return x[torch.randint_like(kinds, 40)] * (torch.rand_like(x[:1]) + edges.sum())


@pytest.mark.parametrize("function", [of_tuples, of_writes, of_random_numbers])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_taken_out(function, dynamic):
    """And that results are those of the whole graph."""
    torch._dynamo.reset()
    taken = []

    def compiler(graph_module, inputs):
        rest, given, before = integers_first(graph_module, inputs)
        rest.graph.lint()
        assert len(given) == sum(node.op == "placeholder" for node in rest.graph.nodes)
        old, new = (
            {node.name for node in graph.nodes if node.op == "placeholder"}
            for graph in (graph_module.graph, rest.graph)
        )
        taken.extend(new - old)
        return before(rest.forward)

    compiled = torch.compile(function, backend=compiler, dynamic=dynamic)
    for size in (160, 90):
        edges, kinds = torch.randint(40, (2, size)), torch.arange(size) % 4
        given = torch.randn(40, 4), edges, kinds
        torch.manual_seed(0)
        want = function(*given)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(*given), want)
    assert bool(taken) == (function is not of_writes)
    assert not any("rand" in name for name in taken)
