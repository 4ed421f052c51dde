"""The attention operators with their derivatives, for each of the paths in `paths`.

An eager call is a `Layer` if it has no options, else an `Attention` of an `EagerCall` (`operators`), or of a
`DispatchedCall` while a dispatch mode is active. torch.export, and callers that use the operators directly,
get the formula that is registered here. Under torch.func, `TransformedAttention` and `TransformedBackward` do
the same in a slower form that transforms see through. Second derivatives, sinks and forward mode are in
`plain`.

`Layer` is the autograd function of whole layers and of attention alone, whose operators compute them in one
call forward and one backward (csrc/torch/layer.h). The launches around a layer's attention cost a small graph
more than the attention does, and most of that is the work of Python, autograd and the dispatcher per
operation. So the operators do all of it below autograd, and this calls them in as few Python frames as there
can be."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, library

from ..runtime import batches as _batches
from ..runtime import ops as _ops
from ..runtime import rules
from ..runtime import torch_internals as internals
from ..runtime.arguments import (
    NO_EDGES,
    SCORE_OF_NUMBER,
    SCORE_TABLE,
    SCORES,
    Backward,
    BackwardResults,
    Forward,
    ForwardResults,
    GraphArgs,
    GraphHandle,
    LayerTensors,
    Numbers,
    Tensors,
    ops,
)
from ..runtime.eager import (
    EagerFunction,
    called_directly,
    restored_results,
    retains_graph,
    save_results,
    top_hooks,
)
from ..runtime.ops import typed
from . import plain, second_order
from .operators import DispatchedCall, EagerCall, backward_op, forward_op

_NUM_TENSORS = len(Tensors._fields)
_NONE = (None,) * _NUM_TENSORS


# ---- eager calls -----------------------------------------------------------------------------------------


@called_directly
class Attention(EagerFunction):
    """Computes (out, attention or None) of an eager call, whose softmax may have a sink.

    The results may be modified in place, although backward reads them: they are stored outside of autograd,
    which refuses tensors that were modified, and are computed again if they were. Under hooks for saved
    tensors (activation checkpointing, offloading) they are saved like the rest, so that the hooks see them.
    """

    @staticmethod
    def forward(ctx, call, sink, *tensors):
        """tensors: the first fields of `Tensors`, up to the last that is not None."""
        out, attention, saved = call.run(tensors) if sink is None else plain.with_sink(call, sink, tensors)
        ctx.call = call
        if attention is not None:
            ctx.set_materialize_grads(False)  # a missing gradient is None, not a tensor of zeros
        ctx.save_for_backward(sink, *tensors, *saved, *save_results(ctx, out, attention))
        return out, attention

    @staticmethod
    def backward(ctx, grad_out, grad_attention):
        call, (sink, *tensors), (_, need_sink, *need) = ctx.call, ctx.saved_tensors, ctx.needs_input_grad
        count = len(need)
        missing = _NONE[count:]
        results, saved = restored_results(ctx, tensors[count:])
        tensors, need = Tensors(*tensors[:count], *missing), Tensors(*need, *missing)
        if results is None:  # the caller has modified one of them in place: compute both again
            with torch.no_grad():
                out, attention, _ = (
                    call.run(tensors) if sink is None else plain.with_sink(call, sink, tensors)
                )
        else:
            out, attention = results
        if grad_attention is None:
            attention = None
        # Of the attention alone the gradients of the bias and, unless scores are made of them, of the values
        # are None, as in plain PyTorch. Scores without terms of sources are made of values.
        of_value = grad_out is not None or "src" not in SCORE_TABLE[call.score].inputs
        if grad_out is None:
            grad_out, need = torch.zeros_like(out), need._replace(out_bias=None)
        grads = grad_out, grad_attention
        if torch.is_grad_enabled():  # backward was called with create_graph
            if sink is not None:
                found = plain.recorded_sink_gradients(call, sink, tensors, (need_sink, *need), grads)
                return None, *found[: count + 1]
            found = recorded_gradients(call, grads, tensors, out, attention, saved, need)[:count]
            return None, None, found[0] if of_value else None, *found[1:]
        found = call.run_backward(grads, tensors, out, attention, saved, _ops.need_bits(need))
        grad_sink = None
        if sink is not None:
            found, grad_sink = plain.eager_sink_gradients(
                call, sink, tensors, grads, out, saved[0], attention, found
            )
        found = _ops.gradients(need, tensors, grad_out, found)[:count]
        return None, grad_sink, found[0] if of_value else None, *found[1:]


def recorded_gradients(call, grads, tensors, out, attention, saved, need) -> tuple[Tensor | None, ...]:
    """The gradients that backward returns, with derivatives of their own. need: `Tensors` of bools."""
    call, saved = call.dispatched(tensors, saved)
    wide = tensors
    if call.score == "additive":  # whose terms may have 16 bits
        acc = _ops.acc_type(tensors.value.dtype)
        src, dst = (x if x is None else _ops.as_type(x, acc) for x in (tensors.src, tensors.dst))
        wide = tensors._replace(src=src, dst=dst)
    found = TransformedBackward.apply(call, _ops.need_bits(need), *grads, *wide, out, *saved, attention)
    found = _ops.gradients(need, wide, grads[0], found)
    if wide is tensors:
        return found
    value, *terms = found[:3]
    terms = [x if x is None else _ops.as_type(x, like.dtype) for x, like in zip(terms, tensors[1:3])]
    return value, *terms, *found[3:]


# ---- calls under torch.func, and first derivatives that are differentiated again --------------------------


class TransformedAttention(torch.autograd.Function):
    """Computes all results of the forward operator."""

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
        grads, tensors, saved = _backward_arguments(ctx, grad_out, grad_attention)
        need = Tensors(*ctx.needs_input_grad[1:])
        results = TransformedBackward.apply(ctx.call, _ops.need_bits(need), *grads, *tensors, *saved)
        return None, *_ops.gradients(need, tensors, grads[0], results)

    @staticmethod
    def vmap(info, in_dims, call, *tensors):
        return _vmap(TransformedAttention, info.batch_size, call, (), Tensors._fields, tensors, in_dims[1:])


def _backward_arguments(ctx, grad_out, grad_attention):
    """The arguments of `DispatchedCall.backward`: gradients, tensors, and the forward operator's results."""
    saved = ctx.saved_tensors
    tensors, r = Tensors(*saved[:_NUM_TENSORS]), ForwardResults(*saved[_NUM_TENSORS:])
    if grad_out is None:
        grad_out = torch.zeros_like(r.out)
    if not ctx.call.save_positive:
        r = r._replace(positive=None, positive_mass=None)
    if grad_attention is None:
        r = r._replace(attention=None)
    return (grad_out, grad_attention), tensors, r


