"""Graphs within the CUDA graphs of torch.compile: sorted anew at every replay, of what an ``edge_index`` then
holds.

A graph that is looked up by its ``edge_index`` would keep the attention out of a CUDA graph, as replays run
no Python. So there an operator yields both CSRs, and on a GPU their plans, in a shape that follows from that
of ``edge_index``, by kernels that nobody waits for. What takes them makes a Graph of them while it is
recorded, and keeps none: that would hold memory of the CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph, build
from ..graph.capacity import OF_BUFFER
from ..plan import items
from ..plan.plans import Items
from ..runtime import torch_internals as internals
from ..runtime.compiling import is_plain
from ..sparse import csr as _csr
from ..sparse.csr import CSR
from ..sparse.structure import Side

__all__ = ["graph_of", "is_recorded", "num_places", "structure", "structure_fake"]

# Edges up to which a graph is sorted at every replay. Larger ones are kept, with plans that suit their
# degrees, and outside: there the launches of some more CUDA graphs do not count.
MOST_EDGES = 2**18

DEVICES = ("cuda",)  # whose graphs Inductor can record
_BOUND = 64  # of an item's edges: of small graphs the longest one counts
_STEP = 4  # numbers that CUDA's kernels load at a time


def is_recorded(edge_index: Tensor) -> bool:
    """Whether Inductor is at work that will put what becomes of ``edge_index`` into CUDA graphs, and it is
    not too large. A number of edges that nobody knows before is."""
    if is_plain(edge_index) or not internals.inductor_uses_cuda_graphs():
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return edge_index.device.type in DEVICES and guard_or_false(edge_index.shape[1] <= MOST_EDGES)


def structure(edge_index: Tensor, num_src: int, num_dst: int, self_loops: bool) -> Tensor:
    """Both CSRs with their edge ids, by destination first, and on a GPU the items and splits of either, in
    one tensor (`_shapes`), as a replay's host handles each that passes from forward to backward. With loops
    they have places for all edges and loops; what is no edge is in no row."""
    if OF_BUFFER.get(edge_index) is not None:
        raise NotImplementedError(
            "edge_index: expected no buffer of a graph of fixed capacity in CUDA graphs of torch.compile, "
            "where nobody knows which of its edges are in use; take dfgnn.capture, or a layer of dfgnn.nn "
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
    """Of edges and loops."""
    return src.shape[-1] + (torch.sym_min(num_src, num_dst) if self_loops else 0)


def _shapes(room: Any, num_src: Any, num_dst: Any, planned: bool) -> list[tuple]:
    """Of int32 parts; those of indptr are pairs."""
    more = room // _BOUND
    csrs = [((num_rows + 1, 2), (room,), (room,)) for num_rows in (num_dst, num_src)]
    plans = [((num_rows + more, 4), (more, 4)) for num_rows in (num_dst, num_src)] if planned else []
    return [shape for shapes in (*csrs, *plans) for shape in shapes]


def _size(shape: tuple) -> Any:
    """Of a part, up to where the next one begins, as kernels load it."""
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
    """Of what `structure` gave, of so many places."""
    shapes = _shapes(room, num_src, num_dst, packed.is_cuda)
    split = packed.split_with_sizes(list(map(_size, shapes)))
    parts = [part[: math.prod(shape)].view(shape) for part, shape in zip(split, shapes)]
    csrs = [(parts[k].view(torch.int64).squeeze(1), *parts[k + 1 : k + 3]) for k in (0, 3)]
    plans = [Items(parts[k], parts[k + 1], 2 * len(parts[k + 1])) for k in range(6, len(parts), 2)]
    if not plans:  # the CPU's kernels want no more places than edges
        csrs = [(indptr, x[: indptr[-1]], eids[: indptr[-1]]) for indptr, x, eids in csrs]
    by_dst, by_src = (CSR(*csr) for csr in csrs)
    graph = Graph._make(Side(num_dst, (by_dst, True)), Side(num_src, (by_src, True)), once=True)
    for reverse, found in enumerate(plans):
        graph._planner._direction(bool(reverse)).items_once = found
    return graph
