import copy
import itertools
import pickle
import pickletools
import statistics
import weakref

import pytest
import torch
from graph_checks import check_graph, edge_order, small
from graphs import GRAPHS, edges

from dfgnn.graph import CSR, DegreeStats, Graph
from dfgnn.plan import Planner, Shape


def csr_of(src, dst, num_dst):
    """(indptr, indices, eids), built edge by edge."""
    rows = [[e for e, d in enumerate(dst.tolist()) if d == i] for i in range(num_dst)]
    order = torch.tensor([e for row in rows for e in row], dtype=torch.long)
    indptr = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return indptr, src.cpu()[order], order


# ---- constructors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, validate", [(torch.int64, True), (torch.int32, False)])
@pytest.mark.parametrize("name", GRAPHS)
def test_from_coo_and_edge_index(name, validate, dtype, device):
    src, dst, num_src, num_dst = edges(name, device, dtype)
    sizes = {"num_src": num_src, "num_dst": num_dst, "validate": validate}
    check_graph(Graph.from_coo(src, dst, **sizes), *edges(name), device)
    check_graph(Graph.from_edge_index(torch.stack([src, dst]), **sizes), *edges(name), device)


@pytest.mark.parametrize("dtype, validate", [(torch.int64, True), (torch.int32, False)])
@pytest.mark.parametrize("name", GRAPHS)
def test_from_csr(name, validate, dtype, device):
    src, dst, num_src, num_dst = edges(name)
    indptr, indices, order = csr_of(src, dst, num_dst)
    given = indptr.to(device, dtype), indices.to(device, dtype), num_src
    graph = Graph.from_csr(*given, validate=validate)
    assert graph.csr().eids is None
    check_graph(graph, src[order], dst[order], num_src, num_dst, device)
    graph = Graph.from_csr(*given, eids=order.to(device, dtype), validate=validate)
    check_graph(graph, src, dst, num_src, num_dst, device)


def test_edges_of_a_row_keep_the_users_order(device):
    src, dst, num_src, num_dst = edges("duplicates", device)
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    indptr, ids = graph.csr().indptr.tolist(), edge_order(graph.csr()).tolist()
    for begin, end in itertools.pairwise(indptr):
        assert ids[begin:end] == sorted(ids[begin:end])


def test_no_permutation_where_the_edges_are_sorted(device):
    src, dst, num_src, num_dst = edges("sorted", device)
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    assert graph.csr().eids is None
    backwards = Graph.from_coo(dst, src, num_src=num_dst, num_dst=num_src)
    assert backwards.reverse_csr(need_eids=True).eids is None
    assert backwards.csr().eids is not None
    identity = torch.arange(graph.num_edges, device=device)
    assert Graph.from_csr(*graph.csr()[:2], num_src, eids=identity).csr().eids is None


def test_sizes_that_are_not_given(device):
    src, dst = torch.tensor([0, 2], device=device), torch.tensor([5, 1], device=device)
    for validate in (True, False):

        def sizes(validate=validate, **given):
            graph = Graph.from_coo(src, dst, validate=validate, **given)
            assert graph.csr().indptr.numel() == graph.num_dst + 1
            return graph.num_src, graph.num_dst

        assert sizes() == (6, 6)
        assert sizes(num_nodes=9) == (9, 9)
        assert sizes(num_src=4) == (4, 6)
        assert sizes(num_dst=7) == (3, 7)
        assert sizes(num_src=4, num_dst=7) == (4, 7)
    none = src[:0]
    assert Graph.from_coo(none, none).num_dst == 0
    assert Graph.from_edge_index(torch.stack([none, none]), num_src=3).num_src == 3
    assert Graph.from_csr(torch.tensor([0, 1, 2]), torch.tensor([0, 1])).num_src == 2


