"""Every layer beside torch_geometric's where something around it is unusual: attributes that are set after
``accelerate``; torch.func; fake tensors; short integers.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from covering import covered
from every_layer import (
    ALL,
    ATTR,
    CONVS,
    EDGES,
    LAYERS,
    E,
    N,
    PyG,
    X,
    assert_equal,
    both,
    drawn,
    results,
    with_gradients,
)  # fmt: skip
from own_layers import floats
from torch import nn
from torch._subclasses import FakeTensorMode

import dfgnn
from dfgnn.nn import FallbackWarning

# ---- what is set after accelerate ------------------------------------------------------------------------


def explain(layer):
    layer.explain, layer._loop_mask = True, ALL
    layer._edge_mask = torch.linspace(-1, 1, E, dtype=torch.float64)


SET = {
    "flow": lambda layer: setattr(layer, "flow", "target_to_source"),
    "aggr_module": lambda layer: setattr(layer, "aggr_module", PyG.MaxAggregation()),
    "message hook": lambda layer: layer.register_message_forward_hook(lambda module, args, out: 2 * out),
    "aggregate hook": lambda layer: layer.register_aggregate_forward_hook(lambda module, args, out: 2 * out),
    "explain": explain,
    "explained before": lambda layer: (setattr(layer, "explain", True), setattr(layer, "explain", False)),
}


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@pytest.mark.parametrize("what", SET)
@pytest.mark.parametrize("name", CONVS)
def test_what_is_set_after_accelerate(name, what):
    if what == "explain" and name in ("HGTConv", "HANConv", "FAConv"):
        pytest.skip("the mask is of the edges of one type, and without loops")
    theirs, ours = both(name)
    for layer in (theirs, ours):
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
    theirs, ours = both("HEATConv")
    for layer in (theirs, ours):
        layer.edge_type_emb.scale_grad_by_freq = True
    with pytest.warns(FallbackWarning, match="edge_type_emb has options"):
        actual = with_gradients(ours, "HEATConv")
    assert_equal(actual, with_gradients(theirs, "HEATConv"))


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


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_edges_made_inside_a_transform(name, transform):
    if name == "GPSConv" and transform in ("jvp", "hessian"):
        pytest.skip("torch has no forward mode of its attention")
    theirs, ours = both(name)
    before = results(ours, name)
    found = [TRANSFORMS[transform](lambda p, layer=layer: energy(layer, name, p)) for layer in (theirs, ours)]
    assert_equal([found[1]], [found[0]], 1e-8)
    assert_equal(results(ours, name), before)


@pytest.mark.parametrize("name", ["TransformerConv", "GENConv", "GATEConv", "ResGatedGraphConv", "HGTConv"])
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
    theirs = make().double()
    ours = copy.deepcopy(theirs)
    dfgnn.accelerate(ours)
    told = {"index": torch.zeros(0, dtype=torch.long), "dim_size": groups}
    if by == "ptr":
        told = {"ptr": torch.zeros(groups + 1, dtype=torch.long)}
    x = torch.zeros(0, 8, dtype=torch.float64, requires_grad=True)
    outs = [layer(x, **told) for layer in (theirs, ours)]
    assert_equal([outs[1]], [outs[0]])
    outs[1].sum().backward()


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@pytest.mark.parametrize("structure", [True, False], ids=["all", "features and types"])
@pytest.mark.parametrize("name", LAYERS)
def test_fake_tensors(name, structure):
    theirs, ours = both(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value):
            if isinstance(value, dict):
                return {key: fake(item) for key, item in value.items()}
            is_type = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dim() == 1)
            return mode.from_tensor(value) if structure or is_type else value

        given = [x if x is None or isinstance(x, int) else fake(x) for x in LAYERS[name][1](X, EDGES, ATTR)]
        try:
            expected = floats(theirs(*given))
        except (RuntimeError, NotImplementedError) as error:  # it reads values, which fake tensors lack
            pytest.skip(f"torch_geometric's cannot: {type(error).__name__}")
        assert [x.shape for x in floats(ours(*given))] == [x.shape for x in expected]
    assert_equal(results(ours, name), results(theirs, name))  # no fake tensor is left in a cache


@covered(1, directed=[True, False], record=["compile", "export"])
def test_general_conv_while_a_compiler_records(record, directed):
    torch.manual_seed(0)
    for options in ({"in_edge_channels": 3, "directed_msg": directed}, {"attention_type": "dot_product"}):
        theirs = PyG.GeneralConv(8, 4, heads=2, attention=True, **options).double()
        ours = copy.deepcopy(theirs)
        dfgnn.accelerate(ours)
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
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "AGNNConv", "SuperGATConv"])
def test_small_integers(name, dtype):
    theirs, ours = both(name)
    edge_index = EDGES % 2 if dtype == torch.bool else EDGES
    given = {"edge_index": edge_index.to(dtype)}
    assert_equal(with_gradients(ours, name, **given), with_gradients(theirs, name, **given))
    if name.startswith("GAT"):
        args = LAYERS[name][1](X, given["edge_index"], ATTR)
        (_, (actual, _)), (_, (expected, _)) = (
            layer(*args, return_attention_weights=True) for layer in (ours, theirs)
        )
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


# ---- what tools do to parameters, features and modules ---------------------------------------------------


class Noise(nn.Module):
    """A parametrization that draws numbers at every access."""

    def forward(self, x):
        return x + torch.randn_like(x)


class Halved(torch.Tensor):
    """A tensor with operations of its own, as quantised ones have: half of some results."""

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        out = super().__torch_function__(function, kinds, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return out / 2 if function in (F.linear, torch.matmul, torch.Tensor.mul) else out


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_parametrizations(name):
    theirs, ours = both(name)
    for layer in (theirs, ours):
        modules = [m for m in layer.modules() if m._parameters]
        for module in modules:
            for key in [key for key, p in module._parameters.items() if p is not None]:
                nn.utils.parametrize.register_parametrization(module, key, Noise())
    assert_equal(results(ours, name), results(theirs, name))


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_tensors_with_operations_of_their_own(name):
    theirs, ours = both(name)
    x, attr = X.as_subclass(Halved), ATTR.as_subclass(Halved)
    assert_equal(results(ours, name, x, attr=attr), results(theirs, name, x, attr=attr))
    for layer in (theirs, ours):
        for module in layer.modules():
            for key, p in module._parameters.items():
                module._parameters[key] = p if p is None else nn.Parameter(p.detach().as_subclass(Halved))
    assert_equal(results(ours, name), results(theirs, name))


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_hooks_see_what_they_see_there(name):
    """A hook on a linear module gets the same input as in torch_geometric's layer: tools compute per-sample
    gradients or statistics from it."""
    parts = [key for key, m in both(name)[0].named_modules() if isinstance(m, (nn.Linear, PyG.Linear))]
    for part in parts:
        seen = []
        for layer in both(name):
            given = []
            layer.get_submodule(part).register_forward_hook(lambda m, args, out, to=given: to.append(args[0]))
            results(layer, name)
            seen.append(given)
        assert_equal(seen[1], seen[0])


# Without GPSConv: PyTorch's attention in torch_geometric's layer has no second derivative.
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "GPSConv"])
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
    torch.manual_seed(0)
    theirs = make().double()
    if hasattr(theirs, "lin_key"):
        theirs.lin_key.weight = theirs.lin_value.weight  # one tensor twice
    ours = copy.deepcopy(theirs)
    dfgnn.accelerate(ours)
    found = []
    for layer in (theirs, ours):
        x = X.clone().requires_grad_()
        out = layer((x, x[:7]), EDGES % 7).sin().sum()
        first = torch.autograd.grad(out, [x, *layer.parameters()], create_graph=True)
        total = sum(g.square().sum() for g in first)
        found.append([*first, *torch.autograd.grad(total, [x, *layer.parameters()])])
    assert_equal(found[1], found[0], 1e-8)


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
def test_torchscript():
    for name in ("SoftmaxAggregation", "AttentionalAggregation"):
        theirs, ours = both(name)
        try:
            expected = results(torch.jit.script(theirs), name)
        except RuntimeError:  # torch_geometric's layer cannot be scripted: dfgnn's must fail, too
            with pytest.raises(RuntimeError):
                torch.jit.script(ours)
            continue
        assert_equal(results(torch.jit.script(ours), name), expected)
    theirs, ours = both("GPSConv")
    traced = torch.jit.trace(ours, LAYERS["GPSConv"][1](X, EDGES, ATTR), check_trace=False)
    assert_equal(results(traced, "GPSConv", X / 2), results(theirs, "GPSConv", X / 2))


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_leaves_float64_alone(name):
    theirs, ours = both(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(results(ours, name), results(theirs, name))
