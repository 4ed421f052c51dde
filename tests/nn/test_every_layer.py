"""What every layer does: results modified in place, derivatives of any kind, torch.func, several sets of
features, the device meta, the same as on plain PyTorch, the same each time."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from attention import MODIFY
from covering import covered
from every_layer import (
    ATTR,
    EDGES,
    LAYERS,
    E,
    N,
    X,
    arguments,
    edges_of,
    floats,
    in_turns,
    made,
    names,
    of,
    on,
)  # fmt: skip
from graphs import make_graph
from torch import nn

import dfgnn
from dfgnn import Graph, functional, reference
from dfgnn.nn import dgl as dgl_like

# Of the aggregations a program asks less.
CONVOLUTIONS = names(without=["Aggregation", "Pooling"])
DRAWS_EDGES = "SuperGATConv"  # in training: what it draws depends on more than torch's seed


def on_device(name, device):
    layer = made(name).to(device)
    return layer.eval() if DRAWS_EDGES in name else layer


def first_of(layer, name, x, attr=ATTR):
    return floats(layer(*arguments(name, x, attr.to(x.device))))[0]


def weights(x):
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x)


def loss_of(layer, name, x):
    """Linear in the results, so that its gradient with respect to them is constant."""
    torch.manual_seed(0)
    found = floats(layer(*arguments(name, x, ATTR.to(x.device))))
    return sum((out * weights(out)).sum() for out in found)


# ---- in place -------------------------------------------------------------------------------------------


def gradients(layer, call, x, modify):
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    out = modify(call(x))
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    found = torch.autograd.grad((out * weights(out)).sum(), wanted, allow_unused=True)
    return [out.detach(), *(g for g in found if g is not None)]


@covered(1, modify=MODIFY, name=CONVOLUTIONS)
def test_a_result_may_be_modified_in_place(device, name, modify):
    layer, x = on_device(name, device), X.to(device)
    found = gradients(layer, lambda x: first_of(layer, name, x), x, modify)
    expected = gradients(layer, lambda x: first_of(layer, name, x), x, lambda out: modify(out.clone()))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "activation", [nn.ReLU(True), nn.ELU(inplace=True), F.relu_], ids=["ReLU", "ELU", "relu_"]
)
@pytest.mark.parametrize("make", [dgl_like.GATConv, dgl_like.GATv2Conv])
def test_an_activation_may_work_in_place(device, make, activation):
    outside = {nn.ReLU: F.relu, nn.ELU: F.elu}.get(type(activation), F.relu)
    graph = make_graph("complete", device)
    x = torch.randn(graph.num_src, 6, dtype=torch.float64, device=device)
    found = []
    for function in (activation, outside):
        torch.manual_seed(0)
        layer = make(6, 4, 2, activation=function).to(device, torch.float64)
        found.append(gradients(layer, lambda x, layer=layer: layer(graph, x), x, lambda out: out))
    torch.testing.assert_close(*found)


# ---- derivatives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names(without=["GPSConv"]))
def test_gradient_penalty(device, name):
    """The gradient of |dL/dx|^2, against differences of dL/dx along a fixed direction."""
    layer, x = on_device(name, device), X.to(device)

    def penalty(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(loss_of(layer, name, x), x)[0].square().sum()

    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(layer, name, leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), leaf)
    direction, step = weights(x), 1e-6
    high, low = (penalty(x + sign * step * direction) for sign in (1, -1))
    torch.testing.assert_close((second * direction).sum(), (high - low) / (2 * step), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", names(without=["GPSConv"]))
def test_torch_func(device, name):
    """Gradients of the parameters, forward mode and vmap, where no graph of these edges is cached yet."""
    layer, x = on_device(name, device).eval(), X.to(device)
    parameters = {n: p.detach() for n, p in layer.named_parameters()}

    class Bound(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return first_of(self.layer, name, x)

    bound = Bound()

    def loss(parameters, x):
        given = {"layer." + n: p for n, p in parameters.items()}
        return torch.func.functional_call(bound, given, (x,)).square().sum()

    found, of_x = torch.func.grad(loss, (0, 1))(parameters, x)
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(
        bound(leaf).square().sum(), [leaf, *layer.parameters()], allow_unused=True, materialize_grads=True
    )
    torch.testing.assert_close([of_x, *found.values()], list(expected))
    _, tangent = torch.func.jvp(lambda x: loss(parameters, x), (x,), (weights(x),))
    torch.testing.assert_close(tangent, (expected[0] * weights(x)).sum())
    batch = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(bound)(batch), torch.stack([bound(x), bound(2 * x)]))


def test_types_made_under_a_transform(device):
    """Rows are grouped by type also where torch.func has wrapped the tensor of types."""
    layer, graph = made("dgl HGTConv").to(device).eval(), edges_of("dgl HGTConv").to(device)

    def call(x):
        made_here = torch.arange(N, device=device) % 2, torch.arange(graph.num_edges, device=device) % 2
        return layer(graph, x, *made_here)

    found = torch.func.grad(lambda x: call(x).square().sum())(X.to(device))
    leaf = X.detach().to(device).requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(call(leaf).square().sum(), leaf)[0])


# ---- several sets of features ---------------------------------------------------------------------------

SETS = 3
ONE_SET = ["GPSConv", "Aggregation", "Pooling", "weights"]  # layers that take one, and weights of edges


def dimension_of_sets(name):
    """[B, N, F], as torch_geometric and Transformers have it; layers of DGL's contract take [N, B, F]."""
    return 0 if of(name) == "pyg" or "TransformerLayer" in name else 1


