"""The one way into attention: a call's inputs, the paths that can carry it out, a record of the one taken.

The public functions check their arguments, put them into `AttentionInputs` and call `attend`, which asks the
paths of `PATHS` one after the other. Each says in words why it does not take the call, or None; the first
that says None carries it out. Two kinds of calls skip this, because on a small graph its Python time counts:
eager calls without options, which `unchecked` takes to the autograd function of layers
(`autograd.Layer`), and layers (`nn.fused`), which report to the same record, `recorder`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..graph import Graph, GraphPart
from ..runtime import eager, tracing
from ..runtime import torch_internals as internals
from ..runtime.arguments import (
    PLAN_LAYERS,
    SCORE_TABLE,
    SCORES,
    AttentionInputs,
    LayerNumbers,
    LayerTensors,
    draw_seed,
    needs_rows,
)
from ..runtime.eager import PLAIN_TYPES, is_eager
from ..runtime.ops import acc_type
from . import compiler_attention, compiler_graph, plain
from .argument_checks import DTYPES
from .autograd import Attention, FunctionKind, Layer, TransformedAttention, run
from .operators import DispatchedCall, EagerCall, graph_args

Results = tuple[Tensor, Any]  # out, and the attention, which is to be ignored unless it was asked for


class Path(NamedTuple):
    """One way to carry out a call."""

    name: str
    what: str  # what it runs, in words
    why_not: Callable[[AttentionInputs], str | None]  # why it does not take the call; None if it does
    run: Callable[[AttentionInputs], Results]  # carries out a call that it takes


class PathRecorder:
    """A record of attention calls, made while it is the module's `recorder`."""

    def __init__(self) -> None:
        #: For each call: the path that it took, what was called, and (path, reason) of those that declined.
        self.calls: list[tuple[str, str, tuple[tuple[str, str], ...]]] = []
        self._declined: list[tuple[str, str]] = []

    def declined(self, path: str, reason: str) -> None:
        self._declined.append((path, reason))

    def took(self, path: str, what: str) -> None:
        self.calls.append((path, what, tuple(self._declined)))
        self._declined = []


def describe(score: str, value: Tensor) -> str:
    """A call in words: its score, and the shape and dtype of its values."""
    heads, dim = value.shape[-2:]
    return f"{score} attention, {heads} heads of {dim}, {str(value.dtype).removeprefix('torch.')}"


#: Where calls are recorded while :func:`dfgnn.explain` runs one; None, which costs nothing, at other times.
recorder: PathRecorder | None = None


def declined(path: str, reason: str) -> Any:
    """Record why a path did not take a call; returns None, as a path that declines does."""
    if recorder is not None:
        recorder.declined(path, reason)
    return None


def attend(inputs: AttentionInputs) -> Results:
    """(out, attention) by the first path that takes the call."""
    out_bias = inputs.tensors.out_bias
    if inputs.sink is not None and out_bias is not None:
        # A sink is included by scaling the finished output, so that the bias must be added afterwards.
        out, attention = attend(inputs._replace(tensors=inputs.tensors._replace(out_bias=None)))
        return out + out_bias, attention
    for path in PATHS:
        reason = path.why_not(inputs)
        if reason is None:
            if recorder is not None:
                recorder.took(path.name, describe(inputs.score, inputs.tensors.value))
            return path.run(inputs)
        if recorder is not None:
            recorder.declined(path.name, reason)
    raise AssertionError("the last path takes every call")


def _saves_positive(inputs: AttentionInputs, backward: bool, whatever_requires: bool = False) -> bool:
    """Whether backward reads the sums over edges with z > 0 (z: the score before the LeakyReLU), from which
    it computes the gradient of alpha_dst. whatever_requires: even if alpha_dst does not require one."""
    t = inputs.tensors
    of_score = backward and inputs.score == "additive" and t.dst is not None and t.edge_gate is None
    return of_score and (whatever_requires or t.dst.requires_grad)  # type: ignore[union-attr]


# ---- the path `parts`: a graph in ranges or of several processes, one part at a time ----------------------


def _not_parts(inputs: AttentionInputs) -> str | None:
    return None if isinstance(inputs.graph, GraphPart) else "the graph is one, of this process alone"


def _run_parts(inputs: AttentionInputs) -> Results:
    return inputs.graph.attention(inputs, attend)


# ---- the path `eager` --------------------------------------------------------------------------------------


def _not_eager(inputs: AttentionInputs) -> str | None:
    value = inputs.tensors.value
    if value.is_meta:
        return "the features are on the device meta, where there are only shapes"
    return None if eager.is_eager(value) else eager.why_not_eager(value)


