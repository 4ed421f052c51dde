"""DGLGraph's questions about its nodes and edges."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..nn.dgl import DGLError
from .base import ALL, is_all
from .frames import Frame
from .ids import found_edges, ids, is_one
from .sparse import spmatrix
from .sparse.structure import pairs

#: Graphs that were made from a "csr" or "csc" without edge ids -> that.
WITHOUT_IDS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Queries:
    """The part of `DGLGraph` that reads its structure."""

    _sizes: list[int]
    _ends: list[tuple[int, int]]
    _graphs: list[Any]
    _edge_frames: list[Frame]
    _sides: tuple[list[int], list[int]]

    # ---- numbers ------------------------------------------------------------------------------------

    def num_nodes(self: Any, ntype: str | None = None) -> int:
        return sum(self._sizes) if ntype is None else self._sizes[self.get_ntype_id(ntype)]

    def num_src_nodes(self: Any, ntype: str | None = None) -> int:
        places = self._sides[0] if ntype is None else [self.get_ntype_id_from_src(ntype)]
        return sum(self._sizes[k] for k in places)

    def num_dst_nodes(self: Any, ntype: str | None = None) -> int:
        places = self._sides[1] if ntype is None else [self.get_ntype_id_from_dst(ntype)]
        return sum(self._sizes[k] for k in places)

    def num_edges(self: Any, etype: Any = None) -> int:
        if etype is None:
            return sum(graph.num_edges for graph in self._graphs)
        return self._graphs[self.get_etype_id(etype)].num_edges

    number_of_nodes, number_of_edges = num_nodes, num_edges
    number_of_src_nodes, number_of_dst_nodes = num_src_nodes, num_dst_nodes

    @property
    def is_multigraph(self) -> bool:
        """Whether several edges of a relation have the same ends."""
        for graph in self._graphs:
            src, dst = graph.edge_index
            if len((src * graph.num_dst + dst).unique()) < graph.num_edges:
                return True
        return False

    def in_degrees(self: Any, v: Any = ALL, etype: Any = None) -> Any:
        """In-degrees of all destinations, or of v: a tensor, or a number for a single node."""
        return self._degrees(self._graphs[self.get_etype_id(etype)].in_degrees(), v, "in_degrees: v")

    def out_degrees(self: Any, u: Any = ALL, etype: Any = None) -> Any:
        """Out-degrees of all sources, or of u: a tensor, or a number for a single node."""
        return self._degrees(self._graphs[self.get_etype_id(etype)].out_degrees(), u, "out_degrees: u")

    def _degrees(self: Any, degrees: Tensor, nodes: Any, where: str) -> Any:
        if not is_all(nodes):
            degrees = degrees[self._ids(nodes, len(degrees), *where.split(": "))]
        return int(degrees) if is_one(nodes) else degrees.to(self.idtype)

    # ---- edges --------------------------------------------------------------------------------------

    def _uv(self: Any, place: int) -> tuple[Tensor, Tensor]:
        src, dst = self._graphs[place].edge_index
        return src.to(self.idtype), dst.to(self.idtype)

    def all_edges(self: Any, form: str = "uv", order: str = "eid", etype: Any = None) -> Any:
        """form: "uv" for sources and destinations, "eid" for ids, "all" for these three.  order: "eid", or
        "srcdst" to sort them by their ends."""
        if order not in ("eid", "srcdst"):
            raise DGLError(f"DGLGraph.edges: order: expected 'eid' or 'srcdst', got {order!r}")
        place = self.get_etype_id(etype)
        eids = None
        if order == "srcdst":
            src, dst = self._graphs[place].edge_index
            eids = (src * max(self._graphs[place].num_dst, 1) + dst).argsort(stable=True)
        return self._in_form("edges", form, place, eids)

    def _in_form(self: Any, where: str, form: str, place: int, eids: Tensor | None) -> Any:
        if form not in ("uv", "eid", "all"):
            raise DGLError(f"DGLGraph.{where}: form: expected 'uv', 'eid' or 'all', got {form!r}")
        src, dst = self._uv(place)
        if eids is None:
            eids = torch.arange(len(src), device=src.device)
        else:
            src, dst = src[eids], dst[eids]
        eids = eids.to(self.idtype)
        return {"uv": (src, dst), "eid": eids, "all": (src, dst, eids)}[form]

    def find_edges(self: Any, eid: Any, etype: Any = None) -> tuple[Tensor, Tensor]:
        """Sources and destinations of the edges with these ids."""
        place = self.get_etype_id(etype)
        src, dst = self._uv(place)
        eid = self._ids(eid, len(src), "find_edges", "eid")
        return src[eid], dst[eid]

    def in_edges(self: Any, v: Any, form: str = "uv", etype: Any = None) -> Any:
        """The edges into each of the nodes v in turn; form: as for :meth:`all_edges`."""
        place = self.get_etype_id(etype)
        graph = self._graphs[place]
        v = self._ids(v, graph.num_dst, "in_edges", "v")
        return self._in_form("in_edges", form, place, _edges_at(v.long(), graph))

    def out_edges(self: Any, u: Any, form: str = "uv", etype: Any = None) -> Any:
        """The edges out of each of the nodes u in turn; form: as for :meth:`all_edges`."""
        place = self.get_etype_id(etype)
        graph = self._graphs[place]
        u = self._ids(u, graph.num_src, "out_edges", "u")
        return self._in_form("out_edges", form, place, _edges_at(u.long(), graph.reverse()))

    def successors(self: Any, v: Any, etype: Any = None) -> Tensor:
        return self.out_edges(v, etype=etype)[1]

    def predecessors(self: Any, v: Any, etype: Any = None) -> Tensor:
        return self.in_edges(v, etype=etype)[0]

    def has_nodes(self: Any, vid: Any, ntype: str | None = None) -> Any:
        """Whether there are nodes with these ids."""
        given = ids("DGLGraph.has_nodes", "vid", vid, None, self.idtype, self.device)
        if len(given) and int(given.min()) < 0:
            raise DGLError(
                f"DGLGraph.has_nodes: vid: expected ids that are not negative, got {int(given.min())}"
            )
        found = given < self._sizes[self.get_ntype_id(ntype)]
        return bool(found) if is_one(vid) else found

    def _between(self: Any, where: str, u: Any, v: Any, place: int) -> Any:
        """The pairs of nodes as tensors of one length, and what `found_edges` says of them."""
        graph = self._graphs[place]
        u = self._ids(u, graph.num_src, where, "u")
        v = self._ids(v, graph.num_dst, where, "v")
        if len(u) != len(v) and 1 not in (len(u), len(v)):
            raise DGLError(f"DGLGraph.{where}: v: expected {len(u)} nodes like u, got {len(v)}")
        u, v = torch.broadcast_tensors(u, v)
        return u, v, *found_edges(graph.edge_index, u, v, graph.num_dst)

    def has_edges_between(self: Any, u: Any, v: Any, etype: Any = None) -> Any:
        """Whether there is an edge between each pair of nodes."""
        *_, first, last = self._between("has_edges_between", u, v, self.get_etype_id(etype))
        found = first < last
        return bool(found) if is_one(u) and is_one(v) else found

    def edge_ids(self: Any, u: Any, v: Any, return_uv: bool = False, etype: Any = None) -> Any:
        """The id of an edge between each pair of nodes; with return_uv sources, destinations and ids of all
        edges between them."""
        u_nodes, v_nodes, order, first, last = self._between("edge_ids", u, v, self.get_etype_id(etype))
        if return_uv:
            counts = last - first
            pair = torch.arange(len(counts), device=order.device).repeat_interleave(counts)
            place = torch.arange(len(pair), device=order.device) + (first - counts.cumsum(0) + counts)[pair]
            return u_nodes[pair], v_nodes[pair], order[place].to(self.idtype)
        missing = (first == last).nonzero()
        if len(missing):
            at = int(missing[0])
            raise DGLError(
                "DGLGraph.edge_ids: expected pairs of nodes with an edge between them, got "
                f"{int(u_nodes[at])}, {int(v_nodes[at])}"
            )
        eids = order[first].to(self.idtype)
        return int(eids) if is_one(u) and is_one(v) else eids

    def _eids(self: Any, edges: Any, place: int) -> Tensor:
        """The ids of edges that are given by ids, or by (sources, destinations)."""
        if isinstance(edges, tuple):
            return self.edge_ids(*edges, etype=self.canonical_etypes[place]).reshape(-1)
        return self._ids(edges, self._graphs[place].num_edges, "DGLGraph", "edges")

    # ---- matrices -----------------------------------------------------------------------------------

    def adj_tensors(self: Any, fmt: str, etype: Any = None) -> tuple[Tensor, ...]:
        """ "coo": (sources, destinations); "csr" and "csc": (indptr, indices, edge ids)."""
        place = self.get_etype_id(etype)
        graph = self._graphs[place]
        if fmt == "coo":
            return self._uv(place)
        if fmt not in ("csr", "csc"):
            raise DGLError(f"DGLGraph.adj_tensors: fmt: expected 'coo', 'csr' or 'csc', got {fmt!r}")
        indptr, indices, eids = _compressed(graph, by_source=fmt == "csr")
        if WITHOUT_IDS.get(graph) == fmt:
            eids = eids[:0]  # as in DGL
        return indptr.to(self.idtype), indices.to(self.idtype), eids.to(self.idtype)

    def adj_external(
        self: Any, transpose: bool = False, ctx: Any = "cpu", scipy_fmt: str | None = None, etype: Any = None
    ) -> Any:
        """The matrix [source, destination], or its transpose: PyTorch's, or with scipy_fmt SciPy's."""
        graph = self._graphs[self.get_etype_id(etype)]
        ends, shape = graph.edge_index, (graph.num_src, graph.num_dst)
        if transpose:
            ends, shape = ends.flip(0), shape[::-1]
        if scipy_fmt is not None:
            from scipy import sparse

            ones: Any = torch.ones(graph.num_edges, dtype=self.idtype).numpy()
            if scipy_fmt == "csr":  # asformat would add edges with the same ends
                arrays = _compressed(graph.reverse() if transpose else graph, by_source=True)
                indptr, indices, _ = (x.cpu().numpy() for x in arrays)
                return sparse.csr_matrix((ones, indices, indptr), shape=shape)
            return sparse.coo_matrix((ones, tuple(ends.cpu().numpy())), shape=shape).asformat(scipy_fmt)
        ones = torch.ones(graph.num_edges, device=self.device)
        return torch.sparse_coo_tensor(ends, ones, shape, check_invariants=False).to(ctx)

    def adj(self: Any, etype: Any = None, eweight_name: str | None = None) -> Any:
        """The matrix [source, destination], of :mod:`dfgnn.compat.sparse`."""
        place = self.get_etype_id(etype)
        graph = self._graphs[place]
        val = None if eweight_name is None else self._edge_frames[place][eweight_name]
        return spmatrix(graph.edge_index, val, (graph.num_src, graph.num_dst))

    adjacency_matrix = adj


def _edges_at(nodes: Tensor, graph: Any) -> Tensor:
    """Ids of the edges into each of these nodes in turn, rising for a node, as in DGL."""
    place, eids = pairs(nodes, graph)
    return eids[(place * max(graph.num_edges, 1) + eids).argsort()]


def _compressed(graph: Any, by_source: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr, indices, edge ids) by source, or by destination; ids of a node's edges rise, as in DGL."""
    src, dst = graph.edge_index
    outer, inner = (src, dst) if by_source else (dst, src)
    eids = outer.argsort(stable=True)
    degrees = graph.out_degrees() if by_source else graph.in_degrees()
    return torch.nn.functional.pad(degrees.cumsum(0), (1, 0)), inner[eids], eids
