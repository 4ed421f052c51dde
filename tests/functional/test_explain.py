"""dfgnn.explain: the path that a call took is the one that ran, with reasons for those before it."""

import pytest
import torch
from graphs import make_graph

import dfgnn
from dfgnn.functional import EdgeTerm, Projected, dot_attention, gat_attention, gatv2_attention


def rows(graph, heads=2, dim=8, **options):
    return torch.randn(graph.num_src, heads, dim, **options)


@pytest.fixture
def graph():
    return make_graph("random", "cpu")


def only(explanation):
    (call,) = explanation.calls
    return call


def test_eager_calls(graph):
    x = rows(graph)
    call = only(dfgnn.explain(dot_attention, graph, x, x, x))
    assert call.path == "eager" and [path for path, _ in call.declined] == ["parts"]
    assert call.what == "dot attention, 2 heads of 8, float32"
    bias = torch.zeros(graph.num_edges, 2)
    call = only(dfgnn.explain(dot_attention, graph, x, x, x, bias=bias))
    assert call.path == "eager"
    assert [path for path, _ in call.declined] == ["parts"]
    call = only(dfgnn.explain(gatv2_attention, graph, x, x, torch.ones(2, 8)))
    assert call.path == "eager" and call.what.startswith("additive_v2 attention")


def test_projected_edges(graph):
    x = rows(graph)
    attr, proj = torch.randn(graph.num_edges, 3), torch.randn(16, 3)
    term = Projected(attr, proj)
    call = only(dfgnn.explain(dot_attention, graph, x, x, x, edge=EdgeTerm(term, term)))
    assert call.path == "edge projection"


def test_transforms(graph):
    x = rows(graph)

    def loss(x):
        return dot_attention(graph, x, x, x).sum()

    call = only(dfgnn.explain(torch.func.grad(loss), x))
    assert call.path == "dispatched"
    assert dict(call.declined)["eager"] == "a transform of torch.func is active"
    call = only(dfgnn.explain(torch.func.jvp, loss, (x,), (x,)))
    assert call.path == "plain"


def test_a_dispatch_mode(graph):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x, terms = rows(graph), torch.randn(graph.num_src, 2)
    with Nothing():
        call = only(dfgnn.explain(gat_attention, graph, x, terms, terms))
    assert call.path == "dispatched"
    assert dict(call.declined)["eager"] == "a dispatch mode of torch is active"


def test_compiled(graph):
    x = rows(graph)
    compiled = torch.compile(lambda x: dot_attention(graph, x, x, x), backend="eager")
    explanation = dfgnn.explain(compiled, x)
    assert [call.path for call in explanation.calls] == ["traced"]
    assert torch.equal(explanation.result, dot_attention(graph, x, x, x))


def test_text_result_and_end(graph):
    """What is printed names path and reasons; nothing is recorded afterwards, nor after an error."""
    x = rows(graph)
    explanation = dfgnn.explain(dot_attention, graph, x, x, x, return_attention=True)
    assert isinstance(explanation.result, tuple)
    text = str(explanation)
    assert text.startswith("dot attention, 2 heads of 8, float32: eager (one autograd function")
    assert "    not parts: the graph is one" in text
    assert str(dfgnn.explain(torch.add, x, x)).startswith("no attention of dfgnn was computed (")
    with pytest.raises(ValueError, match="key"):
        dfgnn.explain(dot_attention, graph, x, x[:1], x)
    from dfgnn.engine import paths

    assert paths.recorder is None
