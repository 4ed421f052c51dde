"""Every layer, compared with the one of torch_geometric or DGL with its contract, where a program or a tool
changes something around it: replaced functions, modules and modes, hooks, parametrizations, tensors with
operations of their own; and which gradients are None."""

import contextlib
import copy
import functools
import sys
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from every_layer import (
    ATTR,
    EDGES,
    LAYERS,
    UPSTREAM,
    E,
    Layer,
    N,
    X,
    arguments,
    assert_equal,
    both,
    edges_of,
    floats,
    in_turns,
    library,
    made,
    names,
    names_upstream,
    of,
    results,
    types,
    with_gradients,
)  # fmt: skip
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dfgnn
from dfgnn.nn import FallbackWarning, _upstream

NAMES = names_upstream()
EVERY = pytest.mark.parametrize("name", NAMES)
OF_PYG = pytest.mark.parametrize("name", [name for name in NAMES if of(name) == "pyg"])
pytestmark = pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")


def linears():
    """The classes of linear modules."""
    if "torch_geometric" not in sys.modules:
        return (nn.Linear,)
    from torch_geometric.nn.dense.linear import HeteroLinear, Linear

    return nn.Linear, Linear, HeteroLinear


# ---- what is replaced ----------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(*places):
    """Replaces functions by ones whose results are 1.5 times as large. places: (owner, name) of each."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, scaled(getattr(owner, name)))
        yield


def scaled(function):
    @functools.wraps(function)  # as tools do
    def call(*args, **kwargs):
        out = function(*args, **kwargs)
        return tuple(scale(x) for x in out) if isinstance(out, tuple) else scale(out)

    return call


def scale(x):
    return 1.5 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def softmax_of(name):
    home = sys.modules[type(made(name, upstream=True)).__module__]
    return [(home, key) for key in ("softmax", "edge_softmax", "softmax_nodes") if hasattr(home, key)]


def linear_forwards():
    return replaced(*((cls, "forward") for cls in linears()[1:]))


@contextlib.contextmanager
def calls_of_linears():
    """Replaces nn.Module._call_impl, which calls every module, as profilers and quantisation tools do."""
    original = nn.Module._call_impl

    def call(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        return 1.5 * out if isinstance(self, linears()[:2]) else out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "_call_impl", call)
        yield


@contextlib.contextmanager
def hooks_on_all():
    handle = register_module_forward_hook(
        lambda module, args, out: 1.5 * out if isinstance(out, torch.Tensor) else None
    )
    yield
    handle.remove()


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 1.5 * out if getattr(function, "__name__", "") in ("linear", "leaky_relu", "sum") else out


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 1.5 * out if function._schema.name in ("aten::mm", "aten::addmm", "aten::leaky_relu") else out


REPLACED = {
    "nn.Linear.forward": lambda name: replaced((nn.Linear, "forward")),
    "Linear.forward": lambda name: linear_forwards(),
    "F.linear": lambda name: replaced((F, "linear")),
    "F.leaky_relu": lambda name: replaced((F, "leaky_relu")),
    "F.dropout": lambda name: replaced((F, "dropout")),
    "F.normalize": lambda name: replaced((F, "normalize")),
    "attention": lambda name: replaced((F, "multi_head_attention_forward")),
    "softmax": lambda name: replaced(*softmax_of(name)),
    "Sigmoid": lambda name: replaced((nn.Sigmoid, "forward")),
    "SumAggregation": lambda name: replaced((library("torch_geometric").SumAggregation, "forward")),
    "Embedding": lambda name: replaced((nn.Embedding, "forward")),
    "calls": lambda name: calls_of_linears(),
    "hooks on all": lambda name: hooks_on_all(),
    "functions mode": lambda name: Functions(),
    "operators mode": lambda name: Operators(),
}


@in_turns("what", REPLACED, NAMES)
def test_what_a_program_replaces(name, what):
    if what == "SumAggregation" and of(name) == "dgl":
        pytest.skip("DGL has none")
    theirs, ours = both(name)
    results(ours, name)  # the next call may be prepared (`dfgnn.nn.prepared`)
    expected = with_gradients(theirs, name)
    with REPLACED[what](name):
        changed = with_gradients(theirs, name)
        actual = with_gradients(ours, name)
    assert_equal(actual, changed)
    # The layer also notices that the replacement is undone.
    assert_equal(with_gradients(ours, name), expected)


@pytest.mark.parametrize("name", [name for name in NAMES if of(name) == "dgl"])
def test_a_replacement_that_was_there_first_and_is_gone(name):
    upstream = type(both(name)[0])
    with replaced((F, "linear"), (upstream, "forward"), *softmax_of(name)):
        called = _upstream.Called(upstream)
        assert called.replaced() == "forward"
    assert called.replaced() is None
    with replaced((F, "linear")):
        assert called.replaced() == "linear"
    assert called.replaced() is None


def test_a_replaced_linear_layer_is_called_without_a_fallback():
    theirs, ours = both("pyg GATConv")
    with linear_forwards(), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert_equal(with_gradients(ours, "pyg GATConv"), with_gradients(theirs, "pyg GATConv"))


def test_torchs_own_modes_are_no_reason():
    _, ours = both("pyg GATConv")
    with torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        results(ours, "pyg GATConv")
        assert ours.why_not(ours) is None


# The functions that DeepSpeed's profiler replaces to count operations, as far as these layers call them.
COUNTED = (
    *((F, name) for name in ("linear", "relu", "elu", "leaky_relu", "silu", "gelu", "softmax", "embedding")),
    *((F, name) for name in ("batch_norm", "layer_norm")),
    *((torch, name) for name in ("matmul", "addmm", "mul", "add", "einsum", "baddbmm")),
    *((torch.Tensor, name) for name in ("matmul", "addmm", "mul", "add")),
)


@contextlib.contextmanager
def counting():
    """Calls of each function, with the shapes of their tensors."""
    calls = Counter()

    def counted(place, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            calls[place, tuple(x.shape for x in args if isinstance(x, torch.Tensor))] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in COUNTED:
            patch.setattr(owner, name, counted(f"{owner.__name__}.{name}", getattr(owner, name)))
        yield calls


@OF_PYG
def test_the_same_calls_are_counted(name):
    counts, found = [], []
    for layer in both(name):
        with counting() as calls:
            found.append(with_gradients(layer, name))
        counts.append(calls)
    assert counts[1] == counts[0]
    assert counts[0] or name in ("pyg AGNNConv", "pyg SoftmaxAggregation")
    assert_equal(found[1], found[0])


# ---- linear modules ------------------------------------------------------------------------------------

CHANGES = {
    "forward hook": lambda linear: linear.register_forward_hook(lambda module, args, out: 2 * out),
    "forward pre-hook": lambda linear: linear.register_forward_pre_hook(lambda module, args: args[0] + 1),
    "parametrization": parametrizations.weight_norm,
    "its forward": lambda linear: setattr(linear, "forward", lambda x, w=linear.weight: 2 * F.linear(x, w)),
    "another module": lambda linear: nn.Sequential(linear, nn.SiLU()),
}


def parts_of(layer):
    return [key for key, module in layer.named_modules() if isinstance(module, linears()[:2])]


@in_turns("change", CHANGES, NAMES)
def test_changes_of_a_linear_module(name, change):
    """Changes of each linear module of a layer, also of those whose weight is folded into the score terms;
    for every other change the layer has been called before, so that its next call may be prepared."""
    parts, is_called = parts_of(both(name)[0]), list(CHANGES).index(change) % 2 == 0
    if name == "pyg GPSConv" and change == "another module":
        parts.remove("attn.out_proj")  # torch's attention reads its weight
    for part in parts:
        found = []
        for layer in both(name):
            if is_called:
                results(layer, name)
            changed = CHANGES[change](layer.get_submodule(part))
            if change == "another module":
                owner, _, key = part.rpartition(".")
                setattr(layer.get_submodule(owner), key, changed)
            found.append(with_gradients(layer, name))
        assert_equal(found[1], found[0])
        if name.split()[1] in ("GATConv", "GATv2Conv", "TransformerConv", "SuperGATConv"):
            assert of(name) == "dgl" or layer.why_not(layer) is None


# ---- other modules of DGL's layers ----------------------------------------------------------------------

PARTS = {
    "leaky_relu hook": lambda m: m.register_forward_hook(lambda module, args, out: 2 * out),
    "leaky_relu pre-hook": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] - 1,)),
    "leaky_relu forward": lambda m: setattr(m, "forward", lambda x: x.abs()),
    "leaky_relu Tanh": lambda m: nn.Tanh(),
    "attn_drop hook": lambda m: m.register_forward_hook(lambda module, args, out: 2 * out),
    "attn_drop Softsign": lambda m: nn.Softsign(),
    "relation_att.1 hook": lambda m: m.register_forward_hook(lambda module, args, out: 2 * out),
    # What the engine does, too.
    "feat_drop hook": lambda m: m.register_forward_hook(lambda module, args, out: 2 * out),
    "feat_drop Tanh": lambda m: nn.Tanh(),
    "attn_drop Identity": lambda m: nn.Identity(),
    "feat_drop Identity": lambda m: nn.Identity(),
    "leaky_relu of another slope": lambda m: nn.LeakyReLU(0.7),
}
HONOURED = "feat_drop hook", "feat_drop Tanh", "Identity", "slope"


def change_part(layer, change):
    part = change.split()[0]
    new = PARTS[change](layer.get_submodule(part))
    if isinstance(new, nn.Module):
        setattr(layer, part, new)


def changes_of_parts():
    for name in NAMES:
        if of(name) == "dgl" and name.split()[1] in ("GATConv", "GATv2Conv", "EdgeGATConv", "HGTConv"):
            for change in PARTS:
                if ("HGT" in name) == ("relation" in change):
                    yield name, change


@pytest.mark.parametrize(("name", "change"), [*changes_of_parts()])
def test_changes_of_other_modules(name, change):
    """Changes made before accelerate and after it take effect in the fused forward, or DGL's own forward runs
    with a warning; with a dfgnn.Graph, which that cannot take, they raise."""
    part, honoured = change.split()[0], any(word in change for word in HONOURED)
    theirs, late = both(name)
    change_part(theirs, change)
    early = copy.deepcopy(theirs)
    report = dfgnn.accelerate(early)
    if honoured:
        assert report.replaced
    else:
        (kept,) = report.kept
        assert part.split(".")[0] in kept.reason and not report.replaced
    change_part(late, change)
    expected = results(theirs, name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for layer in (early, late):
            assert_equal(results(layer, name), expected)
    found = [str(x.message) for x in said if issubclass(x.category, FallbackWarning)]
    assert len(found) == (not honoured) and all(part.split(".")[0] in text for text in found)
    if not honoured:
        with pytest.raises(NotImplementedError, match=f"{name.split()[1]}: .*{part.split('.')[0]}.*DGL"):
            late(*arguments(name))


# ---- hooks ---------------------------------------------------------------------------------------------


@OF_PYG
def test_hooks_see_what_they_see_there(name):
    """A hook on a linear module gets the same input as in the other layer: tools compute per-sample gradients
    or statistics from it."""
    for part in parts_of(both(name)[0]):
        seen = []
        for layer in both(name):
            given = []
            layer.get_submodule(part).register_forward_hook(lambda m, args, out, to=given: to.append(args[0]))
            results(layer, name)
            seen.append(given)
        assert_equal(seen[1], seen[0])


@pytest.mark.parametrize(("name", "part"), [("pyg RGATConv", "lin_edge"), ("pyg HANConv", "proj.b")])
def test_hooks_that_return_more_rows(name, part):
    """Forward hooks that return more rows than the module did, as captum's integrated gradients of a layer
    use."""
    theirs, ours = both(name)
    for layer in (theirs, ours):
        layer.get_submodule(part).register_forward_hook(lambda m, args, out: torch.cat([out, 2 * out]))
    assert_equal(with_gradients(ours, name), with_gradients(theirs, name))


# ---- parameters, features, autocast --------------------------------------------------------------------


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


def parametrized(layer):
    for module in [m for m in layer.modules() if m._parameters and not isinstance(m, nn.ParameterList)]:
        for key in [key for key, p in module._parameters.items() if p is not None]:
            nn.utils.parametrize.register_parametrization(module, key, Noise())


def halved(layer):
    for module in layer.modules():
        for key, p in module._parameters.items():
            module._parameters[key] = p if p is None else nn.Parameter(p.detach().as_subclass(Halved))


@in_turns("change", [parametrized, halved], NAMES)
def test_changed_parameters(name, change):
    theirs, ours = both(name)
    change(theirs), change(ours)
    assert_equal(results(ours, name), results(theirs, name))


@OF_PYG
def test_features_with_operations_of_their_own(name):
    theirs, ours = both(name)
    given = dict(x=X.as_subclass(Halved), attr=ATTR.as_subclass(Halved))
    assert_equal(results(ours, name, **given), results(theirs, name, **given))


@EVERY
def test_autocast_leaves_float64_alone(name):
    theirs, ours = both(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(with_gradients(ours, name), with_gradients(theirs, name))


# ---- which gradients are None: for these optimizers keep their state, and weight decay does not apply --

LOSSES = {
    "all results": lambda found: sum(x.square().sum() for x in found),
    "the last": lambda found: found[-1].square().sum(),
}
MORE = {
    "pyg GATConv, attention": Layer(
        lambda l: l.GATConv(8, 4, 2, edge_dim=3, add_self_loops=False), lambda x, e, a: (x, e, a, None, True)
    ),
    "pyg GATConv, unused attributes": Layer(
        lambda l: l.GATConv(8, 4, 2, edge_dim=3), lambda x, e, a: (x, e)
    ),
    "pyg GATConv, sources": Layer(
        lambda l: l.GATConv((8, 8), 4, 2, residual=True, add_self_loops=False),
        lambda x, e, a: ((x, None), e),
    ),
    "pyg GATv2Conv, residual": Layer(
        lambda l: l.GATv2Conv(8, 4, 2, residual=True, edge_dim=3, add_self_loops=False),
        lambda x, e, a: (x, e, a),
    ),
    "pyg TransformerConv, attention": Layer(
        lambda l: l.TransformerConv((8, 8), 4, 2, edge_dim=3), lambda x, e, a: ((x, x.sin()), e, a, True)
    ),
    "pyg GENConv, learned": Layer(
        lambda l: l.GENConv(8, 4, learn_t=True, edge_dim=3), lambda x, e, a: (x, e)
    ),
    "pyg GeneralConv, both ends": Layer(
        lambda l: l.GeneralConv(8, 4, 3, heads=2, attention=True, directed_msg=False),
        lambda x, e, a: (x, e, a),
    ),
    "pyg RGATConv, within": Layer(
        lambda l: l.RGATConv(
            8, 8, 2, heads=2, dim=2, attention_mechanism="within-relation", num_blocks=2, mod="scaled",
            attention_mode="multiplicative-self-attention",
        ),
        lambda x, e, a: (x, e, types(a)),
    ),
}  # fmt: skip
HETEROGENEOUS = "pyg HGTConv", "pyg HANConv"  # see test_types_without_edges
OF_EDGES = [name for name in NAMES if name not in HETEROGENEOUS and "Aggregation" not in name]
MORE = {name: case for name, case in MORE.items() if name.split(",")[0] in NAMES}
ASKED = "GATConv", "GATv2Conv", "DotGatConv", "EGATConv", "EdgeGATConv", "GlobalAttentionPooling"


def with_gradient(layer, case, edges, attr, loss, options):
    """The names of the leaves that have a gradient."""
    leaves = {"x": X.clone().requires_grad_(), "attr": attr.clone().requires_grad_()}
    torch.manual_seed(1)
    loss(floats(layer(*case.arguments(leaves["x"], edges, leaves["attr"]), **options))).backward()
    return {key for key, x in [*layer.named_parameters(), *leaves.items()] if x.grad is not None}


@pytest.mark.parametrize("edges", [E, 1, 0])
@pytest.mark.parametrize("name", [*OF_EDGES, *MORE])
def test_which_gradients_are_none(name, edges):
    case = LAYERS.get(name) or MORE[name]
    given, attr, asked = EDGES[:, :edges], ATTR[:edges], [{}]
    if of(name) == "dgl":
        dgl = pytest.importorskip("dgl")
        if "EGATConv" in name and edges < E:
            given = torch.cat([given, torch.arange(N).expand(2, N)], 1)  # it refuses rows without edges
            attr = torch.cat([attr, ATTR[:N]])
        given = dgl.graph(tuple(given), num_nodes=N) if edges < E else edges_of(name, upstream=True)
        asked += [{"get_attention": True}] if name.split()[1] in ASKED else []
    for options in asked:
        for loss in LOSSES.values():
            found = []
            for accelerate in (False, True):
                torch.manual_seed(0)
                layer = case.make(library(UPSTREAM[of(name)])).double().eval()
                layer._allow_zero_in_degree = True
                if accelerate:
                    assert dfgnn.accelerate(layer).replaced
                found.append(with_gradient(layer, case, given, attr, loss, options))
            assert found[0] == found[1]


# ---- gradients that have derivatives -------------------------------------------------------------------

BIPARTITE = {
    "DotGatConv": (lambda l: l.DotGatConv((8, 8), 4, 2), lambda g, x: (g, (x, x[:7]))),
    "GATConv": (lambda l: l.GATConv((8, 8), 4, 2), lambda g, x: (g, (x, x[:7]))),
    "GATv2Conv": (lambda l: l.GATv2Conv((8, 8), 4, 2), lambda g, x: (g, (x, x[:7]))),
}


@pytest.mark.parametrize("name", BIPARTITE)
def test_gradients_that_have_derivatives(name):
    """Gradients with create_graph=True equal those without it, also where the destinations' features are
    computed from the sources'."""
    make, call = BIPARTITE[name]
    torch.manual_seed(0)
    layer = make(library("dgl")).double()
    src, dst = EDGES[0], torch.cat([torch.arange(7), EDGES[1, 7:] % 7])
    graph = dfgnn.Graph.from_coo(src, dst, num_src=N, num_dst=7)
    found = []
    for create_graph in (False, True):
        x = X.clone().requires_grad_()
        out = layer(*call(graph, x)).sin().sum()
        found.append(torch.autograd.grad(out, [x, *layer.parameters()], create_graph=create_graph))
    assert_equal(found[1], found[0])


# ---- dfgnn.run, which looks at calls -----------------------------------------------------------------------


def nodes_of(out):
    """The names of what computes gradients behind a result, by number."""
    found, waiting = set(), [x.grad_fn for x in floats(out) if x.requires_grad]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return Counter(type(node).__name__ for node in found)


@pytest.mark.parametrize("name", names())
def test_looking_at_calls_does_not_change_how_they_are_computed(name):
    from dfgnn.run.models import Models

    layer, args = made(name), arguments(name)
    looked_at = Models(lambda call, module, args, kwargs: call(module, *args, **kwargs))
    for _ in range(2):  # the second call uses what the first one has found
        expected = nodes_of(layer(*args))
        looked_at.install()
        try:
            assert nodes_of(layer(*args)) == expected
        finally:
            looked_at.remove()
