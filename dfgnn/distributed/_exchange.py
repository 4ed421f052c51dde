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
    sent: list[Tensor]
    dtype: torch.dtype
    group: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            with named(self.group):
                self.work.wait()
        return self.received if self.received.dtype == self.dtype else self.received.to(self.dtype)


class Exchange:
    """Which of its sources this process sends to whom, and how many it gets from whom.

    send: int64 [S], places among this process's num_src sources, those for rank 0 first, rising for each
    rank; who asks for all of them gets them as they lie. wire: float16 or bfloat16, as which rows [*, H, D]
    of wider types travel; score terms [*, H] always go as they are. group: None for one process.
    """

    def __init__(
        self, group: Any, num_src: int, send: Tensor, send_counts: list[int], recv_counts: list[int]
    ):
        self.group, self.wire = group, None
        self.send_counts, self.recv_counts = send_counts, recv_counts
        self.num_halo, self.num_sent = sum(recv_counts), sum(send_counts)
        pieces = send.split(send_counts)
        # Places for each rank, None for all.
        self._send = [None if count == num_src else piece for count, piece in zip(send_counts, pieces)]
        some = [piece for piece in self._send if piece is not None]
        self._some = torch.cat(some) if some else send[:0]

    wire: torch.dtype | None

    def fetch(self, x: Tensor, into: Tensor | None = None) -> Pending:
        """Starts to fetch the rows [num_halo, ...] of x [num_src, ...] that others own."""
        wire, x = x.dtype, self._narrow(x)
        counts = [count for count, piece in zip(self.send_counts, self._send) if piece is not None]
        some = iter(x.index_select(0, self._some).split(counts) if sum(counts) else [x[:0]] * len(counts))
        rows = [x if piece is None else next(some) for piece in self._send]
        return self._start(rows, self.recv_counts, wire, into)

    def give_back(self, grad: Tensor) -> Pending:
        """Starts to send gradients [num_halo, ...] of fetched rows to those who own them."""
        rows = self._narrow(grad).split(self.recv_counts)
        return self._start(list(rows), self.send_counts, grad.dtype)

    def add(self, grad: Tensor, received: Tensor) -> None:
        """grad[owned row] += what was given back, in place; in the order of ranks, none twice at a time, so
        that the sum is the same at every run."""
        for place, rows in zip(self._send, received.split(self.send_counts)):
            if place is None:
                grad.add_(rows)
            elif len(rows):
                grad.index_add_(0, place, rows)

    def _narrow(self, rows: Tensor) -> Tensor:
        if self.wire is None or rows.dim() < 3 or self.wire.itemsize >= rows.dtype.itemsize:
            return rows.contiguous()
        return rows.to(self.wire).contiguous()

    def _start(
        self, rows: list[Tensor], back: list[int], dtype: torch.dtype, into: Tensor | None = None
    ) -> Pending:
        """rows: for each rank. back: how many come from each."""
        if into is None or rows[0].dtype != dtype:
            into = rows[0].new_empty(sum(back), *rows[0].shape[1:])
        if self.group is None:
            return Pending(None, into, rows, dtype, None)
        with named(self.group):
            if into.is_cuda:  # NCCL sends each rank's rows from where they lie
                work = dist.all_to_all(
                    list(_bytes(into).split(back)), [_bytes(x) for x in rows], self.group, async_op=True
                )
            else:
                there = [x for x in rows if len(x)]
                sent = there[0] if len(there) == 1 else torch.cat(rows)
                counts = [len(x) for x in rows]
                work = dist.all_to_all_single(
                    _bytes(into), _bytes(sent), back, counts, group=self.group, async_op=True
                )
                rows = [sent]
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
        grad = grad.contiguous()
        pending = exchange.give_back(grad[num_src:])
        own = grad[:num_src].clone()
        exchange.add(own, pending.wait())
        return None, own
