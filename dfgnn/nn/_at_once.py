"""When a layer can be computed at once (`dfgnn._layers`), which is decided here alone.

A layer says what it consists of: its projections, vectors and numbers. It is computed at once if these are
all that it is (`knows_all_of`), if nothing hangs on them, and if the tensors are such as the functions take.
All else takes the way of single operations, which knows every option.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from .._autograd import is_eager
from .._layers import PairTensors, can_fuse, gat_layer, pair_layer
from ._terms import plain_linear

__all__ = ["dot_at_once", "gat_at_once", "is_first_rows", "knows_all_of", "pair_at_once"]

_PLAIN = (nn.Parameter, Tensor)
_NONE = None, None


@cache
def knows_all_of(cls: type) -> bool:
    """Whether the options that a layer is made with are those that its class names in ``AT_ONCE``: what is
    given at once takes care of these. A class without that name is not computed at once, nor one whose
    constructor has learnt more since, as a library's layers do."""
    owner = next((c for c in cls.__mro__ if "AT_ONCE" in vars(c)), None)
    if owner is None:
        return False
    options = inspect.signature(owner.__init__).parameters.values()  # type: ignore[misc]
    named = {x.name for x in options if x.kind is not inspect.Parameter.VAR_KEYWORD}
    return named <= {"self", *vars(owner)["AT_ONCE"].split()}


def _applies(layer: nn.Module, attention: Callable[..., Any]) -> bool:
    return (
        not torch.compiler.is_compiling()
        and getattr(layer, "attention", attention) is attention
        and knows_all_of(type(layer))  # type: ignore[arg-type]
    )


def is_first_rows(x_dst: Tensor, x: Tensor) -> bool:
    """Whether these are the first rows of x, or x itself, for autograd, too: as samplers give a block's
    destinations, ``x[:num_dst]``. Who has the gradient of x then needs none of theirs."""
    if x_dst is x:
        return True
    if (
        not is_eager(x)
        or not is_eager(x_dst)
        or x.layout is not torch.strided
        or x_dst.layout is not torch.strided
        or x_dst.data_ptr() != x.data_ptr()
        or (x_dst.dtype, x_dst.device, x_dst.dim()) != (x.dtype, x.device, x.dim())
        or (x_dst.stride(), x_dst.shape[1:]) != (x.stride(), x.shape[1:])
        or len(x_dst) > len(x)
    ):
        return False
    if not torch.is_grad_enabled() or not (x.requires_grad or x_dst.requires_grad):
        return True
    node = x_dst.grad_fn
    if node is None or node.name() != "SliceBackward0" or x_dst._backward_hooks or x_dst.retains_grad:
        return False
    return x.requires_grad and node.next_functions[0] == tuple(torch.autograd.graph.get_gradient_edge(x))[:2]


def _in_autocast(x: Tensor, x_dst: Tensor | None) -> tuple[Tensor, Tensor | None, bool]:
    """Features as a linear layer takes them here; and whether that is the dtype of autocast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, x_dst, False
    dtype = torch.get_autocast_dtype(kind)
    if x_dst is not None and x_dst.dtype is not dtype:
        x_dst = x_dst.to(dtype)
    return x if x.dtype is dtype else x.to(dtype), x_dst, True


def _are_plain(x: Tensor, tensors: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether these parameters are ordinary tensors of one of the types, on the device of x."""
    device = x.device
    for t in tensors:
        if t is not None and not (type(t) in _PLAIN and t.dtype in dtypes and t.device == device):
            return False
    return True


def _result(x: Tensor, wide: Any) -> torch.dtype:
    """The dtype of the result: x's, or what it becomes with `wide`, a tensor or a dtype."""
    if wide is None:
        return x.dtype
    return torch.promote_types(x.dtype, wide.dtype if isinstance(wide, Tensor) else wide)


def gat_at_once(
    layer: Any,
    graph: Any,
    x: Tensor,
    linear: Any,
    attn_src: Tensor,
    attn_dst: Tensor,
    bias: Tensor | None,
    *,
    dropout_p: float,
    wide: Tensor | None = None,
) -> Tensor | None:
    """``[N_dst, H * D]`` of an additive layer with its bias, in the dtype of features and ``wide`` together,
    where `gat_layer` gives it; else None."""
    if not _applies(layer, functional.gat_attention):
        return None
    plain = plain_linear(linear)
    if plain is None or plain[1] is not None:
        return None
    x, _, autocast = _in_autocast(x, None)
    known = (x.dtype, torch.float32)
    if not (
        can_fuse(graph, x, plain[0], autocast) and _are_plain(x, (attn_src, attn_dst, bias, plain[0]), known)
    ):
        return None
    return gat_layer(
        graph, x, plain[0], attn_src, attn_dst, bias, negative_slope=layer.negative_slope,
        dropout_p=dropout_p, dtype=_result(x, wide),
    )  # fmt: skip


def pair_at_once(
    layer: Any,
    graph: Any,
    score: str,
    x: Tensor,
    x_dst: Tensor | None,
    value: Any,
    key: Any,
    query: Any,
    *,
    heads: int,
    skip: Any = None,
    attn: Tensor | None = None,
    bias: Tensor | None = None,
    negative_slope: float = 1.0,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    wide: Any = None,
) -> Tensor | None:
    """``[N_dst, H * D]`` of a layer with a score of pairs and these projections, in the dtype of features and
    ``wide`` together, where `pair_layer` gives it; else None.

    key, query, skip: None for what ``value`` gives, or none. x_dst: None for x, or its first rows where
    ``value`` projects the query, too.
    """
    function = functional.dot_attention if score == "dot" else functional.gatv2_attention
    if not _applies(layer, function):
        return None
    parameters: list[Any] = []
    for linear in (value, key, query, skip):
        found = _NONE if linear is None else plain_linear(linear)
        if found is None:
            return None
        parameters += found
    x, x_dst, autocast = _in_autocast(x, x_dst)
    known = (x.dtype, torch.float32) if autocast else (x.dtype,)
    weight, at_dst = parameters[0], [w for w in parameters[4::2] if w is not None]
    shape = weight.shape if x_dst is None else (len(weight), x_dst.shape[-1])
    if not (
        can_fuse(graph, x, weight, autocast)
        and (key is None or parameters[2].shape == weight.shape)
        and all(w.shape == shape for w in at_dst)
        and (x_dst is None or not at_dst or can_fuse(graph, x_dst, at_dst[0], autocast))
        and _are_plain(x, (*parameters, attn, bias), known)
    ):
        return None
    tensors = PairTensors._make([x, x_dst, *parameters[:6], attn, bias, *parameters[6:], None])
    return pair_layer(
        graph, score, tensors, heads, negative_slope=negative_slope, scale=scale, dropout_p=dropout_p,
        dtype=_result(x, wide),
    )  # fmt: skip


def dot_at_once(
    graph: Any,
    x: Tensor,
    x_dst: Tensor | None,
    value: nn.Module,
    key: nn.Module | None,
    query: nn.Module | None,
    layer: Any,
    dropout_p: float = 0.0,
) -> Tensor | None:
    """`pair_at_once` of a layer of dot products with DGL's contract."""
    return pair_at_once(
        layer, graph, "dot", x, x_dst, value, key, query, heads=layer.num_heads,
        scale=1 / math.sqrt(layer.out_feats), dropout_p=dropout_p,
    )  # fmt: skip
