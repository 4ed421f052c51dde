"""From the degree distribution to a plan: which rows, or pieces of rows, run where and in what order.

Level 1 of the scheduler (level 2, how a warp works on its edges: ``csrc/cuda/attention/lanes.cuh``). A plan
cuts the rows of a CSR into work items of at most ``max_edges`` edges; a longer row (a *super node*) is split
into equal pieces whose partial results are merged exactly. The schedules differ in the order of the items and
in how many rows a warp takes:

``natural``        one row or piece per warp, in row order: neighbouring rows run together and share cache.
``longest_first``  the same items by decreasing number of edges: no long item is left for the end.
``packed``         every sub-warp of a warp takes a row of its own; longest first, except where all rows are
                   alike. Needs feature rows of at most 256 bytes per tile of heads, so that a warp has
                   several sub-warps.
``tiles``          windows of 64 rows as dense blocks with masks, on tensor cores (``tiles``): what rows
                   of a window have in common is loaded once. Float16 and bfloat16, heads of 8, 16, 32, 64 or
                   128 elements, additive and dot attention without edge tensors, dropout or returned
                   attention, no edge twice.

On the CPU, threads take equal numbers of edges of the natural order, so ``natural`` is the only schedule
there.

``plan`` estimates the cost of every candidate and takes the cheapest; a schedule asked for by name is taken
or refused with an error, never replaced. ``"natural<=512"`` also sets the bound of an item, which otherwise
follows from the number of edges; of tiles it bounds the columns. ``"natural<=512 heads<=2"`` works on two
heads at a time, over all rows, and ``"natural<=512 sources/2"`` on half of the sources at a time: where the
neighbours' rows exceed the L2 cache and those of some heads, or parts, do not, that is the choice.
``Graph.autotune`` measures instead of estimating.
"""

from __future__ import annotations

import re

from . import cost, items, tiles
from .direction import Direction
from .plans import SCHEDULES, Plan, Shape


def parse(schedule: str) -> tuple[str, int | None, int | None, int | None]:
    """(name, bound, heads, parts) of "natural<=512 heads<=2 sources/4"; None for what is not given.

    Raises TypeError (no string) and ValueError (unknown name, bound below ``LEAST_BOUND``, no heads).
    """
    if schedule == "auto":
        return schedule, None, None, None
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
    if bound and not cost.LEAST_BOUND <= int(bound) < 2**31:
        raise ValueError(f"schedule: expected a bound from {cost.LEAST_BOUND} to 2**31 - 1, got {schedule!r}")
    if parts and int(parts) > cost.MOST_PARTS:
        raise ValueError(
            f"schedule: expected at most {cost.MOST_PARTS} parts of the sources, got {schedule!r}"
        )
    if name == "tiles" and (heads or parts):
        raise ValueError(
            f"schedule: expected no heads or parts of tiles, which share neighbours, got {schedule!r}"
        )
    numbers = [int(x) if x else None for x in (bound, heads, parts)]
    return name, numbers[0], numbers[1], numbers[2]


