"""Schedules with bounds, and plans by measurement."""

import json
import multiprocessing
import os
import pickle
import random
import socket
from pathlib import Path

import pytest
import torch
from attention import SCORES, function, make_inputs, relative_error, run
from graph_checks import check_items
from graphs import GRAPHS, make_graph

from dfgnn import Graph, functional, reference
from dfgnn import plan as schedule
from dfgnn.plan import tuning

SHAPE = {"num_heads": 4, "head_dim": 32, "dtype": torch.float32}


def skewed(device="cpu", seed=0):
    """Rows of 0 to 300 edges."""
    generator = torch.Generator().manual_seed(seed)
    dst = (300 * torch.rand(4000, generator=generator) ** 3).long()
    src = torch.randint(50, (4000,), generator=generator)
    return Graph.from_coo(src, dst, num_src=50, num_dst=301).to(device)


def rises(graph) -> bool:
    """Whether the neighbours of every row rise, in both directions."""
    for csr in (graph.csr(), graph.reverse_csr()):
        for row in csr.indices.cpu().split(csr.indptr.diff().tolist()):
            if (row[1:] < row[:-1]).any():
                return False
    return True


# ---- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", ("auto", None, None, None)),
        ("natural", ("natural", None, None, None)),
        ("packed<=64", ("packed", 64, None, None)),
        ("longest_first <= 1024", ("longest_first", 1024, None, None)),
        ("natural<=32", ("natural", 32, None, None)),
        ("packed heads<=2", ("packed", None, 2, None)),
        ("natural<=512 heads<=1", ("natural", 512, 1, None)),
        ("natural<=64 sources/3", ("natural", 64, None, 3)),
        ("natural heads<=2 sources/4", ("natural", None, 2, 4)),
        ("tiles<=64", ("tiles", 64, None, None)),
    ],
)
def test_names(text, expected):
    assert schedule.parse(text) == expected


@pytest.mark.parametrize("text", ["natural<=31", "natural<=0", f"natural<={2**31}"])
def test_bounds_that_are_refused(text):
    with pytest.raises(ValueError, match="expected a bound from 32 to"):
        schedule.parse(text)
    with pytest.raises(TypeError, match="expected a string, got int"):
        schedule.parse(64)
    with pytest.raises(ValueError, match="expected at most 16 source partitions"):
        schedule.parse("natural sources/17")
    with pytest.raises(ValueError, match="no heads or sources for tiles"):
        schedule.parse("tiles heads<=2")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bound", [32, 50, 100, 4096])
