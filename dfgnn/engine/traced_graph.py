"""Graphs while a compiler records: operators that take an ``edge_index``, or a Graph's number, and find the
graph when they run.

What a graph derives of its edges (sorted ends, plans) depends on their values, and while torch.compile or
torch.export records there are none. So there an `EdgeList` stands for the graph. The attention becomes one
operator, opaque to the compiler, that looks the graph up where eager calls do (`_kept`) and runs the engine's
operator; likewise its gradient. Layers that share an ``edge_index`` and backward find the graph made already.
For a Graph stands its number, so that what is compiled for one serves all.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from ..graph import Graph
from ..graph.by_edges import edges_as_sources
from ..graph.cache import graph_of, known, once
from ..graph.graph import OF_NUMBER
from ..runtime import ops as _ops
from ..runtime import torch_internals as internals
from ..runtime.arguments import ops
from ..runtime.compiling import is_exporting
from . import operators
from . import recorded_graph as _replayed

__all__ = ["EdgeList", "is_traced"]


def is_traced(edge_index: Any) -> bool:
    """Whether a compiler or a FakeTensorMode is at work on a dense ``edge_index``."""
    if not torch.compiler.is_compiling() and type(edge_index) is not internals.FakeTensor:
        return False
    is_dense = isinstance(edge_index, Tensor) and edge_index.layout == torch.strided
    return is_dense and not hasattr(edge_index, "sparse_size")  # no EdgeIndex


class EdgeList:
    """What a Graph is to the functions while a compiler records.

    edge_index: int32 or int64 ``[2, E]``. num_src, num_dst: may be symbolic. self_loops: of the graph, the
    loops among the edges are removed, and one for each node in 0 .. min(num_src, num_dst) - 1 appended.
    """

    number = -1
    edge_mask = None  # operators leave out what is not in use
    given: Any  # None of a `NumberedGraph`

    def __init__(self, edge_index: Tensor, num_src: int, num_dst: int, self_loops: bool = False):
        if edge_index.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"Graph.from_pyg: edge_index: expected an int32 or int64 tensor, got {edge_index.dtype}"
            )
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ValueError(
                f"Graph.from_pyg: edge_index: expected shape [2, E], got {list(edge_index.shape)}"
            )
        self.given, self.num_src, self.num_dst, self.self_loops = edge_index, num_src, num_dst, self_loops
        self.device = edge_index.device
        self._with_loops: tuple[Tensor, Tensor] | None = None

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    @property
    def edge_index(self) -> Tensor:
        """[2, num_edges], in the graph's edge order, in the dtype given."""
        return self._appended()[0] if self.self_loops else self.given

    @property
    def edge_map(self) -> Tensor | None:
        """With ``self_loops``, int64 [num_edges]: where each edge was, -1 for an appended loop; else None."""
        return self._appended()[1] if self.self_loops else None

    def in_degrees(self) -> Tensor:
        """int64 [num_dst]."""
        dst = self.edge_index[1].to(torch.int64)
        return dst.new_zeros(self.num_dst).index_add(0, dst, torch.ones_like(dst))

    def _appended(self) -> tuple[Tensor, Tensor]:
        if self._with_loops is None:
            edge_index = self.given
            kept = (edge_index[0] != edge_index[1]).nonzero().squeeze(1)
            num_loops = smaller(self.num_src, self.num_dst)
            loops = torch.arange(num_loops, dtype=edge_index.dtype, device=self.device)
            appended = torch.cat([edge_index.index_select(1, kept), loops.expand(2, -1)], dim=1)
            self._with_loops = appended, torch.cat([kept, kept.new_full(loops.shape, -1)])
        return self._with_loops


class NumberedGraph(EdgeList):
    """What a Graph is to the functions while torch.compile records: it is looked up when the operators run.
    It must live until then; backward finds it by what forward saved."""

    def __init__(self, graph: Graph) -> None:
        self.given, self.number, self.self_loops = None, graph._number, False
        self.num_src, self.num_dst, self.device = graph.num_src, graph.num_dst, graph.device
        self._num_edges = graph.num_edges

    @property
    def num_edges(self) -> int:
        return self._num_edges


