"""Every layer under what upstream's layers allow: results modified in place, gradients of gradients,
torch.func and forward mode."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from covering import covered
from graphs import make_graph
from torch import nn

import dfgnn
from dfgnn.graph.cache import graph_of
from dfgnn.nn import dgl as dgl_like
from dfgnn.nn import pyg as pyg_like

NODES, EDGES = 50, 400


def _types(count, rows, device):
    return torch.arange(rows, device=device) % count


def _dgl(make, *extra):
    def build(device):
        graph = make_graph("complete", device)
        x = torch.randn(graph.num_src, 6, dtype=torch.float64, device=device)
        more = [f(graph, device) for f in extra]
        return make().to(device, torch.float64), x, lambda layer, x: layer(graph, x, *more)

    return build


def _pyg(make, **extra):
    def build(device):
        generator = torch.Generator().manual_seed(0)
        edge_index = torch.randint(NODES, (2, EDGES), generator=generator).to(device)
        x = torch.randn(NODES, 6, dtype=torch.float64, device=device)
        arguments = {n: f(device) for n, f in extra.items()}
        return make().to(device, torch.float64), x, lambda layer, x: layer(x, edge_index, **arguments)

    return build


def _edge_features(graph, device):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(graph.num_edges, 3, generator=generator, dtype=torch.float64).to(device)


class First(nn.Module):
    """The first result of a layer that has several."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return self.layer(*args)[0]


LAYERS = {
    "dgl GATConv": _dgl(lambda: dgl_like.GATConv(6, 4, 2)),
    "dgl GATConv residual": _dgl(lambda: dgl_like.GATConv(6, 4, 2, attn_drop=0.5, residual=True)),
    "dgl GATv2Conv": _dgl(lambda: dgl_like.GATv2Conv(6, 4, 2, attn_drop=0.5)),
    "dgl DotGatConv": _dgl(lambda: dgl_like.DotGatConv(6, 4, 2)),
    "dgl AGNNConv": _dgl(lambda: dgl_like.AGNNConv()),
    "dgl EdgeGATConv": _dgl(lambda: dgl_like.EdgeGATConv(6, 3, 4, 2), _edge_features),
    "dgl EGATConv": _dgl(lambda: First(dgl_like.EGATConv(6, 3, 4, 2, 2)), _edge_features),
    "dgl HGTConv": _dgl(
        lambda: dgl_like.HGTConv(6, 4, 2, 3, 2),
        lambda graph, device: _types(3, graph.num_src, device),
        lambda graph, device: _types(2, graph.num_edges, device),
    ),
    "pyg GATConv": _pyg(lambda: pyg_like.GATConv(6, 4, 2, dropout=0.5)),
    "pyg GATConv mean": _pyg(lambda: pyg_like.GATConv(6, 4, 2, concat=False)),
    "pyg GATv2Conv": _pyg(lambda: pyg_like.GATv2Conv(6, 4, 2)),
    "pyg TransformerConv": _pyg(lambda: pyg_like.TransformerConv(6, 4, 2, dropout=0.5)),
    "pyg TransformerConv bare": _pyg(
        lambda: pyg_like.TransformerConv(6, 4, 2, root_weight=False, bias=False)
    ),
    "pyg AGNNConv": _pyg(lambda: pyg_like.AGNNConv()),
    "pyg SuperGATConv": _pyg(lambda: pyg_like.SuperGATConv(6, 4, 2, attention_type="SD").eval()),
    "pyg RGATConv": _pyg(
        lambda: pyg_like.RGATConv(6, 4, 2, heads=2), edge_type=lambda device: _types(2, EDGES, device)
    ),
}


def _attr(size):
    return lambda device: torch.linspace(-1, 1, EDGES * size, dtype=torch.float64, device=device).view(
        -1, size
    )


