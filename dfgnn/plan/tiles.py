"""Builds block-sparse tiles: a graph as dense blocks with masks, for rows that share their neighbours.

A *window* is ``ROWS`` consecutive rows of a CSR. The neighbours of its rows, each once and in ascending
order, are cut into *chunks* of ``COLUMNS`` columns. A chunk is ``COLUMNS + ROWS`` int32 numbers: its columns,
padded with its first one, and for every row a mask whose bit c says that the row has an edge to column c. The
kernels (csrc/cuda/attention/tiles.cuh) compute a dense ROWS x COLUMNS block of scores per chunk.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime import ops as _ops
from ..sparse.csr import CSR
from .plans import CHUNK_COLUMNS as COLUMNS
from .plans import Items

# These are the same as in csrc/core/params.h.
ROWS = 64
HEAD_DIMS = (8, 16, 32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16)
# `sharing` samples at least 128 windows, if the graph has them, and fewer than 256; and of each of their rows
# at most 4,096 edges.
_SAMPLE, _SAMPLE_EDGES = 128, 4096
# Up to this number of columns the kernels are faster than sorting. They mark the columns of each window in a
# bitmap, 2**17 columns at a time.
_MOST_COLUMNS = 2**23


class Tiles(NamedTuple):
    chunks: Tensor  # int32 [num_chunks, COLUMNS + ROWS]
    offsets: Tensor  # int64 [num_windows + 1]: the chunks of window w are offsets[w] .. offsets[w + 1] - 1


@cache
def refusal(head_dim: int, dtype: torch.dtype, device: str) -> str | None:
    """The reason why there are no tiles for such features on such a device, or None."""
    if device != "cuda":
        return f"it needs a GPU, got a graph on {device}"
    if dtype not in DTYPES:
        return f"it needs features in float16 or bfloat16, got {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"it needs heads of {', '.join(map(str, HEAD_DIMS))} elements, got {head_dim}"
    return None


def sharing(csr: CSR, num_cols: int) -> float:
    """Edges per distinct neighbour in a sample of windows: how many rows use a neighbour that is loaded once.

    Only the first 4,096 edges of a row count, so that super nodes cost no more than other rows.
    """
    windows = -(-(csr.indptr.numel() - 1) // ROWS)
    if csr.indices.numel() == 0:
        return 0.0
    step = max(windows // _SAMPLE, 1)
    if _ops.on_device(csr.indptr):
        edges, columns = _ops.sharing(csr.indptr, csr.indices, step, _SAMPLE_EDGES).tolist()
    else:
        edges, columns = _sharing(csr, num_cols, step, _SAMPLE_EDGES)
    return edges / columns if edges else 0.0


def _sharing(csr: CSR, num_cols: int, step: int, most: int) -> tuple[int, int]:
    """The edges and distinct columns of every step-th window, of whose rows at most the first `most` edges
    count."""
    device, num_rows = csr.indptr.device, csr.indptr.numel() - 1
    row = torch.arange(num_rows, device=device)
    row = row[row // ROWS % step == 0]
    begin = csr.indptr[row]
    length = (csr.indptr[row + 1] - begin).clamp_(max=most)
    place = torch.repeat_interleave(length)
    edge = torch.arange(place.numel(), device=device) - (length.cumsum(0) - length)[place] + begin[place]
    return place.numel(), (row[place] // ROWS * num_cols + csr.indices[edge]).unique().numel()


def build(csr: CSR, num_cols: int) -> Tiles | None:
    """The tiles of one direction; None if an edge occurs twice, because a mask has only one bit for it."""
    device = csr.indptr.device
    num_rows, num_edges = csr.indptr.numel() - 1, csr.indices.numel()
    windows = -(-num_rows // ROWS)
    if num_edges == 0:
        none = torch.zeros(windows + 1, dtype=torch.int64, device=device)  # the one chunk is never read
        return Tiles(torch.zeros(1, COLUMNS + ROWS, dtype=torch.int32, device=device), none)
    if _ops.on_device(csr.indptr) and num_cols <= _MOST_COLUMNS:
        offsets = _ops.tile_counts(csr.indptr, csr.indices).cumsum(0)
        chunks, twice = _ops.tiles(csr.indptr, csr.indices, offsets, int(offsets[-1]))
        return None if twice.item() else Tiles(chunks, offsets)
    row = torch.repeat_interleave(
        torch.arange(num_rows, device=device), csr.indptr.diff(), output_size=num_edges
    )
    # One sort key for (window, column, row in the window); it is at most num_rows * num_cols.
    key = ((row // ROWS * num_cols + csr.indices) * ROWS + row % ROWS).sort().values
    del row
    column_key = key // ROWS  # (window, column)
    new = torch.ones(num_edges, dtype=torch.bool, device=device)
    torch.ne(column_key[1:], column_key[:-1], out=new[1:])
    unique = new.cumsum(0) - 1  # each edge's place among the distinct (window, column)
    if bool((key[1:] == key[:-1]).any()):
        return None
    distinct = column_key[new]
    window = distinct // num_cols
    columns = torch.bincount(window, minlength=windows)
    counts = (columns + COLUMNS - 1) // COLUMNS
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    num_chunks = int(offsets[-1])
    place = torch.arange(distinct.numel(), device=device) - (columns.cumsum(0) - columns)[window]
    chunk, bit = offsets[window] + place // COLUMNS, place % COLUMNS

    chunks = torch.zeros(num_chunks, COLUMNS + ROWS, dtype=torch.int32, device=device)
    ids = (distinct % num_cols).to(torch.int32)
    head = bit == 0
    chunks[chunk[head], :COLUMNS] = ids[head].unsqueeze(1)
    chunks[chunk, bit] = ids
    masks = torch.bitwise_left_shift(torch.ones_like(bit), bit).to(torch.int32)  # bit 31 is the sign
    flat = chunks.view(-1)
    at = chunk[unique] * (COLUMNS + ROWS) + COLUMNS + key % ROWS
    flat.index_add_(0, at, masks[unique])  # the bits of a mask are distinct, so their sum is their union
    return Tiles(chunks, offsets)


def items(tiles: Tiles, num_rows: int, max_chunks: int) -> Items:
    """Cuts windows into work items (first row, first chunk, last chunk + 1, slot) of at most `max_chunks`.

    A longer window is cut into equal work items, each of which has a partial-result slot per row, so that the
    slots of a row are ROWS apart. On a GPU, all work items but the first of each window are in front. Rows of
    the last window beyond the graph's last row have no entries in ``splits``; on a GPU they have empty ones.
    """
    device = tiles.offsets.device
    counts, windows = tiles.offsets.diff(), tiles.offsets.numel() - 1
    if _ops.on_device(tiles.offsets):
        work_items = _ops.plan_windows(tiles.offsets, len(tiles.chunks), num_rows, max_chunks)
        more, num_slots, num_splits = work_items[2][:3].tolist()
        begin = len(work_items[0]) - windows - more
        return Items(work_items[0][begin:], work_items[1][: num_splits * ROWS], num_slots * ROWS)
    item_counts = ((counts + max_chunks - 1) // max_chunks).clamp_(min=1)
    total = int(item_counts.sum()) if windows else 0
    window = torch.repeat_interleave(torch.arange(windows, device=device), item_counts, output_size=total)
    place = torch.arange(total, device=device) - (item_counts.cumsum(0) - item_counts)[window]
    length = ((counts + item_counts - 1) // item_counts)[window]
    stop = tiles.offsets[window + 1]
    begin = torch.minimum(tiles.offsets[window] + place * length, stop)
    end = torch.minimum(begin + length, stop)
    split = item_counts[window] > 1
    slot = torch.where(split, (split.cumsum(0) - 1) * ROWS, -1)
    work_items = torch.stack([window * ROWS, begin, end, slot], 1).to(torch.int32)

    split_windows = (item_counts > 1).nonzero().squeeze(1)
    split_counts = item_counts[split_windows]
    last = split_counts.cumsum(0) * ROWS
    row = split_windows.unsqueeze(1) * ROWS + torch.arange(ROWS, device=device)
    first = (last - split_counts * ROWS).unsqueeze(1) + torch.arange(ROWS, device=device)
    splits = torch.stack([row, first, last.unsqueeze(1).expand_as(row), torch.full_like(row, ROWS)], 2).view(
        -1, 4
    )
    splits = splits[splits[:, 0] < num_rows].to(torch.int32)
    return Items(work_items, splits, int(last[-1]) if len(split_windows) else 0)
