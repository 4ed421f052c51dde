"""Graphs within the CUDA graphs of torch.compile: every replay sorts the current values of ``edge_index``.

A replay runs no Python, so that it cannot look a graph up by its ``edge_index``. Instead an operator
(`structure`) computes both CSRs, and on a GPU their work items, by kernels that the host does not wait for.
They are one tensor, the packed structure, whose size follows from the shape of ``edge_index``. The operators
of attention make a Graph of it (`graph_of`) while they are recorded. Nothing may hold that Graph afterwards,
because its memory is the CUDA graph's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan import items
from ..plan.plans import Items
from ..runtime import torch_internals as internals
from ..runtime.tracing import is_plain
from ..sparse import csr as _csr
from ..sparse.csr import CSR
from ..sparse.structure import Side
from . import Graph, build
from .fixed_capacity import OF_BUFFER

# Maximum number of edges of a graph that is sorted at every replay. The attention of a larger one runs
# outside of CUDA graphs, with the cached graph and plans that suit its degrees: its launches cost little.
# Measured on an H200, two layers of GAT, in and outside: 492,000 edges 1.48 and 2.85 ms, 2 million 3.4 and
# 2.7 ms.
MOST_EDGES = 2**20

DEVICES = ("cuda",)  # the types of devices for which Inductor records CUDA graphs
# Maximum edges per work item. It is small, because the longest work item determines a small graph's time.
_BOUND = 64
# CUDA's kernels load four int32 at a time, so that each part of the packed structure is aligned to four.
_STEP = 4


def is_recorded(edge_index: Tensor) -> bool:
    """Whether Inductor compiles with CUDA graphs, and there are at most `MOST_EDGES` edges. A number of edges
    that depends on values counts as too large."""
    if is_plain(edge_index) or not internals.inductor_uses_cuda_graphs():
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return edge_index.device.type in DEVICES and guard_or_false(edge_index.shape[-1] <= MOST_EDGES)


def tell_of_cuts(edge_index: Tensor) -> None:
    """Warns where Inductor will cut its CUDA graph at the attention of a graph that is not recorded."""
    if edge_index.device.type in DEVICES and internals.inductor_cuts_cuda_graphs():
        warnings.warn(
            f"attention with more than {MOST_EDGES} edges, or with edge attributes where loops are replaced, "
            f"is outside of CUDA graphs. {internals.OF_CUTS}, or take dfgnn.compile, which does",
            stacklevel=2,
        )


def structure(edge_index: Tensor, num_src: int, num_dst: int, self_loops: bool) -> Tensor:
    """The packed structure: both CSRs with their edge ids, that by destination first, and on a GPU the work
    items and split rows of each (`_shapes`). It is one tensor, because each tensor that passes from forward
    to backward costs the host time. The CSRs have the capacity of `num_places`; positions that hold no edge
    belong to no row."""
    if OF_BUFFER.get(edge_index) is not None:
        raise NotImplementedError(
            "edge_index: expected no buffer of a graph of fixed capacity in CUDA graphs of torch.compile, "
            "where it is unknown which of its edges are in use; take dfgnn.capture, or a layer of dfgnn.nn "
            "with the Graph"
        )
    src, dst = edge_index.unbind()
    if not edge_index.is_cuda:
        return _packed(_structure_on_cpu(src, dst, num_src, num_dst, self_loops))
    numbers, *by_dst, _, indptr, indices, eids = _csr.structure_on_gpu(src, dst, num_src, num_dst, self_loops)
    if torch.cuda.is_current_stream_capturing():
        low_src, high_src, low_dst, high_dst = numbers[:4].unbind()
        inside = (low_src >= 0) & (high_src < num_src) & (low_dst >= 0) & (high_dst < num_dst)
        internals.assert_async(inside, f"edge_index: expected values in [0, {num_src}) and [0, {num_dst})")
    else:
        _given(src, dst, num_src, num_dst).with_sizes(numbers[:4].tolist())
    csrs = CSR(*by_dst), CSR(indptr, indices, eids)
    plans = [tensor for csr in csrs for tensor in items.of_rows_once(csr, _BOUND)[:2]]
    return _packed([*by_dst, indptr, indices, eids, *plans])


def _given(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> _csr.UserEdges:
    return _csr.UserEdges("Graph.from_pyg", _csr.EDGE_INDEX, src, dst, num_src, num_dst)


def _structure_on_cpu(src: Tensor, dst: Tensor, num_src: int, num_dst: int, self_loops: bool) -> list[Tensor]:
    edges = _csr.from_edges(_given(src, dst, num_src, num_dst), with_loops=self_loops)
    graph = build.of_edges(Graph, edges)
    room, made = num_places(src, num_src, num_dst, self_loops), []
    for indptr, indices, eids in (graph.csr(), graph.reverse_csr(need_eids=True)):
        if eids is None:
            eids = torch.arange(len(indices), dtype=torch.int32)
        more = indices.new_zeros(room - len(indices))
        made += [indptr, *(torch.cat([x, more]) for x in (indices, eids))]
    return made


def num_places(src: Tensor, num_src: Any, num_dst: Any, self_loops: bool) -> Any:
    """The capacity: the number of edges, plus that of the loops that are appended."""
    return src.shape[-1] + (torch.sym_min(num_src, num_dst) if self_loops else 0)


def _shapes(room: Any, num_src: Any, num_dst: Any, planned: bool) -> list[tuple]:
    """The shapes of the parts of the packed structure, all int32: an int64 entry of indptr takes two. room:
    the capacity. planned: whether there are work items and split rows."""
    more = room // _BOUND  # cutting rows of more than _BOUND edges adds at most this number of work items
    csrs = [((num_rows + 1, 2), (room,), (room,)) for num_rows in (num_dst, num_src)]
    plans = [((num_rows + more, 4), (more, 4)) for num_rows in (num_dst, num_src)] if planned else []
    return [shape for shapes in (*csrs, *plans) for shape in shapes]


def _size(shape: tuple) -> Any:
    """The size of a part with the padding that aligns the next one."""
    return (math.prod(shape) + _STEP - 1) // _STEP * _STEP


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    padding, parts = tensors[1].new_zeros(_STEP), []
    for tensor in tensors:
        words = tensor.flatten().view(torch.int32)
        parts += [words, padding[: -len(words) % _STEP]]
    return torch.cat(parts)


def structure_fake(edge_index: Tensor, num_src: Any, num_dst: Any, self_loops: bool) -> Tensor:
    room = num_places(edge_index, num_src, num_dst, self_loops)
    size = sum(map(_size, _shapes(room, num_src, num_dst, edge_index.is_cuda)))
    return edge_index.new_empty(size, dtype=torch.int32)


def graph_of(packed: Tensor, num_src: int, num_dst: int, room: int) -> Graph:
    """The Graph of a packed structure. room: its capacity."""
    shapes = _shapes(room, num_src, num_dst, packed.is_cuda)
    split = packed.split_with_sizes(list(map(_size, shapes)))
    parts = [part[: math.prod(shape)].view(shape) for part, shape in zip(split, shapes)]
    csrs = [(parts[k].view(torch.int64).squeeze(1), *parts[k + 1 : k + 3]) for k in (0, 3)]
    plans = [Items(parts[k], parts[k + 1], 2 * len(parts[k + 1])) for k in range(6, len(parts), 2)]
    if not plans:  # the CPU's kernels need CSRs without unused capacity
        csrs = [(indptr, x[: indptr[-1]], eids[: indptr[-1]]) for indptr, x, eids in csrs]
    by_dst, by_src = (CSR(*csr) for csr in csrs)
    graph = Graph._make(Side(num_dst, (by_dst, True)), Side(num_src, (by_src, True)), once=True)
    for reverse, found in enumerate(plans):
        graph._planner._direction(bool(reverse)).items_once = found
    return graph
