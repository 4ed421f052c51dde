"""Layers on fused attention for a DGLGraph, a block or a dfgnn.Graph.

All but GraphTransformerConv and GraphTransformerLayer have the contracts of the layers of the same names in
``dgl.nn`` (``dgl``); DGL need not be installed. ``pyg`` holds the layers of torch_geometric.
"""

from ._graph import ZeroInDegreeError
from .dgl import AGNNConv, DotGatConv, EdgeGATConv, EGATConv, GATConv, GATv2Conv, HGTConv
from .graph_transformer import GraphTransformerConv, GraphTransformerLayer

__all__ = [
    "AGNNConv",
    "DotGatConv",
    "EGATConv",
    "EdgeGATConv",
    "GATConv",
    "GATv2Conv",
    "GraphTransformerConv",
    "GraphTransformerLayer",
    "HGTConv",
    "ZeroInDegreeError",
]
