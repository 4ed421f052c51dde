"""Sums of rows by an index: what PyTorch computes slowly, by kernels of this library.

``index_add``, ``scatter_add`` and the gradients of ``x[index]``, ``index_select`` and ``gather`` add rows of
edges to rows of nodes. On a GPU, PyTorch adds them by atomic operations; for ``x[index]`` it sorts the index
at each call and then adds the rows of a node one after the other. While `IndexSums` are installed, an index
that comes again is sorted once, and a kernel sums the rows in that order: on an H200, where it is taken, 1.8
to 52 times as fast as the gradient of ``x[index]`` (3.2 ms, and 0.07, where 100 nodes have 4,000 edges each),
1.4 to 5.5 times as fast as ``index_add``, 1.0 to 2.1 times as ``scatter_add`` (48 sizes). In 16 bits it
rounds each sum once. On the CPU the kernel sorts
nothing; there the gradient of ``x[index]`` takes PyTorch 1.2 to 2.7 times as long on one thread, 5 to 16
times on two.

On a GPU an index is known by its memory and by the number of modifications that PyTorch counts, as edges are
(:mod:`dfgnn.graph.cache`). Within a capture of a CUDA graph only one that is `constant` is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..capturing import constants
from ..engine import by_index, operators
from ..engine.edge_maps import prepared_sum, sum_of_edges
from ..graph import Graph
from ..runtime import library
from ..runtime import torch_internals as internals


class IndexSums:
    """The functions that take the place of PyTorch's kernels on a type of device while they are installed."""

    device_type: str
    dtypes: frozenset[torch.dtype]
    #: Operator -> from how many elements, and from how many rows for each row of the result, this is faster.
    least: dict[str, tuple[int, int]]

    def __init__(self) -> None:
        self.count = 0  # sums that were computed
        self._users = 0
        self._library: Any = None
        self._theirs: dict[str, Any] = {}

    def install(self) -> None:
        if not self._users:
            ours = {
                "index_add": self._index_add, "index_add_": self._index_add_,
                "scatter_add": self._scatter_add, "scatter_add_": self._scatter_add_,
                "_index_put_impl_": self._index_put_,
            }  # fmt: skip
            self._library, self._theirs = internals.replaced_kernels(ours, self.device_type)
        self._users += 1

    def remove(self) -> None:
        self._users -= 1
        if not self._users:
            internals.put_back_kernels(self._library)
            self._library, self._theirs = None, {}
            self._forget()

    @contextmanager
    def installed(self) -> Iterator[None]:
        self.install()
        try:
            yield
        finally:
            self.remove()

    # ---- PyTorch's operators

    def _index_add(self, x, dim, index, source, *, alpha=1):
        sums = self._sums("index_add", x, dim, index, source) if alpha == 1 else None
        return self._theirs["index_add"](x, dim, index, source, alpha=alpha) if sums is None else sums.add_(x)

    def _index_add_(self, x, dim, index, source, *, alpha=1):
        sums = self._sums("index_add", x, dim, index, source) if alpha == 1 else None
        if sums is None:
            return self._theirs["index_add_"](x, dim, index, source, alpha=alpha)
        return x.add_(sums)

    def _scatter_add(self, x, dim, index, source):
        sums = self._sums("scatter_add", x, dim, index, source)
        return self._theirs["scatter_add"](x, dim, index, source) if sums is None else sums.add_(x)

    def _scatter_add_(self, x, dim, index, source):
        sums = self._sums("scatter_add", x, dim, index, source)
        return self._theirs["scatter_add_"](x, dim, index, source) if sums is None else x.add_(sums)

    def _index_put_(self, x, indices, values, accumulate=False, unsafe=False):
        sums = None
        if accumulate and len(indices) == 1:
            sums = self._sums("_index_put_impl_", x, 0, indices[0], values)
        if sums is None:
            return self._theirs["_index_put_impl_"](x, indices, values, accumulate, unsafe)
        return x.add_(sums)

    # ---- their results

    def _sums(self, name: str, x: Tensor, dim: int, index: Tensor | None, source: Tensor) -> Tensor | None:
        """``[N, ...]``, new memory: the sums of the rows of source; None: PyTorch is to compute them."""
        least, times = self._least(name)
        if source.numel() < least or index is None or dim not in (0, -x.dim()) or not x.numel():
            return None  # asked first, as small sums take little longer than the other questions
        if name == "scatter_add":
            index = _of_rows(index, source)
        if index is None or index.dim() != 1 or index.dtype != torch.int64:
            return None
        (num_edges,), (num_rows, *row) = index.shape, x.shape
        if num_edges < times * num_rows or source.shape != (num_edges, *row) or x.dtype != source.dtype:
            return None
        if source.dtype not in self.dtypes or index.device != source.device:
            return None
        sums = self._computed(name, index, num_rows, source.detach())
        self.count += sums is not None
        return sums

    def _least(self, name: str) -> tuple[int, int]:
        return self.least[name]

    def _computed(self, name: str, index: Tensor, num_rows: int, source: Tensor) -> Tensor | None:
        raise NotImplementedError

    def _forget(self) -> None:
        """Lets go of what was kept."""


