"""A layer's usual call is prepared once (`dfgnn.nn.prepared`): every change that the call depends on is seen
by the next one, which then gives what a new layer gives, or raises its error."""

import copy
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dfgnn import Graph, functional
from dfgnn.engine import autograd as _engine
from dfgnn.nn import dgl as dgl_layers
from dfgnn.nn import prepared as _prepared

pyg = pytest.importorskip("dfgnn.nn.pyg", reason="torch_geometric is not installed")

N = 12
LAYERS = (
    "pyg GATConv",
    "pyg GATv2Conv",
    "pyg TransformerConv",
    "dgl GATConv",
    "dgl GATv2Conv",
    "dgl DotGatConv",
)


def edges():
    return torch.randint(N, (2, 40), generator=torch.Generator().manual_seed(1))


class Case:
    """A layer that has been called, so that its next usual call is prepared."""

    def __init__(self, name, **options):
        torch.manual_seed(0)
        library, cls = name.split()
        self.is_pyg = library == "pyg"
        if self.is_pyg:
            self.layer, self.edges = getattr(pyg, cls)(8, 4, heads=2, **options), edges()
        else:
            self.layer = getattr(dgl_layers, cls)(8, 4, num_heads=2, **options)
            self.edges = Graph.from_edge_index(edges(), num_nodes=N).add_self_loops()
        self.x = torch.randn(N, 8)
        self()
        assert self.is_prepared()

    def __call__(self, x=None, layer=None):
        layer, x = layer or self.layer, self.x if x is None else x
        return layer(x, self.edges) if self.is_pyg else layer(self.edges, x)

    def is_prepared(self, x=None):
        """Whether `again` answers."""
        x = self.x if x is None else x
        return _prepared.again(self.layer, x, self.edges) is not None

    def anew(self, x=None):
        """The result and gradients of a call that is not prepared."""
        layer = copy.deepcopy(self.layer)
        layer.__dict__.pop(_prepared.KEY)
        return self.results(layer, x)

    def results(self, layer=None, x=None):
        layer = layer or self.layer
        x = (self.x if x is None else x).detach().requires_grad_()
        parameters = [x for x in layer.parameters() if x.requires_grad]
        out = self(x, layer)
        weight = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
        return out, torch.autograd.grad((out * weight).sum(), [x, *parameters])

    def check(self, x=None):
        torch.testing.assert_close(self.results(x=x), self.anew(x), rtol=0, atol=0)


def linear_of(layer):
    return next(x for x in layer.children() if hasattr(x, "weight"))


@pytest.fixture(params=LAYERS)
def case(request):
    return Case(request.param)


def test_the_same_results(case):
    case.check()
    case.check(torch.randn(N, 8))
    want = case.anew()[0]
    with torch.no_grad():
        torch.testing.assert_close(case(), want, rtol=0, atol=0)
    case.layer.requires_grad_(False)
    case.check()
    assert not case().requires_grad


