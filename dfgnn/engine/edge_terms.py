"""Products of the edges' features with rows of nodes. Terms of edges in key and value consist of them.

There are two kinds of features. Those that all heads share, ``[E, d]``, are multiplied by three operators
(csrc/core/edge_terms.h): `edge_dot`, `edge_sum` and `edge_outer`. Each is linear in both arguments, and its
gradients are the other two. Features of each head, ``[E, H, D]``, are rows of sources of the graph that leads
from each edge to its destination; the same three products are sddmm and spmm (`products`) on it. `dot`,
`total` and `outer` take either kind.

In the docstrings e is an edge into node i, and h a head; acc is the accumulation type of a tensor's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graph import GraphPart
from ..runtime import ops as _ops
from ..runtime.compiling import sums_of_rows
from . import compiler_graph as _edges
from . import edge_maps as _products
from . import operators
from . import plain as _plain
from .edge_maps import EdgeMap, apply, define, edges_as_sources, rows_of_destinations, sum_of_edges

# ---- features that heads share ---------------------------------------------------------------------------


def _dot_in_tensors(graph, rows: Tensor, attr: Tensor, scale: float) -> Tensor:
    acc = _ops.acc_type(rows.dtype)
    ends = rows[:, :, : attr.shape[1]].to(acc)[_plain.ends_of(graph).edge_index[1]]
    return torch.einsum("ehc,ec->eh", ends, attr.to(acc)) * scale


def _sum_in_tensors(graph, weight: Tensor, attr: Tensor, width: int) -> Tensor:
    terms = torch.einsum("eh,ec->ehc", weight, attr.to(weight.dtype))
    terms = torch.nn.functional.pad(terms, (0, width - attr.shape[1]))
    found = terms.new_zeros(graph.num_dst, *terms.shape[1:])
    return found.index_add(0, _plain.ends_of(graph).edge_index[1], terms).to(attr.dtype)


def _outer_in_tensors(graph, weight: Tensor, rows: Tensor, dim: int, scale: float) -> Tensor:
    ends = rows[:, :, :dim].to(weight.dtype)[_plain.ends_of(graph).edge_index[1]]
    return (torch.einsum("eh,ehc->ec", weight, ends) * scale).to(rows.dtype)


_DOT = define(
    EdgeMap(
        "edge_dot", "Tensor rows, Tensor attr", "float scale", of_edges=True,
        run=operators.edge_dot,
        plain=_dot_in_tensors,
        empty=lambda graph, rows, attr, scale: _ops.edge_dot_fake(rows, graph.num_edges),
        gradients=(
            lambda graph, grad, rows, attr, scale: edge_sum(graph, grad, attr, rows.shape[2]) * scale,
            lambda graph, grad, rows, attr, scale: edge_outer(graph, grad, rows, attr.shape[1], scale),
        ),
    )
)  # fmt: skip
_SUM = define(
    EdgeMap(
        "edge_sum", "Tensor weight, Tensor attr", "SymInt width",
        run=operators.edge_sum,
        plain=_sum_in_tensors,
        empty=lambda graph, weight, attr, width: attr.new_empty(graph.num_dst, weight.shape[1], width),
        gradients=(
            lambda graph, grad, weight, attr, width: edge_dot(graph, grad, attr),
            lambda graph, grad, weight, attr, width: edge_outer(graph, weight, grad, attr.shape[1]),
        ),
    )
)  # fmt: skip
_OUTER = define(
    EdgeMap(
        "edge_outer", "Tensor weight, Tensor rows", "SymInt dim, float scale", of_edges=True,
        run=operators.edge_outer,
        plain=_outer_in_tensors,
        empty=lambda graph, weight, rows, dim, scale: rows.new_empty(graph.num_edges, dim),
        gradients=(
            lambda graph, grad, weight, rows, dim, scale: edge_dot(graph, rows, grad, scale),
            lambda graph, grad, weight, rows, dim, scale: edge_sum(graph, weight, grad, rows.shape[2])
            * scale,
        ),
    )
)  # fmt: skip


def _operand(graph):
    """The graph as one Graph. These maps read only destinations and edges, so that no rows of other
    processes' sources are fetched for a shared graph."""
    return graph.as_one() if isinstance(graph, GraphPart) else graph


