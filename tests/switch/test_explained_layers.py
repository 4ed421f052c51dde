"""Which path layers take: the walk of docs/architecture.md, and what leads away from it."""

import pytest
import torch
from torch import nn

import dfgnn

pytest.importorskip("torch_geometric")


@pytest.fixture
def inputs():
    return torch.randn(20, 16), torch.randint(20, (2, 60))


def made(name, *args, **kwargs):
    import dfgnn.nn.pyg

    return getattr(dfgnn.nn.pyg, name)(16, 4, *args, **kwargs)


def only(explanation):
    (call,) = explanation.calls
    return call


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_a_layer_as_it_is_made(name, inputs):
    """The call that the page follows: one autograd function for the whole layer."""
    call = only(dfgnn.explain(made(name, heads=2), *inputs))
    assert (call.path, call.what, call.declined) == ("layer", name, ())


def test_an_accelerated_model(inputs):
    from torch_geometric.nn import GAT

    model = GAT(16, 8, num_layers=3, heads=2)
    dfgnn.accelerate(model)
    assert [call.path for call in dfgnn.explain(model, *inputs).calls] == ["layer"] * 3


def test_operation_by_operation(inputs):
    """A projection with a hook: the layer calls the function, which takes the eager path."""
    layer = made("GATConv", heads=2)
    layer.lin.register_forward_hook(lambda *args: None)
    call = only(dfgnn.explain(layer, *inputs))
    assert call.path in ("short", "eager")
    assert dict(call.declined)["layer"].startswith("a projection is no plain linear module")


def test_the_library_s_own_forward(inputs):
    layer = made("GATConv", heads=2)
    layer.flow = "target_to_source"
    with pytest.warns(dfgnn.nn.FallbackWarning):
        call = only(dfgnn.explain(layer, *inputs))
    assert (call.path, call.what) == ("upstream", "GATConv")
    assert call.declined == (("fused", "flow='target_to_source'"),)


def test_a_compiled_layer(inputs):
    torch._dynamo.reset()
    explanation = dfgnn.explain(torch.compile(made("GATConv", heads=2)), *inputs)
    assert [call.path for call in explanation.calls] == ["traced"]


def test_layers_with_dgl_s_contract(inputs):
    x, edge_index = inputs
    graph = dfgnn.Graph.from_edge_index(edge_index, num_nodes=20).add_self_loops()
    call = only(dfgnn.explain(dfgnn.nn.dgl.GATConv(16, 4, 2), graph, x))
    assert (call.path, call.what) == ("layer", "GATConv")
    model = nn.Sequential()
    assert dfgnn.explain(model, x).calls == ()
