"""Attention whose scores are products with a factor of the edge's type, clamped, as one autograd function:
projections, keys of each type, scores and attention. See `_layers`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ...engine.edge_rows import of_graph
from ...graph import Graph
from ...runtime import ops as _ops
from ...runtime.arguments import NEED_BIAS, SCORES, ops
from ...runtime.eager import EagerFunction, called_directly, keep_aside, taken_back
from .pair import can_fuse, cut, cut_rows, derived, pad_columns, pad_rows, padding_of

__all__ = ["typed_attention", "typed_layer"]

_attend, _attend_backward = ops.attend.default, ops.attend_backward.default
_hardtanh_backward = torch.ops.aten.hardtanh_backward.default
_ADDITIVE = SCORES["additive"]
_NO_OPTIONS = (None,) * 6  # behind the bias


class _Edges(NamedTuple):
    """What a graph is to it."""

    forward: tuple[Any, ...]  # the arguments of products, and those over sources
    reverse: tuple[Any, ...]
    ends: Tensor  # 0 [T N, H]: to the scores, which are a bias, nothing is added


def _edges(graph: Graph, keys: Tensor) -> _Edges:
    """keys: [T N, H, D]."""
    heads, dtype = keys.shape[1], keys.dtype

    def make(graph: Graph) -> _Edges:
        ends = torch.zeros(graph.num_src, heads, dtype=_ops.acc_type(dtype), device=graph.device)
        forward, reverse = (_ops.product_args(graph, keys, end) for end in (False, True))
        return _Edges(forward, reverse, ends)

    return of_graph(graph, ("typed", heads, keys.shape[2], dtype), make)


class _Typed(NamedTuple):
    """What is no tensor of it."""

    graph: Graph  # source t N + j: the node j at edges of type t
    handle: Any  # a GraphHandle
    heads: int
    size: int  # of a head
    padding: int
    scale: float
    clamp: float | None

    def forward(self, x: Tensor, weight: Tensor, factor: Tensor):
        """The result [N, H * size], what backward takes beside the inputs, and what the operator gave."""
        types = len(factor)
        if self.padding:
            weight = pad_rows(weight, self.size, self.padding)
            factor = pad_columns(factor, self.heads, self.size, self.padding)
        factor = (factor * self.scale).unsqueeze(1)
        by_kind = weight.view(3, -1, x.shape[1]).transpose(1, 2)
        projected = torch.bmm(x.expand(3, *x.shape), by_kind)
        query, key, value = projected.unbind()
        keys = (key * factor).view(-1, self.heads, self.size + self.padding)
        values = value.expand(types, *value.shape).reshape(-1, value.shape[1])
        score = ops.sddmm.default(self._heads(query), keys, *_edges(self.graph, keys).forward)
        if self.clamp is not None:
            score.clamp_(-self.clamp, self.clamp)
        out, kept, _ = self._run(keys, values, score)
        made = weight, factor, projected, keys, values, score, kept
        return cut(out, self.heads, self.size, self.padding) if self.padding else out, made, out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1)

    def _run(self, keys: Tensor, values: Tensor, score: Tensor):
        ends = _edges(self.graph, keys).ends
        return _attend(
            self.handle.number, self.heads, _ADDITIVE, values, ends, None, None, score, *_NO_OPTIONS, 1.0,
            1.0, 0.0, 0, False, False,
        )  # fmt: skip

    def backward(self, x: Tensor, grad: Tensor, made, out: Tensor | None, need):
        weight, factor, projected, keys, values, score, kept = made
        if out is None:  # it was modified
            out, _, _ = self._run(keys, values, score)
        query, key, _ = projected.unbind()
        n, types, width, edges = len(x), len(factor), query.shape[1], _edges(self.graph, keys)
        if self.padding:
            grad = pad_columns(grad, self.heads, self.size, self.padding)
        of_values, _, _, _, of_score, *_ = _attend_backward(
            self.handle.number, self.heads, grad, None, _ADDITIVE, values, edges.ends, None, None, score,
            *_NO_OPTIONS, out, kept, False, None, 1.0, 1.0, 0.0, 0, NEED_BIAS,
        )  # fmt: skip
        if self.clamp is not None:
            of_score = _hardtanh_backward(of_score, score, -self.clamp, self.clamp)
        of_score = _ops.as_type(of_score, keys.dtype)
        of_query = ops.spmm.default(of_score, keys, *edges.forward, n)
        of_keys = ops.spmm.default(of_score, self._heads(query), *edges.reverse, n * types)
        of_keys = of_keys.view(types, n, width)
        found: list[Tensor | None] = [None, None, None]
        if need[2]:
            of_factor = (of_keys * key).sum(1).mul_(self.scale)
            found[2] = cut(of_factor, self.heads, self.size, self.padding)
        if need[0] or need[1]:
            of_value, of_key = of_values.view(types, n, width).sum(0), (of_keys * factor).sum(0)
            together = torch.cat([of_query.flatten(1), of_key, of_value], 1)
            if need[0]:
                found[0] = together.mm(weight)
            if need[1]:
                of_weight = together.t().mm(x)
                found[1] = cut_rows(of_weight, self.size, self.padding) if self.padding else of_weight
        return found

    def formula(self, x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        return typed_attention(self.graph, F.linear(x, weight), factor, self.heads, self.scale, self.clamp)


@called_directly
class _TypedLayer(EagerFunction):
    @staticmethod
    def forward(ctx, call, *tensors):
        result, made, out = _ops.call(call.forward, *tensors)
        ctx.call = call
        # Unless it is the result, nobody else sees `out`.
        ctx.save_for_backward(*tensors, *made, *((out,) if call.padding else keep_aside(ctx, out)))
        return result

    @staticmethod
    def backward(ctx, grad):
        call, saved, need = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        inputs, made, last = saved[:3], saved[3:10], saved[10:]
        if torch.is_grad_enabled():  # create_graph
            return None, *derived(call.formula, grad, inputs, need)
        if not call.padding:
            last, _ = taken_back(ctx, last)
        return None, *_ops.call(call.backward, inputs[0], grad, made, None if last is None else last[0], need)


def typed_layer(
    graph: Graph, x: Tensor, weight: Tensor, factor: Tensor, heads: int, scale: float, clamp: float | None
) -> Tensor:
    """[N, H * D] of checked arguments. x: [N, F]. weight: [3 H D, F], of queries, keys and values. factor:
    [T, H D]. graph: source t N + j is the node j at edges of type t."""
    size = factor.shape[1] // heads
    tensors = x, weight, factor
    if not (
        can_fuse(graph, x, weight)
        and can_fuse(graph, factor, factor)
        and factor.dtype is x.dtype
        and not torch.is_autocast_enabled(x.device.type)
    ):
        return typed_attention(graph, F.linear(x, weight), factor, heads, scale, clamp)
    padding = padding_of(x, size)
    train = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    handle = graph._planner.handle(heads, size + padding, x.dtype, "gat", "auto", True, train)
    call = _Typed(graph, handle, heads, size, padding, scale, clamp)
    return _TypedLayer.at_once(call, *tensors) if train else _ops.call(call.forward, *tensors)[0]


def typed_attention(
    graph: Graph, projected: Tensor, factor: Tensor, heads: int, scale: float, clamp: float | None
) -> Tensor:
    """`typed_layer` of what was projected: [N, 3 H D]."""
    query, key, value = projected.unflatten(1, (3, heads, -1)).unbind(1)
    by_type = factor.unflatten(1, (heads, -1)).unsqueeze(1)
    keys, values = (key * by_type).flatten(0, 1), value.repeat(len(factor), 1, 1)
    score = functional.sddmm(graph, query, keys, scale=scale)
    if clamp is not None:
        score = score.clamp(-clamp, clamp)
    out = functional.gat_attention(graph, values, None, None, negative_slope=1.0, edge_bias=score)
    return out.flatten(1)
