"""From the degree distribution to a plan: which rows, or pieces of rows, run where and in what order.

Level 1 of the scheduler (level 2, how a warp works on its edges, is in ``csrc/cuda/lanes.cuh``). A plan cuts
the rows of a CSR into work items of at most ``max_edges`` edges; a longer row (a *super node*) is split into
equal pieces whose partial results are merged exactly. The schedules differ in the order of the items and in
how many rows a warp takes:

``natural``        one row or piece per warp, in row order: neighbouring rows run together and share cache.
``longest_first``  the same items by decreasing number of edges: no long item is left for the end.
``packed``         every sub-warp of a warp takes a row of its own; longest first, except where all rows are
                   alike. Needs feature rows of at most 256 bytes per tile of heads, so that a warp has
                   several sub-warps.
``tiles``          windows of 64 rows as dense blocks with masks, on tensor cores (dfgnn/tiles.py): what rows
                   of a window have in common is loaded once. Float16 and bfloat16, heads of 16, 32, 64 or 128
                   elements, additive and dot attention without edge tensors, dropout or returned
                   attention, no edge twice. A feature that is not finite reaches all rows of its windows.

On the CPU, threads take equal numbers of edges of the natural order, so ``natural`` is the only schedule
there.

``plan`` estimates the cost of every candidate and takes the cheapest; a schedule asked for by name is taken
or refused with an error, never replaced. ``"natural<=512"`` also sets the bound of an item, which otherwise
follows from the number of edges; of tiles it bounds the columns. ``"natural<=512 heads<=2"`` works on two
heads at a time, over all rows, and ``"natural<=512 sources/2"`` on half of the sources at a time: where the
neighbours' rows exceed the L2 cache and those of some heads, or parts, do not, that is the choice.
``Graph.autotune`` measures instead of estimating.
"""

import math
import re
from dataclasses import dataclass

import torch

from .. import _ops
from . import tiles as tiling

# Of these the plain products have the first three.
ROW_SCHEDULES = ("natural", "longest_first", "packed")
SCHEDULES = (*ROW_SCHEDULES, "tiles")

