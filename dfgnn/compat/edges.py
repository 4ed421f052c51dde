"""Reads the forms of edges that DGL's functions accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..nn import DGLError


def of_data(
    where: str, data: Any, num_src: int | None = None, num_dst: int | None = None, device: Any = None
) -> Graph:
    """A Graph from (sources, destinations), pairs of numbers, ("coo", ...), ("csr", (indptr, columns, edge
    ids)), ("csc", ...), a SciPy matrix[source, destination] or a networkx graph.

    Sizes: None for the largest number + 1, or for one common number if both are None.
    """
    if hasattr(data, "tocoo"):
        src, dst, sizes = *_of_scipy(data), data.shape
    elif hasattr(data, "edges") and hasattr(data, "nodes"):
        src, dst, sizes = *_of_networkx(data), (len(data.nodes), len(data.nodes))
    else:
        (src, dst), sizes = _ends(where, data), None
    if sizes is not None and sizes[0] != sizes[1] and num_src is None and num_dst is None:
        raise DGLError(f"{where}: data: expected a square matrix, got {tuple(sizes)}")
    num_src, num_dst = (num_src, num_dst) if sizes is None or num_src is not None else sizes
    src, dst = (x if device is None else x.to(device) for x in (src, dst))
    if num_src is None and num_dst is None:
        num_src = num_dst = max((int(x.max()) + 1 if len(x) else 0) for x in (src, dst))
    return Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)


def between(ends: Any, num_src: int, num_dst: int) -> Graph:
    """The Graph of the edges ``ends``, (sources, destinations)."""
    src, dst = ends
    return Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)


def _ends(where: str, data: Any) -> tuple[Tensor, Tensor]:
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], str):
        form, arrays = data
        if form == "coo":
            return _ends(where, arrays)
        if form not in ("csr", "csc"):
            raise DGLError(f"{where}: data: expected 'coo', 'csr' or 'csc', got {form!r}")
        return _of_compressed(form, *arrays)
    are_ends = isinstance(data, tuple) and len(data) == 2
    if isinstance(data, Sequence) and data and not are_ends and all(map(_is_pair, data)):
        data = tuple(zip(*data))
    if not isinstance(data, (tuple, list, Tensor)) or len(data) != 2:
        raise DGLError(
            f"{where}: data: expected (sources, destinations), a list of pairs, ('csr', (indptr, indices, "
            f"eids)), a SciPy matrix or a networkx graph, got {type(data).__name__}"
        )
    src, dst = (as_index(x) for x in data)
    return src, dst


def _is_pair(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2


def as_index(x: Any) -> Tensor:
    x = torch.as_tensor(x)
    return x.long() if x.numel() == 0 or x.dtype not in (torch.int32, torch.int64) else x


def _of_compressed(form: str, indptr: Any, indices: Any, eids: Any = ()) -> tuple[Tensor, Tensor]:
    indptr, indices, eids = as_index(indptr), as_index(indices), as_index(eids)
    outer = torch.arange(len(indptr) - 1, dtype=indices.dtype, device=indices.device)
    outer = outer.repeat_interleave(indptr.diff())
    if len(eids):
        outer, indices = (torch.empty_like(x).index_copy(0, eids.long(), x) for x in (outer, indices))
    return (outer, indices) if form == "csr" else (indices, outer)


def _of_scipy(matrix: Any) -> tuple[Tensor, Tensor]:
    matrix = matrix.tocoo()
    return torch.as_tensor(matrix.row, dtype=torch.int64), torch.as_tensor(matrix.col, dtype=torch.int64)


def _of_networkx(graph: Any) -> tuple[Tensor, Tensor]:
    graph = graph if graph.is_directed() else graph.to_directed()
    place = {node: k for k, node in enumerate(sorted(graph.nodes) if _sortable(graph.nodes) else graph.nodes)}
    ends = [(place[u], place[v]) for u, v in graph.edges()]
    src, dst = torch.tensor(ends, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return src, dst


def _sortable(nodes: Any) -> bool:
    return all(isinstance(node, int) for node in nodes)
