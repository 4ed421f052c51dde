"""Detects processes that ended or died, so that others raise an error that names them instead of waiting.

A process that ends writes so to the store. One that dies cannot; a `watch` misses its signs of life.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist

# ---- processes that end ----------------------------------------------------------------------------------

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


# ---- processes that die ----------------------------------------------------------------------------------


class DeadRankError(RuntimeError):
    """Another process died, or failed; the text says which one."""


_GRACE = 5.0  # seconds in which the main thread may raise before the process is ended
_current: list[_Watch] = []
_started = 0


@contextmanager
def watch(timeout: float = 20.0, interval: float = 1.0) -> Iterator[None]:
    """A context in which the death of one process ends all of them, with an error that names it.

    A thread writes a sign of life to the store of the default process group (torchrun's, or rank 0's) each
    ``interval`` seconds and reads that of the next rank. A rank without a sign for ``timeout`` seconds, or
    that left its block by an exception, is reported to all. Then exchanges of this package that wait for it,
    and other errors within the block, raise :class:`DeadRankError`. A process that waits where nothing can be
    raised, as in NCCL, is ended 5 seconds later, with the same text on stderr and exit code 1. With the
    defaults all of that takes less than 60 seconds.

    It does nothing for one process. All processes must enter it together, and leave it when their work is
    done. A process that holds Python's lock for ``timeout`` seconds looks dead to the others.

    Raises ValueError (timeout not above twice the interval).
    """
    if not timeout > 2 * interval > 0:
        raise ValueError(f"watch: timeout: expected more than twice interval={interval}, got {timeout}")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    watching = _Watch(timeout, interval)
    _current.append(watching)
    try:
        yield
    except BaseException as error:
        # An error here may result from another rank's death: wait until that would have been reported.
        victim = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        dead = watching.wait_for_dead() if victim else watching.dead
        watching.stop(f"failed with {type(error).__name__}: {str(error)[:200]}" if dead is None else "left")
        if dead is not None and not isinstance(error, DeadRankError):
            raise DeadRankError(dead) from error
        raise
    else:
        watching.stop("left")
    finally:
        _current.remove(watching)


def dead_rank() -> str | None:
    """The dead process in words, if a watch has found one; else None."""
    return _current[-1].dead if _current else None


@contextmanager
def named(group: Any) -> Iterator[None]:
    """A context in which a communication error becomes a `DeadRankError`, if a process has reported its end
    or a watch has found one dead."""
    try:
        yield
    except RuntimeError as error:
        dead = _current[-1].wait_for_dead() if _current else _ended()
        if dead is None:
            raise
        raise DeadRankError(dead) from error


def _ended() -> str | None:
    with suppress(RuntimeError, ValueError):  # raised if the store is gone
        return ended_rank(range(dist.get_world_size()), default_store())
    return None


class _Watch:
    def __init__(self, timeout: float, interval: float):
        global _started
        _started += 1
        self.timeout, self.interval = timeout, interval
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store: Any = default_store()
        # A second connection, because the main thread may be waiting in the first.
        self.store = store.clone() if hasattr(store, "clone") else store
        self.prefix = f"dfgnn/watch/{_started}"
        self.dead: str | None = None
        self.known, self.stopped = threading.Event(), threading.Event()
        self.beats = 0
        self._beat()
        self.thread = threading.Thread(target=self._run, name="dfgnn.distributed.watch", daemon=True)
        self.thread.start()

    def wait_for_dead(self) -> str | None:
        """The dead process, once it is known; None if none is reported within the time that this takes."""
        self.known.wait(self.timeout + 2 * self.interval)
        return self.dead

    def stop(self, word: str) -> None:
        self.stopped.set()
        self.thread.join(self.timeout)
        with suppress(RuntimeError):  # raised if the store's host is gone, and with it the others
            self.store.set(f"{self.prefix}/{self.rank}", f"{word}\n{self._who()}")

    def _who(self) -> str:
        return f"{socket.gethostname()}, process {os.getpid()}"

    def _beat(self) -> None:
        self.beats += 1
        self.store.set(f"{self.prefix}/{self.rank}", f"{self.beats}\n{self._who()}")

    def _run(self) -> None:
        watched, last, last_change = (self.rank + 1) % self.size, "", time.monotonic()
        while self.dead is None:
            if self.stopped.wait(self.interval):
                return
            try:
                self._beat()
                if self.store.check([f"{self.prefix}/dead"]):
                    self.dead = self.store.get(f"{self.prefix}/dead").decode()
                    break
                key = f"{self.prefix}/{watched}"
                sign = self.store.get(key).decode() if self.store.check([key]) else ""
            except RuntimeError as error:
                self.dead = f"the store of the process group (torchrun, or rank 0) is gone: {error}"
                break
            word, _, process = sign.partition("\n")
            if word == "left":
                watched = (watched + 1) % self.size
                if watched == self.rank:
                    return
                last, last_change = "", time.monotonic()
            elif word.startswith("failed"):
                self._tell(f"rank {watched} ({process}) {word}")
            elif sign != last:
                last, last_change = sign, time.monotonic()
            elif time.monotonic() - last_change > self.timeout:
                process = f" ({process})" if process else ""
                self._tell(f"rank {watched}{process} died: no sign of life for {self.timeout:g} s")
        self.known.set()
        print(f"dfgnn.distributed: rank {self.rank}: {self.dead}", file=sys.stderr, flush=True)
        if not self.stopped.wait(_GRACE):
            os._exit(1)

    def _tell(self, text: str) -> None:
        self.dead = text
        with suppress(RuntimeError):  # raised if the store is gone, which the others notice themselves
            self.store.set(f"{self.prefix}/dead", text)
