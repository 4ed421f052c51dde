"""Attention among all pairs within blocks of rows: its operators with their derivatives and shapes.

`csrc/core/blocks.h` has the formulas. The operators are called through torch's dispatcher, which knows their
gradients from here, so that compilers, torch.func and export see them as they see PyTorch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from ..runtime import ops as _ops

forward_op, backward_op = _ops.operator("block_attention_forward"), _ops.operator("block_attention_backward")
second_op = _ops.operator("block_attention_second")

CUDA_SIZES = 16, 32, 64, 128  # of heads, for which there are CUDA kernels; for float64 without the last


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    key_bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out [N, H, Dv], stats [N, H, 2]): the logarithm of the sum of a row's exponentials is the sum of its
    two numbers, of which only this sum is differentiable. A row without mass has (inf, 0)."""
    out, stats = forward_op(query, key, value, offsets, key_offsets, key_bias, scale)
    return out, stats


# ---- shapes ----------------------------------------------------------------------------------------------


@library.register_fake(forward_op)
def _(query, key, value, offsets, key_offsets, key_bias, scale):
    rows, heads, _ = query.shape
    return (
        query.new_empty(rows, heads, value.shape[2]),
        query.new_empty(rows, heads, 2, dtype=_ops.acc_type(query.dtype)),
    )


def _gradients(query, key, value, need_bias: bool) -> tuple[Tensor, ...]:
    bias = (key.shape[0], key.shape[1]) if need_bias else (0,)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        query.new_empty(bias, dtype=_ops.acc_type(query.dtype)),
    )


@library.register_fake(backward_op)
def _(
    grad_out, grad_log_sum, query, key, value, offsets, key_offsets, key_bias, out, stats, scale, need_bias
):
    return _gradients(query, key, value, need_bias)


@library.register_fake(second_op)
def _(
    grad_out, grad_log_sum, query, key, value, offsets, key_offsets, key_bias, out, stats,
    of_query, of_key, of_value, of_bias, scale, need_bias,
):  # fmt: skip
    tau = query.new_empty(query.shape[:2], dtype=_ops.acc_type(query.dtype))
    return grad_out.new_empty(grad_out.shape), tau, *_gradients(query, key, value, need_bias)


# ---- derivatives -----------------------------------------------------------------------------------------


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, offsets, key_offsets, key_bias, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, offsets, key_offsets, key_bias, *output)


def _backward(ctx: Any, grad_out: Tensor | None, grad_stats: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, offsets, key_offsets, key_bias, out, stats = ctx.saved_tensors
    if grad_out is None and grad_stats is None:
        return (None,) * 7
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    of_sum = None if grad_stats is None else grad_stats[..., 1]
    need_bias = key_bias is not None and ctx.needs_input_grad[5]
    of_query, of_key, of_value, of_bias = backward_op(
        grad_out, of_sum, query, key, value, offsets, key_offsets, key_bias, out, stats, ctx.scale, need_bias
    )
    return of_query, of_key, of_value, None, None, of_bias if need_bias else None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale, ctx.need_bias = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _second(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_out, of_sum, query, key, value, offsets, key_offsets, key_bias, out, stats = ctx.saved_tensors
    if all(grad is None for grad in grads):
        return (None,) * 12
    of_query, of_key, of_value = (
        torch.zeros_like(x) if grad is None else grad for x, grad in zip((query, key, value), grads)
    )
    of_bias = grads[3] if ctx.need_bias else None
    need_bias = key_bias is not None and ctx.needs_input_grad[7]
    given = (grad_out, query, key, value, out, of_query, of_key, of_value)
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):  # kernels of 32 and 64 bits alone
        given = tuple(x.float() for x in given)
    grad_out, query_, key_, value_, out, of_query, of_key, of_value = given
    of_grad, tau, *found, of_bias = second_op(
        grad_out, of_sum, query_, key_, value_, offsets, key_offsets, key_bias, out, stats,
        of_query, of_key, of_value, of_bias, ctx.scale, need_bias,
    )  # fmt: skip
    of_grad, *found = (x.to(query.dtype) for x in (of_grad, *found))
    return (
        of_grad, tau if of_sum is not None else None, *found, None, None, of_bias if need_bias else None,
        None, None, None, None,
    )  # fmt: skip


def _no_third(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(
        "block_attention: third derivatives are not computed; dfgnn.reference.block_attention has them"
    )


library.register_autograd(forward_op, _backward, setup_context=_save_forward)
library.register_autograd(backward_op, _second, setup_context=_save_backward)
library.register_autograd(second_op, _no_third)
