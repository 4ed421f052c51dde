"""EdgeGATConv beside dgl.nn.EdgeGATConv."""

import torch
from covering import covering
from dgl_compare import DropoutContract, dgl_graph

from dfgnn.nn.dgl import EdgeGATConv


class EdgeGATContract(DropoutContract):
    layer = EdgeGATConv
    options = covering(
        residual=(False, True),
        bias=(False, True),
        activation=(None, torch.nn.functional.elu),
        negative_slope=(0.2, 0.05),
    )
    edge_feats: int

    def arguments(self, in_feats):
        return in_feats, self.edge_feats, 5, 2

    def more_inputs(self, g, dtype, prefix=()):
        return (torch.randn(g.num_edges(), *prefix, self.edge_feats, dtype=dtype),)


class TestNarrowEdges(EdgeGATContract):
    """Edge features are summed before they are projected."""

    edge_feats = 4


class TestWideEdges(EdgeGATContract):
    """Edge features are projected before they are summed."""

    edge_feats = 40
    options = EdgeGATContract.options[::3]


def test_no_tensor_of_edges_and_features():
    """Narrow edge features are never projected: forward and backward make nothing as large as E x H x D."""
    g = dgl_graph("super_row")
    layer = EdgeGATConv(9, 4, 32, 8)
    inputs = [x.requires_grad_() for x in TestNarrowEdges().inputs(g)]
    size = g.num_edges() * 8 * 32 * 4
    with torch.profiler.profile(profile_memory=True) as profile:
        layer(g, *inputs).sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < size / 2