def step(outs, inputs):
    grads = torch.autograd.grad(sum(x.sin().sum() for x in outs), inputs, allow_unused=True)
    return list(outs), [g for g in grads if g is not None]


def check_sets(layer, call, dim, *sets):
    """Checks that ``call`` with all sets along ``dim`` gives what it gives for each set."""
    inputs = [x.requires_grad_() for x in sets]
    parameters = [*inputs, *layer.parameters()]
    found = step(floats(call(*inputs)), parameters)
    each = [floats(call(*(t.select(dim, k) for t in inputs))) for k in range(SETS)]
    torch.testing.assert_close(found, step([torch.stack(xs, dim) for xs in zip(*each)], parameters))
    # After calls with one set, which prepare the next one of their kind (`dfgnn.nn.prepared`).
    torch.testing.assert_close(floats(call(*inputs)), found[0])


WITH_ATTENTION = "GATConv", "GATv2Conv", "FAConv", "TransformerConv", "RGATConv"


@pytest.mark.parametrize("name", names(without=ONE_SET))
def test_sets_of_features(device, name):
    """Also with the attention, of layers that have one of sets."""
    layer, dim = on_device(name, device).eval(), dimension_of_sets(name)
    x = torch.randn(SETS, N, 8, dtype=X.dtype, device=device).movedim(0, dim)
    shared = of(name) == "pyg" or "GraphTransformer" in name and "attributes" in name
    if shared or "attributed" not in LAYERS[name].arguments.__name__:
        check_sets(layer, lambda x: layer(*arguments(name, x, ATTR.to(device))), dim, x)
    else:
        attr = torch.randn(SETS, *ATTR.shape, dtype=X.dtype, device=device).movedim(0, dim)
        check_sets(layer, lambda x, attr: layer(*arguments(name, x, attr)), dim, x, attr)

    def with_attention(x):
        given = arguments(name, x, ATTR.to(device))
        out, (edges, alpha) = layer(*given, return_attention_weights=True)
        assert edges.shape[1] in alpha.shape
        return out, alpha

    if of(name) == "pyg" and name.split()[1] in WITH_ATTENTION:
        check_sets(layer, with_attention, 0, x)


@pytest.mark.parametrize("name", [n for n in names("dgl", "", without=ONE_SET) if dimension_of_sets(n)])
def test_two_dimensions_of_sets(device, name):
    layer = on_device(name, device).eval()
    x = torch.randn(N, 2, SETS, 8, dtype=X.dtype, device=device)
    attr = ATTR.to(device)
    if name != "GraphTransformerConv attributes":
        attr = torch.randn(E, 2, SETS, 3, dtype=X.dtype, device=device)
    flat = attr.flatten(1, 2) if attr.dim() > 2 else attr
    found = floats(layer(*arguments(name, x, attr)))
    expected = floats(layer(*arguments(name, x.flatten(1, 2), flat)))
    torch.testing.assert_close(found, [out.unflatten(1, (2, SETS)) for out in expected])


def test_dropout_is_another_for_each_set(device):
    pyg = pytest.importorskip("dfgnn.nn.pyg")
    x, edge_index = X.float().to(device).expand(SETS, -1, -1), EDGES.to(device)
    for layer in (pyg.GATConv(8, 4, 2, dropout=0.5), pyg.GATEConv(8, 8, 3, dropout=0.5)):
        more = (ATTR.float().to(device),) if isinstance(layer, pyg.GATEConv) else ()
        out = layer.to(device)(x, edge_index, *more)
        assert not torch.allclose(out[0], out[1])
        out.sum().backward()


