"""Whole layers as one autograd function each: projections, score terms, attention and bias.

What a layer launches around its attention costs a small graph more than the attention does, and most of that
is autograd's and the dispatcher's work per operation. So where nothing stands between these operations (no
hook, no replaced module, no compiler or transform: `nn` decides) they are one node here, with the fewest
launches. The results are those of the operations one by one, up to rounding; `_formula` of each says what
these are, and second derivatives go through it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _ops, functional
from ._arguments import NEED_DST, SCORES, GraphHandle, ops
from ._autograd import is_eager, keep_aside, taken_back
from ._checks import DTYPES
from .graph import Graph

__all__ = ["can_fuse", "gat_layer", "pair_layer"]

_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_linear = torch._C._nn.linear
_gat, _gat_backward = ops.gat.default, ops.gat_backward.default
_attend, _attend_backward = ops.attend.default, ops.attend_backward.default


def can_fuse(graph: Any, x: Tensor, weight: Tensor) -> bool:
    """Whether a layer's features and one of its weights are such as these functions take: tensors that are
    computed with at once, of one dtype and on the graph's device. All else has a way of its own, with its own
    errors."""
    return (
        is_eager(x)
        and type(graph) is Graph
        and x.dim() == 2
        and x.shape[1] == weight.shape[1]
        and x.dtype is weight.dtype
        and x.dtype in DTYPES
        and x.layout is torch.strided
        and x.device == graph._device == weight.device
        and (x.device.type == "cpu" or x.device.type == "cuda" and _ops.on_device(x))
    )


def _padding(x: Tensor, size: int) -> int:
    """Columns that CUDA's kernels want behind a head's: they load 16 bytes at a time."""
    return -size % (16 // x.element_size()) if x.is_cuda else 0


def _cut(x: Tensor, heads: int, size: int, padding: int, bias: Tensor | None = None) -> Tensor:
    """Rows of padded heads without the padding, with a bias. A new tensor and no view: autograd refuses
    to have a view modified in place that was made within a function."""
    cut = x.new_empty(len(x), heads * size)
    to, rows = cut.view(-1, heads, size), x.view(-1, heads, size + padding)[..., :size]
    if bias is None:
        to.copy_(rows)
    else:
        torch.add(rows, bias.view(heads, size), out=to)
    return cut


class _Gat(NamedTuple):
    """What is no tensor of an additive layer."""

    graph: Graph
    handle: GraphHandle
    heads: int
    size: int  # of a head
    padding: int
    slope: float
    dropout_p: float

    def run(self, feat, attn_src, attn_dst, bias, seed, train: bool):
        """out [num_dst, H * padded size], without the bias where there is padding; and what it keeps."""
        bias = None if self.padding else bias
        try:
            with _BelowAutograd():
                return _gat(
                    self.handle.number,
                    feat,
                    attn_src,
                    attn_dst,
                    seed,
                    bias,
                    self.slope,
                    self.dropout_p,
                    train,
                )
        except RuntimeError as error:
            raise _ops.typed(error) from None

    def padded(self, weight):
        """A projection whose result is padded."""
        if not self.padding:
            return weight
        by_head = weight.unflatten(0, (self.heads, self.size))
        return F.pad(by_head, (0, 0, 0, self.padding)).flatten(0, 1)

    def cut(self, out, bias):
        """Without the padding, but with the bias; a tensor of its own."""
        return _cut(out, self.heads, self.size, self.padding, bias)

    def formula(self, x, weight, attn_src, attn_dst, bias, seed):
        heads = self.heads, self.size
        feat = F.linear(x, weight).unflatten(1, heads)
        terms = [(feat * attn.view(heads)).sum(-1) for attn in (attn_src, attn_dst)]
        out = functional.gat_attention(
            self.graph, feat, terms[0], terms[1][: self.graph.num_dst], negative_slope=self.slope,
            out_bias=None if bias is None else bias.view(heads), dropout_p=self.dropout_p, _seed=seed,
        )  # fmt: skip
        return out.flatten(1)


class _GatLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, weight, attn_src, attn_dst, bias, seed):
        padded = call.padded(weight)
        feat = _linear(x, padded)
        out, kept = call.run(feat, attn_src, attn_dst, bias, seed, True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        saved = x, weight, attn_src, attn_dst, bias, seed, padded if call.padding else None, feat, kept
        if call.padding:  # nobody else sees `out`
            ctx.save_for_backward(*saved, out)
            return call.cut(out, bias)
        ctx.save_for_backward(*saved, *keep_aside(ctx, out))
        return out

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * 7
        call, need = ctx.call, ctx.needs_input_grad
        saved = ctx.saved_tensors
        x, weight, attn_src, attn_dst, bias, seed, padded, feat, kept = saved[:9]
        if torch.is_grad_enabled():  # create_graph
            return None, *_derived(call.formula, grad, saved[:6], need[1:])
        padding, inner = call.padding, None if call.padding else bias
        if padding:
            (out,) = saved[9:]
            outer = grad
            grad = F.pad(grad.reshape(-1, call.heads, call.size), (0, padding)).flatten(1)
        else:
            results, _ = taken_back(ctx, saved[9:])
            out = call.run(feat, attn_src, attn_dst, bias, seed, True)[0] if results is None else results[0]
            padded = weight
        try:
            with _BelowAutograd():
                grad_feat, grad_src, grad_attn_dst, grad_bias = _gat_backward(
                    call.handle.number, grad, feat, attn_src, attn_dst, seed, inner, out, kept, call.slope,
                    call.dropout_p,
                )  # fmt: skip
        except RuntimeError as error:
            raise _ops.typed(error) from None
        grad_weight = None
        if need[2]:
            grad_weight = grad_feat.t().mm(x)
            if padding:
                grad_weight = grad_weight.unflatten(0, (call.heads, call.size + padding))
                grad_weight = grad_weight[:, : call.size].flatten(0, 1)
        if padding and bias is not None and need[5]:
            grad_bias = outer.sum(0)
        return (
            None,
            grad_feat.mm(padded) if need[1] else None,
            grad_weight,
            grad_src if need[3] else None,
            grad_attn_dst if need[4] else None,
            grad_bias if need[5] else None,
            None,
        )


def _derived(formula, grad, inputs, need) -> tuple[Tensor | None, ...]:
    """The gradients of the formula, with derivatives of their own."""
    wanted = [x for x, needed in zip(inputs, need) if needed]
    with torch.enable_grad():
        out = formula(*inputs)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in need)


def _seed(graph: Graph, dropout_p: float) -> Tensor | None:
    return torch.randint(0, 2**62, (1,), device=graph._device) if dropout_p > 0 else None


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
) -> Tensor:
    """GAT: features [num_src, F], of which the first num_dst rows are the destinations', projected, attended
    to and biased: [num_dst, H * D].

    Of checked arguments: `can_fuse`, weight [H * D, F]; attn_src, attn_dst [.., H, D] both in its dtype or
    float32; bias [H * D] in its dtype.
    """
    heads, size = attn_src.shape[-2:]
    train = torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or attn_src.requires_grad
        or attn_dst.requires_grad
        or (bias is not None and bias.requires_grad)
    )
    padding = _padding(x, size)
    handle = graph._planner.handle(heads, size + padding, x.dtype, "gat", "auto", dropout_p > 0, train)
    call = _Gat(graph, handle, heads, size, padding, float(negative_slope), float(dropout_p))
    seed = _seed(graph, dropout_p)
    if train:
        return _GatLayer.apply(call, x, weight, attn_src, attn_dst, bias, seed)
    out, _ = call.run(_linear(x, call.padded(weight)), attn_src, attn_dst, bias, seed, False)
    return call.cut(out, bias) if padding else out


# ---- scores of pairs: GATv2 and dot products -----------------------------------------------------------


class PairTensors(NamedTuple):
    """The tensors of a layer with a score of pairs. Value, src (the key of dot products) and dst (the query)
    have a projection each, but additive_v2 no src; without a projection of its own src or dst is what value
    is."""

    x: Tensor  # [num_src, F]
    x_dst: Tensor | None  # [num_dst, F_dst]; None: x
    value_weight: Tensor  # [H * D, F]
    value_bias: Tensor | None  # [H * D]
    src_weight: Tensor | None
    src_bias: Tensor | None
    dst_weight: Tensor | None
    dst_bias: Tensor | None
    attn: Tensor | None  # additive_v2: [.., H, D]
    out_bias: Tensor | None  # [H * D]
    skip_weight: Tensor | None  # [H * D, F_dst]: a projection of x_dst that is added to the result
    skip_bias: Tensor | None
    seed: Tensor | None = None


_FIELDS = PairTensors._fields
_AT = {name: k for k, name in enumerate(_FIELDS)}
_LAYERS = {"dot": "dot", "additive_v2": "gatv2"}
_NO_EDGES = (None,) * 5


class _Pair(NamedTuple):
    """What is no tensor of it."""

    graph: Graph
    handle: GraphHandle
    score: str
    heads: int
    size: int
    padding: int
    slope: float
    scale: float
    dropout_p: float

    def pad(self, x):
        """[n, H * size] with the padding; None stays."""
        if not self.padding or x is None:
            return x
        by_head = x.reshape(-1, self.heads, self.size)
        return F.pad(by_head, (0, self.padding)).flatten(1)

    def cut(self, x):
        if not self.padding or x is None:
            return x
        return _cut(x, self.heads, self.size, self.padding)

    def ends(self, t):
        """value, src and dst as the operator takes them."""
        value = self.pad(_linear(t.x, t.value_weight, t.value_bias))
        src = value if self.score == "dot" else None
        if t.src_weight is not None:
            src = self.pad(_linear(t.x, t.src_weight, t.src_bias))
        if t.dst_weight is None:
            return value, src, value[: self.graph.num_dst]
        end = t.x if t.x_dst is None else t.x_dst
        return value, src, self.pad(_linear(end, t.dst_weight, t.dst_bias))

    def run(self, t, value, src, dst):
        """out and what it keeps; out_bias is in out."""
        attn, bias = self.pad(t.attn), self.pad(t.out_bias)
        try:
            with _BelowAutograd():
                out, kept, _ = _attend(
                    self.handle.number, self.heads, SCORES[self.score], value, src, dst, attn, *_NO_EDGES,
                    t.seed, bias, self.slope, self.scale, self.dropout_p, 0, False, False,
                )  # fmt: skip
        except RuntimeError as error:
            raise _ops.typed(error) from None
        return out, kept

    def run_backward(self, t, grad, value, src, dst, out, kept):
        attn, bias = self.pad(t.attn), self.pad(t.out_bias)
        try:
            with _BelowAutograd():
                return _attend_backward(
                    self.handle.number, self.heads, grad, None, SCORES[self.score], value, src, dst, attn,
                    *_NO_EDGES, t.seed, bias, out, kept, False, None, self.slope, self.scale,
                    self.dropout_p, 0, NEED_DST,
                )[:4]  # fmt: skip
        except RuntimeError as error:
            raise _ops.typed(error) from None

    def formula(self, *tensors):
        t = PairTensors(*tensors)
        heads = self.heads, self.size
        end = t.x if t.x_dst is None else t.x_dst
        value = F.linear(t.x, t.value_weight, t.value_bias).unflatten(1, heads)
        if t.dst_weight is None:
            dst = value[: self.graph.num_dst]
        else:
            dst = F.linear(end, t.dst_weight, t.dst_bias).unflatten(1, heads)
        options: dict[str, Any] = {"dropout_p": self.dropout_p, "_seed": t.seed}
        if t.out_bias is not None:
            options["out_bias"] = t.out_bias.view(heads)
        if t.attn is not None:
            out = functional.gatv2_attention(
                self.graph, value, dst, t.attn.view(heads), negative_slope=self.slope, **options
            )
        else:
            src = value
            if t.src_weight is not None:
                src = F.linear(t.x, t.src_weight, t.src_bias).unflatten(1, heads)
            out = functional.dot_attention(self.graph, dst, src, value, scale=self.scale, **options)
        out = out.flatten(1)
        return out if t.skip_weight is None else out + F.linear(end, t.skip_weight, t.skip_bias)


class _PairLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        t = PairTensors(*tensors)
        ends = call.ends(t)
        out, kept = call.run(t, *ends)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if t.skip_weight is None and not call.padding:
            ctx.save_for_backward(*tensors, *ends, kept, *keep_aside(ctx, out))
            return out
        ctx.save_for_backward(*tensors, *ends, kept, out)
        return finish(call, t, out)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * (1 + len(_FIELDS))
        call, need = ctx.call, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors
        count = len(_FIELDS)
        t, ends, kept = PairTensors(*saved[:count]), saved[count : count + 3], saved[count + 3]
        if torch.is_grad_enabled():  # create_graph
            return None, *_derived(call.formula, grad, t, need)
        if t.skip_weight is None and not call.padding:
            results, _ = taken_back(ctx, saved[count + 4 :])
            out = call.run(t, *ends)[0] if results is None else results[0]
        else:
            out = saved[count + 4]
        value, src, dst, attn = call.run_backward(t, call.pad(grad), *ends, out, kept)
        value, src, dst = call.cut(value), call.cut(src), call.cut(dst)
        found: list[Tensor | None] = [None] * count
        if t.src_weight is None and src is not None:
            value += src
        if t.dst_weight is None:
            value[: len(dst)] += dst
        end, end_name = (t.x, "x") if t.x_dst is None else (t.x_dst, "x_dst")
        sides = (
            ("value", t.x, "x", value),
            ("src", t.x, "x", src),
            ("dst", end, end_name, dst),
            ("skip", end, end_name, grad),
        )
        for name, x, x_name, g in sides:
            at = _AT[name + "_weight"]
            if t[at] is None:
                continue
            if need[at]:
                found[at] = g.t().mm(x)
            if need[at + 1]:
                found[at + 1] = g.sum(0)
            at_x = _AT[x_name]
            if need[at_x]:
                before = found[at_x]
                found[at_x] = g.mm(t[at]) if before is None else before.addmm_(g, t[at])
        if need[_AT["attn"]]:
            found[_AT["attn"]] = _ops.as_type(call.cut(attn.sum(0).view(1, -1)), t.attn.dtype).view(
                t.attn.shape
            )
        if need[_AT["out_bias"]]:
            found[_AT["out_bias"]] = grad.sum(0)
        return None, *found


def finish(call: _Pair, t: PairTensors, out: Tensor) -> Tensor:
    """The result where it is not what the operator gave: a tensor of its own."""
    if t.skip_weight is None:
        return call.cut(out)
    end = t.x if t.x_dst is None else t.x_dst
    return _linear(end, t.skip_weight, t.skip_bias).add_(call.cut(out))


def pair_layer(
    graph: Graph,
    score: str,
    tensors: PairTensors,
    heads: int,
    *,
    negative_slope: float = 1.0,
    scale: float = 1.0,
    dropout_p: float,
) -> Tensor:
    """GATv2 (score "additive_v2") or attention by dot products ("dot"): features projected, attended to, with
    a skip connection and a bias: [num_dst, H * D].

    Of checked arguments: `can_fuse` of each end with its weights, and all tensors of one dtype.
    """
    size = tensors.value_weight.shape[0] // heads
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    padding = _padding(tensors.x, size)
    handle = graph._planner.handle(
        heads, size + padding, tensors.x.dtype, _LAYERS[score], "auto", dropout_p > 0, train
    )
    call = _Pair(
        graph, handle, score, heads, size, padding, float(negative_slope), float(scale), float(dropout_p)
    )
    if dropout_p > 0:
        tensors = tensors._replace(seed=_seed(graph, dropout_p))
    if train:
        return _PairLayer.apply(call, *tensors)
    out, _ = call.run(tensors, *call.ends(tensors))
    return finish(call, tensors, out) if padding or tensors.skip_weight is not None else out
