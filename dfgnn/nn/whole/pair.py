"""Whole layers as one autograd function each: projections, score terms, attention and bias.

What a layer launches around its attention costs a small graph more than the attention does, and most of that
is autograd's and the dispatcher's work per operation. So where nothing stands between these operations (no
hook, no replaced module, no compiler or transform: `nn` decides) they are one node here, with the fewest
launches. The results are those of the operations one by one, up to rounding; `_formula` of each says what
these are, and second derivatives go through it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ...engine import traced_graph as _edges
from ...engine.checks import DTYPES
from ...graph import Graph
from ...runtime import ops as _ops
from ...runtime import torch_internals as internals
from ...runtime.arguments import FEAT_IN_KEY, FEAT_IN_VALUE, NEED_DST, NEED_FEAT, SCORES, GraphHandle, ops
from ...runtime.eager import EagerFunction, called_directly, is_eager, keep_aside, taken_back

__all__ = ["can_fuse", "pair_layer"]

_linear = internals.linear
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


def padding_of(x: Tensor, size: int) -> int:
    """Columns that CUDA's kernels want behind a head's: they load 16 bytes at a time."""
    return -size % (16 // x.element_size()) if x.is_cuda else 0


_constants: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one number, which is kept."""
    found = _constants.get((value, dtype, device))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.full((), value, dtype=dtype, device=device)  # which has no value yet
        with torch.inference_mode(False):  # a copy waits: other streams may use it at once
            found = _constants[value, dtype, device] = torch.full((), value, dtype=dtype).to(device)
    return found


def extended(x: Tensor, dim: int, more: int) -> Tensor:
    """x with so many zeros behind it in this dimension, in one launch, where `pad` takes two."""
    shape = list(x.shape)
    shape[dim] = more
    return torch.cat([x, constant(0, x.dtype, x.device).expand(shape)], dim)


def cut(
    x: Tensor,
    heads: int,
    size: int,
    padding: int,
    more: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows of padded heads without the padding, in this dtype, with `more` added: such rows, padded or not,
    or one for all. A new tensor and no view: autograd refuses to have a view modified in place that was made
    within a function. Without padding and `more` it is another dtype.
    """
    if not padding:
        return x.to(dtype) if more is None else torch.add(x, more, out=x.new_empty(x.shape, dtype=dtype))
    if heads == 1:
        rows = x[:, :size]
        rows = rows.clone() if more is None else torch.add(rows, more[..., :size])
        return _ops.as_type(rows, x.dtype if dtype is None else dtype)
    cut = x.new_empty(len(x), heads * size, dtype=dtype)
    to, rows = cut.view(-1, heads, size), x.view(-1, heads, size + padding)[..., :size]
    if more is None:
        to.copy_(rows)
    else:
        width = size if more.shape[-1] == heads * size else size + padding
        torch.add(rows, more.view(-1, heads, width)[..., :size], out=to)
    return cut


def pad_columns(x: Tensor, heads: int, size: int, padding: int) -> Tensor:
    """Rows [n, heads * size] with padding behind each head. One head, as last layers have it, is not taken
    apart and put together, for each of which a small graph waits; nor below."""
    if heads == 1:
        return extended(x, x.dim() - 1, padding)
    return extended(x.reshape(-1, heads, size), 2, padding).flatten(1)


def pad_rows(x: Tensor, size: int, padding: int) -> Tensor:
    """A weight [heads * size, F], or bias, that gives rows with the padding."""
    if x.shape[0] == size:
        return extended(x, 0, padding)
    return extended(x.view(-1, size, *x.shape[1:]), 1, padding).flatten(0, 1)


def cut_rows(x: Tensor, size: int, padding: int) -> Tensor:
    """The gradient of `pad_rows`."""
    if x.shape[0] == size + padding:
        return x[:size]
    return x.unflatten(0, (-1, size + padding))[:, :size].flatten(0, 1)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in this dtype; on a GPU in one launch."""
    if a.is_cuda and a.dtype.itemsize == 2 and dtype is torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return _ops.as_type(a.mm(b), dtype)


def derived(formula, grad, inputs, need) -> tuple[Tensor | None, ...]:
    """The gradients of the formula, with derivatives of their own."""
    with torch.enable_grad():
        # Views: an input may be made of another one, or be the same tensor, and each is to get its own part.
        inputs = [x if x is None else x.view_as(x) for x in inputs]
        out = formula(*inputs)
    wanted = [x for x, needed in zip(inputs, need) if needed]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in need)


