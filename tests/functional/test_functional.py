"""The fused attention functions against the float64 reference: outputs and every gradient."""

import math

import pytest
import torch
from attention import DTYPES, SCORES, TERMS, VALUES, check, function, make_inputs, relative_error, run, shapes
from covering import covered
from graphs import GRAPHS, make_graph

from dfgnn import functional, reference

MODULES = [pytest.param(module, id=module.__name__) for module in (functional, reference)]
INDEX_DTYPES = torch.int32, torch.int64


@covered(score=SCORES, name=tuple(GRAPHS), dtype=DTYPES, index_dtype=INDEX_DTYPES)
def test_hard_graphs(device, score, name, dtype, index_dtype):
    turn = list(GRAPHS).index(name) * len(DTYPES) + DTYPES.index(dtype)
    graph = make_graph(name, device, index_dtype)
    for heads, dim in shapes(device, turn, graph.num_edges):
        check(score, graph, make_inputs(score, graph, heads, dim, dtype), note=f"H={heads} D={dim}: ")


SMALL_HEADS = [(1, 8), (2, 4), (4, 8), (5, 4), (6, 16), (8, 8), (9, 8), (17, 4), (40, 8)]


@covered(
    shape=SMALL_HEADS,
    score=SCORES,
    case=[("mixed_degrees", torch.float32), ("super_row", torch.bfloat16), ("mixed_degrees", torch.float16)],
)
def test_dropout_of_any_number_of_heads(device, score, shape, case):
    """One Philox number has four words, one for each of four heads; on a GPU lanes of small heads share its
    computation."""
    (heads, dim), (name, dtype) = shape, case
    options = {"dropout_p": 0.4, "generator": torch.tensor([2**33 + heads], device=device)}
    graph = make_graph(name, device)
    inputs = make_inputs(score, graph, heads, dim, dtype)
    for schedule in ("natural", "packed") if device == "cuda" and heads * dim <= 64 else ("auto",):
        check(
            score,
            graph,
            inputs,
            f"{schedule}: ",
            kernel_options={"schedule": schedule},
            return_attention=True,
            **options,
        )


@covered(1, dtype=DTYPES, shape=((8, 8), (4, 32), (3, 64), (2, 250)))
def test_gatv2_on_the_bend(device, dtype, shape):
    """Where x_src + x_dst is 0, of zeros of either sign or of opposite numbers, LeakyReLU' is the slope."""
    graph = make_graph("mixed_degrees", device)
    inputs = make_inputs("gatv2", graph, *shape, dtype)
    for name in ("key", "query"):
        values = torch.tensor([-1.0, -0.0, 0.0, 1.0])
        inputs[name] = values[torch.randint(4, inputs[name].shape)].to(device, dtype)
    check("gatv2", graph, inputs)


@pytest.mark.parametrize("scale", [None, 0.0, 1.0, -2.0])
def test_scale(device, scale):
    graph = make_graph("mixed_degrees", device)
    check("dot", graph, make_inputs("dot", graph, 3, 8), scale=scale)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("module", MODULES)
def test_rows_without_edges_are_exactly_zero(device, module, score, name):
    graph = make_graph(name, device)
    results = run(function(score, module), graph, make_inputs(score, graph, 3, 5))
    assert all(x.isfinite().all() for x in results.values())
    row, source = graph.in_degrees() == 0, graph.out_degrees() == 0
    of_rows = {"gat": "grad_score_dst", "gatv2": "grad_query", "dot": "grad_query"}
    of_sources = {"gat": "grad_score_src", "gatv2": "grad_key", "dot": "grad_key"}
    for zero in ("out", of_rows[score]):
        assert results[zero][row].eq(0).all(), zero
    for zero in ("grad_" + VALUES[score], of_sources[score]):
        assert results[zero][source].eq(0).all(), zero


@pytest.mark.parametrize("name", ["random", "super_row"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("module", MODULES)
def test_edges_masked_by_minus_infinity(device, module, score, name):
    """Some edges, all edges of row 2, and the first chunks of a split row are masked."""
    graph = make_graph(name, device)
    inputs = make_inputs(score, graph, 3, 8, term=True)
    src, dst = graph.edge_index
    inputs[TERMS[score]][src % 3 == 0] = -math.inf
    inputs[TERMS[score]][src < 100 if name == "super_row" else dst == 2] = -math.inf
    if module is functional:
        check(score, graph, inputs, return_attention=True)
    results = run(function(score, module), graph, inputs, return_attention=True)
    rows = torch.zeros(graph.num_dst, dtype=torch.bool, device=device)
    rows[dst[inputs[TERMS[score]][:, 0] > -math.inf]] = True
    assert results["out"][~rows].eq(0).all() and results["out"][rows].ne(0).any()
    inputs[TERMS[score]][:] = -math.inf
    results = run(function(score, module), graph, inputs, return_attention=True)
    assert all(x.eq(0).all() for x in results.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
def test_large_scores(device, score, dtype):
    """Scores far outside exp's range, and dot products outside float16's: the softmax does not overflow."""
    graph = make_graph("mixed_degrees", device)
    inputs = make_inputs(score, graph, 2, 32, dtype)
    for name in ("score_src", "query", "key", "att"):
        if name in inputs:
            inputs[name] *= 100
    # Backward recomputes s, and the relative error of exp(s - max) is the rounding of s.
    largest = {"gat": 400, "gatv2": 2e3, "dot": 2e5}[score]
    exponent_error = 4 * largest * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    if score == "gatv2" and device == "cuda":  # att's gradient has, besides, the rounding of each end
        exponent_error *= 2  # (docs/internals/mathematics.md)
    if score == "dot" and dtype == torch.float16:
        results = run(function(score), graph, inputs, scale=1.0)
        oracle = run(function(score, reference), graph, inputs, dtype=torch.float64, scale=1.0)
        for key in ("out", "grad_value"):
            assert relative_error(results[key], oracle[key]) < exponent_error, key
    else:
        check(score, graph, inputs, extra=exponent_error, **({"scale": 1.0} if score == "dot" else {}))
