"""HEATConv, GeneralConv and FAConv beside torch_geometric's: edges in the message, unnormalised scores."""

import copy

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
    run,
    sparse_forms,
    torch_geometric,
)

import dfgnn
from dfgnn.nn import FallbackWarning, pyg

nn = torch_geometric.nn
N, E = 50, 400  # of the graph "random"


def heat_inputs(graph="random", dtype=torch.float64):
    edge_index = edges(graph)
    num_nodes, num_edges = int(edge_index.max()) + 2, edge_index.shape[1]
    kinds = torch.randint(3, (num_nodes,)), torch.randint(4, (num_edges,))
    return features(num_nodes, 9, dtype=dtype), edge_index, *kinds, features(num_edges, 6, dtype=dtype)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("root_weight", [True, False])
def test_heat(heads, concat, root_weight):
    options = dict(heads=heads, concat=concat, root_weight=root_weight, bias=concat)
    theirs, ours = pair(nn.HEATConv, pyg.HEATConv, 9, 5, 3, 4, 7, 6, 2, **options)
    for graph in ("random", "isolated", "duplicates"):
        compare(theirs, ours, *heat_inputs(graph))
    compare(theirs, accelerated(theirs), *heat_inputs())
    theirs, ours = pair(nn.HEATConv, pyg.HEATConv, 9, 5, 3, 4, 7, 6, 2, dtype=torch.float32, **options)
    compare(theirs, ours, *heat_inputs(dtype=torch.float32))


def test_heat_dropout_and_errors(monkeypatch):
    theirs, ours = pair(nn.HEATConv, pyg.HEATConv, 9, 5, 3, 4, 7, 6, 2, heads=2, dropout=0.4)
    inject_dropout(monkeypatch, ours, E, 2)
    compare(theirs, ours, *heat_inputs())
    *args, _ = heat_inputs()
    with pytest.raises(ValueError, match="edge_attr: expected"):
        ours(*args, None)
    ours.att.register_forward_hook(lambda *a: None)
    with pytest.warns(FallbackWarning, match="att or lin"):
        ours(*heat_inputs())


GENERAL = [
    {},
    {"in_edge_channels": 3},
    {"directed_msg": False},
    {"in_edge_channels": 3, "directed_msg": False, "bias": False},
    {"attention_type": "dot_product"},
    {"skip_linear": True, "l2_normalize": True, "in_edge_channels": 7},
]


@pytest.mark.parametrize("options", GENERAL, ids=str)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("graph", ["random", "isolated", "fewer_destinations"])
def test_general(options, heads, graph):
    channels = (9, 6) if graph == "fewer_destinations" and "attention_type" not in options else (9, 9)
    if not options.get("directed_msg", True):
        channels = (9, 9)
    theirs, ours = pair(nn.GeneralConv, pyg.GeneralConv, channels, 5, heads=heads, attention=True, **options)
    edge_index = edges(graph)
    sizes = (80, 30) if graph == "fewer_destinations" else (int(edge_index.max()) + 2,) * 2
    x = tuple(features(n, k) for n, k in zip(sizes, channels))
    args = x, edge_index
    if "in_edge_channels" in options:
        compare(theirs, ours, *args)  # without attributes
        args += (features(edge_index.shape[1], options["in_edge_channels"]),)
    compare(theirs, ours, *args)
    compare(theirs, accelerated(theirs), *args)
    low = pair(
        nn.GeneralConv,
        pyg.GeneralConv,
        channels,
        5,
        heads=heads,
        attention=True,
        dtype=torch.float32,
        **options,
    )
    compare(*low, tuple(t.float() for t in x), edge_index, *(t.float() for t in args[2:]))


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(attention=False), "attention=False"),
        (dict(attention=True, attention_type="dot_product", in_edge_channels=3), "dot_product"),
        (dict(attention=True, attention_type="dot_product", directed_msg=False), "dot_product"),
    ],
)
def test_general_falls_back(options, reason):
    theirs, ours = pair(nn.GeneralConv, pyg.GeneralConv, 9, 5, **options)
    args = (features(N, 9), edges()) + ((features(E, 3),) if "in_edge_channels" in options else ())
    with pytest.warns(FallbackWarning, match=reason):
        found = run(ours, *args)
    assert_same(found, run(theirs, *args), 0)
    assert not dfgnn.accelerate(theirs).replaced


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"eps": 0.0}, {"cached": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fa(options, dtype):
    theirs, ours = pair(nn.FAConv, pyg.FAConv, 9, dtype=dtype, **options)
    for graph in ("random",) if "cached" in options else ("random", "isolated", "self_loops"):
        edge_index = edges(graph)
        num_nodes = int(edge_index.max()) + 2
        args = features(num_nodes, 9, dtype=dtype), features(num_nodes, 9, dtype=dtype), edge_index
        compare(theirs, ours, *args)
        compare(theirs, ours, *args, None, True)
        assert torch.equal(ours(*args), ours(*args))
        if "cached" not in options and dtype == torch.float64:
            compiled = copy.deepcopy(ours)
            compiled.compile(backend="aot_eager", fullgraph=True)
            compare(theirs, compiled, *args)
    compare(theirs, accelerated(theirs), *args)


def test_fa_with_weights_and_sparse_edges():
    theirs, ours = pair(nn.FAConv, pyg.FAConv, 9, normalize=False)
    x = features(N, 9), features(N, 9)
    compare(theirs, ours, *x, edges(), features(E))
    with pytest.raises(ValueError, match="edge_weight: expected a tensor"):
        ours(*x, edges())
    theirs, ours = pair(nn.FAConv, pyg.FAConv, 9, dropout=1.0)
    compare(theirs, ours, *x, edges())
    with pytest.raises(ValueError, match="edge_weight: expected None"):
        ours(*x, edges(), features(E))
    matrix = sparse_forms(torch.unique(edges(), dim=1), N, N)["coo"].double()
    theirs, ours = pair(nn.FAConv, pyg.FAConv, 9, normalize=False)
    with pytest.warns(FallbackWarning, match="sparse tensor"):
        torch.testing.assert_close(ours(*x, matrix, matrix.values()), theirs(*x, matrix, matrix.values()))
