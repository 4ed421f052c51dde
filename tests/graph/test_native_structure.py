"""The CPU's operators that make structures and plans give the same results as the tensor operations that run
on other devices."""

import pickle

import pytest
import torch
from covering import covered
from graphs import GRAPHS

from dfgnn import Graph
from dfgnn.plan import Shape, items
from dfgnn.sparse import csr as _csr
from dfgnn.sparse import degrees
from dfgnn.sparse.csr import CSR
from dfgnn.sparse.packed import PackedGraph

HERE = "here", ("src", "dst")
PAIRS = [
    (torch.int64, torch.int64),
    (torch.int32, torch.int32),
    (torch.int64, torch.int32),
    (torch.int32, torch.int64),
]


THREADS = [1, 2, 5]


def large():
    """Enough edges for several threads, and nodes without any."""
    generator = torch.Generator().manual_seed(1)
    src, dst = (torch.rand(2, 200_000, generator=generator) ** 2 * 3000).long()
    return src, dst, 3010, 3005


CASES = {**GRAPHS, "large": large}


def in_tensors(src, dst, num_src, num_dst, validate=True, with_loops=False):
    """`_csr.from_edges` as it is for other devices."""
    given = _csr.UserEdges(*HERE, src, dst, num_src, num_dst)
    (*_, num_src, num_dst), src_sorted, dst_sorted = given.checked(validate)
    edge_map = None
    if with_loops:
        src, dst, edge_map = _csr.append_loops(src, dst, min(num_src, num_dst), remove_existing=True)
        src_sorted, dst_sorted = (bool(_csr.is_sorted(end)) for end in (src, dst))
    src, dst = src.to(torch.int32), dst.to(torch.int32)
    by_src = src_sorted and not dst_sorted
    ends = (dst, src, num_src, True) if by_src else (src, dst, num_dst, dst_sorted)
    return _csr.Edges(num_src, num_dst, _csr.from_coo(*ends), by_src, edge_map)


def natively(*given, **options):
    """The CSR that the CPU's operators make first, in the form in which `in_tensors` returns it."""
    made = _csr.from_edges(_csr.UserEdges(*HERE, *given), **options)
    return _csr.Edges(*made.sizes, CSR(*made.csr(made.by_src)), made.by_src, made.edge_map)


def assert_same(found, expected):
    assert type(found) is type(expected)
    for a, b in zip(found, expected):
        if isinstance(b, tuple):
            assert_same(a, b)
        elif isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b)
        else:
            assert a == b and type(a) is type(b)


def orders(src, dst):
    """Yields the edges as they are, sorted by destination, by source and by both, and as strided views."""
    yield src, dst
    for key in (dst, src, src * (int(dst.max()) + 1 if len(dst) else 1) + dst):
        order = torch.argsort(key, stable=True)
        yield src[order], dst[order]
    yield torch.stack([src, dst], 1).unbind(1)


@covered(name=list(CASES), with_loops=[False, True], count=THREADS)
def test_edges(threads, name, with_loops, count):
    threads(count)
    src, dst, num_src, num_dst = CASES[name]()
    for left, right in orders(src, dst):
        for left_type, right_type in PAIRS:
            ends = left.to(left_type), right.to(right_type)
            given = (*ends, num_src, num_dst)
            found = natively(*given, with_loops=with_loops)
            assert_same(found, in_tensors(*given, with_loops=with_loops))


@covered(name=list(CASES), sizes=[(None, None), (4000, None), (None, 4000)], count=THREADS)
def test_sizes_are_found(threads, name, sizes, count):
    threads(count)
    src, dst, *_ = CASES[name]()
    for given in ((src, dst, *sizes), (dst.int(), src.int(), *sizes)):
        assert_same(natively(*given), in_tensors(*given))


def test_loops_that_are_there():
    """Loops among the given edges: anywhere, several at one node, and at nodes that only one side has."""
    src = torch.tensor([3, 0, 0, 2, 1, 3, 0, 5, 2])
    dst = torch.tensor([3, 0, 1, 2, 1, 0, 0, 2, 2])
    for num_src, num_dst in ((6, 6), (6, 4), (7, 9)):
        found = natively(src, dst, num_src, num_dst, with_loops=True)
        assert_same(found, in_tensors(src, dst, num_src, num_dst, with_loops=True))
        loops = min(num_src, num_dst)
        assert found.edge_map.tolist() == [2, 5, 7] + loops * [-1]


