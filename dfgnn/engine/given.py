"""The first argument of the public functions: a Graph, or an object that a Graph can be made of."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..graph import Graph, GraphPart
from ..graph import cache as _kept
from ..graph.cache import sizes_of
from ..graph.of_dgl import is_dgl, of_dgl
from ..runtime import torch_internals as internals
from .compiler_graph import EdgeList, is_traced
from .edge_rows import by_edges

#: What public functions take for a graph: a Graph, DGLGraph, ``edge_index``, sparse tensor or GraphPart.
GraphLike: TypeAlias = Graph | GraphPart | Tensor | Any


def graph_of(function: str, given: Any, size: Any, src: Any = None, dst: Any = None) -> Any:
    """The graph of a function's first argument: the argument itself if it is a Graph, GraphPart or EdgeList;
    the cached Graph of a DGLGraph or ``edge_index``; while a compiler records, an EdgeList. Anything else is
    returned unchanged, and `Checker` raises an error.

    size: (num_src, num_dst), or None. Without it the sizes of an ``edge_index`` are the numbers of rows of
    src and dst, tensors with a row per source and per destination. Without ``dst`` there are as many
    destinations as sources. Without ``src`` there are as many sources as destinations, or more if an id is
    larger. Without both, the largest id + 1 is the number of nodes.
    """
    pair = sizes_of(function, size)
    graph = given
    if isinstance(given, Tensor) or hasattr(given, "sparse_sizes"):
        if isinstance(given, Tensor) and _is_features(given):
            return given
        return _of_edges(function, given, pair, _rows(src), _rows(dst))
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
    if pair is not None and pair != (graph.num_src, graph.num_dst):
        raise ValueError(
            f"{function}: size: expected {graph.num_src, graph.num_dst}, the graph's, or None, got {pair}"
        )
    return graph


def _of_edges(
    function: str, edge_index: Any, size: tuple[int, int] | None, num_src: int | None, num_dst: int | None
) -> Any:
    told = "size says {}"
    traced = is_traced(edge_index)
    if size is None and not (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided):
        return Graph.cached(edge_index)  # a sparse tensor, which knows its sizes
    if size is None and num_src is not None:
        size = num_src, num_src if num_dst is None else num_dst
        told = "the tensors have {}, one per node, unless size=(num_src, num_dst) is given"
    elif size is None and num_dst is not None:  # src is None: there may be more sources than num_dst
        size = num_dst if traced else _kept.at_least(edge_index, num_dst, function), num_dst
        told = "the tensors have {}, one per node, unless size=(num_src, num_dst) is given"
    if traced:
        if size is None:
            raise ValueError(
                f"{function}: size: expected (num_src, num_dst) where a compiler records and edge_index has "
                "no values that would tell, got None"
            )
        return EdgeList(edge_index, *size)
    if size is None:
        return Graph.cached(edge_index)
    find = _kept.graph_of_uncompiled if torch.compiler.is_compiling() else _kept.graph_of
    return find(edge_index, *size, where=function, sizes=told)[0]


def _is_features(x: Tensor) -> bool:
    return x.layout == torch.strided and (x.is_floating_point() or x.is_complex())


def _rows(x: Any) -> int | None:
    """How many rows a tensor has, if it is one."""
    return x.shape[0] if isinstance(x, Tensor) and x.dim() else None


def edges_as_sources(function: str, graph: Any, key_at: Any) -> Any:
    """The graph from each edge to its destination, on which rows of edges are rows of sources."""
    if key_at != "edges":
        raise ValueError(f"{function}: key_at: expected 'nodes' or 'edges', got {key_at!r}")
    if isinstance(graph, GraphPart):
        raise NotImplementedError(
            f"{function}: key_at: expected 'nodes' for a {type(graph).__name__}, got 'edges'"
        )
    return by_edges(graph) if isinstance(graph, (Graph, EdgeList)) else graph
