"""Traced graphs: what stands for a graph while a compiler records, and how operators find the graph.

The CSRs and plans of a graph depend on the values of its edges, and while torch.compile or torch.export
records there are no values. So an `EdgeList` stands for the graph, and each attention becomes one operator
that the compiler does not look into, on a plan. When the compiled code runs, the operator ``edge_plan`` finds
it by the cache of eager calls (`graph.cache`), for forward and backward of all layers of one shape. A Graph
is represented by its number, so that what was compiled for one Graph serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..graph import Graph, in_cuda_graphs
from ..graph.cache import graph_of, once
from ..graph.derived import edges_as_sources
from ..graph.fixed_capacity import of_buffer
from ..graph.graph import OF_NUMBER
from ..runtime import ops as _ops
from ..runtime import torch_internals as internals
from ..runtime.cuda_graphs import in_captured_step
from ..runtime.rules import ByRule, Rule
from ..runtime.torch_internals import is_exporting


def is_traced(edge_index: Any) -> bool:
    """Whether a dense ``edge_index`` has no values: a compiler or a FakeTensorMode is at work on it, or it is
    on the device meta."""
    is_dense = isinstance(edge_index, Tensor) and edge_index.layout == torch.strided
    if not (torch.compiler.is_compiling() or type(edge_index) is internals.FakeTensor):
        return is_dense and edge_index.is_meta
    return is_dense and not hasattr(edge_index, "sparse_size")  # which torch_geometric's EdgeIndex has


class EdgeList:
    """What stands for a graph while a compiler records; operators look the graph up when they run (`find`).

    =============== ========= ===============================================================================
    given           number    the graph
    =============== ========= ===============================================================================
    edge_index      -1        the cached graph of this tensor
    None            n >= 0    the Graph of this number, which must live until backward
    types [E]       n >= 0    the Graph n with pairs of a type and a source as sources: see `of_types`
    edge_index      -2        the graph from each edge to its destination (graph/derived.py)
    None            -2 - n    the same for the Graph of number n
    =============== ========= ===============================================================================

    num_src, num_dst: may be symbolic. self_loops: the loops among the given edges are removed, and one for
    each node in 0 .. min(num_src, num_dst) - 1 is appended. num_edges, device: None: those of ``given``.
    where: the layer or function that errors name.
    """

    # The mask of a graph of fixed capacity is not known while a compiler records: operators apply it.
    edge_mask = None

    def __init__(
        self,
        given: Tensor | None,
        num_src: int,
        num_dst: int,
        self_loops: bool = False,
        number: int = -1,
        num_edges: int | None = None,
        device: torch.device | None = None,
        where: str = "compiled attention",
    ):
        if given is not None and num_edges is None:
            if given.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{where}: edge_index: expected an int32 or int64 tensor, got {given.dtype}")
            if given.dim() != 2 or given.shape[0] != 2:
                raise ValueError(f"{where}: edge_index: expected shape [2, E], got {list(given.shape)}")
        self.given: Any = given
        self.number, self.self_loops, self.where = number, self_loops, where
        self.num_src, self.num_dst, self._num_edges = num_src, num_dst, num_edges
        self.device: Any = given.device if device is None and given is not None else device
        self._with_loops: tuple[Tensor, Tensor] | None = None

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1] if self._num_edges is None else self._num_edges

    @property
    def edge_index(self) -> Tensor:
        """[2, num_edges], in the graph's edge order, in the dtype given. It exists only if an ``edge_index``
        was given."""
        if self.number <= _AS_SOURCES:
            return _from_edges(self.given)
        return self._appended()[0] if self.self_loops else self.given

    @property
    def edge_map(self) -> Tensor | None:
        """With ``self_loops`` int64 [num_edges], the position that each edge had, -1 for an appended loop;
        else None."""
        return self._appended()[1] if self.self_loops else None

    def edges_as_sources(self) -> EdgeList:
        """See `Graph.edges_as_sources`."""
        return by_edges(self)

    def in_degrees(self) -> Tensor:
        """int64 [num_dst]."""
        dst = self.edge_index[1].to(torch.int64)
        return dst.new_zeros(self.num_dst).index_add(0, dst, torch.ones_like(dst))

    def _appended(self) -> tuple[Tensor, Tensor]:
        if self._with_loops is None:
            edge_index = self.given
            if edge_index.is_meta and not torch.compiler.is_compiling():
                # How many edges are loops is not known there: none, so that edge tensors have the most rows.
                others = torch.arange(edge_index.shape[1], device=edge_index.device)
            else:
                others = (edge_index[0] != edge_index[1]).nonzero().squeeze(1)
            num_loops = smaller(self.num_src, self.num_dst)
            loops = torch.arange(num_loops, dtype=edge_index.dtype, device=self.device)
            appended = torch.cat([edge_index.index_select(1, others), loops.expand(2, -1)], dim=1)
            self._with_loops = appended, torch.cat([others, others.new_full(loops.shape, -1)])
        return self._with_loops


# Numbers of an `EdgeList` up to this one stand for graphs with edges as sources (see its table).
_AS_SOURCES = -2


def of_types(graph: Graph, types: Tensor, num_types: int) -> EdgeList:
    """The graph whose sources are all pairs of a type and a source, pair t num_src + j being that of the
    source j of an edge of type t: keys and values may differ by the type of the edge.

    types: integers ``[E]`` in the user's edge order.
    """
    num_src = num_types * graph.num_src
    return EdgeList(types, num_src, graph.num_dst, False, graph._number, graph.num_edges, types.device)


def by_edges(edges: EdgeList) -> EdgeList:
    """The graph that leads from each edge to its destination."""
    given, number, num_edges = edges.given, edges.number, edges.num_edges
    if given is None and number >= 0:
        number = _AS_SOURCES - number
    elif given is not None and number == -1 and not edges.self_loops:
        number = _AS_SOURCES
    else:
        return EdgeList(_from_edges(edges.edge_index), num_edges, edges.num_dst)
    return EdgeList(given, num_edges, edges.num_dst, False, number, num_edges, edges.device, edges.where)


def _from_edges(edge_index: Tensor) -> Tensor:
    """[2, E], from each edge to its destination."""
    dst = edge_index[1]  # len(dst) would make an exporter take the number of edges for a constant
    return torch.stack([torch.arange(dst.shape[0], dtype=dst.dtype, device=dst.device), dst])


def for_compiler(graph: Any) -> Any:
    """A Graph as a traced graph while torch.compile records; anything else as it is. An exported program,
    which must run elsewhere, contains the graph's tensors instead."""
    if isinstance(graph, EdgeList) or is_exporting() or not torch.compiler.is_dynamo_compiling():
        return graph
    return _of_graph(graph, graph.device)


