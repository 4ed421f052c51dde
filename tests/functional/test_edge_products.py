"""Attention whose scores are products of an edge's ends and its features, and the operators behind it."""

import torch
from graphs import make_graph

from dfgnn import functional

NAMES = "query", "key", "value", "edge_attr"


def make_inputs(graph, heads, dim, dtype=torch.float64, value_dim=None):
    rows = graph.num_dst, graph.num_src, graph.num_src, graph.num_edges
    dims = dim, dim, value_dim or dim, dim
    return {name: torch.randn(n, heads, d).to(graph.device, dtype) for name, n, d in zip(NAMES, rows, dims)}


def test_as_published(device):
    """exp(clamped) / (its sum + 1e-6)."""
    graph = make_graph("random", device)
    q, k, v, e = make_inputs(graph, 2, 8).values()
    src, dst = graph.edge_index
    weight = ((q * 8**-0.5)[dst] * k[src] * e).sum(-1, keepdim=True).clamp(-5, 5).exp()
    sums = torch.zeros(graph.num_dst, 2, 1).to(weight).index_add(0, dst, weight)
    expected = torch.zeros_like(q).index_add(0, dst, weight * v[src]) / (sums + 1e-6)
    found = functional.edge_product_attention(graph, q, k, v, e, clamp=5.0)
    assert ((found - expected).abs() <= 1.5e-4 * found.abs() + 1e-12).all()