class TypedGraph(NumberedGraph):
    """The same of the graph whose sources are all pairs of a type and a source, pair t num_src + j being that
    of the source j of an edge of type t: its keys and values may differ by the type of the edge.

    types: integers ``[E]`` in the user's edge order.
    """

    def __init__(self, graph: Graph, types: Tensor, num_types: int) -> None:
        super().__init__(graph)
        self.given, self.num_src = types, num_types * graph.num_src


class EdgesAsSources(EdgeList):
    """The same of the graph that leads from each edge of another stand-in's to its destination
    (graph/by_edges.py)."""

    def __init__(self, of: EdgeList) -> None:
        self.given, self.self_loops = of.given, False
        self.number = _AS_SOURCES - (0 if of.given is not None else of.number)
        self.num_src = self._num_edges = of.num_edges
        self.num_dst, self.device = of.num_dst, of.device

    @property
    def num_edges(self) -> int:
        return self._num_edges

    @property
    def edge_index(self) -> Tensor:
        return _from_edges(self.given)


# Numbers from here downwards stand for the edges as sources: of what is given, or of the graph of the number
# that lies as far below.
_AS_SOURCES = -2


def by_edges(edges: EdgeList) -> EdgeList:
    if type(edges) in (EdgeList, NumberedGraph) and not edges.self_loops:
        return EdgesAsSources(edges)
    ends = _from_edges(edges.edge_index)
    return EdgeList(ends, ends.shape[1], edges.num_dst)


def _from_edges(edge_index: Tensor) -> Tensor:
    """[2, E], from each edge to its destination."""
    dst = edge_index[1]
    return torch.stack([torch.arange(len(dst), dtype=dst.dtype, device=dst.device), dst])


def stand_in(graph: Any) -> Any:
    """What a Graph is to be while torch.compile records. An exported program has no graphs to find, and keeps
    the tensors."""
    if isinstance(graph, EdgeList) or is_exporting() or not torch.compiler.is_dynamo_compiling():
        return graph
    return NumberedGraph(graph)


def smaller(a: int, b: int) -> int:
    # Dynamo knows min of its own sizes, and older ones no sym_min; min of a SymInt would ask which it is.
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


# ---- operators -------------------------------------------------------------------------------------------

# given: an edge_index, the types of a `TypedGraph`, or what `_replayed` makes, with the places in it.
_EDGES = "Tensor? given, SymInt number, SymInt num_src, SymInt num_dst, bool self_loops, SymInt num_edges"
_library = library.Library("dfgnn", "FRAGMENT")


def _define(name: str, schema: str, kernel, fake, tags=()) -> Any:
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, library.fallthrough_kernel, "Autograd")
    library.register_fake(f"dfgnn::{name}", fake, lib=_library)
    return getattr(ops, name).default


