"""Every layer, compared with torch_geometric's, where something around it is unusual: attributes that are set
after ``accelerate``; torch.func; fake tensors; short integers; types without edges; attributes of edges in
other dtypes."""

import copy
import functools
import warnings

import pytest
import torch
from covering import covered
from every_layer import (
    ATTR,
    EDGES,
    LAYERS,
    VARIANTS,
    E,
    Layer,
    N,
    X,
    assert_equal,
    attributed,
    both,
    drawn,
    floats,
    in_turns,
    library,
    names,
    results,
    with_gradients,
)  # fmt: skip
from of_pyg import torch_geometric
from torch import nn
from torch._subclasses import FakeTensorMode

import dfgnn
from dfgnn.nn import FallbackWarning

PyG = torch_geometric.nn
ALL = torch.ones(E, dtype=torch.bool)
NAMES = names("pyg")
CONVS = names("pyg", without=["pyg GPSConv", "Aggregation"])
FALLS_BACK = pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")


def pair_of(make, dtype=torch.float64):
    torch.manual_seed(0)
    theirs = make().to(dtype)
    ours = copy.deepcopy(theirs)
    dfgnn.accelerate(torch.nn.ModuleList([ours]))
    return theirs, ours


# ---- what is set after accelerate ------------------------------------------------------------------------


def explain(layer):
    layer.explain, layer._loop_mask = True, ALL
    layer._edge_mask = torch.linspace(-1, 1, E, dtype=torch.float64)


def doubled(module, args, out):
    return 2 * out


def hooked(step):
    return lambda layer: getattr(layer, f"register_{step}_forward_hook")(doubled)


SET = {
    "flow": lambda layer: setattr(layer, "flow", "target_to_source"),
    "aggr_module": lambda layer: setattr(layer, "aggr_module", PyG.MaxAggregation()),
    "hook on aggr_module": lambda layer: layer.aggr_module.register_forward_hook(doubled),
    **{
        f"hook on {step}": hooked(step)
        for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    },
    "pre-hook on propagate": lambda layer: layer.register_propagate_forward_pre_hook(
        lambda module, args: (args[0], args[1], {**args[2], "x": tripled(args[2].get("x"))})
    ),
    "explain": explain,
    "explained before": lambda layer: (setattr(layer, "explain", True), setattr(layer, "explain", False)),
}


def tripled(x):
    return tuple(map(tripled, x)) if isinstance(x, tuple) else None if x is None else 3 * x


@FALLS_BACK
@in_turns("what", SET, CONVS)
def test_what_is_set_after_accelerate(name, what):
    if what == "explain" and name in ("pyg HGTConv", "pyg HANConv", "pyg FAConv"):
        pytest.skip("the mask is of the edges of one type, and without loops")
    theirs, ours = both(name)
    for layer in (theirs, ours):
        results(layer, name)  # the next call may be prepared (`dfgnn.nn.prepared`)
        SET[what](layer)
    try:
        expected = with_gradients(theirs, name)
    except Exception as error:  # some layers of torch_geometric raise with another `flow`: ours must, too
        with pytest.raises(type(error)):
            with_gradients(ours, name)
        return
    assert_equal(with_gradients(ours, name), expected)


@pytest.mark.parametrize("name", CONVS)
def test_another_dimension_of_nodes(name):
    theirs, ours = both(name)
    for layer in (theirs, ours):
        layer.node_dim = -1
    with pytest.raises((IndexError, RuntimeError)) as raised:
        results(theirs, name)
    with pytest.raises(raised.type), pytest.warns(FallbackWarning, match="node_dim=-1"):
        results(ours, name)


def test_an_embedding_with_options_of_its_own():
    theirs, ours = both("pyg HEATConv")
    for layer in (theirs, ours):
        layer.edge_type_emb.scale_grad_by_freq = True
    with pytest.warns(FallbackWarning, match="edge_type_emb has options"):
        actual = with_gradients(ours, "pyg HEATConv")
    assert_equal(actual, with_gradients(theirs, "pyg HEATConv"))


# ---- torch.func ------------------------------------------------------------------------------------------

POSITIONS, WEIGHT = drawn(N, 3), drawn(3, 8)


