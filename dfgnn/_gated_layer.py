"""ResGatedGraphConv without attributes of edges as one autograd function: projections, gates and their sum.

Nothing of edge size is kept for backward, which makes the gates again. See `_layers`.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _ops
from ._arguments import ops
from ._eager import EagerFunction, called_directly
from ._edge_rows import rows_of_destinations, rows_of_sources, sum_of_edges
from ._fixed import FixedStructure
from ._layers import derived
from .graph import Graph

__all__ = ["GatedTensors", "gated_layer", "inverse_degrees"]

_linear = torch._C._nn.linear
_sigmoid_backward = torch.ops.aten.sigmoid_backward.default
_inverses: weakref.WeakKeyDictionary[Graph, dict[torch.dtype, Tensor]] = weakref.WeakKeyDictionary()


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


def inverse_degrees(graph: Graph, dtype: torch.dtype) -> Tensor:
    """[num_dst, 1]: 1 over the number of edges into each destination, and 1 where there are none."""

    def build() -> Tensor:
        return graph.in_degrees().clamp(min=1).to(dtype).reciprocal().unsqueeze(1)

    structure = graph._structure
    if isinstance(structure, FixedStructure):
        return structure._get(f"inverse degrees {dtype}", build)
    kept = _inverses.setdefault(graph, {})
    if dtype not in kept:
        with torch.inference_mode(False):
            kept[dtype] = build()
    return kept[dtype]


def _summed(graph: Graph, rows: Tensor, reverse: bool) -> Tensor:
    """`sum_of_edges`, of the graph's own plan and recorded by nothing."""
    csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
    eids = csr.eids
    if eids is None:
        eids = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    plan = graph.plan(1, rows.shape[1], rows.dtype, reverse, layer=None)
    slots, packed, per_tile, num_rows, _, *of_edges = plan.launch  # their sources are the edges
    launch = [slots, packed, per_tile, num_rows, len(rows), *of_edges]
    if rows.is_cuda:
        return ops.gather_sum.default(rows, eids, plan.items, plan.splits, launch, num_rows)
    one = rows.new_ones(len(rows), 1)
    args = eids, eids, plan.items, plan.splits, launch, num_rows
    return ops.spmm.default(one, rows.unsqueeze(1), *args).squeeze(1)


class _Gated(NamedTuple):
    """What is no tensor of it."""

    graph: Graph
    mean: bool

    def gates(self, projected: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """sigmoid(k_i + q_j) and v_j of each edge. projected: keys, queries and values side by side."""
        src, dst = self.graph.edge_index
        gate = projected[:, :width].index_select(0, dst)
        at_src = projected[:, width : 3 * width].index_select(0, src)
        return gate.add_(at_src[:, :width]).sigmoid_(), at_src[:, width:]

    def forward(self, t: GatedTensors) -> tuple[Tensor, Tensor, Tensor]:
        """The result, and what backward takes beside the inputs: projections and their weights."""
        width = len(t.key_weight)
        weight = torch.cat([w for w in t[1:5] if w is not None])
        biases = list(t[5:8])
        if t.skip_weight is not None:
            biases.append(torch.zeros_like(t.key_bias) if t.out_bias is None else t.out_bias)
        projected = _linear(t.x, weight, torch.cat(biases))
        gate, value = self.gates(projected, width)
        out = _summed(self.graph, gate.mul_(value), False)
        if self.mean:
            out = out * inverse_degrees(self.graph, out.dtype)
        if t.skip_weight is not None:
            out = out + projected[:, 3 * width :]
        elif t.out_bias is not None:
            out = out + t.out_bias
        # A tensor of its own, which may be modified in place.
        return out.clone() if out._is_view() else out, projected, weight

    def backward(self, t: GatedTensors, grad: Tensor, projected: Tensor, weight: Tensor, need):
        width = len(t.key_weight)
        gate, value = self.gates(projected, width)
        of_sum = grad * inverse_degrees(self.graph, grad.dtype) if self.mean else grad
        along = of_sum.index_select(0, self.graph.edge_index[1])
        before = _sigmoid_backward(along * value, gate)
        of_value = along.mul_(gate)
        ends = (before, False), (before, True), (of_value, True)
        grads = [_summed(self.graph, rows, reverse) for rows, reverse in ends]
        together = torch.cat([*grads, grad], 1)
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
        key, query, value = (F.linear(t.x, t[at], t[at + 4]) for at in (1, 2, 3))
        gate = (rows_of_destinations(self.graph, key) + rows_of_sources(self.graph, query)).sigmoid()
        out = sum_of_edges(self.graph, gate * rows_of_sources(self.graph, value))
        if self.mean:
            out = out * inverse_degrees(self.graph, out.dtype)
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
        *tensors, projected, weight = ctx.saved_tensors
        t, need = GatedTensors(*tensors), ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph
            return None, *derived(ctx.call.formula, grad, t, need)
        return None, *_ops.call(ctx.call.backward, t, grad, projected, weight, need)


def gated_layer(graph: Graph, tensors: GatedTensors, mean: bool) -> Tensor:
    """[N, C] of checked arguments: `_layers.can_fuse` of x and each weight, all of one dtype."""
    call = _Gated(graph, mean)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _GatedLayer.at_once(call, *tensors)
    return _ops.call(call.forward, tensors)[0]
