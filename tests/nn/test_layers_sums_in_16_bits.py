"""Every layer, and the gradient of every input and parameter, at a node of 5,000 edges in bfloat16 and
float16, beside float64.

Eager and compiled: what torch 2.13.0 and torch_geometric 2.8.0 do with the same sums is
tests/functional/test_where_libraries_differ.py.
"""

import copy

import pytest
import torch
from covering import some
from every_layer import LAYERS as PYG
from many_terms import DEGREE, HALF, assert_no_sum_lost, edges, positive, weighted
from own_layers import LAYERS as OURS
from own_layers import floats

import dfgnn
from dfgnn import Graph

EDGE_INDEX = edges(loops=False)
GRAPH = Graph.from_edge_index(EDGE_INDEX, num_nodes=DEGREE + 1)
LEAST = 1e-3  # of the largest gradient: `assert_no_sum_lost`


def run(layer, arguments, dtype, exact=False, call=None):
    """The results and the gradients; exact: of the same parameters and inputs of 16 bits, in float64."""
    inputs = positive((DEGREE + 1, 8), dtype, seed=2), positive((EDGE_INDEX.shape[1], 3), dtype, seed=3)
    inputs = [x.to(torch.float64 if exact else dtype).requires_grad_() for x in inputs]
    torch.manual_seed(1)
    results = floats((layer if call is None else call)(*arguments(*inputs)))
    wanted = {"x": inputs[0], "attributes": inputs[1], **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(
        weighted(results), list(wanted.values()), allow_unused=True, materialize_grads=True
    )
    return {str(k): x.detach() for k, x in enumerate(results)} | dict(zip(wanted, gradients))


def drawn(make, dtype):
    """A layer, with parameters that are not 0, of 16 bits; and its copy in float64."""
    torch.manual_seed(0)
    layer = make().eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) / 2)
    layer = layer.to(dtype)
    return layer, copy.deepcopy(layer).double()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", OURS)
def test_ours_like_float64(name, dtype):
    make, arguments = OURS[name]
    layer, exact = drawn(make, dtype)
    call = lambda x, a: arguments(GRAPH, x, a)  # noqa: E731
    assert_no_sum_lost(run(layer, call, dtype), run(exact, call, dtype, exact=True), least=LEAST)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", PYG)
def test_pyg_like_float64(name, dtype):
    """Our layer beside torch_geometric's own in float64."""
    layer, exact = drawn(PYG[name][0], dtype)
    assert dfgnn.accelerate(layer).replaced
    call = lambda x, a: PYG[name][1](x, EDGE_INDEX, a)  # noqa: E731
    assert_no_sum_lost(run(layer, call, dtype), run(exact, call, dtype, exact=True), least=LEAST)


@some(["GATConv", "FAConv"], PYG)
def test_pyg_compiled_like_float64(name):
    """By Inductor, under which torch_geometric 2.8.0's GATConv loses a node of 5,000 edges."""
    layer, exact = drawn(PYG[name][0], torch.bfloat16)
    assert dfgnn.accelerate(layer).replaced
    torch._dynamo.reset()
    call = lambda x, a: PYG[name][1](x, EDGE_INDEX, a)  # noqa: E731
    found = run(layer, call, torch.bfloat16, call=torch.compile(layer))
    assert_no_sum_lost(found, run(exact, call, torch.bfloat16, exact=True), least=LEAST)
