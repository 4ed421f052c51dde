"""Features of edges against rows of nodes, with their derivatives: what terms of edges add to an attention.

There are two kinds of features. Those that all heads share, ``[E, d]``, are multiplied by three operators
(csrc/core/edge_terms.h): `edge_dot`, `edge_sum` and `edge_outer`, each linear in both arguments, with the
other two as gradients. Features of each head, ``[E, H, D]``, are the sources of a graph that leads from each
edge to its destination, whose sampled products and weighted sums (`products`) are the same three. `dot`,
`total` and `outer` take either kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graph import GraphPart
from ..runtime import eager as _eager
from ..runtime import ops as _ops
from ..runtime import rules
from ..runtime.rules import Rule
from ..runtime.torch_internals import exports_onnx
from . import operators
from . import plain as _plain
from . import products as _products
from . import traced_graph as _edges
from .edge_rows import edges_as_sources, rows_of_destinations, sum_of_edges

# ---- features that heads share ---------------------------------------------------------------------------


class _EdgeDot(Rule):
    __slots__ = "graph", "scale"

    def __init__(self, graph, scale: float):
        self.graph, self.scale = graph, scale

    def forward(self, rows, attr):
        return operators.edge_dot(self.graph, rows, attr, self.scale)

    def gradients(self, need, saved, grad):
        rows, attr = saved
        return (
            edge_sum(self.graph, grad, attr, rows.shape[2]) * self.scale if need[0] else None,
            edge_outer(self.graph, grad, rows, attr.shape[1], self.scale) if need[1] else None,
        )


class _EdgeSum(Rule):
    __slots__ = "graph", "width"

    def __init__(self, graph, width: int):
        self.graph, self.width = graph, width

    def forward(self, weight, attr):
        return operators.edge_sum(self.graph, weight, attr, self.width)

    def gradients(self, need, saved, grad):
        weight, attr = saved
        return (
            edge_dot(self.graph, grad, attr) if need[0] else None,
            edge_outer(self.graph, weight, grad, attr.shape[1]) if need[1] else None,
        )


class _EdgeOuter(Rule):
    __slots__ = "dim", "graph", "scale"

    def __init__(self, graph, dim: int, scale: float):
        self.graph, self.dim, self.scale = graph, dim, scale

    def forward(self, weight, rows):
        return operators.edge_outer(self.graph, weight, rows, self.dim, self.scale)

    def gradients(self, need, saved, grad):
        weight, rows = saved
        return (
            edge_dot(self.graph, rows, grad, self.scale) if need[0] else None,
            edge_sum(self.graph, weight, grad, rows.shape[2]) * self.scale if need[1] else None,
        )


def _operand(graph):
    """Of destinations and edges alone: sources need not be fetched."""
    return graph.as_one() if isinstance(graph, GraphPart) else _edges.stand_in(graph)


def edge_dot(graph, rows: Tensor, attr: Tensor, scale: float = 1.0) -> Tensor:
    """[E, H] acc: scale rows[i, h] . attr[e] of each edge e into i. rows: [N, H, width]; attr: [E, d]. What
    rows have behind the first d is not looked at, here and below."""
    graph = _operand(graph)
    if isinstance(graph, _edges.EdgeList) and not exports_onnx():
        return _edges.edge_dot(graph, rows, attr, scale)
    if _eager.transformed(rows, attr) or exports_onnx():
        acc = _ops.acc_type(rows.dtype)
        ends = rows[:, :, : attr.shape[1]].to(acc)[_plain.ends_of(graph).edge_index[1]]
        return torch.einsum("ehc,ec->eh", ends, attr.to(acc)) * scale
    return rules.apply(_EdgeDot(graph, scale), rows, attr)


def edge_sum(graph, weight: Tensor, attr: Tensor, width: int) -> Tensor:
    """[N, H, width]: the sum of weight[e, h] attr[e] over the edges e into i; zeros behind d. weight: acc."""
    graph = _operand(graph)
    if isinstance(graph, _edges.EdgeList) and not exports_onnx():
        return _edges.edge_sum(graph, weight, attr, width)
    if _eager.transformed(weight, attr) or exports_onnx():
        terms = torch.einsum("eh,ec->ehc", weight, attr.to(weight.dtype))
        terms = torch.nn.functional.pad(terms, (0, width - attr.shape[1]))
        found = terms.new_zeros(graph.num_dst, *terms.shape[1:])
        return found.index_add(0, _plain.ends_of(graph).edge_index[1], terms).to(attr.dtype)
    return rules.apply(_EdgeSum(graph, width), weight, attr)


def edge_outer(graph, weight: Tensor, rows: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    """[E, d]: scale sum_h weight[e, h] rows[i, h] of each edge e into i. weight: acc."""
    graph = _operand(graph)
    if isinstance(graph, _edges.EdgeList) and not exports_onnx():
        return _edges.edge_outer(graph, weight, rows, dim, scale)
    if _eager.transformed(weight, rows) or exports_onnx():
        ends = rows[:, :, :dim].to(weight.dtype)[_plain.ends_of(graph).edge_index[1]]
        return (torch.einsum("eh,ehc->ec", weight, ends) * scale).to(rows.dtype)
    return rules.apply(_EdgeOuter(graph, dim, scale), weight, rows)


def sum_of_features(graph, attention: Tensor, attr: Tensor) -> Tensor:
    """[N, H, d]: the sum of attention[e, h] attr[e] over the edges e into i, of attention in any type."""
    width = row_width(attr.shape[1], attr)
    found = edge_sum(graph, _ops.as_type(attention, _ops.acc_type(attr.dtype)), attr, width)
    return found[:, :, : attr.shape[1]] if width > attr.shape[1] else found


def row_width(size: int, x: Tensor) -> int:
    """Columns of a row for so many features: CUDA's kernels load 16 bytes at a time."""
    step = 16 // x.dtype.itemsize if x.is_cuda else 1
    return -(-size // step) * step


# ---- features of either kind -----------------------------------------------------------------------------


def dot(graph, rows: Tensor, feat: Tensor, scale: float = 1.0) -> Tensor:
    """[E, H] acc: scale rows[i, h] . feat[e, h] of each edge e into i. feat: [E, d], or [E, H, width]."""
    if feat.dim() == 2:
        return edge_dot(graph, rows, feat, scale)
    graph = _operand(graph)
    if _recorded(graph):
        ends = rows_of_destinations(graph, rows.flatten(1)).view_as(feat)
        found = (ends * feat).sum(-1)
    else:
        found = _products.sddmm(edges_as_sources(graph), rows.contiguous(), feat)
    found = _ops.as_type(found, _ops.acc_type(rows.dtype))
    return found if scale == 1 else found * scale


def total(graph, weight: Tensor, feat: Tensor, width: int) -> Tensor:
    """[N, H, width]: the sum of weight[e, h] feat[e, h] over the edges e into i. weight: acc; feat: as in
    `dot`, and those of each head as wide."""
    if feat.dim() == 2:
        return edge_sum(graph, weight, feat, width)
    graph, weight = _operand(graph), _ops.as_type(weight, feat.dtype)
    if _recorded(graph):
        rows = (weight.unsqueeze(2) * feat).flatten(1)
        return sum_of_edges(graph, rows).unflatten(1, feat.shape[1:])
    return _products.spmm(edges_as_sources(graph), weight, feat)


def outer(graph, weight: Tensor, rows: Tensor, feat: Tensor, scale: float = 1.0) -> Tensor:
    """Of the shape of feat: scale sum_h weight[e, h] rows[i, h], or of each head alone. weight: acc. It is
    the gradient of feat in `dot` and `total`; for eager calls."""
    if feat.dim() == 2:
        return edge_outer(graph, weight, rows, feat.shape[1], scale)
    weight = _ops.as_type(weight if scale == 1 else weight * scale, feat.dtype)
    return _products.spmm(edges_as_sources(_operand(graph)), weight, rows.contiguous(), reverse=True)


def _recorded(graph) -> bool:
    """Whether a compiler records, which knows the edges' rows but not graphs of edges."""
    return isinstance(graph, _edges.EdgeList) or torch.compiler.is_compiling()
