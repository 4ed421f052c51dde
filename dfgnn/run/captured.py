"""Calls of a script's models as CUDA graphs: ``dfgnn.run --capture``.

A model is a module that passes messages and that no other one calls. When it has been called in training a
few times with the same edges, its forward and its backward pass are captured as two CUDA graphs, which take
the place of its Python from then on: losses, optimizers and all else of the script stay as they are. Results
are copies of what the graphs hold, as are gradients, so that the script may keep and modify them.

A call is replayed while nothing has changed that Python would have seen: the tensors of integers and their
versions, shapes and dtypes of the others (whose numbers are copied), plain arguments, which parameters train,
numbers and tensors in the attributes of the modules, hooks. Otherwise it runs as written. What a model reads
elsewhere (global variables, lists, Python's random numbers) has to stay the same, as for `dfgnn.capture`.
"""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from ..capturing.state import Snapshot
from ..graph import Graph
from ..runtime import cuda_graphs
from .call_graphs import PLAIN, CallGraphs
from .compiled import agree, draws_elsewhere, is_generator, trains
from .models import Models
from .sample import milliseconds, random_state, said, tensors_of, unseen

#: Equal calls before one is captured; CUDA graphs of one model at most, each of which holds its own memory;
#: how much faster is faster.
_AFTER, _MOST, _FASTER = 3, 4, 1.05
#: Calls that could not be replayed, after which no further one is looked at, which takes time.
_MOST_LEFT = 50
#: Objects in a list or dict of an attribute up to which it is looked at.
_MOST_SEEN = 64
_OF_MODULES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Captured:
    """Replays calls of models while it is installed."""

    def __init__(self) -> None:
        self.models = Models(self._called)
        self.calls: WeakKeyDictionary[nn.Module, _Calls] = WeakKeyDictionary()
        self.rows_of: dict[type, list[_Calls]] = {}
        self.install, self.remove = self.models.install, self.models.remove

    def _called(self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if module not in self.calls:
            self.calls[module] = calls = _Calls(module)
            weakref.finalize(module, calls.forget)
            self.rows_of.setdefault(type(module), []).append(self.calls[module])
        return self.calls[module](partial(self._as_written, call), module, args, kwargs)

    def _as_written(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.models.inside():
            return call(*args, **kwargs)

    def rows(self) -> list[dict[str, Any]]:
        """Of each model: calls, how many of them were replayed, milliseconds as written and replayed, and why
        calls were not."""
        return [
            {"class": f"{cls.__module__}.{cls.__qualname__}", "calls": calls.count,
             "replayed": calls.replayed, "milliseconds": calls.milliseconds, "reason": calls.reason}
            for cls, all_calls in self.rows_of.items()
            for calls in all_calls
        ]  # fmt: skip


class _Calls:
    """The calls of one model."""

    def __init__(self, module: nn.Module):
        self.state = _State(module)
        self.last: tuple[Any, ...] | None = None
        self.equal = 0  # calls in a row that were equal to the last one
        self.graphs: dict[tuple[Any, ...], CallGraphs | None] = {}
        self.count = self.replayed = self.left = self.captures = 0
        self.modified: dict[int, Any] = {}  # of `Constants`
        self.reason, self.milliseconds = "", [0.0, 0.0]
        self.given_up = False

    def __call__(self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        self.count += 1
        graphs = self._graphs(call, module, args, kwargs)
        if graphs is None or not graphs.is_free():
            with nullcontext() if self.given_up else self.state.noting():
                return call(module, *args, **kwargs)
        self.replayed += 1
        return graphs(args, kwargs)

    def _graphs(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict) -> CallGraphs | None:
        if self.given_up or not module.training or not trains():
            return None
        leaves, tree = tree_flatten((args, kwargs))
        reason = next((reason for x in leaves if (reason := _unfit(x))), "")
        state = None if reason else self.state.now()
        if state is None:
            self._left(reason or "its modules have hooks")
            return None
        key = (tree, *map(_key, leaves), *_autocast(), *state)
        graphs = self.graphs.get(key)
        if graphs is not None and graphs.given_up:
            self.reason, self.given_up = f"backward ran through a call {graphs.given_up}", True
            self.graphs.clear()
            return None
        if graphs is not None and not graphs.is_current():
            del self.graphs[key]
        elif key in self.graphs:
            return graphs
        self.equal = self.equal + 1 if key == self.last else 0
        self.last = key
        if self.equal < _AFTER:
            self._left(self.reason or "no call is equal to those before it")
            return None
        self.reason = ""
        if self.captures == _MOST:
            self._left(f"more than {_MOST} different calls came repeatedly")
            return None
        self.captures += 1
        try:
            self.graphs[key] = self._captured(call, module, args, kwargs)
        except Exception as error:  # the call as written follows, which works, or raises the script's own
            self.graphs[key], self.reason, self.given_up = None, said(error), True
        return self.graphs[key]

    def forget(self) -> None:
        """Lets go of what the model has held."""
        self.graphs.clear()
        self.modified.clear()
        self.state = None  # type: ignore[assignment]

    def _left(self, reason: str) -> None:
        self.reason, self.left = reason, self.left + 1
        self.given_up = self.left > _MOST_LEFT

    def _unfit(self, module: nn.Module, devices: set[torch.device]) -> str:
        """Why calls of this model cannot be captured."""
        if {x.type for x in devices} != {cuda_graphs.Recorder.device_type} or len(devices) != 1:
            return "its tensors are not on one GPU"
        if any(part._compiled_call_impl is not None for part in module.modules()):
            return "it is compiled"
        if self.state.has_generator() or any(draws_elsewhere(type(part)) for part in module.modules()):
            return "it draws from a random generator of its own"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "several processes train together"
        return ""

    def _captured(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict) -> CallGraphs | None:
        tensors = tensors_of(args, kwargs, list(module.parameters()))
        self.reason = self._unfit(module, {x.device for x in tensors})
        if self.reason:
            self.given_up = True
            return None
        snapshot, attributes = Snapshot(module.buffers(), device := tensors[0].device), self.state.plain()
        containers = self.state.containers()
        held = [x for *_, x in attributes if isinstance(x, Tensor)]
        leaves = tree_leaves((args, kwargs))
        before = _random(device), self.state.now(), [*map(_key, leaves)]

        def restore() -> None:
            snapshot.restore()
            for own, name, value in attributes:
                own[name] = value
            for own, name, x, contents in containers:
                own[name] = x
                if not _same(x, contents):
                    x.clear()
                    x.extend(contents) if isinstance(x, list) else x.update(contents)

        with unseen(tensors), _without_autocast_cache():
            try:
                graphs = CallGraphs(
                    call, module, args, kwargs, snapshot, self.state.results, held, self.modified
                )
                restore()
                drawn = random_state(device.type == "cuda")
                expected = graphs.results(graphs.written)
                graphs.draws = not all(map(torch.equal, drawn, random_state(device.type == "cuda")))
                graphs.draws |= _autocast()[0]  # what is computed later is so outside of autocast
                if (_random(device), self.state.now(), [*map(_key, leaves)]) != before:
                    raise RuntimeError("it draws random numbers on the host, or changes attributes")
                if any(own.get(name) is not x or not _same(x, y) for own, name, x, y in containers):
                    raise RuntimeError("it changes lists or dicts in attributes")
                snapshot.restore()
                if not agree(expected, graphs.results(graphs.written)):
                    raise RuntimeError("it reads what its last call has left in attributes")
                restore()
                if not agree(expected, graphs.results(graphs.replayed)):
                    raise RuntimeError("its CUDA graphs give other numbers")
                del expected
                ways = [partial(graphs.results, way) for way in (graphs.written, graphs.replayed)]
                self.milliseconds = milliseconds(ways, device.type == "cuda")
            finally:
                restore()
        if self.milliseconds[1] * _FASTER > self.milliseconds[0]:
            self.reason = "its CUDA graphs are not faster"
            return None
        graphs.settle()
        return graphs


class _State:
    """What Python sees in the modules of a model: attributes, parameters, buffers, hooks. results: attributes
    to which a call assigns tensors."""

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)
        self._owned = [part.__dict__ for part in module.modules()]
        self._children = self._ids()
        # Attributes to which each of the last two calls has assigned tensors, and the last one.
        self._results: set[tuple[int, str]] = set()
        self._assigned: set[tuple[int, str]] = set()

    def _ids(self) -> list[int]:
        return [id(x) for own in self._owned for x in own["_modules"].values()]

    def _look_again(self, module: nn.Module) -> None:
        """Where modules were added or taken away since."""
        self._owned = [part.__dict__ for part in module.modules()]
        self._children = self._ids()
        self._results, self._assigned = set(), set()

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
        self._results, self._assigned = assigned & self._assigned, assigned

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

    def now(self) -> tuple[Any, ...] | None:
        """None: with hooks, which are to be called each time."""
        module = self._module()
        if module is not None and self._children != self._ids():
            self._look_again(module)
        found: list[Any] = [*self._children]
        for k, own in enumerate(self._owned):
            if any(map(own.get, _HOOKS)):
                return None
            for name, value in own.items():
                if (k, name) in self._results:
                    continue
                if type(value) in PLAIN:
                    found += type(value), value
                elif isinstance(value, Tensor):
                    found += id(value), value._version, value.data_ptr()
                elif type(value) in (list, dict) and name not in _OF_MODULES and len(value) <= _MOST_SEEN:
                    found += map(_seen, value)
                    found += map(_seen, value.values()) if type(value) is dict else ()
            for x in own["_parameters"].values():
                if x is not None:
                    if x._backward_hooks:
                        return None
                    found += id(x), x.data_ptr(), x.requires_grad
            for x in own["_buffers"].values():
                if x is not None:  # the versions of single numbers change in training: those of BatchNorm
                    counted = x.numel() > 1 and not x.is_floating_point()
                    found += x.data_ptr(), x._version if counted else 0
        return tuple(found)


def _seen(x: Any) -> Any:
    """What is seen of an object in a list or dict."""
    return x if type(x) in PLAIN else id(x)


def _same(a: Any, b: Any) -> bool:
    """Whether two containers hold the same objects."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


def _unfit(x: Any) -> str:
    """Why a call with this argument cannot be replayed."""
    if isinstance(x, Tensor):
        plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_inference()
        return "" if plain else f"an argument is a {type(x).__name__} of another kind"
    if type(x) in (*PLAIN, Graph):
        return ""
    return next((f"an argument is a {type(x).__name__}" for y in _parts(x) if y is x or _unfit(y)), "")


def _parts(x: Any) -> list[Any]:
    """What an object holds, such as torch_geometric's Data; the object itself where that is not known."""
    if hasattr(x, "to_dict") and hasattr(x, "edge_index"):
        return tree_leaves(x.to_dict())
    plain = hasattr(x, "__dict__") and not isinstance(x, (type, nn.Module)) and not callable(x)
    parts = tree_leaves(vars(x)) if plain else [x]
    return parts if all(type(y) in PLAIN or isinstance(y, Tensor) for y in parts) else [x]


def _key(x: Any) -> Any:
    """What has to be the same of an argument."""
    if isinstance(x, Tensor):
        layout = x.shape, x.stride(), x.dtype, x.device
        return (*layout, x.requires_grad) if x.is_floating_point() else (*layout, *_place(x))
    if type(x) in PLAIN:
        return type(x), str(x) if isinstance(x, slice) else x
    if type(x) is Graph:
        return id(x)
    leaves, tree = tree_flatten(x.to_dict() if hasattr(x, "to_dict") else vars(x))
    return id(x), tree, *[_place(y) if isinstance(y, Tensor) else (type(y), y) for y in leaves]


def _place(x: Tensor) -> tuple[Any, ...]:
    """Which tensor it is, in which version; a view is known by its base."""
    owner = x if x._base is None else x._base
    return id(owner), owner._version, x.data_ptr(), x.shape, x.stride()


def _autocast() -> tuple[Any, ...]:
    on = torch.is_autocast_enabled("cuda")
    return on, torch.get_autocast_dtype("cuda") if on else None


def _random(device: torch.device) -> Any:
    """The states of the generators on the host, of PyTorch's only beside a GPU."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else (None, b"", 0)
    of_torch = b"" if device.type == "cpu" else bytes(torch.get_rng_state().numpy())
    return random.getstate(), bytes(drawn[1]), drawn[2], of_torch


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Weights that autocast has cast before would stay those weights in a CUDA graph."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Of the report, for a terminal."""
    said = []
    for row in rows:
        what = f"{row['replayed']} of {row['calls']} calls replayed as CUDA graphs"
        if row["reason"]:
            what += f", not all: {row['reason']}" if row["replayed"] else f": {row['reason']}"
        took = "; a call, forward and backward: {} ms as written, {} ms replayed".format(*row["milliseconds"])
        said.append(f"  {row['class']}: {what}{took * any(row['milliseconds'])}")
    return said or ["  --capture: no model with message passing was trained"]
