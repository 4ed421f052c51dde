"""A graph that a GPU has just made, as eager calls take it: planned in one call and without waiting.

What `choose.plan` chooses, where it is a schedule on rows, heads and sources all at a time, that the degrees
alone decide, and these are known: as for a small graph that is new at every step, which waits for this.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arguments import GraphArgs, GraphHandle, ops
from . import cost, tiles
from .direction import Direction
from .plans import Items, Shape

_cut_graph = ops.cut_graph.default
_NONE = None, None, None


def chosen(direction: Direction, shape: Shape, edges: bool) -> tuple[str, int, bool, tuple[int, int]] | None:
    """The schedule with its bound, whether its order is by length, and what it cuts; None where that takes
    more than the degrees, or they are not known."""
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
    return name, bound, name == "longest_first" or (name == "packed" and stats.cv >= cost.ALIKE), cut


def handle(
    forward: Direction, reverse: Direction, shape: Shape, edges: bool, backward: bool
) -> GraphHandle | None:
    """None where this is not the way, or some of it is there already."""
    found: list[tuple[str, int, bool, tuple[int, int]]] = []
    for direction in (forward, reverse) if backward else (forward,):
        way = chosen(direction, shape, edges)
        if way is None or direction.has_items(way[1], way[2], 1):
            return None
        found.append(way)
    ids = edges or (backward and cost.hands_over(shape, forward))
    given: list[Any] = []
    for direction, (name, bound, by_length, cut) in zip((forward, reverse), found):
        indptr, indices, eids = direction.csr_with_ids(ids)
        given += indptr, indices, eids if ids else None, [bound, by_length, *cut, name == "packed"]
    if not backward:
        given += *_NONE, [reverse.size[0]]
    number, *made = _cut_graph(*given)
    args: list[Any] = []
    for k, (direction, (name, bound, by_length, cut)) in enumerate(zip((forward, reverse), found)):
        items = direction.keep_items(bound, by_length, 1, Items(made[2 * k], made[2 * k + 1], sum(cut)))
        plan = [items.num_slots, int(name == "packed"), 0, *direction.size]
        args += *given[4 * k + 1 : 4 * k + 3], items.items, items.splits, plan
    if not backward:
        args += *_NONE, None, []
    return GraphHandle(GraphArgs._make([*args, None, None]), number)
