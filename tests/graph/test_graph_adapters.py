"""Graphs of scipy, torch.sparse, DGL and PyG, against their edges listed one by one."""

import numpy as np
import pytest
import torch
from graph_checks import SparseTensor, check_graph
from graphs import GRAPHS, edges

from dfgnn.graph import Graph

NAMES = list(GRAPHS)
BIPARTITE = ["no_destinations", "fewer_destinations", "fewer_sources", "super_source"]


# ---- scipy -----------------------------------------------------------------------------------------


@pytest.fixture
def sparse():
    return pytest.importorskip("scipy.sparse", reason="scipy is not installed")


def scipy_matrix(sparse, fmt, row, col, shape):
    """A matrix of this format, duplicates kept, and the (row, col) of its stored elements in their order."""
    row, col, ones = row.numpy(), col.numpy(), np.ones(len(row), dtype=np.float32)
    if fmt == "coo":
        return sparse.coo_matrix((ones, (row, col)), shape=shape), row, col
    major, minor, num_major = (row, col, shape[0]) if fmt.startswith("csr") else (col, row, shape[1])
    order = np.argsort(major, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(major, minlength=num_major))])
    matrix = getattr(sparse, fmt)((ones, minor[order], indptr), shape=shape)
    return matrix, row[order], col[order]


@pytest.mark.parametrize("rows", ["src", "dst"])
@pytest.mark.parametrize("fmt", ["coo", "csr_matrix", "csc_matrix", "csr_array", "csc_array"])
@pytest.mark.parametrize("name", NAMES)
def test_scipy(sparse, name, fmt, rows):
    src, dst, num_src, num_dst = edges(name)
    ends, shape = ((src, dst), (num_src, num_dst)) if rows == "src" else ((dst, src), (num_dst, num_src))
    matrix, row, col = scipy_matrix(sparse, fmt, *ends, shape)
    row, col = torch.from_numpy(row), torch.from_numpy(col)
    graph = Graph.from_scipy(matrix, rows=rows)
    check_graph(graph, *((row, col) if rows == "src" else (col, row)), num_src, num_dst)
    if rows == "src":
        assert torch.equal(Graph.from_scipy(matrix).edge_index, graph.edge_index)


@pytest.mark.parametrize("fmt", ["lil", "dok", "bsr", "dia"])
def test_scipy_other_formats(sparse, fmt):
    matrix = sparse.random(7, 5, density=0.4, random_state=0).asformat(fmt)
    coo = matrix.tocoo()
    src, dst = torch.tensor(coo.row), torch.tensor(coo.col)
    check_graph(Graph.from_scipy(matrix), src, dst, 7, 5)
    check_graph(Graph.from_scipy(matrix, rows="dst"), dst, src, 5, 7)


def test_scipy_is_copied_and_zeros_are_edges(sparse):
    matrix = sparse.csr_matrix(([0.0, 1.0, 0.0], [2, 0, 1], [0, 2, 3]), shape=(2, 3))
    graph = Graph.from_scipy(matrix, rows="dst")
    matrix.sort_indices()
    check_graph(graph, torch.tensor([2, 0, 1]), torch.tensor([0, 0, 1]), 3, 2)
    with pytest.raises(ValueError, match="Graph.from_scipy: rows: expected 'src' or 'dst', got 'row'"):
        Graph.from_scipy(matrix, rows="row")


# ---- torch.sparse ----------------------------------------------------------------------------------


def torch_matrix(layout, row, col, shape, index_dtype=torch.int64, dense=()):
    """A sparse tensor with duplicates kept, and the (row, col) of its values in their order."""
    values = torch.rand(row.numel(), *dense, device=row.device)
    if layout == "coo":
        matrix = torch.sparse_coo_tensor(
            torch.stack([row, col]), values, (*shape, *dense), check_invariants=False
        )
        assert row.numel() < 2 or not matrix.is_coalesced()
        return matrix, row, col
    major, minor, num_major = (row, col, shape[0]) if layout == "csr" else (col, row, shape[1])
    order = torch.argsort(major, stable=True)
    indptr = torch.bincount(major, minlength=num_major).cumsum(0)
    indptr = torch.cat([indptr.new_zeros(1), indptr])
    make = torch.sparse_csr_tensor if layout == "csr" else torch.sparse_csc_tensor
    parts = indptr.to(index_dtype), minor[order].to(index_dtype), values
    return make(*parts, size=(*shape, *dense), check_invariants=False), row[order], col[order]


@pytest.mark.filterwarnings("ignore:Sparse C")
@pytest.mark.parametrize(
    "layout, index_dtype",
    [("coo", torch.int64), ("csr", torch.int64), ("csr", torch.int32), ("csc", torch.int64)],
)
@pytest.mark.parametrize("name", NAMES)
def test_torch_sparse(name, layout, index_dtype, device):
    src, dst, num_src, num_dst = edges(name, device)
    matrix, row, col = torch_matrix(layout, dst, src, (num_dst, num_src), index_dtype)
    check_graph(Graph.from_torch_sparse(matrix), col, row, num_src, num_dst, device)


