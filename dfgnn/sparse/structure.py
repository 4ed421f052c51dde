"""Both directions of a graph as CSRs. Each is made at its first use and cached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.arguments import GraphHandle
from ..runtime.tracing import not_compiled, untraced
from . import csr as _csr
from . import degrees as _degrees
from .csr import CSR
from .degrees import Degrees, DegreeStats
from .packed import PackedGraph

_CPU = torch.device("cpu")


class Side:
    """One direction of a graph and what was derived from it; a graph and its reverse share both sides.

    built is None or (CSR, whether it has its eids); at least one side of a graph always has them. It is one
    attribute, so that a second thread which derives it too can replace it at any moment. A side without eids
    comes from `_csr.transpose`. When its eids are needed, a second transpose gives the same order with eids.
    """

    __slots__ = ("_built", "cuts", "edge_index", "has_empty", "num_rows", "packed", "stats")

    def __init__(
        self,
        num_rows: int,
        built: tuple[CSR, bool] | None = None,
        packed: tuple[PackedGraph, bool] | None = None,
    ) -> None:
        self.num_rows = num_rows
        self._built = built
        self.packed = packed  # (object that holds the CSR until it is asked for, whether rows are sources)
        self.edge_index: Tensor | None = None  # [2, E]: other side's nodes, this side's; user's order
        self.has_empty: bool | None = None
        self.stats: DegreeStats | None = None
        self.cuts: dict[int, tuple[int, int]] = {}  # see `Degrees`

    @property
    def built(self) -> tuple[CSR, bool] | None:
        found = self._built
        if found is None and self.packed is not None:
            graph, reverse = self.packed
            arrays = graph.csr(reverse)
            found = self._built = None if arrays is None else (CSR(*arrays), True)
        return found

    @built.setter
    def built(self, found: tuple[CSR, bool] | None) -> None:
        self._built = found

    def know(self, degrees: Degrees) -> None:
        """Stores statistics that were computed elsewhere."""
        self.stats, self.cuts = degrees
        self.has_empty = None if self.stats is None else self.stats.num_empty > 0

    def __getstate__(self) -> tuple[Any, ...]:  # without edge_index: two int64 per edge, and quickly made
        return self.num_rows, self.built, self.has_empty, self.stats

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.num_rows, self._built, self.has_empty, self.stats = state
        self.edge_index, self.packed, self.cuts = None, None, {}

    def to(self, device: torch.device, non_blocking: bool) -> Side:
        side = Side(self.num_rows)
        side.has_empty, side.stats = self.has_empty, self.stats
        if self.built is not None:
            csr, has_eids = self.built
            indptr, indices, eids = csr
            side.built = (
                CSR(
                    indptr.to(device, non_blocking=non_blocking),
                    indices.to(device, non_blocking=non_blocking),
                    None if eids is None else eids.to(device, non_blocking=non_blocking),
                ),
                has_eids,
            )
        return side


class Structure:
    """Both sides of a graph; `dfgnn.Graph` documents the methods of the same names."""

    __slots__ = ("dst", "src")

    def __init__(self, dst: Side, src: Side) -> None:
        self.dst, self.src = dst, src

    def to(self, device: torch.device, non_blocking: bool) -> Structure:
        return Structure(self.dst.to(device, non_blocking), self.src.to(device, non_blocking))

    def reversed(self) -> Structure:
        """The reverse structure, which shares its sides with this one: what either derives, both have."""
        return Structure(self.src, self.dst)

    def _known(self) -> list[tuple[Side, CSR]]:
        """(side, its CSR) for each side whose CSR has edge ids, or needs none because it is in the user's
        order. There is at least one."""
        return [(side, side.built[0]) for side in (self.dst, self.src) if side.built and side.built[1]]

    def _untraced(self):
        return untraced(*self._known()[0][1])

    @property
    def indices(self) -> Tensor:
        """The indices of a side that has been built; the other side's have the same number and device."""
        for side in (self.dst, self.src):
            if side.built is not None and side.built[1]:
                return side.built[0].indices
        raise AssertionError("a graph without edge ids")

    @property
    def place(self) -> tuple[torch.device, int]:
        """The device and the number of edges."""
        packed = self.dst.packed
        if packed is not None:
            return _CPU, packed[0].num_edges
        indices = self.indices
        return indices.device, indices.numel()

    def planned(self) -> dict[bool, GraphHandle]:
        """The handles of this graph without and with backward, if it was planned when its edges were
        sorted."""
        found = self.dst.packed
        if found is None or found[1] or not found[0].number:
            return {}
        return {False: found[0], True: found[0]} if found[0].backward else {False: found[0]}

    def csr(self) -> CSR:
        return self._of(self.dst, True)

    def reverse_csr(self, need_eids: bool = False) -> CSR:
        csr = self._of(self.src, need_eids)
        return csr if need_eids or csr.eids is None else CSR(csr.indptr, csr.indices, None)

    def _of(self, side: Side, need_eids: bool) -> CSR:
        built = side.built
        if built is None or (need_eids and not built[1]):
            built = self._transposed(side, need_eids)
        return built[0]

    @not_compiled
    def _transposed(self, side: Side, need_eids: bool) -> tuple[CSR, bool]:
        built = side.built
        # _known() lists only sides whose CSR has edge ids. This side is not built, or lacks them: so the
        # first is the other side.
        _, other = self._known()[0]
        with self._untraced():
            csr = _csr.transpose(other, side.num_rows, need_eids)
        if built is not None:  # keep the CSR that exists, whose tensors plans may hold; only ids are added
            csr = built[0]._replace(eids=csr.eids)
        side.built = csr, need_eids
        return side.built

    @not_compiled
    def endpoints(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(src, dst) in the user's order."""
        # A side that is in the user's order already has no eids, and is preferred.
        side, csr = min(self._known(), key=lambda pair: pair[1].eids is not None)
        with self._untraced():
            rows, cols = _csr.endpoints(csr, dtype)
        return (cols, rows) if side is self.dst else (rows, cols)

    @property
    def edge_index(self) -> Tensor:
        found = self.dst.edge_index
        if found is None or found._version:  # the user has written to it
            return self._edge_index()
        return found

    @not_compiled
    def _edge_index(self) -> Tensor:
        with self._untraced():
            self.dst.edge_index = found = torch.stack(self.endpoints(torch.int64))
        return found

    @not_compiled
    def degrees(self, reverse: bool) -> Tensor:
        side = self.src if reverse else self.dst
        with self._untraced():
            if side.built is not None:
                return side.built[0].indptr.diff()
            return _csr.count(self.indices, side.num_rows)

    @property
    def has_zero_in_degree(self) -> bool:
        found = self.dst.has_empty
        return self._has_zero_in_degree() if found is None else found

    @not_compiled
    def _has_zero_in_degree(self) -> bool:
        if self.indices.is_meta:  # where nothing is known of the edges but their number
            return False
        with self._untraced():
            self.dst.has_empty = found = bool((self.degrees(False) == 0).any())
        return found

    def degree_stats(self, reverse: bool) -> DegreeStats:
        found = (self.src if reverse else self.dst).stats
        return self._degree_stats(reverse) if found is None else found

    @not_compiled
    def _degree_stats(self, reverse: bool) -> DegreeStats:
        side = self.src if reverse else self.dst
        with self._untraced():
            if side.built is not None:
                indptr, indices, _ = side.built[0]
                stats, side.cuts = _degrees.degrees_of(indptr, indices.numel())
            else:
                stats = _degrees.degree_stats(self.degrees(reverse), self.indices.numel())
        side.stats, side.has_empty = stats, stats.num_empty > 0
        return stats

    def cut(self, reverse: bool, max_edges: int) -> tuple[int, int] | None:
        """(work items beyond one per row, split rows) with this maximum of edges per work item; None where
        counting them would have to wait for the device."""
        side = self.src if reverse else self.dst
        if side.stats is not None and side.stats.max <= max_edges:
            return 0, 0
        return side.cuts.get(max_edges)
