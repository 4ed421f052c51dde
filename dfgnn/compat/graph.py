"""DGLGraph: a graph with features and the methods of DGL's class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..graph.hetero import Relation
from ..nn import DGLError
from . import passing
from .edges import between, of_data
from .frames import Edges, Frame, Frames, NodeBatch, Nodes
from .function import Reduce
from .sparse import spmatrix
from .sparse.structure import pairs

HOMOGENEOUS: Relation = ("_N", "_E", "_N")
ALL = "__ALL__"


class DGLGraph:
    """A graph, or one per relation, with features of nodes and edges and the methods of DGL's class.

    Layers and :mod:`dfgnn.ops` accept it if it has one relation. ``fused`` is its :class:`dfgnn.Graph`;
    ``graphs`` maps (type of sources, name, type of destinations) to the Graph of each relation. Features are
    dictionaries of tensors with a row per node or edge. Methods that add edges in place make new Graphs.

    data: as for :func:`~dfgnn.compat.graph`, or nothing for an empty graph, to which nodes and edges are
    added.
    """

    is_block = False

    def __init__(self, data: Any = (), **deprecated: Any):
        empty: Any = ([], [])
        graph = of_data("DGLGraph", empty if isinstance(data, tuple) and not data else data)
        self._init({HOMOGENEOUS: graph}, {"_N": graph.num_src}, None)

    @classmethod
    def _of(cls, graphs: Mapping[Any, Graph], sizes: Mapping[Any, int], frames: Any = None) -> Any:
        """A graph of these parts. frames: of nodes by type and of edges by relation; `Frame`s are shared."""
        made = cls.__new__(cls)
        made._init(graphs, sizes, frames)
        return made

    def _init(self, graphs: Mapping[Any, Graph], sizes: Mapping[Any, int], frames: Any) -> None:
        self.graphs, self._sizes = dict(graphs), dict(sizes)
        nodes, edges = ({}, {}) if frames is None else frames
        self._nodes = {kind: _frame(size, nodes.get(kind)) for kind, size in self._sizes.items()}
        self._edges = {r: _frame(graph.num_edges, edges.get(r)) for r, graph in self.graphs.items()}
        self._batch_nodes: dict[Any, Tensor] = {}
        self._batch_edges: dict[Any, Tensor] = {}

    # ---- types ------------------------------------------------------------------------------------

    @property
    def canonical_etypes(self) -> list[Relation]:
        return list(self.graphs)

    @property
    def etypes(self) -> list[str]:
        return [relation[1] for relation in self.graphs]

    @property
    def ntypes(self) -> list[str]:
        return list(self._sizes)

    @property
    def srctypes(self) -> list[str]:
        return self.ntypes

    @property
    def dsttypes(self) -> list[str]:
        return self.ntypes

    @property
    def is_homogeneous(self) -> bool:
        return len(self.graphs) == 1 and len(self._sizes) == 1

    def to_canonical_etype(self, etype: str | Relation | None) -> Relation:
        return self._relation(etype)

    def get_ntype_id(self, ntype: str) -> int:
        return list(self._sizes).index(self._kind(ntype))

    def get_etype_id(self, etype: str | Relation) -> int:
        return list(self.graphs).index(self._relation(etype))

    def _relation(self, etype: Any) -> Any:
        etype = tuple(etype) if isinstance(etype, list) else etype
        found = [r for r in self.graphs if etype is None or etype in (r, r[1])]
        if len(found) != 1:
            raise KeyError(f"DGLGraph: etype: expected one of {self.canonical_etypes}, got {etype!r}")
        return found[0]

    def _kind(self, ntype: str | None) -> Any:
        if ntype is None and len(self._sizes) == 1:
            return next(iter(self._sizes))
        if ntype not in self._sizes:
            raise KeyError(f"DGLGraph: ntype: expected one of {self.ntypes}, got {ntype!r}")
        return ntype

    def _end_kind(self, ntype: str | None, end: int) -> Any:
        """The type of sources (end 0) or destinations (end 2)."""
        if ntype is None and len(self._sizes) > 1 and len(self.graphs) == 1:
            return next(iter(self.graphs))[end]
        return self._kind(ntype)

    def __getitem__(self, etype: str | Relation) -> DGLGraph:
        """The graph of one relation; it shares the features."""
        relation = self._relation(etype)
        sizes = {kind: self._sizes[kind] for kind in dict.fromkeys((relation[0], relation[2]))}
        return type(self)._of({relation: self.graphs[relation]}, sizes, (self._nodes, self._edges))

    @property
    def dfgnn_graph(self) -> Graph:
        """The Graph on which layers and operators compute. Raises ValueError with several relations."""
        if len(self.graphs) != 1:
            raise ValueError(f"DGLGraph: expected one relation, take one of {self.canonical_etypes}")
        return next(iter(self.graphs.values()))

    fused = dfgnn_graph

    # ---- sizes and structure ------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(iter(self.graphs.values())).device

    @property
    def idtype(self) -> torch.dtype:
        """The dtype of the indices that methods return."""
        return torch.int64

    def num_nodes(self, ntype: str | None = None) -> int:
        return sum(self._sizes.values()) if ntype is None else self._sizes[self._kind(ntype)]

    def num_edges(self, etype: str | Relation | None = None) -> int:
        if etype is None:
            return sum(graph.num_edges for graph in self.graphs.values())
        return self.graphs[self._relation(etype)].num_edges

    def num_src_nodes(self, ntype: str | None = None) -> int:
        return self._sizes[self._end_kind(ntype, 0)]

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        return self._sizes[self._end_kind(ntype, 2)]

    number_of_nodes, number_of_edges = num_nodes, num_edges
    number_of_src_nodes, number_of_dst_nodes = num_src_nodes, num_dst_nodes

    def in_degrees(self, v: Any = ALL, etype: str | Relation | None = None) -> Any:
        """In-degrees of all destinations, or of v: a tensor, or a number for a single node."""
        return _of_nodes(self.graphs[self._relation(etype)].in_degrees(), v)

    def out_degrees(self, u: Any = ALL, etype: str | Relation | None = None) -> Any:
        return _of_nodes(self.graphs[self._relation(etype)].out_degrees(), u)

    def find_edges(self, eid: Any, etype: Any = None) -> tuple[Tensor, Tensor]:
        src, dst = self.graphs[self._relation(etype)].edge_index
        eid = self._ids(eid)
        return src[eid], dst[eid]

    def in_edges(self, v: Any, form: str = "uv", etype: Any = None) -> Any:
        return self._edges_at(v, form, etype, 1)

    def out_edges(self, u: Any, form: str = "uv", etype: Any = None) -> Any:
        return self._edges_at(u, form, etype, 0)

    def _edges_at(self, nodes: Any, form: str, etype: Any, end: int) -> Any:
        graph = self.graphs[self._relation(etype)]
        graph = graph if end else graph.reverse()
        _, eid = pairs(self._ids(nodes), graph)
        src, dst = self.graphs[self._relation(etype)].edge_index[:, eid]
        return {"uv": (src, dst), "eid": eid, "all": (src, dst, eid)}[form]

    def successors(self, v: Any, etype: Any = None) -> Tensor:
        return self.out_edges(v, etype=etype)[1]

    def predecessors(self, v: Any, etype: Any = None) -> Tensor:
        return self.in_edges(v, etype=etype)[0]

    def has_edges_between(self, u: Any, v: Any, etype: Any = None) -> Any:
        graph = self.graphs[self._relation(etype)]
        u, v = torch.broadcast_tensors(self._ids(u), self._ids(v))
        src, dst = graph.edge_index
        return torch.isin(u * graph.num_dst + v, src * graph.num_dst + dst)

    def adj_tensors(self, fmt: str, etype: Any = None) -> tuple[Tensor, ...]:
        """ "coo": (sources, destinations); "csr" and "csc": (indptr, indices, edge ids)."""
        graph = self.graphs[self._relation(etype)]
        if fmt == "coo":
            return tuple(graph.edge_index)
        csr = (graph if fmt == "csc" else graph.reverse()).csr()
        eids = torch.arange(graph.num_edges, device=self.device) if csr.eids is None else csr.eids.long()
        return csr.indptr.long(), csr.indices.long(), eids

    def adj_external(
        self, transpose: bool = False, ctx: Any = "cpu", scipy_fmt: str | None = None, etype: Any = None
    ) -> Any:
        """The matrix [source, destination], or its transpose: PyTorch's, or with scipy_fmt SciPy's."""
        graph = self.graphs[self._relation(etype)]
        ends, shape = graph.edge_index, (graph.num_src, graph.num_dst)
        if transpose:
            ends, shape = ends.flip(0), shape[::-1]
        if scipy_fmt is not None:
            from scipy.sparse import coo_matrix

            rows, cols = ends.cpu().numpy()
            return coo_matrix((torch.ones(len(rows)).numpy(), (rows, cols)), shape=shape).asformat(scipy_fmt)
        ones = torch.ones(graph.num_edges, device=self.device)
        return torch.sparse_coo_tensor(ends, ones, shape, check_invariants=False).to(ctx)

    def adj(self, etype: Any = None, eweight_name: str | None = None) -> Any:
        """The matrix [source, destination], of :mod:`dfgnn.compat.sparse`."""
        relation = self._relation(etype)
        graph = self.graphs[relation]
        val = None if eweight_name is None else self._edges[relation][eweight_name]
        return spmatrix(graph.edge_index, val, (graph.num_src, graph.num_dst))

    def formats(self, formats: Any = None) -> Any:
        return {"created": ["coo", "csr", "csc"], "not created": []} if formats is None else self

    def create_formats_(self) -> None:
        """Does nothing, because formats are made at their first use."""

    def _ids(self, x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=torch.int64, device=self.device).reshape(-1)

    def __repr__(self) -> str:
        edges = {relation: graph.num_edges for relation, graph in self.graphs.items()}
        return f"{type(self).__name__}(num_nodes={self._sizes}, num_edges={edges}, device={self.device})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r} in dfgnn, which stands for DGL here; "
            "docs/dgl_without_dgl.md says what there is"
        )

    # ---- features -----------------------------------------------------------------------------------

    @property
    def nodes(self) -> Nodes:
        return Nodes(self, self._kind)

    @property
    def srcnodes(self) -> Nodes:
        return Nodes(self, lambda ntype: self._end_kind(ntype, 0))

    @property
    def dstnodes(self) -> Nodes:
        return Nodes(self, lambda ntype: self._end_kind(ntype, 2))

    @property
    def edges(self) -> Edges:
        return Edges(self)

    all_edges = edges

    @property
    def ndata(self) -> Any:
        return next(iter(self._nodes.values())) if len(self._nodes) == 1 else Frames(self._nodes)

    @property
    def edata(self) -> Any:
        return next(iter(self._edges.values())) if len(self._edges) == 1 else Frames(self._edges)

    @property
    def srcdata(self) -> Any:
        return self._end_data(0)

    @property
    def dstdata(self) -> Any:
        return self._end_data(2)

    def _end_data(self, end: int) -> Any:
        kinds = dict.fromkeys(relation[end] for relation in self.graphs)
        found = {kind: self._nodes[kind] for kind in kinds}
        return next(iter(found.values())) if len(found) == 1 else Frames(found)

    def _frame(self, relation: Any, end: str) -> Frame:
        if end == "e":
            return self._edges[relation]
        return self._nodes[relation[0 if end == "u" else 2]]

    # ---- copies -------------------------------------------------------------------------------------

    def to(self, device: Any, **_: Any) -> DGLGraph:
        graphs = {relation: graph.to(device) for relation, graph in self.graphs.items()}
        frames = tuple(
            {k: {name: x.to(device) for name, x in frame.items()} for k, frame in part.items()}
            for part in (self._nodes, self._edges)
        )
        return self._like(graphs, frames, device)

    def _like(self, graphs: Mapping[Any, Graph], frames: Any, device: Any = None) -> Any:
        made = type(self)._of(graphs, self._sizes, frames)
        for name in ("_batch_nodes", "_batch_edges"):
            counts = getattr(self, name)
            setattr(made, name, {k: x if device is None else x.to(device) for k, x in counts.items()})
        return made

    def cpu(self) -> DGLGraph:
        return self.to("cpu")

    def cuda(self) -> DGLGraph:
        return self.to("cuda")

    def pin_memory_(self) -> DGLGraph:
        """Does nothing; it exists for scripts that call it."""
        return self

    def clone(self) -> DGLGraph:
        frames = ({k: dict(x) for k, x in part.items()} for part in (self._nodes, self._edges))
        return self._like(self.graphs, tuple(frames))

    def local_var(self) -> DGLGraph:
        """A graph with the same structure and features; setting its features does not change this one's."""
        return self.clone()

    @contextlib.contextmanager
    def local_scope(self) -> Iterator[None]:
        """A context after which features that were set within it are removed."""
        kept = [(frame, dict(frame)) for part in (self._nodes, self._edges) for frame in part.values()]
        try:
            yield
        finally:
            for frame, before in kept:
                frame.clear()
                dict.update(frame, before)

    # ---- message passing ----------------------------------------------------------------------------

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        """Set features of the edges by a built-in function, or by a Python function of all edges or of those
        with these numbers or (sources, destinations)."""
        relation = self._relation(etype)
        eids = None if isinstance(edges, str) else self._eids(edges, relation)
        passing.apply_to_edges(self, relation, func, eids)

    def _eids(self, edges: Any, relation: Any) -> Tensor:
        if isinstance(edges, tuple):
            return self.edge_ids(edges[0], edges[1], relation)
        return self._ids(edges)

    def edge_ids(self, u: Any, v: Any, etype: Any = None) -> Tensor:
        """The number of an edge between each pair of nodes."""
        graph, u, v = self.graphs[self._relation(etype)], self._ids(u), self._ids(v)
        keys, eids = (graph.edge_index[0] * graph.num_dst + graph.edge_index[1]).sort(stable=True)
        wanted = u * graph.num_dst + v
        at = torch.searchsorted(keys, wanted).clamp(max=max(len(keys) - 1, 0))
        if not len(keys) or not torch.equal(keys[at], wanted):
            raise DGLError("DGLGraph.edge_ids: expected pairs of nodes with an edge between them")
        return eids[at]

    def update_all(
        self, message_func: Any, reduce_func: Reduce | Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        """Set features of the destinations from their edges' messages."""
        relation = self._relation(etype)
        frame, found = self._nodes[relation[2]], passing.reduced(self, relation, message_func, reduce_func)
        if apply_node_func is not None:  # it reads the new features, and sets its results
            found = apply_node_func(NodeBatch(Frame(frame.rows, {**frame, **found})))
        frame.update(found)

    def multi_update_all(
        self, etype_dict: Mapping[Any, tuple], cross_reducer: str = "sum", apply_node_func: Any = None
    ) -> None:
        """``update_all`` for several relations; their results for one type of nodes are reduced again."""
        found = passing.reduced_by_relations(self, etype_dict, cross_reducer)
        for (kind, name), x in found.items():
            self._nodes[kind][name] = x
        if apply_node_func is not None:
            for kind in dict.fromkeys(kind for kind, _ in found):
                self._nodes[kind].update(apply_node_func(NodeBatch(self._nodes[kind])))

    def apply_nodes(self, func: Any, v: Any = ALL, ntype: str | None = None) -> None:
        frame = self._nodes[self._kind(ntype)]
        which = None if isinstance(v, str) else self._ids(v)
        passing.put(frame, func(NodeBatch(frame, which)), which)

    # ---- batches --------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return len(self.batch_num_nodes(self.ntypes[0] if len(self._sizes) > 1 else None))

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        kind = self._kind(ntype)
        if kind not in self._batch_nodes:
            self._batch_nodes[kind] = torch.tensor([self._sizes[kind]], device=self.device)
        return self._batch_nodes[kind]

    def batch_num_edges(self, etype: Any = None) -> Tensor:
        relation = self._relation(etype)
        if relation not in self._batch_edges:
            self._batch_edges[relation] = torch.tensor([self.num_edges(relation)], device=self.device)
        return self._batch_edges[relation]

    def set_batch_num_nodes(self, val: Any) -> None:
        given = val if isinstance(val, Mapping) else {self._kind(None): val}
        self._batch_nodes = {self._kind(kind): self._ids(x) for kind, x in given.items()}

    def set_batch_num_edges(self, val: Any) -> None:
        given = val if isinstance(val, Mapping) else {self._relation(None): val}
        self._batch_edges = {self._relation(etype): self._ids(x) for etype, x in given.items()}

    # ---- changes in place -------------------------------------------------------------------------------

    def add_nodes(self, num: int, data: Any = None, ntype: str | None = None) -> None:
        """Append nodes; features that data lacks are zeros."""
        kind = self._kind(ntype)
        self._resize({kind: self._sizes[kind] + num}, {kind: data})

    def add_edges(self, u: Any, v: Any, data: Any = None, etype: Any = None) -> None:
        """Append edges, and nodes that they name and that do not exist yet."""
        relation = self._relation(etype)
        u, v = torch.broadcast_tensors(self._ids(u), self._ids(v))
        sizes: dict[Any, int] = {}
        for kind, ends in ((relation[0], u), (relation[2], v)):
            largest = int(ends.max()) + 1 if len(ends) else 0
            sizes[kind] = max(largest, self._sizes[kind], sizes.get(kind, 0))
        self._resize(sizes, {}, {relation: torch.stack([u, v])}, {relation: data})

    def remove_edges(self, eids: Any, etype: Any = None) -> None:
        relation = self._relation(etype)
        keep = torch.ones(self.num_edges(relation), dtype=torch.bool, device=self.device)
        keep[self._ids(eids)] = False
        graph = self.graphs[relation]
        self.graphs[relation] = between(graph.edge_index[:, keep], graph.num_src, graph.num_dst)
        self._edges[relation] = self._edges[relation].rows_of(keep)
        self._batch_nodes, self._batch_edges = {}, {}

    def _resize(self, sizes: Mapping[Any, int], node_data: Any, edges: Any = None, edge_data: Any = None):
        for kind, size in sizes.items():
            frame = self._nodes[kind]
            self._nodes[kind] = frame.grown(size - frame.rows, node_data.get(kind))
            self._sizes[kind] = size
        for relation, graph in self.graphs.items():
            more = (edges or {}).get(relation)
            ends = graph.edge_index if more is None else torch.cat([graph.edge_index, more], 1)
            if more is not None:
                self._edges[relation] = self._edges[relation].grown(more.shape[1], edge_data[relation])
            num_src, num_dst = self._sizes[relation[0]], self._sizes[relation[2]]
            if more is not None or (num_src, num_dst) != (graph.num_src, graph.num_dst):
                self.graphs[relation] = between(ends, num_src, num_dst)
        self._batch_nodes, self._batch_edges = {}, {}

    def int(self) -> DGLGraph:
        """The graph itself, because indices are always stored as int32."""
        return self

    long = int


def _frame(rows: int, given: Any) -> Frame:
    return given if isinstance(given, Frame) else Frame(rows, given)


def _of_nodes(degrees: Tensor, v: Any) -> Any:
    if isinstance(v, str):
        return degrees
    if isinstance(v, int):
        return int(degrees[v])
    return degrees[torch.as_tensor(v, dtype=torch.int64, device=degrees.device)]
