"""DGLGraph: a graph with features and the methods of DGL's class."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..graph.hetero import Relation
from ..nn.dgl import DGLError
from .as_dgl import PAGE
from .editing import Editing
from .frames import Data, Edges, Frame, Nodes, Scheme
from .ids import Ends, by_type, check_idtype, ends_of, ends_of_matrix, ends_of_networkx, ids
from .passing import Passing
from .queries import WITHOUT_IDS, Queries


class Casts:
    """The part of `DGLGraph` about the dtype of ids."""

    @property
    def idtype(self: Any) -> torch.dtype:
        """The dtype of the ids that methods return."""
        return self._idtype

    def astype(self: Any, idtype: torch.dtype | None) -> Any:
        """The graph with ids of int32 or int64."""
        if check_idtype("DGLGraph.astype", idtype) in (None, self._idtype):
            return self
        made = copy.copy(self)
        made._idtype = idtype
        return made

    def int(self: Any) -> Any:
        return self.astype(torch.int32)

    def long(self: Any) -> Any:
        return self.astype(torch.int64)


class DGLGraph(Queries, Passing, Editing, Casts):
    """A graph, or one per relation, with features of nodes and edges and the methods of DGL's class.

    Layers and :mod:`dfgnn.ops` accept it if it has one relation. ``dfgnn_graph`` is its :class:`dfgnn.Graph`;
    ``graphs`` maps (type of sources, name, type of destinations) to the Graph of each relation. Features are
    dictionaries of tensors with a row per node or edge. Methods that add or remove edges in place make new
    Graphs.

    data: as for :func:`~dfgnn.compat.graph`, or a SciPy matrix or networkx graph, or nothing for an empty
    graph, to which nodes and edges are added. deprecated: further arguments of old scripts, which have no
    effect, as in DGL.

    Types are stored in order, and everything that belongs to one in lists in that order: ``_ntypes`` and
    ``_sizes``, ``_node_frames``; ``_etypes``, ``_ends`` (places of the types of sources and destinations),
    ``_graphs``, ``_edge_frames``. ``_sides``: the places of the types that sources and destinations may have;
    in a block, and where no type is both, they differ.
    """

    is_block = False

    def __init__(self, data: Any = (), **deprecated: Any):
        if hasattr(data, "tocoo"):
            edges = ends_of_matrix("DGLGraph", data)
        elif hasattr(data, "is_directed"):
            edges = ends_of_networkx("DGLGraph", data)
        else:
            edges = ends_of("DGLGraph", ([], []) if isinstance(data, tuple) and not data else data)
        if edges.num_src != edges.num_dst:
            raise DGLError(f"DGLGraph: data: expected a square matrix, got {edges.num_src, edges.num_dst}")
        self._init(["_N"], [edges.num_src], ["_E"], [(0, 0)], [fused(edges)], edges.src.dtype)

    @classmethod
    def _of(cls, *parts: Any, **options: Any) -> Any:
        made = cls.__new__(cls)
        made._init(*parts, **options)
        return made

    def _with(self, graphs: Sequence[Graph], *frames: Any, **changed: Any) -> Any:
        """A graph of these edges and features, with its types, sizes and relations, but for ``changed``
        ones."""
        parts = {"sizes": self._sizes, "ends": self._ends, **changed}
        return DGLGraph._of(
            self._ntypes, parts["sizes"], self._etypes, parts["ends"], graphs, self._idtype, frames
        )

    def _only(self, kinds: Sequence[int], relations: Sequence[int], cls: Any = None) -> Any:
        """The graph of these types of nodes and these relations; it shares the features."""
        return (cls or type(self))._of(
            [self._ntypes[k] for k in kinds], [self._sizes[k] for k in kinds],
            [self._etypes[k] for k in relations],
            [tuple(kinds.index(kind) for kind in self._ends[k]) for k in relations],
            [self._graphs[k] for k in relations], self._idtype,
            ([self._node_frames[k] for k in kinds], [self._edge_frames[k] for k in relations]),
        )  # fmt: skip

    def _init(
        self, ntypes: Sequence[str], sizes: Sequence[int], etypes: Sequence[str],
        ends: Sequence[tuple[int, int]], graphs: Sequence[Graph], idtype: Any = torch.int64,
        frames: tuple[Sequence[Any] | None, Sequence[Any] | None] = (None, None),
        num_src_types: int | None = None,
    ) -> None:  # fmt: skip
        self._ntypes, self._sizes, self._etypes = list(ntypes), [int(n) for n in sizes], list(etypes)
        self._ends, self._graphs, self._idtype = list(ends), list(graphs), idtype
        given_nodes, given_edges = frames[0] or [None] * len(sizes), frames[1] or [None] * len(graphs)
        self._node_frames = [Frame(n) if x is None else x for n, x in zip(self._sizes, given_nodes)]
        self._edge_frames = [Frame(g.num_edges) if x is None else x for g, x in zip(graphs, given_edges)]
        self._batch_num_nodes: dict[str, Tensor] | None = None
        self._batch_num_edges: dict[Relation, Tensor] | None = None
        if num_src_types is None and len(ntypes) > 1:
            # As in DGL: types are of sources or destinations if none is both.
            targets = {end for _, end in ends}
            if not any(begin in targets for begin, _ in ends):
                self._sides = [k for k in range(len(ntypes)) if k not in targets], sorted(targets)
                self._is_unibipartite = True
                return
        self._is_unibipartite = num_src_types is not None
        places = list(range(len(ntypes)))
        self._sides = (
            (places, places) if num_src_types is None else (places[:num_src_types], places[num_src_types:])
        )

    # ---- types ------------------------------------------------------------------------------------

    @property
    def ntypes(self) -> list[str]:
        return self._ntypes

    @property
    def etypes(self) -> list[str]:
        return self._etypes

    @property
    def canonical_etypes(self) -> list[Relation]:
        names = self._ntypes
        return [(names[begin], name, names[end]) for name, (begin, end) in zip(self._etypes, self._ends)]

    @property
    def srctypes(self) -> list[str]:
        return sorted(self._ntypes[k] for k in self._sides[0]) if self._is_unibipartite else self._ntypes

    @property
    def dsttypes(self) -> list[str]:
        return sorted(self._ntypes[k] for k in self._sides[1]) if self._is_unibipartite else self._ntypes

    @property
    def is_unibipartite(self) -> bool:
        return self._is_unibipartite

    @property
    def is_homogeneous(self) -> bool:
        return len(self._ntypes) == 1 and len(self._etypes) == 1

    def metagraph(self) -> Any:
        """A networkx.MultiDiGraph with an edge for each relation."""
        import networkx

        found = networkx.MultiDiGraph()
        for begin, name, end in self.canonical_etypes:
            found.add_edge(begin, end, name)
        return found

    def to_canonical_etype(self, etype: str | Relation | None) -> Relation:
        if isinstance(etype, tuple):
            return etype  # type: ignore[return-value]
        found = [relation for relation in self.canonical_etypes if etype in (None, relation[1])]
        if len(found) != 1:
            raise DGLError(self._no_etype(etype, found))
        return found[0]

    def get_etype_id(self, etype: str | Relation | None) -> int:
        etype = tuple(etype) if isinstance(etype, list) else etype  # type: ignore[assignment]
        wanted = self.to_canonical_etype(etype)
        if wanted not in self.canonical_etypes:
            raise DGLError(self._no_etype(etype, []))
        return self.canonical_etypes.index(wanted)

    def _no_etype(self, etype: Any, found: Any) -> str:
        what = "which occurs more than once" if found and etype is not None else "which does not say one"
        return f"DGLGraph: etype: expected one of {self.canonical_etypes}, got {etype!r}, {what}"

    def get_ntype_id(self, ntype: str | None) -> int:
        """The place of a type; of a name that is of sources and destinations, that of the sources."""
        if ntype is None and not self._is_unibipartite and len(self._ntypes) == 1:
            return 0
        if self._is_unibipartite and ntype is not None and ntype[:4] in ("SRC/", "DST/"):
            return self._end_place(ntype[4:], int(ntype.startswith("DST/")))
        if ntype is None or ntype not in self._ntypes:
            raise DGLError(f"DGLGraph: ntype: expected one of {self._ntypes}, got {ntype!r}")
        return self._ntypes.index(ntype)

    def get_ntype_id_from_src(self, ntype: str | None) -> int:
        return self._end_place(ntype, 0)

    def get_ntype_id_from_dst(self, ntype: str | None) -> int:
        return self._end_place(ntype, 1)

    def _end_place(self, ntype: str | None, end: int) -> int:
        found = [k for k in self._sides[end] if ntype in (None, self._ntypes[k])]
        if len(found) != 1:
            names, whose = [self._ntypes[k] for k in self._sides[end]], ("sources", "destinations")[end]
            raise DGLError(f"DGLGraph: ntype: expected one of {names}, the types of {whose}, got {ntype!r}")
        return found[0]

    def __getitem__(self, etype: str | Relation) -> DGLGraph:
        """The graph of one relation; it shares the features."""
        key = etype if isinstance(etype, tuple) and len(etype) == 3 else (_EACH, etype, _EACH)
        found = [
            k
            for k, relation in enumerate(self.canonical_etypes)
            if all(a in (_EACH, b) for a, b in zip(key, relation))
        ]
        if len(found) > 1 and any(part == _EACH and part is not _EACH for part in key):
            raise NotImplementedError(
                f"DGLGraph: etype: expected one relation in dfgnn, got {etype!r}, of {len(found)}"
            )
        if len(found) != 1:
            raise DGLError(self._no_etype(etype, found))
        return self._relation(found[0])

    def _relation(self, place: int) -> Any:
        return self._only(list(dict.fromkeys(self._ends[place])), [place])

    @property
    def graphs(self) -> dict[Relation, Graph]:
        return dict(zip(self.canonical_etypes, self._graphs))

    @property
    def dfgnn_graph(self) -> Graph:
        """The Graph on which layers and operators compute. Raises ValueError with several relations."""
        if len(self._graphs) != 1:
            raise ValueError(f"DGLGraph: expected one relation, take one of {self.canonical_etypes}")
        return self._graphs[0]

    # ---- features -----------------------------------------------------------------------------------

    @property
    def nodes(self) -> Nodes:
        return Nodes(self, self.get_ntype_id)

    @property
    def srcnodes(self) -> Nodes:
        return Nodes(self, self.get_ntype_id_from_src)

    @property
    def dstnodes(self) -> Nodes:
        return Nodes(self, self.get_ntype_id_from_dst)

    @property
    def edges(self) -> Edges:
        return Edges(self)

    @property
    def ndata(self) -> Data:
        # If both the sources and the destinations of a block have a feature, DGL takes the sources'.
        return self._data([self._ntypes.index(kind) for kind in self._ntypes])

    @property
    def srcdata(self) -> Data:
        return self._data(self._sides[0])

    @property
    def dstdata(self) -> Data:
        return self._data(self._sides[1])

    def _data(self, places: Sequence[int]) -> Data:
        return Data(self, "nodes", {self._ntypes[k]: k for k in places}, len(places) > 1)

    @property
    def edata(self) -> Data:
        return Data(self, "edges", {r: k for k, r in enumerate(self.canonical_etypes)}, len(self._graphs) > 1)

    def node_attr_schemes(self, ntype: str | None = None) -> dict[str, Scheme]:
        return self._node_frames[self.get_ntype_id(ntype)].schemes

    def edge_attr_schemes(self, etype: Any = None) -> dict[str, Scheme]:
        return self._edge_frames[self.get_etype_id(etype)].schemes

    def _frames(self, where: str) -> list[Frame]:
        return self._node_frames if where == "nodes" else self._edge_frames

    def _chosen(self, where: str, place: int, which: Any) -> Tensor:
        """The ids of a selection of nodes; or of edges, given by ids or by (sources, destinations)."""
        if where == "edges":
            return self._eids(which, place)
        return self._ids(which, self._sizes[place], f"DGLGraph.{where}", "ids")

    def _ids(self, x: Any, size: int, where: str, name: str) -> Tensor:
        return ids(
            f"DGLGraph.{where}" if "." not in where else where, name, x, size, self._idtype, self.device
        )

    # ---- copies -------------------------------------------------------------------------------------

    def __copy__(self) -> Any:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def to(self, device: Any, **options: Any) -> Any:
        """The graph and its features on another device."""
        if device is None or torch.device(device) == self.device:
            return self
        made = copy.copy(self)
        made._graphs = [graph.to(device) for graph in self._graphs]
        made._node_frames = [frame.to(device, **options) for frame in self._node_frames]
        made._edge_frames = [frame.to(device, **options) for frame in self._edge_frames]
        for name in ("_batch_num_nodes", "_batch_num_edges"):
            counts = getattr(self, name)
            setattr(made, name, None if counts is None else {k: x.to(device) for k, x in counts.items()})
        return made

    def cpu(self) -> Any:
        return self.to("cpu")

    def clone(self) -> Any:
        """A graph with the same structure and features; changing one does not change the other."""
        made = self.local_var()
        for name in ("_sizes", "_graphs", "_batch_num_nodes", "_batch_num_edges"):
            setattr(made, name, copy.copy(getattr(self, name)))
        return made

    def local_var(self) -> Any:
        """A graph with the same structure and features; setting its features does not change this one's."""
        made = copy.copy(self)
        made._node_frames = [frame.copy() for frame in self._node_frames]
        made._edge_frames = [frame.copy() for frame in self._edge_frames]
        return made

    @contextlib.contextmanager
    def local_scope(self) -> Iterator[None]:
        """A context after which features are as they were before it."""
        before = self._node_frames, self._edge_frames
        self._node_frames = [frame.copy() for frame in self._node_frames]
        self._edge_frames = [frame.copy() for frame in self._edge_frames]
        try:
            yield
        finally:
            self._node_frames, self._edge_frames = before

    @property
    def device(self) -> torch.device:
        return self._graphs[0].device

    def create_formats_(self) -> None:
        """Does nothing, because formats are made at their first use."""

    # ---- batches --------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return len(self.batch_num_nodes(self._ntypes[0]))

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        if self._batch_num_nodes is None:
            counts = zip(self._ntypes, self._sizes)
            self._batch_num_nodes = {name: torch.tensor([n], device=self.device) for name, n in counts}
        if ntype is None and len(self._ntypes) == 1:
            ntype = self._ntypes[0]
        if ntype not in self._batch_num_nodes:
            raise DGLError(f"DGLGraph.batch_num_nodes: ntype: expected one of {self._ntypes}, got {ntype!r}")
        return self._batch_num_nodes[ntype]

    def batch_num_edges(self, etype: Any = None) -> Tensor:
        if self._batch_num_edges is None:
            counts = self.graphs.items()
            self._batch_num_edges = {r: torch.tensor([g.num_edges], device=self.device) for r, g in counts}
        return self._batch_num_edges[self.canonical_etypes[self.get_etype_id(etype)]]

    def set_batch_num_nodes(self, val: Any) -> None:
        """val: the graphs' numbers of nodes, or a dictionary of such by type."""
        self._batch_num_nodes = dict(by_type("DGLGraph.set_batch_num_nodes", "val", self._ntypes, val))

    def set_batch_num_edges(self, val: Any) -> None:
        """val: the graphs' numbers of edges, or a dictionary of such by canonical type."""
        given = by_type("DGLGraph.set_batch_num_edges", "val", self.canonical_etypes, val)
        self._batch_num_edges = {self.to_canonical_etype(etype): x for etype, x in given.items()}

    # ---- in Python --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        nodes: Any = dict(zip(self._ntypes, self._sizes))
        if self.is_homogeneous:
            return (
                f"Graph(num_nodes={self._sizes[0]}, num_edges={self._graphs[0].num_edges},\n"
                f"      ndata_schemes={self._node_frames[0].schemes}\n"
                f"      edata_schemes={self._edge_frames[0].schemes})"
            )
        edges = {relation: graph.num_edges for relation, graph in self.graphs.items()}
        meta = [(begin, end, name) for begin, name, end in self.canonical_etypes]
        return f"Graph(num_nodes={nodes},\n      num_edges={edges},\n      metagraph={meta})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r} in dfgnn, which stands for DGL here; "
            f"{PAGE} says what there is"
        )


_EACH = slice(None)


def fused(edges: Ends) -> Graph:
    graph = Graph.from_coo(edges.src, edges.dst, num_src=edges.num_src, num_dst=edges.num_dst)
    if edges.form != "coo":
        WITHOUT_IDS[graph] = edges.form
    return graph
