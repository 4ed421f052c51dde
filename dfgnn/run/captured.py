"""Calls of a script's models as CUDA graphs: ``dfgnn.run --capture``.

A model is a module that passes messages and that no other one calls. When it has been called in training a
few times with the same edges, its forward and its backward pass are captured as two CUDA graphs, which take
the place of its Python from then on: losses, optimizers and all else of the script stay as they are. Results
are copies of what the graphs hold, as are gradients, so that the script may keep and modify them.

A call is replayed while nothing has changed that Python would have seen: the tensors of integers and their
versions, shapes and dtypes of the others (whose numbers are copied), plain arguments, which parameters train,
attributes of the modules, hooks, and what else its code reads (:mod:`dfgnn.run.elsewhere`). Otherwise it runs
as written.

Calls are captured with care: of models whose forward calls nothing that a replay leaves out,
whose results are not asked for gradients that a replay does not have, and whose CUDA graphs take little
memory. With ``--capture-all`` those of others, too.
"""

from __future__ import annotations

import math
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..capturing.state import Snapshot
from ..runtime import cuda_graphs
from ..runtime import torch_internals as internals
from .arguments import Arguments, Made, Numbers
from .call_graphs import CallGraphs, no_gradient
from .compiled import agree, draws_elsewhere, trains
from .elsewhere import put_back
from .model_state import KEY, ModelState, same_objects
from .models import Models
from .sample import milliseconds, put_random_state, random_state, said, tensors_of, unseen

#: Equal calls before one is captured; CUDA graphs of one model at most, each of which holds its own memory;
#: how much faster is faster.
_AFTER, _MOST, _FASTER = 3, 4, 1.07
#: Calls that could not be replayed, after which no further one is looked at, which takes time: where some
#: calls were replayed, and where none was.
_MOST_LEFT = 50, 12
_CALLS = "dfgnn.run: calls"
#: With care: the share of a GPU's memory that the CUDA graphs of a model may hold; that a script may have
#: used before, because a sample takes memory for a second step; how much faster is faster; and the most
#: seconds of a forward, as a sample takes about forty times as long.
_MOST_HELD, _MOST_USED, _FASTER_WITH_CARE, _LONGEST = 0.1, 0.4, 1.15, 0.5


@dataclass
class Row:
    """What the report says of a model: its calls, how many of them were replayed, milliseconds as written and
    replayed, why calls were not, and what replays leave out."""

    calls: int = 0
    replayed: int = 0
    milliseconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    reason: str = ""
    left_out: dict[str, str] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        reason = self.reason or ("" if self.replayed else "no call in training was equal to those before it")
        return {**asdict(self), "reason": reason}


