"""Makes the handles of graphs for eager calls: plans both directions of a graph in one native call.

On a GPU nothing waits. The plans are those of `choose.plan`, where these depend only on known degrees, are on
rows, and take all heads and sources at a time. Small graphs that are new at every step, whose planning time
matters, have such plans.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arguments import GraphArgs, GraphHandle
from ..runtime.ops import cut_graph, plan_graph
from ..sparse.csr import CSR
from ..sparse.packed import CPU_BOUND
from ..sparse.structure import Structure
from . import cost, tiles
from .direction import Direction
from .plans import Items, Shape

_NONE = None, None, None


def on_cpu(structure: Structure, backward: bool) -> GraphHandle:
    """The handle of "auto", which on a CPU serves all feature shapes. It has edge ids whether a call needs
    them or not. It is made by one call, because a graph that is used once is planned anew at every step."""
    dst, src = structure.dst, structure.src
    if dst.built is not None and not dst.built[1]:
        structure.csr()
    if backward and src.built is not None and not src.built[1]:
        structure.reverse_csr(need_eids=True)
    forward: Any = _NONE if dst.built is None else dst.built[0]
    reverse: Any = _NONE if src.built is None or not src.built[1] else src.built[0]
    number, slots, rev_slots, *csr, items, splits, rev_items, rev_splits = plan_graph(
        *forward, *reverse, dst.num_rows, src.num_rows, CPU_BOUND, backward
    )
    if csr[0] is not None:
        side = dst if dst.built is None else src
        side.built = CSR(*csr), True
        forward, reverse = (csr, reverse) if side is dst else (forward, csr)
    size = dst.num_rows, src.num_rows, len(forward[1])
    args: list[Any] = [*forward[1:], items, splits, [slots, 0, 0, *size]]
    if backward:
        args += *reverse[1:], rev_items, rev_splits, [rev_slots, 0, 0, size[1], size[0], size[2]]
    else:
        args += *_NONE, None, []
    return GraphHandle(GraphArgs._make([*args, None, None]), number)


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


def on_gpu(
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
