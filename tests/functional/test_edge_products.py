"""Attention whose scores are products of an edge's ends and its features, and the operators behind it."""

import itertools

import pytest
import torch
from attention import DTYPES, Made, relative_error, rounding_band
from graphs import GRAPHS, make_graph
from torch import library

from dfgnn import Graph, functional, reference
from dfgnn.runtime import ops as _ops
from dfgnn.runtime.arguments import ops

NAMES = "query", "key", "value", "edge_attr"
RESULTS = (None, "products", "scores")


def make_inputs(graph, heads, dim, dtype=torch.float64, value_dim=None):
    rows = graph.num_dst, graph.num_src, graph.num_src, graph.num_edges
    dims = dim, dim, value_dim or dim, dim
    return {name: torch.randn(n, heads, d).to(graph.device, dtype) for name, n, d in zip(NAMES, rows, dims)}


def run(module, graph, inputs, dtype=None, **options):
    """All results, and the gradients of all inputs."""
    leaves = {n: x.to(dtype or x.dtype, copy=True).requires_grad_() for n, x in inputs.items()}
    found = module.edge_product_attention(graph, **leaves, **options)
    results = [x for x in found if x is not None] if isinstance(found, tuple) else [found]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    torch.autograd.backward(results, grads)
    return [x.detach() for x in results] + [x.grad for x in leaves.values()]


def check(graph, inputs, note="", **options):
    """Error against float64 <= 2 x that of plain PyTorch + rounding, relative to the terms that cancel."""
    exact = run(reference, graph, inputs, torch.float64, **options)
    low = run(reference, graph, inputs, **options)
    dtype = inputs["query"].dtype
    for k, (x, expected, y) in enumerate(zip(run(functional, graph, inputs, **options), exact, low)):
        assert x.shape == expected.shape and x.dtype == y.dtype, f"{note}{k}"
        assert x.isfinite().all(), f"{note}{k} is not finite"
        floor = expected.numel() ** 0.5
        error, allowed = (relative_error(z, expected, floor) for z in (x, y))
        limit = 2 * allowed + 4 * rounding_band(dtype)
        assert error <= limit, f"{note}{k}: error {error:.3g} > {limit:.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRAPHS)
def test_attention(device, name, dtype):
    graph = make_graph(name, device)
    turn = list(GRAPHS).index(name) * len(DTYPES) + DTYPES.index(dtype)
    shapes = list(itertools.product((1, 3, 8), (1, 7, 16, 33)))
    k = turn + turn // 4
    heads, dim = shapes[k % len(shapes)]
    if graph.num_edges * heads * dim > 500_000:
        heads, dim = 3, 7
    inputs = make_inputs(graph, heads, dim, dtype, value_dim=(dim, 5)[k % 2])
    # No clamp in 16 bits: a score may be rounded to the other side of the clamp, where its gradient is 0.
    clamp = None if dtype.itemsize == 2 else (None, 0.7)[k % 2]
    more = dict(clamp=clamp, return_edges=RESULTS[k % 3], return_attention=k // 2 % 2 == 0)
    check(graph, inputs, f"H={heads} D={dim} {more}: ", **more)


@pytest.mark.parametrize("return_edges", RESULTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_options(device, dtype, return_edges):
    graph = make_graph("mixed_degrees", device)
    inputs = make_inputs(graph, 3, 8, dtype, value_dim=5)
    inputs["bias"] = torch.randn(graph.num_edges, 3).to(device, dtype)
    inputs["weight"] = torch.rand(graph.num_edges, 3).to(device, dtype)
    mask = torch.rand(graph.num_edges, 3, device=device) < 0.8
    more = dict(mask=mask, dropout_p=0.4, generator=torch.tensor([11], device=device), clamp=0.2)
    check(graph, inputs, return_edges=return_edges, return_attention=True, **more)


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


def test_no_further_tensor_of_edges_and_channels():
    """Unless the products are returned, the only new tensor of E x H x D elements is edge_attr's gradient."""
    graph = Graph.from_coo(*torch.randint(50, (2, 4000)), num_src=50, num_dst=50)
    leaves = [x.requires_grad_() for x in make_inputs(graph, 4, 32).values()]

    with Made() as made:
        functional.edge_product_attention(graph, *leaves, clamp=5.0).sum().backward()
    assert sum(n >= 4000 * 32 for n in made.sizes) == 1
