"""Products along edges, sddmm and spmm, with their derivatives, which are each other."""

from __future__ import annotations

import torch

from ..graph import GraphPart, RangedGraph
from ..runtime.eager import transformed
from ..runtime.torch_internals import exports_onnx
from . import operators
from . import plain as _plain
from . import traced_graph as _edges
from .checks import refuse_transforms_of_shared_graphs


class _Sddmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, feat, graph, reverse):
        ctx.save_for_backward(rows, feat)
        ctx.graph, ctx.reverse = graph, reverse
        return operators.sddmm(graph, rows, feat, reverse)

    @staticmethod
    def backward(ctx, grad):
        rows, feat = ctx.saved_tensors
        need_rows, need_feat = ctx.needs_input_grad[:2]
        return (
            spmm(ctx.graph, grad, feat, ctx.reverse) if need_rows else None,
            spmm(ctx.graph, grad, rows, not ctx.reverse) if need_feat else None,
            None,
            None,
        )


class _Spmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, feat, graph, reverse):
        ctx.save_for_backward(weight, feat)
        ctx.graph, ctx.reverse = graph, reverse
        return operators.spmm(graph, weight, feat, reverse)

    @staticmethod
    def backward(ctx, grad):
        weight, feat = ctx.saved_tensors
        need_weight, need_feat = ctx.needs_input_grad[:2]
        return (
            sddmm(ctx.graph, grad, feat, ctx.reverse) if need_weight else None,
            spmm(ctx.graph, weight, grad, not ctx.reverse) if need_feat else None,
            None,
            None,
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
    return _Sddmm.apply(rows, feat, graph, reverse)


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
    return _Spmm.apply(weight, feat, graph, reverse)
