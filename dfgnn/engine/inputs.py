"""The record of an attention call, which the public functions make of their checked arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..runtime.arguments import Numbers, Tensors


class AttentionInputs(NamedTuple):
    """One attention call whose arguments have been checked."""

    graph: Any  # a Graph, or what stands for one: RangedGraph, GraphPart, EdgeList
    score: str  # a name in `SCORES`
    tensors: Tensors
    numbers: Numbers
    return_attention: bool = False
    schedule: str = "auto"
    sink: Tensor | None = None  # [H], in the type of sums
