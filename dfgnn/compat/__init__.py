"""DGL's API without DGL, for scripts that were written for it.

With :func:`install_as_dgl`, or ``python -m dfgnn.run --as-dgl script.py``, a script runs unchanged. Or change
its imports:

============================================== =======================================================
``import dgl``                                 ``import dfgnn.compat as dgl``
``import dgl.function as fn``                  ``import dfgnn.compat.function as fn``
``import dgl.sparse as dglsp``                 ``import dfgnn.compat.sparse as dglsp``
``from dgl import ops``                        ``from dfgnn import ops``
``from dgl.nn.functional import edge_softmax`` ``from dfgnn.functional.ops import edge_softmax``
``import dgl.nn as dglnn``                     ``import dfgnn.compat.nn as dglnn``
``from dgl.nn import GATConv``                 ``from dfgnn.nn.dgl import GATConv``
``from dgl.data import CoraGraphDataset``      ``from dfgnn.compat.data import CoraGraphDataset``
``from dgl.dataloading import ...``            ``from dfgnn.compat.dataloading import ...``
============================================== =======================================================

:class:`DGLGraph` is a graph with features, of one or several types of nodes and edges; built-in message
functions run on :mod:`dfgnn.ops`, others in Python. The documentation ("DGL without DGL") lists what is
missing.
"""

import importlib
from typing import Any

import torch

from ..nn.dgl import DGLError
from . import function, sparse
from .as_dgl import VERSION, install_as_dgl, lacks
from .base import ALL, EID, ETYPE, NID, NTYPE
from .batch import batch, unbatch
from .block import DGLBlock, create_block, to_block
from .changed import add_reverse_edges, metapath_reachable_graph, reverse, to_bidirected, to_simple
from .create import (
    bipartite_from_scipy,
    from_networkx,
    from_scipy,
    graph,
    heterograph,
    rand_graph,
    to_homogeneous,
)
from .data import load_graphs, save_graphs
from .editing import (
    add_edges,
    add_nodes,
    add_self_loop,
    remove_edges,
    remove_nodes,
    remove_self_loop,
)
from .graph import DGLGraph
from .readout import (
    broadcast_edges,
    broadcast_nodes,
    max_edges,
    max_nodes,
    mean_edges,
    mean_nodes,
    readout_edges,
    readout_nodes,
    softmax_edges,
    softmax_nodes,
    sum_edges,
    sum_nodes,
)
from .subgraph import (
    edge_subgraph,
    edge_type_subgraph,
    in_subgraph,
    node_subgraph,
    node_type_subgraph,
    out_subgraph,
)
from .transforms import AddReverse, AddSelfLoop, BaseTransform, Compose, RemoveSelfLoop, RowFeatNormalizer

DGLHeteroGraph = DGLGraph
__version__ = VERSION


def __getattr__(name: str) -> Any:
    """DGL's modules that are imported at their first use, and an error for names that are not here."""
    if name in ("data", "dataloading", "nn"):
        return importlib.import_module(f".{name}", __name__)
    if name == "ops":
        return importlib.import_module("dfgnn.ops")
    raise AttributeError(lacks(f"dgl.{name}"), name=name)


def seed(val: Any) -> None:
    """Seeds PyTorch's generator, from which all random numbers here come."""
    torch.manual_seed(val)


__all__ = [
    "ALL",
    "EID",
    "ETYPE",
    "NID",
    "NTYPE",
    "AddReverse",
    "AddSelfLoop",
    "BaseTransform",
    "Compose",
    "DGLBlock",
    "DGLError",
    "DGLGraph",
    "DGLHeteroGraph",
    "RemoveSelfLoop",
    "RowFeatNormalizer",
    "add_edges",
    "add_nodes",
    "add_reverse_edges",
    "add_self_loop",
    "batch",
    "bipartite_from_scipy",
    "broadcast_edges",
    "broadcast_nodes",
    "create_block",
    "edge_subgraph",
    "edge_type_subgraph",
    "from_networkx",
    "from_scipy",
    "function",
    "graph",
    "heterograph",
    "in_subgraph",
    "install_as_dgl",
    "load_graphs",
    "max_edges",
    "max_nodes",
    "mean_edges",
    "mean_nodes",
    "metapath_reachable_graph",
    "node_subgraph",
    "node_type_subgraph",
    "out_subgraph",
    "rand_graph",
    "readout_edges",
    "readout_nodes",
    "remove_edges",
    "remove_nodes",
    "remove_self_loop",
    "reverse",
    "save_graphs",
    "seed",
    "softmax_edges",
    "softmax_nodes",
    "sparse",
    "sum_edges",
    "sum_nodes",
    "to_bidirected",
    "to_block",
    "to_homogeneous",
    "to_simple",
    "unbatch",
]  # fmt: skip
