"""Products along edges, sddmm and spmm, whose gradients are each other."""

from __future__ import annotations

from ..graph import GraphPart, RangedGraph
from . import operators
from . import plain as _plain
from .argument_checks import refuse_transforms_of_shared_graphs
from .edge_maps import EdgeMap, apply, define

_SDDMM = define(
    EdgeMap(
        "sddmm", "Tensor rows, Tensor feat", "bool reverse",
        run=operators.sddmm,
        plain=lambda graph, rows, feat, reverse: _plain.sddmm(_plain.ends_of(graph, reverse), rows, feat),
        empty=lambda graph, rows, feat, reverse: feat.new_empty(graph.num_edges, feat.shape[1]),
        gradients=(
            lambda graph, grad, rows, feat, reverse: spmm(graph, grad, feat, reverse),
            lambda graph, grad, rows, feat, reverse: spmm(graph, grad, rows, not reverse),
        ),
    )
)  # fmt: skip
_SPMM = define(
    EdgeMap(
        "spmm", "Tensor weight, Tensor feat", "bool reverse",
        run=operators.spmm,
        plain=lambda graph, weight, feat, reverse: _plain.spmm(_plain.ends_of(graph, reverse), weight, feat),
        empty=lambda graph, weight, feat, reverse: feat.new_empty(
            graph.num_src if reverse else graph.num_dst, *feat.shape[1:]
        ),
        gradients=(
            lambda graph, grad, weight, feat, reverse: sddmm(graph, grad, feat, reverse),
            lambda graph, grad, weight, feat, reverse: spmm(graph, weight, grad, not reverse),
        ),
    )
)  # fmt: skip


def sddmm(graph, rows, feat, reverse: bool = False):
    """<rows[i], feat[j]> of each edge [E, H]. rows belong to destinations, or with ``reverse`` to sources."""
    if isinstance(graph, RangedGraph):
        return graph.sddmm(sddmm, rows, feat, reverse)
    return apply(_SDDMM, *_on_one_graph(graph, rows, feat), reverse)


def spmm(graph, weight, feat, reverse: bool = False):
    """sum_j weight_ij feat[j] of each row i: a destination, or with ``reverse`` a source."""
    if isinstance(graph, RangedGraph):
        return graph.spmm(spmm, weight, feat, reverse)
    return apply(_SPMM, *_on_one_graph(graph, weight, feat), reverse)


def _on_one_graph(graph, first, feat):
    """(graph, tensors): a shared graph is replaced by a Graph, and feat gets the rows of all sources of this
    process's edges."""
    if isinstance(graph, GraphPart):
        refuse_transforms_of_shared_graphs(first, feat)
        graph, (feat,) = graph.gathered(feat)
    return graph, (first, feat)
