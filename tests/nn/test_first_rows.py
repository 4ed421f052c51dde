"""A pair whose destinations are the first rows of its sources, as samplers give them."""

import pytest
import torch

from dfgnn import Graph
from dfgnn import nn as layers
from dfgnn.nn.fused import operator_call as _operator_call
from dfgnn.nn.fused.operator_call import is_first_rows


def test_which_are():
    x = torch.randn(6, 4, requires_grad=True)
    moved, inner = x * 2, torch.randn(6, 4)
    kept = moved[:3]
    kept.retain_grad()
    hooked = moved[:3]
    hooked.register_hook(lambda grad: grad)
    for dst, src in [(x, x), (x[:3], x), (moved[:3], moved), (inner[:2], inner), (x[0:6], x)]:
        assert is_first_rows(dst, src)
    for dst, src in [
        (x[:3].detach(), x),  # no gradient for x
        (x[:3].detach().requires_grad_(), x),
        (x[:3].clone(), x),
        (x[1:3], x),
        (x[:0], x),  # an empty view has no memory that could be compared
        (x[:3, :2], x),
        (x[::2], x),
        (x[:4][:3], x),  # a view of a view is not recognised
        (x, x[:3]),
        (x[:3], moved),
        (kept, moved),  # retain_grad(): the gradient of this view itself is needed
        (hooked, moved),
        (x.detach()[:3].requires_grad_(), x),
        (x[:3].double(), x),
    ]:
        assert not is_first_rows(dst, src)
    with torch.no_grad():
        assert is_first_rows(x[:3].detach(), x)


def _block(device):
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(9, (40,), generator=generator), torch.randint(4, (40,), generator=generator)
    return torch.stack([src, dst]).to(device)


def _pyg(edge_index):
    conv = pytest.importorskip("dfgnn.nn.pyg", reason="torch_geometric is not installed").GATConv
    layer = conv(5, 4, heads=2, residual=True)
    return layer, lambda x, x_dst: layer((x, x_dst), edge_index)


def _dgl(edge_index):
    layer = layers.dgl.GATConv(5, 4, num_heads=2, residual=True, allow_zero_in_degree=True)
    graph = Graph.from_edge_index(edge_index, num_src=9, num_dst=4)
    return layer, lambda x, x_dst: layer(graph, (x, x_dst))


@pytest.mark.parametrize("make", [_pyg, _dgl])
def test_the_layer_is_computed_at_once(make, device, count_calls):
    """The layer is one operator call, and has the results and gradients that it has for any other pair."""
    layer, run = make(_block(device))
    layer.to(device)
    calls = count_calls(_operator_call, "computed")
    x = torch.randn(9, 5, device=device, requires_grad=True)
    parameters = [x, *layer.parameters()]
    out = run(x, x[:4])
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), parameters)
    assert len(calls) == 1
    other = run(x, x[:4].clone())
    want = torch.autograd.grad((other * weight).sum(), parameters)
    torch.testing.assert_close(out, other)
    torch.testing.assert_close(found, want)


def test_two_projections_are_two(device):
    """Widths that differ: each end has its own."""
    layer = layers.dgl.GATConv((5, 5), 4, num_heads=2, allow_zero_in_degree=True).to(device)
    graph = Graph.from_edge_index(_block(device), num_src=9, num_dst=4)
    x = torch.randn(9, 5, device=device)
    torch.testing.assert_close(layer(graph, (x, x[:4])), layer(graph, (x, x[:4].clone())))