def seed_of(graph: Graph, dropout_p: float) -> Tensor | None:
    return torch.randint(0, 2**62, (1,), device=graph._device) if dropout_p > 0 else None


# ---- scores of pairs: GATv2 and dot products -----------------------------------------------------------


class PairTensors(NamedTuple):
    """The tensors of a layer with a score of pairs. Value, src (the key of dot products) and dst (the query)
    have a projection each, but additive_v2 no src; without a projection of its own src or dst is what value
    is. In a layer of dot products a projection of edges' attributes may be added to keys and values."""

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
    edge_attr: Tensor | None = None  # [E, F_e], in x's dtype
    edge_weight: Tensor | None = None  # [H * D, F_e]
    edge_bias: Tensor | None = None  # [H * D]
    seed: Tensor | None = None


_FIELDS = PairTensors._fields
_new = tuple.__new__  # of a tuple of all fields, without the frame of a named tuple's own
# Places of weights, each with its bias behind it, and of others.
_VALUE, _SRC, _DST, _ATTN, _OUT_BIAS, _SKIP, _EDGE_ATTR, _EDGE = map(
    _FIELDS.index,
    (
        "value_weight", "src_weight", "dst_weight", "attn", "out_bias", "skip_weight", "edge_attr",
        "edge_weight",
    ),
)  # fmt: skip
_LAYERS = {"dot": "dot", "additive_v2": "gatv2"}
_NO_OPTIONS = (None,) * 4  # on edges


# Elements of what a projection gives up to which those of the same features are one product: launches are
# what a small graph on a GPU waits for. Of a large one the gradients would be copied for that.
_MOST_JOINED = 2**22


def _joins(x: Tensor, width: int) -> bool:
    return x.is_cuda and x.shape[0] * width <= _MOST_JOINED


