"""Layers on fused attention: DGL's names, arguments and state_dict, on a DGLGraph, a block or a dfgnn.Graph."""

from ._graph import ZeroInDegreeError
from .gat import GATConv
from .transformer import GraphTransformerConv

__all__ = ["GATConv", "GraphTransformerConv", "ZeroInDegreeError"]
