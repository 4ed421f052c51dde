"""GATConv beside dgl.nn.GATConv with the same parameters: outputs, attention, every gradient, every quirk."""

import pytest
import torch
from covering import covering
from dgl_compare import DropoutContract, compare, dgl_graph

from dfgnn.nn.dgl import GATConv


class TestGATConv(DropoutContract):
    layer = GATConv
    options = covering(
        residual=(False, True),
        bias=(False, True),
        activation=(None, torch.nn.functional.elu),
        negative_slope=(0.2, 0.05),
    )

    def more_inputs(self, g, dtype, prefix=()):
        return (torch.rand(g.num_edges(), dtype=dtype),)


def pair(in_feats, **options):
    return TestGATConv().pair(in_feats, **options)


def test_without_edge_weight():
    g = dgl_graph()
    compare(*pair(9), g, torch.randn(g.num_nodes(), 9))


@pytest.mark.parametrize("in_feats", [9, 40])
@pytest.mark.parametrize("residual", [False, True])
def test_leading_dimensions(residual, in_feats):
    """Inputs ``[N, *, F]``; DGL takes them with more than one dimension in place of the star, too."""
    g = dgl_graph()
    theirs, ours = pair(in_feats, residual=residual)
    compare(theirs, ours, g, torch.randn(g.num_nodes(), 3, in_feats))
    compare(theirs, ours, g, torch.randn(g.num_nodes(), 2, 4, in_feats))
    pair_of = torch.randn(g.num_nodes(), 3, in_feats), torch.randn(g.num_nodes(), 3, in_feats)
    compare(theirs, ours, g, pair_of)
