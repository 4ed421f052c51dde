"""Reductions over rows of which some are not in use, as they are without those."""

import pytest
import torch

from dfgnn.capturing.masked_functions import WithoutPadding

REDUCTIONS = {
    "all": lambda x: [x.sum(), x.mean(), x.std(), x.var(), torch.std(x), torch.mean(x)],
    "rows": lambda x: [x.sum(0), x.mean(dim=0), x.std(0), x.var(dim=0, keepdim=True), x.mean(axis=0)],
    "rows, from the end": lambda x: [x.sum(-3), x.mean(dim=(-3,)), x.std(-3), torch.var(x, -3)],
    "several": lambda x: [x.sum((0, 1)), x.mean((0, 2), keepdim=True), x.std((0, -1)), x.var(dim=(0, 1, 2))],
    "others": lambda x: [x.sum(1), x.mean(-1, keepdim=True), x.std(2), x.var((1, 2))],
    "corrections": lambda x: [
        x.std(False), x.std(0, False), x.var(0, unbiased=True), x.var(dim=0, correction=0),
        x.std(0, True, True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("used", [2, 5])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(device, name, used):
    whole = torch.randn(7, 3, 4, device=device, dtype=torch.float64)
    if used < 7:
        whole[used:] = float("nan")
    whole.requires_grad_()
    rows = whole.detach()[:used].requires_grad_()
    with WithoutPadding({7: torch.arange(7, device=device) < used}, []):
        got = REDUCTIONS[name](whole)
    want = REDUCTIONS[name](rows)
    for a, b in zip(got, want):
        torch.testing.assert_close(a[:used] if name == "others" else a, b)
    sums = [sum((x[:used] if name == "others" else x).sin().sum() for x in found) for found in (got, want)]
    grads = [torch.autograd.grad(total, x)[0][:used] for total, x in zip(sums, (whole, rows))]
    torch.testing.assert_close(*grads)


def test_rows_that_are_alike(device):
    x = torch.ones(4, 3, device=device).requires_grad_()
    with WithoutPadding({4: torch.arange(4, device=device) < 3}, []):
        x.std(0).sum().backward()
    assert not x.grad.any()
