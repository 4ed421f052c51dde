"""Caches the Graph of an ``edge_index`` (or of torch_geometric's other forms of edges): one per tensor."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..runtime import torch_internals as internals
from ..runtime import tracing
from ..runtime.library import long_checksum, short_checksum
from ..runtime.tracing import has_numbers, in_a_mode, not_compiled, untraced, without_gradient
from ..sparse import csr as _csr
from ..sparse.fixed import FixedStructure
from ..sparse.packed import PackedGraph
from . import Graph
from .build import of_edges
from .fixed_capacity import OF_BUFFER, of_buffer

# Maximum number of cached graphs per edge_index: with and without loops, and with a few sizes. The limit
# matters for programs that pass the same edges with another number of nodes each time.
_LIMIT = 16
#: torch_geometric's layers also take these dtypes if they add self loops, which are int64 and so promote
#: them.
SMALL_DTYPES = torch.bool, torch.uint8, torch.int8, torch.int16
_OF_FEATURES = "x has {}, one per node"  # how errors explain a size


class _Attributes(dict):
    """A tensor's ``__dict__``. It lives as long as the tensor, and weak references to it take the place of
    those to the tensor: a tensor with weak references cannot be swapped (``torch.utils.swap_tensors``, and so
    ``load_state_dict`` with ``torch.__future__.set_swap_module_params_on_conversion``)."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple:  # so that files of tensors with attributes can be read without dfgnn
        return OrderedDict, (), None, None, iter(self.items())


class _Entry(NamedTuple):
    """The cached values of a set of tensors. The key of the entry is the tensors' ids."""

    refs: tuple[weakref.ref, ...]  # weak references to the tensors' attributes
    state: tuple  # `state_of` the tensors when the values were made
    values: OrderedDict[tuple, Any]  # key -> (more_state, value): see `once`


# Graph -> (that graph with self loops, the edge map): see `_of_graph`.
_with_loops: WeakKeyDictionary[Graph, tuple[Graph, Tensor | None]] = WeakKeyDictionary()
_cache: dict[tuple[int, ...], _Entry] = {}
_lock = threading.RLock()  # re-entrant, because a tensor may be freed while its thread holds the lock


def graph_of(
    edge_index: Any,
    num_src: int,
    num_dst: int,
    self_loops: bool = False,
    where: str = "Graph.from_pyg",
    sizes: str = _OF_FEATURES,
) -> tuple[Graph, Tensor | None]:
    """The graph of ``edge_index``, cached as long as that tensor lives.

    A second call with the same tensor gives the same graph, without waiting for the device; the first one
    waits, to check the indices. See :func:`once` for when it is made anew. Models call this once per layer
    and step, so that a hit takes three Python frames: this, `_found` and `state_of`. Where Dynamo records,
    `graph_of_uncompiled` has to be called instead.

    Args:
        edge_index: int32 or int64 ``[2, E]`` tensor or EdgeIndex, with ``self_loops`` also one of
            SMALL_DTYPES; or SparseTensor or torch.sparse tensor, transposed as torch_geometric takes them
            (rows are destinations); or a Graph of these sizes.
        num_src, num_dst: numbers of nodes.
        self_loops: remove the loops and append one for each node in 0 .. min(num_src, num_dst) - 1.
        where: the beginning of error messages.
        sizes: their explanation of the sizes, with {} for the number of rows.

    Returns:
        The graph, its edges in the order of the columns or of the sparse tensor's values; and with
        ``self_loops`` int64 ``[E']``, each edge's position in that order, -1 for a new loop; else None.

    Raises:
        TypeError: ``edge_index`` is none of these, or of another dtype.
        ValueError: a wrong shape, sizes that contradict a sparse tensor's, or a node out of range.
    """
    if isinstance(edge_index, Graph):
        return _of_graph(edge_index, self_loops)
    key = "graph_of", num_src, num_dst, self_loops
    if internals.get_eval_frame_callback() is None:  # else torch.compile would trace what is called here
        found = _found((edge_index,) if type(edge_index) is Tensor else parts_of(edge_index, where), key)
        if found is not None:
            return found[1]
        made = _of_plain(edge_index, key) if type(edge_index) is Tensor and not OF_BUFFER.data else None
        if made is not None:
            return made
    return _graph_of(edge_index, key, where, sizes)


