"""Adds and removes nodes and edges: DGLGraph's methods, and DGL's functions that return a new graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional.ops import gspmm
from ..graph import Graph
from ..nn.dgl import DGLError
from .frames import Frame


class Editing:
    """The part of `DGLGraph` that changes the graph in place."""

    _batch_num_nodes: dict[str, Tensor] | None
    _batch_num_edges: dict[Any, Tensor] | None

    def add_nodes(self: Any, num: int, data: Any = None, ntype: str | None = None) -> None:
        """Append nodes; features that data lacks are zeros. The graph is one graph of a batch then."""
        place = self.get_ntype_id(ntype)
        if num < 0:
            raise DGLError(f"DGLGraph.add_nodes: num: expected at least 0, got {num}")
        if num:
            self._resize({place: self._sizes[place] + num}, {place: data})
            self._batch_num_nodes = self._batch_num_edges = None

    def add_edges(self: Any, u: Any, v: Any, data: Any = None, etype: Any = None) -> None:
        """Append edges, and nodes that they name and that do not exist yet; features that data lacks are
        zeros. The graph is one graph of a batch then."""
        place = self.get_etype_id(etype)
        u, v = (self._ids(x, None, "add_edges", name) for x, name in ((u, "u"), (v, "v")))
        if not len(u) or not len(v):
            return
        if len(u) != len(v) and 1 not in (len(u), len(v)):
            raise DGLError(f"DGLGraph.add_edges: v: expected {len(u)} nodes like u, got {len(v)}")
        u, v = torch.broadcast_tensors(u.long(), v.long())
        least = min(int(u.min()), int(v.min()))
        if least < 0:
            raise DGLError(f"DGLGraph.add_edges: expected ids that are not negative, got {least}")
        begin, end = self._ends[place]
        sizes = {kind: self._sizes[kind] for kind in (begin, end)}
        for kind, ends in ((begin, u), (end, v)):
            sizes[kind] = max(sizes[kind], int(ends.max()) + 1)
        grown = self._edge_frames[place].grown(len(u), data)
        self._resize(sizes, {})
        src, dst = self._graphs[place].edge_index
        self._graphs = list(self._graphs)
        self._graphs[place] = self._between_ends(place, torch.cat([src, u]), torch.cat([dst, v]))
        self._set_frame("_edge_frames", place, grown)
        self._batch_num_nodes = self._batch_num_edges = None

    def _between_ends(self: Any, place: int, src: Tensor, dst: Tensor) -> Graph:
        begin, end = self._ends[place]
        return Graph.from_coo(src, dst, num_src=self._sizes[begin], num_dst=self._sizes[end])

    def _set_frame(self: Any, name: str, place: int, frame: Frame) -> None:
        frames = list(getattr(self, name))
        frames[place] = frame
        setattr(self, name, frames)

    def _resize(self: Any, sizes: Mapping[int, int], data: Mapping[int, Any]) -> None:
        """Append nodes, so that types have these sizes."""
        changed = {kind: size for kind, size in sizes.items() if size != self._sizes[kind]}
        self._sizes = [changed.get(kind, size) for kind, size in enumerate(self._sizes)]
        for kind, size in changed.items():
            frame = self._node_frames[kind]
            self._set_frame("_node_frames", kind, frame.grown(size - frame.rows, data.get(kind)))
        self._graphs = [
            self._between_ends(k, *graph.edge_index) if changed.keys() & set(self._ends[k]) else graph
            for k, graph in enumerate(self._graphs)
        ]

    def remove_edges(self: Any, eids: Any, etype: Any = None, store_ids: bool = False) -> None:
        """Remove these edges; store_ids: set the edges' features ``_ID`` to their ids before. A batch stays
        one."""
        place = self.get_etype_id(etype)
        gone = self._ids(eids, self._graphs[place].num_edges, "remove_edges", "eids")
        if len(gone):
            self._keep({}, {place: _others(gone, self._graphs[place].num_edges)}, False, store_ids)

    def remove_nodes(self: Any, nids: Any, ntype: str | None = None, store_ids: bool = False) -> None:
        """Remove these nodes and their edges, and number the others anew; store_ids: set the features ``_ID``
        to the ids before. A batch stays one."""
        place = self.get_ntype_id(ntype)
        gone = self._ids(nids, self._sizes[place], "remove_nodes", "nids")
        if not len(gone):
            return
        keep = _others(gone, self._sizes[place])
        edges = {}
        for k, graph in enumerate(self._graphs):
            masks = [keep[ends] for ends, kind in zip(graph.edge_index, self._ends[k]) if kind == place]
            edges[k] = torch.ones_like(graph.edge_index[0], dtype=torch.bool)
            for mask in masks:
                edges[k] = edges[k] & mask
        self._keep({place: keep}, edges, store_ids, store_ids, by_source=True)

    def _keep(
        self: Any, nodes: Any, edges: Any, store_nodes: bool, store_edges: bool, by_source: bool = False
    ) -> None:
        """Keep the nodes and edges of these masks by type, and all of types without a mask; by_source: sort
        the edges by their sources, as DGL's subgraphs are."""
        names, relations = self._ntypes, self.canonical_etypes
        counts = self._batch_num_nodes, self._batch_num_edges
        if counts[0] is not None:
            self._batch_num_nodes = counts[0] | {
                names[k]: _left(counts[0][names[k]], x) for k, x in nodes.items()
            }
        if counts[1] is not None:
            kept = {relations[k]: _left(counts[1][relations[k]], x) for k, x in edges.items()}
            self._batch_num_edges = counts[1] | kept
        chosen = [{k: x.nonzero().squeeze(1) for k, x in masks.items()} for masks in (nodes, edges)]
        for k, eids in chosen[1].items() if by_source else ():
            chosen[1][k] = eids[self._graphs[k].edge_index[0][eids].argsort(stable=True)]
        self._sizes, self._graphs, self._node_frames, self._edge_frames = self._selected(
            *chosen, store_nodes, store_edges
        )

    def _selected(
        self: Any,
        nodes: Mapping[int, Tensor],
        edges: Mapping[int, Tensor],
        store_nodes: bool,
        store_edges: bool,
    ) -> tuple[list[int], list[Graph], list[Frame], list[Frame]]:
        """Sizes, Graphs and features of the nodes and edges with these ids by type, in that order, and all of
        other types; store_nodes, store_edges: set the features ``_ID`` to the ids here."""
        numbers = {}
        for kind, chosen in nodes.items():
            place = torch.full((self._sizes[kind],), -1, dtype=torch.int64, device=self.device)
            numbers[kind] = place.index_copy(0, chosen, torch.arange(len(chosen), device=self.device))
        sizes = [len(nodes[kind]) if kind in nodes else size for kind, size in enumerate(self._sizes)]
        graphs = []
        for k, graph in enumerate(self._graphs):
            if k not in edges and not numbers.keys() & set(self._ends[k]):
                graphs.append(graph)
                continue
            ends = graph.edge_index[:, edges[k]] if k in edges else graph.edge_index
            src, dst = (numbers[kind][x] if kind in numbers else x for x, kind in zip(ends, self._ends[k]))
            begin, end = self._ends[k]
            graphs.append(Graph.from_coo(src, dst, num_src=sizes[begin], num_dst=sizes[end]))
        frames = (self._node_frames, nodes, store_nodes), (self._edge_frames, edges, store_edges)
        return (
            sizes,
            graphs,
            *(
                [self._rows(frame, chosen.get(k), store) for k, frame in enumerate(of)]
                for of, chosen, store in frames
            ),
        )  # type: ignore[return-value]

    def _rows(self: Any, frame: Frame, chosen: Tensor | None, store_ids: bool) -> Frame:
        part = frame.copy() if chosen is None else frame.part(chosen)
        if store_ids:
            chosen = torch.arange(frame.rows, device=self.device) if chosen is None else chosen
            part["_ID"] = chosen.to(self.idtype)
        return part


