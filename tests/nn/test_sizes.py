"""Layers without heads or columns, and parameters of other shapes than the layer's own, are refused."""

import pytest
import torch
from every_layer import arguments, in_turns, made, names, of
from torch.nn import Parameter

import dfgnn
from dfgnn import Graph
from dfgnn import nn as ours

PYG = pytest.importorskip("torch_geometric.nn")
X, EDGES, ATTR = torch.randn(9, 8), torch.randint(9, (2, 30)), torch.randn(30, 3)


def accelerated(layer):
    layers = torch.nn.ModuleList([layer])
    dfgnn.accelerate(layers)
    return layers[0]


def made_by_pyg(name, *args, **options):
    """A layer whose constructor is torch_geometric's, which takes any size."""
    with torch.random.fork_rng():
        return accelerated(getattr(PYG, name)(*args, **options))


def inputs(pair, with_attributes):
    return (X, X.clone()) if pair else X, EDGES, *((ATTR,) if with_attributes else ())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("options", [{}, {"edge_dim": 3}, {"concat": False}], ids=str)
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv", "SuperGATConv"])
def test_no_heads_and_no_columns(name, options):
    if name == "SuperGATConv":
        options = {}
    for argument, out, heads in (("out_channels", 0, 2), ("heads", 4, 0)):
        layer = made_by_pyg(name, 8, out, heads=heads, **options)
        with pytest.raises(ValueError, match=rf"{name}: {argument}: expected at least 1, got 0"):
            layer(*inputs(False, "edge_dim" in options))


WRONG = {  # of 2 heads of 4 columns: fewer heads, more heads of the same number of elements, other dimensions
    "vectors": [(1, 1, 4), (1, 4, 2), (2, 4), (4,), (1, 2, 1)],
    "bias": [(1,), (), (1, 8), (3,), (16,)],
    "weight": [(6, 8), (16, 8)],
}


def refused(layer, call, name, value):
    owner, attribute = layer, name
    if "." in name:
        module, attribute = name.split(".")
        owner = getattr(layer, module)
    right = getattr(owner, attribute)
    before = call()
    setattr(owner, attribute, Parameter(value))
    shape = ", ".join(map(str, value.shape))
    words = rf"{type(layer).__name__}: {name}: expected shape .*, got \[{shape}\]; give"
    with pytest.raises(ValueError, match=words):
        call()
    setattr(owner, attribute, right)
    assert torch.equal(call(), before)


@pytest.mark.parametrize("pair", [False, True], ids=["x", "pair"])
@pytest.mark.parametrize("options", [{}, {"edge_dim": 3}, {"concat": False}], ids=str)
@pytest.mark.parametrize("name, vectors", [("GATConv", ("att_src", "att_dst")), ("GATv2Conv", ("att",))])
def test_parameters_of_other_shapes(name, vectors, options, pair):
    layer = made_by_pyg(name, 8, 4, heads=2, **options)
    given = inputs(pair, "edge_dim" in options)
    call = lambda: layer(*given)  # noqa: E731
    for vector in vectors + (("att_edge",) if name == "GATConv" and "edge_dim" in options else ()):
        if vector == "att_edge" and pair:
            continue  # broadcast, as in torch_geometric
        for shape in WRONG["vectors"]:
            refused(layer, call, vector, torch.randn(shape))
    for shape in WRONG["bias"]:
        if shape != tuple(layer.bias.shape):
            refused(layer, call, "bias", torch.randn(shape))


@pytest.mark.parametrize("name", ["lin_key", "lin_query", "lin_value", "lin_skip"])
def test_weights_of_other_shapes(name):
    layer = made_by_pyg("TransformerConv", 8, 4, heads=2)
    if name != "lin_skip":
        for shape in WRONG["weight"]:
            refused(layer, lambda: layer(X, EDGES), f"{name}.weight", torch.randn(shape))
    for projection in ("lin_key", "lin_query", "lin_value", "lin_skip"):  # all of them, to one wrong width
        linear = getattr(layer, projection)
        linear.weight, linear.bias = Parameter(torch.randn(6, 8)), Parameter(torch.randn(6))
    with pytest.raises(ValueError, match=r"TransformerConv: lin_\w+.weight: expected shape \[8, 8\]"):
        layer(X, EDGES)


@pytest.mark.parametrize("name, vectors", [("GATConv", ("attn_l", "attn_r")), ("GATv2Conv", ("attn",))])
def test_parameters_of_other_shapes_in_layers_of_dgl(name, vectors):
    layer = getattr(ours.dgl, name)(8, 4, 2, allow_zero_in_degree=True)
    graph = Graph.from_edge_index(EDGES, num_nodes=9)
    for vector in vectors:
        for shape in WRONG["vectors"]:
            refused(layer, lambda: layer(graph, X), vector, torch.randn(shape))


#: Parameters that are added to something wider or not read, so that another shape of them is no error.
BROADCAST = {"w", "l1", "b1", "l2", "b2", "beta", "skip"}


@in_turns("usual", [False, True], names(without=["GPSConv", "Aggregation", "bare"]))
def test_every_parameter_of_another_shape(name, usual):
    """PyTorch's errors do not know its name; those of a layer do, whichever of its modules raises them."""
    for parameter, x in made(name, upstream=of(name) == "pyg").named_parameters():
        layer = accelerated(made(name, upstream=of(name) == "pyg"))
        call = lambda: layer(*arguments(name))  # noqa: B023, E731
        with torch.no_grad():
            for _ in range(2 if usual else 0):  # a usual call is prepared by the one before
                call()
            dict(layer.named_parameters())[parameter].data = torch.randn(*x.shape[:-1], x.shape[-1] + 5)
            if parameter in BROADCAST:
                continue
            with pytest.raises(
                ValueError, match=r"^\w+: [\w.]+: expected shape .*, got \[.*\]; give it"
            ) as error:
                call()
            assert parameter.endswith(str(error.value).split(": ")[1])


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("pair", [False, True], ids=["x", "pair"])
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_vectors_of_float64(name, pair, edge_dim):
    """The result is float64, as torch_geometric's; the scores are computed in the features' type."""
    layer = made_by_pyg(name, 8, 4, heads=2, edge_dim=edge_dim)
    for key in ("att", "att_src", "att_dst", "att_edge"):
        if getattr(layer, key, None) is not None:
            setattr(layer, key, Parameter(getattr(layer, key).detach().double()))
    given = inputs(pair, edge_dim is not None)
    expected = getattr(PYG, name).forward(layer, *given)
    got = layer(*given)
    assert got.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    got.sum().backward()


@pytest.mark.parametrize("name, vector", [("GATConv", "att_src"), ("GATv2Conv", "att")])
def test_a_compiler_refuses_them_too(name, vector):
    layer = made_by_pyg(name, 8, 4, heads=2)
    setattr(layer, vector, Parameter(torch.randn(1, 4, 2)))  # the right number of elements
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"{name}: {vector}: expected shape \[1, 2, 4\]"):
        torch.compile(layer, backend="eager", fullgraph=True)(X, EDGES)