@not_compiled
def _graph_of(edge_index: Any, key: tuple, where: str, sizes: str) -> tuple[Graph, Tensor | None]:
    """`graph_of` for edges of every kind, with all errors."""
    _, num_src, num_dst, self_loops = key
    if OF_BUFFER.data:
        graph = _of_buffer(edge_index, num_src, num_dst, self_loops)
        if graph is not None:
            return graph
    return once(
        parts_of(edge_index, where),
        key,
        lambda: _build(edge_index, num_src, num_dst, self_loops, where, sizes),
    )


graph_of_uncompiled = not_compiled(graph_of)


@not_compiled
def cached(edge_index: Any, num_src: int | None = None, num_dst: int | None = None) -> Graph:
    """See `Graph.cached`."""
    where = "Graph.cached"
    if isinstance(edge_index, Graph):
        raise TypeError(f"{where}: edge_index: expected a [2, E] tensor, got a Graph")
    check_type(edge_index, where)
    sizes = ("num_src", num_src), ("num_dst", num_dst)
    num_src, num_dst = (x if x is None else _csr.as_size(where, name, x) for name, x in sizes)
    if num_src is not None and num_dst is not None:
        return graph_of(edge_index, num_src, num_dst, where=where, sizes="{} were given")[0]

    def build() -> Graph:
        own_src, own_dst = _own_sizes(edge_index, where)
        own_src = own_src if num_src is None else num_src
        own_dst = own_dst if num_dst is None else num_dst
        return graph_of(edge_index, own_src, own_dst, where=where, sizes="the largest id makes {}")[0]

    return once(parts_of(edge_index), ("cached", num_src, num_dst), build)


def _own_sizes(edge_index: Any, where: str) -> tuple[int, int]:
    """The sizes that ``edge_index`` has itself; for a tensor, the largest ids + 1."""
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return edge_index.size(1), edge_index.size(0)
    if type(edge_index) is not Tensor and hasattr(edge_index, "sparse_size"):  # EdgeIndex
        num_src, num_dst = edge_index.sparse_size()
        if num_src is not None and num_dst is not None:
            return num_src, num_dst
    ends = _csr.as_index(where, "edge_index", edge_index, (2, None))
    num_nodes = int(ends.max()) + 1 if ends.numel() else 0
    return num_nodes, num_nodes


def _of_buffer(
    edge_index: Any, num_src: int, num_dst: int, self_loops: bool
) -> tuple[Graph, Tensor | None] | None:
    """The result of `graph_of` if ``edge_index`` is the buffer of a graph of fixed capacity; else None."""
    graph = of_buffer(edge_index)
    if graph is None:
        return None
    if (graph.num_src, graph.num_dst) != (num_src, num_dst):
        raise ValueError(
            f"edge_index: expected {graph.num_src} source and {graph.num_dst} destination rows, the graph's "
            f"capacity, got {num_src} and {num_dst}"
        )
    return _of_graph(graph, self_loops)


def _of_graph(graph: Graph, self_loops: bool) -> tuple[Graph, Tensor | None]:
    """The result of `graph_of` for a Graph. The graph with loops is made once and cached."""
    if not self_loops:
        return graph, None
    looped, edge_map = _with_loops.get(graph, (None, None))
    if looped is None:
        looped, edge_map = graph.add_self_loops(remove_existing=True, return_edge_map=True)
        _with_loops[graph] = looped, edge_map
    structure = looped._structure
    return looped, structure.edge_map if isinstance(structure, FixedStructure) else edge_map


def once(parts: tuple[Tensor, ...], key: tuple, build: Callable[[], Any], more_state: tuple = ()) -> Any:
    """The value of ``build()``, called once for these tensors and this key, and cached.

    The value is cached as long as all of the tensors live, and built again when one was modified (see
    `state_of`) or ``more_state`` differs. Each set of tensors has at most 16 values; the least recently used
    one is dropped first. Nothing is cached for inference tensors, which do not count modifications, nor for
    tensors without values: fake ones, and those that a transform has wrapped.

    ``build`` runs outside of transforms, modes and inference mode if the tensors are plain, so that later
    calls can use its value. The value must not hold the tensors and must not be modified; two threads may
    both build it.
    """
    found = _found(parts, key)
    if found is not None and found[0] == more_state:
        return found[1]
    if not all(map(has_numbers, parts)) or any(map(Tensor.is_inference, parts)):
        with untraced(*parts):
            return build()
    state = tuple(map(state_of, parts))
    with untraced(*parts):
        value = build()
    _put(parts, state, key, more_state, value)
    return value


