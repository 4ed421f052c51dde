"""Layers on several sets of features at a time: DGL's kind takes [N, B, F], PyG's [B, N, F]."""

import pytest
import torch
from graphs import make_graph

from dfgnn import nn

B, N, E = 3, 50, 450
DTYPE = torch.float64


def _of_types(graph):
    return torch.arange(graph.num_src) * 7 % 3, torch.arange(graph.num_edges) * 5 % 4


# Name -> (the layer, its further arguments: None; a number, the size of edge features with a batch dimension;
# or a function that gives types).
DGL = {
    "GATConv": (lambda: nn.dgl.GATConv(6, 4, 2, residual=True), None),
    "GATv2Conv": (lambda: nn.dgl.GATv2Conv(6, 4, 2, residual=True), None),
    "DotGatConv": (lambda: nn.dgl.DotGatConv(6, 4, 2), None),
    "AGNNConv": (lambda: nn.dgl.AGNNConv(), None),
    "EGATConv": (lambda: nn.dgl.EGATConv(6, 3, 4, 5, 2), 3),
    "EdgeGATConv": (lambda: nn.dgl.EdgeGATConv(6, 3, 4, 2), 3),
    "EdgeGATConv wide": (lambda: nn.dgl.EdgeGATConv(6, 9, 4, 2), 9),
    "HGTConv": (lambda: nn.dgl.HGTConv(6, 4, 2, 3, 4, use_norm=True).eval(), _of_types),
    "GraphTransformerConv": (lambda: nn.GraphTransformerConv(6, 4, 2), None),
    "EdgeGraphTransformerConv": (lambda: nn.EdgeGraphTransformerConv(6, 3, 4, 2), 3),
    "EdgeGraphTransformerConv flex": (lambda: nn.EdgeGraphTransformerConv(6, 3, 4, 2, edge_out=False), 3),
}


def step(out, inputs):
    outs = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(sum(x.sin().sum() for x in outs), inputs, allow_unused=True)
    return outs, [g for g in grads if g is not None]


def check(layer, call, dim, x, *edges):
    """Checks that call(x, *edges) with all sets along dimension ``dim`` gives what it gives for each set."""
    inputs = [t.requires_grad_() for t in (x, *edges)]
    parameters = [*inputs, *layer.parameters()]
    found = step(call(*inputs), parameters)
    each = [call(*(t.select(dim, k) for t in inputs)) for k in range(B)]
    pair = isinstance(each[0], tuple)
    expected = tuple(torch.stack(xs, dim) for xs in zip(*each)) if pair else torch.stack(each, dim)
    torch.testing.assert_close(found, step(expected, parameters))


@pytest.mark.parametrize("shape", ["sorted", "random"])
@pytest.mark.parametrize("name", DGL)
def test_dgl(device, name, shape):
    torch.manual_seed(1)
    make, more = DGL[name]
    layer = make().to(device, DTYPE)
    graph = make_graph(shape, device).add_self_loops()
    x = torch.randn(graph.num_src, B, 6, dtype=DTYPE, device=device)
    if callable(more):
        types = [t.to(device) for t in more(graph)]
        check(layer, lambda x: layer(graph, x, *types), 1, x)
    elif more is None:
        check(layer, lambda x: layer(graph, x), 1, x)
    else:
        edges = torch.randn(graph.num_edges, B, more, dtype=DTYPE, device=device)
        check(layer, lambda x, e: layer(graph, x, e), 1, x, edges)


def test_two_dimensions_of_sets(device):
    graph = make_graph("random", device).add_self_loops()
    layer = nn.dgl.HGTConv(6, 4, 2, 3, 4).eval().to(device, DTYPE)
    x = torch.randn(graph.num_src, 2, B, 6, dtype=DTYPE, device=device)
    types = [t.to(device) for t in _of_types(graph)]
    found = layer(graph, x, *types)
    torch.testing.assert_close(found, layer(graph, x.flatten(1, 2), *types).unflatten(1, (2, B)))


@pytest.mark.parametrize("norm", ["layer", None])
@pytest.mark.parametrize("name", ["GraphTransformerLayer", "EdgeGraphTransformerLayer"])
def test_transformers(device, name, norm):
    """[B, N, F], as other transformers."""
    graph = make_graph("random", device).add_self_loops()
    x = torch.randn(B, graph.num_src, 6, dtype=DTYPE, device=device)
    if name == "GraphTransformerLayer":
        layer = nn.GraphTransformerLayer(6, 2, norm=norm).to(device, DTYPE)
        check(layer, lambda x: layer(graph, x), 0, x)
    else:
        layer = nn.EdgeGraphTransformerLayer(6, 2, 3, norm=norm).to(device, DTYPE)
        edges = torch.randn(B, graph.num_edges, 3, dtype=DTYPE, device=device)
        check(layer, lambda x, e: layer(graph, x, e, return_attention=True), 0, x, edges)


pyg = pytest.importorskip("dfgnn.nn.pyg", exc_type=ImportError)


def _attr(size):
    return lambda: {
        "edge_attr": torch.randn(E, size, generator=torch.Generator().manual_seed(0), dtype=DTYPE)
    }


def _types():
    return {"edge_type": torch.arange(E) * 5 % 4}


def _heat():
    return {"node_type": torch.arange(N) % 2, **_types(), **_attr(3)()}


