"""The record of an attention call. The public functions make it from their checked arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..runtime.arguments import Numbers, Tensors


class EdgeTerms(NamedTuple):
    """What edges add to key and value: features [E, d] or [E, H, D], or None for no term, and their
    projections [H, D, d] or None. If key and value have the same tensor, it is one term."""

    key: Tensor | None
    key_proj: Tensor | None
    value: Tensor | None
    value_proj: Tensor | None


class AttentionInputs(NamedTuple):
    """One attention call whose arguments have been checked."""

    graph: Any  # a Graph, or what stands for one: RangedGraph, GraphPart, EdgeList
    score: str  # a name in `SCORES`
    tensors: Tensors
    numbers: Numbers
    return_attention: bool = False
    schedule: str = "auto"
    sink: Tensor | None = None  # [H], in the accumulation type
    terms: EdgeTerms | None = None  # of dot attention; `edge_projection` computes them, the paths do not
