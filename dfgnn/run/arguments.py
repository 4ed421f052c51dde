"""The arguments of a call, taken apart into tensors and numbers, also those within objects that hold them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

#: What is the same object, or an equal one, in each call: neither a tensor nor something that holds them.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice)


class Arguments:
    """The arguments of a call. given: one by one; leaves: those that are no objects, and what objects such
    as torch_geometric's Data hold; key: what is the same in calls of one kind, apart from the numbers that
    tensors hold."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.given, tree = tree_flatten((args, kwargs))
        self.leaves: list[Any] = []
        key: list[Any] = [tree]
        for x in self.given:
            parts, within = tree_flatten(_contents(x))
            self.leaves += parts
            key += [type(x), within, *map(_key, parts)]
        self.key = tuple(key)


class Numbers:
    """Tensors whose numbers, or for those of ``static`` whose place alone, CUDA graphs rely on. They are the
    same as others if they are the same tensors, or equal to them, which waits for the device."""

    def __init__(self, leaves: Sequence[Any], static: Collection[int] = ()):
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        self._static = [(id(x), x.data_ptr(), x.shape, x.stride()) for x in tensors if id(x) in static]
        self._tensors = [x for x in tensors if id(x) not in static and not x.is_floating_point()]
        self._places = [*map(_place, self._tensors)]

    def equal(self, others: Numbers) -> bool:
        if self._static != others._static or len(self._tensors) != len(others._tensors):
            return False
        mine, theirs = zip(self._tensors, self._places), zip(others._tensors, others._places)
        # A tensor that was modified since no longer has the value that was noted.
        return all(
            place == now or (_place(x) == place and _same(x, y)) for (x, place), (y, now) in zip(mine, theirs)
        )


def _contents(x: Any) -> Any:
    """A leaf itself, or the attributes of an object; of torch_geometric's Data those of its stores."""
    if isinstance(x, (Tensor, nn.Module, type)) or type(x) in PLAIN:
        return x
    if hasattr(type(x), "stores") and hasattr(type(x), "to_dict"):
        return [dict(store.items()) for store in x.stores]
    return vars(x) if isinstance(getattr(x, "__dict__", None), dict) else x


def _key(x: Any) -> Any:
    """What has to be the same of a leaf."""
    if isinstance(x, Tensor):
        strides = x.stride() if x.layout == torch.strided else x.layout
        return type(x), x.shape, strides, x.dtype, x.device, x.is_floating_point() and x.requires_grad
    return (type(x), str(x) if isinstance(x, slice) else x) if type(x) in PLAIN else type(x)


def _same(x: Tensor, y: Tensor) -> bool:
    plain = x.layout == y.layout == torch.strided
    return plain and x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Which tensor it is, in which version; a view is known by its base."""
    owner = x if x._base is None else x._base
    version = 0 if owner.is_inference() else owner._version
    memory = (x.data_ptr(), x.stride()) if x.layout == torch.strided else ()
    return id(owner), version, x.shape, memory
