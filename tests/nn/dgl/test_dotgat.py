"""DotGatConv beside dgl.nn.DotGatConv."""

import torch
from dgl_compare import Contract, dgl_graph

from dfgnn.nn.dgl import DotGatConv


class TestDotGatConv(Contract):
    layer = DotGatConv


def test_pair_of_features_with_one_projection():
    """DGL's layer raises there; ours projects both ends with it."""
    g = dgl_graph()
    layer = DotGatConv(9, 5, 2)
    x = torch.randn(g.num_nodes(), 9)
    assert torch.equal(layer(g, (x, x)), layer(g, x))
    assert not torch.equal(layer(g, (x, x.flip(0))), layer(g, x))
