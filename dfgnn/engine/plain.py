"""What the attention's kernels do not compute: attention in plain operations, and sinks.

**Plain operations.** They have E x H x D temporaries. The kernels compute an attention and its first and
second derivatives. Third derivatives, second ones under vmap, and forward mode use these operations: torch
differentiates them any number of times, in either mode. A cotangent is the gradient that comes into a
backward pass: here that of a result of the backward operator.

**A sink**, as an option of every attention: a score per head in every softmax, which brings no value.

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

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..runtime import rules, tracing
from ..runtime.arguments import (
    BIAS_AFTER,
    FEAT_IN_KEY,
    FEAT_IN_VALUE,
    PART_OF_ROWS,
    SCORE_OF_NUMBER,
    SCORE_TABLE,
    SCORES,
    Numbers,
    Tensors,
)
from ..runtime.attention_options import EdgeTerm
from ..runtime.ops import acc_type
from . import operators

# The names of the backward operator's results -> the tensors whose gradients the results are.
GRADIENTS = {
    "grad_value": "value",
    "grad_src": "src",
    "grad_dst": "dst",
    "grad_attn": "attn",
    "grad_bias": "edge_bias",
    "grad_gate": "edge_gate",
    "grad_weight": "edge_weight",
    "grad_feat": "edge_feat",
}


_reference: Any = reference  # as Any, because type checkers would refuse `Ends` for a Graph


class Ends(NamedTuple):
    """The part of a graph that `reference` reads."""

    edge_index: Tensor  # [2, E], in the user's edge order
    num_dst: int

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]


def ends_of(graph, reverse: bool = False, all_in_use: bool = True) -> Ends:
    """The graph as `Ends`, from destinations to sources with ``reverse``. all_in_use: raise for a graph of
    fixed capacity, because the caller cannot leave out its unused edges."""
    if all_in_use and graph.edge_mask is not None:
        raise NotImplementedError(
            "a graph of fixed capacity has first derivatives only, and no reference functions"
        )
    with tracing.untransformed():
        edge_index = graph.edge_index
        return Ends(edge_index.flip(0), graph.num_src) if reverse else Ends(edge_index, graph.num_dst)


def attention(
    ends: Ends, score: int, numbers: Numbers, tensors: Tensors, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, attention) of the forward operator. sink: [H] acc, or None."""
    dtype = tensors.value.dtype
    acc = acc_type(dtype)
    t = Tensors._make(x if x is None or not x.is_floating_point() else x.to(acc) for x in tensors)
    if score not in SCORE_OF_NUMBER:
        raise ValueError(f"score: expected a number of {SCORES}, got {score}")
    known = SCORE_TABLE[SCORE_OF_NUMBER[score]]
    feat, bias, flags = t.edge_feat, t.edge_bias, numbers.flags
    late = bool(flags & BIAS_AFTER)
    edge = EdgeTerm(
        feat if flags & FEAT_IN_KEY else None, feat if flags & FEAT_IN_VALUE else None, None if late else bias
    )
    options = dict(
        negative_slope=numbers.negative_slope, edge=edge, bias=bias if late else None, gate=t.edge_gate,
        mask=t.edge_mask, weight=t.edge_weight, out_bias=t.out_bias, dropout_p=numbers.dropout_p,
        return_attention=True, sink=sink, generator=t.seed,
        **({"scale": numbers.scale} if known.scaled else {}),
    )  # fmt: skip
    out, weights = getattr(_reference, known.reference)(
        ends, *(getattr(t, name) for name in known.inputs), **options
    )
    return out.to(dtype), weights


def plain_backward_of_backward(
    ends: Ends,
    score: int,
    numbers: Numbers,
    primals: dict[str, Any],
    grads: dict[str, Tensor | None],
) -> dict[str, Tensor]:
    """Gradients, by name, of the backward operator's arguments: grad_out, grad_attention and the tensors.

    primals: these arguments, each a tensor or None. grads: the cotangents of its results, None where there is
    none.
    """
    acc = acc_type(primals["value"].dtype)
    heads = primals["value"].shape[1]
    constants = {n: x for n, x in primals.items() if x is None or not x.is_floating_point()}
    primals = {n: x for n, x in primals.items() if n not in constants}
    given = {}
    for name, grad in grads.items():
        if grad is None or GRADIENTS[name] not in primals:
            continue
        if name == "grad_attn":
            # The operator returns partial sums of grad_attn, which are added up. So each of them has the
            # cotangent of the sum, and one is taken.
            if len(grad) == 0:
                continue
            grad = grad[0]
        given[GRADIENTS[name]] = grad.to(acc)
    if not given:
        return {}

    def first(primals):
        merged = {**constants, **primals}
        grad_out, grad_attention = merged.pop("grad_out"), merged.pop("grad_attention")
        # The operator returns these gradients per head, also for a tensor with one column for all heads.
        for name in ("edge_gate", "edge_weight"):
            if merged[name] is not None:
                merged[name] = merged[name].expand(-1, heads)

        def forward(wanted):
            out, weights = attention(ends, score, numbers, Tensors(**{**merged, **wanted}))
            return out.to(acc), weights

        inputs = {n: merged[n].to(acc) for n in given}
        (out, weights), pull = torch.func.vjp(forward, inputs)
        if grad_attention is None:
            grad_attention = torch.zeros_like(weights)
        return pull((grad_out.to(out.dtype), grad_attention.to(weights.dtype)))[0]

    _, pull = torch.func.vjp(first, primals)  # type: ignore[misc]
    return pull(given)[0]


