"""Layers on fused attention for a DGLGraph, a block or a dfgnn.Graph; GATConv has DGL's contract."""

from ._graph import ZeroInDegreeError
from .gat import GATConv
from .transformer import GraphTransformerConv

__all__ = ["GATConv", "GraphTransformerConv", "ZeroInDegreeError"]
