"""What must hold without an oracle: equal graphs give equal results, and what is not finite stays local."""

import dataclasses
import math

import pytest
import torch
from corpus import calls, cases, generator, graphs
from criterion import gradients
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from dfgnn import Graph, functional

FAMILIES = ("gat_attention", "gatv2_attention", "dot_attention")
SOURCES = ("value", "score_src", "key")
DESTINATIONS = ("score_dst", "query")
_OF_HEADS = ("edge_key", "edge_value", "edge_both")
PER_EDGE = ("bias", "edge_score", "gate", "weight", "mask", "score", "edge_attr", *_OF_HEADS)
EXACT = (torch.float32, torch.float64)


def example(functions=FAMILIES, dtypes=EXACT, examples=1.0, **how):
    """Decorator: runs a test on random pairs of a GraphSpec and a Call that fits it. examples: their number,
    as a share of the profile's."""
    most = max(int(settings.default.max_examples * examples), 1)

    def decorate(test):
        return settings(max_examples=most)(
            given(cases(functions=functions, dtypes=dtypes, **how), st.data())(test)
        )

    return decorate


def same(x, y, note=""):
    """Equal except for the order of sums, of values of the size of 1."""
    assert x.shape == y.shape, f"{note}: shape {tuple(x.shape)}, not {tuple(y.shape)}"
    difference = (x.double() - y.double()).norm().item()
    tolerance = 1e-12 if x.dtype == torch.float64 else 3e-5
    limit = tolerance * (y.double().norm().item() + math.sqrt(max(y.numel(), 1)))
    assert difference <= limit, f"{note}: {difference:.3g} > {limit:.3g}"


def changed(tensors, names, change):
    return {n: change(x) if n in names else x for n, x in tensors.items()}


@example(dropout=False, examples=0.6)
def test_order_of_edges(device, case, data):
    spec, call = case
    graph, (leaves, masks) = spec.build(device), call.inputs(device)
    order = torch.randperm(graph.num_edges, generator=generator(call.seed)).to(device)
    other = Graph.from_coo(*graph.edge_index[:, order], num_src=spec.num_src, num_dst=spec.num_dst)
    expected = call(functional, graph, leaves, masks)
    results = call(functional, other, *(changed(t, PER_EDGE, lambda x: x[order]) for t in (leaves, masks)))
    same(results[0], expected[0])
    if len(results) > 1:
        same(results[1], expected[1][order])


@example(dropout=False, examples=0.6)
def test_heads_by_themselves(device, case, data):
    spec, call = case
    graph, (leaves, masks) = spec.build(device), call.inputs(device)
    heads = next(iter(leaves.values())).shape[1]
    expected = call(functional, graph, leaves, masks)

    def part(name, x, h):
        if name in ("att", "out_bias"):
            return x[h : h + 1]
        if name.startswith("edge_") and name.endswith(("_weight", "_bias")):
            return x.unflatten(0, (heads, -1))[h]
        if name == "edge_attr" or name in _OF_HEADS and x.dim() == 2:
            return x
        return x[:, h : h + 1] if x.dim() > 1 else x

    for h in {0, heads - 1}:
        inputs = ({n: part(n, x, h) for n, x in t.items()} for t in (leaves, masks))
        for x, y in zip(call(functional, graph, *inputs), expected):
            same(x, y[:, h : h + 1], f"head {h}")


@example(dropout=False, examples=0.6)
def test_isolated_nodes_change_nothing(device, case, data):
    spec, call = case
    graph, (leaves, masks) = spec.build(device), call.inputs(device)
    more_src, more_dst = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    other = Graph.from_coo(
        *graph.edge_index, num_src=spec.num_src + more_src, num_dst=spec.num_dst + more_dst
    )
    wider = changed(leaves, SOURCES, lambda x: torch.cat([x, x.new_full((more_src, *x.shape[1:]), math.nan)]))
    wider = changed(wider, DESTINATIONS, lambda x: torch.cat([x, x.new_ones((more_dst, *x.shape[1:]))]))
    expected, results = call(functional, graph, leaves, masks), call(functional, other, wider, masks)
    same(results[0][: spec.num_dst], expected[0])
    bias = leaves.get("out_bias", torch.zeros((), dtype=expected[0].dtype, device=device))
    assert torch.equal(results[0][spec.num_dst :], bias.expand_as(results[0][spec.num_dst :]))
    if len(results) > 1:
        same(results[1], expected[1])


