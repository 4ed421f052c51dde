"""The graphs that the layers of dfgnn.nn.pyg make of edges: their content, and how long they are kept."""

import gc
import weakref

import pytest
import torch
from graph_checks import SparseTensor, in_threads
from graphs import GRAPHS
from of_pyg import edges, sparse_forms, torch_geometric

from dfgnn import Graph, functional
from dfgnn.graph import cache as _kept
from dfgnn.graph.cache import graph_of, once
from dfgnn.nn import pyg


@pytest.fixture(autouse=True)
def _empty_cache():
    _kept._cache.clear()


def with_loops(edge_index, num_nodes):
    """edge_index with torch_geometric's loops, and each edge's position before (-1: an added loop)."""
    position = torch.arange(edge_index.shape[1])
    edge_index, position = torch_geometric.utils.remove_self_loops(edge_index, position)
    return torch_geometric.utils.add_self_loops(edge_index, position, -1, num_nodes)


# ---- content ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_order_of_edges(name, dtype):
    src, dst, num_src, num_dst = GRAPHS[name]()
    edge_index = torch.stack([src, dst])
    graph, edge_map = graph_of(edge_index.to(dtype), num_src, num_dst)
    assert (graph.num_src, graph.num_dst) == (num_src, num_dst) and edge_map is None
    assert torch.equal(graph.edge_index, edge_index)
    graph, edge_map = graph_of(edge_index.to(dtype), num_src, num_dst, self_loops=True)
    expected, position = with_loops(edge_index, min(num_src, num_dst))
    assert (graph.num_src, graph.num_dst) == (num_src, num_dst)
    assert torch.equal(graph.edge_index, expected) and torch.equal(edge_map, position)


@pytest.mark.parametrize("self_loops", [False, True])
def test_forms_of_edges(self_loops):
    edge_index = torch.unique(edges("fewer_sources"), dim=1)
    dst, src = edge_index.flip(0)[:, torch.argsort(edge_index[1], stable=True)]
    by_rows = torch.stack([src, dst])
    forms = sparse_forms(edge_index, 30, 80)
    forms["csc"] = forms["coo"].to_sparse_csc()
    forms["SparseTensor"] = SparseTensor(dst, src, (80, 30))
    forms["EdgeIndex"] = torch_geometric.EdgeIndex(by_rows, sort_order="col")
    for name, form in forms.items():
        order = edge_index if name == "csc" else by_rows  # its values are by columns
        graph, edge_map = graph_of(form, 30, 80, self_loops)
        if self_loops:
            order, position = with_loops(order, 30)
            assert torch.equal(edge_map, position), name
        assert torch.equal(graph.edge_index, order), name
        assert graph_of(form, 30, 80, self_loops)[0] is graph, name


def test_views_and_slices():
    wide = torch.zeros(400, 2, dtype=torch.long)
    wide.copy_(edges().t())
    assert torch.equal(graph_of(wide.t(), 50, 50)[0].edge_index, edges())
    part = wide.t()[:, 10:90]
    assert torch.equal(graph_of(part, 50, 50, True)[0].edge_index, with_loops(edges()[:, 10:90], 50)[0])


@pytest.mark.parametrize("dtype", _kept.SMALL_DTYPES, ids=str)
def test_small_integers_need_self_loops(dtype):
    """edge_index of small integers: torch_geometric's layers promote it to int64 where they append loops, and
    cannot index with it elsewhere."""
    edge_index = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype)
    looped, _ = graph_of(edge_index, 50, 50, self_loops=True)
    expected, _ = graph_of(edge_index.long(), 50, 50, self_loops=True)
    assert torch.equal(looped.edge_index, expected.edge_index)
    with pytest.raises(TypeError, match=f"edge_index: expected dtype .* got {dtype}"):
        graph_of(edge_index, 50, 50)
    layers = pyg.GATConv(4, 4, add_self_loops=False), pyg.GATv2Conv(4, 4, add_self_loops=False)
    for layer in (*layers, pyg.TransformerConv(4, 4), pyg.ResGatedGraphConv(4, 4)):
        with pytest.raises(TypeError, match=f"{type(layer).__name__}: edge_index: .* got {dtype}"):
            layer(torch.ones(50, 4), edge_index)


