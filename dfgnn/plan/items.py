"""Cuts the rows of a CSR into work items: rows, or chunks of rows, in the order in which they run."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime import ops as _ops
from ..sparse.csr import CSR
from .plans import Items

_plan_rows, _cut_rows = _ops.plan_rows, _ops.cut_rows
# A work item with this number as its slot adds to what one of an earlier source partition wrote to the row
# (csrc/core/params.h).
JOINS = -2
# Maximum edges per work item where degrees are not known.
ONCE_BOUND = 256


def of_rows(
    csr: CSR,
    num_cols: int,
    max_edges: int,
    longest_first: bool,
    parts: int,
    counts: tuple[int, int] | None = None,
) -> Items:
    """Work items by source partition (``parts`` of them), and within one in row order or the longest first.
    The same rows always give the same order. counts: (work items beyond one per row, split rows); where it is
    None, the host waits for the GPU to count them.
    """
    if not _ops.on_device(csr.indptr):
        if csr.indptr.device.type == "cpu" and parts == 1 and not longest_first:
            return cut_on_cpu(csr, max_edges)
        return cut(*by_source(csr, num_cols, parts), max_edges, longest_first)
    if counts is None or parts > 1:
        return cut_on_gpu(csr, num_cols, max_edges, longest_first, parts)
    items, splits = _cut_rows(csr.indptr, csr.indices, max_edges, longest_first, *counts)
    return Items(items, splits, sum(counts))


def of_rows_once(csr: CSR, max_edges: int = ONCE_BOUND) -> Items:
    """Work items in row order, made on a GPU without waiting. Their tensors are as long as any graph of this
    size needs."""
    items, splits, _ = _plan_rows(csr.indptr, csr.indices, 0, 1, max_edges, False)
    # The last field, num_slots, is an upper bound: a split row of d edges has ceil(d / max_edges)
    # <= 2 floor(d / max_edges) slots. The floors of all rows add up to at most E // max_edges, which is the
    # length of splits here.
    return Items(items, splits, 2 * len(splits))


def cut(begin: Tensor, end: Tensor, max_edges: int, longest_first: bool) -> Items:
    """Cuts rows into work items of at most `max_edges` edges, with tensor operations on any device.

    begin, end: int64 [parts, rows], the range of a row's edges whose sources lie in a partition. Work items
    are ordered as `of_rows` says. A row of several work items is split: their slots are consecutive.
    """
    num_rows, device = begin.shape[1], begin.device
    degree = end - begin
    chunks = (degree + max_edges - 1) // max_edges
    chunks_per_row = chunks.sum(0)
    chunks[0] += chunks_per_row == 0  # a row without edges also needs a work item, which writes zeros
    chunks_per_row.clamp_(min=1)
    split = chunks_per_row > 1
    slots = torch.where(split, chunks_per_row, 0).cumsum(0)
    first_slot = slots - torch.where(split, chunks_per_row, 0) + (chunks.cumsum(0) - chunks)  # [parts, rows]
    length = ((degree + chunks - 1) // chunks.clamp(min=1)).flatten()

    count = chunks.flatten()
    total = int(count.sum())
    place = torch.repeat_interleave(torch.arange(count.numel(), device=device), count, output_size=total)
    chunk = torch.arange(total, device=device) - (count.cumsum(0) - count)[place]
    row, stop = place % max(num_rows, 1), end.flatten()[place]
    start = torch.minimum(begin.flatten()[place] + chunk * length[place], stop)
    slot = torch.where(split[row], first_slot.flatten()[place] + chunk, -1)
    items = torch.stack([row, start, torch.minimum(start + length[place], stop), slot], 1).to(torch.int32)
    if longest_first:
        part = place // max(num_rows, 1)
        order = torch.argsort(part * 2**31 - (items[:, 2] - items[:, 1]), stable=True)
        items = items[order].contiguous()

    rows = split.nonzero().squeeze(1)
    last = slots[rows]
    splits = torch.stack([rows, last - chunks_per_row[rows], last, torch.ones_like(rows)], 1).to(torch.int32)
    return Items(items, splits, int(last[-1]) if len(rows) else 0)


def cut_on_cpu(csr: CSR, max_edges: int) -> Items:
    """`cut` in row order, by one native call."""
    indices = csr.indices[: csr.indptr[-1]]  # a graph of fixed capacity has room for more edges
    items, splits, counts = _plan_rows(csr.indptr, indices, 0, 1, max_edges, False)
    return Items(items, splits, int(counts[1]) if len(splits) else 0)


def by_source(csr: CSR, num_cols: int, parts: int) -> tuple[Tensor, Tensor]:
    """Begin and end [parts, rows] of each row's edges in each source partition. They are found by bisection,
    because the neighbours of a row are in ascending order."""
    low, high = csr.indptr[:-1], csr.indptr[1:]
    bounds = [low]
    for part in range(1, parts):
        bound = -(-num_cols * part // parts)
        lo, hi = bounds[-1], high
        for _ in range(csr.indices.numel().bit_length()):
            middle = (lo + hi) // 2
            searching = lo < hi
            below = searching & (csr.indices[torch.where(searching, middle, 0)] < bound)
            lo, hi = torch.where(below, middle + 1, lo), torch.where(searching & ~below, middle, hi)
        bounds.append(lo)
    bounds.append(high)
    return torch.stack(bounds[:-1]), torch.stack(bounds[1:])


def cut_on_gpu(csr: CSR, num_cols: int, max_edges: int, longest_first: bool, parts: int) -> Items:
    """`cut` by the GPU's kernels, in another order. With longest_first they sort by ranges of lengths, four
    for each doubling of the length. In natural order each 64 rows are sorted by length; chunks of split rows
    beyond a row's first come before all rows, and unused entries before those. With source partitions only
    blocks of rows are in order."""
    items, splits, counts = _plan_rows(csr.indptr, csr.indices, num_cols, parts, max_edges, longest_first)
    more, num_slots, num_splits = counts[:3].tolist()
    num_rows = csr.indptr.numel() - 1
    begin = 0 if longest_first or parts > 1 else len(items) - num_rows - more
    return Items(items[begin : begin + num_rows + more], splits[:num_splits], num_slots)


def join(cut_rows: Items, csr: CSR, num_cols: int, parts: int) -> tuple[Items, tuple[int, ...]]:
    """Removes the slots of rows that have one work item per source partition: the first work item writes the
    output row (slot -1), and those of later partitions, which run after it, add to it (`JOINS`). Also returns
    how many work items each partition has.
    """
    slot = cut_rows.items[:, 3].long()
    part = _part_of(cut_rows.items, csr, num_cols, parts)
    sizes = tuple(torch.bincount(part, minlength=parts).tolist())
    row, first, last, _ = cut_rows.splits.long().unbind(1)
    of_slot = part.new_zeros(cut_rows.num_slots)
    of_slot[slot[slot >= 0]] = part[slot >= 0]
    # A row with two chunks in one partition keeps its slots, which are consecutive and in the order of
    # partitions.
    repeats = torch.cat([part.new_zeros(1), (of_slot[1:] == of_slot[:-1]).cumsum(0)])
    keeps_slots = repeats[last - 1] > repeats[first] if len(row) else row.bool()
    count = (last - first) * keeps_slots
    begin = count.cumsum(0) - count
    order = first.argsort()
    split = torch.repeat_interleave(order, (last - first)[order], output_size=cut_rows.num_slots)
    old = torch.arange(cut_rows.num_slots, device=slot.device)
    joined = torch.where(old == first[split], -1, JOINS)
    new = torch.where(keeps_slots[split], begin[split] + old - first[split], joined)
    items = cut_rows.items.clone()
    items[:, 3] = torch.cat([new, new.new_full((1,), -1)])[slot].int()
    splits = torch.stack([row, begin, begin + count, torch.ones_like(row)], 1)[keeps_slots].int()
    return Items(items, splits, int(count.sum())), sizes


def _part_of(items: Tensor, csr: CSR, num_cols: int, parts: int) -> Tensor:
    """The source partition of each work item's first edge; a work item without edges is in the first."""
    if not csr.indices.numel():
        return items[:, 0].long() * 0
    ends = [-(-num_cols * p // parts) for p in range(1, parts)]
    bounds = torch.tensor(ends, dtype=csr.indices.dtype, device=items.device)
    source = csr.indices[items[:, 1].clamp(max=csr.indices.numel() - 1)]
    return torch.where(items[:, 2] > items[:, 1], torch.bucketize(source, bounds, right=True), 0)


def falls(indptr: Tensor, indices: Tensor) -> Tensor:
    """How many indices are smaller than the one before them in the same row: 0 if the indices of every row
    ascend."""
    if _ops.on_device(indptr):
        return _ops.falls(indptr, indices)
    return falls_in_tensors(indptr, indices)


def falls_in_tensors(indptr: Tensor, indices: Tensor) -> Tensor:
    descending = indices[1:] < indices[:-1]
    starts = indptr[1:-1]
    descending[starts[(starts > 0) & (starts < indices.numel())] - 1] = False
    return descending.sum()