def sddmm(ends: Ends, rows: Tensor, feat: Tensor) -> Tensor:
    acc = acc_type(feat.dtype)
    return _reference.sddmm(ends, rows.to(acc), feat.to(acc)).to(feat.dtype)


def spmm(ends: Ends, weight: Tensor, feat: Tensor) -> Tensor:
    acc = acc_type(feat.dtype)
    return _reference.spmm(ends, weight.to(acc), feat.to(acc)).to(feat.dtype)


# ---- a sink -----------------------------------------------------------------------------------------------


def sink_numbers(numbers: Numbers) -> Numbers:
    """The numbers as the operators take them with a sink."""
    return numbers._replace(flags=numbers.flags | PART_OF_ROWS)


def with_sink(call: Any, sink: Tensor, tensors: Any) -> tuple[Tensor, Tensor | None, tuple[Tensor]]:
    """Does what `operators.EagerCall.run` does, with a sink."""
    out, attention, (saved,) = call.run(tensors)
    include_sink(call, sink, tensors[0], out, saved, attention)
    return out, attention, (saved,)


def sink_factor(sink: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
    """(c, log_sum'), from the max and log_sum in a row's stats: c is the factor by which the sink shrinks the
    row's weights, log_sum' the log_sum with the sink included."""
    top, log_sum = stats.unbind(-1)
    whole = torch.logaddexp(log_sum, sink - top)
    return torch.exp(log_sum - whole), whole


def include_sink(
    call: Any, sink: Tensor, value: Tensor, out: Tensor, saved: Tensor, attention: Tensor | None
) -> None:
    """Changes out, saved and attention, which the forward operator computed without a sink, in place to what
    they are with one. sink: [H], in the accumulation type; saved: what an eager forward saves for backward.

    A row without edges, or whose edges are all masked, has max = inf and log_sum = 0, and keeps them.
    """
    graph = call.graph
    stats, positive, positive_mass = operators.unpacked(saved, value, graph.num_dst, call.save_positive)
    factor, whole = sink_factor(sink, stats)
    stats[..., 1].copy_(whole)
    out.mul_(factor.unsqueeze(-1))
    if positive is not None and positive_mass is not None:  # sums of terms that are proportional to alpha
        positive.mul_(factor.unsqueeze(-1))
        positive_mass.mul_(factor)
    if attention is not None:
        attention.mul_(factor.index_select(0, _destinations(graph)))
        if graph.edge_mask is not None:
            # Kernels do not write the rows of unused edges, but `gradients` adds up all rows.
            attention.masked_fill_(~graph.edge_mask.unsqueeze(1), 0)


def sink_gradients(
    score: str,
    numbers: Numbers,
    sink: Tensor,
    tensors: Tensors,
    grads: tuple[Tensor, Tensor | None],
    made: tuple[Tensor, Tensor, Tensor | None],
    found: tuple,
    at_edges: Callable[[Tensor], Tensor],
) -> tuple[tuple, Tensor]:
    """The backward operator's results with a sink, and the gradient of the sink. made: out, stats and
    attention of forward.  found: the operator's results.  at_edges: gathers rows of destinations for edges.

    The operator computes the gradient of additive attention's alpha_dst from the edges with z > 0 (z: the
    score before the LeakyReLU) alone, because the gradients ds_ij of a row's scores add up to 0. With a sink
    they add up to beta delta, which is added here, times the slope. Where there is a gradient of the
    attention or an edge gate, the operator adds up all ds_ij itself, and nothing is missing.
    """
    (grad_out, grad_attention), (out, stats, attention) = grads, made
    top, log_sum = stats.unbind(-1)
    share = torch.exp(sink - top - log_sum)
    of_row = share * (grad_out.to(share.dtype) * out).sum(-1)
    grad_sink = -of_row.sum(0)
    if grad_attention is not None:
        assert attention is not None
        grad_sink = grad_sink - (at_edges(share) * attention * grad_attention).sum(0)
    elif score == "additive" and found[2] is not None and tensors.edge_gate is None:
        found = (*found[:2], found[2] + numbers.negative_slope * of_row, *found[3:])
    return found, grad_sink


def eager_sink_gradients(call: Any, sink: Tensor, tensors: Tensors, grads, out, saved, attention, found):
    """`sink_gradients` of an eager call."""
    graph = call.graph
    stats, *_ = operators.unpacked(saved, tensors.value, graph.num_dst, False)
    return sink_gradients(
        call.score, call.numbers, sink, tensors, grads, (out, stats, attention), found,
        lambda x: x.index_select(0, _destinations(graph)),
    )  # fmt: skip


def recorded_sink_gradients(
    call: Any, sink: Tensor, tensors: Tensors, need: tuple, grads: tuple
) -> tuple[Tensor | None, ...]:
    """The gradients of the sink and of the tensors, with derivatives of their own, by plain tensor
    operations. need: which of them are wanted, the sink's first."""
    ends, score = ends_of(call.graph), SCORES[call.score]

    def formula(sink, *tensors):
        return attention(ends, score, call.numbers, Tensors(*tensors), sink)

    return rules.recorded_gradients(formula, (sink, *tensors), need, *grads)


def _destinations(graph: Any) -> Tensor:
    """The destination of each edge, in the user's order."""
    dst = graph.edge_index[1]
    # In a graph of fixed capacity unused edges may have any ids, which must not be out of range as indices.
    return dst if graph.edge_mask is None else dst.clamp(0, max(graph.num_dst - 1, 0))