def _others(gone: Tensor, size: int) -> Tensor:
    """A mask of the ids that are not gone."""
    return torch.ones(size, dtype=torch.bool, device=gone.device).index_fill(0, gone.long(), False)


def _left(counts: Tensor, keep: Tensor) -> Tensor:
    """How many of each graph's rows are kept."""
    before = torch.nn.functional.pad(keep.long().cumsum(0), (1, 0))
    last = counts.long().cumsum(0)
    return before[last] - before[last - counts.long()]


# ---- DGL's functions, which return a new graph ----------------------------------------------------------


def _of_copy(method: Callable[..., None]) -> Callable[..., Any]:
    """The function that calls this method of a copy of the graph, and returns the copy."""

    @functools.wraps(method)
    def changed(g: Any, *args: Any, **kwargs: Any) -> Any:
        g = g.clone()
        method(g, *args, **kwargs)
        return g

    return changed


add_nodes, add_edges = _of_copy(Editing.add_nodes), _of_copy(Editing.add_edges)
remove_nodes, remove_edges = _of_copy(Editing.remove_nodes), _of_copy(Editing.remove_edges)


def add_self_loop(
    g: Any, edge_feat_names: Sequence[str] | None = None, fill_data: Any = 1.0, etype: Any = None
) -> Any:
    """Appends a loop for every node; fill_data: the features of these loops, a number, or "sum", "mean",
    "max" or "min" of the features of the edges into the node; edge_feat_names: the features that are filled
    so, by default all. Others are zeros."""
    relation = _between_one_type("add_self_loop", g, etype)
    frame, size = g.edges[relation].data, g.num_nodes(relation[0])
    data = {}
    for name in frame if edge_feat_names is None else edge_feat_names:
        x = frame[name]
        if isinstance(fill_data, str):
            if fill_data not in ("sum", "mean", "max", "min"):
                raise DGLError(
                    f"dgl.add_self_loop: fill_data: expected sum, mean, max or min, got {fill_data!r}"
                )
            loops = gspmm(g.graphs[relation], "copy_rhs", fill_data, None, x)
            data[name] = loops.masked_fill(loops.isinf(), 0) if fill_data in ("max", "min") else loops
        else:
            data[name] = x.new_full((size, *x.shape[1:]), fill_data)
    nodes = torch.arange(size, dtype=g.idtype, device=g.device)
    return add_edges(g, nodes, nodes, data or None, relation)


def remove_self_loop(g: Any, etype: Any = None) -> Any:
    relation = _between_one_type("remove_self_loop", g, etype)
    src, dst = g.edges(etype=relation)
    return remove_edges(g, (src == dst).nonzero().squeeze(1), relation)


def _between_one_type(where: str, g: Any, etype: Any) -> Any:
    relation = g.to_canonical_etype(etype)
    if relation[0] != relation[2] or g.is_block:
        raise DGLError(f"dgl.{where}: etype: expected a relation between nodes of one type, got {relation}")
    return relation


Editing.add_self_loop = add_self_loop  # type: ignore[attr-defined]
Editing.remove_self_loop = remove_self_loop  # type: ignore[attr-defined]
