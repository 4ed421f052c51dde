"""GATv2Conv beside dgl.nn.GATv2Conv."""

import pytest
import torch
from covering import covering
from dgl_compare import DropoutContract, compare, dgl_graph

from dfgnn.nn.dgl import GATv2Conv


class TestGATv2Conv(DropoutContract):
    layer = GATv2Conv
    options = covering(
        residual=(False, True),
        bias=(False, True),
        share_weights=(False, True),
        activation=(None, torch.nn.functional.elu),
        negative_slope=(0.2, 0.05),
    )


@pytest.mark.parametrize("share_weights", [False, True])
def test_pair_of_features_with_one_size(share_weights):
    g = dgl_graph()
    layers = TestGATv2Conv().pair(share_weights=share_weights)
    feats = torch.randn(g.num_nodes(), 9), torch.randn(g.num_nodes(), 9)
    compare(*layers, g, feats)


def test_shared_projection_runs_once():
    """A hook on it sees one call, whose output serves both ends, as in DGL."""
    g = dgl_graph()
    layers = TestGATv2Conv().pair(share_weights=True)
    calls = []
    for layer in layers:
        layer.fc_src.register_forward_hook(lambda module, args, out: calls.append(1) or 2 * out)
        layer(g, torch.randn(g.num_nodes(), 9))
    assert len(calls) == 2
    compare(*layers, g, torch.randn(g.num_nodes(), 9))
