"""Graphs while a compiler records: operators that take an ``edge_index``, or a Graph's number, and find the
graph when they run.

What a graph derives of its edges (sorted ends, plans) depends on their values, and while torch.compile or
torch.export records there are none. So there an `EdgeList` stands for the graph. The attention becomes one
operator, opaque to the compiler, that looks the graph up where eager calls do (`_kept`) and runs the engine's
operator; likewise its gradient. Layers that share an ``edge_index`` and backward find the graph made already.
For a Graph stands its number, so that what is compiled for one serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..graph import Graph
from ..graph.cache import graph_of, known, once
from ..graph.derived import edges_as_sources
from ..graph.graph import OF_NUMBER
from ..runtime import ops as _ops
from ..runtime import torch_internals as internals
from ..runtime.compiling import is_exporting
from ..runtime.rules import ByRule, Rule
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
    (graph/derived.py)."""

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


class Arguments(NamedTuple):
    """A traced graph in the arguments of operators; given: an edge_index, the types of a `TypedGraph`, or the
    structure that `recorded_graph` makes, whose capacity num_edges then is."""

    given: Tensor | None
    number: int
    num_src: int
    num_dst: int
    self_loops: bool
    num_edges: int


ARGUMENTS = "Tensor? given, SymInt number, SymInt num_src, SymInt num_dst, bool self_loops, SymInt num_edges"
# The prefixes of the operators on an edge_index and on a Graph's number, with their tags. A graph is waited
# for where it is made, so that no CUDA graph can contain the first call with an edge_index. A Graph that was
# used before waits for nothing, and torch records a CUDA graph for each number.
_FAMILIES = {"edge": (torch.Tag.cudagraph_unsafe,), "graph": ()}


class Traced(NamedTuple):
    """A traced graph as operators take it, and the prefix of the operators that do."""

    family: str
    edges: Arguments

    def operator(self, name: str) -> Any:
        return _ops.operator(f"{self.family}_{name}")


def as_traced(edges: EdgeList, sized: bool = True) -> Traced:
    """sized: a result has a row per edge, so that a graph with appended loops must count its edges."""
    num_edges = edges.num_edges if sized else 0
    arguments = edges.given, edges.number, edges.num_src, edges.num_dst, edges.self_loops, num_edges
    return Traced("graph" if edges.given is None else "edge", Arguments(*arguments))


def define(name: str, schema: str, kernel: Callable, fake: Callable) -> None:
    """An operator of both families. Autograd passes it over, so that compiled code meets no Python there."""
    for family, tags in _FAMILIES.items():
        _ops.define(f"{family}_{name}", schema, kernel, fake, *tags)
        _ops.without_autograd(f"{family}_{name}")


def define_differentiable(
    name: str, schema: str, kernel: Callable, fake: Callable, rule_of: Callable[..., tuple[Rule, tuple]]
) -> None:
    """An operator of both families, ``<family>_<name>``, which decomposes while a compiler traces: into
    ``<family>_<name>_run``, within an autograd function where gradients are recorded.

    rule_of: from the family and the arguments, the rule of that autograd function and its tensors.
    """
    define(f"{name}_run", schema, kernel, fake)
    for family in _FAMILIES:
        run = _ops.operator(f"{family}_{name}_run")
        place = [argument.name for argument in run._schema.arguments].index("given")
        call = _with_gradients(family, name, run, place, rule_of)
        _ops.define_composite(f"{family}_{name}", schema, call)


def _with_gradients(family: str, name: str, run: Any, place: int, rule_of: Callable) -> Callable:
    end = place + len(Arguments._fields)

    def call(*args):
        made = _in_cuda_graphs(*args[place:end]) if family == "edge" else None
        if made is not None:
            return Traced("graph", made).operator(name)(*args[:place], *made, *args[end:])
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            rule, tensors = rule_of(family, *args)
            results = ByRule.apply(rule, *tensors)
            return list(results) if isinstance(results, tuple) else results
        return run(*args)

    return call


_structure = _ops.define(
    "edge_structure",
    "(Tensor edge_index, SymInt num_src, SymInt num_dst, bool self_loops) -> Tensor",
    _replayed.structure,
    _replayed.structure_fake,
)
_ops.without_autograd("edge_structure")


def _in_cuda_graphs(given, number, num_src, num_dst, self_loops, num_edges) -> Arguments | None:
    """In place of the ``edge_index`` that is given; None where it is to be looked up, outside: also where
    tensors have the number of edges, loops among them, which nobody knows before."""
    counted = self_loops and not (isinstance(num_edges, int) and num_edges == 0)
    if given.dim() != 2 or counted or not _replayed.is_recorded(given):
        return None
    if number == _AS_SOURCES:
        given, number = _from_edges(given), -1
    made = _structure(given, num_src, num_dst, self_loops)
    room = _replayed.num_places(given, num_src, num_dst, self_loops)
    return Arguments(made, number, num_src, num_dst, self_loops, room)


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
