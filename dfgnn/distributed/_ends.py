"""Lets a process that ends write so to the store, so that processes that wait for it raise an error."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

_KEY = "dfgnn/ended"  # in the store: how many processes have ended; below it, each one's message
_registered_by: int | None = None  # the id of the process that registered `_say`; forks have another
_last: tuple[Any, int] | None = None  # the store used last, and this process's rank


def default_store() -> Any:
    """The store of the default process group, which torchrun or rank 0 runs."""
    return dist.distributed_c10d._get_default_store()


def will_say(store: Any = None) -> None:
    """Registers `_say` to run when this process ends, also if multiprocessing has started it, so that atexit
    does not run. A fork of this process (a DataLoader's worker) is no rank and must not write."""
    global _registered_by, _last
    if store is not None:
        # For a process that destroys its group before it ends. Not for rank 0: it may run the store itself.
        _last = (store, dist.get_rank()) if dist.get_rank() else None
    if _registered_by != os.getpid():
        _registered_by = os.getpid()
        Finalize(None, _say, exitpriority=0)


def someone_ended(store: Any) -> bool:
    return store.check([_KEY])


def ended_rank(ranks: Iterable[int], store: Any) -> str | None:
    """A text: the rank that ended first, because of which others may have ended, and why; or None."""
    keys = {rank: f"{_KEY}/{rank}" for rank in ranks}
    messages = [
        (*store.get(key).decode(errors="replace").partition(" ")[::2], rank)
        for rank, key in keys.items()
        if store.check([key])
    ]
    if not messages:
        return None
    _, text, rank = min(messages)  # a message begins with its place among those that ended
    return f"rank {rank} {text}"


def _say() -> None:
    error, last = getattr(sys, "last_value", None), _last  # error: the uncaught exception, if any
    with suppress(RuntimeError, ValueError):  # raised by a store that is gone
        if dist.is_initialized():
            last = default_store(), dist.get_rank()
        elif last is None or not _is_served(last[0]):  # there is no store to write to
            return
        store, rank = last
        why = "" if error is None else f": {type(error).__name__}: {str(error)[:200]}"
        who = f"({socket.gethostname()}, process {os.getpid()})"
        place = store.add(_KEY, 1)
        store.set(f"{_KEY}/{rank}", f"{place:09d} {who} has ended{why}")


def _is_served(store: Any) -> bool:
    """Whether there is still a server where the store is: after a request to none PyTorch prints a trace."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        try:
            socket.create_connection((store.host, store.port), timeout=1).close()
        except OSError:
            return False
    return True


will_say()
