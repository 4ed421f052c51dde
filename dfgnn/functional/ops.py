"""The operators of ``dgl.ops``, with the same names, on a :class:`dfgnn.Graph`; DGL is not needed.

An edge leads from its source u to its destination v. There are

- ``{u,v,e}_{add,sub,mul,div,dot}_{u,v,e}(graph, x, y)`` with two different letters: a row for every edge,
  from features of sources (u), destinations (v) or edges (e); ``dot`` sums over the last dimension, which
  stays as 1;
- ``copy_u(graph, x)`` and ``copy_v(graph, x)``: the source's or destination's features for every edge;
- ``u_{add,sub,mul,div}_e_{sum,mean,max,min}(graph, x, y)``, ``copy_u_{sum,...}(graph, x)`` and
  ``copy_e_{sum,...}(graph, y)``: the edges' messages, reduced over the edges into each destination;
- ``gsddmm`` and ``gspmm``, which all of these call; ``edge_softmax``; ``segment_reduce``,
  ``segment_softmax``, ``segment_mm``, ``gather_mm``.

Features are ``[rows, ...]`` with any number of dimensions, which broadcast as in NumPy; float32, float64,
float16 or bfloat16, one type in a call. Edge tensors are in the graph's order of edges. A destination
without edges gets 0 from sum and mean, -inf from max and inf from min, as with ``dgl.ops``. Of equal maxima
or minima the first has the gradient; on CUDA, and in float16 and bfloat16, they share it. (DGL 1.1.3 on a CPU
gives it to the last in float32 with AVX-512, and to the first in float64.) ``u_dot_v``, ``v_dot_u``, sums and
means of ``copy_u`` and ``u_mul_e`` make no tensor with a row of features for every edge
(:func:`dfgnn.functional.sddmm`, :func:`~dfgnn.functional.spmm`), unless it has a few thousand elements or
fewer. Sums and means of float16 and bfloat16 are computed in float32, so that no term is lost, and no mean
overflows whose sum would. All operators are
differentiable; sums are deterministic, forward and backward.

Raises TypeError and ValueError for arguments that are not as described.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine import by_index
from ..engine.argument_checks import DTYPES
from ..engine.edge_maps import rows_of_destinations, rows_of_sources, sum_of_edges
from ..graph import Graph
from ..sparse.csr import no_tensor
from . import pieces

BINARY = ("add", "sub", "mul", "div")
REDUCERS = ("sum", "mean", "max", "min")
_ENDS = {"u": "source", "v": "destination", "e": "edge"}
__all__ = ["copy_e", "copy_u", "copy_v", "edge_softmax", "gather_mm", "gsddmm", "gspmm", "segment_mm",
           "segment_reduce", "segment_softmax"]  # fmt: skip

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Tensor]: ...


def gsddmm(
    graph: Graph,
    op: str,
    lhs_data: Tensor | None,
    rhs_data: Tensor | None,
    lhs_target: str = "u",
    rhs_target: str = "v",
    *,
    _caller: str = "gsddmm",
) -> Tensor:
    """A row for every edge, ``[E, ...]``: op applied to features of its source, destination or itself.

    op: "add", "sub", "mul", "div", "dot", "copy_lhs" or "copy_rhs".  lhs_target, rhs_target: "u", "v" or "e".
    """
    graph = _fused(graph)
    if op not in (*BINARY, "dot", "copy_lhs", "copy_rhs"):
        raise ValueError(f"{_caller}: op: expected one of {', '.join((*BINARY, 'dot'))}, got {op!r}")
    for name, target in (("lhs_target", lhs_target), ("rhs_target", rhs_target)):
        if target not in _ENDS:
            raise ValueError(f"{_caller}: {name}: expected 'u', 'v' or 'e', got {target!r}")
    if op == "copy_lhs":
        _check(_caller, graph, "x", lhs_data, lhs_target)
        return _on_edges(graph, lhs_data, lhs_target)
    if op == "copy_rhs":
        _check(_caller, graph, "x", rhs_data, rhs_target)
        return _on_edges(graph, rhs_data, rhs_target)
    _check(_caller, graph, "x", lhs_data, lhs_target)
    _check(_caller, graph, "y", rhs_data, rhs_target)
    x, y = _alike(_caller, lhs_data, rhs_data)
    shape = _common_shape(x, y)
    size = math.prod(shape)
    few = _few(graph, size, x)
    if op == "dot" and {lhs_target, rhs_target} == {"u", "v"} and x.dim() > 1 and size and not few:
        rows = size // shape[-1], shape[-1]
        x, y = (z if z.shape[1:] == rows else z.expand(-1, *shape).reshape(-1, *rows) for z in (x, y))
        query, key = (x, y) if lhs_target == "v" else (y, x)
        return pieces.sddmm(graph, query, key).view(graph.num_edges, *shape[:-1], 1)
    x, y = _on_edges(graph, x, lhs_target, few), _on_edges(graph, y, rhs_target, few)
    if op == "dot":
        return (x * y).sum(-1, keepdim=True) if x.dim() > 1 else x * y
    return _BINARY[op](x, y)


def gspmm(
    graph: Graph,
    op: str,
    reduce_op: str,
    lhs_data: Tensor | None,
    rhs_data: Tensor | None,
    *,
    _caller: str = "gspmm",
) -> Tensor:
    """A row for every destination, ``[num_dst, ...]``: its edges' messages, reduced.

    op: makes a message from the source's features (lhs) and the edge's (rhs): "add", "sub", "mul", "div",
    "copy_lhs" or "copy_rhs".  reduce_op: "sum", "mean", "max" or "min".
    """
    graph = _fused(graph)
    if op not in (*BINARY, "copy_lhs", "copy_rhs"):
        names = ", ".join((*BINARY, "copy_lhs", "copy_rhs"))
        raise ValueError(f"{_caller}: op: expected one of {names}, got {op!r}")
    if reduce_op not in REDUCERS:
        raise ValueError(f"{_caller}: reduce_op: expected one of {', '.join(REDUCERS)}, got {reduce_op!r}")
    x, y = lhs_data, rhs_data
    if op != "copy_rhs":
        _check(_caller, graph, "x", x, "u")
    if op != "copy_lhs":
        _check(_caller, graph, "y", y, "e")
    if op in BINARY:
        x, y = _alike(_caller, x, y)
    if reduce_op in ("max", "min"):
        return _extreme(graph, op, x, y, reduce_op)
    if reduce_op == "sum":
        return _sum(graph, op, x, y)
    dtype = (y if op == "copy_rhs" else x).dtype  # type: ignore[union-attr]
    if dtype.itemsize == 2:  # a sum of 16 bits may be inf where the mean is not
        x, y = (None if z is None else z.float() for z in (x, y))
    out = _sum(graph, op, x, y)
    degree = graph.in_degrees().clamp(min=1).to(out.dtype)
    return (out / degree.view(-1, *[1] * (out.dim() - 1))).to(dtype)


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div
}  # fmt: skip


def _message(graph: Graph, op: str, x: Any, y: Any, few: bool = False) -> Tensor:
    if op == "copy_lhs":
        return _on_edges(graph, x, "u")
    return y if op == "copy_rhs" else _BINARY[op](_on_edges(graph, x, "u", few), y)


def _sum(graph: Graph, op: str, x: Any, y: Any) -> Tensor:
    if op == "copy_lhs":
        return _sum_sources(graph, x)
    if op == "copy_rhs":
        return sum_of_edges(graph, y)
    shape = _common_shape(x, y)
    size = math.prod(shape)
    if size == 0:
        return x.new_zeros(graph.num_dst, *shape)
    if _few(graph, size, x):
        return by_index.sums_of_edges(graph, _message(graph, op, x, y, few=True))
    if op != "mul":
        # The messages themselves: sum x - sum y would cancel where x - y is small, and 1 / y may overflow.
        return sum_of_edges(graph, _message(graph, op, x, y))
    # spmm takes a weight per edge and head. So the dimensions in which y has more than one entry become
    # heads, whose weights are y, and the other dimensions become the columns of a head.
    heads = [k for k in range(1, x.dim()) if y.shape[k] != 1]
    x = x if x.shape[1:] == shape else x.expand(-1, *shape)
    order = [0, *heads, *(k for k in range(1, x.dim()) if k not in heads)]
    moved = order != sorted(order)
    x = x.permute(order) if moved else x
    weight = y.flatten(1) if y.dim() > 1 else y.unsqueeze(1)
    out = pieces.spmm(
        graph,
        weight,
        x.reshape(len(x), weight.shape[1], size // weight.shape[1]),
    ).view(graph.num_dst, *x.shape[1:])
    return out.permute(sorted(range(len(order)), key=order.__getitem__)) if moved else out


def _sum_sources(graph: Graph, x: Tensor) -> Tensor:
    if by_index.takes_of(graph, x):
        return by_index.sums_of_sources(graph, x)
    size = math.prod(x.shape[1:])
    if size == 0:
        return x.new_zeros(graph.num_dst, *x.shape[1:])
    out = pieces.spmm(graph, x.new_ones(graph.num_edges), x.reshape(len(x), 1, size))
    return out.view(graph.num_dst, *x.shape[1:])


def _few(graph: Graph, size: int, x: Tensor) -> bool:
    """Whether PyTorch's own operations are the fastest on one row of this size per edge; see
    `by_index.is_few`."""
    return by_index.is_few(graph.num_edges * size) and by_index.takes_of(graph, x)


def _extreme(graph: Graph, op: str, x: Any, y: Any, kind: str) -> Tensor:
    if op == "copy_lhs" and by_index.takes_of(graph, x):
        return by_index.extremes(graph, x, False, kind)
    rows = _message(graph, op, x, y)
    if by_index.takes_of(graph, rows):
        return by_index.extremes(graph, rows, True, kind)
    csr = graph.csr()
    rows = rows if csr.eids is None else rows.index_select(0, csr.eids)
    empty = -math.inf if kind == "max" else math.inf
    return torch.segment_reduce(rows, kind, offsets=csr.indptr, initial=empty, unsafe=True)


def _on_edges(graph: Graph, x: Any, target: str, few: bool = False) -> Tensor:
    if target == "e":
        return x
    if few:
        return x.index_select(0, graph.edge_index[0 if target == "u" else 1])
    return rows_of_sources(graph, x) if target == "u" else rows_of_destinations(graph, x)


def _fused(graph: Any) -> Graph:
    """The Graph of a :class:`dfgnn.compat.DGLGraph`; anything else is returned as it is."""
    return getattr(graph, "dfgnn_graph", graph)


def _check(caller: str, graph: Any, name: str, x: Any, target: str) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(f"{caller}: graph: expected a dfgnn.Graph, got {type(graph).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"{caller}: {name}: expected a tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{caller}: {name}: expected float32, float64, float16 or bfloat16, got {x.dtype}")
    rows = {"u": graph.num_src, "v": graph.num_dst, "e": graph.num_edges}[target]
    if x.dim() == 0 or len(x) != rows:
        raise ValueError(
            f"{caller}: {name}: expected shape [{rows}, ...], a row per {_ENDS[target]}, got {list(x.shape)}"
        )
    if x.device != graph.device:
        raise ValueError(f"{caller}: {name}: expected device {graph.device} (the graph's), got {x.device}")


def _alike(caller: str, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """x and y with the same number of dimensions, of which the first counts rows; checks that they fit."""
    if x.dtype != y.dtype:
        raise TypeError(f"{caller}: y: expected {x.dtype} like x, got {y.dtype}")
    if x.dim() != y.dim():
        dims = max(x.dim(), y.dim())
        x, y = (z.view(len(z), *[1] * (dims - z.dim()), *z.shape[1:]) for z in (x, y))
    if any(a != b and 1 not in (a, b) for a, b in zip(x.shape[1:], y.shape[1:])):
        raise ValueError(
            f"{caller}: y: expected a shape that broadcasts against {list(x.shape[1:])}, "
            f"got {list(y.shape[1:])}"
        )
    return x, y


def _common_shape(x: Tensor, y: Tensor) -> tuple[int, ...]:
    """The shape to which rows of x and y broadcast (`_alike` has checked that they do); faster than
    torch.broadcast_shapes."""
    return tuple(b if a == 1 else a for a, b in zip(x.shape[1:], y.shape[1:]))


def copy_u(graph: Graph, x: Tensor) -> Tensor:
    """``[E, ...]``: the features x of every edge's source."""
    return gsddmm(graph, "copy_lhs", x, None, _caller="copy_u")


