"""Readouts: reduce the features of nodes or edges to a row for each graph of a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..functional.ops import REDUCERS, edge_softmax, gspmm
from ..graph import Graph
from ..graph.cache import of_segments
from ..nn.dgl import DGLError
from .graph import DGLGraph


def readout(sizes: Tensor, x: Tensor, op: str) -> Tensor:
    """``[graphs, ...]``: x ``[rows, ...]`` reduced over the rows of each graph, 0 for a graph without rows.
    The first graph has the first sizes[0] rows."""
    if op not in REDUCERS:
        raise DGLError(f"readout: op: expected one of {', '.join(REDUCERS)}, got {op!r}")
    out = gspmm(_of_rows(sizes, len(x)), "copy_lhs", op, x, None)
    if op in ("max", "min"):
        out = out.masked_fill((sizes == 0).view(-1, *[1] * (out.dim() - 1)), 0)
    return out


def _of_rows(sizes: Tensor, rows: int) -> Graph:
    if int(sizes.sum()) != rows:
        raise DGLError(f"readout: expected {int(sizes.sum())} rows, as the graphs have, got {rows}")
    return of_segments(sizes, rows)


def _of_nodes(graph: DGLGraph, ntype: str | None) -> tuple[Any, Tensor]:
    return graph.nodes[ntype].data, graph.batch_num_nodes(ntype)


def _of_edges(graph: DGLGraph, etype: Any) -> tuple[Any, Tensor]:
    return graph.edges[etype].data, graph.batch_num_edges(etype)


def _read(of: tuple[Any, Tensor], feat: str, weight: str | None, op: str) -> Tensor:
    data, sizes = of
    x = data[feat]
    return readout(sizes, x if weight is None else x * data[weight], op)


def readout_nodes(
    graph: DGLGraph, feat: str, weight: str | None = None, *, op: str = "sum", ntype: str | None = None
) -> Tensor:
    """The feature of each graph's nodes, times their ``weight``, reduced by op: sum, mean, max or min."""
    return _read(_of_nodes(graph, ntype), feat, weight, op)


def readout_edges(
    graph: DGLGraph, feat: str, weight: str | None = None, *, op: str = "sum", etype: Any = None
) -> Tensor:
    """The feature of each graph's edges, times their ``weight``, reduced by op: sum, mean, max or min."""
    return _read(_of_edges(graph, etype), feat, weight, op)


sum_nodes, mean_nodes, max_nodes = (partial(readout_nodes, op=op) for op in ("sum", "mean", "max"))
sum_edges, mean_edges, max_edges = (partial(readout_edges, op=op) for op in ("sum", "mean", "max"))


def softmax_nodes(graph: DGLGraph, feat: str, *, ntype: str | None = None) -> Tensor:
    """Softmax over the nodes of each graph."""
    data, sizes = _of_nodes(graph, ntype)
    return edge_softmax(_of_rows(sizes, len(data[feat])), data[feat])


def softmax_edges(graph: DGLGraph, feat: str, *, etype: Any = None) -> Tensor:
    """Softmax over the edges of each graph."""
    data, sizes = _of_edges(graph, etype)
    return edge_softmax(_of_rows(sizes, len(data[feat])), data[feat])


def broadcast_nodes(graph: DGLGraph, graph_feat: Tensor, *, ntype: str | None = None) -> Tensor:
    """Repeats each graph's row for all of its nodes."""
    return _repeated(graph_feat, graph.batch_num_nodes(ntype))


def broadcast_edges(graph: DGLGraph, graph_feat: Tensor, *, etype: Any = None) -> Tensor:
    """Repeats each graph's row for all of its edges."""
    return _repeated(graph_feat, graph.batch_num_edges(etype))


def _repeated(rows: Tensor, sizes: Tensor) -> Tensor:
    if len(sizes) == 1 and len(rows) != 1:  # as in DGL, one graph's row may come without its dimension
        rows = rows.unsqueeze(0)
    if len(rows) != len(sizes):
        raise DGLError(f"broadcast: graph_feat: expected {len(sizes)} rows, one per graph, got {len(rows)}")
    return rows.repeat_interleave(sizes, 0)
