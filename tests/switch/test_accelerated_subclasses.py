"""accelerate of subclasses: those that only wrap the layer's forward run it fused, the others are refused."""

import abc
import copy
import functools
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn

import dfgnn

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
import torch_geometric.nn as pygnn

N = 30
# torch_geometric compiles methods into a class when one is first made, as any script's layers do.
for _of in (pygnn.GATConv, pygnn.GATv2Conv, pygnn.TransformerConv):
    _of(2, 2)


class Relation(pygnn.TransformerConv):
    """Attention from one kind of nodes to another, with an output layer."""

    def __init__(self, sizes, width, heads):
        super().__init__(sizes, width // heads, heads, dropout=0.0, bias=False)
        self.last = nn.Linear(width, width)

    def forward(self, src, dst, edge_index):
        out = super().forward((src, dst), edge_index)
        return self.last(out.relu()) if len(dst) else None


class Deeper(Relation):
    def forward(self, x, edge_index):
        return x + super().forward(x, x, edge_index)


class Named:
    """A mixin that has nothing to do with layers."""

    label = "named"

    def __init__(self, *args, label="?", **kwargs):
        super().__init__(*args, **kwargs)
        self.text = label


class Mixed(Named, pygnn.GATv2Conv, abc.ABC):
    def extra_repr(self):
        return self.text

    @functools.lru_cache  # noqa: B019
    def helper(self):
        return 2

    def forward(self, *args, **kwargs):
        return self.helper() * super().forward(*args, **kwargs)


class Plain(pygnn.GATConv):
    pass


def edges():
    return torch.randint(N, (2, 150))


CASES = {
    "own constructor": (lambda: Relation(8, 8, 2), lambda m, x, e: m(x, x, e)),
    "pair of sizes": (lambda: Relation((8, 8), 8, 2), lambda m, x, e: m(x, x[:20], e % 20)),
    "two levels": (lambda: Deeper(8, 8, 2), lambda m, x, e: m(x, e)),
    "mixin": (lambda: Mixed(8, 4, heads=2, label="a"), lambda m, x, e: m(x, e)),
    "nothing": (lambda: Plain(8, 4, heads=2), lambda m, x, e: m(x, e)),
}
LAYERS = pytest.mark.parametrize("build, call", CASES.values(), ids=CASES)


def gradients(module, call, x, edge_index):
    x = x.clone().requires_grad_()
    out = call(module, x, edge_index)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *module.parameters()])]


@LAYERS
def test_same_results_and_fused(build, call):
    module, x, edge_index = build().double(), torch.randn(N, 8, dtype=torch.float64), edges()
    cls, names = type(module), list(module.state_dict())
    expected = gradients(module, call, x, edge_index)
    report = dfgnn.accelerate(module)
    assert [y.before for y in report.replaced] == [cls] and not report.kept
    assert "the same on dfgnn.nn.pyg." in str(report)
    assert isinstance(module, cls) and isinstance(module, report.replaced[0].after)
    assert list(module.state_dict()) == names and type(module).__name__ == cls.__name__
    ours = next(base for base in type(module).__mro__ if base.__module__.startswith("dfgnn.nn.pyg."))
    assert isinstance(module, ours)
    torch.testing.assert_close(gradients(module, call, x, edge_index), expected)
    assert dfgnn.restore(module) == [""] and type(module) is cls


def test_the_fused_forward_is_what_runs(monkeypatch):
    from dfgnn.nn.pyg import TransformerConv

    calls, forward = [], TransformerConv.forward
    monkeypatch.setattr(
        TransformerConv, "forward", lambda self, *a, **k: calls.append(1) or forward(self, *a, **k)
    )
    module = Deeper(8, 8, 2)
    dfgnn.accelerate(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error", dfgnn.nn.FallbackWarning)
        module(torch.randn(N, 8), edges())
    assert calls == [1]


def test_one_class_for_a_pair():
    model = nn.ModuleList([Plain(8, 4), Plain(8, 4), Deeper(8, 8, 2)])
    dfgnn.accelerate(model)
    other = Plain(3, 2)
    dfgnn.accelerate(other)
    assert type(model[0]) is type(model[1]) is type(other) is not type(model[2])
    report = dfgnn.accelerate(model)
    assert not report.replaced and {kept.reason for kept in report.kept} == {"is dfgnn's already"}


@LAYERS
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy])
def test_copies(build, call, duplicate):
    module, x, edge_index = nn.Sequential(build()), torch.randn(N, 8), edges()
    cls = type(module[0])
    dfgnn.accelerate(module)
    made = type(module[0])
    again = duplicate(module)
    assert type(again[0]) is made
    torch.testing.assert_close(call(again[0], x, edge_index), call(module[0], x, edge_index), rtol=0, atol=0)
    dfgnn.restore(again)
    assert type(again[0]) is cls


