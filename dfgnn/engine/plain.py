"""The operators in plain tensor operations, with E x H x D temporaries, and the derivatives that need them.

The kernels compute an attention and its first and second derivatives. Third derivatives, second ones under
vmap, and forward mode use these operations: torch differentiates them any number of times, in either mode.
A cotangent is the gradient that comes into a backward pass: here that of a result of the backward operator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..runtime import transforms
from ..runtime.arguments import (
    BIAS_AFTER,
    FEAT_IN_KEY,
    FEAT_IN_VALUE,
    SCORE_OF_NUMBER,
    SCORE_TABLE,
    SCORES,
    Numbers,
    Tensors,
)
from ..runtime.attention_options import EdgeTerm
from ..runtime.ops import acc_type

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
    with transforms.untransformed():
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


def backward_of_backward(
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
            # The operator returns partial sums of this gradient. All have the cotangent of their total.
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


def blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    key_bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, stats) of `block_attention_forward`, with a score for every pair of a block."""
    acc = acc_type(query.dtype)
    for given, count in ((offsets, query.shape[0]), (key_offsets, key.shape[0])):
        if bool((given.diff() < 0).any()) or given[0] < 0 or given[-1] > count:
            raise RuntimeError("dfgnn::block_attention: offsets: expected numbers that rise, up to the rows")
    empty = query.new_empty(0, dtype=acc)
    out = empty.new_zeros(*query.shape[:2], value.shape[2])
    stats = empty.new_zeros(*query.shape[:2], 2)
    stats[..., 0] = torch.inf
    parts, places = [], []
    rows_of, keys_of = offsets.tolist(), key_offsets.tolist()
    for begin, end, first, last in zip(rows_of, rows_of[1:], keys_of, keys_of[1:]):
        if begin == end or first == last:
            continue
        q, (k, v) = query[begin:end].to(acc), (x[first:last].to(acc) for x in (key, value))
        scores = torch.einsum("nhd,mhd->nhm", q, k) * scale
        if key_bias is not None:
            scores = scores + key_bias[first:last].t()
        top = scores.detach().amax(-1, keepdim=True)
        seen = top > -torch.inf
        weights = torch.where(seen, (scores - torch.where(seen, top, 0)).exp(), 0)
        total = weights.sum(-1, keepdim=True)
        rows = torch.einsum("nhm,mhd->nhd", weights / torch.where(seen, total, 1), v)
        of_rows = torch.cat([torch.where(seen, top, torch.inf), torch.where(seen, total, 1).log()], -1)
        parts.append((rows, of_rows))
        places.append(torch.arange(begin, end))
    if parts:
        place = torch.cat(places)
        out = out.index_copy(0, place, torch.cat([rows for rows, _ in parts]))
        stats = stats.index_copy(0, place, torch.cat([of_rows for _, of_rows in parts]))
    return out.to(query.dtype), stats