def test_sizes():
    """The rows of the result: one per destination."""
    layer = pyg.GATConv((1, 1), 2, add_self_loops=False)

    def rows(edge_index, x_src, x_dst, size=None):
        return len(layer((x_src, x_dst), edge_index, size=size))

    x, y = torch.zeros(4, 1), torch.zeros(3, 1)
    edge_index = torch.zeros(2, 1, dtype=torch.long)
    assert rows(edge_index, x, y) == rows(edge_index, x, None, (4, 3)) == 3
    assert rows(edge_index, x, None) == rows(edge_index, x, None, (4, None)) == 4
    declared = torch_geometric.EdgeIndex([[0], [0]], sparse_size=(4, 3))
    for given in (declared, sparse_forms(edge_index, 4, 3)["csr"]):
        assert rows(given, x, None) == rows(given, x, y, (9, 9)) == 3
    for wrong in (edge_index, declared, sparse_forms(edge_index, 4, 3)["csr"]):
        with pytest.raises(ValueError, match="x: expected 3 destination rows, .* got 4"):
            rows(wrong, x, x, (4, 3))
        with pytest.raises(ValueError, match="x: expected 4 source rows, .* got 3"):
            rows(wrong, y, y, (4, 3))


# ---- caches ----------------------------------------------------------------------------------------------


def test_the_same_tensor_gives_the_same_graph():
    edge_index = edges()
    graph, _ = graph_of(edge_index, 50, 50)
    with_loops, edge_map = graph_of(edge_index, 50, 50, self_loops=True)
    assert graph_of(edge_index, 50, 50)[0] is graph
    again = graph_of(edge_index, 50, 50, self_loops=True)
    assert again[0] is with_loops and again[1] is edge_map
    assert graph_of(edge_index, 50, 51)[0] is not graph
    assert graph_of(edge_index.clone(), 50, 50)[0] is not graph


def test_a_modified_edge_index_class_and_its_copies():
    edge_index = torch_geometric.EdgeIndex(edges())
    graph, _ = graph_of(edge_index, 50, 50)
    # Another view of the same memory.
    assert graph_of(torch_geometric.EdgeIndex(edge_index), 50, 50)[0] is graph
    edge_index.as_tensor()[0, 0] = 49
    assert graph_of(edge_index, 50, 50)[0].edge_index[0, 0] == 49


@pytest.mark.parametrize(
    "form", ["dense", "int32", "sorted int32", "coo", "csr", "EdgeIndex", "SparseTensor"]
)
@pytest.mark.parametrize("self_loops", [False, True])
def test_a_graph_dies_with_its_tensor(form, self_loops):
    edge_index = torch.unique(edges(), dim=1)[[1, 0]].contiguous()
    if form in ("coo", "csr"):
        edge_index = sparse_forms(edge_index, 50, 50)[form]
    elif form == "EdgeIndex":
        edge_index = torch_geometric.EdgeIndex(edge_index)
    elif form == "SparseTensor":
        edge_index = SparseTensor(edge_index[1].sort().values, edge_index[0], (50, 50))
    elif form != "dense":
        edge_index = edge_index.int() if form == "int32" else edge_index[:, edge_index[1].argsort()].int()
    graph, _ = graph_of(edge_index, 50, 50, self_loops)
    graph.reverse_csr()
    kept = weakref.ref(graph)
    del graph
    gc.collect()
    assert kept() is not None and len(_kept._cache) == 1
    del edge_index
    gc.collect()
    assert kept() is None and not _kept._cache


