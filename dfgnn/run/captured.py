"""Calls of a script's models as CUDA graphs: ``dfgnn.run --capture``.

A model is a module that passes messages and that no other one calls. When it has been called in training a
few times with the same edges, PyTorch's compiler (Dynamo) records its call: graphs of operations, functions
of tensors alone, and guards, which know when a call would do something else. Nothing is compiled. The
forward and the backward pass of each graph are captured as two CUDA graphs, which take its place from then
on: what lies between graphs, and losses, optimizers and all else of the script stay as they are. Results are
copies of what the CUDA graphs hold, as are gradients, so that the script may keep and modify them.

A graph is replayed while its tensors of integers are the same, in the same version, and parameters and
buffers lie where they lay; other tensors' numbers are copied. Otherwise its operations run one by one. What
Python code reads elsewhere is the compiler's to know; a graph that it records anew is captured anew.

Calls are captured with care: of graphs whose forward is short, and whose CUDA graphs take little memory and
are much faster. With ``--capture-all`` those of others, too.
"""

from __future__ import annotations

import functools
import operator
import os
import random
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ..runtime import cuda_graphs
from ..runtime import torch_internals as internals
from . import recorded
from .arguments import Arguments, Numbers
from .call_graphs import no_gradient
from .compiled import draws_elsewhere, is_generator, trains
from .models import Models
from .recorded import RECORDED, RecordedGraph, Replays, Row, memory_of
from .sample import said, tensors_of