@pytest.mark.parametrize("order", ["natural", "longest_first"])
def test_bounds_cut_rows(order, bound, reverse, device):
    if (order, device) == ("longest_first", "cpu"):
        pytest.skip("the CPU has natural only")
    graph = skewed(device)
    plan = graph.plan(**SHAPE, reverse=reverse, schedule=f"{order}<={bound}")
    csr = graph.reverse_csr() if reverse else graph.csr()
    assert plan.max_edges == bound
    check_items(plan.items, plan.splits, plan.num_slots, csr.indptr.tolist(), bound)
    _, begin, end, slot = plan.items.long().T
    assert torch.equal(
        plan.splits[:, 0].sort().values, (csr.indptr.diff() > bound).nonzero().squeeze(1).int()
    )
    if order == "longest_first":  # by length up to a quarter of an octave; lengths 2 and 3 count as equal
        length = (end - begin)[slot < 0].double().clamp(min=1)
        assert (length[1:] <= 1.5 * length[:-1]).all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_sources_in_parts(parts, reverse, device):
    """Items are in the order of the source partitions and hold only edges of theirs."""
    graph = skewed(device)
    graph = Graph.from_coo(*graph.edge_index.T.unique(dim=0).T, num_src=50, num_dst=301)  # rows rise
    order = "longest_first" if device == "cuda" else "natural"
    plan = graph.plan(**SHAPE, reverse=reverse, schedule=f"{order}<=64 sources/{parts}")
    csr = graph.reverse_csr() if reverse else graph.csr()
    num_cols = graph.num_dst if reverse else graph.num_src
    assert plan.source_parts == parts and f"sources in {parts} parts" in repr(plan)
    bounds = torch.tensor([-(-num_cols * part // parts) for part in range(1, parts)])
    part_of = torch.bucketize(csr.indices.cpu().long(), bounds, right=True)
    check_items(plan.items, plan.splits, plan.num_slots, csr.indptr.tolist(), 64, part_of)


def test_sources_in_parts_need_rows_that_rise(device):
    graph = Graph.from_csr(
        torch.tensor([0, 2], device=device), torch.tensor([1, 0], device=device), num_src=2
    )
    with pytest.raises(ValueError, match="rising order"):
        graph.plan(**SHAPE, schedule="natural sources/2")
    assert graph.plan(**SHAPE).source_parts == 1


def test_feature_shapes_share_their_items():
    graph = skewed()
    plan, other = graph.plan(4, 32, torch.float32), graph.plan(1, 8, torch.float64)
    assert plan.items is other.items and plan.splits is other.splits
    assert graph.plan(4, 32, torch.float32, schedule="natural<=64").items is not plan.items
    assert graph.plan(4, 32, torch.float32, reverse=True).items is not plan.items


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("turn", range(6))
def test_random_schedules_give_the_same_results(device, score, turn):
    """A sweep over graphs, shapes, schedules and bounds, other ones in every turn."""
    rng = random.Random(100 * turn + SCORES.index(score))
    for _ in range(4):
        graph = make_graph(rng.choice(list(GRAPHS)), device) if rng.random() < 0.5 else skewed(device, turn)
        if rng.random() < 0.5:  # with edges in an order in which rows rise
            ends = graph.edge_index
            order = (ends[1] * graph.num_src + ends[0]).argsort()
            graph = Graph.from_coo(*ends[:, order], num_src=graph.num_src, num_dst=graph.num_dst)
        heads, dim = rng.choice((1, 3, 8)), rng.choice((4, 8, 32, 64))
        shape = dict(num_heads=heads, head_dim=dim, dtype=torch.float64)
        names = [c.schedule for c in graph.plan(**shape).candidates]
        chosen = f"{rng.choice(names)}<={rng.choice((32, 33, 64, 100, 257, 1024))}"
        assert graph.plan(**shape, schedule=chosen).schedule in chosen
        chosen += rng.choice(("", "", f" heads<={rng.choice((1, 2, 3))}"))
        chosen += rng.choice(("", f" sources/{rng.choice((2, 5))}")) if rises(graph) else ""
        weight = rng.choice((None, "H"))
        inputs = make_inputs(score, graph, heads, dim, torch.float64, term=rng.random() < 0.3, weight=weight)
        seed = torch.tensor([turn], device=device)
        options = {"dropout_p": 0.3, "generator": seed} if rng.random() < 0.3 else {}
        options["return_attention"] = rng.random() < 0.5
        expected = run(function(score, reference), graph, inputs, **options)
        results = run(function(score), graph, inputs, schedule=chosen, **options)
        for key, x in expected.items():
            assert relative_error(results[key], x, 1.0) < 1e-10, (chosen, graph, heads, dim, key)


# ---- graphs for one step ------------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", GRAPHS)
def test_one_shot_graphs_give_the_same_results(device, name, score):
    graph = make_graph(name, device)
    inputs = make_inputs(score, graph, 3, 8, torch.float64, term=True)
    expected = run(function(score, reference), graph, inputs)
    for key, x in run(function(score), graph.one_shot(), inputs).items():
        assert relative_error(x, expected[key], 1.0) < 1e-10, key


def test_one_shot_graphs_share_what_is_built():
    graph = skewed()
    once = graph.one_shot()
    assert once.is_one_shot and not graph.is_one_shot
    assert once.reverse_csr().indptr is graph.reverse_csr().indptr
    assert once.reverse().is_one_shot and once.to("cpu") is once
    assert pickle.loads(pickle.dumps(once)).is_one_shot and not pickle.loads(pickle.dumps(graph)).is_one_shot


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
def test_one_shot_graphs_never_wait(score):
    csr = skewed("cuda").csr()
    inputs = make_inputs(score, skewed("cuda"), 4, 32, torch.bfloat16)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    grad = torch.randn(301, 4, 32, device="cuda", dtype=torch.bfloat16)
    function(score)(skewed("cuda"), **leaves).backward(grad)  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = Graph.from_csr(csr.indptr, csr.indices, num_src=50, validate=False).one_shot()
        function(score)(graph, **leaves).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plan = graph.plan(**{**SHAPE, "dtype": torch.bfloat16})
    assert plan.schedule == "packed" and "degrees are not known" in repr(plan)


def test_kept_arguments_follow_the_plan(clock, long_rows, tmp_path):
    """The arguments cached for calls are made anew when autotuning has measured a plan or read it from a
    file."""
    for graph in (long_rows, Graph.from_edge_index(long_rows.edge_index.clone(), num_nodes=100)):

        def used(graph=graph):
            args = graph._planner.arguments(
                4, 32, torch.float32, "gat", schedule="auto", edges=False, backward=True
            )
            return args.items, args.rev_items

        before = used()
        assert all(x is y for x, y in zip(used(), before))
        graph.autotune("gat", file=tmp_path / "plans.json")
        after = used()
        assert not any(x is y for x, y in zip(after, before))
        assert all(x is graph.plan(**SHAPE, reverse=r).items for x, r in zip(after, (False, True)))


# ---- measuring -------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch, long_rows):
    """A stand-in for the clock. times[backward or not, maximum edges per work item] are in ms; `asked` lists
    what was measured."""
    times, asked = {(d, b): float(b) for d in (False, True) for b in (4096, 2048, 8192)}, []

    def timings(call, device, budget):
        results = call()
        graph = clock.graph
        backward = len(results) != 5  # the forward operator has five results
        bound = graph.plan(**SHAPE, reverse=backward).max_edges
        asked.append((backward, bound))
        return {"eager": {"median": times[asked[-1]]}}

    clock = type("clock", (), {"times": times, "asked": asked, "graph": long_rows})
    monkeypatch.setattr(tuning, "timings", timings)
    return clock


@pytest.fixture
def long_rows():
    """A row and a source of 20,000 edges each, so that the CPU's bounds make a difference."""
    many = torch.randint(100, (20000,))
    none = torch.zeros_like(many)
    return Graph.from_coo(torch.cat([many, none]), torch.cat([none, many]), num_nodes=100)


def test_the_fastest_of_each_direction_is_kept(clock, long_rows):
    clock.times |= {(False, 4096): 3.0, (False, 2048): 2.0, (False, 8192): 4.0}
    # 8.99 is too little below 9.0 to be more than noise: the plan stays.
    clock.times |= {(True, 4096): 9.0, (True, 2048): 8.99, (True, 8192): 9.5}
    before = long_rows.plan(**SHAPE)
    found = long_rows.autotune("gat")
    assert clock.asked == [(d, b) for d in (False, True) for b in (4096, 2048, 8192)]
    assert (found.forward, found.reverse) == ("natural<=2048", "natural<=4096")
    assert found.milliseconds["forward"] == {"natural<=4096": 3.0, "natural<=2048": 2.0, "natural<=8192": 4.0}
    plan = long_rows.plan(**SHAPE)
    assert plan.max_edges == 2048 and "fastest of 3 measured: 2 ms" in repr(plan)
    assert long_rows.plan(**SHAPE, reverse=True).max_edges == 4096
    assert long_rows.plan(1, 8, torch.float32).max_edges == 4096  # another shape
    assert before.max_edges == 4096
    assert "natural<=8192 4 ms" in str(found)


def test_nothing_else_stays(clock, long_rows):
    clock.times |= {(d, b): 1.0 for d in (False, True) for b in (4096, 2048, 8192)}
    long_rows.autotune("dot")
    planner, shape = long_rows._planner, schedule.Shape(*SHAPE.values(), "dot")
    chosen = {(shape, reverse, "auto", edges) for reverse in (False, True) for edges in (False, True)}
    assert {key for key in planner._plans if key[2] == "auto"} == chosen
    assert len({id(plan.items) for plan in planner._plans.values()}) == 2
    assert [len(direction._items) for direction in planner._directions.values()] == [1, 1]


def test_a_failure_leaves_the_plans_alone(clock, long_rows):
    del clock.times[False, 2048]
    long_rows.plan(**SHAPE)
    before, items = dict(long_rows._planner._plans), dict(long_rows._planner._directions[False]._items)
    with pytest.raises(KeyError):
        long_rows.autotune("gat")
    assert long_rows._planner._plans == before
    assert long_rows._planner._directions[False]._items == items


def test_file(clock, long_rows, tmp_path):
    path = tmp_path / "new" / "plans.json"
    long_rows.autotune("gat", file=path)
    measured = len(clock.asked)
    csr = long_rows.csr()
    again = clock.graph = Graph.from_csr(csr.indptr, csr.indices)
    found = again.autotune("gat", file=path)
    assert len(clock.asked) == measured and found.milliseconds == {}
    assert found.forward == found.reverse == "natural<=2048" and "from the file" in str(found)
    assert again.plan(**SHAPE).max_edges == again.plan(**SHAPE, reverse=True).max_edges == 2048
    # Another layer, another shape and the same graph in another order are measured, and added.
    for graph, layer, heads in ((again, "dot", 4), (long_rows.reorder("degree").graph, "gat", 4)):
        clock.graph = graph
        graph.autotune(layer, heads, file=path)
        assert len(clock.asked) > measured
        measured = len(clock.asked)
    assert len(json.loads(path.read_text())) == 3
    assert [p.name for p in path.parent.iterdir()] == ["plans.json"]


def test_file_keeps_its_mode_and_its_place(clock, long_rows, tmp_path):
    path, link = tmp_path / "shared" / "plans.json", tmp_path / "plans.json"
    link.symlink_to(path)  # its target does not exist yet
    before = os.umask(0o027)
    try:
        long_rows.autotune("gat", file=link)
    finally:
        os.umask(before)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640  # as any new file
    path.chmod(0o664)
    long_rows.autotune("dot", file=link)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o664
    assert len(json.loads(path.read_text())) == 2 and len(list(path.parent.iterdir())) == 1


def _write(path, start, name):
    start.wait()
    for part in ("forward", "reverse"):
        tuning._add(path, name, {part: "natural<=64"})


def test_many_writers_lose_nothing(tmp_path):
    """24 processes at a time add two entries each, and none is lost; a reader always sees a complete file."""
    path, context = tmp_path / "plans.json", multiprocessing.get_context("fork")
    start = context.Barrier(25)
    writers = [context.Process(target=_write, args=(path, start, f"graph {i}")) for i in range(24)]
    for writer in writers:
        writer.start()
    start.wait()
    while any(writer.is_alive() for writer in writers):
        assert set(tuning._read(path)) <= {f"graph {i}" for i in range(24)}
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 24
    both = {"forward": "natural<=64", "reverse": "natural<=64"}
    assert tuning._read(path) == {f"graph {i}": both for i in range(24)}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "entry",
    [
        {"forward": "hexagonal<=64", "reverse": "natural"},  # no such schedule
        {"forward": "natural", "reverse": "packed"},  # a schedule that the CPU does not have
        {"forward": {"schedule": "natural"}, "reverse": None, "version": 7},
        {"forward": ["natural"], "reverse": 512},
        {"forward": "natural<=1e9", "reverse": "natural<=-4"},
        {"forward": f"natural<={10**40}", "reverse": "natural<=\x00"},
        {"forward": "", "reverse": "auto"},
        {},
    ],
)
def test_entries_that_are_not_known_are_measured_again(clock, long_rows, tmp_path, entry):
    path = tmp_path / "plans.json"
    long_rows.autotune("gat", file=path)
    ((key, found),) = json.loads(path.read_text()).items()
    others = {"another graph": {"forward": "hexagonal", "since": 9}}
    path.write_text(json.dumps({key: entry, **others}))
    clock.asked.clear()
    assert long_rows.autotune("gat", file=path).forward == "natural<=2048" and len(clock.asked) == 6
    assert json.loads(path.read_text()) == {key: entry | found, **others}


def test_a_failure_to_write_leaves_the_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "plans.json"
    tuning._add(path, "a", {"forward": "natural"})
    text = path.read_text()

    def replace(*names):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="no space left"):
        tuning._add(path, "b", {"forward": "natural"})
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]