def of_segments(sizes: Tensor, num_rows: int) -> Graph:
    """The graph that leads from each of ``num_rows`` rows to its segment, of which the first has the first
    sizes[0] rows, and so on; cached as long as ``sizes`` lives."""

    def build() -> Graph:
        indptr = torch.nn.functional.pad(sizes.to(torch.int64).cumsum(0), (1, 0))
        return Graph.from_csr(indptr, torch.arange(num_rows, device=sizes.device), num_rows, validate=False)

    return once((sizes,), ("rows of segments", num_rows), build)


def _found(parts: tuple[Tensor, ...], key: tuple) -> tuple[tuple, Any] | None:
    """(more_state, value) as cached for these tensors in their current state, or None."""
    entry = _cache.get(tuple(map(id, parts)))
    found = None if entry is None else entry.values.get(key)
    if entry is None or found is None:
        return None
    for ref, part in zip(entry.refs, parts):
        if ref() is not part.__dict__:  # another tensor's entry, which has got the same id
            return None
    if tuple(map(state_of, parts)) != entry.state:
        return None
    if len(entry.values) > 1:
        with _lock:
            if key in entry.values:  # another thread may just have dropped it
                entry.values.move_to_end(key)
    return found


def _of_plain(x: Tensor, key: tuple) -> tuple[Graph, Tensor | None] | None:
    """The result of `graph_of` for a plain tensor on the CPU, made and cached without most of its checks,
    which take longer than sorting a small graph's edges. None for any other tensor, and for wrong edges."""
    if not (x.is_cpu and x.dtype is torch.int64 and x.layout is torch.strided):
        return None
    _, num_src, num_dst, self_loops = key
    # LIMIT // 2, because appended loops may double the number of edges.
    if x.dim() != 2 or x.shape[0] != 2 or max(x.shape[1], num_src, num_dst) >= _csr.LIMIT // 2:
        return None
    if x.is_inference() or in_a_mode() or not has_numbers(x):
        return None
    state = (state_of(x),)
    made = PackedGraph(x, None, (num_src, num_dst), self_loops)
    if made.num_edges < 0:  # a node is out of range: `_build` says which
        return None
    value = of_edges(Graph, made), made.edge_map
    _put((x,), state, key, (), value)
    return value


def _put(parts: tuple[Tensor, ...], state: tuple, key: tuple, more_state: tuple, value: Any) -> None:
    """Caches a value that `once` or `_of_plain` has made, until one of the tensors is freed."""
    place = tuple(map(id, parts))

    def forget(ref, lock=_lock, cache=_cache):  # bound as defaults: globals may be gone when Python ends
        with lock:
            entry = cache.get(place)
            # A dead reference equals itself alone, so this does not delete a newer entry of tensors that got
            # the same ids.
            if entry is not None and ref in entry.refs:
                del cache[place]

    with _lock:
        entry = _entry(place, parts, state)
        if entry is None:
            refs = tuple([weakref.ref(_attributes(part), forget) for part in parts])
            entry = _cache[place] = _Entry(refs, state, OrderedDict())
        entry.values[key] = more_state, value
        if len(entry.values) > _LIMIT:
            entry.values.popitem(last=False)


def keep(edge_index: Tensor, graph: Graph) -> None:
    """Cache ``graph``, made elsewhere, as the graph of ``edge_index``, which has the same edges in the same
    order. The tensor must not share memory with the graph, which would keep it alive."""
    once(parts_of(edge_index), ("graph_of", graph.num_src, graph.num_dst, False), lambda: (graph, None))


def _entry(place: tuple[int, ...], parts: tuple[Tensor, ...], state: tuple) -> _Entry | None:
    """The cached values for these tensors in their current state, or None."""
    entry = _cache.get(place)
    if entry is None or entry.state != state:
        return None
    return entry if all(ref() is x.__dict__ for ref, x in zip(entry.refs, parts)) else None


def _attributes(x: Tensor) -> _Attributes:
    found = x.__dict__
    if type(found) is not _Attributes:
        found = x.__dict__ = _Attributes(found)
    return found


def check_type(edge_index: Any, where: str = "") -> None:
    if not isinstance(edge_index, Tensor) and not hasattr(edge_index, "sparse_sizes"):
        got = _csr.no_tensor("edge_index", edge_index).partition(", ")[2]
        raise TypeError(
            f"{where and f'{where}: '}edge_index: expected a [2, E] tensor, an EdgeIndex, a SparseTensor, a "
            f"torch.sparse tensor or a dfgnn.Graph, {got}"
        )