# Projections that are one product: the place of their features, and those of their weights.
Groups = tuple[tuple[int, tuple[int, ...]], ...]


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
    groups: Groups

    def pad(self, x):
        """[n, H * size] with the padding; None stays."""
        return x if not self.padding or x is None else pad_columns(x, self.heads, self.size, self.padding)

    def pad_rows(self, x):
        """Of a weight [H * size, F] or bias [H * size] of some projections, likewise."""
        return x if not self.padding or x is None else pad_rows(x, self.size, self.padding)

    def cut_rows(self, x):
        """The gradient of `pad_rows`."""
        return cut_rows(x, self.size, self.padding) if self.padding else x

    def attn(self, t):
        """The vectors of additive_v2 as the operator takes them."""
        return None if t.attn is None else self.pad(_ops.as_type(t.attn, t.x.dtype))

    def joined(self, t, x, places):
        """Weights or biases, one behind the other, in x's dtype; None where there are none."""
        found = t[places[0]]
        if found is None:
            return None
        if len(places) > 1:
            found = torch.cat([t[at] for at in places])
        return _ops.as_type(found, x.dtype)

    def project(self, t):
        """value, src, dst and the features of edges as the operator takes them, and the skip connection or
        None, all with padding; and of each group the weights as they were used, None for two of them."""
        made: dict[int, Tensor] = {}
        used: list[Tensor | None] = []
        for end, places in self.groups:
            x = t[end]
            if len(places) == 1:
                (at,) = places
                weight = self.pad_rows(_ops.as_type(t[at], x.dtype))
                bias = self.pad_rows(self.joined(t, x, (at + 1,)))
                made[at] = _linear(x, weight, bias)
                used.append(weight)
                continue
            # Of several, of a small graph, what they give is padded: that is one, and their gradients are cut
            # where they are put side by side.
            if len(places) == 2:  # two products take less than what makes one of them
                for at in places:
                    weight, bias = self.joined(t, x, (at,)), self.joined(t, x, (at + 1,))
                    made[at] = self.pad(_linear(x, weight, bias))
                used.append(None)
                continue
            weight = self.joined(t, x, places)
            bias = self.joined(t, x, [at + 1 for at in places])
            used.append(weight)
            # A result behind the other, as kernels take rows without gaps.
            by_place = weight.view(len(places), -1, x.shape[1]).transpose(1, 2)
            same = x.expand(len(places), *x.shape)
            if bias is None:
                results = torch.bmm(same, by_place)
            else:
                results = torch.baddbmm(bias.view(len(places), 1, -1), same, by_place)
            if self.padding:
                results = self.pad(results).view(len(places), x.shape[0], -1)
            made.update(zip(places, results.unbind()))
        value = made[_VALUE]
        src = made.get(_SRC, value) if self.score == "dot" else None
        dst = made.get(_DST)
        if dst is None:
            num_dst = self.graph.num_dst
            dst = value if value.shape[0] == num_dst else value[:num_dst]
        feat = made.get(_EDGE)
        if feat is not None:
            feat = feat.view(-1, self.heads, self.size + self.padding)
        return (value, src, dst, feat), made.get(_SKIP), used

    def run(self, t, attn, value, src, dst, feat):
        """out and what it keeps; out has the bias where `is_out`."""
        flags = 0 if feat is None else FEAT_IN_KEY | FEAT_IN_VALUE
        out, kept, _ = _attend(
            self.handle.number, self.heads, SCORES[self.score], value, src, dst, attn, *_NO_OPTIONS, feat,
            t.seed, t.out_bias if self.is_out else None, self.slope, self.scale, self.dropout_p, flags, False,
            False,
        )  # fmt: skip
        return out, kept

    def run_backward(self, t, grad, attn, value, src, dst, feat, out, kept, need):
        """The gradients of value, src, dst, attn, and of feat if one of its own is needed."""
        flags, bits = 0 if feat is None else FEAT_IN_KEY | FEAT_IN_VALUE, NEED_DST
        need_feat = feat is not None and any(need[_EDGE_ATTR : _EDGE + 2])
        if need_feat:
            bits |= NEED_FEAT
        value, src, dst, attn, *_, feat = _attend_backward(
            self.handle.number, self.heads, grad, None, SCORES[self.score], value, src, dst, attn,
            *_NO_OPTIONS, feat, t.seed, t.out_bias if self.is_out else None, out, kept, False, None,
            self.slope, self.scale, self.dropout_p, flags, bits,
        )  # fmt: skip
        if not need_feat:
            return value, src, dst, attn, None
        mask = self.graph.edge_mask
        if mask is not None:  # fixed capacity: of edges that are not in use nothing was written
            feat = _edges.in_use(mask, feat)
        return value, src, dst, attn, feat.flatten(1)

    def forward(self, t):
        """The result, what backward takes beside the inputs, and what the operator gave."""
        attn = self.attn(t)
        ends, skipped, used = self.project(t)
        out, kept = self.run(t, attn, *ends)
        result = out if self.is_out else self.finish(t, out, skipped)
        return result, (*ends, attn, kept, *used), out

    def finish(self, t, out, skipped):
        """The result where it is not what the operator gave: a tensor of its own."""
        more = t.out_bias
        if skipped is not None:
            if more is not None:
                skipped = skipped + self.pad(more)
            elif not self.padding and self.dtype is out.dtype:
                # One of several results would keep the others alive.
                of_several = any(len(places) > 2 and _SKIP in places for _, places in self.groups)
                return skipped + out if of_several else skipped.add_(out)
            more = skipped
        return cut(out, self.heads, self.size, self.padding, more, self.dtype)

    def backward(self, t, grad, made, out, need):
        """The gradients of the inputs."""
        value, src, dst, feat, attn, kept, *used = made
        found: list[Tensor | None] = [None] * len(_FIELDS)
        biased = self.sums_with_bias(t, grad) if need[_OUT_BIAS] else None
        if need[_OUT_BIAS] and biased is None:
            found[_OUT_BIAS] = grad.sum(0, dtype=t.out_bias.dtype)
        grad = self.pad(_ops.as_type(grad, t.x.dtype))
        value, src, dst, grad_attn, feat = self.run_backward(
            t, grad, attn, value, src, dst, feat, out, kept, need
        )
        if t.src_weight is None and src is not None:
            value += src
        if t.dst_weight is None:
            value[: dst.shape[0]] += dst
        if need[_ATTN]:
            grad_attn = _ops.as_type(_ops.total(grad_attn), t.attn.dtype)
            found[_ATTN] = (grad_attn[:, : self.size] if self.padding else grad_attn).reshape(t.attn.shape)
        grads = {_VALUE: value, _SRC: src, _DST: dst, _SKIP: grad, _EDGE: feat}
        for group, weight in zip(self.groups, used):
            of_group = [grads[k] for k in group[1]]
            if of_group[0] is not None:
                of_bias = grad if group is biased else None
                self.project_back(t, *group, weight, of_group, of_bias, need, found)
        return found

    def sums_with_bias(self, t, grad):
        """The group whose biases' gradients are a sum together with that of the bias of the result."""
        if self.padding or grad.dtype is not t.x.dtype:
            return None
        for group in self.groups:
            end, places = group
            if len(places) == 1 or t[end].shape[0] != grad.shape[0]:
                continue
            bias = t[places[0] + 1]
            if bias is not None and bias.dtype is t.out_bias.dtype:
                return group
        return None

    def give(self, whole, places, need, found) -> None:
        """The parts of a gradient, each to its place."""
        width = whole.shape[0] // len(places)
        for k, at in enumerate(places):
            if need[at]:
                found[at] = whole[k * width : (k + 1) * width]

    def project_back(self, t, end: int, places, weight, grads: list, of_bias, need, found) -> None:
        """The gradients of projections that were one product, into `found`. of_bias: the gradient of the
        result, where that of its bias is to be summed with those of the projections' biases."""
        x = t[end]
        if len(places) == 1:  # no view of anything: a small graph waits for each
            (at,), (g,) = places, grads
            if need[at]:
                found[at] = self.cut_rows(product(g.t(), x, t[at].dtype))
            if need[at + 1]:
                found[at + 1] = self.cut_rows(g.sum(0, dtype=t[at + 1].dtype))
        else:
            g = self.projections_back(t, x, places, grads, of_bias, need, found)
        if need[end]:
            weight = self.joined(t, x, places) if weight is None else weight
            before = found[end]
            found[end] = g.mm(weight) if before is None else before.addmm_(g, weight)

    def projections_back(self, t, x, places, grads: list, of_bias, need, found):
        """The gradients of several weights and biases, into `found`; returns those of what they gave."""
        biases = [at + 1 for at in places]
        if of_bias is not None:
            together = torch.cat([*grads, of_bias], 1)
            biases.append(_OUT_BIAS)
            g = together[:, : -of_bias.shape[1]]
        elif self.padding:
            by_head = self.heads, self.size + self.padding
            together = g = torch.cat([g.unflatten(1, by_head)[..., : self.size] for g in grads], 1).flatten(1)
        else:
            together = g = torch.cat(grads, 1)
        wanted = [t[at] for at in places if need[at]]
        if wanted:
            self.give(product(g.t(), x, wanted[0].dtype), places, need, found)
        wanted = [t[at] for at in biases if need[at]]
        if wanted:
            self.give(together.sum(0, dtype=wanted[0].dtype), biases, need, found)
        return g

    def formula(self, *tensors):
        t = PairTensors(*tensors)
        dtype, heads, end = t.x.dtype, (self.heads, self.size), _end(t)

        def project(x, name):
            weight, bias = (getattr(t, name + kind) for kind in ("_weight", "_bias"))
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
            if t.edge_attr is not None:
                options["edge_feat"] = project(t.edge_attr, "edge").unflatten(1, heads)
            out = functional.dot_attention(self.graph, dst, src, value, scale=self.scale, **options)
        out = out.flatten(1)
        if t.out_bias is not None:
            out = out + t.out_bias
        return (out if t.skip_weight is None else out + project(end, "skip")).to(self.dtype)