#: Equal calls before one is recorded; kinds of calls that are.
_AFTER, _MOST = 2, 4
#: Calls of a model in which graphs are recorded, and graphs of the same code, at most.
_RECORDINGS, _GRAPHS = 8, 64
#: Forwards that are timed, one as written, and replayed ones; and how much longer these may take, as backward
#: is shorter.
_TIMED, _SLOWER = 4, 1.05
#: Where packages are installed, and Python's own modules.
_INSTALLED = tuple(
    os.path.join(path, "")
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
#: Calls that could not be replayed, after which no further one is looked at, which takes time: where some
#: calls were replayed, and where none was.
_MOST_LEFT = 50, 12
#: With care: the share of a GPU's memory that a script may have used before, because a sample takes memory
#: for a second step; and the most seconds of a forward, as a sample takes about forty times as long.
_MOST_USED, _LONGEST = 0.4, 0.5


class Captured:
    """Replays calls of models while it is installed."""

    def __init__(self, with_care: bool = False) -> None:
        self.with_care = with_care
        self.models = Models(self._called)
        self.rows_of: dict[type, list[Row]] = {}
        self._calls: WeakKeyDictionary[nn.Module, Calls] = WeakKeyDictionary()

    def install(self) -> None:
        self.models.install()
        self._grad = torch.autograd.grad
        torch.autograd.grad = _seen(self._grad)

    def remove(self) -> None:
        torch.autograd.grad = self._grad
        self.models.remove()
        self._calls.clear()

    def _called(self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        calls = self._calls.get(module)
        if calls is None:
            self._calls[module] = calls = Calls(module, call, self.with_care)
            self.rows_of.setdefault(type(module), []).append(calls.row)
        calls.row.calls += 1
        if calls.given_up:
            return call(module, *args, **kwargs)
        return calls(module, args, kwargs)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the report, one for each model."""
        return [
            {"class": f"{cls.__module__}.{cls.__qualname__}", **row.told()}
            for cls, rows in self.rows_of.items()
            for row in rows
        ]


def _seen(grad: Callable[..., Any]) -> Callable[..., Any]:
    """torch.autograd.grad, which sees whether gradients of models' results are asked for."""

    @functools.wraps(grad)
    def gradient(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return grad(outputs, inputs, *args, **kwargs)
        for x in [inputs] if isinstance(inputs, Tensor) else tensors_of(inputs):
            if x.grad_fn is None:
                continue
            graph = x.grad_fn.metadata.get(RECORDED, lambda: None)()  # type: ignore[attr-defined]
            if graph is not None:
                graph.asks = "torch.autograd.grad"
            if any(ref() is x for _, ref in getattr(x.grad_fn, "parts", ())):
                raise RuntimeError(no_gradient("torch.autograd.grad: inputs"))
        return grad(outputs, inputs, *args, **kwargs)

    return gradient


class Calls(Replays):
    """The calls of one model."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], with_care: bool):
        super().__init__(with_care)
        self._call, self._thread = call, threading.get_ident()
        self._recordings = 0  # calls in which graphs were recorded
        self._last: tuple[Any, Numbers] | None = None
        self._equal = 0  # calls in a row that were equal to the last one
        self._known: list[Any] = []  # calls of which one was recorded
        self._left = 0
        self._hooks = _hooks(module)
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._seconds: list[float] = []  # of a forward as written, and of the first replayed ones
        self._recorded: Callable[..., Any] | None = None  # `_forward`, by Dynamo

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if not self._may_replay(module):
            return self._call(module, *args, **kwargs)
        # Calls that Dynamo has not recorded yet are recorded only if they come again. Where the last one was
        # replayed, its guards look at the arguments.
        if not self.replayed:
            arguments = Arguments(args, kwargs)
            if arguments.key not in self._known and not self._is_known(module, arguments):
                return self._as_written(module, args, kwargs)
        times = self.replayed and len(self._seconds) < _TIMED
        self.replayed, known, captured = False, self.row.recorded, self.row.captured
        start = _now() if times else 0.0
        try:
            with internals.Recording(_GRAPHS):
                out = self._forward()(self._call, module, args, kwargs)
        except Exception as error:
            if not internals.is_of_compiler(error):
                raise
            self.give_up(said(error))
            return self._call(module, *args, **kwargs)
        if self.row.recorded > known:
            self._recordings, self.replayed = self._recordings + 1, False
            if self._recordings > _RECORDINGS:
                self.give_up(f"its code was recorded {_RECORDINGS} times, as what it reads changes")
        self.row.replayed += self.replayed
        if self.replayed:
            self._left = 0
            if times and self.row.captured == captured:
                self._compare(_now() - start)
        elif not self.given_up:
            self.leave(self.row.reason)
        return out

    def _compare(self, seconds: float) -> None:
        """Gives up where a forward, with all that lies between graphs and what guards look at, is not shorter
        than as written."""
        written, *replayed = self._seconds = [*self._seconds, seconds]
        if len(self._seconds) == _TIMED and min(replayed) * min(recorded.FASTER, 1.0) > _SLOWER * written:
            self.give_up(
                f"a forward takes {1e3 * written:.1f} ms as written, {1e3 * min(replayed):.1f} replayed"
            )

    def _forward(self) -> Callable[..., Any]:
        if self._recorded is None:
            # Dynamo keeps what it has recorded with the code, and backends for ever.
            own = FunctionType(_forward.__code__.replace(), globals())
            self._recorded = torch.compile(own, backend=partial(_backend, weakref.ref(self)), dynamic=False)
        return self._recorded

    def _may_replay(self, module: nn.Module) -> bool:
        if not module.training or any(self._hooks) or not trains() or _is_captured():
            return False
        # A debugger or profiler is to see its code; what is replayed is the state of one thread.
        if sys.gettrace() or sys.getprofile() or threading.get_ident() != self._thread:
            return False
        if internals.parametrizations_are_cached():  # whose weights would stay those of the capture
            return False
        for cls, before in self._classes:
            if not _same(vars(cls).values(), before.values()):
                now = vars(cls)
                names = [name for name in {**now, **before} if now.get(name) is not before.get(name)]
                self.give_up(f"{cls.__module__}.{cls.__qualname__}.{names[0]} has changed")
                return False
        return True

    def _is_known(self, module: nn.Module, arguments: Arguments) -> bool:
        """Whether a call is equal to those before it."""
        last, self._last = self._last, (arguments.key, Numbers(arguments.leaves))
        same = last is not None and last[0] == arguments.key and last[1].equal(self._last[1])
        self._equal = self._equal + 1 if same else 0
        if self._equal < _AFTER:
            self.leave(self.row.reason or "no call is equal to those before it")
            return False
        if len(self._known) == _MOST:
            self.leave(f"more than {_MOST} different calls came repeatedly")
            return False
        try:
            unfit = self._unfit(module, arguments)
            self._forward()
        except RuntimeError as error:  # of torch.compile, which not every Python has
            unfit = said(error)
        if unfit:
            self.give_up(unfit)
            return False
        self.row.reason = ""
        self.static = {id(x) for x in (*module.parameters(), *module.buffers())}
        self._hooks, self._classes = _hooks(module), _classes(module)
        self._known.append(arguments.key)
        return True

    def record(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.row.recorded += 1
        if internals.has_higher_order_operators(graph):  # which PyTorch runs right within its compiler alone
            self.leave("it has checkpoints, or other operators that call functions")
            return internals.aot_eager(graph, inputs)
        return RecordedGraph(self, graph)

    def _as_written(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call that is not looked at. The one before the first that is recorded is a test: whether it is
        short, and draws no random numbers on the host, of which Dynamo draws others."""
        if self._equal != _AFTER - 1:
            return self._call(module, *args, **kwargs)
        before, start = _random_on_host(), _now()
        out = self._call(module, *args, **kwargs)
        self._seconds = [_now() - start]
        if _random_on_host() != before:
            self.give_up("it draws random numbers on the host")
        elif self.with_care and self._seconds[0] > _LONGEST:
            took = f"a forward takes {self._seconds[0]:.1f} s"
            self.give_up(f"{took}; --capture-all replays it all the same")
        return out

    def _unfit(self, module: nn.Module, arguments: Arguments) -> str:
        """Why calls of this model cannot be captured."""
        tensors = [x for x in (*arguments.leaves, *module.parameters()) if isinstance(x, Tensor)]
        devices = {x.device for x in tensors}
        if {x.type for x in devices} != {cuda_graphs.Recorder.device_type} or len(devices) != 1:
            return "its tensors are not on one GPU"
        if any(part._compiled_call_impl is not None for part in module.modules()):
            return "it is compiled"
        held = [x for part in module.modules() for x in vars(part).values()]
        if any(draws_elsewhere(type(part)) for part in module.modules()) or any(
            map(is_generator, (*held, *arguments.given))
        ):
            return "it draws from a random generator of its own"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "several processes train together"
        (device,) = devices
        if self.with_care and device.type == "cuda":
            used = torch.cuda.max_memory_allocated(device)
            if used > _MOST_USED * memory_of(device):
                return f"the script uses {used / 2**20:,.0f} MiB; --capture-all replays it all the same"
        return ""

    def give_up(self, reason: str) -> None:
        super().give_up(reason)
        self._last = None

    def leave(self, reason: str) -> None:
        self.row.reason, self._left = reason, self._left + 1
        if self._left > _MOST_LEFT[not self.row.replayed]:
            self.give_up(reason)


def _hooks(module: nn.Module) -> list[Any]:
    """The hooks of a module's parts, which Dynamo does not look at in each of them: torch_geometric's of
    messages."""
    of_parts = [own for part in module.modules() for own in vars(part).items()]
    return [
        x
        for name, x in of_parts
        if name.endswith("hooks") and "state_dict" not in name and isinstance(x, dict)
    ]


def _classes(module: nn.Module) -> list[tuple[type, dict[str, Any]]]:
    """The classes of a module's parts, and of the script, with what they hold: Dynamo does not see each
    change of it."""
    found = {cls for part in module.modules() for cls in type(part).__mro__}
    for x in list(sys.modules.values()):
        file, name = getattr(x, "__file__", None) or "", getattr(x, "__name__", None) or ""
        if file and not file.startswith(_INSTALLED) and name.partition(".")[0] != "dfgnn":
            own = [y for y in list(vars(x).values()) if isinstance(y, type) and y.__module__ == name]
            found.update(own)  # not those that it imports, of which libraries may count something
    classes = [cls for cls in found if cls not in (nn.Module, object) and cls.__module__ != "builtins"]
    return [(cls, dict(vars(cls))) for cls in classes]


def _same(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _backend(calls: weakref.ref[Calls], graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Dynamo's backend."""
    one = calls()
    return graph.forward if one is None else one.record(graph, inputs)


def _forward(call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return call(module, *args, **kwargs)


def _now() -> float:
    """Seconds, when all that was launched has run."""
    if cuda_graphs.Recorder.device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _random_on_host() -> Any:
    """The states of Python's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else (None, b"", 0)
    return random.getstate(), bytes(drawn[1]), drawn[2]


def _is_captured() -> bool:
    """Whether the script captures the call itself."""
    on_gpu = torch.cuda.is_initialized()
    return cuda_graphs.in_captured_step() or (on_gpu and torch.cuda.is_current_stream_capturing())


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the report about captured calls, for a terminal."""
    said = []
    for row in rows:
        what = f"{row['replayed']} of {row['calls']} calls replayed as CUDA graphs"
        if row["reason"]:
            what += f", not all: {row['reason']}" if row["replayed"] else f": {row['reason']}"
        took = "; forward and backward: {} ms as written, {} ms replayed".format(*row["milliseconds"])
        said.append(f"  {row['class']}: {what}{took * any(row['milliseconds'])}")
    return said or ["  --capture: no model with message passing was trained"]
