"""What functions take for a graph besides a Graph: a DGLGraph, an ``edge_index``, a sparse tensor."""

import functools
import gc

import pytest
import torch
from every_function import CASES
from graphs import GRAPHS, make_graph

from dfgnn import Graph, compat, functional, reference
from dfgnn.functional import gat as _attention
from dfgnn.graph import cache as _kept

H, D = 2, 4


TOLD = "gat", "gat edges", "gatv2", "dot", "agnn", "flex", "sddmm"
# These have no tensor with a row per destination: they need a Graph where num_dst is not num_src.
NAMES = *TOLD, "score", "softmax", "spmm"


def calls(graph):
    """Name -> a call of one function, ``call(graph)``, where graph may be anything that the functions accept
    as one."""
    cases = {name: CASES[name] for name in NAMES}
    return {name: functools.partial(c, tensors=c.tensors(graph, batch=False)) for name, c in cases.items()}


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("name", GRAPHS)
def test_an_edge_index(device, name, index_dtype):
    graph = make_graph(name, device)
    edge_index = graph.edge_index.to(index_dtype, copy=True)
    sizes = dict(num_src=graph.num_src, num_dst=graph.num_dst)
    for function, call in calls(graph).items():
        expected = call(graph)
        torch.testing.assert_close(call(Graph.cached(edge_index, **sizes)), expected)
        if function in TOLD or graph.num_src == graph.num_dst and function != "softmax":
            torch.testing.assert_close(call(edge_index), expected, msg=lambda m, f=function: f"{f}: {m}")


def test_it_is_made_once(device, count_calls):
    """One Graph is made of an edge_index for all functions and layers, as long as the tensor lives and is not
    written to."""
    built = count_calls(_kept, "of_edges")
    graph = make_graph("random", device)
    edge_index = graph.edge_index.clone()
    for call in calls(graph).values():
        call(edge_index)
    assert Graph.cached(edge_index, 50) is Graph.cached(edge_index, num_src=50, num_dst=50)
    assert _kept.graph_of(edge_index, 50, 50)[0] is Graph.cached(edge_index, 50)
    assert len(built) == 1
    before = functional.dot_attention(edge_index, *torch.ones(3, 50, H, D, device=device))
    edge_index[1, edge_index[1] == 7] = 8
    after = functional.dot_attention(edge_index, *torch.ones(3, 50, H, D, device=device))
    assert len(built) == 2 and before[7].ne(0).all() and after[7].eq(0).all()
    gc.collect()  # now, so that below only this test's graph leaves the cache
    kept, place = len(_kept._cache), id(edge_index)
    del edge_index
    gc.collect()
    assert len(_kept._cache) == kept - 1 and (place,) not in _kept._cache


def test_a_graph_costs_nothing(device, monkeypatch):
    """A Graph is used directly: the function that looks up the graph of an edge_index is not called."""
    graph = make_graph("random", device)
    monkeypatch.setattr(_attention, "given_graph", None)
    for name in ("gat", "gatv2", "dot", "agnn"):
        calls(graph)[name](graph)


def test_compiled_without_a_size(device):
    """A call with scores alone does not tell the number of destinations, so that a Graph is asked for, which
    may be made while it is recorded, and with edges as sources."""
    graph = make_graph("random", device)
    compiled = torch.compile(calls(graph)["softmax"], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="graph: expected a Graph, which knows its sizes"):
        compiled(graph.edge_index.clone())
    rows, query = torch.randn(graph.num_edges, H, D, device=device), torch.randn(50, H, D, device=device)

    def told(edge_index, rows, query):
        given = Graph.cached(edge_index, num_nodes=50)
        out = functional.dot_attention(given.edges_as_sources(), query, rows, rows)
        return functional.edge_softmax(given, rows), out

    compiled = torch.compile(told, fullgraph=True, backend="aot_eager")
    given = graph.edge_index.clone(), rows, query
    torch.testing.assert_close(compiled(*given), told(*given))