def test_any_number_of_tensors_is_kept(count_calls):
    """Graphs that a program goes through again and again are not built again, however many."""
    built = count_calls(_kept, "of_edges")
    tensors = [torch.randint(20, (2, 40)) for _ in range(200)]
    graphs = [graph_of(tensor, 20, 20)[0] for tensor in tensors]
    for _ in range(2):
        assert all(graph_of(tensor, 20, 20)[0] is graph for tensor, graph in zip(tensors, graphs))
    assert len(built) == len(_kept._cache) == 200
    del tensors[50:]
    assert len(_kept._cache) == 50


def test_no_more_than_a_bound_is_kept_of_one_tensor():
    edge_index, bound = edges(), _kept._LIMIT
    graphs = [graph_of(edge_index, 50 + k, 50)[0] for k in range(bound)]
    assert graph_of(edge_index, 50, 50)[0] is graphs[0]  # now the one used last
    graph_of(edge_index, 50 + bound, 50)
    assert graph_of(edge_index, 50, 50)[0] is graphs[0]
    assert graph_of(edge_index, 51, 50)[0] is not graphs[1]
    (entry,) = _kept._cache.values()
    assert len(entry.values) == bound


def test_a_write_forgets_every_value():
    """After a write to an edge_index all its cached graphs are dropped, for every combination of options."""
    edge_index = edges()
    stale = [graph_of(edge_index, 50, 50, self_loops)[0] for self_loops in (False, True)]
    edge_index[0, 0] = (edge_index[0, 0] + 1) % 50
    assert graph_of(edge_index, 50, 50)[0] is not stale[0]
    (entry,) = _kept._cache.values()
    assert len(entry.values) == 1


def test_inference_tensors():
    """Inference tensors have no version counter, so that no graph is cached for them. A graph that is cached
    in inference mode for a normal tensor can be used outside of it."""
    plain = edges()
    with torch.inference_mode():
        edge_index = edges()
        first, _ = graph_of(edge_index, 50, 50)
        edge_index[0, 0] = 3
        assert graph_of(edge_index, 50, 50)[0].edge_index[0, 0] == 3
        assert not _kept._cache and first.num_edges == 400
        graph, edge_map = graph_of(plain, 50, 50, self_loops=True)
    assert not edge_map.is_inference()
    x = torch.randn(50, 1, 4, requires_grad=True)
    functional.gat_attention(graph, x, x.sum(-1), None).sum().backward()
    assert graph_of(plain, 50, 50, self_loops=True)[0] is graph


def test_threads():
    shared = [edges(name) for name in ("random", "duplicates", "complete")]

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for k in range(60):
            own = torch.randint(50, (2, 30), generator=generator)
            for edge_index in (shared[k % 3], own):
                graph, _ = graph_of(edge_index, 50, 50)
                assert torch.equal(graph.edge_index, edge_index)

    in_threads(work)
    assert len(_kept._cache) == 3


def test_several_tensors():
    a, b, calls = torch.zeros(2), torch.zeros(2), []

    def build():
        calls.append(None)
        return len(calls)

    assert once((a, b), ("sum",), build) == once((a, b), ("sum",), build) == 1
    assert once((a, b), ("other",), build) == 2
    assert once((b, a), ("sum",), build) == 3
    b += 1
    assert once((a, b), ("sum",), build) == once((a, b), ("sum",), build) == 4
    del a
    assert not _kept._cache
    with pytest.raises(ZeroDivisionError):
        once((b,), (), lambda: 1 / 0)
    assert not _kept._cache


def test_an_entry_of_a_dead_tensor_is_not_taken():
    """The cache must not return an entry of a dead tensor, even if another tensor has got its id before the
    entry was removed."""
    edge_index, other = edges(), edges("complete")
    graph, _ = graph_of(edge_index, 50, 50)
    (entry,) = _kept._cache.values()
    _kept._cache[(id(other),)] = entry._replace(state=(_kept.state_of(other),))
    assert graph_of(other, 50, 50)[0].num_edges == 576
    assert isinstance(graph, Graph)