# Further layers, of which only second derivatives are tested.
MORE = {
    "pyg GATConv edges": _pyg(lambda: pyg_like.GATConv(6, 4, 2, edge_dim=3), edge_attr=_attr(3)),
    "pyg GATv2Conv edges": _pyg(lambda: pyg_like.GATv2Conv(6, 4, 2, edge_dim=3), edge_attr=_attr(3)),
    "pyg TransformerConv edges": _pyg(
        lambda: pyg_like.TransformerConv(6, 4, 2, edge_dim=3), edge_attr=_attr(3)
    ),
    "pyg GATEConv": _pyg(lambda: pyg_like.GATEConv(6, 6, 3), edge_attr=_attr(3)),
    "pyg GENConv": _pyg(lambda: pyg_like.GENConv(6, 4, edge_dim=3, norm="layer"), edge_attr=_attr(3)),
    "pyg GeneralConv": _pyg(
        lambda: pyg_like.GeneralConv(6, 4, 3, attention=True, heads=2), edge_attr=_attr(3)
    ),
    "pyg HEATConv": _pyg(
        lambda: pyg_like.HEATConv(6, 4, 2, 2, 3, 3, 3, heads=2),
        node_type=lambda device: _types(2, NODES, device),
        edge_type=lambda device: _types(2, EDGES, device),
        edge_attr=_attr(3),
    ),
    "pyg GPSConv": _pyg(
        lambda: pyg_like.GPSConv(6, pyg_like.GATConv(6, 3, 2), heads=2, act="tanh", norm=None),
        batch=lambda device: _types(3, NODES, device).sort().values,
    ),
    "GraphTransformerConv edges": _dgl(
        lambda: dfgnn.nn.GraphTransformerConv(6, 4, 2, edge_dim=3),
        lambda graph, device: None,
        lambda graph, device: None,
        lambda graph, device: False,
        _edge_features,
    ),
    "EdgeGraphTransformerConv": _dgl(
        lambda: First(dfgnn.nn.EdgeGraphTransformerConv(6, 3, 4, 2)), _edge_features
    ),
    "EdgeGraphTransformerConv flex": _dgl(
        lambda: dfgnn.nn.EdgeGraphTransformerConv(6, 3, 4, 2, edge_out=False), _edge_features
    ),
}
MODIFY = {
    "relu_": lambda x: x.relu_(),
    "elu_": F.elu_,
    "add_": lambda x: x.add_(1),
    "iadd": lambda x: x.__iadd__(torch.ones_like(x)),
    "mul_": lambda x: x.mul_(2),
    "ReLU": nn.ReLU(inplace=True),
    "dropout_": lambda x: F.dropout(x, 0.5, training=True, inplace=True),
    "setitem": lambda x: x.__setitem__((slice(None, 3),), 0.5) or x,
    "view": lambda x: x.flatten().sigmoid_().view_as(x),
}


def _weights(x):
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x)


def gradients(layer, call, x, modify):
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    out = modify(call(layer, x))
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    found = torch.autograd.grad((out * _weights(out)).sum(), wanted, allow_unused=True)
    return [out.detach(), *(g for g in found if g is not None)]


@covered(1, modify=MODIFY, build=LAYERS)
def test_in_place(device, build, modify):
    layer, x, call = build(device)
    found = gradients(layer, call, x, modify)
    expected = gradients(layer, call, x, lambda out: modify(out.clone()))
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "activation", [nn.ReLU(True), nn.ELU(inplace=True), F.relu_], ids=["ReLU", "ELU", "relu_"]
)
@pytest.mark.parametrize("make", [dgl_like.GATConv, dgl_like.GATv2Conv])
def test_activation_in_place(device, make, activation):
    outside = {nn.ReLU: F.relu, nn.ELU: F.elu}.get(type(activation), F.relu)
    graph = make_graph("complete", device)
    x = torch.randn(graph.num_src, 6, dtype=torch.float64, device=device)
    found = []
    for function in (activation, outside):
        torch.manual_seed(0)
        layer = make(6, 4, 2, activation=function).to(device, torch.float64)
        found.append(gradients(layer, lambda layer, x: layer(graph, x), x, lambda out: out))
    torch.testing.assert_close(*found)


