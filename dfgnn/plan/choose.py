"""Chooses a schedule for a graph: which rows, or chunks of rows, run where and in what order.

This is level 1 of the scheduler; level 2, how a warp works on its edges, is in
``csrc/cuda/attention/lanes.cuh``. A plan cuts the rows of a CSR into work items of at most ``max_edges``
edges; a longer row (a *super node*) is split into equal chunks whose partial results are merged exactly. The
schedules differ in the order of the work items and in how many rows a warp takes:

``natural``        One row or chunk per warp, in row order: neighbouring rows run together and share cache.
``longest_first``  The same work items, most edges first, so that no long one runs alone at the end.
``packed``         Every sub-warp takes a row of its own. A sub-warp is the lanes that a feature row needs; a
                   warp has several where rows have at most 256 bytes. The longest rows run first, except
                   where all are alike.
``tiles``          Windows of 64 rows as dense blocks with masks, on tensor cores (``tiles``): neighbours that
                   rows of a window share are loaded once. It needs float16 or bfloat16, heads of 8, 16, 32,
                   64 or 128 elements, additive or dot attention without edge tensors, dropout or returned
                   attention (dot: without a negative_slope, too), and no edge twice.

On the CPU, threads take parts of equal cost of the natural order (edges, and 4 for each work item), so
``natural`` is the only schedule there.

``plan`` estimates the cost of every candidate and takes the cheapest; a schedule that the caller names is
taken or refused with an error, never replaced. ``"natural<=512"`` also sets the maximum edges per work item,
which otherwise follows from the number of edges; with tiles it limits the columns. ``"natural heads<=2"``
works on two heads at a time, ``"natural sources/2"`` on half of the sources at a time. Both help where the
neighbours' rows exceed the L2 cache and those of some heads, or of a source partition, fit.
``Graph.autotune`` measures instead of estimating.
"""

from __future__ import annotations

import re

from ..runtime.arguments import PLAN_LAYERS
from . import cost, items, tiles
from .direction import Direction
from .plans import SCHEDULES, Candidate, Plan, Shape


def parse(schedule: str) -> tuple[str, int | None, int | None, int | None]:
    """Splits "natural<=512 heads<=2 sources/4" into (name, bound, heads, parts); what is absent is None.

    Raises TypeError (no string) and ValueError (unknown name, a number out of range, tiles with heads or
    sources).
    """
    if schedule == "auto":
        return schedule, None, None, None
    if not isinstance(schedule, str):
        raise TypeError(f"schedule: expected a string, got {type(schedule).__name__}")
    match = re.fullmatch(
        r"(\w+)(?: ?<= ?(\d+))?(?: heads ?<= ?([1-9]\d{0,8}))?(?: sources/([1-9]\d?))?", schedule
    )
    name, bound, heads, parts = match.groups() if match else (None,) * 4
    if name not in ("auto", *SCHEDULES) or (name == "auto" and (bound or heads or parts)):
        raise ValueError(
            f"schedule: expected 'auto' or one of {', '.join(SCHEDULES)}, optionally with a maximum of edges "
            f"per work item ('natural<=512'), of heads at a time ('natural heads<=2') and with the sources "
            f"in partitions ('natural sources/2'), got {schedule!r}"
        )
    if bound and not cost.LEAST_BOUND <= int(bound) < 2**31:
        raise ValueError(f"schedule: expected a bound from {cost.LEAST_BOUND} to 2**31 - 1, got {schedule!r}")
    if parts and int(parts) > cost.MOST_PARTS:
        raise ValueError(f"schedule: expected at most {cost.MOST_PARTS} source partitions, got {schedule!r}")
    if name == "tiles" and (heads or parts):
        raise ValueError(
            f"schedule: expected no heads or sources for tiles, whose rows share neighbours, got {schedule!r}"
        )
    numbers = [int(x) if x else None for x in (bound, heads, parts)]
    return name, numbers[0], numbers[1], numbers[2]


