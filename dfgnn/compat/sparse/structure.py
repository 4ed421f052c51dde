"""The positions of a sparse matrix's entries, and the Graph over which its products run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...graph import Graph
from ...graph.cache import once
from ...runtime.tracing import not_compiled

INDEX_DTYPES = torch.int32, torch.int64


class Structure:
    """Positions of entries, in the order of their values. Rows are destinations of the Graph's edges, columns
    are sources, so that a product with a dense matrix is a sum over the edges into each row."""

    def __init__(self, row: Tensor, col: Tensor, shape: tuple[int, int], graph: Graph):
        self.row, self.col, self.shape, self.graph = row, col, shape, graph
        # What the matrix was made from: [2, nnz], rows and columns; (indptr, columns); (indptr, rows).
        self.indices: Tensor | None = None
        self.compressed: tuple[Tensor, Tensor] | None = None
        self.compressed_by_column: tuple[Tensor, Tensor] | None = None

    @property
    def nnz(self) -> int:
        return self.row.shape[0]

    def transposed(self) -> Structure:
        other = Structure(self.col, self.row, self.shape[::-1], self.graph.reverse())
        other.compressed, other.compressed_by_column = self.compressed_by_column, self.compressed
        return other

    def keys(self) -> Tensor:
        """A unique number for each position, in the order of the entries."""
        return self.row.long() * self.shape[1] + self.col.long()

    def same_as(self, other: Structure) -> bool:
        """Whether the entries have the same positions, in the same order."""
        if self is other:
            return True
        if self.shape != other.shape or self.nnz != other.nnz or self.graph.device != other.graph.device:
            return False
        return torch.equal(self.row, other.row) and torch.equal(self.col, other.col)


def of_indices(where: str, indices: Any, shape: Any) -> Structure:
    """The structure for indices ``[2, nnz]``; the Graph is cached per tensor (`once`)."""
    if not isinstance(indices, Tensor) or indices.dim() != 2 or indices.shape[0] != 2:
        got = list(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"{where}: indices: expected a tensor [2, nnz], rows and columns, got {got}")
    made = _made(where, indices[0], indices[1], shape, (indices,))
    made.indices = indices
    return made


def of_coo(where: str, row: Any, col: Any, shape: Any) -> Structure:
    for name, x in (("row", row), ("col", col)):
        if not isinstance(x, Tensor) or x.dim() != 1:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{where}: {name}: expected a vector [nnz], got {got}")
    if len(row) != len(col):
        raise ValueError(f"{where}: col: expected {len(row)} numbers like row, got {len(col)}")
    return _made(where, row, col, shape, (row, col))


@not_compiled
def _made(where: str, row: Tensor, col: Tensor, shape: Any, parts: tuple[Tensor, ...]) -> Structure:
    for part in parts:
        if part.dtype not in INDEX_DTYPES:
            raise TypeError(f"{where}: expected indices of int32 or int64, got {part.dtype}")
    if shape is None:
        shape = tuple(int(x.max()) + 1 if len(x) else 0 for x in (row, col))
    if len(shape) != 2:
        raise ValueError(f"{where}: shape: expected two numbers, got {tuple(shape)}")
    rows, cols = (int(size) for size in shape)

    def build() -> Graph:
        # The graph could hold a view of int32 indices, and a cached value must not hold its key's memory.
        src, dst = (x.clone() if x.dtype == torch.int32 else x for x in (col, row))
        return Graph.from_coo(src, dst, num_src=cols, num_dst=rows)

    try:
        graph = once(parts, ("dgl.sparse", rows, cols), build)
    except ValueError as error:
        text = str(error).replace("Graph.from_coo: src", "col").replace("Graph.from_coo: dst", "row")
        raise ValueError(f"{where}: {text}; shape is {(rows, cols)}") from None
    return Structure(row, col, (rows, cols), graph)


def of_compressed(where: str, indptr: Tensor, indices: Tensor, shape: Any, by_row: bool) -> Structure:
    """The structure for a CSR, or for a CSC if not by_row; entries in that order."""
    if not isinstance(indptr, Tensor) or indptr.dim() != 1 or not len(indptr):
        raise ValueError(f"{where}: indptr: expected a vector of one number more than there are rows")
    counts = indptr.diff()
    if len(counts) and int(counts.min()) < 0 or int(indptr[0]) != 0 or int(indptr[-1]) != len(indices):
        raise ValueError(f"{where}: indptr: expected rising numbers from 0 to {len(indices)}, the entries")
    if shape is None:
        other = int(indices.max()) + 1 if len(indices) else 0
        shape = (len(counts), other) if by_row else (other, len(counts))
    if shape[0 if by_row else 1] != len(counts):
        raise ValueError(f"{where}: shape: expected {len(counts)} rows of indptr, got {tuple(shape)}")
    outer = torch.arange(len(counts), device=indptr.device, dtype=indices.dtype)
    outer = outer.repeat_interleave(counts, output_size=len(indices))
    made = of_coo(where, *((outer, indices) if by_row else (indices, outer)), shape)
    if by_row:
        made.compressed = indptr, indices
    else:
        made.compressed_by_column = indptr, indices
    return made


def pairs(nodes: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
    """For each element of ``nodes`` in turn, pairs (its position, an edge into that node)."""
    csr = graph.csr()
    begin, counts = csr.indptr[nodes].long(), csr.indptr.diff()[nodes].long()
    first = counts.cumsum(0) - counts
    place = torch.arange(len(nodes), device=nodes.device).repeat_interleave(counts)
    edge = torch.arange(len(place), device=nodes.device) + (begin - first)[place]
    return place, edge if csr.eids is None else csr.eids[edge].long()
