"""``dgl.nn``: the attention layers of :mod:`dfgnn.nn.dgl`, ``edge_softmax``, pooling, and GraphConv."""

from __future__ import annotations

from typing import Any

from ...functional.ops import edge_softmax
from ...nn import dgl as _attention
from .conv import GraphConv, HeteroGraphConv, Identity, Sequential
from .glob import AvgPooling, MaxPooling, SumPooling, WeightAndSum

__all__ = [*_attention.__all__, "AvgPooling", "GraphConv", "HeteroGraphConv", "Identity",
           "MaxPooling", "Sequential", "SumPooling", "WeightAndSum", "edge_softmax"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _attention.__all__:
        return getattr(_attention, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