def test_non_contiguous_input(device):
    src, dst, num_src, num_dst = edges("random", device)
    columns = torch.stack([src, dst], dim=1)
    graph = Graph.from_edge_index(columns.t(), num_src=num_src, num_dst=num_dst)
    check_graph(graph, src, dst, num_src, num_dst, device)
    indptr, indices, _ = csr_of(src, dst, num_dst)
    strided = torch.stack([indices, indices], dim=1).int().to(device)[:, 0]
    graph = Graph.from_csr(indptr.to(device), strided, num_src)
    assert graph.csr().indices.is_contiguous() and graph.csr().indices.tolist() == indices.tolist()


def test_canonical_input_is_shared_and_never_modified(device):
    csr = CSR(*(t.to(device) for t in (torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1]).int())), None)
    graph = Graph.from_csr(csr.indptr, csr.indices)
    assert graph.csr().indptr.data_ptr() == csr.indptr.data_ptr()
    assert graph.csr().indices.data_ptr() == csr.indices.data_ptr()
    edge_index = torch.tensor([[1, 0, 1], [1, 0, 0]], device=device)
    before = edge_index.clone()
    check_graph(Graph.from_edge_index(edge_index), *before, 2, 2, device)
    assert torch.equal(edge_index, before)


@pytest.mark.parametrize("inside", ["graph", "reverse"])
def test_built_under_inference_mode_usable_for_training(inside, device):
    with torch.inference_mode():
        if inside == "graph":
            graph = Graph.from_csr(
                torch.tensor([0, 2, 3], device=device), torch.tensor([1, 0, 1], device=device).int()
            )
    if inside == "reverse":
        graph = small(device)
    with torch.inference_mode():
        graph.reverse_csr(need_eids=True)
        graph.edge_index  # noqa: B018
        looped = graph.add_self_loops()
        batched = Graph.batch([graph, looped])
    for g in (graph, looped, batched):
        tensors = (*g.csr(), *g.reverse_csr(need_eids=True), g.edge_index)
        assert not any(t.is_inference() for t in tensors if t is not None)


# ---- the object ------------------------------------------------------------------------------------


def test_immutable_hashable_weakly_referenced(no_collection):
    graph = small()
    with pytest.raises(AttributeError, match="immutable: cannot set num_src"):
        graph.num_src = 3
    with pytest.raises(AttributeError, match="immutable: cannot set _planner"):
        graph._planner = None
    with pytest.raises(AttributeError, match="immutable: cannot delete _planner"):
        del graph._planner
    assert graph == graph and graph != small() and len({graph, graph, small()}) == 2
    graph.reverse_csr(), graph.reverse().csr(), graph.degree_stats(), graph.plan(reverse=True)
    reference = weakref.ref(graph)
    del graph  # GPU memory must go when the last name does
    assert reference() is None


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
@pytest.mark.parametrize("name", ["random", "sorted", "no_nodes", "fewer_sources"])
def test_copies(name, clone, device):
    src, dst, num_src, num_dst = edges(name, device)
    for graph in (
        Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst),
        Graph.from_coo(dst, src, num_src=num_dst, num_dst=num_src).reverse(),
    ):
        check_graph(clone(graph), src, dst, num_src, num_dst, device)
        graph.reverse_csr(), graph.degree_stats(), graph.plan()
        twin = clone(graph)
        assert twin != graph and twin._planner._plans == {} and twin.degree_stats() == graph.degree_stats()
        check_graph(twin, src, dst, num_src, num_dst, device)


def test_names_in_files():
    """Saved graphs (pickle, torch.save) refer to classes by these names: a class that moves must leave its
    old name behind."""
    graph, fixed = small(), Graph.with_capacity(3, 4)
    graph.degree_stats()
    found = {
        name
        for text in (pickle.dumps(graph, protocol=2), pickle.dumps(fixed, protocol=2))
        for opcode, name, _ in pickletools.genops(text)
        if opcode.name == "GLOBAL" and name.startswith("dfgnn")
    }
    assert found == {
        "dfgnn.graph.graph Graph",
        "dfgnn.sparse.structure Structure",
        "dfgnn.sparse.structure Side",
        "dfgnn.sparse.csr CSR",
        "dfgnn.sparse.degrees DegreeStats",
        "dfgnn.sparse.fixed FixedStructure",
    }


