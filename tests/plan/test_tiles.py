"""Tiles: the blocks themselves, and attention on them. Errors as in tests/attention.py."""

import pytest
import torch
from attention import check, function, make_inputs, run
from graph_checks import canonical
from graphs import GRAPHS

from dfgnn import Graph, reference
from dfgnn.plan import tiles
from dfgnn.runtime.arguments import ops

DTYPES = (torch.float16, torch.bfloat16)


def without_duplicates(src, dst, num_src, num_dst, device="cpu") -> Graph:
    edges = torch.stack([src, dst]).unique(dim=1)
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(0))
    return Graph.from_coo(*edges[:, order].to(device), num_src=num_src, num_dst=num_dst)


def cliques():
    """Groups of 40 nodes with random edges inside: rows share neighbours, and windows of 64 rows end within
    groups."""
    generator = torch.Generator().manual_seed(0)
    dst = torch.randint(300, (4000,), generator=generator)
    src = dst // 40 * 40 + torch.randint(40, (4000,), generator=generator)
    return src.clamp(max=299), dst, 300, 300


def many_columns():
    """One window whose rows have 2,000 distinct neighbours: its tile is cut into several work items."""
    src = torch.arange(6000) % 2000
    return src, torch.arange(6000) % 50, 2000, 50


def long_rows():
    """Rows of more edges than `sharing` reads of one, in several windows, and empty rows."""
    dst = torch.repeat_interleave(torch.arange(200) % 50 * 100)
    return torch.randint(9000, dst.shape, generator=torch.Generator().manual_seed(0)), dst, 9000, 200


def wide():
    """The neighbours of a window lie in several of the bitmaps of node ids that the kernels make, with
    gaps."""
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(1000, (4000,), generator=generator) * torch.randint(
        1000, (4000,), generator=generator
    )
    return src, torch.randint(150, (4000,), generator=generator), 999_999, 150


SHAPES = {**GRAPHS, "cliques": cliques, "many_columns": many_columns}
HARD = {**SHAPES, "long_rows": long_rows, "wide": wide}


@pytest.fixture(params=SHAPES)
def graph(request):
    return without_duplicates(*SHAPES[request.param]())


# ---- the blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_bits_are_the_edges(graph, reverse):
    csr = graph.reverse_csr() if reverse else graph.csr()
    found = tiles.build(csr, graph.num_dst if reverse else graph.num_src)
    assert found.chunks.dtype == torch.int32 and found.chunks.shape[1] == tiles.COLUMNS + tiles.ROWS
    window = torch.repeat_interleave(found.offsets.diff()).tolist()
    edges = []
    assert len(found.chunks) == max(len(window), 1)  # a graph without edges has one chunk that is never read
    for w, chunk in zip(window, found.chunks.tolist()):
        columns, masks = chunk[: tiles.COLUMNS], chunk[tiles.COLUMNS :]
        used = 0
        for row, mask in enumerate(masks):
            used |= mask & 0xFFFFFFFF
            edges += [(w * tiles.ROWS + row, columns[bit]) for bit in range(tiles.COLUMNS) if mask >> bit & 1]
        # Some row uses every column, except columns that fill up the chunk: these repeat the first one.
        count = used.bit_length()
        assert used == (1 << count) - 1 and columns[count:] == columns[:1] * (tiles.COLUMNS - count)
    rows = torch.repeat_interleave(csr.indptr.diff()).tolist()
    assert sorted(edges) == sorted(zip(rows, csr.indices.tolist()))


def test_an_edge_that_is_there_twice_has_no_place():
    csr = Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1]), num_nodes=2).csr()
    assert tiles.build(csr, 2) is None


