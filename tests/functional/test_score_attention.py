"""`score_attention`, whose scores are given, and `dot_attention`, with values (and keys) that have a row per
edge."""

import torch
from graphs import GRAPHS, make_graph

from dfgnn import Graph, functional
from dfgnn.graph.derived import edges_as_sources


def at_rows(graph, at):
    """The graph whose sources have the rows: those of the edges or of the nodes."""
    return graph.edges_as_sources() if at == "edges" else graph


def test_rows_of_edges_or_of_nodes(device):
    """Rows are those of the graph's sources, also where it has as many sources as edges. (Rows of edges on a
    graph of nodes: tests/fuzz/bad_input.py.)"""
    shift = torch.arange(20, device=device)
    ring = Graph.from_coo((shift + 1) % 20, shift, num_nodes=20)
    score, value = torch.randn(20, 2, device=device), torch.randn(20, 2, 4, device=device)
    for at, expected in (("nodes", value.roll(-1, 0)), ("edges", value)):
        found = functional.score_attention(at_rows(ring, at), score, value)
        torch.testing.assert_close(found, expected)
        found = functional.dot_attention(at_rows(ring, at), value, value, value)
        torch.testing.assert_close(found, expected)


def test_a_compiled_call_keeps_the_graph_of_the_edges(device):
    """A traced call finds the graph of edges as sources that was made before, and does not sort again."""
    graph = make_graph("random", device)
    sizes = graph.num_dst, graph.num_edges, graph.num_edges
    inputs = [torch.randn(n, 2, 4, device=device) for n in sizes]
    call = torch.compile(functional.dot_attention, fullgraph=True, backend="aot_eager")
    made = graph.edges_as_sources()
    torch.testing.assert_close(call(made, *inputs), functional.dot_attention(made, *inputs))
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


def test_products_of_ends_and_features_as_published(device):
    """exp(clamped) / (its sum + 1e-6)."""
    graph = make_graph("random", device)
    q, k, v, e = (torch.randn(n, 2, 8, device=device).double() for n in (50, 50, 50, graph.num_edges))
    src, dst = graph.edge_index
    weight = ((q * 8**-0.5)[dst] * k[src] * e).sum(-1, keepdim=True).clamp(-5, 5).exp()
    sums = torch.zeros(graph.num_dst, 2, 1).to(weight).index_add(0, dst, weight)
    expected = torch.zeros_like(q).index_add(0, dst, weight * v[src]) / (sums + 1e-6)
    found = functional.edge_product_attention(graph, q, k, v, e, clamp=5.0)
    assert ((found - expected).abs() <= 1.5e-4 * found.abs() + 1e-12).all()
