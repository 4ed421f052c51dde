"""A number that is added to all scores of a row does not change the softmax, however large it is."""

import pytest
import torch
from attention import DTYPES, SCORES, function, make_inputs, relative_error, run
from covering import covered

from dfgnn import Graph, functional, reference

MIN = "finfo.min"
SHIFTS = (1e6, 1e7, -1e9, MIN)
ON_CPU = ("natural", "natural<=32")
ON_GPU = ("longest_first", "packed", "natural<=32 sources/2", "tiles", "tiles<=32")
SCHEDULES = (*ON_CPU, *(ON_GPU if torch.cuda.is_available() else ()))
HEADS, DIM = 2, 16  # small enough for several rows per warp, large enough for tiles
# Relative errors that right results may have.
BAND = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


def make_graph(device) -> Graph:
    """Rows of four neighbours, of one and of none, and two rows of 300 edges, which schedules with at most
    32 edges per work item split."""
    n = torch.arange(4, 250)
    dst = torch.cat([n.repeat_interleave(4), torch.zeros(300), torch.ones(300), torch.tensor([2])]).long()
    four = (n // 8 * 8)[:, None] + torch.arange(4) * 9
    src = torch.cat([four.flatten(), *[torch.arange(300)] * 2, n[:1]])
    order = torch.argsort(src * 300 + dst)  # sources rise in every row; edge ids are not those of the CSR
    return Graph.from_coo(src[order].to(device), dst[order].to(device), num_src=300, num_dst=260)


def value_of(shift, dtype):
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    return (torch.finfo(acc).min if shift == MIN else shift), acc


def degrees_of(graph):
    return torch.bincount(graph.edge_index[1], minlength=graph.num_dst)


def skip_unless_available(schedule, device, dtype, edges=True):
    if device == "cpu" and schedule not in ON_CPU:
        pytest.skip("a schedule of the GPU")
    if schedule.startswith("tiles") and (edges or dtype.itemsize != 2):
        pytest.skip("tiles are for 16 bits and take no edge tensors")
    if schedule == "packed" and dtype == torch.float64:
        pytest.skip("a row of this type fills a warp")


def alike(score, graph, dtype):
    """Inputs whose scores are all 0; their values, and the gradients of the scores, are not 0."""
    inputs = make_inputs(score, graph, HEADS, DIM, dtype)
    for name in {"gat": ("score_src", "score_dst"), "gatv2": ("att",), "dot": ("query",)}[score]:
        inputs[name] = torch.zeros_like(inputs[name])
    return inputs


def check(found, expected, dtype):
    for name, x in expected.items():
        assert found[name].isfinite().all(), f"{name} is not finite"
        floor = x.numel() ** 0.5  # a gradient in which all cancels, against terms of the size of 1
        error = relative_error(found[name], x.double(), floor)
        assert error <= BAND[dtype], f"{name}: {error:.3g}"


def check_attention(found, expected):
    """The returned attention is right up to the rounding of its dtype."""
    allowed = 1e-6 + (torch.finfo(found.dtype).eps if found.dtype.itemsize == 2 else 0) * expected
    assert ((found - expected).abs() <= allowed).all()


@covered(3, dtype=DTYPES, schedule=SCHEDULES, shift=SHIFTS, score=SCORES)
def test_bias(score, shift, schedule, dtype, device):
    """A bias of the edges: the same output, attention and gradients as without it."""
    skip_unless_available(schedule, device, dtype)
    graph, (amount, acc) = make_graph(device), value_of(shift, dtype)
    inputs = alike(score, graph, dtype)
    inputs["bias"] = torch.zeros(graph.num_edges, HEADS, dtype=acc, device=device)
    options = dict(schedule=schedule, return_attention=True)
    expected = run(function(score), graph, inputs, **options)
    found = run(function(score), graph, {**inputs, "bias": inputs["bias"] + amount}, **options)
    uniform = 1 / degrees_of(graph)[graph.edge_index[1]].to(acc)[:, None]
    for result in (expected, found):
        check_attention(result["attention"], uniform)
    check(found, expected, dtype)


@covered(dtype=DTYPES, schedule=SCHEDULES, shift=SHIFTS)
def test_score_terms(shift, schedule, dtype, device):
    """Large terms of the sources, against the plain computation in float64 and, for the sums, 1 / degree."""
    skip_unless_available(schedule, device, dtype, edges=False)
    graph, (amount, acc) = make_graph(device), value_of(shift, dtype)
    inputs = alike("gat", graph, dtype)
    for name, x in (("score_src", amount), ("score_dst", 0.0)):
        inputs[name] = torch.full_like(inputs[name], x, dtype=acc)
    expected = run(reference.gat_attention, graph, inputs, dtype=torch.float64)
    check(run(functional.gat_attention, graph, inputs, schedule=schedule), expected, dtype)
    # grad_value_j = sum of 1 / degree_i over its destinations, exactly, for a loss that is the sum.
    value = inputs["value"].clone().requires_grad_()
    functional.gat_attention(
        graph, value, inputs["score_src"], inputs["score_dst"], kernel_options={"schedule": schedule}
    ).sum().backward()
    src, dst = graph.edge_index
    sums = torch.zeros(300, dtype=torch.float64, device=device).index_add_(
        0, src, 1 / degrees_of(graph)[dst].double()
    )
    assert relative_error(value.grad[:, 0, 0], sums) <= BAND[dtype] / 4


@covered(dtype=DTYPES, schedule=SCHEDULES, factor=[1, 1.75], exponent=[(10, 10), (12, 11), (15, -15)])
def test_products(exponent, factor, schedule, dtype, device):
    """Large products of queries and keys, times a scale that is no power of two: some are rounded."""
    skip_unless_available(schedule, device, dtype, edges=False)
    graph = make_graph(device)
    inputs = alike("dot", graph, dtype)
    sign = 1 if exponent[1] > 0 else -1
    inputs["query"][..., 3] = factor * 2.0 ** exponent[0]
    inputs["key"] = torch.zeros_like(inputs["key"])
    inputs["key"][..., 3] = sign * factor * 2.0 ** abs(exponent[1])
    expected = run(functional.dot_attention, graph, alike("dot", graph, dtype) | {"value": inputs["value"]})
    found = run(functional.dot_attention, graph, inputs, schedule=schedule, scale=0.3)
    check(found, {n: expected[n] for n in ("out", "grad_value")}, dtype)


@covered(dtype=DTYPES, schedule=SCHEDULES, masked=[-1e9, MIN], score=SCORES)
def test_masking_bias(score, masked, schedule, dtype, device):
    """Edges that a large negative bias masks have no weight where the row has others, and equal weights where
    it has not."""
    skip_unless_available(schedule, device, dtype)
    graph, (amount, acc) = make_graph(device), value_of(masked, dtype)
    dst = graph.edge_index[1]
    inputs = alike(score, graph, dtype)
    hidden = torch.rand(graph.num_edges, HEADS, device=device) < 0.5
    hidden[dst % 3 == 0] = True
    hidden[(dst == 1) & (graph.edge_index[0] < 200)] = True  # whole work items of a row that is split
    bias = torch.zeros(graph.num_edges, HEADS, dtype=acc, device=device)
    inputs["bias"] = torch.where(hidden, amount, torch.randn_like(bias))
    options = dict(return_attention=True)
    expected = run(function(score, reference), graph, inputs, dtype=torch.float64, **options)
    found = run(function(score), graph, inputs, schedule=schedule, **options)
    check_attention(found["attention"], expected["attention"])
    check(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", SHIFTS)
def test_edge_softmax(shift, dtype, device):
    graph = make_graph(device)
    largest = torch.finfo(dtype).max
    amount = torch.finfo(dtype).min if shift == MIN else max(min(shift, largest), -largest)
    score = torch.full((graph.num_edges, 2), amount, dtype=dtype, device=device).requires_grad_()
    found = functional.edge_softmax(graph, score)
    uniform = 1 / degrees_of(graph)[graph.edge_index[1]].double()[:, None]
    check_attention(found, uniform)
    weight = torch.randn_like(found)
    (gradient,) = torch.autograd.grad((found * weight).sum(), score)
    flat = torch.zeros_like(score).requires_grad_()
    (expected,) = torch.autograd.grad((functional.edge_softmax(graph, flat) * weight).sum(), flat)
    check({"gradient": gradient}, {"gradient": expected}, dtype)
