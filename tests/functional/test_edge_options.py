"""What edges bring to the attention: gate, mask, features, a bias on either side of the activation."""

import itertools

import pytest
import torch
from attention import DTYPES, SCORES, check, function, make_inputs, run
from covering import covered
from graphs import make_graph

YES_OR_NO = False, True
FEATURES = [("gat", "value"), ("gatv2", "key"), ("dot", "key"), ("dot", "value"), ("dot", "both")]


CASES = [
    ("mixed_degrees", 3, 8), ("isolated", 1, 33), ("super_row", 2, 4), ("super_source", 8, 7),
    ("duplicates", 4, 32), ("fewer_sources", 2, 300), ("fewer_destinations", 3, 64), ("sorted", 1, 1),
    ("no_edges", 2, 8), ("no_nodes", 1, 4), ("one_edge", 3, 16),
]  # fmt: skip


@covered(features=FEATURES, dtype=DTYPES, case=CASES)
def test_edge_features(device, features, dtype, case):
    (score, where), (name, heads, dim) = features, case
    graph = make_graph(name, device)
    inputs = make_inputs(score, graph, heads, dim, dtype, edge=f"edge_{where}")
    check(score, graph, inputs)


@covered(features=FEATURES, dim=[600, 1100], dtype=[torch.float32, torch.float16], edge=[True, False])
def test_wide_heads(device, features, dim, dtype, edge):
    """Heads of more columns than the registers of a warp hold."""
    graph, (score, where) = make_graph("isolated", device), features
    place = f"edge_{where}" if edge else False
    inputs = make_inputs(score, graph, 2, dim, dtype, edge=place, gate=1 if edge else None)
    inputs["out_bias"] = torch.randn(2, dim).to(device, dtype)
    check(score, graph, inputs)


@covered(
    heads=[1, "H"],
    score=SCORES,
    case=[("mixed_degrees", torch.float32), ("super_row", torch.float64), ("sorted", torch.float16)],
    return_attention=YES_OR_NO,
)
def test_gate(device, score, heads, case, return_attention):
    name, dtype = case
    graph = make_graph(name, device)
    inputs = make_inputs(score, graph, 3, 8, dtype, gate=heads)
    if dtype == torch.float16 and return_attention:
        inputs["gate"] = inputs["gate"].float()
    check(score, graph, inputs, return_attention=return_attention)


@pytest.mark.parametrize("heads", [1, "H"])
@pytest.mark.parametrize("score", SCORES)
def test_mask(device, score, heads):
    """An edge that is masked is an edge that is not there; a row whose edges are all masked is zero."""
    for name in ("mixed_degrees", "super_row", "duplicates"):
        graph = make_graph(name, device)
        inputs = make_inputs(score, graph, 3, 8)
        dst = graph.edge_index[1]
        mask = torch.rand(graph.num_edges, 3, device=device) < 0.6
        mask[dst == 1] = False
        mask = mask[:, 0].contiguous() if heads == 1 else mask
        for slope in (0.2, 0.0):  # slope 0: LeakyReLU of a score -inf would be 0 * -inf, NaN
            options = {"mask": mask, "negative_slope": slope}
            results = check(score, graph, inputs, note=f"{name}: ", return_attention=True, **options)
        assert results["out"][1].eq(0).all() and results["attention"][~mask].eq(0).all()
    if heads == 1:
        kept = mask.nonzero().squeeze(1)
        part = type(graph).from_coo(*graph.edge_index[:, kept], num_src=graph.num_src, num_dst=graph.num_dst)
        alone = run(function(score), part, inputs)
        masked = run(function(score), graph, inputs, mask=mask)
        for name, expected in alone.items():
            torch.testing.assert_close(masked[name], expected, msg=lambda m, n=name: f"{n}: {m}")


@covered(
    slope=[0.2, 1.0, -0.5],
    score=["gat", "dot"],
    name=["mixed_degrees", "super_source"],
    return_attention=YES_OR_NO,
)
def test_bias_behind_the_activation(device, score, slope, name, return_attention):
    graph = make_graph(name, device)
    inputs = make_inputs(score, graph, 3, 8, term="bias")
    options = {"negative_slope": slope, "return_attention": return_attention}
    check(score, graph, inputs, **options)


