"""The fused layer of `ExphormerAttention`: scores are products of query, key and a factor of the edge's type,
and may be clamped (see `engine.autograd`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ...engine import operators
from ...engine.autograd import SeveralOperators
from ...graph import Graph
from ...graph.derived import of_graph
from ...runtime import ops as _ops
from ...runtime.arguments import NEED_BIAS, Numbers, Tensors
from ...runtime.eager import in_autocast, needs_backward
from .operator_call import can_fuse
from .traced import Rows

_hardtanh_backward = _ops.aten.hardtanh_backward.default


class TypedSpec(NamedTuple):
    """An `ExphormerAttention` layer: everything but its tensors."""

    graph: Graph  # source t N + j is the node j for edges of type t
    heads: int
    scale: float
    clamp: float | None


class _GraphOfTypes(NamedTuple):
    """What is derived from a graph, once per shape and dtype."""

    forward: tuple[Any, ...]  # the graph arguments of sddmm, and of spmm over the edges into each node
    reverse: tuple[Any, ...]  # the graph arguments of spmm over the edges out of each source
    ends: Tensor  # zeros [T N, H] as the sources' score terms: the whole score is the edge bias


def _edges(graph: Graph, keys: Tensor) -> _GraphOfTypes:
    """keys: [T N, H, D]."""
    heads, dtype = keys.shape[1], keys.dtype

    def make(graph: Graph) -> _GraphOfTypes:
        ends = torch.zeros(graph.num_src, heads, dtype=_ops.acc_type(dtype), device=graph.device)
        forward, reverse = (_ops.product_args(graph, keys, end) for end in (False, True))
        return _GraphOfTypes(forward, reverse, ends)

    return of_graph(graph, ("typed", heads, keys.shape[2], dtype), make)


class _Typed(NamedTuple):
    """A call of the layer: everything but its tensors, which are x, weight and factor of `typed_layer`."""

    spec: TypedSpec
    handle: Any  # a GraphHandle
    heads: int
    rows: Rows  # those of queries, keys and values, with padding
    # The other attributes that `operators.attend_rows` reads are the same for all calls: additive scores that
    # consist of the edge bias alone, without LeakyReLU and dropout.
    score: str = "additive"
    numbers: Numbers = Numbers(1.0, 1.0, 0.0, 0)

    def forward(self, tensors):
        x, weight, factor = tensors
        types, (_, _, scale, clamp) = len(factor), self.spec
        if self.rows.padding:
            weight = self.of_all().pad(weight)
            factor = self.rows.pad_columns(factor)
        factor = (factor * scale).unsqueeze(1)
        by_kind = weight.view(3, -1, x.shape[1]).transpose(1, 2)
        projected = torch.bmm(x.expand(3, *x.shape), by_kind)
        query, key, value = projected.unbind()
        keys = (key * factor).view(-1, self.heads, self.rows.size + self.rows.padding)
        values = value.expand(types, *value.shape).reshape(-1, value.shape[1])
        edges = _edges(self.spec.graph, keys)
        score = operators.sddmm_op(self.by_head(query), keys, *edges.forward)
        if clamp is not None:
            score.clamp_(-clamp, clamp)
        out, saved = operators.attend_rows(self, self.inputs(keys, values, score), False)
        made = weight, factor, projected, keys, values, score, saved
        # Contiguous: autograd does not let a user modify in place a view that an autograd function made.
        return self.rows.cut(out).contiguous(), made, out

    def of_all(self) -> Rows:
        """The rows of the weight, which projects to queries, keys and values."""
        return self.rows._replace(heads=3 * self.heads)

    def by_head(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1)

    def inputs(self, keys: Tensor, values: Tensor, score: Tensor) -> Tensors:
        ends = _edges(self.spec.graph, keys).ends
        return Tensors(values, ends, None, None, score, *(None,) * 6)

    def rerun(self, tensors, made):
        return operators.attend_rows(self, self.inputs(*made[3:6]), False)[0]

    def backward(self, tensors, grad, made, out, need):
        x, (weight, factor, projected, keys, values, score, saved) = tensors[0], made
        query, key, _ = projected.unbind()
        (graph, _, scale, clamp) = self.spec
        edges = _edges(graph, keys)
        n, types, width = len(x), len(factor), query.shape[1]
        if self.rows.padding:
            grad = self.rows.pad_columns(grad)
        of_values, _, _, _, of_score, *_ = operators.attend_rows_backward(
            self, grad, self.inputs(keys, values, score), out, saved, False, NEED_BIAS
        )
        if clamp is not None:
            of_score = _hardtanh_backward(of_score, score, -clamp, clamp)
        of_score = _ops.as_type(of_score, keys.dtype)
        of_query = operators.spmm_op(of_score, keys, *edges.forward, n)
        of_keys = operators.spmm_op(of_score, self.by_head(query), *edges.reverse, n * types)
        of_keys = of_keys.view(types, n, width)
        found: list[Tensor | None] = [None, None, None]
        if need[2]:
            of_factor = (of_keys * key).sum(1).mul_(scale)
            found[2] = self.rows.cut(of_factor)
        if need[0] or need[1]:
            of_value, of_key = of_values.view(types, n, width).sum(0), (of_keys * factor).sum(0)
            together = torch.cat([of_query.flatten(1), of_key, of_value], 1)
            if need[0]:
                found[0] = together.mm(weight)
            if need[1]:
                found[1] = self.of_all().cut(together.t().mm(x).t()).t()
        return found

    def formula(self, x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        return typed_attention(self.spec, F.linear(x, weight), factor)


def typed_layer(spec: TypedSpec, x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    """The layer's result [N, H * D], from checked arguments. x: [N, F]. weight: [3 H D, F], of queries, keys
    and values. factor: [T, H D]."""
    graph, heads, tensors = spec.graph, spec.heads, (x, weight, factor)
    if not (
        can_fuse(graph, x, weight)
        and can_fuse(graph, factor, factor)
        and factor.dtype is x.dtype
        and not in_autocast(x)
    ):
        return typed_attention(spec, F.linear(x, weight), factor)
    rows = Rows.on(x.device.type, heads, factor.shape[1] // heads, x.dtype)
    train = needs_backward(tensors)
    handle = graph._planner.handle(heads, rows.size + rows.padding, x.dtype, "gat", "auto", True, train)
    call = _Typed(spec, handle, heads, rows)
    return SeveralOperators.at_once(call, *tensors) if train else _ops.call(call.forward, tensors)[0]


def typed_attention(spec: TypedSpec, projected: Tensor, factor: Tensor) -> Tensor:
    """`typed_layer` in plain operations, from the projected features [N, 3 H D]."""
    graph, heads, scale, clamp = spec
    query, key, value = projected.unflatten(1, (3, heads, -1)).unbind(1)
    by_type = factor.unflatten(1, (heads, -1)).unsqueeze(1)
    keys, values = (key * by_type).flatten(0, 1), value.repeat(len(factor), 1, 1)
    score = functional.sddmm(graph, query, keys) * scale
    if clamp is not None:
        score = score.clamp(-clamp, clamp)
    out = functional.score_attention(graph, score, values)
    return out.flatten(1)
