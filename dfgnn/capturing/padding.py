"""What rows that are not in use would disturb, and how they do not: while a padded step runs, the functions
of torch that mix rows see this mode.

``F.batch_norm`` in training, the mean, sum, variance or deviation over all rows of what has a row per node,
edge or graph, and the losses of ``torch.nn.functional`` leave out what is not in use. The largest value of an
index (``int(batch.max()) + 1``, as pooling asks) is that of the capacity, which nobody has to wait for.
``x[mask]`` with a mask of a batch that never changes is a selection of rows that are known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOSSES = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.cross_entropy,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.mse_loss,
    F.multilabel_soft_margin_loss,
    F.nll_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
)
_TOTALS = {Tensor.mean: "mean", torch.mean: "mean", Tensor.sum: "sum", torch.sum: "sum"}
_SPREADS = {Tensor.std: "std", torch.std: "std", Tensor.var: "var", torch.var: "var"}
_LARGEST = (Tensor.max, torch.max, Tensor.amax, torch.amax)


class Padding(TorchFunctionMode):
    """masks: bool ``[capacity]`` by that capacity, which rows are in use. bounds: of indices, (begin, end) of
    their addresses and how many values they can have."""

    def __init__(self, masks: dict[int, Tensor], bounds: list[tuple[int, int, int]]):
        super().__init__()
        self.masks, self.bounds = masks, bounds
        self._counts: dict[int, _Counts] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **kwargs)
        return rule(self, func, args, kwargs)

    def bound_of(self, x: Tensor) -> int | None:
        if x.is_floating_point() or not x.numel():
            return None
        place = x.data_ptr()
        return next((count for begin, end, count in self.bounds if begin <= place < end), None)

    def mask_of(self, x: Any) -> Tensor | None:
        return self.masks.get(x.shape[0]) if isinstance(x, Tensor) and x.dim() else None

    def counts_of(self, mask: Tensor) -> _Counts:
        """Of one of the masks; found once in a step, for all that ask."""
        if len(mask) not in self._counts:
            used = mask.sum(dtype=torch.float32)
            total = torch.full_like(used, len(mask))
            self._counts[len(mask)] = _Counts(
                torch.stack([total, used - total]), used.to(torch.int32).view(1), torch.zeros_like(used)
            )
        return self._counts[len(mask)]


class _Counts(NamedTuple):
    """merged: float32 [2], of all rows, and less than 0 of those that are to be left out. used: int32 [1]."""

    merged: Tensor
    used: Tensor
    zero: Tensor


class KnownMasks(TorchFunctionMode):
    """``x[mask]`` with masks that were seen while ``learns``: by their identity, where they are True."""

    def __init__(self) -> None:
        super().__init__()
        self.learns = True
        self._places: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__ and len(args) == 2 and isinstance(args[1], Tensor):
            x, mask = args
            if mask.dtype == torch.bool and mask.dim() == 1 and len(x) == len(mask):
                if self.learns and id(mask) not in self._places:
                    self._places[id(mask)] = mask, mask.nonzero().squeeze(1)
                found = self._places.get(id(mask))
                if found is not None:
                    return x.index_select(0, found[1])
        return func(*args, **(kwargs or {}))


class WithoutDropout(TorchFunctionMode):
    """For a comparison of two runs whose masks would differ."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout,
)  # fmt: skip


# ---- rules -----------------------------------------------------------------------------------------------


def _rows(mask: Tensor, x: Tensor) -> Tensor:
    """mask, as wide as x."""
    return mask.view(-1, *[1] * (x.dim() - 1))


def in_use(mask: Tensor, x: Tensor) -> Tensor:
    """x, 0 in the rows that are not in use, whatever was there."""
    return torch.where(_rows(mask, x), x, 0)


def _largest(mode: Padding, func, args, kwargs):
    x = args[0] if args else kwargs.get("input")
    if len(args) == 1 and not kwargs and isinstance(x, Tensor):
        bound = mode.bound_of(x)
        if bound is not None:
            return torch.tensor(bound - 1)  # on the host, where it is asked for
    return func(*args, **kwargs)


