"""Which gradients are None in DGL's layers and in ours, also where only the returned attention is used."""

import pytest
import torch
from dgl_compare import dgl
from torch import nn

import dfgnn

DGL = dgl.nn.pytorch
N, E = 12, 40
EDGES = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(0))
KINDS, TYPES = EDGES[0, :N] % 2, EDGES[1] % 3
OPTIONS = dict(allow_zero_in_degree=True)

# Name -> (a function that makes the layer, a function from a graph, features and attributes to arguments).
LAYERS = {
    "GATConv": (lambda: DGL.GATConv(8, 4, 2, residual=True, **OPTIONS), lambda g, x, a: (g, x)),
    "GATConv pair": (lambda: DGL.GATConv((8, 8), 4, 2, **OPTIONS), lambda g, x, a: (g, (x, x.sin()))),
    "GATConv weights": (lambda: DGL.GATConv(8, 4, 2, **OPTIONS), lambda g, x, a: (g, x, a[:, 0])),
    "GATv2Conv": (lambda: DGL.GATv2Conv(8, 4, 2, residual=True, **OPTIONS), lambda g, x, a: (g, x)),
    "AGNNConv": (lambda: DGL.AGNNConv(**OPTIONS), lambda g, x, a: (g, x)),
    "DotGatConv": (lambda: DGL.DotGatConv(8, 4, 2, **OPTIONS), lambda g, x, a: (g, x)),
    "EGATConv": (lambda: DGL.EGATConv(8, 3, 4, 3, 2), lambda g, x, a: (g, x, a)),
    "HGTConv": (
        lambda: DGL.HGTConv(8, 4, 2, 2, 3),
        lambda g, x, a: (g, x, KINDS, TYPES[: g.num_edges()]),
    ),
    "GlobalAttentionPooling": (
        lambda: DGL.GlobalAttentionPooling(nn.Linear(8, 1), nn.Linear(8, 6)),
        lambda g, x, a: (g, x),
    ),
}
if hasattr(DGL, "EdgeGATConv"):
    LAYERS["EdgeGATConv"] = lambda: DGL.EdgeGATConv(8, 3, 4, 2, **OPTIONS), lambda g, x, a: (g, x, a)


def given(layer, arguments, loss, options):
    """The names of the leaves that have a gradient."""
    inputs, named = arguments()
    results = layer(*inputs, **options)
    loss(results if isinstance(results, tuple) else (results,)).backward()
    return {name for name, x in [*layer.named_parameters(), *named.items()] if x.grad is not None}


@pytest.mark.parametrize("edges", [E, 1, 0])
@pytest.mark.parametrize("name", LAYERS)
def test_which_gradients_are_none(name, edges):
    make, call = LAYERS[name]
    src, dst = EDGES[:, :edges]
    if name == "EGATConv":  # which refuses destinations without edges
        src, dst = torch.cat([src, torch.arange(N)]), torch.cat([dst, torch.arange(N)])
    graph = dgl.graph((src, dst), num_nodes=N)
    draw = torch.Generator().manual_seed(1)
    x, attr = (torch.randn(n, k, generator=draw).double() for n, k in ((N, 8), (len(src), 3)))

    def arguments():
        named = {"x": x.clone().requires_grad_(), "attr": attr.clone().requires_grad_()}
        return call(graph, named["x"], named["attr"]), named

    asked = [{}] if name in ("AGNNConv", "HGTConv") else [{}, {"get_attention": True}]
    for options in asked:
        for loss in (lambda xs: sum(x.square().sum() for x in xs), lambda xs: xs[-1].square().sum()):
            found = []
            for accelerate in (False, True):
                torch.manual_seed(0)
                layer = make().double()
                if accelerate:
                    assert dfgnn.accelerate(layer).replaced
                found.append(given(layer, arguments, loss, options))
            assert found[0] == found[1]
