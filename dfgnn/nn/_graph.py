"""What the layers share: the graph that they are given, its in-degree check, and its two ends' features."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..graph import Graph

# Graphs made from DGL's, by id of DGL's immutable index, which it replaces when edges change. Not a
# WeakKeyDictionary: the index of DGL 1.1 cannot be hashed.
_from_dgl: dict[int, Graph] = {}


class ZeroInDegreeError(ValueError):
    """A destination has no in-edges and the layer was not told to allow it."""


def as_graph(graph: Any) -> Graph:
    """``graph`` itself, or the Graph of a DGLGraph or block, converted once and kept as long as DGL keeps it.

    Raises TypeError for anything else.
    """
    if isinstance(graph, Graph):
        return graph
    if not _is_dgl(graph):
        raise TypeError(f"graph: expected a dfgnn.Graph or a DGLGraph, got {type(graph).__name__}")
    index = graph._graph
    if id(index) not in _from_dgl:
        _from_dgl[id(index)] = Graph.from_dgl(graph)
        weakref.finalize(index, _from_dgl.pop, id(index), None)
    return _from_dgl[id(index)]


def check_in_degrees(graph: Any, converted: Graph) -> None:
    """Raise DGLError for a DGL graph, ZeroInDegreeError for ours, when a destination has no in-edges."""
    if not converted.has_zero_in_degree:
        return
    message = (
        "the graph has destinations without in-edges, whose aggregate would be 0. Add self-loops "
        "(dgl.add_self_loop(g), Graph.add_self_loops()), or pass allow_zero_in_degree=True to accept that."
    )
    raise (sys.modules["dgl"].DGLError if _is_dgl(graph) else ZeroInDegreeError)(message)


def split_ends(
    graph: Graph, feat: Tensor | tuple[Tensor, Tensor], dropout: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Source and destination features after dropout.

    A single tensor has one row per source; the destinations are its first ``num_dst`` rows, as in a block.
    """
    if isinstance(feat, tuple):
        return dropout(feat[0]), dropout(feat[1])
    if graph.num_dst > graph.num_src:
        raise ValueError(
            f"feat: expected a pair (source, destination) for a graph with {graph.num_src} sources and "
            f"{graph.num_dst} destinations, got one tensor"
        )
    feat = dropout(feat)
    return feat, feat[: graph.num_dst] if graph.num_dst < graph.num_src else feat


def _is_dgl(graph: Any) -> bool:
    dgl = sys.modules.get("dgl")
    return dgl is not None and isinstance(graph, dgl.DGLGraph)
