"""What the scheduler decides from statistics alone, where no GPU is needed to ask it."""

from types import SimpleNamespace

import pytest
import torch
from graph_checks import canonical, check_items
from graphs import GRAPHS

from dfgnn import Graph, functional
from dfgnn.plan import Shape, choose, cost, handles, items
from dfgnn.plan.device import Device
from dfgnn.plan.direction import Direction
from dfgnn.runtime.arguments import ops
from dfgnn.sparse.csr import CSR
from dfgnn.sparse.degrees import Degrees, DegreeStats, degrees_of

FLOAT, BF16 = torch.float32, torch.bfloat16


def stats(num_rows, mean, cv, largest) -> DegreeStats:
    return DegreeStats(num_rows, int(num_rows * mean), largest, mean, int(mean), largest, 0, cv)


# Nodes, mean and largest degree as published; cv, the degrees' coefficient of variation, is that of the
# graphs in dfgnn.bench.
ARXIV = stats(169_343, 14.7, 4.7, 13_162)
REDDIT = stats(232_965, 492, 2.3, 20_380)
PRODUCTS = stats(2_449_029, 51.5, 1.9, 16_972)
PATTERN = stats(121_168, 46.3, 0.2, 72)
DDI = stats(4_267, 501.5, 0.9, 2_235)


# The properties of an H200 as torch.cuda.get_device_properties returns them.
H200 = Device("cuda", "NVIDIA H200", 132, 64, 233_472, 62_914_560)


def chosen(which: DegreeStats, packable: int, device: Device = H200) -> str:
    return min(cost.on_rows(which, packable, device), key=lambda c: c.cost).schedule


@pytest.mark.parametrize(
    ("which", "packable", "expected"),
    [
        (ARXIV, 1, "longest_first"),
        (ARXIV, 2, "packed"),
        (REDDIT, 1, "longest_first"),
        (REDDIT, 2, "longest_first"),  # rows are long enough for a whole warp
        (PRODUCTS, 2, "packed"),
        (PATTERN, 1, "natural"),  # rows are of similar length: another order would only cost cache hits
        (PATTERN, 2, "packed"),
        (ARXIV, 4, "packed"),  # four sub-warps would find too few edges in a row
        (PATTERN, 4, "packed"),
        (DDI, 4, "longest_first"),
        (REDDIT, 4, "packed"),
    ],
)
def test_order(which, packable, expected):
    assert chosen(which, packable) == expected


def split(which: DegreeStats, layer, dtype, heads=4, dim=32, reverse=False, rises=True, device=H200):
    direction = SimpleNamespace(
        device=device, reverse=reverse, num_cols=which.num_rows, stats=which, rises=rises
    )
    return cost.cache_split(direction, Shape(heads, dim, dtype, layer))


@pytest.mark.parametrize(
    ("layer", "dtype", "reverse", "parts", "heads"),
    [
        ("gat", FLOAT, False, 3, 2),  # a part takes two thirds of the cache
        ("gat", FLOAT, True, 3, 2),
        ("dot", FLOAT, False, 6, 1),
        ("gatv2", FLOAT, False, 3, 2),
        ("gatv2", FLOAT, True, 6, 1),  # gathers two rows per edge: query and the output's gradient
        ("gat", BF16, False, 1, 0),  # all sources fit the cache
        ("gatv2", BF16, True, 1, 0),  # bound by instructions, not by memory
        (None, FLOAT, False, 3, 2),
    ],
)
def test_less_at_a_time_where_a_large_graph_exceeds_the_cache(layer, dtype, reverse, parts, heads):
    """Sources are partitioned where the neighbours of rows rise; else fewer heads are computed at a time."""
    assert split(REDDIT, layer, dtype, reverse=reverse) == (0, parts)
    assert split(REDDIT, layer, dtype, reverse=reverse, rises=False) == (heads, 1)


def test_heads_where_a_row_of_several_parts_would_be_rounded_or_has_no_place():
    assert split(REDDIT, "dot", BF16) == split(REDDIT, "dot", torch.float16) == (2, 1)
    assert split(REDDIT, "gat", FLOAT, heads=1, dim=768) == (0, 1)
    assert split(REDDIT, "gat", FLOAT, heads=1, dim=256) == (0, 6)


def test_all_at_once_where_less_would_not_pay():
    assert split(ARXIV, "dot", FLOAT) == (0, 1)  # short rows
    assert split(PRODUCTS, "dot", FLOAT) == (0, 1)  # no part fits
    assert split(REDDIT, "dot", FLOAT, device=Device("cpu")) == (0, 1)
    assert split(REDDIT, "dot", FLOAT, heads=1, dim=128, rises=False) == (0, 1)  # one head, in no order
    assert split(REDDIT, "gat", BF16, heads=4, dim=16) == (0, 1)


