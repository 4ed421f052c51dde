"""A graph of operations that PyTorch's compiler has recorded in a call of a model, replayed as CUDA
graphs."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten

from ..capturing.state import Snapshot
from ..compiling.operations import graph_without_dropout
from ..compiling.rewrite import rewritten
from ..runtime import cuda_graphs
from .arguments import Numbers
from .call_graphs import CallGraphs
from .compiled import agree
from .sample import milliseconds, random_state, said, unseen

#: CUDA graphs of one graph at most, each of which holds its own memory; how much faster is faster, also with
#: care; and the share of a GPU's memory that CUDA graphs may hold then.
MOST, FASTER, FASTER_WITH_CARE, _MOST_HELD = 4, 1.07, 1.15, 0.1
#: The name with which autograd's nodes of results know the graph.
RECORDED = "dfgnn.run: recorded graph"


@dataclass
class Row:
    """What the report says of a model: its calls, how many of them were replayed, graphs that were recorded
    and captured, milliseconds of these as written and replayed, and why calls were not replayed."""

    calls: int = 0
    replayed: int = 0
    recorded: int = 0
    captured: int = 0
    milliseconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    reason: str = ""

    def told(self) -> dict[str, Any]:
        reason = self.reason or ("" if self.replayed else "no call in training was equal to those before it")
        return {**asdict(self), "reason": reason}


@dataclass
class Captures:
    """The CUDA graphs of a recorded graph, by the numbers that they rely on, None where these cannot be
    captured; the numbers of its last call, and how many calls before it had the same."""

    graphs: list[tuple[Numbers, CallGraphs | None]] = field(default_factory=list)
    last: Numbers | None = None
    equal: int = 0


class Replays:
    """What the recorded graphs of one model share. modified: of `Constants`; static: the ids of its
    parameters and buffers; replayed: whether a graph was replayed in this call; captures: of each graph."""

    def __init__(self, with_care: bool):
        self.with_care, self.row, self.given_up = with_care, Row(), False
        self.modified: dict[int, Any] = {}
        self.static: set[int] = set()
        self.replayed = False
        self.captures: list[Captures] = []

    def give_up(self, reason: str) -> None:
        """Ends the replays of this model. Graphs that are being recorded run as they are."""
        self.row.reason, self.given_up = reason, True
        self.captures = [Captures() for _ in self.captures]


class _Way(NamedTuple):
    """How a graph's results are computed; and, where this is not as it is written, both without dropout,
    whose random numbers are others."""

    run: Callable[..., Any]
    alike: tuple[Callable[..., Any], Callable[..., Any]] | None = None


def _ways(graph: GraphModule) -> list[_Way]:
    """As it is written, and with attention that was recognised in it."""
    made = rewritten(graph, 0, True)[0]
    if made is graph:
        return [_Way(graph.forward)]
    plain = graph_without_dropout(graph)
    return [_Way(graph.forward), _Way(made.forward, (plain.forward, rewritten(plain, 0, True)[0].forward))]


class RecordedGraph:
    """A graph that Dynamo has recorded, and replays. Dynamo holds it longer than the model lives."""

    def __init__(self, model: Replays, graph: GraphModule):
        self._model, self._run = weakref.ref(model), graph.forward
        self._graph: GraphModule | None = graph  # until it was captured
        self._number = len(model.captures)
        model.captures.append(Captures())
        self._asked: set[int] = set()  # the leaves of what it returns that got gradients
        self._results: list[weakref.ref[Tensor]] = []  # of the last call that was not replayed
        self.asks = ""  # how the script asks for gradients of results, if it does
        self._left = False
        self._all_ways: list[_Way] = []

    def __call__(self, *inputs: Any) -> Any:
        model = self._model()
        if self._left or model is None or model.given_up or not torch.is_grad_enabled():
            return self._run(*inputs)
        self._look_at_results()
        graphs = self._chosen(model, inputs)
        if graphs is None or not graphs.is_free():
            return self._noted(inputs)
        model.replayed = True
        return graphs(*inputs)

    def _noted(self, inputs: Sequence[Any]) -> Any:
        """A call that is not replayed, of which is noted which results get gradients."""
        out = self._run(*inputs)
        for k, x in enumerate(tree_flatten(out)[0]):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                self._results.append(weakref.ref(x))
                # For torch.autograd.grad. An attribute of x would be saved with it.
                x.grad_fn.metadata[RECORDED] = weakref.ref(self)  # type: ignore[index]
                x.grad_fn.register_prehook(partial(_noted, self._asked, k, x.output_nr))
        return out

    def _look_at_results(self) -> None:
        for x in [x for ref in self._results if (x := ref()) is not None]:
            if x.retains_grad or x._backward_hooks:
                self.asks = "retain_grad" if x.retains_grad else "register_hook"
        self._results = []

    def _chosen(self, model: Replays, inputs: Sequence[Any]) -> CallGraphs | None:
        if not all(isinstance(x, Tensor) for x in inputs):
            self._leave(model, "its code computes with numbers that change")
            return None
        mine = model.captures[self._number]
        static = [x for x in inputs if id(x) in model.static or not x.is_floating_point()]
        numbers = Numbers(static, model.static)
        for k, (held, graphs) in enumerate(mine.graphs):
            if not held.equal(numbers):
                continue
            if graphs is not None and graphs.given_up:
                model.give_up(f"backward ran through a call {graphs.given_up}")
                return None
            if graphs is None or graphs.is_current():
                return graphs
            del mine.graphs[k]
            break
        last, mine.last = mine.last, numbers
        mine.equal = mine.equal + 1 if last is not None and last.equal(numbers) else 0
        if not mine.equal:
            model.row.reason = model.row.reason or "no call is equal to those before it"
            return None
        if len(mine.graphs) == MOST:
            self._leave(model, f"more than {MOST} different calls came repeatedly")
            return None
        try:
            graphs = self._captured(model, inputs)
        except Exception as error:  # its operations run one by one, or raise the script's own error
            self._leave(model, said(error))
            return None
        mine.graphs.append((numbers, graphs))
        return graphs

    def _leave(self, model: Replays, reason: str) -> None:
        model.row.reason, model.captures[self._number], self._left = reason, Captures(), True

    def _captured(self, model: Replays, inputs: Sequence[Tensor]) -> CallGraphs | None:
        """The CUDA graphs of the faster way, if they are faster than the graph as it is written."""
        devices = {x.device for x in inputs if x.numel() > 1 or x.requires_grad}
        if {x.type for x in devices} != {cuda_graphs.Recorder.device_type} or len(devices) != 1:
            raise RuntimeError("its tensors are not on one GPU")
        if self._graph is not None:
            self._all_ways, self._graph = _ways(self._graph), None
        first, *others = self._all_ways
        found = [self._sample(model, inputs, first)]
        for way in others:
            with contextlib.suppress(Exception):  # it may not be what it was taken for
                found.append(self._sample(model, inputs, way))
        graphs, took = min(found, key=lambda x: x[1][1])
        row, faster = model.row, FASTER_WITH_CARE if model.with_care else FASTER
        if took[1] * faster > took[0]:
            row.reason = row.reason or "its CUDA graphs are not faster"
            row.milliseconds = row.milliseconds if row.captured else took
            self._left = not model.captures[self._number].graphs
            return None
        known = row.milliseconds if row.captured else [0.0, 0.0]
        row.milliseconds = [round(x + y, 3) for x, y in zip(known, took)]
        row.captured, row.reason = row.captured + 1, ""
        graphs.settle()
        return graphs

    def _sample(
        self, model: Replays, inputs: Sequence[Tensor], way: _Way
    ) -> tuple[CallGraphs, list[float]]:  # fmt: skip
        """The CUDA graphs of one way, and milliseconds as written and replayed. Raises an error where they
        give other numbers."""
        device = next((x.device for x in inputs if x.requires_grad), inputs[0].device)
        on_gpu = device.type == "cuda"
        given = [k for k, x in enumerate(inputs) if x.is_floating_point() and id(x) not in model.static]
        snapshot = Snapshot([x for k, x in enumerate(inputs) if k not in given], device)
        versions = [x._version for x in inputs]
        with unseen(inputs), _without_autocast_cache():
            try:
                reserved = _reserved(device)
                graphs = CallGraphs(way.run, inputs, given, snapshot, frozenset(self._asked), model.modified)
                if model.with_care:
                    _take_care(graphs, self.asks, _reserved(device) - reserved, device)
                for one, other in [way.alike] if way.alike else []:
                    snapshot.restore()
                    expected = graphs.results(one, inputs)
                    snapshot.restore()
                    if not agree(expected, graphs.results(other, inputs)):
                        raise RuntimeError("recognised attention gives other numbers")
                snapshot.restore()
                drawn = random_state(on_gpu)
                expected = graphs.results(way.run, inputs)
                drew = [not torch.equal(x, y) for x, y in zip(drawn, random_state(on_gpu))]
                graphs.draws = any(drew)
                if on_gpu and drew[0]:
                    raise RuntimeError("it draws random numbers on the host")
                if snapshot.writes():
                    graphs.reads = [
                        k for k, x in enumerate(inputs) if k not in given and x._version != versions[k]
                    ]
                snapshot.restore()
                if not agree(expected, graphs.results(graphs, inputs)):
                    raise RuntimeError("its CUDA graphs give other numbers")
                del expected
                ways = [partial(graphs.results, call, inputs) for call in (self._run, graphs)]
                took = milliseconds(ways, on_gpu)
            finally:
                snapshot.restore()
        return graphs, took


def _noted(asked: set[int], k: int, place: int, grads: Sequence[Tensor | None]) -> None:
    """Before the backward pass of a result: notes that it has a gradient."""
    if grads[place] is not None:
        asked.add(k)


def _take_care(graphs: CallGraphs, asks: str, held: int, device: torch.device) -> None:
    """Raises RuntimeError for CUDA graphs that ``--capture-all`` alone makes. asks: of the recorded graph."""
    if graphs.has_parts and asks:
        raise RuntimeError(f"{asks} asks for the gradient of a result, of which another one is computed")
    if held > _MOST_HELD * memory_of(device):
        raise RuntimeError(
            f"its CUDA graphs would hold {held / 2**20:,.0f} MiB; --capture-all replays it all the same"
        )


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def memory_of(device: torch.device) -> float:
    """Bytes of a GPU's memory."""
    on_gpu = device.type == "cuda"
    return float(torch.cuda.get_device_properties(device).total_memory) if on_gpu else math.inf


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
