"""A graph with features, under DGL's names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..graph import Graph
from ..graph import heterograph as graphs_of
from ..graph import to_homogeneous as as_one
from ..graph.hetero import Relation
from .function import Message, Reduce

_HOMOGENEOUS: Relation = ("_N", "_E", "_N")
_CROSS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda x: fold(torch.add, x),
    "mean": lambda x: torch.stack(x).mean(0),
    "max": lambda x: torch.stack(x).amax(0),
    "min": lambda x: torch.stack(x).amin(0),
    "stack": lambda x: torch.stack(x, 1),
}


class DGLGraph:
    """A graph, or one per relation, with features of nodes and edges, as DGL's class of that name offers
    them.

    Layers and :mod:`dfgnn.ops` take it where it has one relation. ``fused`` is its :class:`dfgnn.Graph`, and
    ``graphs`` are those of all relations, by (type of sources, name, type of destinations). Structure is
    immutable, features are dictionaries of tensors with a row per node or edge.
    """

    def __init__(self, graphs: Mapping[Relation, Graph], num_nodes: Mapping[str, int], frames=None):
        self.graphs = dict(graphs)
        self._sizes = dict(num_nodes)
        nodes, edges = ({}, {}) if frames is None else frames
        self._nodes: dict[str, dict[str, Tensor]] = {kind: nodes.get(kind, {}) for kind in self._sizes}
        self._edges: dict[Relation, dict[str, Tensor]] = {r: edges.get(r, {}) for r in self.graphs}

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
    def is_homogeneous(self) -> bool:
        return len(self.graphs) == 1 and len(self._sizes) == 1

    def to_canonical_etype(self, etype: str | Relation | None) -> Relation:
        found = [r for r in self.graphs if etype is None or etype in (r, r[1])]
        if len(found) != 1:
            raise KeyError(f"DGLGraph: etype: expected one of {self.canonical_etypes}, got {etype!r}")
        return found[0]

    def _kind(self, ntype: str | None) -> str:
        if ntype is None and len(self._sizes) == 1:
            return next(iter(self._sizes))
        if ntype not in self._sizes:
            raise KeyError(f"DGLGraph: ntype: expected one of {self.ntypes}, got {ntype!r}")
        return ntype

    def __getitem__(self, etype: str | Relation) -> DGLGraph:
        """The graph of one relation; it shares the features."""
        relation = self.to_canonical_etype(etype)
        sizes = {kind: self._sizes[kind] for kind in dict.fromkeys((relation[0], relation[2]))}
        return DGLGraph({relation: self.graphs[relation]}, sizes, (self._nodes, self._edges))

    @property
    def dfgnn_graph(self) -> Graph:
        """What layers and operators compute on. Raises ValueError where there are several relations."""
        if len(self.graphs) != 1:
            raise ValueError(f"DGLGraph: expected one relation, take one of {self.canonical_etypes}")
        return next(iter(self.graphs.values()))

    fused = dfgnn_graph

    # ---- sizes and structure ------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(iter(self.graphs.values())).device

    def num_nodes(self, ntype: str | None = None) -> int:
        return sum(self._sizes.values()) if ntype is None else self._sizes[self._kind(ntype)]

    def num_edges(self, etype: str | Relation | None = None) -> int:
        if etype is None:
            return sum(graph.num_edges for graph in self.graphs.values())
        return self.graphs[self.to_canonical_etype(etype)].num_edges

    number_of_nodes, number_of_edges = num_nodes, num_edges

    def num_src_nodes(self) -> int:
        return self.fused.num_src

    def num_dst_nodes(self) -> int:
        return self.fused.num_dst

    def in_degrees(self, etype: str | Relation | None = None) -> Tensor:
        return self.graphs[self.to_canonical_etype(etype)].in_degrees()

    def out_degrees(self, etype: str | Relation | None = None) -> Tensor:
        return self.graphs[self.to_canonical_etype(etype)].out_degrees()

    def __repr__(self) -> str:
        edges = {relation: graph.num_edges for relation, graph in self.graphs.items()}
        return f"DGLGraph(num_nodes={self._sizes}, num_edges={edges}, device={self.device})"

    # ---- features -----------------------------------------------------------------------------------

    @property
    def nodes(self) -> _Nodes:
        return _Nodes(self)

    @property
    def edges(self) -> _Edges:
        return _Edges(self)

    @property
    def ndata(self) -> dict[str, Tensor]:
        return self._nodes[self._kind(None)]

    @property
    def edata(self) -> dict[str, Tensor]:
        return self._edges[self.to_canonical_etype(None)]

    @property
    def srcdata(self) -> dict[str, Tensor]:
        return self._nodes[self.to_canonical_etype(None)[0]]

    @property
    def dstdata(self) -> dict[str, Tensor]:
        return self._nodes[self.to_canonical_etype(None)[2]]

    def to(self, device: torch.device | str) -> DGLGraph:
        graphs = {relation: graph.to(device) for relation, graph in self.graphs.items()}
        nodes, edges = (
            {k: {name: x.to(device) for name, x in frame.items()} for k, frame in part.items()}
            for part in (self._nodes, self._edges)
        )
        return DGLGraph(graphs, self._sizes, (nodes, edges))

    def cpu(self) -> DGLGraph:
        return self.to("cpu")

    def int(self) -> DGLGraph:
        """Itself: indices are int32 inside, whatever was given."""
        return self

    long = int

    def local_var(self) -> DGLGraph:
        """The same graph and features; those that are set on it stay its own."""
        frames = ({k: dict(x) for k, x in part.items()} for part in (self._nodes, self._edges))
        return DGLGraph(self.graphs, self._sizes, tuple(frames))

    @contextlib.contextmanager
    def local_scope(self) -> Iterator[None]:
        """Features that are set inside are gone afterwards."""
        kept = [(frame, dict(frame)) for part in (self._nodes, self._edges) for frame in part.values()]
        try:
            yield
        finally:
            for frame, before in kept:
                frame.clear()
                frame.update(before)

    # ---- message passing ----------------------------------------------------------------------------

    def apply_edges(self, func: Message | Callable[[_EdgeBatch], dict], etype=None) -> None:
        """Set features of the edges, by a built-in function or by one of yours, which gets all edges."""
        relation = self.to_canonical_etype(etype)
        if isinstance(func, Message):
            self._edges[relation][func.out] = self._on_edges(relation, func)
        else:
            self._edges[relation].update(func(_EdgeBatch(self, relation)))

    def update_all(self, message_func: Any, reduce_func: Reduce, apply_node_func=None, etype=None) -> None:
        """Set features of the destinations from what their edges carry."""
        relation = self.to_canonical_etype(etype)
        self._nodes[relation[2]][reduce_func.out] = self._reduced(relation, message_func, reduce_func)
        if apply_node_func is not None:
            self.apply_nodes(apply_node_func, relation[2])

    def multi_update_all(self, etype_dict: Mapping[Any, tuple], cross_reducer: str = "sum") -> None:
        """``update_all`` of several relations; what reaches a type of nodes from several is reduced again."""
        if cross_reducer not in _CROSS:
            raise ValueError(
                f"DGLGraph: cross_reducer: expected one of {list(_CROSS)}, got {cross_reducer!r}"
            )
        found: dict[tuple[str, str], list[Tensor]] = {}
        for etype, (message, reducer, *_) in etype_dict.items():
            relation = self.to_canonical_etype(etype)
            out = self._reduced(relation, message, reducer)
            found.setdefault((relation[2], reducer.out), []).append(out)
        for (kind, name), parts in found.items():
            self._nodes[kind][name] = _CROSS[cross_reducer](parts)

    def apply_nodes(self, func: Callable[[_NodeBatch], dict], ntype: str | None = None) -> None:
        frame = self._nodes[self._kind(ntype)]
        frame.update(func(_NodeBatch(frame)))

    def _frame(self, relation: Relation, end: str) -> dict[str, Tensor]:
        if end == "e":
            return self._edges[relation]
        return self._nodes[relation[0 if end == "u" else 2]]

    def _on_edges(self, relation: Relation, message: Message) -> Tensor:
        graph, x = self.graphs[relation], self._frame(relation, message.lhs)[message.lhs_field]
        if message.rhs is None or message.rhs_field is None:
            return x if message.lhs == "e" else ops.gsddmm(graph, "copy_lhs", x, None, message.lhs)
        y = self._frame(relation, message.rhs)[message.rhs_field]
        return ops.gsddmm(graph, message.op, x, y, message.lhs, message.rhs)

    def _reduced(self, relation: Relation, message: Any, reducer: Any) -> Tensor:
        if not isinstance(reducer, Reduce):
            raise NotImplementedError(
                "DGLGraph: reduce function: expected sum, mean, max or min of dfgnn.compat.function, "
                f"got {type(reducer).__name__}"
            )
        graph, x, y, op = self.graphs[relation], None, None, "copy_rhs"
        if not isinstance(message, Message):
            y = message(_EdgeBatch(self, relation))[reducer.message]
        elif (message.lhs, message.rhs) == ("u", None):
            x, op = self._frame(relation, "u")[message.lhs_field], "copy_lhs"
        elif (message.lhs, message.rhs) == ("u", "e") and message.op in ops.BINARY:
            x, op = self._frame(relation, "u")[message.lhs_field], message.op
            y = self._edges[relation][str(message.rhs_field)]
        elif (message.lhs, message.rhs, message.op) == ("e", "u", "mul"):
            x, op = self._frame(relation, "u")[str(message.rhs_field)], "mul"
            y = self._edges[relation][message.lhs_field]
        else:
            y = self._on_edges(relation, message)
        out = ops.gspmm(graph, op, reducer.op, x, y)
        if reducer.op in ("max", "min"):  # DGL's update_all gives 0 to nodes without edges
            empty = (graph.in_degrees() == 0).view(-1, *[1] * (out.dim() - 1))
            out = out.masked_fill(empty, 0)
        return out


class _Nodes:
    """``g.nodes()``, ``g.nodes("paper")`` and ``g.nodes["paper"].data``."""

    def __init__(self, graph: DGLGraph):
        self._graph = graph

    def __call__(self, ntype: str | None = None) -> Tensor:
        kind = self._graph._kind(ntype)
        return torch.arange(self._graph._sizes[kind], device=self._graph.device)

    def __getitem__(self, ntype: str) -> _NodeBatch:
        return _NodeBatch(self._graph._nodes[self._graph._kind(ntype)])


class _Edges:
    """``g.edges()``, ``g.edges(etype="cites")`` and ``g.edges["cites"].data``."""

    def __init__(self, graph: DGLGraph):
        self._graph = graph

    def __call__(self, form: str = "uv", order: str = "eid", etype=None) -> tuple[Tensor, ...]:
        src, dst = self._graph.graphs[self._graph.to_canonical_etype(etype)].edge_index
        eid = torch.arange(len(src), device=src.device)
        return {"uv": (src, dst), "eid": (eid,), "all": (src, dst, eid)}[form]

    def __getitem__(self, etype: str | Relation) -> _NodeBatch:
        return _NodeBatch(self._graph._edges[self._graph.to_canonical_etype(etype)])


class _NodeBatch:
    def __init__(self, frame: dict[str, Tensor]):
        self.data = frame


class _Rows(Mapping):
    """The features of edges' ends, gathered when they are asked for."""

    def __init__(self, graph: Graph, frame: dict[str, Tensor], end: str):
        self._graph, self._frame, self._end = graph, frame, end

    def __getitem__(self, name: str) -> Tensor:
        return ops.gsddmm(self._graph, "copy_lhs", self._frame[name], None, self._end)

    def __iter__(self):
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


