"""Rows of nodes that other processes need: sent, received, and their gradients on the way back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._watch import named


class Pending(NamedTuple):
    """Rows on their way. What is sent stays alive until they are there."""

    work: Any
    received: Tensor
    sent: Tensor
    dtype: torch.dtype
    group: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            with named(self.group):
                self.work.wait()
        return self.received if self.received.dtype == self.dtype else self.received.to(self.dtype)


class Exchange:
    """Which of its sources this process sends to whom, and how many it gets from whom.

    send: int64 [S], places among this process's sources, those for rank 0 first, rising for each rank.
    send_counts, recv_counts: rows for and from each rank. wire: float16 or bfloat16, as which rows [*, H, D]
    of wider types travel; score terms [*, H] always go as they are. group: None for one process.
    """

    def __init__(self, group: Any, send: Tensor, send_counts: list[int], recv_counts: list[int]):
        self.group, self.send = group, send
        self.send_counts, self.recv_counts = send_counts, recv_counts
        self.num_halo = sum(recv_counts)
        self.wire: torch.dtype | None = None

    def fetch(self, x: Tensor, into: Tensor | None = None) -> Pending:
        """Starts to fetch the rows [num_halo, ...] of x [num_src, ...] that others own."""
        return self._start(x.index_select(0, self.send), self.send_counts, self.recv_counts, into)

    def give_back(self, grad: Tensor) -> Pending:
        """Starts to send gradients [num_halo, ...] of fetched rows to those who own them."""
        return self._start(grad, self.recv_counts, self.send_counts)

    def add(self, grad: Tensor, received: Tensor) -> None:
        """grad[owned row] += what was given back, in place; in the order of ranks, none twice at a time, so
        that the sum is the same at every run."""
        begin = 0
        for count in self.send_counts:
            if count:
                grad.index_add_(0, self.send[begin : begin + count], received[begin : begin + count])
            begin += count

    def _start(self, rows: Tensor, out: list[int], back: list[int], into: Tensor | None = None) -> Pending:
        dtype = rows.dtype
        if self.wire is not None and rows.dim() > 2 and self.wire.itemsize < dtype.itemsize:
            rows, into = rows.to(self.wire), None
        rows = rows.contiguous()
        if into is None:
            into = rows.new_empty(sum(back), *rows.shape[1:])
        if self.group is None:
            return Pending(None, into, rows, dtype, None)
        with named(self.group):
            work = dist.all_to_all_single(
                _bytes(into), _bytes(rows), back, out, group=self.group, async_op=True
            )
        return Pending(work, into, rows, dtype, self.group)


def _bytes(x: Tensor) -> Tensor:
    """[N, bytes]: every backend moves them, whatever types it knows."""
    return x.view(len(x), x[0].numel() if len(x) else _width(x)).view(torch.uint8)


def _width(x: Tensor) -> int:
    width = 1
    for size in x.shape[1:]:
        width *= size
    return width


def rows_of_all(x: Tensor, group: Any) -> list[Tensor]:
    """Everybody's x [any, ...], in the order of ranks."""
    if group is None:
        return [x]
    size = dist.get_world_size(group)
    count = torch.tensor([len(x)], device=x.device)
    counts = [torch.empty_like(count) for _ in range(size)]
    with named(group):
        dist.all_gather(counts, count, group=group)
        sizes = torch.cat(counts).tolist()
        mine = x.new_zeros(max(sizes), *x.shape[1:])
        mine[: len(x)] = x
        found = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(found, mine, group=group)
    return [rows[:size] for rows, size in zip(found, sizes)]


class Gather(torch.autograd.Function):
    """[num_src, ...] and the rows fetched from others below: [num_src + num_halo, ...]."""

    @staticmethod
    def forward(ctx, exchange: Exchange, x: Tensor) -> Tensor:
        ctx.exchange = exchange
        both = x.new_empty(len(x) + exchange.num_halo, *x.shape[1:])
        halo = both[len(x) :]
        pending = exchange.fetch(x, into=halo)
        both[: len(x)] = x
        received = pending.wait()
        if received.data_ptr() != halo.data_ptr():
            halo.copy_(received)
        return both

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        exchange = ctx.exchange
        num_src = len(grad) - exchange.num_halo
        pending = exchange.give_back(grad[num_src:])
        own = grad[:num_src].clone()
        exchange.add(own, pending.wait())
        return None, own
