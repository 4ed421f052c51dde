"""Normal forms of gathers, segment sums and segment maxima, whatever they were written as."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from . import calls
from .operations import arguments, name, same, shape, storage, value


class Index(NamedTuple):
    """A one-dimensional index of nodes, one per edge."""

    key: Hashable  # equal for equal values
    node: Node  # [E]
    tensor: Node  # the node itself, or the tensor [2, E] of which it is a row
    row: int | None


class Gather(NamedTuple):
    """Rows of nodes, for every edge: source.index_select(source_dim, index), its edges along dim."""

    source: Node
    dim: int
    at: Index


class Sum(NamedTuple):
    """A segment sum: base (filled with `fill`) plus, in each segment, the sum of src over its edges (dim)."""

    node: Node
    src: Node
    dim: int
    at: Index
    base: Node
    fill: float | None  # what fills base; None: another tensor


class Forms:
    """Normal forms of the nodes of one graph. written: the storages that are written to in place; what reads
    them has none."""

    def __init__(self, written: set[Any] = frozenset()):  # type: ignore[assignment]
        self._written = written
        self._keys: dict[Node, Hashable] = {}

    def is_written(self, node: Any) -> bool:
        return isinstance(node, Node) and storage(node) in self._written

    # ---- equality ----------------------------------------------------------------------------------------

    def key(self, x: Any) -> Hashable:
        """Equal keys: equal values. Nodes of unknown operations equal themselves alone."""
        if isinstance(x, (tuple, list)):
            return tuple(map(self.key, x))
        if isinstance(x, slice):
            return "slice", self.key(x.start), self.key(x.stop), self.key(x.step)
        if not isinstance(x, Node):
            return type(x).__name__, x
        found = self._keys.get(x)
        if found is None:
            found = self._keys[x] = self._key(x)
        return found

    def _key(self, node: Node) -> Hashable:
        if self.is_written(node):
            return "node", node
        found = self._row(node)
        if found is not None:
            return "row", self.key(found[0]), found[1]
        called, given = name(node), arguments(node)
        if not given or called == "dropout" or called not in _PURE:
            return "node", node
        return called, tuple(sorted((word, self.key(x)) for word, x in given.items()))

    def _row(self, node: Any) -> tuple[Node, int] | None:
        """(tensor, k) if the node is tensor[k]."""
        called, given = name(node), arguments(node) if isinstance(node, Node) else {}
        if called == "select" and given.get("dim") == 0:
            tensor, k = given["input"], given.get("index")
        elif called == "getitem":
            tensor, k = given["input"], given["index"]
            if name(tensor) == "unbind" and arguments(tensor).get("dim", 0) == 0:
                tensor = arguments(tensor)["input"]
            elif isinstance(k, tuple) and len(k) == 2 and k[1] == slice(None):
                k = k[0]
        else:
            return None
        if not isinstance(k, int) or isinstance(k, bool) or not isinstance(value(tensor), Tensor):
            return None
        count = shape(tensor)[0] if shape(tensor) else 0
        return (tensor, k + count if k < 0 else k) if isinstance(count, int) else None

    # ---- indices -----------------------------------------------------------------------------------------

    def index(self, node: Any, dim: int = 0) -> Index | None:
        """The index of a tensor of integers whose values differ along one dimension alone."""
        if not isinstance(value(node), Tensor) or value(node).dtype not in (torch.int64, torch.int32):
            return None
        base, place = self._spread(node)
        if base is None or place != dim or self.is_written(base) or value(base).dtype.is_floating_point:
            return None
        if value(base).dtype not in (torch.int64, torch.int32):
            return None
        row = self._row(base)
        if row is not None and len(shape(row[0])) == 2:
            return Index(self.key(base), base, *row)
        return Index(self.key(base), base, base, None)

    def _spread(self, node: Any) -> tuple[Node | None, int]:
        """(the one-dimensional tensor, the dimension along which its values lie) for views of it."""
        found = self._view_of_index(node)
        if found is not None:
            return found
        return (node, 0) if len(shape(node)) == 1 and not self.is_written(node) else (None, 0)

    def _view_of_index(self, node: Any) -> tuple[Node, int] | None:
        called, given = name(node), arguments(node) if isinstance(node, Node) else {}
        inner, out = given.get("input"), shape(node)
        if called not in _SPREADS or not isinstance(value(inner), Tensor) or not shape(inner):
            return None
        if value(inner).dtype not in (torch.int64, torch.int32):
            return None
        base, place = self._spread(inner)
        if base is None:
            return None
        count = shape(base)[0]
        if called in ("to", "long", "int", "type", "contiguous", "clone"):
            return (base, place) if len(shape(inner)) == len(out) else None
        if called in ("expand", "expand_as", "repeat"):
            place += len(out) - len(shape(inner))
            return (base, place) if same(out[place], count) else None
        if called in ("transpose", "t"):
            order = order_of(called, given, len(out))
            return None if order is None else (base, order.index(place))
        # Views in which all other dimensions are 1, before and behind.
        places = [k for k, size in enumerate(out) if same(size, count)]
        if len(places) != 1 or not _ones_but(shape(inner), place) or not _ones_but(out, places[0]):
            return None
        return (base, places[0]) if called != "getitem" or adds_dimensions(given["index"]) else None

    # ---- gathers and sums --------------------------------------------------------------------------------

    def gather(self, node: Any) -> Gather | None:
        called, given = name(node), arguments(node) if isinstance(node, Node) else {}
        source: Any
        index: Any
        source, dim, index = given.get("input"), given.get("dim", 0), given.get("index")
        if called == "embedding":
            plain = all(given.get(word) in (None, False) for word in ("padding_idx", "max_norm", "sparse"))
            source, index = (
                (given.get("weight"), given.get("input")) if plain and "more" not in given else (None,) * 2
            )
        elif called == "getitem":
            dim, index = _indexed(source, index)
        elif called == "take_along_dim":
            called, index = "gather", given.get("indices")
        elif called not in ("index_select", "gather"):
            return None
        if not isinstance(dim, int) or not isinstance(value(source), Tensor) or self.is_written(source):
            return None
        if not shape(source) or not value(source).is_floating_point():
            return None
        dim %= len(shape(source))
        found = self.index(index, dim if called == "gather" else 0)
        if found is None or len(shape(node)) != len(shape(source)):
            return None
        if called == "gather" and not _alike_but(shape(node), shape(source), dim):
            return None
        return Gather(source, dim, found)

    def sum(self, node: Any) -> Sum | None:
        """The segment sum that a node is."""
        called, given = name(node), arguments(node) if isinstance(node, Node) else {}
        if isinstance(node, Node) and self.is_written(node):
            return None
        base: Any
        index: Any
        src: Any
        base, dim, index = given.get("input"), given.get("dim", 0), given.get("index")
        if called == "scatter_add":
            src = given.get("src")
        elif called == "scatter_reduce":
            src = given.get("src") if given.get("reduce") == "sum" else None
        elif called == "index_add":
            src = given.get("source") if given.get("alpha", 1) == 1 and "more" not in given else None
        elif called == "index_put" and given.get("accumulate") is True:
            indices = given.get("indices")
            one = isinstance(indices, (tuple, list)) and len(indices) == 1
            index, src, dim = (given["indices"][0] if one else None), given.get("values"), 0
        else:
            return None
        found = self._segments(called, base, dim, index, src)
        if found is None:
            return None
        dim, place = found
        fill = filled_with(base)
        if called == "scatter_reduce" and given.get("include_self", True) is False and fill != 0:
            return None
        return Sum(node, src, dim, place, base, fill)  # type: ignore[arg-type]

    def _segments(self, called: str, base: Any, dim: Any, index: Any, src: Any) -> tuple[int, Index] | None:
        if (
            not isinstance(value(src), Tensor)
            or not isinstance(value(base), Tensor)
            or not isinstance(dim, int)
        ):
            return None
        if not shape(base) or len(shape(src)) != len(shape(base)) or self.is_written(src):
            return None
        if value(src).dtype != value(base).dtype or not value(src).is_floating_point():
            return None
        dim %= len(shape(base))
        full = called in ("scatter_add", "scatter_reduce")
        found = self.index(index, dim if full else 0)
        if found is None or not _alike_but(shape(src), shape(base), dim):
            return None
        if not same(shape(src)[dim], shape(found.node)[0]):
            return None
        if full and not all(map(same, shape(index), shape(src))):
            return None
        return dim, found

    def maximum(self, node: Any) -> tuple[Node, int, Index] | None:
        """(src, dim, index) if a node is the segment maximum of src, whatever it is without edges."""
        called, given = name(node), arguments(node) if isinstance(node, Node) else {}
        if isinstance(node, Node) and self.is_written(node):
            return None
        if called not in ("scatter_reduce", "index_reduce") or given.get("reduce") != "amax":
            return None
        base, src = given.get("input"), given.get("src", given.get("source"))
        if given.get("include_self", True) is not False and not _is_lowest(base):
            return None
        found = self._segments(called, base, given.get("dim", 0), given.get("index"), src)
        return None if found is None else (src, *found)  # type: ignore[return-value]

    # ---- segments that offsets give ----------------------------------------------------------------------

    def without_offsets(self, graph: Graph) -> bool:
        """Where offsets give segments, gathers (``repeat_interleave`` of their differences) and sums
        (``segment_reduce``) become those by an index. Says whether there are any."""
        made: dict[Hashable, Node] = {}
        for node in list(graph.nodes):
            called, given = name(node), arguments(node)
            x: Any
            x, count = given.get("input"), given.get("output_size")
            if called == "segment_reduce":
                offsets, dim, reduce = given.get("offsets"), given.get("axis", 0), given.get("reduce")
                initial = (None, 0) if reduce == "sum" else (None,)
                fits = reduce in ("sum", "amax", "max") and dim == 0 and given.get("initial") in initial
                fits = fits and all(isinstance(size, int) for size in shape(node)[1:])
            elif called == "repeat_interleave":
                offsets, dim, fits = self._offsets(given.get("repeats")), given.get("dim"), count is not None
            else:
                continue
            offsets = _flat(offsets)
            if not fits or not isinstance(dim, int) or len(shape(offsets)) != 1 or self.is_written(offsets):
                continue
            with graph.inserting_before(node):
                key = self.key(offsets)
                if key not in made:
                    rows = shape(x)[0] if count is None else value(count)
                    count = _size_of(graph, x, 0) if count is None else count
                    made[key] = graph.call_function(calls.segments, (offsets, count))
                    made[key].meta = {"example_value": value(offsets).new_empty((rows,), dtype=torch.int64)}
                if called == "repeat_interleave":
                    new = graph.call_method("index_select", (x, dim, made[key]))
                else:
                    like, fill = value(node), 0.0 if reduce == "sum" else -math.inf
                    sizes = _size_of(graph, offsets, 0, 1), *shape(node)[1:]
                    kwargs = dict(dtype=like.dtype, device=like.device)
                    base = graph.call_function(torch.full, (sizes, fill), kwargs)
                    base.meta = {"example_value": like}
                    called, how = ("index_add", ()) if reduce == "sum" else ("index_reduce", ("amax",))
                    new = graph.call_method(called, (base, 0, made[key], x, *how))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
        return bool(made)

    def _offsets(self, counts: Any) -> Any:
        """The offsets whose differences are these counts."""
        given = arguments(counts) if isinstance(counts, Node) else {}
        if name(counts) == "diff" and set(given) == {"input"}:
            return given["input"]
        ends = [
            arguments(given[word]) if isinstance(given.get(word), Node) else {} for word in ("input", "other")
        ]
        found = [x.get("input") for x in ends]
        cuts = slice(1, None), slice(None, -1)
        fits = name(counts) == "sub" and tuple(x.get("index") for x in ends) == cuts
        return found[0] if fits and self.key(found[0]) == self.key(found[1]) else None


# ---- facts about single nodes -----------------------------------------------------------------------------

_PURE = {
    "getitem", "select", "unbind", "reshape", "unsqueeze", "squeeze", "transpose", "t", "permute", "movedim",
    "flatten", "unflatten", "expand", "expand_as", "view_as", "contiguous", "clone", "detach", "long", "int",
    "add", "sub", "mul", "div", "exp", "neg", "index_select", "gather", "to", "float", "leaky_relu",
}  # fmt: skip
_SPREADS = {
    "expand", "expand_as", "repeat", "transpose", "t", "unsqueeze", "getitem", "reshape", "view_as",
    "squeeze", "flatten", "to", "long", "int", "type", "contiguous", "clone",
}  # fmt: skip


def _flat(node: Any) -> Any:
    """A tensor of one dimension without views of it as such."""
    while name(node) == "reshape" and len(shape(node)) == 1 and len(shape(arguments(node)["input"])) == 1:
        node = arguments(node)["input"]
    return node


def _size_of(graph: Graph, x: Node, dim: int, less: int = 0) -> Any:
    """A size, minus a number, as an argument of a call."""
    size = shape(x)[dim]
    if isinstance(size, int):
        return size - less
    made = graph.call_method("size", (x, dim))
    made.meta = {"example_value": size}
    if less:
        made = graph.call_function(operator.sub, (made, less))
        made.meta = {"example_value": size - less}
    return made


def _ones_but(sizes: tuple, place: int) -> bool:
    return all(same(size, 1) for k, size in enumerate(sizes) if k != place)


def _alike_but(a: tuple, b: tuple, dim: int) -> bool:
    return len(a) == len(b) and all(same(x, y) for k, (x, y) in enumerate(zip(a, b)) if k != dim)


def adds_dimensions(index: Any) -> bool:
    """Whether an index consists of None, ... and whole slices, with None."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(p is None for p in parts) and all(
        p is None or p is Ellipsis or p == slice(None) for p in parts
    )