@example(functions=("gat_attention", "dot_attention"), examples=0.6, dropout=False)
def test_linear_in_the_values(device, case, data):
    spec, call = case
    name = "value"
    # These are added to the values or the result, which are then not linear in the values.
    assume(not {"out_bias", "edge_value", "edge_both", "edge_attr"} & set(call.tensors))
    graph, (leaves, masks) = spec.build(device), call.inputs(device)
    factor = data.draw(st.sampled_from((-4.0, 0.0, 0.5, 1024.0)))
    expected = call(functional, graph, leaves, masks)
    result = call(functional, graph, changed(leaves, (name,), lambda x: factor * x), masks)
    # A factor that is a power of two changes only exponents, so that the results are equal to the bit.
    assert torch.equal(result[0], factor * expected[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_draws_the_same_dropout(device, use_reentrant):
    @example(examples=0.25)
    def drawn(device, case, data):
        spec, call = case
        options = {n: x for n, x in call.options.items() if n != "generator"}
        call = dataclasses.replace(call, options={**options, "dropout_p": 0.5})
        graph = spec.build(device)
        runs = []
        for checkpointed in (False, True):
            leaves, masks = call.inputs(device)
            torch.manual_seed(call.seed)

            def run(*tensors, leaves=leaves, masks=masks):
                return call(functional, graph, dict(zip(leaves, tensors)), masks)

            if checkpointed:
                results = checkpoint(run, *leaves.values(), use_reentrant=use_reentrant)
            else:
                results = run(*leaves.values())
            runs.append([*results, *gradients("", results, leaves).values()])
        assert all(torch.equal(x, y) for x, y in zip(*runs))

    drawn(device)


def reached(graph, node, shared):
    """Boolean masks of the sources, destinations and edges that a source may change, forward or backward.

    shared: sources are destinations, too.
    """
    src, dst = graph.edge_index
    hit_dst = torch.zeros(graph.num_dst, dtype=torch.bool, device=graph.device)
    hit_dst[dst[src == node]] = True
    if shared:
        hit_dst[node] = True
    edges = hit_dst[dst]
    hit_src = torch.zeros(graph.num_src, dtype=torch.bool, device=graph.device)
    hit_src[src[edges]] = True
    hit_src[node] = True
    return (hit_src | hit_dst if shared else hit_src), hit_dst, edges


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("function", [*FAMILIES, "agnn_attention", "spmm", "sddmm"])
def test_not_finite_stays_with_the_neighbours(device, function, value):
    """A value that is not finite may change only destinations that have the node for a neighbour, and the
    gradients that these send back; elsewhere no bit differs, but for other roundings on tiles."""

    @settings(max_examples=max(settings.default.max_examples // 3, 10))
    @given(graphs(), st.data())
    def drawn(spec, data):
        assume(spec.num_src and spec.num_dst)
        call = data.draw(calls(spec, functions=(function,)))
        node = data.draw(st.integers(0, spec.num_src - 1))
        names = data.draw(st.sets(st.sampled_from([n for n in call.tensors if n in SOURCES]), min_size=1))
        graph = spec.build(device)
        shared = function == "agnn_attention" and "query" not in call.tensors
        hit_src, hit_dst, hit_edges = reached(graph, node, shared)
        runs = []
        for dirty in (False, True):
            leaves, masks = call.inputs(device)
            for name in names:  # cloned in both runs: torch's order of sums depends on the memory layout
                leaves[name] = leaves[name].detach().clone()
                if dirty:
                    leaves[name][node] = value
                leaves[name].requires_grad_()
            results = call(functional, graph, leaves, masks)
            runs.append((results, gradients("", results, leaves)))
        (clean, clean_grads), (dirty, dirty_grads) = runs
        by_edge = function == "sddmm"
        # Tiles compute rows near such a number again, edge by edge, which rounds otherwise.
        rounding = 8 * torch.finfo(call.dtype).eps if device == "cuda" and call.dtype.itemsize == 2 else 0.0

        def same(x, y):
            size = y[y.isfinite()].abs().max().item() if y.isfinite().any() else 0.0
            return torch.allclose(x, y, rtol=0, atol=rounding * max(size, 1), equal_nan=True)

        for x, y, hit in zip(dirty, clean, (hit_edges if by_edge else hit_dst, hit_edges)):
            assert same(x[~hit], y[~hit]), "a row that is no neighbour's"
        hits = {**dict.fromkeys(SOURCES, hit_src), **dict.fromkeys(DESTINATIONS, hit_dst)}
        hits |= dict.fromkeys(PER_EDGE, hit_edges)
        for name, grad in dirty_grads.items():
            if name in hits:
                expected = clean_grads[name]
                assert same(grad[~hits[name]], expected[~hits[name]]), f"gradient of {name}"
        neighbours = graph.edge_index[1][graph.edge_index[0] == node]
        if math.isnan(value) and not by_edge and not call.masks and "dropout_p" not in call.options:
            assert dirty[0][neighbours].isnan().any(-1).all(), "a NaN that vanished"

    drawn()