def _of_rows(index: Tensor, source: Tensor) -> Tensor | None:
    """The index of the rows, if that of ``scatter_add`` is the same for all columns."""
    if index.dim() == 0 or index.shape != source.shape:
        return None
    if any(stride and size > 1 for size, stride in zip(index.shape[1:], index.stride()[1:])):
        return None
    return index.as_strided((len(index),), (index.stride(0),))


class OnCpu(IndexSums):
    device_type, dtypes = "cpu", frozenset(by_index.DTYPES)
    least = {"_index_put_impl_": (1 << 13, 1), "index_add": (1 << 16, 1), "scatter_add": (1 << 16, 1)}
    #: Wider rows PyTorch adds as fast, other than gradients of x[index].
    most_columns = 32

    def _computed(self, name: str, index: Tensor, num_rows: int, source: Tensor) -> Tensor | None:
        if name != "_index_put_impl_" and source.numel() > self.most_columns * len(index):
            return None
        rows = source.unsqueeze(1) if source.dim() == 1 else source.flatten(1)
        try:
            sums = operators.index_sum(rows.contiguous(), index.contiguous(), num_rows)
        except RuntimeError:  # a number counts from the end, or is out of range, which PyTorch says
            return None
        return sums.view(num_rows, *source.shape[1:])


class _Index:
    """An index in its present state. reference: keeps its address from being used again."""

    __slots__ = ("graph", "prepared", "reference", "seen", "version")

    def __init__(self, reference: Any, version: int):
        self.reference, self.version, self.seen = reference, version, 0
        self.graph: Graph | None = None
        # By columns and dtype.
        self.prepared: dict[tuple[int, torch.dtype], Callable[[Tensor], Tensor] | None] = {}

    def sums(self, rows: Tensor, captures: bool) -> Tensor | None:
        """``[N, ...]``: the sums of rows ``[E, ...]``, if there is a graph. captures: a CUDA graph is being
        captured, in which nothing is prepared, because it would be there only after a replay."""
        if self.graph is None:
            return None
        flat = rows if rows.dim() == 2 else rows.view(rows.shape[0], rows.shape[1:].numel())
        key = flat.shape[1], rows.dtype
        if key not in self.prepared:
            if captures:
                return None
            with torch.no_grad():
                self.prepared[key] = prepared_sum(self.graph, *key)
        prepared = self.prepared[key]
        sums = sum_of_edges(self.graph, flat) if prepared is None else prepared(flat)
        return sums if flat is rows else sums.view(sums.shape[0], *rows.shape[1:])


