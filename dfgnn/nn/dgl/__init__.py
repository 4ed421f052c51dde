"""Layers with the contracts of the layers of the same names in ``dgl.nn``; DGL need not be installed."""

from .agnn import AGNNConv
from .dotgat import DotGatConv
from .edgegat import EdgeGATConv
from .egat import EGATConv
from .gat import GATConv
from .gatv2 import GATv2Conv
from .hgt import HGTConv

__all__ = ["AGNNConv", "DotGatConv", "EGATConv", "EdgeGATConv", "GATConv", "GATv2Conv", "HGTConv"]
