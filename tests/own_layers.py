"""Layers with DGL's contract and our own, small, with inputs."""

import torch

from dfgnn import nn


def turns(rows, count):
    return torch.arange(len(rows)) % count


def floats(value):
    """The tensors of floating-point numbers in a layer's results."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value
    return [x for item in items if item is not None for x in floats(item)]


# Name -> (a function that makes the layer, a function from (Graph, features [N, 8], edge attributes [E, 3])
# to its arguments).
LAYERS = {
    "GATConv": (lambda: nn.dgl.GATConv(8, 4, 2, residual=True), lambda g, x, a: (g, x)),
    "GATv2Conv": (lambda: nn.dgl.GATv2Conv(8, 4, 2), lambda g, x, a: (g, x)),
    "DotGatConv": (lambda: nn.dgl.DotGatConv(8, 4, 2), lambda g, x, a: (g, x)),
    "AGNNConv": (lambda: nn.dgl.AGNNConv(), lambda g, x, a: (g, x)),
    "EGATConv": (lambda: nn.dgl.EGATConv(8, 3, 4, 3, 2), lambda g, x, a: (g, x, a)),
    "EdgeGATConv": (lambda: nn.dgl.EdgeGATConv(8, 3, 4, 2), lambda g, x, a: (g, x, a)),
    "HGTConv": (lambda: nn.dgl.HGTConv(8, 4, 2, 3, 2), lambda g, x, a: (g, x, turns(x, 3), turns(a, 2))),
    "GlobalAttentionPooling": (
        lambda: nn.dgl.GlobalAttentionPooling(torch.nn.Linear(8, 1), torch.nn.Linear(8, 5)),
        lambda g, x, a: (g, x),
    ),
    "GraphTransformerConv": (lambda: nn.GraphTransformerConv(8, 4, 2), lambda g, x, a: (g, x)),
    "GraphTransformerConv edges": (
        lambda: nn.GraphTransformerConv(8, 4, 2, edge_dim=3),
        lambda g, x, a: (g, x, None, None, False, a),
    ),
    "GraphTransformerLayer": (
        lambda: nn.GraphTransformerLayer(8, 2, norm="layer"), lambda g, x, a: (g, x)
    ),
    "EdgeGraphTransformerConv": (
        lambda: nn.EdgeGraphTransformerConv(8, 3, 4, 2, bias=True), lambda g, x, a: (g, x, a)
    ),
    "EdgeGraphTransformerLayer": (
        lambda: nn.EdgeGraphTransformerLayer(8, 2, edge_dim=3, norm="layer"), lambda g, x, a: (g, x, a)
    ),
}  # fmt: skip