def plan(
    direction: Direction, shape: Shape, schedule: str = "auto", edges: bool = False, once: bool = False
) -> Plan:
    """schedule: one of ``SCHEDULES``, alone or with a bound (see ``parse``), or "auto" for the cheapest by
    estimate. edges: the call has edge tensors or dropout, or returns attention. once: the graph is for one
    step, and nobody is to wait.

    Raises ValueError for an unknown schedule or layer, or a schedule that this device, feature shape or graph
    does not have.
    """
    name, bound, heads, parts = parse(schedule)
    if shape.layer not in cost.GATHERED:
        raise ValueError(f"layer: expected gat, gatv2, dot or None, got {shape.layer!r}")
    device = direction.device
    if once and name == "auto" and device.kind == "cuda":
        return _plan_once(direction, shape)
    if device.kind == "cpu" and name in ("auto", "natural") and parts in (None, 1):
        return _plan_on_cpu(direction, shape, name, bound, heads if heads and heads < shape.heads else 0)
    stats = direction.stats
    fit = (0, 1) if name == "tiles" else cost.cache_split(direction, shape)
    heads = fit[0] if heads is None else heads if heads < shape.heads else 0
    parts = fit[1] if parts is None else parts
    if parts > 1 and not direction.rises:
        raise ValueError("schedule: parts of the sources need the neighbours of every row in rising order")
    packable = cost.sub_warps(heads or shape.heads, shape.dim, shape.dtype)
    candidates = cost.on_rows(stats, packable, device)
    refusal = tiles.refusal(shape.dim, shape.dtype, device.kind)
    if refusal is None and (edges or shape.layer not in cost.CHUNK_COST):
        refusal = "GATv2 and calls with edge tensors, dropout or returned attention have no tiles"
    if refusal is None and stats.num_edges:
        candidates += (cost.on_tiles(direction, shape),)
    if name == "auto":
        order = sorted(candidates, key=lambda c: c.cost)
        if order[0].schedule == "tiles" and (
            direction.sharing < cost.LEAST_SHARING or direction.tiles is None
        ):
            order.pop(0)  # nothing is shared that tiles would load once, or an edge is there twice
        chosen, why = order[0].schedule, "cheapest estimate"
    elif name in (c.schedule for c in candidates) or (name == "tiles" and refusal is None):
        chosen, why = name, "asked for by name"
    else:
        if name == "tiles":
            reason = refusal
        elif device.kind != "cuda":
            reason = "the CPU has 'natural' only"
        else:
            rows = f"{shape.heads} x {shape.dim} {shape.dtype}"
            reason = f"rows of {rows} fill a warp, so that it cannot take several"
        raise ValueError(f"schedule: {name!r} is not available: {reason}")

    if chosen == "tiles":
        built = direction.tiles
        if built is None:
            raise ValueError(
                "schedule: 'tiles' is not available: the graph has an edge twice, "
                "and a tile has no place for it"
            )
        bound = bound or cost.max_columns(len(built.chunks), shape.heads, device)
        found = tiles.items(built, stats.num_rows, max(bound // tiles.COLUMNS, 1))
        return Plan("tiles", bound, *found, direction.size, False, why, stats, candidates, built.chunks)
    by_name = bound is not None
    bound = bound or cost.max_edges(stats, chosen, device)
    longest_first = chosen == "longest_first" or (chosen == "packed" and stats.cv >= cost.ALIKE)
    joins = parts > 1 and device.kind == "cuda" and cost.joins(shape)
    as_asked = by_name or (parts > 1 and not joins)
    while True:
        key = bound, longest_first, parts
        found, part_items = direction.joined(*key) if joins else (direction.items(*key), ())
        partial = cost.partial_bytes(shape, direction.reverse, found.num_slots)
        if as_asked or partial <= cost.most_partial_bytes(shape, direction):
            break
        bound *= 2
    return Plan(
        chosen, bound, *found, direction.size, chosen == "packed", why, stats, candidates, None, heads, parts,
        part_items, partial,
    )  # fmt: skip


def _plan_on_cpu(direction: Direction, shape: Shape, name: str, bound: int | None, heads: int) -> Plan:
    """Without statistics: they would take longer than the rest, which a graph that is used once pays at every
    step. The kernels choose whether short rows go in groups; the plan says so."""
    bound = bound or cost.CPU_BOUND
    found = direction.items(bound, False, 1)
    why = "cheapest estimate" if name == "auto" else "asked for by name"
    size = direction.size
    candidates = cost.on_cpu(size[2], len(found.items), shape, direction.reverse)
    return Plan("natural", bound, *found, size, False, why, None, candidates, None, heads)


def _plan_once(direction: Direction, shape: Shape) -> Plan:
    """Without statistics."""
    packed = cost.sub_warps(shape.heads, shape.dim, shape.dtype) > 1
    found = direction.items_once
    name, why = "packed" if packed else "natural", "a graph for one step"
    return Plan(name, items.ONCE_BOUND, *found, direction.size, packed, why, None, ())


def alternatives(direction: Direction, shape: Shape, chosen: Plan) -> list[str]:
    """What could be asked for instead of "auto", which is `chosen`: every schedule that there is here, with
    its own bound, half and twice of it where that cuts rows in other places, and with fewer heads at a time
    or the sources in parts where the neighbours' rows exceed half of the L2 cache. `chosen` is among them.
    """
    stats = direction.stats
    found: dict[tuple, str] = {}
    for candidate in chosen.candidates:
        if candidate.schedule == "tiles":
            if direction.tiles is not None:
                own = cost.max_columns(len(direction.tiles.chunks), shape.heads, direction.device)
                found |= {("tiles", b): f"tiles<={b}" for b in (own, own // 2, 2 * own)}
            continue
        own = cost.max_edges(stats, candidate.schedule, direction.device)
        for heads, parts in cost.cache_splits(direction, shape):
            if candidate.schedule == "packed" and cost.sub_warps(heads, shape.dim, shape.dtype) == 1:
                continue
            mine = (heads, parts) == (chosen.heads_per_tile or shape.heads, chosen.source_parts)
            for bound in (own, own // 2, 2 * own) if mine else (own,):
                if bound >= cost.LEAST_BOUND:
                    name = f"{candidate.schedule}<={bound}" + (
                        "" if mine else f" heads<={heads} sources/{parts}"
                    )
                    found.setdefault((candidate.schedule, min(bound, stats.max), heads, parts), name)
    return list(found.values())
