"""DGL's functions that return a graph with other edges than the one they get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..graph import Graph
from ..nn.dgl import DGLError
from .graph import DGLGraph
from .sparse.structure import pairs


def reverse(
    g: DGLGraph, copy_ndata: bool = True, copy_edata: bool = False, *, share_ndata: bool | None = None,
    share_edata: bool | None = None,
) -> DGLGraph:  # fmt: skip
    """The graph with all edges reversed, in the same order; copy_ndata, copy_edata: keep the features;
    share_ndata, share_edata: their old names."""
    copy_ndata = copy_ndata if share_ndata is None else share_ndata
    copy_edata = copy_edata if share_edata is None else share_edata
    if g.is_block:
        raise DGLError("dgl.reverse: g: expected no block")
    ends, graphs = [(end, begin) for begin, end in g._ends], [graph.reverse() for graph in g._graphs]
    return g._with(graphs, *_copies(g, copy_ndata, copy_edata), ends=ends)


def _copies(g: DGLGraph, nodes: bool, edges: bool = False) -> tuple[Any, Any]:
    """Copies of the features, or None for none."""
    return tuple(
        [frame.copy() for frame in frames] if wanted else None
        for frames, wanted in ((g._node_frames, nodes), (g._edge_frames, edges))
    )  # type: ignore[return-value]


def add_reverse_edges(
    g: DGLGraph, readonly: Any = None, copy_ndata: bool = True, copy_edata: bool = False,
    ignore_bipartite: bool = False, exclude_self: bool = True,
) -> DGLGraph:  # fmt: skip
    """Appends the reverse of every edge, of loops only without exclude_self.

    readonly: has no effect, as in DGL.  copy_ndata, copy_edata: keep the features; reversed edges have those
    of their edges, and ``_ID`` is the edge before.  ignore_bipartite: leave
    relations between different types as they are, instead of an
    error.
    """
    graphs, edge_frames = [], []
    for (begin, end), graph, frame in zip(g._ends, g._graphs, g._edge_frames):
        if begin != end:
            if not ignore_bipartite:
                raise DGLError(
                    "dgl.add_reverse_edges: g: expected relations between nodes of one type, or "
                    "ignore_bipartite=True"
                )
            graphs.append(graph)
            edge_frames.append(frame.copy())
            edge_frames[-1]["_ID"] = torch.arange(frame.rows, device=g.device)
            continue
        ends = graph.edge_index
        eids = torch.arange(ends.shape[1], device=ends.device)
        again = eids[ends[0] != ends[1]] if exclude_self else eids
        src, dst = torch.cat([ends, ends[:, again].flip(0)], 1)
        graphs.append(Graph.from_coo(src, dst, num_src=graph.num_src, num_dst=graph.num_dst))
        both = torch.cat([eids, again])
        edge_frames.append(frame.part(both))
        edge_frames[-1]["_ID"] = both  # of int64, as in DGL
    return g._with(graphs, _copies(g, copy_ndata)[0], edge_frames if copy_edata else None)


def to_bidirected(g: DGLGraph, copy_ndata: bool = False, readonly: Any = None) -> DGLGraph:
    """The graph with both directions of every edge, each once."""
    both = add_reverse_edges(g, copy_ndata=copy_ndata)
    return to_simple(both, return_counts=None, copy_ndata=copy_ndata)


def to_simple(
    g: DGLGraph, return_counts: str | None = "count", writeback_mapping: bool = False,
    copy_ndata: bool = True, copy_edata: bool = False, aggregator: str = "arbitrary",
) -> Any:  # fmt: skip
    """The graph with every edge once, sorted by its ends.

    return_counts: the name of a feature for the number of edges that became one, or None.
    writeback_mapping: also return the new edge of every edge, of several relations a dictionary.
    copy_ndata, copy_edata: keep the features; of edges that become one by the aggregator: "arbitrary" (the
    first), "sum" or "mean".
    """
    where = "dgl.to_simple"
    if g.is_block:
        raise DGLError(f"{where}: g: expected no block")
    if aggregator not in ("arbitrary", "sum", "mean"):
        raise DGLError(f"{where}: aggregator: expected arbitrary, sum or mean, got {aggregator!r}")
    graphs, mapping, edge_frames = [], {}, []
    for relation, graph, frame in zip(g.canonical_etypes, g._graphs, g._edge_frames):
        src, dst = graph.edge_index
        size = max(graph.num_dst, 1)
        keys, place, counts = (src * size + dst).unique(return_inverse=True, return_counts=True)
        graphs.append(Graph.from_coo(keys // size, keys % size, num_src=graph.num_src, num_dst=graph.num_dst))
        mapping[relation] = place.to(g.idtype)
        numbers = torch.arange(len(place), device=place.device)
        first = torch.zeros_like(keys).scatter_reduce(0, place, numbers, "amin", include_self=False)
        merged = frame.part(first)
        merged["_ID"] = first  # of int64, as in DGL
        if not copy_edata or aggregator != "arbitrary":
            merged.clear()
        if copy_edata and aggregator != "arbitrary":
            for name, x in frame.items():
                total = x.new_zeros(len(keys), *x.shape[1:]).index_add(0, place, x)
                shape = -1, *[1] * (x.dim() - 1)
                merged[name] = total if aggregator == "sum" else total / counts.view(shape)
        if return_counts is not None:
            merged[return_counts] = counts.to(g.idtype)
        edge_frames.append(merged)
    made = g._with(graphs, _copies(g, copy_ndata)[0], edge_frames)
    if not writeback_mapping:
        return made
    return made, mapping if len(mapping) > 1 else next(iter(mapping.values()))


def metapath_reachable_graph(g: DGLGraph, metapath: Sequence[Any]) -> DGLGraph:
    """The graph with an edge from each node to all nodes that it reaches along these relations in turn."""
    places = [g.get_etype_id(etype) for etype in metapath]
    kinds = [g._ends[places[0]][0], g._ends[places[-1]][1]]
    begin = end = torch.arange(g._sizes[kinds[0]], device=g.device)
    for place in places:
        start, edge = pairs(end, g._graphs[place].reverse())
        begin, end = begin[start], g._graphs[place].edge_index[1][edge]
        size = max(g._graphs[place].num_dst, 1)
        keys = (begin * size + end).unique()
        begin, end = keys // size, keys % size
    sizes = g._sizes[kinds[0]], g._sizes[kinds[1]]
    graph = Graph.from_coo(begin, end, num_src=sizes[0], num_dst=sizes[1])
    order = sorted(dict.fromkeys(kinds), key=g._ntypes.__getitem__)
    return DGLGraph._of(
        [g._ntypes[k] for k in order], [g._sizes[k] for k in order], ["_E"],
        [(order.index(kinds[0]), order.index(kinds[1]))], [graph], g.idtype,
        ([g._node_frames[k].copy() for k in order], None),
    )  # fmt: skip


DGLGraph.reverse = reverse  # type: ignore[attr-defined]
DGLGraph.to_simple = to_simple  # type: ignore[attr-defined]
