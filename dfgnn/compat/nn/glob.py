"""Pooling over the nodes of each graph of a batch, with DGL's contract."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..readout import readout


class _Pooling(nn.Module):
    _op = ""

    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        """``[graphs, ...]`` from ``feat [N, ...]``."""
        return readout(graph.batch_num_nodes(), feat, self._op)


class SumPooling(_Pooling):
    """The sum over the nodes of each graph."""

    _op = "sum"


class AvgPooling(_Pooling):
    """The mean over the nodes of each graph."""

    _op = "mean"


class MaxPooling(_Pooling):
    """The largest value over the nodes of each graph."""

    _op = "max"


class WeightAndSum(nn.Module):
    """A sum over the nodes of each graph, weighted by a gate between 0 and 1."""

    def __init__(self, in_feats: int):
        super().__init__()
        self.in_feats = in_feats
        self.atom_weighting = nn.Sequential(nn.Linear(in_feats, 1), nn.Sigmoid())

    def forward(self, g: Any, feats: Tensor) -> Tensor:
        return readout(g.batch_num_nodes(), feats * self.atom_weighting(feats), "sum")