PYG = {
    "GATConv": (lambda: pyg.GATConv(6, 4, 2, residual=True), dict),
    "GATConv mean": (lambda: pyg.GATConv(6, 4, 2, concat=False, edge_dim=3), _attr(3)),
    "GATv2Conv": (lambda: pyg.GATv2Conv(6, 4, 2, edge_dim=3, residual=True), _attr(3)),
    "TransformerConv": (lambda: pyg.TransformerConv(6, 4, 2, beta=True), dict),
    "TransformerConv edges": (lambda: pyg.TransformerConv(6, 4, 2, concat=False, edge_dim=3), _attr(3)),
    "TransformerConv wide": (lambda: pyg.TransformerConv(6, 4, 2, edge_dim=9), _attr(9)),
    "AGNNConv": (lambda: pyg.AGNNConv(), dict),
    "SuperGATConv": (lambda: pyg.SuperGATConv(6, 4, 2).eval(), dict),
    "SuperGATConv SD": (lambda: pyg.SuperGATConv(6, 4, 2, attention_type="SD").eval(), dict),
    "GATEConv": (lambda: pyg.GATEConv(6, 6, 3), _attr(3)),
    "GENConv": (lambda: pyg.GENConv(6, 4, edge_dim=3, norm="layer"), _attr(3)),
    "GeneralConv": (lambda: pyg.GeneralConv(6, 4, 3, attention=True, heads=2), _attr(3)),
    "HEATConv": (lambda: pyg.HEATConv(6, 4, 2, 4, 3, 3, 3, heads=2), _heat),
    "RGATConv": (lambda: _filled(pyg.RGATConv(6, 4, num_relations=4, heads=2)), _types),
}


def _filled(layer):
    """The layer with a value in l2, which torch_geometric leaves uninitialised."""
    torch.nn.init.constant_(layer.l2, 0.1)
    return layer


@pytest.fixture
def edge_index(device):
    return make_graph("random", device).edge_index.repeat(1, 2)[:, :E].contiguous()


@pytest.mark.parametrize("name", PYG)
def test_pyg(device, name, edge_index):
    torch.manual_seed(1)
    make, more = PYG[name]
    layer = make().to(device, DTYPE)
    options = {n: t.to(device) for n, t in more().items()}
    x = torch.randn(B, N, 6, dtype=DTYPE, device=device)
    check(layer, lambda x: layer(x, edge_index, **options), 0, x)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv", "RGATConv"])
def test_attention_that_is_returned(device, name, edge_index):
    torch.manual_seed(1)
    make, more = PYG[name]
    layer = make().to(device, DTYPE)
    options = {n: t.to(device) for n, t in more().items()}
    x = torch.randn(B, N, 6, dtype=DTYPE, device=device)

    def call(x):
        out, (edges, alpha) = layer(x, edge_index, **options, return_attention_weights=True)
        assert edges.shape == (2, alpha.shape[-2])
        return out, alpha

    check(layer, call, 0, x)


def test_fa(device, edge_index):
    layer = pyg.FAConv(6, dropout=0.0).to(device, DTYPE)
    x = torch.randn(B, N, 6, dtype=DTYPE, device=device)
    first = torch.randn(B, N, 6, dtype=DTYPE, device=device)
    check(layer, lambda x: layer(x, 0.5 * x, edge_index), 0, x)

    def call(x, first):
        out, (_, alpha) = layer(x, first, edge_index, return_attention_weights=True)
        return out, alpha

    check(layer, call, 0, x, first)
    with pytest.raises(ValueError, match="x_0: expected a batch as x"):
        layer(x, first[:2], edge_index)


@pytest.mark.parametrize("name", ["HANConv", "HGTConv"])
def test_kinds_of_nodes(device, name, edge_index):
    metadata = ["a", "b"], [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a")]
    torch.manual_seed(1)
    layer = getattr(pyg, name)(6, 6, metadata, heads=2).to(device, DTYPE)
    edges = {kind: edge_index.roll(k, 0)[:, k:].contiguous() for k, kind in enumerate(metadata[1])}
    a, b = (torch.randn(B, N, 6, dtype=DTYPE, device=device) for _ in range(2))
    check(layer, lambda a, b: tuple(layer({"a": a, "b": b}, edges).values()), 0, a, b)


def test_dropout_is_another_for_each_set(device, edge_index):
    x = torch.randn(1, N, 6, device=device).expand(B, -1, -1)
    for layer in (pyg.GATConv(6, 4, 2, dropout=0.5), pyg.GATEConv(6, 6, 3, dropout=0.5)):
        more = (torch.randn(E, 3, device=device),) if isinstance(layer, pyg.GATEConv) else ()
        out = layer.to(device)(x, edge_index, *more)
        assert not torch.allclose(out[0], out[1])
        out.sum().backward()


def test_pairs_and_errors(device, edge_index):
    layer = pyg.GATConv((6, 5), 4, 2, add_self_loops=False).to(device, DTYPE)
    x = torch.randn(B, N, 6, dtype=DTYPE, device=device)
    y = torch.randn(B, N, 5, dtype=DTYPE, device=device)
    check(layer, lambda x, y: layer((x, y), edge_index), 0, x, y)
    with pytest.raises(ValueError, match=r"x\[1\]: expected a batch as x\[0\]"):
        layer((x, y[0]), edge_index)
    with pytest.raises(ValueError, match=r"x\[0\]: expected shape \[N, F\] or \[B, N, F\]"):
        layer((x.unsqueeze(0), y), edge_index)
    with pytest.raises(NotImplementedError, match="in training"):
        pyg.SuperGATConv(6, 4).to(device, DTYPE)(x, edge_index)
    with pytest.raises(NotImplementedError, match="batch norm"):
        pyg.GENConv(6, 4).to(device, DTYPE)(x, edge_index)


def test_compiled(device, edge_index):
    layer = pyg.GATv2Conv(6, 4, 2).to(device, DTYPE)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(B, N, 6, dtype=DTYPE, device=device)
    torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))
