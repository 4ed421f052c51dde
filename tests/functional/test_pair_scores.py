"""GATv2 with attributes of edges and their projection, compared with plain operations."""

import pytest
import torch
from attention import function, relative_error, rounding_band
from graphs import GRAPHS, make_graph

from dfgnn import functional, reference
from dfgnn.bench.measure import peak_extra
from dfgnn.functional import EdgeTerm
from dfgnn.nn import pyg

NAMES = "key", "query", "att", "edge_attr", "edge_key_weight"
OPTIONS = {"none": (), "bias, weight": ("bias", "weight"), "gate, sink": ("gate", "sink")}
SHAPES = (1, 4, 1), (3, 5, 7), (8, 8, 16), (2, 1, 33), (5, 12, 8)  # heads, columns, attributes


def make_inputs(graph, heads, dim, size, dtype=torch.float64, options=()):
    edges = graph.num_edges
    shapes = [(graph.num_src, heads, dim), (graph.num_dst, heads, dim), (heads, dim), (edges, size)]
    inputs = dict(zip(NAMES, [*shapes, (heads * dim, size)]))
    inputs |= {name: (heads,) if name == "sink" else (edges, heads) for name in options}
    return {n: torch.randn(s, dtype=torch.float64).to(graph.device, dtype) for n, s in inputs.items()}


def derivatives(module, graph, inputs, dtype=None, orders=2, **options):
    """The result, then for each order the gradients of a sum of sines of the tensors of the order before."""
    leaves = {n: x.to(dtype or x.dtype, copy=True).requires_grad_() for n, x in inputs.items()}
    found = [function("gatv2", module)(graph, **leaves, **options)]
    total = found[0].sin().sum()
    for _ in range(orders):
        grads = torch.autograd.grad(total, list(leaves.values()), create_graph=True)
        found += grads
        total = sum(g.sin().sum() for g in grads)
    return [x.detach() for x in found]


def chance(graph):
    """The factor by which rounding errors may exceed those of plain operations.

    On a GPU the projection runs as plain operations, whose order of sums over edges differs between runs.
    """
    return 6 if graph.device.type == "cuda" else 2


def check(graph, inputs, **options):
    exact = derivatives(reference, graph, inputs, torch.float64, **options)
    low = derivatives(reference, graph, inputs, **options)
    for k, (x, expected, y) in enumerate(zip(derivatives(functional, graph, inputs, **options), exact, low)):
        assert x.shape == expected.shape and x.dtype == y.dtype
        assert x.isfinite().all(), k
        error, allowed = (relative_error(z, expected, expected.numel() ** 0.5) for z in (x, y))
        assert error <= chance(graph) * allowed + 8 * rounding_band(y.dtype), k


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_derivatives(device, name, dtype):
    turn = list(GRAPHS).index(name)
    graph, options = make_graph(name, device), list(OPTIONS.values())[turn % 3]
    check(graph, make_inputs(graph, *SHAPES[turn % 5], dtype, options))


def test_vector_of_opposite_ends(device):
    """query is nearly -key, so that much cancels in att's gradient, a sum over nodes and attributes."""
    graph = make_graph("complete", device)
    inputs = make_inputs(graph, 2, 8, 4, torch.float32)
    inputs["key"] += 100
    inputs["query"] -= 100
    exact, low, found = (
        derivatives(m, graph, inputs, dtype, orders=1)
        for m, dtype in ((reference, torch.float64), (reference, None), (functional, None))
    )
    allowed = [chance(graph) * relative_error(y, x) + 1e-5 for x, y in zip(exact, low)]
    if device == "cuda":  # kernels add up each end's terms by themselves (docs/internals/mathematics.md)
        att = 1 + list(inputs).index("att")
        allowed[att] = max(allowed[att], rounding_of_ends(graph, inputs, exact[att]))
    for x, most, expected in zip(found, allowed, exact):
        assert relative_error(x, expected) <= most


def rounding_of_ends(graph, inputs, exact):
    """The likely relative error of att's gradient, the sum over edges of r L' (key + query + e) with
    r = alpha (g . key - delta), L' the slope of LeakyReLU, g the gradient of the output and e the projected
    attributes: if key, query and e are summed apart, and r has the rounding error of g . key."""
    key, query, att, attr, proj = (x.double() for x in inputs.values())
    feat = (attr @ proj.t()).view(-1, *att.shape)
    out, alpha = reference.gatv2_attention(graph, query, key, att, edge=EdgeTerm(feat), return_attention=True)
    src, dst = graph.edge_index
    products = (out.cos()[dst] * key[src]).norm(dim=-1, keepdim=True)  # g = cos(out), as the loss is sin
    ends = key[src].abs() + query[dst].abs() + feat.abs()
    sums = (alpha.view_as(products) * products * ends).norm(dim=0)  # independent errors
    return 4 * torch.finfo(torch.float32).eps * (sums.norm() / exact.norm()).item()


def layer_step(conv, x, edges, attr):
    leaves = [x, attr]
    grads = torch.autograd.grad(conv(x, edges, attr).sin().sum(), leaves, create_graph=True)
    sum(g.square().mean() for g in grads).backward()
    return grads


def test_layer(device):
    """Training on gradients of the layer: memory, and results compared with those of plain operations."""
    torch.manual_seed(0)
    n, heads, dim, size = 200, 8, 8, 16
    edges = torch.randint(n, (2, 8000), device=device)
    conv = pyg.GATv2Conv(64, dim, heads, edge_dim=size, add_self_loops=False).to(device)
    plain = pyg.GATv2Conv(64, dim, heads, edge_dim=size, add_self_loops=False).to(device)
    plain.load_state_dict(conv.state_dict())
    plain.attention = reference.gatv2_attention
    x = torch.randn(n, 64, device=device, requires_grad=True)
    attr = torch.randn(8000, size, device=device, requires_grad=True)
    found, peaks = [], []
    for layer in (conv, plain):
        found.append([*layer_step(layer, x, edges, attr), *(p.grad for p in layer.parameters())])
        if device == "cpu":
            peaks.append(peak_extra(lambda m=layer: layer_step(m, x, edges, attr), 0, torch.device("cpu")))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    if device == "cpu":
        assert peaks[0] < peaks[1] / 5