def copy_v(graph: Graph, x: Tensor) -> Tensor:
    """``[E, ...]``: the features x of every edge's destination."""
    return gsddmm(graph, "copy_rhs", None, x, _caller="copy_v")


def copy_e(graph: Graph, x: Tensor) -> Tensor:
    """x itself, ``[E, ...]``."""
    _check("copy_e", _fused(graph), "x", x, "e")
    return x


def edge_softmax(graph: Graph, logits: Tensor, eids: Any = "__ALL__", norm_by: str = "dst") -> Tensor:
    """Softmax of ``logits [E, ...]`` over the edges into each destination, or with norm_by="src" out of each
    source; with ``eids``, a vector of int32 or int64, of these edges only, whose logits are given in that
    order."""
    graph = _fused(graph)
    if norm_by not in ("src", "dst"):
        raise ValueError(f"edge_softmax: norm_by: expected 'src' or 'dst', got {norm_by!r}")
    if not isinstance(graph, Graph):
        raise TypeError(f"edge_softmax: graph: expected a dfgnn.Graph, got {type(graph).__name__}")
    graph = graph if norm_by == "dst" else graph.reverse()
    if eids is None or isinstance(eids, str) and eids == "__ALL__":
        return pieces.edge_softmax(graph, logits)
    if not isinstance(eids, Tensor) or eids.dtype not in (torch.int32, torch.int64) or eids.dim() != 1:
        got = f"{list(eids.shape)}, {eids.dtype}" if isinstance(eids, Tensor) else type(eids).__name__
        raise ValueError(f"edge_softmax: eids: expected a vector of ids, int32 or int64, got {got}")
    if len(eids) and (int(eids.min()) < 0 or int(eids.max()) >= graph.num_edges):
        raise ValueError(f"edge_softmax: eids: expected ids from 0 to {graph.num_edges - 1}, got others")
    if isinstance(logits, Tensor) and (logits.dim() == 0 or len(logits) != len(eids)):
        what = f"shape [{len(eids)}, ...], a row per id in eids"
        raise ValueError(f"edge_softmax: logits: expected {what}, got {list(logits.shape)}")
    src, dst = graph.edge_index[:, eids.long()]
    return pieces.edge_softmax(Graph.from_coo(src, dst, num_src=graph.num_src, num_dst=graph.num_dst), logits)