def plan(
    direction: Direction, shape: Shape, schedule: str = "auto", edges: bool = False, once: bool = False
) -> Plan:
    """The plan of one direction of a graph for a feature shape.

    schedule: one of ``SCHEDULES``, alone or with a bound (see ``parse``), or "auto" for the cheapest by
    estimate. edges: the call has edge tensors, dropout or a LeakyReLU around the score of dot attention, or
    returns attention: kernels on tiles have none of these. once: the graph is used for one step, so that
    planning must not wait for the GPU.

    Raises ValueError for an unknown schedule or layer, or a schedule that this device, feature shape or graph
    does not have.
    """
    name, bound, heads, parts = parse(schedule)
    if shape.layer not in cost.GATHERED:
        expected = ", ".join(PLAN_LAYERS.values())
        raise ValueError(f"layer: expected {expected} or None, got {shape.layer!r}")
    device = direction.device
    if once and name == "auto" and device.kind == "cuda":
        return _plan_once(direction, shape)
    if device.kind == "cpu" and name in ("auto", "natural") and parts in (None, 1):
        return _plan_on_cpu(direction, shape, name, bound, heads if heads and heads < shape.heads else 0)
    fit = (0, 1) if name == "tiles" else cost.cache_split(direction, shape)
    heads = fit[0] if heads is None else heads if heads < shape.heads else 0
    parts = fit[1] if parts is None else parts
    if parts > 1 and not direction.rises:
        raise ValueError("schedule: source partitions need the neighbours of every row in rising order")
    candidates, refusal = _candidates(direction, shape, heads, edges)
    if name == "auto":
        chosen, why = _cheapest(direction, candidates), "cheapest estimate"
    else:
        if name == "tiles" and refusal is not None:
            raise ValueError(f"schedule: 'tiles' is not available: {refusal}")
        if name != "tiles" and name not in (c.schedule for c in candidates):
            raise _unavailable(name, device.kind, shape)
        chosen, why = name, "asked for by name"
    if chosen == "tiles":
        return _plan_on_tiles(direction, shape, bound, why, candidates)
    return _plan_on_rows(direction, shape, (chosen, bound, heads, parts), why, candidates)


def _candidates(
    direction: Direction, shape: Shape, heads: int, edges: bool
) -> tuple[tuple[Candidate, ...], str | None]:
    """The available schedules with their costs; and the reason why tiles are not among them, or None."""
    device, stats = direction.device, direction.stats
    packable = cost.sub_warps(heads or shape.heads, shape.dim, shape.dtype)
    candidates = cost.on_rows(stats, packable, device)
    refusal = tiles.refusal(shape.dim, shape.dtype, device.kind)
    if refusal is None and (edges or shape.layer not in cost.CHUNK_COST):
        refusal = (
            "GATv2, dot attention with a negative_slope and calls with edge tensors, dropout or returned "
            "attention have no tiles"
        )
    if refusal is None and stats.num_edges:
        candidates += (cost.on_tiles(direction, shape),)
    return candidates, refusal


def _cheapest(direction: Direction, candidates: tuple[Candidate, ...]) -> str:
    order = sorted(candidates, key=lambda c: c.cost)
    if order[0].schedule == "tiles" and (direction.sharing < cost.LEAST_SHARING or direction.tiles is None):
        order.pop(0)  # rows share too few neighbours, or an edge occurs twice
    return order[0].schedule


def _unavailable(name: str, kind: str, shape: Shape) -> ValueError:
    """The error for a schedule on rows that this device or feature shape does not have."""
    if kind != "cuda":
        reason = "the CPU has 'natural' only"
    else:
        rows = f"{shape.heads} x {shape.dim} {shape.dtype}"
        reason = f"a row of {rows} fills a warp, which cannot take several"
    return ValueError(f"schedule: {name!r} is not available: {reason}")


