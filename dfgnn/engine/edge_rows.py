"""Maps between nodes and edges: the rows of edges' sources or destinations, and sums of edges' rows over
nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..graph.derived import edges_as_sources
from ..runtime.eager import in_plain_operations
from ..runtime.ops import acc_type
from ..runtime.rules import rows_at
from . import by_index
from . import compiler_graph as _edges
from . import plain as _plain
from . import products as _products
from .argument_checks import Checker, for_device, without_padding
from .compiler_graph import EdgeList
from .edge_maps import EdgeMap, apply, define


def by_edges(graph: Any) -> Any:
    """``edges_as_sources`` of the graph, also while a compiler records."""
    graph = _edges.for_compiler(graph)
    return _edges.by_edges(graph) if isinstance(graph, EdgeList) else edges_as_sources(graph)


# ---- gathered rows of the edges' sources or destinations, and sums of edges' rows over nodes --------------


def _sum(graph: Graph, rows: Tensor, reverse: bool) -> Tensor:
    if by_index.takes_of(graph, rows):
        return by_index.sums_of_edges(graph, rows, reverse)
    if rows.shape[1:].numel() == 0:
        return rows.new_zeros(graph.num_src if reverse else graph.num_dst, *rows.shape[1:])
    flat = rows.unsqueeze(1) if rows.dim() == 1 else rows.flatten(1)
    (values,) = for_device(Checker("sum_of_edges", graph, "rows", rows), flat.unsqueeze(1))
    one = rows.new_ones(1, 1).expand(len(rows), 1)
    sums = _products.spmm(edges_as_sources(graph, reverse), one, values)
    return without_padding(sums, flat.shape[1]).reshape(-1, *rows.shape[1:])


def _sum_in_tensors(graph: Any, rows: Tensor, reverse: bool) -> Tensor:
    ends, acc = _plain.ends_of(graph, reverse), acc_type(rows.dtype)
    out = rows.new_zeros(ends.num_dst, *rows.shape[1:], dtype=acc)
    return out.index_add(0, ends.edge_index[1], rows.to(acc)).to(rows.dtype)


_SUM = define(
    EdgeMap(
        "edge_rows_sum", "Tensor x", "bool reverse", saves=False,
        run=_sum,
        plain=_sum_in_tensors,
        empty=lambda graph, x, reverse: x.new_empty(
            graph.num_src if reverse else graph.num_dst, *x.shape[1:]
        ),
        gradients=(lambda graph, grad, reverse: _rows(graph, grad, reverse),),
    )
)  # fmt: skip
_ROWS = define(
    EdgeMap(
        "edge_rows", "Tensor x", "bool sources", saves=False,
        run=lambda graph, x, sources: x.index_select(0, graph.edge_index[0 if sources else 1]),
        plain=lambda graph, x, sources: rows_at(x, _plain.ends_of(graph).edge_index[0 if sources else 1]),
        empty=lambda graph, x, sources: x.new_empty(graph.num_edges, *x.shape[1:]),
        gradients=(lambda graph, grad, sources: sum_of_edges(graph, grad.contiguous(), sources),),
        of_edges=True,
    )
)  # fmt: skip


def sum_of_edges(graph: Any, rows: Tensor, reverse: bool = False) -> Tensor:
    """``[N, ...]``: the sums of edges' rows ``[E, ...]`` over the edges into each node, or with ``reverse``
    out of each."""
    recorded = torch.compiler.is_compiling() or in_plain_operations() or rows.is_meta
    if isinstance(graph, Graph) and not recorded:
        return _sum(graph, rows, reverse)  # whose functions are differentiable, so that no rule is needed
    return apply(_SUM, graph, (rows,), reverse)


def _rows(graph: Any, x: Tensor, sources: bool) -> Tensor:
    if by_index.takes_of(graph, x) and by_index.is_few(graph.num_edges * x.shape[1:].numel()):
        return x.index_select(0, graph.edge_index[0 if sources else 1])
    return apply(_ROWS, graph, (x,), sources)


def rows_of_sources(graph: Graph, x: Tensor) -> Tensor:
    """x[j] for every edge j -> i: ``[N_src, ...]`` -> ``[E, ...]``. The gradient is deterministic, unlike
    that of indexing."""
    return _rows(graph, x, True)


def rows_of_destinations(graph: Graph, x: Tensor) -> Tensor:
    """x[i] for every edge j -> i: ``[N_dst, ...]`` -> ``[E, ...]``. The gradient is deterministic."""
    return _rows(graph, x, False)