def test_deepcopy_owns_its_memory():
    graph = small()
    twin = copy.deepcopy(graph)
    assert twin.csr().indices.data_ptr() != graph.csr().indices.data_ptr()


def test_num_nodes_of_a_square_graph_only():
    ends = torch.tensor([0, 1])
    assert Graph.from_coo(ends, ends, num_nodes=3).num_nodes == 3
    block = Graph.from_coo(ends, ends, num_src=3, num_dst=2)
    with pytest.raises(AttributeError, match="Graph.num_nodes: .* got num_src=3 and num_dst=2"):
        _ = block.num_nodes


def test_repr():
    assert repr(small()) == "Graph(num_nodes=4, num_edges=4, device='cpu')"
    graph = Graph.from_csr(torch.tensor([0, 1, 3]), torch.tensor([0, 1, 0]), 7)
    assert repr(graph) == "Graph(num_src=7, num_dst=2, num_edges=3, device='cpu')"
    graph.degree_stats()
    assert repr(graph) == (
        "Graph(num_src=7, num_dst=2, num_edges=3, device='cpu', in_degree: mean 1.5, max 2, p99 2, zero 0)"
    )
    graph.degree_stats(reverse=True)
    assert repr(graph).endswith("out_degree: mean 0.4, max 2, p99 2, zero 5)")


def test_lazy_parts_are_built_once():
    graph = small()
    assert graph.csr() is graph.csr()
    assert graph.edge_index is graph.edge_index
    assert graph.reverse_csr().indices is graph.reverse_csr().indices
    without = graph.reverse_csr()
    with_eids = graph.reverse_csr(need_eids=True)
    assert with_eids.indices is without.indices and with_eids.indptr is without.indptr
    assert with_eids.eids is graph.reverse_csr(need_eids=True).eids
    assert graph.reverse_csr().indices is with_eids.indices
    assert graph.degree_stats() is graph.degree_stats()


def test_edge_index_after_a_reverse_csr_without_ids(device):
    src, dst, num_src, num_dst = edges("random", device)
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    graph.reverse_csr()
    check_graph(graph.add_self_loops(remove_existing=True).reverse().reverse(), *_looped(src, dst), device)
    assert graph.edge_index.tolist() == [src.tolist(), dst.tolist()]


def _looped(src, dst, n=50):
    loops = torch.arange(n, device=src.device)
    kept = src != dst
    return torch.cat([src[kept], loops]), torch.cat([dst[kept], loops]), n, n


def test_plan_is_cached_by_its_arguments(monkeypatch):
    calls = []

    def estimate(planner, *arguments):
        calls.append((planner, arguments))
        return object()

    monkeypatch.setattr(Planner, "estimate", estimate)
    graph = small()
    first = graph.plan()
    assert graph.plan(4, 32, torch.float32, False, "auto") is first
    assert graph.plan(reverse=True) is not first
    assert graph.plan(num_heads=1, head_dim=7, dtype=torch.float16, schedule="natural") is not first
    assert calls == [
        (graph._planner, (Shape(4, 32, torch.float32, "gat"), False, "auto", False)),
        (graph._planner, (Shape(4, 32, torch.float32, "gat"), True, "auto", False)),
        (graph._planner, (Shape(1, 7, torch.float16, "gat"), False, "natural", False)),
    ]


