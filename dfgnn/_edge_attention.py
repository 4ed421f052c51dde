"""Attention while a compiler records: operators of a graph's stand-in (`_edges`) that run those of eager
calls.

What compiled code calls is ``..._attend_run`` and its gradient ``..._attend_backward``: they look the graph
up and hand its number on to the operators of csrc/torch/planned.h. They return lists, of what is wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _edges, _ops
from ._arguments import (
    NEED_BIAS,
    NEED_DST,
    NEED_FEAT,
    NEED_GATE,
    NEED_WEIGHT,
    SCORES,
    Numbers,
    Tensors,
    ops,
)
from ._edges import EdgeList

_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_attend, _attend_backward = ops.attend.default, ops.attend_backward.default
_LAYERS = {SCORES["additive"]: "gat", SCORES["dot"]: "dot", SCORES["additive_v2"]: "gatv2"}
_ALIGN = 256  # of the parts of what forward keeps (csrc/torch/checks.h)

# Arguments of both operators: a stand-in as in `_edges`; whether there are edge tensors, dropout or returned
# attention; the schedule. Then, of the backward operator, two gradients; the score; and tensors.
_NUM_GRAPH = len(_edges._Edges._fields) + 2
_TENSORS = slice(_NUM_GRAPH + 1, _NUM_GRAPH + 1 + len(Tensors._fields))
_TENSORS_BACK = slice(_TENSORS.start + 2, _TENSORS.stop + 2)


def _schema(op, more: str = "") -> str:
    """An eager operator's, with a stand-in in place of a graph's number and the number of heads."""
    arguments = str(op._schema).partition("(int graph, int heads, ")[2].rpartition(") -> ")[0]
    return f"({_edges._EDGES}, bool edges, str schedule, {arguments}{more}) -> Tensor[]"


def _handle(given, score: int, value: Tensor, train: bool):
    """A graph and the handle of its plan. given: `_NUM_GRAPH` arguments."""
    *edges, any_edges, schedule = given
    graph = _edges.find(*edges)
    _, heads, dim = value.shape
    layer = _LAYERS[score]
    return graph, graph._planner.handle(heads, dim, value.dtype, layer, schedule, any_edges, train)


def _forward(*args) -> list[Tensor]:
    """out, what backward takes beside it, and the attention if asked for."""
    *given, train = args
    graph, handle = found = _handle(given[:_NUM_GRAPH], given[_NUM_GRAPH], given[_TENSORS.start], train)
    try:
        with _BelowAutograd():
            out, kept, attention = _attend(handle.number, 0, *given[_NUM_GRAPH:])
    except RuntimeError as error:
        raise _ops.typed(error) from None
    if train:
        kept._dfgnn_graph = found  # backward need not look for it, and it lives until then
    return [out, kept] if attention is None else [out, kept, _in_use(graph.edge_mask, attention)]


def _forward_fake(*args) -> list[Tensor]:
    t, (num_dst, num_edges) = Tensors(*args[_TENSORS]), (args[3], args[5])
    return_attention, save_positive, _ = args[-3:]
    value, (_, heads, dim) = t.value, t.value.shape
    acc = _ops.acc_type(value.dtype)
    sizes = [num_dst * heads * 2 * acc.itemsize]
    if save_positive:
        sizes += [num_dst * heads * acc.itemsize, num_dst * heads * dim * value.dtype.itemsize]
    kept = sum((size + _ALIGN - 1) // _ALIGN * _ALIGN for size in sizes)
    results = [value.new_empty(num_dst, heads, dim), value.new_empty(kept, dtype=torch.uint8)]
    return [*results, value.new_empty(num_edges, heads, dtype=acc)] if return_attention else results


def _backward(*args) -> list[Tensor]:
    """The gradients of value, src and those that are wanted."""
    score, (value, *_), kept = args[_NUM_GRAPH + 2], args[_TENSORS_BACK], args[_TENSORS_BACK.stop + 1]
    found = getattr(kept, "_dfgnn_graph", None)
    graph, handle = _handle(args[:_NUM_GRAPH], score, value, True) if found is None else found
    try:
        with _BelowAutograd():
            results = _attend_backward(handle.number, 0, *args[_NUM_GRAPH:])
    except RuntimeError as error:
        raise _ops.typed(error) from None
    of_nodes, of_edges = results[:3], results[4:]
    mask = graph.edge_mask
    if mask is not None:
        of_edges = tuple(x if x is None else _in_use(mask, x) for x in of_edges)
    attn = None if results[3] is None else results[3].sum(0)  # of partial sums
    return [x for x, wanted in zip((*of_nodes, attn, *of_edges), _wanted(args)) if wanted]


def _in_use(mask: Tensor | None, x: Tensor) -> Tensor:
    """A result of edges; in a graph of fixed capacity kernels leave out what is no edge."""
    return x if mask is None else _edges.in_use(mask, x)


def _wanted(args) -> tuple[bool, ...]:
    """Which of the eager operator's results the backward operator gives."""
    t, need = Tensors(*args[_TENSORS_BACK]), args[-1]
    return (
        True,
        t.src is not None,
        t.dst is not None and bool(need & NEED_DST),
        t.attn is not None,
        *(bool(need & bit) for bit in (NEED_BIAS, NEED_GATE, NEED_WEIGHT, NEED_FEAT)),
    )