def test_only_what_is_needed_is_made():
    src, dst = torch.tensor([2, 0, 1]).int(), torch.tensor([0, 1, 1]).int()
    csr = natively(src, dst, 3, 3).csr
    assert csr.eids is None and csr.indices is src
    csr = natively(dst, src.sort().values, 3, 3).csr
    assert csr.eids is None and csr.indices is dst


@covered(name=list(CASES), need_eids=[False, True], count=THREADS)
def test_transpose(threads, name, need_eids, count):
    threads(count)
    src, dst, num_src, num_dst = CASES[name]()
    for left, right in orders(src, dst):
        edges = natively(left, right, num_src, num_dst)
        num_cols = num_dst if edges.by_src else num_src
        found = _csr.transpose(edges.csr, num_cols, need_eids)
        assert_same(found, _csr.transpose_in_tensors(edges.csr, num_cols, need_eids))


@covered(name=[*CASES, "many_rows"], bound=[1, 7, 32, 50, 4096], count=THREADS)
def test_items(threads, name, bound, count):
    threads(count)
    if name == "many_rows":
        csr = CSR(torch.arange(70_001), torch.zeros(70_000, dtype=torch.int32), None)
        num_cols = 1
    else:
        src, dst, num_cols, num_rows = CASES[name]()
        csr = Graph.from_coo(src, dst, num_src=num_cols, num_dst=num_rows).csr()
    found = items.cut_on_cpu(csr, bound)
    assert_same(found, items.cut(*items.by_source(csr, num_cols, 1), bound, longest_first=False))


@covered(name=list(CASES), known=["no gradient", "one side", "no ids", "both"], count=THREADS)
def test_a_graph_at_once(threads, name, known, count):
    """The operator that makes the missing CSR, items and splits together gives what separate operators
    give."""
    threads(count)
    src, dst, num_src, num_dst = CASES[name]()
    for left, right in orders(src, dst):
        for backward in (False, True):
            with torch.set_grad_enabled(known == "one side"):  # without it only what forward needs is made
                graph = Graph.from_coo(left, right, num_src=num_src, num_dst=num_dst)
            if known in ("no ids", "both"):
                graph.reverse_csr(need_eids=known == "both")
            args = graph._planner.handle(2, 4, torch.float32, "dot", "auto", True, backward).args
            # The graph caches the very tensors that the handle uses.
            assert args.indices is graph.csr().indices and args.eids is graph.csr().eids
            sides = [(graph.csr(), num_src, args[:5])]
            at_once = known == "one side" and max(len(src), num_src, num_dst) <= 2**16
            if backward or at_once:
                back = graph.reverse_csr(need_eids=True)
                assert args.rev_indices is back.indices and args.rev_eids is back.eids
                first = in_tensors(left, right, num_src, num_dst)
                other = _csr.transpose_in_tensors(first.csr, num_dst if first.by_src else num_src, True)
                expected = (other, first.csr) if first.by_src else (first.csr, other)
                assert_same((graph.csr(), back), expected)
                sides.append((back, num_dst, args[5:10]))
            else:
                assert args[5:] == (None, None, None, None, [], None, None)
            for csr, num_cols, (_, _, rows, splits, plan) in sides:
                expected = items.cut(*items.by_source(csr, num_cols, 1), 4096, longest_first=False)
                assert_same(items.Items(rows, splits, plan[0]), expected)
                assert plan[1:] == [0, 0, len(csr.indptr) - 1, num_cols, len(src)]


