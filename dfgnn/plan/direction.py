"""One direction of a graph (rows are destinations, or sources) with what its plans share, each made once."""

from __future__ import annotations

from copy import copy
from functools import cached_property

from ..sparse.csr import CSR
from ..sparse.degrees import DegreeStats
from ..sparse.structure import Structure
from . import items, tiles
from .device import Device
from .plans import Items
from .tiles import Tiles


class Direction:
    """One direction: rows are destinations, or with ``reverse`` sources. What it derives is made once and
    cached."""

    def __init__(self, structure: Structure, reverse: bool, device: Device) -> None:
        self.reverse, self.device = reverse, device
        self._structure = structure
        self._items: dict[tuple[int, bool, int], Items] = {}
        self._joined: dict[tuple[int, bool, int], tuple[Items, tuple[int, ...]]] = {}

    def copy(self) -> Direction:
        """A copy with the same cached work items; what it makes later does not appear in this one."""
        twin = copy(self)
        twin._items, twin._joined = dict(self._items), dict(self._joined)
        return twin

    @property
    def csr(self) -> CSR:
        return self._structure.reverse_csr() if self.reverse else self._structure.csr()

    @property
    def num_cols(self) -> int:
        return (self._structure.dst if self.reverse else self._structure.src).num_rows

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, columns and edges."""
        rows = (self._structure.src if self.reverse else self._structure.dst).num_rows
        return rows, self.num_cols, self._structure.indices.numel()

    def csr_with_ids(self, need_eids: bool) -> CSR:
        return self._structure.reverse_csr(need_eids) if self.reverse else self._structure.csr()

    @property
    def known_stats(self) -> DegreeStats | None:
        """`stats` where they are on the host already; None where they would have to be waited for."""
        return (self._structure.src if self.reverse else self._structure.dst).stats

    def cut(self, max_edges: int) -> tuple[int, int] | None:
        """(work items beyond one per row, split rows) with this maximum; None if that is not known yet."""
        return self._structure.cut(self.reverse, max_edges)

    @property
    def stats(self) -> DegreeStats:
        return self._structure.degree_stats(self.reverse)

    @cached_property
    def rises(self) -> bool:
        """Whether the neighbours of every row are in ascending order. Waits for the device."""
        csr = self.csr
        return not items.falls(csr.indptr, csr.indices).item()

    @cached_property
    def sharing(self) -> float:
        """How many rows of a window share a neighbour, in the mean. Waits for the device."""
        return tiles.sharing(self.csr, self.num_cols)

    @cached_property
    def tiles(self) -> Tiles | None:
        """The tiles, or None if an edge occurs twice. Waits for the device."""
        return tiles.build(self.csr, self.num_cols)

    def items(self, max_edges: int, longest_first: bool, parts: int) -> Items:
        """The work items for these settings. Feature shapes with the same settings share the tensors."""
        key = (max_edges, longest_first, parts)
        found = self._items.get(key)
        if found is None:
            found = self._items[key] = items.of_rows(self.csr, self.num_cols, *key, self.cut(max_edges))
        return found

    def has_items(self, *key) -> bool:
        return key in self._items

    def cache_items(self, max_edges: int, longest_first: bool, parts: int, work_items: Items) -> Items:
        """Stores work items that were made elsewhere, so that `items` returns them."""
        self._items[max_edges, longest_first, parts] = work_items
        return work_items

    def joined(self, max_edges: int, longest_first: bool, parts: int) -> tuple[Items, tuple[int, ...]]:
        """`items` joined by source partition, and how many each partition has: see `items.join`."""
        key = (max_edges, longest_first, parts)
        found = self._joined.get(key)
        if found is None:
            made = items.of_rows(self.csr, self.num_cols, *key)
            found = self._joined[key] = items.join(made, self.csr, self.num_cols, parts)
        return found

    @cached_property
    def items_once(self) -> Items:
        """The work items of a graph that is used for one step: see `items.of_rows_once`."""
        return items.of_rows_once(self.csr)