def edge_dot(graph, rows: Tensor, attr: Tensor, scale: float = 1.0) -> Tensor:
    """[E, H] acc: scale rows[i, h] . attr[e] of each edge e into i. rows: [N, H, width]; attr: [E, d]. Here
    and below, columns of rows beyond the first d are not read."""
    return apply(_DOT, _operand(graph), (rows, attr), scale)


def edge_sum(graph, weight: Tensor, attr: Tensor, width: int) -> Tensor:
    """[N, H, width]: the sum of weight[e, h] attr[e] over the edges e into i; columns beyond d are 0. weight:
    acc."""
    return apply(_SUM, _operand(graph), (weight, attr), width)


def edge_outer(graph, weight: Tensor, rows: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    """[E, d]: scale sum_h weight[e, h] rows[i, h] of each edge e into i. weight: acc."""
    return apply(_OUTER, _operand(graph), (weight, rows), dim, scale)


def sum_of_features(graph, attention: Tensor, attr: Tensor) -> Tensor:
    """[N, H, d]: the sum of attention[e, h] attr[e] over the edges e into i. attention: of any dtype."""
    width = row_width(attr.shape[1], attr)
    found = edge_sum(graph, _ops.as_type(attention, _ops.acc_type(attr.dtype)), attr, width)
    return found[:, :, : attr.shape[1]] if width > attr.shape[1] else found


def row_width(size: int, x: Tensor) -> int:
    """The columns of a row of ``size`` features, with padding: CUDA's kernels load 16 bytes at a time."""
    step = 16 // x.dtype.itemsize if x.is_cuda else 1
    return -(-size // step) * step


# ---- features of either kind -----------------------------------------------------------------------------


def dot(graph, rows: Tensor, feat: Tensor, scale: float = 1.0) -> Tensor:
    """[E, H] acc: scale rows[i, h] . feat[e, h] of each edge e into i. feat: [E, d], or [E, H, width]."""
    if feat.dim() == 2:
        return edge_dot(graph, rows, feat, scale)
    graph = _edges.for_compiler(_operand(graph))
    if _recorded(graph):
        ends = rows_of_destinations(graph, rows.flatten(1)).view_as(feat)
        found = sums_of_rows(ends * feat)
    else:
        found = _products.sddmm(edges_as_sources(graph), rows.contiguous(), feat)
    found = _ops.as_type(found, _ops.acc_type(rows.dtype))
    return found if scale == 1 else found * scale


def total(graph, weight: Tensor, feat: Tensor, width: int) -> Tensor:
    """[N, H, width]: the sum of weight[e, h] feat[e, h] over the edges e into i. weight: acc. feat: as in
    `dot`; features of each head have this width."""
    if feat.dim() == 2:
        return edge_sum(graph, weight, feat, width)
    graph, weight = _edges.for_compiler(_operand(graph)), _ops.as_type(weight, feat.dtype)
    if _recorded(graph):
        rows = (weight.unsqueeze(2) * feat).flatten(1)
        return sum_of_edges(graph, rows).unflatten(1, feat.shape[1:])
    return _products.spmm(edges_as_sources(graph), weight, feat)


def outer(graph, weight: Tensor, rows: Tensor, feat: Tensor, scale: float = 1.0) -> Tensor:
    """The gradient of feat in `dot` and `total`, of the shape of feat: scale sum_h weight[e, h] rows[i, h],
    or for features of each head without the sum. weight: acc. For eager calls only."""
    if feat.dim() == 2:
        return edge_outer(graph, weight, rows, feat.shape[1], scale)
    weight = _ops.as_type(weight if scale == 1 else weight * scale, feat.dtype)
    return _products.spmm(edges_as_sources(_operand(graph)), weight, rows.contiguous(), reverse=True)


def _recorded(graph) -> bool:
    """Whether a compiler records. There `edges_as_sources` cannot be made, which needs a Graph; gathered rows
    and sums of edges' rows (`edge_maps`) take its place."""
    return isinstance(graph, _edges.EdgeList) or torch.compiler.is_compiling()
