"""What a schedule costs: constants calibrated on an H200 (docs/performance-log.md), scaled to the device.

Costs are in edges on the critical path of a warp: the share of a resident warp, times what the order loses,
plus the tail that is left at the end.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from ..sparse.csr import DegreeStats
from . import tiles
from .device import Device
from .direction import Direction
from .plans import Candidate, Shape

_WARP = 32
# The least bound of an item: a warp's edges. Partial results stay below 1/32 of a tensor of edges.
LEAST_BOUND = _WARP
# The bound on a CPU, where a row is cut only so that several threads can have a part of it.
CPU_BOUND = 4096
# Starting and finishing an item, in edges; twice that where a row has to feed four sub-warps, and so on;
_ITEM_COST = 10.0
# slow-down of natural order where degrees vary, on top of the tail: warps of a block finish apart;
_UNEVEN_LOSS = 1.15
# slow-down of another order where rows are alike, as in batches of small graphs: neighbours lose their cache;
_LOCALITY_LOSS = 1.4
# slow-down of two sub-warps with a row each, whose steps are not the same; more of them make up for it.
_PACKING_LOSS = 1.03
# Items of whole warps for each resident warp, at least; and the power of a warp's edges that an item of
# sub-warps holds at most, of which more run at a time and take longer.
_ITEMS_PER_WARP, _PACKED_POWER = 1.55, 0.9
# What is left at the end, in edges, where the longest items go first; and of one of sub-warps, as a share of
# the longest item for each of the others.
_SHORT_TAIL, _PACKED_TAIL = 64.0, 1 / 4
# A chunk of tiles, in edges of the layer on rows: with heads of 8 elements, for which rows take few
# instructions, and with larger ones.
CHUNK_COST: dict[str | None, tuple[float, float]] = {"gat": (660.0, 420.0), "dot": (400.0, 230.0)}
# Rows of a window that share a neighbour, from which on "auto" takes tiles: blocks are nearly empty below,
# and a graph of a few edges would have their roundings for nothing.
LEAST_SHARING = 2.0
# Rows gathered per edge forward or over destinations, and over sources: arrays that the cache has to hold.
# None: the plain products.
GATHERED: dict[str | None, tuple[int, int]] = {"gat": (1, 1), "gatv2": (1, 2), "dot": (2, 2), None: (1, 1)}
_MOST_PARTS = 8
# Of the L2 cache, that the rows of a part may take: what is streamed takes the rest. Heads are halved until
# theirs fit, or exceed it by little.
_PART_OF_CACHE, _HEADS_OF_CACHE = 2 / 3, 1.25
# Lanes that a neighbour's row needs to be worth an instruction; edges of a row to be worth a visit per group
# of heads.
_LEAST_LANES = 8
_LEAST_MEAN = 64.0
# Degrees are alike below this coefficient of variation.
ALIKE = 0.5


# ---- lanes, as in csrc/cuda/launch.cuh -------------------------------------------------------------


def lanes_per_head(num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    loads = -(-head_dim // (16 // dtype.itemsize))
    if loads == 1 and num_heads > 1 and dtype.itemsize < 8:
        return 1
    sizes = (4, 32) if dtype.itemsize == 8 else (2, 4, 8, 16, 32)
    return next((size for size in sizes if loads <= size), _WARP)


def tile_heads(num_heads: int, lanes: int) -> int:
    """Heads that a sub-warp covers at most."""
    heads = 1
    while heads < num_heads and heads * lanes < _WARP:
        heads *= 2
    return heads


@cache
def sub_warps(num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Sub-warps of a CUDA warp for this feature shape."""
    lanes = lanes_per_head(num_heads, head_dim, dtype)
    return _WARP // (tile_heads(num_heads, lanes) * lanes)


# ---- bounds of items -------------------------------------------------------------------------------


def _power_of_two_below(x: float) -> int:
    return 1 << max(int(x), 1).bit_length() - 1


