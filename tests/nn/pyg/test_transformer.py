"""pyg.TransformerConv beside torch_geometric's with the same parameters: outputs, attention, gradients."""

import pytest
import torch
from pyg_compare import compare, edges, inject_dropout, pair, torch_geometric

from dfgnn.nn.pyg import TransformerConv

PyGConv = torch_geometric.nn.TransformerConv
N = 50  # nodes of the graph "random"


def features(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("shape", [(400, 2, 5), (400, 1, 5), (400, 2, 1), (2, 5), (5,)], ids=str)
def test_edge_attributes_without_a_projection(shape):
    """In a layer without edge_dim they are added to the values, as they are."""
    theirs, ours = pair(PyGConv, TransformerConv, 9, 5, 2)
    compare(theirs, ours, features(N, 9), edges(), features(*shape), return_attention_weights=True)


def test_one_attribute_for_each_edge():
    theirs, ours = pair(PyGConv, TransformerConv, 7, 5, 2, edge_dim=1)
    x, attr = features(N, 7), features(400, 1)
    compare(theirs, ours, x, edges(), attr)
    torch.testing.assert_close(ours(x, edges(), attr[:, 0]), theirs(x, edges(), attr))


def test_errors():
    layer, x = TransformerConv(9, 5, 2).double(), features(N, 9)
    with pytest.raises(ValueError, match=r"got None for x\[1\]"):
        layer((x, None), edges())
    with pytest.raises(ValueError, match=r"edge_attr: .* broadcasts to \[400, 2, 5\], got \[400, 3\]"):
        layer(x, edges(), features(400, 3))
    with pytest.raises(ValueError, match=r"edge_attr: expected \[E, 3\] in a layer with edge_dim, got None"):
        TransformerConv(9, 5, 2, edge_dim=3).double()(x, edges())
    with pytest.raises(ValueError, match="edge_attr: expected shape"):
        TransformerConv(9, 5, 2, edge_dim=3).double()(x, edges(), features(399, 3))


def test_injected_mask(monkeypatch):
    """Attributes that are added to the values, as they are, are dropped with them."""
    theirs, ours = pair(PyGConv, TransformerConv, 9, 5, 2, dropout=0.4)
    inject_dropout(monkeypatch, ours, 400, 2)
    attr = features(400, 2, 5)
    compare(theirs, ours, features(N, 9), edges(), attr, return_attention_weights=True)
    compare(theirs, ours, features(N, 9), edges(), attr)
