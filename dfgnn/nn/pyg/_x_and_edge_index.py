"""What torch_geometric's layers take: features of both ends, and edges, of which this gives the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...engine.argument_checks import DTYPES
from ...engine.compiler_graph import EdgeList, is_traced
from ...graph import Graph, GraphPart, cache
from ...runtime import torch_internals as internals
from .._errors import wrong_argument, wrong_features
from . import VERSION


def in_version(version: tuple[int, int]) -> Callable[[Any], bool]:
    """`wants_attention` of a version of torch_geometric: since 2.8 whether the argument is true, before
    whether it is a bool, whichever."""
    return (lambda argument: isinstance(argument, bool)) if version < (2, 8) else bool


#: Whether GATConv and GATv2Conv return the attention, of their argument ``return_attention_weights``.
wants_attention = in_version(VERSION)


def ends(layer: nn.Module, x: Any) -> tuple[Tensor, Tensor | None]:
    """Source and destination features ``[N, F]`` or ``[B, N, F]``; both are x where it is one tensor."""
    if isinstance(x, Tensor):
        if x.dtype not in DTYPES or x.dim() not in (2, 3):
            check_rows(layer, "x", x)
        return x, x
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise wrong_features(layer, "x", x, "[N, F] or a pair of them")
    x_src, x_dst = x
    check_rows(layer, "x[0]", x_src)
    if x_dst is not None:
        check_rows(layer, "x[1]", x_dst)
        if x_src.shape[:-2] != x_dst.shape[:-2]:
            raise wrong_argument(
                layer, "x[1]", f"a batch as x[0], {list(x_src.shape[:-2])}", list(x_dst.shape[:-2])
            )
    return x_src, x_dst


def both_ends(layer: nn.Module, x: Any) -> tuple[Tensor, Tensor]:
    """`ends` of a layer that reads the destinations' features, too."""
    x_src, x_dst = ends(layer, x)
    if x_dst is None:
        raise wrong_argument(layer, "x", "features of the destinations, too", "None for x[1]")
    return x_src, x_dst


def check_rows(layer: nn.Module, name: str, x: Any) -> None:
    """Raise TypeError or ValueError unless x is ``[N, F]``, or ``[B, N, F]``: B sets on one graph."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        raise wrong_features(layer, name, x, "[N, F]")
    if x.dim() not in (2, 3):
        where = f"{type(layer).__name__}: {name}"
        raise ValueError(f"{where}: expected shape [N, F] or [B, N, F], got {list(x.shape)}")


def check_dicts(layer: nn.Module, x_dict: Any, edge_index_dict: Any) -> None:
    """Raise TypeError unless both are dicts."""
    for name, x, what in (
        ("x_dict", x_dict, "a dict, of each node type its features [N, F]"),
        ("edge_index_dict", edge_index_dict, "a dict, of each edge type (source, name, target) its [2, E]"),
    ):
        if not hasattr(x, "items"):
            raise wrong_argument(layer, name, what, type(x).__name__, TypeError)


def no_features(layer: nn.Module, missing: set[str], edge_type: Any, x_dict: Any) -> Exception:
    """The error of node types without features, to which or from which edges lead."""
    what = f"features of {', '.join(map(repr, missing))} too, as there are edges {edge_type}"
    return wrong_argument(layer, "x_dict", what, f"{[*x_dict]}; add them, or leave these edges out")


def layer_graph(
    layer: nn.Module,
    edge_index: Any,
    x_src: Tensor,
    x_dst: Tensor | None,
    size: tuple[int, int] | None = None,
    self_loops: bool = False,
) -> tuple[Graph, Tensor | None]:
    """The graph, and the edge map or None, as from `cache.graph_of` with the sizes of a layer's features.
    While a compiler records, the graph is an EdgeList, which makes the map itself."""
    recording = internals.is_dynamo_recording() or internals.compiler._is_compiling_flag
    is_plain = type(edge_index) is Tensor and edge_index.layout is torch.strided
    if is_plain and size is None and x_dst is not None:  # the sizes are those of the features: see `sizes_of`
        num_src, num_dst = x_src.shape[-2], x_dst.shape[-2]
    else:
        num_src, num_dst = sizes_of(layer, edge_index, x_src, x_dst, size)
    if is_plain and not recording and not edge_index.is_meta:
        return cache.graph_of(edge_index, num_src, num_dst, self_loops, type(layer).__name__)
    if isinstance(edge_index, Graph) and not self_loops:  # which compilers can record
        return edge_index, None
    if isinstance(edge_index, GraphPart):
        return cast(Graph, edge_index.with_self_loops() if self_loops else edge_index), None
    if is_traced(edge_index):
        if self_loops and edge_index.dtype in cache.SMALL_DTYPES:
            edge_index = edge_index.to(torch.int64)
        where = type(layer).__name__
        return cast(Graph, EdgeList(edge_index, num_src, num_dst, self_loops, where=where)), None
    find = cache.graph_of_uncompiled if recording else cache.graph_of
    return find(edge_index, num_src, num_dst, self_loops, type(layer).__name__)


def for_upstream(edge_index: Any) -> Any:
    """What torch_geometric's own code takes for the edges: of a Graph its tensor."""
    return edge_index.edge_index if isinstance(edge_index, Graph) else edge_index


def declared_sizes(
    edge_index: Any, size: tuple[int, int] | None = None, where: str = ""
) -> tuple[int | None, int | None]:
    """What ``edge_index`` itself, or else ``size``, says of (num_src, num_dst); None where it does not."""
    if isinstance(edge_index, (Graph, GraphPart)):
        return edge_index.num_src, edge_index.num_dst
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        if type(edge_index) is not Tensor and hasattr(edge_index, "sparse_size"):  # an EdgeIndex
            num_src, num_dst = edge_index.sparse_size()
            return num_src, num_dst
        if size is None:
            return None, None
        if not isinstance(size, (tuple, list)) or len(size) != 2:
            raise TypeError(f"{where}: size: expected a pair (num_src, num_dst) or None, got {size!r}")
        return size[0], size[1]
    cache.check_type(edge_index, where)
    return edge_index.size(1), edge_index.size(0)


def sizes_of(
    layer: nn.Module, edge_index: Any, x_src: Tensor, x_dst: Tensor | None, size: tuple[int, int] | None
) -> tuple[int, int]:
    """(num_src, num_dst) from features, one row per node, and what is declared, as in message passing.

    Without destination features the declared size counts, else num_src. Raises ValueError where features and
    declared sizes differ.
    """
    sizes = declared_sizes(edge_index, size, type(layer).__name__)
    for name, x, want in zip(("source", "destination"), (x_src, x_dst), sizes):
        if x is not None and want is not None and x.shape[-2] != want:
            raise wrong_argument(layer, "x", f"{want} {name} rows, as edge_index or size says", x.shape[-2])
    if x_dst is not None:
        return x_src.shape[-2], x_dst.shape[-2]
    return x_src.shape[-2], x_src.shape[-2] if sizes[1] is None else sizes[1]