@pytest.mark.parametrize("with_loops", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_an_edge_index_is_sorted_as_its_rows(name, with_loops):
    src, dst, num_src, num_dst = GRAPHS[name]()
    sizes, pair = (num_src, num_dst), torch.stack([src, dst])
    for edge_index in (pair, pair.int(), pair.t().contiguous().t(), pair.repeat(1, 2)[:, ::2]):
        found = PackedGraph(edge_index, None, sizes, with_loops)
        expected = PackedGraph(*edge_index.long().unbind(), sizes, with_loops)
        assert found.num_edges == expected.num_edges and found.by_src == expected.by_src
        for reverse in (False, True):
            assert_same(found.csr(reverse), expected.csr(reverse))
        assert_same(found.args, expected.args)
        assert (found.edge_map is None) == (not with_loops)
        if with_loops:
            assert torch.equal(found.edge_map, expected.edge_map)


def test_a_packed_graph_is_copied_without_the_rest_of_its_tensor():
    src, dst, num_src, num_dst = GRAPHS["random"]()
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    copied = pickle.loads(pickle.dumps(graph))
    for ours, theirs in ((graph.csr(), copied.csr()), (graph.reverse_csr(True), copied.reverse_csr(True))):
        assert_same(theirs, ours)
        for x in theirs:
            assert x is None or x.untyped_storage().nbytes() == x.nbytes


def test_a_graph_at_once_is_that_of_all_shapes():
    graph = Graph.from_coo(*(torch.tensor([0, 1, 2, 2]), torch.tensor([2, 1, 0, 1])))
    first = graph._planner.handle(1, 4, torch.float32, "gat", "auto", False, True)
    assert graph._planner.handle(2, 8, torch.float64, "dot", "auto", True, True) is first
    given = graph._planner.arguments(1, 2, torch.float16, "gatv2", schedule="auto", edges=True, backward=True)
    assert given is first.args
    graph._planner.adopt(Shape(1, 4, torch.float32), False, "natural<=32", "tuned")
    assert graph._planner.handle(1, 4, torch.float32, "gat", "auto", False, True) is not first


BAD = [
    ([0, 7, 1], [0, 1, 1], (4, 4)),
    ([0, 1, 1], [0, 4, 1], (4, 4)),
    ([0, -1, 1], [0, 1, 1], (4, 4)),
    ([0, 1, 1], [-9, 1, 1], (None, None)),
    ([0, 1, 1], [-9, -1, -1], (None, None)),
    ([0, 1, 2**31], [0, 1, 1], (None, None)),
    ([0, 1, 1], [0, 1, 2**40], (4, None)),
    ([0, 1, 2**63 - 1], [0, 1, 1], (None, 4)),
    ([0, 1, -(2**63)], [0, 1, 1], (2**31 - 1, 4)),
    ([1], [0], (0, 0)),
]


@pytest.mark.parametrize("src, dst, sizes", BAD)
@pytest.mark.parametrize("swap", [False, True])
def test_errors_are_the_same(src, dst, sizes, swap):
    ends = torch.tensor(src), torch.tensor(dst)
    given = (*ends[::-1], *sizes[::-1]) if swap else (*ends, *sizes)
    with pytest.raises(ValueError) as expected:
        in_tensors(*given)
    for validate in (True, False):  # the CPU checks in both cases, because it reads the values anyway
        with pytest.raises(ValueError) as found:
            _csr.from_edges(_csr.UserEdges(*HERE, *given), validate=validate)
        assert str(found.value) == str(expected.value)
    if None not in sizes:
        with pytest.raises(ValueError) as found:
            _csr.from_edges(_csr.UserEdges(*HERE, *given), with_loops=True)
        assert str(found.value) == str(expected.value)


def test_a_csr_that_is_none_is_refused_before_it_is_followed(threads):
    """A CSR with wrong values, as from_csr(validate=False) accepts it, raises before it is used for
    indexing."""
    threads(2)
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0]).int()
    ops, no_ids = torch.ops.dfgnn, None
    for bad in ([0, 2, 4], [0, 2, 2], [1, 2, 3], [0, 9, 3], [0, -5, 3], [2**40, 2, 3]):
        with pytest.raises(RuntimeError, match="indptr: expected values that rise"):
            ops.transpose_csr(torch.tensor(bad), indices, no_ids, 2, False)
        with pytest.raises(RuntimeError, match="indptr: expected values that rise"):
            ops.plan_rows(torch.tensor(bad), indices, 2, 1, 32, False)
        for given in (
            ((torch.tensor(bad), indices, None), 3 * [None]),
            (3 * [None], (torch.tensor(bad), indices, None)),
        ):
            with pytest.raises(RuntimeError, match="indptr: expected values that rise"):
                ops.plan_graph(*given[0], *given[1], 2, 2, 32, True)
    for bad in (-1, 2, 2**31 - 1, -(2**31)):
        values = torch.tensor([0, bad, 0]).int()
        for need_eids in (False, True):
            with pytest.raises(RuntimeError, match=r"indices: expected values in \[0, num_cols\)"):
                ops.transpose_csr(indptr, values, no_ids, 2, need_eids)
        with pytest.raises(RuntimeError, match=r"indices: expected values in \[0, num_cols\)"):
            ops.plan_graph(indptr, values, None, None, None, None, 2, 2, 32, True)
    many = torch.arange(3000).repeat(100).int()  # on several threads
    many[-1] = 3000
    with pytest.raises(RuntimeError, match="indices: expected values in"):
        ops.transpose_csr(torch.tensor([0, len(many)]), many, no_ids, 3000, True)


