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


def dot(graph, x, **more):
    return dot_attention(graph, x, x, x, **more)


def projected(graph, x):
    term = Projected(torch.randn(graph.num_edges, 3), torch.randn(16, 3))
    return dot(graph, x, edge=EdgeTerm(term, term))


#: A call with a graph and rows -> the path that it takes, and a reason against another path.
CALLS = {
    "plain": (dot, "eager", None),
    "a bias": (lambda g, x: dot(g, x, bias=torch.zeros(g.num_edges, 2)), "eager", None),
    "gatv2": (lambda g, x: gatv2_attention(g, x, x, torch.ones(2, 8)), "eager", None),
    "projected edges": (projected, "edge projection", None),
    "gradients": (
        lambda g, x: torch.func.grad(lambda x: dot(g, x).sum())(x), "dispatched",
        ("eager", "a transform of torch.func is active"),
    ),
    "forward mode": (lambda g, x: torch.func.jvp(lambda x: dot(g, x), (x,), (x,)), "plain", None),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_path(graph, name):
    call, path, reason = CALLS[name]
    found = only(dfgnn.explain(call, graph, rows(graph)))
    assert found.path == path
    if path == "eager":
        assert [declined for declined, _ in found.declined] == ["parts"]
    if name in ("plain", "gatv2"):
        assert found.what == f"{'dot' if name == 'plain' else 'additive_v2'} attention, 2 heads of 8, float32"
    if reason is not None:
        assert reason in found.declined


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