_BACKWARD_TENSORS = (*Backward._fields[:2], *Tensors._fields, *ForwardResults._fields)


class TransformedBackward(torch.autograd.Function):
    """Computes the results of the backward operator, which have derivatives of their own."""

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
        # The forward operator's results, which are arguments of the backward operator, get no gradients here:
        # the second-order formulas treat them as functions of the other arguments. Of these results the
        # formulas read only stats, so that only stats is saved.
        ctx.save_for_backward(*tensors[: 2 + _NUM_TENSORS], tensors[_BACKWARD_TENSORS.index("stats")])

    @staticmethod
    def backward(ctx, *grads):
        call = ctx.call
        primals = dict(zip((*_BACKWARD_TENSORS[: 2 + _NUM_TENSORS], "stats"), ctx.saved_tensors))
        found = second_order.backward_of_backward(
            call.graph, SCORES[call.score], call.numbers, primals, BackwardResults(*grads)._asdict(),
            [name for name, needed in zip(_BACKWARD_TENSORS, ctx.needs_input_grad[2:]) if needed],
        )  # fmt: skip
        return None, None, *(found.get(name) for name in _BACKWARD_TENSORS)

    @staticmethod
    def vmap(info, in_dims, call, need, *tensors):
        return _vmap(
            TransformedBackward, info.batch_size, call, (need,), _BACKWARD_TENSORS, tensors, in_dims[2:]
        )


def _vmap(function, batch: int, call: DispatchedCall, more: tuple, names, tensors, dims):
    """Runs an autograd function under vmap, with the batch folded into the heads. With one dropout seed for
    the whole batch it runs once per batch element instead, because the dropout mask depends on the index of
    the head. ``more``: the arguments between ``call`` and the tensors."""
    named = dict(zip(names, zip(tensors, dims)))
    seed, of_each = named["seed"]
    if seed is not None and of_each is not None:
        # vmap with randomness="different" gives each element a seed. The first one serves all elements,
        # because their dropout masks differ by the index of the head.
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
    """Whether a result was not asked for: the operators return an empty vector for it. All other results have
    a dimension of heads."""
    return result.dim() == 1


