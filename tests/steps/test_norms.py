"""Batch normalisation without what is padded, as dfgnn.capture has it, compared with float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dfgnn.capturing import masked_functions


@pytest.mark.parametrize("shape", [(5,), (48,), (3, 4)])
@pytest.mark.parametrize("used", [1000, 801, 250, 40])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_the_norm_and_its_gradient_are(device, shape, used, affine, kind):
    """Features are not centred, and unused rows hold arbitrary values; the reference is float64 without the
    unused rows. Both get the same output gradient, so that rounding of the output does not reach the
    gradients."""
    mask = torch.arange(1000, device=device) < used
    axes = [1] * (len(shape) - 1)
    centre = 10 * (torch.arange(shape[0], device=device) % 5)
    x = torch.randn(1000, *shape, device=device) + centre.view(-1, *axes)
    x, accuracy = x.to(kind), 1e-4 if kind is torch.float32 else 2e-2
    x[~mask] = float("nan")
    weight, bias = torch.randn(2, shape[0], device=device)
    grad = torch.randn(used, *shape, device=device).to(kind)
    found = []
    for masked in (True, False):
        dtype = torch.float32 if masked else torch.float64
        mean, var = torch.zeros_like(bias, dtype=dtype), torch.ones_like(bias, dtype=dtype)
        given = x if masked else x[mask].to(dtype), weight.to(dtype), bias.to(dtype)
        given = [t.clone().requires_grad_() for t in given]
        with masked_functions.WithoutPadding({1000: mask} if masked else {}, []):
            y = F.batch_norm(given[0], mean, var, *(given[1:] if affine else (None, None)), True, 0.3)
        y = y[mask] if masked else y
        y.backward(grad.to(y.dtype))
        grads = [t.grad for t in given if t.grad is not None]
        if masked:
            assert not grads[0][~mask].any()
            grads[0] = grads[0][mask]
        found.append([y, mean, var, *grads])
    assert len(found[0]) == (6 if affine else 4)
    for got, want in zip(*found):
        atol = accuracy * max(1.0, float(want.detach().abs().max()))
        torch.testing.assert_close(got.double(), want, rtol=accuracy, atol=atol)


@pytest.mark.gpu
def test_the_norm_is_few_launches():
    """A CUDA graph of many norms is as long as they have kernels; torch's own have about five."""
    from torch.profiler import ProfilerActivity, profile

    norm, x = nn.BatchNorm1d(48).cuda(), torch.randn(1000, 48, device="cuda", requires_grad=True)
    mask = torch.arange(1000, device="cuda") < 801

    def step(times):
        with masked_functions.WithoutPadding({1000: mask}, []):
            y = x
            for _ in range(times):
                y = norm(y)
        y.square().sum().backward()

    step(1)
    counts = []
    for times in (1, 5):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            step(times)
        counts.append(sum(e.device_type == torch.autograd.DeviceType.CUDA for e in found.events()))
    assert 0 < counts[1] - counts[0] <= 4 * 17