def test_a_pickle_makes_the_class_anew():
    module = nn.Sequential(Deeper(8, 8, 2))
    dfgnn.accelerate(module)
    data, x, edge_index = pickle.dumps(module), torch.randn(N, 8), edges()
    expected = module[0](x, edge_index)
    dfgnn.restore(module)
    gc.collect()
    again = pickle.loads(data)
    assert type(again[0]).__mro__[1] is Deeper
    torch.testing.assert_close(again[0](x, edge_index), expected, rtol=0, atol=0)


def test_compiled():
    module, x, edge_index = Deeper(8, 8, 2), torch.randn(N, 8), edges()
    expected = module(x, edge_index)
    dfgnn.accelerate(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, edge_index), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["message", "aggregate", "update", "propagate", "edge_updater", "edge_update", "message_and_aggregate",
     "_check_input", "__init_subclass__", "__reduce__", "explain_message"],
)  # fmt: skip
def test_what_is_refused(name):
    cls = type("Own", (pygnn.TransformerConv,), {"__module__": __name__})
    module = cls(8, 4, heads=2)
    setattr(cls, name, lambda self, *args, **kwargs: None)
    report = dfgnn.accelerate(module)
    assert type(module) is cls and not report.replaced
    assert "TransformerConv" in report.kept[0].reason and name in report.kept[0].reason


class Alone(pygnn.GATConv):
    def forward(self, x, edge_index):
        return pygnn.GATConv.forward(self, x, edge_index)


class Meta(type):
    pass


class OfMeta(pygnn.GATConv, metaclass=Meta):
    pass


class Helper(pygnn.GATConv):
    def _heads(self):
        return 3


class Attribute(pygnn.GATConv):
    def __init__(self, *args):
        super().__init__(*args)
        self.attention = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "cls, words",
    [
        (Alone, "the forward of Alone does not call super().forward"),
        (OfMeta, "metaclass is Meta"),
        (Helper, "overrides _heads"),
        (Attribute, "an attribute attention"),
        (functools.partial(Plain, aggr="max"), "aggr='max'"),
    ],
)
def test_more_that_is_refused(cls, words):
    module = cls(8, 4)
    before = type(module)
    report = dfgnn.accelerate(module)
    assert type(module) is before and words in report.kept[0].reason


def test_on_the_instance_and_later():
    module = Plain(8, 4)
    module.forward = lambda x, edge_index: x
    assert "on the instance" in dfgnn.accelerate(module).kept[0].reason
    module, x, edge_index = Plain(8, 4), torch.randn(N, 8), edges()
    expected = module(x, edge_index)
    dfgnn.accelerate(module)
    module.register_message_forward_hook(lambda *_: None)
    with pytest.warns(dfgnn.nn.FallbackWarning, match="Plain runs torch_geometric's own forward"):
        torch.testing.assert_close(module(x, edge_index), expected)


def test_script():
    """TorchScript compiles an instance of the original subclass, not of the accelerated one."""
    module, x, edge_index = Plain(8, 4), torch.randn(N, 8), edges()
    expected = module(x, edge_index)
    dfgnn.accelerate(module)
    plain = module.__prepare_scriptable__()
    assert type(plain) is Plain and torch.equal(plain(x, edge_index), expected)


# ---- DGL -------------------------------------------------------------------------------------------------


def test_of_dgl():
    dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")

    class Wrapped(dgl.nn.GATConv):
        def __init__(self, size):
            super().__init__(size, 4, 2, allow_zero_in_degree=True)
            self.num_heads = 2  # dfgnn's layer has a property of this name with the same value: no conflict

        def forward(self, graph, feat):
            return super().forward(graph, feat).flatten(1)

    class Other(dgl.nn.GATConv):
        def __init__(self, size):
            super().__init__(size, 4, 2)
            self.num_heads = 3

    module, g, x = Wrapped(8), dgl.graph(tuple(edges())), torch.randn(N, 8)
    g.add_nodes(N - g.num_nodes())
    expected = module(g, x)
    report = dfgnn.accelerate(module)
    assert report.replaced and "the same on dfgnn.nn.dgl.GATConv" in str(report)
    torch.testing.assert_close(module(g, x), expected)
    module(dfgnn.Graph.from_dgl(g), x)  # DGL's own forward could not take a dfgnn.Graph
    assert type(copy.deepcopy(module)) is type(module)
    dfgnn.restore(module)
    assert type(module) is Wrapped
    assert "attribute num_heads" in dfgnn.accelerate(Other(8)).kept[0].reason
