"""The first argument of the public functions: a Graph, or an object that a Graph can be made of."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..graph import Graph, GraphPart
from ..graph import cache as _kept
from ..graph import constructors as _constructors
from ..graph.of_dgl import is_dgl, of_dgl
from ..runtime import torch_internals as internals
from .compiler_graph import EdgeList, is_traced

#: What public functions take for a graph: a Graph, DGLGraph, ``edge_index``, sparse tensor or GraphPart.
GraphLike: TypeAlias = Graph | GraphPart | Tensor | Any


def graph_of(function: str, given: Any, src: Any = None, dst: Any = None) -> Any:
    """The graph of a function's first argument: the argument itself if it is a Graph, GraphPart or EdgeList;
    the cached Graph of a DGLGraph or ``edge_index``; while a compiler records, an EdgeList. Anything else is
    returned unchanged, and `Checker` raises an error.

    The sizes of an ``edge_index`` are the numbers of rows of src and dst, tensors with a row per source and
    per destination. Without ``dst`` there are as many destinations as sources. Without both, the largest
    id + 1 is the number of nodes.
    """
    graph = given
    if isinstance(given, Tensor) or hasattr(given, "sparse_sizes"):
        if isinstance(given, Tensor) and _is_features(given):
            return given
        return _of_edges(function, given, _rows(src), _rows(dst))
    if not isinstance(given, (Graph, EdgeList, GraphPart)):
        graph = getattr(given, "dfgnn_graph", None)  # the Graph of a DGLGraph of dfgnn.compat
        if not isinstance(graph, Graph):
            if not is_dgl(given):
                return given
            if torch.compiler.is_dynamo_compiling():
                internals.graph_break(
                    f"{function}: graph: expected a dfgnn.Graph (Graph.from_dgl) or an edge_index, as "
                    "torch.compile cannot look into DGL's, got one"
                )
            graph = of_dgl(given)
    return graph


def _of_edges(function: str, edge_index: Any, num_src: int | None, num_dst: int | None) -> Any:
    if num_src is None or not (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided):
        if is_traced(edge_index) and num_src is None:
            raise ValueError(
                f"{function}: graph: expected a Graph, which knows its sizes, where a compiler records and "
                "edge_index has no values that would tell, got an edge_index"
            )
        return Graph.cached(edge_index)  # a sparse tensor knows its sizes
    size = num_src, num_src if num_dst is None else num_dst
    if is_traced(edge_index):
        return EdgeList(edge_index, *size)
    told = (
        "the tensors have {}, one per node; Graph.cached(edge_index, num_src=..., num_dst=...) states others"
    )
    find = _kept.graph_of_uncompiled if torch.compiler.is_compiling() else _kept.graph_of
    return find(edge_index, *size, where=function, sizes=told)[0]


def _is_features(x: Tensor) -> bool:
    return x.layout == torch.strided and (x.is_floating_point() or x.is_complex())


def _rows(x: Any) -> int | None:
    """How many rows a tensor has, if it is one."""
    return x.shape[0] if isinstance(x, Tensor) and x.dim() else None


def _cached(edge_index: Any, num_src: int | None, num_dst: int | None) -> Any:
    """See `Graph.cached`; of an ``edge_index`` without values, what stands for the graph."""
    if num_src is not None and num_dst is not None and is_traced(edge_index):
        return EdgeList(edge_index, num_src, num_dst)
    return _kept.cached(edge_index, num_src, num_dst)


_constructors.make_cached = _cached  # constructors.py cannot import this module
