"""The fused layer with a gate per channel, PyTorch Geometric's ResGatedGraphConv without attributes of edges:
projections, gates and their sum (see `engine.autograd`).

Of the tensors of edge size only the gates are saved for backward. As in `LayerSpec`, the query belongs to the
destination, key and value to the source (PyTorch Geometric's layer has query and key the other way round).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine import operators
from ...engine.autograd import SeveralOperators
from ...engine.edge_maps import rows_of_destinations, rows_of_sources, sum_of_edges
from ...graph import Graph
from ...graph.derived import of_graph
from ...runtime import ops as _ops
from ...runtime import torch_internals as internals
from ...runtime.arguments import LayerTensors
from ...runtime.eager import needs_backward
from .spec import LayerSpec, spelled

_linear = internals.linear
_sigmoid_backward = _ops.aten.sigmoid_backward.default
_WEIGHTS = tuple(LayerTensors._fields.index(f"{name}_weight") for name in ("query", "key", "value", "skip"))
_OUT_BIAS = LayerTensors._fields.index("out_bias")


def why_not(graph: Graph, t: LayerTensors) -> str | None:
    """The reason why this layer does not compute with these tensors, or None."""
    if t.query_bias is None or t.key_bias is None or t.value_bias is None or t.skip_bias is not None:
        return "keys, queries and values have a bias each, and the skip connection none"
    if t.x.is_cuda and len(t.key_weight) * t.x.element_size() % 16:  # type: ignore[arg-type]
        return "rows are not a multiple of 16 bytes, which the kernels load at a time"
    return None if graph.num_src == graph.num_dst else "sources and destinations differ"


_constants: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A cached tensor without dimensions."""
    found = _constants.get((value, dtype, device))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # While a CUDA graph is captured the tensor is not cached: it has no value before the first
            # replay.
            return torch.full((), value, dtype=dtype, device=device)
        # Made on the CPU and copied: the copy waits until it is done, so that any stream may read the tensor.
        with torch.inference_mode(False):
            found = _constants[value, dtype, device] = torch.full((), value, dtype=dtype).to(device)
    return found


class _GraphOfGates(NamedTuple):
    """What is derived from a graph, once per width and dtype."""

    inverse: Tensor  # [N, 1]: 1 over the number of edges into a node; 1 where there are none
    src: Tensor  # int64 [E]: the source of each edge
    dst: Tensor  # int64 [E]: the destination of each edge
    into: tuple[Any, ...]  # the operators' arguments for sums over the edges into each node
    out_of: tuple[Any, ...]  # the operators' arguments for sums over the edges out of each node


def _edges(graph: Graph, width: int, dtype: torch.dtype, by_heads: bool) -> _GraphOfGates:
    """by_heads: the operators are sddmm and spmm on rows [N, width, _SLOTS]; else `_summed` on [E, width]."""

    def make(graph: Graph) -> _GraphOfGates:
        inverse = graph.in_degrees().clamp(min=1).to(dtype).reciprocal().unsqueeze(1)
        if by_heads:
            like = torch.empty(0, width, _SLOTS, dtype=dtype, device=graph.device)
            into, out_of = (_ops.product_args(graph, like, reverse) for reverse in (False, True))
        else:
            into, out_of = (_sum_args(graph, width, dtype, reverse) for reverse in (False, True))
        src, dst = graph.edge_index
        return _GraphOfGates(inverse, src, dst, into, out_of)

    return of_graph(graph, ("gated", width, dtype, by_heads), make)


def _sum_args(graph: Graph, width: int, dtype: torch.dtype, reverse: bool) -> tuple[Any, ...]:
    """The arguments of `_summed`: the neighbours of a node are its edges, whose ids take the place of
    sources' ids."""
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
    """For each node the sum of the rows of its edges; args: from `_sum_args`."""
    if rows.is_cuda:
        return _ops.gather_sum(rows, *args)
    return operators.spmm_op(args[0], rows.unsqueeze(1), *args[1:]).squeeze(1)


# On a GPU, in float32 and float64, each channel of the layer becomes a head of four columns, a size that the
# kernels can load: sddmm and spmm then read the nodes' rows themselves, without copies per edge. With a
# channel's query q, key k, value v and skip connection s, the row of a destination is (q, 1, 0, 0) and that
# of a source (1, k, v, s). sddmm gives q + k, whose sigmoid is the gate. spmm of the sources' rows, weighted
# by the gates, has the sum of the gated values in its third column; weighted by the gradients of q + k, it
# has the gradient of q in its first.
_SLOTS = 4


def _by_heads(x: Tensor) -> bool:
    return x.is_cuda and x.element_size() >= 4


