"""Attention with its derivatives: eagerly, compiled, under torch.func and in forward mode.

Eager calls take `_Attention`, with operators of few arguments (`ShortCall`); compiled ones and direct
callers of ``torch.ops.dfgnn`` the formula that is registered here. Under torch.func `_Forward` and
`_Backward` do the same in torch's slower form, which transforms see through. Second derivatives and forward
mode are plain tensor operations (`_plain`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

from ..graph import GraphPart, RangedGraph
from ..runtime import batches as _batches
from ..runtime import ops as _ops
from ..runtime import transforms
from ..runtime.arguments import (
    BIAS_AFTER,
    FEAT_IN_KEY,
    FEAT_IN_VALUE,
    NO_EDGES,
    SCORES,
    Backward,
    BackwardResults,
    EdgeArgs,
    Forward,
    ForwardResults,
    GraphArgs,
    Numbers,
    Tensors,
    ops,
)
from ..runtime.eager import (
    EagerFunction,
    called_directly,
    is_eager,
    keep_aside,
    taken_back,
    transformed,
    transforms_active,
)
from . import plain as _plain
from . import traced as _edge_attention
from . import traced_graph as _edges

_BelowAutograd = torch._C._AutoDispatchBelowAutograd

_attend, _attend_backward = ops.attend.default, ops.attend_backward.default
_forward_op = ops.attention_forward.default
_backward_op = ops.attention_backward.default
LAYERS = {"additive": "gat", "dot": "dot", "additive_v2": "gatv2"}  # as plans name them
_NUM_TENSORS = len(Tensors._fields)
_NONE = (None,) * _NUM_TENSORS


class _Call:
    """The arguments of an attention that are no tensors to differentiate by.

    No tuple, which torch.func would take apart.
    """

    __slots__ = ("graph", "graph_args", "numbers", "return_attention", "save_positive", "score")

    def __init__(self, graph, graph_args, score, numbers, return_attention, save_positive):
        self.graph = graph
        self.graph_args = graph_args
        self.score = score
        self.numbers = numbers
        self.return_attention = return_attention
        self.save_positive = save_positive

    def forward(self, tensors):
        """ForwardResults, as a plain tuple; recorded by nothing but a compiler."""
        return _ops.call(
            _forward_op, SCORES[self.score], *tensors, *self.graph_args, self.graph.num_dst, *self.numbers,
            self.return_attention, self.save_positive,
        )  # fmt: skip

    def run(self, tensors):
        """out, attention, and as a tuple what backward takes beside them."""
        out, stats, positive, positive_mass, attention = self.forward(tensors)
        if not self.save_positive:
            positive = positive_mass = None
        return out, attention if self.return_attention else None, (stats, positive, positive_mass)

    def run_backward(self, grads, tensors, out, attention, kept, need: int):
        return self.backward(grads, tensors, (out, *kept, attention), need)

    def differentiable(self, tensors, kept):
        """The call, and what it kept, as `_Backward` takes them."""
        return self, kept

    def of_heads(self, tensors: dict[str, Tensor | None]) -> _Call:
        """This call with tensors of another number of heads."""
        edge = EdgeArgs(*(tensors[name] for name in EdgeArgs._fields))
        backward = self.graph_args.rev_indices is not None
        with transforms.untransformed():
            args = _graph_args(
                self.graph, self.score, tensors["value"], edge, self.return_attention, backward, "auto"
            )
        return _Call(self.graph, args, self.score, self.numbers, self.return_attention, self.save_positive)

    def backward(self, grads, tensors, saved, need: int):
        """BackwardResults, as a plain tuple. saved: out, stats, positive, positive_mass, attention."""
        return _ops.call(
            _backward_op, *grads, SCORES[self.score], *tensors, *saved, *self.graph_args, *self.numbers, need
        )


class ShortCall(_Call):
    """The same by the operators of eager calls, which know the graph by a number (csrc/torch/planned.h).

    graph_args: a GraphHandle.
    """

    __slots__ = ()

    def run(self, tensors):
        numbers = self.numbers
        try:
            with _BelowAutograd():
                out, kept, attention = _attend(
                    self.graph_args.number, 0, SCORES[self.score], *tensors, *_NONE[len(tensors) :], *numbers,
                    self.return_attention, self.save_positive,
                )  # fmt: skip
        except RuntimeError as error:
            raise _ops.typed(error) from None
        return out, attention, (kept,)

    def run_backward(self, grads, tensors, out, attention, kept, need: int):
        try:
            with _BelowAutograd():
                return _attend_backward(
                    self.graph_args.number, 0, *grads, SCORES[self.score], *tensors, out, *kept,
                    self.save_positive, attention, *self.numbers, need,
                )  # fmt: skip
        except RuntimeError as error:
            raise _ops.typed(error) from None

    def differentiable(self, tensors, kept):
        args = self.graph_args.args
        call = _Call(self.graph, args, self.score, self.numbers, self.return_attention, self.save_positive)
        with torch.no_grad():
            return call, call.run(tensors)[2]


# ---- the formula registered with the operators -----------------------------------------------------------


def _register(op, forward, backward_op, graph_fields) -> None:
    """The formula of an operator whose arguments are ``forward``; graph_fields: those that are a graph's."""

    def setup(ctx, inputs, output):
        a, r = forward(*inputs), ForwardResults(*output)
        ctx.set_materialize_grads(False)
        ctx.arguments = a._replace(**dict.fromkeys(Tensors._fields))  # tensors are saved, not kept here
        ctx.save_for_backward(
            *(getattr(a, name) for name in Tensors._fields),
            r.out,
            r.stats,
            r.positive if a.save_positive else None,
            r.positive_mass if a.save_positive else None,
            r.attention if a.return_attention else None,
        )
        constant = () if a.return_attention else (r.attention,)
        ctx.mark_non_differentiable(r.stats, r.positive, r.positive_mass, *constant)

    def backward(ctx, grad_out, grad_stats, grad_positive, grad_mass, grad_attention):
        a = ctx.arguments
        tensors, (*saved, attention) = _split(ctx.saved_tensors)
        need = Tensors(*forward(*ctx.needs_input_grad)[1 : _NUM_TENSORS + 1])
        if grad_out is None:
            grad_out = torch.zeros_like(saved[0])
        arguments = (
            grad_out, grad_attention, a.score, *tensors, *saved,
            None if grad_attention is None else attention,
            *(getattr(a, name) for name in (*graph_fields, *Numbers._fields)), _ops.need_bits(need),
        )  # fmt: skip
        # Under create_graph it is recorded, so that a derivative of it is refused.
        results = backward_op(*arguments) if torch.is_grad_enabled() else _ops.call(backward_op, *arguments)
        grads = dict(zip(Tensors._fields, _ops.gradients(need, tensors, grad_out, results)))
        return tuple(grads.get(name) for name in forward._fields)

    library.register_autograd(op, backward, setup_context=setup)
    library.register_autograd(backward_op, _no_second_order)


