"""Attention as people write it, rewritten, against itself as it is."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from written import Inputs, cases, inputs

from dfgnn.compiling.rewrite import rewritten

SIZES = (7, 7, 25), (12, 12, 40), (30, 30, 33)  # sources, destinations, edges


def rewriting(reports: list, inner=None):
    """A backend that rewrites, and runs the graph as it is or by another backend."""

    def backend(graph_module, example_inputs):
        made, report = rewritten(graph_module)
        reports.append(report)
        return made.forward if inner is None else inner(made, example_inputs)

    return backend


def flat(out) -> list[torch.Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def loss(out) -> torch.Tensor:
    return sum(
        (x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape).sin()).sum() for x in flat(out)
    )


def gradients(fn, x: Inputs, twice: bool):
    out = fn(*x)
    leaves = x[1:]
    first = torch.autograd.grad(loss(out), leaves, create_graph=twice, allow_unused=True)
    found = [*flat(out), *first]
    if twice:
        total = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
        if isinstance(total, torch.Tensor):
            found += torch.autograd.grad(total, leaves, allow_unused=True)
    return found


def check(ours, theirs, tolerance=1e-9):
    for a, b in zip(ours, theirs, strict=True):
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_written(case):
    torch._dynamo.reset()
    reports: list = []
    compiled = torch.compile(case.fn, backend=rewriting(reports))
    for k, sizes in enumerate(SIZES):
        x = inputs(*sizes, seed=k)
        check(gradients(compiled, x, k == 1), gradients(case.fn, x, k == 1))
    if len(reports) != 2:  # the third size is one of the dynamic graph's, but where torch itself adds guards
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(case.fn, backend=counter)
        for k, sizes in enumerate(SIZES):
            compiled(*inputs(*sizes, seed=k))
        assert len(reports) == counter.frame_count
    for report in reports:
        assert report.rewritten and not report.refused, str(report)
        assert any(case.form in found.form for found in report.rewritten), str(report)
