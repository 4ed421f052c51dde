"""Attention without options, called eagerly: the same operators as in `_autograd`, with less Python around
them, for which a small graph waits.

Only what the operators cannot know is looked at here. What they refuse, and all that is not of this kind,
goes the longer way, which has every option and names what is wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..runtime import torch_internals as internals
from ..runtime.arguments import NEED_DST, SCORES, Numbers, Tensors
from ..runtime.eager import (
    PLAIN_TYPES,
    EagerFunction,
    called_directly,
    is_eager,
    retains_graph,
    top_hooks,
    why_not_eager,
)
from ..runtime.ops import acc_type, as_type, total, typed
from . import paths
from .autograd import recorded_gradients
from .checks import DTYPES
from .operators import PLAN_LAYERS, EagerCall
from .operators import attend_backward_op as _attend_backward
from .operators import attend_op as _attend
from .paths import declined

_BelowAutograd = internals.BelowAutograd
_NO_EDGES = (None,) * 5
# What sums are in, as the score terms of additive attention.
_ACC = {dtype: acc_type(dtype) for dtype in DTYPES}
_NUMBERS = float, int


def attention(
    graph: Any,
    score: str,
    value: Any,
    src: Any,
    dst: Any,
    attn: Any,
    *,
    slope: Any = 1.0,
    scale: Any = 1.0,
    dropout_p: Any,
) -> Tensor | None:
    """`_autograd.attention` of arguments that nobody has looked at yet; None where they are not such as this
    is for."""
    if type(graph) is not Graph or type(value) not in PLAIN_TYPES or type(dst) not in PLAIN_TYPES:
        return declined("short", "the graph or a tensor is of a type of its own")
    # Each library counts its graphs: the number of one on another device may be that of another graph.
    if not is_eager(value):
        return declined("short", why_not_eager(value))
    if value.dim() != 3 or value.device != graph._device:
        return declined("short", "the values are not [N, H, D] on the graph's device")
    dtype, (_, heads, dim) = value.dtype, value.shape
    if dtype not in _ACC or not heads or not dim or value.is_cuda and dim * dtype.itemsize % 16:
        return declined("short", f"heads of {dim} in {dtype} are padded, or not of a dtype of the engine")
    train, additive = torch.is_grad_enabled(), score == "additive"
    wanted = train and value.requires_grad
    for x in (src, dst, attn):
        if x is not None:
            known = type(x) in PLAIN_TYPES and (x.dtype is dtype or additive and x.dtype is _ACC[dtype])
            if not known:
                return declined("short", "the tensors differ in dtype or are of a type of their own")
            wanted = wanted or (train and x.requires_grad)
    if not additive and dst.shape[2:] != value.shape[2:]:
        return declined("short", "keys and values have heads of different sizes")
    if scale is None:
        scale = 1 / math.sqrt(dim)
    for number in (slope, scale, dropout_p):
        if type(number) not in _NUMBERS:
            return declined("short", "a scalar argument is no Python number")
    seed = None
    if dropout_p:
        if not 0 < dropout_p <= 1:
            return declined("short", "dropout_p is no probability")
        seed = torch.randint(0, 2**62, (1,), device=graph._device)
    handle = graph._planner.handle(heads, dim, dtype, PLAN_LAYERS[score], "auto", seed is not None, wanted)
    positive = additive and wanted and dst.requires_grad
    call = graph, handle, score, seed, slope, scale, dropout_p, positive
    try:
        if wanted:
            out = _Attention.at_once(call, value, src, dst, attn)
        else:
            src, dst = _terms(call, value, src, dst)
            out = _run(call, value, src, dst, attn)[0]
    except RuntimeError as error:
        if (found := typed(error)) is not error:
            raise found from None
        return declined("short", "the operator refused an argument, which the function's own checks name")
    if paths.recorder is not None:
        paths.recorder.took("short", paths.describe(score, value))
    return out


def _terms(call, value, src, dst):
    """src and dst as the operators take them."""
    if call[2] != "additive":
        return src, dst
    acc = _ACC[value.dtype]
    return as_type(src, acc), as_type(dst, acc)


def _run(call, value, src, dst, attn):
    _, handle, score, seed, slope, scale, dropout_p, positive = call
    with _BelowAutograd():
        out, kept, _ = _attend(
            handle.number, 0, SCORES[score], value, src, dst, attn, None, None, None, None, None, seed, None,
            slope, scale, dropout_p, 0, False, positive,
        )  # fmt: skip
    return out, kept


@called_directly
class _Attention(EagerFunction):
    """Of its result there is a second one for backward, as in `_autograd._Attention`."""

    @staticmethod
    def forward(ctx, call, *tensors):
        value, src, dst, attn = tensors
        terms = _terms(call, value, src, dst)
        out, kept = _run(call, value, *terms, attn)
        ctx.call, ctx.version = call, out._version
        if top_hooks(True) is None:
            ctx.kept, ctx.terms = out.detach(), None if terms[1] is dst else terms
            ctx.save_for_backward(*tensors, kept)
        else:
            ctx.kept = ctx.terms = None
            ctx.save_for_backward(*tensors, kept, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        call, out, terms = ctx.call, ctx.kept, ctx.terms
        value, src, dst, attn, kept, *saved = ctx.saved_tensors
        if out is None:
            (out,) = saved
        elif not retains_graph():
            ctx.kept = ctx.terms = None
        try:
            return None, *_backward(call, grad, (value, src, dst, attn), terms, kept, out, ctx)
        except RuntimeError as error:
            raise typed(error) from None


def _backward(call, grad, given, terms, kept, out, ctx):
    """The gradients of value, src, dst and attn."""
    graph, handle, score, seed, slope, scale, dropout_p, positive = call
    value, *ends, attn = given
    if terms is None or torch.is_grad_enabled():
        terms = _terms(call, value, *ends)
    if out._version != ctx.version:  # modified
        with torch.no_grad():
            out, _ = _run(call, value, *terms, attn)
    need = ctx.needs_input_grad
    if torch.is_grad_enabled():  # create_graph
        tensors = Tensors(value, *terms, attn, *_NO_EDGES, seed, None)
        wanted = Tensors(*need[1:], *_NO_EDGES, None, None)
        longer = EagerCall(graph, handle, score, Numbers(slope, scale, dropout_p, 0), False, positive)
        found = recorded_gradients(longer, (grad, None), tensors, out, None, (kept,), wanted)[:4]
        return [g if g is None else as_type(g, x.dtype) for g, x in zip(found, given)]
    with _BelowAutograd():
        of_value, of_src, of_dst, of_attn, *_ = _attend_backward(
            handle.number, 0, grad, None, SCORES[score], value, *terms, attn, None, None, None, None, None,
            seed, None, out, kept, positive, None, slope, scale, dropout_p, 0, NEED_DST if need[3] else 0,
        )  # fmt: skip
        return (
            of_value,
            of_src if of_src is None else as_type(of_src, ends[0].dtype),
            of_dst if of_dst is None else as_type(of_dst, ends[1].dtype),
            as_type(total(of_attn), attn.dtype) if need[4] else None,
        )
