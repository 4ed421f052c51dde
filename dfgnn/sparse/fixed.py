"""The structure of a graph of fixed capacity, whose number of edges in use is known to the device alone.

Everything is derived by kernels whose shapes follow from the capacity, so that a CUDA graph can hold them. An
edge is a column of edge_index. Columns that are not in use are sorted behind all others, beyond the last row
of the CSR. E' is the number of columns plus that of appended loops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.tracing import not_compiled, untraced
from . import csr as _csr
from .csr import CSR
from .degrees import DegreeStats, degree_stats
from .structure import Side, Structure


class FixedStructure(Structure):
    """A `Structure` whose edges may be replaced by others, up to its capacity.

    edges: int64 or int32 ``[2, E]``, of which the first ``counts[2]`` columns are in use; the others may hold
    anything. counts: int64 ``[3]`` on the device: sources, destinations and edges in use; None if all are. A
    column with a node that is not in use is left out.

    num_loops: edges from a node to itself are left out, and i -> i for i < num_loops appended as far as both
    nodes are in use.

    Derived tensors are cached until ``renew`` and never overwritten, so that earlier results stay valid.
    """

    __slots__ = ("_loops", "_made", "_made_for", "counts", "edges", "num_loops", "parent")

    def __init__(
        self,
        edges: Tensor,
        counts: Tensor | None,
        num_src: int,
        num_dst: int,
        num_loops: int = 0,
        parent: FixedStructure | None = None,
    ) -> None:
        super().__init__(Side(num_dst), Side(num_src))
        self.edges, self.counts, self.num_loops = edges, counts, num_loops
        self.parent = parent  # the structure that owns the edges, or None
        self._made: dict[str, Any] = {}
        self._made_for = 0  # the generation of the edges from which `_made` was derived
        self._loops: FixedStructure | None = None

    def __getstate__(self):
        sizes = self.src.num_rows, self.dst.num_rows
        return self.edges, self.counts, *sizes, self.num_loops, self.parent

    def __setstate__(self, state) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def generation(self) -> int:
        """How many times ``renew`` was called."""
        return self._made_for if self.parent is None else self.parent.generation

    def renew(self) -> None:
        """To be called after the edges were replaced: drops what was derived from the old ones."""
        self._made = {}
        self._made_for += 1

    def derived(self) -> dict[str, Any]:
        """The cache of what was derived from the current edges."""
        if self.parent is not None and self._made_for != self.parent.generation:
            self._made, self._made_for = {}, self.parent.generation
        return self._made

    def with_loops(self) -> FixedStructure:
        """These edges without those from a node to itself, and with a loop for each node in use; cached."""
        if self.num_loops:
            return self
        if self._loops is None:
            n, m = self.src.num_rows, self.dst.num_rows
            self._loops = FixedStructure(self.edges, self.counts, n, m, min(n, m), self)
        return self._loops

    def reversed(self) -> FixedStructure:
        counts = None if self.counts is None else self.counts[[1, 0, 2]]
        found = FixedStructure(
            self.edges.flip(0), counts, self.dst.num_rows, self.src.num_rows, self.num_loops
        )
        return found

    def to(self, device: torch.device, non_blocking: bool) -> FixedStructure:
        edges = self.edges.to(device, non_blocking=non_blocking)
        counts = None if self.counts is None else self.counts.to(device, non_blocking=non_blocking)
        return FixedStructure(edges, counts, self.src.num_rows, self.dst.num_rows, self.num_loops)

    # ---- derived tensors -------------------------------------------------------------------------

    def _get(self, name: str, make) -> Any:
        made = self.derived()
        if name not in made:
            made[name] = self._make(make)
        return made[name]

    @not_compiled
    def _make(self, make) -> Any:
        with untraced(self.edges):
            return make()

    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """int32 sources and destinations in the user's order, and which of them are in use."""
        src, dst = self.edges.to(torch.int32)
        device = src.device
        num_src: Tensor | int
        num_dst: Tensor | int
        if self.counts is None:
            num_src, num_dst, in_use = self.src.num_rows, self.dst.num_rows, None
        else:
            num_src, num_dst, num_edges = self.counts.unbind()
            in_use = torch.arange(src.numel(), device=device) < num_edges
        valid = (src >= 0) & (src < num_src) & (dst >= 0) & (dst < num_dst)
        if in_use is not None:
            valid &= in_use
        if self.num_loops:
            loops = torch.arange(self.num_loops, dtype=torch.int32, device=device)
            valid = torch.cat([valid & (src != dst), (loops < num_src) & (loops < num_dst)])
            src, dst = torch.cat([src, loops]), torch.cat([dst, loops])
        return src, dst, valid

    @property
    def valid(self) -> Tensor:
        """bool ``[E']``, in the user's order: whether each edge is in use."""
        return self._get("ends", self._ends)[2]

    def _by_dst(self) -> tuple[CSR, Tensor, Tensor]:
        """The CSR by destination; and the row and column of each of its positions, which `_by_src` sorts."""
        src, dst, valid = self._get("ends", self._ends)
        n, m = self.src.num_rows, self.dst.num_rows
        rows, eids = torch.sort(torch.where(valid, dst, m), stable=True)
        cols = torch.where(valid, src, n)[eids]
        # No work item covers positions beyond the last row, but kernels prefetch them: indices stay in range.
        csr = CSR(_csr.indptr_of(rows, m), cols.clamp(max=max(n - 1, 0)), eids.to(torch.int32))
        return csr, rows, cols

    def _by_src(self) -> CSR:
        csr, rows, cols = self._get("by_dst", self._by_dst)
        keys, order = torch.sort(cols, stable=True)
        indices = rows[order].clamp_(max=max(self.dst.num_rows - 1, 0))
        assert csr.eids is not None
        return CSR(_csr.indptr_of(keys, self.src.num_rows), indices, csr.eids[order])

    def edges_as_sources(self, reverse: bool) -> FixedStructure:
        """The structure of the graph from each edge to its destination (reverse: to its source)."""

        def make() -> FixedStructure:
            src, dst, valid = self._get("ends", self._ends)
            rows = self.src.num_rows if reverse else self.dst.num_rows
            ends = torch.where(valid, src if reverse else dst, rows)
            edges = torch.stack([torch.arange(len(ends), dtype=ends.dtype, device=ends.device), ends])
            return FixedStructure(edges, None, len(ends), rows)

        return self._get(f"edges as sources {reverse}", make)

    # ---- what every Structure has ----------------------------------------------------------------

    @property
    def indices(self) -> Tensor:
        """A tensor of the right length and device; its values mean nothing."""
        num_edges = self.edges.shape[1] + self.num_loops
        return torch.empty(1, dtype=torch.int32, device=self.edges.device).expand(num_edges)

    def csr(self) -> CSR:
        return self._get("by_dst", self._by_dst)[0]

    def reverse_csr(self, need_eids: bool = False) -> CSR:
        csr = self._get("by_src", self._by_src)
        return csr if need_eids else CSR(csr.indptr, csr.indices, None)

    def endpoints(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(src, dst) in the user's order, columns that are not in use included."""
        src, dst = self.edge_index.to(dtype)
        return src, dst

    @property
    def edge_index(self) -> Tensor:
        return self.edges if self.num_loops == 0 else self._get("edge_index", self._with_loops)

    def _with_loops(self) -> Tensor:
        loops = torch.arange(self.num_loops, dtype=self.edges.dtype, device=self.edges.device)
        return torch.cat([self.edges, loops.expand(2, -1)], dim=1)

    @property
    def edge_map(self) -> Tensor:
        """int64 ``[E']``: each edge's column in ``edges``, -1 for an appended loop."""
        return self._get("edge_map", self._edge_map)

    def _edge_map(self) -> Tensor:
        before = torch.arange(self.edges.shape[1], device=self.edges.device)
        return torch.cat([before, before.new_full((self.num_loops,), -1)])

    def degrees(self, reverse: bool) -> Tensor:
        return (self.reverse_csr() if reverse else self.csr()).indptr.diff()

    @property
    def has_zero_in_degree(self) -> bool:
        """Whether a node in use has no edge. Waits for the device."""
        degrees = self.degrees(False)
        if self.counts is not None:
            degrees = degrees[: int(self.counts[1])]
        return bool((degrees == 0).any())

    def degree_stats(self, reverse: bool) -> DegreeStats:
        """Statistics of all rows, in use or not. Waits for the device."""
        degrees = self.degrees(reverse)
        return degree_stats(degrees, int(degrees.sum()))
