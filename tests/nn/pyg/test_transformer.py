"""pyg.TransformerConv beside torch_geometric's with the same parameters: outputs, attention, gradients."""

import pytest
import torch
from pyg_compare import compare, edges, features, inject_dropout, pair, torch_geometric

from dfgnn.nn import _fused_or_upstream
from dfgnn.nn import fused as _fused
from dfgnn.nn.pyg import TransformerConv, _base
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


LAYERS = {
    "few attributes": dict(edge_dim=3),
    "many attributes": dict(edge_dim=11),
    "beta": dict(edge_dim=3, beta=True),
    "mean": dict(edge_dim=11, concat=False),
    "no root weight": dict(edge_dim=3, root_weight=False),
    "no bias": dict(edge_dim=3, bias=False),
    "beta without attributes": dict(beta=True),
}
MODES = {
    "float64": {},
    "float32": dict(dtype=torch.float32),
    "float32, autocast": dict(dtype=torch.float32, autocast=True),
    "dropout": dict(dropout=0.4),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", LAYERS)
def test_at_once_is_what_its_operations_are(monkeypatch, kind, mode, padded):
    """The fused layer and separate operations give the same results and gradients up to rounding, with a new
    edge_index and with one that is in the cache."""
    if padded:
        monkeypatch.setitem(_fused._LOAD, "cpu", 16)
        monkeypatch.setitem(_fused._MOST_JOINED, "cpu", 2**22)
    options = dict(MODES[mode])
    dtype, autocast = options.pop("dtype", torch.float64), options.pop("autocast", False)
    layer = TransformerConv(9, 5, 2, **LAYERS[kind], **options).to(dtype)
    x, edge_index = features(N, 9, dtype=dtype).requires_grad_(), edges()
    attr = None if layer.lin_edge is None else features(400, layer.edge_dim, dtype=dtype)
    counts = counted(monkeypatch)

    def results(edge_index, learning):
        torch.manual_seed(5)
        given = [] if attr is None else [attr.detach().requires_grad_(learning)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = layer(x, edge_index, *given)
        leaves = [x, *layer.parameters(), *(given if learning else ())]
        grad = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
        found = torch.autograd.grad(out, leaves, grad, allow_unused=not layer.root_weight)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.manual_seed(5)
            assert torch.equal(layer(x, edge_index, *given), out)
        return [x for x in (out, *found) if x is not None]

    for learning in (True, False)[: 1 if attr is None else 2]:
        short = results(edge_index, learning)
        for same in (edge_index, edge_index.clone()):
            assert all(map(torch.equal, short, results(same, learning)))
        assert len(counts) == 6
        with monkeypatch.context() as patch:
            patch.setattr(_base, "fused_layer", lambda *args, **kwargs: (None, None))
            patch.setattr(_fused_or_upstream, "again", lambda *args: None)
            long = results(edge_index, learning)
        counts.clear()
        tolerance = 0.05 if autocast else 1e-10 if dtype == torch.float64 else 2e-5
        for got, want in zip(short, long, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            scale = max(1.0, want.abs().max().item())
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance * scale)


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
