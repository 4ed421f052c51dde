"""Every layer beside DGL's where a program or a tool changes something around it: replaced functions, modes,
hooks on all modules, parametrizations, tensors with operations of their own.
"""

import contextlib
import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from dgl_compare import dgl
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

import dfgnn
from dfgnn.nn import _upstream

DGL = dgl.nn.pytorch
N, E = 12, 52
pytestmark = pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def chosen(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


EDGES = torch.cat([chosen(N, 2, E - N), torch.arange(N).expand(2, N)], 1)
GRAPH = dgl.graph(tuple(EDGES), num_nodes=N)
TO_SEVEN = dgl.heterograph({("a", "to", "b"): (EDGES[0], EDGES[1] % 7)}, num_nodes_dict={"a": N, "b": 7})
X, ATTR = drawn(N, 8), drawn(E, 3)
KINDS, TYPES = chosen(2, N), chosen(3, E)

# Name -> (a function that makes the layer, a function from features to the layer's arguments).
LAYERS = {
    "GATConv": (lambda: DGL.GATConv(8, 4, 2, residual=True), lambda x: (GRAPH, x)),
    "GATv2Conv": (lambda: DGL.GATv2Conv(8, 4, 2), lambda x: (GRAPH, x)),
    "AGNNConv": (lambda: DGL.AGNNConv(), lambda x: (GRAPH, x)),
    "AGNNConv pair": (lambda: DGL.AGNNConv(), lambda x: (GRAPH, (x, x.sin()))),
    "DotGatConv": (lambda: DGL.DotGatConv(8, 4, 2), lambda x: (GRAPH, x)),
    "DotGatConv pair": (lambda: DGL.DotGatConv((8, 8), 4, 2), lambda x: (GRAPH, (x, x.sin()))),
    "DotGatConv bipartite": (lambda: DGL.DotGatConv((8, 8), 4, 2), lambda x: (TO_SEVEN, (x, x[:7]))),
    "EGATConv": (lambda: DGL.EGATConv(8, 3, 4, 3, 2), lambda x: (GRAPH, x, ATTR)),
    "HGTConv": (lambda: DGL.HGTConv(8, 4, 2, 2, 3), lambda x: (GRAPH, x, KINDS, TYPES)),
    "GlobalAttentionPooling": (
        lambda: DGL.GlobalAttentionPooling(nn.Linear(8, 1), nn.Linear(8, 6)),
        lambda x: (GRAPH, x),
    ),
}
if hasattr(DGL, "EdgeGATConv"):
    LAYERS["EdgeGATConv"] = lambda: DGL.EdgeGATConv(8, 3, 4, 2), lambda x: (GRAPH, x, ATTR)
EVERY = pytest.mark.parametrize("name", LAYERS)


def both(name):
    """DGL's layer, and a copy of it after dfgnn.accelerate."""
    torch.manual_seed(0)
    theirs = LAYERS[name][0]().double().eval()
    ours = copy.deepcopy(theirs)
    assert dfgnn.accelerate(ours).replaced
    return theirs, ours


def results(layer, name, x=X):
    """Outputs, and the gradients of the features and of all parameters."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    outs = layer(*LAYERS[name][1](x))
    outs = outs if isinstance(outs, tuple) else (outs,)
    leaves = x, *layer.parameters()
    grads = torch.autograd.grad(sum(out.square().sum() for out in outs), leaves, allow_unused=True)
    return [*outs, *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads))]


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def check(name, change=None):
    """Checks that both layers give the same results after ``change``, which is called with each of them."""
    theirs, ours = both(name)
    if change is not None:
        for layer in (theirs, ours):
            change(layer)
    assert_equal(results(ours, name), results(theirs, name))


@contextlib.contextmanager
def replaced(*places):
    """Replaces functions by ones whose results are 1.5 times as large. places: (owner, name) of each."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, key in places:
            original = getattr(owner, key)
            patch.setattr(owner, key, lambda *args, f=original, **kwargs: 1.5 * f(*args, **kwargs))
        yield


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 1.5 * out if getattr(function, "__name__", "") in ("linear", "leaky_relu", "sum") else out


@contextlib.contextmanager
def hooks_on_all():
    handle = register_module_forward_hook(
        lambda module, args, out: 1.5 * out if isinstance(out, torch.Tensor) else None
    )
    yield
    handle.remove()


def softmax(name):
    home = vars(sys.modules[type(both(name)[0]).__module__])
    return [(sys.modules[home["__name__"]], key) for key in ("edge_softmax", "softmax_nodes") if key in home]


CHANGES = {
    "F.linear": lambda name: replaced((F, "linear")),
    "F.leaky_relu": lambda name: replaced((F, "leaky_relu")),
    "F.normalize": lambda name: replaced((F, "normalize")),
    "softmax": lambda name: replaced(*softmax(name)),
    "mode": lambda name: Functions(),
    "hooks on all": lambda name: hooks_on_all(),
}


@pytest.mark.parametrize("what", CHANGES)
@EVERY
def test_what_a_program_changes(name, what):
    with CHANGES[what](name):
        check(name)
    check(name)


@EVERY
def test_a_change_that_was_there_first_and_is_gone(name):
    theirs, ours = both(name)
    upstream = type(theirs)
    with replaced((F, "linear"), (upstream, "forward"), *softmax(name)):
        called = _upstream.Called(upstream)
        assert called.replaced() == "forward"
    assert called.replaced() is None
    with replaced((F, "linear")):
        assert called.replaced() == "linear"
    assert called.replaced() is None


class Noise(nn.Module):
    """A parametrization that draws numbers at every access."""

    def forward(self, x):
        return x + torch.randn_like(x)


@EVERY
def test_parametrizations(name):
    def parametrize(layer):
        for module in [m for m in layer.modules() if m._parameters and not isinstance(m, nn.ParameterList)]:
            for key in [key for key, p in module._parameters.items() if p is not None]:
                nn.utils.parametrize.register_parametrization(module, key, Noise())

    check(name, parametrize)


class Halved(torch.Tensor):
    """A tensor with operations of its own, as quantised ones have: half of some results."""

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        out = super().__torch_function__(function, kinds, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return out / 2 if function in (F.linear, torch.matmul, torch.Tensor.mul) else out


@EVERY
def test_parameters_with_operations_of_their_own(name):
    def change(layer):
        for module in layer.modules():
            for key, p in module._parameters.items():
                module._parameters[key] = p if p is None else nn.Parameter(p.detach().as_subclass(Halved))

    check(name, change)


@EVERY
def test_autocast_leaves_float64_alone(name):
    with torch.autocast("cpu", torch.bfloat16):
        check(name)


@pytest.mark.parametrize("name", ["DotGatConv bipartite", "GATConv", "GATv2Conv"])
def test_gradients_that_have_derivatives(name):
    """Gradients with create_graph=True equal those without it, also where the destinations' features are
    computed from the sources'."""
    _, layer = both(name)
    found = []
    for create_graph in (False, True):
        x = X.clone().requires_grad_()
        out = layer(*LAYERS[name][1](x)).sin().sum()
        found.append(torch.autograd.grad(out, [x, *layer.parameters()], create_graph=create_graph))
    assert_equal(found[1], found[0])