def on_meta(graph: Any, features: Tensor) -> Any:
    """A Graph as a traced graph on the device meta if the features are there, so that operators give shapes;
    anything else as it is."""
    return _of_graph(graph, features.device) if features.is_meta and isinstance(graph, Graph) else graph


def _of_graph(graph: Graph, device: torch.device) -> EdgeList:
    sizes = graph.num_src, graph.num_dst
    return EdgeList(None, *sizes, False, graph._number, graph.num_edges, device)


def smaller(a: int, b: int) -> int:
    # In functions that Dynamo traces sizes are ints, on which older versions of PyTorch cannot trace
    # sym_min. Elsewhere a size may be a SymInt, whose comparison in min would add a guard.
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


# ---- how operators take a traced graph, and how they find the graph ---------------------------------------


class Traced(NamedTuple):
    """A traced graph in the arguments of operators. given and number are those of `EdgeList`, or a packed
    structure (`in_cuda_graphs`) and -1. num_edges: the capacity of a packed structure; 0 if no result
    has a row per edge."""

    given: Tensor | None
    number: int
    num_src: int
    num_dst: int
    self_loops: bool
    num_edges: int
    where: str = ""

    @property
    def family(self) -> str:
        """The prefix of the operators in Python that find this graph: see `_FAMILIES`."""
        return "graph" if self.given is None or is_made(self.given, self.number) else "edge"


TRACED = (
    "Tensor? given, SymInt number, SymInt num_src, SymInt num_dst, bool self_loops, SymInt num_edges, "
    "str where"
)
# The prefixes of operators -> their tags. Making the graph of a new edge_index ("edge") waits for the GPU,
# which a CUDA graph cannot contain. A Graph that was used before needs no waiting ("graph"), and torch
# records one CUDA graph for each value of `number`.
_FAMILIES = {"edge": (torch.Tag.cudagraph_unsafe,), "graph": ()}


