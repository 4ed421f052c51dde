"""Softmax and sums over groups of rows, the group of each row given by its number: on the CPU, without a
graph (csrc/cpu/by_index.h).

Each autograd function's backward is made of the others, so that they are differentiable any number of times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime import eager
from . import operators

DTYPES = torch.float32, torch.float64


def takes_rows(rows: Tensor) -> bool:
    """Whether the functions below take these rows, with `Graph.edge_index` for the groups."""
    return rows.is_cpu and rows.dtype in DTYPES and eager.is_eager(rows)


def takes(rows: Tensor, index: Tensor) -> bool:
    """Whether they take these: one index for all columns, int64."""
    return (
        rows.dim() > 0
        and takes_rows(rows)
        and index.is_cpu
        and index.dtype == torch.int64
        and index.dim() == 1
        and rows.shape[0] == index.shape[0]
        and eager.is_eager(index)
    )


def softmax(score: Tensor, index: Tensor, num_groups: int, masked: bool = False) -> Tensor:
    """``[E, ...]``: softmax of score over the rows of each group. masked: of nothing but -inf 0, else nan.

    The caller may modify the result. RuntimeError: a group is out of range.
    """
    flat = _flat(score)
    if torch.is_grad_enabled() and flat.requires_grad:
        return _Softmax.at_once(flat, index, num_groups, masked).clone().view(score.shape)
    return operators.index_softmax(flat, index, num_groups, masked).view(score.shape)


def sums(rows: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """``[num_groups, ...]``: the sums of the rows ``[E, ...]`` of each group. RuntimeError as `softmax`."""
    flat, shape = _flat(rows), (num_groups, *rows.shape[1:])
    if torch.is_grad_enabled() and flat.requires_grad:
        return _Sums.at_once(flat, index, num_groups).view(shape)
    return operators.index_sum(flat, index, num_groups).view(shape)


def _flat(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x
    return x.unsqueeze(1) if x.dim() == 1 else x.flatten(1)


class _Softmax(eager.EagerFunction):
    @staticmethod
    def forward(ctx, score, index, num_groups, masked):
        result = operators.index_softmax(score, index, num_groups, masked)
        ctx.save_for_backward(result, index)
        ctx.num_groups = num_groups
        return result

    @staticmethod
    def backward(ctx, grad):
        result, index = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return operators.index_softmax_backward(result, grad, index, ctx.num_groups), None, None, None
        return _Gradient.apply(result, grad, index, ctx.num_groups), None, None, None


class _Gradient(torch.autograd.Function):
    """result (grad - S(result grad)), S the sum over the group of a row."""

    @staticmethod
    def forward(ctx, result, grad, index, num_groups):
        ctx.save_for_backward(result, grad, index)
        ctx.num_groups = num_groups
        return operators.index_softmax_backward(result, grad, index, num_groups)

    @staticmethod
    def backward(ctx, more):
        result, grad, index = ctx.saved_tensors

        def of_group(x):
            return _Rows.apply(_Sums.apply(x, index, ctx.num_groups), index)

        of_result = of_grad = None
        if ctx.needs_input_grad[0]:
            of_result = more * (grad - of_group(result * grad)) - grad * of_group(result * more)
        if ctx.needs_input_grad[1]:
            of_grad = _Gradient.apply(result, more, index, ctx.num_groups)
        return of_result, of_grad, None, None


class _Sums(eager.EagerFunction):
    @staticmethod
    def forward(ctx, rows, index, num_groups):
        ctx.save_for_backward(index)
        return operators.index_sum(rows, index, num_groups)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return grad.index_select(0, index), None, None
        return _Rows.apply(grad, index), None, None


class _Rows(torch.autograd.Function):
    """x[index]."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.num_groups = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return _Sums.apply(grad, index, ctx.num_groups), None