class _EdgeBatch:
    """What a message function written in Python gets: all edges of a relation."""

    def __init__(self, graph: DGLGraph, relation: Relation):
        fused = graph.graphs[relation]
        self.src = _Rows(fused, graph._frame(relation, "u"), "u")
        self.dst = _Rows(fused, graph._frame(relation, "v"), "v")
        self.data = graph._edges[relation]

    def batch_size(self) -> int:
        return len(next(iter(self.src.values())))


# ---- making graphs ----------------------------------------------------------------------------------------


def _homogeneous(fused: Graph, nodes=None, edges=None) -> DGLGraph:
    frames = {"_N": dict(nodes or {})}, {_HOMOGENEOUS: dict(edges or {})}
    return DGLGraph({_HOMOGENEOUS: fused}, {"_N": fused.num_nodes}, frames)


def graph(
    data: tuple[Any, Any], *, num_nodes: int | None = None, idtype: Any = None, device: Any = None
) -> DGLGraph:
    """From (sources, destinations), tensors or lists; idtype is not needed: indices are int32 inside."""
    src, dst = (torch.as_tensor(x, device=device) for x in data)
    return _homogeneous(Graph.from_coo(src, dst, num_nodes=num_nodes))


def heterograph(
    data_dict: Mapping[Relation, tuple],
    num_nodes_dict: Mapping[str, int] | None = None,
    idtype: Any = None,
    device: Any = None,
) -> DGLGraph:
    """From (sources, destinations) by (type of sources, name, type of destinations)."""
    # DGL orders types by name.
    ends: dict[Relation, tuple[Tensor, Tensor]] = {}
    for relation in sorted(data_dict):
        src, dst = (torch.as_tensor(x, device=device) for x in data_dict[relation])
        ends[relation] = src, dst
    graphs = graphs_of(ends, num_nodes_dict)
    sizes = dict(num_nodes_dict or {})
    for relation, found in graphs.items():
        sizes |= {relation[0]: found.num_src, relation[2]: found.num_dst}
    return DGLGraph(graphs, {kind: sizes[kind] for kind in sorted(sizes)})


