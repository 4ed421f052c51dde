"""Every function, and every gradient of it, at a node of 5,000 edges in bfloat16 and float16, compared with
float64.

What torch 2.13.0 does with the same sums is tests/functional/test_where_libraries_differ.py.
"""

import pytest
import torch
from covering import exhaustive, some
from every_function import CASES
from many_terms import DEGREE, HALF, assert_no_sum_lost, edges, positive, weighted

from dfgnn import Graph, ops, reference


def tensors_of(case, graph, sizes):
    """The case's tensors of positive numbers; small where they are elements of a product, so that a softmax
    does not choose one edge."""
    tensors = case.tensors(graph, *sizes, batch=False)
    scale = {name: 1 if name in ("value", "value", "score") else sizes[0] ** -0.5 for name in tensors}
    return {
        name: scale[name] * positive(x.shape, seed=k).to(x.device)
        for k, (name, x) in enumerate(tensors.items())
    }


def run(call, tensors, dtype, exact=False):
    """The results and the gradients; exact: of the same numbers of 16 bits, in float64."""
    leaves = {
        n: x.to(dtype).to(torch.float64 if exact else dtype).requires_grad_() for n, x in tensors.items()
    }
    results = call(leaves)
    gradients = torch.autograd.grad(weighted(results), list(leaves.values()))
    return {str(k): x.detach() for k, x in enumerate(results)} | dict(zip(leaves, gradients))


@pytest.fixture
def graph(device):
    return Graph.from_edge_index(edges().to(device), num_nodes=DEGREE + 1)


@pytest.fixture
def case(name, monkeypatch):
    CASES[name].choose(monkeypatch)
    return CASES[name]


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (3, 2, 2), pytest.param((64, 64, 4), marks=exhaustive)], ids=str
)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.in_blocks])
def test_like_float64(name, case, graph, dtype, sizes):
    if name == "gat projected" and sizes[0] == 64:
        pytest.skip("the gradient of its projection is a difference of large terms, which 16 bits round")
    tensors = tensors_of(case, graph, sizes)
    found = run(lambda leaves: case(graph, leaves), tensors, dtype)
    assert_no_sum_lost(found, run(lambda leaves: case(graph, leaves, reference), tensors, dtype, exact=True))


COMPILED = [
    "gat edges",
    "gatv2",
    "dot edges",
    "terms of heads, shared",
    "products",
    "spmm shared",
    "flex",
    "softmax",
]


@some(["gat edges"], COMPILED)
def test_compiled(case, graph, monkeypatch):
    """Compiled by Inductor, whose own sums along an index lose more digits than those of eager calls."""
    tensors = tensors_of(case, graph, (3, 2, 2))
    torch._dynamo.reset()
    compiled = torch.compile(lambda leaves: [x * 1 for x in case(graph, leaves)])
    found = run(compiled, tensors, torch.bfloat16)
    assert_no_sum_lost(
        found, run(lambda leaves: case(graph, leaves, reference), tensors, torch.bfloat16, exact=True)
    )


def check_of_ops(name, graph, dtype, tensors):
    tensors = {n: x.to(graph.device) for n, x in tensors.items()}

    def call(leaves):
        return (getattr(ops, name)(graph, *leaves.values()),)

    assert_no_sum_lost(run(call, tensors, dtype), run(call, tensors, dtype, exact=True), 0.02)


MESSAGES = [f"u_{op}_e_{reducer}" for op in ("add", "mul", "div") for reducer in ("sum", "mean")]


@pytest.mark.parametrize("width", [1, 64])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", [*MESSAGES, "copy_u_sum", "copy_u_mean", "copy_e_sum", "copy_e_mean"])
def test_sums_of_messages(graph, dtype, name, width):
    """The sums and means of dfgnn.ops, and the gradients with respect to nodes and edges."""
    tensors = {"x": positive((DEGREE + 1, width), seed=2), "y": positive((graph.num_edges, width), seed=3)}
    if name.startswith("copy"):
        del tensors["y" if "_u_" in name else "x"]
    check_of_ops(name, graph, dtype, tensors)


@pytest.mark.parametrize("width", [1, 64])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["copy_u", "copy_v", "u_add_v", "u_mul_v", "u_dot_v", "e_dot_v", "u_sub_e"])
def test_gradients_of_rows_at_edges(graph, dtype, name, width):
    sizes = {"e": graph.num_edges, "u": DEGREE + 1, "v": DEGREE + 1}
    kinds = [letter for letter in name.split("_") if letter in sizes]
    tensors = {f"{k} {kind}": positive((sizes[kind], width), seed=k) for k, kind in enumerate(kinds)}
    check_of_ops(name, graph, dtype, tensors)
