"""What a program sees of layers besides their numbers: types without edges, and attributes in other
dtypes."""

import copy
import functools

import pytest
import torch
from every_layer import ATTR, EDGES, LAYERS, VARIANTS, Layer, X, attributed, floats, library, names
from of_pyg import torch_geometric

import dfgnn

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

# The layers of every_layer.py that take attributes, and more of their options.
TAKE = "attributes", "GATConv pair", "wide", "GENConv", "GeneralConv", "GATEConv", "RGATConv", "HEATConv"
WITH_ATTRIBUTES = {
    **{name: LAYERS[name] for name in names("pyg", without=["products"]) if any(x in name for x in TAKE)},
    **{name: case for name, case in VARIANTS.items() if name.split(",")[0][4:] in ("GATConv", "FAConv")},
    "GATConv, one": Layer(lambda l: l.GATConv(8, 4, 2, edge_dim=1), lambda x, e, a: (x, e, a[:, 0])),
    "GATConv, ignored": Layer(lambda l: l.GATConv(8, 4, 2), attributed),
    "GATv2Conv, asked": Layer(lambda l: l.GATv2Conv(8, 4, 2, edge_dim=3), lambda x, e, a: (x, e, a, True)),
    "TransformerConv, added": Layer(
        lambda l: l.TransformerConv(8, 4, 2), lambda x, e, a: (x, e, a[:, :1, None], True)
    ),
    "GENConv, added": Layer(lambda l: l.GENConv(3, 3), lambda x, e, a: (x[:, :3], e, a)),
    "GPSConv": Layer(
        lambda l: l.GPSConv(8, l.ResGatedGraphConv(8, 8, edge_dim=3), norm=None),
        lambda x, e, a: (x, e, None, a),
    ),
}
DTYPES = torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16


def outcome(layer, name, x, attr):
    given = WITH_ATTRIBUTES[name].arguments(x, EDGES, attr)
    try:
        return floats(layer(*given[:3], edge_attr=attr) if name == "GPSConv" else layer(*given))
    except (RuntimeError, TypeError, ValueError) as error:
        return error


@pytest.mark.parametrize("name", WITH_ATTRIBUTES)
@FALLS_BACK
def test_attributes_of_other_dtypes(name):
    """Where torch_geometric's layer takes such attributes, ours gives the same; where it raises, ours names
    them in its error."""
    for dtype in (torch.float64, torch.float32):
        theirs, ours = pair_of(lambda: WITH_ATTRIBUTES[name].make(library("torch_geometric")), dtype)
        for attr in (ATTR.mul(2).abs().to(kind) for kind in DTYPES):
            want, got = (outcome(layer.eval(), name, X.to(dtype), attr) for layer in (theirs, ours))
            if isinstance(want, Exception):
                assert "edge_attr: expected" in str(got), (attr.dtype, got)
                continue
            tolerance = 1e-9 if dtype == torch.float64 and attr.dtype != torch.float16 else 1e-4
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_wide_attributes_under_autocast():
    """In a layer without edge_dim, attributes are added to values that autocast has cast to a narrower
    dtype."""
    theirs, ours = pair_of(lambda: PyG.TransformerConv(8, 4, 2), torch.float32)
    arguments = X.float(), EDGES, ATTR.float()[:, :1, None]
    with torch.autocast("cpu", torch.bfloat16):
        want, got = (layer(*arguments) for layer in (theirs, ours))
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)
