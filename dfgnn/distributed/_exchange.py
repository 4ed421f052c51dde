"""Exchanges rows of nodes between processes: fetches other processes' rows, and returns their gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._watch import named


class Pending(NamedTuple):
    """Rows that are being received. It holds what is sent until the transfer is complete."""

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
    """Knows which of its sources this process sends to which rank, and how many rows it gets from each.

    send: int64 [S], indices into this process's num_src sources, those for rank 0 first, rising for each
    rank; a rank that needs all sources gets them without a gather. wire: float16 or bfloat16, to which rows
    [*, H, D] of wider types are converted for the transfer; score terms [*, H] are never converted. group:
    None for one process.
    """

    def __init__(
        self, group: Any, num_src: int, send: Tensor, send_counts: list[int], recv_counts: list[int]
    ):
        self.group, self.wire = group, None
        self.send_counts, self.recv_counts = send_counts, recv_counts
        self.num_halo, self.num_sent = sum(recv_counts), sum(send_counts)
        pieces = send.split(send_counts)
        # For each rank the indices of the rows to send; None for all rows.
        self._send = [None if count == num_src else piece for count, piece in zip(send_counts, pieces)]
        some = [piece for piece in self._send if piece is not None]
        self._some = torch.cat(some) if some else send[:0]

    wire: torch.dtype | None

    def fetch(self, x: Tensor, into: Tensor | None = None) -> Pending:
        """Starts to fetch the halo's rows [num_halo, ...] and to send rows of x [num_src, ...] to others.
        into: where to receive the rows, unless they are converted for the transfer."""
        wire, x = x.dtype, self._narrow(x)
        counts = [count for count, piece in zip(self.send_counts, self._send) if piece is not None]
        some = iter(x.index_select(0, self._some).split(counts) if sum(counts) else [x[:0]] * len(counts))
        rows = [x if piece is None else next(some) for piece in self._send]
        return self._start(rows, self.recv_counts, wire, into)

    def give_back(self, grad: Tensor) -> Pending:
        """Starts to send the gradients [num_halo, ...] of fetched rows to the processes that own the rows."""
        rows = self._narrow(grad).split(self.recv_counts)
        return self._start(list(rows), self.send_counts, grad.dtype)

    def add(self, grad: Tensor, received: Tensor) -> None:
        """Adds received gradients to those of this process's rows, in place. It adds one rank's rows at a
        time, among which none occurs twice, so that sums have the same order in every run."""
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
        """Starts a transfer. rows: what each rank gets. back: how many rows come from each rank. dtype: that
        of the rows which `Pending.wait` returns. into: see `fetch`."""
        if into is None or rows[0].dtype != dtype:
            into = rows[0].new_empty(sum(back), *rows[0].shape[1:])
        if self.group is None:
            return Pending(None, into, rows, dtype, None)
        with named(self.group):
            if into.is_cuda:  # NCCL sends each rank's rows without a copy
                work = dist.all_to_all(
                    list(_bytes(into).split(back)), [_bytes(x) for x in rows], self.group, async_op=True
                )
            else:
                nonempty = [x for x in rows if len(x)]
                sent = nonempty[0] if len(nonempty) == 1 else torch.cat(rows)
                counts = [len(x) for x in rows]
                work = dist.all_to_all_single(
                    _bytes(into), _bytes(sent), back, counts, group=self.group, async_op=True
                )
                rows = [sent]
        return Pending(work, into, rows, dtype, self.group)


def _bytes(x: Tensor) -> Tensor:
    """x as [N, bytes], because not every backend can send every dtype."""
    return x.view(len(x), x[0].numel() if len(x) else _width(x)).view(torch.uint8)


def _width(x: Tensor) -> int:
    width = 1
    for size in x.shape[1:]:
        width *= size
    return width


def rows_of_all(x: Tensor, group: Any) -> list[Tensor]:
    """All processes' x, in the order of ranks; numbers of rows may differ."""
    if group is None:
        return [x]
    size = dist.get_world_size(group)
    count = torch.tensor([len(x)], device=x.device)
    counts = [torch.empty_like(count) for _ in range(size)]
    with named(group):
        dist.all_gather(counts, count, group=group)
        sizes = torch.cat(counts).tolist()
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=group)
    return [rows[:size] for rows, size in zip(gathered, sizes)]


def first_order(backward: Any) -> Any:
    """A backward that refuses to be recorded. With torch's `once_differentiable` a second derivative by
    parameters, to which no path leads through this node, would silently lack its part."""

    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "dfgnn.distributed: create_graph: expected False, as a DistributedGraph has first "
                "derivatives only, got True; take second ones on a Graph, in one process"
            )
        return backward(ctx, *grads)

    return checked


class Gather(torch.autograd.Function):
    """x [num_src, ...] followed by the rows fetched from others: [num_src + num_halo, ...]."""

    @staticmethod
    def forward(ctx, exchange: Exchange, x: Tensor) -> Tensor:
        ctx.exchange = exchange
        rows = x.new_empty(len(x) + exchange.num_halo, *x.shape[1:])
        halo = rows[len(x) :]
        pending = exchange.fetch(x, into=halo)
        rows[: len(x)] = x
        received = pending.wait()
        if received.data_ptr() != halo.data_ptr():
            halo.copy_(received)
        return rows

    @staticmethod
    @first_order
    def backward(ctx, grad):
        exchange = ctx.exchange
        num_src = len(grad) - exchange.num_halo
        grad = grad.contiguous()
        pending = exchange.give_back(grad[num_src:])
        own = grad[:num_src].clone()
        exchange.add(own, pending.wait())
        return None, own
