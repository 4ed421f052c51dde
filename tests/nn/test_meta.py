"""Tensors on the device meta have shapes alone, and so have the results of every function and layer there."""

import pytest
import torch
from every_function import CASES
from graphs import make_graph
from torch import nn

import dfgnn
from dfgnn import Graph

N, E = 12, 52


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def check(found, expected, leaves):
    """The results are on meta with these shapes and dtypes, and so are the gradients of the leaves."""
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert all(x.is_meta for x in found)
    gradients = torch.autograd.grad(sum(x.sum() for x in found), leaves, allow_unused=True)
    for x, grad in zip(leaves, gradients):
        assert grad is None or grad.is_meta and grad.shape == x.shape


@pytest.mark.parametrize("given", ["Graph", "Graph on meta", "edge_index"])
@pytest.mark.parametrize("name", CASES)
def test_functions(name, given, monkeypatch):
    case, graph = CASES[name], make_graph("isolated")
    case.choose(monkeypatch)
    tensors = case.tensors(graph, 4, 5, 3, batch=False)
    expected = case(graph, tensors)
    on_meta = {key: x.to("meta").requires_grad_() for key, x in tensors.items()}
    if given != "edge_index":
        found = case(graph if given == "Graph" else graph.to("meta"), on_meta)
    else:
        edges = graph.edge_index.to("meta")
        edges = Graph.cached(edges, num_src=graph.num_src, num_dst=graph.num_dst)
        found = case(edges, on_meta)
    check(found, expected, list(on_meta.values()))


def inputs(device):
    draw = torch.Generator().manual_seed(0)
    x, attr = (torch.randn(n, k, generator=draw).to(device) for n, k in ((N, 8), (E, 3)))
    return x.requires_grad_(), attr.requires_grad_()


def edges():
    edge_index = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(1))
    edge_index[:, -N:] = torch.arange(N)
    return edge_index


GRAPH = Graph.from_edge_index(edges(), num_nodes=N)
TO_SEVEN = Graph.from_coo(edges()[0], edges()[1] % 7, num_src=N, num_dst=7)
OWN = {
    "GATConv": (lambda l: l.GATConv(8, 4, 2, residual=True, attn_drop=0.5), lambda x, a: (GRAPH, x)),
    "GATConv weights": (lambda l: l.GATConv(8, 4, 2), lambda x, a: (GRAPH, x, a[:, 0])),
    "GATConv pair": (lambda l: l.GATConv((8, 8), 4, 2), lambda x, a: (TO_SEVEN, (x, x[:7]))),
    "GATv2Conv": (lambda l: l.GATv2Conv(8, 4, 2), lambda x, a: (GRAPH, x)),
    "AGNNConv": (lambda l: l.AGNNConv(), lambda x, a: (GRAPH, x)),
    "DotGatConv": (lambda l: l.DotGatConv(8, 4, 2), lambda x, a: (GRAPH, x)),
    "EGATConv": (lambda l: l.EGATConv(8, 3, 4, 3, 2), lambda x, a: (GRAPH, x, a)),
    "EdgeGATConv": (lambda l: l.EdgeGATConv(8, 3, 4, 2), lambda x, a: (GRAPH, x, a)),
    "HGTConv": (
        lambda l: l.HGTConv(8, 4, 2, 2, 3),
        lambda x, a: (GRAPH, x, *(t.to(x.device) for t in (edges()[0, :N] % 2, edges()[1] % 3))),
    ),
    "GlobalAttentionPooling": (
        lambda l: l.GlobalAttentionPooling(nn.Linear(8, 1), nn.Linear(8, 6)),
        lambda x, a: (GRAPH, x),
    ),
    "GraphTransformerConv": (lambda l: dfgnn.nn.GraphTransformerConv(8, 4, 2), lambda x, a: (GRAPH, x)),
    "GraphTransformerLayer": (lambda l: dfgnn.nn.GraphTransformerLayer(8, 2), lambda x, a: (GRAPH, x)),
    "EdgeGraphTransformerLayer": (
        lambda l: dfgnn.nn.EdgeGraphTransformerLayer(8, 2, edge_dim=3),
        lambda x, a: (GRAPH, x, a),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_layers_on_a_graph(name):
    """The graph has values; features and parameters are on meta."""
    make, arguments = OWN[name]
    layer = make(dfgnn.nn.dgl)
    expected = as_tuple(layer(*arguments(*inputs("cpu"))))
    layer.to("meta")
    x, attr = inputs("meta")
    check(as_tuple(layer(*arguments(x, attr))), expected, [x, attr, *layer.parameters()])


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@pytest.mark.parametrize("train", [False, True])
def test_layers_with_the_contract_of_pyg(train):
    """Everything is on meta: also where loops are appended, whose number depends on values."""
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")

    from every_layer import ATTR, EDGES, LAYERS, X, both
    from own_layers import floats
    from torch.utils._pytree import tree_map

    def moved(x):
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    for name, (_, call) in LAYERS.items():
        layer = both(name)[1].train(train)
        expected = floats(layer(*call(X, EDGES, ATTR)))
        layer = both(name)[1].train(train).to("meta")
        x = X.to("meta").requires_grad_()
        found = floats(layer(*tree_map(moved, call(x, EDGES, ATTR))))
        check(found, expected, [x, *layer.parameters()])


def test_a_graph_needs_values():
    on_meta = edges().to("meta")
    for make in (
        lambda: Graph.from_edge_index(on_meta, num_nodes=N),
        lambda: Graph.from_coo(*on_meta, num_nodes=N),
        lambda: Graph.cached(on_meta),
    ):
        with pytest.raises(ValueError, match="meta"):
            make()