def _indexed(source: Any, index: Any) -> tuple[int | None, Any]:
    """(dim, index) of source[..., index, :], an index of integers in one dimension, all others whole."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [p for p in parts if isinstance(p, Node)]
    others = [p for p in parts if not isinstance(p, Node)]
    if len(tensors) != 1 or any(p is not Ellipsis and p != slice(None) for p in others):
        return None, None
    place = parts.index(tensors[0])
    if Ellipsis in parts[:place]:
        place -= len(parts)
    return place, tensors[0]


def filled_with(node: Any) -> float | None:
    """The number that fills a new tensor; None for any other."""
    called, given = name(node), arguments(node) if isinstance(node, Node) else {}
    if called in ("zeros", "new_zeros", "zeros_like"):
        return 0.0
    fill = given.get("fill_value")
    if called in ("full", "new_full", "full_like") and isinstance(fill, (int, float)):
        return float(fill)
    return None


def _is_lowest(node: Any) -> bool:
    fill = filled_with(node)
    return fill is not None and (fill == -math.inf or fill <= torch.finfo(value(node).dtype).min)


def order_of(called: str, given: dict, rank: int) -> list[int] | None:
    order = list(range(rank))
    if called == "t":
        return order[::-1]
    if called == "permute":
        dims = given["dims"]
        return [d % rank for d in dims] if all(isinstance(d, int) for d in dims) else None
    first = given.get("dim0" if called == "transpose" else "source")
    last = given.get("dim1" if called == "transpose" else "destination")
    if not isinstance(first, int) or not isinstance(last, int):
        return None
    first, last = first % rank, last % rank
    if called == "transpose":
        order[first], order[last] = last, first
    else:
        order.insert(last, order.pop(first))
    return order
