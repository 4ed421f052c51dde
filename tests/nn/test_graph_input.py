"""A dfgnn.Graph in place of an edge_index: layers with PyG's contract give the same as for the tensor."""

import inspect
import warnings

import pytest
import torch
from every_layer import EDGES, N, X, arguments, floats, made, names

from dfgnn import Graph

pytest.importorskip("torch_geometric")

from dfgnn.nn import FallbackWarning, pyg

GRAPH = Graph.from_edge_index(EDGES, num_nodes=N)


@pytest.mark.parametrize("name", names("pyg", without=["HGT", "HAN", "Aggregation"]))
def test_same_results_and_gradients(name):
    layer, found = made(name).eval(), []
    for given in (EDGES, GRAPH):
        x = X.clone().requires_grad_()
        outs = floats(layer(*arguments(name, x, edges=given)))
        leaves = [x, *layer.parameters()]
        found.append(outs + list(torch.autograd.grad(sum(map(torch.sum, outs)), leaves, allow_unused=True)))
    for got, want in zip(*found):
        assert got is want is None or torch.equal(got, want)
    if "return_attention_weights" in inspect.signature(layer.forward).parameters:
        given = [arguments(name, edges=edges) for edges in (GRAPH, EDGES)]
        torch.testing.assert_close(*(layer(*each, return_attention_weights=True) for each in given))


def test_typed_edges():
    metadata, x = (["a"], [("a", "to", "a")]), {"a": X.float()}
    for layer in (pyg.HGTConv(8, 4, metadata, 2), pyg.HANConv(8, 4, metadata, 2)):
        torch.testing.assert_close(*(layer(x, {("a", "to", "a"): given}) for given in (EDGES, GRAPH)))


def test_loops_are_appended_once(monkeypatch):
    graph, layer = Graph.from_edge_index(EDGES, num_nodes=N), pyg.GATConv(8, 4)
    layer(X.float(), graph)

    def again(*args, **kwargs):
        raise AssertionError("loops were appended again")

    monkeypatch.setattr(Graph, "add_self_loops", again)
    layer(X.float(), graph)
    pyg.GATv2Conv(8, 4)(X.float(), graph)


def test_torch_geometrics_own_code_gets_the_tensor():
    layer = pyg.GATConv(8, 4, aggr="max")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        torch.testing.assert_close(layer(X.float(), GRAPH), layer(X.float(), EDGES))


def test_a_bipartite_graph():
    src, dst = torch.randint(9, (40,)), torch.randint(5, (40,))
    graph, layer = Graph.from_coo(src, dst, num_src=9, num_dst=5), pyg.TransformerConv((8, 8), 4, 2)
    x = torch.randn(9, 8), torch.randn(5, 8)
    torch.testing.assert_close(layer(x, graph), layer(x, torch.stack([src, dst])))


def test_compiled():
    layer = pyg.GATConv(8, 4, add_self_loops=False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X.float(), GRAPH), layer(X.float(), EDGES))
