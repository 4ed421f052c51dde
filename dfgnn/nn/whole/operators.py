"""The engine's operators as the fused layers call them: the only place here that knows their arguments'
order.

``call`` is the layer's call, of which ``handle`` (a graph and its plan), ``heads``, ``score`` and ``numbers``
are read. All are called below autograd (`runtime.ops.call`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...runtime.arguments import SCORES, Tensors, ops
from .spec import LayerTensors

_attend, _attend_backward = ops.attend.default, ops.attend_backward.default
_gat, _gat_backward = ops.gat.default, ops.gat_backward.default

score_terms, score_terms_backward = ops.score_terms.default, ops.score_terms_backward.default


def attend(call: Any, t: Tensors, positive: bool) -> tuple[Tensor, Tensor]:
    """The result of rows [N, H * D], and what backward takes of it. positive: see `attend_backward`."""
    out, saved, _ = _attend(
        call.handle.number, call.heads, SCORES[call.score], *t, *call.numbers, False, positive
    )  # fmt: skip
    return out, saved


def attend_backward(
    call: Any, grad: Tensor, t: Tensors, out: Tensor, saved: Tensor, positive: bool, need: int
) -> tuple[Any, ...]:
    """The gradients of value, src, dst, attn (partial sums), edge_bias, edge_gate, edge_weight and edge_feat.

    positive: forward saved the sums over edges with z > 0, from which the gradient of additive scores' dst is
    made. need: bits of `arguments.NEED_DST` and others.
    """
    return _attend_backward(
        call.handle.number, call.heads, grad, None, SCORES[call.score], *t, out, saved, positive, None,
        *call.numbers, need,
    )  # fmt: skip


def gat(call: Any, feat: Tensor, t: LayerTensors) -> tuple[Tensor, Tensor]:
    """Additive attention with its score terms: the result, and what backward takes of it."""
    bias, (slope, _, dropout_p, _) = t.out_bias if call.is_out else None, call.numbers
    return _gat(call.handle.number, feat, t.attn, t.attn_dst, t.seed, bias, slope, dropout_p, call.train)


def gat_backward(call: Any, grad: Tensor, feat: Tensor, t: LayerTensors, out: Tensor, saved: Tensor):
    """The gradients of feat, both vectors, and the bias or None."""
    bias, (slope, _, dropout_p, _) = t.out_bias if call.is_out else None, call.numbers
    return _gat_backward(
        call.handle.number, grad, feat, t.attn, t.attn_dst, t.seed, bias, out, saved, slope, dropout_p
    )
