"""Products along edges, sddmm and spmm, whose gradients are each other."""

from __future__ import annotations

from ..graph import GraphPart, RangedGraph
from ..runtime import rules
from ..runtime.eager import transformed
from ..runtime.rules import Rule
from ..runtime.torch_internals import exports_onnx
from . import operators
from . import plain as _plain
from . import traced_graph as _edges
from .checks import refuse_transforms_of_shared_graphs


class _Sddmm(Rule):
    __slots__ = "graph", "reverse"

    def __init__(self, graph, reverse: bool):
        self.graph, self.reverse = graph, reverse

    def forward(self, rows, feat):
        return operators.sddmm(self.graph, rows, feat, self.reverse)

    def gradients(self, need, saved, grad):
        (rows, feat), graph, reverse = saved, self.graph, self.reverse
        return (
            spmm(graph, grad, feat, reverse) if need[0] else None,
            spmm(graph, grad, rows, not reverse) if need[1] else None,
        )


class _Spmm(_Sddmm):
    __slots__ = ()

    def forward(self, weight, feat):
        return operators.spmm(self.graph, weight, feat, self.reverse)

    def gradients(self, need, saved, grad):
        (weight, feat), graph, reverse = saved, self.graph, self.reverse
        return (
            sddmm(graph, grad, feat, reverse) if need[0] else None,
            spmm(graph, weight, grad, not reverse) if need[1] else None,
        )


def sddmm(graph, rows, feat, reverse: bool = False):
    """<rows[i], feat[j]> of each edge [E, H]; rows are destinations, or with ``reverse`` sources."""
    if isinstance(graph, RangedGraph):
        return graph.sddmm(sddmm, rows, feat, reverse)
    if isinstance(graph, GraphPart):
        refuse_transforms_of_shared_graphs(rows, feat)
        graph, (feat,) = graph.gathered(feat)
    graph = _edges.stand_in(graph)
    if isinstance(graph, _edges.EdgeList) and not exports_onnx():
        return _edges.sddmm(graph, rows, feat, reverse)
    if transformed(rows, feat) or exports_onnx():
        return _plain.sddmm(_plain.ends_of(graph, reverse), rows, feat)
    return rules.apply(_Sddmm(graph, reverse), rows, feat)


def spmm(graph, weight, feat, reverse: bool = False):
    """sum_j weight_ij feat[j] of each row i: a destination, or with ``reverse`` a source."""
    if isinstance(graph, RangedGraph):
        return graph.spmm(spmm, weight, feat, reverse)
    if isinstance(graph, GraphPart):
        refuse_transforms_of_shared_graphs(weight, feat)
        graph, (feat,) = graph.gathered(feat)
    graph = _edges.stand_in(graph)
    if isinstance(graph, _edges.EdgeList) and not exports_onnx():
        return _edges.spmm(graph, weight, feat, reverse)
    if transformed(weight, feat) or exports_onnx():
        return _plain.spmm(_plain.ends_of(graph, reverse), weight, feat)
    return rules.apply(_Spmm(graph, reverse), weight, feat)
