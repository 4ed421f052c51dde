"""What edges bring to the attention: gate, mask, features, a bias on either side of the activation."""

import pytest
import torch
from attention import DTYPES, SCORES, check, function, make_inputs, run
from covering import covered
from graphs import make_graph

YES_OR_NO = False, True
FEATURES = [("gat", "value"), ("gatv2", "key"), ("dot", "key"), ("dot", "value"), ("dot", "both")]


# A graph, heads, and their size.
CASES = [
    ("mixed_degrees", 3, 8), ("isolated", 1, 33), ("super_row", 2, 4), ("super_source", 8, 7),
    ("duplicates", 4, 32), ("fewer_sources", 2, 300), ("fewer_destinations", 3, 64), ("sorted", 1, 1),
    ("no_edges", 2, 8), ("no_destinations", 3, 8), ("one_edge", 3, 16), ("super_row", 2, 64),
    ("no_nodes", 1, 4), ("sorted", 4, 16),
]  # fmt: skip


@covered(
    features=[*((score, None) for score in SCORES), *FEATURES], bias=[False, True, "bias"],
    gate=[None, 1, "H"],
    weight=[None, 1, "H"], mask=[None, 1, "H"], dropout=YES_OR_NO, slope=[None, 0.2, 0.0, -0.5, 1.5],
    out_bias=YES_OR_NO, sink=YES_OR_NO, attention=YES_OR_NO, without=YES_OR_NO, wide=YES_OR_NO, dtype=DTYPES,
    case=CASES, rows=[None, "grouped", "single"],
)  # fmt: skip
def test_options_together(
    device, monkeypatch, features, bias, gate, weight, mask, dropout, slope, out_bias, sink, attention,
    without, wide, dtype, case, rows,
):  # fmt: skip
    """wide: numbers of edges, and terms of GAT's scores, in float32 while features have 16 bits; without: GAT
    without the term of the destinations; rows: how the CPU computes short ones."""
    if rows:
        monkeypatch.setenv("DFGNN_CPU_ROWS", rows)
    (score, where), (name, heads, dim) = features, case
    graph, edge = make_graph(name, device), where and f"edge_{where}"
    if score == "dot" and slope not in (None, 1.0) and where in ("key", "both") and bias == "bias":
        bias = False  # it is added behind the LeakyReLU, the key's features before it
    inputs = make_inputs(score, graph, heads, dim, dtype, term=bias, gate=gate, weight=weight, edge=edge)
    if out_bias:
        inputs["out_bias"] = torch.randn(heads, dim).to(device, dtype)
    if sink:
        inputs["sink"] = torch.randn(heads).to(device, dtype)
    if wide:
        of_edges = {"bias", "edge_score", "gate", "weight", "score_src", "score_dst", "sink"}
        inputs |= {n: x.float() for n, x in inputs.items() if n in of_edges and dtype.itemsize == 2}
    if without and score == "gat":
        inputs["score_dst"] = None
    options = {"return_attention": True} if attention else {}
    if slope is not None:
        options["negative_slope"] = slope
    if mask:
        shape = (graph.num_edges,) if mask == 1 else (graph.num_edges, heads)
        options["mask"] = torch.rand(shape, device=device) < 0.7
    if dropout:
        options |= {"dropout_p": 0.4, "generator": torch.tensor([77], device=device)}
    results = check(score, graph, inputs, **options)
    assert all(results[f"grad_{n}"].dtype == x.dtype for n, x in inputs.items() if x is not None)


@covered(features=FEATURES, dim=[600, 1100], dtype=[torch.float32, torch.float16], edge=[True, False])
def test_wide_heads(device, features, dim, dtype, edge):
    """Heads of more columns than the registers of a warp hold."""
    graph, (score, where) = make_graph("isolated", device), features
    place = f"edge_{where}" if edge else False
    inputs = make_inputs(score, graph, 2, dim, dtype, edge=place, gate=1 if edge else None)
    inputs["out_bias"] = torch.randn(2, dim).to(device, dtype)
    check(score, graph, inputs)


@pytest.mark.parametrize("heads", [1, "H"])
@pytest.mark.parametrize("score", SCORES)
def test_mask(device, score, heads):
    """An edge that is masked is an edge that is not there; a row whose edges are all masked is zero."""
    for name in ("mixed_degrees", "super_row", "duplicates"):
        graph = make_graph(name, device)
        inputs = make_inputs(score, graph, 3, 8)
        mask = torch.rand(graph.num_edges, 3, device=device) < 0.6
        mask[graph.edge_index[1] == 1] = False
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


@pytest.mark.parametrize("score", SCORES)
def test_bend_of_the_activation(device, score):
    """Slopes of either sign, with scores on both sides of the LeakyReLU's bend and a bias behind it."""
    graph = make_graph("mixed_degrees", device)
    for slope in (0.0, 0.2, 1.5, -0.5):
        inputs = make_inputs(score, graph, 3, 8, term="bias" if score != "gatv2" else False)
        check(score, graph, inputs, f"{slope}: ", negative_slope=slope)
