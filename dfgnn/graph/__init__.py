"""Graph, what it is made of (``convert``), other orders of its nodes (``reorder``), several types of nodes
and edges (``hetero``), and parts of a graph that several processes share (``part``)."""

from .graph import CSR, DegreeStats, Graph
from .hetero import Homogeneous, heterograph, to_homogeneous
from .part import GraphPart
from .reorder import METHODS, Reordering

__all__ = [
    "CSR",
    "METHODS",
    "DegreeStats",
    "Graph",
    "GraphPart",
    "Homogeneous",
    "Reordering",
    "heterograph",
    "to_homogeneous",
]
