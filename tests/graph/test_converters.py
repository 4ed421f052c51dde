"""convert_state_dict: DGL's layers and torch_geometric's with each other's weights compute the same."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import dfgnn

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
pyg = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
import dgl.nn.pytorch as dglnn  # noqa: E402
import torch_geometric.nn as pygnn  # noqa: E402

N_SRC, N_DST = 25, 20
LAYERS = pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])


def random_edges(bipartite):
    """Random edges, at least one into every destination, as DGL's layers require it."""
    num_src = N_SRC if bipartite else N_DST
    src = torch.randint(num_src, (80,))
    dst = torch.cat([torch.arange(N_DST), torch.randint(N_DST, (80 - N_DST,))])
    return src, dst


def with_values(layer):
    """The layer with random parameters: biases that start at zero would hide where the converter puts
    them."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.double().eval()


def pair(name, in_feats, residual, bias):
    kwargs = {"residual": residual, "bias": bias}
    ours = getattr(dglnn, name)(in_feats, 4, 3, allow_zero_in_degree=True, **kwargs)
    theirs = getattr(pygnn, name)(in_feats, 4, 3, add_self_loops=False, **kwargs)
    return with_values(ours), with_values(theirs)


def outputs(of_dgl, of_pyg, in_feats):
    """Outputs and attention of both on the same graph."""
    bipartite = isinstance(in_feats, tuple)
    src, dst = random_edges(bipartite)
    sizes = in_feats if bipartite else (in_feats, in_feats)
    feat = torch.randn(N_SRC, sizes[0]).double(), torch.randn(N_DST, sizes[1]).double()
    if bipartite:
        g = dgl.heterograph({("a", "to", "b"): (src, dst)}, num_nodes_dict={"a": N_SRC, "b": N_DST})
    else:
        g, feat = dgl.graph((src, dst), num_nodes=N_DST), feat[1]
    one, attention = of_dgl(g, feat, get_attention=True)
    other, (_, weights) = of_pyg(feat, torch.stack([src, dst]), return_attention_weights=True)
    return (one.flatten(1), attention.squeeze(-1)), (other, weights)


@LAYERS
@pytest.mark.parametrize("in_feats", [6, (6, 7)], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("to", ["pyg", "dgl"])
def test_same_results(name, in_feats, residual, bias, to):
    of_dgl, of_pyg = pair(name, in_feats, residual, bias)
    if to == "pyg":
        of_pyg.load_state_dict(dfgnn.convert_state_dict(of_dgl.state_dict(), to))
    else:
        of_dgl.load_state_dict(dfgnn.convert_state_dict(of_pyg.state_dict(), to))
    torch.testing.assert_close(*outputs(of_dgl, of_pyg, in_feats), rtol=0, atol=1e-6)


@LAYERS
@pytest.mark.parametrize("bias", [False, True])
def test_there_and_back(name, bias):
    for residual in (False, True):
        state = pair(name, 6, residual, bias)[0].state_dict()
        back = dfgnn.convert_state_dict(dfgnn.convert_state_dict(state, "pyg"), "dgl")
        assert state.keys() == back.keys() and all(torch.equal(x, back[key]) for key, x in state.items())


@LAYERS
def test_identity_residual(name):
    """DGL's residual has no weight where sizes are equal; torch_geometric's always has one."""
    of_dgl, of_pyg = pair(name, 12, True, True)
    with pytest.raises(ValueError, match="learned residual of equal sizes"):
        dfgnn.convert_state_dict(of_pyg.state_dict(), "dgl")
    nn.init.eye_(of_pyg.res.weight)
    of_dgl.load_state_dict(dfgnn.convert_state_dict(of_pyg.state_dict(), "dgl"))
    torch.testing.assert_close(*outputs(of_dgl, of_pyg, 12), rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"Missing key.*res\.weight"):
        of_pyg.load_state_dict(dfgnn.convert_state_dict(of_dgl.state_dict(), "pyg"))


def test_shared_weights():
    theirs = with_values(pygnn.GATv2Conv(6, 4, 3, share_weights=True, add_self_loops=False))
    with pytest.raises(ValueError, match="share_weights and a bias"):
        dfgnn.convert_state_dict(theirs.state_dict(), "dgl")
    nn.init.zeros_(theirs.bias)
    ours = dglnn.GATv2Conv(6, 4, 3, share_weights=True).double()
    ours.load_state_dict(dfgnn.convert_state_dict(theirs.state_dict(), "dgl"))
    torch.testing.assert_close(*outputs(ours, theirs, 6), rtol=0, atol=1e-6)


class DGLModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.convs = nn.ModuleList([dglnn.GATConv(6, 4, 3, residual=True), dglnn.GATv2Conv(12, 4, 3)])
        self.norm = nn.BatchNorm1d(12)
        self.agnn = dglnn.AGNNConv(0.3)

    def forward(self, g, x):
        h = self.embed(x)
        for conv in self.convs:
            h = self.norm(conv(g, h).flatten(1))
        return self.agnn(g, h)


class PyGModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 6)
        first = pygnn.GATConv(6, 4, 3, residual=True, add_self_loops=False)
        self.convs = nn.ModuleList([first, pygnn.GATv2Conv(12, 4, 3, add_self_loops=False)])
        self.norm = nn.BatchNorm1d(12)
        self.agnn = pygnn.AGNNConv(add_self_loops=False)

    def forward(self, x, edge_index):
        h = self.embed(x)
        for conv in self.convs:
            h = self.norm(conv(h, edge_index))
        return self.agnn(h, edge_index)


@pytest.mark.parametrize("to", ["pyg", "dgl"])
@pytest.mark.parametrize("accelerated", [False, True])
def test_a_whole_model(to, accelerated):
    of_dgl, of_pyg = DGLModel(), PyGModel()
    source, target = (of_dgl, of_pyg) if to == "pyg" else (of_pyg, of_dgl)
    for name, parameter in source.named_parameters():
        if not name.startswith("norm"):
            nn.init.normal_(parameter, std=0.5)
    if accelerated:
        dfgnn.accelerate(source), dfgnn.accelerate(target)
    state = dfgnn.convert_state_dict(source.state_dict(), to)
    target.load_state_dict(state)
    assert state["embed.weight"].data_ptr() == source.embed.weight.data_ptr()
    assert state._metadata == source.state_dict()._metadata
    edge_index, x = torch.stack(random_edges(False)), torch.randn(N_DST, 5)
    one = of_dgl(dgl.graph(tuple(edge_index), num_nodes=N_DST), x)
    torch.testing.assert_close(one, of_pyg(x, edge_index), rtol=0, atol=1e-5)


@pytest.mark.parametrize("to", ["pyg", "dgl"])
@pytest.mark.parametrize("feature_net", [False, True])
def test_pooling(to, feature_net):
    """The pooling layer's networks may be of any depth, and the layer part of a model."""

    def networks():
        gate = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
        return gate, nn.Sequential(nn.Linear(6, 4)) if feature_net else None

    of_dgl = nn.ModuleDict({"pool": with_values(dglnn.GlobalAttentionPooling(*networks()))})
    of_pyg = nn.ModuleDict({"pool": with_values(pygnn.aggr.AttentionalAggregation(*networks()))})
    source, target = (of_dgl, of_pyg) if to == "pyg" else (of_pyg, of_dgl)
    target.load_state_dict(dfgnn.convert_state_dict(source.state_dict(), to))
    feat, sizes = torch.randn(12, 6).double(), [5, 7]
    g = dgl.batch([dgl.rand_graph(n, 2) for n in sizes])
    index = torch.arange(2).repeat_interleave(torch.tensor(sizes))
    torch.testing.assert_close(of_dgl["pool"](g, feat), of_pyg["pool"](feat, index))