@pytest.mark.parametrize("longest_first", [False, True])
def test_items_come_part_by_part(longest_first):
    generator = torch.Generator().manual_seed(0)
    degree = torch.randint(0, 90, (2, 50), generator=generator)
    degree[:, ::7] = 0
    flat = torch.cat([torch.zeros(1, dtype=torch.int64), degree.T.flatten().cumsum(0)])
    begin, end = flat[:-1].view(50, 2).T, flat[1:].view(50, 2).T
    found, splits, num_slots = items.cut(begin, end, 32, longest_first)
    part_of = torch.arange(2).repeat(50).repeat_interleave(degree.T.flatten())
    check_items(found, splits, num_slots, [*begin[0].tolist(), int(flat[-1])], 32, part_of)
    assert found.is_contiguous() and (splits[:, 3] == 1).all()
    if longest_first:
        found = found[found[:, 2] > found[:, 1]]
        for p in (0, 1):
            length = (found[:, 2] - found[:, 1])[part_of[found[:, 1].long()] == p]
            assert (length[1:] <= length[:-1]).all()


def skewed(device="cpu") -> CSR:
    """Rows of 0 to 3,500 edges, most of them short, from 4,000 sources; neighbours are in rising order."""
    generator = torch.Generator().manual_seed(0)
    degree = ((1 - torch.rand(3000, generator=generator)) ** -0.9).long().clamp(max=3500)
    degree[::7] = 0
    row = torch.repeat_interleave(degree)
    col = torch.randint(4000, row.shape, generator=generator)
    order = (row * 4000 + col).argsort()
    graph = Graph.from_coo(col[order], row, num_src=4000, num_dst=3000)
    return graph.to(device).csr()


@pytest.mark.gpu
@pytest.mark.parametrize("schedule_name", ["natural<=64", "longest_first<=64", "packed<=64", "one shot"])
def test_two_graphs_of_the_same_edges_give_the_same_bits(schedule_name):
    def step():
        torch.manual_seed(0)
        csr = skewed("cuda")
        graph = Graph.from_csr(csr.indptr, csr.indices, num_src=4000)
        name = schedule_name
        if name == "one shot":
            graph, name = graph.one_shot(), "auto"
        source, target = torch.randn(4000, 2, 32), torch.randn(3000, 2, 32)
        inputs = [x.to("cuda", BF16).requires_grad_() for x in (target, source, torch.randn(2, 32))]
        out = functional.gatv2_attention(graph, *inputs, kernel_options={"schedule": name})
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

    first = step()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step()))