def _differentiable(name: str, run, setup, backward, once: bool = False) -> Any:
    """``run`` with a formula for its gradient, as an operator of its own: it decomposes when gradients are
    recorded, so that compiled code calls ``run`` alone, with no Python of autograd around it. once: the
    gradient has none."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            output = run(*args)
            output = tuple(output) if isinstance(output, list) else output
            setup(ctx, args, output)
            return output

    Function.backward = staticmethod(once_differentiable(backward) if once else backward)  # type: ignore

    place = [argument.name for argument in run._schema.arguments].index("given")
    of_graph = name.replace("edge_", "graph_", 1) if name.startswith("edge_") else None

    def call(*args):
        made = None if of_graph is None else _in_cuda_graphs(*args[place : place + len(_Edges._fields)])
        if made is not None:
            return getattr(ops, of_graph).default(*args[:place], *made, *args[place + len(made) :])
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            output = Function.apply(*args)
            return list(output) if isinstance(output, tuple) else output
        return run(*args)

    schema = str(run._schema).partition("(")[2]
    _library.define(f"{name}({schema}", tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, call, "CompositeImplicitAutograd")
    return getattr(ops, name).default


_structure = _define(
    "edge_structure",
    "(Tensor edge_index, SymInt num_src, SymInt num_dst, bool self_loops) -> Tensor",
    _replayed.structure,
    _replayed.structure_fake,
)


def _in_cuda_graphs(given, number, num_src, num_dst, self_loops, num_edges) -> _Edges | None:
    """In place of the ``edge_index`` that is given; None where it is to be looked up, outside: also where
    tensors have the number of edges, loops among them, which nobody knows before."""
    counted = self_loops and not (isinstance(num_edges, int) and num_edges == 0)
    if given.dim() != 2 or counted or not _replayed.is_recorded(given):
        return None
    if number == _AS_SOURCES:
        given, number = _from_edges(given), -1
    made = _structure(given, num_src, num_dst, self_loops)
    room = _replayed.num_places(given, num_src, num_dst, self_loops)
    return _Edges(made, number, num_src, num_dst, self_loops, room)


def is_made(given: Tensor | None, number: int) -> bool:
    """Whether an operator got what `_replayed` makes, by its first arguments."""
    return given is not None and number == -1 and given.dim() == 1


def find(
    given: Tensor | None, number: int, num_src: int, num_dst: int, self_loops: bool, num_edges: int
) -> Graph:
    """The graph that a stand-in is for, given as the operators take it."""
    if number >= 0:
        graph = _of_number(number)
        return graph if given is None else _typed(graph, given, num_src)
    if number <= _AS_SOURCES:
        return _by_edges(given, _AS_SOURCES - number, num_dst)
    assert given is not None
    if is_made(given, number):
        return _replayed.graph_of(given, num_src, num_dst, num_edges)
    kept = known(given, num_src, num_dst, self_loops)
    graph, _ = graph_of(given, num_src, num_dst, self_loops) if kept is None else kept
    if num_edges not in (0, graph.num_edges):
        raise ValueError(f"num_edges: expected {graph.num_edges}, the graph's, got {num_edges}")
    return graph


def _of_number(number: int) -> Graph:
    graph = OF_NUMBER.get(number)
    if graph is None:
        raise RuntimeError("dfgnn: a Graph that a compiled function was given has to live until backward")
    return graph


def _by_edges(given: Tensor | None, number: int, num_dst: int) -> Graph:
    """The graph that an `EdgesAsSources` stands for."""
    if given is None:
        return edges_as_sources(_of_number(number))

    def build() -> Graph:
        src, dst = _from_edges(given).unbind()
        return Graph.from_coo(src, dst, num_src=len(src), num_dst=num_dst)

    return once((given,), ("edges as sources", num_dst), build)


def _typed(graph: Graph, types: Tensor, num_pairs: int) -> Graph:
    """The graph that a `TypedGraph` stands for, kept as long as ``graph`` and ``types``."""
    kept: Any = once((types,), ("typed", num_pairs), WeakKeyDictionary)
    if graph not in kept:
        csr, num_src = graph.csr(), max(graph.num_src, 1)
        if types.numel():
            low, high = torch.stack(types.aminmax()).tolist()
            if low < 0 or high >= num_pairs // num_src:
                wrong = low if low < 0 else high
                raise ValueError(f"etype: expected types in [0, {num_pairs // num_src}), got {wrong}")
        in_order = types if csr.eids is None else types[csr.eids]
        pairs = in_order.to(torch.int64) * graph.num_src + csr.indices
        kept[graph] = Graph.from_csr(csr.indptr, pairs, num_pairs, eids=csr.eids, validate=False)
    return kept[graph]


def in_use(mask: Tensor, x: Tensor) -> Tensor:
    """x ``[E, ...]``, 0 where mask ``[E]`` is False."""
    return torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, 0)


class _Edges(NamedTuple):
    given: Tensor | None
    number: int
    num_src: int
    num_dst: int
    self_loops: bool
    num_edges: int


def _sddmm(rows, feat, *rest):
    *edges, reverse = rest
    return operators.sddmm(find(*edges), rows, feat, reverse)


def _spmm(weight, feat, *rest):
    *edges, reverse = rest
    return operators.spmm(find(*edges), weight, feat, reverse)


def _sddmm_fake(rows, feat, *rest):
    *edges, _ = rest
    return feat.new_empty(_Edges(*edges).num_edges, feat.shape[1])


def _spmm_fake(weight, feat, *rest):
    *edges, reverse = rest
    e = _Edges(*edges)
    return feat.new_empty(e.num_src if reverse else e.num_dst, *feat.shape[1:])


# ---- products with low-dimensional edge features (`_edge_terms`)


def _dot(rows, attr, *rest):
    *edges, scale = rest
    graph = find(*edges)
    found = operators.edge_dot(graph, rows, attr, scale)
    return found if graph.edge_mask is None else in_use(graph.edge_mask, found)


def _sum(weight, attr, *rest):
    *edges, width = rest
    return operators.edge_sum(find(*edges), weight, attr, width)


def _outer(weight, rows, *rest):
    *edges, dim, scale = rest
    graph = find(*edges)
    found = operators.edge_outer(graph, weight, rows, dim, scale)
    return found if graph.edge_mask is None else in_use(graph.edge_mask, found)


def _dot_fake(rows, attr, *rest):
    *edges, _ = rest
    return _ops.edge_dot_fake(rows, _Edges(*edges).num_edges)


def _sum_fake(weight, attr, *rest):
    *edges, width = rest
    return attr.new_empty(_Edges(*edges).num_dst, weight.shape[1], width)


def _outer_fake(weight, rows, *rest):
    *edges, dim, _ = rest
    return rows.new_empty(_Edges(*edges).num_edges, dim)


class Family(NamedTuple):
    """The operators of one kind of stand-in."""

    sddmm: Any
    spmm: Any
    edge_dot: Any
    edge_sum: Any
    edge_outer: Any


def _family(prefix: str, *tags) -> Family:
    product = f"{_EDGES}, bool reverse) -> Tensor"
    run_sddmm = _define(
        f"{prefix}_sddmm_run", f"(Tensor rows, Tensor feat, {product}", _sddmm, _sddmm_fake, tags
    )
    run_spmm = _define(
        f"{prefix}_spmm_run", f"(Tensor weight, Tensor feat, {product}", _spmm, _spmm_fake, tags
    )

    def setup(ctx, inputs, output):
        first, feat, *ctx.rest, ctx.reverse = inputs
        ctx.save_for_backward(first, feat)

    def backward_of_sddmm(ctx, grad):
        (rows, feat), rest = ctx.saved_tensors, ctx.rest
        need_rows, need_feat = ctx.needs_input_grad[:2]
        return (
            spmm(grad, feat, *rest, ctx.reverse) if need_rows else None,
            spmm(grad, rows, *rest, not ctx.reverse) if need_feat else None,
            *[None] * (len(rest) + 1),
        )

    def backward_of_spmm(ctx, grad):
        (weight, feat), rest = ctx.saved_tensors, ctx.rest
        need_weight, need_feat = ctx.needs_input_grad[:2]
        return (
            sddmm(grad, feat, *rest, ctx.reverse) if need_weight else None,
            spmm(weight, grad, *rest, not ctx.reverse) if need_feat else None,
            *[None] * (len(rest) + 1),
        )

    sddmm = _differentiable(f"{prefix}_sddmm", run_sddmm, setup, backward_of_sddmm)
    spmm = _differentiable(f"{prefix}_spmm", run_spmm, setup, backward_of_spmm)
    return Family(sddmm, spmm, *_edge_terms(prefix, tags))


def _edge_terms(prefix: str, tags) -> tuple[Any, Any, Any]:
    """edge_dot, edge_sum and edge_outer of a family."""
    rows, weight = f"(Tensor rows, Tensor attr, {_EDGES}", f"(Tensor weight, Tensor attr, {_EDGES}"
    run_dot = _define(f"{prefix}_edge_dot_run", f"{rows}, float scale) -> Tensor", _dot, _dot_fake, tags)
    run_sums = _define(f"{prefix}_edge_sum_run", f"{weight}, SymInt width) -> Tensor", _sum, _sum_fake, tags)
    schema = f"(Tensor weight, Tensor rows, {_EDGES}, SymInt dim, float scale) -> Tensor"
    run_outer = _define(f"{prefix}_edge_outer_run", schema, _outer, _outer_fake, tags)

    def setup(ctx, inputs, output):
        first, second, *rest = inputs
        ctx.edges, ctx.rest = rest[: len(_Edges._fields)], rest[len(_Edges._fields) :]
        ctx.save_for_backward(first, second)

    def differentiable(run, first, second):
        """first, second: the gradients, of (both inputs, the output's gradient, edges, *rest)."""

        def backward(ctx, grad):
            saved, (need_first, need_second) = ctx.saved_tensors, ctx.needs_input_grad[:2]
            given = *saved, grad, ctx.edges, *ctx.rest
            return (
                first(*given) if need_first else None,
                second(*given) if need_second else None,
                *[None] * (len(ctx.edges) + len(ctx.rest)),
            )

        name = run._schema.name.removeprefix("dfgnn::").removesuffix("_run")
        return _differentiable(name, run, setup, backward)

    dot: Any
    sums: Any
    outer: Any
    dot = differentiable(
        run_dot,
        lambda rows, attr, grad, edges, scale: sums(grad, attr, *edges, rows.shape[2]) * scale,
        lambda rows, attr, grad, edges, scale: outer(grad, rows, *edges, attr.shape[1], scale),
    )
    sums = differentiable(
        run_sums,
        lambda weight, attr, grad, edges, width: dot(grad, attr, *edges, 1.0),
        lambda weight, attr, grad, edges, width: outer(weight, grad, *edges, attr.shape[1], 1.0),
    )
    outer = differentiable(
        run_outer,
        lambda weight, rows, grad, edges, dim, scale: dot(rows, grad, *edges, scale),
        lambda weight, rows, grad, edges, dim, scale: sums(weight, grad, *edges, rows.shape[2]) * scale,
    )
    return dot, sums, outer


# Graphs wait for the device where they are made, so that no CUDA graph can have the first ones in it. A Graph
# that was used before waits for nothing, and for another number torch's CUDA graphs are others.
OF_EDGES = _family("edge", torch.Tag.cudagraph_unsafe)
OF_GRAPHS = _family("graph")


def _operators(edges: EdgeList) -> Family:
    return OF_EDGES if edges.given is not None else OF_GRAPHS


def edge_dot(edges: EdgeList, rows: Tensor, attr: Tensor, scale: float) -> Tensor:
    return _operators(edges).edge_dot(rows, attr, *_arguments(edges), scale)


def edge_sum(edges: EdgeList, weight: Tensor, attr: Tensor, width: int) -> Tensor:
    return _operators(edges).edge_sum(weight, attr, *_arguments(edges), width)


def edge_outer(edges: EdgeList, weight: Tensor, rows: Tensor, dim: int, scale: float) -> Tensor:
    return _operators(edges).edge_outer(weight, rows, *_arguments(edges), dim, scale)


def _arguments(edges: EdgeList, sized: bool = True) -> _Edges:
    """sized: a result has the number of edges, which with loops must be counted."""
    num_edges = edges.num_edges if sized else 0
    return _Edges(edges.given, edges.number, edges.num_src, edges.num_dst, edges.self_loops, num_edges)


def sddmm(edges: EdgeList, rows: Tensor, feat: Tensor, reverse: bool) -> Tensor:
    return _operators(edges).sddmm(rows, feat, *_arguments(edges), reverse)


def spmm(edges: EdgeList, weight: Tensor, feat: Tensor, reverse: bool) -> Tensor:
    return _operators(edges).spmm(weight, feat, *_arguments(edges), reverse)
