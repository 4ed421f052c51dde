"""The buffers of one capacity: a padded batch at fixed addresses, as CUDA graphs need it, and its graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from . import samples
from .samples import FIXED, GRAPH_OF, INDEX, OFFSETS, Level, Sample, Sizes

_ALIGN = 256  # bytes: each tensor in the block begins at a multiple of this
_RING = 3  # number of staging buffers on the host: several, because earlier copies may be in progress
_NUMBERS = "sizes in use"  # the name of the tensor with `Sizes.numbers` of the batch


class Buffers:
    """All tensors of a batch as views of one block of memory, so that a batch on the host takes one copy.

    Padding consists of edges from the last node, which is never in use, to itself; of nodes that belong to
    the last graph, which is never in use either; and of zeros.
    """

    def __init__(self, sample: Sample, levels: dict[str, Level], capacity: Sizes, device: torch.device):
        self.capacity, self.levels, self.device = capacity, levels, device
        # Name of a tensor -> (offset in the block in bytes, shape, dtype).
        self._layout: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        at = 0
        shapes = {name: self._shape(name, x) for name, x in sample.tensors.items()}
        numbers = torch.Size([len(capacity.numbers())]), torch.int64
        for name, (shape, dtype) in {**shapes, _NUMBERS: numbers}.items():
            self._layout[name] = at, shape, dtype
            at += -(-shape.numel() * dtype.itemsize // _ALIGN) * _ALIGN
        self._bytes = at
        self._block = torch.empty(at, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._block)
        # How many are in use: sources, destinations and edges of each hop's graph, then graphs.
        self.numbers = self.tensors.pop(_NUMBERS)
        self._staging: list[tuple[Tensor, dict[str, Tensor], Any]] = []
        self._turn = 0
        self._fill(self.tensors, Sizes(0, 0, 0, (0,) * len(capacity.hops)))
        indices = [x for name, x in self.tensors.items() if name.endswith("edge_index")]
        self.graphs = [
            Graph._over(edges, self.numbers[3 * k : 3 * k + 3], num_src, num_dst)
            for k, (edges, (num_src, num_dst, _)) in enumerate(zip(indices, capacity.ends()))
        ]
        masks = capacity.masks()
        self.masks = {
            name: torch.zeros(size, dtype=torch.bool, device=device) for name, (_, size) in masks.items()
        }
        # For each mask: the number of rows in use on the device, and 0 .. size - 1, to compare with it.
        self._counting = [
            (self.numbers[place], torch.arange(size, device=device)) for place, size in masks.values()
        ]

    def _shape(self, name: str, x: Tensor) -> tuple[torch.Size, torch.dtype]:
        level, shape = self.levels[name], list(x.shape)
        if level.kind != FIXED:
            shape[1 if level.kind == INDEX else 0] = samples.rows_of(level, self.capacity)
        return torch.Size(shape), x.dtype

    def _views(self, block: Tensor) -> dict[str, Tensor]:
        return {
            name: block[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (at, shape, dtype) in self._layout.items()
        }

    # ---- what goes in ----------------------------------------------------------------------------

    def load(self, sample: Sample) -> None:
        """Copies a batch in; nothing waits for the device."""
        numbers = torch.tensor(sample.sizes.numbers())
        if self.device.type == "cuda" and all(x.device.type == "cpu" for x in sample.tensors.values()):
            block, views, event = self._next_staging()
            self._write(views, sample)
            views[_NUMBERS].copy_(numbers)
            self._block.copy_(block, non_blocking=True)
            event.record()
        else:
            self._write(self.tensors, sample)
            self.numbers.copy_(numbers, non_blocking=True)

    def _next_staging(self) -> tuple[Tensor, dict[str, Tensor], Any]:
        if len(self._staging) < _RING:
            block = torch.zeros(self._bytes, dtype=torch.uint8, pin_memory=True)
            self._staging.append((block, self._views(block), torch.cuda.Event()))
        staging = self._staging[self._turn % len(self._staging)]
        self._turn += 1
        staging[2].synchronize()  # waits for the copy from it some batches ago
        return staging

    def _write(self, views: dict[str, Tensor], sample: Sample) -> None:
        for name, x in sample.tensors.items():
            kind, view = self.levels[name].kind, views[name]
            if kind == FIXED:
                view.copy_(x, non_blocking=True)
            elif kind == INDEX:
                for row, values in zip(view, x):
                    row[: x.shape[1]].copy_(values, non_blocking=True)
            else:
                view[: len(x)].copy_(x, non_blocking=True)
        self._fill(views, sample.sizes)

    def _fill(self, views: dict[str, Tensor], used: Sizes) -> None:
        """Writes the padding behind the rows that are used."""
        for name, level in self.levels.items():
            view, begin = views[name], samples.rows_of(level, used)
            if level.kind == INDEX:
                num_src, num_dst, _ = self.capacity.ends()[level.hop]
                if num_src == num_dst:
                    view[:, begin:].fill_(num_src - 1)
                else:
                    view[0, begin:].fill_(num_src - 1)
                    view[1, begin:].fill_(num_dst - 1)
            elif level.kind == GRAPH_OF:
                view[begin:].fill_(self.capacity.graphs - 1)
            elif level.kind == OFFSETS:
                view[begin:].fill_(used.nodes)
                view[-1:].fill_(self.capacity.nodes)
            elif level.kind != FIXED:
                view[begin:].zero_()

    # ---- what a step sees ------------------------------------------------------------------------

    def derive(self) -> None:
        """Derives masks and the graph from the numbers in use; part of the captured step."""
        self.forget()
        for mask, (count, places) in zip(self.masks.values(), self._counting):
            torch.lt(places, count, out=mask)

    def forget(self) -> None:
        """Drops the graphs' derived tensors: those made within a CUDA graph must not be used outside."""
        for graph in self.graphs:
            graph._renew()

    def row_masks(self) -> dict[int, Tensor]:
        return {len(mask): mask for mask in self.masks.values()}

    def cut(self, out: Any, sizes: Sizes) -> Any:
        """An output without the rows that are not in use."""
        if not isinstance(out, Tensor) or not out.dim():
            return out
        numbers = sizes.numbers()
        used = {rows: numbers[place] for place, rows in self.capacity.masks().values()}.get(out.shape[0])
        return out if used is None else out[:used]


_MULTIPLE = 64  # capacities are one more than a multiple of this


def capacity_for(sizes: Sizes, room: float) -> Sizes:
    """Sizes with some room, all different and unlike usual feature sizes: see `distinct`."""
    nodes, edges, *hops = (-(-int(size * room + 1) // _MULTIPLE) * _MULTIPLE + 1 for size in sizes.counts())
    if hops:
        hops[-1] = sizes.hops[-1] + 1  # all batches but an epoch's last have the same number of seeds
    return distinct(Sizes(nodes, edges, sizes.graphs + 1, tuple(hops)))


def distinct(sizes: Sizes, used_sizes: Iterable[int] = ()) -> Sizes:
    """Sizes that all differ, also from ``used_sizes``, because `WithoutPadding` recognises tensors by their
    number of rows."""
    used_sizes = set(used_sizes)

    def free(size: int) -> int:
        while size in used_sizes:
            size += 1
        used_sizes.add(size)
        return size

    counts = list(sizes.counts())
    for k in (*reversed(range(0, len(counts), 2)), *range(1, len(counts), 2)):  # smaller sizes first
        counts[k] = free(counts[k])
    return Sizes(counts[0], counts[1], free(sizes.graphs), tuple(counts[2:]))
