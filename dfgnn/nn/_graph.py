"""The graph that a layer gets, the check of its in-degrees, and the features of sources and destinations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..engine.argument_checks import DTYPES, no_graph
from ..engine.compiler_graph import in_use
from ..graph import Graph, GraphPart
from ..graph.graph import OF_NUMBER
from ..graph.of_dgl import is_dgl, of_dgl
from ..runtime import torch_internals as internals
from ..runtime.ops import python_operator
from ..runtime.torch_internals import is_exporting
from ._errors import DGLError, wrong_argument, wrong_features


class ZeroInDegreeError(DGLError, ValueError):
    """A destination has no in-edges, and the layer does not have ``allow_zero_in_degree``."""


def as_graph(graph: Any, layer: nn.Module | None = None) -> Graph:
    """``graph`` itself, if it is ours (or a part of one that processes share); or the Graph of a DGLGraph or
    block, converted once and cached as long as DGL's object lives. layer: the layer that errors name.

    Raises TypeError for anything else, and ValueError for several edge types or malformed structure.
    """
    if isinstance(graph, (Graph, GraphPart)):
        return cast(Graph, graph)
    ours = getattr(graph, "dfgnn_graph", None)  # the Graph of a DGLGraph of dfgnn.compat
    if isinstance(ours, Graph):
        return ours
    if not is_dgl(graph):
        where = "" if layer is None else f"{type(layer).__name__}: "
        raise TypeError(f"{where}graph: {no_graph(graph, 'a dfgnn.Graph or a DGLGraph')}")
    if torch.compiler.is_dynamo_compiling():
        internals.graph_break(
            "graph: expected a dfgnn.Graph (Graph.from_dgl), as torch.compile cannot look into DGL's, got one"
        )
    return of_dgl(graph)


def rows_in_use(graph: Any, rows: Tensor) -> Tensor:
    """``rows [E, ...]``. In a graph of fixed capacity the rows of unused edges, which may be NaN, are set to
    0, and so is their gradient. Compiled code takes them as they are: only operators see the graph."""
    return in_use(graph.edge_mask, rows)


def check_in_degrees(graph: Any, converted: Graph, where: str = "") -> None:
    """Raise DGLError for a DGL graph, ZeroInDegreeError for ours, when a destination has no in-edges; where:
    what the message begins with."""
    if not is_dgl(graph) and torch.compiler.is_dynamo_compiling() and not is_exporting():
        _check_number(converted._number)  # an operator, so that compiled code checks at every call
        return
    # The in-degrees of a graph of fixed capacity are not checked: they may change, and checking them at every
    # call would wait for the GPU.
    if converted.edge_mask is not None or not converted.has_zero_in_degree:
        return
    message = (
        f"{where}graph: it has destinations without in-edges, whose aggregate would be 0. Add self-loops "
        "(dgl.add_self_loop(g), Graph.add_self_loops()), or pass allow_zero_in_degree=True to accept that."
    )
    raise (sys.modules["dgl"].DGLError if is_dgl(graph) else ZeroInDegreeError)(message)


def _check_in_degrees(number: int) -> None:
    graph = OF_NUMBER[number]()
    assert graph is not None  # OF_NUMBER has weak references to living graphs only
    check_in_degrees(graph, graph)


_check_number = python_operator(
    "check_in_degrees", "(SymInt number) -> ()", _check_in_degrees, lambda number: None, autograd=True
)
torch.fx.node.has_side_effect(_check_number)


def split_ends(
    layer: nn.Module,
    graph: Graph,
    feat: Tensor | tuple[Tensor, Tensor],
    dropout: Callable[[Tensor], Tensor] | None,
    name: str = "feat",
) -> tuple[Tensor, Tensor]:
    """Source and destination features, after ``dropout`` if it is given.

    A single tensor has one row per source; the destinations are its first ``num_dst`` rows, as in a block.
    """
    num_src, num_dst = graph.num_src, graph.num_dst
    if isinstance(feat, tuple):
        if len(feat) != 2:
            where = f"{type(layer).__name__}: {name}"
            raise ValueError(f"{where}: expected a tensor or a pair of them, got {len(feat)}")
        _check_rows(layer, f"{name}[0]", feat[0], num_src)
        _check_rows(layer, f"{name}[1]", feat[1], num_dst)
        return feat if dropout is None else (dropout(feat[0]), dropout(feat[1]))
    if num_dst > num_src:
        nodes = f"{num_src} sources and {num_dst} destinations"
        what = f"a pair (source, destination) for a graph with {nodes}"
        raise wrong_argument(layer, name, what, type(feat).__name__)
    _check_rows(layer, name, feat, num_src)
    if dropout is not None:
        feat = dropout(feat)
    return feat, feat[:num_dst] if num_dst < num_src else feat


def names_of_ends(name: str, feat: Any) -> tuple[str, str]:
    """What errors call the features of sources and destinations."""
    return (f"{name}[0]", f"{name}[1]") if isinstance(feat, tuple) else (name, name)


def _check_rows(layer: nn.Module, name: str, x: Any, rows: int) -> None:
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        raise wrong_features(layer, name, x, "[N, *, F]")
    if x.dim() < 2 or x.shape[0] != rows:
        raise wrong_argument(layer, name, f"shape [{rows}, *, F], a row per node of the graph", list(x.shape))
