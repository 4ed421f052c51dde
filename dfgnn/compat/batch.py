"""Several graphs as one, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..nn.dgl import DGLError
from .base import ALL, is_all
from .frames import Frame
from .graph import DGLGraph
from .ids import by_type


def batch(graphs: Sequence[DGLGraph], ndata: Any = ALL, edata: Any = ALL) -> DGLGraph:
    """The disjoint union of graphs with the same types; ndata, edata: names of the features that are
    concatenated, by default all, which all graphs (that have any such nodes or edges) must have."""
    graphs = list(graphs)
    if not graphs:
        raise DGLError("dgl.batch: graphs: expected at least one graph, got none")
    for name, given in (("ndata", ndata), ("edata", edata)):
        if not is_all(given) and given is not None and not isinstance(given, list):
            raise DGLError(f"dgl.batch: {name}: expected a list of names or None, got {type(given).__name__}")
    first = graphs[0]
    if any(g.is_block for g in graphs):
        raise DGLError("dgl.batch: graphs: expected no blocks")
    if any(g.canonical_etypes != first.canonical_etypes or g.ntypes != first.ntypes for g in graphs):
        raise DGLError("dgl.batch: graphs: expected the same types of nodes and edges in all of them")
    if any(g.idtype != first.idtype or g.device != first.device for g in graphs):
        raise DGLError("dgl.batch: graphs: expected one dtype of ids and one device in all of them")
    whole = first._with(
        [Graph.batch(parts) for parts in zip(*(g._graphs for g in graphs))],
        [_joined(frames, ndata) for frames in zip(*(g._node_frames for g in graphs))],
        [_joined(frames, edata) for frames in zip(*(g._edge_frames for g in graphs))],
        sizes=[sum(sizes) for sizes in zip(*(g._sizes for g in graphs))],
    )
    whole._batch_num_nodes = {k: torch.cat([g.batch_num_nodes(k) for g in graphs]) for k in first.ntypes}
    whole._batch_num_edges = {
        r: torch.cat([g.batch_num_edges(r) for g in graphs]) for r in first.canonical_etypes
    }
    return whole


def _joined(frames: Sequence[Frame], names: Any) -> Frame:
    whole = Frame(sum(frame.rows for frame in frames))
    filled = [frame for frame in frames if frame.rows] or list(frames)
    for name in dict.fromkeys(n for frame in filled for n in frame) if is_all(names) else (names or ()):
        if any(name not in frame for frame in filled):
            raise DGLError(
                f"dgl.batch: expected feature {name!r} in all graphs, or in none, got some with it"
            )
        parts = [frame[name] for frame in filled]
        if len({(x.shape[1:], x.dtype) for x in parts}) > 1:
            raise DGLError(f"dgl.batch: feature {name!r}: expected rows of one shape and dtype in all graphs")
        whole[name] = torch.cat(parts)
    return whole


def unbatch(g: DGLGraph, node_split: Any = None, edge_split: Any = None) -> list[DGLGraph]:
    """Splits a batch into its graphs. node_split, edge_split: numbers of nodes and edges of each graph, or
    dictionaries of such by type; by default those of the batch."""
    nodes = _split("node_split", node_split, g.ntypes, g.batch_num_nodes, g._sizes)
    sizes = [graph.num_edges for graph in g._graphs]
    edges = _split("edge_split", edge_split, g.canonical_etypes, g.batch_num_edges, sizes)
    if len({len(counts) for counts in (*nodes, *edges)}) != 1:
        raise DGLError("dgl.unbatch: expected as many numbers in all of node_split and edge_split")
    node_frames = [_parts(frame, counts) for frame, counts in zip(g._node_frames, nodes)]
    edge_frames = [_parts(frame, counts) for frame, counts in zip(g._edge_frames, edges)]
    ends = [graph.edge_index.split(counts, 1) for graph, counts in zip(g._graphs, edges)]
    first, found = [0] * len(nodes), []
    for k in range(len(nodes[0])):
        part_sizes = [counts[k] for counts in nodes]
        graphs = []
        for place, (begin, end) in enumerate(g._ends):
            src, dst = ends[place][k]
            src, dst = src - first[begin], dst - first[end]
            graphs.append(Graph.from_coo(src, dst, num_src=part_sizes[begin], num_dst=part_sizes[end]))
        frames = [parts[k] for parts in node_frames], [parts[k] for parts in edge_frames]
        found.append(g._with(graphs, *frames, sizes=part_sizes))
        first = [start + size for start, size in zip(first, part_sizes)]
    return found


def _split(
    name: str, given: Any, kinds: Sequence[Any], default: Any, sizes: Sequence[int]
) -> list[list[int]]:
    if given is None:
        given = {kind: default(kind) for kind in kinds}
    given = by_type("dgl.unbatch", name, kinds, given)
    if set(given) != set(kinds):
        raise DGLError(f"dgl.unbatch: {name}: expected the types {list(kinds)}, got {list(given)}")
    found = [torch.as_tensor(given[kind]).tolist() for kind in kinds]
    for kind, counts, size in zip(kinds, found, sizes):
        if sum(counts) != size or min(counts, default=0) < 0:
            raise DGLError(
                f"dgl.unbatch: {name}: {kind!r}: expected numbers that add up to {size}, got {counts}"
            )
    return found


def _parts(frame: Frame, counts: list[int]) -> list[Frame]:
    columns: dict[str, Sequence[Tensor]] = {name: x.split(counts) for name, x in frame.items()}
    return [Frame(n, {name: parts[k] for name, parts in columns.items()}) for k, n in enumerate(counts)]
