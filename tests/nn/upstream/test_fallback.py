"""When layers of dfgnn.nn.pyg run torch_geometric's own forward, and what of torch_geometric takes them."""

import functools
import importlib
import sys
import warnings

import pytest
import torch
from beside import assert_same, compare, pair, run
from of_pyg import edges, torch_geometric

import dfgnn
from dfgnn.nn import (
    FallbackWarning,
    _upstream,  # tells which methods of a class count as replaced
    pyg,
)
from dfgnn.nn.pyg import AGNNConv, GATConv, GATv2Conv, TransformerConv, _x_and_edge_index, gat

N = 50  # nodes of the graph "random"
PyG = torch_geometric.nn
LAYERS = [GATConv, GATv2Conv, TransformerConv, AGNNConv]


def fusable(layer):
    """Why the fused forward is not for this layer, or None."""
    return type(layer).why_not(layer)


def arguments_of(cls):
    return () if cls is AGNNConv else (9, 5, 2)


def layer_pair(cls, **options):
    return pair(getattr(PyG, cls.__name__), cls, *arguments_of(cls), **options)


def assert_falls_back(theirs, ours, match):
    x = torch.randn(N, 9, dtype=torch.float64)
    with pytest.warns(FallbackWarning, match=match) as caught:
        actual = run(ours, x, edges())
    assert len(caught) == 1 and caught[0].filename == run.__code__.co_filename, caught
    assert_same(actual, run(theirs, x, edges()), 1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        ours(x, edges())  # the warning is given once only


def test_decomposed_layers():
    # torch_geometric cannot decompose these layers; dfgnn must fall back all the same.
    _, ours = layer_pair(GATConv, decomposed_layers=2)
    assert fusable(ours) == "decomposed_layers=2"
    ours.decomposed_layers = 1
    assert fusable(ours) is None


@pytest.mark.parametrize("cls", LAYERS)
def test_overridden_methods(cls):
    def update(self, inputs):
        return 3 * inputs

    def subclass(base, prefix):
        # torch_geometric tells classes apart by module and name, and reads their source.
        changed = type(f"{prefix}{base.__name__}", (base,), {"update": update})
        changed.__module__ = __name__
        return changed

    theirs, ours = subclass(getattr(PyG, cls.__name__), "Theirs"), subclass(cls, "Ours")
    for child in (ours, subclass(ours, "Child")):
        assert_falls_back(*pair(theirs, child, *arguments_of(cls)), "update is overridden")


@pytest.mark.parametrize("name", ["message", "aggregate", "update", "edge_update", "message_and_aggregate"])
def test_each_overridden_method_is_seen(name):
    changed = type("Changed", (GATConv,), {name: lambda self, *args, **kwargs: None})
    layer = GATConv(9, 5)
    layer.__class__ = changed
    assert fusable(layer) == f"{name} is overridden"
    layer = GATConv(9, 5)
    setattr(layer, name, getattr(layer, name))
    assert fusable(layer) is None
    setattr(layer, name, lambda *args, **kwargs: None)
    assert fusable(layer) == f"{name} is overridden"


def test_a_subclass_with_its_own_message_passing():
    """torch_geometric reads the arguments of `message` from the subclass's source: dfgnn must not disturb
    that."""

    class Weighted(GATConv):
        def forward(self, x, edge_index, weight):
            # propagate_type: (x: Tensor, weight: Tensor)
            return self.propagate(edge_index, x=x, weight=weight)

        def message(self, x_j, weight):
            return weight[:, None] * x_j

    x, weight = torch.randn(N, 9), torch.rand(400)
    src, dst = edges()
    expected = torch.zeros(N, 9).index_add(0, dst, weight[:, None] * x[src])
    torch.testing.assert_close(Weighted(9, 5)(x, edges(), weight), expected)


def test_a_subclass_that_only_sets_options_is_fused():
    class Mine(GATConv):
        def __init__(self):
            super().__init__(9, 5, heads=2, residual=True)

        def reset_parameters(self):
            super().reset_parameters()

    layer = Mine()
    assert fusable(layer) is None
    theirs = PyG.GATConv(9, 5, heads=2, residual=True)
    theirs.load_state_dict(layer.state_dict())
    compare(theirs, layer, torch.randn(N, 9), edges())


# ---- explanations ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["base first", "derived first"])
@pytest.mark.parametrize("cls", LAYERS)
def test_explain_of_derived_classes(cls, order, monkeypatch):
    """The mask of edges has an effect on derived classes, also if an instance of one is the first of its
    library class that is made, or if one is derived from another."""
    library = getattr(PyG, cls.__name__)
    for name in ("propagate", "collect", "_orig_propagate", "_jinja_propagate"):
        if name in vars(library):  # the first instance of a class adds these attributes to the class
            monkeypatch.delattr(library, name)
    for name in [name for name in sys.modules if name.startswith(f"{__name__}_")]:
        monkeypatch.delitem(sys.modules, name)  # torch_geometric keeps what it compiled by the class's name

    class Named(cls):
        pass

    class Derived(Named):
        pass

    made = [(Named, Derived)[k](*arguments_of(cls)).double() for k in order]
    x, mask = torch.randn(N, 9, dtype=torch.float64), torch.randn(400, dtype=torch.float64)
    for layer in made:
        plain = layer(x, edges())
        layer.explain, layer._edge_mask, layer._loop_mask = True, mask, edges()[0] != edges()[1]
        assert not torch.allclose(layer(x, edges()), plain)


# ---- TorchScript, compilation, heterogeneous models ------------------------------------------------------


@pytest.mark.parametrize("cls", LAYERS)
def test_tracing(cls):
    theirs, ours = layer_pair(cls)
    x, edge_index = torch.randn(N, 9, dtype=torch.float64), edges()
    with pytest.warns(FallbackWarning, match="TorchScript"):
        traced = torch.jit.trace(ours, (x, edge_index))
    other = edges("complete")
    torch.testing.assert_close(traced(x, other), theirs(x, other))
    assert fusable(ours) is None


class Scripted(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index)


# The others of torch_geometric 2.8 do not script.
@pytest.mark.parametrize("cls", [TransformerConv, AGNNConv])
def test_scripting(cls, monkeypatch):
    """What is compiled is torch_geometric's layer, which torch.jit.script puts in place of ours."""
    theirs, ours = layer_pair(cls)
    # As if torch_geometric's layer had never been used: the first instance sets this.
    monkeypatch.delattr(type(theirs), "propagate")
    model = Scripted(ours)
    with pytest.warns(FallbackWarning, match="TorchScript"):
        scripted = torch.jit.script(model)
    x = torch.randn(N, 9, dtype=torch.float64)
    torch.testing.assert_close(scripted(x, edges()), torch.jit.script(Scripted(theirs))(x, edges()))
    assert type(model.conv) is type(theirs) and type(ours) is cls
    compare(theirs, ours, x, edges())


# ---- the package -----------------------------------------------------------------------------------------


def test_missing_torch_geometric(plain_python):
    code = "import sys; sys.modules['torch_geometric'] = None; import dfgnn.nn.pyg"
    result = plain_python(code, status=1)
    assert "ImportError: dfgnn.nn.pyg: expected the package torch_geometric" in result.stderr


def upstream(name):
    """torch_geometric's class; GATEConv is not among the names of its nn."""
    bases = getattr(pyg, name).__mro__[1:]
    return next(c for c in bases if c.__name__ == name and c.__module__.startswith("torch_geometric."))


def test_names():
    assert set(pyg.__all__) <= set(dir(pyg))
    for name in pyg.__all__:
        value = getattr(pyg, name)
        assert value.__name__ == name
        assert upstream(name) is getattr(PyG, name, upstream(name))
    with pytest.raises(AttributeError, match="has no attribute 'GCNConv'"):
        _ = pyg.GCNConv


# ---- changes of torch_geometric's classes, and hooks on sub-modules --------------------------------------


@pytest.mark.parametrize("name", ["message", "forward", "aggregate", "edge_update"])
def test_methods_replaced_in_the_class(name, monkeypatch):
    theirs, ours = layer_pair(GATConv)
    original = getattr(PyG.GATConv, name)

    @functools.wraps(original)  # as decorators do
    def changed(self, *args, **kwargs):
        return 2 * original(self, *args, **kwargs)

    monkeypatch.setattr(PyG.GATConv, name, changed)
    (kept,) = dfgnn.accelerate(theirs).kept
    assert kept.reason == f"GATConv.{name} was replaced" and type(theirs) is PyG.GATConv
    assert_falls_back(theirs, ours, name)  # `ours` was made before the method was replaced
    monkeypatch.undo()
    assert fusable(ours) is None and len(dfgnn.accelerate(theirs).replaced) == 1


def test_methods_replaced_before_ours_are_imported(plain_python):
    code = """
import dfgnn, torch, torch_geometric.nn as gnn
original = gnn.GATConv.message
def message(self, x_j, alpha):
    return 2 * original(self, x_j, alpha)
gnn.GATConv.message = message
layer = gnn.GATConv(3, 4)
(kept,) = dfgnn.accelerate(layer).kept
assert kept.reason == "GATConv.message was replaced"
ours = dfgnn.nn.pyg.GATConv(3, 4)
ours.load_state_dict(layer.state_dict())
x, edge_index = torch.randn(5, 3), torch.randint(5, (2, 9))
torch.testing.assert_close(ours(x, edge_index), layer(x, edge_index))
"""
    assert "message is overridden" in plain_python(code).stderr


@pytest.mark.parametrize("name", pyg.__all__)
def test_the_library_has_its_own_methods(name):
    assert _upstream.replaced_method(upstream(name), "torch_geometric") is None


def test_an_aggregation_is_named_rightly():
    _, ours = layer_pair(GATConv)
    ours.aggr_module = PyG.MaxAggregation()
    assert fusable(ours) == "aggr_module=MaxAggregation"
    ours.aggr_module = PyG.SumAggregation()
    assert fusable(ours) is None
    ours.aggr_module.register_forward_hook(lambda module, args, out: None)
    assert "aggr_module has hooks" in fusable(ours)
    assert fusable(GATConv(3, 4, aggr="max")) == "aggr='max'"


# ---- versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["2.4.0", "2.5.3", "1.7.2", "3.0.0", "3.1.0.dev20270101"])
def test_versions_that_are_not_supported(found, monkeypatch):
    monkeypatch.setattr(torch_geometric, "__version__", found)
    with pytest.raises(ImportError, match=rf"expected torch_geometric >= 2.6, < 3.0, got {found}"):
        importlib.reload(pyg)
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "dfgnn.nn.pyg")
        patched.delattr(dfgnn.nn, "pyg")
        (kept,) = dfgnn.accelerate(PyG.GATConv(3, 4)).kept
        assert found in kept.reason and ">= 2.6" in kept.reason
        with pytest.raises(ImportError, match="expected torch_geometric"):
            dfgnn.patch("pyg")


@pytest.mark.parametrize("flag", [None, False, True], ids=str)
@pytest.mark.parametrize("cls", [GATConv, GATv2Conv, TransformerConv])
def test_what_asks_for_attention(cls, flag):
    """The values of return_attention_weights that ask for attention; versions of torch_geometric differ."""
    theirs, ours = layer_pair(cls)
    x = torch.randn(N, 9, dtype=torch.float64)
    expected, actual = (layer(x, edges(), return_attention_weights=flag) for layer in (theirs, ours))
    assert type(expected) is type(actual)


def test_what_asks_for_attention_before_2_8(monkeypatch):
    x = torch.randn(N, 9)
    monkeypatch.setattr(gat, "wants_attention", _x_and_edge_index.in_version((2, 7)))
    assert isinstance(GATConv(9, 5)(x, edges(), return_attention_weights=False), tuple)
    monkeypatch.setattr(gat, "wants_attention", _x_and_edge_index.in_version((2, 8)))
    assert isinstance(GATConv(9, 5)(x, edges(), return_attention_weights=False), torch.Tensor)
