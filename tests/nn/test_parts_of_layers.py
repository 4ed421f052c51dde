"""What layers of DGL's contract are made of: maps by type, and sums between nodes and edges."""

import pytest
import torch
from graphs import make_graph

# Private helpers of layers, tested directly: gradients of any order, and sizes that are divided into chunks.
from dfgnn.nn import _typed
from dfgnn.nn.dgl import _edges


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_typed_matmul(heads, in_order, device):
    """Some types have many rows, some few and some none."""
    types = torch.cat([torch.full((9000,), 3), torch.tensor([0, 4, 0, 2]), torch.full((5000,), 4)])
    types = types.sort().values if in_order else types.roll(2500)
    types = types.to(device)
    x = torch.randn(len(types), heads, 6, dtype=torch.float64, device=device).requires_grad_()
    weight = torch.randn(6, heads, 6, 5, dtype=torch.float64, device=device).requires_grad_()
    out = _typed.typed_matmul(x, weight, _typed.groups_of(types, 6), len(types))
    expected = (x.unsqueeze(-2) @ weight[types]).squeeze(-2)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [x, weight], grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [x, weight], grad))


# ---- sums between nodes and edges ------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["random", "isolated", "fewer_sources", "no_edges", "no_nodes"])
@pytest.mark.parametrize("step", [1, 40, 1 << 20])
def test_add_ends(graph, step, device, monkeypatch):
    monkeypatch.setitem(_edges._STEP, torch.device(device).type, step)
    graph = make_graph(graph, device)
    sizes = graph.num_edges, graph.num_src, graph.num_dst
    leaves = [torch.randn(n, 7, dtype=torch.float64, device=device).requires_grad_() for n in sizes]
    src, dst = graph.edge_index
    rows = leaves[0].clone()
    out = _edges.add_ends(graph, rows, *leaves[1:])
    assert out.data_ptr() == rows.data_ptr()
    expected = leaves[0] + leaves[1][src] + leaves[2][dst]
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, grad))


@pytest.mark.parametrize("prefix", [(), (2, 3)], ids=str)
def test_sums_per_head(prefix, device):
    graph = make_graph("isolated", device)
    weight = torch.randn(graph.num_edges, *prefix, 4, dtype=torch.float64, device=device)
    rows = torch.randn(graph.num_edges, *prefix, 5, dtype=torch.float64, device=device)
    messages = weight[..., None] * rows[..., None, :]
    expected = messages.new_zeros(graph.num_dst, *messages.shape[1:]).index_add(
        0, graph.edge_index[1], messages
    )
    sums = _edges.sums_per_head(graph, weight, rows)
    torch.testing.assert_close(torch.stack(sums, -2), expected)
