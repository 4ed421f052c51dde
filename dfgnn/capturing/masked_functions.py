"""Keeps padding out of results: a torch function mode that replaces functions which mix rows by masked ones.

`padded_batch` makes the padding. While a padded step runs, ``F.batch_norm`` in training, the mean, sum,
variance or deviation over all rows (one per node, edge or graph), and the losses of ``torch.nn.functional``
leave out rows that are not in use. The largest value of an index (``int(batch.max()) + 1``, as pooling asks)
is that of the capacity, so that nothing waits.
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


class WithoutPadding(TorchFunctionMode):
    """The mode of a padded step, in which functions that mix rows leave out padded ones. masks: for each
    capacity a bool ``[capacity]`` that is True for rows in use. bounds: for each tensor of ids (begin, end)
    of its addresses, and the number of possible ids."""

    def __init__(self, masks: dict[int, Tensor], bounds: list[tuple[int, int, int]]):
        super().__init__()
        self.masks, self.bounds = masks, bounds
        self._counts: dict[int, _Counts] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rule = _RULES.get(func) or _RULES.get(getattr(func, "__wrapped__", None))
        if rule is None:
            return func(*args, **kwargs)
        return rule(self, func, args, kwargs)

    def bound_of(self, x: Tensor) -> int | None:
        """The number of possible ids if x lies in the memory of one of the tensors of ids; else None."""
        if x.is_floating_point() or not x.numel():
            return None
        place = x.data_ptr()
        return next((count for begin, end, count in self.bounds if begin <= place < end), None)

    def mask_of(self, x: Any) -> Tensor | None:
        return self.masks.get(x.shape[0]) if isinstance(x, Tensor) and x.dim() else None

    def counts_of(self, mask: Tensor) -> _Counts:
        """The counts of one of the masks, computed once per step."""
        if len(mask) not in self._counts:
            used = mask.sum(dtype=torch.float32)
            total = torch.full_like(used, len(mask))
            self._counts[len(mask)] = _Counts(
                torch.stack([total, used - total]), used.to(torch.int32).view(1), torch.zeros_like(used)
            )
        return self._counts[len(mask)]


class _Counts(NamedTuple):
    """Numbers of rows, on the device. merged: float32 [2], the number of all rows, and minus that of padded
    rows; used: int32 [1], that of rows in use; zero: a float32 0."""

    merged: Tensor
    used: Tensor
    zero: Tensor


class _Running(NamedTuple):
    """The statistics that a batch normalisation keeps, and how it does."""

    mean: Tensor | None
    var: Tensor | None
    momentum: float
    eps: float


class WithoutDropout(TorchFunctionMode):
    """A mode without dropout, for comparing two runs whose dropout masks would differ."""

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
    """The mask with as many dimensions as x."""
    return mask.view(-1, *[1] * (x.dim() - 1))


def in_use(mask: Tensor, x: Tensor) -> Tensor:
    """x with zeros in the rows that are not in use, even where these hold inf or NaN."""
    return torch.where(_rows(mask, x), x, 0)


def _largest(mode: WithoutPadding, func, args, kwargs):
    x = args[0] if args else kwargs.get("input")
    if len(args) == 1 and not kwargs and isinstance(x, Tensor):
        bound = mode.bound_of(x)
        if bound is not None:
            return torch.tensor(bound - 1)  # on the host, where the caller reads it without waiting
    return func(*args, **kwargs)


def _over_rows(
    mode: WithoutPadding, arguments: dict[str, Any] | None
) -> tuple[Tensor, Tensor, tuple[int, ...]] | None:
    """(x, its mask, the reduced dimensions) if the rows are reduced and x has padding; else None."""
    mask = None if arguments is None else mode.mask_of(arguments["input"])
    if arguments is None or mask is None:
        return None
    x, dim = arguments["input"], arguments["axis"] if arguments["dim"] is None else arguments["dim"]
    dims = range(x.dim()) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    dims = tuple(k % x.dim() for k in dims)
    return (x, mask, dims) if 0 in dims else None


def _count(x: Tensor, mask: Tensor, dims: tuple[int, ...]) -> Tensor:
    return mask.sum() * prod(x.shape[k] for k in dims if k)


def _total(mode: WithoutPadding, func, args, kwargs):
    arguments = _bound(_total_of, args, kwargs)
    over = _over_rows(mode, arguments)
    if arguments is None or over is None:
        return func(*args, **kwargs)
    x, mask, dims = over
    if x.dtype == torch.bool or not (x.is_floating_point() or _TOTALS[func] == "sum"):
        return func(*args, **kwargs)
    total = torch.sum(in_use(mask, x), dims, keepdim=arguments["keepdim"], dtype=arguments["dtype"])
    return total if _TOTALS[func] == "sum" else total / _count(x, mask, dims)


# The arguments of sum and mean, for `_bound`: torch's own functions have no signature in Python.
def _total_of(input, dim=None, keepdim=False, *, dtype=None, axis=None): ...


def _spread(mode: WithoutPadding, func, args, kwargs):
    arguments = _bound(_spread_of, args, kwargs)
    if arguments is not None and isinstance(arguments["dim"], bool):  # x.std(unbiased)
        arguments["dim"], arguments["unbiased"] = None, arguments["dim"]
    over = _over_rows(mode, arguments)
    if arguments is None or over is None:
        return func(*args, **kwargs)
    x, mask, dims = over
    count, keepdim = _count(x, mask, dims), arguments["keepdim"]
    x = in_use(mask, x)
    centred = in_use(mask, x - x.sum(dims, keepdim=True) / count)
    correction = arguments["correction"] if arguments["unbiased"] is None else int(arguments["unbiased"])
    degrees = (count - correction).clamp(min=0)
    if _SPREADS[func] == "var":
        return centred.square().sum(dims, keepdim=keepdim) / degrees
    # The gradient of vector_norm is 0 where all rows are equal, as that of torch.std is; sqrt's is not.
    return torch.linalg.vector_norm(centred, dim=dims, keepdim=keepdim) / degrees.sqrt()


# The arguments of std and var, for `_bound`.
def _spread_of(input, dim=None, unbiased=None, keepdim=False, *, correction=1, axis=None): ...


def _loss(mode: WithoutPadding, func, args, kwargs):
    arguments = _bound(func, args, kwargs)
    mask = None if arguments is None else mode.mask_of(arguments["input"])
    if arguments is None or mask is None or arguments["reduction"] == "none":
        return func(*args, **kwargs)
    if any(arguments.get(name) is not None for name in ("size_average", "reduce")):
        return func(*args, **kwargs)
    target = arguments["target"]
    if func in (F.cross_entropy, F.nll_loss) and not target.is_floating_point():
        arguments["target"] = torch.where(_rows(mask, target), target, arguments["ignore_index"])
        return func(**arguments)
    reduction, arguments["reduction"] = arguments["reduction"], "none"
    each = in_use(mask, func(**arguments))
    if reduction == "sum":
        return each.sum()
    return each.sum() / (mask.sum() * (1 if reduction == "batchmean" else each[0].numel()))


def _batch_norm(mode: WithoutPadding, func, args, kwargs):
    arguments = _bound(func, args, kwargs)
    mask = None if arguments is None else mode.mask_of(arguments["input"])
    if arguments is None or mask is None or not arguments["training"]:
        return func(*args, **kwargs)
    x, mean, var = arguments["input"], arguments["running_mean"], arguments["running_var"]
    if _on_device(x, mean):
        running = _Running(mean, var, arguments["momentum"], arguments["eps"])
        counts = mode.counts_of(mask)
        return _DeviceBatchNorm.apply(x, arguments["weight"], arguments["bias"], mask, counts, running)
    y, batch_mean, batch_var, count = _masked_batch_norm(
        x, arguments["weight"], arguments["bias"], mask, arguments["eps"]
    )
    if mean is not None:
        with torch.no_grad():
            unbiased = batch_var * (count / (count - 1).clamp(min=1))
            mean.lerp_(batch_mean.to(mean.dtype), arguments["momentum"])
            var.lerp_(unbiased.to(var.dtype), arguments["momentum"])
    return y


# With more rows, float32 does not count them exactly.
_MOST_ROWS = 2**24


def _on_device(x: Tensor, running_mean: Tensor | None) -> bool:
    """Whether `_DeviceBatchNorm` can normalise x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    known = running_mean is None or running_mean.dtype == wide
    return x.is_cuda and x.dim() == 2 and len(x) < _MOST_ROWS and known


