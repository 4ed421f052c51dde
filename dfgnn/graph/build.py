"""Builds graphs: from index tensors, as Graph's constructors do, and from other graphs.

Functions take a graph, or the Graph class as an argument, because this module cannot import it; ``where`` is
the constructor's name in errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.tracing import not_compiled, untraced, without_gradient
from ..sparse import csr as _csr
from ..sparse.csr import CSR, EDGE_INDEX, UserEdges
from ..sparse.fixed import FixedStructure
from ..sparse.packed import PackedGraph
from ..sparse.structure import Side, Structure
from . import ranges


@not_compiled
def from_csr(cls, where, indptr, indices, num_cols, eids, validate, rows="dst") -> Any:
    """rows: "dst" or "src", what the CSR's rows are. With "src" the other CSR is derived at its first use."""
    indptr = _csr.as_index(where, "indptr", indptr)
    indices = _csr.as_index(where, "indices", indices)
    _csr.same_device(where, "indices", indices, "indptr", indptr)
    if indptr.numel() == 0:
        raise ValueError(f"{where}: indptr: expected at least 1 value, got 0")
    num_rows = _csr.as_size(where, f"num_{rows}", indptr.numel() - 1)
    cols_name = "num_src" if rows == "dst" else "num_dst"
    num_cols = num_rows if num_cols is None else _csr.as_size(where, cols_name, num_cols)
    num_edges = indices.numel()
    if eids is not None:
        eids = _csr.as_index(where, "eids", eids, (num_edges,))
        _csr.same_device(where, "eids", eids, "indptr", indptr)
    if num_edges >= _csr.MOST_EDGES and rows == "dst":
        return ranges.from_csr(cls.from_csr, where, indptr, indices, num_cols, eids, validate)
    _csr.as_size(where, "number of edges", num_edges)
    with untraced(indptr, indices, eids):
        if validate:
            identity = _csr.check_csr(where, indptr, indices, eids, cols_name, num_cols)
        else:
            identity = eids is not None and eids.device.type == "cpu" and bool(_csr.is_identity(eids))
        csr = CSR(
            _csr.canonical(indptr, torch.int64),
            _csr.canonical(indices, torch.int32),
            None if eids is None or identity else _csr.canonical(eids, torch.int32),
        )
    sides = Side(num_rows, (csr, True)), Side(num_cols)
    return cls._make(*sides) if rows == "dst" else cls._make(*sides[::-1])


def given_sizes(where: str, num_nodes: Any, num_src: Any, num_dst: Any) -> tuple[Any, Any]:
    """The numbers of sources and of destinations, which are both num_nodes if that is given."""
    if num_nodes is None:
        return num_src, num_dst
    if num_src is not None or num_dst is not None:
        raise TypeError(f"{where}: expected either num_nodes or num_src and num_dst, got both")
    num_nodes = _csr.as_size(where, "num_nodes", num_nodes)
    return num_nodes, num_nodes


@not_compiled
def from_coo(cls, given: UserEdges, num_nodes=None, validate: bool = True, sort_order=None) -> Any:
    """num_nodes: the number of sources and of destinations. sort_order: that of PyG's EdgeIndex, which is
    trusted if the values are not read."""
    where, names, src, dst, num_src, num_dst = given
    src, dst = without_gradient(src), without_gradient(dst)
    num_src, num_dst = given_sizes(where, num_nodes, num_src, num_dst)
    num_src = None if num_src is None else _csr.as_size(where, "num_src", num_src)
    num_dst = None if num_dst is None else _csr.as_size(where, "num_dst", num_dst)
    _csr.same_device(where, names[1], dst, names[0], src)
    given = UserEdges(where, names, src, dst, num_src, num_dst)
    if src.numel() >= _csr.MOST_EDGES:
        return ranges.from_coo(cls.from_coo, given, validate)
    with untraced(src, dst):
        return of_edges(cls, _csr.from_edges(given, validate, sort_order))


@not_compiled
def of_blocks(cls, blocks: Sequence[tuple[Tensor, int, int]]) -> list:
    """`Graph.from_edge_index` for several (edge_index, num_src, num_dst), waiting for the device once."""
    where = "Graph.from_edge_index"
    with untraced(*(edge_index for edge_index, _, _ in blocks)):
        given = [UserEdges(where, EDGE_INDEX, x[0], x[1], num_src, num_dst) for x, num_src, num_dst in blocks]
        return [of_edges(cls, edges) for edges in _csr.from_blocks(given)]


