"""Layers on fused attention for a DGLGraph, a block or a dfgnn.Graph.

All but the Graph Transformers have the contracts of the layers of the same names in ``dgl.nn``, and are
subclasses of them where DGL is installed (``dgl``, which makes them at their first use).
``pyg`` holds the layers of torch_geometric.

A layer that is called a drop-in has the arguments, parameters, initialisation, state_dict and results of the
layer that it is named after. All are deterministic, and differentiable any number of times with respect to
parameters and all tensors of real numbers that they take. A layer's ``attention`` is the function of
:mod:`dfgnn.functional` that it calls; with the function of the same name in :mod:`dfgnn.reference` it is the
same layer on plain PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from . import dgl
from ._errors import DGLError
from ._fused_or_upstream import FallbackWarning
from ._graph import ZeroInDegreeError
from .edge_transformer import EdgeGraphTransformerConv, EdgeGraphTransformerLayer
from .exphormer import ExphormerAttention
from .graph_transformer import GraphTransformerConv, GraphTransformerLayer

if TYPE_CHECKING:
    from .dgl import *  # noqa: F403

__all__ = [
    "DGLError",
    "EdgeGraphTransformerConv",
    "EdgeGraphTransformerLayer",
    "ExphormerAttention",
    "FallbackWarning",
    "GraphTransformerConv",
    "GraphTransformerLayer",
    "ZeroInDegreeError",
]
__all__ += dgl.__all__


def __getattr__(name: str):
    if name == "pyg":  # imported at its first use, because it imports torch_geometric
        return import_module(".pyg", __name__)
    if name not in dgl.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(dgl, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
