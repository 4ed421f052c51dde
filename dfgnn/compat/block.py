"""Blocks: graphs whose sources and destinations are different nodes with separate features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..graph import Graph
from ..nn import DGLError
from .edges import of_data
from .frames import Frames
from .graph import DGLGraph
from .subgraph import first_seen

# A block keeps sources and destinations of one type apart: internally its types begin with one of these texts
# of 4 characters, which are cut off (``kind[4:]``) for users.
_SRC, _DST = "SRC/", "DST/"


class DGLBlock(DGLGraph):
    """A graph of a sampled mini-batch: destinations are the first of the sources, or other nodes. ``srcdata``
    and ``dstdata`` are separate features even if sources and destinations have the same type."""

    is_block = True

    @property
    def canonical_etypes(self) -> list[tuple[str, str, str]]:
        return [_plain(relation) for relation in self.graphs]

    @property
    def ntypes(self) -> list[str]:
        return list(dict.fromkeys((*self.srctypes, *self.dsttypes)))

    @property
    def srctypes(self) -> list[str]:
        return [kind[4:] for kind in self._sizes if kind.startswith(_SRC)]

    @property
    def dsttypes(self) -> list[str]:
        return [kind[4:] for kind in self._sizes if kind.startswith(_DST)]

    def to_canonical_etype(self, etype: Any) -> tuple[str, str, str]:
        return _plain(self._relation(etype))

    def _relation(self, etype: Any) -> Any:
        found = [r for r in self.graphs if etype is None or etype in (r, r[1], _plain(r))]
        if len(found) != 1:
            raise KeyError(f"DGLBlock: etype: expected one of {self.canonical_etypes}, got {etype!r}")
        return found[0]

    def _kind(self, ntype: str | None) -> Any:
        if ntype in self._sizes:
            return ntype
        found = [kind for kind in self._sizes if ntype is None or kind[4:] == ntype]
        if len(found) != 1:
            raise DGLError(
                f"DGLBlock: ntype: {ntype!r} may be sources or destinations; ask for num_src_nodes, srcdata, "
                "srcnodes or num_dst_nodes, dstdata, dstnodes"
            )
        return found[0]

    def _end_kind(self, ntype: str | None, end: int) -> Any:
        side = _SRC if end == 0 else _DST
        found = [k for k in self._sizes if k.startswith(side) and (ntype is None or ntype in (k, k[4:]))]
        if len(found) != 1:
            kinds = self.dsttypes if end else self.srctypes
            raise KeyError(f"DGLBlock: ntype: expected one of {kinds}, got {ntype!r}")
        return found[0]

    def _end_data(self, end: int) -> Any:
        side = _SRC if end == 0 else _DST
        found = {kind[4:]: frame for kind, frame in self._nodes.items() if kind.startswith(side)}
        return next(iter(found.values())) if len(found) == 1 else Frames(found)

    @property
    def batch_size(self) -> int:
        return 1


def _plain(relation: tuple[str, str, str]) -> tuple[str, str, str]:
    return relation[0][4:], relation[1], relation[2][4:]


def create_block(
    data_dict: Any, num_src_nodes: Any = None, num_dst_nodes: Any = None, idtype: Any = None,
    device: Any = None,
) -> DGLBlock:  # fmt: skip
    """A block from (sources, destinations), or from a dictionary (source type, name, destination type) ->
    pair.

    num_src_nodes, num_dst_nodes: numbers, or dictionaries by type; by default the largest number + 1.
    """
    where = "dgl.create_block"
    if not isinstance(data_dict, Mapping):
        data_dict = {("_N", "_E", "_N"): data_dict}
        num_src_nodes, num_dst_nodes = (
            x if x is None or isinstance(x, Mapping) else {"_N": int(x)}
            for x in (num_src_nodes, num_dst_nodes)
        )
    if (num_src_nodes is None) != (num_dst_nodes is None):
        raise DGLError(f"{where}: expected both num_src_nodes and num_dst_nodes, or neither")
    graphs, ends = {}, {}
    sizes = {} if num_src_nodes is None else {_SRC + k: int(n) for k, n in num_src_nodes.items()}
    sizes |= {} if num_dst_nodes is None else {_DST + k: int(n) for k, n in num_dst_nodes.items()}
    for (src_kind, name, dst_kind), data in data_dict.items():
        relation = _SRC + src_kind, name, _DST + dst_kind
        ends[relation] = of_data(where, data, device=device).edge_index
        if num_src_nodes is None:
            for kind, x in zip((relation[0], relation[2]), ends[relation]):
                sizes[kind] = max(sizes.get(kind, 0), int(x.max()) + 1 if len(x) else 0)
    for relation, (src, dst) in ends.items():
        graphs[relation] = Graph.from_coo(src, dst, num_src=sizes[relation[0]], num_dst=sizes[relation[2]])
    ordered = sorted(sizes, key=lambda kind: (not kind.startswith(_SRC), kind))
    return DGLBlock._of(graphs, {kind: sizes[kind] for kind in ordered})


def to_block(
    g: DGLGraph, dst_nodes: Any = None, include_dst_in_src: bool = True, src_nodes: Any = None
) -> DGLBlock:
    """A block of the edges of g and their nodes, renumbered: destinations first, then the other sources.

    ``srcdata["_ID"]``, ``dstdata["_ID"]`` and ``edata["_ID"]`` are the numbers in g.
    """
    if not g.is_homogeneous or g.is_block:
        raise NotImplementedError("dgl.to_block: g: expected one type of nodes and edges in dfgnn")
    if src_nodes is not None or not include_dst_in_src:
        raise NotImplementedError("dgl.to_block: expected include_dst_in_src=True and no src_nodes in dfgnn")
    src, dst = g.edges()
    dst_nodes = dst.unique() if dst_nodes is None else g._ids(dst_nodes)
    place = torch.full((g.num_nodes(),), -1, dtype=torch.int64, device=g.device)
    place[dst_nodes] = torch.arange(len(dst_nodes), device=g.device)
    if len(dst) and int(place[dst].min()) < 0:
        raise DGLError("dgl.to_block: dst_nodes: expected all nodes that have edges")
    others = first_seen(src[place[src] < 0])
    place[others] = torch.arange(len(dst_nodes), len(dst_nodes) + len(others), device=g.device)
    sources = torch.cat([dst_nodes, others])
    block = create_block((place[src], place[dst]), len(sources), len(dst_nodes))
    for name, x in g.ndata.items():
        block.srcdata[name], block.dstdata[name] = x[sources], x[dst_nodes]
    block.edata.update(dict(g.edata))
    block.srcdata["_ID"], block.dstdata["_ID"] = sources, dst_nodes
    block.edata["_ID"] = torch.arange(len(src), device=g.device)
    return block
