"""The GPU's operator that makes both CSRs of edges and the statistics by which plans are chosen gives the
same results as plain tensor operations."""

import warnings

import pytest
import torch
from graphs import GRAPHS

from dfgnn import Graph, functional
from dfgnn.graph import cache as _kept
from dfgnn.plan import Shape, items
from dfgnn.runtime.arguments import ops
from dfgnn.sparse import csr as _csr
from dfgnn.sparse.csr import CSR
from dfgnn.sparse.degrees import Degrees, degree_stats

HERE = "here", ("src", "dst")
INT32, INT64 = torch.int32, torch.int64


def sized(num_edges, num_nodes):
    def build():
        generator = torch.Generator().manual_seed(num_edges)
        src, dst = (torch.rand(2, num_edges, generator=generator) ** 2 * num_nodes).long()
        src[::9] = dst[::9]
        return src, dst, num_nodes + 3, num_nodes + 1

    return build


# Numbers of edges at the limits of the kernels: fewer than one thread block takes, as many, one tile of the
# radix sort and more, several blocks and passes; the most that a thread block cluster and a grid sort at
# once, alone and with loops, and more; and node ids of many bits.
CASES = {**GRAPHS, **{f"{e} edges": sized(e, n) for e, n in ((511, 90), (2048, 300), (2500, 2000))}}
CASES |= {f"{e} edges": sized(e, n) for e, n in ((5000, 70), (60_000, 3000), (700_000, 70_000))}
CASES |= {f"{e} edges": sized(e, n) for e, n in ((2**18 - 5001, 5000), (2**18, 300), (333, 200_000))}
CASES |= {f"{e} edges": sized(e, n) for e, n in ((4096, 999), (8000, 150), (2**14, 700), (2**14 + 1, 5000))}


