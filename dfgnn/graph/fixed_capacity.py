"""Graphs of fixed capacity: makes their buffers, and copies edges into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime.tracing import not_compiled, untraced
from ..sparse import csr as _csr
from ..sparse.fixed import FixedStructure

# The edge_index that is a graph's buffer -> a weak reference to that graph.
OF_BUFFER = WeakIdKeyDictionary()
_WITH, _COPY = "Graph.with_capacity", "Graph.copy_"


def of_buffer(edge_index: Any) -> Any:
    """The graph of fixed capacity of which ``edge_index`` is the buffer, or None."""
    found = OF_BUFFER.get(edge_index) if isinstance(edge_index, Tensor) else None
    return None if found is None else found()


def sizes_of(where: str, name: str, value: Any) -> tuple[int, int]:
    """(num_src, num_dst) of a number of nodes, or of a pair of them."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return _csr.as_size(where, f"{name}[0]", value[0]), _csr.as_size(where, f"{name}[1]", value[1])
    number = _csr.as_size(where, name, value)
    return number, number


@not_compiled
def make(num_nodes: Any, num_edges: Any, device: Any) -> FixedStructure:
    """The structure of `Graph.with_capacity`, without edges in use."""
    num_src, num_dst = sizes_of(_WITH, "num_nodes", num_nodes)
    num_edges = _csr.as_size(_WITH, "num_edges", num_edges)
    # Layers may append a loop per node.
    _csr.as_size(_WITH, "num_edges + num_nodes", num_edges + min(num_src, num_dst))
    if num_edges and not (num_src and num_dst):
        raise ValueError(f"{_WITH}: num_nodes: expected nodes for {num_edges} edges, got {num_nodes}")
    with untraced():
        edges = torch.empty(2, num_edges, dtype=torch.int64, device=device)
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        structure = FixedStructure(edges, counts, num_src, num_dst)
        _pad(structure, 0)
    return structure


def _pad(structure: FixedStructure, begin: int) -> None:
    """Sets the columns from ``begin`` on to the last source and destination: they stay valid indices."""
    if begin < structure.edges.shape[1]:
        for end, side in zip(structure.edges, (structure.src, structure.dst)):
            end[begin:].fill_(max(side.num_rows - 1, 0))


@not_compiled
def fill(structure: FixedStructure, edge_index: Any, num_nodes: Any, num_edges: Any, validate: bool) -> None:
    """See `Graph.copy_`."""
    src, dst = _csr.ends_of(_COPY, edge_index)
    capacity, given = structure.edges.shape[1], src.numel()
    if given > capacity:
        raise ValueError(f"{_COPY}: edge_index: expected at most {capacity} edges, the capacity, got {given}")
    rows = structure.src.num_rows, structure.dst.num_rows
    on_device = isinstance(num_nodes, Tensor)
    sizes = rows if num_nodes is None or on_device else sizes_of(_COPY, "num_nodes", num_nodes)
    for name, size, most in zip(("sources", "destinations"), sizes, rows):
        if size > most:
            raise ValueError(f"{_COPY}: num_nodes: expected at most {most} {name}, the capacity, got {size}")
    count = given if num_edges is None else num_edges
    if not isinstance(count, Tensor):
        count = _csr.as_size(_COPY, "num_edges", count)
        if count > given:
            raise ValueError(f"{_COPY}: num_edges: expected at most {given}, those given, got {count}")
    if (validate or src.device.type == "cpu") and not on_device and not isinstance(count, Tensor):
        _csr.UserEdges(_COPY, _csr.EDGE_INDEX, src[:count], dst[:count], *sizes).checked(validate=True)
    assert structure.counts is not None
    with untraced(structure.edges):
        for end, values in zip(structure.edges, (src, dst)):
            end[:given].copy_(values, non_blocking=True)
        _pad(structure, given)
        if on_device:
            structure.counts[:2].copy_(num_nodes, non_blocking=True)
        else:
            for place, size in enumerate(sizes):
                structure.counts[place].fill_(size)
        if isinstance(count, Tensor):
            structure.counts[2].copy_(count, non_blocking=True)
        else:
            structure.counts[2].fill_(count)
    structure.renew()
