"""The arguments of a call, taken apart into tensors and numbers, also those within objects that hold them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..graph import Graph

#: What is the same object, or an equal one, in each call: neither a tensor nor something that holds them.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice)


class Place(NamedTuple):
    """Where an object among arguments has a value: which object, which of its `contents`, which name."""

    object: int
    store: int
    name: str


class Arguments:
    """The arguments of a call. leaves: tensors, plain values and graphs; objects: what holds others of them,
    such as torch_geometric's Data; unfit: why the call cannot be replayed; key: what has to be the same in
    each call, except for the numbers that tensors hold."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self._given, self._tree = tree_flatten((args, kwargs))
        self.leaves: list[Any] = []
        self.objects: list[Any] = []
        self._trees: list[Any] = []  # of the objects' contents
        key: list[Any] = [self._tree]
        for x in self._given:
            if not _is_leaf(x):
                parts, tree = tree_flatten(contents(x) if _holds(x) else [])
                self.leaves += parts
                self.objects.append(x)
                self._trees.append(tree)
                key += type(x), tree, *_hidden(x)
            else:
                self.leaves.append(x)
        self.unfit = next((reason for x in self.leaves if (reason := _unfit(x))), "")
        if not all(map(_holds, self.objects)):
            names = [type(x).__name__ for x in self.objects if not _holds(x)]
            self.unfit = f"an argument is a {names[0]}"
        elif len(set(map(id, self.objects))) < len(self.objects):
            self.unfit = "an object is given twice"
        self.key = () if self.unfit else (*key, *map(_key, self.leaves))

    def made_of(self, leaves: Sequence[Any]) -> Made:
        """The same arguments of other leaves, in objects and containers of their own."""
        rest, objects, trees = iter(leaves), [], iter(self._trees)
        given = []
        for x in self._given:
            if _is_leaf(x):
                given.append(next(rest))
                continue
            tree = next(trees)
            given.append(copy.copy(x))
            objects.append(given[-1])
            parts = tree_unflatten([next(rest) for _ in range(tree.num_leaves)], tree)
            for store, items in enumerate(parts):
                for name, value in items.items():
                    assign(objects, Place(len(objects) - 1, store, name), value)
        return Made(given, objects, self._tree)


class Made:
    """Arguments that were made for one call."""

    def __init__(self, given: list[Any], objects: list[Any], tree: Any):
        self.args, self.kwargs = tree_unflatten(given, tree)
        self.objects, self._given, self._tree = objects, given, tree
        self._before = [contents(x) for x in objects]

    def assigned(self) -> list[tuple[Place, Any]]:
        """What the call has assigned to objects: (where, value). Raises RuntimeError for other
        changes of objects and containers."""
        given, tree = tree_flatten((self.args, self.kwargs))
        if tree != self._tree or any(x is not y for x, y in zip(given, self._given)):
            raise RuntimeError("it changes lists or dicts among its arguments")
        found = []
        for k, (x, stores) in enumerate(zip(self.objects, self._before)):
            for s, (now, before) in enumerate(zip(contents(x), stores)):
                if before.keys() - now.keys():
                    raise RuntimeError("it takes attributes from its arguments")
                changed = [name for name in now if name not in before or now[name] is not before[name]]
                found += [(Place(k, s, name), now[name]) for name in changed]
        return found


class Numbers:
    """The tensors of integers among leaves. They are the same numbers as others if they are the same tensors,
    or equal to them, which waits for the device."""

    def __init__(self, leaves: Sequence[Any]):
        self._tensors = [x for x in leaves if isinstance(x, Tensor) and not x.is_floating_point()]
        self._places = [*map(_place, self._tensors)]

    def are(self, others: Numbers) -> bool:
        """Whether both hold the same tensors, to which nothing was written in between."""
        return self._places == others._places

    def equal(self, others: Numbers) -> bool:
        mine, theirs = zip(self._tensors, self._places), zip(others._tensors, others._places)
        # A tensor that was modified since no longer has the value that was noted.
        return all(
            place == now or _place(x) == place and torch.equal(x, y)
            for (x, place), (y, now) in zip(mine, theirs)
        )


def contents(x: Any) -> list[dict[str, Any]]:
    """The attributes of an object, of torch_geometric's Data and HeteroData those of its stores."""
    return [dict(store.items()) for store in x.stores] if _has_stores(x) else [dict(vars(x))]


def assign(objects: list[Any], place: Place, value: Any) -> None:
    x = objects[place.object]
    stores = x.stores if _has_stores(x) else [vars(x)]
    stores[place.store][place.name] = value


def _hidden(x: Any) -> Iterator[Any]:
    """What else is seen of an object."""
    for store in x.stores if _has_stores(x) else ():
        hidden = {name: y for name, y in vars(store).items() if name not in ("_mapping", "_parent")}
        yield from (y if type(y) in (*PLAIN, tuple) else id(y) for y in hidden.values())


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (Tensor, Graph)) or type(x) in PLAIN


def _has_stores(x: Any) -> bool:
    """Whether it is torch_geometric's Data or HeteroData, or one like them."""
    return hasattr(type(x), "stores") and hasattr(type(x), "to_dict")


def _holds(x: Any) -> bool:
    """Whether an object is one that holds values, and nothing else."""
    if _has_stores(x):
        return True
    # Others hold something beside their __dict__: subclasses of dict and list, generators, slots.
    made_plainly = type(x).__new__ is object.__new__ or type(x) is SimpleNamespace
    slots = any(vars(cls).get("__slots__") for cls in type(x).__mro__)
    plain = made_plainly and not slots and not isinstance(x, (type, nn.Module)) and not callable(x)
    plain = plain and isinstance(getattr(x, "__dict__", None), dict)
    return plain and all(map(_is_leaf, tree_flatten(vars(x))[0]))


def _unfit(x: Any) -> str:
    """Why a call with this leaf cannot be replayed."""
    if isinstance(x, Tensor):
        plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_inference()
        return "" if plain else f"an argument is a {type(x).__name__} of another kind"
    return "" if _is_leaf(x) else f"an argument holds a {type(x).__name__}"


def _key(x: Any) -> Any:
    """What has to be the same of a leaf."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.is_floating_point() and x.requires_grad
    return id(x) if isinstance(x, Graph) else (type(x), str(x) if isinstance(x, slice) else x)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Which tensor it is, in which version; a view is known by its base."""
    owner = x if x._base is None else x._base
    return id(owner), owner._version, x.data_ptr(), x.shape, x.stride()
