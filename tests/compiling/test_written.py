"""Attention as people write it, rewritten, against itself as it is."""

import pytest
import torch
from comparing import check, gradients, rewriting
from covering import exhaustive
from torch._dynamo.testing import CompileCounter
from written import cases, inputs

SIZES = (7, 7, 25), (12, 12, 40), (30, 30, 33)  # sources, destinations, edges


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[exhaustive] * case.more) for case in cases()]
)
def test_written(case, device):
    """Static shapes, then symbolic ones, then another size of these, in float64, with derivatives of first
    and second order."""
    torch._dynamo.reset()
    reports: list = []
    compiled = torch.compile(case.fn, backend=rewriting(reports))
    for k, sizes in enumerate(SIZES):
        x = inputs(*sizes, seed=k, device=device)
        check(gradients(compiled, x, k == 1), gradients(case.fn, x, k == 1))
    if len(reports) != 2:  # the third size is one of the dynamic graph's, but where torch itself adds guards
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(case.fn, backend=counter)
        for k, sizes in enumerate(SIZES):
            compiled(*inputs(*sizes, seed=k, device=device))
        assert len(reports) == counter.frame_count
    for report in reports:
        assert report.rewritten and not report.refused, str(report)
        assert any(case.form in found.form for found in report.rewritten), str(report)
