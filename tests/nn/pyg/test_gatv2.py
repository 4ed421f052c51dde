"""pyg.GATv2Conv beside torch_geometric's with the same parameters: outputs, attention, all gradients."""

import pytest
import torch
from pyg_compare import compare, edges, features, pair, torch_geometric

from dfgnn.nn.pyg import GATv2Conv

PyGConv = torch_geometric.nn.GATv2Conv
N = 50  # nodes of the graph "random"


def test_one_attribute_for_each_edge():
    theirs, ours = pair(PyGConv, GATv2Conv, 7, 5, 2, edge_dim=1)
    compare(theirs, ours, features(N, 7), edges(), features(400))
    compare(theirs, ours, features(N, 7), edges())  # edge attributes may be left out


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("name", ["lin_l", "lin_r"])
def test_one_of_two_shared_projections_was_replaced(name, pairs):
    """lin_l and lin_r are one module; an adapter (as of LoRA) may replace it under one of these names
    only."""
    theirs, ours = pair(PyGConv, GATv2Conv, 7, 5, 2, share_weights=True)
    other = torch.nn.Linear(7, 10).double()
    setattr(theirs, name, other)
    setattr(ours, name, other)
    x = features(N, 7)
    compare(theirs, ours, (x, x) if pairs else x, edges())