# ---- degrees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("reverse", [False, True])
def test_degree_stats(name, reverse, device):
    src, dst, num_src, num_dst = edges(name, device)
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    rows, n = (src, num_src) if reverse else (dst, num_dst)
    degrees = sorted(torch.bincount(rows.cpu(), minlength=n).tolist())
    stats = graph.degree_stats(reverse=reverse)
    assert (stats.num_rows, stats.num_edges, stats.num_empty) == (n, len(rows), degrees.count(0))
    if n == 0:
        assert stats == DegreeStats(0, 0, 0, 0.0, 0, 0, 0, 0.0)
        return
    assert stats.max == degrees[-1]
    assert stats.mean == pytest.approx(statistics.fmean(degrees))
    for percent, value in ((50, stats.p50), (99, stats.p99)):
        below = [sum(d <= bound for d in degrees) * 100 >= percent * n for bound in (value, value - 1)]
        assert value in degrees and below == [True, False]
    deviation = statistics.pstdev(degrees)
    assert stats.cv == pytest.approx(deviation / stats.mean if stats.mean else 0.0)


# ---- derived graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_reverse(name, device):
    src, dst, num_src, num_dst = edges(name, device)
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    check_graph(graph.reverse(), dst, src, num_dst, num_src, device)
    check_graph(graph.reverse().reverse(), src, dst, num_src, num_dst, device)
    # A graph and its reverse share what either of them builds: CSRs and statistics.
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    built = graph.reverse().csr()
    assert graph.reverse_csr(need_eids=True).indices is built.indices
    assert graph.reverse().reverse_csr().indptr is graph.csr().indptr
    assert graph.degree_stats() is graph.reverse().degree_stats(reverse=True)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("remove_existing", [False, True])
def test_add_self_loops(name, remove_existing, device):
    src, dst, num_src, num_dst = edges(name)
    graph = Graph.from_coo(src.to(device), dst.to(device), num_src=num_src, num_dst=num_dst)
    looped, edge_map = graph.add_self_loops(remove_existing, return_edge_map=True)
    kept = [e for e in range(len(src)) if not (remove_existing and src[e] == dst[e])]
    loops = torch.arange(min(num_src, num_dst))
    check_graph(
        looped, torch.cat([src[kept], loops]), torch.cat([dst[kept], loops]), num_src, num_dst, device
    )
    assert edge_map.tolist() == kept + [-1] * len(loops)
    check_graph(graph, src, dst, num_src, num_dst, device)
    plain = graph.add_self_loops(remove_existing=remove_existing)
    assert torch.equal(plain.edge_index, looped.edge_index)


@pytest.mark.parametrize("state", ["fresh", "reverse", "reverse with ids"])
@pytest.mark.parametrize("backwards", [False, True])
def test_batch(state, backwards, device):
    """`backwards`: every other graph was built by source, so that the edges within a row of its CSR are in
    another order."""
    graphs, all_src, all_dst, num_src, num_dst = [], [], [], 0, 0
    for i, name in enumerate(GRAPHS):
        src, dst, n_src, n_dst = edges(name, device)
        if backwards and i % 2:
            graph = Graph.from_coo(dst, src, num_src=n_dst, num_dst=n_src).reverse()
        else:
            graph = Graph.from_coo(src, dst, num_src=n_src, num_dst=n_dst)
        if state != "fresh":
            graph.reverse_csr(need_eids=state == "reverse with ids")
        graphs.append(graph)
        all_src.append(src + num_src)
        all_dst.append(dst + num_dst)
        num_src, num_dst = num_src + n_src, num_dst + n_dst
    batched = Graph.batch(graphs)
    if state == "reverse with ids":
        assert batched._structure.src.built is not None  # the graphs' CSRs were joined, nothing was sorted
    check_graph(batched, torch.cat(all_src), torch.cat(all_dst), num_src, num_dst, device)


def test_batch_of_sorted_graphs_has_no_permutation(device):
    src, dst, num_src, num_dst = edges("sorted", device)
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    assert Graph.batch([graph, graph]).csr().eids is None
    check_graph(Graph.batch([graph]), src, dst, num_src, num_dst, device)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("state", ["fresh", "reverse", "reverse with ids"])