class Captured:
    """Replays calls of models while it is installed."""

    def __init__(self, with_care: bool = False) -> None:
        self.with_care = with_care
        self.models = Models(self._called)
        self.rows_of: dict[type, list[Row]] = {}
        self._called_models: WeakSet[nn.Module] = WeakSet()

    def install(self) -> None:
        self.models.install()
        self._grad = torch.autograd.grad
        torch.autograd.grad = partial(_gradient, self._grad)

    def remove(self) -> None:
        torch.autograd.grad = self._grad
        self.models.remove()
        for module in self._called_models:
            module.__dict__.pop(KEY, None)

    def _called(self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        # An attribute of the model, with which it ends, also where what its calls read refers to it.
        calls = module.__dict__.get(KEY)
        if calls is None:
            module.__dict__[KEY] = calls = Calls(module, self.with_care)
            self._called_models.add(module)
            self.rows_of.setdefault(type(module), []).append(calls.row)
        if calls.given_up:
            calls.row.calls += 1
            return call(module, *args, **kwargs)
        return calls(partial(self._as_written, call), module, args, kwargs)

    def _as_written(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.models.inside():
            return call(*args, **kwargs)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the report, one for each model."""
        return [
            {"class": f"{cls.__module__}.{cls.__qualname__}", **row.told()}
            for cls, rows in self.rows_of.items()
            for row in rows
        ]


def _gradient(grad: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad, which sees whether gradients of models' results are asked for."""
    if torch.compiler.is_compiling():
        return grad(outputs, inputs, *args, **kwargs)
    for x in [inputs] if isinstance(inputs, Tensor) else tensors_of(inputs):
        if x.grad_fn is None:
            continue
        calls = x.grad_fn.metadata.get(_CALLS, lambda: None)()  # type: ignore[attr-defined]
        if calls is not None:
            calls.asks = "torch.autograd.grad"
        if any(ref() is x for _, ref in getattr(x.grad_fn, "parts", ())):
            raise RuntimeError(no_gradient("torch.autograd.grad: inputs"))
    return grad(outputs, inputs, *args, **kwargs)


def _noted(asked: set[int], k: int, place: int, grads: Sequence[Tensor | None]) -> None:
    """Before the backward pass of a result: notes that it has a gradient."""
    if grads[place] is not None:
        asked.add(k)


class Calls:
    """The calls of one model."""

    def __init__(self, module: nn.Module, with_care: bool = False):
        self.with_care = with_care
        self.state = ModelState(module)
        self.last: tuple[Any, Numbers] | None = None
        self.equal = 0  # calls in a row that were equal to the last one
        self.graphs: dict[tuple[Any, ...], list[tuple[Numbers, CallGraphs | None]]] = {}
        self.row = Row()
        self.left = self.captures = 0
        self.modified: dict[int, Any] = {}  # of `Constants`
        self.asks = ""  # how the script asks for gradients of results, if it does
        self.asked: set[int] = set()  # the leaves of what it returns that got gradients
        self._results: list[weakref.ref[Tensor]] = []  # of the last call as written
        self.given_up = False
        self.recorded: Any = None  # the state in which a call was recorded last
        self.to_record = False  # this call

    def __call__(self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        self.row.calls += 1
        self._look_at_results()
        arguments, graphs = self._graphs(call, module, args, kwargs)
        if arguments is None or graphs is None or not graphs.is_free():
            if self.given_up:
                self.last = None
                return call(module, *args, **kwargs)
            records = self.last is not None and bool(self._unknown() or self.to_record)
            self.to_record = False
            times = self.with_care and self.equal == 1
            with self.state.noting(), self.state.elsewhere.recording() if records else nullcontext():
                out = (partial(self._timed, call) if times else call)(module, *args, **kwargs)
            self._note_results(out)
            if self.last is not None and records and (state := self.state.now()) is not None:
                (*key, _), numbers = self.last
                self.last, self.recorded = ((*key, state), numbers), state  # as more is seen now
            return out
        self.row.replayed += 1
        return graphs(arguments)

    def _graphs(
        self, call: Callable, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[Arguments | None, CallGraphs | None]:
        if self.given_up or not module.training or not trains() or _is_captured():
            return None, None
        if internals.parametrizations_are_cached():  # whose weights would stay those of the capture
            return None, None
        arguments = Arguments(args, kwargs)
        self.state.elsewhere.classes.update(map(type, arguments.objects))
        state = None if arguments.unfit else self.state.now()
        if state is None:
            self._left(arguments.unfit or "its modules have hooks")
            return None, None
        key, numbers = (arguments.key, *_settings(), state), Numbers(arguments.leaves)
        captured = self.graphs.setdefault(key, [])
        for k, (held, graphs) in enumerate(captured):
            if not held.equal(numbers):
                continue
            if graphs is not None and graphs.given_up:
                self.row.reason, self.given_up = f"backward ran through a call {graphs.given_up}", True
                self.graphs.clear()
                return None, None
            if graphs is None or graphs.is_current():
                return arguments, graphs
            del captured[k]
            break
        last, self.last = self.last, (key, numbers)
        self.equal = self.equal + 1 if last is not None and key == last[0] and last[1].equal(numbers) else 0
        if self.equal < _AFTER:
            self._left(self.row.reason or "no call is equal to those before it")
            return None, None
        if unknown := self._unknown():
            self._left(unknown)
            return None, None
        if self.recorded != state:  # in another state it may do something else, which a sample would repeat
            self.to_record = True
            return None, None
        self.row.reason = ""
        if self.captures == _MOST:
            self._left(f"more than {_MOST} different calls came repeatedly")
            return None, None
        self.captures += 1
        try:
            graphs = self._captured(call, module, arguments)
        except Exception as error:  # the call as written follows, which works, or raises the script's own
            graphs, self.row.reason, self.given_up = None, said(error), True
        captured.append((numbers, graphs))
        return arguments, graphs

    def _timed(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """A call, after which the model is given up if it takes long."""
        wait = torch.cuda.synchronize if cuda_graphs.Recorder.device_type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        out = call(*args, **kwargs)
        wait()
        if (took := time.perf_counter() - start) > _LONGEST:
            self.row.reason = f"a forward takes {took:.1f} s; --capture-all replays it all the same"
            self.given_up = True
        return out

    def _note_results(self, out: Any) -> None:
        results = [(k, x) for k, x in enumerate(tree_flatten(out)[0]) if isinstance(x, Tensor)]
        self._results = [weakref.ref(x) for _, x in results if x.grad_fn is not None]
        for k, x in results:
            if x.grad_fn is not None:
                # Of `_gradient`. An attribute of x would be saved with it.
                x.grad_fn.metadata[_CALLS] = weakref.ref(self)  # type: ignore[index]
                x.grad_fn.register_prehook(partial(_noted, self.asked, k, x.output_nr))

    def _look_at_results(self) -> None:
        for x in [x for ref in self._results if (x := ref()) is not None]:
            if x.retains_grad or x._backward_hooks:
                self.asks = "retain_grad" if x.retains_grad else "register_hook"
        self._results = []

    def _unknown(self) -> str:
        """Why it is not known that a replay does what a call does, which the record of another call may
        answer."""
        elsewhere = self.state.elsewhere
        if elsewhere.unknown or not (self.with_care and elsewhere.others):
            return elsewhere.unknown
        calls = ", ".join(f"{name} ({where})" for name, where in elsewhere.others.items())
        return f"it calls {calls}, which replays leave out; --capture-all replays it all the same"

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()  # a model that is saved has none

    def _left(self, reason: str) -> None:
        self.row.reason, self.left = reason, self.left + 1
        self.given_up = self.left > _MOST_LEFT[not self.row.replayed]

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
        (device,) = devices
        if self.with_care and device.type == "cuda":
            used = torch.cuda.max_memory_allocated(device)
            if used > _MOST_USED * _memory(device):
                return f"the script uses {used / 2**20:,.0f} MiB; --capture-all replays it all the same"
        return ""

    def _captured(self, call: Callable, module: nn.Module, arguments: Arguments) -> CallGraphs | None:
        tensors = tensors_of(arguments.leaves, list(module.parameters()))
        self.row.reason = self._unfit(module, {x.device for x in tensors})
        if self.row.reason:
            self.given_up = True
            return None
        device, elsewhere = tensors[0].device, self.state.elsewhere
        before = _Before(module, self.state, arguments, device)

        def looks(made: Made) -> Any:
            """A replay, which begins with looking at the model."""
            self.state.now()
            return graphs.replayed(made)

        with unseen(tensors), _without_autocast_cache():
            try:
                reserved = _reserved(device)
                graphs = CallGraphs(
                    call, module, arguments, before.snapshot, self.state.results, before.held, self.modified,
                    frozenset(self.asked),
                )  # fmt: skip
                reserved = _reserved(device) - reserved
                before.restore()
                drawn, version = random_state(device.type == "cuda"), elsewhere.version
                with elsewhere.recording():
                    expected = graphs.results(graphs.written)
                if elsewhere.version != version:  # it reads more than was known when the call was compared
                    self.equal = 0
                    return None
                if elsewhere.unknown:
                    raise RuntimeError(elsewhere.unknown)
                self.row.left_out = dict(elsewhere.others)
                if self.with_care:
                    self._take_care(graphs, reserved, device)
                graphs.draws = not all(map(torch.equal, drawn, random_state(device.type == "cuda")))
                if changed := before.changed():
                    raise RuntimeError(changed)
                if before.snapshot.writes():
                    put_random_state(drawn, device)
                    graphs.reads_buffers = not agree(expected, graphs.results(graphs.written))
                before.snapshot.restore()
                if not agree(expected, graphs.results(graphs.written)):
                    raise RuntimeError("it reads what its last call has left in attributes")
                before.restore()
                if not agree(expected, graphs.results(graphs.replayed)):
                    raise RuntimeError("its CUDA graphs give other numbers")
                del expected
                ways = [partial(graphs.results, graphs.written), partial(graphs.results, looks)]
                self.row.milliseconds = milliseconds(ways, device.type == "cuda")
            finally:
                before.restore()
        faster = _FASTER_WITH_CARE if self.with_care else _FASTER
        if self.row.milliseconds[1] * faster > self.row.milliseconds[0]:
            self.row.reason, self.given_up = "its CUDA graphs are not faster", not self.row.replayed
            return None
        graphs.settle()
        return graphs

    def _take_care(self, graphs: CallGraphs, held: int, device: torch.device) -> None:
        """Raises RuntimeError for CUDA graphs that ``--capture-all`` alone makes."""
        if unknown := self._unknown():
            raise RuntimeError(unknown)
        if graphs.has_parts and self.asks:
            raise RuntimeError(
                f"{self.asks} asks for the gradient of a result, of which another one is computed"
            )
        if held > _MOST_HELD * _memory(device):
            raise RuntimeError(
                f"its CUDA graphs would hold {held / 2**20:,.0f} MiB; --capture-all replays it all the same"
            )


class _Before:
    """What a call finds, to be put back after each call of a sample."""

    def __init__(self, module: nn.Module, state: ModelState, arguments: Arguments, device: torch.device):
        # A forward may write to parameters, too.
        self.snapshot = Snapshot(chain(module.buffers(), module.parameters()), device)
        self.held = state.held()
        self._attributes, self._containers = state.plain(), state.containers()
        self._put_back = state.elsewhere.restoring()
        self._state, self._leaves, self._device = state, arguments.leaves, device
        self._numbers, self._seen = Numbers(arguments.leaves), (_random(device), state.now())

    def restore(self) -> None:
        self.snapshot.restore()
        for own, name, value in self._attributes:
            own[name] = value
        for own, name, x, contents in self._containers:
            own[name] = x
            if not same_objects(x, contents):
                put_back(x, contents)
        self._put_back()

    def changed(self) -> str:
        """What calls have changed that may not differ between calls; "" if nothing."""
        if (_random(self._device), self._state.now()) != self._seen:
            return "it draws random numbers on the host, or changes attributes"
        if not Numbers(self._leaves).are(self._numbers):
            return "it modifies its arguments"
        if any(own.get(name) is not x or not same_objects(x, y) for own, name, x, y in self._containers):
            return "it changes lists or dicts in attributes"
        return ""


def _settings() -> tuple[Any, ...]:
    """Settings of PyTorch by which the same call computes something else."""
    on = torch.is_autocast_enabled("cuda")
    return (
        on, torch.get_autocast_dtype("cuda") if on else None, torch.get_default_dtype(),
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _memory(device: torch.device) -> float:
    """Bytes of a GPU's memory."""
    on_gpu = device.type == "cuda"
    return float(torch.cuda.get_device_properties(device).total_memory) if on_gpu else math.inf


def _random(device: torch.device) -> Any:
    """The states of the generators on the host; where there is a GPU, of PyTorch's only."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else (None, b"", 0)
    of_torch = b"" if device.type == "cpu" else bytes(torch.get_rng_state().numpy())
    return random.getstate(), bytes(drawn[1]), drawn[2], of_torch


def _is_captured() -> bool:
    """Whether the script captures the call itself."""
    on_gpu = torch.cuda.is_initialized()
    return cuda_graphs.in_captured_step() or (on_gpu and torch.cuda.is_current_stream_capturing())


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
    """The lines of the report about captured calls, for a terminal."""
    said = []
    for row in rows:
        what = f"{row['replayed']} of {row['calls']} calls replayed as CUDA graphs"
        if row["reason"]:
            what += f", not all: {row['reason']}" if row["replayed"] else f": {row['reason']}"
        took = "; a call, forward and backward: {} ms as written, {} ms replayed".format(*row["milliseconds"])
        said.append(f"  {row['class']}: {what}{took * any(row['milliseconds'])}")
        if row["replayed"] and row["left_out"]:
            calls = ", ".join(f"{name} ({where})" for name, where in row["left_out"].items())
            said.append(f"    a replay leaves out calls of {calls}")
    return said or ["  --capture: no model with message passing was trained"]