@pytest.mark.filterwarnings("ignore:Sparse C")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_torch_sparse_with_edge_features(layout):
    src, dst, num_src, num_dst = edges("fewer_sources")
    matrix, row, col = torch_matrix(layout, dst, src, (num_dst, num_src), dense=(3,))
    check_graph(Graph.from_torch_sparse(matrix), col, row, num_src, num_dst)


def test_torch_sparse_coalesced():
    src, dst, num_src, num_dst = edges("fewer_sources")
    matrix = torch_matrix("coo", dst, src, (num_dst, num_src))[0].coalesce()
    graph = Graph.from_torch_sparse(matrix)
    check_graph(graph, matrix.indices()[1], matrix.indices()[0], num_src, num_dst)
    assert graph.csr().eids is None


# ---- DGL -------------------------------------------------------------------------------------------


@pytest.fixture
def dgl():
    return pytest.importorskip("dgl", reason="dgl is not installed", exc_type=ImportError)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("formats", [None, "coo", "csr", "csc", ["coo", "csr"]])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in BIPARTITE and name != "no_edges"])
def test_dgl(dgl, name, formats, dtype):
    src, dst, n, _ = edges(name, dtype=dtype)
    graph = dgl.graph((src, dst), num_nodes=n, idtype=dtype)
    if formats is not None:
        graph = graph.formats(formats)
    check_graph(Graph.from_dgl(graph), src, dst, n, n)


@pytest.mark.parametrize("formats", [None, "coo", "csr", "csc"])
@pytest.mark.parametrize("name", [*BIPARTITE, "no_edges"])
def test_dgl_bipartite(dgl, name, formats):
    src, dst, num_src, num_dst = edges(name)
    graph = dgl.heterograph({("user", "buys", "item"): (src, dst)}, {"user": num_src, "item": num_dst})
    if formats is not None:
        graph = graph.formats(formats)
    check_graph(Graph.from_dgl(graph), src, dst, num_src, num_dst)


def test_dgl_made_from_csr_and_csc(dgl):
    indptr, indices, ids = torch.tensor([0, 2, 2, 3]), torch.tensor([1, 0, 1]), torch.tensor([1, 2, 0])
    rows = torch.tensor([0, 0, 2])
    check_graph(Graph.from_dgl(dgl.graph(("csc", (indptr, indices, [])))), indices, rows, 3, 3)
    check_graph(Graph.from_dgl(dgl.graph(("csr", (indptr, indices, [])))), rows, indices, 3, 3)
    graph = Graph.from_dgl(dgl.graph(("csc", (indptr, indices, ids))))
    check_graph(graph, indices[ids.argsort()], rows[ids.argsort()], 3, 3)


def test_dgl_block(dgl):
    src, dst, n, _ = edges("power_law")
    graph = dgl.graph((src, dst), num_nodes=n)
    seeds = torch.arange(0, n, 7)
    for fanout in (-1, 3):
        block = dgl.to_block(dgl.sampling.sample_neighbors(graph, seeds, fanout), seeds)
        assert block.is_block and block.num_src_nodes() != block.num_dst_nodes()
        ours = Graph.from_dgl(block)
        check_graph(ours, *block.edges(order="eid"), block.num_src_nodes(), block.num_dst_nodes())
    frontier = dgl.graph((src[dst.argsort(stable=True)], dst.sort(stable=True).values), num_nodes=n)
    block = dgl.to_block(frontier, torch.arange(n))
    assert Graph.from_dgl(block).csr().eids is None  # the ids of DGL are 0 .. E - 1: dropped


def test_dgl_edge_types(dgl):
    relations = {
        ("user", "follows", "user"): (torch.tensor([0, 1]), torch.tensor([1, 2])),
        ("user", "buys", "item"): (torch.tensor([2, 0, 2]), torch.tensor([0, 1, 0])),
    }
    graph = dgl.heterograph(relations, {"user": 4, "item": 2})
    with pytest.raises(ValueError, match=r"expected one edge type, got 2: .*buys.*; pass graph\[etype\]"):
        Graph.from_dgl(graph)
    for (_, etype, dst_type), (src, dst) in relations.items():
        check_graph(Graph.from_dgl(graph[etype]), src, dst, 4, graph.num_nodes(dst_type))
    block = dgl.to_block(graph)
    with pytest.raises(ValueError, match="expected one edge type, got 2"):
        Graph.from_dgl(block)
    part = block["buys"]
    src, dst = part.edges(order="eid")
    check_graph(Graph.from_dgl(part), src, dst, block.num_src_nodes("user"), block.num_dst_nodes("item"))


# ---- PyG -------------------------------------------------------------------------------------------


@pytest.fixture
def pyg():
    return pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")


@pytest.mark.parametrize("name", NAMES)
def test_pyg_edge_index(name, device):
    src, dst, num_src, num_dst = edges(name, device)
    graph = Graph.from_pyg(torch.stack([src, dst]), num_src=num_src, num_dst=num_dst)
    check_graph(graph, src, dst, num_src, num_dst, device)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("order", [None, "row", "col"])
