"""Graphs with more edges than a kernel can count (2³¹), which are divided into ranges of destinations. Here
the limit is lowered, so that small graphs are divided."""

import pickle

import pytest
import torch
from attention import SCORES, function, make_inputs, relative_error, run
from graphs import GRAPHS

from dfgnn import Graph, functional, nn
from dfgnn.engine import edge_maps as _products
from dfgnn.functional import EdgeTerm, Projected
from dfgnn.graph import RangedGraph, ranges
from dfgnn.sparse import csr as _csr

MOST = 97


@pytest.fixture
def few(monkeypatch):
    """A CSR has fewer than MOST edges, and operations take 50 values at a time."""
    monkeypatch.setattr(_csr, "MOST_EDGES", MOST)
    monkeypatch.setattr(ranges, "_CHUNK", 50)


def edges(order: str, num_src=40, num_dst=60, count=700):
    """Random edges in the given order; rows have 0 to 80 of them."""
    generator = torch.Generator().manual_seed(0)
    dst = (torch.rand(count, generator=generator) ** 2 * num_dst).long()
    dst[dst % 7 == 3] -= 1
    src = torch.randint(num_src, (count,), generator=generator)
    if order == "sorted":
        dst = dst.sort().values
    return src, dst, num_src, num_dst


def both(order: str, device, **sizes):
    """The same graph whole and in ranges."""
    src, dst, num_src, num_dst = edges(order, **sizes)
    src, dst = src.to(device), dst.to(device)
    most, _csr.MOST_EDGES = _csr.MOST_EDGES, 2**31
    whole = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    whole.reverse_csr()
    _csr.MOST_EDGES = most
    return whole, Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("order", ["sorted", "mixed"])
def test_results_are_those_of_the_whole_graph(few, device, order, score):
    whole, graph = both(order, device)
    assert isinstance(whole, Graph) and isinstance(graph, RangedGraph) and len(graph.ranges) > 7
    assert all(part.graph.num_edges < MOST for part in graph.ranges)
    assert all(isinstance(part.place, slice) == (order == "sorted") for part in graph.ranges)
    kinds = [{}, {"term": True, "weight": "H", "gate": 1}, {"edge": True}]
    mask = torch.rand(whole.num_edges, device=device) < 0.5
    for kind in kinds:
        inputs = make_inputs(score, whole, 3, 8, torch.float64, **kind)
        if kind:
            inputs["sink"] = torch.randn(3, dtype=torch.float64, device=device)
            inputs["out_bias"] = torch.randn(3, 8, dtype=torch.float64, device=device)
        if "edge" in kind and score == "gat":
            inputs["score_dst"] = None
        for options in ({}, {"return_attention": True}, {"mask": mask}):
            expected = run(function(score), whole, inputs, **options)
            for name, x in run(function(score), graph, inputs, **options).items():
                assert relative_error(x, expected[name], 1.0) < 1e-12, name


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("order", ["sorted", "mixed"])
def test_products(few, device, order, reverse):
    whole, graph = both(order, device)
    sizes = (40, 60) if reverse else (60, 40)
    rows, feat = (torch.randn(n, 2, 8, dtype=torch.float64, device=device) for n in sizes)
    weight = torch.randn(700, 2, dtype=torch.float64, device=device)
    for product, inputs in ((_products.sddmm, (rows, feat)), (_products.spmm, (weight, feat))):
        inputs = [x.requires_grad_() for x in inputs]
        found, expected = (product(g, *inputs, reverse) for g in (graph, whole))
        torch.testing.assert_close(found, expected)
        grad = torch.randn_like(expected)
        torch.testing.assert_close(*(torch.autograd.grad(r, inputs, grad) for r in (found, expected)))


def test_dropout_drops_other_edges_in_each_range(few, device):
    """All destinations have the same neighbours, so that two ranges with the same dropout mask would show."""
    src, dst = torch.arange(48, device=device).repeat(30), torch.arange(30, device=device)
    graph = Graph.from_coo(src, dst.repeat_interleave(48))
    assert len(graph.ranges) == 15
    zeros = torch.zeros(48, 1, device=device)
    seed = torch.tensor([3], device=device)
    _, weights = functional.gat_attention(
        graph,
        torch.ones(48, 1, 4, device=device),
        zeros,
        None,
        dropout_p=0.5,
        return_attention=True,
        generator=seed,
    )
    kept = weights.view(15, 96) > 0
    assert 0.4 < kept.float().mean() < 0.6 and len(kept.unique(dim=0)) == 15


@pytest.mark.parametrize("order", ["sorted", "mixed"])
def test_structure(few, order):
    src, dst, num_src, num_dst = edges(order)
    whole, graph = both(order, "cpu")
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (num_src, num_dst, 700)
    ends = graph.ends()
    assert torch.equal(ends[0], src.int()) and torch.equal(ends[1], dst.int())
    assert torch.equal(graph.in_degrees(), whole.in_degrees())
    assert torch.equal(graph.out_degrees(), whole.out_degrees())
    assert graph.has_zero_in_degree == whole.has_zero_in_degree is True
    back = graph.reverse()
    assert (back.num_src, back.num_dst) == (num_dst, num_src)
    assert torch.equal(back.ends()[1], src.int()) and torch.equal(back.ends()[0], dst.int())
    looped, expected = graph.with_self_loops(), whole.add_self_loops(remove_existing=True)
    assert torch.equal(torch.stack(looped.ends()).long(), expected.edge_index)
    assert graph.to("cpu") is graph and "700" in repr(graph)
    again = pickle.loads(pickle.dumps(graph))
    assert torch.equal(again.ends()[0], src.int())


