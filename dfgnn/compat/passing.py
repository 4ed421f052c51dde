"""Message passing: computes messages on edges and reduces them at their destinations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from ..functional.ops import BINARY, gsddmm, gspmm
from ..graph import Graph
from ..nn.dgl import DGLError
from .base import ALL, is_all
from .frames import EdgeBatch, Frame, NodeBatch
from .function import Message, Reduce

# Name of a reduction -> a function that reduces the results of several relations for one type of nodes.
CROSS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda x: fold(torch.add, x),
    "mean": lambda x: torch.stack(x).mean(0),
    "max": lambda x: torch.stack(x).amax(0),
    "min": lambda x: torch.stack(x).amin(0),
    "stack": lambda x: torch.stack(x, 1),
}


def on_edges(g: Any, message: Message) -> Tensor:
    """The messages of a built-in message function on a graph of one relation, ``[E, ...]``."""
    data, graph = {"u": g.srcdata, "v": g.dstdata, "e": g.edata}, g.dfgnn_graph
    x = data[message.lhs][message.lhs_field]
    if message.rhs is None:
        return x if message.lhs == "e" else gsddmm(graph, "copy_lhs", x, None, message.lhs)
    return gsddmm(graph, message.op, x, data[message.rhs][str(message.rhs_field)], message.lhs, message.rhs)


def messages(g: Any, message: Any) -> Mapping[str, Tensor]:
    """The messages of a built-in or a Python message function."""
    if isinstance(message, Message):
        return {message.out: on_edges(g, message)}
    if not callable(message):
        raise DGLError(f"DGLGraph: message function: expected a function, got {type(message).__name__}")
    eids = g.edata["_ID"] if "_ID" in g.edata else g.edges(form="eid")
    return message(edge_batch(g, eids, g._edge_frames[0], g.dfgnn_graph))


def edge_batch(g: Any, eids: Tensor, data: Frame, graph: Graph) -> EdgeBatch:
    """graph: has the edges of the batch. Features of nodes are gathered by our kernels when they are read."""
    begin, end = g._ends[0]
    src, dst = (
        g._node_frames[place].part(
            graph.edge_index[k], lambda x, end=name: gsddmm(graph, "copy_lhs", x, None, end)
        )
        for k, (place, name) in enumerate(((begin, "u"), (end, "v")))
    )
    return EdgeBatch(g, eids, g.canonical_etypes[0], src, data, dst)


def reduced(g: Any, message: Any, reducer: Any) -> dict[str, Tensor]:
    """Features of the destinations of a relation: the reduced messages of their edges. Of "max" and "min" a
    node without edges has an infinity; or 0 if there are no edges at all, as in DGL."""
    if not isinstance(reducer, Reduce):
        if not callable(reducer):
            raise DGLError(f"DGLGraph: reduce function: expected a function, got {type(reducer).__name__}")
        return by_degree(g, messages(g, message), reducer)
    graph, x, y, op = g.dfgnn_graph, None, None, "copy_rhs"
    if not isinstance(message, Message):
        y = messages(g, message)[reducer.message]
    elif message.out != reducer.message:
        raise DGLError(
            f"DGLGraph: reduce function: expected the messages {message.out!r} of the message function, "
            f"got {reducer.message!r}"
        )
    elif (message.lhs, message.rhs) == ("u", None):
        x, op = g.srcdata[message.lhs_field], "copy_lhs"
    elif (message.lhs, message.rhs) == ("u", "e") and message.op in BINARY:
        x, y, op = g.srcdata[message.lhs_field], g.edata[str(message.rhs_field)], message.op
    elif (message.lhs, message.rhs, message.op) == ("e", "u", "mul"):
        x, y, op = g.srcdata[str(message.rhs_field)], g.edata[message.lhs_field], "mul"
    else:
        y = on_edges(g, message)
    out = gspmm(graph, op, reducer.op, x, y)
    return {reducer.out: out if graph.num_edges else torch.zeros_like(out)}


def by_degree(
    g: Any, found: Mapping[str, Tensor], reducer: Callable[[NodeBatch], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Reduces by a Python function, which is called once per in-degree, for all destinations with it, as in
    DGL. A node's messages are in the order of the edges' ids; destinations without edges get 0."""
    csr, place = g.dfgnn_graph.csr(), g._ends[0][1]
    frame, kind = g._node_frames[place], g._ntypes[place]
    numbers = frame["_ID"] if "_ID" in frame else g.dstnodes()
    begin, degrees = csr.indptr[:-1].long(), csr.indptr.diff()
    out = Frame(frame.rows)
    for degree in degrees.unique().tolist():
        if degree == 0:
            continue
        rows = (degrees == degree).nonzero().squeeze(1)
        places = begin[rows].unsqueeze(1) + torch.arange(degree, device=rows.device)
        edges = (places if csr.eids is None else csr.eids.long()[places].sort(1).values).flatten()
        mailbox = {name: x[edges].view(len(rows), degree, *x.shape[1:]) for name, x in found.items()}
        out.put(rows, reducer(NodeBatch(numbers[rows], kind, frame.part(rows), mailbox)))
    return dict(out)


