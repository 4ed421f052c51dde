"""Between nodes and edges: the rows of edges' ends, and sums of edges' rows over nodes."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .. import _autograd, _plain, functional
from .._compile import not_compiled
from .._edges import EdgeList
from ..graph import Graph
from ._derived import of_graph


@not_compiled
@torch.inference_mode(False)
@_plain.untransformed()
def edges_as_sources(graph: Graph, reverse: bool = False) -> Graph:
    """The graph that leads from each edge of ``graph`` to its destination (reverse: to its source).

    Its spmm sums rows of edges over the nodes. Shares the structure of ``graph``.
    """
    kept = of_graph(graph)
    key = ("edges_as_sources", reverse)
    if key not in kept:
        csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
        edges = csr.eids
        if edges is None:
            edges = torch.arange(graph.num_edges, dtype=torch.int32, device=graph.device)
        kept[key] = Graph.from_csr(csr.indptr, edges, graph.num_edges, eids=csr.eids, validate=False)
    return kept[key]


def by_edges(graph: Graph) -> Graph:
    """``edges_as_sources``, also while a compiler records."""
    if not isinstance(graph, EdgeList):
        return edges_as_sources(graph)
    dst = graph.edge_index[1]
    edges = torch.stack([torch.arange(len(dst), dtype=dst.dtype, device=dst.device), dst])
    return cast(Graph, EdgeList(edges, len(dst), graph.num_dst))


def sum_of_edges(graph: Graph, rows: Tensor, reverse: bool = False) -> Tensor:
    """The sums of edges' rows ``[E, D]`` over the edges into each node (reverse: out of each): ``[N, D]``."""
    one = rows.new_ones(1).expand(len(rows))
    return functional.spmm(edges_as_sources(graph, reverse), one, rows.unsqueeze(1)).squeeze(1)


def rows_of_sources(graph: Graph, x: Tensor) -> Tensor:
    """x[j] for every edge j -> i: ``[N_src, D]`` -> ``[E, D]``. Deterministic, unlike indexing."""
    return _rows(graph, x, True)


def rows_of_destinations(graph: Graph, x: Tensor) -> Tensor:
    """x[i] for every edge j -> i: ``[N_dst, D]`` -> ``[E, D]``; as :func:`rows_of_sources`."""
    return _rows(graph, x, False)


def _rows(graph: Graph, x: Tensor, sources: bool) -> Tensor:
    if isinstance(graph, EdgeList) or _autograd.transformed(x):
        ends = graph.edge_index if isinstance(graph, EdgeList) else _plain.ends_of(graph).edge_index
        return x[ends[0 if sources else 1]]
    return _Rows.apply(x, graph, sources)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, graph, sources):
        ctx.graph, ctx.sources = graph, sources
        return x.index_select(0, graph.edge_index[0 if sources else 1])

    @staticmethod
    def backward(ctx, grad):
        return sum_of_edges(ctx.graph, grad.contiguous(), reverse=ctx.sources), None, None