def _fold(name: str, x: Tensor | None, dim: int | None, batch: int, heads: int) -> Tensor | None:
    """x with its batch dimension ``dim`` folded into its heads. An edge tensor without a batch dimension and
    with one column stays as it is: that column serves all heads."""
    if x is None or name == "seed":
        return x
    if dim is None and name in ("edge_gate", "edge_mask", "edge_weight") and x.shape[1] == 1:
        return x
    return _batches.fold(x, dim, 0 if name in ("attn", "out_bias") else 1, batch, heads)


# ---- the gradients of the operators for callers of torch.ops, and torch.export ----------------------------


def _setup(ctx, inputs, output):
    a = Forward(*inputs)
    graph_args, numbers = (
        kind(*(getattr(a, name) for name in kind._fields)) for kind in (GraphArgs, Numbers)
    )
    score = SCORE_OF_NUMBER[a.score]
    call = DispatchedCall(None, graph_args, score, numbers, a.return_attention, a.save_positive)
    TransformedAttention.setup_context(ctx, (call, *inputs[1 : 1 + _NUM_TENSORS]), output)


def _formula(ctx, grad_out, grad_stats, grad_positive, grad_mass, grad_attention):
    arguments = _backward_arguments(ctx, grad_out, grad_attention)
    need = Tensors(*ctx.needs_input_grad[1 : 1 + _NUM_TENSORS])
    # Under create_graph autograd records the backward operator, whose derivative `_no_second_order` refuses.
    results = ctx.call.backward(*arguments, _ops.need_bits(need), recorded=torch.is_grad_enabled())
    (grad_out, _), tensors, _ = arguments
    rest = (None,) * (len(Forward._fields) - 1 - _NUM_TENSORS)
    return None, *_ops.gradients(need, tensors, grad_out, results), *rest


def _no_second_order(ctx, *grads):
    raise NotImplementedError(
        "torch.ops.dfgnn.attention_backward is not differentiable; dfgnn.functional is, any number of times, "
        "where it is not compiled"
    )


library.register_autograd(forward_op, _formula, setup_context=_setup)
library.register_autograd(backward_op, _no_second_order)


# ---- whole layers -----------------------------------------------------------------------------------------


_BelowAutograd = internals.BelowAutograd
_forward = internals.without_frame(ops.layer.default)
_backward = internals.without_frame(ops.layer_backward.default)
# Which of an autograd function's arguments require gradients -> the bits by which the operator knows them,
# and what puts None and the operator's results in the order of the arguments.
_WANTED: dict[tuple[bool, ...], tuple[int, Any]] = {}
_NOT_TENSORS = 3  # the arguments of `Layer` before the tensors


