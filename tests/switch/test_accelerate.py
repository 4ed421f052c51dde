"""accelerate and restore: the same model, the same parameters and the same numbers, through dfgnn."""

import copy
import pickle

import pytest
import torch
from torch import nn

import dfgnn

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
pyg = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
import dgl.nn.pytorch as dglnn  # noqa: E402
import torch_geometric.nn as pygnn  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N = 40


def edges():
    """Random edges, and a loop at every node."""
    loops = torch.arange(N)
    return torch.cat([torch.randint(N, (2, 200)), loops.expand(2, N)], 1)


class DGLModel(nn.Module):
    """Every kind of layer of DGL that works on a plain graph."""

    def __init__(self):
        super().__init__()
        self.first = dglnn.GATConv(6, 4, 2, residual=True, activation=nn.functional.elu)
        self.second = nn.ModuleList([dglnn.GATv2Conv(8, 4, 2, residual=True), dglnn.DotGatConv(8, 4, 2)])
        self.third = dglnn.AGNNConv()
        self.egat = dglnn.EGATConv(8, 3, 4, 5, 2)
        self.edgegat = dglnn.EdgeGATConv(8, 10, 4, 2)
        self.hgt = dglnn.HGTConv(8, 4, 2, 3, 4, dropout=0.0)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)

    def forward(self, g, x, e, ntype, etype):
        h = self.norm(self.first(g, x).flatten(1))
        for layer in self.second:
            h = torch.tanh(layer(g, h).flatten(1))
        h = self.third(g, h)
        out, e = self.egat(g, h, e)
        h = torch.tanh(self.edgegat(g, h + out.flatten(1), e.flatten(1)).flatten(1))
        return self.out(self.hgt(g, h, ntype, etype))


def dgl_inputs():
    g = dgl.graph(tuple(edges()))
    g.edata["etype"] = torch.randint(4, (g.num_edges(),))
    return g, torch.randn(N, 6), torch.randn(g.num_edges(), 3), torch.randint(3, (N,)), g.edata["etype"]


class PyGModel(nn.Module):
    """Every kind of layer of torch_geometric that works on a plain graph."""

    def __init__(self):
        super().__init__()
        self.first = pygnn.GATConv(6, 4, 2, edge_dim=3, residual=True)
        self.second = nn.ModuleList(
            [pygnn.GATv2Conv(8, 4, 2, edge_dim=3), pygnn.TransformerConv(8, 4, 2, edge_dim=3, beta=True)]
        )
        self.third = pygnn.AGNNConv()
        self.supergat = pygnn.SuperGATConv(8, 4, 2, attention_type="SD")
        self.rgat = pygnn.RGATConv(8, 8, 4, heads=1, edge_dim=3)
        self.norm = pygnn.BatchNorm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x, edge_index, edge_attr, etype):
        h = self.norm(self.first(x, edge_index, edge_attr))
        for layer in self.second:
            h = torch.tanh(layer(h, edge_index, edge_attr))
        h = self.third(h, edge_index)
        h = torch.tanh(self.supergat(h, edge_index))
        return self.out(self.rgat(h, edge_index, etype, edge_attr))


def pyg_inputs():
    edge_index = edges()
    num_edges = edge_index.shape[1]
    return torch.randn(N, 6), edge_index, torch.randn(num_edges, 3), torch.randint(4, (num_edges,))


MODELS = pytest.mark.parametrize(
    "build, inputs", [(DGLModel, dgl_inputs), (PyGModel, pyg_inputs)], ids=["dgl", "pyg"]
)
NUM_LAYERS = {DGLModel: 7, PyGModel: 6}


# ---- the model stays what it is --------------------------------------------------------------------------


@MODELS
def test_nothing_but_classes_changes(build, inputs):
    model, args = build(), inputs()
    model.eval()
    model.first.train()
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append("forward"))
    model.third.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.first._forward_hooks_before = dict(model.first._forward_hooks)
    before = {
        "parameters": [(name, id(p)) for name, p in model.named_parameters()],
        "buffers": [(name, id(p)) for name, p in model.named_buffers()],
        "state": list(model.state_dict()),
        "training": [m.training for m in model.modules()],
        "modules": [(name, id(m)) for name, m in model.named_modules()],
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    classes = [type(m) for m in model.modules()]
    state = [dict(vars(m)) for m in model.modules()]
    dfgnn.accelerate(model)
    assert before["parameters"] == [(name, id(p)) for name, p in model.named_parameters()]
    assert before["buffers"] == [(name, id(p)) for name, p in model.named_buffers()]
    assert before["state"] == list(model.state_dict())
    assert before["training"] == [m.training for m in model.modules()]
    assert before["modules"] == [(name, id(m)) for name, m in model.named_modules()]
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes))
    # The optimizer from before moves the parameters that the layers use.
    model(*args).sum().backward()
    first = model(*args).detach()
    optimizer.step()
    assert not torch.equal(first, model(*args)) and {"forward", "backward"} <= set(calls)
    names = dfgnn.restore(model)
    assert len(names) == NUM_LAYERS[build]
    assert [type(m) for m in model.modules()] == classes
    for module, attributes in zip(model.modules(), state):
        assert vars(module).keys() == attributes.keys()


