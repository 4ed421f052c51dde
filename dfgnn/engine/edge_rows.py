"""Between nodes and edges: the rows of edges' ends, and sums of edges' rows over nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph import Graph
from ..graph.by_edges import edges_as_sources
from ..runtime import eager as _eager
from ..runtime import rules
from ..runtime import torch_internals as internals
from ..runtime.rules import Rule
from ..sparse.fixed import FixedStructure
from . import plain as _plain
from . import products as _products
from . import traced_graph as _edges
from .checks import Checker, for_device, without_padding
from .traced_graph import EdgeList

_derived: weakref.WeakKeyDictionary[Graph, dict[Any, Any]] = weakref.WeakKeyDictionary()


def of_graph(graph: Graph, key: tuple, make: Callable[[Graph], Any]) -> Any:
    """What ``make`` gives, made once; of a graph of fixed capacity once for its edges as they are."""
    structure = graph._structure
    fixed = isinstance(structure, FixedStructure)
    kept: dict[Any, Any] = structure.derived() if fixed else _derived.setdefault(graph, {})  # type: ignore
    found = kept.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = kept[key] = make(graph)
    return found


def by_edges(graph: Any) -> Any:
    """``edges_as_sources``, also while a compiler records."""
    graph = _edges.stand_in(graph)
    return _edges.by_edges(graph) if isinstance(graph, EdgeList) else edges_as_sources(graph)


# ---- rows of ends, and their sums -----------------------------------------------------------------------


def sum_of_edges(graph: Graph, rows: Tensor, reverse: bool = False) -> Tensor:
    """The sums of edges' rows ``[E, D]`` over the edges into each node (reverse: out of each): ``[N, D]``."""
    stand_in = _edges.stand_in(graph)
    if internals.exports_onnx():
        ends = _plain.ends_of(graph, reverse)
        return rows.new_zeros(ends.num_dst, rows.shape[1]).index_add(0, ends.edge_index[1], rows)
    if isinstance(stand_in, EdgeList):
        return _operators(stand_in).sum(rows, *_edges._arguments(stand_in), reverse)
    (values,) = for_device(Checker("sum_of_edges", graph, "rows", rows), rows.unsqueeze(1))
    one = rows.new_ones(1, 1).expand(len(rows), 1)
    sums = _products.spmm(edges_as_sources(graph, reverse), one, values)
    return without_padding(sums, rows.shape[1]).squeeze(1)


def rows_of_sources(graph: Graph, x: Tensor) -> Tensor:
    """x[j] for every edge j -> i: ``[N_src, D]`` -> ``[E, D]``. Deterministic, unlike indexing."""
    return _rows(graph, x, True)


def rows_of_destinations(graph: Graph, x: Tensor) -> Tensor:
    """x[i] for every edge j -> i: ``[N_dst, D]`` -> ``[E, D]``; as :func:`rows_of_sources`."""
    return _rows(graph, x, False)


def _rows(graph: Graph, x: Tensor, sources: bool) -> Tensor:
    stand_in = _edges.stand_in(graph)
    if isinstance(stand_in, EdgeList) and not internals.exports_onnx():
        return _operators(stand_in).rows(x, *_edges._arguments(stand_in), sources)
    if _eager.transformed(x) or internals.exports_onnx():
        return x[_plain.ends_of(graph).edge_index[0 if sources else 1]]
    return rules.apply(_Rows(graph, sources), x)


class _Rows(Rule):
    __slots__ = "graph", "sources"

    def __init__(self, graph, sources: bool):
        self.graph, self.sources = graph, sources

    def forward(self, x):
        return x.index_select(0, self.graph.edge_index[0 if self.sources else 1])

    def saved(self, tensors, results):
        return ()

    def gradients(self, need, saved, grad):
        return (sum_of_edges(self.graph, grad.contiguous(), reverse=self.sources),)


# ---- the same while a compiler records -------------------------------------------------------------------


class _Family(NamedTuple):
    """The operators of one kind of stand-in; each is the gradient of the other."""

    rows: Any
    sum: Any


def _family(prefix: str, *tags) -> _Family:
    def rows(x, *rest):
        *edges, sources = rest
        ends = _edges.find(*edges).edge_index
        return x.index_select(0, ends[0 if sources else 1])

    def rows_fake(x, *rest):
        return x.new_empty(_edges._Edges(*rest[:-1]).num_edges, x.shape[1])

    def total(x, *rest):
        *edges, reverse = rest
        with internals.BelowAutograd():
            sums = sum_of_edges(_edges.find(*edges), x.contiguous(), reverse)
        return sums.contiguous()  # as total_fake has it, without the padding that kernels may want

    def total_fake(x, *rest):
        *edges, reverse = rest
        e = _edges._Edges(*edges)
        return x.new_empty(e.num_src if reverse else e.num_dst, x.shape[1])

    given = f"(Tensor x, {_edges._EDGES}, bool"
    run_rows = _edges._define(f"{prefix}_edge_rows_run", f"{given} sources) -> Tensor", rows, rows_fake, tags)
    name = f"{prefix}_edge_rows_sum"
    run_total = _edges._define(f"{name}_run", f"{given} reverse) -> Tensor", total, total_fake, tags)

    def setup(ctx, inputs, output):
        ctx.rest = inputs[1:]

    def differentiable(name, run, adjoint):
        def backward(ctx, grad):
            return getattr(found, adjoint)(grad, *ctx.rest), *[None] * len(ctx.rest)

        return _edges._differentiable(name, run, setup, backward)

    found = _Family(
        differentiable(f"{prefix}_edge_rows", run_rows, "sum"), differentiable(name, run_total, "rows")
    )
    return found


_OF_EDGES = _family("edge", torch.Tag.cudagraph_unsafe)
_OF_GRAPHS = _family("graph")


def _operators(edges: EdgeList) -> _Family:
    return _OF_EDGES if edges.given is not None else _OF_GRAPHS
