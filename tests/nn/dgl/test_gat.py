"""GATConv beside dgl.nn.GATConv with the same parameters: outputs, attention, every gradient, every quirk."""

import math

import pytest
import torch
from covering import covering
from dgl_compare import DropoutContract, compare, dgl_graph

from dfgnn.nn import ZeroInDegreeError
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


def test_kind_of_error():
    assert issubclass(ZeroInDegreeError, ValueError)


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


def test_initialisation_distribution():
    layer = GATConv(200, 30, 10, residual=True)
    fan_sum = {"fc.weight": 500, "res_fc.weight": 500}
    for name, width in fan_sum.items():
        std = math.sqrt(2) * math.sqrt(2 / width)
        assert abs(layer.state_dict()[name].std().item() / std - 1) < 0.02
    # torch.nn.init takes (fan in, fan out) of a parameter [1, H, D] as (H D, D): here 300 and 30.
    assert abs(layer.attn_l.std().item() / (math.sqrt(2) * math.sqrt(2 / (300 + 30))) - 1) < 0.2
    assert layer.res_fc.bias.eq(0).all() and layer.bias is None