class _DeviceBatchNorm(torch.autograd.Function):
    """`_masked_batch_norm` of ``[N, C]`` on a GPU with few launches, by the kernels of
    torch.nn.SyncBatchNorm, which merge statistics of parts by their sizes.

    Rows that are not in use, the last ones, become copies of the first row, which always is in use. The merge
    removes them from the statistics as a part of negative size, with the first row's mean and no variance.
    That loses digits where means are many deviations from 0, so the first row is first subtracted from all;
    not so in 16 bits, where the subtraction's rounding would lose more. Padded rows of y are finite and have
    no gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, mask, counts, running):
        first = x[:1]
        is_shifted = x.dtype.itemsize > 2
        x = torch.where(_rows(mask, x), x, first).contiguous()
        if is_shifted:
            x = x - first
        parts = [torch.batch_norm_stats(part, running.eps) for part in (x, x[:1])]
        means, invstds = map(torch.stack, zip(*parts))
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            means, means, invstds, *running, counts.merged.to(means.dtype)
        )
        if is_shifted and running.mean is not None:
            running.mean.add_(first[0], alpha=running.momentum)
        ctx.save_for_backward(x, weight, mask, mean, invstd, counts.used, counts.zero)
        ctx.has_bias = bias is not None
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, running.eps)

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
        return torch.where(rows, grad_x, zero), grad_weight, grad_bias if ctx.has_bias else None, *[None] * 3


def _masked_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch normalisation of ``[N, C, ...]`` over the rows in use; the others become 0.

    Returns (y, mean, biased variance, number of elements of a channel).
    """
    axes, shape, rows = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2)), _rows(mask, x)
    values = torch.where(rows, x, 0).to(torch.promote_types(x.dtype, torch.float32))
    count = mask.sum() * (x[0, 0].numel() if x.dim() > 2 else 1)
    mean = values.sum(axes) / count
    centred = torch.where(rows, values - mean.view(shape), 0)
    var = centred.square().sum(axes) / count
    scale = (var + eps).rsqrt()
    y = centred * (scale if weight is None else scale * weight).view(shape)
    if bias is not None:
        y = torch.where(rows, y + bias.view(shape), 0)
    return y.to(x.dtype), mean, var, count


@cache
def _signature(func: Callable) -> inspect.Signature:
    return inspect.signature(func)


def _bound(func: Callable, args: tuple, kwargs: dict) -> dict[str, Any] | None:
    """The arguments by name, defaults included; None where they do not match the signature."""
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
