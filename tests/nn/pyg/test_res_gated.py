"""ResGatedGraphConv beside torch_geometric's: gates for each channel."""

import copy

import pytest
import torch
from covering import covered
from pyg_compare import assert_same, compare, edges, pair, run, torch_geometric

import dfgnn
from dfgnn.nn import pyg
from dfgnn.nn.whole import gated as _gated

nn = torch_geometric.nn
NAMES = "random", "isolated", "duplicates", "self_loops", "super_row", "mixed_degrees", "sorted"


def inputs(name="random", width=9, dtype=torch.float64, edge_dim=None):
    edge_index = edges(name)
    x = torch.randn(int(edge_index.max()) + 2, width, dtype=dtype)
    attr = () if edge_dim is None else (torch.randn(edge_index.shape[1], edge_dim, dtype=dtype),)
    return x, edge_index, *attr


def both(*args, **options):
    return pair(nn.ResGatedGraphConv, pyg.ResGatedGraphConv, *args, **options)


@pytest.fixture(params=[False, True], ids=["by rows", "by heads"])
def calls(request, monkeypatch):
    """A list with one element per forward pass of the fused layer; the test runs with the CPU's and the GPU's
    code path of it."""
    monkeypatch.setattr(_gated, "_by_heads", lambda x: request.param)
    found, layer = [], _gated._Gated.forward
    monkeypatch.setattr(_gated._Gated, "forward", lambda *args: found.append(1) or layer(*args))
    return found


@covered(
    aggr=["add", "mean"], root_weight=[True, False], bias=[True, False], dtype=[torch.float64, torch.float32]
)
def test_at_once(aggr, root_weight, bias, dtype, calls):
    theirs, ours = both(9, 5, aggr=aggr, root_weight=root_weight, bias=bias, dtype=dtype)
    for name in NAMES:
        compare(theirs, ours, *inputs(name, dtype=dtype))
    assert len(calls) == len(NAMES)
    accelerated = copy.deepcopy(theirs)
    assert dfgnn.accelerate(accelerated).replaced
    compare(theirs, accelerated, *inputs(dtype=dtype))
    x, edge_index = inputs(dtype=dtype)
    assert torch.equal(ours(x, edge_index), ours(x, edge_index))


def test_a_graph_of_fixed_capacity(calls):
    _, ours = both(9, 5, aggr="mean")
    graph = dfgnn.Graph.with_capacity(60, 500)
    for count in (400, 300):
        x, edge_index = inputs()
        x = torch.cat([x[:50], torch.full((10, 9), 3.0, dtype=x.dtype)])
        edge_index = edge_index[:, :count] % 50
        graph.copy_(edge_index, num_nodes=50)
        found = [run(ours, x, edges) for edges in (graph.edge_index, edge_index)]
        assert_same(*found, 1e-10)
    assert len(calls) == 4


def test_gradients_of_some_and_what_is_modified(calls):
    theirs, ours = both(9, 5, aggr="mean")
    x, edge_index = inputs()
    for layer in (theirs, ours):
        layer.lin_query.requires_grad_(False)
        layer.bias.requires_grad_(False)
    assert_same(run(ours, x, edge_index), run(theirs, x, edge_index), 1e-10)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    assert len(calls) == 2
