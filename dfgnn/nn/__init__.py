"""Layers on fused attention for a DGLGraph, a block or a dfgnn.Graph.

All but GraphTransformerConv and GraphTransformerLayer have the contracts of the layers of the same names in
``dgl.nn``; DGL need not be installed.
"""

from ._graph import ZeroInDegreeError
from .agnn import AGNNConv
from .dotgat import DotGatConv
from .edgegat import EdgeGATConv
from .egat import EGATConv
from .gat import GATConv
from .gatv2 import GATv2Conv
from .graph_transformer import GraphTransformerLayer
from .hgt import HGTConv
from .transformer import GraphTransformerConv

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