def test_pairs_of_sets_and_errors(device):
    pyg = pytest.importorskip("dfgnn.nn.pyg")
    layer = pyg.GATConv((8, 5), 4, 2, add_self_loops=False).to(device, X.dtype)
    edge_index = EDGES.to(device)
    x, y = (torch.randn(SETS, N, k, dtype=X.dtype, device=device) for k in (8, 5))
    check_sets(layer, lambda x, y: layer((x, y), edge_index), 0, x, y)
    with pytest.raises(ValueError, match=r"x\[1\]: expected a batch as x\[0\]"):
        layer((x, y[0]), edge_index)
    with pytest.raises(ValueError, match=r"x\[0\]: expected shape \[N, F\] or \[B, N, F\]"):
        layer((x.unsqueeze(0), y), edge_index)
    with pytest.raises(ValueError, match="x_0: expected a batch as x"):
        pyg.FAConv(8).to(device, X.dtype)(x, x[:2], edge_index)
    with pytest.raises(NotImplementedError, match="in training"):
        pyg.SuperGATConv(8, 4).to(device, X.dtype)(x, edge_index)
    with pytest.raises(NotImplementedError, match="batch norm"):
        pyg.GENConv(8, 4).to(device, X.dtype)(x, edge_index)


def test_sets_compiled(device, fresh_dynamo):
    layer = made("pyg GATv2Conv").to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(SETS, N, 8, dtype=X.dtype, device=device)
    given = arguments("pyg GATv2Conv", x)
    torch.testing.assert_close(compiled(*given), layer(*given))


# ---- the device meta ------------------------------------------------------------------------------------


def check_meta(found, expected, leaves):
    """The results are on meta with these shapes and dtypes, and so are the gradients of the leaves."""
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert all(x.is_meta for x in found)
    found = torch.autograd.grad(sum(x.sum() for x in found), leaves, allow_unused=True)
    for x, grad in zip(leaves, found):
        assert grad is None or grad.is_meta and grad.shape == x.shape


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@in_turns("train", [False, True], names())
def test_layers_on_meta(name, train):
    """A Graph has values, with features and parameters on meta; of an edge_index everything is on meta, also
    where loops are appended, whose number depends on values."""
    layer = made(name).train(train)
    expected = floats(layer(*arguments(name)))
    layer = made(name).train(train).to("meta")
    leaves = [t.to("meta").requires_grad_() for t in (X, ATTR)]
    given = LAYERS[name].arguments(leaves[0], edges_of(name), leaves[1])
    given = tuple(t if isinstance(t, Graph) else on("meta", t) for t in given)
    check_meta(floats(layer(*given)), expected, [*leaves, *layer.parameters()])


# ---- plain PyTorch, and the same each time --------------------------------------------------------------

GRAPHS = "random", "isolated", "duplicates", "mixed_degrees", "fewer_destinations"


def on_hard_graph(name, graph, device, dtype=torch.float64):
    """The layer and its arguments on one of `graphs.GRAPHS`."""
    graph, layer = make_graph(graph, device), made(name).to(device, dtype).eval()
    if hasattr(layer, "set_allow_zero_in_degree"):
        layer.set_allow_zero_in_degree(True)
    draw = torch.Generator().manual_seed(2)
    x, attr = (
        torch.randn(rows, k, generator=draw, dtype=dtype).to(device).requires_grad_()
        for rows, k in ((graph.num_src, 8), (graph.num_edges, 3))
    )
    given = on(device, LAYERS[name].arguments(x, graph, attr))
    return layer, given, [x, attr, *layer.parameters()]


def run(layer, given, leaves):
    outs = floats(layer(*given))
    draw = torch.Generator().manual_seed(3)
    grads = [torch.randn(x.shape, generator=draw, dtype=x.dtype).to(x.device) for x in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, grads, allow_unused=True, materialize_grads=True)]


ON_HARD_GRAPHS = names("dgl", "", without=["pair", "Pooling"])


@in_turns("graph", GRAPHS, ON_HARD_GRAPHS)
def test_reference(name, graph, device, monkeypatch):
    """A layer whose ``attention`` is the function of `reference` is the same layer."""
    if graph == "fewer_destinations" and "EdgeGraphTransformer" in name:
        pytest.skip("it gives new features of all edges: see test_transformers.py")
    layer, given, leaves = on_hard_graph(name, graph, device)
    actual = run(layer, given, leaves)
    for module in layer.modules():
        if hasattr(type(module), "attention"):
            module.attention = getattr(reference, type(module).attention.__name__)
    monkeypatch.setattr(functional, "spmm", reference.spmm)
    torch.testing.assert_close(actual, run(layer, given, leaves), rtol=1e-9, atol=1e-9)