def of_edges(cls, edges: _csr.Edges | PackedGraph) -> Any:
    if isinstance(edges, PackedGraph):
        num_src, num_dst = edges.sizes
        sides = Side(num_dst, None, (edges, False)), Side(num_src, None, (edges, True))
        return cls._of(Structure(*sides), False)
    dst, src = Side(edges.num_dst), Side(edges.num_src)
    given, other = (src, dst) if edges.by_src else (dst, src)
    given.built = edges.csr, True
    if edges.other is not None:
        other.built = edges.other, True
    if edges.degrees is not None:
        for side, found in zip((dst, src), edges.degrees):
            side.know(found)
    return cls._make(dst, src)


@not_compiled
def with_self_loops(graph: Any, remove_existing: bool) -> tuple[Any, Tensor]:
    """`Graph.add_self_loops`: the graph, and each edge's position in ``graph``, -1 for an appended loop."""
    cls, where, structure = type(graph), "Graph.add_self_loops", graph._structure
    if isinstance(structure, FixedStructure):
        if not remove_existing:
            raise NotImplementedError(
                f"{where}: remove_existing: expected True for a graph of fixed capacity"
            )
        looped = structure.with_loops()
        return cls._of(looped), looped.edge_map
    num_loops = min(graph.num_src, graph.num_dst)
    _csr.as_size(where, "number of edges", graph.num_edges + num_loops)
    with untraced(structure.indices):
        src, dst = structure.endpoints(torch.int32)
        edge_map = None
        if not remove_existing:
            src, dst, edge_map = _csr.append_loops(src, dst, num_loops, remove_existing=False)
        given = UserEdges(where, ("src", "dst"), src, dst, graph.num_src, graph.num_dst)
        edges = _csr.from_edges(given, validate=False, with_loops=remove_existing)
        looped = of_edges(cls, edges)
    if remove_existing:
        edge_map = edges.edge_map
    assert edge_map is not None  # `from_edges` returns one if it appends loops
    return looped, edge_map


@not_compiled
def batch(cls, graphs: Any) -> Any:
    """See `Graph.batch`."""
    where = "Graph.batch"
    graphs = _checked(cls, where, graphs)
    num_src = _csr.as_size(where, "num_src", sum(g.num_src for g in graphs))
    num_dst = _csr.as_size(where, "num_dst", sum(g.num_dst for g in graphs))
    _csr.as_size(where, "number of edges", sum(g.num_edges for g in graphs))
    structures = [g._structure for g in graphs]
    with untraced(*(s.indices for s in structures)):
        csr = _csr.batch([g.csr() for g in graphs], [g.num_src for g in graphs], True)
        dst, src = Side(num_dst, (csr, True)), Side(num_src)
        # The reverse CSRs are joined only if all have edge ids, or none has: see `Side`.
        built = [s.src.built for s in structures if s.src.built is not None]
        if len(built) == len(graphs) and len({known for _, known in built}) == 1:
            known = built[0][1]
            src.built = _csr.batch([csr for csr, _ in built], [g.num_dst for g in graphs], known), known
    return cls._make(dst, src)


def _checked(cls, where: str, graphs) -> list:
    """The graphs as a list, after checking that there is at least one and all are on one device."""
    if isinstance(graphs, cls):
        raise TypeError(f"{where}: graphs: expected a sequence of dfgnn.Graph, got {cls.__name__}")
    graphs = list(graphs)
    if not graphs:
        raise ValueError(f"{where}: graphs: expected at least one graph, got none")
    for i, graph in enumerate(graphs):
        if not isinstance(graph, cls):
            raise TypeError(
                f"{where}: graphs[{i}]: expected a dfgnn.Graph, got {type(graph).__name__}; "
                "Graph.from_edge_index, from_pyg and from_dgl make one"
            )
        if graph.device != graphs[0].device:
            raise ValueError(
                f"{where}: graphs[{i}]: expected device {graphs[0].device} like graphs[0], got {graph.device}"
            )
    return graphs