def whole(ops, indptr, indices, eids, rev_indptr=None, rev_indices=None, max_edges=32):
    return ops.plan_graph(indptr, indices, eids, rev_indptr, rev_indices, None, 2, 2, max_edges, True)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda ops, x: ops.coo_to_csr(x, x[:2], 3, 3, False, 0, True), "dst: expected shape"),
        (lambda ops, x: ops.coo_to_csr(x.float(), x, 3, 3, False, 0, True), "src: unexpected dtype"),
        (lambda ops, x: ops.coo_to_csr(x, None, 3, 3, False, 0, True), "edge_index: expected shape"),
        (lambda ops, x: ops.coo_to_csr(x, x, 3, 3, False, -1, True), "max_edges: expected a bound"),
        (lambda ops, x: ops.transpose_csr(x, x, None, 3, False), "indices: unexpected dtype"),
        (lambda ops, x: ops.transpose_csr(x[:0], x.int(), None, 3, False), "indptr: expected a contiguous"),
        (lambda ops, x: ops.transpose_csr(x, x.int(), x[:1].int(), 3, False), "eids: expected shape"),
        (lambda ops, x: ops.transpose_csr(x, x.int(), None, -1, False), "num_cols: expected"),
        (lambda ops, x: ops.plan_rows(x, x.int(), 3, 2, 32, False), "expected the order of the rows"),
        (lambda ops, x: ops.plan_rows(x, x.int(), 3, 1, 32, True), "expected the order of the rows"),
        (lambda ops, x: ops.plan_rows(x, x.int(), 3, 1, 0, False), "max_edges: expected a bound"),
        (lambda ops, x: whole(ops, x, None, None), "indptr, indices: expected both of a direction"),
        (lambda ops, x: whole(ops, x[:2], x.int(), None), "indptr: expected shape"),
        (lambda ops, x: whole(ops, x, x, None), "indices: unexpected dtype"),
        (lambda ops, x: whole(ops, x, x.int(), x[:1].int()), "eids: expected shape"),
        (lambda ops, x: whole(ops, x, x.int(), x), "eids: unexpected dtype"),
        (lambda ops, x: whole(ops, x, x.int(), x.int().repeat(2)[::2]), "eids: expected contiguous"),
        (lambda ops, x: whole(ops, x, x.int(), None, x, x[:2].int()), "rev_indices: expected as many"),
        (lambda ops, x: whole(ops, x, x.int(), None, max_edges=0), "max_edges: expected a bound"),
    ],
)
def test_operators_check(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.ops.dfgnn, torch.tensor([0, 1, 3]))


def test_a_plan_without_statistics_prints_them():
    src, dst, num_src, num_dst = GRAPHS["mixed_degrees"]()
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    for reverse in (False, True):
        plan = graph.plan(reverse=reverse, schedule="natural<=64")
        assert plan.stats is None
        text = repr(plan)
        stats = graph.degree_stats(reverse)
        assert f"rows {stats.num_rows:,}, edges {stats.num_edges:,}, degree mean {stats.mean:.1f}" in text
        assert f"max {stats.max:,}, cv {stats.cv:.2f}, empty rows {stats.num_empty:,}" in text
    assert "rows 0, edges 0" in repr(Graph.from_coo(src[:0], dst[:0], 0).plan())


def test_nothing_is_sorted_by_tensors_on_the_cpu(monkeypatch):
    """From edges to the kernels' arguments, the CPU uses dfgnn's operators alone, not torch's sort."""

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor operation")

    for module, name in (
        (_csr, "from_coo"),
        (_csr.UserEdges, "checked"),
        (_csr, "transpose_in_tensors"),
        (degrees, "degree_stats"),
        (items, "cut"),
        (torch, "sort"),
    ):
        monkeypatch.setattr(module, name, refuse)
    src, dst, num_src, num_dst = GRAPHS["random"]()
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    graph.plan(), graph.plan(reverse=True), graph.reverse_csr(need_eids=True)
    graph.add_self_loops(remove_existing=True)
