"""Compares a compiled function with itself as it is: results, gradients, second derivatives."""

from __future__ import annotations

import torch
from written import Inputs

from dfgnn.compiling.rewrite import rewritten


def rewriting(reports: list, inner=None):
    """A backend that rewrites, and runs the graph as it is or by another backend."""

    def backend(graph_module, example_inputs):
        made, report = rewritten(graph_module, min_elements=0)
        reports.append(report)
        return made.forward if inner is None else inner(made, example_inputs)

    return backend


def flat(out) -> list[torch.Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def loss(out) -> torch.Tensor:
    return sum(
        (x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype, device=x.device).view(x.shape).sin()).sum()
        for x in flat(out)
    )


def gradients(fn, x: Inputs, twice: bool = False) -> list:
    """Results of fn, and the gradients of all tensors; with twice also those of a function of these."""
    out = fn(*x)
    leaves = x[1:]
    first = torch.autograd.grad(loss(out), leaves, create_graph=twice, allow_unused=True)
    found = [*flat(out), *first]
    if twice:
        total = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
        if isinstance(total, torch.Tensor):
            found += torch.autograd.grad(total, leaves, allow_unused=True)
    return found


def check(ours: list, theirs: list, tolerance: float = 1e-9) -> None:
    """Compares tensors; no gradient is one of zeros."""
    for a, b in zip(ours, theirs, strict=True):
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
