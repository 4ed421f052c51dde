"""The records of the scheduler: `Plan`, its work items, and the feature shape that it is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..sparse.degrees import DegreeStats, degree_stats

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# The schedules on rows. Products and sums along edges without softmax have only these.
ROW_SCHEDULES = ("natural", "longest_first", "packed")
SCHEDULES = (*ROW_SCHEDULES, "tiles")
# Columns per chunk of block-sparse tiles, as in csrc/core/params.h.
CHUNK_COLUMNS = 32


class Shape(NamedTuple):
    """The shape and dtype of features, and the layer: "gat", "gatv2", "dot", or None for products and sums
    along edges without softmax.

    Every call makes and hashes one. With a tuple this takes a third of the time that a dataclass takes.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    layer: str | None = "gat"


def check_shape(where: str, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raises ValueError for features that no kernel takes."""
    for name, size in (("num_heads", num_heads), ("head_dim", head_dim)):
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise ValueError(f"{where}: {name}: expected a positive integer, got {size!r}")
    if dtype not in DTYPES:
        raise ValueError(f"{where}: dtype: expected one of {', '.join(map(str, DTYPES))}, got {dtype!r}")


def padded(head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """The size to which kernels pad a head: on CUDA a multiple of 16 bytes."""
    step = 16 // dtype.itemsize if device.type == "cuda" else 1
    return -(-head_dim // step) * step


class Items(NamedTuple):
    """Work items, and the split rows whose partial results are merged."""

    items: Tensor  # int32 [num_items, 4]: row, begin, end, slot (-1: writes the row, -2: adds to it)
    splits: Tensor  # int32 [num_splits, 4]: row, slot_begin, slot_end, stride between its slots
    num_slots: int


@dataclass(frozen=True)
class Candidate:
    """A schedule with its estimated cost, in edges on the critical path of a warp."""

    schedule: str
    cost: float
    note: str


@dataclass(frozen=True, repr=False)
class Plan:
    """Work items of one direction of a graph; ``repr`` tells how it was chosen."""

    schedule: str
    max_edges: int  # per work item; with tiles, maximum columns
    items: Tensor  # as in `Items`
    splits: Tensor
    num_slots: int
    size: tuple[int, int, int]  # numbers of rows, columns and edges of the graph
    packed: bool
    why: str
    stats: DegreeStats | None  # None where the choice needed no degrees
    candidates: tuple[Candidate, ...]
    tiles: Tensor | None = None  # int32 [num_chunks, 96]: `Tiles.chunks` in dfgnn/plan/tiles.py
    heads_per_tile: int = 0  # maximum heads at a time; 0: as many as a warp has lanes for
    source_parts: int = 1  # source partitions
    part_items: tuple[int, ...] = ()  # work items per source partition, if later partitions add to rows
    partial_bytes: int = 0  # size of the partial rows that a pass writes for split rows

    @property
    def launch(self) -> list[int]:
        """The integers of a plan that operators take besides its tensors."""
        return [self.num_slots, int(self.packed), self.heads_per_tile, *self.size, *self.part_items]

    def __repr__(self) -> str:
        if not self.candidates:
            packed = ", several rows per warp" if self.packed else ""
            return (
                f"Plan {self.schedule}: items of at most {self.max_edges} edges{packed}; {self.why}, whose "
                "degrees are not known"
            )
        s = self._stats_of_items() if self.stats is None else self.stats
        held = "edges" if self.tiles is None else f"columns ({len(self.tiles):,} chunks of {CHUNK_COLUMNS})"
        lines = [
            f"Plan {self.schedule}: {len(self.items):,} items of at most {self.max_edges} {held}, "
            f"{len(self.splits):,} split rows in {self.num_slots:,} pieces"
            + (f" ({self.partial_bytes / 1e6:.1f} MB)" if self.partial_bytes else "")
            + (f", {self.heads_per_tile} heads at a time" if self.heads_per_tile else "")
            + (f", sources in {self.source_parts} parts" if self.source_parts > 1 else ""),
            f"  rows {s.num_rows:,}, edges {s.num_edges:,}, degree mean {s.mean:.1f}, p50 {s.p50:g}, "
            f"p99 {s.p99:g}, max {s.max:,}, cv {s.cv:.2f}, empty rows {s.num_empty:,}",
        ]
        lines += [
            f"  {'->' if c.schedule == self.schedule else '  '} {c.schedule:<14} cost {c.cost:>9,.0f}  "
            f"{c.note}"
            for c in self.candidates
        ]
        return "\n".join([*lines, f"  {self.why}"])

    def _stats_of_items(self) -> DegreeStats:
        """Degree statistics from the work items, of which every row has at least one."""
        row, begin, end, _ = self.items.long().unbind(1)
        degrees = row.new_zeros(int(row[-1]) + 1 if len(row) else 0).index_add_(0, row, end - begin)
        return degree_stats(degrees, int(degrees.sum()))
