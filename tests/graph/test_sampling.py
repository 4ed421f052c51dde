"""Sampled neighbourhoods: what is drawn, the blocks, and batches that are made ahead."""

import contextlib
import threading
import time

import pytest
import torch

from dfgnn import Graph, sampling
from dfgnn import functional as F
from dfgnn.graph.hops import without_repetition
from dfgnn.graph.sampling import NeighborSampler


def random_graph(num_nodes=60, num_edges=400, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    edge_index[1, : num_edges // 4] = 3  # one node with many in-edges
    return Graph.from_edge_index(edge_index.to(device), num_nodes)


@pytest.mark.parametrize("fanouts", [(3,), (2, 4), (5, 1, 3), (-1, 2)])
def test_blocks(fanouts, device):
    """Every hop has the edges that were drawn, from the sampled graph, into its first nodes."""
    graph = random_graph(device=device)
    src, dst = graph.edge_index
    seeds = torch.tensor([3, 59, 0, 17], device=device)
    sample = NeighborSampler(graph, fanouts).sample(seeds)
    assert torch.equal(sample.nodes[: len(seeds)], seeds)
    assert len(sample.nodes.unique()) == len(sample.nodes) == sample.hops[0].graph.num_src
    for k, (hop, fanout) in enumerate(zip(sample.hops, fanouts)):
        assert torch.equal(hop.graph.edge_index, hop.edge_index)
        assert hop.num_dst == (sample.hops[k + 1].graph.num_src if k + 1 < len(fanouts) else len(seeds))
        # In the ids of the whole graph these are the edges that edge_ids names, each at most once.
        ends = sample.nodes[hop.edge_index]
        assert torch.equal(ends, torch.stack([src[hop.edge_ids], dst[hop.edge_ids]]))
        assert len(hop.edge_ids.unique()) == len(hop.edge_ids)
        degrees = graph.in_degrees()[sample.nodes[: hop.num_dst]]
        wanted = degrees if fanout == -1 else degrees.clamp(max=fanout)
        assert torch.equal(hop.graph.in_degrees(), wanted)
        # The hop's graph has the same CSRs as one that is made of these edges.
        same = Graph.from_edge_index(hop.edge_index, num_src=hop.graph.num_src, num_dst=hop.num_dst)
        for name in ("dst", "src"):
            one, other = (getattr(g._structure, name) for g in (hop.graph, same))
            assert (one.stats, one.cuts, one.built is None) == (other.stats, other.cuts, other.built is None)
        for csr, other in zip(*((g.csr(), g.reverse_csr(True)) for g in (hop.graph, same))):
            assert all(a is b or torch.equal(a, b) for a, b in zip(csr, other))


@pytest.mark.parametrize("fanouts", [(3,), (2, 4), (5, 1, 3), (-1, 2)])
def test_subgraph(fanouts, device):
    """Each node's neighbours are drawn once: the seeds' with the last fanout, their neighbours' with the one
    before it, and so on."""
    graph = random_graph(device=device)
    src, dst = graph.edge_index
    seeds = torch.tensor([3, 59, 0, 17], device=device)
    nodes, edge_index, edge_ids = NeighborSampler(graph, fanouts).subgraph(seeds)
    assert torch.equal(nodes[: len(seeds)], seeds) and len(nodes.unique()) == len(nodes)
    assert torch.equal(nodes[edge_index], torch.stack([src[edge_ids], dst[edge_ids]]))
    assert len(edge_ids.unique()) == len(edge_ids)
    degrees, found = graph.in_degrees()[nodes], edge_index[1].bincount(minlength=len(nodes))
    begin, end = 0, len(seeds)
    for fanout in reversed(fanouts):
        wanted = degrees[begin:end] if fanout == -1 else degrees[begin:end].clamp(max=fanout)
        assert torch.equal(found[begin:end], wanted)
        into = (edge_index[1] >= begin) & (edge_index[1] < end)
        begin, end = end, max([end, *(edge_index[0][into] + 1).tolist()])
    assert end == len(nodes) and not found[begin:].any()


def test_all_neighbours_are_the_full_graph(device):
    """With all neighbours, two layers of attention on a sample are those on the graph."""
    graph = random_graph(device=device)
    x = torch.randn(60, 2, 4, device=device)
    seeds = torch.tensor([3, 8, 21], device=device)
    sample = NeighborSampler(graph, (-1, -1)).sample(seeds)
    h = x[sample.nodes]
    for hop in sample.hops:
        h = F.dot_attention(hop.graph, h[: hop.num_dst], h, h)
    want = F.dot_attention(graph, x, x, x)
    want = F.dot_attention(graph, want, want, want)[seeds]
    torch.testing.assert_close(h, want, rtol=1e-4, atol=1e-5)


def test_every_neighbour_is_as_likely():
    """4 of 9 neighbours: each in 4 / 9 of the samples, each pair in 4 * 3 / (9 * 8)."""
    graph = Graph.from_coo(torch.arange(9), torch.full((9,), 9), num_nodes=10)
    sampler, count = NeighborSampler(graph, (4,)), 4000
    found = torch.zeros(count, 9)
    for k in range(count):
        found[k, sampler.sample(torch.tensor([9])).hops[0].edge_ids] = 1
    assert (found.sum(1) == 4).all()
    pairs = found.T @ found / count
    assert (pairs.diagonal() - 4 / 9).abs().max() < 0.04
    off = pairs[~torch.eye(9, dtype=torch.bool)]
    assert (off - 12 / 72).abs().max() < 0.03


def test_equal_generators_give_equal_samples(device):
    graph = random_graph(device=device)
    sampler, seeds = NeighborSampler(graph, (3, 3)), torch.arange(5, device=device)

    def draw(seed):
        return sampler.sample(seeds, torch.Generator(device).manual_seed(seed))

    one, same, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(a, b) for a, b in zip(one.tensors(), same.tensors(), strict=True))
    assert not torch.equal(one.hops[0].edge_ids, other.hops[0].edge_ids)
    draws = [sampler.subgraph(seeds, torch.Generator(device).manual_seed(s)).edge_ids for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def drawn(sampler, blocks, seeds, state, device):
    """Everything in a sample, and the next random number."""
    generator = torch.Generator(device).manual_seed(state)
    sample = (sampler.sample if blocks else sampler.subgraph)(seeds, generator)
    found = [sample.nodes, *(x for hop in sample.hops for x in hop[1:3])] if blocks else list(sample)
    return [*found, torch.rand(1, generator=generator, device=device)]


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("fanouts", [(3,), (2, 4), (5, 1, 3), (2, 40)])
def test_replayed_hops_draw_the_same(fanouts, blocks, device):
    """Samples from buffers, on a GPU by CUDA graphs, are those of plain operations, to the bit."""
    graph = random_graph(num_nodes=300, num_edges=2000, device=device)
    plain, replayed = NeighborSampler(graph, fanouts), NeighborSampler(graph, fanouts)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(device)
    replayed._record(order[:40], blocks)  # more seeds than any sample below, so that all fit
    for k, seeds in enumerate([*order[:100].split(20), order[200:207], order[5:6], order[:20]]):
        generator = torch.Generator(device).manual_seed(k)
        assert replayed._recorded[blocks].draw(seeds, generator) is not None
        want, got = (drawn(s, blocks, seeds, k, device) for s in (plain, replayed))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("blocks, seeds, where", [
    (True, [1, 0], "9 nodes after hop 1"), (False, [1, 0], "9 nodes after hop 1"),
    (True, [0, 9], "8 nodes after hop 2"), (False, [0, 9], "6 nodes after hop 1"),
    (True, [1, 2, 3], None), (False, [1, 2, 3], None),
])  # fmt: skip
def test_samples_that_graphs_have_no_room_for(blocks, seeds, where, device, monkeypatch):
    """A sample too large for the recorded buffers is drawn by plain operations, from the same random
    numbers."""
    monkeypatch.setattr(sampling, "_with_room", lambda count: int(1.25 * count))
    src = torch.tensor([10, 11, 12, 13, 14, 15, 20, 21, 22], device=device)
    dst = torch.tensor([0, 0, 0, 0, 10, 10, 1, 1, 1], device=device)
    graph = Graph.from_coo(src, dst, 30)
    plain, replayed = NeighborSampler(graph, (4, 4)), NeighborSampler(graph, (4, 4))
    replayed._record(torch.tensor([1, 9], device=device), blocks)
    seeds = torch.tensor(seeds, device=device)
    with pytest.warns(UserWarning, match=where) if where else contextlib.nullcontext():
        got = drawn(replayed, blocks, seeds, 3, device)
    assert all(torch.equal(a, b) for a, b in zip(drawn(plain, blocks, seeds, 3, device), got, strict=True))


@pytest.mark.parametrize("blocks", [True, False])
def test_replayed_hops_refuse_seeds(blocks, device):
    """Wrong seeds raise as without recorded hops, and later samples are right."""
    sampler = NeighborSampler(random_graph(device=device), (2, 3))
    sampler._record(torch.arange(4, device=device), blocks)
    draw = sampler.sample if blocks else sampler.subgraph
    with pytest.raises(ValueError, match="in 0 .. 59, got 3 .. 60"):
        draw(torch.tensor([3, 60], device=device))
    with pytest.raises(ValueError, match="at most once, got 1 repeated"):
        draw(torch.tensor([3, 3], device=device))
    with pytest.raises(TypeError, match="int64"):
        draw(torch.tensor([3], dtype=torch.int32, device=device))
    assert draw(torch.tensor([3, 0], device=device)).nodes[:2].tolist() == [3, 0]


@pytest.mark.gpu
def test_capture_is_of_what_it_says():
    sampler, seeds = NeighborSampler(random_graph(device="cuda"), (3, 3)), torch.arange(9, device="cuda")
    sampler.capture(seeds)
    sampler.capture(seeds, subgraph=True)
    for blocks in (True, False):
        assert sampler._recorded[blocks].draw(seeds, None) is not None


@pytest.mark.parametrize("count", [1, 2, 7, 16, 33])
def test_draws_are_those_of_floyds_algorithm(count):
    """The same as Floyd's sampling algorithm in a Python loop."""
    degree = torch.arange(count + 1, count + 60)
    draws = torch.rand(
        len(degree), count, generator=torch.Generator().manual_seed(count), dtype=torch.float64
    )
    found = without_repetition(degree, draws)
    for row, n, draw in zip(found.tolist(), degree.tolist(), draws.tolist()):
        chosen = []
        for t, u in enumerate(draw):
            drawn = min(int(u * (n - count + t + 1)), n - count + t)
            chosen.append(n - count + t if drawn in chosen else drawn)
        assert row == sorted(chosen)


@pytest.mark.parametrize("seeds, num_edges", [([], 400), ([5], 0), ([0, 1, 2], 1)])
def test_nothing_to_draw(seeds, num_edges, device):
    graph = Graph.from_coo(*torch.zeros(2, num_edges, dtype=torch.int64, device=device), num_nodes=60)
    sample = NeighborSampler(graph, (3, 2)).sample(torch.tensor(seeds, dtype=torch.int64, device=device))
    assert sample.nodes.tolist() == seeds + ([0] if num_edges and 0 not in seeds and seeds else [])


@pytest.mark.parametrize("num_nodes", [0, 1])
def test_no_seeds(num_nodes, device):
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    sampler = NeighborSampler(Graph.from_coo(nothing, nothing, num_nodes=num_nodes), (3, -1))
    assert not len(sampler.subgraph(nothing).nodes)
    assert [hop.num_dst for hop in sampler.sample(nothing).hops] == [0, 0]
    if not num_nodes:
        with pytest.raises(ValueError, match="none for a graph without nodes, got 2"):
            sampler.sample(torch.tensor([0, 1], device=device))


def test_layers_find_the_block(device, monkeypatch):
    """PyG's contract takes hop.edge_index, and neither sorts nor checks it."""
    nn = pytest.importorskip("dfgnn.nn.pyg", reason="torch_geometric is not installed")
    graph = random_graph(device=device)
    sample = NeighborSampler(graph, (3,)).sample(torch.arange(6, device=device))
    (hop,) = sample.hops
    x = torch.randn(len(sample.nodes), 8, device=device)
    conv = nn.GATConv(8, 4, heads=2, add_self_loops=False).to(device)
    want = conv((x, x[:6]), hop.edge_index.clone())
    from dfgnn.graph import cache as _kept

    monkeypatch.setattr(_kept, "of_edges", lambda *_: pytest.fail("the graph was made anew"))
    torch.testing.assert_close(conv((x, x[:6]), hop.edge_index), want)


def of_seeds(*seeds, dtype=None):
    return lambda graph: NeighborSampler(graph, (3,)).sample(torch.tensor(*seeds, dtype=dtype))


def of_fanouts(*fanouts):
    return lambda graph: NeighborSampler(graph, fanouts)


def of_a_block(graph):
    return NeighborSampler(Graph.from_coo(*torch.zeros(2, 1, dtype=torch.int64), num_src=3, num_dst=1), (1,))


def of_a_graph_that_changes(graph):
    """A sampler of a graph of fixed capacity must be refused: its samples would be of the first edges
    only."""
    fixed = Graph.with_capacity(graph.num_nodes, graph.num_edges, device="cpu")
    return NeighborSampler(fixed, (3,))


@pytest.mark.parametrize("bad, error, message", [
    (lambda g: NeighborSampler("graph", (3,)), TypeError, "graph: expected a dfgnn.Graph, got str"),
    (of_fanouts(), ValueError, "fanouts: expected integers"),
    (of_fanouts(3, 0), ValueError, "fanouts: expected integers"),
    (of_fanouts(True), ValueError, "fanouts: expected integers"),
    (lambda g: NeighborSampler(g, 3), ValueError, "fanouts: expected integers >= 1 or -1, got 3"),
    (lambda g: NeighborSampler(g, torch.tensor([3, 3])), ValueError, "fanouts: expected integers"),
    (of_a_graph_that_changes, ValueError, "graph: expected one that stays, got one of fixed capacity"),
    (lambda g: NeighborSampler(g, (3, -1)).capture(g), ValueError, "fanouts: expected numbers >= 1"),
    (lambda g: NeighborSampler(g, (3,)).capture([1]), TypeError, "seeds: expected an int64 tensor, got list"),
    (of_a_block, ValueError, "as many sources as destinations, got 3 and 1"),
    (lambda g: NeighborSampler(g, (3,)).sample([1]), TypeError, "seeds: expected an int64 tensor, got list"),
    (of_seeds([1.0]), TypeError, "got torch.float32"),
    (of_seeds([[1]]), ValueError, r"shape \[n\] on cpu, got \[1, 1\]"),
    (of_seeds([1, 60]), ValueError, "in 0 .. 59, got 1 .. 60"),
    (of_seeds([-1]), ValueError, "in 0 .. 59, got -1 .. -1"),
    (of_seeds([2, 4, 2]), ValueError, "at most once, got 1 repeated"),
    (lambda g: next(sampling.prefetch(int, [1], "cpu", depth=0)), ValueError, "depth: expected an integer"),
    (lambda g: sampling.host_rows([1]), TypeError, "host_rows: x: expected a tensor on the CPU, got list"),
    (lambda g: sampling.host_rows(torch.zeros(3, 4).T), ValueError, "contiguous"),
])  # fmt: skip
def test_bad_input(bad, error, message):
    with pytest.raises(error, match=message):
        bad(random_graph())


@pytest.mark.parametrize("thread", [True, False])
def test_prefetch_is_ahead_and_in_order(thread, device):
    made = []

    def make(k):
        made.append(k)
        return {"x": torch.full((3,), k, device=device)}

    found = []
    for value in sampling.prefetch(make, range(8), device, depth=2, thread=thread):
        if not thread:
            assert len(made) == min(len(found) + 2, 8)
        elif not found:
            deadline = time.monotonic() + 10
            while len(made) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert 3 <= len(made) <= 4  # this one, two that wait, and perhaps one that the thread holds
        found.append(int(value["x"][0]))
    assert found == list(range(8))


@pytest.mark.parametrize("thread", [True, False])
def test_prefetch_ends_with_its_caller_and_hands_errors_on(thread):
    def make(k):
        return 1 // (k - 5)

    before = threading.active_count()
    batches = sampling.prefetch(make, range(100), "cpu", thread=thread)
    assert next(batches) == -1
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(ZeroDivisionError):
        list(sampling.prefetch(make, range(100), "cpu", thread=thread))
    assert threading.active_count() == before


@pytest.mark.gpu
def test_prefetched_tensors_are_not_overwritten():
    """Memory of a batch is not given to a later one while the caller's stream reads it."""

    def make(k):
        return torch.full((1 << 20,), k, device="cuda")

    for k, x in enumerate(sampling.prefetch(make, range(50), "cuda")):
        torch.cuda._sleep(2_000_000)
        y = x + 1
        del x
        assert (y == k + 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_host_rows(dtype):
    x = torch.randint(100, (1000, 33)).to(dtype)
    before = torch.cuda.memory_allocated()
    view = sampling.host_rows(x)
    assert view.is_cuda and view.shape == x.shape and view.dtype == dtype
    assert torch.cuda.memory_allocated() == before
    rows = torch.randint(1000, (77,))
    assert torch.equal(view[rows.cuda()].cpu(), x[rows])
    assert torch.equal(view.index_select(0, rows.cuda()).cpu(), x[rows])


def test_host_rows_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="expected a CUDA device"):
        sampling.host_rows(torch.zeros(3, 4))