def degrees_of(degree: torch.Tensor) -> list[int]:
    """The statistics that the operator returns for rows with these degrees."""
    n, squares = degree.numel(), int((degree * degree).sum())
    found = [0, 0, 0, 0, squares]
    if n:
        ordered = degree.sort().values
        quantiles = [int(ordered[-(-n * percent // 100) - 1]) for percent in (50, 99)]
        found[:4] = *(min(q, 2048) for q in quantiles), int((degree == 0).sum()), int(degree.max())
    for bound in _CUTS:
        more = ((degree - 1).clamp(min=0)) // bound
        found += [int(more.sum()), int((more > 0).sum())]
    return found


_CUTS = [32, 64, 128, 256, 512, 1024]


def structure(src, dst, num_src, num_dst, with_loops):
    """The operator in plain tensor operations. Its tensors have no room for edges that are dropped, except in
    front of loops."""
    ends = [src.long(), dst.long()]
    numbers = [n for x in ends for n in ((int(x.min()), int(x.max())) if x.numel() else (0, -1))]
    falls = [int((x[1:] < x[:-1]).sum()) for x in ends]
    keep = (ends[0] >= 0) & (ends[0] < num_src) & (ends[1] >= 0) & (ends[1] < num_dst)
    if with_loops:
        keep &= ends[0] != ends[1]
    edge_map = keep.nonzero().squeeze(1)
    ends = [x[keep] for x in ends]
    numbers += [edge_map.numel(), *falls]
    dropped = src.numel() - edge_map.numel()
    if with_loops:
        loops = torch.arange(min(num_src, num_dst))
        ends = [torch.cat([x, loops]) for x in ends]
        edge_map = torch.cat([edge_map, torch.full_like(loops, -1)])
    made, as_given = [], not with_loops and not falls[0] and falls[1]
    order = torch.arange(ends[0].numel())
    for rows, cols, n in ((ends[1], ends[0], num_dst), (ends[0], ends[1], num_src)):
        eids = order[torch.sort(rows[order], stable=True).indices]
        order, ordered = order if as_given else eids, rows[eids]
        indptr = torch.searchsorted(ordered, torch.arange(n + 1))
        room = torch.zeros(dropped, dtype=INT32)
        made += [indptr, torch.cat([cols[eids].int(), room]), torch.cat([eids.int(), room])]
        numbers += degrees_of(indptr.diff())
    edge_map = torch.cat([edge_map, torch.zeros(dropped, dtype=INT64)]) if with_loops else None
    return torch.tensor(numbers), *made[:3], edge_map, *made[3:]


def structure_read(*args):
    numbers, *made = structure(*args)
    return numbers.tolist(), *made


def given(name, device="cpu", dtypes=(INT64, INT64)):
    src, dst, num_src, num_dst = CASES[name]()
    return src.to(device, dtypes[0]), dst.to(device, dtypes[1]), num_src, num_dst


def check(found: _csr.Edges, src, dst, num_src, num_dst, with_loops):
    """Edges of the operator: both directions, in the user's order, and their degrees."""
    numbers, *made, edge_map, rev_indptr, rev_indices, rev_eids = structure(
        src.cpu(), dst.cpu(), num_src, num_dst, with_loops
    )
    num_edges = len(found.csr.indices)
    assert (found.num_src, found.num_dst, found.by_src) == (num_src, num_dst, False)
    assert num_edges == int(numbers[4]) + (min(num_src, num_dst) if with_loops else 0)
    if with_loops:
        assert torch.equal(found.edge_map.cpu(), edge_map[:num_edges])
    else:
        assert found.edge_map is None
    assert found.other is not None
    for csr, expected in ((found.csr, made), (found.other, (rev_indptr, rev_indices, rev_eids))):
        assert all(x is None or x.is_contiguous() for x in csr)
        assert torch.equal(csr.indptr.cpu(), expected[0])
        assert torch.equal(csr.indices.cpu(), expected[1][:num_edges])
        if csr.eids is None:
            assert torch.equal(expected[2][:num_edges], torch.arange(num_edges).int())
        else:
            assert torch.equal(csr.eids.cpu(), expected[2][:num_edges])
    assert found.degrees is not None
    for degrees, indptr in zip(found.degrees, (made[0], rev_indptr)):
        degree = indptr.diff()
        stats = degree_stats(degree, num_edges)
        assert isinstance(degrees, Degrees) and degrees.stats == (stats if stats.p99 < 2048 else None)
        for bound in _CUTS:
            cut = items.cut(indptr[None, :-1], indptr[None, 1:], bound, False)
            assert degrees.cuts[bound] == (len(cut.items) - len(degree), len(cut.splits))


@pytest.fixture
def in_tensors(monkeypatch):
    """Lets the CPU take the code path of GPUs, with `structure` above in place of the operator."""
    monkeypatch.setattr(_csr, "structure_on_gpu", structure)
    monkeypatch.setattr(_csr, "structure_read", structure_read)
    monkeypatch.setattr(_csr._ops, "on_device", lambda x: True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_loops", [False, True])
def test_what_is_made_of_the_numbers(name, with_loops, in_tensors):
    args = given(name)
    check(_csr._from_edges_on_gpu(_csr.UserEdges(*HERE, *args), True, with_loops), *args, with_loops)


def test_bad_nodes_are_an_error_in_the_words_of_the_cpu(in_tensors):
    src, dst = torch.tensor([0, 1, 5]), torch.tensor([0, -3, 1])
    for ends, sizes in (((src, dst), (6, 2)), ((src, dst), (5, 9)), ((dst, src), (2, 5))):
        with pytest.raises(ValueError, match=r"here: (src|dst): expected values in \[0, num_") as expected:
            _csr.from_edges(_csr.UserEdges(*HERE, *ends, *sizes))
        for with_loops in (False, True):
            with pytest.raises(ValueError) as found:
                _csr._from_edges_on_gpu(_csr.UserEdges(*HERE, *ends, *sizes), True, with_loops)
            assert str(found.value) == str(expected.value)


# ---- on a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_loops", [False, True])
@pytest.mark.parametrize("dtypes", [(INT64, INT64), (INT32, INT32), (INT32, INT64)])
def test_the_operator(name, with_loops, dtypes):
    src, dst, *sizes = given(name, "cuda", dtypes)
    for ends in ((src, dst), torch.stack([src.long(), dst.long()], 1).unbind(1)):
        args = (*ends, *sizes)
        check(_csr.from_edges(_csr.UserEdges(*HERE, *args), with_loops=with_loops), *args, with_loops)
    order = torch.argsort(dst, stable=True)
    args = (src[order], dst[order], *sizes)
    edges = _csr.from_edges(_csr.UserEdges(*HERE, *args))
    check(edges, *args, False)
    assert edges.csr.eids is None


@pytest.mark.gpu
def test_the_operator_gives_the_same_bits():
    src, dst, *sizes = given("700000 edges", "cuda")
    for num_edges in (4096, 200_000, len(src)):
        ends = src[:num_edges], dst[:num_edges]
        first, *more = (ops.structure(*ends, *sizes, False) for _ in range(4))
        for found in more:
            assert all(a is b or torch.equal(a, b) for a, b in zip(first, found))


@pytest.mark.gpu
def test_bad_nodes_on_the_gpu():
    src, dst = torch.tensor([0, 1, 5], device="cuda"), torch.tensor([0, -3, 1], device="cuda")
    for ends, sizes, message in (
        ((src, dst), (6, 2), r"dst: expected values in \[0, num_dst=2\), got -3 at position 1"),
        ((src, dst.abs()), (5, 9), r"src: expected values in \[0, num_src=5\), got 5 at position 2"),
    ):
        for with_loops in (False, True):
            with pytest.raises(ValueError, match=message):
                _csr.from_edges(_csr.UserEdges(*HERE, *ends, *sizes), with_loops=with_loops)
    wild = torch.tensor([[0, 2**40, -(2**50), 2**31], [1, 0, 2**62, 2]], device="cuda")
    with pytest.raises(ValueError, match="edge_index"):
        _kept.graph_of(wild, 3, 3, True)
    args = *wild, 3, 3
    numbers, indptr, indices, *_ = ops.structure(*args, False)  # nothing is read or written out of bounds
    assert numbers[4].item() == 1 and indptr.tolist() == [0, 0, 1, 1] and indices[0].item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("layer", ["gat", "gatv2", "dot"])
def test_a_fresh_graph_waits_once(self_loops, layer, count_calls):
    """The host waits for the GPU once for both directions, their plans and all else that a step needs."""
    src, dst, num_nodes, _ = sized(9000, 700)()
    edge_index = torch.stack([src, dst]).cuda()

    def plans(edge_index):
        graph, _ = _kept.graph_of(edge_index, num_nodes, num_nodes, self_loops)
        for dim in (8, 32):
            graph._planner.handle(4, dim, torch.float32, layer, "auto", False, True)
        return graph

    plans(edge_index.clone())
    calls = count_calls(_csr, "structure_read")
    torch.cuda.set_sync_debug_mode("warn")  # waits outside `structure_read` warn; "error" refuses
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            plans(edge_index.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(calls) == 1 and not [w for w in waits if "synchronizing" in str(w.message)]


@pytest.mark.gpu
@pytest.mark.parametrize("with_loops", [False, True])
def test_numbers_on_the_host_are_those_on_the_device(with_loops):
    """The statistics that the host reads equal those on the device, also on another stream with much queued
    work; the tensors may then be used on that stream."""
    stream = torch.cuda.Stream()
    for name in ("5000 edges", "700000 edges", "511 edges", "60000 edges"):
        args = *given(name, "cuda"), with_loops
        expected, *others = ops.structure(*args)
        num_edges = int(expected[4]) + (min(args[2:4]) if with_loops else 0)
        stream.wait_stream(torch.cuda.current_stream())
        for busy in (0, 1_000_000, 50_000_000):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(busy)
                numbers, *made = ops.structure_read(*args)
                assert numbers == expected.tolist()
                for a, b in zip(made, others):
                    assert a is b or torch.equal(a[:num_edges], b[:num_edges])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*GRAPHS, "60000 edges", "700000 edges"])
@pytest.mark.parametrize("edges", [False, True])
def test_a_handle_in_one_call_is_that_of_several(name, edges):
    src, dst, num_src, num_dst = given(name, "cuda")
    for layer, backward in (("gat", True), ("gatv2", True), ("dot", False)):
        fresh, known = (Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst) for _ in range(2))
        args = (4, 16, torch.float32, layer)
        known.plan(*args[:3], layer=layer, edges=edges)
        expected = known._planner.arguments(*args, schedule="auto", edges=edges, backward=backward)
        found = fresh._planner.handle(*args, "auto", edges, backward).args
        assert len(found) == len(expected)
        for a, b in zip(found, expected):
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
        plan = fresh.plan(*args[:3], layer=layer, edges=edges)  # has the same items tensor
        assert plan.items.data_ptr() == found.items.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["natural<=32", "natural<=64", "longest_first<=64", "packed<=128"])
def test_items_without_waiting_are_those_that_were_counted(schedule):
    src, dst, *sizes = given("mixed_degrees", "cuda")
    graph = Graph.from_coo(src, dst, num_src=sizes[0], num_dst=sizes[1])
    bound = int(schedule.partition("<=")[2])
    for reverse in (False, True):
        plan = graph._planner.plan(Shape(2, 16, torch.float32, "gat"), reverse, schedule)
        csr = graph.reverse_csr() if reverse else graph.csr()
        counted = items.cut_on_gpu(CSR(*csr), sizes[reverse], bound, "natural" not in schedule, 1)
        assert plan.num_slots == counted.num_slots > 0
        assert torch.equal(plan.items, counted.items) and torch.equal(plan.splits, counted.splits)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHS)
def test_attention_on_what_was_made(name):
    """The same as on a graph that the CPU has sorted."""
    src, dst, num_src, num_dst = GRAPHS[name]()
    fresh = Graph.from_coo(src.cuda(), dst.cuda(), num_src=num_src, num_dst=num_dst)
    moved = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst).to("cuda")
    torch.manual_seed(0)
    inputs = [
        torch.randn(n, 2, 8, device="cuda", dtype=torch.float64, requires_grad=True)
        for n in (num_dst, num_src, num_src)
    ]
    bias = torch.randn(len(src), 2, device="cuda", dtype=torch.float64, requires_grad=True)
    results = []
    for graph in (fresh, moved):
        out = functional.dot_attention(graph, *inputs, bias=bias)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, bias])])
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-10)