def segment_reduce(seglen: Tensor, value: Tensor, reducer: str = "sum") -> Tensor:
    """``[len(seglen), ...]``: segments of seglen[k] consecutive rows of value, reduced; 0 if empty."""
    if reducer not in REDUCERS:
        raise ValueError(f"segment_reduce: reducer: expected one of {', '.join(REDUCERS)}, got {reducer!r}")
    return _segments(seglen, value, reducer, "segment_reduce")


def _check_lengths(where: str, lengths: Any, x: Tensor, name: str) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{where}: {no_tensor(where.split()[-1], lengths)}")
    total, least = torch.stack([lengths.sum(), lengths.clamp(max=0).sum()]).tolist()
    if lengths.dim() != 1 or total != len(x) or least < 0:
        got = f"{total} in all, of shape {list(lengths.shape)}" if least == 0 else "some below 0"
        way = "; batch.bincount() are those of a sorted batch vector" if lengths.shape == x.shape[:1] else ""
        what = f"lengths that add up to {len(x)}, the rows of {name}"
        raise ValueError(f"{where}: expected {what}, got {got}{way}")


def _segments(seglen: Tensor, value: Tensor, reducer: str, caller: str) -> Tensor:
    _check_lengths(f"{caller}: seglen", seglen, value, "value")
    out = torch.segment_reduce(value, reducer, lengths=seglen.long(), unsafe=True)
    return torch.where((seglen == 0).view(-1, *[1] * (out.dim() - 1)), torch.zeros_like(out), out)