def max_edges(stats: DegreeStats, schedule: str, device: Device) -> int:
    """Bound of an item: about two items per resident warp where there are few edges, for balance; no more
    than 1,024 where there are many, and 512 for sub-warps that work alone, to which an item takes longer.
    """
    if device.kind != "cuda":
        return CPU_BOUND
    per_warp = stats.num_edges / device.resident_warps
    if schedule == "packed":
        edges, most = per_warp**_PACKED_POWER, 512
    else:
        edges, most = per_warp / _ITEMS_PER_WARP, 1024
    return min(max(_power_of_two_below(edges), 64 if stats.cv >= ALIKE else 128), most)


def max_columns(num_chunks: int, num_heads: int, device: Device) -> int:
    """Bound of an item of tiles: windows whole where there are enough of them for every head's blocks."""
    enough = num_chunks * tiles.COLUMNS * num_heads / device.resident_blocks
    return min(max(_power_of_two_below(enough), 4 * tiles.COLUMNS), 4096)


# ---- partial rows ----------------------------------------------------------------------------------

# Arrays that forward and the pass over sources sum up: partial rows of each for split rows. (The pass over
# destinations has one.)
_SUMS: dict[str | None, tuple[int, int]] = {"gat": (2, 1), "gatv2": (1, 1), "dot": (1, 2), None: (1, 1)}
# Partial rows may take this share of a feature array for each of these sums, so that a training step takes
# less than three arrays beyond its inputs, results and gradients; or these bytes.
_PARTIAL_SHARE, _PARTIAL_BYTES = 0.85, 2**24
# Parts of the sources that can be asked for, and bytes of a head that a warp holds, as in csrc/core/params.h.
MOST_PARTS = 16
_WIDE_BYTES = 2048


def joins(shape: Shape) -> bool:
    """Whether a row's items of several parts of the sources are added up in the row itself. In 16 bits they
    are not, as it would be rounded each time, and where a head is worked on in chunks of columns they cannot
    be.
    """
    return shape.dtype.itemsize >= 4 and shape.dim * shape.dtype.itemsize <= _WIDE_BYTES


def sums(shape: Shape, reverse: bool) -> int:
    return _SUMS[shape.layer][reverse]


def partial_bytes(shape: Shape, reverse: bool, num_slots: int) -> int:
    """Of the partial rows that a pass writes, in the type of sums, for so many pieces of split rows."""
    return num_slots * shape.heads * shape.dim * max(shape.dtype.itemsize, 4) * sums(shape, reverse)


def most_partial_bytes(shape: Shape, direction: Direction) -> int:
    of_array = direction.size[0] * shape.heads * shape.dim * shape.dtype.itemsize
    return max(int(_PARTIAL_SHARE * of_array) * sums(shape, direction.reverse), _PARTIAL_BYTES)


# ---- numbers of the edges --------------------------------------------------------------------------

# The scratch of backward, them included, may take so many times what a feature of all nodes takes. Partial
# rows are not counted here: csrc/torch/cuda.cpp has the last word.
_MOST_SCRATCH = 3


def hands_over(shape: Shape, destinations: Direction) -> bool:
    """Whether the pass over destinations may leave alpha and ds of the edges to the one over sources, so that
    both need the edges' ids. The CPU's kernels do wherever there are such passes, the GPU's for dot.
    """
    if destinations.device.kind != "cuda":
        return shape.layer in ("dot", "gatv2")
    num_dst, num_src, num_edges = destinations.size
    row = shape.heads * shape.dim * shape.dtype.itemsize
    numbers = 2 * shape.heads * max(shape.dtype.itemsize, 4)
    return shape.layer == "dot" and num_edges * numbers <= _MOST_SCRATCH * (num_dst + num_src) // 2 * row


# ---- schedules -------------------------------------------------------------------------------------


_ON_CPU = "threads take equal numbers of edges"


def grouped_below(heads: int, backward: bool) -> int:
    """The mean degree of items below which the CPU takes short rows in groups (csrc/cpu/engine.h)."""
    return 2 + 6 * heads if backward else 24 + 8 * heads