def _numeric(function, x, step=1e-6):
    """d function(x + t d) / dt at 0 along a fixed direction d, and d."""
    direction = _weights(x)
    with torch.no_grad():
        high, low = (function(x + s * step * direction) for s in (1, -1))
    return (high - low) / (2 * step), direction


@pytest.mark.parametrize("build", {**LAYERS, **MORE}.values(), ids={**LAYERS, **MORE})
def test_gradient_penalty(device, build):
    """The gradient of |dL/dx|^2, against differences of dL/dx. L is linear, so that dL/dout is constant."""
    layer, x, call = build(device)

    def loss(x):
        torch.manual_seed(0)
        out = call(layer, x)
        return (out * _weights(out)).sum()

    def penalty(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(loss(x), x)[0].square().sum()

    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), leaf)
    expected, direction = _numeric(penalty, x)
    torch.testing.assert_close((second * direction).sum(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_torch_func(device, build):
    """Cold: torch.func meets the edges first. Gradients of the parameters and forward mode."""
    layer, x, call = build(device)
    layer.eval()
    parameters = {n: p.detach() for n, p in layer.named_parameters()}

    class Bound(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return call(self.layer, x)

    bound = Bound()

    def loss(parameters, x):
        named = {"layer." + n: p for n, p in parameters.items()}
        return torch.func.functional_call(bound, named, (x,)).square().sum()

    found, of_x = torch.func.grad(loss, (0, 1))(parameters, x)
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(
        bound(leaf).square().sum(), [leaf, *layer.parameters()], allow_unused=True, materialize_grads=True
    )
    torch.testing.assert_close([of_x, *found.values()], list(expected))
    _, tangent = torch.func.jvp(lambda x: loss(parameters, x), (x,), (_weights(x),))
    torch.testing.assert_close(tangent, (expected[0] * _weights(x)).sum())
    batch = torch.stack([x, 2 * x])
    out = torch.func.vmap(bound)(batch)
    torch.testing.assert_close(out, torch.stack([bound(x), bound(2 * x)]))


def test_types_made_under_a_transform(device):
    """Rows are grouped by type also where torch.func has wrapped the tensor of types."""
    layer, x, _ = LAYERS["dgl HGTConv"](device)
    layer.eval()
    graph = make_graph("complete", device)

    def call(x):
        return layer(graph, x, _types(3, graph.num_src, device), _types(2, graph.num_edges, device))

    found = torch.func.grad(lambda x: call(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(call(leaf).square().sum(), leaf)[0])


def test_types_behind_data(device):
    """``types.data = ...`` does not count as a modification, but the memory is another."""
    layer = dfgnn.nn.dgl.HGTConv(3, 2, 1, 3, 1).linear_k.to(device)  # a projection for each type
    x, types = torch.randn(6, 3, device=device), _types(3, 6, device).clone()
    layer(x, types)
    types.data = (types + 1) % 3
    torch.testing.assert_close(layer(x, types), torch.einsum("ni,nio->no", x, layer.W[types]))


def test_a_graph_made_under_a_transform(device):
    """It serves later calls, and pickle: nothing of torch.func's is left in it."""
    layer, x, _ = LAYERS["pyg TransformerConv bare"](device)
    layer.eval()
    edge_index = torch.randint(NODES, (2, EDGES)).to(device)
    torch.func.grad(lambda x: layer(x, edge_index).square().sum())(x)
    graph, _ = graph_of(edge_index, NODES, NODES)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    assert not any(
        wrapped(t) for t in (*graph.csr(), *graph.reverse_csr(), graph.edge_index) if t is not None
    )
    assert pickle.loads(pickle.dumps(graph)).num_edges == EDGES