def segment_softmax(seglen: Tensor, value: Tensor) -> Tensor:
    """Softmax over each segment of seglen[k] consecutive rows of value."""
    high = _segments(seglen, value.detach(), "max", "segment_softmax")
    exp = (value - high.repeat_interleave(seglen, 0)).exp()
    total = _segments(seglen, exp, "sum", "segment_softmax")
    return exp / total.repeat_interleave(seglen, 0)


def segment_mm(a: Tensor, b: Tensor, seglen_a: Tensor) -> Tensor:
    """``[N, D2]``: the k-th segment of rows of ``a [N, D1]`` times matrix k of ``b [R, D1, D2]``."""
    _check_lengths("segment_mm: seglen_a", seglen_a, a, "a")
    if len(seglen_a) != len(b):
        what = f"shape [{len(b)}], one length per matrix of b"
        raise ValueError(f"segment_mm: seglen_a: expected {what}, got {list(seglen_a.shape)}")
    return torch.cat([rows @ matrix for rows, matrix in zip(a.split(seglen_a.tolist()), b)])


def gather_mm(a: Tensor, b: Tensor, *, idx_b: Tensor) -> Tensor:
    """``[N, D2]``: row i of ``a [N, D1]`` times ``b[idx_b[i]]``, of ``b [R, D1, D2]``."""
    if idx_b.dim() != 1 or len(idx_b) != len(a):
        got = list(idx_b.shape)
        raise ValueError(f"gather_mm: idx_b: expected {len(a)} numbers, one per row of a, got {got}")
    if len(idx_b) and not 0 <= (ends := torch.stack(idx_b.aminmax()).tolist())[0] <= ends[1] < len(b):
        what = f"numbers in [0, {len(b)}), the matrices of b"
        raise ValueError(f"gather_mm: idx_b: expected {what}, got {ends[0]} to {ends[1]}")
    order = idx_b.argsort(stable=True)
    out = segment_mm(a[order], b, torch.bincount(idx_b, minlength=len(b)))
    return torch.empty_like(out).index_copy(0, order, out)


