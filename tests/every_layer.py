"""Every layer, small, with inputs: the table that tests of what all layers do go through.

A layer is made from a library: ours, or the one whose contract it has; `both` gives the two with the same
parameters. Its name says the library: "pyg GATConv", "dgl GATConv", or none for our own.
"""

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from covering import exhaustive
from torch import nn

import dfgnn
from dfgnn import Graph

N, E = 12, 40
METADATA = ["a", "b"], [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a")]


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def chosen(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


X, ATTR, EDGES = drawn(N, 8), drawn(E, 3), chosen(N, 2, E)
EDGES[1] = (EDGES[0] + 1 + EDGES[1] % (N - 1)) % N  # without loops
# Layers of DGL's contract refuse a destination without edges.
WITH_LOOPS = torch.cat([EDGES[:, : E - N], torch.arange(N).expand(2, N)], 1)
TYPES, KINDS, BATCH = chosen(2, E), chosen(2, N), torch.arange(N) // 5


def types(attr):
    return TYPES if len(attr) == E else torch.arange(len(attr)) % 2


def kinds(num_nodes):
    return KINDS if num_nodes == N else torch.arange(num_nodes) % 2


def batch(x):
    return BATCH if x.shape[-2] == N else torch.zeros(x.shape[-2], dtype=torch.long)


def by_type(x, edge_index, attr):
    relations = (edge_index % 5, edge_index % 5, edge_index)
    return {"a": x, "b": x[..., :5, :]}, dict(zip(METADATA[1], relations))


def plain(x, edges, attr):
    return x, edges


def attributed(x, edges, attr):
    return x, edges, attr


def pooled(x, edge_index, attr):
    return x, edge_index[1, : len(x)], None, len(x)


def on_graph(x, graph, attr):
    return graph, x


def on_graph_attributed(x, graph, attr):
    return graph, x, attr


def on_graph_pair(x, graph, attr):
    return graph, (x, x.sin())


def on_graph_typed(x, graph, attr):
    return graph, x, kinds(len(x)), types(attr)


class Layer(NamedTuple):
    make: Callable[[Any], nn.Module]  # from the library
    arguments: Callable[..., tuple]  # of forward, from features [N, 8], edges and their attributes [E, 3]


# The edges are an edge_index for "pyg", else a Graph or DGLGraph.
LAYERS = {
    "pyg GATConv": Layer(lambda l: l.GATConv(8, 4, 2, dropout=0.5), plain),
    "pyg GATConv mean": Layer(lambda l: l.GATConv(8, 4, 2, concat=False), plain),
    "pyg GATConv attributes": Layer(lambda l: l.GATConv(8, 4, 2, residual=True, edge_dim=3), attributed),
    "pyg GATConv pair": Layer(
        lambda l: l.GATConv((8, 8), 4, 2, edge_dim=3), lambda x, e, a: ((x, x.sin()), e, a)
    ),
    "pyg GATv2Conv": Layer(lambda l: l.GATv2Conv(8, 4, 2), plain),
    "pyg GATv2Conv attributes": Layer(lambda l: l.GATv2Conv(8, 4, 2, edge_dim=3), attributed),
    "pyg TransformerConv": Layer(lambda l: l.TransformerConv(8, 4, 2, dropout=0.5), plain),
    "pyg TransformerConv bare": Layer(
        lambda l: l.TransformerConv(8, 4, 2, root_weight=False, bias=False), plain
    ),
    "pyg TransformerConv attributes": Layer(
        lambda l: l.TransformerConv(8, 4, 2, beta=True, edge_dim=3), attributed
    ),
    "pyg TransformerConv wide": Layer(
        lambda l: l.TransformerConv(8, 2, 2, concat=False, edge_dim=3), attributed
    ),
    "pyg AGNNConv": Layer(lambda l: l.AGNNConv(), plain),
    "pyg SuperGATConv": Layer(lambda l: l.SuperGATConv(8, 4, 2), plain),
    "pyg SuperGATConv SD": Layer(lambda l: l.SuperGATConv(8, 4, 2, attention_type="SD"), plain),
    "pyg FAConv": Layer(lambda l: l.FAConv(8), lambda x, e, a: (x, x, e)),
    "pyg GENConv": Layer(lambda l: l.GENConv(8, 4, edge_dim=3), attributed),
    "pyg GeneralConv": Layer(lambda l: l.GeneralConv(8, 4, 3, heads=2, attention=True), attributed),
    "pyg GeneralConv products": Layer(
        lambda l: l.GeneralConv(8, 4, heads=2, attention=True, attention_type="dot_product"), plain
    ),
    "pyg GATEConv": Layer(lambda l: l.GATEConv(8, 8, 3), attributed),
    "pyg ResGatedGraphConv": Layer(lambda l: l.ResGatedGraphConv(8, 4), plain),
    "pyg ResGatedGraphConv attributes": Layer(
        lambda l: l.ResGatedGraphConv(8, 4, edge_dim=3, aggr="mean"), attributed
    ),
    "pyg RGATConv": Layer(lambda l: l.RGATConv(8, 4, 2, edge_dim=3), lambda x, e, a: (x, e, types(a), a)),
    "pyg HEATConv": Layer(
        lambda l: l.HEATConv(8, 4, 2, 3, 2, 3, 3, heads=2),
        lambda x, e, a: (x, e, kinds(x.shape[-2]), types(a), a),
    ),
    "pyg HGTConv": Layer(lambda l: l.HGTConv(8, 8, METADATA, 2), by_type),
    "pyg HANConv": Layer(lambda l: l.HANConv(8, 8, METADATA, 2), by_type),
    "pyg GPSConv": Layer(
        lambda l: l.GPSConv(8, l.GATConv(8, 8), heads=2, norm=None), lambda x, e, a: (x, e, batch(x))
    ),
    "pyg SoftmaxAggregation": Layer(lambda l: l.SoftmaxAggregation(learn=True, channels=8), pooled),
    "pyg AttentionalAggregation": Layer(
        lambda l: l.AttentionalAggregation(nn.Linear(8, 1), nn.Linear(8, 6)), pooled
    ),
    "dgl GATConv": Layer(lambda l: l.GATConv(8, 4, 2, residual=True, attn_drop=0.5), on_graph),
    "dgl GATConv pair": Layer(lambda l: l.GATConv((8, 8), 4, 2), on_graph_pair),
    "dgl GATConv weights": Layer(lambda l: l.GATConv(8, 4, 2), lambda x, g, a: (g, x, a[..., 0])),
    "dgl GATv2Conv": Layer(lambda l: l.GATv2Conv(8, 4, 2, residual=True, attn_drop=0.5), on_graph),
    "dgl AGNNConv": Layer(lambda l: l.AGNNConv(), on_graph),
    "dgl AGNNConv pair": Layer(lambda l: l.AGNNConv(), on_graph_pair),
    "dgl DotGatConv": Layer(lambda l: l.DotGatConv(8, 4, 2), on_graph),
    "dgl DotGatConv pair": Layer(lambda l: l.DotGatConv((8, 8), 4, 2), on_graph_pair),
    "dgl EGATConv": Layer(lambda l: l.EGATConv(8, 3, 4, 3, 2), on_graph_attributed),
    "dgl EdgeGATConv": Layer(lambda l: l.EdgeGATConv(8, 3, 4, 2), on_graph_attributed),
    "dgl EdgeGATConv wide": Layer(lambda l: l.EdgeGATConv(8, 3, 2, 2), on_graph_attributed),
    "dgl HGTConv": Layer(lambda l: l.HGTConv(8, 4, 2, 3, 2), on_graph_typed),
    "dgl HGTConv norm": Layer(lambda l: l.HGTConv(8, 4, 2, 3, 2, use_norm=True), on_graph_typed),
    "dgl GlobalAttentionPooling": Layer(
        lambda l: l.GlobalAttentionPooling(nn.Linear(8, 1), nn.Linear(8, 6)), on_graph
    ),
    "GraphTransformerConv": Layer(lambda l: l.GraphTransformerConv(8, 4, 2), on_graph),
    "GraphTransformerConv attributes": Layer(
        lambda l: l.GraphTransformerConv(8, 4, 2, edge_dim=3), lambda x, g, a: (g, x, None, None, False, a)
    ),
    "GraphTransformerLayer": Layer(lambda l: l.GraphTransformerLayer(8, 2, norm="layer"), on_graph),
    "GraphTransformerLayer attributes": Layer(
        lambda l: l.GraphTransformerLayer(8, 2, norm="layer", edge_dim=3),
        lambda x, g, a: (g, x, None, False, a),
    ),
    "EdgeGraphTransformerConv": Layer(
        lambda l: l.EdgeGraphTransformerConv(8, 3, 4, 2, bias=True), on_graph_attributed
    ),
    "EdgeGraphTransformerConv no edges": Layer(
        lambda l: l.EdgeGraphTransformerConv(8, 3, 4, 2, edge_out=False), on_graph_attributed
    ),
    "EdgeGraphTransformerLayer": Layer(
        lambda l: l.EdgeGraphTransformerLayer(8, 2, edge_dim=3, norm="layer"), on_graph_attributed
    ),
}
# Further options, which only some tests go through.
VARIANTS = {
    "pyg GATConv, sum": Layer(lambda l: l.GATConv(8, 4, 2, edge_dim=3, fill_value="add"), attributed),
    "pyg GATConv, number": Layer(lambda l: l.GATConv(8, 4, 2, edge_dim=3, fill_value=0.5), attributed),
    "pyg GATConv, no loops": Layer(
        lambda l: l.GATConv(8, 4, 2, edge_dim=3, add_self_loops=False), attributed
    ),
    "pyg GATv2Conv, number": Layer(lambda l: l.GATv2Conv(8, 4, 2, edge_dim=3, fill_value=0.5), attributed),
    "pyg FAConv, weights": Layer(
        lambda l: l.FAConv(8, normalize=False), lambda x, e, a: (x, x, e, a[..., 0])
    ),
    "pyg RGATConv, within": Layer(
        lambda l: l.RGATConv(8, 4, 2, attention_mechanism="within-relation"), lambda x, e, a: (x, e, types(a))
    ),
    "pyg SoftmaxAggregation, ptr": Layer(
        lambda l: l.SoftmaxAggregation(), lambda x, e, a: (x, None, torch.tensor([0, 3, 3, 9, len(x)]))
    ),
}
LIBRARIES = {
    "pyg": ("dfgnn.nn.pyg",),
    "dgl": ("dfgnn.nn.dgl",),
    "": ("dfgnn.nn",),
    "torch_geometric": ("torch_geometric.nn", "torch_geometric.nn.models.attentive_fp"),
    "dgl itself": ("dgl.nn.pytorch",),
}
UPSTREAM = {"pyg": "torch_geometric", "dgl": "dgl itself"}


def of(name):
    """The library of a layer: "pyg", "dgl" or ""."""
    return name.partition(" ")[0] if name.partition(" ")[0] in UPSTREAM else ""


class _Names:
    def __init__(self, modules):
        self._modules = [importlib.import_module(module) for module in modules]

    def __getattr__(self, name):
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


@functools.cache
def library(name):
    """The names of one of `LIBRARIES`."""
    return _Names(LIBRARIES[name])


def is_installed(module):
    return importlib.util.find_spec(module) is not None


def names(*libraries, without=()):
    """The layers of these libraries ("pyg", "dgl", ""; none: of all) that the installed packages allow.
    without: words of names that are left out."""
    missing = [] if is_installed("torch_geometric") else ["pyg"]
    chosen = set(libraries or ("pyg", "dgl", "")).difference(missing)
    return [name for name in LAYERS if of(name) in chosen and not any(word in name for word in without)]


def names_upstream():
    """The layers that `both` can make: an older version of the other library may lack one."""
    return [
        name
        for name in LAYERS
        if of(name)
        and is_installed({"pyg": "torch_geometric", "dgl": "dgl"}[of(name)])
        and hasattr(library(UPSTREAM[of(name)]), name.split()[1])
    ]


def in_turns(of_what, items, names):
    """Parametrizes a test over these layers and items: every item with every class of layers, whose variants
    take turns; in exhaustive tests every item with every layer."""
    classes = {}
    for name in names:
        classes.setdefault(tuple(name.split(",")[0].split()[: 1 + bool(of(name))]), []).append(name)
    return pytest.mark.parametrize(
        ("name", of_what),
        [
            pytest.param(name, item, marks=[exhaustive] * (turn != k % len(variants)))
            for variants in classes.values()
            for turn, name in enumerate(variants)
            for k, item in enumerate(items)
        ],
    )


def case_of(name):
    return LAYERS.get(name) or VARIANTS[name]


def made(name, upstream=False):
    """The layer, in float64 and with parameters that are drawn from one seed; with ``upstream`` the other
    library's."""
    torch.manual_seed(0)
    layer = case_of(name).make(library(UPSTREAM[of(name)] if upstream else of(name))).double()
    if "RGATConv" in name:  # torch_geometric leaves this parameter uninitialised
        nn.init.constant_(layer.l2, 0.1)
    return layer


def both(name):
    """The other library's layer, and a copy of it after dfgnn.accelerate."""
    theirs = made(name, upstream=True).eval()
    ours = copy.deepcopy(theirs)
    assert dfgnn.accelerate(ours).replaced
    return theirs, ours


@functools.cache
def edges_of(name, upstream=False):
    """What the layer takes for edges: an edge_index or a Graph; with ``upstream`` a DGLGraph for "dgl"."""
    if of(name) == "pyg":
        return EDGES
    if not upstream:
        return Graph.from_edge_index(WITH_LOOPS, num_nodes=N)
    return importlib.import_module("dgl").graph(tuple(WITH_LOOPS), num_nodes=N)


def on(device, value):
    """``value``, tensors, Graphs and what contains them, on the device."""
    if isinstance(value, (torch.Tensor, Graph)):
        return value.to(device)
    if isinstance(value, dict):
        return {key: on(device, item) for key, item in value.items()}
    return tuple(on(device, item) for item in value) if isinstance(value, tuple) else value


def arguments(name, x=X, attr=ATTR, edges=None, upstream=False):
    edges = edges_of(name, upstream) if edges is None else edges
    return on(x.device, case_of(name).arguments(x, edges, attr))


def floats(value):
    """The tensors of floating-point numbers in a layer's results."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value
    return [x for item in items if item is not None for x in floats(item)]


def results(layer, name, x=X, edges=None, attr=ATTR):
    """The floating-point tensors among the results of one of `both`."""
    torch.manual_seed(1)
    return floats(layer(*arguments(name, x, attr, edges, upstream=True)))


def with_gradients(layer, name, x=X, **given):
    """`results`, and the gradients of features and parameters."""
    x = x.detach().requires_grad_()
    found = results(layer, name, x, **given)
    leaves = x, *layer.parameters()
    grads = torch.autograd.grad(sum(out.square().sum() for out in found), leaves, allow_unused=True)
    return [*found, *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads))]


def assert_equal(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(list(actual), list(expected), rtol=tolerance, atol=tolerance)
