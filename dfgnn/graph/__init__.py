"""Graph, what it is made of (``convert``), other orders of its nodes (``reorder``), and parts of a graph that
several processes share (``part``)."""

from .graph import CSR, DegreeStats, Graph
from .part import GraphPart
from .reorder import METHODS, Reordering

__all__ = ["CSR", "METHODS", "DegreeStats", "Graph", "GraphPart", "Reordering"]
