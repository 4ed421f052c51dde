"""pyg.AGNNConv beside torch_geometric's with the same parameter: outputs and all gradients."""

import torch
from pyg_compare import compare_low_precision, edges, features, pair, torch_geometric

from dfgnn.nn.pyg import AGNNConv

PyGConv = torch_geometric.nn.AGNNConv
N = 50  # nodes of the graph "random"


def agnn_pair(beta=1.7, dtype=torch.float64, **options):
    layers = pair(PyGConv, AGNNConv, dtype=dtype, **options)
    for layer in layers:
        layer.beta.data.fill_(beta)
    return layers


def test_a_row_of_zeros():
    x = features(N, 9)
    x[3] = 0
    theirs, ours = agnn_pair()
    with torch.no_grad():
        torch.testing.assert_close(ours(x, edges()), theirs(x, edges()), rtol=1e-10, atol=1e-10)


def test_low_precision_features_under_autocast():
    """A layer before this one gives bfloat16 under autocast; beta stays float32, and so is the result."""
    args = torch.randn(N, 9).bfloat16(), edges()
    compare_low_precision(*agnn_pair(dtype=torch.float32), *args, autocast=True)
