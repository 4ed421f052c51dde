"""Attention while a compiler records: C++ operators on a graph's plan, which an operator in Python has found.

Compiled code calls ``planned_attend``, ``planned_gat`` and the operators of their gradients
(csrc/torch/planned.h), in CUDA graphs ``graph_attend`` and so on, which find the plan themselves
(`compiler_graph.Place`). This file has their schemas, their shapes without values, and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime import ops as _ops
from ..runtime.arguments import (
    PLAN_LAYERS,
    SCORE_OF_NUMBER,
    SCORES,
    AttentionInputs,
    GraphArgs,
    Numbers,
    Tensors,
    needs_rows,
)
from ..runtime.rules import Rule, once
from . import compiler_graph, edge_maps, plain
from .compiler_graph import EdgeList, Place, PlanKey, Traced
from .operators import SAVED_ALIGN, attend_backward_op, backward_op, forward_op, gat_backward_op, gat_op

_GRAPH = {*GraphArgs._fields, "graph", "num_dst"}


def _arguments(op) -> str:
    """An operator's arguments other than the graph's."""
    given = str(op._schema).partition("(")[2].rpartition(") -> ")[0].split(", ")
    return ", ".join(x for x in given if x.split()[-1] not in _GRAPH)


def _results(op) -> str:
    return str(op._schema).rpartition(" -> ")[2]


# ---- attention. Tensors of nodes are [N, H, D] if heads is 0, else [N, heads * D] --------------------------


def _forward_fake(plan, num_dst, num_edges, heads, score, value, *args):
    return _ops.forward_fake(num_dst, num_edges, heads, value, *args[-2:])


def _backward_fake(plan, num_dst, num_edges, heads, grad_out, grad_attention, score, *args):
    return _ops.backward_fake(num_edges, heads, score, Tensors(*args[: len(Tensors._fields)]), args[-1])


compiler_graph.define_planned(
    "attend",
    f"int num_heads, {_arguments(forward_op)}",
    "(Tensor out, Tensor stats, Tensor? positive, Tensor? positive_mass, Tensor? attention)",
    _forward_fake,
)
compiler_graph.define_planned(
    "attend_backward",
    f"int num_heads, {_arguments(backward_op)}",
    _results(attend_backward_op),
    _backward_fake,
)


@dataclass(slots=True, eq=False)
class _Attend(Rule):
    """The attention of (sink, *Tensors) at a place. trailing: numbers, return_attention, save_positive."""

    place: Place
    edges: Traced
    heads: int
    score: int
    trailing: tuple

    def forward(self, sink, *tensors):
        found = self.place.call("attend", self.heads, self.score, *tensors, *self.trailing)
        return found if sink is None else self._with_sink(sink, *found)

    def _with_sink(self, sink, out, stats, positive, mass, attention):
        factor, log_sum = plain.sink_factor(sink, stats)
        column = factor.unsqueeze(-1)
        out, stats = _ops.as_type(out * column, out.dtype), torch.stack([stats[..., 0], log_sum], -1)
        if positive is not None:
            positive, mass = _ops.as_type(positive * column, positive.dtype), mass * factor
        return out, stats, positive, mass, None if attention is None else attention * self._at_edges(factor)

    def _at_edges(self, x: Tensor) -> Tensor:
        return edge_maps.rows_of_destinations(self.edges, x)

    def saved(self, tensors, results):
        return *tensors, *results

    @once
    def gradients(self, need, saved, grad_out, grad_stats, grad_positive, grad_mass, grad_attention):
        count = 1 + len(Tensors._fields)
        sink, tensors = saved[0], Tensors(*saved[1:count])
        out, stats, positive, mass, attention = saved[count:]
        numbers, needed = Numbers(*self.trailing[:-2]), Tensors(*need[1:])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if grad_attention is None:
            attention = None
        results = self.place.call(
            "attend_backward", self.heads, grad_out, grad_attention, self.score, *tensors,
            out, stats, positive, mass, attention, *numbers, _ops.need_bits(needed),
        )  # fmt: skip
        grad_sink = None
        if sink is not None:
            score = SCORE_OF_NUMBER[self.score]
            results, grad_sink = plain.sink_gradients(
                score, numbers, sink, tensors, (grad_out, grad_attention), (out, stats, attention), results,
                self._at_edges,
            )  # fmt: skip
        if results[3] is not None:
            results = (*results[:3], results[3].view(1, *tensors.attn.shape), *results[4:])
        gradients = _ops.gradients(needed, tensors, grad_out, results)
        if needed.out_bias:
            gradients = (*gradients[:-1], gradients[-1].view(tensors.out_bias.shape))
        return grad_sink, *gradients


_PLACE = f"{compiler_graph.TRACED}, {compiler_graph.KEY}"
_NUM_KEY = len(PlanKey._fields)


def _run(edges: Traced, *args) -> list[Tensor]:
    key, (heads, score, *rest) = PlanKey(*args[:_NUM_KEY]), args[_NUM_KEY:]
    count = len(Tensors._fields)
    tensors, (*trailing, sink) = rest[:count], rest[count:]
    rule = _Attend(compiler_graph.place_of(edges, key, tensors[0]), edges, heads, score, tuple(trailing))
    out, _, _, _, attention = compiler_graph.by_rule(rule, sink, *tensors)
    return [out] if attention is None else [out, attention]


compiler_graph.define_traced(
    "attend", f"({_PLACE}, int num_heads, {_arguments(forward_op)}, Tensor? sink) -> Tensor[]", _run
)


# ---- additive attention whose operator also computes the score terms from the features --------------------


def _gat_fake(plan, num_dst, num_edges, feat, attn_src, *args):
    # The head size is that of feat, which may be padded.
    heads, acc, train = attn_src.shape[-2], _ops.acc_type(feat.dtype).itemsize, args[-1]
    sizes = [num_dst * heads * 2 * acc, feat.shape[0] * heads * acc, num_dst * heads * acc]
    if train:
        sizes += [num_dst * heads * acc, num_dst * feat.shape[1] * feat.dtype.itemsize]
    kept = sum(-(-size // SAVED_ALIGN) * SAVED_ALIGN for size in sizes)
    return feat.new_empty(num_dst, feat.shape[1]), feat.new_empty(kept, dtype=torch.uint8)


def _gat_backward_fake(plan, num_dst, num_edges, grad_out, *args):
    *learned, _, bias = args[:5]  # feat, attn_src, attn_dst; seed
    made = (x.new_empty(x.shape) for x in learned)
    return *made, None if bias is None else bias.new_empty(bias.shape)


compiler_graph.define_planned("gat", _arguments(gat_op), _results(gat_op), _gat_fake)
compiler_graph.define_planned(
    "gat_backward", _arguments(gat_backward_op), _results(gat_backward_op), _gat_backward_fake
)


@dataclass(slots=True, eq=False)
class _Gat(Rule):
    """Additive attention from features, vectors, seed and bias. numbers: the slope and dropout_p."""

    place: Place
    numbers: tuple
    train: bool

    def forward(self, *tensors):
        return self.place.call("gat", *tensors, *self.numbers, self.train)

    def saved(self, tensors, results):
        return *tensors, *results

    @once
    def gradients(self, need, saved, grad, _):
        *found, bias = self.place.call("gat_backward", grad, *saved, *self.numbers)
        return *found, None, bias


def _run_gat(edges: Traced, *args) -> Tensor:
    key, (*tensors, slope, dropout_p, train) = PlanKey(*args[:_NUM_KEY]), args[_NUM_KEY:]
    rule = _Gat(compiler_graph.place_of(edges, key, tensors[0]), (slope, dropout_p), train)
    return compiler_graph.by_rule(rule, *tensors)[0]


compiler_graph.define_traced(
    "gat", f"({_PLACE}, {_arguments(gat_op)[: -len(', bool train')]}, bool save) -> Tensor", _run_gat
)


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
    if sink is not None:
        numbers = plain.sink_numbers(numbers)
    h, dim = (heads, t.value.shape[1] // heads) if heads else t.value.shape[1:]
    key = PlanKey(h, dim, t.value.dtype, PLAN_LAYERS[score], schedule, any_edges, train)
    out, *more = _ops.operator("traced_attend")(
        *compiler_graph.as_traced(edges, sized), *key, heads, SCORES[score], *t, *numbers, return_attention,
        save_positive, sink,
    )  # fmt: skip
    return out, more[0] if more else None


def gat(
    edges: EdgeList, tensors: tuple[Tensor | None, ...], slope: float, dropout_p: float, train: bool
) -> Tensor:
    """Additive attention [num_dst, H * D] from the features [num_src, H * D], the vectors [.., H, D] of
    sources and of destinations, the seed of dropout and the bias."""
    feat, attn_src = tensors[:2]
    assert feat is not None and attn_src is not None
    heads, any_edges = attn_src.shape[-2], tensors[3] is not None  # dropout needs the ids of edges
    key = PlanKey(heads, feat.shape[1] // heads, feat.dtype, "gat", "auto", any_edges, train)
    return _ops.operator("traced_gat")(
        *compiler_graph.as_traced(edges, False), *key, *tensors, slope, dropout_p, train
    )
