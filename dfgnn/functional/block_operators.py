"""Attention among all pairs within blocks of rows: its operators with their derivatives and shapes.

`csrc/core/blocks.h` has the formulas. Eager calls are rules (`runtime/rules.py`), which cost the host little.
Compilers, torch.func and export call the operators through torch's dispatcher, which knows the same formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from ..runtime import eager, rules
from ..runtime import ops as _ops

forward_op, backward_op = _ops.operator("block_attention_forward"), _ops.operator("block_attention_backward")
second_op = _ops.operator("block_attention_second")

CUDA_SIZES = 16, 32, 64, 128  # of heads, for which there are CUDA kernels; for float64 without the last


def cuda_size(dtype: torch.dtype, columns: int) -> int | None:
    """The least size of heads with kernels on CUDA that holds so many columns; None if none does."""
    sizes = CUDA_SIZES[:-1] if dtype == torch.float64 else CUDA_SIZES
    return next((size for size in sizes if size >= columns), None)


def takes(device: torch.device, dtype: torch.dtype, columns: int) -> bool:
    """Whether the device's kernels take heads of so many columns."""
    return device.type != "cuda" or cuda_size(dtype, columns) is not None


class Inputs(NamedTuple):
    """The tensors that the operators take besides numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    offsets: Tensor
    key_offsets: Tensor
    key_bias: Tensor | None


def attention(inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """(out [N, H, Dv], stats [N, H, 2]): the logarithm of the sum of a row's exponentials is the sum of its
    two numbers, of which only this sum is differentiable. A row without mass has (inf, 0)."""
    if eager.is_eager(inputs.query) or eager.transformed(*inputs):
        out, stats = rules.apply(_Attention(scale), *inputs)
    else:
        out, stats = forward_op(*inputs, scale)
    return out, stats


# ---- formulas --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Attention(rules.Rule):
    scale: float

    def forward(self, *inputs):
        return _ops.call(forward_op, *inputs, self.scale)

    def saved(self, tensors, results):
        return *tensors, *results

    def gradients(self, need, saved, grad_out, grad_stats):
        return _first(need[5], saved, self.scale, grad_out, grad_stats)

    def vmap(self, info, dims, *inputs):
        return _folded(info, dims, inputs, lambda *x: rules.apply(self, *x))


@dataclass(slots=True, eq=False)
class _Gradient(rules.Rule):
    """The backward operator, of (grad_out, grad_log_sum, the inputs, out, stats)."""

    scale: float
    need_bias: bool

    def forward(self, *tensors):
        return _ops.call(backward_op, *tensors, self.scale, self.need_bias)

    def gradients(self, need, saved, *grads):
        return _of_first(need[7], saved, self.scale, self.need_bias, grads)

    def vmap(self, info, dims, *tensors):
        return _mapped(self, info, dims, tensors)


class _Second(_Gradient):
    """The operator of second derivatives, of the arguments that `_of_first` gives it."""

    __slots__ = ()

    def forward(self, *tensors):
        return _ops.call(second_op, *tensors, self.scale, self.need_bias)

    def saved(self, tensors, results):
        return ()

    def gradients(self, need, saved, *grads):
        raise NotImplementedError(
            "block_attention: third derivatives are not computed; dfgnn.reference.block_attention has them"
        )


def _run(rule: rules.Rule, op: Any, *args: Any) -> Any:
    """What the rule and the operator both compute of (tensors, scale, need_bias): eagerly by the rule."""
    if eager.is_eager(args[2]) or eager.transformed(*args[:-2]):
        return rules.apply(rule, *args[:-2])
    return op(*args)


def _first(
    need_bias: bool, saved: Any, scale: float, grad_out: Tensor | None, grad_stats: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs. saved: the inputs, out and stats."""
    if grad_out is None and grad_stats is None:
        return (None,) * 6
    grad_out = torch.zeros_like(saved[6]) if grad_out is None else grad_out
    of_sum = None if grad_stats is None else grad_stats[..., 1]
    need_bias = need_bias and saved[5] is not None
    rule = _Gradient(scale, need_bias)
    query, key, value, bias = _run(rule, backward_op, grad_out, of_sum, *saved, scale, need_bias)
    return query, key, value, None, None, bias if need_bias else None


