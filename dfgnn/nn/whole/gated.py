"""ResGatedGraphConv without attributes of edges as one autograd function: projections, gates and their sum.

Of edge size the gates are kept for backward. See `_layers`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine.edge_rows import of_graph, rows_of_destinations, rows_of_sources, sum_of_edges
from ...graph import Graph
from ...runtime import ops as _ops
from ...runtime import torch_internals as internals
from ...runtime.arguments import ops
from ...runtime.eager import EagerFunction, called_directly
from .pair import constant, derived

__all__ = ["GatedTensors", "gated_layer"]

_linear = internals.linear
_sigmoid_backward = torch.ops.aten.sigmoid_backward.default


class GatedTensors(NamedTuple):
    x: Tensor  # [N, F]
    key_weight: Tensor  # [C, F], as the other weights
    query_weight: Tensor
    value_weight: Tensor
    skip_weight: Tensor | None
    key_bias: Tensor  # [C], as the other biases
    query_bias: Tensor
    value_bias: Tensor
    out_bias: Tensor | None


class _Edges(NamedTuple):
    """What a graph is to it."""

    inverse: Tensor  # [N, 1]: 1 over the number of edges into a node; 1 where there are none
    src: Tensor  # int64 [E], as dst
    dst: Tensor
    into: tuple[Any, ...]  # the operators' arguments along the edges into each node, and out of it
    out_of: tuple[Any, ...]


def _edges(graph: Graph, width: int, dtype: torch.dtype, by_heads: bool) -> _Edges:
    def make(graph: Graph) -> _Edges:
        inverse = graph.in_degrees().clamp(min=1).to(dtype).reciprocal().unsqueeze(1)
        if by_heads:
            like = torch.empty(0, width, _SLOTS, dtype=dtype, device=graph.device)
            into, out_of = (_ops.product_args(graph, like, reverse) for reverse in (False, True))
        else:
            into, out_of = (_sum_args(graph, width, dtype, reverse) for reverse in (False, True))
        src, dst = graph.edge_index
        return _Edges(inverse, src, dst, into, out_of)

    return of_graph(graph, ("gated", width, dtype, by_heads), make)


def _sum_args(graph: Graph, width: int, dtype: torch.dtype, reverse: bool) -> tuple[Any, ...]:
    csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
    num_edges, eids = graph.num_edges, csr.eids
    if eids is None:
        eids = torch.arange(num_edges, dtype=torch.int32, device=graph.device)
    plan = graph.plan(1, width, dtype, reverse, layer=None)
    slots, packed, per_tile, num_rows, _, *more = plan.launch
    launch = [slots, packed, per_tile, num_rows, num_edges, *more]  # the edges are the sources
    args = eids, plan.items, plan.splits, launch, num_rows
    if graph.device.type == "cuda":
        return args
    return torch.ones(num_edges, 1, dtype=dtype, device=graph.device), eids, *args


def _summed(rows: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Sums of edges' rows over nodes, recorded by nothing."""
    if rows.is_cuda:
        return ops.gather_sum.default(rows, *args)
    return ops.spmm.default(args[0], rows.unsqueeze(1), *args[1:]).squeeze(1)


# On a GPU channels are heads of so many numbers, as kernels load them, and the engine's products gather: with
# (k, 1, 0, 0) of a destination and (1, q, v, s) of a source the product is k + q, the sum with the gates as
# weights has that of the values in its third place, and with the gradients of k + q that of k in its first.
_SLOTS = 4


def _by_heads(x: Tensor) -> bool:
    return x.is_cuda and x.element_size() >= 4