@pytest.mark.parametrize("max_chunks", [1, 3, 1000])
def test_items_hold_every_chunk_once(graph, max_chunks):
    found = tiles.build(graph.csr(), graph.num_src)
    items, splits, num_slots = tiles.items(found, graph.num_dst, max_chunks)
    chunks, slots = [], {}
    first_chunk = found.offsets.tolist()
    for row, begin, end, slot in items.tolist():
        assert row % tiles.ROWS == 0 and 0 <= begin <= end and end - begin <= max_chunks
        window = row // tiles.ROWS
        assert first_chunk[window] <= begin and end <= first_chunk[window + 1]
        chunks += range(begin, end)
        if slot >= 0:
            for r in range(tiles.ROWS):
                slots.setdefault(row + r, []).append(slot + r)
    assert sorted(chunks) == list(range(first_chunk[-1]))
    assert len(items[items[:, 3] < 0]) + len({row // tiles.ROWS for row in slots}) == len(first_chunk) - 1
    assert sorted(slot for found in slots.values() for slot in found) == list(range(num_slots))
    merged = {row: list(range(first, last, stride)) for row, first, last, stride in splits.tolist()}
    assert merged == {row: found for row, found in slots.items() if row < graph.num_dst}


def test_sharing():
    """`sharing` is the number of edges per distinct neighbour of a window: in a clique all 64 rows share each
    neighbour, in a matching no two rows do."""
    n = torch.arange(64)
    clique = Graph.from_coo(n.repeat(64), n.repeat_interleave(64), num_nodes=64)
    matching = Graph.from_coo(n, n, num_nodes=64)
    assert tiles.sharing(clique.csr(), 64) == 64
    assert tiles.sharing(matching.csr(), 64) == 1
    assert tiles.sharing(Graph.from_coo(n[:0], n[:0], num_nodes=64).csr(), 64) == 0


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("step, most", [(1, 3), (2, 4096)])
def test_sharing_counts_edges_and_columns(name, step, most, device):
    """`sharing` counts in every step-th window, and at most the first ``most`` edges of its rows."""
    src, dst, num_src, num_dst = (x.to(device) if isinstance(x, torch.Tensor) else x for x in HARD[name]())
    csr = Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst).csr()
    pointers, indices, edges, columns = csr.indptr.tolist(), csr.indices.tolist(), 0, 0
    for first in range(0, num_dst, step * tiles.ROWS):
        rows = range(first, min(first + tiles.ROWS, num_dst))
        found = [i for r in rows for i in indices[pointers[r] : min(pointers[r + 1], pointers[r] + most)]]
        edges, columns = edges + len(found), columns + len(set(found))
    assert tiles._sharing(csr, num_src, step, most) == (edges, columns)
    if device == "cuda":
        assert ops.sharing(csr.indptr, csr.indices, step, most).tolist() == [edges, columns]


@pytest.mark.gpu
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("reverse", [False, True])
def test_kernels_build_what_tensors_do(name, reverse):
    for graph in (
        without_duplicates(*HARD[name]()),
        Graph.from_coo(*HARD[name]()[:2], None, *HARD[name]()[2:]),
    ):
        csr, num_cols = (graph.reverse_csr(), graph.num_dst) if reverse else (graph.csr(), graph.num_src)
        on_gpu = type(csr)(*(None if x is None else x.cuda() for x in csr))
        assert tiles.sharing(csr, num_cols) == tiles.sharing(on_gpu, num_cols)
        expected, found = tiles.build(csr, num_cols), tiles.build(on_gpu, num_cols)
        assert (expected is None) == (found is None)
        if found is None:
            continue
        assert torch.equal(found.offsets.cpu(), expected.offsets)
        assert torch.equal(found.chunks.cpu(), expected.chunks)
        num_rows = csr.indptr.numel() - 1
        for max_chunks in (1, 3, 1000):
            *cut, num_slots = tiles.items(expected, num_rows, max_chunks)
            *cut_on_gpu, num_slots_on_gpu = tiles.items(found, num_rows, max_chunks)
            assert num_slots == num_slots_on_gpu and canonical(*cut_on_gpu) == canonical(*cut)
            assert all(x.is_contiguous() for x in cut_on_gpu)


# ---- attention on them -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("score", ["gat", "dot"])
def test_accuracy(score, name, dtype):
    graph = without_duplicates(*SHAPES[name](), "cuda")
    for heads in (1, 3, 8):
        for dim in tiles.HEAD_DIMS:
            inputs = make_inputs(score, graph, heads, dim, dtype)
            for schedule in ("tiles", "tiles<=64"):
                check(score, graph, inputs, f"{schedule} {heads}x{dim} ", schedule=schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy_of_options(dtype):
    """Options of layers without edge tensors: no score_dst, out_bias, values of another size than keys."""
    graph = without_duplicates(*cliques(), "cuda")
    inputs = make_inputs("gat", graph, 3, 32, dtype)
    bias = torch.randn(3, 32).to("cuda", dtype)
    check("gat", graph, {**inputs, "score_dst": None}, "no score_dst ", schedule="tiles")
    check("gat", graph, {**inputs, "out_bias": bias}, "out_bias ", schedule="tiles", negative_slope=0.0)
    inputs = make_inputs("dot", graph, 3, 30, dtype, value_dim=17)
    bias = torch.randn(3, 17).to("cuda", dtype)
    check("dot", graph, {**inputs, "out_bias": bias}, "sizes ", schedule="tiles", scale=0.3)


def attention_under_a_compiler(*args, **options):
    call = torch.compile(function("dot"), backend="aot_eager", fullgraph=True)
    return call(*args, **options)


def attention_under_a_transform(graph, query, key, value, **options):
    def call(query):
        return function("dot")(graph, query, key, value, **options)

    return torch.func.vmap(call)(query[None])[0]


@pytest.mark.gpu
@pytest.mark.parametrize("out_bias", [False, True])
@pytest.mark.parametrize("call", [function("dot"), attention_under_a_compiler, attention_under_a_transform])
def test_a_leaky_relu_around_the_dot_product_takes_no_tiles(call, out_bias):
    graph = without_duplicates(*cliques(), "cuda")
    inputs = make_inputs("dot", graph, 4, 32, torch.float16)
    assert graph.plan(4, 32, torch.float16, layer="dot").schedule == "tiles"
    bias = {"out_bias": torch.randn(4, 32).to("cuda", torch.float16)} if out_bias else {}
    check("dot", graph, {**inputs, **bias}, attention=call, negative_slope=0.2)
    with pytest.raises(ValueError, match="'tiles' is not available.*negative_slope"):
        function("dot")(graph, **inputs, negative_slope=0.2, schedule="tiles")


@pytest.mark.gpu
@pytest.mark.parametrize("score", ["gat", "dot"])
def test_a_sink_on_tiles(score):
    graph = without_duplicates(*cliques(), "cuda")
    inputs = make_inputs(score, graph, 4, 32, torch.float16)
    inputs["sink"] = torch.randn(4).to("cuda", torch.float16)
    for schedule in ("auto", "tiles", "natural"):
        check(score, graph, inputs, f"{schedule} ", extra=0.01, schedule=schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("score", ["gat", "dot"])
def test_equal_inputs_give_equal_bits(score):
    graph = without_duplicates(*many_columns(), "cuda")
    inputs = make_inputs(score, graph, 3, 64, torch.bfloat16)
    first, second = (run(function(score), graph, inputs, schedule="tiles<=64") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("score", ["gat", "dot"])
def test_large_scores(score):
    """Scores far from 0, and scores of which one gets all the weight."""
    graph = without_duplicates(*cliques(), "cuda")
    inputs = make_inputs(score, graph, 2, 32, torch.bfloat16)
    large = {name: x * 30 if name in ("score_src", "query") else x for name, x in inputs.items()}
    check(score, graph, large, schedule="tiles", extra=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales(scale):
    """A negative scale, with which the largest score is that of the smallest product, and scale 0."""
    graph = without_duplicates(*cliques(), "cuda")
    inputs = make_inputs("dot", graph, 2, 32, torch.bfloat16)
    check("dot", graph, {**inputs, "query": inputs["query"] * 8}, schedule="tiles", scale=scale)


def neighbours_share():
    """64 groups of 64 nodes; each node has edges from most nodes of its group and from no others."""
    n = torch.arange(4096)
    src = (n[:, None] // 64 * 64 + torch.arange(64)).flatten()
    dst = n.repeat_interleave(64)
    there = torch.rand(len(src), generator=torch.Generator().manual_seed(0)) < 0.7
    return src[there], dst[there], 4096, 4096


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", tiles.HEAD_DIMS)
@pytest.mark.parametrize("score", ["gat", "dot"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_only_neighbours_see_what_is_not_finite(score, dim, dtype, bad):
    """One element of each input in turn is not finite: the rows of the results that are not finite are then
    the same as in plain PyTorch."""
    graph = without_duplicates(*neighbours_share(), "cuda")
    for reverse in (False, True):
        assert graph.plan(2, dim, dtype, layer=score, reverse=reverse).schedule == "tiles"
    inputs = make_inputs(score, graph, 2, dim, dtype)
    names = {"gat": ("value", "score_src", "score_dst"), "dot": ("query", "key", "value")}[score]
    tolerance = dict(rtol=0.05, atol=0.05) if dtype == torch.bfloat16 else dict(rtol=0.01, atol=0.01)
    for name in names:
        spoilt = inputs[name].clone()
        spoilt[777].view(-1)[-1] = bad
        changed = {**inputs, name: spoilt}
        plain = run(function(score, reference), graph, changed, dtype=torch.float64)
        finite = {n: x.isfinite().flatten(1).all(1) for n, x in plain.items()}
        assert finite["out"].sum() >= 4096 - 64
        expected = run(function(score), graph, changed, schedule="natural")
        for schedule in ("auto", "tiles<=32"):
            found = run(function(score), graph, changed, schedule=schedule)
            for n, rows in finite.items():
                assert torch.equal(found[n].isfinite().flatten(1).all(1), rows), f"{name} {schedule} {n}"
                torch.testing.assert_close(found[n][rows], expected[n][rows], **tolerance)
            assert torch.equal(found["out"].isfinite(), plain["out"].isfinite()), f"{name}: elements of out"


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["gat", "dot"])
def test_chosen_where_neighbours_are_shared(layer):
    n = torch.arange(4096)
    src = (n // 64 * 64).repeat_interleave(64) + n.repeat(64).view(4096, 64).remainder(64).flatten()
    dense = Graph.from_coo(src.cuda(), n.repeat_interleave(64).cuda(), num_nodes=4096)
    random = without_duplicates(*(torch.randint(4096, (2, 60000))), 4096, 4096, "cuda")
    for reverse in (False, True):
        shape = dict(num_heads=4, head_dim=32, dtype=torch.bfloat16, reverse=reverse, layer=layer)
        assert dense.plan(**shape).schedule == "tiles"
        assert dense.plan(**shape, edges=True).schedule != "tiles"
        assert dense.plan(**{**shape, "layer": "gatv2"}).schedule != "tiles"
        assert dense.plan(**{**shape, "dtype": torch.float32}).schedule != "tiles"
        assert random.plan(**shape).schedule != "tiles"
    doubled = Graph.from_coo(src.repeat(2).cuda(), n.repeat_interleave(64).repeat(2).cuda(), num_nodes=4096)
    assert doubled.plan(4, 32, torch.bfloat16).schedule != "tiles"


@pytest.mark.gpu
def test_refusals():
    graph = without_duplicates(*cliques(), "cuda")
    inputs = make_inputs("gat", graph, 2, 32, torch.bfloat16)
    twice = Graph.from_coo(torch.tensor([0, 0]).cuda(), torch.tensor([0, 0]).cuda(), num_nodes=1)
    cases = [
        ("an edge twice", twice, make_inputs("gat", twice, 2, 32, torch.bfloat16), {}),
        ("float16 or bfloat16, got torch.float32", graph, make_inputs("gat", graph, 2, 32), {}),
        ("heads of 8, 16, 32, 64, 128", graph, make_inputs("gat", graph, 2, 40, torch.bfloat16), {}),
        ("edge tensors", graph, inputs, {"return_attention": True}),
        ("edge tensors", graph, inputs, {"dropout_p": 0.5}),
        ("edge tensors", graph, inputs, {"weight": torch.ones(graph.num_edges).cuda().bfloat16()}),
    ]
    for reason, on, tensors, options in cases:
        with pytest.raises(ValueError, match=f"schedule: 'tiles' is not available.*{reason}"):
            function("gat")(on, **tensors, **options, schedule="tiles")
    with pytest.raises(ValueError, match="GATv2, dot attention with"):
        function("gatv2")(graph, **make_inputs("gatv2", graph, 2, 32, torch.bfloat16), schedule="tiles")


def test_refused_on_the_cpu(graph):
    inputs = make_inputs("gat", graph, 2, 32, torch.bfloat16)
    with pytest.raises(ValueError, match="'tiles' is not available: it needs a GPU, got a graph on cpu"):
        function("gat")(graph, **inputs, schedule="tiles")
