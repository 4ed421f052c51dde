"""Estimates what a schedule costs, from constants calibrated on an H200 (benchmarks/LOG.md).

A cost is a number of edges on the critical path of a warp: the edges per resident warp, times the loss of the
schedule's order, plus the tail, which is the work that remains when most warps have finished.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from ..sparse.degrees import DegreeStats
from ..sparse.packed import CPU_BOUND
from . import tiles
from .device import Device
from .direction import Direction
from .plans import Candidate, Shape

_WARP = 32
# The least maximum of edges per work item: a warp's lanes. A row of 33 edges is then split in two, and there
# are at most 2 / 33 as many partial rows as edges.
LEAST_BOUND = _WARP
# The cost of starting and finishing a work item, in edges. With more than two sub-warps per row it grows.
_ITEM_COST = 10.0
# Natural order is slower by this factor if degrees vary, besides its tail: the warps of a block finish at
# different times.
_UNEVEN_LOSS = 1.15
# longest_first is slower by this factor if rows are alike, as in batches of small graphs: it loses locality.
_LOCALITY_LOSS = 1.4
# Two sub-warps with a row each are slower by this factor, because they diverge. More sub-warps are not.
_PACKING_LOSS = 1.03
# Least number of work items per resident warp; and an exponent: a packed work item may have (edges per
# resident warp) ** 0.9 edges, because sub-warps take longer but more of them run at a time.
_ITEMS_PER_WARP, _PACKED_POWER = 1.55, 0.9
# The most that the tail costs, in edges, if the longest work items run first; and with `packed`, the share of
# the longest work item that the tail costs for each sub-warp beyond the first.
_SHORT_TAIL, _PACKED_TAIL = 64.0, 1 / 4
# What a chunk of block-sparse tiles (64 rows x 32 columns) costs, in edges of the kernels on rows: with heads
# of 8 elements, for which the kernels on rows take few instructions per edge, and with larger heads.
CHUNK_COST: dict[str | None, tuple[float, float]] = {"gat": (660.0, 420.0), "dot": (400.0, 230.0)}
# "auto" takes tiles only where a neighbour is shared by at least this number of rows of a window in the mean:
# with fewer, blocks are nearly empty, and a graph of a few edges would get the rounding errors of tiles
# without being faster.
LEAST_SHARING = 2.0
# How many feature rows are gathered per edge in the pass over destinations and in that over sources; the
# cache should hold the arrays of all of them. The key None stands for products and sums along edges without
# softmax.
GATHERED: dict[str | None, tuple[int, int]] = {"gat": (1, 1), "gatv2": (1, 2), "dot": (2, 2), None: (1, 1)}
# The most source partitions that "auto" takes; a schedule that the caller names may have up to `MOST_PARTS`.
_MOST_PARTS = 8
# The share of the L2 cache that the rows of a source partition may take; streamed data needs the rest. The
# number of heads at a time is halved until their rows fit the cache, or until lanes would be too few: the
# result is taken if the rows need at most 1.25 times the cache.
_PART_OF_CACHE, _HEADS_OF_CACHE = 2 / 3, 1.25
# A neighbour's row should need at least 8 lanes, or loading it wastes instructions. Rows should have at least
# 64 edges in the mean, or visiting them once per group of heads costs more than it saves.
_LEAST_LANES = 8
_LEAST_MEAN = 64.0
# Degrees count as alike if their coefficient of variation is below this.
ALIKE = 0.5


# ---- lanes per head, as in csrc/cuda/launch.cuh ----------------------------------------------------


def lanes_per_head(num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    loads = -(-head_dim // (16 // dtype.itemsize))
    if loads == 1 and num_heads > 1 and dtype.itemsize < 8:
        return 1
    sizes = (4, 32) if dtype.itemsize == 8 else (2, 4, 8, 16, 32)
    return next((size for size in sizes if loads <= size), _WARP)


def tile_heads(num_heads: int, lanes: int) -> int:
    """How many heads a sub-warp covers at most."""
    heads = 1
    while heads < num_heads and heads * lanes < _WARP:
        heads *= 2
    return heads


@cache
def sub_warps(num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """How many sub-warps a CUDA warp has for this feature shape."""
    lanes = lanes_per_head(num_heads, head_dim, dtype)
    return _WARP // (tile_heads(num_heads, lanes) * lanes)


# ---- maximum edges per work item -------------------------------------------------------------------


def _power_of_two_below(x: float) -> int:
    return 1 << max(int(x), 1).bit_length() - 1


def max_edges(stats: DegreeStats, schedule: str, device: Device) -> int:
    """Maximum edges per work item: about two work items per resident warp where there are few edges, for
    balance; at most 1,024 edges where there are many, and 512 for sub-warps, which take longer per edge."""
    if device.kind != "cuda":
        return CPU_BOUND
    per_warp = stats.num_edges / device.resident_warps
    if schedule == "packed":
        edges, most = per_warp**_PACKED_POWER, 512
    else:
        edges, most = per_warp / _ITEMS_PER_WARP, 1024
    return min(max(_power_of_two_below(edges), 64 if stats.cv >= ALIKE else 128), most)


def max_columns(num_chunks: int, num_heads: int, device: Device) -> int:
    """Maximum columns per work item of tiles: windows stay whole where there are enough to fill the GPU."""
    enough = num_chunks * tiles.COLUMNS * num_heads / device.resident_blocks
    return min(max(_power_of_two_below(enough), 4 * tiles.COLUMNS), 4096)


# ---- partial rows ----------------------------------------------------------------------------------

# How many feature arrays are sums over a row's edges: in forward, and in backward's pass over sources. A row
# chunk writes a partial row of each.
_SUMS: dict[str | None, tuple[int, int]] = {"gat": (2, 1), "gatv2": (1, 1), "dot": (1, 2), None: (1, 1)}
# Partial rows may take this share of a feature array for each of these sums, or 16 MiB if that is more. A
# training step then takes less than three feature arrays beyond its inputs, results and gradients.
_PARTIAL_SHARE, _PARTIAL_BYTES = 0.85, 2**24
# The most source partitions, and the bytes of a head that a warp's registers hold, as in csrc/core/params.h.
MOST_PARTS = 16
_WIDE_BYTES = 2048


def joins(shape: Shape) -> bool:
    """Whether a row's work items in several source partitions add up in the output row itself. In 16 bits
    they do not, because each addition would round; heads wider than a warp's registers have no such
    kernel."""
    return shape.dtype.itemsize >= 4 and shape.dim * shape.dtype.itemsize <= _WIDE_BYTES


def sums(shape: Shape, reverse: bool) -> int:
    return _SUMS[shape.layer][reverse]


def partial_bytes(shape: Shape, reverse: bool, num_slots: int) -> int:
    """Bytes of the partial rows that a pass writes, in the accumulation type. num_slots: its row chunks."""
    return num_slots * shape.heads * shape.dim * max(shape.dtype.itemsize, 4) * sums(shape, reverse)


def most_partial_bytes(shape: Shape, direction: Direction) -> int:
    of_array = direction.size[0] * shape.heads * shape.dim * shape.dtype.itemsize
    return max(int(_PARTIAL_SHARE * of_array) * sums(shape, direction.reverse), _PARTIAL_BYTES)


# ---- per-edge alpha and ds -------------------------------------------------------------------------

# The scratch memory of backward may take three times the bytes of one feature array. It includes alpha (the
# attention weight) and ds (the gradient of the score) of each edge and head, where they are saved.
# The operator (csrc/torch/cuda.cpp) also counts partial rows, and decides.
_MOST_SCRATCH = 3


def saves_alpha_ds(shape: Shape, destinations: Direction) -> bool:
    """Whether the pass over destinations may save per-edge alpha and ds for the pass over sources, so that
    both need edge ids. The CPU's kernels do so wherever backward has both passes, the GPU's for dot alone."""
    if destinations.device.kind != "cuda":
        return shape.layer in ("dot", "gatv2")
    num_dst, num_src, num_edges = destinations.size
    row = shape.heads * shape.dim * shape.dtype.itemsize
    numbers = 2 * shape.heads * max(shape.dtype.itemsize, 4)
    return shape.layer == "dot" and num_edges * numbers <= _MOST_SCRATCH * (num_dst + num_src) // 2 * row


# ---- schedules -------------------------------------------------------------------------------------


_ON_CPU = "threads take equal numbers of edges"


def grouped_below(heads: int, backward: bool) -> int:
    """The mean edges per work item below which the CPU groups short rows (csrc/cpu/engine.h)."""
    if backward:
        return 2 + 6 * heads if heads > 1 else 12
    return 24 + 8 * heads


def on_cpu(num_edges: int, num_items: int, shape: Shape, reverse: bool) -> tuple[Candidate, ...]:
    note = _ON_CPU
    if shape.layer is not None:
        # Forward never uses the reverse direction; GAT's backward uses only that one.
        passes = [False] * (not reverse) + [True] * (reverse or shape.layer != "gat")  # True: backward
        names = [
            "backward" if backward else "forward"
            for backward in passes
            if num_edges < grouped_below(shape.heads, backward) * num_items
        ]
        note += f"; short rows {'in groups: ' + ', '.join(names) if names else 'alone'}"
    return (Candidate("natural", float(num_edges), note),)


def costs_on_rows(stats: DegreeStats, packable: int, device: Device) -> dict[str, float]:
    """The estimated cost of each schedule on rows. packable: sub-warps per warp, for the number of heads at a
    time."""
    if device.kind != "cuda":
        return {"natural": float(stats.num_edges)}
    alike, warps = stats.cv < ALIKE, device.resident_warps
    longest = min(stats.max, max_edges(stats, "natural", device))
    item_cost = _ITEM_COST * max(packable / 2, 1)
    whole = (stats.num_edges + item_cost * stats.num_rows) / warps
    costs = {
        "natural": whole if alike else whole * _UNEVEN_LOSS + longest,
        "longest_first": whole * (_LOCALITY_LOSS if alike else 1) + min(stats.mean, _SHORT_TAIL),
    }
    if packable > 1:
        # A row gets one sub-warp instead of all, and the sub-warps of a warp wait for the longest row.
        loss = _PACKING_LOSS if packable == 2 else 1
        share = (stats.num_edges + _ITEM_COST / packable * stats.num_rows) / warps
        longest = min(stats.max, max_edges(stats, "packed", device))
        costs["packed"] = share * loss + longest * _PACKED_TAIL * (packable - 1)
    return costs


def longest_first(schedule: str, stats: DegreeStats) -> bool:
    """Whether the work items of a schedule on rows run in the order of their lengths."""
    return schedule == "longest_first" or (schedule == "packed" and stats.cv >= ALIKE)


def on_rows(stats: DegreeStats, packable: int, device: Device) -> tuple[Candidate, ...]:
    notes = {
        "natural": "neighbouring rows run together" if device.kind == "cuda" else _ON_CPU,
        "longest_first": "no long item is left for the end",
        "packed": f"{packable} rows per warp",
    }
    costs = costs_on_rows(stats, packable, device)
    return tuple(Candidate(name, cost, notes[name]) for name, cost in costs.items())


def on_tiles(direction: Direction, shape: Shape) -> Candidate:
    """Estimates the number of chunks from sampled windows: how many of their rows share a neighbour."""
    stats, shared = direction.stats, direction.sharing
    windows = stats.num_rows / tiles.ROWS
    chunks = stats.num_edges / max(shared, 1) / tiles.COLUMNS + windows / 2
    cost = chunks * CHUNK_COST[shape.layer][shape.dim > 8] / direction.device.resident_warps
    return Candidate("tiles", cost, f"{shared:.1f} rows of a window share a neighbour")


# ---- fewer heads or sources at a time, so that their rows fit the cache ----------------------------


def cache_split(direction: Direction, shape: Shape) -> tuple[int, int]:
    """(heads at a time, source partitions) with which the rows that a pass gathers fit the L2 cache.

    Source partitions are preferred; heads are divided if indices descend, `joins` is false or too many
    partitions would be needed. The result is (0, 1), all at a time, if the rows fit undivided, no division
    makes them fit, rows are short, or instructions rather than memory are the limit (GATv2 in 16 bits).
    """
    stats, device, itemsize = direction.stats, direction.device, shape.dtype.itemsize
    if device.kind != "cuda" or stats.mean < _LEAST_MEAN or (shape.layer == "gatv2" and itemsize == 2):
        return 0, 1
    lanes = lanes_per_head(shape.heads, shape.dim, shape.dtype)
    most = heads = min(tile_heads(shape.heads, lanes), shape.heads)
    rows = direction.num_cols * GATHERED[shape.layer][direction.reverse]
    row_bytes = rows * shape.dim * itemsize  # of one head

    if most * row_bytes <= device.l2_bytes:
        return 0, 1
    parts = math.ceil(most * row_bytes / (_PART_OF_CACHE * device.l2_bytes))
    if joins(shape) and parts <= _MOST_PARTS and stats.mean / parts >= _LEAST_MEAN and direction.rises:
        return 0, parts
    while heads > 1 and heads * row_bytes > device.l2_bytes and heads // 2 * lanes >= _LEAST_LANES:
        heads //= 2
    return (heads, 1) if heads < most and heads * row_bytes <= _HEADS_OF_CACHE * device.l2_bytes else (0, 1)


def cache_splits(direction: Direction, shape: Shape) -> list[tuple[int, int]]:
    """Pairs (heads at a time, source partitions) that autotuning tries: more than one pair where the
    neighbours' rows exceed half of the cache."""
    lanes = lanes_per_head(shape.heads, shape.dim, shape.dtype)
    pairs = [(shape.heads, 1)]
    row_bytes = shape.heads * shape.dim * shape.dtype.itemsize
    if direction.device.kind == "cuda" and direction.num_cols * row_bytes > direction.device.l2_bytes / 2:
        most = tile_heads(shape.heads, lanes)
        pairs += [(n, 1) for n in (4, 2, 1) if n < most and n * lanes >= _LEAST_LANES]
        if direction.stats.mean >= _LEAST_MEAN and direction.rises:
            pairs += [(shape.heads, parts) for parts in (2, 3, 4, 6)]
    return pairs
