"""Steps of layers whose gradients PyTorch adds up in 16 bits, where a sum of ones stops at 256 (bfloat16) or
2,048 (float16): the same steps with sums in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..runtime.rules import rows_at
from ._linear import all_hooked, is_untouched

HALF = torch.float16, torch.bfloat16


def rows_of_types(table: Tensor, types: Tensor) -> Tensor:
    """table[types], rows ``[N, ...]`` of ``[T, ...]``. The gradient of a row of the table is a sum of as many
    rows as have its type."""
    if table.dtype in HALF:
        return rows_at(table.float(), types).to(table.dtype)
    return rows_at(table, types)


def normalized(norm: nn.Module, h: Tensor) -> Tensor:
    """``norm`` of h ``[N, *, F]``, flattened to rows: BatchNorm1d takes ``[rows, F]``."""
    rows = h.flatten(0, -2)
    if isinstance(norm, nn.LayerNorm) and _loses_sums(norm, rows):
        # One group of all channels: the same function, whose gradients are sums in float32.
        return F.group_norm(rows, 1, norm.weight, norm.bias, norm.eps).view_as(h)
    return norm(rows).view_as(h)


def _loses_sums(norm: nn.LayerNorm, rows: Tensor) -> bool:
    """Whether this is LayerNorm in 16 bits on the CPU: torch 2.13 adds its gradients of weight and bias up in
    the type of the weight."""
    return (
        type(norm) is nn.LayerNorm
        and rows.is_cpu
        and rows.dtype in HALF
        and norm.weight is not None
        and norm.weight.dtype == rows.dtype
        and norm.normalized_shape == rows.shape[1:]
        and len(rows) > 1  # group_norm takes no single number
        and is_untouched(norm)
        and not all_hooked()
    )
