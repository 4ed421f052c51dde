"""Every layer of torch_geometric that dfgnn has, small, with inputs; and copies that were accelerated."""

import copy

import torch
from own_layers import floats
from pyg_compare import torch_geometric
from torch import nn
from torch_geometric.nn.models.attentive_fp import GATEConv

import dfgnn

PyG = torch_geometric.nn
N, E = 12, 40
METADATA = ["a", "b"], [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a")]


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def chosen(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


X, ATTR, EDGES = drawn(N, 8), drawn(E, 3), chosen(N, 2, E)
EDGES[1] = (EDGES[0] + 1 + EDGES[1] % (N - 1)) % N  # without loops
TYPES, KINDS, BATCH = chosen(2, E), chosen(2, N), torch.arange(N) // 5
ALL = torch.ones(E, dtype=torch.bool)


# Name -> (a function that makes the layer, a function from (features, edge_index, edge attributes) to its
# arguments).
LAYERS = {
    "GATConv": (lambda: PyG.GATConv(8, 4, 2), lambda x, e, a: (x, e)),
    "GATConv attributes": (lambda: PyG.GATConv(8, 4, 2, edge_dim=3), lambda x, e, a: (x, e, a)),
    "GATv2Conv": (lambda: PyG.GATv2Conv(8, 4, 2), lambda x, e, a: (x, e)),
    "GATv2Conv attributes": (lambda: PyG.GATv2Conv(8, 4, 2, edge_dim=3), lambda x, e, a: (x, e, a)),
    "TransformerConv": (lambda: PyG.TransformerConv(8, 4, 2), lambda x, e, a: (x, e)),
    "TransformerConv attributes": (
        lambda: PyG.TransformerConv(8, 4, 2, beta=True, edge_dim=3),
        lambda x, e, a: (x, e, a),
    ),
    "AGNNConv": (lambda: PyG.AGNNConv(), lambda x, e, a: (x, e)),
    "SuperGATConv": (lambda: PyG.SuperGATConv(8, 4, 2), lambda x, e, a: (x, e)),
    "FAConv": (lambda: PyG.FAConv(8), lambda x, e, a: (x, x, e)),
    "GENConv": (lambda: PyG.GENConv(8, 4, edge_dim=3), lambda x, e, a: (x, e, a)),
    "GeneralConv": (lambda: PyG.GeneralConv(8, 4, 3, heads=2, attention=True), lambda x, e, a: (x, e, a)),
    "GeneralConv products": (
        lambda: PyG.GeneralConv(8, 4, heads=2, attention=True, attention_type="dot_product"),
        lambda x, e, a: (x, e),
    ),
    "GATEConv": (lambda: GATEConv(8, 8, 3), lambda x, e, a: (x, e, a)),
    "ResGatedGraphConv": (lambda: PyG.ResGatedGraphConv(8, 4), lambda x, e, a: (x, e)),
    "RGATConv": (lambda: PyG.RGATConv(8, 4, 2, edge_dim=3), lambda x, e, a: (x, e, types(a), a)),
    "HEATConv": (
        lambda: PyG.HEATConv(8, 4, 2, 3, 2, 3, 3, heads=2),
        lambda x, e, a: (x, e, kinds(x), types(a), a),
    ),
    "HGTConv": (
        lambda: PyG.HGTConv(8, 8, METADATA, 2),
        lambda x, e, a: ({"a": x, "b": x[:5]}, dict(zip(METADATA[1], (e % 5, e % 5, e)))),
    ),
    "HANConv": (
        lambda: PyG.HANConv(8, 8, METADATA, 2),
        lambda x, e, a: ({"a": x, "b": x[:5]}, dict(zip(METADATA[1], (e % 5, e % 5, e)))),
    ),
    "GPSConv": (
        lambda: PyG.GPSConv(8, PyG.GATConv(8, 8), heads=2, norm=None),
        lambda x, e, a: (x, e, batch(x)),
    ),
    "SoftmaxAggregation": (
        lambda: PyG.SoftmaxAggregation(learn=True, channels=8),
        lambda x, e, a: (x, e[1, : len(x)], None, len(x)),
    ),
    "AttentionalAggregation": (
        lambda: PyG.AttentionalAggregation(nn.Linear(8, 1), nn.Linear(8, 6)),
        lambda x, e, a: (x, e[1, : len(x)], None, len(x)),
    ),
}
CONVS = [name for name in LAYERS if name not in ("GPSConv", "SoftmaxAggregation", "AttentionalAggregation")]


def types(attr):
    return TYPES if len(attr) == E else (attr.detach()[:, 0] > 0).long()


def kinds(x):
    return KINDS if len(x) == N else torch.arange(len(x)) % 2


def batch(x):
    return BATCH if len(x) == N else torch.zeros(len(x), dtype=torch.long)


def both(name):
    """torch_geometric's layer, and a copy of it after dfgnn.accelerate."""
    torch.manual_seed(0)
    theirs = LAYERS[name][0]().double().eval()
    ours = copy.deepcopy(theirs)
    assert dfgnn.accelerate(ours).replaced
    return theirs, ours


def results(layer, name, x=X, edge_index=EDGES, attr=ATTR):
    """The floating-point tensors among the layer's results."""
    torch.manual_seed(1)
    return floats(layer(*LAYERS[name][1](x, edge_index, attr)))


def with_gradients(layer, name, **given):
    found = results(layer, name, **given)
    total = sum(x.square().sum() for x in found)
    if not total.requires_grad:
        return found
    grads = torch.autograd.grad(total, list(layer.parameters()), allow_unused=True)
    return [*found, *(torch.zeros_like(p) if g is None else g for p, g in zip(layer.parameters(), grads))]


def assert_equal(actual, expected, tolerance=1e-9):
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
