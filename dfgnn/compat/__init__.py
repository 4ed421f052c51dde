"""DGL's names for scripts that are to run without DGL: change the imports, keep the rest.

============================================== =======================================================
``import dgl``                                 ``import dfgnn.compat as dgl``
``import dgl.function as fn``                  ``import dfgnn.compat.function as fn``
``from dgl import ops``                        ``from dfgnn import ops``
``from dgl.nn.functional import edge_softmax`` ``from dfgnn.ops import edge_softmax``
``import dgl.nn as dglnn``                     ``import dfgnn.nn as dglnn``
``from dgl.nn import GATConv``                 ``from dfgnn.nn import GATConv``
``from dgl.data import CoraGraphDataset``      ``from dfgnn.compat.data import CoraGraphDataset``
============================================== =======================================================

:class:`DGLGraph` is a graph with features, of one or several types of nodes and edges; built-in message
functions run on :mod:`dfgnn.ops`. Not here: reduce functions written in Python, subgraphs, samplers
(:mod:`dfgnn.sampling` has one) and what changes a graph in place.
"""

from . import function
from .graph import (
    DGLGraph,
    add_reverse_edges,
    add_self_loop,
    batch,
    from_scipy,
    graph,
    heterograph,
    remove_self_loop,
    reverse,
    to_bidirected,
    to_homogeneous,
)
from .transforms import AddReverse, AddSelfLoop, Compose, RemoveSelfLoop, RowFeatNormalizer

#: Names of the features that :func:`to_homogeneous` gives.
NTYPE, ETYPE, NID, EID = "_TYPE", "_TYPE", "_ID", "_ID"

__all__ = [
    "EID",
    "ETYPE",
    "NID",
    "NTYPE",
    "AddReverse",
    "AddSelfLoop",
    "Compose",
    "DGLGraph",
    "RemoveSelfLoop",
    "RowFeatNormalizer",
    "add_reverse_edges",
    "add_self_loop",
    "batch",
    "from_scipy",
    "function",
    "graph",
    "heterograph",
    "remove_self_loop",
    "reverse",
    "to_bidirected",
    "to_homogeneous",
]