def _over_rows(mode: Padding, found: dict[str, Any] | None) -> tuple[Tensor, Tensor, tuple[int, ...]] | None:
    """x, its mask and the dimensions that are reduced, where rows are one of them."""
    mask = None if found is None else mode.mask_of(found["input"])
    if found is None or mask is None:
        return None
    x, dim = found["input"], found["axis"] if found["dim"] is None else found["dim"]
    dims = range(x.dim()) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    dims = tuple(k % x.dim() for k in dims)
    return (x, mask, dims) if 0 in dims else None


def _count(x: Tensor, mask: Tensor, dims: tuple[int, ...]) -> Tensor:
    return mask.sum() * prod(x.shape[k] for k in dims if k)


def _total(mode: Padding, func, args, kwargs):
    found = _bound(_total_of, args, kwargs)
    over = _over_rows(mode, found)
    if found is None or over is None:
        return func(*args, **kwargs)
    x, mask, dims = over
    if x.dtype == torch.bool or not (x.is_floating_point() or _TOTALS[func] == "sum"):
        return func(*args, **kwargs)
    total = torch.sum(in_use(mask, x), dims, keepdim=found["keepdim"], dtype=found["dtype"])
    return total if _TOTALS[func] == "sum" else total / _count(x, mask, dims)


def _total_of(input, dim=None, keepdim=False, *, dtype=None, axis=None): ...


def _spread(mode: Padding, func, args, kwargs):
    found = _bound(_spread_of, args, kwargs)
    if found is not None and isinstance(found["dim"], bool):  # std(unbiased)
        found["dim"], found["unbiased"] = None, found["dim"]
    over = _over_rows(mode, found)
    if found is None or over is None:
        return func(*args, **kwargs)
    x, mask, dims = over
    count, keepdim = _count(x, mask, dims), found["keepdim"]
    x = in_use(mask, x)
    centred = in_use(mask, x - x.sum(dims, keepdim=True) / count)
    correction = found["correction"] if found["unbiased"] is None else int(found["unbiased"])
    degrees = (count - correction).clamp(min=0)
    if _SPREADS[func] == "var":
        return centred.square().sum(dims, keepdim=keepdim) / degrees
    # Whose gradient is 0 where all rows are alike, as that of torch.std.
    return torch.linalg.vector_norm(centred, dim=dims, keepdim=keepdim) / degrees.sqrt()


def _spread_of(input, dim=None, unbiased=None, keepdim=False, *, correction=1, axis=None): ...


def _loss(mode: Padding, func, args, kwargs):
    found = _bound(func, args, kwargs)
    mask = None if found is None else mode.mask_of(found["input"])
    if found is None or mask is None or found["reduction"] == "none":
        return func(*args, **kwargs)
    if any(found.get(name) is not None for name in ("size_average", "reduce")):
        return func(*args, **kwargs)
    target = found["target"]
    if func in (F.cross_entropy, F.nll_loss) and not target.is_floating_point():
        found["target"] = torch.where(_rows(mask, target), target, found["ignore_index"])
        return func(**found)
    reduction, found["reduction"] = found["reduction"], "none"
    each = in_use(mask, func(**found))
    if reduction == "sum":
        return each.sum()
    return each.sum() / (mask.sum() * (1 if reduction == "batchmean" else each[0].numel()))


def _batch_norm(mode: Padding, func, args, kwargs):
    found = _bound(func, args, kwargs)
    mask = None if found is None else mode.mask_of(found["input"])
    if found is None or mask is None or not found["training"]:
        return func(*args, **kwargs)
    x, mean, var = found["input"], found["running_mean"], found["running_var"]
    if _on_device(x, mean):
        options = mode.counts_of(mask), mean, var, found["momentum"], found["eps"]
        return _DeviceBatchNorm.apply(x, found["weight"], found["bias"], mask, *options)
    y, batch_mean, batch_var, count = _MaskedBatchNorm.apply(
        x, found["weight"], found["bias"], mask, found["eps"]
    )
    if mean is not None:
        with torch.no_grad():
            unbiased = batch_var * (count / (count - 1).clamp(min=1))
            mean.lerp_(batch_mean.to(mean.dtype), found["momentum"])
            var.lerp_(unbiased.to(var.dtype), found["momentum"])
    return y


# Beyond, float32 does not count rows exactly.
_MOST_ROWS = 2**24