def as_traced(edges: EdgeList, sized: bool = True) -> Traced:
    """sized: a result has a row per edge, so that edges of a graph with appended loops must be counted."""
    num_edges, sizes = edges.num_edges if sized else 0, (edges.num_src, edges.num_dst)
    return Traced(edges.given, edges.number, *sizes, edges.self_loops, num_edges, edges.where)


def by_rule(rule: Rule, *tensors: Any) -> Any:
    """What the rule computes, in an autograd function where gradients are recorded."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        return ByRule.apply(rule, *tensors)
    return rule.forward(*tensors)


def define(name: str, schema: str, kernel: Callable, fake: Callable) -> None:
    """Defines an operator of both families."""
    for family, tags in _FAMILIES.items():
        _ops.python_operator(f"{family}_{name}", schema, kernel, fake, *tags)


def define_traced(name: str, schema: str, call: Callable[..., Any]) -> None:
    """Defines the operator ``traced_<name>``, which compilers replace by what ``call`` calls. Inductor's
    settings are known only then. call: a function of the operator's arguments, with a `Traced` in place of
    its fields."""
    place = schema.count(",", 0, schema.index("given"))
    end = place + len(Traced._fields)

    def composite(*args):
        edges = Traced(*args[place:end])
        return call(*args[:place], (edges.family == "edge" and _in_cuda_graphs(*edges)) or edges, *args[end:])

    _ops.composite_operator(f"traced_{name}", schema, composite)


# ---- plans: compiled code looks a graph up once, in Python, and calls C++ operators on what was found ------


class PlanKey(NamedTuple):
    """What a plan depends on besides the graph: the arguments of `plan.Planner.handle`. layer: `OF_EDGES` for
    products of the edges' features, `OF_ROWS` for those of nodes' rows."""

    heads: int
    dim: int
    dtype: torch.dtype
    layer: str
    schedule: str
    edges: bool
    train: bool


OF_EDGES, OF_ROWS = "edges", "rows"
# Named apart from the arguments of the operators that it is joined to, where Inductor takes no name twice.
KEY = (
    "SymInt plan_heads, SymInt plan_dim, ScalarType plan_dtype, str plan_layer, str plan_schedule, "
    "bool plan_edges, bool plan_train"
)
_NUM_FOUND = len(Traced._fields) + len(PlanKey._fields)


def _plan(*args: Any) -> Tensor:
    """What the operators of csrc/torch/planned.h call ``plan``. It keeps the graph and the plan alive."""
    graph, key = find(*args[: len(Traced._fields)]), PlanKey(*args[len(Traced._fields) :])
    planner = graph._planner
    schedule = planner.edge_schedule if key.layer == OF_EDGES else key.schedule
    layer = None if key.layer in (OF_EDGES, OF_ROWS) else key.layer
    handle = planner.handle(*key[:3], layer, schedule, *key[5:])
    made = torch.tensor((handle.number, graph.edge_mask is not None), device="cpu")
    made._dfgnn_graph = graph, handle  # type: ignore[attr-defined]
    return made


def _plan_fake(*args: Any) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


_plan_op = _ops.python_operator(
    "edge_plan", f"({TRACED}, {KEY}) -> Tensor", _plan, _plan_fake, torch.Tag.cudagraph_unsafe
)


class Place(NamedTuple):
    """How compiled code calls the operators on one graph and plan: "planned" ones are C++, and get what
    `edge_plan` found; within CUDA graphs, "graph" ones find it themselves. leading: their first arguments."""

    family: str
    leading: tuple[Any, ...]

    def call(self, name: str, *args: Any) -> Any:
        return _ops.operator(f"{self.family}_{name}")(*self.leading, *args)


def place_of(edges: Traced, key: PlanKey, features: Tensor) -> Place:
    if edges.family == "graph" and internals.inductor_uses_cuda_graphs():
        return Place("graph", (*edges, *key))
    # On the device meta operators give shapes alone, for which no graph is looked up.
    plan = _plan_fake() if features.is_meta else _plan_op(*edges, *key)
    return Place("planned", (plan, edges.num_dst, edges.num_edges))


def define_planned(name: str, arguments: str, results: str, fake: Callable) -> None:
    """Defines the two operators by which `Place` calls one of csrc/torch/planned.h. arguments: those behind
    the plan, num_dst and num_edges."""
    op = _ops.python_operator(
        f"planned_{name}",
        f"(Tensor plan, SymInt num_dst, SymInt num_edges, {arguments}) -> {results}",
        None,
        fake,
        torch.Tag.cudagraph_unsafe,  # the plan's numbers would be recorded with it
    )

    def kernel(*args):  # a packed structure on a CPU has fewer edges than its capacity, so that 0 is given
        return op(_plan(*args[:_NUM_FOUND]), args[3], 0, *args[_NUM_FOUND:])

    def fake_of_graph(*args):
        return fake(None, args[3], args[5], *args[_NUM_FOUND:])

    schema = f"({TRACED}, {KEY}, {arguments}) -> {results}"
    _ops.python_operator(f"graph_{name}", schema, kernel, fake_of_graph)


# ---- a graph that is sorted in each replay of a CUDA graph ------------------------------------------------


_structure = _ops.python_operator(
    "edge_structure",
    "(Tensor edge_index, SymInt num_src, SymInt num_dst, bool self_loops) -> Tensor",
    in_cuda_graphs.structure,
    in_cuda_graphs.structure_fake,
)


def _in_cuda_graphs(given, number, num_src, num_dst, self_loops, num_edges, where) -> Traced | None:
    """The arguments with a packed structure (`in_cuda_graphs`) in place of the ``edge_index``, if
    Inductor will record CUDA graphs. None if the graph is to be looked up, outside of CUDA graphs: also if
    tensors have a row per edge and loops are replaced, because the number of edges then depends on values."""
    counted = self_loops and not (isinstance(num_edges, int) and num_edges == 0)
    if given.dim() != 2 or counted or not in_cuda_graphs.is_recorded(given):
        in_cuda_graphs.tell_of_cuts(given)
        return None
    if number == _AS_SOURCES:
        given, number = _from_edges(given), -1
    made = _structure(given, num_src, num_dst, self_loops)
    room = in_cuda_graphs.num_places(given, num_src, num_dst, self_loops)
    return Traced(made, number, num_src, num_dst, self_loops, room, where)


# ---- an edge_index of rows of other tensors ---------------------------------------------------------------

# The attribute of a tensor of `edge_pair` with the kept tensor of the same numbers, which has the graph.
_KEPT = "_dfgnn_kept"


def stacked(first: Tensor, first_row: int, second: Tensor, second_row: int) -> Tensor:
    """[2, E] of two indices, each a row of a tensor [2, E] or, with the row -1, a tensor [E]."""
    ends = [x if row < 0 else x[row] for x, row in ((first, first_row), (second, second_row))]
    dtype = ends[0].dtype if ends[0].dtype == ends[1].dtype else torch.int64
    return torch.stack([x.to(dtype) for x in ends])


def _pair(first: Tensor, first_row: int, second: Tensor, second_row: int) -> Tensor:
    """`stacked` as new memory each time, as compilers expect, which stands for a tensor that is kept as long
    as the given ones live, so that a graph is not made again for every call."""
    given = first, first_row, second, second_row
    # A replay has to read the given tensors, except where `dfgnn.capture` knows that they stay the same.
    if first.is_cuda and not in_captured_step() and torch.cuda.is_current_stream_capturing():
        return stacked(*given)
    parts = (kept(first),) if first is second else (kept(first), kept(second))
    return _copy(once(parts, ("edge pair", first_row, second_row), lambda: stacked(*given)))


def _copy(x: Tensor) -> Tensor:
    made = x.clone()
    setattr(made, _KEPT, x)
    return made


def _pair_fake(first: Tensor, first_row: int, second: Tensor, second_row: int) -> Tensor:
    dtype = first.dtype if first.dtype == second.dtype else torch.int64
    return first.new_empty((2, first.shape[-1]), dtype=dtype)


edge_pair = _ops.python_operator(
    "edge_pair", "(Tensor first, int first_row, Tensor second, int second_row) -> Tensor", _pair, _pair_fake
)


def segments_of(offsets: Tensor, count: int) -> Tensor:
    """[count], the segment of each row: those of segment i are offsets[i] to offsets[i + 1] - 1."""
    made = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return made.repeat_interleave(offsets.diff(), output_size=count)


def _segments(offsets: Tensor, count: int) -> Tensor:
    """`segments_of`, kept as those of `edge_pair` are."""
    if offsets.is_cuda and not in_captured_step() and torch.cuda.is_current_stream_capturing():
        return segments_of(offsets, count)

    def build() -> Tensor:
        first, last = offsets[[0, -1]].tolist()
        if (first, last) != (0, count):
            raise ValueError(
                f"segment_reduce: offsets: expected 0 to {count}, the rows, got {first} to {last}"
            )
        return segments_of(offsets, count)

    return _copy(once((offsets,), ("segments", count), build))


segments = _ops.python_operator(
    "segments", "(Tensor offsets, SymInt count) -> Tensor", _segments,
    lambda offsets, count: offsets.new_empty((count,), dtype=torch.int64),
)  # fmt: skip


def kept(edge_index: Any) -> Any:
    """The tensor by which the graph of an ``edge_index`` is cached: the given one, but for those of
    `edge_pair`."""
    return getattr(edge_index, _KEPT, edge_index)


# ---- finding the graph -------------------------------------------------------------------------------------


def is_made(given: Tensor | None, number: int) -> bool:
    """Whether an operator was called with a packed structure, according to its first two arguments."""
    return given is not None and number == -1 and given.dim() == 1


def find(
    given: Tensor | None,
    number: int,
    num_src: int,
    num_dst: int,
    self_loops: bool,
    num_edges: int,
    where: str,
) -> Graph:
    """The graph of a `Traced`."""
    if number >= 0:
        graph = _of_number(number)
        return graph if given is None else _typed(graph, given, num_src)
    if number <= _AS_SOURCES:
        return _by_edges(kept(given), _AS_SOURCES - number, num_dst)
    edges: Any = kept(given)
    if is_made(edges, number):
        return in_cuda_graphs.unpacked(edges, num_src, num_dst, num_edges)
    told = "the tensors have {}, one per node"
    graph, _ = graph_of(edges, num_src, num_dst, self_loops, where, told)
    if num_edges not in (0, graph.num_edges):
        raise ValueError(f"num_edges: expected {graph.num_edges}, the graph's, got {num_edges}")
    return graph


def _of_number(number: int) -> Graph:
    found = OF_NUMBER.get(number)
    graph = None if found is None else found()
    if graph is None:
        raise RuntimeError("dfgnn: a Graph that a compiled function was given has to live until backward")
    return graph


def _by_edges(given: Tensor | None, number: int, num_dst: int) -> Graph:
    """The graph from each edge to its destination, made from the given edges, the graph of fixed capacity of
    which they are the buffer, or the Graph of this number."""
    graph = _of_number(number) if given is None else of_buffer(given)
    if graph is not None:
        return edges_as_sources(graph)
    assert given is not None

    def build() -> Graph:
        src, dst = _from_edges(given).unbind()
        return Graph.from_coo(src, dst, num_src=len(src), num_dst=num_dst)

    return once((given,), ("edges as sources", num_dst), build)


def _typed(graph: Graph, types: Tensor, num_pairs: int) -> Graph:
    """The graph of `of_types`, cached as long as ``graph`` and ``types`` live."""
    made: Any = once((types,), ("typed", num_pairs), WeakKeyDictionary)
    if graph not in made:
        csr, num_src = graph.csr(), max(graph.num_src, 1)
        if types.numel():
            low, high = torch.stack(types.aminmax()).tolist()
            if low < 0 or high >= num_pairs // num_src:
                wrong = low if low < 0 else high
                raise ValueError(f"etype: expected types in [0, {num_pairs // num_src}), got {wrong}")
        in_order = types if csr.eids is None else types[csr.eids]
        pairs = in_order.to(torch.int64) * graph.num_src + csr.indices
        made[graph] = Graph.from_csr(csr.indptr, pairs, num_pairs, eids=csr.eids, validate=False)
    return made[graph]


def in_use(mask: Tensor | None, x: Tensor) -> Tensor:
    """x ``[E, ...]``, with 0 in the rows of unused edges, which kernels do not write: where mask ``[E]``, the
    `edge_mask` of a graph of fixed capacity, is False. Other graphs have none (None)."""
    return x if mask is None else torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, 0)
