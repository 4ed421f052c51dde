"""Message passing: computes messages on edges and reduces them at their destinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from ..nn import DGLError
from ..ops import BINARY, gsddmm, gspmm
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


def on_edges(g: Any, relation: Any, message: Message) -> Tensor:
    """The messages of a built-in message function, ``[E, ...]``."""
    graph, x = g.graphs[relation], g._frame(relation, message.lhs)[message.lhs_field]
    if message.rhs is None or message.rhs_field is None:
        return x if message.lhs == "e" else gsddmm(graph, "copy_lhs", x, None, message.lhs)
    y = g._frame(relation, message.rhs)[message.rhs_field]
    return gsddmm(graph, message.op, x, y, message.lhs, message.rhs)


def reduced(g: Any, relation: Any, message: Any, reducer: Any) -> dict[str, Tensor]:
    """Features of the destinations: the reduced messages of their edges."""
    if not isinstance(reducer, Reduce):
        if not callable(reducer):
            raise DGLError(f"DGLGraph: reduce function: expected a function, got {type(reducer).__name__}")
        return _by_degree(g, relation, message, reducer)
    graph, x, y, op = g.graphs[relation], None, None, "copy_rhs"
    if not isinstance(message, Message):
        y = message(EdgeBatch(g, relation))[reducer.message]
    elif (message.lhs, message.rhs) == ("u", None):
        x, op = g._frame(relation, "u")[message.lhs_field], "copy_lhs"
    elif (message.lhs, message.rhs) == ("u", "e") and message.op in BINARY:
        x, op = g._frame(relation, "u")[message.lhs_field], message.op
        y = g._edges[relation][str(message.rhs_field)]
    elif (message.lhs, message.rhs, message.op) == ("e", "u", "mul"):
        x, op = g._frame(relation, "u")[str(message.rhs_field)], "mul"
        y = g._edges[relation][message.lhs_field]
    else:
        y = on_edges(g, relation, message)
    out = gspmm(graph, op, reducer.op, x, y)
    if reducer.op in ("max", "min"):  # in DGL's update_all, nodes without edges get 0
        empty = (graph.in_degrees() == 0).view(-1, *[1] * (out.dim() - 1))
        out = out.masked_fill(empty, 0)
    return {reducer.out: out}


def _by_degree(
    g: Any, relation: Any, message: Any, reducer: Callable[[NodeBatch], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Reduces by a Python function, which is called once per in-degree, for all destinations with it, as in
    DGL. Destinations without edges get 0."""
    if isinstance(message, Message):
        messages: Mapping[str, Tensor] = {message.out: on_edges(g, relation, message)}
    else:
        messages = message(EdgeBatch(g, relation))
    csr, frame = g.graphs[relation].csr(), g._frame(relation, "v")
    begin, degrees = csr.indptr[:-1].long(), csr.indptr.diff()
    found: dict[str, Tensor] = {}
    for degree in degrees.unique().tolist():
        if degree == 0:
            continue
        rows = (degrees == degree).nonzero().squeeze(1)
        places = begin[rows].unsqueeze(1) + torch.arange(degree, device=rows.device)
        edges = places if csr.eids is None else csr.eids[places]
        mailbox = {name: x[edges] for name, x in messages.items()}
        for name, x in reducer(NodeBatch(frame, rows, mailbox)).items():
            if len(x) != len(rows):
                raise DGLError(
                    f"DGLGraph: reduce function: expected {len(rows)} rows of {name!r}, got {len(x)}"
                )
            before = found.get(name, x.new_zeros(frame.rows, *x.shape[1:]))
            found[name] = before.index_copy(0, rows, x)
    return found


def reduced_by_relations(g: Any, functions: Mapping[Any, tuple], cross: Any) -> dict[Any, Any]:
    """For each type of destinations and each feature: the results of its relations, reduced by ``cross``."""
    if not callable(cross) and cross not in CROSS:
        raise ValueError(f"DGLGraph: cross_reducer: expected one of {list(CROSS)}, got {cross!r}")
    found: dict[tuple[str, str], list[Tensor]] = {}
    for etype, (message, reducer, *_) in functions.items():
        relation = g._relation(etype)
        for name, x in reduced(g, relation, message, reducer).items():
            found.setdefault((relation[2], name), []).append(x)
    if callable(cross):
        raise DGLError("DGLGraph: cross_reducer: expected the name of a reduction, got a function")
    return {place: CROSS[cross](parts) for place, parts in found.items()}


def apply_to_edges(g: Any, relation: Any, func: Any, eids: Tensor | None) -> None:
    frame: Frame = g._edges[relation]
    if isinstance(func, Message):
        found: Mapping[str, Tensor] = {func.out: on_edges(g, relation, func)}
        if eids is not None:
            found = {name: x[eids] for name, x in found.items()}
    else:
        found = func(EdgeBatch(g, relation, eids))
    put(frame, found, eids)


def put(frame: Frame, found: Mapping[str, Tensor], which: Tensor | None) -> None:
    """Set features, or the rows ``which`` of them; other rows of a new feature are 0."""
    for name, x in found.items():
        if which is not None:
            before = frame.get(name, x.new_zeros(frame.rows, *x.shape[1:]))
            x = before.index_copy(0, which, x)
        frame[name] = x
