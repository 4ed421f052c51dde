"""Hooks, parametrizations and replacements of sub-modules of DGL's layers: they take effect in the fused
forward, or DGL's own forward runs with a warning."""

import warnings

import pytest
import torch
from dgl_compare import dgl, dgl_graph, our_graph
from torch import nn

import dfgnn
from dfgnn.nn import FallbackWarning

N = 50
LAYERS = {
    "GATConv": lambda: dgl.nn.GATConv(6, 4, 2),
    "GATConv-pair": lambda: dgl.nn.GATConv((6, 6), 4, 2, residual=True),
    "GATv2Conv": lambda: dgl.nn.GATv2Conv(6, 4, 2),
    "EdgeGATConv": lambda: dgl.nn.EdgeGATConv(6, 3, 4, 2),
}
EVERY = pytest.mark.parametrize("name", LAYERS)


def inputs(name):
    torch.manual_seed(2)
    g, x = dgl_graph(), torch.randn(N, 6, dtype=torch.float64)
    x = (x, x.flip(0)) if name == "GATConv-pair" else x
    return (g, x, torch.randn(g.num_edges(), 3, dtype=torch.float64)) if name == "EdgeGATConv" else (g, x)


def before_and_after(name, change, late):
    """Outputs of DGL's layer and of its accelerated copy, and accelerate's report. late: the change is made
    after accelerate."""
    layer = LAYERS[name]().double()
    if late:
        report = dfgnn.accelerate(layer)
        change(layer)
    else:
        change(layer)
        report = dfgnn.accelerate(layer)
    actual = layer(*inputs(name))
    dfgnn.restore(layer)
    return layer(*inputs(name)), actual, report


def hook(name, kind="forward_hook"):
    def change(layer):
        module = getattr(layer, name)
        if kind == "forward_hook":
            module.register_forward_hook(lambda module, args, out: 2 * out)
        elif kind == "forward_pre_hook":
            module.register_forward_pre_hook(lambda module, args: (args[0] - 1,))
        else:
            module.forward = lambda x: x.abs()

    return change


def replace(name, module):
    return lambda layer: setattr(layer, name, module)


CHANGES = {
    "leaky_relu hook": hook("leaky_relu"),
    "leaky_relu pre-hook": hook("leaky_relu", "forward_pre_hook"),
    "leaky_relu forward": hook("leaky_relu", "forward"),
    "leaky_relu Tanh": replace("leaky_relu", nn.Tanh()),
    "attn_drop hook": hook("attn_drop"),
    "attn_drop Softsign": replace("attn_drop", nn.Softsign()),
}


@EVERY
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_engine_does_not_do(name, change):
    expected, actual, report = before_and_after(name, CHANGES[change], late=False)
    torch.testing.assert_close(actual, expected)
    (kept,) = report.kept
    assert change.split()[0] in kept.reason and report.replaced == []
    with pytest.warns(FallbackWarning, match=change.split()[0]) as caught:
        expected, actual, report = before_and_after(name, CHANGES[change], late=True)
    torch.testing.assert_close(actual, expected)
    assert len(report.replaced) == 1 and caught[0].filename == __file__


HONOURED = {
    "feat_drop hook": hook("feat_drop"),
    "feat_drop Tanh": replace("feat_drop", nn.Tanh()),
    "attn_drop Identity": replace("attn_drop", nn.Identity()),
    "feat_drop Identity": replace("feat_drop", nn.Identity()),
    "another slope": replace("leaky_relu", nn.LeakyReLU(0.7)),
}


@EVERY
@pytest.mark.parametrize("change", HONOURED)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_what_it_does(name, change, late):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        expected, actual, report = before_and_after(name, HONOURED[change], late)
    torch.testing.assert_close(actual, expected)
    # The bits differ, which shows that dfgnn's forward ran and not DGL's.
    assert len(report.replaced) == 1 and not torch.equal(actual, expected)


@pytest.mark.parametrize("change", CHANGES)
def test_without_a_forward_of_dgl(change):
    """With a dfgnn.Graph a change that asks for DGL's own forward raises, because that cannot take the
    graph."""
    layer = dfgnn.nn.dgl.GATConv(6, 4, 2)
    CHANGES[change](layer)
    with pytest.raises(NotImplementedError, match=f"GATConv: .*{change.split()[0]}.*DGL"):
        layer(our_graph(dgl_graph()), torch.randn(N, 6))


def test_relations_of_hgt():
    g, x = dgl_graph(), torch.randn(N, 6, dtype=torch.float64)
    args = g, x, torch.randint(2, (N,)), torch.randint(3, (g.num_edges(),))

    def change(layer):
        layer.relation_att[1].register_forward_hook(lambda module, args, out: 2 * out)

    layer = dgl.nn.HGTConv(6, 3, 2, 2, 3, dropout=0.0).double()
    plain = layer(*args)
    dfgnn.accelerate(layer)
    torch.testing.assert_close(layer(*args), plain)
    change(layer)
    with pytest.warns(FallbackWarning, match="relation_att"):
        actual = layer(*args)
    dfgnn.restore(layer)
    torch.testing.assert_close(actual, layer(*args))
    assert not torch.allclose(actual, plain)
    (kept,) = dfgnn.accelerate(layer).kept
    assert "relation_att" in kept.reason