def parts_of(edge_index: Any, where: str = "") -> tuple[Tensor, ...]:
    """The tensors whose identity is the cache's key."""
    if not isinstance(edge_index, Tensor):
        check_type(edge_index, where)
        return edge_index.csr()[:2]  # SparseTensors that share a structure share these tensors
    if hasattr(edge_index, "as_tensor"):  # EdgeIndex
        edge_index = edge_index.as_tensor()
    return (without_gradient(edge_index),)


def state_of(part: Tensor) -> tuple:
    """A value that changes when the tensor is modified. On the CPU a checksum of the contents is part of it;
    on other devices that would wait, so that only modifications by PyTorch are noticed."""
    if part.layout is not torch.strided:
        return part.layout, part.shape, *map(state_of, _indices(part))
    place, checksum = part.data_ptr(), None
    if part.is_cpu:
        if part.is_contiguous() or (part.dim() == 2 and part.t().is_contiguous()):
            size = part.nbytes
            # Memory that cannot be read gets a value that equals no other.
            checksum = (short_checksum if size <= _SHORT else long_checksum)(place, size) or object()
        else:
            checksum = _checksums(part)
    return part._version, place, part.stride(), part.shape, part.dtype, part.device, checksum


_SHORT = 2**20  # bytes whose checksum takes about 50 µs: `short_checksum` blocks other threads for so long


def _checksums(x: Tensor) -> tuple:
    """The checksum of a tensor whose memory has gaps."""
    with untraced(x):
        if x.dim() == 2 and x.stride(0) == 1:  # transposed: read in the order of memory
            x = x.t()
        rows = x.unbind() if x.dim() == 2 and len(x) <= 2 else (x,)
        return tuple(long_checksum(row.data_ptr(), row.nbytes) for row in map(Tensor.contiguous, rows))


def _indices(matrix: Tensor) -> tuple[Tensor, ...]:
    if matrix.layout == torch.sparse_csr:
        return matrix.crow_indices(), matrix.col_indices()
    if matrix.layout == torch.sparse_csc:
        return matrix.ccol_indices(), matrix.row_indices()
    return (matrix._indices(),)


def _build(
    edge_index: Any, num_src: int, num_dst: int, self_loops: bool, where: str, sizes: str = _OF_FEATURES
) -> tuple[Graph, Tensor | None]:
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return _build_of_sparse(edge_index, num_src, num_dst, self_loops, where)
    if self_loops and edge_index.dtype in SMALL_DTYPES:
        edge_index = edge_index.to(torch.int64)
    edge_index = _csr.as_index(where, "edge_index", edge_index, (2, None))
    num_loops = min(num_src, num_dst) if self_loops else 0
    _csr.as_size(where, "number of edges", edge_index.shape[1] + num_loops)
    with untraced(edge_index):
        if not self_loops and edge_index.dtype == torch.int32:
            # The graph would hold a view of int32 ids, which keeps the tensor alive and changes with it.
            edge_index = edge_index.clone()
        src, dst = edge_index.unbind()
        try:
            given = _csr.UserEdges(where, _csr.EDGE_INDEX, src, dst, num_src, num_dst)
            edges = _csr.from_edges(given, with_loops=self_loops)
        except ValueError as error:
            rows = f"{num_src} rows" if num_src == num_dst else f"{num_src} and {num_dst} rows"
            raise ValueError(f"{error}; {sizes.format(rows)}") from None
        return of_edges(Graph, edges), edges.edge_map


@tracing.untransformed()
def _build_of_sparse(
    matrix: Any, num_src: int, num_dst: int, self_loops: bool, where: str
) -> tuple[Graph, Tensor | None]:
    graph = _from_sparse(matrix)
    if (graph.num_src, graph.num_dst) != (num_src, num_dst):
        raise ValueError(
            f"{where}: edge_index: expected a sparse tensor [num_dst={num_dst}, num_src={num_src}], "
            f"got [{graph.num_dst}, {graph.num_src}]"
        )
    return graph.add_self_loops(remove_existing=True, return_edge_map=True) if self_loops else (graph, None)


def _from_sparse(matrix) -> Graph:
    if isinstance(matrix, Tensor):
        return Graph.from_pyg(matrix)
    indptr, indices, _ = matrix.csr()
    return Graph.from_csr(indptr.clone(), indices.clone(), matrix.size(1))