def _socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _link_to_null(path):
    path.symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("make", "kind"),
    [(Path.mkdir, "a directory"), (os.mkfifo, "a pipe"), (_socket, "a socket"), (_link_to_null, "a device")],
)
def test_what_is_no_file_is_not_replaced(make, kind, tmp_path, monkeypatch):
    """A path that is no regular file is refused before anything is measured."""
    path = tmp_path / "plans"
    make(path)
    before = os.stat(path)
    monkeypatch.setattr(tuning, "timings", None)
    with pytest.raises(ValueError, match=f"file: expected a regular file, or none yet, at .*, got {kind}"):
        skewed().autotune(file=path)
    with pytest.raises(ValueError, match="expected a regular file"):  # as if it appeared while measuring
        tuning._add(path, "a", {"forward": "natural"})
    after = os.stat(path)
    assert os.path.samestat(before, after) and before.st_mode == after.st_mode


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', "[" * 100_000, "\udcff", "1" * 5000, "nul"])
def test_files_that_are_something_else(text, tmp_path):
    path = tmp_path / "plans.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match="file: expected JSON of an earlier call"):
        skewed().autotune(file=path)
    assert path.read_text(errors="surrogateescape") == text


@pytest.mark.parametrize("layer", ["gat", "gatv2", "dot"])
@pytest.mark.parametrize("name", ["power_law", "no_edges", "no_nodes"])
def test_measured_for_real(device, layer, name):
    graph = make_graph(name, device)
    found = graph.autotune(layer, 2, 7, torch.bfloat16, seconds=0.05)
    for direction, reverse in (("forward", False), ("reverse", True)):
        assert getattr(found, direction) in found.milliseconds[direction]
        step = 8 if graph.device.type == "cuda" else 7
        plan = graph.plan(2, step, torch.bfloat16, reverse=reverse, layer=layer)
        assert f"{plan.schedule}<={plan.max_edges}" == getattr(found, direction)
        assert "fastest of" in plan.why
    assert graph.autotune(layer, 2, 7, torch.bfloat16, seconds=0.05, backward=False).reverse is None


