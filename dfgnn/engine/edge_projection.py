"""Dot attention whose edge features are projections of few numbers, e_ij = W x_ij: no E x H x D tensor.

A projection is linear, and so can change places with the products of attention:

    q_i . (k_j + W x_ij) = q_i . k_j + (W^T q_i) . x_ij
    sum_j alpha_ij (v_j + W x_ij) = sum_j alpha_ij v_j + W sum_j alpha_ij x_ij

What remains per edge are products of d numbers per head, an edge bias, and the weighted sum of the edge's own
features; per node there are rows [H, d]. Three operators (csrc/core/edge_terms.h) do that: `edge_dot`,
`edge_sum` and `edge_outer`, each linear in both arguments, with the other two as gradients.

There are three ways. `_composed` puts these together under autograd, for every option and to any order.
`_Projected` is training with less memory and fewer passes. Its output contains the edges' part, so that
g . out is all of delta, and backward needs neither the attention nor the output without that part. `_InOne`
is the same with all products but the gradient of x in the attention's own kernels, on CUDA in 16 bits,
for heads whose lanes can share the features: of edge size are these, and in backward two numbers per edge and
head.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ..graph import GraphPart
from ..plan.cost import lanes_per_head
from ..runtime import eager as _eager
from ..runtime import ops as _ops
from ..runtime.arguments import FEAT_IN_KEY, FEAT_IN_VALUE, NEED_BIAS, NEED_WEIGHT, EdgeArgs, Numbers, Tensors
from . import autograd as _autograd
from . import paths
from . import plain as _plain
from . import traced_graph as _edges
from .paths import AttentionInputs, attend

# ---- the operators with their derivatives ----------------------------------------------------------------


class _EdgeDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, attr, graph, scale):
        ctx.save_for_backward(rows, attr)
        ctx.graph, ctx.scale = graph, scale
        return _ops.edge_dot(graph, rows, attr, scale)

    @staticmethod
    def backward(ctx, grad):
        rows, attr = ctx.saved_tensors
        need_rows, need_attr = ctx.needs_input_grad[:2]
        return (
            edge_sum(ctx.graph, grad, attr, rows.shape[2]) * ctx.scale if need_rows else None,
            edge_outer(ctx.graph, grad, rows, attr.shape[1], ctx.scale) if need_attr else None,
            None,
            None,
        )


class _EdgeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, attr, graph, width):
        ctx.save_for_backward(weight, attr)
        ctx.graph = graph
        return _ops.edge_sum(graph, weight, attr, width)

    @staticmethod
    def backward(ctx, grad):
        weight, attr = ctx.saved_tensors
        need_weight, need_attr = ctx.needs_input_grad[:2]
        return (
            edge_dot(ctx.graph, grad, attr) if need_weight else None,
            edge_outer(ctx.graph, weight, grad, attr.shape[1]) if need_attr else None,
            None,
            None,
        )


class _EdgeOuter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, rows, graph, dim, scale):
        ctx.save_for_backward(weight, rows)
        ctx.graph, ctx.scale = graph, scale
        return _ops.edge_outer(graph, weight, rows, dim, scale)

    @staticmethod
    def backward(ctx, grad):
        weight, rows = ctx.saved_tensors
        need_weight, need_rows = ctx.needs_input_grad[:2]
        return (
            edge_dot(ctx.graph, rows, grad, ctx.scale) if need_weight else None,
            edge_sum(ctx.graph, weight, grad, rows.shape[2]) * ctx.scale if need_rows else None,
            None,
            None,
            None,
        )


def _operand(graph):
    """Of destinations and edges alone: sources need not be fetched."""
    return graph.as_one() if isinstance(graph, GraphPart) else _edges.stand_in(graph)


def edge_dot(graph, rows: Tensor, attr: Tensor, scale: float = 1.0) -> Tensor:
    """[E, H] acc: scale rows[i, h] . attr[e] of each edge e into i. rows: [N, H, width]; attr: [E, d]. What
    rows have behind the first d is not looked at, here and below."""
    graph = _operand(graph)
    if isinstance(graph, _edges.EdgeList):
        return _edges.edge_dot(graph, rows, attr, scale)
    if _eager.transformed(rows, attr):
        acc = _ops.acc_type(rows.dtype)
        ends = rows[:, :, : attr.shape[1]].to(acc)[_plain.ends_of(graph).edge_index[1]]
        return torch.einsum("ehc,ec->eh", ends, attr.to(acc)) * scale
    return _EdgeDot.apply(rows, attr, graph, scale)


def edge_sum(graph, weight: Tensor, attr: Tensor, width: int) -> Tensor:
    """[N, H, width]: the sum of weight[e, h] attr[e] over the edges e into i; zeros behind d. weight: acc."""
    graph = _operand(graph)
    if isinstance(graph, _edges.EdgeList):
        return _edges.edge_sum(graph, weight, attr, width)
    if _eager.transformed(weight, attr):
        terms = torch.einsum("eh,ec->ehc", weight, attr.to(weight.dtype))
        terms = torch.nn.functional.pad(terms, (0, width - attr.shape[1]))
        found = terms.new_zeros(graph.num_dst, *terms.shape[1:])
        return found.index_add(0, _plain.ends_of(graph).edge_index[1], terms).to(attr.dtype)
    return _EdgeSum.apply(weight, attr, graph, width)


def edge_outer(graph, weight: Tensor, rows: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    """[E, d]: scale sum_h weight[e, h] rows[i, h] of each edge e into i. weight: acc."""
    graph = _operand(graph)
    if isinstance(graph, _edges.EdgeList):
        return _edges.edge_outer(graph, weight, rows, dim, scale)
    if _eager.transformed(weight, rows):
        ends = rows[:, :, :dim].to(weight.dtype)[_plain.ends_of(graph).edge_index[1]]
        return (torch.einsum("eh,ehc->ec", weight, ends) * scale).to(rows.dtype)
    return _EdgeOuter.apply(weight, rows, graph, dim, scale)


def sum_of_features(graph, attention: Tensor, attr: Tensor) -> Tensor:
    """[N, H, d]: the sum of attention[e, h] attr[e] over the edges e into i, of attention in any type."""
    width = _width(attr.shape[1], attr)
    found = edge_sum(graph, _ops.as_type(attention, _ops.acc_type(attr.dtype)), attr, width)
    return found[:, :, : attr.shape[1]] if width > attr.shape[1] else found


def _width(size: int, x: Tensor) -> int:
    """Columns of a row for so many features: CUDA's kernels load 16 bytes at a time."""
    step = 16 // x.dtype.itemsize if x.is_cuda else 1
    return -(-size // step) * step


# ---- products per node -----------------------------------------------------------------------------------


def _onto_features(x: Tensor, proj: Tensor) -> Tensor:
    """W^T x: [N, H, D] x [H, D, width] -> [N, H, width], a view whose heads may lie apart."""
    return torch.bmm(x.transpose(0, 1), proj).transpose(0, 1)


def _project(x: Tensor, proj: Tensor) -> Tensor:
    """W x: [N, H, width] x [H, D, width] -> [N, H, D], likewise."""
    return torch.bmm(x.transpose(0, 1), proj.transpose(1, 2)).transpose(0, 1)


def _add_projection(out: Tensor, x: Tensor, proj: Tensor, factor: float = 1.0) -> None:
    """out += factor W x, in place."""
    out.transpose(0, 1).baddbmm_(x.transpose(0, 1), proj.transpose(1, 2), alpha=factor)


def _factors(proj: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    """W [H, D, width] in the two orders in which a warp whose lanes share a head takes it (EdgeAttr in
    csrc/core/params.h), [H, steps, elements]."""
    heads, size, width = proj.shape
    columns, steps = 8 * lanes, -(-width // 16)
    group = min(columns, 64)
    full = torch.nn.functional.pad(proj, (0, 16 * steps - width, 0, columns - size))
    onto = full.reshape(heads, columns // 32, 4, 2, 2, 2, steps, 2, 8).permute(0, 6, 1, 3, 8, 2, 4, 7, 5)
    back = full.reshape(heads, columns // group, 8, group // 16, 2, steps, 4, 2, 2)
    back = back.permute(0, 1, 5, 3, 2, 6, 7, 4, 8)
    return onto.reshape(heads, steps, -1), back.reshape(heads, steps, -1)


def _grad_proj(query: Tensor, query_sums: Tensor, grad: Tensor, grad_sums: Tensor, scale: float) -> Tensor:
    """sum_i scale query_i query_sums_i^T + grad_i grad_sums_i^T, [H, D, width]; sums: [N, H, width]."""
    if query.is_cuda and query.dtype != torch.float64 and len(query):
        return _ops.projection_grad(query, query_sums, grad, grad_sums, scale)
    products = (
        torch.bmm(x.permute(1, 2, 0), y.transpose(0, 1)) for x, y in ((query, query_sums), (grad, grad_sums))
    )
    acc = _ops.acc_type(query.dtype)
    return next(products).to(acc).mul_(scale).add_(next(products)).to(query.dtype)


def _without_autocast(device: torch.device):
    """All tensors have one type by now, and autocast would give the products another."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


# ---- attention -------------------------------------------------------------------------------------------


class _Call:
    """What of an attention is no tensor to differentiate by."""

    __slots__ = ("graph", "in_key", "in_value", "numbers", "schedule")

    def __init__(self, graph, numbers: Numbers, schedule: str, in_key: bool, in_value: bool):
        self.graph, self.numbers, self.schedule = graph, numbers, schedule
        self.in_key, self.in_value = in_key, in_value

    def engine(self, value: Tensor, backward: bool) -> _autograd.DispatchedCall:
        """The engine's attention, which returns the weights."""
        args = self.graph._planner.arguments(
            *value.shape[1:], value.dtype, "dot", schedule=self.schedule, edges=True, backward=backward
        )
        return _autograd.DispatchedCall(self.graph, args, "dot", self.numbers, True, False)


def _composed(call: _Call, query, key, value, attr, proj, edge: EdgeArgs, out_bias, return_attention: bool):
    """(out, attention or None)"""
    graph, numbers, bias = call.graph, call.numbers, edge.edge_bias
    with _without_autocast(query.device):
        if call.in_key:
            score = edge_dot(graph, _onto_features(query, proj), attr, numbers.scale)
            if edge.edge_gate is not None:
                score = score * edge.edge_gate
            bias = score if bias is None else score + bias
        tensors = Tensors(value, key, query, None, *edge._replace(edge_bias=bias), out_bias)
        out, attention = attend(
            AttentionInputs(graph, "dot", tensors, numbers, return_attention or call.in_value, call.schedule)
        )
        if call.in_value:
            out = out + _project(edge_sum(graph, attention, attr, proj.shape[2]), proj)
    return out, attention


def _handle(call: _Call, value: Tensor, attr: Tensor, backward: bool):
    """The graph as `_InOne` takes it, or None where it cannot be (kProjects, attention/lanes.cuh)."""
    heads, dim = value.shape[1:]
    lanes, size = lanes_per_head(heads, dim, value.dtype), dim * value.dtype.itemsize
    fits = value.is_cuda and value.dtype.itemsize == 2 and 32 < size <= 16 * lanes
    if not fits or attr.shape[1] > max(2 * lanes, 16) or call.numbers.negative_slope != 1:
        return None
    return call.graph._planner.handle(heads, dim, value.dtype, "dot", call.schedule, True, backward)


def _grad_attr(call: _Call, attr, rows, grad_rows, grad_score, attention) -> Tensor:
    dim = attr.shape[1]
    found = _ops.edge_outer(call.graph, grad_score, rows, dim, call.numbers.scale)
    return found.add_(_ops.edge_outer(call.graph, attention, grad_rows, dim, 1.0))


_NAMES = "query", "key", "value", "attr", "proj", "edge_bias", "edge_mask", "edge_weight", "seed", "out_bias"


class _Projected(torch.autograd.Function):
    """The output of an eager training step, without a gate, with features in key and value.

    It may be modified in place, as in `autograd.Attention`: backward then computes it again.
    """

    @staticmethod
    def forward(ctx, call: _Call, *given):
        out, bias, stats, sums, attention = _Projected.compute(call, given)
        ctx.call = call
        ctx.kept = out.detach() if _eager.top_hooks(True) is None else None
        ctx.version = out._version
        need_attr = ctx.needs_input_grad[1 + _NAMES.index("attr")]
        ctx.save_for_backward(
            *given, bias, stats, sums, attention if need_attr else None, out if ctx.kept is None else None
        )
        return out

    @staticmethod
    def compute(call: _Call, given):
        """out, the scores' part of the edges with edge_bias, stats, the sums of features, attention."""
        query, key, value, attr, proj, edge_bias, mask, weight, seed, out_bias = given
        with _without_autocast(query.device):
            bias = _ops.edge_dot(call.graph, _onto_features(query, proj), attr, call.numbers.scale)
            if edge_bias is not None:
                bias = bias + edge_bias
            tensors = Tensors(value, key, query, None, bias, None, mask, weight, None, seed, out_bias)
            out, stats, _, _, attention = call.engine(value, True).forward(tensors)
            sums = _ops.edge_sum(call.graph, attention, attr, proj.shape[2])
            _add_projection(out, sums, proj)
        return out, bias, stats, sums, attention

    @staticmethod
    def backward(ctx, grad):
        call, saved = ctx.call, ctx.saved_tensors
        given, (bias, stats, sums, attention, out) = saved[: len(_NAMES)], saved[len(_NAMES) :]
        need = dict(zip(_NAMES, ctx.needs_input_grad[1:]))
        if torch.is_grad_enabled():  # create_graph
            return None, *_differentiable(call, given, need, grad)
        query, key, value, attr, proj, edge_bias, mask, weight, seed, out_bias = given
        if out is None:
            out = ctx.kept
            if not _eager.retains_graph():
                ctx.kept = None
        if out._version != ctx.version:
            out = _Projected.compute(call, given)[0]
        graph = call.graph
        with _without_autocast(query.device):
            grad = grad.contiguous()
            grad_rows = _onto_features(grad, proj)
            gamma = _ops.edge_dot(graph, grad_rows, attr, 1.0)
            tensors = Tensors(value, key, query, None, bias, None, mask, weight, None, seed, out_bias)
            bits = NEED_BIAS | (NEED_WEIGHT if need["edge_weight"] else 0)
            grads = call.engine(value, True).backward(
                (grad, gamma), tensors, (out, stats, None, None, None), bits
            )
            grad_value, grad_key, grad_query, _, grad_score, _, grad_weight, _ = grads
            score_sums = _ops.edge_sum(graph, grad_score, attr, proj.shape[2])
            found = dict(value=grad_value, key=grad_key, query=grad_query)
            if need["query"]:
                _add_projection(grad_query, score_sums, proj, call.numbers.scale)
            if need["proj"]:
                found["proj"] = _grad_proj(query, score_sums, grad, sums, call.numbers.scale)
            if need["out_bias"]:
                found["out_bias"] = grad.sum(0)
            if need["attr"]:
                rows = _onto_features(query, proj)
                found["attr"] = _grad_attr(call, attr, rows, grad_rows, grad_score, attention)
            if need["edge_bias"]:
                found["edge_bias"] = _ops.as_type(grad_score, edge_bias.dtype)
            if need["edge_weight"]:
                found["edge_weight"] = _ops.per_edge(weight, grad_weight)
        return None, *(found.get(name) if need[name] else None for name in _NAMES)


class _InOne(torch.autograd.Function):
    """`_Projected` without gradients of edge_bias and edge_weight, by kernels that know features of edges."""

    @staticmethod
    def forward(ctx, call: _Call, handle, *given):
        out, kept, factors, sums = _InOne.compute(call, handle, given)
        ctx.call, ctx.handle = call, handle
        ctx.kept = out.detach() if _eager.top_hooks(True) is None else None
        ctx.version = out._version
        ctx.save_for_backward(*given, kept, *factors, sums, out if ctx.kept is None else None)
        return out

    @staticmethod
    def compute(call: _Call, handle, given):
        """out, what its backward wants, the factors of proj, sums of features."""
        query, _, value, _, proj, *options = given
        heads, size = value.shape[1:]
        with _without_autocast(query.device):
            factors = _factors(proj, lanes_per_head(heads, size, value.dtype))
            out, kept, sums = _ops.attend_projected(handle, *given[:4], *factors, *options, call.numbers)
        return out, kept, factors, sums

    @staticmethod
    def backward(ctx, grad):
        call, handle, saved = ctx.call, ctx.handle, ctx.saved_tensors
        given, (kept, *factors, sums, out) = saved[: len(_NAMES)], saved[len(_NAMES) :]
        need = dict(zip(_NAMES, ctx.needs_input_grad[2:]))
        if torch.is_grad_enabled():  # create_graph
            return None, None, *_differentiable(call, given, need, grad)
        query, _, _, attr, proj, *options = given
        if out is None:
            out = ctx.kept
            if not _eager.retains_graph():
                ctx.kept = None
        if out._version != ctx.version:
            out = _InOne.compute(call, handle, given)[0]
        with _without_autocast(query.device):
            grad = grad.contiguous()
            *grads, score_sums, edges = _ops.attend_projected_backward(
                handle, grad, *given[:4], *factors, *options, out, kept, call.numbers, need["attr"]
            )
            found = dict(zip(("value", "key", "query"), grads))
            if need["proj"]:
                found["proj"] = _grad_proj(query, score_sums, grad, sums, call.numbers.scale)
            if need["out_bias"]:
                found["out_bias"] = grad.sum(0)
            if need["attr"]:
                attention, grad_score = edges.unbind(-1)
                rows, grad_rows = _onto_features(query, proj), _onto_features(grad, proj)
                found["attr"] = _grad_attr(call, attr, rows, grad_rows, grad_score, attention)
        return None, None, *(found.get(name) if need[name] else None for name in _NAMES)


def _differentiable(call: _Call, given, need, grad):
    """The gradients by the composed way, which may be differentiated again."""
    # Views: a tensor that was given twice has two gradients here.
    given = [x.view_as(x) if needed else x for x, needed in zip(given, need.values())]
    query, key, value, attr, proj, bias, mask, weight, seed, out_bias = given
    edge = EdgeArgs(bias, None, mask, weight, None, seed)
    out, _ = _composed(call, query, key, value, attr, proj, edge, out_bias, False)
    wanted = [x for x, needed in zip(given, need.values()) if needed]
    grads = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(grads) if needed else None for needed in need.values()]


def attention(inputs: AttentionInputs, attr: Tensor, proj: Tensor) -> tuple[Tensor, Any]:
    """(out, attention) of dot attention whose edge features are proj attr; the attention means nothing unless
    it was asked for. attr: [E, d]; proj: [H, D, d]. Heads of the inputs may have been padded."""
    graph, _, tensors, numbers, return_attention, schedule = inputs
    value, key, query, _, *options, out_bias = tensors
    assert key is not None and query is not None
    edge = EdgeArgs(*options)
    in_key, in_value = bool(numbers.flags & FEAT_IN_KEY), bool(numbers.flags & FEAT_IN_VALUE)
    size = (query if in_key else value).shape[2]
    width = _width(proj.shape[2], proj)
    if (size, width) != proj.shape[1:]:
        proj = torch.nn.functional.pad(proj, (0, width - proj.shape[2], 0, size - proj.shape[1]))
    call = _Call(graph, numbers._replace(flags=0), schedule, in_key, in_value)
    given = (
        query,
        key,
        value,
        attr,
        proj,
        edge.edge_bias,
        edge.edge_mask,
        edge.edge_weight,
        edge.seed,
        out_bias,
    )
    plain = edge.edge_gate is not None or not (in_key and in_value)
    plain = plain or isinstance(graph, (GraphPart, _edges.EdgeList))
    if plain or torch.compiler.is_compiling() or _eager.transformed(*given):
        return _composed(call, query, key, value, attr, proj, edge, out_bias, return_attention)
    weights = None
    if return_attention:  # by a call of its own: `out` is the same whether it is asked for or not
        alone = _Call(graph, call.numbers, schedule, in_key, False)
        _, weights = _composed(alone, query, key, value, attr, proj, edge, None, True)
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    edges_learn = any(x is not None and x.requires_grad for x in (edge.edge_bias, edge.edge_weight))
    handle = None if train and edges_learn else _handle(call, value, attr, train)
    if paths.recorder is not None:
        paths.recorder.took("edge projection", paths.describe("dot", value))
    if handle is not None:
        if train:
            return _InOne.apply(call, handle, *given), weights
        return _InOne.compute(call, handle, given)[0], weights
    if train:
        return _Projected.apply(call, *given), weights
    return _Projected.compute(call, given)[0], weights
