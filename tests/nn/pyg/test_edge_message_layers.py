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


def test_general_without_the_attributes_that_it_was_made_for():
    theirs, ours = pair(nn.GeneralConv, pyg.GeneralConv, 9, 5, 3, heads=2, attention=True)
    compare(theirs, ours, features(N, 9), edges())


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