@pytest.mark.parametrize("eids", [False, True])
def test_from_csr(few, device, eids):
    src, dst, num_src, num_dst = edges("sorted")
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(dst, minlength=num_dst).cumsum(0)])
    order = torch.randperm(700) if eids else None
    graph = Graph.from_csr(
        indptr.to(device), src.to(device), num_src, eids=None if order is None else order.to(device)
    )
    assert isinstance(graph, RangedGraph)
    found = [x.cpu() for x in graph.ends()]
    if eids:
        found = [x[order] for x in found]
    assert torch.equal(found[0], src.int()) and torch.equal(found[1], dst.int())


def test_every_small_graph_in_ranges(monkeypatch, device):
    """All test graphs, with ranges as short as their longest row allows."""
    monkeypatch.setattr(ranges, "_CHUNK", 64)
    for name, make in GRAPHS.items():
        src, dst, num_src, num_dst = (x.to(device) if torch.is_tensor(x) else x for x in make())
        longest = int(torch.bincount(dst, minlength=1).max()) if len(dst) else 0
        if not 0 < longest + 1 <= len(dst):
            continue
        monkeypatch.setattr(_csr, "MOST_EDGES", longest + 1)
        graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
        assert isinstance(graph, RangedGraph), name
        monkeypatch.setattr(_csr, "MOST_EDGES", 2**31)
        whole = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
        inputs = make_inputs("dot", whole, 2, 8)
        ranged = run(functional.dot_attention, graph, inputs)
        for key, x in run(functional.dot_attention, whole, inputs).items():
            assert relative_error(ranged[key], x.double(), 1.0) < 1e-5, (name, key)


def test_layers_take_it(few, device):
    whole, graph = both("mixed", device, num_src=60)
    layer = nn.GraphTransformerConv(12, 4, 3, allow_zero_in_degree=True).to(device)
    x = torch.randn(60, 12, device=device)
    torch.testing.assert_close(layer(graph, x), layer(whole, x))
    layer.allow_zero_in_degree = False
    with pytest.raises(ValueError, match="without in-edges"):
        layer(graph, x)


def test_gradients_to_second_order_and_under_functions(few):
    whole, graph = both("mixed", "cpu")
    feat = torch.randn(40, 2, 4, dtype=torch.float64)
    alpha = torch.randn(40, 2, dtype=torch.float64)

    def value(g, x):
        return functional.gat_attention(g, x, alpha * x.mean(-1), None).square().sum()

    torch.testing.assert_close(torch.func.grad(value, 1)(graph, feat), torch.func.grad(value, 1)(whole, feat))
    twice = [torch.autograd.functional.vhp(lambda x, g=g: value(g, x), feat, feat)[1] for g in (graph, whole)]
    torch.testing.assert_close(*twice)


def test_errors(few):
    src, dst, num_src, num_dst = edges("mixed")
    cases = [
        (lambda: Graph.from_coo(src, dst.clamp(max=3)), r"destination \d: expected fewer than 2\*\*31 edges"),
        (
            lambda: Graph.from_coo(src, dst, num_src=5, num_dst=num_dst),
            r"src: expected values in \[0, num_src=5\), got",
        ),
        (lambda: Graph.from_coo(src, dst - 1, num_src=40), r"dst: expected values .* got -1"),
        (lambda: Graph.from_coo(src, dst, num_src=40, num_dst=2**31), r"expected a number in \[0, 2\*\*31\)"),
        (lambda: Graph.from_csr(torch.tensor([0, 5]), src), "indptr: expected values that rise from 0"),
        (lambda: Graph.from_csr(torch.tensor([0, 650, 80, 700]), src), "indptr: expected values that rise"),
        (
            lambda: Graph.from_csr(torch.arange(0, 701, 10), src, eids=torch.zeros(700, dtype=torch.int64)),
            "eids: expected each edge once",
        ),
        (
            lambda: Graph.from_csr(torch.arange(0, 701, 10), src, eids=torch.arange(1, 701)),
            r"eids: expected values in \[0, 700\)",
        ),
        (lambda: Graph.from_csr(torch.arange(0, 701, 10), src, num_src=7), "7"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    attr, proj = torch.randn(700, 2), torch.randn(4, 2)
    with pytest.raises(NotImplementedError, match=r"2\*\*31 edges or more"):
        term = EdgeTerm(Projected(attr, proj))
        functional.dot_attention(graph, torch.randn(60, 1, 4), *torch.randn(2, 40, 1, 4), edge=term)
    with pytest.raises(NotImplementedError, match=r"RangedGraph: csr is not to be had of a graph of 2\*\*31"):
        graph.csr()
