"""What all processes of a group must say alike, compared over a gloo group with a time limit of its own."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ._watch import named

# Of one agreement: a process that does not come is an error then.
TIMEOUT = timedelta(seconds=60)

_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def host_group(group: Any) -> Any:
    """The gloo group of the same processes."""
    group = group or dist.group.WORLD
    found = _groups.get(group)
    if found is None:
        ranks = dist.get_process_group_ranks(group)
        found = _groups[group] = dist.new_group(
            ranks, timeout=TIMEOUT, backend="gloo", use_local_synchronization=True
        )
    return found


def gather(value: Any, group: Any) -> list[Any]:
    """Everybody's value, in the order of ranks."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    with named(group):
        dist.all_gather_object(found, value, group=host_group(group))
    return found


def require_same(where: str, group: Any, **said: Any) -> None:
    """Raises ValueError in all processes if their values are not the same, with what the ranks said."""
    everybody = gather(said, group)
    names = dict.fromkeys(name for one in everybody for name in one)
    for name in names:
        texts = [repr(one.get(name)) for one in everybody]
        if len(set(texts)) > 1:
            by_text: dict[str, list[int]] = {}
            for rank, text in enumerate(texts):
                by_text.setdefault(text, []).append(rank)
            got = "; ".join(f"{text} on rank {_ranks(ranks)}" for text, ranks in by_text.items())
            raise ValueError(f"{where}: {name}: expected the same on all ranks, got {got}")


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
