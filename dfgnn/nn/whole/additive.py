"""An additive layer as one autograd function (`_layers`): projection, score terms, attention and bias; with
attributes of edges, their score terms, too."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ...graph import Graph
from ...runtime import ops as _ops
from ...runtime import torch_internals as internals
from ...runtime.arguments import NEED_BIAS, NEED_DST, SCORES, GraphHandle, ops
from ...runtime.eager import EagerFunction, called_directly, keep_aside, taken_back
from . import pair as _layers

_linear = internals.linear
_gat, _gat_backward = ops.gat.default, ops.gat_backward.default
_attend, _attend_backward = ops.attend.default, ops.attend_backward.default
_score_terms, _score_terms_backward = ops.score_terms.default, ops.score_terms_backward.default
_ADDITIVE = SCORES["additive"]
_NONE = None, None, None, None


class Edges(NamedTuple):
    """Attributes of edges that enter into the scores: attn . (weight attr) per head."""

    attr: Tensor  # [E, F_e]
    weight: Tensor  # [H * D, F_e], in attr's dtype
    attn: Tensor  # [.., H, D], likewise


class _Gat(NamedTuple):
    """What is no tensor of an additive layer."""

    graph: Graph
    handle: GraphHandle
    heads: int
    size: int  # of a head
    padding: int
    slope: float
    dropout_p: float
    dtype: torch.dtype  # of the result
    is_out: bool  # the result is what the operator gives, bias and all

    def run(self, feat, inputs, train: bool):
        """out [num_dst, H * padded size], with the bias where `is_out`; and what backward takes of it."""
        _, _, attn_src, attn_dst, bias, seed = inputs[:6]
        if not self.is_out:
            bias = None
        if len(inputs) == 6:
            out, kept = _gat(
                self.handle.number, feat, attn_src, attn_dst, seed, bias, self.slope, self.dropout_p, train
            )
            return out, (kept,)
        attr, weight, attn = inputs[6:]
        src, dst = _score_terms(feat, attn_src, attn_dst, self.graph.num_dst)
        folded = torch.bmm(attn.view(self.heads, 1, -1), weight.view(self.heads, self.size, -1)).squeeze(1)
        scores = attr.mm(folded.t())
        out, kept, _ = _attend(
            self.handle.number, self.heads, _ADDITIVE, feat, src, dst, None, scores, *_NONE, seed, bias,
            self.slope, 1.0, self.dropout_p, 0, False, train,
        )  # fmt: skip
        return out, (kept, src, dst, scores, folded)

    def run_backward(self, grad, inputs, feat, kept, out, need):
        """Of `run`: the gradients of feat, the vectors, the bias, and of each of the edges' tensors."""
        _, _, attn_src, attn_dst, bias, seed = inputs[:6]
        if not self.is_out:
            bias = None
        if len(inputs) == 6:
            return _gat_backward(
                self.handle.number, grad, feat, attn_src, attn_dst, seed, bias, out, *kept, self.slope,
                self.dropout_p,
            )  # fmt: skip
        attr, weight, attn = inputs[6:]
        need_edges = need[6:]
        kept, src, dst, scores, folded = kept
        value, src, dst, _, scores, *_ = _attend_backward(
            self.handle.number, self.heads, grad, None, _ADDITIVE, feat, src, dst, None, scores, *_NONE, seed,
            bias, out, kept, True, None, self.slope, 1.0, self.dropout_p, 0,
            NEED_DST | (NEED_BIAS if any(need_edges) else 0),
        )  # fmt: skip
        grad_feat, *vectors = _score_terms_backward(src, dst, feat, attn_src, attn_dst)
        grad_bias = grad.sum(0) if bias is not None and need[4] else None
        of_edges: list[Tensor | None] = [None] * 3
        if any(need_edges):
            scores = _ops.as_type(scores, attr.dtype)
        if need_edges[0]:
            of_edges[0] = scores.mm(folded)
        if any(need_edges[1:]):
            grad_folded = scores.t().mm(attr)
            of_edges[1] = attn.view(self.heads, -1, 1).mul(grad_folded.unsqueeze(1)).flatten(0, 1)
            by_head = weight.view(self.heads, self.size, -1)
            of_edges[2] = torch.bmm(by_head, grad_folded.unsqueeze(2)).view(attn.shape)
        return grad_feat.add_(value), *vectors, grad_bias, *of_edges

    def forward(self, inputs, train: bool):
        """The result, what the operator gave, and what backward takes beside them and the inputs: the weight
        as it was used if that is another one, features, and what `run` kept."""
        x, weight = inputs[:2]
        used = self.projection(weight, x.dtype)
        feat = _linear(x, used)
        out, kept = self.run(feat, inputs, train)
        result = out
        if not self.is_out:
            result = _layers.cut(out, self.heads, self.size, self.padding, inputs[4], self.dtype)
        return result, out, (None if used is weight else used, feat, *kept)

    def backward(self, grad, inputs, made, out, need):
        """The gradients of the inputs."""
        x, weight, _, _, bias, *_ = inputs
        used, feat, *kept = made
        outer = grad
        if not self.is_out:
            grad = _ops.as_type(grad, x.dtype)
            if self.padding:
                grad = _layers.pad_columns(grad, self.heads, self.size, self.padding)
        grad_feat, grad_src, grad_dst, grad_bias, *edges = self.run_backward(
            grad, inputs, feat, kept, out, need
        )
        grad_weight = None
        if need[1]:
            grad_weight = _layers.product(grad_feat.t(), x, weight.dtype)
            if self.padding:
                grad_weight = _layers.cut_rows(grad_weight, self.size, self.padding)
        if not self.is_out and need[4]:
            grad_bias = outer.sum(0, dtype=bias.dtype)
        return (
            grad_feat.mm(weight if used is None else used) if need[0] else None,
            grad_weight,
            grad_src if need[2] else None,
            grad_dst if need[3] else None,
            grad_bias if need[4] else None,
            None,
            *edges,
        )

    def projection(self, weight, dtype):
        """The weight in this dtype, such that what it gives is padded."""
        weight = _ops.as_type(weight, dtype)
        return _layers.pad_rows(weight, self.size, self.padding) if self.padding else weight

    def formula(self, x, weight, attn_src, attn_dst, bias, seed, *edges):
        heads = self.heads, self.size
        edge_bias = None
        if edges:
            e = Edges(*edges)
            edge_bias = (F.linear(e.attr, e.weight).unflatten(1, heads) * e.attn.view(heads)).sum(-1)
        feat = F.linear(x, weight.to(x.dtype)).unflatten(1, heads)
        terms = [(feat * attn.view(heads)).sum(-1) for attn in (attn_src, attn_dst)]
        out = functional.gat_attention(
            self.graph, feat, terms[0], terms[1][: self.graph.num_dst], negative_slope=self.slope,
            dropout_p=self.dropout_p, _seed=seed, edge_bias=edge_bias,
        ).flatten(1)  # fmt: skip
        return (out if bias is None else out + bias).to(self.dtype)