def _backward_fake(*args) -> list[Tensor]:
    t, num_edges = Tensors(*args[_TENSORS_BACK]), args[5]
    acc = _ops.acc_type(t.value.dtype)

    def like(x: Tensor | None, dtype: torch.dtype | None = None) -> Any:
        return None if x is None else x.new_empty(x.shape, dtype=dtype)

    of_edge = [t.value.new_empty(num_edges, t.value.shape[1], dtype=acc)] * 3
    results = like(t.value), like(t.src), like(t.dst), like(t.attn, acc), *of_edge, like(t.edge_feat)
    return [
        torch.empty_like(x) if k in (5, 6) else x
        for k, (x, wanted) in enumerate(zip(results, _wanted(args)))
        if wanted
    ]


def _family(prefix: str, *tags) -> Any:
    run = _edges._define(
        f"{prefix}_attend_run", _schema(_attend, ", bool train"), _forward, _forward_fake, tags
    )
    schema = _schema(_attend_backward)
    run_backward = _edges._define(f"{prefix}_attend_backward", schema, _backward, _backward_fake, tags)

    def setup(ctx, inputs, output):
        out, kept, *attention = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(kept)
        ctx.graph, ctx.score = inputs[:_NUM_GRAPH], inputs[_NUM_GRAPH]
        *ctx.numbers, _, ctx.positive, _ = inputs[_TENSORS.stop :]
        ctx.save_for_backward(*inputs[_TENSORS], *output)

    def backward(ctx, grad_out, grad_kept, grad_attention=None):
        count = len(Tensors._fields)
        saved = ctx.saved_tensors
        tensors, (out, kept, *attention) = Tensors(*saved[:count]), saved[count:]
        need = Tensors(*ctx.needs_input_grad[_TENSORS])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        args = (
            *ctx.graph, grad_out, grad_attention, ctx.score, *tensors, out, kept, ctx.positive,
            None if grad_attention is None else attention[0], *ctx.numbers, _ops.need_bits(need),
        )  # fmt: skip
        found = iter(run_backward(*args))
        results = [next(found) if wanted else None for wanted in _wanted(args)]
        if results[3] is not None:
            results[3] = results[3].unsqueeze(0)
        none = (None,) * (len(ctx.numbers) + 3)
        return *(None,) * (_NUM_GRAPH + 1), *_ops.gradients(need, tensors, grad_out, results), *none

    return _edges._differentiable(f"{prefix}_attend", run, setup, backward, once=True)


_OF_EDGES = _family("edge", torch.Tag.cudagraph_unsafe)
_OF_GRAPHS = _family("graph")


def attention(
    edges: EdgeList,
    score: str,
    tensors: tuple,
    numbers: Numbers,
    return_attention: bool,
    save_positive: bool,
    train: bool,
    schedule: str,
) -> tuple[Tensor, Tensor | None]:
    """(out, attention or None)."""
    t = Tensors(*tensors)
    sized = return_attention or not (t.edge_bias is None and t.edge_gate is None and t.edge_weight is None)
    any_edges = sized or not (t.edge_mask is None and t.edge_feat is None and t.seed is None)
    op = _OF_EDGES if edges.given is not None else _OF_GRAPHS
    out, _, *more = op(
        *_edges._arguments(edges, sized), any_edges, schedule, SCORES[score], *tensors, *numbers,
        return_attention, save_positive, train,
    )  # fmt: skip
    return out, more[0] if more else None
