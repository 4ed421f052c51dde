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


def can_fuse(graph: Any, x: Tensor, weight: Tensor, autocast: bool = False) -> bool:
    """Whether a layer's features and one of its weights are such as these functions take: tensors that are
    computed with at once, of one dtype and on the graph's device. All else has a way of its own, with its own
    errors. autocast: x has been brought to the dtype of autocast, to which the weight is brought here."""
    return (
        is_eager(x)
        and type(graph) is Graph
        and x.dim() == 2
        and x.shape[1] == weight.shape[1]
        and (x.dtype is weight.dtype or autocast and weight.is_floating_point())
        and x.dtype in DTYPES
        and x.layout is torch.strided
        and x.device == graph._device == weight.device
        and (x.device.type == "cpu" or x.device.type == "cuda" and _ops.on_device(x))
    )


def _padding(x: Tensor, size: int) -> int:
    """Columns that CUDA's kernels want behind a head's: they load 16 bytes at a time."""
    return -size % (16 // x.element_size()) if x.is_cuda else 0


def _cut(
    x: Tensor,
    heads: int,
    size: int,
    padding: int,
    more: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows of padded heads without the padding, in this dtype, with `more` added: such rows, padded or not,
    or one for all. A new tensor and no view: autograd refuses to have a view modified in place that was made
    within a function.
    """
    cut = x.new_empty(len(x), heads * size, dtype=dtype)
    to, rows = cut.view(-1, heads, size), x.view(-1, heads, size + padding)[..., :size]
    if more is None:
        to.copy_(rows)
    else:
        width = size if more.shape[-1] == heads * size else size + padding
        torch.add(rows, more.view(-1, heads, width)[..., :size], out=to)
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
    dtype: torch.dtype  # of the result
    is_out: bool  # the result is what the operator gives, bias and all

    def run(self, feat, attn_src, attn_dst, bias, seed, train: bool):
        """out [num_dst, H * padded size], with the bias where `is_out`; and what it keeps."""
        try:
            with _BelowAutograd():
                return _gat(
                    self.handle.number, feat, attn_src, attn_dst, seed, bias if self.is_out else None,
                    self.slope, self.dropout_p, train,
                )  # fmt: skip
        except RuntimeError as error:
            raise _ops.typed(error) from None

    def projection(self, weight, dtype):
        """The weight in this dtype, such that what it gives is padded."""
        weight = _ops.as_type(weight, dtype)
        if not self.padding:
            return weight
        by_head = weight.unflatten(0, (self.heads, self.size))
        return F.pad(by_head, (0, 0, 0, self.padding)).flatten(0, 1)

    def finish(self, out, bias):
        """The result where it is not what the operator gave: a tensor of its own."""
        return _cut(out, self.heads, self.size, self.padding, bias, self.dtype)

    def formula(self, x, weight, attn_src, attn_dst, bias, seed):
        heads = self.heads, self.size
        feat = F.linear(x, weight.to(x.dtype)).unflatten(1, heads)
        terms = [(feat * attn.view(heads)).sum(-1) for attn in (attn_src, attn_dst)]
        out = functional.gat_attention(
            self.graph, feat, terms[0], terms[1][: self.graph.num_dst], negative_slope=self.slope,
            dropout_p=self.dropout_p, _seed=seed,
        ).flatten(1)  # fmt: skip
        return (out if bias is None else out + bias).to(self.dtype)


class _GatLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, weight, attn_src, attn_dst, bias, seed):
        used = call.projection(weight, x.dtype)
        feat = _linear(x, used)
        out, kept = call.run(feat, attn_src, attn_dst, bias, seed, True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        saved = x, weight, attn_src, attn_dst, bias, seed, None if used is weight else used, feat, kept
        if not call.is_out:  # nobody else sees `out`
            ctx.save_for_backward(*saved, out)
            return call.finish(out, bias)
        ctx.save_for_backward(*saved, *keep_aside(ctx, out))
        return out

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * 7
        call, need = ctx.call, ctx.needs_input_grad
        saved = ctx.saved_tensors
        x, weight, attn_src, attn_dst, bias, seed, used, feat, kept = saved[:9]
        if torch.is_grad_enabled():  # create_graph
            return None, *_derived(call.formula, grad, saved[:6], need[1:])
        outer = grad
        if call.is_out:
            results, _ = taken_back(ctx, saved[9:])
            out = call.run(feat, attn_src, attn_dst, bias, seed, True)[0] if results is None else results[0]
        else:
            (out,) = saved[9:]
            grad = _ops.as_type(grad, x.dtype)
            if call.padding:
                grad = F.pad(grad.reshape(-1, call.heads, call.size), (0, call.padding)).flatten(1)
        used = weight if used is None else used
        try:
            with _BelowAutograd():
                grad_feat, grad_src, grad_attn_dst, grad_bias = _gat_backward(
                    call.handle.number, grad, feat, attn_src, attn_dst, seed, bias if call.is_out else None,
                    out, kept, call.slope, call.dropout_p,
                )  # fmt: skip
        except RuntimeError as error:
            raise _ops.typed(error) from None
        grad_weight = None
        if need[2]:
            grad_weight = grad_feat.t().mm(x)
            if call.padding:
                grad_weight = grad_weight.unflatten(0, (call.heads, call.size + call.padding))
                grad_weight = grad_weight[:, : call.size].flatten(0, 1)
            grad_weight = _ops.as_type(grad_weight, weight.dtype)
        if not call.is_out and bias is not None and need[5]:
            grad_bias = outer.sum(0, dtype=bias.dtype)
        return (
            None,
            grad_feat.mm(used) if need[1] else None,
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
    dtype: torch.dtype | None = None,
) -> Tensor:
    """GAT: features [num_src, F], of which the first num_dst rows are the destinations', projected, attended
    to and biased: [num_dst, H * D].

    Of checked arguments: `can_fuse`, weight [H * D, F]; attn_src, attn_dst [.., H, D] both in x's dtype or
    float32; bias [H * D], in either. dtype: of the result; default x's.
    """
    heads, size = attn_src.shape[-2:]
    train = torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or attn_src.requires_grad
        or attn_dst.requires_grad
        or (bias is not None and bias.requires_grad)
    )
    padding, dtype = _padding(x, size), x.dtype if dtype is None else dtype
    is_out = not padding and dtype is x.dtype and (bias is None or bias.dtype is dtype)
    handle = graph._planner.handle(heads, size + padding, x.dtype, "gat", "auto", dropout_p > 0, train)
    call = _Gat(
        graph, handle, heads, size, padding, float(negative_slope), float(dropout_p), dtype, is_out
    )  # fmt: skip
    seed = _seed(graph, dropout_p)
    if train:
        return _GatLayer.apply(call, x, weight, attn_src, attn_dst, bias, seed)
    out, _ = call.run(_linear(x, call.projection(weight, x.dtype)), attn_src, attn_dst, bias, seed, False)
    return out if is_out else call.finish(out, bias)


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


# Elements of what a projection gives up to which those of the same features are one product: launches are
# what a small graph on a GPU waits for. Of a large one the gradients would be copied for that.
_MOST_JOINED = 2**22


def _joins(x: Tensor, width: int) -> bool:
    return x.is_cuda and len(x) * width <= _MOST_JOINED


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
    dtype: torch.dtype  # of the result
    is_out: bool  # the result is what the operator gives, bias and all
    groups: list[tuple[str, list[str]]]  # projections that are one product: of which features, and names

    def pad(self, x):
        """[n, H * size] with the padding; None stays."""
        if not self.padding or x is None:
            return x
        by_head = x.reshape(-1, self.heads, self.size)
        return F.pad(by_head, (0, self.padding)).flatten(1)

    def pad_rows(self, x):
        """Of a weight [H * size, F] or bias [H * size] of some projections, likewise."""
        if not self.padding or x is None:
            return x
        by_head = x.view(-1, self.size, *x.shape[1:])
        return F.pad(by_head, (0, 0) * (x.dim() - 1) + (0, self.padding)).flatten(0, 1)

    def cut_rows(self, x):
        """The gradient of `pad_rows`."""
        if not self.padding:
            return x
        return x.unflatten(0, (-1, self.size + self.padding))[:, : self.size].flatten(0, 1)

    def attn(self, t):
        """The vectors of additive_v2 as the operator takes them."""
        return None if t.attn is None else self.pad(_ops.as_type(t.attn, t.x.dtype))

    def project(self, t):
        """value, src, dst as the operator takes them, and the skip connection or None, all with padding; and
        of each group the weights as they were used."""
        given: dict[str, Tensor] = {}
        used = []
        for end, names in self.groups:
            x = getattr(t, end)
            weights, biases = ([t[_AT[n + kind]] for n in names] for kind in ("_weight", "_bias"))
            bias = None if biases[0] is None else biases[0] if len(biases) == 1 else torch.cat(biases)
            weight = weights[0] if len(names) == 1 else torch.cat(weights)
            weight, bias = (
                None if w is None else self.pad_rows(_ops.as_type(w, x.dtype)) for w in (weight, bias)
            )
            used.append(weight)
            if len(names) == 1:
                given[names[0]] = _linear(x, weight, bias)
                continue
            # A result behind the other, as kernels take rows without gaps.
            by_name = weight.view(len(names), -1, x.shape[1]).transpose(1, 2)
            same = x.expand(len(names), *x.shape)
            if bias is None:
                results = torch.bmm(same, by_name)
            else:
                results = torch.baddbmm(bias.view(len(names), 1, -1), same, by_name)
            given.update(zip(names, results.unbind()))
        value = given["value"]
        src = given.get("src", value) if self.score == "dot" else None
        dst = given["dst"] if "dst" in given else value[: self.graph.num_dst]
        return (value, src, dst), given.get("skip"), used

    def run(self, t, attn, value, src, dst):
        """out and what it keeps; out has the bias where `is_out`."""
        try:
            with _BelowAutograd():
                out, kept, _ = _attend(
                    self.handle.number, self.heads, SCORES[self.score], value, src, dst, attn, *_NO_EDGES,
                    t.seed, t.out_bias if self.is_out else None, self.slope, self.scale, self.dropout_p, 0,
                    False, False,
                )  # fmt: skip
        except RuntimeError as error:
            raise _ops.typed(error) from None
        return out, kept

    def run_backward(self, t, grad, attn, value, src, dst, out, kept):
        try:
            with _BelowAutograd():
                return _attend_backward(
                    self.handle.number, self.heads, grad, None, SCORES[self.score], value, src, dst, attn,
                    *_NO_EDGES, t.seed, t.out_bias if self.is_out else None, out, kept, False, None,
                    self.slope, self.scale, self.dropout_p, 0, NEED_DST,
                )[:4]  # fmt: skip
        except RuntimeError as error:
            raise _ops.typed(error) from None

    def finish(self, t, out, skipped):
        """The result where it is not what the operator gave: a tensor of its own."""
        more = t.out_bias
        if skipped is not None:
            if more is not None:
                skipped = skipped + self.pad(more)
            elif not self.padding and self.dtype is out.dtype:
                return skipped + out if skipped._is_view() else skipped.add_(out)
            more = skipped
        return _cut(out, self.heads, self.size, self.padding, more, self.dtype)

    def formula(self, *tensors):
        t = PairTensors(*tensors)
        dtype, heads, end = t.x.dtype, (self.heads, self.size), _end(t)

        def project(x, name):
            weight, bias = (t[_AT[name + kind]] for kind in ("_weight", "_bias"))
            return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

        value = project(t.x, "value").unflatten(1, heads)
        dst = value[: self.graph.num_dst]
        if t.dst_weight is not None:
            dst = project(end, "dst").unflatten(1, heads)
        options: dict[str, Any] = {"dropout_p": self.dropout_p, "_seed": t.seed}
        if t.attn is not None:
            out = functional.gatv2_attention(
                self.graph, value, dst, t.attn.view(heads).to(dtype), negative_slope=self.slope, **options
            )
        else:
            src = value if t.src_weight is None else project(t.x, "src").unflatten(1, heads)
            out = functional.dot_attention(self.graph, dst, src, value, scale=self.scale, **options)
        out = out.flatten(1)
        if t.out_bias is not None:
            out = out + t.out_bias
        return (out if t.skip_weight is None else out + project(end, "skip")).to(self.dtype)


def _groups(t: PairTensors) -> list[tuple[str, list[str]]]:
    end = "x" if t.x_dst is None else "x_dst"
    found: dict[Any, tuple[str, list[str]]] = {}
    for name, of in (("value", "x"), ("src", "x"), ("dst", end), ("skip", end)):
        weight = t[_AT[name + "_weight"]]
        if weight is None:
            continue
        joined = _joins(getattr(t, of), len(weight))
        key = (of, t[_AT[name + "_bias"]] is None) if joined else name
        found.setdefault(key, (of, []))[1].append(name)
    return list(found.values())


def _end(t: PairTensors) -> Tensor:
    """The features of the destinations."""
    return t.x if t.x_dst is None else t.x_dst


class _PairLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        t = PairTensors(*tensors)
        attn = call.attn(t)
        ends, skipped, used = call.project(t)
        out, kept = call.run(t, attn, *ends)
        ctx.call = call
        ctx.set_materialize_grads(False)
        saved = *tensors, *ends, attn, kept, *used
        if call.is_out:
            ctx.save_for_backward(*saved, *keep_aside(ctx, out))
            return out
        ctx.save_for_backward(*saved, out)
        return call.finish(t, out, skipped)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * (1 + len(_FIELDS))
        call, need = ctx.call, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors
        count = len(_FIELDS)
        t = PairTensors(*saved[:count])
        if torch.is_grad_enabled():  # create_graph
            return None, *_derived(call.formula, grad, t, need)
        *ends, attn, kept = saved[count : count + 5]
        groups = call.groups
        used, saved = saved[count + 5 : count + 5 + len(groups)], saved[count + 5 + len(groups) :]
        if call.is_out:
            results, _ = taken_back(ctx, saved)
            out = call.run(t, attn, *ends)[0] if results is None else results[0]
        else:
            (out,) = saved
        found: list[Tensor | None] = [None] * count
        if t.out_bias is not None and need[_AT["out_bias"]]:
            found[_AT["out_bias"]] = grad.sum(0, dtype=t.out_bias.dtype)
        grad = call.pad(_ops.as_type(grad, t.x.dtype))
        value, src, dst, grad_attn = call.run_backward(t, grad, attn, *ends, out, kept)
        if t.src_weight is None and src is not None:
            value += src
        if t.dst_weight is None:
            value[: len(dst)] += dst
        if t.attn is not None and need[_AT["attn"]]:
            grad_attn = _ops.as_type(grad_attn.sum(0), t.attn.dtype)
            found[_AT["attn"]] = grad_attn[:, : call.size].reshape(t.attn.shape)
        grads = {"value": value, "src": src, "dst": dst, "skip": grad}
        for (end, names), weight in zip(groups, used):
            _project_back(call, t, end, names, weight, [grads[name] for name in names], need, found)
        return None, *found


def _project_back(call, t, end: str, names: list[str], weight: Tensor, grads: list, need, found) -> None:
    """The gradients of projections that were one product, into `found`."""
    x, at_x, places = getattr(t, end), _AT[end], [_AT[name + "_weight"] for name in names]
    g = grads[0] if len(grads) == 1 else torch.cat(grads, 1)
    width = call.heads * call.size

    def parts(x):  # of one projection no view: a small graph waits for each
        return (x,) if len(places) == 1 else x.split(width)

    if any(need[at] for at in places):
        whole = _ops.as_type(call.cut_rows(g.t().mm(x)), t[places[0]].dtype)
        for at, part in zip(places, parts(whole)):
            found[at] = part if need[at] else None
    if any(need[at + 1] for at in places):
        whole = call.cut_rows(g.sum(0, dtype=t[places[0] + 1].dtype))
        for at, part in zip(places, parts(whole)):
            found[at + 1] = part if need[at + 1] else None
    if need[at_x]:
        before = found[at_x]
        found[at_x] = g.mm(weight) if before is None else before.addmm_(g, weight)


def pair_layer(
    graph: Graph,
    score: str,
    tensors: PairTensors,
    heads: int,
    *,
    negative_slope: float = 1.0,
    scale: float = 1.0,
    dropout_p: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """GATv2 (score "additive_v2") or attention by dot products ("dot"): features projected, attended to, with
    a skip connection and a bias: [num_dst, H * D].

    Of checked arguments: `can_fuse` of each end with its weights, which are brought to x's dtype here. dtype:
    of the result; default x's.
    """
    size = tensors.value_weight.shape[0] // heads
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    padding, dtype = _padding(tensors.x, size), tensors.x.dtype if dtype is None else dtype
    handle = graph._planner.handle(
        heads, size + padding, tensors.x.dtype, _LAYERS[score], "auto", dropout_p > 0, train
    )
    bias = tensors.out_bias
    is_out = not padding and tensors.skip_weight is None and dtype is tensors.x.dtype
    is_out = is_out and (bias is None or bias.dtype is dtype)
    call = _Pair(
        graph, handle, score, heads, size, padding, float(negative_slope), float(scale), float(dropout_p),
        dtype, is_out, _groups(tensors),
    )  # fmt: skip
    if dropout_p > 0:
        tensors = tensors._replace(seed=_seed(graph, dropout_p))
    if train:
        return _PairLayer.apply(call, *tensors)
    ends, skipped, _ = call.project(tensors)
    out, _ = call.run(tensors, call.attn(tensors), *ends)
    return out if is_out else call.finish(tensors, out, skipped)