def _groups(t: PairTensors) -> Groups:
    end = 0 if t.x_dst is None else 1
    width = t.value_weight.shape[0]
    joins = _joins(t.x, width), t.x_dst is not None and _joins(t.x_dst, width)
    return _grouped(end, joins, tuple([None if t[k] is None else t[k + 1] is None for k in _PROJECTIONS]))


_PROJECTIONS = _VALUE, _SRC, _DST, _SKIP, _EDGE


@cache
def _grouped(end: int, joins: tuple[bool, bool], has_no_bias: tuple[bool | None, ...]) -> Groups:
    """has_no_bias: of `_PROJECTIONS`; None for one that is not there. joins: by end."""
    found: dict[Any, tuple[int, tuple[int, ...]]] = {}
    for place, of, no_bias in zip(_PROJECTIONS, (0, 0, end, end, _EDGE_ATTR), has_no_bias):
        if no_bias is not None:
            key = (of, no_bias) if of != _EDGE_ATTR and joins[of] else place
            found[key] = of, (*found.get(key, (of, ()))[1], place)
    return tuple(found.values())


def _end(t: PairTensors) -> Tensor:
    """The features of the destinations."""
    return t.x if t.x_dst is None else t.x_dst


@called_directly
class _PairLayer(EagerFunction):
    @staticmethod
    def forward(ctx, call, *tensors):
        result, made, out = _ops.call(call.forward, _new(PairTensors, tensors))
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Unless it is the result, nobody else sees `out`.
        ctx.save_for_backward(*tensors, *made, *(keep_aside(ctx, out) if call.is_out else (out,)))
        return result

    @staticmethod
    def backward(ctx, grad):
        count = len(_FIELDS)
        if grad is None:
            return (None,) * (1 + count)
        call, saved, need = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        end = count + 6 + len(call.groups)
        t, made, last = _new(PairTensors, saved[:count]), saved[count:end], saved[end:]
        if torch.is_grad_enabled():  # create_graph
            return None, *derived(call.formula, grad, t, need)
        if call.is_out:
            last, _ = taken_back(ctx, last)
        *ends, attn = made[:5]
        out = _ops.call(call.run, t, attn, *ends)[0] if last is None else last[0]
        return None, *_ops.call(call.backward, t, grad, made, out, need)


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

    Of checked arguments: `can_fuse` of each end, and of the edges' attributes, with its weights, which are
    brought to x's dtype here. dtype: of the result; default x's.
    """
    size = tensors.value_weight.shape[0] // heads
    train = torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])
    padding, dtype = padding_of(tensors.x, size), tensors.x.dtype if dtype is None else dtype
    handle = graph._planner.handle(
        heads, size + padding, tensors.x.dtype, _LAYERS[score], "auto",
        dropout_p > 0 or tensors.edge_attr is not None, train,
    )  # fmt: skip
    bias = tensors.out_bias
    is_out = not padding and tensors.skip_weight is None and dtype is tensors.x.dtype
    is_out = is_out and (bias is None or bias.dtype is dtype)
    call = _Pair(
        graph, handle, score, heads, size, padding, float(negative_slope), float(scale), float(dropout_p),
        dtype, is_out, _groups(tensors),
    )  # fmt: skip
    if dropout_p > 0 and tensors.seed is None:
        tensors = tensors._replace(seed=seed_of(graph, dropout_p))
    return _PairLayer.at_once(call, *tensors) if train else _ops.call(call.forward, tensors)[0]
