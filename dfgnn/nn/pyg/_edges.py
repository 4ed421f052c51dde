"""The attributes that layers get with their edges, and the attention that they return in the edges' form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.typing import torch_sparse
from torch_geometric.utils import (
    add_self_loops,
    remove_self_loops,
    scatter,
    to_torch_coo_tensor,
    to_torch_csr_tensor,
)
from torch_geometric.utils.sparse import set_sparse_value

from ...engine.argument_checks import DTYPES
from ...engine.compiler_graph import EdgeList, in_use, smaller
from ...graph import Graph, GraphPart
from .._errors import wrong_argument, wrong_features
from .._graph import rows_in_use


def edge_attributes(
    layer: nn.Module,
    edge_index: Any,
    edge_attr: Tensor | None,
    graph: Graph,
    edge_map: Tensor | None = None,
    fill_value: float | Tensor | str | None = None,
    joins: torch.dtype | None = None,
) -> Tensor | None:
    """``[E', F]``, the attributes of the graph's edges: those given, or a sparse tensor's own.

    joins: the dtype of the features that the layer adds attributes to, or concatenates with them, so that
    integers, booleans and narrower numbers become such numbers (`promoted`). In a layer that multiplies
    attributes with a weight integers become numbers only by a mean for the loops, as in torch_geometric's;
    else TypeError is raised.

    Loops that the graph was given (``edge_map`` as from ``layer_graph``) get ``fill_value``, or, for the name
    of a reduction, that of the edges into their node. A sparse tensor's values are attributes where an edge
    has several of them, and else say only that the edge exists, as in message passing.
    """
    if isinstance(graph, EdgeList):
        edge_map = graph.edge_map
    if edge_map is not None and not isinstance(edge_index, (Tensor, Graph)):
        what = "a tensor in a layer with edge_dim and add_self_loops"
        raise wrong_argument(layer, "edge_index", what, "a SparseTensor", NotImplementedError)
    if type(edge_index) is type(edge_attr) is Tensor and edge_index.layout is torch.strided:
        num_edges = edge_index.shape[1]  # the usual case, in this frame
    else:
        num_edges, edge_attr = given_attributes(layer, edge_index, edge_attr)
    if edge_attr is None:
        return None
    if isinstance(edge_index, GraphPart) and edge_index is not graph:
        raise NotImplementedError(
            f"{type(layer).__name__}: edge_attr: expected None for {edge_index.kind}, in a layer with "
            "add_self_loops: append the loops and their attributes before it is divided"
        )
    if edge_attr.dim() not in (1, 2) or edge_attr.shape[0] != num_edges:
        what = f"shape [{num_edges}] or [{num_edges}, F], a row per edge"
        raise wrong_argument(layer, "edge_attr", what, list(edge_attr.shape))
    if edge_attr.is_complex():  # of which torch_geometric's `scatter` takes no mean
        raise wrong_features(layer, "edge_attr", edge_attr, "[E, F]")
    if edge_map is not None:
        edge_attr = _with_loops(edge_attr, graph, edge_map, fill_value)
    else:
        edge_attr = rows_in_use(graph, edge_attr)
    if joins is not None:
        edge_attr = promoted(edge_attr, joins)
    if edge_attr.dtype not in DTYPES:
        raise wrong_features(layer, "edge_attr", edge_attr, "[E, F]")
    return edge_attr.unsqueeze(1) if edge_attr.dim() == 1 else edge_attr


def promoted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype, if that is what torch promotes the two to; else as it is."""
    return x.to(dtype) if torch.promote_types(x.dtype, dtype) == dtype else x


def _with_loops(edge_attr: Tensor, graph: Graph, edge_map: Tensor, fill_value) -> Tensor:
    traced, num_src, num_dst = isinstance(graph, EdgeList), graph.num_src, graph.num_dst
    num_loops = smaller(num_src, num_dst) if traced else min(num_src, num_dst)
    num_kept = graph.num_edges - num_loops
    if traced or num_kept < edge_attr.shape[0]:
        edge_attr = edge_attr.index_select(0, edge_map[:num_kept])
    shape, mask = (num_loops, *edge_attr.shape[1:]), graph.edge_mask
    if mask is not None:
        mask = mask[:num_kept]
        edge_attr = in_use(mask, edge_attr)
    if isinstance(fill_value, str):
        dst = graph.edge_index[1, :num_kept]
        if mask is not None:  # unused edges get one more destination, whose row is dropped
            dst, num_dst = torch.where(mask, dst, num_dst), num_dst + 1
        loops = scatter(edge_attr, dst, 0, num_dst, fill_value)[:num_loops]
    elif isinstance(fill_value, Tensor):
        loops = fill_value.to(edge_attr).expand(shape)
    else:
        loops = edge_attr.new_full(shape, 1 if fill_value is None else fill_value)
    return torch.cat([edge_attr, loops])


def given_attributes(
    layer: nn.Module, edge_index: Any, edge_attr: Tensor | None
) -> tuple[int, Tensor | None]:
    """The number of edges, and the attributes given for them: ``edge_attr``, or a sparse tensor's own."""
    values = None
    if isinstance(edge_index, (Graph, GraphPart)):
        num_edges = edge_index.num_edges
    elif not isinstance(edge_index, Tensor):
        num_edges, values = edge_index.nnz(), edge_index.storage.value()
    elif edge_index.layout == torch.strided:
        num_edges = edge_index.shape[1]
    else:
        num_edges = edge_index._nnz()
        values = edge_index.values() if edge_index.dense_dim() else None
    if edge_attr is not None and not isinstance(edge_attr, Tensor):
        where = f"{type(layer).__name__}: edge_attr"
        raise TypeError(f"{where}: expected a tensor, got {type(edge_attr).__name__}")
    if edge_attr is None and values is not None and values.dim() > 1:
        edge_attr = values
    return num_edges, edge_attr


def attention_result(edge_index: Any, alpha: Tensor, graph: Graph, self_loops: bool) -> Any:
    """What a layer returns besides its output: the edges with their attention, in the form of ``edge_index``.

    ``alpha [E', H]`` is in the graph's edge order, where loops are last. Sparse tensors hold their edges
    sorted by row.
    """
    if isinstance(graph, EdgeList):
        return graph.edge_index, alpha
    if graph.edge_mask is not None or isinstance(edge_index, Graph):
        return graph.edge_index.clone(), alpha  # a copy, as the caller may modify it
    if alpha.dim() == 3 and not (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided):
        raise NotImplementedError("edge_index: expected a dense tensor for the attention of a batch")
    if isinstance(graph, GraphPart):
        return graph, alpha
    is_tensor = isinstance(edge_index, Tensor)
    if is_tensor and edge_index.layout == torch.strided:
        if self_loops:
            edge_index, _ = remove_self_loops(edge_index)
            edge_index, _ = add_self_loops(edge_index, num_nodes=min(graph.num_src, graph.num_dst))
        return edge_index, alpha
    if not self_loops:
        if is_tensor:
            return set_sparse_value(edge_index, alpha), alpha
        return edge_index.set_value(alpha, layout="coo")
    src, dst = graph.edge_index
    by_rows = torch.argsort(dst * graph.num_src + src, stable=True)
    alpha = alpha[by_rows]
    if not is_tensor:
        return torch_sparse.set_diag(edge_index.set_value(None)).set_value(alpha, layout="coo")
    index = torch.stack([dst[by_rows], src[by_rows]])
    size = graph.num_dst, graph.num_src
    structure = to_torch_coo_tensor if edge_index.layout == torch.sparse_coo else to_torch_csr_tensor
    return set_sparse_value(structure(index, size=size, is_coalesced=True), alpha), alpha