def _split(saved):
    return Tensors(*saved[:_NUM_TENSORS]), saved[_NUM_TENSORS:]


def _no_second_order(ctx, *grads):
    raise NotImplementedError(
        "torch.ops.dfgnn.attention_backward is not differentiable; dfgnn.functional is, any number of times, "
        "where it is not compiled"
    )


_register(_forward_op, Forward, _backward_op, GraphArgs._fields)


# ---- eager -----------------------------------------------------------------------------------------------


@called_directly
class _Attention(EagerFunction):
    """(out, attention or None) of an eager call.

    Its results may be modified in place, although backward reads them: they are kept aside, where autograd
    does not refuse what was modified, and are computed again if they were. Under hooks for saved tensors
    (activation checkpointing, offloading) they are saved like the rest, so that the hooks see them.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        """tensors: the first of `Tensors`, with all that are not None."""
        out, attention, kept = call.run(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept, *keep_aside(ctx, out, attention))
        return out, attention

    @staticmethod
    def backward(ctx, grad_out, grad_attention):
        call = ctx.call
        saved, need = ctx.saved_tensors, ctx.needs_input_grad[1:]
        count = len(need)
        missing = _NONE[count:]
        tensors, need = Tensors(*saved[:count], *missing), Tensors(*need, *missing)
        results, kept = taken_back(ctx, saved[count:])
        if results is None:  # they were modified
            with torch.no_grad():
                out, attention, _ = call.run(tensors)
        else:
            out, attention = results
        if grad_attention is None:
            attention = None
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = grad_out, grad_attention
        if torch.is_grad_enabled():  # create_graph
            return None, *recorded_gradients(call, grads, tensors, out, attention, kept, need)[:count]
        found = call.run_backward(grads, tensors, out, attention, kept, _ops.need_bits(need))
        return None, *_ops.gradients(need, tensors, grad_out, found)[:count]


def recorded_gradients(call, grads, tensors, out, attention, kept, need) -> tuple[Tensor | None, ...]:
    """Those of backward with derivatives of their own. need: Tensors of bools."""
    call, kept = call.differentiable(tensors, kept)
    found = _Backward.apply(call, _ops.need_bits(need), *grads, *tensors, out, *kept, attention)
    return _ops.gradients(need, tensors, grads[0], found)


# ---- under torch.func, and second derivatives ------------------------------------------------------------


class _Forward(torch.autograd.Function):
    """The forward operator, all of its results."""

    @staticmethod
    def forward(call, *tensors):
        return tuple(call.forward(tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        call, *tensors = inputs
        r = ForwardResults(*output)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*tensors, *output)
        constant = () if call.return_attention else (r.attention,)
        ctx.mark_non_differentiable(r.stats, r.positive, r.positive_mass, *constant)

    @staticmethod
    def backward(ctx, grad_out, grad_stats, grad_positive, grad_mass, grad_attention):
        call = ctx.call
        tensors, (out, stats, positive, positive_mass, attention) = _split(ctx.saved_tensors)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        need = Tensors(*ctx.needs_input_grad[1:])
        results = _Backward.apply(
            call, _ops.need_bits(need), grad_out, grad_attention, *tensors, out, stats,
            *((positive, positive_mass) if call.save_positive else (None, None)),
            None if grad_attention is None else attention,
        )  # fmt: skip
        return None, *_ops.gradients(need, tensors, grad_out, results)

    @staticmethod
    def vmap(info, in_dims, call, *tensors):
        return _vmap(_Forward, info.batch_size, call, (), Tensors._fields, tensors, in_dims[1:])


_BACKWARD_TENSORS = (*Backward._fields[:2], *Tensors._fields, *ForwardResults._fields)


class _Backward(torch.autograd.Function):
    """The backward operator, with derivatives of its own."""

    @staticmethod
    def forward(call, need, *tensors):
        return tuple(
            call.backward(tensors[:2], tensors[2 : 2 + _NUM_TENSORS], tensors[2 + _NUM_TENSORS :], need)
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        call, _, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.call = call
        # out and the statistics are functions of the others, whose derivatives comprise theirs.
        ctx.save_for_backward(*tensors[: 2 + _NUM_TENSORS])

    @staticmethod
    def backward(ctx, *grads):
        call = ctx.call
        primals = dict(zip(_BACKWARD_TENSORS, ctx.saved_tensors))
        found = _plain.backward_of_backward(
            _plain.ends_of(call.graph), SCORES[call.score], call.numbers, primals,
            BackwardResults(*grads)._asdict(),
        )  # fmt: skip
        return None, None, *(found.get(name) for name in _BACKWARD_TENSORS)

    @staticmethod
    def vmap(info, in_dims, call, need, *tensors):
        return _vmap(_Backward, info.batch_size, call, (need,), _BACKWARD_TENSORS, tensors, in_dims[2:])


def _vmap(function, batch: int, call: _Call, more: tuple, names, tensors, dims):
    """A batch is further heads. Where dropout, whose mask depends on the head, is to be the same in all, it
    is done one by one."""
    named = dict(zip(names, zip(tensors, dims)))
    seed, of_each = named["seed"]
    if seed is not None and of_each is not None:  # vmap's randomness="different": as heads have it
        named["seed"] = seed.select(of_each, 0), None
    elif seed is not None:
        each = [
            function.apply(call, *more, *(x if d is None else x.select(d, k) for x, d in zip(tensors, dims)))
            for k in range(batch)
        ]
        results = [xs[0] if _is_empty(xs[0]) else torch.stack(xs) for xs in zip(*each)]
        return tuple(results), tuple(None if _is_empty(x) else 0 for x in each[0])
    value, dim = named["value"]
    heads = value.shape[-2] if dim is None else value.movedim(dim, 0).shape[-2]
    folded = [_fold(name, x, d, batch, heads) for name, (x, d) in named.items()]
    call = call.of_heads(dict(zip(names, folded)))
    results = function.apply(call, *more, *folded)
    return (
        tuple(x if _is_empty(x) else x.unflatten(1, (batch, heads)) for x in results),
        tuple(None if _is_empty(x) else 1 for x in results),
    )


def _is_empty(result: Tensor) -> bool:
    """A result that was not asked for; all others have a dimension of heads."""
    return result.dim() == 1


def _fold(name: str, x: Tensor | None, dim: int | None, batch: int, heads: int) -> Tensor | None:
    if x is None or name == "seed":
        return x
    if dim is None and name in ("edge_gate", "edge_mask", "edge_weight") and x.shape[1] == 1:
        return x
    return _batches.fold(x, dim, 0 if name in ("attn", "out_bias") else 1, batch, heads)


# ---- the way in ------------------------------------------------------------------------------------------


def attention(
    graph,
    score: str,
    value,
    src,
    dst,
    attn,
    edge: EdgeArgs,
    out_bias,
    *,
    slope: float,
    dropout_p: float,
    return_attention: bool,
    schedule: str,
    scale: float = 1.0,
    bias_after: bool = False,
    feat_in_key: bool = False,
    feat_in_value: bool = False,
    more_flags: int = 0,
):
    """(out, attention) of checked arguments; attention means nothing unless asked for."""
    tensors: tuple[Any, ...] = value, src, dst, attn, *edge, out_bias
    flags = BIAS_AFTER * bias_after + FEAT_IN_KEY * feat_in_key + FEAT_IN_VALUE * feat_in_value
    flags |= more_flags
    numbers = Numbers(float(slope), float(scale), float(dropout_p), flags)
    if isinstance(graph, RangedGraph):

        def of_range(graph, x: Tensors):
            return attention(
                graph, score, x.value, x.src, x.dst, x.attn, EdgeArgs(*x[4:-1]), x.out_bias,
                slope=slope, scale=scale, dropout_p=dropout_p, return_attention=return_attention,
                schedule=schedule, bias_after=bias_after, feat_in_key=feat_in_key,
                feat_in_value=feat_in_value,
            )  # fmt: skip

        return graph.by_ranges(of_range, Tensors(*tensors), return_attention)
    if isinstance(graph, GraphPart):
        not_compiled_or_transformed(*tensors)
        return graph.attention(score, Tensors(*tensors), numbers, return_attention, schedule)
    if is_eager(value):
        plain = edge is NO_EDGES and out_bias is None
        if plain:
            tensors = tensors[:4]
        edges = return_attention or not plain and any(x is not None for x in edge)
        backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        positive = (
            backward and score == "additive" and dst is not None and edge.edge_gate is None
            and dst.requires_grad
        )  # fmt: skip
        _, heads, dim = value.shape
        handle = graph._planner.handle(heads, dim, value.dtype, LAYERS[score], schedule, edges, backward)
        call = ShortCall(graph, handle, score, numbers, return_attention, positive)
        return _Attention.at_once(call, *tensors) if backward else call.run(tensors)[:2]
    return _slow_attention(graph, score, tensors, edge, numbers, return_attention, schedule)


def _slow_attention(graph, score, tensors, edge, numbers, return_attention, schedule):
    value, _, dst = tensors[:3]
    compiling = torch.compiler.is_compiling()
    in_transform = False
    if not compiling and (transforms_active() or forward_ad._current_level >= 0):
        in_transform = transformed(*tensors)
    if in_transform and forward_ad._current_level >= 0:
        return _plain.attention(_plain.ends_of(graph), SCORES[score], numbers, Tensors(*tensors))
    # What torch.func differentiates by cannot be seen from within.
    backward = torch.is_grad_enabled() and (
        in_transform or any(x is not None and x.requires_grad for x in tensors)
    )
    with_positive = score == "additive" and backward and dst is not None and edge.edge_gate is None
    graph = _edges.stand_in(graph) if compiling else graph
    if isinstance(graph, _edges.EdgeList):
        out, attention = _edge_attention.attention(
            graph, score, tensors, numbers, return_attention, with_positive and dst.requires_grad, backward,
            schedule,
        )  # fmt: skip
        if not backward:
            return out, attention
        return out.clone(), attention if attention is None else attention.clone()  # see below
    if in_transform:
        with transforms.untransformed():
            args = _graph_args(graph, score, value, edge, return_attention, backward, schedule)
    else:
        args = _graph_args(graph, score, value, edge, return_attention, backward, schedule)
    call = _Call(
        graph,
        args,
        score,
        numbers,
        return_attention,
        with_positive and (in_transform or dst.requires_grad),
    )
    if in_transform:
        out, _, _, _, attention = _Forward.apply(call, *tensors)
        return out.clone(), attention.clone()  # which may be modified, as backward reads the others
    if backward and not compiling:
        return _Attention.apply(call, *tensors)
    out, _, _, _, attention = call.forward(tensors)
    if backward:  # compiled: what is modified must not be what is saved; Inductor drops idle clones
        return out.clone(), attention.clone()
    return out, attention


def not_compiled_or_transformed(*tensors: Tensor | None) -> None:
    """Raises NotImplementedError where a graph that several processes share is not to be had."""
    in_transform = transformed(*tensors)
    if in_transform or torch.compiler.is_compiling():
        what = "torch.func and forward mode" if in_transform else "compilers"
        raise NotImplementedError(f"{what} do not know graphs that several processes share")


def _graph_args(graph, score, value, edge, return_attention, backward, schedule) -> GraphArgs:
    _, num_heads, head_dim = value.shape
    return graph._planner.arguments(
        num_heads,
        head_dim,
        value.dtype,
        LAYERS[score],
        schedule=schedule,
        edges=return_attention or any(x is not None for x in edge),
        backward=backward,
    )
