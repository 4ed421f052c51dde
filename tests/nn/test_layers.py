"""The layers with DGL's names on a dfgnn.Graph, without DGL: every device, against reference."""

import os

import pytest
import torch
from graphs import make_graph

from dfgnn import functional, nn, reference

# Private helpers of layers, tested directly: gradients of any order, and sizes that are divided into chunks.
from dfgnn.nn import _typed
from dfgnn.nn.dgl import _edges

NAMES = ["AGNNConv", "DotGatConv", "EGATConv", "EdgeGATConv", "GATConv", "GATv2Conv", "HGTConv"]
ARGUMENTS = {
    "AGNNConv": (),
    "DotGatConv": (9, 8, 2),
    "EGATConv": (9, 4, 8, 3, 2),
    "EdgeGATConv": (9, 4, 8, 2),
    "GATConv": (9, 8, 2),
    "GATv2Conv": (9, 8, 2),
    "HGTConv": (9, 8, 2, 3, 4, 0.0),
}


def make_layer(name, **options):
    if name != "HGTConv":
        options = {"allow_zero_in_degree": True, **options}
    torch.manual_seed(1)
    return getattr(nn.dgl, name)(*ARGUMENTS[name], **options)


def make_inputs(name, graph, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).to(graph.device)

    inputs = [normal(graph.num_src, 9)]
    if name in ("EGATConv", "EdgeGATConv"):
        inputs.append(normal(graph.num_edges, 4))
    elif name == "HGTConv":
        for size, kinds in ((graph.num_src, 3), (graph.num_edges, 4)):
            inputs.append(torch.randint(kinds, (size,), generator=generator).to(graph.device))
    return inputs


def run(layer, graph, inputs):
    """Outputs and gradients of features and parameters."""
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outs = layer(graph, *inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) for x in outs]
    wanted = [x for x in inputs if x.requires_grad] + list(layer.parameters())
    return [*outs, *torch.autograd.grad(outs, wanted, grads)]


@pytest.mark.parametrize("graph", ["random", "isolated", "duplicates", "mixed_degrees", "fewer_destinations"])
@pytest.mark.parametrize("name", NAMES)
def test_reference(name, graph, device, monkeypatch):
    graph = make_graph(graph, device)
    layer = make_layer(name).double().to(device)
    inputs = make_inputs(name, graph)
    actual = run(layer, graph, inputs)
    layer.attention = getattr(reference, type(layer).attention.__name__)
    monkeypatch.setattr(functional, "spmm", reference.spmm)
    for one, other in zip(actual, run(layer, graph, inputs)):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_deterministic(name, device):
    graph = make_graph("mixed_degrees", device)
    layer = make_layer(name).to(device)
    inputs = make_inputs(name, graph, torch.float32)
    first = run(layer, graph, inputs)
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(first, run(layer, graph, inputs)))


def test_without_dgl(plain_python):
    """An import of dgl fails there; every layer still runs, and says itself that a row is empty."""
    code = """
import sys
sys.modules["dgl"] = None
import torch
from graphs import make_graph
from test_layers import NAMES, make_inputs, make_layer
from dfgnn.nn import ZeroInDegreeError
for name in NAMES:
    layer = make_layer(name).double()
    layer(make_graph("random"), *make_inputs(name, make_graph("random")))
    if name == "HGTConv":
        continue
    layer.set_allow_zero_in_degree(False)
    try:
        layer(make_graph("isolated"), *make_inputs(name, make_graph("isolated")))
    except ZeroInDegreeError:
        continue
    raise AssertionError(name)
print("ran")
"""
    assert plain_python(code, path=[os.path.dirname(__file__)]).stdout.strip() == "ran"


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
