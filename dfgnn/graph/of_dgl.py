"""Converts DGLGraphs, and caches the result as long as the DGLGraph lives."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from . import Graph

# `DGLGraph._graph`, an immutable index of the edges, which DGL replaces when they change -> Graph. Keys are
# compared by identity, because the index of DGL 1.1 cannot be hashed. Values do not refer to keys, so an
# entry lives as long as DGL's object.
_from_dgl = WeakIdKeyDictionary()

# g[etype] makes a new index each time, with the same arrays of edges and the edge frame of g. Frame ->
# (identity of the arrays, the arrays, their Graph). The arrays are held, so that addresses stay unique.
_of_frame = WeakIdKeyDictionary()


def of_dgl(graph: Any) -> Graph:
    """The Graph of a DGLGraph or block with one edge type, converted once and cached as long as DGL's object.

    The structure is checked first, because DGL itself reads out of bounds if it is wrong. A relation
    ``g[etype]`` of a heterograph is converted once per ``g``, however often it is taken; inside
    ``g.local_scope()`` each time, because nothing there outlives the scope. Raises ValueError for several
    edge types or malformed structure.
    """
    found = _from_dgl.get(graph._graph)
    if found is None:
        found = _from_dgl[graph._graph] = _of_relation(graph)
    return found


def _of_relation(graph: Any) -> Graph:
    formats = graph.formats()["created"]
    # Only a format that DGL has created already: it would make another one without checking the ids, and read
    # out of bounds.
    created = graph.formats(formats)
    if len(graph.canonical_etypes) != 1:
        return Graph.from_dgl(created)  # raises the error for several edge types
    form = next((name for name in ("csc", "csr") if name in formats), "coo")
    arrays = graph.edges() if form == "coo" else graph.adj_tensors(form)
    places = [(x.data_ptr(), x.shape, x.dtype, x.device) for x in arrays]
    key = (form, graph.num_src_nodes(), graph.num_dst_nodes(), *places)
    frame = graph._edge_frames[0]
    entry = _of_frame.get(frame)
    if entry is None or entry[0] != key:
        entry = _of_frame[frame] = key, arrays, Graph.from_dgl(created)
    return entry[2]


def is_dgl(graph: Any) -> bool:
    """Whether it is a graph of the DGL library."""
    dgl = sys.modules.get("dgl")
    return dgl is not None and not stands_for_dgl(dgl) and isinstance(graph, dgl.DGLGraph)


def stands_for_dgl(module: Any) -> bool:
    """Whether a module named dgl is dfgnn's (`dfgnn.compat.install_as_dgl`)."""
    return "__dfgnn__" in vars(module)
