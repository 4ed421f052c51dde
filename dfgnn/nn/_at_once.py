"""When a layer can be computed at once (`dfgnn._layers`), and what it then hands over."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._layers import PairTensors, can_fuse, pair_layer
from ._terms import plain_linear

__all__ = ["are_plain", "dot_at_once", "under_autocast"]

_PLAIN = (nn.Parameter, Tensor)


def under_autocast(x: Tensor, *weights: Tensor | None) -> tuple[Any, ...]:
    """x and weights as a linear layer takes them here: under autocast in its dtype."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return (x, *weights)
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype is dtype else t.to(dtype) for t in (x, *weights))


def are_plain(x: Tensor, tensors: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether these parameters are ordinary tensors of one of the types, on the device of x."""
    device = x.device
    return all(t is None or type(t) in _PLAIN and t.dtype in dtypes and t.device == device for t in tensors)


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
    """``[N_dst, H * D]`` of a layer of dot products with these projections, where `pair_layer` gives it; else
    None. key, query: None for what ``value`` gives. x_dst: None for x, or its first rows where ``value``
    projects the query, too."""
    if torch.compiler.is_compiling():
        return None
    parameters: list[Any] = []
    for linear in (value, key, query):
        found = (None, None) if linear is None else plain_linear(linear)
        if found is None:
            return None
        parameters += found
    x, x_dst, *parameters = under_autocast(x, x_dst, *parameters)
    if not (
        can_fuse(graph, x, parameters[0])
        and (query is None or can_fuse(graph, x if x_dst is None else x_dst, parameters[4]))
        and are_plain(x, tuple(parameters), (x.dtype,))
    ):
        return None
    tensors = PairTensors._make([x, x_dst, *parameters, None, None, None, None, None])
    return pair_layer(
        graph, "dot", tensors, layer.num_heads, scale=1 / math.sqrt(layer.out_feats), dropout_p=dropout_p
    )
