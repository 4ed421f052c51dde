"""Attention while a compiler records: operators of a graph's stand-in (`_edges`) that run those of eager
calls.

What compiled code calls is ``..._attend_run``, ``..._gat_run`` and their gradients: they look the graph up
and hand its number on to the operators of csrc/torch/attention.h. They return lists, of what is wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import ops as _ops
from ..runtime import torch_internals as internals
from ..runtime.arguments import (
    NEED_BIAS,
    NEED_DST,
    NEED_FEAT,
    NEED_GATE,
    NEED_WEIGHT,
    PLAN_LAYERS,
    SCORE_OF_NUMBER,
    SCORES,
    Numbers,
    Tensors,
)
from . import sink as _sink
from . import traced_graph as _edges
from .operators import SAVED_ALIGN, EagerCall
from .operators import attend_backward_op as _attend_backward
from .operators import attend_op as _attend
from .operators import gat_backward_op as _gat_backward
from .operators import gat_op as _gat
from .traced_graph import EdgeList

_BelowAutograd = internals.BelowAutograd

# Arguments of all operators: a stand-in as in `_edges`; whether there are edge tensors, dropout or returned
# attention; the schedule. Those of `attend` go on with the number of heads, 0 where tensors have a dimension
# for them; two gradients, if it is the backward operator; the score; and tensors.
_NUM_GRAPH = len(_edges._Edges._fields) + 2
_TENSORS = slice(_NUM_GRAPH + 2, _NUM_GRAPH + 2 + len(Tensors._fields))
_TENSORS_BACK = slice(_TENSORS.start + 2, _TENSORS.stop + 2)


def _schema(op, more: str = "") -> str:
    """An eager operator's, with a stand-in in place of a graph's number."""
    arguments = str(op._schema).partition("(int graph, ")[2].rpartition(") -> ")[0]
    return f"({_edges._EDGES}, bool edges, str schedule, {arguments}{more}) -> Tensor[]"


def _handle(given, layer: str, heads: int, value: Tensor, train: bool):
    """A graph and the handle of its plan. given: `_NUM_GRAPH` arguments; heads: of rows without a dimension
    for them, else 0."""
    *edges, any_edges, schedule = given
    graph = _edges.find(*edges)
    if heads:
        dim = value.shape[1] // heads
    else:
        _, heads, dim = value.shape
    return graph, graph._planner.handle(heads, dim, value.dtype, layer, schedule, any_edges, train)


def _kept_bytes(num_dst, heads, dim, dtype: torch.dtype, positive: bool, num_src=None):
    """The size of what forward keeps in one tensor. num_src: with the score terms of an additive layer."""
    acc = _ops.acc_type(dtype).itemsize
    sizes = [num_dst * heads * 2 * acc]
    if positive:
        sizes += [num_dst * heads * acc, num_dst * heads * dim * dtype.itemsize]
    if num_src is not None:
        sizes += [num_src * heads * acc, num_dst * heads * acc]
    return sum(-(-size // SAVED_ALIGN) * SAVED_ALIGN for size in sizes)


def _forward(*args) -> list[Tensor]:
    """out, what backward takes beside it, and the attention if asked for."""
    *given, sink, train = args
    heads, score, value = given[_NUM_GRAPH : _NUM_GRAPH + 3]
    graph, handle = found = _handle(
        given[:_NUM_GRAPH], PLAN_LAYERS[SCORE_OF_NUMBER[score]], heads, value, train
    )
    try:
        with _BelowAutograd():
            out, kept, attention = _attend(handle.number, *given[_NUM_GRAPH:])
    except RuntimeError as error:
        raise _ops.typed(error) from None
    if sink is not None:
        numbers = Numbers(*given[_TENSORS.stop : _TENSORS.stop + len(Numbers._fields)])
        call = EagerCall(graph, handle, SCORE_OF_NUMBER[score], numbers, attention is not None, given[-1])
        _sink.include(call, sink, value, out, kept, attention)
    if train and not _edges.is_made(*args[:2]):
        kept._dfgnn_graph = found  # backward need not look for it, and it lives until then
    return [out, kept] if attention is None else [out, kept, _in_use(graph.edge_mask, attention)]


def _forward_fake(*args) -> list[Tensor]:
    t, num_dst, num_edges, heads = Tensors(*args[_TENSORS]), args[3], args[5], args[_NUM_GRAPH]
    return_attention, save_positive = args[-4:-2]
    value = t.value
    shape = (num_dst, value.shape[1]) if heads else (num_dst, *value.shape[1:])
    heads, dim = (heads, value.shape[1] // heads) if heads else value.shape[1:]
    size = _kept_bytes(num_dst, heads, dim, value.dtype, save_positive)
    results = [value.new_empty(shape), value.new_empty(size, dtype=torch.uint8)]
    acc = _ops.acc_type(value.dtype)
    return [*results, value.new_empty(num_edges, heads, dtype=acc)] if return_attention else results


def _backward(*args) -> list[Tensor]:
    """The gradients of value, src and those that are wanted, and then that of the sink if there is one."""
    args, sink = args[:-1], args[-1]
    kept = args[_TENSORS_BACK.stop + 1]
    found = getattr(kept, "_dfgnn_graph", None)
    if found is None:
        heads, _, _, score, value = args[_NUM_GRAPH : _NUM_GRAPH + 5]
        found = _handle(args[:_NUM_GRAPH], PLAN_LAYERS[SCORE_OF_NUMBER[score]], heads, value, True)
    graph, handle = found
    try:
        with _BelowAutograd():
            results = _attend_backward(handle.number, *args[_NUM_GRAPH:])
    except RuntimeError as error:
        raise _ops.typed(error) from None
    if sink is not None:
        results, grad_sink = _grad_sink(sink, found, args, results)
    of_nodes, of_edges = results[:3], results[4:]
    mask = graph.edge_mask
    if mask is not None:
        of_edges = tuple(x if x is None else _in_use(mask, x) for x in of_edges)
    attn = None if results[3] is None else results[3].sum(0)  # of partial sums
    given = [x for x, wanted in zip((*of_nodes, attn, *of_edges), _wanted(args)) if wanted]
    return given if sink is None else [*given, grad_sink]


def _grad_sink(sink: Tensor, found, args, results):
    """`_sink.gradients`, from the arguments of the backward operator."""
    grads, score = tuple(args[_NUM_GRAPH + 1 : _NUM_GRAPH + 3]), args[_NUM_GRAPH + 3]
    out, kept, positive, attention, *numbers, _ = args[_TENSORS_BACK.stop :]
    graph, handle = found
    call = EagerCall(
        graph, handle, SCORE_OF_NUMBER[score], Numbers(*numbers), attention is not None, positive
    )
    return _sink.gradients(call, sink, Tensors(*args[_TENSORS_BACK]), grads, out, kept, attention, results)


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
    args, sink = args[:-1], args[-1]
    t, num_edges, heads = (
        Tensors(*args[_TENSORS_BACK]),
        args[5],
        args[_NUM_GRAPH] or args[_NUM_GRAPH + 4].shape[1],
    )
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


def _family(prefix: str, *tags) -> Any:
    run = _edges._define(
        f"{prefix}_attend_run", _schema(_attend, ", Tensor? sink, bool train"), _forward, _forward_fake, tags
    )
    schema = _schema(_attend_backward, ", Tensor? sink")
    run_backward = _edges._define(f"{prefix}_attend_backward", schema, _backward, _backward_fake, tags)

    def setup(ctx, inputs, output):
        out, kept, *attention = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(kept)
        *ctx.graph, ctx.score = inputs[: _TENSORS.start]
        *ctx.numbers, _, ctx.positive, sink, _ = inputs[_TENSORS.stop :]
        ctx.save_for_backward(sink, *inputs[_TENSORS], *output)

    def backward(ctx, grad_out, grad_kept, grad_attention=None):
        count = len(Tensors._fields)
        sink, *saved = ctx.saved_tensors
        tensors, (out, kept, *attention) = Tensors(*saved[:count]), saved[count:]
        need = Tensors(*ctx.needs_input_grad[_TENSORS])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        args = (
            *ctx.graph, grad_out, grad_attention, ctx.score, *tensors, out, kept, ctx.positive,
            None if grad_attention is None else attention[0], *ctx.numbers, _ops.need_bits(need), sink,
        )  # fmt: skip
        found = iter(run_backward(*args))
        results = [next(found) if wanted else None for wanted in _wanted(args[:-1])]
        grad_sink = None if sink is None else next(found)
        if results[3] is not None:
            results[3] = results[3].view(1, *tensors.attn.shape)
        gradients = _ops.gradients(need, tensors, grad_out, results)
        if need.out_bias:
            gradients = (*gradients[:-1], gradients[-1].view(tensors.out_bias.shape))
        return *(None,) * _TENSORS.start, *gradients, *(None,) * (len(ctx.numbers) + 2), grad_sink, None

    return _edges._differentiable(f"{prefix}_attend", run, setup, backward, once=True)


# ---- additive attention with its score terms ---------------------------------------------------------------


def _gat_forward(*args) -> list[Tensor]:
    """out [num_dst, H * D], and what backward takes beside it."""
    feat, attn_src, train = args[_NUM_GRAPH], args[_NUM_GRAPH + 1], args[-1]
    found = _handle(args[:_NUM_GRAPH], "gat", attn_src.shape[-2], feat, train)
    try:
        with _BelowAutograd():
            out, kept = _gat(found[1].number, *args[_NUM_GRAPH:])
    except RuntimeError as error:
        raise _ops.typed(error) from None
    if train and not _edges.is_made(*args[:2]):
        kept._dfgnn_graph = found
    return [out, kept]


def _gat_forward_fake(*args) -> list[Tensor]:
    num_src, num_dst = args[2:4]
    feat, attn_src, train = args[_NUM_GRAPH], args[_NUM_GRAPH + 1], args[-1]
    heads = attn_src.shape[-2]  # of vectors that may be shorter than the heads of feat
    size = _kept_bytes(num_dst, heads, feat.shape[1] // heads, feat.dtype, train, num_src)
    return [feat.new_empty(num_dst, feat.shape[1]), feat.new_empty(size, dtype=torch.uint8)]


def _gat_run_backward(*args) -> list[Tensor]:
    """The gradients of feat, both vectors, and the bias if there is one."""
    feat, attn_src, *_, kept, _, _ = args[_NUM_GRAPH + 1 :]
    found = getattr(kept, "_dfgnn_graph", None)
    if found is None:
        found = _handle(args[:_NUM_GRAPH], "gat", attn_src.shape[-2], feat, True)
    try:
        with _BelowAutograd():
            *results, bias = _gat_backward(found[1].number, *args[_NUM_GRAPH:])
    except RuntimeError as error:
        raise _ops.typed(error) from None
    return results if bias is None else [*results, bias]


def _gat_backward_fake(*args) -> list[Tensor]:
    feat, attn_src, attn_dst, _, bias, *_ = args[_NUM_GRAPH + 1 :]
    return [x.new_empty(x.shape) for x in (feat, attn_src, attn_dst, bias) if x is not None]


def _gat_family(prefix: str, *tags) -> Any:
    run = _edges._define(f"{prefix}_gat_run", _schema(_gat), _gat_forward, _gat_forward_fake, tags)
    schema = _schema(_gat_backward)
    run_backward = _edges._define(
        f"{prefix}_gat_backward", schema, _gat_run_backward, _gat_backward_fake, tags
    )

    def setup(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.graph, (*tensors, slope, dropout_p, _) = inputs[:_NUM_GRAPH], inputs[_NUM_GRAPH:]
        ctx.numbers = slope, dropout_p
        ctx.save_for_backward(*tensors, *output)

    def backward(ctx, grad, _):
        found = run_backward(*ctx.graph, grad, *ctx.saved_tensors, *ctx.numbers)
        bias = found[3] if len(found) > 3 else None
        return *(None,) * _NUM_GRAPH, *found[:3], None, bias, None, None, None

    return _edges._differentiable(f"{prefix}_gat", run, setup, backward, once=True)


# ---- the way in --------------------------------------------------------------------------------------------

# Graphs wait for the device where they are made, so that no CUDA graph can have the first ones in it. A Graph
# that was used before waits for nothing, and for another number torch's CUDA graphs are others.
_UNSAFE = torch.Tag.cudagraph_unsafe
_OF_EDGES, _GAT_OF_EDGES = _family("edge", _UNSAFE), _gat_family("edge", _UNSAFE)
_OF_GRAPHS, _GAT_OF_GRAPHS = _family("graph"), _gat_family("graph")


def attention(
    edges: EdgeList,
    score: str,
    tensors: tuple,
    numbers: Numbers,
    return_attention: bool,
    save_positive: bool,
    train: bool,
    schedule: str,
    heads: int = 0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(out, attention or None). heads: of tensors of nodes [N, H * D], which out then is, too; 0 where they
    are [N, H, D]."""
    t = Tensors(*tensors)
    of_edges = t.edge_bias, t.edge_gate, t.edge_mask, t.edge_weight, t.edge_feat
    sized = return_attention or any(x is not None for x in of_edges)
    any_edges = sized or t.seed is not None
    op = _OF_EDGES if edges.given is not None else _OF_GRAPHS
    if sink is not None:
        numbers = _sink.with_flag(numbers)
    out, _, *more = op(
        *_edges._arguments(edges, sized), any_edges, schedule, heads, SCORES[score], *tensors, *numbers,
        return_attention, save_positive, sink, train,
    )  # fmt: skip
    return out, more[0] if more else None


def gat(
    edges: EdgeList,
    feat: Tensor,
    attn_src: Tensor,
    attn_dst: Tensor,
    seed: Tensor | None,
    out_bias: Tensor | None,
    negative_slope: float,
    dropout_p: float,
    train: bool,
) -> Tensor:
    """Additive attention of features [num_src, H * D] with vectors [.., H, D]: [num_dst, H * D]."""
    op = _GAT_OF_EDGES if edges.given is not None else _GAT_OF_GRAPHS
    out, _ = op(
        *_edges._arguments(edges, False), seed is not None, "auto", feat, attn_src, attn_dst, seed, out_bias,
        negative_slope, dropout_p, train,
    )  # fmt: skip
    return out
