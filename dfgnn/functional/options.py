"""The options of the attention functions, for type checkers, which see what ``return_attention`` returns.

What they mean is said where the functions are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor


class Options(TypedDict, total=False):
    edge_mask: Tensor | None
    edge_weight: Tensor | None
    dropout_p: float
    schedule: str
    size: tuple[int, int] | None


class AgnnOptions(Options, total=False):
    beta: float | Tensor


class FlexOptions(Options, total=False):
    params: Sequence[Tensor]
    out_bias: Tensor | None
    chunk_edges: int | None


class ScoreOptions(Options, total=False):
    out_bias: Tensor | None
    sink: Tensor | None
    value_at: str


class EdgeProductOptions(Options, total=False):
    scale: float | None
    clamp: float | None
    edge_bias: Tensor | None
    out_bias: Tensor | None


class GatV2Options(Options, total=False):
    out_bias: Tensor | None
    sink: Tensor | None
    negative_slope: float
    edge_bias: Tensor | None
    edge_gate: Tensor | None
    edge_feat: Tensor | None


class GatOptions(GatV2Options, total=False):
    bias_after: bool


class DotOptions(GatOptions, total=False):
    scale: float | None
    key_at: str
    edge_feat_in: str
    edge_feat_value: Tensor | None
    edge_attr: Tensor | None
    edge_proj: Tensor | None
    edge_proj_bias: Tensor | None
    edge_proj_value: Tensor | None
    edge_proj_bias_value: Tensor | None
    edge_type: Tensor | None
    edge_table: Tensor | None
