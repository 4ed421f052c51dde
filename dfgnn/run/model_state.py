"""What Python sees in the modules of a model, and what else its calls read: whether anything has changed."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ..nn import prepared
from .arguments import PLAIN
from .elsewhere import CONTAINERS, Elsewhere, is_generator, seen, seen_in

#: Objects in a list or dict up to which it is looked at; of a longer one the length is.
_MOST_SEEN = 1024
#: The name among a model's attributes of what knows its calls.
KEY = "_dfgnn_calls"
_OF_MODULES = frozenset(vars(nn.Module()))


class ModelState:
    """What Python sees in the modules of a model: attributes, parameters, buffers, hooks, and what else its
    calls read. results: attributes to which a call assigns tensors."""

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)
        # Attributes to which each of the last two calls has assigned tensors, and the last one.
        self._results: set[tuple[int, str]] = set()
        self._assigned: set[tuple[int, str]] = set()
        self._numbers: dict[tuple[Any, ...], int] = {}  # what was seen of attributes -> its number
        self._owned: list[dict[str, Any]] = []
        self.elsewhere = Elsewhere(module)
        self._look(module)

    def _look(self, module: nn.Module) -> None:
        """Finds all that belongs to the model; what changes of it without being replaced is kept apart."""
        self._parts = [weakref.ref(part) for part in module.modules()]
        owned = [part.__dict__ for part in module.modules()]
        if [*map(id, owned)] != [*map(id, self._owned)]:  # modules were added or taken away
            self._owned, self._results, self._assigned = owned, set(), set()
        inner = [[own[name] for own in self._owned] for name in ("_parameters", "_buffers", "_modules")]
        self._dicts = [*self._owned, *chain(*inner)]
        self._hooks = [
            x for own in self._owned for name, x in own.items()
            if name.endswith("hooks") and "state_dict" not in name and isinstance(x, dict)
        ]  # fmt: skip
        self._parameters = [x for parameters in inner[0] for x in parameters.values() if x is not None]
        self._buffers = [x for buffers in inner[1] for x in buffers.values() if x is not None]
        kept = {
            (k, name): x for k, own in enumerate(self._owned) for name, x in own.items()
            if (k, name) not in self._results
        }  # fmt: skip
        self._places, self._version = self.elsewhere.places, self.elsewhere.version
        values = [x for (_, name), x in kept.items() if name not in _OF_MODULES]
        values += [get(name) for get, name in self._places]
        self._kept_tensors = [x for x in values if isinstance(x, Tensor)]
        direct = [x for x in values if isinstance(x, CONTAINERS) and not isinstance(x, (tuple, frozenset))]
        containers = {id(x): x for x in (*direct, *self.elsewhere.lists)}.values()
        self._kept_containers = [x for x in containers if len(x) <= _MOST_SEEN]
        self._kept_lengths = [x for x in containers if len(x) > _MOST_SEEN]
        places = {
            (k, name): place
            for place, (k, name) in enumerate((k, name) for k, own in enumerate(self._owned) for name in own)
        }
        # What a call leaves for the next one is not seen: tensors, and what dfgnn's layers have prepared.
        left = {*self._results, *((k, name) for k in range(len(self._owned)) for name in (prepared.KEY, KEY))}
        self._places_left = [places[key] for key in left if key in places]
        self._values = self._values_now()
        by_content = set(map(id, self._kept_containers))
        which = tuple([type(x) if id(x) in by_content else _seen(x) for x in self._values])
        self._number = self._numbers.setdefault(which, len(self._numbers))

    def _values_now(self) -> list[Any]:
        values = [*chain.from_iterable(map(dict.values, self._dicts))]
        for place in self._places_left:
            values[place] = None
        values += [get(name) for get, name in self._places]
        values += [type(part()) for part in self._parts]
        return values

    def now(self) -> tuple[Any, ...] | None:
        """None: with hooks, which are to be called each time."""
        module = self._module()
        if self._version != self.elsewhere.version:
            self._values = []
        values = self._values_now()
        same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if module is not None and not same:
            self._look(module)
        if any(self._hooks) or any([x._backward_hooks for x in self._parameters]):
            return None
        found: list[Any] = [self._number]
        for x in self._parameters:
            found += x.data_ptr(), x.requires_grad, x.shape, x.stride()
        for x in self._buffers:  # the versions of single numbers change in training: those of BatchNorm
            found += x.data_ptr(), x._version if x.numel() > 1 and not x.is_floating_point() else 0
        for x in self._kept_tensors:
            found += x.data_ptr(), x._version
        for x in self._kept_containers:
            found.append(seen_in(x))
        found += map(len, self._kept_lengths)
        return tuple(found)

    def held(self) -> list[Any]:
        """All objects of which `now` sees which they are."""
        inner = [[*x, *x.values()] if isinstance(x, dict) else [*x] for x in self._kept_containers]
        root = self._module()  # which lives as long as its CUDA graphs do
        return [x for x in (*self._values, *chain(*inner)) if x is not root]

    @property
    def results(self) -> list[tuple[dict[str, Any], str]]:
        return [(self._owned[k], name) for k, name in sorted(self._results)]

    def _tensors(self) -> dict[tuple[int, str], int]:
        return {
            (k, name): id(x)
            for k, own in enumerate(self._owned)
            for name, x in own.items()
            if isinstance(x, Tensor)
        }

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A context of a call, at whose end the attributes are known to which calls assign."""
        before = self._tensors()
        yield
        assigned = {key for key, now in self._tensors().items() if before.get(key) != now}
        results, self._assigned = assigned & self._assigned, assigned
        if results != self._results:
            self._results, self._values = results, []  # which are looked at again

    def plain(self) -> list[tuple[dict[str, Any], str, Any]]:
        """All attributes that are numbers, texts, tensors and the like."""
        kept = (*PLAIN, Tensor, nn.Parameter)
        return [(own, name, x) for own in self._owned for name, x in own.items() if type(x) in kept]

    def has_generator(self) -> bool:
        """Whether an attribute is a generator of random numbers, which a sample would advance."""
        return any(is_generator(x) for own in self._owned for x in own.values())

    def containers(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """All lists, dicts and sets in attributes, by module and name, and copies of them."""
        return [
            (own, name, x, copy.copy(x)) for own in self._owned for name, x in own.items()
            if name not in _OF_MODULES and isinstance(x, (list, dict, set))
        ]  # fmt: skip


def _seen(x: Any) -> Any:
    """As `seen`; tensors' versions are seen apart, as those of statistics change in training."""
    return id(x) if isinstance(x, Tensor) else seen(x)


def same_objects(a: Any, b: Any) -> bool:
    """Whether two containers hold the same objects."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))
