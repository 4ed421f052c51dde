"""Graphs of DGLGraphs, made once per graph of DGL's and kept as long as it lives."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from . import Graph

# Graphs made from DGL's, by DGL's immutable index of a graph, which it replaces when edges change. Keys go by
# identity: the index of DGL 1.1 cannot be hashed. What is kept refers to no key, so an entry lives as long as
# DGL's object does.
_from_dgl = WeakIdKeyDictionary()

# g[etype] has a new index each time, around the same arrays of edges, and the edge frame of g. By that frame:
# (what identifies the arrays, the arrays, their Graph). They are held so that no others get their addresses.
_of_frame = WeakIdKeyDictionary()


def of_dgl(graph: Any) -> Graph:
    """The Graph of a DGLGraph or block of one edge type, converted once and kept as long as DGL keeps it.

    The structure is checked first, for DGL itself reads past the end of what it is given. A relation
    ``g[etype]`` of a heterograph is converted once for ``g``, however often it is taken; taken inside
    ``g.local_scope()`` it is converted anew, as nothing there outlives the scope. Raises ValueError for
    several edge types or malformed structure.
    """
    found = _from_dgl.get(graph._graph)
    if found is None:
        found = _from_dgl[graph._graph] = _of_relation(graph)
    return found


def _of_relation(graph: Any) -> Graph:
    formats = graph.formats()["created"]
    # Only what DGL has made already: it would make another format without checking, and read out of bounds.
    created = graph.formats(formats)
    if len(graph.canonical_etypes) != 1:
        return Graph.from_dgl(created)  # which raises
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
    """Whether it is a graph of DGL's own."""
    dgl = sys.modules.get("dgl")
    return dgl is not None and not stands_for_dgl(dgl) and isinstance(graph, dgl.DGLGraph)


def stands_for_dgl(module: Any) -> bool:
    """Whether it is ours under DGL's name (`dfgnn.compat.install_as_dgl`)."""
    return "__dfgnn__" in vars(module)