def _run_eager(inputs: AttentionInputs) -> Results:
    graph, score, t, numbers, return_attention, schedule, sink, _ = inputs
    edges = return_attention or needs_rows(score, numbers.negative_slope)
    for x in t[4:-1]:
        edges = edges or x is not None
    # Each argument of an autograd function costs time, so that the options are passed only if one is given.
    tensors: tuple[Any, ...] = t if edges or t.out_bias is not None else t[:4]
    backward = False  # a loop rather than a call, because each Python frame costs time
    if torch.is_grad_enabled():
        for x in (*tensors, sink):
            backward = backward or (x is not None and x.requires_grad)
    positive = (
        backward and score == "additive" and t.dst is not None and t.edge_gate is None and t.dst.requires_grad
    )
    _, heads, dim = t.value.shape
    handle = graph._planner.handle(heads, dim, t.value.dtype, PLAN_LAYERS[score], schedule, edges, backward)
    if sink is not None:
        numbers = plain.sink_numbers(numbers)
    call = EagerCall(graph, handle, score, numbers, return_attention, positive)
    if backward:
        return Attention.at_once(call, sink, *tensors)
    return (call.run(tensors) if sink is None else plain.with_sink(call, sink, tensors))[:2]


# ---- the path `plain` -------------------------------------------------------------------------------------


def _not_plain(inputs: AttentionInputs) -> str | None:
    if eager.in_plain_operations():
        return None
    active = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
    if active and eager.transformed(*inputs.tensors, inputs.sink):
        return None
    # With a sink, this path takes all that `eager` (asked before it) declined, except for traced graphs: the
    # path `traced` knows sinks, `dispatched` does not.
    if inputs.sink is not None and not isinstance(_traced_graph(inputs), compiler_graph.EdgeList):
        return None
    return "no tensor carries a tangent of forward-mode differentiation, and torch.onnx.export is not active"


def _run_plain(inputs: AttentionInputs) -> Results:
    if internals.exports_onnx() and internals.tracing_state() is not None:
        raise NotImplementedError(
            "torch.onnx.export: dynamo: expected True for attention on a Graph, got False, whose exporter "
            "writes files that onnxruntime does not load"
        )
    ends = plain.ends_of(inputs.graph)
    return plain.attention(ends, SCORES[inputs.score], inputs.numbers, inputs.tensors, inputs.sink)


# ---- the paths `traced` and `dispatched` ------------------------------------------------------------------


def _not_traced(inputs: AttentionInputs) -> str | None:
    if isinstance(_traced_graph(inputs), compiler_graph.EdgeList):
        return None
    return "torch.compile is not recording, or an export keeps the graph's tensors in the program"


def _traced_graph(inputs: AttentionInputs) -> Any:
    return compiler_graph.for_compiler(inputs.graph) if torch.compiler.is_compiling() else inputs.graph


def _run_traced(inputs: AttentionInputs) -> Results:
    backward = eager.needs_backward((*inputs.tensors, inputs.sink))
    positive = _saves_positive(inputs, backward)
    out, attention = compiler_attention.attention(
        inputs._replace(graph=_traced_graph(inputs)), positive, backward
    )
    if not backward:
        return out, attention
    # Copies, because the caller may modify the results, which backward reads. Inductor drops the copies that
    # are not needed.
    return out.clone(), attention if attention is None else attention.clone()


def _run_dispatched(inputs: AttentionInputs) -> Results:
    graph, score, tensors, numbers, return_attention, schedule, *_ = inputs
    transformed = eager.transformed(*tensors)
    # Under torch.func one cannot see which tensors are differentiated, so that backward may be needed.
    backward = torch.is_grad_enabled() if transformed else eager.needs_backward(tensors)
    positive = _saves_positive(inputs, backward, transformed)
    with tracing.untransformed():
        edges = return_attention or any(x is not None for x in tensors[4:-1])
        edges = edges or needs_rows(score, numbers.negative_slope)
        args = graph_args(graph, score, tensors.value, edges, backward, schedule)
    call = DispatchedCall(graph, args, score, numbers, return_attention, positive)
    if transformed:
        out, _, _, _, attention = TransformedAttention.apply(call, *tensors)
    elif backward and not torch.compiler.is_compiling():
        return Attention.apply(call, None, *tensors)
    else:
        out, _, _, _, attention = call.forward(tensors)
    return (out.clone(), attention.clone()) if backward else (out, attention)  # copies, as in `_run_traced`