@pytest.mark.parametrize("seed", range(12))
def test_the_short_way_chooses_what_the_long_one_does(seed):
    """The choice from a summary of the degrees, which a GPU's graph has when it is made, is the planner's."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = int(10 ** (1 + 3 * torch.rand((), generator=generator)))
    degree = (torch.rand(num_rows, generator=generator) ** -(0.2 + seed / 12)).long().clamp(max=4000)
    dst = torch.repeat_interleave(degree)
    src = torch.randint(num_rows, dst.shape, generator=generator)
    structure = Graph.from_coo(src, dst, num_rows)._structure
    for reverse in (False, True):
        direction = Direction(structure, reverse, H200)
        shapes = [
            Shape(heads, dim, dtype, layer)
            for heads, dim in ((1, 8), (4, 16), (8, 8), (3, 128))
            for dtype, layer in ((FLOAT, "gat"), (FLOAT, "dot"), (FLOAT, "gatv2"), (BF16, "gatv2"))
        ]
        assert handles.chosen(direction, shapes[0], False) is None  # the degrees have not been read yet
        side = structure.src if reverse else structure.dst
        cuts = {}
        for bound in (2**k for k in range(5, 11)):
            found = direction.items(bound, False, 1)
            cuts[bound] = len(found.items) - num_rows, len(found.splits)
        side.know(Degrees(direction.stats, cuts))
        for shape in shapes:
            plan = choose.plan(direction, shape)
            name, bound, by_length, cut = handles.chosen(direction, shape, False)
            assert (name, bound, sum(cut)) == (plan.schedule, plan.max_edges, plan.num_slots)
            length = plan.items[:, 2] - plan.items[:, 1]
            assert by_length or name == "natural" or plan.stats.cv < cost.ALIKE
            assert not by_length or (length[1:] <= length[:-1]).all()
            assert plan.heads_per_tile == 0 and plan.source_parts == 1
    assert handles.chosen(direction, Shape(4, 32, BF16, "dot"), False) is None  # tiles are a candidate
    assert handles.chosen(direction, Shape(4, 32, BF16, "dot"), True) is not None


def long_degrees(device="cpu") -> CSR:
    """More than one row in a hundred is longer than the histogram of degrees reaches."""
    degree = torch.arange(100) * 40
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)]).to(device)
    return CSR(indptr, torch.zeros(int(degree.sum()), dtype=torch.int32, device=device), None)


def many_rows() -> CSR:
    """More rows than a GPU computes at a time; some of them are cut."""
    degree = torch.arange(70_000) % 3
    degree[::1000] = 100
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    place = torch.arange(int(degree.sum())) - torch.repeat_interleave(indptr[:-1], degree)
    return CSR(indptr, (40 * place).int(), None)


def test_falls():
    """Counts neighbours with a smaller id than the one before them in the same row."""
    indptr = torch.tensor([0, 0, 3, 3, 5, 6, 6])
    for indices, expected in (([1, 2, 2, 0, 5, 0], 0), ([3, 2, 1, 0, 5, 0], 2), ([1, 2, 9, 7, 5, 9], 1)):
        assert items.falls_in_tensors(indptr, torch.tensor(indices)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*GRAPHS, "skewed", "long_degrees", "many_rows"])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_kernels_plan_what_tensors_do(name, parts):
    """The kernels that plan give the items and splits of the tensor operations; only the order of equally
    long items and of splits may differ."""
    if name in GRAPHS:
        src, dst, num_cols, num_rows = GRAPHS[name]()
        order = (dst * num_cols + src).argsort()  # rows rise
        csr = Graph.from_coo(src[order], dst[order], num_src=num_cols, num_dst=num_rows).csr()
    else:
        made = {"skewed": skewed, "long_degrees": long_degrees, "many_rows": many_rows}
        csr, num_cols = made[name](), 4000
    on_gpu = CSR(csr.indptr.cuda(), csr.indices.cuda(), None)
    num_edges = len(csr.indices)
    assert degrees_of(on_gpu.indptr, num_edges)[0] == degrees_of(csr.indptr, num_edges)[0]
    for indices in (csr.indices, csr.indices.flip(0)):
        falls = ops.falls(on_gpu.indptr, indices.contiguous().cuda())
        assert falls.item() == items.falls_in_tensors(csr.indptr, indices)

    for bound in (32, 50, 4096):
        for longest_first in (False, True):
            *expected, num_slots = items.cut(*items.by_source(csr, num_cols, parts), bound, longest_first)
            *found, num_slots_found = items.cut_on_gpu(on_gpu, num_cols, bound, longest_first, parts)
            assert num_slots_found == num_slots and all(x.is_contiguous() for x in found)
            assert canonical(*found) == canonical(*expected)
            assert len(found[1]) == len(expected[1])  # splits have no unused rows at their end
            slots = found[0][:, 3]
            assert slots[slots >= 0].sort().values.tolist() == list(range(num_slots))
            made = found[0].long().cpu()
            made = made[made[:, 2] > made[:, 1]]
            bounds = torch.tensor([-(-num_cols * part // parts) for part in range(1, parts + 1)])
            part = torch.searchsorted(bounds, csr.indices[made[:, 1]].long(), right=True)
            if parts > 1:
                assert (part[1:] >= part[:-1]).all()
            elif not longest_first:  # one item of each row comes last: by falling length within 64 rows
                rows = found[0][len(found[0]) - csr.indptr.numel() + 1 :].long().cpu()
                near, length = rows[:, 0] // 64, rows[:, 2] - rows[:, 1]
                assert (
                    (near[1:] > near[:-1]) | ((near[1:] == near[:-1]) & (length[1:] <= length[:-1]))
                ).all()
            if longest_first:
                # Whole rows are sorted by length, up to a quarter of an octave; 2 and 3 count as equal.
                whole = made[:, 3] < 0
                length, part = (made[:, 2] - made[:, 1])[whole], part[whole]
                assert ((2 * length[1:] <= 3 * length[:-1]) | (part[1:] > part[:-1])).all()


def test_plans_on_the_cpu_say_which_passes_take_short_rows_in_groups():
    src = torch.arange(100).repeat(12)
    graph = Graph.from_coo(src, (src + torch.arange(12).repeat_interleave(100)) % 100, num_nodes=100)

    def note(reverse, **options):
        return repr(graph.plan(reverse=reverse, head_dim=8, **options))

    assert "rows in groups: forward, backward\n" in note(False, num_heads=8, layer="dot")
    # GAT's backward has only a pass over sources, so that no backward pass uses this direction.
    assert "rows in groups: forward\n" in note(False, num_heads=8, layer="gat")
    assert "rows in groups: backward\n" in note(True, num_heads=8, layer="gat")
    assert "rows in groups: forward\n" in note(False, num_heads=1, layer="dot")
    assert "rows alone\n" in note(True, num_heads=1, layer="dot")
