"""Graph, what it is made of (``convert``) and other orders of its nodes (``reorder``)."""

from .graph import CSR, DegreeStats, Graph
from .reorder import METHODS, Reordering

__all__ = ["CSR", "METHODS", "DegreeStats", "Graph", "Reordering"]