def _public(name: str, function: Callable[..., Tensor], doc: str) -> None:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    globals()[name] = function
    __all__.append(name)


def _edge_function(lhs: str, op: str, rhs: str) -> None:
    name = f"{lhs}_{op}_{rhs}"

    def function(graph: Graph, x: Tensor, y: Tensor) -> Tensor:
        return gsddmm(graph, op, x, y, lhs, rhs, _caller=name)

    shape = "[E, ..., 1]" if op == "dot" else "[E, ...]"
    _public(name, function, f"``{shape}``: {op} of x of every edge's {_ENDS[lhs]} and y of its {_ENDS[rhs]}.")


def _reduce_function(op: str, reducer: str) -> None:
    name = f"u_{op}_e_{reducer}"

    def function(graph: Graph, x: Tensor, y: Tensor) -> Tensor:
        return gspmm(graph, op, reducer, x, y, _caller=name)

    what = f"{reducer} over edges of {op} of their source's x and their y"
    _public(name, function, f"``[num_dst, ...]``: {what}.")


def _copy_function(end: str, reducer: str) -> None:
    name = f"copy_{end}_{reducer}"
    sums = _sum_sources if end == "u" else sum_of_edges

    def summed(graph: Graph, x: Tensor) -> Tensor:  # not gspmm, whose checks take longer than small sums
        graph = _fused(graph)
        _check(name, graph, "x" if end == "u" else "y", x, end)
        return sums(graph, x)

    def of_sources(graph: Graph, x: Tensor) -> Tensor:
        return gspmm(graph, "copy_lhs", reducer, x, None, _caller=name)

    def of_edges(graph: Graph, x: Tensor) -> Tensor:
        return gspmm(graph, "copy_rhs", reducer, None, x, _caller=name)

    reduced = of_sources if end == "u" else of_edges
    whose = "sources'" if end == "u" else "own"
    what = f"``[num_dst, ...]``: {reducer} over edges of their {whose} features x."
    _public(name, summed if reducer == "sum" else reduced, what)


for _lhs, _rhs in permutations("uve", 2):
    for _op in (*BINARY, "dot"):
        _edge_function(_lhs, _op, _rhs)
for _reducer in REDUCERS:
    for _op in BINARY:
        _reduce_function(_op, _reducer)
    _copy_function("u", _reducer)
    _copy_function("e", _reducer)
__all__.sort()