class _Gated(NamedTuple):
    """A call of the layer: everything but its tensors."""

    graph: Graph
    mean: bool
    by_heads: bool

    def edges(self, t: LayerTensors) -> _GraphOfGates:
        return _edges(self.graph, len(t.value_weight), t.x.dtype, self.by_heads)

    def forward(self, tensors):
        t = LayerTensors._make(tensors)
        edges, n = self.edges(t), len(t.x)
        if self.by_heads:
            dst, src = self.tables(t)
            gate = operators.sddmm_op(dst, src, *edges.into).sigmoid_()
            out = operators.spmm_op(gate, src, *edges.into, n)[..., 2]
            skip = src[..., 3]
        else:
            width = len(t.value_weight)
            weight = torch.cat([t[at] for at in _WEIGHTS if t[at] is not None])
            biases = [t.query_bias, t.key_bias, t.value_bias]
            if t.skip_weight is not None:
                biases.append(torch.zeros_like(t.query_bias) if t.out_bias is None else t.out_bias)
            projected = _linear(t.x, weight, torch.cat(biases))
            dst, src, skip = projected[:, :width], projected[:, width : 3 * width], projected[:, 3 * width :]
            gate, at_src = dst.index_select(0, edges.dst), src.index_select(0, edges.src)
            gate.add_(at_src[:, :width]).sigmoid_()
            out = _summed(gate * at_src[:, width:], edges.into)
        more = t.out_bias if t.skip_weight is None else skip
        # `out` may be a view (one column of four). Autograd does not let a caller modify a view in place that
        # an autograd function returns. So `out` is copied where nothing is added to it.
        if self.mean:
            out = out * edges.inverse if more is None else torch.addcmul(more, out, edges.inverse)
        else:
            out = out.clone() if more is None else out + more
        return out, (dst, src, gate), None

    def tables(self, t: LayerTensors) -> tuple[Tensor, ...]:
        """The rows of `_SLOTS` columns of all nodes as destinations and as sources, [N, C, 4] each."""
        like = t.value_weight.dtype, t.x.device
        zero, one = (constant(value, *like) for value in (0, 1))
        no_weight, no_bias = zero.expand_as(t.value_weight), zero.expand_as(t.query_bias)
        ones = one.expand_as(t.query_bias)
        skip = (no_weight, no_bias) if t.skip_weight is None else (t.skip_weight, t.out_bias)
        weights = [t.query_weight, *[no_weight] * 3], [no_weight, t.key_weight, t.value_weight, skip[0]]
        biases = (
            [t.query_bias, ones, no_bias, no_bias],
            [ones, t.key_bias, t.value_bias, no_bias if skip[1] is None else skip[1]],
        )
        tables = [
            _linear(t.x, torch.stack(w, 1).flatten(0, 1), torch.stack(b, 1).flatten())
            for w, b in zip(weights, biases)
        ]
        return tuple(table.view(len(t.x), -1, _SLOTS) for table in tables)

    def sums_backward(self, t: LayerTensors, grad: Tensor, dst, src, gate) -> list[Tensor]:
        """The gradients of queries, keys and values. The local variable ``before`` is the gradient with
        respect to the arguments of the gates' sigmoid."""
        edges, n, width = self.edges(t), len(t.x), len(t.value_weight)
        scale = edges.inverse if self.mean else constant(1, grad.dtype, grad.device)
        if self.by_heads:
            of_sum = torch.zeros_like(dst)
            torch.mul(grad, scale, out=of_sum[..., 2])
            before = _sigmoid_backward(operators.sddmm_op(of_sum, src, *edges.into), gate)
            return [
                operators.spmm_op(before, src, *edges.into, n)[..., 0],
                operators.spmm_op(before, dst, *edges.out_of, n)[..., 1],
                operators.spmm_op(gate, of_sum, *edges.out_of, n)[..., 2],
            ]
        along = (grad * scale if self.mean else grad).index_select(0, edges.dst)
        value = src[:, width:].index_select(0, edges.src)
        before = _sigmoid_backward(value.mul_(along), gate)
        ends = (before, edges.into), (before, edges.out_of), (along.mul_(gate), edges.out_of)
        return [_summed(*end) for end in ends]

    def backward(self, tensors, grad, made, _, need):
        t = LayerTensors._make(tensors)
        width = len(t.value_weight)
        together = torch.cat([*self.sums_backward(t, grad, *made), grad], 1)
        places = _WEIGHTS[:3] if t.skip_weight is None else _WEIGHTS
        of_projected = together[:, : len(places) * width]
        found: list[Tensor | None] = [None] * len(t)
        if need[0]:
            found[0] = of_projected.mm(torch.cat([t[at] for at in places]))
        if any(need[at] for at in places):
            of_weight = of_projected.t().mm(t.x)
            for k, at in enumerate(places):
                found[at] = of_weight[k * width : (k + 1) * width]
        biases = [*(at + 1 for at in _WEIGHTS[:3]), _OUT_BIAS]
        if any(need[at] for at in biases):
            of_bias = together.sum(0)
            for k, at in enumerate(biases):
                found[at] = of_bias[k * width : (k + 1) * width]
        return [x if needed else None for x, needed in zip(found, need)]

    def formula(self, *tensors):
        t, graph = LayerTensors(*tensors), self.graph

        def project(name):
            weight, bias = getattr(t, name + "_weight"), getattr(t, name + "_bias")
            return None if weight is None else F.linear(t.x, weight, bias)

        def attend(value, key, query, _):
            gate = (rows_of_destinations(graph, query) + rows_of_sources(graph, key)).sigmoid()
            out = sum_of_edges(graph, gate * rows_of_sources(graph, value))
            if self.mean:
                out = out * self.edges(t).inverse
            return out if t.out_bias is None else out + t.out_bias

        return spelled("gate", project, attend)


def gated_layer(spec: LayerSpec, graph: Graph, t: LayerTensors) -> Tensor:
    """The layer's result [N, C], from tensors that `operator_call.checked_tensors` and `why_not` have
    checked."""
    call = _Gated(graph, spec.mean, _by_heads(t.x))
    return SeveralOperators.at_once(call, *t) if needs_backward(t) else _ops.call(call.forward, t)[0]
