"""Readouts: reduce the features of nodes or edges to a row for each graph of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..graph.cache import once
from ..nn import DGLError
from ..ops import edge_softmax, gspmm
from .graph import DGLGraph


def readout(sizes: Tensor, x: Tensor, weight: Tensor | None, op: str) -> Tensor:
    """``[graphs, ...]``: x ``[rows, ...]`` reduced over the rows of each graph. The first graph has the first
    sizes[0] rows."""
    if op not in ("sum", "mean", "max", "min"):
        raise DGLError(f"readout: op: expected sum, mean, max or min, got {op!r}")
    graph = _of_rows(sizes, len(x))
    if weight is None:
        out = gspmm(graph, "copy_lhs", op, x, None)
    else:
        out = gspmm(graph, "copy_lhs", op, x * weight, None)
    if op in ("max", "min"):  # in DGL, graphs without nodes get 0
        out = out.masked_fill((sizes == 0).view(-1, *[1] * (out.dim() - 1)), 0)
    return out


def _of_rows(sizes: Tensor, rows: int) -> Graph:
    """A Graph with an edge from each row to its batch element; cached as long as ``sizes`` lives."""

    def build() -> Graph:
        indptr = torch.nn.functional.pad(sizes.to(torch.int64).cumsum(0), (1, 0))
        return Graph.from_csr(indptr, torch.arange(rows, device=sizes.device), rows, validate=False)

    if int(sizes.sum()) != rows:
        raise DGLError(f"readout: expected {int(sizes.sum())} rows, as the graphs have, got {rows}")
    return once((sizes,), ("dgl.readout", rows), build)


def readout_nodes(
    graph: DGLGraph, feat: str, weight: str | None = None, *, op: str = "sum", ntype: str | None = None
) -> Tensor:
    frame = graph._nodes[graph._kind(ntype)]
    weights = None if weight is None else frame[weight]
    return readout(graph.batch_num_nodes(ntype), frame[feat], weights, op)


def readout_edges(
    graph: DGLGraph, feat: str, weight: str | None = None, *, op: str = "sum", etype: Any = None
) -> Tensor:
    frame = graph._edges[graph._relation(etype)]
    weights = None if weight is None else frame[weight]
    return readout(graph.batch_num_edges(etype), frame[feat], weights, op)


def sum_nodes(graph: DGLGraph, feat: str, weight: str | None = None, *, ntype: str | None = None) -> Tensor:
    return readout_nodes(graph, feat, weight, ntype=ntype, op="sum")


def mean_nodes(graph: DGLGraph, feat: str, weight: str | None = None, *, ntype: str | None = None) -> Tensor:
    return readout_nodes(graph, feat, weight, ntype=ntype, op="mean")


def max_nodes(graph: DGLGraph, feat: str, weight: str | None = None, *, ntype: str | None = None) -> Tensor:
    return readout_nodes(graph, feat, weight, ntype=ntype, op="max")


def sum_edges(graph: DGLGraph, feat: str, weight: str | None = None, *, etype: Any = None) -> Tensor:
    return readout_edges(graph, feat, weight, etype=etype, op="sum")


def mean_edges(graph: DGLGraph, feat: str, weight: str | None = None, *, etype: Any = None) -> Tensor:
    return readout_edges(graph, feat, weight, etype=etype, op="mean")


def max_edges(graph: DGLGraph, feat: str, weight: str | None = None, *, etype: Any = None) -> Tensor:
    return readout_edges(graph, feat, weight, etype=etype, op="max")


def softmax_nodes(graph: DGLGraph, feat: str, *, ntype: str | None = None) -> Tensor:
    """Softmax over the nodes of each graph."""
    x = graph._nodes[graph._kind(ntype)][feat]
    return edge_softmax(_of_rows(graph.batch_num_nodes(ntype), len(x)), x)


def softmax_edges(graph: DGLGraph, feat: str, *, etype: Any = None) -> Tensor:
    """Softmax over the edges of each graph."""
    x = graph._edges[graph._relation(etype)][feat]
    return edge_softmax(_of_rows(graph.batch_num_edges(etype), len(x)), x)


def broadcast_nodes(graph: DGLGraph, graph_feat: Tensor, *, ntype: str | None = None) -> Tensor:
    """Repeats each graph's row for all of its nodes."""
    return graph_feat.repeat_interleave(graph.batch_num_nodes(ntype), 0)


def broadcast_edges(graph: DGLGraph, graph_feat: Tensor, *, etype: Any = None) -> Tensor:
    """Repeats each graph's row for all of its edges."""
    return graph_feat.repeat_interleave(graph.batch_num_edges(etype), 0)