@covered(
    3, score=SCORES, bias=[False, True, "bias"], gate=[None, 1, "H"], mask=YES_OR_NO, feat=YES_OR_NO,
    dropout=YES_OR_NO, weight=[None, 1, "H"], return_attention=YES_OR_NO,
    case=[
        ("mixed_degrees", 5, 8, torch.float32),
        ("isolated", 2, 20, torch.float64),
        ("sorted", 4, 16, torch.bfloat16),
    ],
)  # fmt: skip
def test_options_together(device, score, bias, gate, mask, feat, dropout, weight, return_attention, case):
    """The cases (see `covered`) contain every combination of values of any three options."""
    name, heads, dim, dtype = case
    graph = make_graph(name, device)
    inputs = make_inputs(
        score, graph, heads, dim, dtype, term=bias, gate=gate, edge=feat, weight=weight,
    )  # fmt: skip
    options = {"return_attention": return_attention}
    if mask:
        options["mask"] = torch.rand(graph.num_edges, device=device) < 0.7
    if dropout:
        options |= {"dropout_p": 0.4, "generator": torch.tensor([77], device=device)}
    check(score, graph, inputs, **options)


@pytest.mark.parametrize("score", SCORES)
def test_options_on_empty_graphs(device, score):
    """Edge tensors without elements have a null pointer, and must not be taken for absent ones (None)."""
    everything = dict(term=True, gate=1, edge=True, weight="H")
    for name, given in itertools.product(
        ("no_nodes", "no_edges", "no_destinations", "one_edge"), ({}, everything)
    ):
        graph = make_graph(name, device)
        inputs = make_inputs(score, graph, 3, 8, **given)
        mask = torch.ones(graph.num_edges, dtype=torch.bool, device=device)
        seed = torch.tensor([3], device=device)
        check(score, graph, inputs, f"{name}: ", mask=mask, return_attention=True)
        check(score, graph, inputs, f"{name}: ", dropout_p=0.5, generator=seed)


def test_leaky_dot_product(device):
    """SuperGAT's SD attention."""
    graph = make_graph("mixed_degrees", device)
    for dtype in (torch.float32, torch.float64):
        inputs = make_inputs("dot", graph, 3, 8, dtype, term=True)
        check("dot", graph, inputs, negative_slope=0.2)


@covered(
    slope=[0.2, 0.0, -0.5],
    where=["key", "value", "both"],
    case=[("mixed_degrees", 3, 8, torch.float32), ("super_row", 2, 64, torch.bfloat16),
          ("sorted", 4, 16, torch.float64)],
    together=YES_OR_NO,
)  # fmt: skip
def test_leaky_dot_product_of_features(device, slope, where, case, together):
    """Scores on both sides of the LeakyReLU's bend, in whole and in split rows, with and without edge ids."""
    name, heads, dim, dtype = case
    graph = make_graph(name, device)
    more = dict(term=True, gate="H", weight=1) if together else {}
    inputs = make_inputs("dot", graph, heads, dim, dtype, edge=f"edge_{where}", **more)
    options = {"negative_slope": slope, "return_attention": together}
    check("dot", graph, inputs, **options)


@pytest.mark.parametrize("frozen", ["edge_both", "gate", "weight", "bias"])
def test_gradients_not_wanted(device, frozen):
    """If one edge tensor needs no gradient, the gradients of the others stay the same."""
    graph = make_graph("mixed_degrees", device)
    inputs = make_inputs("dot", graph, 3, 8, edge=True, term=True, gate="H", weight="H")
    all_of_them = run(function("dot"), graph, inputs)
    constant = inputs.pop(frozen)
    others = run(function("dot"), graph, inputs, **{frozen: constant})
    # With the gradient of edge_both a CPU saves each edge's weight instead of computing it twice.
    error = 1e-5 if frozen == "edge_both" else 0
    for name, found in others.items():
        torch.testing.assert_close(found, all_of_them[name], rtol=error, atol=error, msg=name)
