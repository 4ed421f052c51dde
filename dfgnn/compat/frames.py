"""Features of the nodes or edges of one type, and the views of them that users get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn.dgl import DGLError
from .base import ALL, is_all


class Scheme(NamedTuple):
    """The shape of a row and the dtype of a feature."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Later:
    """A feature of a part of a graph, which is gathered when it is read first."""

    def __init__(self, read: Callable[[], Tensor]):
        self._read: Callable[[], Tensor] | None = read

    def get(self) -> Tensor:
        if self._read is not None:
            self._value, self._read = self._read(), None
        return self._value


class Frame(MutableMapping):
    """Name -> tensor, or `Later`, with a row for every node, or edge, of one type."""

    def __init__(self, rows: int, columns: Mapping[str, Any] | None = None):
        self.rows, self._columns = rows, dict(columns or {})

    def __getitem__(self, name: str) -> Tensor:
        x = self._columns[name] if name in self._columns else self._missing(name)
        if isinstance(x, Later):
            x = self._columns[name] = x.get()
        return x

    def _missing(self, name: str) -> Any:
        known = ", ".join(map(repr, self._columns)) or "none"
        raise KeyError(
            f"feature: expected one that was set ({known}), got {name!r}; g.ndata or g.edata sets it"
        )

    def __setitem__(self, name: str, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise DGLError(f"feature {name!r}: expected a tensor, got {type(x).__name__}")
        if x.dim() == 0 or len(x) != self.rows:
            raise DGLError(f"feature {name!r}: expected {self.rows} rows, one each, got {list(x.shape)}")
        self._columns[name] = x

    def __delitem__(self, name: str) -> None:
        del self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getstate__(self) -> tuple[int, dict[str, Tensor]]:
        return self.rows, dict(self)

    def __setstate__(self, state: tuple[int, dict[str, Tensor]]) -> None:
        self.rows, self._columns = state

    @property
    def schemes(self) -> dict[str, Scheme]:
        return {name: Scheme(tuple(x.shape[1:]), x.dtype) for name, x in self.items()}

    def copy(self) -> Frame:
        """A frame whose features can be set without changing this one's."""
        return Frame(self.rows, self._columns)

    def to(self, device: Any, **options: Any) -> Frame:
        return Frame(self.rows, {name: x.to(device, **options) for name, x in self.items()})

    def part(self, which: Tensor, gather: Callable[[Tensor], Tensor] | None = None) -> Frame:
        """The rows ``which``, gathered when they are read; gather: how to gather floating-point features."""

        def read(x: Tensor | Later) -> Tensor:
            x = x.get() if isinstance(x, Later) else x
            return gather(x) if gather is not None and x.is_floating_point() else x.index_select(0, which)

        # The tensor itself is bound, so that setting the feature here later does not change the part.
        return Frame(len(which), {name: Later(partial(read, x)) for name, x in self._columns.items()})

    def grown(self, count: int, more: Mapping[str, Any] | None = None) -> Frame:
        """The frame with rows appended from ``more``, or zeros for features that ``more`` lacks."""
        more = Frame(count, None) if more is None else _checked(count, more)
        grown = Frame(self.rows + count)
        for name in dict.fromkeys((*self, *more)):
            like = self[name] if name in self else more[name]
            parts = [
                frame[name] if name in frame else like.new_zeros(frame.rows, *like.shape[1:])
                for frame in (self, more)
            ]
            if parts[0].shape[1:] != parts[1].shape[1:] or parts[0].dtype != parts[1].dtype:
                raise DGLError(
                    f"feature {name!r}: expected rows of {list(parts[0].shape[1:])}, {parts[0].dtype}, got "
                    f"{list(parts[1].shape[1:])}, {parts[1].dtype}"
                )
            grown[name] = torch.cat(parts)
        return grown

    def put(self, which: Tensor, rows: Mapping[str, Any]) -> None:
        """Set rows of features; other rows of a new feature are 0."""
        for name, x in _checked(len(which), rows).items():
            before = self[name] if name in self else x.new_zeros(self.rows, *x.shape[1:])
            if before.shape[1:] != x.shape[1:] or before.dtype != x.dtype:
                raise DGLError(
                    f"feature {name!r}: expected rows of {list(before.shape[1:])}, {before.dtype}, got "
                    f"{list(x.shape[1:])}, {x.dtype}"
                )
            self[name] = before.index_copy(0, which.long(), x)


def _checked(rows: int, features: Mapping[str, Any]) -> Frame:
    frame = Frame(rows)
    frame.update(features)
    return frame


class Space(NamedTuple):
    """The result of ``g.nodes["paper"]``; ``.data`` are its features."""

    data: Any


class Data(MutableMapping):
    """Features of the nodes (or edges) of one type, or of several together.

    where: "nodes" or "edges".  kinds: the types' names -> their places.  which: ids, or ALL.  With several
    types a feature is a dictionary by type.
    """

    def __init__(self, graph: Any, where: str, kinds: Mapping[Any, int], several: bool, which: Any = ALL):
        self._graph, self._where, self._kinds, self._which = graph, where, kinds, which
        self._several = several

    def _frame(self, place: int) -> Frame:
        """Looked up at each use, because scopes and changes of the graph replace frames."""
        return self._graph._frames(self._where)[place]

    def _ids(self, place: int) -> Tensor:
        return self._graph._chosen(self._where, place, self._which)

    def _rows(self, place: int) -> Frame:
        return self._frame(place) if is_all(self._which) else self._frame(place).part(self._ids(place))

    def _place(self, name: str, kind: Any) -> int:
        if self._where == "edges":
            return self._graph.get_etype_id(kind)
        if kind not in self._kinds:
            raise DGLError(f"feature {name!r}: expected types {list(self._kinds)}, got {kind!r}")
        return self._kinds[kind]

    def _one(self) -> int:
        return next(iter(self._kinds.values()))

    def __getitem__(self, name: str) -> Any:
        if not self._several:
            return self._rows(self._one())[name]
        found = {}
        for kind, place in self._kinds.items():
            if name in self._frame(place):
                found[kind] = self._rows(place)[name]
        return found

    def __setitem__(self, name: str, value: Any) -> None:
        if self._several != isinstance(value, dict):
            expected = f"a dictionary by type, one of {list(self._kinds)}" if self._several else "a tensor"
            raise DGLError(f"feature {name!r}: expected {expected}, got {type(value).__name__}")
        for kind, x in value.items() if self._several else [(None, value)]:
            place = self._place(name, kind) if self._several else self._one()
            if isinstance(x, Tensor) and x.device != self._graph.device:
                raise DGLError(
                    f"feature {name!r}: expected device {self._graph.device}, the graph's (g.to moves it), "
                    f"got {x.device}"
                )
            if is_all(self._which):
                self._frame(place)[name] = x
            else:
                self._frame(place).put(self._ids(place), {name: x})

    def __delitem__(self, name: str) -> None:
        if not self._several:
            del self._frame(self._one())[name]
            return
        for place in self._kinds.values():
            if name in self._frame(place):
                del self._frame(place)[name]

    def __contains__(self, name: object) -> bool:
        return any(name in self._frame(place) for place in self._kinds.values())

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for place in self._kinds.values() for name in self._frame(place)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


class Nodes:
    """``g.nodes()``, ``g.nodes("paper")``, ``g.nodes["paper"].data`` and ``g.nodes[ids].data``.

    place: finds a type's place by its name.
    """

    def __init__(self, graph: Any, place: Callable[[str | None], int]):
        self._graph, self._place = graph, place

    def __call__(self, ntype: str | None = None) -> Tensor:
        graph = self._graph
        return torch.arange(graph._sizes[self._place(ntype)], dtype=graph.idtype, device=graph.device)

    def __getitem__(self, key: Any) -> Space:
        which, ntype = _split_key(key, isinstance(key, tuple))
        return Space(Data(self._graph, "nodes", {ntype: self._place(ntype)}, False, which))


class Edges:
    """``g.edges()``, ``g.edges(etype="cites")``, ``g.edges["cites"].data`` and ``g.edges[ids].data``."""

    def __init__(self, graph: Any):
        self._graph = graph

    def __call__(self, form: str = "uv", order: str = "eid", etype: Any = None) -> Any:
        return self._graph.all_edges(form, order, etype)

    def __getitem__(self, key: Any) -> Space:
        if isinstance(key, tuple) and len(key) == 3:
            key = ALL, key
            which, etype = key
        else:
            which, etype = _split_key(key, False)
        return Space(Data(self._graph, "edges", {etype: self._graph.get_etype_id(etype)}, False, which))


def _split_key(key: Any, pair: bool) -> tuple[Any, Any]:
    """(ids or ALL, the name of a type or None) of a key."""
    if isinstance(key, slice):
        if key != slice(None):
            raise DGLError(f"expected ids, a type or [:], got the slice {key}")
        return ALL, None
    if pair:
        which, kind = key
        return which, kind
    if key is None or isinstance(key, str):
        return ALL, key
    return key, None


class EdgeBatch:
    """The argument of a user's message function: edges of one relation with their features."""

    def __init__(self, graph: Any, eids: Tensor, etype: Any, src: Frame, data: Frame, dst: Frame):
        self._graph, self._eids, self.canonical_etype = graph, eids, etype
        self.src, self.data, self.dst = src, data, dst

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        src, dst = self._graph.find_edges(self._eids, etype=self.canonical_etype)
        return src, dst, self._eids

    def batch_size(self) -> int:
        return len(self._eids)

    __len__ = batch_size


class NodeBatch:
    """The argument of a user's function of nodes; in a reduce function ``mailbox`` holds the messages of
    their edges, ``[nodes, edges per node, ...]``."""

    def __init__(self, nodes: Tensor, ntype: str, data: Any, mailbox: Any = None):
        self._nodes, self.ntype, self.data, self.mailbox = nodes, ntype, data, mailbox

    def nodes(self) -> Tensor:
        return self._nodes

    def batch_size(self) -> int:
        return len(self._nodes)

    __len__ = batch_size