@MODELS
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
def test_same_outputs_and_gradients(build, inputs, dtype, tolerance):
    model, args = build().to(dtype), inputs()
    args = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    found = []
    for step in (lambda _: None, dfgnn.accelerate, dfgnn.restore):
        step(model)
        model.zero_grad()
        out = model(*args)
        (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
        found.append({"out": out.detach()} | {name: p.grad for name, p in model.named_parameters()})
    expected, actual, restored = found
    for name, x in expected.items():
        if x is None:  # a parameter that the layer has and does not use
            assert actual[name] is None or actual[name].eq(0).all()
            continue
        assert (actual[name] - x).abs().max() <= tolerance * max(1, x.abs().max().item()), name
        assert torch.equal(restored[name], x) or (restored[name] - x).abs().max() < tolerance, name


# ---- what is found ---------------------------------------------------------------------------------------


class OwnGAT(dglnn.GATConv):
    def reset_parameters(self):
        super().reset_parameters()

    def set_allow_zero_in_degree(self, value):
        super().set_allow_zero_in_degree(not value)


class OwnTransformer(pygnn.TransformerConv):
    def message(self, *args, **kwargs):
        return 2 * super().message(*args, **kwargs)


class OwnConv(pygnn.MessagePassing):
    pass


def test_subclasses_and_unknown_layers_are_left_alone_and_named():
    own_forward = dglnn.GATConv(6, 4, 2)
    own_forward.forward = lambda g, x: x
    model = nn.ModuleDict(
        {
            "own_gat": OwnGAT(6, 4, 2),
            "own_transformer": OwnTransformer(6, 4, 2),
            "own_conv": OwnConv(),
            "gcn": pygnn.GCNConv(6, 4),
            "graph_conv": dglnn.GraphConv(6, 4),
            "own_forward": own_forward,
            "ours": dfgnn.nn.dgl.GATConv(6, 4, 2),
            "linear": nn.Linear(6, 4),
            "gat": pygnn.GATConv(6, 4, 2),
        }
    )
    classes = [type(m) for m in model.modules()]
    report = dfgnn.accelerate(model)
    assert [x.name for x in report.replaced] == ["gat"]
    reasons = {x.name: x.reason for x in report.kept}
    assert list(reasons) == [
        "own_gat", "own_transformer", "own_conv", "gcn", "graph_conv", "own_forward", "ours"
    ]  # fmt: skip
    assert all("subclass of" in reasons[name] for name in ("own_gat", "own_transformer"))
    assert all("no such layer" in reasons[name] for name in ("own_conv", "gcn", "graph_conv"))
    assert "on the instance" in reasons["own_forward"] and "already" in reasons["ours"]
    changed = {name: type(m) for (name, m), cls in zip(model.named_modules(), classes) if type(m) is not cls}
    assert list(changed) == ["gat"]
    text = str(report)
    for entry in report.kept:
        assert entry.name in text and entry.cls.__name__ in text and entry.reason in text
    assert dfgnn.restore(model) == ["gat"] and [type(m) for m in model.modules()] == classes


def test_twice():
    model = DGLModel()
    dfgnn.accelerate(model)
    classes = [type(m) for m in model.modules()]
    report = dfgnn.accelerate(model)
    assert report.replaced == [] and {x.reason for x in report.kept} == {"is dfgnn's already"}
    assert [type(m) for m in model.modules()] == classes
    assert len(dfgnn.restore(model)) == 7 and dfgnn.restore(model) == []
    assert type(model.first) is dglnn.GATConv


def test_restore_leaves_layers_that_were_made_by_name():
    from dfgnn.nn.pyg import GATConv

    model = nn.Sequential(GATConv(3, 4), pygnn.GATConv(4, 4))
    dfgnn.accelerate(model)
    assert dfgnn.restore(model) == ["1"]
    assert type(model[0]) is GATConv and type(model[1]) is pygnn.GATConv


def test_report():
    many = nn.ModuleList([dglnn.GATConv(2, 2, 1) for _ in range(40)] + [pygnn.GCNConv(2, 2)])
    report = dfgnn.accelerate(many)
    lines = str(report).splitlines()
    assert len(lines) == 4 and lines[0] == "40 replaced" and lines[2] == "1 not replaced"
    assert "0, 1, 2, 3, 4, 5 and 34 more" in lines[1]
    assert "dgl.nn.pytorch.conv.gatconv.GATConv -> dfgnn.nn.dgl.GATConv" in lines[1]
    first = report.replaced[0]
    assert (first.name, first.before, first.after) == ("0", dglnn.GATConv, type(many[0]))
    assert "40" in repr(report)
    assert str(dfgnn.accelerate(nn.Linear(2, 2))) == "no layer of DGL or torch_geometric found"


# ---- inside the libraries' containers --------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = pygnn.GATConv((-1, -1), 4, 2, add_self_loops=False)
        self.second = pygnn.GATv2Conv((-1, -1), 6, add_self_loops=False)
        self.third = pygnn.TransformerConv((-1, -1), 3)

    def forward(self, x, edge_index):
        x = self.second(self.first(x, edge_index).relu(), edge_index).relu()
        return self.third(x, edge_index)


def hetero():
    x = {"a": torch.randn(6, 5), "b": torch.randn(8, 7)}
    edge_index = {
        ("a", "to", "b"): torch.randint(6, (2, 20)),
        ("b", "back", "a"): torch.randint(6, (2, 20)),
        ("b", "in", "b"): torch.randint(8, (2, 15)),
    }
    return x, edge_index, (list(x), list(edge_index))


@pytest.mark.parametrize("before", [False, True], ids=["to_hetero first", "accelerate first"])
def test_to_hetero(before):
    x, edge_index, metadata = hetero()
    model = pygnn.to_hetero(Small(), metadata)
    expected = model(x, edge_index)
    if before:
        small = Small()
        assert len(dfgnn.accelerate(small).replaced) == 3
        other = pygnn.to_hetero(small, metadata)
        other(x, edge_index)
        other.load_state_dict(model.state_dict())
    else:
        other = model
        assert len(dfgnn.accelerate(other).replaced) == 9
    for key, out in other(x, edge_index).items():
        torch.testing.assert_close(out, expected[key])


def test_hetero_conv_and_hgt():
    x, edge_index, metadata = hetero()
    x["b"] = torch.randn(8, 5)
    layers = {key: pygnn.GATv2Conv(5, 8, add_self_loops=False) for key in edge_index}
    model = nn.ModuleList([pygnn.HeteroConv(layers), pygnn.HGTConv(8, 4, metadata, 2)])

    def run():
        h = x
        for layer in model:
            h = layer(h, edge_index)
        return h

    expected = run()
    assert len(dfgnn.accelerate(model).replaced) == 4
    for key, out in run().items():
        torch.testing.assert_close(out, expected[key])


# ---- copies and pickles ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [lambda: dglnn.GATConv(3, 4, 2), lambda: pygnn.GATConv(3, 4, 2)])
def test_a_pickle_loads_in_a_new_process(layer, tmp_path, plain_python):
    """The classes are found by name, with nothing imported before."""
    model = nn.Sequential(layer())
    dfgnn.accelerate(model)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    code = "import pickle, dfgnn; m = pickle.load(open('model.pickle', 'rb')); print(dfgnn.restore(m))"
    assert plain_python(code, cwd=tmp_path).stdout.strip() == "['0']"


def test_after_restore_a_pickle_knows_nothing_of_dfgnn():
    model = nn.Sequential(dglnn.GATConv(3, 4, 2), pygnn.GATConv(3, 4, 2))
    before = pickle.dumps(model)
    dfgnn.accelerate(model)
    assert b"dfgnn" in pickle.dumps(model)
    dfgnn.restore(model)
    assert b"dfgnn" not in pickle.dumps(model) and len(pickle.dumps(model)) == len(before)


def test_nothing_is_imported(plain_python):
    code = (
        "import sys, torch, dfgnn; print(dfgnn.accelerate(torch.nn.Linear(2, 2)));"
        "dfgnn.restore(torch.nn.Linear(2, 2)); assert not {'dgl', 'torch_geometric'} & set(sys.modules)"
    )
    plain_python(code)


def test_the_report_is_not_the_model():
    """`model = accelerate(model)` is a mistake that is seen late; both its errors say what to do."""
    report = dfgnn.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="go on with the model"):
        report(torch.ones(2))
    with pytest.raises(AttributeError, match="go on with the model.*'parameters'"):
        report.parameters()
    assert not hasattr(report, "train") and str(copy.deepcopy(report)) == str(report)