# Warps that an H100/H200-class GPU keeps resident at the kernels' register use: 132 multiprocessors x 20.
_RESIDENT_WARPS = 2640
_WARP = 32
# And blocks of the tile kernels.
_RESIDENT_BLOCKS = 132 * 4
# Calibrated on an H200 (docs/performance-log.md):
# starting and finishing an item, in edges; twice that where a row has to feed four sub-warps, and so on;
_ITEM_COST = 10.0
# slow-down of natural order where degrees vary, on top of the tail: warps of a block finish apart;
_UNEVEN_LOSS = 1.15
# slow-down of another order where rows are alike, as in batches of small graphs: neighbours lose their cache.
_LOCALITY_LOSS = 1.4
# A chunk of tiles, in edges of the layer on rows.
_CHUNK_COST = {"gat": 420.0, "dot": 185.0}
# Rows gathered per edge forward or over destinations, and over sources: arrays that the cache has to hold.
# None: the plain products.
_GATHERED = {"gat": (1, 1), "gatv2": (1, 2), "dot": (2, 2), None: (1, 1)}
_L2_BYTES = 63e6
_MOST_PARTS = 4
# Lanes that a neighbour's row needs to be worth an instruction; edges of a row to be worth a visit per group
# of heads.
_LEAST_LANES = 8
_LEAST_MEAN = 64.0
# Bound of an item where degrees are not known.
_ONCE_BOUND = 256
# slow-down of sub-warps with a row each, whose steps are not the same.
_PACKING_LOSS = 1.03
# Degrees are alike below this coefficient of variation.
_ALIKE = 0.5
# The least bound of an item: a warp's edges. Partial results stay below 1/32 of a tensor of edges.
LEAST_BOUND = _WARP


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
    max_edges: int  # of an item; with tiles columns
    items: torch.Tensor  # int32 [num_items, 4]: row, begin, end, slot (-1: the whole row)
    splits: torch.Tensor  # int32 [num_splits, 4]: row, slot_begin, slot_end, stride
    num_slots: int
    size: tuple[int, int, int]  # rows, columns and edges of what it was made for
    packed: bool
    why: str
    stats: object
    candidates: tuple[Candidate, ...]
    tiles: torch.Tensor | None = None  # int32 [num_chunks, 96]: dfgnn/tiles.py
    heads_per_tile: int = 0  # at most so many heads at a time; 0: as many as a warp has lanes for
    source_parts: int = 1  # rows are cut where their sources pass from one part of all to the next

    @property
    def launch(self) -> list[int]:
        """What the operators take of a plan beside its tensors."""
        return [self.num_slots, int(self.packed), self.heads_per_tile, *self.size]

    def __repr__(self) -> str:
        s = self.stats
        if s is None:
            packed = ", several rows per warp" if self.packed else ""
            return (
                f"Plan {self.schedule}: items of at most {self.max_edges} edges{packed}; {self.why}, whose "
                "degrees are not known"
            )
        held = "edges" if self.tiles is None else f"columns ({len(self.tiles):,} chunks of {tiling.COLUMNS})"
        lines = [
            f"Plan {self.schedule}: {len(self.items):,} items of at most {self.max_edges} {held}, "
            f"{len(self.splits):,} split rows in {self.num_slots:,} pieces"
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


def _lanes_per_head(head_dim: int, dtype: torch.dtype) -> int:
    loads = -(-head_dim // (16 // dtype.itemsize))
    sizes = (4, 32) if dtype.itemsize == 8 else (2, 4, 8, 16, 32)
    return next((size for size in sizes if loads <= size), _WARP)


def _tile_heads(num_heads: int, lanes: int) -> int:
    """Heads that a sub-warp covers at most (mirrors csrc/cuda/launch.cuh)."""
    heads = 1
    while heads < num_heads and heads * lanes < _WARP:
        heads *= 2
    return heads


def sub_warps(num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Sub-warps of a CUDA warp for this feature shape (mirrors csrc/cuda/launch.cuh)."""
    lanes = _lanes_per_head(head_dim, dtype)
    return _WARP // (_tile_heads(num_heads, lanes) * lanes)


def parse(schedule: str) -> tuple[str, int | None, int | None, int | None]:
    """(name, bound, heads, parts) of "natural<=512 heads<=2 sources/4"; None for what is not given.

    Raises TypeError (no string) and ValueError (unknown name, bound below ``LEAST_BOUND``, no heads).
    """
    if not isinstance(schedule, str):
        raise TypeError(f"schedule: expected a string, got {type(schedule).__name__}")
    found = re.fullmatch(
        r"(\w+)(?: ?<= ?(\d+))?(?: heads ?<= ?([1-9]\d{0,8}))?(?: sources/([1-9]\d?))?", schedule
    )
    name, bound, heads, parts = found.groups() if found else (None,) * 4
    if name not in ("auto", *SCHEDULES) or (name == "auto" and (bound or heads or parts)):
        raise ValueError(
            f"schedule: expected 'auto' or one of {', '.join(SCHEDULES)}, if wanted with a bound on the "
            f"edges of an item ('natural<=512'), on the heads at a time ('natural heads<=2') and with the "
            f"sources in parts ('natural sources/2'), got {schedule!r}"
        )
    if bound and not LEAST_BOUND <= int(bound) < 2**31:
        raise ValueError(f"schedule: expected a bound from {LEAST_BOUND} to 2**31 - 1, got {schedule!r}")
    if name == "tiles" and (heads or parts):
        raise ValueError(
            f"schedule: expected no heads or parts of tiles, which share neighbours, got {schedule!r}"
        )
    return (name, *(int(x) if x else None for x in (bound, heads, parts)))


def _cache_split(graph, layer, reverse: bool, num_heads: int, head_dim: int, dtype, stats) -> tuple[int, int]:
    """(heads at a time, parts of the sources): parts, or where rows do not rise or too many are needed heads,
    such that the rows that a pass gathers fit into the L2 cache. (0, 1) where they fit as they are, or
    cannot, or rows are short, or instructions are what binds (GATv2 in 16 bits).
    """
    if graph.device.type != "cuda" or stats.mean < _LEAST_MEAN or (layer == "gatv2" and dtype.itemsize == 2):
        return 0, 1
    lanes = _lanes_per_head(head_dim, dtype)
    most = heads = min(_tile_heads(num_heads, lanes), num_heads)
    rows = (graph.num_dst if reverse else graph.num_src) * _GATHERED[layer][reverse]
    row_bytes = rows * head_dim * dtype.itemsize  # of one head

    parts = math.ceil(most * row_bytes / _L2_BYTES)
    if parts == 1:
        return 0, 1
    if parts <= _MOST_PARTS and stats.mean / parts >= _LEAST_MEAN and _rises(graph, reverse):
        return 0, parts
    while heads > 1 and heads * row_bytes > _L2_BYTES and heads // 2 * lanes >= _LEAST_LANES:
        heads //= 2
    return (heads, 1) if heads < most and heads * row_bytes <= _L2_BYTES else (0, 1)


def _power_of_two_below(x: float) -> int:
    return 1 << max(int(x), 1).bit_length() - 1


def _max_edges(stats, schedule: str, device_type: str) -> int:
    """Bound of an item: about two items per resident warp where there are few edges, for balance; no more
    than 1,024 where there are many, and 512 for sub-warps that work alone.
    """
    if device_type == "cpu":
        return 4096
    edges = stats.num_edges / (1.8 * _RESIDENT_WARPS)
    if schedule == "packed":
        return min(max(_power_of_two_below(edges), 128), 512)
    return min(max(_power_of_two_below(edges), 64 if stats.cv >= _ALIKE else 128), 1024)


def _candidates(stats, packable: int) -> tuple[Candidate, ...]:
    """Cost: a resident warp's share of edges and items, times what the order loses, plus the tail left."""
    longest = {s: min(stats.max, _max_edges(stats, s, "cuda")) for s in ROW_SCHEDULES}
    alike = stats.cv < _ALIKE

    def share(item_cost):
        return (stats.num_edges + item_cost * stats.num_rows) / _RESIDENT_WARPS

    whole = share(_ITEM_COST * max(packable / 2, 1))
    found = [
        Candidate(
            "natural",
            whole if alike else whole * _UNEVEN_LOSS + longest["natural"],
            "neighbouring rows run together",
        ),
        Candidate(
            "longest_first",
            whole * (_LOCALITY_LOSS if alike else 1) + min(stats.mean, longest["longest_first"]),
            "no long item is left for the end",
        ),
    ]
    if packable > 1:
        # A row that would have had all sub-warps has one, and those of a warp wait for the longest.
        cost = share(_ITEM_COST / packable) * _PACKING_LOSS + longest["packed"] / 2 * (packable - 1)
        found.append(Candidate("packed", cost, f"{packable} rows per warp"))
    return tuple(found)


def _tile_candidate(graph, reverse: bool, stats, layer: str) -> Candidate:
    """Cost: the chunks, from how many rows share a neighbour in some windows."""
    shared = graph._plans.get(("sharing", reverse))
    if shared is None:
        csr = graph.reverse_csr() if reverse else graph.csr()
        shared = tiling.sharing(csr, graph.num_dst if reverse else graph.num_src)
        graph._plans["sharing", reverse] = shared
    windows = stats.num_rows / tiling.ROWS
    chunks = stats.num_edges / max(shared, 1) / tiling.COLUMNS + windows / 2
    cost = chunks * _CHUNK_COST[layer] / _RESIDENT_WARPS
    return Candidate("tiles", cost, f"{shared:.1f} rows of a window share a neighbour")


def _items(
    begin: torch.Tensor, end: torch.Tensor, max_edges: int, longest_first: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Items, split rows, number of slots.

    begin, end: int64 [parts, rows], the edges of a row whose sources lie in a part of them. Items come part
    by part, in row order or with the longest first. A row of several items is split: their slots are
    consecutive.
    """
    num_rows, device = begin.shape[1], begin.device
    degree = end - begin
    pieces = (degree + max_edges - 1) // max_edges
    of_row = pieces.sum(0)
    pieces[0] += of_row == 0  # a row without edges has an item too
    of_row.clamp_(min=1)
    split = of_row > 1
    slots = torch.where(split, of_row, 0).cumsum(0)
    first_slot = slots - torch.where(split, of_row, 0) + (pieces.cumsum(0) - pieces)  # [parts, rows]
    length = ((degree + pieces - 1) // pieces.clamp(min=1)).flatten()

    count = pieces.flatten()
    total = int(count.sum())
    place = torch.repeat_interleave(torch.arange(count.numel(), device=device), count, output_size=total)
    piece = torch.arange(total, device=device) - (count.cumsum(0) - count)[place]
    row, stop = place % max(num_rows, 1), end.flatten()[place]
    start = torch.minimum(begin.flatten()[place] + piece * length[place], stop)
    slot = torch.where(split[row], first_slot.flatten()[place] + piece, -1)
    items = torch.stack([row, start, torch.minimum(start + length[place], stop), slot], 1).to(torch.int32)
    if longest_first:
        part = place // max(num_rows, 1)
        order = torch.argsort(part * 2**31 - (items[:, 2] - items[:, 1]), stable=True)
        items = items[order].contiguous()

    rows = split.nonzero().squeeze(1)
    last = slots[rows]
    splits = torch.stack([rows, last - of_row[rows], last, torch.ones_like(rows)], 1).to(torch.int32)
    return items, splits, int(last[-1]) if len(rows) else 0


def _parts(csr, num_cols: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Begin and end [parts, rows] of the edges whose sources lie in equal parts of all: by bisection, as the
    neighbours of a row rise."""
    low, high = csr.indptr[:-1], csr.indptr[1:]
    bounds = [low]
    for part in range(1, parts):
        bound = -(-num_cols * part // parts)
        lo, hi = bounds[-1], high
        for _ in range(csr.indices.numel().bit_length()):
            middle = (lo + hi) // 2
            open_ = lo < hi
            below = open_ & (csr.indices[torch.where(open_, middle, 0)] < bound)
            lo, hi = torch.where(below, middle + 1, lo), torch.where(open_ & ~below, middle, hi)
        bounds.append(lo)
    bounds.append(high)
    return torch.stack(bounds[:-1]), torch.stack(bounds[1:])


def _rises(graph, reverse: bool) -> bool:
    """Whether the neighbours of every row are in rising order. Waits for the device once."""
    key = ("rises", reverse)
    if key not in graph._plans:
        csr = graph.reverse_csr() if reverse else graph.csr()
        falls = _ops.ops.falls if _ops.on_device(csr.indptr) else _falls
        graph._plans[key] = not falls(csr.indptr, csr.indices).item()
    return graph._plans[key]


def _falls(indptr: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """How many edges are below the one before them in their row."""
    falls = indices[1:] < indices[:-1]
    starts = indptr[1:-1]
    falls[starts[(starts > 0) & (starts < indices.numel())] - 1] = False
    return falls.sum()


def plan(
    graph,
    *,
    reverse: bool = False,
    num_heads: int = 4,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    schedule: str = "auto",
    layer: str | None = "gat",
    edges: bool = False,
) -> Plan:
    """The plan of one direction of a graph for a feature shape.

    graph: :class:`dfgnn.Graph`. reverse: rows are sources (backward) instead of destinations. num_heads,
    head_dim, dtype: of the features. schedule: one of ``SCHEDULES``, alone or with a bound (see ``parse``),
    or "auto" for the cheapest by estimate. layer: "gat", "gatv2" or "dot", whose passes it is for; None for
    the plain products. edges: the call has edge tensors or dropout, or returns attention.

    Raises ValueError for an unknown schedule, or one that this device or feature shape does not have.
    """
    name, bound, heads, parts = parse(schedule)
    if layer not in _GATHERED:
        raise ValueError(f"layer: expected gat, gatv2, dot or None, got {layer!r}")
    device = graph.device.type
    if graph.is_one_shot and name == "auto" and device == "cuda":
        return _plan_once(graph, reverse, sub_warps(num_heads, head_dim, dtype) > 1, layer == "gatv2")
    stats = graph.degree_stats(reverse=reverse)
    fit = (
        (0, 1) if name == "tiles" else _cache_split(graph, layer, reverse, num_heads, head_dim, dtype, stats)
    )
    heads = fit[0] if heads is None else heads if heads < num_heads else 0
    parts = fit[1] if parts is None else parts
    if parts > 1 and not _rises(graph, reverse):
        raise ValueError("schedule: parts of the sources need the neighbours of every row in rising order")
    packable = sub_warps(heads or num_heads, head_dim, dtype)
    if device == "cpu":
        candidates = (Candidate("natural", float(stats.num_edges), "threads take equal numbers of edges"),)
    else:
        candidates = _candidates(stats, packable)
    refusal = tiling.refusal(head_dim, dtype, graph.device)
    if refusal is None and (edges or layer not in _CHUNK_COST):
        refusal = "GATv2 and calls with edge tensors, dropout or returned attention have no tiles"
    if refusal is None and stats.num_edges:
        candidates += (_tile_candidate(graph, reverse, stats, layer),)
    if name == "auto":
        order = sorted(candidates, key=lambda c: c.cost)
        if order[0].schedule == "tiles" and _shared_tiles(graph, reverse) is None:
            order.pop(0)  # an edge is there twice
        chosen, why = order[0].schedule, "cheapest estimate"
    elif name in (c.schedule for c in candidates) or (name == "tiles" and refusal is None):
        chosen, why = name, "asked for by name"
    else:
        reason = (
            refusal
            if name == "tiles"
            else "the CPU has 'natural' only"
            if device == "cpu"
            else f"rows of {num_heads} x {head_dim} {dtype} fill a warp, so that it cannot take several"
        )
        raise ValueError(f"schedule: {name!r} is not available: {reason}")

    if chosen == "tiles":
        return _tile_plan(graph, reverse, num_heads, bound, why, stats, candidates)
    max_edges = bound or _max_edges(stats, chosen, device)
    longest_first = chosen == "longest_first" or (chosen == "packed" and stats.cv >= _ALIKE)
    items, splits, num_slots = _shared_items(
        graph, reverse, max_edges, longest_first, parts, fixed_order=layer == "gatv2"
    )
    packed = chosen == "packed"
    size = _size(graph, reverse)
    return Plan(
        chosen, max_edges, items, splits, num_slots, size, packed, why, stats, candidates, None, heads, parts
    )


def _size(graph, reverse: bool) -> tuple[int, int, int]:
    ends = (graph.num_src, graph.num_dst) if reverse else (graph.num_dst, graph.num_src)
    return *ends, graph.num_edges


def _shared_tiles(graph, reverse: bool) -> tiling.Tiles | None:
    """The tiles of a direction, built once; None where an edge is there twice."""
    key = ("tiles", reverse)
    if key not in graph._plans:
        csr = graph.reverse_csr() if reverse else graph.csr()
        graph._plans[key] = tiling.build(csr, graph.num_dst if reverse else graph.num_src)
    return graph._plans[key]


def _tile_plan(graph, reverse, num_heads, bound, why, stats, candidates) -> Plan:
    """Windows whole where there are enough of them for every head's blocks, else cut into pieces."""
    tiles = _shared_tiles(graph, reverse)
    if tiles is None:
        raise ValueError(
            "schedule: 'tiles' is not available: the graph has an edge twice, and a tile has no place for it"
        )
    if bound is None:
        enough = len(tiles.chunks) * tiling.COLUMNS * num_heads / _RESIDENT_BLOCKS
        bound = min(max(_power_of_two_below(enough), 4 * tiling.COLUMNS), 4096)
    max_chunks = max(bound // tiling.COLUMNS, 1)
    items, splits, num_slots = tiling.items(tiles, stats.num_rows, max_chunks)
    size = _size(graph, reverse)
    return Plan("tiles", bound, items, splits, num_slots, size, False, why, stats, candidates, tiles.chunks)


def _shared_items(
    graph, reverse: bool, max_edges: int, longest_first: bool, parts: int, fixed_order: bool = False
):
    """``_items`` in the order wanted: the same tensors for every feature shape that has the same ones."""
    key = ("items", reverse, max_edges, longest_first, parts, fixed_order)
    found = graph._plans.get(key)
    if found is None:
        csr = graph.reverse_csr() if reverse else graph.csr()
        num_cols = graph.num_dst if reverse else graph.num_src
        if _ops.on_device(csr.indptr):
            items, *rest = _device_items(csr, num_cols, max_edges, longest_first, parts)
            if fixed_order:
                items = _in_fixed_order(items, csr, num_cols, longest_first, parts)
            found = (items, *rest)
        else:
            found = _items(*_parts(csr, num_cols, parts), max_edges, longest_first)
        graph._plans[key] = found
    return found


def _device_items(csr, num_cols: int, max_edges: int, longest_first: bool, parts: int):
    """``_items`` by the GPU's kernels, cut to what is used. Lengths are ordered to a quarter of an octave.
    Natural order has the pieces of split rows in front; with parts, it is that of blocks of rows.
    """
    items, splits, counts = _ops.ops.plan_rows(
        csr.indptr, csr.indices, num_cols, parts, max_edges, longest_first
    )
    more, num_slots, num_splits = counts[:3].tolist()
    num_rows = csr.indptr.numel() - 1
    begin = 0 if longest_first or parts > 1 else len(items) - num_rows - more
    return items[begin : begin + num_rows + more], splits[:num_splits], num_slots


def _in_fixed_order(items: torch.Tensor, csr, num_cols: int, longest_first: bool, parts: int):
    """The items that a kernel made, in an order that follows from the graph alone. Kernels take places by
    atomics, and one result, GATv2's gradient of attn, is a sum in the order of the items.
    """
    place = items[:, 0].long() * 2**31 + items[:, 1]
    if not longest_first and parts == 1:  # rows have their places: it is the pieces in front of them
        front = len(items) - (csr.indptr.numel() - 1)
        return torch.cat([items[:front][place[:front].argsort()], items[front:]])
    items = items[place.argsort()]
    length = items[:, 2] - items[:, 1]
    rank = torch.zeros_like(length, dtype=torch.int64)
    if parts > 1 and csr.indices.numel():
        bounds = [-(-num_cols * p // parts) for p in range(1, parts)]
        bounds = torch.tensor(bounds, dtype=csr.indices.dtype, device=items.device)
        source = csr.indices[items[:, 1].clamp(max=csr.indices.numel() - 1)]
        rank = torch.where(length > 0, torch.bucketize(source, bounds, right=True), 0) * 2**31
    if longest_first:
        rank = rank - length
    return items[rank.argsort(stable=True)]


def _plan_once(graph, reverse: bool, packed: bool, fixed_order: bool) -> Plan:
    """A plan that nobody waits for: without statistics, its tensors as long as they might have to be."""
    csr = graph.reverse_csr() if reverse else graph.csr()
    items, splits, _ = _ops.ops.plan_rows(csr.indptr, csr.indices, 0, 1, _ONCE_BOUND, False)
    if fixed_order:
        items = _in_fixed_order(items, csr, 0, False, 1)
    num_slots = 2 * len(splits)
    name = "packed" if packed else "natural"
    size, why = _size(graph, reverse), "a graph for one step"
    return Plan(name, _ONCE_BOUND, items, splits, num_slots, size, packed, why, None, ())


def alternatives(
    graph,
    *,
    reverse: bool,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    layer: str | None = "gat",
) -> list[str]:
    """What could be asked for instead of "auto": every schedule that there is here, with its own bound, half
    and twice of it where that cuts rows in other places, and with fewer heads at a time or the sources in
    parts where the neighbours' rows exceed half of the L2 cache. The estimate's choice is among them.
    """
    shape = dict(num_heads=num_heads, head_dim=head_dim, dtype=dtype, reverse=reverse, layer=layer)
    stats, found = graph.degree_stats(reverse=reverse), {}
    chosen = graph.plan(**shape)
    for candidate in chosen.candidates:
        if candidate.schedule == "tiles":
            if _shared_tiles(graph, reverse) is not None:
                own = graph.plan(**shape, schedule="tiles").max_edges
                found |= {("tiles", b): f"tiles<={b}" for b in (own, own // 2, 2 * own)}
            continue
        own = _max_edges(stats, candidate.schedule, graph.device.type)
        for heads, parts in _cache_splits(graph, reverse, num_heads, head_dim, dtype, stats):
            if candidate.schedule == "packed" and sub_warps(heads, head_dim, dtype) == 1:
                continue
            mine = (heads, parts) == (chosen.heads_per_tile or num_heads, chosen.source_parts)
            for bound in (own, own // 2, 2 * own) if mine else (own,):
                if bound >= LEAST_BOUND:
                    name = f"{candidate.schedule}<={bound}" + (
                        "" if mine else f" heads<={heads} sources/{parts}"
                    )
                    found.setdefault((candidate.schedule, min(bound, stats.max), heads, parts), name)
    return list(found.values())


def _cache_splits(graph, reverse: bool, num_heads: int, head_dim: int, dtype, stats) -> list[tuple[int, int]]:
    """Pairs of heads at a time and parts of the sources that might be worth it."""
    lanes = _lanes_per_head(head_dim, dtype)
    found = [(num_heads, 1)]
    rows = graph.num_dst if reverse else graph.num_src
    if graph.device.type == "cuda" and rows * num_heads * head_dim * dtype.itemsize > _L2_BYTES / 2:
        found += [
            (n, 1) for n in (4, 2, 1) if n < _tile_heads(num_heads, lanes) and n * lanes >= _LEAST_LANES
        ]
        if stats.mean >= _LEAST_MEAN and _rises(graph, reverse):
            found += [(num_heads, parts) for parts in range(2, _MOST_PARTS + 1)]
    return found
