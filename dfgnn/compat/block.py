"""Blocks: graphs whose sources and destinations are different nodes with separate features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..nn.dgl import DGLError
from .frames import Frame
from .graph import DGLGraph, fused
from .ids import Ends, by_type, ends_of, ids
from .subgraph import first_seen


class DGLBlock(DGLGraph):
    """A graph of a sampled mini-batch: destinations are the first of the sources, or other nodes. ``srcdata``
    and ``dstdata`` are separate features even if sources and destinations have the same type."""

    is_block = True

    def __repr__(self) -> str:
        if len(self._ntypes) == 2 and len(self._graphs) == 1:
            sizes = *self._sizes, self._graphs[0].num_edges
            return "Block(num_src_nodes={}, num_dst_nodes={}, num_edges={})".format(*sizes)
        src, dst = ({self._ntypes[k]: self._sizes[k] for k in side} for side in self._sides)
        edges = {relation: graph.num_edges for relation, graph in self.graphs.items()}
        meta = [(begin, end, name) for begin, name, end in self.canonical_etypes]
        return (
            f"Block(num_src_nodes={src},\n      num_dst_nodes={dst},\n      num_edges={edges},\n"
            f"      metagraph={meta})"
        )


def create_block(
    data_dict: Any, num_src_nodes: Any = None, num_dst_nodes: Any = None, idtype: Any = None,
    device: Any = None,
) -> DGLBlock:  # fmt: skip
    """A block from (sources, destinations), or from a dictionary (source type, name, destination type) ->
    pair.

    num_src_nodes, num_dst_nodes: numbers, or dictionaries by type; by default the largest number + 1.
    """
    where = "dgl.create_block"
    if (num_src_nodes is None) != (num_dst_nodes is None):
        raise DGLError(f"{where}: expected both num_src_nodes and num_dst_nodes, or neither")
    typed = isinstance(data_dict, Mapping)
    given: tuple[Any, ...] = (num_src_nodes, num_dst_nodes)
    if num_src_nodes is not None and any(isinstance(x, Mapping) != typed for x in given):
        raise DGLError(
            f"{where}: num_src_nodes, num_dst_nodes: expected {'dictionaries' if typed else 'numbers'}"
        )
    if not typed:
        data_dict = {("_N", "_E", "_N"): data_dict}
        given = tuple(x if x is None else {"_N": int(x)} for x in given)
    found = {relation: ends_of(where, data, idtype, bipartite=True) for relation, data in data_dict.items()}
    sides: list[dict[str, int]] = [dict(x or {}) for x in given]
    for relation, ends in found.items():
        for side, kind, need in ((0, relation[0], ends.num_src), (1, relation[2], ends.num_dst)):
            if given[side] is None:
                sides[side][kind] = max(sides[side].get(kind, 0), need)
            elif kind not in sides[side]:
                name = ("num_src_nodes", "num_dst_nodes")[side]
                raise DGLError(f"{where}: {name}: expected a number of {kind!r}, got {sides[side]}")
    names = [sorted(side) for side in sides]
    relations = sorted(found)
    graphs = [fused(found[r].sized(where, sides[0][r[0]], sides[1][r[2]])) for r in relations]
    block = DGLBlock._of(
        [*names[0], *names[1]], [sides[k][kind] for k in (0, 1) for kind in names[k]],
        [r[1] for r in relations],
        [(names[0].index(r[0]), len(names[0]) + names[1].index(r[2])) for r in relations], graphs,
        next((ends.src.dtype for ends in found.values()), torch.int64), num_src_types=len(names[0]),
    )  # fmt: skip
    return block.to(device)


def to_block(
    g: DGLGraph, dst_nodes: Any = None, include_dst_in_src: bool = True, src_nodes: Any = None
) -> DGLBlock:
    """A block of the edges of g and their nodes, renumbered: destinations first, then the other sources in
    the order in which edges name them.

    ``srcdata["_ID"]``, ``dstdata["_ID"]`` and ``edata["_ID"]`` are the numbers in g. dst_nodes: ids, or a
    dictionary of such by type, which have all destinations; by default those, sorted. Of ids that are given
    more than once the last gets the edges, as in DGL. src_nodes: the sources, in that order, instead.
    """
    where = "dgl.to_block"
    if g.is_block:
        raise DGLError(f"{where}: g: expected no block")
    ends = [graph.edge_index for graph in g._graphs]
    if dst_nodes is None:
        chosen = [
            torch.cat([x[1] for x, (_, end) in zip(ends, g._ends) if end == kind] or [_none(g)]).unique()
            for kind in range(len(g.ntypes))
        ]
    else:
        chosen = ids_by_type(where, "dst_nodes", g, dst_nodes)
    places = [_places(x, size) for x, size in zip(chosen, g._sizes)]
    # As in DGL, relations to a type without destinations are left without edges.
    eids = [
        torch.arange(x.shape[1] if len(chosen[end]) else 0, device=g.device)
        for x, (_, end) in zip(ends, g._ends)
    ]
    targets = [places[end][x[1][chosen_edges]] for x, chosen_edges, (_, end) in zip(ends, eids, g._ends)]
    if any(len(x) and int(x.min()) < 0 for x in targets):
        raise DGLError(f"{where}: dst_nodes: expected all nodes that have edges")
    given = None if src_nodes is None else ids_by_type(where, "src_nodes", g, src_nodes)
    return renumbered(g, chosen, targets, eids, include_dst_in_src, given)


def ids_by_type(where: str, name: str, g: DGLGraph, given: Any) -> list[Tensor]:
    """Ids of the nodes of each type, from ids or a dictionary of such by type."""
    found = by_type(where, name, g.ntypes, given)
    return [
        ids(where, name, found.get(kind, ()), size, torch.int64, g.device)
        for kind, size in zip(g.ntypes, g._sizes)
    ]


def _none(g: DGLGraph) -> Tensor:
    return torch.zeros(0, dtype=torch.int64, device=g.device)


def _places(chosen: Tensor, size: int) -> Tensor:
    """The last position of each of ``size`` nodes in ``chosen``, or -1 for a node that is not in it."""
    numbers = torch.arange(len(chosen), device=chosen.device)
    place = torch.full((size,), -1, dtype=torch.int64, device=chosen.device)
    return place.scatter_reduce(0, chosen, numbers, "amax")


def renumbered(
    g: DGLGraph,
    chosen: list[Tensor],
    targets: list[Tensor],
    eids: list[Tensor] | None,
    include_dst: bool = True,
    given: list[Tensor] | None = None,
) -> Any:
    """A block of edges of g.

    chosen: ids of the destinations of each type.  targets, eids: of each relation, the places of its edges'
    destinations among these, and the edges' ids; None for all edges of g.  given: ids of the sources.
    """
    sources = [
        graph.edge_index[0] if eids is None else graph.edge_index[0][eids[k]]
        for k, graph in enumerate(g._graphs)
    ]
    nodes, numbers = [], []
    for kind, size in enumerate(g._sizes):
        first = given[kind] if given is not None else chosen[kind] if include_dst else _none(g)
        used = torch.cat([x for x, (begin, _) in zip(sources, g._ends) if begin == kind] or [_none(g)])
        place = _places(first, size)
        others = first_seen(used[place[used] < 0])
        if given is not None and len(others):
            raise DGLError("dgl.to_block: src_nodes: expected all sources of edges, some are not there")
        numbers.append(place.index_copy(0, others, torch.arange(len(others), device=g.device) + len(first)))
        nodes.append(torch.cat([first, others]))
    count = len(g._sizes)
    sizes = [len(x) for x in (*nodes, *chosen)]
    graphs = [
        fused(Ends(numbers[begin][src], dst, sizes[begin], sizes[count + end]))
        for src, dst, (begin, end) in zip(sources, targets, g._ends)
    ]
    frames = []
    for kind, x in [*enumerate(nodes), *enumerate(chosen)]:
        frame = g._node_frames[kind].part(x)
        frame["_ID"] = x.to(g.idtype)
        frames.append(frame)
    edge_frames = []
    for k, frame in enumerate(g._edge_frames):
        all_edges = torch.arange(frame.rows, device=g.device)
        part: Frame = frame.copy() if eids is None else frame.part(eids[k])
        part["_ID"] = (all_edges if eids is None else eids[k]).to(g.idtype)
        edge_frames.append(part)
    return DGLBlock._of(
        [*g._ntypes, *g._ntypes], sizes, g._etypes, [(begin, count + end) for begin, end in g._ends], graphs,
        g.idtype, (frames, edge_frames), count,
    )  # fmt: skip
