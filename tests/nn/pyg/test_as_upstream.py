"""What a program sees of layers beside their numbers: types without edges, attributes of edges in other
dtypes, and that lazy layers may be compiled first."""

import copy
import functools

import pytest
import torch
from covering import some
from every_layer import ATTR, EDGES, KINDS, TYPES, X, floats
from pyg_compare import torch_geometric
from torch_geometric.nn.models.attentive_fp import GATEConv

import dfgnn
from dfgnn.nn import pyg

PyG = torch_geometric.nn
FALLS_BACK = pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")


def pair_of(make, dtype=torch.float64):
    torch.manual_seed(0)
    theirs = make().to(dtype)
    ours = copy.deepcopy(theirs)
    dfgnn.accelerate(torch.nn.ModuleList([ours]))
    return theirs, ours


# ---- types of nodes without edges -------------------------------------------------------------------------

METADATA = ["a", "b", "c"], [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a"), ("c", "w", "a")]


def typed_arguments(kinds, empty, used_alone):
    """Relations of these numbers; the others are left out, or empty. used_alone: nodes of other types, too,
    are left out."""
    features = {"a": X, "b": X[:5], "c": X[:5]}
    relations = {
        kind: edges % 5 if k in kinds else edges[:, :0]
        for k, (kind, edges) in enumerate(zip(METADATA[1], [EDGES] * 4))
        if k in kinds or empty
    }
    used = {end for kind in relations for end in (kind[0], kind[2])}
    named = {t: x.clone().requires_grad_() for t, x in features.items() if t in used or not used_alone}
    return (named, relations), named


def with_gradient(layer, arguments, number):
    """The names of the leaves that have a gradient where results up to a number are used."""
    inputs, named = arguments()
    sum(x.square().sum() for x in floats(layer(*inputs))[:number]).backward()
    return {name for name, x in [*layer.named_parameters(), *named.items()] if x.grad is not None}


@pytest.mark.parametrize("conv", [PyG.HGTConv, PyG.HANConv])
@pytest.mark.parametrize("kinds", [(0,), (3,), (1, 2), (0, 1, 2)])
def test_types_without_edges(conv, kinds):
    for empty, used_alone in ((False, False), (False, True), (True, False)):
        arguments = functools.partial(typed_arguments, kinds, empty, used_alone)
        for number in (1, None):
            theirs, ours = (layer.eval() for layer in pair_of(lambda: conv(8, 8, METADATA, 2)))
            assert with_gradient(ours, arguments, number) == with_gradient(theirs, arguments, number)


def test_training_with_a_type_that_some_batches_lack():
    """Adam with weight decay: after ten steps all parameters are equal only if None is None for both."""
    layers = pair_of(lambda: PyG.HGTConv(8, 8, METADATA, 2))
    for layer in layers:
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, weight_decay=0.1)
        for step in range(10):
            optimizer.zero_grad()
            inputs, _ = typed_arguments((0, 1, 2, 3) if step % 3 else (0, 1), False, False)
            sum(x.square().sum() for x in floats(layer(*inputs))).backward()
            optimizer.step()
    for ours, theirs in zip(layers[1].parameters(), layers[0].parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


# ---- attributes of edges that are integers, booleans or of another precision ------------------------------

# Name -> (the layer, its arguments from features and attributes).
WITH_ATTRIBUTES = {
    "GATConv": (lambda: PyG.GATConv(8, 4, 2, edge_dim=3), lambda x, a: (x, EDGES, a)),
    "GATConv, sum": (lambda: PyG.GATConv(8, 4, 2, edge_dim=3, fill_value="add"), lambda x, a: (x, EDGES, a)),
    "GATConv, number": (
        lambda: PyG.GATConv(8, 4, 2, edge_dim=3, fill_value=0.5),
        lambda x, a: (x, EDGES, a),
    ),
    "GATConv, no loops": (
        lambda: PyG.GATConv(8, 4, 2, edge_dim=3, add_self_loops=False),
        lambda x, a: (x, EDGES, a),
    ),
    "GATConv, one": (lambda: PyG.GATConv(8, 4, 2, edge_dim=1), lambda x, a: (x, EDGES, a[:, 0])),
    "GATConv, ignored": (lambda: PyG.GATConv(8, 4, 2), lambda x, a: (x, EDGES, a)),
    "GATv2Conv": (lambda: PyG.GATv2Conv(8, 4, 2, edge_dim=3), lambda x, a: (x, EDGES, a, True)),
    "TransformerConv": (lambda: PyG.TransformerConv(8, 4, 2, edge_dim=3), lambda x, a: (x, EDGES, a)),
    "TransformerConv, added": (
        lambda: PyG.TransformerConv(8, 4, 2),
        lambda x, a: (x, EDGES, a[:, :1, None], True),
    ),
    "GENConv": (lambda: PyG.GENConv(8, 4, edge_dim=3), lambda x, a: (x, EDGES, a)),
    "GENConv, added": (lambda: PyG.GENConv(3, 3), lambda x, a: (x[:, :3], EDGES, a)),
    "GeneralConv": (
        lambda: PyG.GeneralConv(8, 4, 3, heads=2, attention=True),
        lambda x, a: (x, EDGES, a),
    ),
    "GATEConv": (lambda: GATEConv(8, 8, 3), lambda x, a: (x, EDGES, a)),
    "ResGatedGraphConv": (
        lambda: PyG.ResGatedGraphConv((8, 8), 4, edge_dim=3),
        lambda x, a: ((x, x.sin()), EDGES, a),
    ),
    "RGATConv": (lambda: PyG.RGATConv(8, 4, 2, edge_dim=3), lambda x, a: (x, EDGES, TYPES, a)),
    "HEATConv": (
        lambda: PyG.HEATConv(8, 4, 2, 3, 2, 3, 3, heads=2),
        lambda x, a: (x, EDGES, KINDS, TYPES, a),
    ),
    "FAConv": (lambda: PyG.FAConv(8, normalize=False), lambda x, a: (x, x, EDGES, a[:, 0])),
    "GPSConv": (
        lambda: PyG.GPSConv(8, PyG.ResGatedGraphConv(8, 8, edge_dim=3), norm=None),
        lambda x, a: (x, EDGES, None, a),
    ),
}
DTYPES = torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16


def outcome(layer, name, x, attr):
    call = WITH_ATTRIBUTES[name][1]
    try:
        found = layer(x, EDGES, edge_attr=attr) if name == "GPSConv" else layer(*call(x, attr))
    except (RuntimeError, TypeError, ValueError) as error:
        return error
    return floats(found)


@pytest.mark.parametrize("name", WITH_ATTRIBUTES)
@FALLS_BACK
def test_attributes_of_other_dtypes(name):
    """Where torch_geometric's layer takes them, ours gives the same; where it raises, ours names them."""
    for dtype in (torch.float64, torch.float32):
        theirs, ours = pair_of(WITH_ATTRIBUTES[name][0], dtype)
        for attr in (ATTR.mul(2).abs().to(kind) for kind in DTYPES):
            want, got = (outcome(layer.eval(), name, X.to(dtype), attr) for layer in (theirs, ours))
            if isinstance(want, Exception):
                assert "edge_attr: expected" in str(got), (attr.dtype, got)
                continue
            tolerance = 1e-9 if dtype == torch.float64 and attr.dtype != torch.float16 else 1e-4
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_wide_attributes_under_autocast():
    """In a layer without edge_dim they are added to values that autocast has made narrower."""
    theirs, ours = pair_of(lambda: PyG.TransformerConv(8, 4, 2), torch.float32)
    arguments = X.float(), EDGES, ATTR.float()[:, :1, None]
    with torch.autocast("cpu", torch.bfloat16):
        want, got = (layer(*arguments) for layer in (theirs, ours))
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


# ---- lazy layers, compiled before they have parameters ----------------------------------------------------


def plain(x):
    return x, EDGES


def ends(x):
    return (x, x.sin()), EDGES


def attributes(x):
    return x, EDGES, ATTR.to(x)


def end_attributes(x):
    return (x, x.sin()), EDGES, ATTR.to(x)


LAZY = {
    "GATConv": (lambda: pyg.GATConv(-1, 4, 2), plain),
    "GATConv pair, residual": (lambda: pyg.GATConv((-1, -1), 4, 2, residual=True), ends),
    "GATConv edges": (lambda: pyg.GATConv(8, 4, 2, edge_dim=-1), attributes),
    "GATv2Conv": (lambda: pyg.GATv2Conv(-1, 4, 2), plain),
    "GATv2Conv pair": (lambda: pyg.GATv2Conv((-1, 8), 4, 2), ends),
    "GATv2Conv shared": (lambda: pyg.GATv2Conv(-1, 4, 2, share_weights=True, residual=True), plain),
    "GATv2Conv edges": (lambda: pyg.GATv2Conv((-1, -1), 4, 2, edge_dim=3), end_attributes),
    "TransformerConv": (lambda: pyg.TransformerConv(-1, 4, 2), plain),
    "TransformerConv pair": (lambda: pyg.TransformerConv((8, -1), 4, 2), ends),
    "TransformerConv edges": (lambda: pyg.TransformerConv(-1, 4, 2, edge_dim=3), attributes),
    "TransformerConv lazy edges": (lambda: pyg.TransformerConv(8, 4, 2, edge_dim=-1), attributes),
    "SuperGATConv": (lambda: pyg.SuperGATConv(-1, 4, 2).eval(), plain),
    "GENConv": (lambda: pyg.GENConv(-1, 4, edge_dim=-1), attributes),
    "GeneralConv": (lambda: pyg.GeneralConv((-1, -1), 4, 3, attention=True), end_attributes),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv((-1, -1), 4), ends),
}


@some(["GATConv edges", "GATv2Conv", "GATv2Conv edges", "TransformerConv", "TransformerConv edges"], LAZY)
@FALLS_BACK
def test_lazy_layers_compiled_before_their_first_call(name):
    make, arguments = LAZY[name]
    layers, found = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = make()
        run = torch.compile(layer, backend="eager") if compiled else super_forward(layer)
        torch.manual_seed(1)  # from which the parameters are drawn
        found.append([run(*arguments(X.float())) for _ in range(2)])
        layers.append(layer)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(layers[1].parameters(), layers[0].parameters()):
        assert torch.equal(ours, theirs)


def super_forward(layer):
    """torch_geometric's forward of the layer, eager."""
    cls = next(c for c in type(layer).__mro__ if c.__module__.startswith("torch_geometric."))
    return lambda *args: cls.forward(layer, *args)
