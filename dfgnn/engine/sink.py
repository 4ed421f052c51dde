"""A sink, as an option of every attention: a score per head in every softmax, which brings no value.

    alpha_ij = exp(s_ij) / (exp(sink) + sum_k exp(s_ik))

The kernels do not know it. To them a row (the edges into destination i) with a sink is a row of which some
edges are elsewhere (`PART_OF_ROWS`), as in a graph that several processes share. The kernels compute out, max
and log_sum of the row's own edges; with the sink they become

    log_sum' = log(exp(log_sum) + exp(sink - max))      c = exp(log_sum - log_sum')      out' = c out

and backward, which computes alpha from the statistics, is right with log_sum' and out'. What remains is the
sink's own weight, beta_i = exp(sink - max_i - log_sum'_i), and its gradient

    grad_sink = -sum_i beta_i delta_i      delta_i = g_i . out'_i + sum_j a'_ij gamma_ij

where g is the gradient of out' and gamma that of the returned attention a', if there is one. All of it is
O(N H D), except that a returned attention is scaled edge by edge.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import rules
from ..runtime.arguments import PART_OF_ROWS, SCORES, Numbers, Tensors
from . import operators, plain


def with_flag(numbers: Numbers) -> Numbers:
    """The numbers as the operators take them with a sink."""
    return numbers._replace(flags=numbers.flags | PART_OF_ROWS)


def run(call: Any, sink: Tensor, tensors: Any) -> tuple[Tensor, Tensor | None, tuple[Tensor]]:
    """As `operators.EagerCall.run`, with a sink."""
    out, attention, (saved,) = call.run(tensors)
    include(call, sink, tensors[0], out, saved, attention)
    return out, attention, (saved,)


def include(
    call: Any, sink: Tensor, value: Tensor, out: Tensor, saved: Tensor, attention: Tensor | None
) -> None:
    """Changes out, saved and attention, which the forward operator computed without a sink, in place to what
    they are with one. sink: [H], in the accumulation type; saved: what an eager forward saves for backward.

    A row without edges, or whose edges are all masked, has max = inf and log_sum = 0, and keeps them.
    """
    graph = call.graph
    stats, positive, positive_mass = operators.unpacked(saved, value, graph.num_dst, call.save_positive)
    top, log_sum = stats.unbind(-1)
    whole = torch.logaddexp(log_sum, sink - top)
    factor = torch.exp(log_sum - whole)
    log_sum.copy_(whole)
    out.mul_(factor.unsqueeze(-1))
    if positive is not None and positive_mass is not None:  # sums of terms that are proportional to alpha
        positive.mul_(factor.unsqueeze(-1))
        positive_mass.mul_(factor)
    if attention is not None:
        attention.mul_(factor.index_select(0, _destinations(graph)))
        if graph.edge_mask is not None:
            # Kernels do not write the rows of unused edges, but `gradients` adds up all rows.
            attention.masked_fill_(~graph.edge_mask.unsqueeze(1), 0)


def gradients(
    call: Any,
    sink: Tensor,
    tensors: Tensors,
    grads: tuple[Tensor, Tensor | None],
    out: Tensor,
    saved: Tensor,
    attention: Tensor | None,
    found: tuple,
) -> tuple[tuple, Tensor]:
    """The backward operator's results with a sink, and the gradient of the sink. found: the operator's
    results.

    The operator computes the gradient of additive attention's alpha_dst from the edges with z > 0 (z: the
    score before the LeakyReLU) alone, because the gradients ds_ij of a row's scores add up to 0. With a sink
    they add up to beta delta, which is added here, times the slope. Where there is a gradient of the
    attention or an edge gate, the operator adds up all ds_ij itself, and nothing is missing.
    """
    (grad_out, grad_attention), graph = grads, call.graph
    stats, *_ = operators.unpacked(saved, tensors.value, graph.num_dst, False)
    top, log_sum = stats.unbind(-1)
    share = torch.exp(sink - top - log_sum)
    of_row = share * (grad_out.to(share.dtype) * out).sum(-1)
    grad_sink = -of_row.sum(0)
    if grad_attention is not None:
        assert attention is not None
        share_of_edges = share.index_select(0, _destinations(graph))
        grad_sink = grad_sink - (share_of_edges * attention * grad_attention).sum(0)
    elif call.score == "additive" and found[2] is not None and tensors.edge_gate is None:
        found = (*found[:2], found[2] + call.numbers.negative_slope * of_row, *found[3:])
    return found, grad_sink


def recorded_gradients(
    call: Any, sink: Tensor, tensors: Tensors, need: tuple, grads: tuple
) -> tuple[Tensor | None, ...]:
    """The gradients of the sink and of the tensors, with derivatives of their own, by plain tensor
    operations. need: which of them are wanted, the sink's first."""
    ends, score = plain.ends_of(call.graph), SCORES[call.score]

    def formula(sink, *tensors):
        return plain.attention(ends, score, call.numbers, Tensors(*tensors), sink)

    return rules.recorded_gradients(formula, (sink, *tensors), need, *grads)


def _destinations(graph: Any) -> Tensor:
    """The destination of each edge, in the user's order."""
    dst = graph.edge_index[1]
    # In a graph of fixed capacity unused edges may have any ids, which must not be out of range as indices.
    return dst if graph.edge_mask is None else dst.clamp(0, max(graph.num_dst - 1, 0))