def test_to(name, state, device):
    src, dst, num_src, num_dst = edges(name)
    graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)
    if state != "fresh":
        graph.reverse_csr(need_eids=state == "reverse with ids")
    moved = graph.to(device)
    assert moved.to(device) is moved and moved.to(torch.device(device)) is moved
    assert (moved is graph) == (device == "cpu")
    check_graph(moved, src, dst, num_src, num_dst, device)
    check_graph(moved.to("cpu"), src, dst, num_src, num_dst)


def test_to_moves_every_part():
    """The meta device stands in for a second one where there is no GPU."""
    graph = small()
    graph.reverse_csr(need_eids=True), graph.degree_stats()
    moved = graph.to("meta")
    assert moved is not graph and moved.device.type == "meta"
    assert moved.degree_stats() is graph.degree_stats()
    assert all(t.device.type == "meta" for t in (*moved.csr(), *moved.reverse_csr(need_eids=True)))
    assert graph.device.type == "cpu"


# ---- errors --------------------------------------------------------------------------------------


_PTR, _IDX = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 0])


def test_errors_on_the_device(device):
    """The same words on every device, and never a device-side assertion."""
    indptr, indices = _PTR.to(device), torch.tensor([0, 7, 0], device=device)
    with pytest.raises(
        ValueError, match=r"indices: expected values in \[0, num_src=2\), got 7 at position 1"
    ):
        Graph.from_csr(indptr, indices)
    with pytest.raises(ValueError, match=r"src: expected values in \[0, num_src=3\), got 7 at position 1"):
        Graph.from_coo(indices, indices, 3)
    with pytest.raises(ValueError, match=r"eids: expected values in \[0, num_edges=3\), got 7"):
        Graph.from_csr(indptr, _IDX.to(device), eids=indices)
    check_graph(small(device), *small().edge_index, 4, 4, device)


@pytest.mark.gpu
def test_devices_that_differ():
    with pytest.raises(ValueError, match="indices: expected device cpu like indptr, got cuda:0"):
        Graph.from_csr(_PTR, _IDX.cuda())
    with pytest.raises(ValueError, match=r"graphs\[1\]: expected device cpu like graphs\[0\], got cuda:0"):
        Graph.batch([small(), small("cuda")])


# ---- CUDA ------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_waits_for_the_device_only_where_documented():
    src, dst, num_src, num_dst = edges("random", "cuda")
    csr = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst).csr()
    built = {}

    def work():
        graph = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst, validate=False)
        built["coo"] = graph
        built["csr"] = Graph.from_csr(*csr[:2], num_src, eids=csr.eids, validate=False)
        graph.reverse_csr(), graph.reverse_csr(need_eids=True), graph.reverse(), repr(graph)
        graph.in_degrees(), graph.out_degrees(), built["csr"].out_degrees()
        built["edge_index"] = graph.edge_index
        built["loops"] = graph.add_self_loops(return_edge_map=True)[0]

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
        with pytest.raises(RuntimeError):  # shows that this debug mode does notice a wait
            Graph.from_csr(*csr[:2], num_src, eids=csr.eids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for graph in (built["coo"], built["csr"]):
        check_graph(graph, src, dst, num_src, num_dst, "cuda")


@pytest.mark.gpu
def test_memory_of_the_reverse_csr():
    num_nodes, num_edges = 1 << 17, 1 << 24
    src, dst = torch.randint(num_nodes, (2, num_edges), device="cuda", dtype=torch.int32)
    graph = Graph.from_coo(src, dst, num_nodes)
    del src, dst
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graph.reverse_csr(need_eids=True)
    # The sort holds sorted keys (4 bytes per edge), the permutation (8) and a second copy of both (12).
    assert torch.cuda.max_memory_allocated() - before < 40 * num_edges
    assert torch.cuda.memory_allocated() - before < 8 * num_edges + 9 * num_nodes
