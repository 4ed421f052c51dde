"""A sink: one more score of every softmax, without a value."""

import math

import pytest
import torch
from attention import SCORES, function, make_inputs, run
from graphs import make_graph

from dfgnn import Graph, functional


def inputs_with_sink(score, graph, heads, dim, dtype=torch.float32, **options):
    inputs = make_inputs(score, graph, heads, dim, dtype, **options)
    return inputs | {"sink": torch.randn(heads).to(graph.device, dtype)}


@pytest.mark.parametrize("score", SCORES)
def test_it_is_an_edge_without_a_value(device, score):
    """The same as an edge from a further source, whose value is 0, with the sink for its score."""
    if score == "gatv2":
        pytest.skip("its value is in the score")
    graph, heads, dim = make_graph("mixed_degrees", device), 3, 8
    inputs = inputs_with_sink(score, graph, heads, dim, torch.float64)
    found = run(function(score), graph, inputs)
    src, dst = graph.edge_index
    nodes = torch.arange(graph.num_dst, device=device)
    more = torch.cat([src, torch.full_like(nodes, graph.num_src)]), torch.cat([dst, nodes])
    larger = Graph.from_coo(*more, num_src=graph.num_src + 1, num_dst=graph.num_dst)
    sink = inputs.pop("sink")
    bias = sink.new_zeros(larger.num_edges, heads)
    bias[graph.num_edges :] = sink
    zero = {n: x.new_zeros(1, *x.shape[1:]) for n, x in inputs.items()}
    ends = ("value", "score_src") if score == "gat" else ("key", "value")
    extended = {n: torch.cat([x, zero[n]]) if n in ends else x for n, x in inputs.items()}
    if score == "gat":  # all scores come as biases, because score_dst would be added to the sink, too
        extended["score_src"], extended["score_dst"] = None, None
        raw = torch.nn.functional.leaky_relu(inputs["score_src"][src] + inputs["score_dst"][dst], 0.2)
        bias = torch.cat([raw, bias[graph.num_edges :]])
        out = functional.gat_attention(larger, extended["value"], None, None, bias=bias, negative_slope=1.0)
    else:
        out = functional.dot_attention(larger, **extended, bias=bias)
    has_edges = graph.in_degrees() > 0
    torch.testing.assert_close(found["out"][has_edges], out[has_edges])
    assert found["out"][~has_edges].eq(0).all()


@pytest.mark.parametrize("score", SCORES)
def test_extremes(device, score):
    """A sink of -inf is none, and one far above the scores takes everything."""
    graph = make_graph("mixed_degrees", device)
    inputs = inputs_with_sink(score, graph, 3, 8)
    sink = inputs.pop("sink")
    without = run(function(score), graph, inputs)
    found = run(function(score), graph, inputs | {"sink": torch.full_like(sink, -math.inf)})
    for name, x in without.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-5)
    assert found["grad_sink"].eq(0).all()
    for far, limit in ((300.0, 1e-30), (-300.0, math.inf)):
        found = run(function(score), graph, inputs | {"sink": torch.full_like(sink, far)})
        assert all(x.isfinite().all() for x in found.values())
        assert found["out"].abs().max() <= limit