@called_directly
class _GatLayer(EagerFunction):
    @staticmethod
    def forward(ctx, call, *inputs):
        result, out, made = _ops.call(call.forward, inputs, True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Unless it is the result, nobody else sees `out`.
        last = keep_aside(ctx, out) if call.is_out else (out,)
        ctx.num_made = len(made)
        ctx.save_for_backward(*inputs, *made, *last)
        return result

    @staticmethod
    def backward(ctx, grad):
        call, saved, need = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if grad is None:
            return (None,) * (1 + len(need))
        count, end = len(need), len(need) + ctx.num_made
        inputs, made, last = saved[:count], saved[count:end], saved[end:]
        if torch.is_grad_enabled():  # create_graph
            return None, *_layers.derived(call.formula, grad, inputs, need)
        if call.is_out:
            last, _ = taken_back(ctx, last)
        out = _ops.call(call.run, made[1], inputs, True)[0] if last is None else last[0]
        return None, *_ops.call(call.backward, grad, inputs, made, out, need)


def gat_layer(
    graph: Graph,
    x: Tensor,
    weight: Tensor,
    attn_src: Tensor,
    attn_dst: Tensor,
    bias: Tensor | None,
    *,
    negative_slope: float,
    dropout_p: float,
    dtype: torch.dtype | None = None,
    edges: Edges | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """GAT: features [num_src, F], of which the first num_dst rows are the destinations', projected, attended
    to and biased: [num_dst, H * D].

    Of checked arguments: `can_fuse`, weight [H * D, F]; attn_src, attn_dst [.., H, D] both in x's dtype or
    float32; bias [H * D], in either. dtype: of the result; default x's. edges: in x's dtype or float32. seed:
    of dropout; default: a new one.
    """
    heads, size = attn_src.shape[-2:]
    seed = _layers.seed_of(graph, dropout_p) if seed is None else seed
    inputs = x, weight, attn_src, attn_dst, bias, seed, *(edges or ())
    train = torch.is_grad_enabled() and (
        weight.requires_grad or any([t is not None and t.requires_grad for t in inputs])
    )
    padding, dtype = _layers.padding_of(x, size), x.dtype if dtype is None else dtype
    is_out = not padding and dtype is x.dtype and (bias is None or bias.dtype is dtype)
    of_edges = dropout_p > 0 or edges is not None
    handle = graph._planner.handle(heads, size + padding, x.dtype, "gat", "auto", of_edges, train)
    call = _Gat(
        graph, handle, heads, size, padding, float(negative_slope), float(dropout_p), dtype, is_out
    )  # fmt: skip
    return _GatLayer.at_once(call, *inputs) if train else _ops.call(call.forward, inputs, False)[0]
