"""Checks that all processes of a group pass the same values, through the store of the default process group.

Values are exchanged as JSON, not as pickles: whoever can reach the store's port can write to it, and must not
be able to run code.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ._watch import dead_rank, default_store, ended_rank, named, someone_ended, will_say

# How long processes wait for each other's values before they raise.
TIMEOUT = timedelta(seconds=60)
# A waiting process asks again after a twentieth of the time that it has waited, limited to these seconds.
_SHORTEST, _LONGEST = 1e-4, 0.5

_calls: Counter[str] = Counter()  # group -> number of calls, which is the same in all of its processes
_complete: dict[str, int] = {}  # group -> the last call in which this process read everybody's value


def gather(value: Any, group: Any) -> list[Any]:
    """All processes' values, in the order of ranks. value: what JSON can hold. group: None for one process.

    Raises RuntimeError if another process failed (`failures_told`), has ended, or does not call it in time.
    """
    if group is None:
        return [value]
    store = default_store()
    will_say(store)
    name, size, call = group.group_name, dist.get_world_size(group), _calls[group.group_name]
    keys = [_key(name, call, rank) for rank in range(size)]
    rank = dist.get_rank(group)
    _calls[name] += 1
    with named(group):
        store.set(keys[rank], json.dumps({"value": value}))
        _wait_for(keys, store, group)
        answers = [_answer(store.get(key), dist.get_global_rank(group, k)) for k, key in enumerate(keys)]
        if _complete.get(name) == call - 1:  # everybody has begun call - 1, so has read those of call - 2
            store.delete_key(_key(name, call - 2, rank))
        _complete[name] = call
    failures = [f"rank {dist.get_global_rank(group, k)} failed: {x['failed']}"
                for k, x in enumerate(answers) if "failed" in x]  # fmt: skip
    if failures:
        raise RuntimeError(f"dfgnn.distributed: {'; '.join(failures)}; rank {dist.get_rank()} stops")
    return [answer["value"] for answer in answers]


@contextmanager
def failures_told(group: Any) -> Iterator[None]:
    """A context for what a process does alone before `gather`: an error within is sent to the others in place
    of its value, so that they raise immediately instead of waiting for it."""
    try:
        yield
    except Exception as error:
        if group is not None:
            name, text = group.group_name, f"{type(error).__name__}: {str(error)[:500]}"
            with suppress(RuntimeError):  # raised if the store is gone, and with it the others
                store = default_store()
                store.set(_key(name, _calls[name], dist.get_rank(group)), json.dumps({"failed": text}))
            _calls[name] += 1
        raise


def require_same(where: str, group: Any, **said: Any) -> None:
    """Raises ValueError in all processes if their values differ, naming the ranks and their values."""
    everybody = gather({name: repr(value) for name, value in said.items()}, group)
    names = dict.fromkeys(name for one in everybody for name in one)
    for name in names:
        by_text: dict[str, list[int]] = {}
        for rank, one in enumerate(everybody):
            by_text.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(by_text) > 1:
            got = "; ".join(f"{text} on rank {_ranks(ranks)}" for text, ranks in by_text.items())
            raise ValueError(f"{where}: {name}: expected the same on all ranks, got {got}")


def _key(group: str, call: int, rank: int) -> str:
    return f"dfgnn/agree/{group}/{call}/{rank}"


def _wait_for(keys: list[str], store: Any, group: Any) -> None:
    """Waits for keys by polling, so that it can raise when a process has ended; `Store.wait` could not."""
    if store.check(keys):
        return
    begin = time.monotonic()
    for key in keys:
        while not store.check([key]):
            waited = time.monotonic() - begin
            over, text = waited > TIMEOUT.total_seconds(), dead_rank()
            if text is None and (over or someone_ended(store)):
                missing = [dist.get_global_rank(group, k) for k, x in enumerate(keys) if not store.check([x])]
                text = ended_rank(missing, store)
                if text is None and over and missing:
                    text = f"rank {_ranks(missing)} did not come within {TIMEOUT.seconds} s"
            if text is not None:
                raise RuntimeError(f"dfgnn.distributed: {text}; rank {dist.get_rank()} waits")
            time.sleep(min(max(waited / 20, _SHORTEST), _LONGEST))


def _answer(text: bytes, rank: int) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or answer.keys() not in ({"value"}, {"failed"}):
        raise RuntimeError(
            f"dfgnn.distributed: rank {rank}: expected JSON in the store, got {text[:40]!r}: do all "
            "processes have the same version of dfgnn?"
        )
    return answer


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
