"""A sink: a score per head that takes part in every softmax and brings no value.

    alpha_ij = exp(s_ij) / (exp(sink) + sum_k exp(s_ik))

The kernels know nothing of it. To them a row with a sink is a row of which some edges are elsewhere
(`PART_OF_ROWS`), as of a graph that several processes share. With max and log_sum of the row's own edges,

    log_sum' = log(exp(log_sum) + exp(sink - max))      c = exp(log_sum - log_sum')      out' = c out

and backward, which computes alpha of the statistics, is right with log_sum' and out'. What is left is the
share of the sink, beta_i = exp(sink - max_i - log_sum'_i), with delta_i = g_i . out'_i + sum_j a'_ij gamma_ij

    grad_sink = -sum_i beta_i delta_i

All of it is O(N H D), but for attention that is returned, which is scaled edge by edge.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import ops as _ops
from ..runtime.arguments import PART_OF_ROWS, SCORES, Numbers, Tensors
from ..runtime.eager import EagerFunction, called_directly, keep_aside, taken_back
from . import operators, plain


def with_flag(numbers: Numbers) -> Numbers:
    """As the operators take them where there is a sink."""
    return numbers._replace(flags=numbers.flags | PART_OF_ROWS)


def include(
    sink: Tensor,
    graph: Any,
    value: Tensor,
    out: Tensor,
    memory: Tensor,
    attention: Tensor | None,
    has_positive: bool,
) -> None:
    """Gives the sink its share, in place, of what the forward operator gave without. sink: [H] acc.

    A row without mass has max = inf and log_sum = 0, and stays so.
    """
    stats, positive, positive_mass = operators.unpacked(memory, value, graph.num_dst, has_positive)
    top, log_sum = stats.unbind(-1)
    whole = torch.logaddexp(log_sum, sink - top)
    factor = torch.exp(log_sum - whole)
    log_sum.copy_(whole)
    out.mul_(factor.unsqueeze(-1))
    if positive is not None and positive_mass is not None:  # in proportion to alpha
        positive.mul_(factor.unsqueeze(-1))
        positive_mass.mul_(factor)
    if attention is not None:
        attention.mul_(factor.index_select(0, _destinations(graph)))
        if graph.edge_mask is not None:  # what kernels have not written, and backward multiplies
            attention.masked_fill_(~graph.edge_mask.unsqueeze(1), 0)


def gradients(
    sink: Tensor,
    graph: Any,
    score: int,
    numbers: Numbers,
    tensors: Tensors,
    grads: tuple[Tensor, Tensor | None],
    out: Tensor,
    memory: Tensor,
    attention: Tensor | None,
    found: tuple,
) -> tuple[tuple, Tensor]:
    """The backward operator's results, and the gradient of the sink.

    The operator makes the gradient of additive attention's destinations of the edges with z > 0 and of
    sum_j ds_ij = 0. With a sink that sum is beta delta.
    """
    grad_out, grad_attention = grads
    stats, *_ = operators.unpacked(memory, tensors.value, graph.num_dst, False)
    top, log_sum = stats.unbind(-1)
    share = torch.exp(sink - top - log_sum)
    of_row = share * (grad_out.to(share.dtype) * out).sum(-1)
    grad_sink = -of_row.sum(0)
    if grad_attention is not None:
        assert attention is not None
        share_of_edges = share.index_select(0, _destinations(graph))
        grad_sink = grad_sink - (share_of_edges * attention * grad_attention).sum(0)
    elif score == SCORES["additive"] and found[2] is not None and tensors.edge_gate is None:
        found = (*found[:2], found[2] + numbers.negative_slope * of_row, *found[3:])
    return found, grad_sink


def _destinations(graph: Any) -> Tensor:
    """Of each edge, in the user's order."""
    dst = graph.edge_index[1]
    # Of a graph of fixed capacity: what is in no use may be any number.
    return dst if graph.edge_mask is None else dst.clamp(0, max(graph.num_dst - 1, 0))


# ---- eager -----------------------------------------------------------------------------------------------


def attention(call: Any, sink: Tensor, tensors: tuple, backward: bool) -> tuple[Tensor, Any]:
    """(out, attention or None) of an eager call. call: an EagerCall, whose numbers are `with_flag`."""
    if backward:
        return _Attention.at_once(call, sink, *tensors)
    return _run(call, sink, tensors)[:2]


def _run(call, sink: Tensor, tensors: tuple):
    out, attention, (kept,) = call.run(tensors)
    include(sink, call.graph, tensors[0], out, kept, attention, call.save_positive)
    return out, attention, kept


@called_directly
class _Attention(EagerFunction):
    """As `autograd.Attention`; second derivatives are plain tensor operations."""

    @staticmethod
    def forward(ctx, call, sink, *tensors):
        out, attention, kept = _run(call, sink, tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sink, *tensors, kept, *keep_aside(ctx, out, attention))
        return out, attention

    @staticmethod
    def backward(ctx, grad_out, grad_attention):
        call, saved, need = ctx.call, ctx.saved_tensors, ctx.needs_input_grad
        count = len(need) - 2
        missing = (None,) * (len(Tensors._fields) - count)
        sink, given = saved[0], saved[1 : count + 1]
        tensors, wanted = Tensors(*given, *missing), Tensors(*need[2:], *missing)
        results, (kept,) = taken_back(ctx, saved[count + 1 :])
        if torch.is_grad_enabled():  # create_graph
            return None, *_recorded(call, sink, given, need[1:], grad_out, grad_attention)
        if results is None:  # they were modified
            with torch.no_grad():
                results = _run(call, sink, given)[:2]
        out, attention = results
        if grad_attention is None:
            attention = None
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = grad_out, grad_attention
        found = call.run_backward(grads, tensors, out, attention, (kept,), _ops.need_bits(wanted))
        found, grad_sink = gradients(
            sink, call.graph, SCORES[call.score], call.numbers, tensors, grads, out, kept, attention, found
        )  # fmt: skip
        return None, grad_sink, *_ops.gradients(wanted, tensors, grad_out, found)[:count]


def _recorded(call, sink, given, need, grad_out, grad_attention) -> tuple[Tensor | None, ...]:
    """The gradients of the sink and of the tensors, with derivatives of their own."""
    missing = (None,) * (len(Tensors._fields) - len(given))
    # Views: a tensor that was given twice has two gradients here.
    views = [x.view_as(x) if needed else x for x, needed in zip((sink, *given), need)]
    results = plain.attention(
        plain.ends_of(call.graph), SCORES[call.score], call.numbers, Tensors(*views[1:], *missing), views[0]
    )
    pairs = [(x, g) for x, g in zip(results, (grad_out, grad_attention)) if g is not None]
    wanted = [x for x, needed in zip(views, need) if needed]
    outputs, grads = [x for x, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in need)
