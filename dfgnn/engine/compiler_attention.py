"""Attention while a compiler records: operators on a traced graph, which run those of eager calls.

Compiled code calls the operators ``<family>_attend_run`` and ``<family>_gat_run``
(`compiler_graph._FAMILIES`) and the operators of their gradients. These look the graph up and pass its number
to the operators of csrc/torch/attention.h. They return lists of the needed results only, because compiled
code checks each result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..runtime import ops as _ops
from ..runtime.arguments import (
    NEED_BIAS,
    NEED_DST,
    NEED_FEAT,
    NEED_GATE,
    NEED_WEIGHT,
    PLAN_LAYERS,
    SCORE_OF_NUMBER,
    SCORES,
    AttentionInputs,
    Numbers,
    Tensors,
    needs_rows,
)
from ..runtime.rules import Rule
from . import compiler_graph as _edges
from . import plain
from .compiler_graph import EdgeList
from .operators import SAVED_ALIGN, EagerCall
from .operators import attend_backward_op as _attend_backward
from .operators import attend_op as _attend
from .operators import gat_backward_op as _gat_backward
from .operators import gat_op as _gat

# The operators' arguments begin with those of a traced graph (`compiler_graph.Arguments`), a bool (`edges`:
# whether there are edge tensors, dropout or returned attention), and the schedule: _NUM_GRAPH arguments. For
# attention there follow the number of heads (0 if tensors have a dimension for them), the gradients of both
# results (in the backward operator only), the score, and the tensors.
_NUM_GRAPH = len(_edges.Arguments._fields) + 2
_TENSORS = slice(_NUM_GRAPH + 2, _NUM_GRAPH + 2 + len(Tensors._fields))
_TENSORS_BACK = slice(_TENSORS.start + 2, _TENSORS.stop + 2)


def _schema(op, more: str = "") -> str:
    """An eager operator's schema, with a traced graph in place of a graph's number."""
    arguments = str(op._schema).partition("(int graph, ")[2].rpartition(") -> ")[0]
    return f"({_edges.ARGUMENTS}, bool edges, str schedule, {arguments}{more}) -> Tensor[]"


def _handle(given, layer: str, heads: int, value: Tensor, train: bool):
    """A graph and the handle of its plan. given: `_NUM_GRAPH` arguments; heads: the number of heads if rows
    have no dimension for them, else 0."""
    *edges, any_edges, schedule = given
    graph = _edges.find(*edges)
    if heads:
        dim = value.shape[1] // heads
    else:
        _, heads, dim = value.shape
    return graph, graph._planner.handle(heads, dim, value.dtype, layer, schedule, any_edges, train)


def _handle_of(saved: Tensor, given, layer: str, heads: int, value: Tensor):
    """`_handle` in backward. Forward has attached it to what it saved, so that it need not be looked up
    again."""
    found = getattr(saved, "_dfgnn_graph", None)
    return _handle(given, layer, heads, value, True) if found is None else found


def _attach(found, args, saved: Tensor) -> None:
    """Attaches (graph, handle) to ``saved`` for `_handle_of`; not that of a packed structure
    (`in_cuda_graphs`), which must not outlive the operator."""
    if not _edges.is_made(*args[:2]):
        saved._dfgnn_graph = found  # type: ignore[attr-defined]


def _saved_bytes(num_dst, heads, dim, dtype: torch.dtype, positive: bool, num_src=None):
    """The size of the one tensor that forward saves. num_src: given by `gat`, which saves its score terms
    [num_src, H] and [num_dst, H], too."""
    acc = _ops.acc_type(dtype).itemsize
    sizes = [num_dst * heads * 2 * acc]
    if positive:
        sizes += [num_dst * heads * acc, num_dst * heads * dim * dtype.itemsize]
    if num_src is not None:
        sizes += [num_src * heads * acc, num_dst * heads * acc]
    return sum(-(-size // SAVED_ALIGN) * SAVED_ALIGN for size in sizes)


def _forward(*args) -> list[Tensor]:
    """Runs forward. Returns out, what else backward takes, and the attention if asked for."""
    (heads, number), tensors = args[_NUM_GRAPH : _TENSORS.start], args[_TENSORS]
    *numbers, return_attention, positive, sink, train = args[_TENSORS.stop :]
    score = SCORE_OF_NUMBER[number]
    graph, handle = found = _handle(args[:_NUM_GRAPH], PLAN_LAYERS[score], heads, tensors[0], train)
    call = EagerCall(graph, handle, score, Numbers(*numbers), return_attention, positive, heads)
    out, attention, (saved,) = call.run(tensors) if sink is None else plain.with_sink(call, sink, tensors)
    if train:
        _attach(found, args, saved)
    return [out, saved] if attention is None else [out, saved, _edges.in_use(graph.edge_mask, attention)]


def _forward_fake(*args) -> list[Tensor]:
    t, num_dst, num_edges, heads = Tensors(*args[_TENSORS]), args[3], args[5], args[_NUM_GRAPH]
    return_attention, save_positive = args[-4:-2]
    value = t.value
    shape = (num_dst, value.shape[1]) if heads else (num_dst, *value.shape[1:])
    heads, dim = (heads, value.shape[1] // heads) if heads else value.shape[1:]
    size = _saved_bytes(num_dst, heads, dim, value.dtype, save_positive)
    results = [value.new_empty(shape), value.new_empty(size, dtype=torch.uint8)]
    acc = _ops.acc_type(value.dtype)
    return [*results, value.new_empty(num_edges, heads, dtype=acc)] if return_attention else results


def _backward(*args) -> list[Tensor]:
    """Runs backward. Returns the gradients that `_wanted` names, and that of the sink if there is one."""
    heads, grad_out, grad_attention, number = args[_NUM_GRAPH : _TENSORS_BACK.start]
    grads = grad_out, grad_attention
    tensors, score = Tensors(*args[_TENSORS_BACK]), SCORE_OF_NUMBER[number]
    out, saved, positive, attention, *numbers, need, sink = args[_TENSORS_BACK.stop :]
    graph, handle = _handle_of(saved, args[:_NUM_GRAPH], PLAN_LAYERS[score], heads, tensors.value)
    call = EagerCall(graph, handle, score, Numbers(*numbers), attention is not None, positive, heads)
    results = call.run_backward(grads, tensors, out, attention, (saved,), need)
    if sink is not None:
        results, grad_sink = plain.sink_gradients(call, sink, tensors, grads, out, saved, attention, results)
    of_nodes, of_edges = results[:3], results[4:]
    mask = graph.edge_mask
    if mask is not None:
        of_edges = tuple(x if x is None else _edges.in_use(mask, x) for x in of_edges)
    attn = None if results[3] is None else results[3].sum(0)  # the eager operator returns partial sums
    given = [x for x, wanted in zip((*of_nodes, attn, *of_edges), _wanted(args)) if wanted]
    return given if sink is None else [*given, grad_sink]


def _wanted(args) -> tuple[bool, ...]:
    """Which of the eager backward operator's results are returned: the gradients of value, src, dst, attn,
    edge_bias, edge_gate, edge_weight and edge_feat."""
    t, need = Tensors(*args[_TENSORS_BACK]), args[-2]
    return (
        True,
        t.src is not None,
        t.dst is not None and bool(need & NEED_DST),
        t.attn is not None,
        *(bool(need & bit) for bit in (NEED_BIAS, NEED_GATE, NEED_WEIGHT, NEED_FEAT)),
    )


def _backward_fake(*args) -> list[Tensor]:
    t, num_edges, sink = Tensors(*args[_TENSORS_BACK]), args[5], args[-1]
    heads = args[_NUM_GRAPH] or t.value.shape[1]
    acc = _ops.acc_type(t.value.dtype)

    def like(x: Tensor | None) -> Any:
        return None if x is None else x.new_empty(x.shape)

    def of_edges() -> Tensor:
        return t.value.new_empty(num_edges, heads, dtype=acc)

    attn = None if t.attn is None else t.attn.new_empty(heads, t.attn.numel() // heads, dtype=acc)
    of_nodes = like(t.value), like(t.src), like(t.dst), attn
    results = (*of_nodes, of_edges(), of_edges(), of_edges(), like(t.edge_feat))
    given = [x for x, wanted in zip(results, _wanted(args)) if wanted]
    return given if sink is None else [*given, sink.new_empty(sink.shape)]


class _Attend(Rule):
    """The attention of (sink, *Tensors) on a traced graph. leading: the operator's arguments before the
    tensors; trailing: numbers, return_attention, save_positive."""

    __slots__ = "family", "leading", "trailing"

    def __init__(self, family: str, *args):
        self.family, self.leading = family, args[: _TENSORS.start]
        self.trailing = args[_TENSORS.stop : -2]

    def forward(self, sink, *tensors):
        run = _ops.operator(f"{self.family}_attend_run")
        return tuple(run(*self.leading, *tensors, *self.trailing, sink, True))

    def saved(self, tensors, results):
        return *tensors, *results

    @once_differentiable
    def gradients(self, need, saved, grad_out, grad_kept, grad_attention=None):
        count = 1 + len(Tensors._fields)
        sink, tensors = saved[0], Tensors(*saved[1:count])
        out, saved_bytes, *attention = saved[count:]
        *graph, score = self.leading
        *numbers, _, positive = self.trailing
        needed = Tensors(*need[1:])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        args = (
            *graph, grad_out, grad_attention, score, *tensors, out, saved_bytes, positive,
            None if grad_attention is None else attention[0], *numbers, _ops.need_bits(needed), sink,
        )  # fmt: skip
        found = iter(_ops.operator(f"{self.family}_attend_backward")(*args))
        results = [next(found) if wanted else None for wanted in _wanted(args)]
        if results[3] is not None:
            results[3] = results[3].view(1, *tensors.attn.shape)
        gradients = _ops.gradients(needed, tensors, grad_out, results)
        if needed.out_bias:
            gradients = (*gradients[:-1], gradients[-1].view(tensors.out_bias.shape))
        return None if sink is None else next(found), *gradients


_edges.define("attend_backward", _schema(_attend_backward, ", Tensor? sink"), _backward, _backward_fake)
_edges.define_differentiable(
    "attend", _schema(_attend, ", Tensor? sink, bool train"), _forward, _forward_fake,
    lambda family, *args: (_Attend(family, *args), (args[-2], *args[_TENSORS])),
)  # fmt: skip


# ---- additive attention whose operator also computes the score terms from the features --------------------


def _gat_forward(*args) -> list[Tensor]:
    """Runs forward. Returns out [num_dst, H * D], and what else backward takes."""
    feat, attn_src, train = args[_NUM_GRAPH], args[_NUM_GRAPH + 1], args[-1]
    found = _handle(args[:_NUM_GRAPH], "gat", attn_src.shape[-2], feat, train)
    out, saved_bytes = _ops.call(_gat, found[1].number, *args[_NUM_GRAPH:])
    if train:
        _attach(found, args, saved_bytes)
    return [out, saved_bytes]


def _gat_forward_fake(*args) -> list[Tensor]:
    num_src, num_dst = args[2:4]
    feat, attn_src, train = args[_NUM_GRAPH], args[_NUM_GRAPH + 1], args[-1]
    heads = attn_src.shape[-2]  # the head size is that of feat, which may be padded
    size = _saved_bytes(num_dst, heads, feat.shape[1] // heads, feat.dtype, train, num_src)
    return [feat.new_empty(num_dst, feat.shape[1]), feat.new_empty(size, dtype=torch.uint8)]


def _gat_run_backward(*args) -> list[Tensor]:
    """Runs backward. Returns the gradients of feat, of both vectors, and of the bias if there is one."""
    feat, attn_src, *_, saved_bytes, _, _ = args[_NUM_GRAPH + 1 :]
    found = _handle_of(saved_bytes, args[:_NUM_GRAPH], "gat", attn_src.shape[-2], feat)
    *results, bias = _ops.call(_gat_backward, found[1].number, *args[_NUM_GRAPH:])
    return results if bias is None else [*results, bias]


def _gat_backward_fake(*args) -> list[Tensor]:
    feat, attn_src, attn_dst, _, bias, *_ = args[_NUM_GRAPH + 1 :]
    return [x.new_empty(x.shape) for x in (feat, attn_src, attn_dst, bias) if x is not None]


class _Gat(Rule):
    """Additive attention from features, vectors, seed and bias. graph: the operator's arguments before these;
    numbers: the slope and dropout_p."""

    __slots__ = "family", "graph", "numbers"

    def __init__(self, family: str, *args):
        self.family, self.graph, self.numbers = family, args[:_NUM_GRAPH], args[-3:-1]

    def forward(self, *tensors):
        return tuple(_ops.operator(f"{self.family}_gat_run")(*self.graph, *tensors, *self.numbers, True))

    def saved(self, tensors, results):
        return *tensors, *results

    @once_differentiable
    def gradients(self, need, saved, grad, _):
        found = _ops.operator(f"{self.family}_gat_backward")(*self.graph, grad, *saved, *self.numbers)
        return *found[:3], None, found[3] if len(found) > 3 else None


_edges.define("gat_backward", _schema(_gat_backward), _gat_run_backward, _gat_backward_fake)
_edges.define_differentiable(
    "gat", _schema(_gat), _gat_forward, _gat_forward_fake,
    lambda family, *args: (_Gat(family, *args), args[_NUM_GRAPH:-3]),
)  # fmt: skip


# ---- the functions that other modules call, which call these operators ------------------------------------


def attention(
    inputs: AttentionInputs, save_positive: bool, train: bool, heads: int = 0
) -> tuple[Tensor, Tensor | None]:
    """(out, attention or None) on an EdgeList. save_positive, heads: see `EagerCall`; train: whether
    gradients are needed."""
    edges, score, t, numbers, return_attention, schedule, sink, _ = inputs
    of_edges = t.edge_bias, t.edge_gate, t.edge_mask, t.edge_weight, t.edge_feat
    sized = return_attention or any(x is not None for x in of_edges)
    any_edges = sized or t.seed is not None or needs_rows(score, numbers.negative_slope)
    graph = _edges.as_traced(edges, sized)
    if sink is not None:
        numbers = plain.sink_numbers(numbers)
    out, _, *more = graph.operator("attend")(
        *graph.edges, any_edges, schedule, heads, SCORES[score], *t, *numbers,
        return_attention, save_positive, sink, train,
    )  # fmt: skip
    return out, more[0] if more else None


def gat(
    edges: EdgeList, tensors: tuple[Tensor | None, ...], slope: float, dropout_p: float, train: bool
) -> Tensor:
    """Additive attention [num_dst, H * D] from the features [num_src, H * D], the vectors [.., H, D] of
    sources and of destinations, the seed of dropout and the bias."""
    graph = _edges.as_traced(edges, False)
    any_edges = tensors[3] is not None  # dropout needs the ids of edges
    out, _ = graph.operator("gat")(*graph.edges, any_edges, "auto", *tensors, slope, dropout_p, train)
    return out
