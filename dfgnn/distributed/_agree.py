"""What all processes of a group must say alike, told through the store of the default process group."""

from __future__ import annotations

import pickle
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ._watch import dead_rank, named

# Of one agreement: a process that does not come is an error then.
TIMEOUT = timedelta(seconds=60)

_calls: Counter[str] = Counter()  # by group; the same in all of its processes


def gather(value: Any, group: Any) -> list[Any]:
    """Everybody's value, in the order of ranks; group: None for one process."""
    if group is None:
        return [value]
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    call = _calls[group.group_name]
    _calls[group.group_name] += 1

    def key(rank: int, call: int = call) -> str:
        return f"dfgnn/agree/{group.group_name}/{call}/{rank}"

    with named(group):
        store.set(key(rank), pickle.dumps(value))  # type: ignore[arg-type]
        try:
            store.wait([key(other) for other in range(size)], TIMEOUT)
        except RuntimeError as error:
            missing = [dist.get_global_rank(group, k) for k in range(size) if not store.check([key(k)])]
            text = dead_rank() or f"rank {_ranks(missing)} did not come within {TIMEOUT.seconds} s"
            raise RuntimeError(f"dfgnn.distributed: {text}; rank {dist.get_rank()} waits") from error
        found = [pickle.loads(store.get(key(other))) for other in range(size)]
        if call > 1:  # all have read it, or they would not have come to the call after it
            store.delete_key(key(rank, call - 2))
    return found


def require_same(where: str, group: Any, **said: Any) -> None:
    """Raises ValueError in all processes if their values are not the same, with what the ranks said."""
    everybody = gather(said, group)
    names = dict.fromkeys(name for one in everybody for name in one)
    for name in names:
        by_text: dict[str, list[int]] = {}
        for rank, one in enumerate(everybody):
            by_text.setdefault(repr(one.get(name)), []).append(rank)
        if len(by_text) > 1:
            got = "; ".join(f"{text} on rank {_ranks(ranks)}" for text, ranks in by_text.items())
            raise ValueError(f"{where}: {name}: expected the same on all ranks, got {got}")


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
