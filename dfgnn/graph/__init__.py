"""Graph, its constructors (``build``, ``convert``), the graphs cached by ``edge_index`` (``cache``), other
orders of nodes (``reorder``), several types of nodes and edges (``hetero``), graphs of ``fixed_capacity``,
parts of a graph that several processes share (``part``), graphs of 2**31 edges or more (``ranges``), and
mini-batches of sampled neighbourhoods (``sampling``, ``hops``)."""

from .graph import CSR, DegreeStats, Graph
from .hetero import Homogeneous, heterograph, to_homogeneous
from .part import GraphPart
from .ranges import RangedGraph
from .reorder import METHODS, Reordering

__all__ = [
    "CSR",
    "METHODS",
    "DegreeStats",
    "Graph",
    "GraphPart",
    "Homogeneous",
    "RangedGraph",
    "Reordering",
    "heterograph",
    "to_homogeneous",
]