class _Gated(NamedTuple):
    """What is no tensor of it."""

    graph: Graph
    mean: bool
    by_heads: bool

    def edges(self, t: GatedTensors) -> _Edges:
        return _edges(self.graph, len(t.key_weight), t.x.dtype, self.by_heads)

    def forward(self, t: GatedTensors) -> tuple[Tensor, ...]:
        """The result, and what backward takes beside the inputs: tables of the ends, and the gates."""
        edges, n = self.edges(t), len(t.x)
        if self.by_heads:
            dst, src = self.tables(t)
            gate = ops.sddmm.default(dst, src, *edges.into).sigmoid_()
            out = ops.spmm.default(gate, src, *edges.into, n)[..., 2]
            skip = src[..., 3]
        else:
            width = len(t.key_weight)
            weight = torch.cat([w for w in t[1:5] if w is not None])
            biases = list(t[5:8])
            if t.skip_weight is not None:
                biases.append(torch.zeros_like(t.key_bias) if t.out_bias is None else t.out_bias)
            projected = _linear(t.x, weight, torch.cat(biases))
            dst, src, skip = projected[:, :width], projected[:, width : 3 * width], projected[:, 3 * width :]
            gate, at_src = dst.index_select(0, edges.dst), src.index_select(0, edges.src)
            gate.add_(at_src[:, :width]).sigmoid_()
            out = _summed(gate * at_src[:, width:], edges.into)
        more = t.out_bias if t.skip_weight is None else skip
        # A tensor of its own, which may be modified in place.
        if self.mean:
            out = out * edges.inverse if more is None else torch.addcmul(more, out, edges.inverse)
        else:
            out = out.clone() if more is None else out + more
        return out, dst, src, gate

    def tables(self, t: GatedTensors) -> tuple[Tensor, Tensor]:
        """[N, C, 4] of destinations and of sources."""
        like = t.key_weight.dtype, t.x.device
        zero, one = (constant(value, *like) for value in (0, 1))
        no_weight, no_bias, ones = (
            zero.expand_as(t.key_weight),
            *(c.expand_as(t.key_bias) for c in (zero, one)),
        )
        skip = (no_weight, no_bias) if t.skip_weight is None else (t.skip_weight, t.out_bias)
        weights = [t.key_weight, *[no_weight] * 3], [no_weight, t.query_weight, t.value_weight, skip[0]]
        biases = (
            [t.key_bias, ones, no_bias, no_bias],
            [ones, t.query_bias, t.value_bias, no_bias if skip[1] is None else skip[1]],
        )
        dst, src = (
            _linear(t.x, torch.stack(w, 1).flatten(0, 1), torch.stack(b, 1).flatten())
            for w, b in zip(weights, biases)
        )
        return dst.view(len(t.x), -1, _SLOTS), src.view(len(t.x), -1, _SLOTS)

    def sums_back(
        self, t: GatedTensors, grad: Tensor, dst: Tensor, src: Tensor, gate: Tensor
    ) -> list[Tensor]:
        """The gradients of keys, queries and values of that of the sums."""
        edges, n, width = self.edges(t), len(t.x), len(t.key_weight)
        scale = edges.inverse if self.mean else constant(1, grad.dtype, grad.device)
        if self.by_heads:
            of_sum = torch.zeros_like(dst)
            torch.mul(grad, scale, out=of_sum[..., 2])
            before = _sigmoid_backward(ops.sddmm.default(of_sum, src, *edges.into), gate)
            return [
                ops.spmm.default(before, src, *edges.into, n)[..., 0],
                ops.spmm.default(before, dst, *edges.out_of, n)[..., 1],
                ops.spmm.default(gate, of_sum, *edges.out_of, n)[..., 2],
            ]
        along = (grad * scale if self.mean else grad).index_select(0, edges.dst)
        value = src[:, width:].index_select(0, edges.src)
        before = _sigmoid_backward(value.mul_(along), gate)
        ends = (before, edges.into), (before, edges.out_of), (along.mul_(gate), edges.out_of)
        return [_summed(*end) for end in ends]

    def backward(self, t: GatedTensors, grad: Tensor, dst: Tensor, src: Tensor, gate: Tensor, need):
        width = len(t.key_weight)
        together = torch.cat([*self.sums_back(t, grad, dst, src, gate), grad], 1)
        places = [1, 2, 3] if t.skip_weight is None else [1, 2, 3, 4]
        of_projected = together[:, : len(places) * width]
        found: list[Tensor | None] = [None] * len(t)
        if need[0]:
            found[0] = of_projected.mm(torch.cat([t[at] for at in places]))  # type: ignore[misc]
        if any(need[at] for at in places):
            of_weight = of_projected.t().mm(t.x)
            for k, at in enumerate(places):
                found[at] = of_weight[k * width : (k + 1) * width]
        if any(need[5:]):
            of_bias = together.sum(0)
            for k, at in enumerate((5, 6, 7, 8)):
                found[at] = of_bias[k * width : (k + 1) * width]
        return [x if needed else None for x, needed in zip(found, need)]

    def formula(self, *tensors: Any) -> Tensor:
        t = GatedTensors(*tensors)
        key = F.linear(t.x, t.key_weight, t.key_bias)
        query = F.linear(t.x, t.query_weight, t.query_bias)
        value = F.linear(t.x, t.value_weight, t.value_bias)
        gate = (rows_of_destinations(self.graph, key) + rows_of_sources(self.graph, query)).sigmoid()
        out = sum_of_edges(self.graph, gate * rows_of_sources(self.graph, value))
        if self.mean:
            out = out * self.edges(t).inverse
        if t.skip_weight is not None:
            out = out + F.linear(t.x, t.skip_weight)
        return out if t.out_bias is None else out + t.out_bias


@called_directly
class _GatedLayer(EagerFunction):
    @staticmethod
    def forward(ctx, call, *tensors):
        out, *made = _ops.call(call.forward, GatedTensors(*tensors))
        ctx.call = call
        ctx.save_for_backward(*tensors, *made)
        return out

    @staticmethod
    def backward(ctx, grad):
        *tensors, dst, src, gate = ctx.saved_tensors
        t, need = GatedTensors(*tensors), ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph
            return None, *derived(ctx.call.formula, grad, t, need)
        return None, *_ops.call(ctx.call.backward, t, grad, dst, src, gate, need)


def gated_layer(graph: Graph, tensors: GatedTensors, mean: bool) -> Tensor:
    """[N, C] of checked arguments: `_layers.can_fuse` of x and each weight, all of one dtype."""
    call = _Gated(graph, mean, _by_heads(tensors.x))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _GatedLayer.at_once(call, *tensors)
    return _ops.call(call.forward, tensors)[0]