def test_without_dgl(plain_python):
    """An import of dgl fails there; every layer still runs, and says itself that a row is empty."""
    code = """
import sys
sys.modules["dgl"] = None
from every_layer import ATTR, X, arguments, edges_of, made, names
from graphs import make_graph
from dfgnn.nn import ZeroInDegreeError
for name in names("dgl"):
    layer = made(name)
    layer(*arguments(name))
    if "HGT" in name or "Pooling" in name or "pair" in name:
        continue
    graph = make_graph("isolated")
    x, attr = X.new_ones(graph.num_src, 8), X.new_ones(graph.num_edges, 3)
    try:
        layer(*arguments(name, x, attr, graph))
    except ZeroInDegreeError:
        continue
    raise AssertionError(name)
print("ran")
"""
    assert plain_python(code).stdout.strip() == "ran"


@pytest.mark.parametrize("name", ON_HARD_GRAPHS)
def test_deterministic(name, device):
    if device == "cuda" and name == "EdgeGraphTransformerConv no edges":
        pytest.skip("functional.edge_product_attention promises equal bits on the CPU alone")
    given = on_hard_graph(name, "mixed_degrees", device, torch.float32)
    first = run(*given)
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(first, run(*given)))


# ---- copies, precision, other graphs ---------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_pickles_and_copies(name):
    layer = made(name).eval()
    expected = floats(layer(*arguments(name)))
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert repr(other) == repr(layer) and other.state_dict().keys() == layer.state_dict().keys()
        assert all(map(torch.equal, floats(other(*arguments(name))), expected))


def check_rounded(layer, found, exact, tolerance):
    """The results are near the exact ones, and their gradients finite."""
    sum(x.sum() for x in found).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    rounded = [out.to(x.dtype) for out, x in zip(found, exact, strict=True)]
    torch.testing.assert_close(rounded, exact, rtol=tolerance, atol=tolerance)


@in_turns("dtype", [torch.float16, torch.bfloat16], names("dgl", ""))
def test_low_precision(name, dtype):
    layer = made(name).eval().to(dtype)
    found = floats(layer(*arguments(name, X.to(dtype), ATTR.to(dtype))))
    assert {out.dtype for out in found} == {dtype}
    given = arguments(name, X.to(dtype).double(), ATTR.to(dtype).double())
    check_rounded(layer, found, floats(copy.deepcopy(layer).double()(*given)), 0.05)


@pytest.mark.parametrize("name", names("dgl", ""))
def test_autocast(name):
    layer, given = made(name).eval().float(), arguments(name, X.float(), ATTR.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = floats(layer(*given))
    check_rounded(layer, found, floats(layer(*given)), 0.1)


@pytest.mark.parametrize("name", names("dgl", "", without=["pair"]))
def test_a_graph_of_dgl_is_the_same(name):
    dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
    layer = made(name).eval()
    of_dgl = floats(layer(*arguments(name, upstream=True)))
    assert all(map(torch.equal, of_dgl, floats(layer(*arguments(name)))))
    if name in REFUSES_EMPTY_ROWS:
        with pytest.raises(dgl.DGLError, match="in-?(edges|degree)"):
            layer(*arguments(name, X[:3], ATTR[:1], dgl.graph(([0], [1]), num_nodes=3)))


REFUSES_EMPTY_ROWS = names("dgl", "", without=["HGT", "Pooling", "pair"])


@pytest.mark.parametrize("name", REFUSES_EMPTY_ROWS)
def test_destinations_without_edges(name, device):
    layer, graph = on_device(name, device).eval(), make_graph("isolated", device)
    layer(*arguments(name, X.to(device), ATTR.to(device)))  # prepares the next call of its kind
    x, attr = (
        torch.randn(n, k, device=device).double() for n, k in ((graph.num_src, 8), (graph.num_edges, 3))
    )
    given = arguments(name, x, attr, graph)
    with pytest.raises(dfgnn.nn.ZeroInDegreeError, match="allow_zero_in_degree"):
        layer(*given)
    layer.set_allow_zero_in_degree(True)
    out, empty = floats(layer(*given))[0], graph.in_degrees() == 0
    assert out.isfinite().all() and out[~empty].any()
    if "GraphTransformerConv" in name:  # others have a bias or a residual
        assert not out[empty].any()
