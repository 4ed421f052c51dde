"""Source partitions, whose work items of one row add up their results ("join") without slots where they can,
and the memory that plans take."""

from dataclasses import replace

import pytest
import torch
from attention import SCORES, check, make_inputs
from test_device import H100, H200

from dfgnn import Graph
from dfgnn.bench import twins
from dfgnn.plan import Planner, Shape, cost

FLOAT, BF16 = torch.float32, torch.bfloat16


def rising(src, dst, num_src, num_dst) -> Graph:
    order = (dst.long() * num_src + src).argsort()
    return Graph.from_coo(src[order], dst[order], num_src=num_src, num_dst=num_dst)


def skewed(device="cpu") -> Graph:
    """Rows of 0 to 2,000 edges from 700 sources, with neighbours in rising order."""
    generator = torch.Generator().manual_seed(0)
    degree = ((1 - torch.rand(400, generator=generator)) ** -1.2 * 4).long().clamp(max=2000)
    degree[::7] = 0
    dst = torch.repeat_interleave(degree)
    return rising(torch.randint(700, dst.shape, generator=generator), dst, 700, 400).to(device)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("order", ["natural", "longest_first"])
@pytest.mark.parametrize(("bound", "parts"), [(32, 3), (64, 2), (4096, 7)])
def test_rows_are_joined_part_by_part(bound, parts, order, reverse):
    """A row with one item per partition needs no slots: the first item writes the row and the others add to
    it. Rows with more items in one partition keep slots."""
    graph = skewed()
    plan = Planner(graph._structure, device=H200).plan(
        Shape(4, 32, FLOAT), reverse, f"{order}<={bound} sources/{parts}"
    )
    assert sum(plan.part_items) == len(plan.items) and len(plan.part_items) == parts
    assert plan.launch[6:] == list(plan.part_items)
    csr = graph.reverse_csr() if reverse else graph.csr()
    columns = graph.num_dst if reverse else graph.num_src
    bounds = torch.tensor([-(-columns * p // parts) for p in range(1, parts)])
    rows: dict[int, list] = {}
    edges: list[int] = []
    items = plan.items.split(list(plan.part_items))
    for part, of_part in enumerate(items):
        for row, begin, end, slot in of_part.tolist():
            inside = torch.bucketize(csr.indices[begin:end].long(), bounds, right=True)
            assert (inside == part).all() and end - begin <= bound
            rows.setdefault(row, []).append((part, slot))
            edges += range(begin, end)
    assert sorted(edges) == list(range(graph.num_edges)) and len(rows) == len(csr.indptr) - 1
    splits = {row: (first, last) for row, first, last, _ in plan.splits.tolist()}
    joined = 0
    for row, found in rows.items():
        of_part, slots = zip(*found)
        if row in splits:
            assert sorted(slots) == list(range(*splits[row])) and len(set(of_part)) < len(of_part)
        else:
            assert slots == (-1,) + (-2,) * (len(slots) - 1) and len(set(of_part)) == len(of_part)
            joined += len(slots) > 1
    assert joined > 20 and bool(splits) == (bound < 4096 and not reverse)
    assert plan.num_slots == sum(last - first for first, last in splits.values())


def test_only_what_can_be_added_up_in_the_row_is_joined():
    """Rows are not joined in 16 bits, which would round each sum, nor where a head is wider than a warp, nor
    on the CPU."""
    structure = skewed()._structure
    name = "natural<=64 sources/2"
    for shape, joins in (
        (Shape(4, 32, FLOAT), True),
        (Shape(1, 512, FLOAT), True),
        (Shape(2, 256, torch.float64), True),
        (Shape(1, 516, FLOAT), False),
        (Shape(4, 32, BF16), False),
        (Shape(4, 32, torch.float16), False),
    ):
        plan = Planner(structure, device=H200).plan(shape, schedule=name)
        assert bool(plan.part_items) == joins and ((plan.items[:, 3] == -2).any() == joins)
    plan = Planner(structure).plan(Shape(4, 32, FLOAT), schedule=name)
    assert not plan.part_items and plan.num_slots


# ---- memory ------------------------------------------------------------------------------------------

# (nodes, edges, largest degree) of a random graph with a real one's size; and the factor by which both the
# graph and the device's memory and cache are scaled down here.
TWINS = {
    "reddit~": (232_965, 114_615_892, 20_390, 128),
    "proteins~": (132_534, 79_122_504, 7_472, 128),
    "products~": (2_449_029, 126_167_053, 17_151, 128),
    "ogbn-arxiv": (169_343, 2_484_941, 13_162, 16),
    "ogbl-ddi": (4_267, 2_140_089, 2_235, 4),
}


def scaled(name: str) -> tuple[Graph, int]:
    nodes, edges, largest, factor = TWINS[name]
    nodes = nodes // factor
    src, dst, _ = twins.power_law(nodes, edges // factor, min(largest, edges // factor // 8))
    return rising(torch.cat([src, dst]), torch.cat([dst, src]), nodes, nodes), factor


@pytest.mark.parametrize("name", TWINS)
def test_plans_take_less_than_three_feature_arrays(name, monkeypatch):
    """The memory of a training step beyond inputs, results and gradients: what forward saves (V+ of GAT, the
    softmax's statistics), backward's tensors per node, and partial results of split rows."""
    monkeypatch.setattr(cost, "_PARTIAL_BYTES", 0)
    graph, factor = scaled(name)
    for full in (H200, H100):
        device = replace(full, num_sms=max(full.num_sms // factor, 1), l2_bytes=full.l2_bytes // factor)
        planner = Planner(graph._structure, device=device)
        for heads, dim in ((4, 32), (8, 64), (1, 128)):
            for dtype in (FLOAT, BF16):
                for layer in ("gat", "gatv2", "dot"):
                    shape = Shape(heads, dim, dtype, layer)
                    plans = [planner.plan(shape, reverse) for reverse in (False, True)]
                    array = graph.num_dst * heads * dim * dtype.itemsize
                    number = 4 * graph.num_dst * heads
                    sums = cost.sums(shape, False)
                    of_query = 0 if layer == "gat" else plans[0].partial_bytes // sums
                    kept = 2 * number + (array + number if layer == "gat" else 0)
                    forward = kept + plans[0].partial_bytes
                    backward = kept + 4 * number + of_query + plans[1].partial_bytes
                    if layer == "gatv2":  # a sum of the gradient of attn per block, of four items or more
                        per_block = [4 * (4 if plan.part_items else 1) for plan in plans]
                        blocks = sum(len(plan.items) / n for plan, n in zip(plans, per_block))
                        backward += int(blocks) * heads * dim * 4
                    assert max(forward, backward) <= 3 * array, (device.name, shape, plans)
                    for plan in plans:
                        stored = plan.num_slots * heads * dim * 4
                        assert plan.partial_bytes % stored == 0 if stored else plan.partial_bytes == 0
                        assert not stored or f"({plan.partial_bytes / 1e6:.1f} MB)" in repr(plan)


# ---- results -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [FLOAT, BF16, torch.float64])
@pytest.mark.parametrize(
    "schedule",
    [
        "natural<=32 sources/3",
        "longest_first<=4096 sources/7",
        "packed<=64 sources/2",
        "natural<=4096 heads<=2 sources/16",
    ],
)
def test_parts_give_the_same_results(score, dtype, schedule):
    graph = skewed("cuda")
    shapes = ((4, 16), (8, 8), (3, 4), (1, 32))
    for heads, dim in shapes if dtype != torch.float64 else ((2, 8), (1, 6)):
        for options in ({}, {"term": True, "weight": "H", "gate": 1}):
            inputs = make_inputs(score, graph, heads, dim, dtype, **options)
            check(score, graph, inputs, f"{heads}x{dim} ", schedule=schedule)
            check(score, graph, inputs, f"{heads}x{dim} ", schedule=schedule, return_attention=True)


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
def test_rows_of_masked_parts(score):
    """In some source partitions all edges of a row are masked (score -inf), before and after others."""
    graph = skewed("cuda")
    inputs = make_inputs(score, graph, 4, 32)
    source = graph.csr().indices.long()
    row = torch.repeat_interleave(graph.csr().indptr.diff())
    eids = graph.csr().eids
    third = 3 * source // graph.num_src  # 0, 1 or 2
    kept = (third == row % 4) | (row % 5 == 0)
    mask = torch.empty_like(kept)
    mask[slice(None) if eids is None else eids.long()] = kept
    check(score, graph, inputs, mask=mask, schedule="natural<=4096 sources/3")
