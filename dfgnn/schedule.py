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

On the CPU, threads take equal numbers of edges of the natural order, so ``natural`` is the only schedule
there.

``plan`` estimates the cost of every candidate and takes the cheapest; a schedule asked for by name is taken
or refused with an error, never replaced. ``"natural<=512"`` also sets the bound of an item, which otherwise
follows from the number of edges. ``Graph.autotune`` measures instead of estimating.
"""

import re
from dataclasses import dataclass

import torch

SCHEDULES = ("natural", "longest_first", "packed")

# Warps that an H100/H200-class GPU keeps resident at the kernels' register use: 132 multiprocessors x 20.
_RESIDENT_WARPS = 2640
_WARP = 32
# Calibrated on an H200 (docs/performance-log.md):
# starting and finishing an item, in edges;
_ITEM_COST = 10.0
# slow-down of natural order where degrees vary, on top of the tail: warps of a block finish apart;
_UNEVEN_LOSS = 1.15
# slow-down of another order where rows are alike, as in batches of small graphs: neighbours lose their cache.
_LOCALITY_LOSS = 1.4
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
    max_edges: int
    items: torch.Tensor  # int32 [num_items, 4]: row, begin, end, slot (-1: the whole row)
    splits: torch.Tensor  # int32 [num_splits, 4]: row, slot_begin, slot_end, 0
    num_slots: int
    packed: bool
    why: str
    stats: object
    candidates: tuple[Candidate, ...]

    @property
    def launch(self) -> list[int]:
        return [self.num_slots, int(self.packed)]

    def __repr__(self) -> str:
        s = self.stats
        lines = [
            f"Plan {self.schedule}: {len(self.items):,} items of at most {self.max_edges} edges, "
            f"{len(self.splits):,} split rows in {self.num_slots:,} pieces",
            f"  rows {s.num_rows:,}, edges {s.num_edges:,}, degree mean {s.mean:.1f}, p50 {s.p50:g}, "
            f"p99 {s.p99:g}, max {s.max:,}, cv {s.cv:.2f}, empty rows {s.num_empty:,}",
        ]
        lines += [
            f"  {'->' if c.schedule == self.schedule else '  '} {c.schedule:<14} cost {c.cost:>9,.0f}  "
            f"{c.note}"
            for c in self.candidates
        ]
        return "\n".join([*lines, f"  {self.why}"])


def sub_warps(num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Sub-warps of a CUDA warp for this feature shape (mirrors csrc/cuda/launch.cuh)."""
    vector = 16 // dtype.itemsize
    loads = -(-head_dim // vector)
    sizes = (4, 32) if dtype.itemsize == 8 else (2, 4, 8, 16, 32)
    lanes = next((size for size in sizes if loads <= size), _WARP)
    heads = 1
    while heads < num_heads and heads * lanes < _WARP:
        heads *= 2
    return _WARP // (heads * lanes)


def parse(schedule: str) -> tuple[str, int | None]:
    """("natural", 512) of "natural<=512", ("natural", None) of "natural".

    Raises TypeError (no string) and ValueError (unknown name, bound below ``LEAST_BOUND``).
    """
    if not isinstance(schedule, str):
        raise TypeError(f"schedule: expected a string, got {type(schedule).__name__}")
    found = re.fullmatch(r"(\w+)(?: ?<= ?(\d+))?", schedule)
    name, bound = found.groups() if found else (None, None)
    if name not in ("auto", *SCHEDULES) or (name == "auto" and bound):
        raise ValueError(
            f"schedule: expected 'auto' or one of {', '.join(SCHEDULES)}, if wanted with a bound on the "
            f"edges of an item ('natural<=512'), got {schedule!r}"
        )
    if bound and not LEAST_BOUND <= int(bound) < 2**31:
        raise ValueError(f"schedule: expected a bound from {LEAST_BOUND} to 2**31 - 1, got {schedule!r}")
    return name, int(bound) if bound else None


def _power_of_two_below(x: float) -> int:
    return 1 << max(int(x), 1).bit_length() - 1


def _max_edges(stats, schedule: str, device_type: str) -> int:
    """Bound of an item: about two items per resident warp where there are few edges, for balance; no more
    than 1,024 where there are many. A sub-warp of a packed warp works alone, so that its items are half as
    long.
    """
    if device_type == "cpu":
        return 4096
    edges = stats.num_edges / (1.8 * _RESIDENT_WARPS)
    if schedule == "packed":
        return min(max(_power_of_two_below(edges / 2), 64), 512)
    return min(max(_power_of_two_below(edges), 64 if stats.cv >= _ALIKE else 128), 1024)


def _candidates(stats, packable: int) -> tuple[Candidate, ...]:
    """Cost: a resident warp's share of edges and items, times what the order loses, plus the tail left."""
    longest = {s: min(stats.max, _max_edges(stats, s, "cuda")) for s in SCHEDULES}
    alike = stats.cv < _ALIKE

    def share(rows_per_warp):
        return (stats.num_edges + _ITEM_COST / rows_per_warp * stats.num_rows) / _RESIDENT_WARPS

    found = [
        Candidate(
            "natural",
            share(1) if alike else share(1) * _UNEVEN_LOSS + longest["natural"],
            "neighbouring rows run together",
        ),
        Candidate(
            "longest_first",
            share(1) * (_LOCALITY_LOSS if alike else 1) + min(stats.mean, longest["longest_first"]),
            "no long item is left for the end",
        ),
    ]
    if packable > 1:
        # A row that would have had all sub-warps has one.
        cost = share(packable) + longest["packed"] * (packable - 1)
        found.append(Candidate("packed", cost, f"{packable} rows per warp"))
    return tuple(found)


def _items(indptr: torch.Tensor, max_edges: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Items in row order, split rows, number of slots."""
    num_rows = indptr.numel() - 1
    device = indptr.device
    degree = indptr.diff()
    parts = ((degree + max_edges - 1) // max_edges).clamp_(min=1)
    total = int(parts.sum()) if num_rows else 0
    row = torch.repeat_interleave(torch.arange(num_rows, device=device), parts, output_size=total)
    piece = torch.arange(total, device=device) - (parts.cumsum(0) - parts)[row]
    length = ((degree + parts - 1) // parts)[row]
    end_of_row = indptr[1:][row]
    begin = torch.minimum(indptr[:-1][row] + piece * length, end_of_row)
    end = torch.minimum(begin + length, end_of_row)
    split = parts[row] > 1
    slot = torch.where(split, split.cumsum(0) - 1, -1)
    items = torch.stack([row, begin, end, slot], 1).to(torch.int32)
    split_rows = (parts > 1).nonzero().squeeze(1)
    count = parts[split_rows]
    slot_end = count.cumsum(0)
    splits = torch.stack([split_rows, slot_end - count, slot_end, torch.zeros_like(count)], 1).to(torch.int32)
    return items, splits, int(slot_end[-1]) if len(splits) else 0


def plan(
    graph,
    *,
    reverse: bool = False,
    num_heads: int = 4,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    schedule: str = "auto",
) -> Plan:
    """The plan of one direction of a graph for a feature shape.

    graph: :class:`dfgnn.Graph`. reverse: rows are sources (backward) instead of destinations. num_heads,
    head_dim, dtype: of the features. schedule: one of ``SCHEDULES``, alone or with a bound (see ``parse``),
    or "auto" for the cheapest by estimate.

    Raises ValueError for an unknown schedule, or one that this device or feature shape does not have.
    """
    name, bound = parse(schedule)
    device = graph.device.type
    stats = graph.degree_stats(reverse=reverse)
    packable = sub_warps(num_heads, head_dim, dtype)
    if device == "cpu":
        candidates = (Candidate("natural", float(stats.num_edges), "threads take equal numbers of edges"),)
    else:
        candidates = _candidates(stats, packable)
    if name == "auto":
        chosen, why = min(candidates, key=lambda c: c.cost).schedule, "cheapest estimate"
    elif name in (c.schedule for c in candidates):
        chosen, why = name, "asked for by name"
    else:
        reason = (
            "the CPU has 'natural' only"
            if device == "cpu"
            else f"rows of {num_heads} x {head_dim} {dtype} fill a warp, so that it cannot take several"
        )
        raise ValueError(f"schedule: {name!r} is not available: {reason}")

    max_edges = bound or _max_edges(stats, chosen, device)
    longest_first = chosen == "longest_first" or (chosen == "packed" and stats.cv >= _ALIKE)
    items, splits, num_slots = _shared_items(graph, reverse, max_edges, longest_first)
    return Plan(chosen, max_edges, items, splits, num_slots, chosen == "packed", why, stats, candidates)


def _shared_items(graph, reverse: bool, max_edges: int, longest_first: bool):
    """``_items`` in the order wanted: the same tensors for every feature shape that has the same ones."""
    key = ("items", reverse, max_edges, longest_first)
    found = graph._plans.get(key)
    if found is None:
        csr = graph.reverse_csr() if reverse else graph.csr()
        items, splits, num_slots = _items(csr.indptr, max_edges)
        if longest_first:
            order = torch.argsort(items[:, 2] - items[:, 1], descending=True, stable=True)
            items = items[order].contiguous()
        found = graph._plans[key] = items, splits, num_slots
    return found


def alternatives(graph, *, reverse: bool, num_heads: int, head_dim: int, dtype: torch.dtype) -> list[str]:
    """What could be asked for instead of "auto": every schedule that there is here, with its own bound, half
    and twice of it where that cuts rows in other places. The estimate's choice is among them."""
    shape = dict(num_heads=num_heads, head_dim=head_dim, dtype=dtype, reverse=reverse)
    stats, found = graph.degree_stats(reverse=reverse), {}
    for candidate in graph.plan(**shape).candidates:
        own = _max_edges(stats, candidate.schedule, graph.device.type)
        for bound in (own, own // 2, 2 * own):
            if bound >= LEAST_BOUND:
                found.setdefault(
                    (candidate.schedule, min(bound, stats.max)), f"{candidate.schedule}<={bound}"
                )
    return list(found.values())
