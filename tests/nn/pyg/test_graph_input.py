"""A dfgnn.Graph in place of an edge_index: layers with PyG's contract give the same as for the tensor."""

import warnings

import pytest
import torch

from dfgnn import Graph

pytest.importorskip("torch_geometric")

from dfgnn.nn import FallbackWarning, pyg

N, E, F = 30, 120, 8


@pytest.fixture
def edges():
    torch.manual_seed(0)
    return torch.randint(N, (2, E))


def attributes(seed=1):
    return torch.randn(E, 3, generator=torch.Generator().manual_seed(seed))


LAYERS = {
    "GATConv": (lambda: pyg.GATConv(F, 4, 2), {}),
    "GATConv edge_dim": (lambda: pyg.GATConv(F, 4, 2, edge_dim=3), {"edge_attr": attributes()}),
    "GATv2Conv edge_dim": (lambda: pyg.GATv2Conv(F, 4, 2, edge_dim=3), {"edge_attr": attributes()}),
    "TransformerConv": (lambda: pyg.TransformerConv(F, 4, 2, edge_dim=3), {"edge_attr": attributes()}),
    "AGNNConv": (lambda: pyg.AGNNConv(), {}),
    "SuperGATConv": (lambda: pyg.SuperGATConv(F, 4, 2).eval(), {}),
    "GENConv": (lambda: pyg.GENConv(F, 4), {}),
    "GeneralConv": (lambda: pyg.GeneralConv(F, 4, attention=True, heads=2), {}),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(F, 4), {}),
    "GATEConv": (lambda: pyg.GATEConv(F, F, 3), {"edge_attr": attributes()}),
    "RGATConv": (lambda: pyg.RGATConv(F, 4, 2, heads=2), {"edge_type": torch.arange(E) % 2}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_same_results_and_gradients(name, edges):
    make, options = LAYERS[name]
    layer, graph = make(), Graph.from_edge_index(edges, num_nodes=N)
    found = []
    for given in (edges, graph):
        x = torch.ones(N, F).cumsum(0).div(N).requires_grad_()
        out = layer(x, given, **options)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        found.append((out, grad))
    torch.testing.assert_close(found[1], found[0])


def test_fa_conv(edges):
    layer, x = pyg.FAConv(F), torch.randn(N, F)
    graph = Graph.from_edge_index(edges, num_nodes=N)
    torch.testing.assert_close(layer(x, x, graph), layer(x, x, edges))


def test_typed_edges(edges):
    metadata = ["a"], [("a", "to", "a")]
    for layer in (pyg.HGTConv(F, 4, metadata, 2), pyg.HANConv(F, 4, metadata, 2)):
        x = {"a": torch.randn(N, F)}
        graph = Graph.from_edge_index(edges, num_nodes=N)
        expected, out = (layer(x, {("a", "to", "a"): given}) for given in (edges, graph))
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "layer", [pyg.GATConv(F, 4, 2), pyg.GATv2Conv(F, 4, 2), pyg.TransformerConv(F, 4, 2)]
)
def test_attention_comes_with_the_edges_as_a_tensor(layer, edges):
    graph, x = Graph.from_edge_index(edges, num_nodes=N), torch.randn(N, F)
    expected, found = (layer(x, given, return_attention_weights=True) for given in (edges, graph))
    torch.testing.assert_close(found, expected)


def test_loops_are_appended_once(edges, monkeypatch):
    graph, x, layer = Graph.from_edge_index(edges, num_nodes=N), torch.randn(N, F), pyg.GATConv(F, 4)
    layer(x, graph)

    def again(*args, **kwargs):
        raise AssertionError("loops were appended again")

    monkeypatch.setattr(Graph, "add_self_loops", again)
    layer(x, graph)
    pyg.GATv2Conv(F, 4)(x, graph)


def test_torch_geometrics_own_code_gets_the_tensor(edges):
    graph, x, layer = (
        Graph.from_edge_index(edges, num_nodes=N),
        torch.randn(N, F),
        pyg.GATConv(F, 4, aggr="max"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        torch.testing.assert_close(layer(x, graph), layer(x, edges))


def test_a_bipartite_graph():
    src, dst = torch.randint(9, (40,)), torch.randint(5, (40,))
    graph, layer = Graph.from_coo(src, dst, num_src=9, num_dst=5), pyg.TransformerConv((F, F), 4, 2)
    x = torch.randn(9, F), torch.randn(5, F)
    torch.testing.assert_close(layer(x, graph), layer(x, torch.stack([src, dst])))


def test_compiled(edges):
    graph, x = Graph.from_edge_index(edges, num_nodes=N), torch.randn(N, F)
    layer = pyg.GATConv(F, 4, add_self_loops=False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, graph), layer(x, edges))
