"""Layers and aggregations that are a softmax in another form, beside torch_geometric's."""

import copy
import pickle

import pytest
import torch
from pyg_compare import (
    accelerated,
    assert_same,
    compare,
    edges,
    features,
    inject_dropout,
    pair,
    replace_their_dropout,
    run,
    sparse_forms,
    torch_geometric,
)

import dfgnn
from dfgnn.nn import FallbackWarning, pyg

nn = torch_geometric.nn
GATEConv = torch_geometric.nn.models.attentive_fp.GATEConv
N, E = 50, 400  # of the graph "random"


# ---- HANConv ---------------------------------------------------------------------------------------------

METADATA = (
    ["paper", "author", "place"],
    [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author")],
)


def heterogeneous(dtype=torch.float64):
    sizes = {"paper": 40, "author": 30, "place": 7}
    x = {t: features(n, k, dtype=dtype) for (t, n), k in zip(sizes.items(), (9, 6, 4))}
    ends = {
        e: torch.stack([torch.randint(sizes[e[0]], (150,)), torch.randint(sizes[e[2]], (150,))])
        for e in METADATA[1]
    }
    return x, ends


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_han(heads, asked, dtype):
    sizes = {"paper": 9, "author": 6, "place": 4}
    theirs, ours = pair(nn.HANConv, pyg.HANConv, sizes, 8, METADATA, heads=heads, dtype=dtype)
    x, ends = heterogeneous(dtype)
    compare(theirs, ours, x, ends, return_semantic_attention_weights=asked)
    assert ours(x, ends)["place"] is None
    compare(theirs, accelerated(theirs), x, ends)


def test_han_lazy_and_sparse():
    theirs, ours = pair(nn.HANConv, pyg.HANConv, {"paper": 9, "author": 6, "place": 4}, 8, METADATA, heads=2)
    x, ends = heterogeneous()
    ends = {e: torch.unique(i, dim=1) for e, i in ends.items()}
    sparse = {e: sparse_forms(i, len(x[e[0]]), len(x[e[2]]))["csr"].double() for e, i in ends.items()}
    compare(theirs, ours, x, ends, our_args=(x, sparse))
    for cls in (nn.HANConv, pyg.HANConv):
        torch.manual_seed(0)
        lazy = cls(-1, 8, METADATA, heads=2).double()
        found = run(lazy, x, ends)
        if cls is nn.HANConv:
            expected = found
    assert_same(found, expected, 1e-10)


def test_han_dropout(monkeypatch):
    metadata = (["n"], [("n", "to", "n")])
    theirs, ours = pair(nn.HANConv, pyg.HANConv, 9, 8, metadata, heads=2, dropout=0.4)
    inject_dropout(monkeypatch, ours, E, 2)
    compare(theirs, ours, {"n": features(N, 9)}, {("n", "to", "n"): edges()})


# ---- GATEConv --------------------------------------------------------------------------------------------


def test_gate_dropout(monkeypatch):
    theirs, ours = pair(GATEConv, pyg.GATEConv, 5, 5, 3, dropout=0.4)
    with pytest.raises(ValueError, match="edge_attr: expected"):
        ours(features(N, 5), edges(), None)
    inject_dropout(monkeypatch, ours, E, 1)
    replace_their_dropout(monkeypatch, ours, lambda x, p, training: x * mask_of(x, ours))
    compare(theirs, ours, features(N, 5), edges(), features(E, 3))


def mask_of(x, layer):
    return dfgnn.reference.dropout_mask(21, E, 1, layer.dropout).view(x.shape).to(x)


def test_attentive_fp():
    """The whole model, of GATEConv and GATConv."""
    theirs = nn.AttentiveFP(9, 16, 3, edge_dim=4, num_layers=3, num_timesteps=2).double()
    ours = copy.deepcopy(theirs)
    assert {x.after for x in dfgnn.accelerate(ours).replaced} == {pyg.GATEConv, pyg.GATConv}
    batch = torch.arange(N) // 10
    args = features(N, 9), edges(), features(E, 4), batch
    assert_same(run(ours, *args), run(theirs, *args), 1e-9)


# ---- GENConv and aggregations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"edge_dim": 3},
        {"edge_dim": 5},
        {"aggr": "softmax_sg", "t": 0.3, "edge_dim": 3},
        {"aggr": "softmax_sg"},
        {"learn_t": True, "t": 0.1, "bias": True, "norm": "layer"},
        {"learn_t": True, "msg_norm": True, "learn_msg_scale": True, "edge_dim": 3},
        {"aggr_kwargs": {"learn": True, "channels": 5}, "num_layers": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [9, 5, (9, 6), (5, 5)])
def test_gen(options, channels):
    theirs, ours = pair(nn.GENConv, pyg.GENConv, channels, 5, **options)
    x, edge_index = features(N, 9 if channels == 9 else 5), edges()
    if isinstance(channels, tuple):
        x, edge_index = (features(80, channels[0]), features(30, channels[1])), edges("fewer_destinations")
    args = x, edge_index
    if "edge_dim" in options:
        args += (features(edge_index.shape[1], options["edge_dim"]),)
    compare(theirs, ours, *args, tolerance=1e-9)
    compare(theirs, accelerated(theirs), *args, tolerance=1e-9)
    assert ours.state_dict().keys() == theirs.state_dict().keys() and repr(ours) == repr(theirs)
    other = pickle.loads(pickle.dumps(ours))
    assert_same(run(other.eval(), *args), run(ours.eval(), *args), 0)


def test_gen_without_destinations_and_errors():
    theirs, ours = pair(nn.GENConv, pyg.GENConv, (5, 5), 5)
    x, edge_index = features(80, 5), edges("fewer_destinations")
    compare(theirs, ours, (x, None), edge_index, None, (80, 30), tolerance=1e-9)
    with pytest.raises(ValueError, match="edge_attr: expected 5 columns"):
        ours((x, None), edge_index, features(edge_index.shape[1], 3), (80, 30))
    with pytest.warns(FallbackWarning, match="aggr='mean'"):
        pyg.GENConv(5, 5, aggr="mean").double()(x, torch.randint(80, (2, 9)))


GROUPS = {
    "sorted": torch.arange(40) // 7,
    "unsorted": torch.randint(9, (40,), generator=torch.Generator().manual_seed(0)),
    "one": torch.zeros(40, dtype=torch.int64),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("options", [{}, {"t": 0.3}, {"learn": True}, {"semi_grad": True}], ids=str)
def test_softmax_aggregation(groups, options):
    theirs, ours = nn.aggr.SoftmaxAggregation(**options), pyg.SoftmaxAggregation(**options)
    x = features(40, 6)
    for size in (None, 11):
        results = [run(module, x, groups, dim_size=size) for module in (ours, theirs)]
        assert_same(*results, 1e-6 if "learn" in options else 1e-10)


def test_softmax_aggregation_of_channels():
    options = dict(learn=True, channels=6)
    theirs, ours = nn.aggr.SoftmaxAggregation(**options), pyg.SoftmaxAggregation(**options)
    x = features(40, 6)
    for given in (dict(index=GROUPS["sorted"]), dict(ptr=torch.tensor([0, 3, 3, 20, 40]))):
        assert_same(run(ours, x, **given), run(theirs, x, **given), 1e-6)
    with pytest.warns(FallbackWarning, match="of 3"):
        three = features(40, 2, 6)
        plain = pyg.SoftmaxAggregation()
        expected = nn.aggr.SoftmaxAggregation()(three, GROUPS["sorted"], dim=0)
        torch.testing.assert_close(plain(three, GROUPS["sorted"], dim=0), expected)


@pytest.mark.parametrize("gates", [1, 6])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_attentional_aggregation(groups, gates):
    def make(cls):
        torch.manual_seed(0)
        gate, inner = torch.nn.Linear(9, gates), torch.nn.Sequential(torch.nn.Linear(9, 6), torch.nn.ReLU())
        return cls(gate, inner).double()

    theirs, ours = make(nn.aggr.AttentionalAggregation), make(pyg.AttentionalAggregation)
    x = features(40, 9)
    for size in (None, 11):
        results = [run(module, x, groups, dim_size=size) for module in (ours, theirs)]
        assert_same(*results, 1e-10)
    assert_same(run(accelerated(theirs), x, groups), run(theirs, x, groups), 1e-10)
    mlp = nn.MLP([9, 4, 1], norm="layer").double()
    theirs, ours = (cls(mlp) for cls in (nn.aggr.AttentionalAggregation, pyg.AttentionalAggregation))
    assert_same(run(ours, x, groups), run(theirs, x, groups), 1e-10)
    wide = pyg.AttentionalAggregation(torch.nn.Linear(9, 3)).double()
    with pytest.raises(ValueError, match="gate_nn: expected"):
        wide(x, groups)