def _on_device(x: Tensor, running_mean: Tensor | None) -> bool:
    """Whether this is for `_DeviceBatchNorm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    known = running_mean is None or running_mean.dtype == wide
    return x.is_cuda and x.dim() == 2 and len(x) < _MOST_ROWS and known


class _DeviceBatchNorm(torch.autograd.Function):
    """`_MaskedBatchNorm` of ``[N, C]`` on a GPU, where it is launches that count: by the few kernels of
    torch.nn.SyncBatchNorm, which merge statistics of parts by their sizes.

    Rows that are not in use, the last ones, become copies of the first, which always is. As a part of a
    negative size, of that mean and no variance, they are taken out of the statistics again. That takes digits
    where means are many deviations from 0, so that the first row is subtracted from all; but not in 16 bits,
    which have fewer digits than are lost and would be rounded once more. What rows that are not in use become
    in y is finite and has no gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, mask, counts, running_mean, running_var, momentum, eps):
        first = x[:1]
        is_shifted = x.dtype.itemsize > 2
        x = torch.where(_rows(mask, x), x, first).contiguous()
        if is_shifted:
            x = x - first
        parts = [torch.batch_norm_stats(part, eps) for part in (x, x[:1])]
        means, invstds = map(torch.stack, zip(*parts))
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            means, means, invstds, running_mean, running_var, momentum, eps, counts.merged.to(means.dtype)
        )
        if is_shifted and running_mean is not None:
            running_mean.add_(first[0], alpha=momentum)
        ctx.save_for_backward(x, weight, mask, mean, invstd, counts.used, counts.zero)
        ctx.has_bias = bias is not None
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight, mask, mean, invstd, used, zero = ctx.saved_tensors
        rows = _rows(mask, grad)
        grad = torch.where(rows, grad, zero).contiguous()
        total, along, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, invstd, weight, True, weight is not None, ctx.has_bias
        )
        grad_x = torch.batch_norm_backward_elemt(grad, x, mean, invstd, weight, total, along, used)
        if weight is None:
            grad_weight = None
        return torch.where(rows, grad_x, zero), grad_weight, grad_bias if ctx.has_bias else None, *[None] * 6


class _MaskedBatchNorm(torch.autograd.Function):
    """Batch normalisation of ``[N, C, ...]`` over the rows in use; those that are not become 0.

    (y, mean, biased variance, number of elements of a channel).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, mask, eps):
        axes = [0, *range(2, x.dim())]
        shape = 1, -1, *[1] * (x.dim() - 2)
        rows = _rows(mask, x)
        values = torch.where(rows, x, 0).to(torch.promote_types(x.dtype, torch.float32))
        count = mask.sum() * (x[0, 0].numel() if x.dim() > 2 else 1)
        mean = values.sum(axes) / count
        centred = torch.where(rows, values - mean.view(shape), 0)
        var = centred.square().sum(axes) / count
        scale = (var + eps).rsqrt()
        factor = scale if weight is None else scale * weight
        y = centred * factor.view(shape)
        if bias is not None:
            y = torch.where(rows, y + bias.view(shape), 0)
        ctx.save_for_backward(centred, weight, mask, scale, factor, count)
        ctx.has_bias, ctx.dtype = bias is not None, x.dtype
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx, grad, *_):
        centred, weight, mask, scale, factor, count = ctx.saved_tensors
        axes = [0, *range(2, grad.dim())]
        shape = 1, -1, *[1] * (grad.dim() - 2)
        rows = _rows(mask, grad)
        grad = torch.where(rows, grad, 0).to(centred.dtype)
        total = grad.sum(axes)
        along = (grad * centred).sum(axes) * scale
        inner = grad - (total / count).view(shape) - centred * (along * scale / count).view(shape)
        grad_x = torch.where(rows, inner * factor.view(shape), 0).to(ctx.dtype)
        return (
            grad_x,
            along.to(weight.dtype) if weight is not None else None,
            total if ctx.has_bias else None,
            None,
            None,
        )


@cache
def _signature(func: Callable) -> inspect.Signature:
    return inspect.signature(func)


def _bound(func: Callable, args: tuple, kwargs: dict) -> dict[str, Any] | None:
    """The arguments by name, defaults included; None where they are not as the signature says."""
    try:
        bound = _signature(func).bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


_RULES: dict[Any, Callable] = {
    F.batch_norm: _batch_norm,
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys(_TOTALS, _total),
    **dict.fromkeys(_SPREADS, _spread),
    **dict.fromkeys(_LARGEST, _largest),
}
