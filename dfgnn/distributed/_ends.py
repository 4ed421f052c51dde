"""A process that ends says so in the store, for those that wait for it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

_KEY = "dfgnn/ended"
_registered_by: int | None = None  # the number of the process
_last: tuple[Any, int] | None = None  # a store that was used, and this process's rank


def default_store() -> Any:
    """Of the default process group: torchrun's, or rank 0's."""
    return dist.distributed_c10d._get_default_store()


def will_say(store: Any = None) -> None:
    """Lets this process say that it ends, also one of multiprocessing's, where atexit does not run. A fork of
    it (a DataLoader's worker) is no rank and says nothing."""
    global _registered_by, _last
    if store is not None:
        # Of use where a process that fails destroys its group. Rank 0 may hold the store's port.
        _last = (store, dist.get_rank()) if dist.get_rank() else None
    if _registered_by != os.getpid():
        _registered_by = os.getpid()
        Finalize(None, _say, exitpriority=0)


def someone_ended(store: Any) -> bool:
    return store.check([_KEY])


def ended_rank(ranks: Iterable[int], store: Any) -> str | None:
    """Who of them was the first to say that it ends, and why: others may have ended because of that one."""
    keys = {rank: f"{_KEY}/{rank}" for rank in ranks}
    said = [
        (*store.get(key).decode(errors="replace").partition(" ")[::2], rank)
        for rank, key in keys.items()
        if store.check([key])
    ]
    if not said:
        return None
    _, text, rank = min(said)
    return f"rank {rank} {text}"


def _say() -> None:
    error, last = getattr(sys, "last_value", None), _last  # error: what nothing caught
    with suppress(RuntimeError, ValueError):  # the store is gone
        if dist.is_initialized():
            last = default_store(), dist.get_rank()
        elif error is None:  # it has destroyed its group, as processes do at a good end
            return
        if last is not None:
            store, rank = last
            why = "" if error is None else f": {type(error).__name__}: {str(error)[:200]}"
            who = f"({socket.gethostname()}, process {os.getpid()})"
            place = store.add(_KEY, 1)
            store.set(f"{_KEY}/{rank}", f"{place:09d} {who} has ended{why}")


will_say()
