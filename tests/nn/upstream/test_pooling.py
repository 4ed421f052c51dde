"""GlobalAttentionPooling computes what DGL's does."""

import copy

import pytest
import torch

import dfgnn
from dfgnn.nn.dgl import GlobalAttentionPooling

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")


def step(layer, graph, x, **options):
    x = x.clone().requires_grad_()
    out = layer(graph, x, **options)
    outs = out if isinstance(out, tuple) else (out,)
    wanted = [x, *layer.parameters()]
    return [*outs, *torch.autograd.grad(sum(o.sin().sum() for o in outs), wanted)]


def graphs(sizes):
    return dgl.batch([dgl.rand_graph(n, n) for n in sizes])


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("sizes", [[5, 1, 8], [7], [3, 3]])
def test_same_as_theirs(sizes, features, asked):
    torch.manual_seed(1)
    nn = torch.nn.Linear(6, 4) if features else None
    theirs = dgl.nn.GlobalAttentionPooling(torch.nn.Linear(6, 1), nn).double()
    ours = copy.deepcopy(theirs)
    assert [x.after for x in dfgnn.accelerate(ours).replaced] == [GlobalAttentionPooling]
    g = graphs(sizes) if len(sizes) > 1 else dgl.rand_graph(sizes[0], 9)
    x = torch.randn(sum(sizes), 6, dtype=torch.float64)
    for _ in range(2):
        found, expected = (step(layer, g, x, get_attention=asked) for layer in (ours, theirs))
        torch.testing.assert_close(found, expected)
    assert ours.state_dict().keys() == theirs.state_dict().keys() and repr(ours) == repr(theirs)
    assert isinstance(ours, dgl.nn.GlobalAttentionPooling)


def test_a_graph_of_ours_is_one_graph():
    layer = GlobalAttentionPooling(torch.nn.Linear(6, 1))
    graph = dfgnn.Graph.from_edge_index(torch.randint(9, (2, 20)), 9)
    x = torch.randn(9, 6)
    expected = (layer.gate_nn(x).softmax(0) * x).sum(0, keepdim=True)
    torch.testing.assert_close(layer(graph, x), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(graph, x), expected)


def test_errors():
    layer, g = GlobalAttentionPooling(torch.nn.Linear(6, 1)), graphs([4, 5])
    with pytest.raises(ValueError, match="feat: expected 9 rows"):
        layer(g, torch.randn(8, 6))
    with pytest.raises(TypeError, match="graph: expected a DGLGraph or a dfgnn.Graph, got int"):
        layer(3, torch.randn(8, 6))
    with pytest.raises(ValueError, match=r"gate_nn: expected a result of \[9, 1\]"):
        GlobalAttentionPooling(torch.nn.Linear(6, 2))(g, torch.randn(9, 6))
