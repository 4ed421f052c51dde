"""Converts graphs of other libraries (SciPy, torch.sparse, DGL, PyG) without importing them: an object is
recognised by its attributes.

Each function takes the Graph class first; the docstrings of Graph's constructors say what they accept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sparse import csr as _csr
from ..sparse.csr import UserEdges
from . import build


def from_scipy(cls, matrix, rows: str, validate: bool):
    where = "Graph.from_scipy"
    if rows not in ("src", "dst"):
        raise ValueError(f"{where}: rows: expected 'src' or 'dst', got {rows!r}")
    if not hasattr(matrix, "tocoo") or not hasattr(matrix, "format"):
        way = "; scipy.sparse.coo_matrix(matrix) makes one" if type(matrix).__name__ == "ndarray" else ""
        raise TypeError(f"{where}: matrix: expected a scipy.sparse matrix, got {type(matrix).__name__}{way}")
    if len(matrix.shape) != 2:
        raise ValueError(f"{where}: matrix: expected 2 dimensions, got shape {tuple(matrix.shape)}")
    num_rows, num_cols = matrix.shape
    other = {"src": "dst", "dst": "src"}[rows]
    if matrix.format in ("csr", "csc"):
        compressed, num_other = (rows, num_cols) if matrix.format == "csr" else (other, num_rows)
        # A matrix's arrays may be longer than its number of elements, nnz.
        indptr, indices = torch.tensor(matrix.indptr), torch.tensor(matrix.indices[: matrix.nnz])
        return build.from_csr(cls, where, indptr, indices, num_other, None, validate, rows=compressed)
    matrix = matrix.tocoo()
    ends = {rows: torch.tensor(matrix.row), other: torch.tensor(matrix.col)}
    sizes = {rows: num_rows, other: num_cols}
    given = UserEdges(where, ("src", "dst"), ends["src"], ends["dst"], sizes["src"], sizes["dst"])
    return build.from_coo(cls, given, validate=validate)


def from_torch_sparse(cls, where: str, matrix: Tensor, validate: bool):
    if not isinstance(matrix, Tensor):
        raise TypeError(f"{where}: matrix: expected a torch.sparse tensor, got {type(matrix).__name__}")
    layout = matrix.layout
    if layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        raise TypeError(
            f"{where}: matrix: expected sparse_coo, sparse_csr or sparse_csc layout, got {layout}"
        )
    if matrix.dim() - matrix.dense_dim() != 2:
        raise ValueError(
            f"{where}: matrix: expected 2 sparse dimensions, got shape {list(matrix.shape)} "
            f"with {matrix.dense_dim()} dense"
        )
    num_dst, num_src = matrix.shape[:2]
    if layout == torch.sparse_csr:
        ends = matrix.crow_indices(), matrix.col_indices()
        return build.from_csr(cls, where, *ends, num_src, None, validate)
    if layout == torch.sparse_csc:
        ends = matrix.ccol_indices(), matrix.row_indices()
        return build.from_csr(cls, where, *ends, num_dst, None, validate, rows="src")
    dst, src = matrix._indices()  # unlike indices(), it accepts uncoalesced tensors
    given = UserEdges(where, ("columns", "rows"), src, dst, num_src, num_dst)
    return build.from_coo(cls, given, validate=validate)


def from_dgl(cls, graph, validate: bool):
    where = "Graph.from_dgl"
    if not hasattr(graph, "canonical_etypes") or not hasattr(graph, "adj_tensors"):
        way = "; Graph.from_edge_index takes edges" if isinstance(graph, (Tensor, list, tuple)) else ""
        raise TypeError(f"{where}: graph: expected a DGLGraph or a block, got {type(graph).__name__}{way}")
    etypes = graph.canonical_etypes
    if len(etypes) != 1:
        raise ValueError(
            f"{where}: graph: expected one edge type, got {len(etypes)}: {etypes}; pass graph[etype]"
        )
    src_type, _, dst_type = etypes[0]
    num_src, num_dst = graph.num_src_nodes(src_type), graph.num_dst_nodes(dst_type)
    # graph.formats("coo") and similar calls restrict a DGLGraph to some formats.
    formats = [name for names in graph.formats().values() for name in names]
    if "csc" in formats or "csr" in formats:
        rows, num_cols = ("dst", num_src) if "csc" in formats else ("src", num_dst)
        indptr, indices, eids = graph.adj_tensors("csc" if rows == "dst" else "csr")
        if eids.numel() == 0:  # DGL's notation for the identity, in a graph made from a CSR
            eids = None
        num_rows = num_dst if rows == "dst" else num_src
        if indptr.numel() != num_rows + 1:
            raise ValueError(
                f"{where}: graph: expected an indptr of {num_rows + 1} values for {num_rows} nodes, "
                f"got {indptr.numel()}"
            )
        found = build.from_csr(cls, where, indptr, indices, num_cols, eids, validate, rows=rows)
    else:
        src, dst = graph.adj_tensors("coo")
        given = UserEdges(where, ("src", "dst"), src, dst, num_src, num_dst)
        found = build.from_coo(cls, given, validate=validate)
    return found.one_shot() if graph.is_block else found


def from_pyg(cls, data, num_nodes, num_src, num_dst, validate: bool):
    where = "Graph.from_pyg"
    if hasattr(data, "edge_types"):
        types = list(data.edge_types)
        raise ValueError(
            f"{where}: data: expected one edge type, got a {type(data).__name__} with {len(types)}: {types}; "
            "pass data[edge_type]"
        )
    sizes = (num_nodes, num_src, num_dst) != (None, None, None)
    if not isinstance(data, Tensor) and not hasattr(data, "sparse_sizes"):
        if not hasattr(data, "edge_index") and not hasattr(data, "adj_t"):
            raise TypeError(
                f"{where}: data: expected an edge_index tensor, an EdgeIndex, a SparseTensor or a Data, "
                f"got {type(data).__name__}"
                + ('; give data["edge_index"]' if isinstance(data, dict) and "edge_index" in data else "")
            )
        edges = getattr(data, "edge_index", None)
        if edges is None:
            edges = getattr(data, "adj_t", None)
        if edges is None:
            raise ValueError(f"{where}: data: expected edge_index or adj_t in it, got neither")
        is_edge_index = isinstance(edges, Tensor) and edges.layout == torch.strided
        if is_edge_index and not sizes:
            num_src, num_dst = data.size()
        return from_pyg(cls, edges, num_nodes, num_src, num_dst, validate)

    is_sparse = not isinstance(data, Tensor) or data.layout != torch.strided
    if is_sparse and sizes:
        raise ValueError(
            f"{where}: num_nodes, num_src, num_dst: expected none of them beside a sparse tensor, "
            f"which has sizes, got {num_nodes}, {num_src}, {num_dst}"
        )
    if not isinstance(data, Tensor):
        indptr, indices, _ = data.csr()
        return build.from_csr(cls, where, indptr, indices, data.sparse_size(1), None, validate)
    if is_sparse:
        return from_torch_sparse(cls, where, data, validate)

    sort_order = None
    if hasattr(data, "sort_order") and hasattr(data, "sparse_size"):  # EdgeIndex
        sort_order = data.sort_order
        if not sizes and None not in data.sparse_size():  # if one size is None, PyG has only cached the other
            num_src, num_dst = data.sparse_size()
    src, dst = _csr.ends_of(where, data)
    given = UserEdges(where, _csr.EDGE_INDEX, src, dst, num_src, num_dst)
    return build.from_coo(cls, given, num_nodes, validate, sort_order)
