"""`score_attention`, whose scores are given, and `dot_attention`, with values (and keys) that have a row per
edge."""

import math

import pytest
import torch
from attention import DTYPES, relative_error, rounding_band, run
from graphs import GRAPHS, make_graph

from dfgnn import Graph, functional, reference
from dfgnn.graph.derived import edges_as_sources

AT = ("nodes", "edges")


def make_inputs(name, graph, heads, dim, dtype, at):
    rows = graph.num_edges if at == "edges" else graph.num_src
    sizes = {
        "score": {"score": (graph.num_edges, heads), "value": (rows, heads, dim)},
        "dot": {
            "query": (graph.num_dst, heads, dim),
            "key": (rows, heads, dim),
            "value": (rows, heads, 2 * dim),
        },
    }[name]
    return {n: torch.randn(size).to(graph.device, dtype) for n, size in sizes.items()}


def at_rows(graph, at):
    """The graph whose sources have the rows: those of the edges or of the nodes."""
    return graph.edges_as_sources() if at == "edges" else graph


def function(name, module, at, **options):
    def call(graph, **inputs):
        return getattr(module, f"{name}_attention")(at_rows(graph, at), **{**options, **inputs})

    return call


def compare(name, at, graph, inputs, **options):
    """Error against float64 <= 2 x that of plain PyTorch in the same dtype + rounding."""
    dtype = inputs["value"].dtype
    note = {"return_attention": True} if "return_attention" in options else {}
    actual = run(function(name, functional, at, **options), graph, inputs, **note)
    plain = function(name, reference, at, **options)
    low, exact = run(plain, graph, inputs, **note), run(plain, graph, inputs, torch.float64, **note)
    for key, x in exact.items():
        # The terms that cancel in gradients of scores are of the size of g . v (output's gradient, value).
        floor = 3 * math.sqrt(inputs["value"].shape[-1]) if key not in ("out", "grad_value") else 0.0
        limit = 2 * relative_error(low[key], x, floor) + 4 * rounding_band(dtype)
        assert actual[key].dtype == low[key].dtype and actual[key].shape == x.shape, key
        assert relative_error(actual[key], x, floor) <= limit, (name, at, dtype, key)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("name", ("score", "dot"))
@pytest.mark.parametrize("graph", GRAPHS)
def test_like_the_reference(device, graph, name, at):
    turn, graph = list(GRAPHS).index(graph), make_graph(graph, device)
    for k in (turn, turn + 1):
        heads, dim = ((3, 8), (1, 33), (8, 1), (2, 7))[k % 4]
        inputs = make_inputs(name, graph, heads, dim, DTYPES[k // 2 % 4], at)
        sink = {"sink": inputs["value"].new_ones(heads)} if k % 3 == 0 else {}
        compare(name, at, graph, inputs | sink, **({"return_attention": True} if k % 2 else {}))


@pytest.mark.parametrize("at", AT)
def test_options(device, at):
    graph = make_graph("mixed_degrees", device)
    inputs = make_inputs("score", graph, 3, 8, torch.float32, at)
    edges, heads = inputs["score"].shape
    seed = torch.tensor([3], device=device)
    compare("score", at, graph, inputs, dropout_p=0.4, generator=seed, return_attention=True)
    compare("score", at, graph, inputs, mask=torch.rand(edges, device=device) < 0.6)
    compare("score", at, graph, inputs | {"weight": torch.rand(edges, heads, device=device)})
    inputs["score"] = torch.randn(edges, device=device)  # one score for all heads
    compare("score", at, graph, inputs)
    inputs["score"][::3] = -math.inf
    on = at_rows(graph, at)
    found = functional.score_attention(on, **inputs, return_attention=True)
    expected = reference.score_attention(on, **inputs, return_attention=True)
    torch.testing.assert_close(found, expected)
    inputs["value"] = inputs["value"].bfloat16()
    out = functional.score_attention(on, **inputs)  # float32 scores
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("at", AT)
def test_it_is_softmax_and_sum(device, at):
    """The result is that of edge_softmax and spmm; negative scores show that there is no LeakyReLU in it."""
    graph = make_graph("random", device)
    inputs = make_inputs("score", graph, 2, 8, torch.float64, at)
    inputs["score"] -= 5
    on = at_rows(graph, at)
    expected = functional.spmm(on, functional.edge_softmax(graph, inputs["score"]), inputs["value"])
    torch.testing.assert_close(functional.score_attention(on, **inputs), expected)


def test_rows_of_edges_or_of_nodes(device):
    """Rows are those of the graph's sources, also where it has as many sources as edges; rows of edges on a
    graph of nodes are an error that names the graph which has them."""
    shift = torch.arange(20, device=device)
    ring = Graph.from_coo((shift + 1) % 20, shift, num_nodes=20)
    inputs = make_inputs("score", ring, 2, 4, torch.float32, "nodes")
    value = inputs["value"]
    for at, expected in (("nodes", value.roll(-1, 0)), ("edges", value)):
        found = functional.score_attention(at_rows(ring, at), **inputs)
        torch.testing.assert_close(found, expected)
        found = functional.dot_attention(at_rows(ring, at), value, value, value)
        torch.testing.assert_close(found, expected)
    graph = make_graph("random", device)
    for name, argument in (("score", "value"), ("dot", "key")):
        inputs = make_inputs(name, graph, 2, 4, torch.float32, "edges")
        with pytest.raises(ValueError, match=rf"{argument}: .*go with graph.edges_as_sources\(\)"):
            getattr(functional, f"{name}_attention")(graph, **inputs)


def test_a_compiled_call_keeps_the_graph_of_the_edges(device):
    """A traced call finds the graph of edges as sources that was made before, and does not sort again."""
    graph = make_graph("random", device)
    inputs = make_inputs("dot", graph, 2, 4, torch.float32, "edges")
    call = torch.compile(functional.dot_attention, fullgraph=True, backend="aot_eager")
    made = graph.edges_as_sources()
    torch.testing.assert_close(call(made, **inputs), functional.dot_attention(made, **inputs))
    assert edges_as_sources(graph) is made


def test_the_graph_of_the_edges(device):
    """Edge e leads from source e to its destination, in both directions and without a sort."""
    for name in GRAPHS:
        graph = make_graph(name, device)
        for reverse in (False, True):
            made = edges_as_sources(graph, reverse)
            assert edges_as_sources(graph, reverse) is made
            ends = graph.edge_index[0 if reverse else 1]
            expected = torch.stack([torch.arange(graph.num_edges, device=device), ends])
            assert torch.equal(made.edge_index, expected)
            again = Graph.from_coo(*expected, num_src=made.num_src, num_dst=made.num_dst)
            for one, other in zip(made.reverse_csr(need_eids=True), again.reverse_csr(need_eids=True)):
                assert (one is None and other is None) or torch.equal(
                    torch.arange(graph.num_edges, device=device).int() if one is None else one,
                    torch.arange(graph.num_edges, device=device).int() if other is None else other,
                )
