"""Every layer, and the gradient of every input and parameter, at a node of 5,000 edges in bfloat16 and
float16, compared with float64.

Eager and compiled: what torch 2.13.0 and torch_geometric 2.8.0 do with the same sums is
tests/functional/test_where_libraries_differ.py.
"""

import copy

import torch
from covering import some
from every_layer import LAYERS, UPSTREAM, floats, in_turns, library, names, of
from many_terms import DEGREE, HALF, assert_no_sum_lost, edges, positive, weighted

import dfgnn
from dfgnn import Graph

EDGE_INDEX = edges(loops=False)
GRAPH = Graph.from_edge_index(EDGE_INDEX, num_nodes=DEGREE + 1)
LEAST = 1e-3  # of the largest gradient: `assert_no_sum_lost`


def run(layer, name, dtype, exact=False, call=None):
    """The results and the gradients; exact: of the same parameters and inputs of 16 bits, in float64."""
    inputs = positive((DEGREE + 1, 8), dtype, seed=2), positive((EDGE_INDEX.shape[1], 3), dtype, seed=3)
    x, attr = (x.to(torch.float64 if exact else dtype).requires_grad_() for x in inputs)
    torch.manual_seed(1)
    given = LAYERS[name].arguments(x, EDGE_INDEX if of(name) == "pyg" else GRAPH, attr)
    results = floats((layer if call is None else call)(*given))
    wanted = {"x": x, "attributes": attr, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(
        weighted(results), list(wanted.values()), allow_unused=True, materialize_grads=True
    )
    return {str(k): x.detach() for k, x in enumerate(results)} | dict(zip(wanted, gradients))


def drawn(name, dtype):
    """Our layer, with parameters of 16 bits that are not 0; in float64 a copy, or torch_geometric's own."""
    torch.manual_seed(0)
    layer = LAYERS[name].make(library(UPSTREAM["pyg"] if of(name) == "pyg" else of(name))).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) / 2)
    exact = copy.deepcopy(layer.to(dtype)).double()
    assert of(name) != "pyg" or dfgnn.accelerate(layer).replaced
    return layer, exact


@in_turns("dtype", HALF, names(without=["pair", "weights"]))
def test_like_float64(name, dtype):
    layer, exact = drawn(name, dtype)
    assert_no_sum_lost(run(layer, name, dtype), run(exact, name, dtype, exact=True), least=LEAST)


@some(["pyg GATConv"], names("pyg"))
def test_compiled_like_float64(name):
    """Compiled by Inductor, under which torch_geometric 2.8.0's GATConv is wrong at a node of 5,000 edges."""
    layer, exact = drawn(name, torch.bfloat16)
    torch._dynamo.reset()
    found = run(layer, name, torch.bfloat16, call=torch.compile(layer))
    assert_no_sum_lost(found, run(exact, name, torch.bfloat16, exact=True), least=LEAST)