def _of_first(
    need_bias: bool, saved: Any, scale: float, has_bias: bool, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of the backward operator's tensors. saved: these; grads: the cotangents of its results;
    has_bias: whether the last of these is one."""
    if all(grad is None for grad in grads):
        return (None,) * 10
    grad_out, of_sum, query, key, value, offsets, key_offsets, key_bias, out, stats = saved
    of_query, of_key, of_value = (
        torch.zeros_like(x) if grad is None else grad for x, grad in zip((query, key, value), grads)
    )
    need_bias = need_bias and key_bias is not None
    features = [grad_out, query, key, value, out, of_query, of_key, of_value]
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):  # kernels of 32 and 64 bits alone
        features = [x.float() for x in features]
    grad, q, k, v, o, a, c, e = features
    of_bias = grads[3] if has_bias else None
    of_grad, tau, *found, of_bias = _run(
        _Second(scale, need_bias), second_op, grad, of_sum, q, k, v, offsets, key_offsets, key_bias, o, stats,
        a, c, e, of_bias, scale, need_bias,
    )  # fmt: skip
    of_grad, *found = (_ops.as_type(x, query.dtype) for x in (of_grad, *found))
    of_sum = None if of_sum is None else tau
    return of_grad, of_sum, *found, None, None, of_bias if need_bias else None, None, None


# ---- torch.func ------------------------------------------------------------------------------------------


def _folded(info: Any, dims: tuple[int | None, ...], args: tuple[Any, ...], call: Any) -> tuple[Any, Any]:
    """The results of call, whose tensors are [rows, heads, ...], besides offsets and numbers, for vmap: what
    it maps over becomes further heads."""
    count, folded = info.batch_size, []
    for x, dim in zip(args, dims):
        if not isinstance(x, Tensor) or x.dim() - (dim is not None) < 2:
            if dim is not None:
                raise NotImplementedError(
                    "block_attention: torch.func.vmap: expected the same offsets for all"
                )
            folded.append(x)
            continue
        whole = x.unsqueeze(1).expand(-1, count, *x.shape[1:]) if dim is None else x.movedim(dim, 1)
        folded.append(whole.flatten(1, 2))
    results = call(*folded)
    return tuple(x.unflatten(1, (count, -1)) for x in results), (1,) * len(results)


def _mapped(rule: Any, info: Any, dims: tuple[int | None, ...], tensors: Any) -> tuple[Any, Any]:
    """vmap of a rule whose last result, the gradient of the bias, may be an empty tensor."""

    def call(*x: Any) -> Any:
        results = rules.apply(rule, *x)
        return results if rule.need_bias else results[:-1]

    found, of_results = _folded(info, dims, tensors, call)
    if rule.need_bias:
        return found, of_results
    return (*found, found[0].new_empty(0, dtype=_ops.acc_type(found[0].dtype))), (*of_results, None)


# ---- operators behind the dispatcher ---------------------------------------------------------------------


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, heads, _ = query.shape
    return (
        query.new_empty(rows, heads, value.shape[2]),
        query.new_empty(rows, heads, 2, dtype=_ops.acc_type(query.dtype)),
    )


def _backward_fake(grad_out: Tensor, _: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    bias = (key.shape[0], key.shape[1]) if rest[-1] else (0,)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        query.new_empty(bias, dtype=_ops.acc_type(query.dtype)),
    )


def _second_fake(grad_out: Tensor, _: Any, query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    tau = query.new_empty(query.shape[:2], dtype=_ops.acc_type(query.dtype))
    return grad_out.new_empty(grad_out.shape), tau, *_backward_fake(grad_out, None, query, *rest)


library.register_fake(forward_op, _forward_fake)
library.register_fake(backward_op, _backward_fake)
library.register_fake(second_op, _second_fake)
rules.register(forward_op, _Attention, len(Inputs._fields))
rules.register(backward_op, _Gradient, len(Inputs._fields) + 4)
rules.register(second_op, _Second, len(Inputs._fields) + 8)