def from_scipy(sp_mat: Any, device: Any = "cpu") -> DGLGraph:
    """From a square matrix[source, destination]."""
    return _homogeneous(Graph.from_scipy(sp_mat).to(device))


def to_homogeneous(g: DGLGraph, ndata: list[str] | None = None) -> DGLGraph:
    """All nodes and edges as one graph; features ``_TYPE`` say which type each had, ``_ID`` which number."""
    found = as_one(g.graphs)
    sizes = [g.num_nodes(kind) for kind in found.node_types]
    numbers = torch.cat([torch.arange(size, device=g.device) for size in sizes])
    nodes = {"_TYPE": found.ntype, "_ID": numbers}
    for name in ndata or []:
        nodes[name] = torch.cat([g.nodes[kind].data[name] for kind in found.node_types])
    counts = [graph.num_edges for graph in g.graphs.values()]
    edge_numbers = torch.cat([torch.arange(count, device=g.device) for count in counts])
    return _homogeneous(found.graph, nodes, {"_TYPE": found.etype, "_ID": edge_numbers})


def add_self_loop(g: DGLGraph, *, fill_data: float = 1.0) -> DGLGraph:
    """A loop for every node, behind the other edges; fill_data: the features of these loops."""
    n = g.num_nodes()
    edges = {k: torch.cat([x, x.new_full((n, *x.shape[1:]), fill_data)]) for k, x in g.edata.items()}
    return _homogeneous(g.fused.add_self_loops(), g.ndata, edges)


