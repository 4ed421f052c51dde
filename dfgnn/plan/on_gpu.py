"""Makes the handle of a new GPU graph for eager calls: plans both directions in one call, without waiting.

The plans are those of `choose.plan`, where these depend only on known degrees, are on rows, and take all
heads and sources at a time. Small graphs that are new at every step, whose planning time matters, have such
plans.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arguments import GraphArgs, GraphHandle
from ..runtime.ops import cut_graph
from . import cost, tiles
from .direction import Direction
from .plans import Items, Shape

_NONE = None, None, None


def chosen(direction: Direction, shape: Shape, edges: bool) -> tuple[str, int, bool, tuple[int, int]] | None:
    """(schedule, maximum edges per work item, whether the longest run first, counts as in `items.of_rows`),
    or None if the choice needs more than the degrees, or they are not known."""
    device, stats = direction.device, direction.known_stats
    if stats is None or cost.cache_split(direction, shape) != (0, 1):
        return None
    may_share = not edges and shape.layer in cost.CHUNK_COST
    if may_share and tiles.refusal(shape.dim, shape.dtype, device.kind) is None:
        return None
    costs = cost.costs_on_rows(stats, cost.sub_warps(shape.heads, shape.dim, shape.dtype), device)
    name = min(costs, key=costs.__getitem__)
    bound = cost.max_edges(stats, name, device)
    cut = direction.cut(bound)
    if cut is None:
        return None
    if cut[0] and cost.partial_bytes(shape, direction.reverse, sum(cut)) > cost.most_partial_bytes(
        shape, direction
    ):
        return None
    return name, bound, cost.longest_first(name, stats), cut


def handle(
    forward: Direction, reverse: Direction, shape: Shape, edges: bool, backward: bool
) -> GraphHandle | None:
    """The handle, or None if `chosen` has no answer or work items of a direction are cached already."""
    choices: list[tuple[str, int, bool, tuple[int, int]]] = []
    for direction in (forward, reverse) if backward else (forward,):
        choice = chosen(direction, shape, edges)
        if choice is None or direction.has_items(choice[1], choice[2], 1):
            return None
        choices.append(choice)
    ids = edges or (backward and cost.saves_alpha_ds(shape, forward))
    arguments: list[Any] = []
    for direction, (name, bound, by_length, cut) in zip((forward, reverse), choices):
        indptr, indices, eids = direction.csr_with_ids(ids)
        arguments += indptr, indices, eids if ids else None, [bound, by_length, *cut, name == "packed"]
    if not backward:
        arguments += *_NONE, [reverse.size[0]]
    number, *new = cut_graph(*arguments)
    args: list[Any] = []
    for k, (direction, (name, bound, by_length, cut)) in enumerate(zip((forward, reverse), choices)):
        items = direction.cache_items(bound, by_length, 1, Items(new[2 * k], new[2 * k + 1], sum(cut)))
        plan = [items.num_slots, int(name == "packed"), 0, *direction.size]
        args += *arguments[4 * k + 1 : 4 * k + 3], items.items, items.splits, plan
    if not backward:
        args += *_NONE, None, []
    return GraphHandle(GraphArgs._make([*args, None, None]), number)