@pytest.mark.parametrize("layer", ["gat", "gatv2", "dot"])
def test_what_is_measured_are_the_layers_calls(device, layer):
    """The operators get what a function and its backward give them."""
    graph, shape = skewed(device), schedule.Shape(2, 8, torch.float32, layer)
    forward = tuning._call(graph, shape, backward=False)()
    backward = tuning._call(graph, shape, backward=True)()
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size):
        return torch.randn(size, generator=generator, device=device).requires_grad_()

    if layer == "gat":
        inputs = [normal(50, 2, 8), normal(50, 2), normal(301, 2)]
        out = functional.gat_attention(graph, *inputs)
    elif layer == "gatv2":
        value, query, att = normal(50, 2, 8), normal(301, 2, 8), normal(2, 8)
        inputs = [value, query, att]
        out = functional.gatv2_attention(graph, query, value, att / 8**0.5)
    else:
        value, query, key = normal(50, 2, 8), normal(301, 2, 8), normal(50, 2, 8)
        inputs = [value, key, query]
        out = functional.dot_attention(graph, query, key, value)
    gradients = torch.autograd.grad(out, inputs, normal(301, 2, 8).detach())
    torch.testing.assert_close(forward[0], out, rtol=0, atol=0)
    torch.testing.assert_close(backward[0], gradients[0], rtol=0, atol=0)
    if layer != "gatv2":
        torch.testing.assert_close(backward[1:3], gradients[1:], rtol=0, atol=0)
