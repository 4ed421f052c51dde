"""What is derived from a graph and cached as long as the graph lives, such as the graph with edges as
sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from ..runtime.tracing import not_compiled, untraced
from ..sparse.csr import CSR
from ..sparse.fixed import FixedStructure
from ..sparse.structure import Side

#: Graphs whose edge e leads from source e, so that edges' rows are sources' rows.
_with_edges_as_sources: WeakSet[Any] = WeakSet()
_made: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def of_graph(graph: Any, key: Any, make: Callable[[Any], Any]) -> Any:
    """``make(graph)``, called once for this key. For a graph of fixed capacity it is called again after
    the edges were replaced. Its result must not refer to the graph."""
    structure = graph._structure
    values: Any = structure.derived() if isinstance(structure, FixedStructure) else _made.get(graph)
    if values is not None and key in values:
        return values[key]
    return _make(graph, key, make)


@not_compiled
def _make(graph: Any, key: Any, make: Callable[[Any], Any]) -> Any:
    structure = graph._structure
    with untraced(structure.indices):
        value = make(graph)
    values: dict[Any, Any]
    values = structure.derived() if isinstance(structure, FixedStructure) else _made.setdefault(graph, {})
    values[key] = value
    return value


def edges_as_sources(graph: Any, reverse: bool = False) -> Any:
    """The graph whose edge e leads from source e, which is edge e of ``graph``, to that edge's destination
    (reverse: to its source). Its other direction, which has a row per edge, needs no sort."""
    return of_graph(graph, ("edges as sources", reverse), partial(_edges_as_sources, reverse=reverse))


def has_edges_as_sources(graph: Any) -> bool:
    """Whether the graph was made by `edges_as_sources`."""
    return (
        hasattr(graph, "_structure") and not torch.compiler.is_compiling() and graph in _with_edges_as_sources
    )


def _edges_as_sources(graph: Any, reverse: bool) -> Any:
    made = _make_edges_as_sources(graph, reverse)
    _with_edges_as_sources.add(made)
    return made


def _make_edges_as_sources(graph: Any, reverse: bool) -> Any:
    structure = graph._structure
    if isinstance(structure, FixedStructure):
        return type(graph)._of(structure.edges_as_sources(reverse))
    csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
    ends = structure.endpoints(torch.int32)[0 if reverse else 1]
    num_edges, eids = ends.numel(), csr.eids
    if eids is None:
        eids = torch.arange(num_edges, dtype=torch.int32, device=ends.device)
    one_each = torch.arange(num_edges + 1, dtype=torch.int64, device=ends.device)
    by_row, by_edge = CSR(csr.indptr, eids, csr.eids), CSR(one_each, ends, None)
    num_rows = graph.num_src if reverse else graph.num_dst
    sides = Side(num_rows, (by_row, True)), Side(num_edges, (by_edge, True))
    return type(graph)._make(*sides, graph.is_one_shot)
