"""ResGatedGraphConv without attributes of edges as one autograd function: projections, gates and their sum.

Of edge size the gates are kept for backward. See `_layers`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _ops
from ._arguments import ops
from ._eager import EagerFunction, called_directly
from ._edge_rows import of_graph, rows_of_destinations, rows_of_sources, sum_of_edges
from ._layers import derived
from .graph import Graph

__all__ = ["GatedTensors", "gated_layer"]

_linear = torch._C._nn.linear
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

    src: Tensor  # int64 [E], as dst
    dst: Tensor
    inverse: Tensor  # [N, 1]: 1 over the number of edges into a node; 1 where there are none
    into: tuple[Any, ...]  # the operator's arguments for sums over the edges into each node, and out of it
    out_of: tuple[Any, ...]


def _edges(graph: Graph, width: int, dtype: torch.dtype) -> _Edges:
    def make(graph: Graph) -> _Edges:
        src, dst = graph.edge_index
        inverse = graph.in_degrees().clamp(min=1).to(dtype).reciprocal().unsqueeze(1)
        into, out_of = (_sum_args(graph, width, dtype, reverse) for reverse in (False, True))
        return _Edges(src, dst, inverse, into, out_of)

    return of_graph(graph, ("gated", width, dtype), make)


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


class _Gated(NamedTuple):
    """What is no tensor of it."""

    graph: Graph
    mean: bool

    def forward(self, t: GatedTensors) -> tuple[Tensor, ...]:
        """The result, and what backward takes beside the inputs."""
        width = len(t.key_weight)
        edges = _edges(self.graph, width, t.x.dtype)
        weight = torch.cat([w for w in t[1:5] if w is not None])
        biases = list(t[5:8])
        if t.skip_weight is not None:
            biases.append(torch.zeros_like(t.key_bias) if t.out_bias is None else t.out_bias)
        projected = _linear(t.x, weight, torch.cat(biases))
        gate = projected[:, :width].index_select(0, edges.dst)
        at_src = projected[:, width : 3 * width].index_select(0, edges.src)
        gate.add_(at_src[:, :width]).sigmoid_()
        out = _summed(gate * at_src[:, width:], edges.into)
        more = t.out_bias if t.skip_weight is None else projected[:, 3 * width :]
        # A tensor of its own, which may be modified in place.
        if self.mean:
            out = out * edges.inverse if more is None else torch.addcmul(more, out, edges.inverse)
        elif more is not None:
            out = out + more
        elif out._is_view():
            out = out.clone()
        return out, projected, weight, gate

    def backward(self, t: GatedTensors, grad: Tensor, projected: Tensor, weight: Tensor, gate: Tensor, need):
        width = len(t.key_weight)
        edges = _edges(self.graph, width, t.x.dtype)
        of_sum = grad * edges.inverse if self.mean else grad
        along = of_sum.index_select(0, edges.dst)
        value = projected[:, 2 * width : 3 * width].index_select(0, edges.src)
        before = _sigmoid_backward(value.mul_(along), gate)
        of_value = along.mul_(gate)
        ends = (before, edges.into), (before, edges.out_of), (of_value, edges.out_of)
        together = torch.cat([*(_summed(*end) for end in ends), grad], 1)
        of_projected = together[:, : weight.shape[0]]
        found: list[Tensor | None] = [None] * len(t)
        if need[0]:
            found[0] = of_projected.mm(weight)
        places = [1, 2, 3] if t.skip_weight is None else [1, 2, 3, 4]
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
            out = out * _edges(self.graph, len(t.key_weight), out.dtype).inverse
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
        *tensors, projected, weight, gate = ctx.saved_tensors
        t, need = GatedTensors(*tensors), ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph
            return None, *derived(ctx.call.formula, grad, t, need)
        return None, *_ops.call(ctx.call.backward, t, grad, projected, weight, gate, need)


def gated_layer(graph: Graph, tensors: GatedTensors, mean: bool) -> Tensor:
    """[N, C] of checked arguments: `_layers.can_fuse` of x and each weight, all of one dtype."""
    call = _Gated(graph, mean)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _GatedLayer.at_once(call, *tensors)
    return _ops.call(call.forward, tensors)[0]