def neighbours(positions):
    """edge_index from the four nearest other nodes to each node."""
    distance = (positions.detach()[:, None] - positions.detach()).square().sum(-1)
    src = distance.topk(5, largest=False).indices[:, 1:]
    dst = torch.arange(N)[:, None].expand(N, 4)
    return torch.stack([src.reshape(-1), dst.reshape(-1)])


def energy(layer, name, positions):
    edge_index = neighbours(positions)
    attr = positions[edge_index[0]] - positions[edge_index[1]]
    return sum(x.sin().sum() for x in results(layer, name, positions @ WEIGHT, edge_index, attr))


TRANSFORMS = {
    "grad": lambda fn: torch.func.grad(fn)(POSITIONS),
    "vjp": lambda fn: torch.func.vjp(fn, POSITIONS)[1](torch.ones((), dtype=torch.float64))[0],
    "jvp": lambda fn: torch.func.jvp(fn, (POSITIONS,), (drawn(N, 3),))[1],
    "jacrev": lambda fn: torch.func.jacrev(fn)(POSITIONS),
    "hessian": lambda fn: torch.func.hessian(fn)(POSITIONS),
}


@in_turns("transform", TRANSFORMS, NAMES)
def test_edges_made_inside_a_transform(name, transform):
    if name == "pyg GPSConv" and transform in ("jvp", "hessian"):
        pytest.skip("torch has no forward mode of its attention")
    theirs, ours = both(name)
    before = results(ours, name)
    found = [TRANSFORMS[transform](lambda p, layer=layer: energy(layer, name, p)) for layer in (theirs, ours)]
    assert_equal([found[1]], [found[0]], 1e-8)
    assert_equal(results(ours, name), before)


@pytest.mark.parametrize(
    "name", ["pyg TransformerConv", "pyg GENConv", "pyg GATEConv", "pyg ResGatedGraphConv", "pyg HGTConv"]
)
def test_edges_of_each_sample(name):
    """torch.func.vmap over positions: torch_geometric's own forward, as each sample has another graph."""
    theirs, ours = both(name)
    positions = torch.stack([POSITIONS, POSITIONS.flip(0)])
    expected = torch.func.vmap(lambda p: energy(theirs, name, p))(positions)
    with pytest.warns(FallbackWarning, match="vmap"):
        actual = torch.func.vmap(lambda p: energy(ours, name, p))(positions)
    assert_equal([actual], [expected])


# ---- nothing, fake tensors, small integers ---------------------------------------------------------------


@pytest.mark.parametrize("groups", [0, 3])
@pytest.mark.parametrize("by", ["index", "ptr"])
@pytest.mark.parametrize(
    "make",
    [
        PyG.SoftmaxAggregation,
        lambda: PyG.SoftmaxAggregation(learn=True, channels=8),
        lambda: PyG.AttentionalAggregation(nn.Linear(8, 1), nn.Linear(8, 6)),
    ],
)
def test_aggregation_of_no_rows(make, by, groups):
    theirs, ours = pair_of(make)
    told = {"index": torch.zeros(0, dtype=torch.long), "dim_size": groups}
    if by == "ptr":
        told = {"ptr": torch.zeros(groups + 1, dtype=torch.long)}
    x = torch.zeros(0, 8, dtype=torch.float64, requires_grad=True)
    outs = [layer(x, **told) for layer in (theirs, ours)]
    assert_equal([outs[1]], [outs[0]])
    outs[1].sum().backward()


@FALLS_BACK
@in_turns("structure", [True, False], NAMES)
def test_fake_tensors(name, structure):
    theirs, ours = both(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value):
            if isinstance(value, dict):
                return {key: fake(item) for key, item in value.items()}
            if isinstance(value, tuple):
                return tuple(map(fake, value))
            is_type = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dim() == 1)
            return mode.from_tensor(value) if structure or is_type else value

        given = [
            x if x is None or isinstance(x, int) else fake(x) for x in LAYERS[name].arguments(X, EDGES, ATTR)
        ]
        try:
            expected = floats(theirs(*given))
        except (RuntimeError, NotImplementedError) as error:  # it reads values, which fake tensors lack
            pytest.skip(f"torch_geometric's cannot: {type(error).__name__}")
        assert [x.shape for x in floats(ours(*given))] == [x.shape for x in expected]
    assert_equal(results(ours, name), results(theirs, name))  # no fake tensor is left in a cache