def test_pooling_with_an_mlp():
    layer = pygnn.aggr.AttentionalAggregation(pygnn.MLP([6, 5, 1]))
    with pytest.raises(ValueError, match="an? AttentionalAggregation with an MLP, which has no counterpart"):
        dfgnn.convert_state_dict(layer.state_dict(), "dgl")


def test_prefixes_and_order():
    """Names of parameters are renamed at any depth, but only whole components between dots."""
    layer = dglnn.GATConv(2, 3, 1)
    state = OrderedDict()
    state["my_attn_l"] = torch.zeros(1)
    for key, value in layer.state_dict().items():
        state[f"net.0.gat.{key}"] = value
    state["net.0.fc.weight"] = torch.ones(1)
    state["other.attn_l"] = torch.zeros(2)
    state["step"] = 7
    assert list(dfgnn.convert_state_dict(state, "pyg")) == [
        "my_attn_l", "net.0.gat.att_src", "net.0.gat.att_dst", "net.0.gat.bias", "net.0.gat.lin.weight",
        "net.0.fc.weight", "other.attn_l", "step",
    ]  # fmt: skip
    assert list(state)[1] == "net.0.gat.attn_l"  # what was given is not changed


@pytest.mark.parametrize(
    "layer, to, message",
    [
        (lambda: dglnn.EdgeGATConv(3, 2, 4, 2), "pyg", "EdgeGATConv"),
        (lambda: dglnn.EGATConv(3, 2, 4, 4, 2), "pyg", "EGATConv"),
        (lambda: dglnn.HGTConv(4, 2, 2, 2, 3), "pyg", "HGTConv"),
        (lambda: pygnn.SuperGATConv(3, 4, 2), "dgl", "SuperGATConv"),
        (lambda: pygnn.models.attentive_fp.GATEConv(4, 4, 2), "dgl", "GATEConv"),
        (lambda: pygnn.FAConv(4), "dgl", "FAConv"),
        (lambda: pygnn.GeneralConv(3, 4, attention=True), "dgl", "GeneralConv"),
        (lambda: pygnn.HANConv(4, 4, (["a"], [("a", "b", "a")]), 2), "dgl", "HANConv"),
        (lambda: pygnn.HEATConv(3, 4, 2, 2, 3, 3, 3), "dgl", "HEATConv"),
        (lambda: pygnn.TransformerConv(3, 4, 2), "dgl", "TransformerConv"),
        (lambda: pygnn.RGATConv(3, 4, 2), "dgl", "RGATConv"),
        (lambda: pygnn.HGTConv(4, 4, (["a"], [("a", "b", "a")]), 2), "dgl", "HGTConv"),
        (lambda: pygnn.GATConv(3, 4, 2, edge_dim=2), "dgl", r"GATConv with (att_edge|lin_edge\.weight)"),
        (lambda: pygnn.GATv2Conv(3, 4, 2, edge_dim=2), "dgl", r"GATv2Conv with lin_edge\.weight"),
        (lambda: pygnn.GATConv(3, 4, 2, concat=False), "dgl", "GATConv with concat=False"),
        (lambda: pygnn.GATv2Conv(3, 4, 2, concat=False), "dgl", "GATv2Conv with concat=False"),
        (
            lambda: pygnn.GATConv(3, 4, 2, concat=False, residual=True, bias=False),
            "dgl",
            "GATConv with concat=False",
        ),
    ],
)
def test_no_counterpart(layer, to, message):
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "conv": layer()})
    with pytest.raises(ValueError, match=rf"state_dict: conv: (an? )?{message}, .*no counterpart"):
        dfgnn.convert_state_dict(model.state_dict(), to)


def test_errors():
    state = dglnn.GATConv(3, 4, 2).state_dict()
    for to in ("torch_geometric", "", None):
        with pytest.raises(ValueError, match="to: expected 'pyg', 'dgl' or 'dfgnn', got"):
            dfgnn.convert_state_dict(state, to)
    for one in (None, list(state), dglnn.GATConv(3, 4, 2)):
        with pytest.raises(TypeError, match="state_dict: expected a mapping, got"):
            dfgnn.convert_state_dict(one, "pyg")
    for one, to in ((state, "dgl"), ({}, "pyg"), (nn.Linear(2, 2).state_dict(), "pyg")):
        with pytest.raises(ValueError, match=f"expected a layer to convert to '{to}'"):
            dfgnn.convert_state_dict(one, to)
