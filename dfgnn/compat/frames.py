"""Features of a DGLGraph's nodes and edges, and the views of them that users' Python functions get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..nn import DGLError
from ..ops import gsddmm


class Frame(dict):
    """Name -> tensor with a row for every node, or edge, of one type."""

    def __init__(self, rows: int, tensors: Mapping[str, Tensor] | None = None):
        super().__init__(tensors or {})
        self.rows = rows

    def __setitem__(self, name: str, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise DGLError(f"feature {name!r}: expected a tensor, got {type(x).__name__}")
        if x.dim() == 0 or len(x) != self.rows:
            raise DGLError(f"feature {name!r}: expected {self.rows} rows, one each, got {list(x.shape)}")
        super().__setitem__(name, x)

    def update(self, *others: Any, **features: Any) -> None:  # type: ignore[override]
        for name, x in dict(*others, **features).items():
            self[name] = x

    def copy(self) -> Frame:
        return Frame(self.rows, self)

    def grown(self, count: int, more: Mapping[str, Tensor] | None = None) -> Frame:
        """The frame with rows appended from ``more``, or zeros for features that ``more`` lacks."""
        grown, more = Frame(self.rows + count), dict(more or {})
        for name in dict.fromkeys((*self, *more)):
            old, new = self.get(name), more.get(name)
            like: Any = new if old is None else old
            parts = [
                like.new_zeros(rows, *like.shape[1:]) if x is None else x
                for x, rows in ((old, self.rows), (new, count))
            ]
            grown[name] = torch.cat(parts)
        return grown

    def rows_of(self, which: Tensor) -> Frame:
        count = int(which.sum()) if which.dtype == torch.bool else len(which)
        return Frame(count, {name: x[which] for name, x in self.items()})


class Frames(MutableMapping):
    """The frames of several types together: a feature is a dictionary type -> tensor."""

    def __init__(self, frames: Mapping[Any, Frame]):
        self._frames = frames

    def __getitem__(self, name: str) -> dict[Any, Tensor]:
        found = {kind: frame[name] for kind, frame in self._frames.items() if name in frame}
        if not found:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, value: Mapping[Any, Tensor]) -> None:
        if not isinstance(value, Mapping):
            raise DGLError(
                f"feature {name!r}: expected a dictionary of tensors by type, one of {list(self._frames)}, "
                f"got {type(value).__name__}"
            )
        for kind, x in value.items():
            if kind not in self._frames:
                raise DGLError(f"feature {name!r}: expected types {list(self._frames)}, got {kind!r}")
            self._frames[kind][name] = x

    def __delitem__(self, name: str) -> None:
        for kind in self[name]:
            del self._frames[kind][name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for frame in self._frames.values() for name in frame))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Data:
    """The result of ``g.nodes["paper"]``; ``.data`` are its features."""

    def __init__(self, frame: Any):
        self.data = frame


class Nodes:
    """``g.nodes()``, ``g.nodes("paper")`` and ``g.nodes["paper"].data``. kind: finds a type by its name."""

    def __init__(self, graph: Any, kind: Callable[[str | None], str]):
        self._graph, self._kind = graph, kind

    def __call__(self, ntype: str | None = None) -> Tensor:
        return torch.arange(self._graph._sizes[self._kind(ntype)], device=self._graph.device)

    def __getitem__(self, ntype: str | None) -> Data:
        return Data(self._graph._nodes[self._kind(ntype)])


class Edges:
    """Implements ``g.edges()``, ``g.edges(etype="cites")`` and ``g.edges["cites"].data``."""

    def __init__(self, graph: Any):
        self._graph = graph

    def __call__(self, form: str = "uv", order: str = "eid", etype: Any = None) -> Any:
        src, dst = self._graph.graphs[self._graph._relation(etype)].edge_index
        eid = torch.arange(len(src), device=src.device)
        if order == "srcdst":
            eid = (src * (int(dst.max()) + 1 if len(dst) else 1) + dst).argsort(stable=True)
            src, dst = src[eid], dst[eid]
        found: dict[str, Any] = {"uv": (src, dst), "eid": eid, "all": (src, dst, eid)}
        if form not in found or order not in ("eid", "srcdst"):
            raise DGLError(f"DGLGraph.edges: expected form in {list(found)} and order eid or srcdst, got "
                           f"{form!r} and {order!r}")  # fmt: skip
        return found[form]

    def __getitem__(self, etype: Any) -> Data:
        return Data(self._graph._edges[self._graph._relation(etype)])


class Rows(Mapping):
    """Features of the edges' sources or destinations, gathered when they are read."""

    def __init__(self, graph: Graph, frame: Mapping[str, Tensor], end: str):
        self._graph, self._frame, self._end = graph, frame, end

    def __getitem__(self, name: str) -> Tensor:
        x = self._frame[name]
        if x.is_floating_point():
            return gsddmm(self._graph, "copy_lhs", x, None, self._end)
        return x[self._graph.edge_index["uv".index(self._end)]]

    def __iter__(self):
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


class Selected(Mapping):
    """Some rows of features, selected when they are read."""

    def __init__(self, features: Mapping[str, Tensor], which: Tensor):
        self._features, self._which = features, which

    def __getitem__(self, name: str) -> Tensor:
        return self._features[name][self._which]

    def __iter__(self):
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)


class EdgeBatch:
    """The argument of a user's message function: the edges of a relation, or some of them."""

    def __init__(self, graph: Any, relation: Any, eids: Tensor | None = None):
        self._fused, self._eids, self.canonical_etype = graph.graphs[relation], eids, relation
        self.src = self._some(Rows(self._fused, graph._frame(relation, "u"), "u"))
        self.dst = self._some(Rows(self._fused, graph._frame(relation, "v"), "v"))
        self.data = self._some(graph._edges[relation])

    def _some(self, features: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return features if self._eids is None else Selected(features, self._eids)

    def batch_size(self) -> int:
        return self._fused.num_edges if self._eids is None else len(self._eids)

    __len__ = batch_size

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        src, dst = self._fused.edge_index
        eids = torch.arange(len(src), device=src.device) if self._eids is None else self._eids
        return src[eids], dst[eids], eids


class NodeBatch:
    """The argument of a user's function of nodes; in a reduce function ``mailbox`` holds the messages of
    their edges, ``[nodes, edges per node, ...]``."""

    def __init__(self, frame: Frame, which: Tensor | None = None, mailbox: dict[str, Tensor] | None = None):
        self._frame, self._which, self.mailbox = frame, which, mailbox
        self.data: Mapping[str, Tensor] = frame if which is None else Selected(frame, which)

    def batch_size(self) -> int:
        return self._frame.rows if self._which is None else len(self._which)

    __len__ = batch_size

    def nodes(self) -> Tensor:
        return torch.arange(self._frame.rows) if self._which is None else self._which