def test_dgl_graphs_of_compat(device):
    graph = make_graph("random", device)
    g = compat.graph(tuple(graph.edge_index), num_nodes=50)
    for call in calls(graph).values():
        torch.testing.assert_close(call(g), call(graph))
    two = compat.heterograph({("a", "x", "b"): graph.edge_index.unbind(), ("a", "y", "b"): ([0], [1])})
    call = calls(graph)["gat"]
    with pytest.raises(ValueError, match="expected one relation"):
        call(two)
    torch.testing.assert_close(call(two["x"]), call(graph))


def test_dgl_graphs():
    dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
    graph = make_graph("random")
    g = dgl.graph(tuple(graph.edge_index), num_nodes=50)
    for call in calls(graph).values():
        torch.testing.assert_close(call(g), call(graph))
    src, dst = make_graph("fewer_destinations").edge_index
    block = dgl.create_block((src, dst), num_src_nodes=80, num_dst_nodes=30)
    graph = make_graph("fewer_destinations")
    for call in calls(graph).values():
        torch.testing.assert_close(call(block), call(graph))
    g = dgl.heterograph({("a", "x", "a"): ([0], [0]), ("a", "y", "a"): ([0], [0])})
    with pytest.raises(ValueError, match="etype"):
        functional.dot_attention(g, *torch.ones(3, 1, 1, 4))


def test_sparse_tensors(device):
    """Sparse tensors are taken as torch_geometric's layers take them: rows are destinations, and the tensor
    has the sizes."""
    graph = make_graph("fewer_destinations", device)
    src, dst = graph.edge_index
    ends = torch.stack([dst, src])
    ones = torch.ones(400, device=device)
    matrix = torch.sparse_coo_tensor(ends, ones, (30, 80), check_invariants=True)
    for call in calls(graph).values():
        torch.testing.assert_close(call(matrix), call(graph))
    with pytest.raises(ValueError, match=r"expected a sparse tensor \[num_dst=30, num_src=81\]"):
        functional.edge_softmax(Graph.cached(matrix, num_src=81, num_dst=30), torch.ones(400, device=device))


def test_an_edge_index_of_pyg():
    pyg = pytest.importorskip("torch_geometric")
    graph = make_graph("random")
    edge_index = pyg.EdgeIndex(graph.edge_index.clone(), sparse_size=(50, 50))
    for name in TOLD:
        call = calls(graph)[name]
        torch.testing.assert_close(call(edge_index), call(graph))
    assert Graph.cached(edge_index) is Graph.cached(edge_index, 50)


def test_cached(device):
    edge_index = torch.tensor([[0, 1, 4], [1, 0, 2]], device=device)
    graph = Graph.cached(edge_index)
    assert (graph.num_src, graph.num_dst) == (5, 5) and Graph.cached(edge_index) is graph
    other = Graph.cached(edge_index, num_src=6, num_dst=3)
    assert (other.num_src, other.num_dst) == (6, 3)
    assert Graph.cached(edge_index, num_src=6, num_dst=3) is other
    assert Graph.cached(edge_index) is graph is Graph.cached(edge_index, 5)
    assert torch.equal(other.edge_index, edge_index)
    edge_index[0, 2] = 8
    assert Graph.cached(edge_index).num_src == 9
    empty = Graph.cached(edge_index[:, :0])
    assert (empty.num_src, empty.num_edges) == (0, 0)
    x = torch.randn(9, H, D, device=device)
    expected = reference.dot_attention(Graph.cached(edge_index), x, x, x)

    def inside(edge_index, x):
        return functional.dot_attention(Graph.cached(edge_index), x, x, x)

    torch.testing.assert_close(inside(edge_index, x), expected)
    compiled = torch.compile(inside, backend="aot_eager")  # the graph is found outside of what is recorded
    torch.testing.assert_close(compiled(edge_index, x), expected)