def _plan_on_tiles(
    direction: Direction, shape: Shape, bound: int | None, why: str, candidates: tuple[Candidate, ...]
) -> Plan:
    dense, stats = direction.tiles, direction.stats
    if dense is None:
        raise ValueError(
            "schedule: 'tiles' is not available: the graph has an edge twice, "
            "and a tile has one bit per pair of nodes"
        )
    bound = bound or cost.max_columns(len(dense.chunks), shape.heads, direction.device)
    work = tiles.items(dense, stats.num_rows, max(bound // tiles.COLUMNS, 1))
    return Plan("tiles", bound, *work, direction.size, False, why, stats, candidates, dense.chunks)


def _plan_on_rows(
    direction: Direction,
    shape: Shape,
    schedule: tuple[str, int | None, int, int],
    why: str,
    candidates: tuple[Candidate, ...],
) -> Plan:
    """schedule: its name, the maximum of edges if it was given, heads at a time, and source partitions. A
    maximum that was not given is doubled until partial rows need at most `cost.most_partial_bytes`."""
    (name, given, heads, parts), device, stats = schedule, direction.device, direction.stats
    bound = given or cost.max_edges(stats, name, device)
    longest_first = cost.longest_first(name, stats)
    joins = parts > 1 and device.kind == "cuda" and cost.joins(shape)
    # Source partitions that do not join (`cost.joins`) need a partial row for each row and partition,
    # whatever the maximum: doubling it would not help.
    as_asked = given is not None or (parts > 1 and not joins)
    while True:
        key = bound, longest_first, parts
        work, sizes = direction.joined(*key) if joins else (direction.items(*key), ())
        partial = cost.partial_bytes(shape, direction.reverse, work.num_slots)
        if as_asked or partial <= cost.most_partial_bytes(shape, direction):
            break
        bound *= 2
    return Plan(
        name, bound, *work, direction.size, name == "packed", why, stats, candidates, None, heads, parts,
        sizes, partial,
    )  # fmt: skip


def _plan_on_cpu(direction: Direction, shape: Shape, name: str, bound: int | None, heads: int) -> Plan:
    """The plan on a CPU. It takes no degree statistics, which would cost a graph that is used once more than
    the rest of its plan. The kernels decide whether short rows are grouped; the plan's notes say so."""
    bound = bound or cost.CPU_BOUND
    work = direction.items(bound, False, 1)
    why = "cheapest estimate" if name == "auto" else "asked for by name"
    size = direction.size
    candidates = cost.on_cpu(size[2], len(work.items), shape, direction.reverse)
    return Plan("natural", bound, *work, size, False, why, None, candidates, None, heads)


def _plan_once(direction: Direction, shape: Shape) -> Plan:
    """The plan of a graph that is used for one step. It takes no degree statistics."""
    packed = cost.sub_warps(shape.heads, shape.dim, shape.dtype) > 1
    work = direction.items_once
    name, why = "packed" if packed else "natural", "a graph for one step"
    return Plan(name, items.ONCE_BOUND, *work, direction.size, packed, why, None, ())


def alternatives(direction: Direction, shape: Shape, chosen: Plan) -> list[str]:
    """Names of the schedules that autotuning compares with `chosen`, the plan of "auto" (which is among
    them): every available schedule with its estimated bound, half and twice of it where that cuts rows
    elsewhere, and with fewer heads at a time or source partitions where the neighbours' rows exceed half of
    the L2 cache.
    """
    stats = direction.stats
    names: dict[tuple, str] = {}
    for candidate in chosen.candidates:
        if candidate.schedule == "tiles":
            if direction.tiles is not None:
                limit = cost.max_columns(len(direction.tiles.chunks), shape.heads, direction.device)
                names |= {("tiles", b): f"tiles<={b}" for b in (limit, limit // 2, 2 * limit)}
            continue
        limit = cost.max_edges(stats, candidate.schedule, direction.device)
        for heads, parts in cost.cache_splits(direction, shape):
            if candidate.schedule == "packed" and cost.sub_warps(heads, shape.dim, shape.dtype) == 1:
                continue
            mine = (heads, parts) == (chosen.heads_per_tile or shape.heads, chosen.source_parts)
            for bound in (limit, limit // 2, 2 * limit) if mine else (limit,):
                if bound >= cost.LEAST_BOUND:
                    name = f"{candidate.schedule}<={bound}" + (
                        "" if mine else f" heads<={heads} sources/{parts}"
                    )
                    names.setdefault((candidate.schedule, min(bound, stats.max), heads, parts), name)
    return list(names.values())