def on_cpu(num_edges: int, num_items: int, shape: Shape, reverse: bool) -> tuple[Candidate, ...]:
    note = _ON_CPU
    if shape.layer is not None:
        # Which passes walk this direction: forward not the reverse one, GAT's backward only that.
        walks = [False] * (not reverse) + [True] * (reverse or shape.layer != "gat")
        names = [
            "backward" if backward else "forward"
            for backward in walks
            if num_edges < grouped_below(shape.heads, backward) * num_items
        ]
        note += f"; short rows {'in groups: ' + ', '.join(names) if names else 'alone'}"
    return (Candidate("natural", float(num_edges), note),)


def costs_on_rows(stats: DegreeStats, packable: int, device: Device) -> dict[str, float]:
    """packable: sub-warps of a warp, for the heads that are worked on at a time."""
    if device.kind != "cuda":
        return {"natural": float(stats.num_edges)}
    alike, warps = stats.cv < ALIKE, device.resident_warps
    longest = min(stats.max, max_edges(stats, "natural", device))
    item_cost = _ITEM_COST * max(packable / 2, 1)
    whole = (stats.num_edges + item_cost * stats.num_rows) / warps
    found = {
        "natural": whole if alike else whole * _UNEVEN_LOSS + longest,
        "longest_first": whole * (_LOCALITY_LOSS if alike else 1) + min(stats.mean, _SHORT_TAIL),
    }
    if packable > 1:
        # A row that would have had all sub-warps has one, and those of a warp wait for the longest.
        loss = _PACKING_LOSS if packable == 2 else 1
        share = (stats.num_edges + _ITEM_COST / packable * stats.num_rows) / warps
        longest = min(stats.max, max_edges(stats, "packed", device))
        found["packed"] = share * loss + longest * _PACKED_TAIL * (packable - 1)
    return found


def on_rows(stats: DegreeStats, packable: int, device: Device) -> tuple[Candidate, ...]:
    notes = {
        "natural": "neighbouring rows run together" if device.kind == "cuda" else _ON_CPU,
        "longest_first": "no long item is left for the end",
        "packed": f"{packable} rows per warp",
    }
    costs = costs_on_rows(stats, packable, device)
    return tuple(Candidate(name, cost, notes[name]) for name, cost in costs.items())


def on_tiles(direction: Direction, shape: Shape) -> Candidate:
    """The chunks, from how many rows share a neighbour in some windows."""
    stats, shared = direction.stats, direction.sharing
    windows = stats.num_rows / tiles.ROWS
    chunks = stats.num_edges / max(shared, 1) / tiles.COLUMNS + windows / 2
    cost = chunks * CHUNK_COST[shape.layer][shape.dim > 8] / direction.device.resident_warps
    return Candidate("tiles", cost, f"{shared:.1f} rows of a window share a neighbour")


# ---- less at a time, so that it fits into the cache ------------------------------------------------


def cache_split(direction: Direction, shape: Shape) -> tuple[int, int]:
    """(heads at a time, parts of the sources): parts, or where rows do not rise, cannot be joined or too many
    parts are needed heads, such that the rows that a pass gathers fit into the L2 cache. (0, 1) where they
    fit as they are, or cannot, or rows are short, or instructions are what binds (GATv2 in 16 bits).
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
    """Pairs of heads at a time and parts of the sources that might be worth it: more than one where the
    neighbours' rows exceed half of the cache."""
    lanes = lanes_per_head(shape.heads, shape.dim, shape.dtype)
    found = [(shape.heads, 1)]
    row_bytes = shape.heads * shape.dim * shape.dtype.itemsize
    if direction.device.kind == "cuda" and direction.num_cols * row_bytes > direction.device.l2_bytes / 2:
        most = tile_heads(shape.heads, lanes)
        found += [(n, 1) for n in (4, 2, 1) if n < most and n * lanes >= _LEAST_LANES]
        if direction.stats.mean >= _LEAST_MEAN and direction.rises:
            found += [(shape.heads, parts) for parts in (2, 3, 4, 6)]
    return found
