"""Attention whose scores are products of an edge's ends and its features, and the operators behind it."""

import torch
from graphs import make_graph
from torch import library

from dfgnn import functional
from dfgnn.runtime import ops as _ops
from dfgnn.runtime.arguments import ops

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


def test_fake_kernels():
    """The fake kernels tell compilers the shapes and dtypes that the operators return."""
    graph = make_graph("mixed_degrees")
    query, key, _, feat = make_inputs(graph, 3, 5, torch.bfloat16).values()
    weight, args = torch.randn(graph.num_edges, 3), _ops.product_args(graph, key, False)
    tests = ("test_schema", "test_faketensor")
    for flag in (False, True):
        library.opcheck(ops.edge_products.default, (query, key, feat, *args, 0.5, flag), test_utils=tests)
        given = weight, feat if flag else None, query, key, feat, *args, 0.5, flag
        library.opcheck(ops.edge_products_backward.default, given, test_utils=tests)