#: The paths in the order in which they are asked. The last one takes every call.
PATHS = (
    Path("parts", "one call per range of a graph of 2^31 edges or more; for a graph that several processes "
         "share, two calls around the exchange of rows", _not_parts, _run_parts),
    Path("eager", "one autograd function on the fused operators", _not_eager, _run_eager),
    Path("plain", "plain tensor operations, which forward mode and torch.onnx.export know", _not_plain,
         _run_plain),
    Path("traced", "one operator on a plan that is found when the compiled code runs", _not_traced,
         _run_traced),
    Path("dispatched", "the fused operators through torch's dispatcher and torch.func",
         lambda inputs: None, _run_dispatched),
)  # fmt: skip


# ---- eager calls without options, before the checks of the public functions -----------------------------
#
# On a small graph the host's work per call is most of what a step costs, and checking every argument is
# most of that work. So only what the operators cannot see is looked at here. A call that is not of this kind,
# or that the operators refuse, is left to the checks, which know all options and name what is wrong.

# dtype -> accumulation type, in which the terms of additive attention may also be.
_ACC = {dtype: acc_type(dtype) for dtype in DTYPES}
_NUMBERS = float, int
# The most kinds of calls that a graph stores; then all are dropped. Only a program that changes a number,
# such as the dropout, at every step has so many.
_MOST_KINDS = 256


def _kind(
    kinds: dict[tuple, Any], score: str, numbers: tuple, dtype: torch.dtype, train: bool, need_dst: bool
) -> FunctionKind:
    slope, scale, dropout_p = numbers
    given = {"x", "seed" if dropout_p else "x", *SCORE_TABLE[score].inputs}
    constant = LayerNumbers(
        SCORES[score],
        0,
        0,
        0,
        slope,
        scale,
        dropout_p,
        dtype,
        unwritten=False,
        train=train,
        need_dst=need_dst,
    )
    if len(kinds) >= _MOST_KINDS:
        kinds.clear()
    kind = FunctionKind(constant, tuple(name in given for name in LayerTensors._fields))
    kinds[score, numbers, dtype, train, need_dst] = kind
    return kind


def are_none(options: dict[str, Any]) -> bool:
    """Whether none of the options is given."""
    for x in options.values():  # noqa: SIM110 - a comprehension is a frame of its own before Python 3.12
        if x is not None:
            return False
    return True


def unchecked(
    graph: Any,
    score: str,
    value: Any,
    others: tuple[Any, ...],
    *,
    slope: Any = 1.0,
    scale: Any = 1.0,
    dropout_p: Any,
) -> Tensor | None:
    """out, computed without checking the arguments, or None if they must be checked. others: the tensors
    besides the value, in the order of `LayerTensors`, of which that of the destinations is the last.

    Calls that :func:`dfgnn.explain` watches are left to `attend`, which reports them.
    """
    if type(graph) is not Graph or type(value) not in PLAIN_TYPES:
        return None
    if recorder is not None or not is_eager(value):
        return None
    # The library of the CPU and that of CUDA number their graphs independently. On tensors of another device,
    # the graph's number could stand for another graph.
    if value.dim() != 3 or value.device != graph._device:
        return None
    dtype, (_, heads, dim) = value.dtype, value.shape
    if dtype not in _ACC or not heads or not dim or value.is_cuda and dim * dtype.itemsize % 16:
        return None
    if value.is_meta:  # without a kernel that would refuse it
        return None
    acc, train, additive = _ACC[dtype], torch.is_grad_enabled(), score == "additive"
    backward = train and value.requires_grad
    for x in others:
        if type(x) not in PLAIN_TYPES or not (x.dtype is dtype or additive and x.dtype is acc):
            return None
        backward = backward or (train and x.requires_grad)
    if not additive and others[-1].shape[2:] != value.shape[2:]:
        return None
    if scale is None:
        scale = 1 / math.sqrt(dim)
    for number in (slope, scale, dropout_p):
        if type(number) not in _NUMBERS:
            return None
    tensors = value, *others
    if dropout_p:
        if not 0 < dropout_p <= 1:
            return None
        tensors = *tensors, draw_seed(graph._device)
    edges = dropout_p > 0 or needs_rows(score, slope)
    planner = graph._planner
    handle = planner.handle(heads, dim, dtype, PLAN_LAYERS[score], "auto", edges, backward)
    need_dst = additive and backward and others[-1].requires_grad
    key = score, (slope, scale, dropout_p), dtype, backward, need_dst
    kind = planner.kinds.get(key) or _kind(planner.kinds, *key)
    try:
        return Layer.at_once(kind, graph, handle, *tensors) if backward else run(kind, handle, tensors)[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the operator refuses an argument; the caller's checks name it in their error
        return None
