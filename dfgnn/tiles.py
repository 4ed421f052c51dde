"""Tiles: a direction of a graph as dense blocks with masks, for rows that share their neighbours.

A *window* is ``ROWS`` consecutive rows of a CSR. The neighbours of its rows, each once and in rising order,
are cut into *chunks* of ``COLUMNS`` columns. A chunk is ``COLUMNS + ROWS`` int32 numbers: its columns, filled
up with its first one, and for every row a mask whose bit c says that the row has an edge to column c. The
kernels (csrc/cuda/tiles.cuh) compute a dense ROWS x COLUMNS block of scores per chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._csr import CSR

# As in csrc/core/params.h.
ROWS, COLUMNS = 64, 32
HEAD_DIMS = (16, 32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16)
# Windows that `sharing` looks at.
_SAMPLE = 128


class Tiles(NamedTuple):
    chunks: Tensor  # int32 [num_chunks, COLUMNS + ROWS]
    counts: Tensor  # int64 [num_windows]: chunks of each window


def refusal(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why there are no tiles for such features, or None."""
    if device.type != "cuda":
        return f"it needs a GPU, got a graph on {device}"
    if dtype not in DTYPES:
        return f"it needs features in float16 or bfloat16, got {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"it needs heads of {', '.join(map(str, HEAD_DIMS))} elements, got {head_dim}"
    return None


def sharing(csr: CSR, num_cols: int) -> float:
    """Edges per column of a window, of some windows: how many rows share a neighbour that is loaded once."""
    num_rows = csr.indptr.numel() - 1
    windows = -(-num_rows // ROWS)
    if num_rows == 0 or csr.indices.numel() == 0:
        return 0.0
    device = csr.indptr.device
    step = max(windows // _SAMPLE, 1)
    window = torch.arange(0, windows, step, device=device)
    begin = csr.indptr[window * ROWS]
    length = csr.indptr[(window * ROWS + ROWS).clamp_(max=num_rows)] - begin
    place = torch.repeat_interleave(length)
    total = place.numel()
    if total == 0:
        return 0.0
    edge = torch.arange(total, device=device) - (length.cumsum(0) - length)[place] + begin[place]
    key = (place * num_cols + csr.indices[edge]).sort().values
    return total / (1 + int((key[1:] != key[:-1]).sum()))


def build(csr: CSR, num_cols: int) -> Tiles | None:
    """None if an edge is there twice: a mask has one bit for it."""
    device = csr.indptr.device
    num_rows, num_edges = csr.indptr.numel() - 1, csr.indices.numel()
    windows = -(-num_rows // ROWS)
    if num_edges == 0:
        none = torch.zeros(windows, dtype=torch.int64, device=device)  # of one chunk, which nobody reads
        return Tiles(torch.zeros(1, COLUMNS + ROWS, dtype=torch.int32, device=device), none)
    row = torch.repeat_interleave(
        torch.arange(num_rows, device=device), csr.indptr.diff(), output_size=num_edges
    )
    # (window, column, row in the window) as one number; at most num_rows * num_cols.
    key = ((row // ROWS * num_cols + csr.indices) * ROWS + row % ROWS).sort().values
    del row
    column_key = key // ROWS  # (window, column)
    new = torch.ones(num_edges, dtype=torch.bool, device=device)
    torch.ne(column_key[1:], column_key[:-1], out=new[1:])
    unique = new.cumsum(0) - 1  # of each edge, among all (window, column)
    if bool((key[1:] == key[:-1]).any()):
        return None
    distinct = column_key[new]
    window = distinct // num_cols
    columns = torch.bincount(window, minlength=windows)
    counts = (columns + COLUMNS - 1) // COLUMNS
    first_chunk, first_column = counts.cumsum(0) - counts, columns.cumsum(0) - columns
    num_chunks = int(counts.sum())
    place = torch.arange(distinct.numel(), device=device) - first_column[window]
    chunk, bit = first_chunk[window] + place // COLUMNS, place % COLUMNS

    chunks = torch.zeros(num_chunks, COLUMNS + ROWS, dtype=torch.int32, device=device)
    ids = (distinct % num_cols).to(torch.int32)
    head = bit == 0
    chunks[chunk[head], :COLUMNS] = ids[head].unsqueeze(1)
    chunks[chunk, bit] = ids
    masks = torch.bitwise_left_shift(torch.ones_like(bit), bit).to(torch.int32)  # bit 31: wraps
    flat = chunks.view(-1)
    at = chunk[unique] * (COLUMNS + ROWS) + COLUMNS + key % ROWS
    flat.index_add_(0, at, masks[unique])  # distinct bits: their sum is their union
    return Tiles(chunks, counts)


def items(tiles: Tiles, num_rows: int, max_chunks: int) -> tuple[Tensor, Tensor, int]:
    """Items (first row, chunks from, to, slot), split rows with the slots of their parts, number of slots.

    A window of more chunks is cut into equal pieces; a piece has a slot for each of its rows, so that those
    of a row are ROWS apart.
    """
    device = tiles.counts.device
    counts, windows = tiles.counts, tiles.counts.numel()
    parts = ((counts + max_chunks - 1) // max_chunks).clamp_(min=1)
    total = int(parts.sum()) if windows else 0
    window = torch.repeat_interleave(torch.arange(windows, device=device), parts, output_size=total)
    piece = torch.arange(total, device=device) - (parts.cumsum(0) - parts)[window]
    length = ((counts + parts - 1) // parts)[window]
    stop = counts.cumsum(0)[window]
    begin = torch.minimum(stop - counts[window] + piece * length, stop)
    end = torch.minimum(begin + length, stop)
    split = parts[window] > 1
    slot = torch.where(split, (split.cumsum(0) - 1) * ROWS, -1)
    found = torch.stack([window * ROWS, begin, end, slot], 1).to(torch.int32)

    cut = (parts > 1).nonzero().squeeze(1)
    pieces = parts[cut]
    last = pieces.cumsum(0) * ROWS
    row = cut.unsqueeze(1) * ROWS + torch.arange(ROWS, device=device)
    first = (last - pieces * ROWS).unsqueeze(1) + torch.arange(ROWS, device=device)
    splits = torch.stack([row, first, last.unsqueeze(1).expand_as(row), torch.full_like(row, ROWS)], 2).view(
        -1, 4
    )
    splits = splits[splits[:, 0] < num_rows].to(torch.int32)
    return found, splits, int(last[-1]) if len(cut) else 0
