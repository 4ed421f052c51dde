"""Graph Transformers of our own, on fused attention for a dfgnn.Graph, a DGLGraph or a block.

Layers with the contract of another library are beside them, under its names: :mod:`dfgnn.nn.pyg` has
torch_geometric's, :mod:`dfgnn.nn.dgl` DGL's. Such a drop-in has the arguments, parameters, initialisation,
state_dict and results of the layer that it is named after, and is a subclass of it where that library is
installed.

All layers are deterministic, and differentiable any number of times with respect to parameters and all
tensors of real numbers that they take. A layer's ``attention`` is the function of :mod:`dfgnn.functional`
that it calls; with the function of the same name in :mod:`dfgnn.reference` it is the same layer on plain
PyTorch.
"""

from importlib import import_module

from . import dgl
from ._fused_or_upstream import FallbackWarning
from ._graph import ZeroInDegreeError
from .edge_transformer import EdgeGraphTransformerConv, EdgeGraphTransformerLayer
from .exphormer import ExphormerAttention
from .graph_transformer import GraphTransformerConv, GraphTransformerLayer

__all__ = [
    "EdgeGraphTransformerConv",
    "EdgeGraphTransformerLayer",
    "ExphormerAttention",
    "FallbackWarning",
    "GraphTransformerConv",
    "GraphTransformerLayer",
    "ZeroInDegreeError",
    "dgl",
]


def __getattr__(name: str):
    if name == "pyg":  # imported at its first use, because it imports torch_geometric
        return import_module(".pyg", __name__)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; "
        "torch_geometric's layers are in dfgnn.nn.pyg, DGL's in dfgnn.nn.dgl"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), "pyg"})