class Kind:
    """What calls of one kind have in common: `LayerNumbers`, and which of `LayerTensors` they have, as
    bools."""

    __slots__ = ("given", "numbers", "packed")

    def __init__(self, numbers: Any, given: tuple[bool, ...]):
        self.numbers, self.given = numbers, given
        self.packed = ops.layer_call.default(*numbers, *given)

    def gradients(self, graph, handle, tensors, need, grad, out, kept) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors, with derivatives of their own. need: a bool per tensor; out, kept:
        what forward has returned."""
        raise NotImplementedError

    def named(self, tensors: Any) -> Any:
        """`LayerTensors` with None for those that calls do not have."""
        rest = iter(tensors)
        return LayerTensors(*(next(rest) if given else None for given in self.given))


class FunctionKind(Kind):
    """Calls of a function without options: attention of rows [N, H, D]."""

    __slots__ = ()

    def gradients(self, graph, handle, tensors, need, grad, out, kept):
        n = self.numbers
        call = EagerCall(graph, handle, SCORE_OF_NUMBER[n.score], Numbers(*n[4:7], 0), False, n.need_dst)

        def named(values) -> Tensors:
            t = self.named(values)
            return Tensors(t.x, t.src, t.dst, t.attn, *NO_EDGES[:-1], t.seed, None)

        found = recorded_gradients(call, (grad, None), named(tensors), out, None, (kept,), named(need))
        found = Tensors(*found)
        by_name = found._asdict() | {"x": found.value}
        return tuple(by_name[name] for name, given in zip(LayerTensors._fields, self.given) if given)


def run(kind: Kind, handle: GraphHandle, tensors):
    """(result, what backward reads besides it and the tensors, whether backward reads the result). tensors:
    those that calls of this kind have."""
    try:
        with _BelowAutograd():
            return _forward(handle.number, kind.packed, tensors)
    except RuntimeError as error:
        raise typed(error) from None


def _wanted(need: tuple[bool, ...]) -> tuple[int, Any]:
    wanted = [k for k, needed in enumerate(need) if needed]
    places = [wanted.index(k) + 1 if needed else 0 for k, needed in enumerate(need)]
    found = _WANTED[need] = sum(1 << (k - _NOT_TENSORS) for k in wanted), itemgetter(*places)
    return found


@called_directly
class Layer(EagerFunction):
    """A layer, or a function without options. kind, tensors: as for `run`. handle: it keeps what belongs to
    the graph's number in the library."""

    @staticmethod
    def forward(ctx, kind, graph, handle, *tensors):
        try:
            with _BelowAutograd():
                result, kept, reads_result = _forward(handle.number, kind.packed, tensors)
        except RuntimeError as error:
            raise typed(error) from None
        ctx.call, ctx.output, ctx.version, out = (kind, graph, handle), None, None, None
        if reads_result:
            # As `save_results` and, in backward, `restored_results` do it, without their frames.
            ctx.version = result._version
            if top_hooks(True) is None:
                ctx.output = result.detach()
            else:
                out = result
        # What ctx.set_materialize_grads(False) and ctx.save_for_backward set, without their frames.
        ctx.materialize_grads, ctx.to_save = False, (*tensors, kept, out)
        return result

    @staticmethod
    def backward(ctx, grad):
        need = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(need)
        (kind, graph, handle), out = ctx.call, ctx.output
        *tensors, kept, saved = ctx.saved_tensors
        if out is None:
            out = saved
        elif not retains_graph():
            ctx.output = None
        if ctx.version is not None and out._version != ctx.version:
            out, *_ = run(kind, handle, tensors)
        if torch.is_grad_enabled():  # backward was called with create_graph
            wanted = need[_NOT_TENSORS:]
            found = kind.gradients(graph, handle, tensors, wanted, grad, out, kept)
            return *(None,) * _NOT_TENSORS, *found
        bits, in_order = _WANTED.get(need) or _wanted(need)
        try:
            with _BelowAutograd():
                found = _backward(handle.number, kind.packed, tensors, grad, out, kept, bits)
        except RuntimeError as error:
            raise typed(error) from None
        return in_order((None, *found))


@called_directly
class SeveralOperators(EagerFunction):
    """Attention with edge terms, and layers whose edges have gates or types: several operators, which one
    node of the autograd graph calls below autograd.

    What is computed is an object with these methods (see `edge_projection`, and `gated` and `typed` in
    nn/fused):

    - ``forward(tensors)``: (result, made, out). made: the other tensors that backward takes; out: the output
      of the attention operator as backward reads it, which may be the result itself, or None.
    - ``rerun(tensors, made)``: ``out`` again, called if ``out`` is the result and the caller modified it.
    - ``backward(tensors, grad, made, out, need)``: the gradients of the tensors. need: a bool per tensor.
    - ``formula(*tensors)``: the result in plain operations, for second derivatives.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        result, made, out = _ops.call(call.forward, tensors)
        ctx.call, ctx.reads_result = call, out is result
        ctx.set_materialize_grads(False)
        # The caller may modify the result.
        ctx.save_for_backward(*tensors, *made, *(save_results(ctx, out) if out is result else (out,)))
        return result

    @staticmethod
    def backward(ctx, grad):
        call, need = ctx.call, ctx.needs_input_grad[1:]
        count = len(need)
        if grad is None:
            return (None,) * (1 + count)
        saved = ctx.saved_tensors
        results, saved = restored_results(ctx, saved) if ctx.reads_result else (saved[-1:], saved[:-1])
        tensors, made = saved[:count], saved[count:]
        if torch.is_grad_enabled():  # backward was called with create_graph
            return None, *rules.recorded_gradients(call.formula, tensors, need, grad)
        (out,) = (_ops.call(call.rerun, tensors, made),) if results is None else results
        return None, *_ops.call(call.backward, tensors, grad, made, out, need)