class OnGpu(IndexSums):
    device_type = "cuda"
    dtypes = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
    # A call takes the host about 70 µs more than PyTorch's of index_add and scatter_add, which have to be
    # gained on the GPU, in case it waits for the host; less than that of the gradient of x[index].
    least = {"_index_put_impl_": (1 << 17, 2), "index_add": (1 << 24, 4), "scatter_add": (1 << 26, 8)}
    #: Within `constant`, where the host computes nothing in a replay.
    least_of_constant = {**least, "index_add": (1 << 22, 4), "scatter_add": (1 << 23, 8)}
    #: Sums by an index before it is sorted, which PyTorch computes. They find numbers that are out of range;
    #: and most indices that are made anew in each step are not sorted.
    before, before_of_constant = 16, 1
    most_indices = 64
    #: An index that is not sorted, of at least so many rows for each of a table of at most so many, is summed
    #: by groups of so many rows, as PyTorch's gradient of x[index] adds the rows of one number in turn.
    rows_of_table, most_of_table, group = 256, 64, 128

    def __init__(self) -> None:
        super().__init__()
        self._indices: dict[tuple, _Index] = {}
        # Within `constant`: what keeps the graphs that a CUDA graph uses.
        self._holder: dict[int, _Index] | None = None

    def _least(self, name: str) -> tuple[int, int]:
        return self.least[name] if self._holder is None else self.least_of_constant[name]

    def install(self) -> None:
        super().install()
        constants.index_sums.append(self)

    def remove(self) -> None:
        constants.index_sums.remove(self)
        super().remove()

    @contextmanager
    def constant(self, holder: dict[int, Any]) -> Iterator[None]:
        """A context in which the index never changes, so that CUDA graphs may use what was made of it.
        holder: gets what has to live as long as they do."""
        before, self._holder = self._holder, holder
        try:
            yield
        finally:
            self._holder = before

    def _computed(self, name: str, index: Tensor, num_rows: int, source: Tensor) -> Tensor | None:
        captures = index.is_cuda and torch.cuda.is_current_stream_capturing()
        found = self._sorted(index, num_rows, captures)
        if found is not None:
            return found.sums(source.contiguous(), captures)
        few = num_rows <= self.most_of_table and index.numel() >= self.rows_of_table * num_rows
        return self._by_groups(index, num_rows, source) if few and name == "_index_put_impl_" else None

    def _by_groups(self, index: Tensor, num_rows: int, source: Tensor) -> Tensor:
        """The sums of groups of rows, summed. Numbers out of range stay so."""
        count = -(-index.numel() // self.group)
        row = torch.where(index < 0, index + num_rows, index)
        place = torch.where(row < 0, num_rows, row) * count
        place += torch.arange(index.numel(), device=index.device) // self.group
        sums = source.new_zeros(num_rows * count, *source.shape[1:])
        self._theirs["_index_put_impl_"](sums, [place], source, True, False)
        return sums.unflatten(0, (num_rows, count)).sum(1)

    def _sorted(self, index: Tensor, num_rows: int, captures: bool) -> _Index | None:
        """The index with the graph from each row to its sum, or None if that is not to be made yet."""
        if index.is_inference() or (captures and self._holder is None):
            return None
        storage, stream = index.untyped_storage(), internals.current_stream(index.device)
        key = storage._cdata, index.storage_offset(), index.numel(), index.stride(0), num_rows, stream
        found = self._indices.get(key)
        if found is None or found.version != index._version or found.reference.expired():
            self._forget_gone()
            found = self._indices[key] = _Index(internals.StorageWeakRef(storage), index._version)
        before = self.before if self._holder is None else self.before_of_constant
        if found.graph is None and not captures and found.seen >= before:
            with torch.no_grad():
                found.graph = _graph(index, num_rows)
        found.seen += 1
        if found.graph is None:
            return None
        if self._holder is not None:
            self._holder[id(found)] = found
        return found

    def _forget_gone(self) -> None:
        """Lets go of indices whose memory is gone, else of the oldest if there are too many."""
        gone = [key for key, found in self._indices.items() if found.reference.expired()]
        for key in gone or [*self._indices][: max(0, len(self._indices) - self.most_indices + 1)]:
            del self._indices[key]

    def _forget(self) -> None:
        self._indices.clear()


def _graph(index: Tensor, num_rows: int) -> Graph:
    # Each number is in range, or counts from the end, because PyTorch has computed with the index before.
    index = torch.where(index < 0, index + num_rows, index)
    src = torch.arange(len(index), dtype=torch.int32, device=index.device)
    graph = Graph.from_coo(src, index.int(), num_src=len(index), num_dst=num_rows, validate=False)
    return graph.one_shot()  # whose plans wait for nothing


on_cpu, on_gpu = OnCpu(), OnGpu()


def of_this_machine() -> list[IndexSums]:
    """Those whose kernels are installed and whose device is there. (Counting GPUs does not initialize CUDA,
    so the script may still fork.)"""
    on_gpus = library.has_cuda_library() and torch.cuda.device_count()
    return [on_cpu] * library.compiled + [on_gpu] * bool(on_gpus)