PYG, V2 = ("GATConv", "GATv2Conv", "TransformerConv"), ("GATv2Conv", "TransformerConv")
# Options of a layer and what its calls get -> the layers that have one operator for it.
KINDS = {
    "mean": ({"concat": False}, PYG),
    "residual": ({"residual": True}, PYG[:2]),
    "mean residual": ({"concat": False, "residual": True}, PYG[:2]),
    "beta": ({"beta": True}, PYG[2:]),
    "no root": ({"root_weight": False}, PYG[2:]),
    "edges": ({"edge_dim": 3}, ("GATConv", "TransformerConv")),
    "mean edges": ({"edge_dim": 3, "concat": False}, ("GATConv", "TransformerConv")),
    "pair": ({}, V2),
    "pair residual": ({"residual": True, "add_self_loops": False}, ("GATv2Conv",)),
    "block": ({}, PYG),
    "block residual": ({"residual": True, "concat": False}, ("GATConv",)),
    "dropout": ({"dropout": 0.5}, PYG),
    "edges dropout": ({"edge_dim": 3, "dropout": 0.4}, ("GATConv",)),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", [f"{kind}/{cls}" for kind in KINDS for cls in KINDS[kind][1]])
def test_kinds_of_calls(name, autocast):
    """Results and gradients are those of a new layer, which asks all questions."""
    (kind, cls), n = name.split("/"), 7
    torch.manual_seed(0)
    layer = getattr(pyg, cls)(8, 4, heads=2, **KINDS[kind][0])
    x, extra = torch.randn(N, 8, requires_grad=True), {}
    edge_index = edges() % torch.tensor([[N], [n]])
    if "edges" in kind:
        extra["edge_attr"] = torch.randn(40, 3, requires_grad=True)
    other = torch.randn(n, 8, requires_grad=True)

    def features(x):
        return (x, other) if "pair" in kind else (x, x[:n]) if "block" in kind else x

    def results(layer, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.manual_seed(5)
            out = layer(features(x), edge_index, **extra)
        leaves = [x, *extra.values(), *layer.parameters()]
        return out, torch.autograd.grad(out.float().sin().sum(), leaves, allow_unused=True)

    def is_prepared(attr):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return _prepared.again(layer, features(x), edge_index, attr) is not None

    results(layer, x)
    assert is_prepared(extra.get("edge_attr"))
    more = torch.randn(N, 8, requires_grad=True)
    new = copy.deepcopy(layer)
    del new.__dict__[_prepared.KEY]
    found, want = results(layer, more), results(new, more)
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    if "edges" in kind:
        assert not is_prepared(torch.ones(40, 3, dtype=torch.float64)) or autocast
        with pytest.raises(ValueError, match="expected 3 features"):
            layer(x, edge_index, torch.randn(40, 2))
        with pytest.raises(ValueError, match="a row per edge"):
            layer(x, edge_index, torch.randn(39, 3))
    elif "block" in kind and cls == "GATConv":
        assert _prepared.again(layer, (x, x[:n].clone()), edge_index) is None


def test_a_graph_of_other_sizes_is_refused():
    case = Case("pyg GATConv")
    graph = Graph.from_edge_index(edges() % torch.tensor([[N], [4]]), num_src=N, num_dst=4)
    with pytest.raises(ValueError, match="destination rows"):
        case.layer(case.x, graph)


def test_other_edges_and_numbers_of_nodes(case):
    n = 7
    edge_index = torch.randint(n, (2, 30))
    case.edges = (
        edge_index if case.is_pyg else Graph.from_edge_index(edge_index, num_nodes=n).add_self_loops()
    )
    case.check(torch.randn(n, 8))


@pytest.mark.parametrize("change", ["half", "double", "one parameter"])
def test_another_dtype(case, change):
    if change == "one parameter":
        weight = linear_of(case.layer).weight
        weight.data = weight.data.double()
        assert not case.is_prepared()
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            case()
    else:
        getattr(case.layer, change)()
        assert not case.is_prepared()
        with pytest.raises((TypeError, ValueError), match="expected torch.float"):
            case()
        case.x = getattr(case.x, change)()
        assert case().dtype == case.x.dtype
        case.check()


def test_parameters_that_are_replaced_or_written(case):
    linear = linear_of(case.layer)
    with torch.no_grad():
        linear.weight.mul_(2)
    case.check()
    linear.weight = nn.Parameter(torch.randn_like(linear.weight))
    assert not case.is_prepared()
    case.check()
    name, old = next((name, x) for name, x in case.layer.named_children() if x is linear)
    setattr(case.layer, name, copy.deepcopy(old))
    assert not case.is_prepared()
    case.check()


def test_attributes(case):
    layer = case.layer
    if hasattr(layer, "leaky_relu") or hasattr(layer, "negative_slope"):
        layer.negative_slope = 0.7
    else:
        layer.attention = functional.dot_attention
        layer.unknown = torch.ones(3)
    assert not case.is_prepared()
    case.check()


def test_features_of_dgl_are_dropped():
    case = Case("dgl GATConv", feat_drop=0.0, residual=True, activation=F.elu)
    case.check()
    case.layer.feat_drop.p = 0.9
    assert not case.is_prepared()
    assert not torch.equal(case(), case())
    assert not case.is_prepared()


def test_modes_and_transforms(case):
    case.check()
    with torch.autocast("cpu", torch.bfloat16):
        assert not case.is_prepared()
        case()
    tangent = torch.func.jvp(case, (case.x,), (torch.ones_like(case.x),))[1]
    assert tangent.shape == case().shape
    batch = torch.func.vmap(lambda x: case(x))(torch.stack([case.x, 2 * case.x]))
    torch.testing.assert_close(batch[0], case())
    meta = torch.zeros(N, 8, device="meta")
    assert not case.is_prepared(meta)


def test_wrong_features(case):
    rows = torch.randn(2 if case.is_pyg else N + 1, 8)
    for x in (torch.randn(N, 5), rows, torch.randn(N, 8, dtype=torch.float64)):
        with pytest.raises((TypeError, ValueError)):
            case(x)
    case.check()


def test_a_user_s_class_is_not_prepared():
    class Mine(pyg.GATConv):
        def message(self, x_j, alpha):
            return 2 * super().message(x_j, alpha)

    layer, x = Mine(8, 4), torch.randn(N, 8)
    with pytest.warns(UserWarning, match="overridden"):
        layer(x, edges())
    assert _prepared.KEY not in vars(layer)


def test_copies_pickles_and_state(case):
    layer = case.layer
    other = copy.deepcopy(layer)
    assert other.__dict__[_prepared.KEY] is None
    with torch.no_grad():
        for x in other.parameters():
            x.add_(1)
    assert not torch.equal(case(layer=other), case())
    shallow = copy.copy(layer)
    assert _prepared.again(shallow, case.x, case.edges) is None
    torch.testing.assert_close(case(layer=shallow), case(), rtol=0, atol=0)
    again = pickle.loads(pickle.dumps(layer))
    torch.testing.assert_close(case(layer=again), case(), rtol=0, atol=0)
    file = io.BytesIO()
    torch.save(layer, file)
    assert b"Prepared" not in file.getvalue()
    assert not any("prepared" in name for name in layer.state_dict())


def test_memory(case, no_collection):
    """A layer and its parameters are freed as soon as nobody has them, without the garbage collector."""
    refs = [weakref.ref(case.layer), *map(weakref.ref, case.layer.parameters())]
    del case.layer
    assert [x() for x in refs] == [None] * len(refs)


def test_it_is_used(case, monkeypatch, count_calls):
    """The operator runs, and the layer's own forward does not."""
    calls = count_calls(_engine, "_forward")
    name = "_fused" if case.is_pyg else "_graph"
    monkeypatch.setattr(type(case.layer), name, lambda *args: 1 / 0)
    case()
    assert calls == [1]


def test_what_is_not_fused_is_not_prepared(case):
    """A layer that is computed operation by operation, until the reason has gone."""
    hook = linear_of(case.layer).register_forward_hook(lambda *_: None)
    case()
    assert not case.is_prepared()
    hook.remove()
    case()
    assert case.is_prepared()
