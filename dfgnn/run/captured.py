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

import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..capturing._run import no_waiting
from ..capturing.constants import LEARNING_RUNS, Constants
from ..capturing.state import buffers_stay, forget_streams
from ..capturing.state import tensors_of as state_of
from ..graph import Graph
from ..runtime import torch_internals as internals
from ..runtime.cuda_graphs import capturing
from .compiled import agree, trains
from .gains import Models
from .sample import milliseconds, said, tensors_of, unseen

#: Equal calls before one is captured; CUDA graphs of one model at most, each of which holds its own memory;
#: how much faster is faster.
_AFTER, _MOST, _FASTER = 3, 4, 1.05
#: Calls that could not be replayed, after which no further one is looked at, which takes time.
_MOST_LEFT = 50
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Captured:
    """Replays calls of models while it is installed. debug: runs them again instead, on any device, like
    that of `dfgnn.capture`."""

    def __init__(self, debug: bool = False) -> None:
        self.debug = debug
        self.models = Models(self._called)
        self.calls: WeakKeyDictionary[nn.Module, _Calls] = WeakKeyDictionary()
        self.rows_of: dict[type, list[_Calls]] = {}
        self.install, self.remove = self.models.install, self.models.remove

    def _called(self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if module not in self.calls:
            self.calls[module] = _Calls(module, self.debug)
            self.rows_of.setdefault(type(module), []).append(self.calls[module])
        return self.calls[module](call, module, args, kwargs)

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

    def __init__(self, module: nn.Module, debug: bool):
        self.state, self.debug = _State(module), debug
        self.last: tuple[Any, ...] | None = None
        self.equal = 0  # calls in a row that were equal to the last one
        self.graphs: dict[tuple[Any, ...], _Graphs | None] = {}
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

    def _graphs(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict) -> _Graphs | None:
        if self.given_up or not module.training or not trains():
            return None
        leaves = tree_leaves((args, kwargs))
        reason = next((reason for x in leaves if (reason := _unfit(x))), "")
        state = None if reason else self.state.now()
        if state is None:
            self._left(reason or "its modules have hooks")
            return None
        key = (*map(_key, leaves), *_autocast(), *state)
        graphs = self.graphs.get(key)
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

    def _left(self, reason: str) -> None:
        self.reason, self.left = reason, self.left + 1
        self.given_up = self.left > _MOST_LEFT

    def _captured(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict) -> _Graphs | None:
        tensors = tensors_of(args, kwargs, list(module.parameters()))
        devices = {x.device for x in tensors}
        if len(devices) > 1 or not self.debug and any(x.type != "cuda" for x in devices):
            self.reason, self.given_up = "its tensors are not on one GPU", True
            return None
        if any(part._compiled_call_impl is not None for part in module.modules()):
            self.reason, self.given_up = "it is compiled", True
            return None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.reason, self.given_up = "several processes train together", True
            return None
        snapshot, attributes = _Snapshot(module, devices.pop()), self.state.plain()
        leaves = tree_leaves((args, kwargs))
        before = _random(), self.state.now(), [*map(_key, leaves)]

        def restore() -> None:
            snapshot.restore()
            for own, name, value in attributes:
                own[name] = value

        with unseen(tensors), _without_autocast_cache():
            try:
                graphs = _Graphs(
                    call, module, args, kwargs, snapshot, self.state.results, self.modified, self.debug
                )
                restore()
                expected = graphs.results(graphs.written)
                if (_random(), self.state.now(), [*map(_key, leaves)]) != before:
                    raise RuntimeError("it draws Python's random numbers, or changes attributes")
                restore()
                if not agree(expected, graphs.results(graphs.replayed)):
                    raise RuntimeError("its CUDA graphs give other numbers")
                del expected
                ways = [partial(graphs.results, way) for way in (graphs.written, graphs.replayed)]
                self.milliseconds = milliseconds(ways, not self.debug)
            finally:
                restore()
        if self.milliseconds[1] * _FASTER > self.milliseconds[0] and not self.debug:
            self.reason = "its CUDA graphs are not faster"
            return None
        graphs.settle()
        return graphs


class _Snapshot:
    """What a call of a model changes, to be restored: buffers and generators. Parameters are not written to:
    the script may have gradients to compute from their current versions."""

    def __init__(self, module: nn.Module, device: torch.device):
        self._buffers = [(x, x.detach().clone()) for x in module.buffers()]
        self._cpu, self._device = torch.get_rng_state(), device
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        for x, before in self._buffers:
            if not torch.equal(x, before):  # the versions of others stay
                x.copy_(before)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class _State:
    """What Python sees in the modules of a model: attributes, parameters, buffers, hooks. results: attributes
    to which a call assigns tensors."""

    def __init__(self, module: nn.Module):
        self._owned = [part.__dict__ for part in module.modules()]
        self.results: list[tuple[dict[str, Any], str]] = []
        self._known: set[tuple[int, str]] = set()

    def _tensors(self) -> dict[tuple[int, str], int]:
        return {
            (k, name): id(x)
            for k, own in enumerate(self._owned)
            for name, x in own.items()
            if isinstance(x, Tensor)
        }

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A context of a call, at whose end the attributes are known that it has assigned."""
        before = self._tensors()
        yield
        for key, now in self._tensors().items():
            if before.get(key) != now and key not in self._known:
                self._known.add(key)
                self.results.append((self._owned[key[0]], key[1]))

    def plain(self) -> list[tuple[dict[str, Any], str, Any]]:
        """All attributes that are numbers, texts, tensors and the like."""
        kept = (*_PLAIN, Tensor, nn.Parameter)
        return [(own, name, x) for own in self._owned for name, x in own.items() if type(x) in kept]

    def now(self) -> tuple[Any, ...] | None:
        """None: with hooks, which are to be called each time."""
        found: list[Any] = []
        for k, own in enumerate(self._owned):
            if any(map(own.get, _HOOKS)):
                return None
            for name, value in own.items():
                if (k, name) in self._known:
                    continue
                if type(value) in _PLAIN:
                    found.append(value)
                elif isinstance(value, Tensor):
                    found += id(value), value._version
            found += map(id, own["_modules"].values())
            for x in own["_parameters"].values():
                if x is not None:
                    found += x.data_ptr(), x.requires_grad
            for x in own["_buffers"].values():
                if x is not None:  # the versions of single numbers change in training: those of BatchNorm
                    counted = x.numel() > 1 and not x.is_floating_point()
                    found += x.data_ptr(), x._version if counted else 0
        return tuple(found)


def _unfit(x: Any) -> str:
    """Why a call with this argument cannot be replayed."""
    if isinstance(x, Tensor):
        plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_inference()
        return "" if plain else f"an argument is a {type(x).__name__} of another kind"
    if type(x) in (*_PLAIN, Graph):
        return ""
    return next((f"an argument is a {type(x).__name__}" for y in _parts(x) if y is x or _unfit(y)), "")


def _parts(x: Any) -> list[Any]:
    """What an object holds, such as torch_geometric's Data; the object itself where that is not known."""
    if hasattr(x, "to_dict") and hasattr(x, "edge_index"):
        return tree_leaves(x.to_dict())
    plain = hasattr(x, "__dict__") and not isinstance(x, (type, nn.Module)) and not callable(x)
    parts = tree_leaves(vars(x)) if plain else [x]
    return parts if all(type(y) in _PLAIN or isinstance(y, Tensor) for y in parts) else [x]


def _key(x: Any) -> Any:
    """What has to be the same of an argument."""
    if isinstance(x, Tensor):
        layout = x.shape, x.stride(), x.dtype, x.device
        return (*layout, x.requires_grad) if x.is_floating_point() else (*layout, *_place(x))
    if type(x) in _PLAIN:
        return type(x), str(x) if isinstance(x, slice) else x
    if type(x) is Graph:
        return id(x)
    return id(x), *[_place(y) if isinstance(y, Tensor) else (type(y), y) for y in _parts(x)]


def _place(x: Tensor) -> tuple[Any, ...]:
    """Which tensor it is, in which version; a view is known by its base."""
    owner = x if x._base is None else x._base
    return id(owner), owner._version, x.data_ptr(), x.shape, x.stride()


def _autocast() -> tuple[Any, ...]:
    on = torch.is_autocast_enabled("cuda")
    return on, torch.get_autocast_dtype("cuda") if on else None


def _random() -> Any:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else (None, b"", 0)
    return random.getstate(), bytes(drawn[1]), drawn[2]


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


def _trained(out: list[Any]) -> list[Tensor]:
    return [x for x in out if isinstance(x, Tensor) and x.requires_grad]


def _leaves(x: Tensor) -> set[int]:
    """The ids of the tensors to whose gradients that of x leads."""
    if x.grad_fn is None:
        return {id(x)}
    found, seen, waiting = set(), set(), [x.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found


class _Pass(NamedTuple):
    """A recorded pass: the tensors it writes, and what runs it again."""

    results: list[Any]
    replay: Callable[[], None]


class _Recorder:
    """Records passes on a stream of its own; with debug the passes themselves run again."""

    def __init__(self, device: torch.device, debug: bool):
        self._debug, self._device = debug, device
        if not debug:
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._debug:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def without_waiting(self, constants: Constants) -> AbstractContextManager[None]:
        if self._debug:
            return nullcontext()
        self._stream.synchronize()
        return no_waiting(constants)

    def recorded(self, run: Callable[[], list[Any]]) -> _Pass:
        """A pass that returns tensors, which each replay overwrites."""
        if self._debug:
            return _Pass(first := run(), partial(_run_again, run, first))
        graph = torch.cuda.CUDAGraph()
        # thread_local, because a data loader may pin memory in another thread meanwhile.
        how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with capturing(graph, **how):
            results = run()
        return _Pass(results, graph.replay)


def _run_again(run: Callable[[], list[Any]], first: list[Any]) -> None:
    with torch.enable_grad():
        again = run()
    for x, new in zip(first, again):
        if isinstance(x, Tensor):
            x.detach().copy_(new.detach())


class _Graphs:
    """The CUDA graphs of one call: forward and backward."""

    def __init__(
        self, call: Callable, module: nn.Module, args: tuple, kwargs: dict,
        snapshot: _Snapshot, assigned: list[tuple[dict[str, Any], str]], modified: dict[int, Any],
        debug: bool,
    ):  # fmt: skip
        self._call, self._module, self._arguments = call, weakref.ref(module), (args, kwargs)
        self._assigned, self._modified = list(assigned), modified
        leaves, self._tree = tree_flatten((args, kwargs))
        self._places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        # The ids of these tell calls apart, and what is made of their edges lives with them.
        self._held = [None if k in self._places else x for k, x in enumerate(leaves)]
        self._loaded: dict[int, tuple[Tensor, int]] = {}  # tensors that the script keeps, and their versions
        self._static = list(leaves)
        for k in self._places:
            self._static[k] = leaves[k].detach().clone().requires_grad_(leaves[k].requires_grad)
        self._parameters = [x for x in module.parameters() if x.requires_grad]
        self._trained = [k for k in self._places if leaves[k].requires_grad]
        self._pending: Callable[[], Any] = lambda: None
        self._record(snapshot, debug)

    def _outputs(self) -> list[Any]:
        """Forward: the leaves of what the model returns."""
        module = self._module()
        assert module is not None
        args, kwargs = tree_unflatten(self._static, self._tree)
        for own, name in self._assigned:
            own[name] = None  # a call that read what the last one left would give other numbers
        with buffers_stay(module):
            out, self._out_tree = tree_flatten(self._call(module, *args, **kwargs))
        out += [own[name] for own, name in self._assigned]
        self._live = _trained(out)
        return out

    def _inputs(self) -> list[Tensor]:
        return [*self._parameters, *(self._static[k] for k in self._trained)]

    def _gradients(self, outputs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        return list(torch.autograd.grad(outputs, self._inputs(), grads, allow_unused=True))

    def _record(self, snapshot: _Snapshot, debug: bool) -> None:
        module = self._module()
        assert module is not None
        recorder = _Recorder(device := self._parameters[0].device, debug)
        given = [self._static[k] for k in self._places]
        self._constants = constants = Constants(
            device, lambda: (*state_of(module, None), *given), self._modified
        )
        forget_streams(self._parameters)
        with recorder.running():
            for k in range(LEARNING_RUNS + 1):
                last = recorder.without_waiting(constants) if k == LEARNING_RUNS else nullcontext()
                with last, constants.running():
                    out = self._outputs()
                    self._check(out)
                    trained = _trained(out)
                    self._gradients(trained, [torch.zeros_like(x) for x in trained])
            del out, trained
            snapshot.restore()
            with constants.running():
                self._forward = recorder.recorded(self._outputs)
                out = self._forward.results
                self._grads = [torch.zeros_like(x) for x in self._live]
                reached = [_leaves(x) for x in self._live]
                self._reached = [[id(x) in leaves for x in self._inputs()] for leaves in reached]
                self._backward = recorder.recorded(lambda: self._gradients(self._live, self._grads))
        self._out_leaves = [None if isinstance(x, Tensor) else x for x in out]
        self._tensors = [k for k, x in enumerate(out) if isinstance(x, Tensor)]
        self._is_trained = [out[k].requires_grad for k in self._tensors]
        self._results = [out[k].detach() for k in self._tensors]
        if not debug:
            self._live = []  # with the graph of gradients
            out.clear()

    def _check(self, out: list[Any]) -> None:
        """Raises RuntimeError for what two CUDA graphs cannot give back."""
        for x in out:
            if not isinstance(x, Tensor) and type(x) not in _PLAIN:
                raise RuntimeError(f"it returns a {type(x).__name__}")
        if any(self._static[k]._version for k in self._places):
            raise RuntimeError("it modifies its arguments")
        if not _trained(out):
            raise RuntimeError("what it returns has no gradient")
        known = set(map(id, self._inputs()))
        if not all(leaf in known for x in _trained(out) for leaf in _leaves(x)):
            raise RuntimeError("it trains tensors that are neither its parameters nor its arguments")

    # ---- calls

    def is_free(self) -> bool:
        """Whether a replay may overwrite what the last one left: its backward has run, or never will."""
        pending = self._pending()
        return pending is None or pending.done

    def is_current(self) -> bool:
        """Whether nothing was modified of which the CUDA graphs hold results."""
        return self._constants.is_current()

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = _Replay.apply(self, leaves, *self._parameters, *(leaves[k] for k in self._trained))
        out = list(self._out_leaves)
        for k, x in zip(self._tensors, tensors):
            out[k] = x
        count = self._out_tree.num_leaves
        for (own, name), x in zip(self._assigned, out[count:]):
            own[name] = x
        return tree_unflatten(out[:count], self._out_tree)

    def settle(self) -> None:
        """Ends the sample: what was restored since the capture counts as what was there."""
        self._constants.settle()
        self._arguments = ((), {})

    def replayed(self) -> Any:
        return self(*self._arguments)

    def written(self) -> Any:
        module = self._module()
        assert module is not None
        args, kwargs = self._arguments
        return self._call(module, *args, **kwargs)

    def results(self, call: Callable[[], Any]) -> tuple[list[Tensor], list[Tensor]]:
        """What a call returns, and its gradients."""
        outputs = tensors_of(call())
        trained = [x for x in outputs if x.requires_grad]
        leaves = tree_leaves(self._arguments)
        inputs = [*self._parameters, *(leaves[k] for k in self._trained)]
        grads = torch.autograd.grad(trained, inputs, [x.detach() for x in trained], allow_unused=True)
        return [x.detach() for x in outputs], [x for x in grads if x is not None]

    def forward(self, leaves: list[Any]) -> list[Tensor]:
        for k in self._places:
            x = leaves[k]
            loaded = self._loaded.get(k)
            if loaded is None or x is not loaded[0] or x._version != loaded[1]:
                self._static[k].detach().copy_(x)
                if x.grad_fn is None and not x.requires_grad:
                    self._loaded[k] = x, x._version
        self._forward.replay()
        return [x.clone() for x in self._results]

    def backward(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        for mine, given in zip(self._grads, grads):
            mine.zero_() if given is None else mine.copy_(given)
        self._backward.replay()
        # What none of the results with a gradient comes of has none either.
        asked = [reached for reached, given in zip(self._reached, grads) if given is not None]
        has = [any(column) for column in zip(*asked)] or [False] * len(self._backward.results)
        found = [x for x, has_one in zip(self._backward.results, has) if has_one and x is not None]
        copies = iter(internals.foreach_mul(found, 1.0) if found else ())
        pairs = zip(self._backward.results, has)
        return [next(copies) if has_one and x is not None else None for x, has_one in pairs]


class _Replay(torch.autograd.Function):
    """A call, replayed. Its inputs are the tensors that get gradients."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, leaves: list[Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs, ctx.done = graphs, False
        graphs._pending = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        results = graphs.forward(leaves)
        ctx.mark_non_differentiable(*[x for x, trained in zip(results, graphs._is_trained) if not trained])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.done:
            raise RuntimeError(
                "dfgnn.run --capture: backward ran through a model's call for a second time, for which its "
                "CUDA graph holds nothing any more: run the script without --capture"
            )
        ctx.done = True
        graphs: _Graphs = ctx.graphs
        given = [x for x, trained in zip(grads, graphs._is_trained) if trained]
        return None, None, *graphs.backward(given)


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