@pytest.mark.parametrize("name", NAMES)
def test_pyg_edge_index_class(pyg, name, order, validate, device):
    src, dst, num_src, num_dst = edges(name, device)
    if order is not None:
        by = torch.argsort(src if order == "row" else dst, stable=True)
        src, dst = src[by], dst[by]
    edge_index = pyg.EdgeIndex(torch.stack([src, dst]), sparse_size=(num_src, num_dst), sort_order=order)
    graph = Graph.from_pyg(edge_index, validate=validate)
    check_graph(graph, src, dst, num_src, num_dst, device)
    if order == "col":
        assert graph.csr().eids is None
    check_graph(
        Graph.from_edge_index(edge_index, num_src=num_src, num_dst=num_dst),
        *edge_index.as_tensor(),
        num_src,
        num_dst,
        device,
    )


def test_pyg_edge_index_class_without_sizes(pyg):
    raw = torch.tensor([[3, 0, 1], [0, 1, 1]])
    edge_index = pyg.EdgeIndex(raw, sort_order="col")
    check_graph(Graph.from_pyg(edge_index), *raw, 4, 4)
    edge_index.get_csc()  # now PyG has found one of the two sizes for itself
    assert None in edge_index.sparse_size() and edge_index.sparse_size() != (None, None)
    check_graph(Graph.from_pyg(edge_index), *raw, 4, 4)
    check_graph(Graph.from_pyg(edge_index, num_src=5, num_dst=2), *raw, 5, 2)


@pytest.mark.parametrize("name", NAMES)
def test_pyg_sparse_tensor(name):
    src, dst, num_src, num_dst = edges(name)
    adj_t = SparseTensor(dst, src, (num_dst, num_src))
    check_graph(Graph.from_pyg(adj_t), adj_t.col, adj_t.row, num_src, num_dst)


def test_pyg_data(pyg):
    src, dst, n, _ = edges("isolated")
    data = pyg.data.Data(edge_index=torch.stack([src, dst]), num_nodes=n + 3)
    check_graph(Graph.from_pyg(data), src, dst, n + 3, n + 3)
    check_graph(Graph.from_pyg(data, num_nodes=n + 1), src, dst, n + 1, n + 1)
    matrix, row, col = torch_matrix("csr", dst, src, (n, n))
    for adj_t in (matrix, SparseTensor(dst, src, (n, n))):
        check_graph(Graph.from_pyg(adj_t), col, row, n, n)
        check_graph(Graph.from_pyg(pyg.data.Data(adj_t=adj_t)), col, row, n, n)


def test_pyg_batch(pyg):
    first, second = (
        pyg.data.Data(edge_index=torch.stack(edges(name)[:2]), num_nodes=edges(name)[2])
        for name in ("isolated", "duplicates")
    )
    batch = pyg.data.Batch.from_data_list([first, second])
    ours = Graph.batch([Graph.from_pyg(first), Graph.from_pyg(second)])
    check_graph(ours, *batch.edge_index, batch.num_nodes, batch.num_nodes)


def test_pyg_hetero(pyg):
    data = pyg.data.HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = 4, 3
    edge_index = torch.tensor([[3, 0, 1], [0, 1, 1]])
    data["user", "buys", "item"].edge_index = edge_index
    data["item", "of", "user"].edge_index = edge_index.flip(0)
    check_graph(Graph.from_pyg(data["user", "buys", "item"]), *edge_index, 4, 3)
    with pytest.raises(
        ValueError, match=r"expected one edge type, got a HeteroData with 2: .*; pass data\[edge_type"
    ):
        Graph.from_pyg(data)


def test_pyg_errors(pyg):
    with pytest.raises(ValueError, match="from_pyg: data: expected edge_index or adj_t in it, got neither"):
        Graph.from_pyg(pyg.data.Data())
    with pytest.raises(ValueError, match=r"edge_index\[0\]: expected values in .*=2\), got 3 at position 0"):
        Graph.from_pyg(pyg.EdgeIndex([[3, 0], [0, 1]], sparse_size=(2, 2)))


def test_self_loops_in_the_order_of_pyg(pyg):
    src, dst, n, _ = edges("mixed_degrees")
    edge_index = torch.stack([src, dst])
    expected, attr = pyg.utils.remove_self_loops(edge_index, torch.arange(len(src)))
    expected, attr = pyg.utils.add_self_loops(expected, attr, fill_value=-1, num_nodes=n)
    graph, edge_map = Graph.from_pyg(edge_index, n).add_self_loops(remove_existing=True, return_edge_map=True)
    assert torch.equal(graph.edge_index, expected) and torch.equal(edge_map, attr)
    expected, _ = pyg.utils.add_self_loops(edge_index, num_nodes=n)
    assert torch.equal(Graph.from_pyg(edge_index, n).add_self_loops().edge_index, expected)