@covered(1, directed=[True, False], record=["compile", "export"])
def test_general_conv_while_a_compiler_records(record, directed):
    for options in ({"in_edge_channels": 3, "directed_msg": directed}, {"attention_type": "dot_product"}):
        make = functools.partial(PyG.GeneralConv, 8, 4, heads=2, attention=True, **options)
        theirs, ours = pair_of(make)
        given = (X, EDGES, ATTR) if "in_edge_channels" in options else (X, EDGES)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            if record == "compile":
                torch._dynamo.reset()
                recorded = torch.compile(ours, backend="aot_eager", fullgraph=True)
            else:
                recorded = torch.export.export(ours, given).module()
            assert_equal([recorded(*given)], [theirs(*given)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["pyg GATConv", "pyg GATv2Conv", "pyg AGNNConv", "pyg SuperGATConv"])
def test_small_integers(name, dtype):
    theirs, ours = both(name)
    edge_index = EDGES % 2 if dtype == torch.bool else EDGES
    given = {"edges": edge_index.to(dtype)}
    assert_equal(with_gradients(ours, name, **given), with_gradients(theirs, name, **given))
    if name.startswith("pyg GAT"):
        args = LAYERS[name].arguments(X, given["edges"], ATTR)
        (_, (actual, _)), (_, (expected, _)) = (
            layer(*args, return_attention_weights=True) for layer in (ours, theirs)
        )
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


# ---- what tools do to parameters, features and modules ---------------------------------------------------


# Without GPSConv: PyTorch's attention in torch_geometric's layer has no second derivative.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "pyg GPSConv"])
def test_inputs_that_depend_on_each_other(name):
    """Features, edges' attributes and edges are made of the same positions: gradients that have derivatives
    must still count each input alone."""
    found = []
    for layer in both(name):
        positions = POSITIONS.clone().requires_grad_()
        (first,) = torch.autograd.grad(energy(layer, name, positions), positions, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), positions)])
    assert_equal(found[1], found[0], 1e-8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PyG.GATConv((8, 8), 4, 2, add_self_loops=False),
        lambda: PyG.GATv2Conv((8, 8), 4, 2, add_self_loops=False),
        lambda: PyG.TransformerConv((8, 8), 4, 2),
    ],
)
def test_destinations_made_of_the_sources(make):
    found = []
    for layer in pair_of(make):
        if hasattr(layer, "lin_key"):
            layer.lin_key.weight = layer.lin_value.weight  # one tensor twice
        x = X.clone().requires_grad_()
        out = layer((x, x[:7]), EDGES % 7).sin().sum()
        first = torch.autograd.grad(out, [x, *layer.parameters()], create_graph=True)
        total = sum(g.square().sum() for g in first)
        found.append([*first, *torch.autograd.grad(total, [x, *layer.parameters()])])
    assert_equal(found[1], found[0], 1e-8)


@FALLS_BACK
def test_torchscript():
    for name in ("pyg SoftmaxAggregation", "pyg AttentionalAggregation"):
        theirs, ours = both(name)
        try:
            expected = results(torch.jit.script(theirs), name)
        except RuntimeError:  # torch_geometric's layer cannot be scripted: dfgnn's must fail, too
            with pytest.raises(RuntimeError):
                torch.jit.script(ours)
            continue
        assert_equal(results(torch.jit.script(ours), name), expected)
    theirs, ours = both("pyg GPSConv")
    traced = torch.jit.trace(ours, LAYERS["pyg GPSConv"].arguments(X, EDGES, ATTR), check_trace=False)
    assert_equal(results(traced, "pyg GPSConv", X / 2), results(theirs, "pyg GPSConv", X / 2))


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
    torch.testing.assert_close(*(list(layer.parameters()) for layer in layers), rtol=1e-7, atol=1e-7)


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
ATTRIBUTE_DTYPES = torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16


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
        for attr in (ATTR.mul(2).abs().to(kind) for kind in ATTRIBUTE_DTYPES):
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