def passed(
    g: Any, message: Any, reducer: Any, apply: Any = None, rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Results of message passing over a graph of one relation, for its destinations or the ``rows`` of
    them; apply: a function of nodes, which reads the new features and whose results take their place."""
    found = reduced(g, message, reducer)
    place = g._ends[0][1]
    frame, nodes = g._node_frames[place], g.dstnodes()
    if rows is not None:
        found = {name: x[rows] for name, x in found.items()}
        frame, nodes = frame.part(rows), rows
    if apply is None:
        return found
    return apply(NodeBatch(nodes, g._ntypes[place], {**frame, **found}))


def without_infinities(found: Mapping[str, Tensor], reducer: Any) -> dict[str, Tensor]:
    """Replaces the infinities of nodes without messages by 0, which is their maximum and minimum in DGL."""
    if not isinstance(reducer, Reduce) or reducer.op not in ("max", "min"):
        return dict(found)
    return {name: x.masked_fill(x.isinf(), 0) for name, x in found.items()}


class Passing:
    """The part of `DGLGraph` that applies functions to nodes and edges, and passes messages."""

    def apply_nodes(self: Any, func: Any, v: Any = ALL, ntype: str | None = None) -> None:
        """Set features of the nodes, or of the nodes v, by a Python function of them."""
        place = self.get_ntype_id(ntype)
        frame, kind = self._node_frames[place], self._ntypes[place]
        if is_all(v):
            self._apply_at(place, func)
        else:
            v = self._ids(v, frame.rows, "apply_nodes", "v")
            frame.put(v, func(NodeBatch(v, kind, frame.part(v))))

    def apply_edges(self: Any, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        """Set features of the edges by a built-in function, or by a Python function of all edges or of those
        with these ids or (sources, destinations). A built-in function without etype applies to all
        relations."""
        if etype is None and len(self._graphs) > 1:
            if not isinstance(func, Message) or not is_all(edges):
                raise DGLError("DGLGraph.apply_edges: etype: expected one of the relations' names, got None")
            for place, x in [(k, on_edges(self._relation(k), func)) for k in range(len(self._graphs))]:
                self._edge_frames[place][func.out] = x
            return
        place = self.get_etype_id(etype)
        part, frame = self._relation(place), self._edge_frames[place]
        if is_all(edges):
            frame.update(messages(part, func))
            return
        eids = self._eids(edges, place)
        frame.put(eids, messages(part._only_edges(eids), func))

    def update_all(
        self: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        """Set features of the destinations from their edges' messages. Built-in functions reduce, without
        etype, over the edges of all relations."""
        if etype is None and len(self._graphs) > 1:
            self._update_by_all_relations(message_func, reduce_func, apply_node_func)
            return
        place = self.get_etype_id(etype)
        found = passed(self._relation(place), message_func, reduce_func, apply_node_func)
        self._node_frames[self._ends[place][1]].update(without_infinities(found, reduce_func))

    def _update_by_all_relations(
        self: Any, message_func: Any, reduce_func: Any, apply_node_func: Any
    ) -> None:
        where = "DGLGraph.update_all"
        if not isinstance(message_func, Message) or not isinstance(reduce_func, Reduce):
            raise DGLError(
                f"{where}: etype: expected one of the relations' names with Python functions, got None"
            )
        if reduce_func.op == "mean":
            raise NotImplementedError(
                f"{where}: reduce_func: expected no mean over relations; use multi_update_all"
            )
        if apply_node_func is not None:
            raise DGLError(
                f"{where}: apply_node_func: expected None over several relations; use multi_update_all"
            )
        functions = {relation: (message_func, reduce_func) for relation in self.canonical_etypes}
        self.multi_update_all(functions, reduce_func.op)

    def multi_update_all(
        self: Any, etype_dict: Mapping[Any, Any], cross_reducer: Any, apply_node_func: Any = None
    ) -> None:
        """``update_all`` for several relations; their results for one type of nodes are reduced again.

        etype_dict: relation -> (message function, reduce function), or a third function that is applied to
        the relation's result.  cross_reducer: "sum", "mean", "max", "min", "stack" in the order of
        ``canonical_etypes``, or a function of a list of tensors.
        """
        if not callable(cross_reducer) and cross_reducer not in CROSS:
            raise DGLError(f"DGLGraph: cross_reducer: expected one of {list(CROSS)}, got {cross_reducer!r}")
        cross = cross_reducer if callable(cross_reducer) else CROSS[cross_reducer]
        found: dict[int, list[tuple[int, Mapping[str, Tensor]]]] = {}
        reducer = None
        for etype, functions in etype_dict.items():
            if not isinstance(functions, tuple) or len(functions) not in (2, 3):
                raise DGLError(
                    f"DGLGraph.multi_update_all: etype_dict[{etype!r}]: expected (message function, reduce "
                    f"function) or three functions, got {functions!r}"
                )
            place = self.get_etype_id(etype)
            reducer = functions[1]
            found.setdefault(self._ends[place][1], []).append(
                (place, passed(self._relation(place), *functions))
            )
        for kind, results in found.items():
            if cross_reducer == "stack":
                results.sort(key=lambda result: result[0])
            parts = [part for _, part in results]
            merged = dict(parts[0])
            if len(parts) > 1 or cross_reducer == "stack":
                names = dict.fromkeys(name for part in parts for name in part)
                merged = {name: cross([part[name] for part in parts if name in part]) for name in names}
            self._node_frames[kind].update(without_infinities(merged, reducer))
            if apply_node_func is not None:
                self._apply_at(kind, apply_node_func)

    def _apply_at(self: Any, place: int, func: Any) -> None:
        frame, kind = self._node_frames[place], self._ntypes[place]
        nodes = torch.arange(frame.rows, dtype=self.idtype, device=self.device)
        frame.update(func(NodeBatch(nodes, kind, frame)))

    def send_and_recv(
        self: Any,
        edges: Any,
        message_func: Any,
        reduce_func: Any,
        apply_node_func: Any = None,
        etype: Any = None,
    ) -> None:
        """``update_all`` over these edges, for their destinations alone."""
        place = self.get_etype_id(etype)
        eids = self._eids(edges, place)
        if len(eids):
            rows = self._uv(place)[1][eids].unique()
            self._receive(place, eids, rows, message_func, reduce_func, apply_node_func)

    def pull(
        self: Any, v: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        """``update_all`` for the nodes v alone."""
        place = self.get_etype_id(etype)
        rows = self._ids(v, self._graphs[place].num_dst, "pull", "v").unique()
        if len(rows):
            eids = self.in_edges(rows, form="eid", etype=self.canonical_etypes[place])
            self._receive(place, eids, rows, message_func, reduce_func, apply_node_func)

    def push(
        self: Any, u: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        """``update_all`` over the edges out of the nodes u, for their destinations alone."""
        eids = self.out_edges(u, form="eid", etype=etype)
        self.send_and_recv(eids, message_func, reduce_func, apply_node_func, etype)

    def _receive(
        self: Any, place: int, eids: Tensor, rows: Tensor, message: Any, reducer: Any, apply: Any
    ) -> None:
        found = passed(self._relation(place)._only_edges(eids), message, reducer, apply, rows.long())
        self._node_frames[self._ends[place][1]].put(rows, found)

    def _only_edges(self: Any, eids: Tensor) -> Any:
        """A graph of one relation with these of its edges, and all nodes."""
        src, dst = self._graphs[0].edge_index[:, eids.long()]
        graph = Graph.from_coo(src, dst, num_src=self._graphs[0].num_src, num_dst=self._graphs[0].num_dst)
        frame = self._edge_frames[0].part(eids.long())
        if "_ID" not in frame:
            frame["_ID"] = eids
        made = copy.copy(self)
        made._graphs, made._edge_frames = [graph], [frame]
        return made

    def filter_nodes(self: Any, predicate: Any, nodes: Any = ALL, ntype: str | None = None) -> Tensor:
        """The nodes, or those of ``nodes``, for which a function of a NodeBatch gives True."""
        place = self.get_ntype_id(ntype)
        frame, kind = self._node_frames[place], self._ntypes[place]
        if is_all(nodes):
            chosen = torch.arange(frame.rows, dtype=self.idtype, device=self.device)
        else:
            chosen = self._ids(nodes, frame.rows, "filter_nodes", "nodes")
            frame = frame.part(chosen)
        return chosen[predicate(NodeBatch(chosen, kind, frame)).nonzero().squeeze(1)]

    def filter_edges(self: Any, predicate: Any, edges: Any = ALL, etype: Any = None) -> Tensor:
        """The edges, or those of ``edges``, for which a function of an EdgeBatch gives True."""
        place = self.get_etype_id(etype)
        part = self._relation(place)
        if is_all(edges):
            chosen = part.edges(form="eid")
        else:
            chosen = self._eids(edges, place)
            part = part._only_edges(chosen)
        batch = edge_batch(part, chosen, part._edge_frames[0], part.dfgnn_graph)
        return chosen[predicate(batch).nonzero().squeeze(1)]
