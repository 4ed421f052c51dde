"""pyg.TransformerConv beside torch_geometric's with the same parameters: outputs, attention, gradients."""

import pytest
import torch
from pyg_compare import compare, edges, features, inject_dropout, pair, torch_geometric

from dfgnn.nn import fused as _fused
from dfgnn.nn.pyg import TransformerConv
from dfgnn.nn.whole import traced as _traced

PyGConv = torch_geometric.nn.TransformerConv
N = 50  # nodes of the graph "random"


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


def test_injected_mask(monkeypatch):
    """Edge attributes that are added to the values without a projection are dropped together with the
    values."""
    theirs, ours = pair(PyGConv, TransformerConv, 9, 5, 2, dropout=0.4)
    inject_dropout(monkeypatch, ours, 400, 2)
    attr = features(400, 2, 5)
    compare(theirs, ours, features(N, 9), edges(), attr, return_attention_weights=True)
    compare(theirs, ours, features(N, 9), edges(), attr)


def counted(monkeypatch):
    """A list that grows with every layer that is computed as one function."""
    found, run = [], _fused.Call.run
    monkeypatch.setattr(_fused.Call, "run", lambda *args: found.append(1) or run(*args))
    return found


def test_large_attributes_are_folded(monkeypatch):
    """Edge attributes that are fewer than a head's channels, or have gradients, are projected up to a number
    of elements and folded beyond it; others are always projected."""
    x, edge_index = features(N, 9), edges()
    for edge_dim, learns, is_folded in ((3, False, True), (5, False, False), (5, True, True)):
        layer = TransformerConv(9, 5, 2, edge_dim=edge_dim).double()
        attr = features(400, edge_dim).requires_grad_(learns)
        counts = counted(monkeypatch)
        monkeypatch.setitem(_traced.MOST_UNFOLDED, "cpu", 400 * 10)
        expected = layer(x, edge_index, attr)
        assert len(counts) == 1
        monkeypatch.setitem(_traced.MOST_UNFOLDED, "cpu", 400 * 10 - 1)
        torch.testing.assert_close(layer(x, edge_index, attr), expected)
        assert len(counts) == (1 if is_folded else 2)


def test_what_is_not_computed_at_once(monkeypatch):
    """Attributes of another dtype raise as without the fused layer; under autocast they are cast."""
    layer, x, edge_index = TransformerConv(9, 5, 2, edge_dim=3), features(N, 9).float(), edges()
    counts = counted(monkeypatch)
    attr = features(400, 3)
    with pytest.raises((RuntimeError, TypeError)):
        layer(x, edge_index, attr)
    expected = layer(x, edge_index, attr.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert len(counts) == 1
        torch.testing.assert_close(
            layer(x, edge_index, attr.bfloat16()), expected.bfloat16(), rtol=0.05, atol=0.05
        )
        assert len(counts) == 2
        layer(x, edge_index, attr)  # autocast does not cast float64: this call is not fused
        assert len(counts) == 2