def remove_self_loop(g: DGLGraph) -> DGLGraph:
    src, dst = g.edges()
    return _kept(g, src != dst)


def _kept(g: DGLGraph, keep: Tensor) -> DGLGraph:
    fused = Graph.from_edge_index(g.fused.edge_index[:, keep], g.num_nodes())
    return _homogeneous(fused, g.ndata, {k: x[keep] for k, x in g.edata.items()})


def reverse(g: DGLGraph, copy_ndata: bool = True, copy_edata: bool = False) -> DGLGraph:
    return _homogeneous(g.fused.reverse(), g.ndata if copy_ndata else None, g.edata if copy_edata else None)


def add_reverse_edges(g: DGLGraph, copy_ndata: bool = True, copy_edata: bool = False) -> DGLGraph:
    """Every edge also the other way round, behind the others."""
    both = torch.cat([g.fused.edge_index, g.fused.edge_index.flip(0)], 1)
    edges = {k: torch.cat([x, x]) for k, x in g.edata.items()} if copy_edata else None
    return _homogeneous(Graph.from_edge_index(both, g.num_nodes()), g.ndata if copy_ndata else None, edges)


def to_bidirected(g: DGLGraph, copy_ndata: bool = False) -> DGLGraph:
    """Both directions of every edge, each once."""
    n = g.num_nodes()
    src, dst = g.fused.edge_index
    keys = torch.cat([src * n + dst, dst * n + src]).unique()
    fused = Graph.from_coo(keys // n, keys % n, num_nodes=n)
    return _homogeneous(fused, g.ndata if copy_ndata else None)


def batch(graphs: list[DGLGraph]) -> DGLGraph:
    """Graphs side by side; features that all of them have are joined."""
    parts = ([g.ndata for g in graphs], [g.edata for g in graphs])
    joined = [
        {k: torch.cat([frame[k] for frame in frames]) for k in frames[0] if all(k in f for f in frames)}
        for frames in parts
    ]
    whole = _homogeneous(Graph.batch([g.fused for g in graphs]), *joined)
    sizes = [[g.num_nodes() for g in graphs], [g.num_edges() for g in graphs]]
    numbers, edges = (torch.tensor(x, device=whole.device) for x in sizes)
    whole.batch_num_nodes, whole.batch_num_edges = lambda: numbers, lambda: edges  # type: ignore[attr-defined]
    whole.batch_size = len(graphs)  # type: ignore[attr-defined]
    return whole
