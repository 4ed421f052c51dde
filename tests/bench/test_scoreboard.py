"""What the documents show, measured on graphs of a few nodes: every part, the file, the tables made of it."""

import copy
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from covering import EXHAUSTIVE, exhaustive

pytest.importorskip("torch_geometric", reason="the benchmarks compare with it")
pytest.importorskip("numpy", reason="the benchmarks need numpy")

from fake_cuda import fake_cuda

from dfgnn import Graph
from dfgnn.bench import cli, compare, peers, records, yardsticks

ROOT = Path(__file__).parents[2]
SHORT = ["--cases", "score.cases", "--quick", "--threads", "1", "--seconds", "0.001", "--commit", "abc"]


@pytest.fixture
def score(monkeypatch):
    """The scoreboard's modules, imported anew, so that changes to them do not reach other tests."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # restored after the test: --threads writes it to os.environ
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for name in [n for n in sys.modules if n == "score" or n.startswith(("score.", "weather_mesh"))]:
        del sys.modules[name]


def module(name: str):
    return importlib.import_module(f"score.{name}")


@pytest.fixture
def one_of_each(score, monkeypatch):
    """Leaves the first quick case of every part, without the libraries that may be missing."""
    from score import cases

    quick = cases.quick

    def first(device):
        parts = {}
        for case in reversed(quick(device)):
            more = {"peers": ["PyG"]} if "peers" in case else {}
            parts[case["part"]] = {**case, **more}
        return list(parts.values())

    monkeypatch.setattr(cases, "quick", first)
    return cases


def run(path: Path, *more: str) -> dict:
    assert cli.main([*SHORT, "--json", str(path), *more]) == 0
    return json.loads(path.read_text())


# ---- measuring -------------------------------------------------------------------------------------------


@exhaustive
def test_every_part_on_the_cpu(score, one_of_each, tmp_path, capsys):
    path = tmp_path / "cpu.json"
    results = run(path, "--device", "cpu")
    # Without CUDA the quick cases leave out the part "compiled", because compiling takes minutes.
    assert {case["part"] for case in results["cases"]} == set(one_of_each.PARTS) - {"compiled"}
    for case in results["cases"]:
        for contestant in case["contestants"]:
            if contestant["way"] != "NeighborLoader":  # pyg-lib may be missing
                assert len(contestant["ms"]) >= compare.LEAST, (case["part"], contestant)
            assert contestant.get("difference", 0) < 1e-4 and contestant.get("loss_difference", 0) < 1e-4
            bound = 1e-5 if contestant["dtype"] == "float32" else 3e-2
            assert all(v < bound for k, v in contestant.get("error", {}).items() if k != "rows")
    before = path.read_text()
    capsys.readouterr()
    again = run(path, "--device", "cpu")  # all of it is there
    assert again["cases"] == json.loads(before)["cases"]
    pages = module("pages")
    for name in pages.TABLES:
        text = pages.rendered(f"cpu-{name}", {"cpu": results})
        assert "\n|" in text or name == "setup", name


@pytest.mark.slow
def test_every_part_dry_on_cuda(score, one_of_each, tmp_path, monkeypatch):
    path = tmp_path / "cuda.json"
    # These two take as long as all others.
    parts = [part for part in one_of_each.PARTS if EXHAUSTIVE or part not in ("compiled", "molecules")]
    monkeypatch.setattr(cli.library, "require_cuda_library", lambda: None)
    with fake_cuda(monkeypatch) as calls:
        results = run(path, "--device", "cuda", "--parts", ",".join(parts))
    assert {"capture", "replay", "memory_allocated", "elapsed_time"} <= set(calls)
    assert results["runs"][0]["gpu"] == "a fake"
    ways = {c["way"] for case in results["cases"] for c in case["contestants"]}
    assert {"eager", "captured"} <= ways
    failed = [c for case in results["cases"] for c in case["contestants"] if "failed" in c]
    # These may fail: FlexAttention's backward has no CPU kernel, and PyG's loader may lack pyg-lib.
    assert {(c["library"], c["way"]) for c in failed} <= {
        ("FlexAttention", "compiled"),
        ("PyG", "NeighborLoader"),
    }


def test_a_run_that_ends_early_goes_on(score, one_of_each, tmp_path, capsys):
    path = tmp_path / "cpu.json"
    arguments = "--device", "cpu", "--parts", "shapes,fresh"
    assert cli.main([*SHORT, "--json", str(path), *arguments, "--minutes", "0"]) == 0
    assert not path.exists()
    assert "left for the same command" in capsys.readouterr().out
    results = run(path, *arguments)
    assert [case["part"] for case in results["cases"]] in (["shapes", "fresh"], ["fresh", "shapes"])
    with pytest.raises(
        ValueError, match="expected results of commit def, found abc: give --json another path"
    ):
        cli.main([*SHORT[:-1], "def", "--json", str(path), *arguments])


@pytest.mark.parametrize(("last", "kept"), [(1.04, True), (1.06, False)])
def test_the_first_case_is_kept_if_it_is_the_same_at_the_end(
    score, monkeypatch, tmp_path, capsys, last, kept
):
    """A process's first calls are slow: measured for nothing, for the file, and again after all others."""
    from score import cases

    calls: list[str] = []

    def measured(case, bench):
        calls.append(case["graph"])
        ms = {1: 7.0, 4: last}.get(len(calls), 1.0)
        return {"edges": 1, "contestants": [contestant("dfgnn", "eager", "float32", ms)]}

    listed = [
        {"part": "attention", "graph": graph, "layer": "gat", "heads": 1, "head_dim": 1} for graph in "ab"
    ]
    monkeypatch.setattr(cases, "cases", lambda *_: (listed, []))
    monkeypatch.setitem(cases.MEASURES, "attention", measured)
    path = tmp_path / "cpu.json"
    options = [option for option in SHORT if option != "--quick"]
    assert cli.main(["--device", "cpu", "--json", str(path), *options]) == (not kept)
    assert calls == ["a", "a", "b", "a"]
    found = [case["graph"] for case in json.loads(path.read_text())["cases"]]
    assert found == (["a", "b"] if kept else ["b"])
    assert ("a gat 1x1: not kept" in capsys.readouterr().out) == (not kept)


def test_a_graph_that_cannot_be_had_is_named(score, one_of_each, monkeypatch, tmp_path, capsys):
    def absent(*_):
        raise OSError("no such file")

    monkeypatch.setattr(module("cases"), "load", absent)
    path = tmp_path / "cpu.json"
    assert cli.main([*SHORT, "--json", str(path), "--device", "cpu", "--parts", "shapes"]) == 1
    (case,) = json.loads(path.read_text())["cases"]
    assert case["unavailable"] == "OSError: no such file"
    assert "not measured: OSError: no such file" in capsys.readouterr().out


def test_cases_are_different_and_known(score):
    from score import cases, models

    for listed in (cases.cuda(), cases.cpu(), cases.quick("cuda"), cases.quick("cpu")):
        keys = [records.key(case) for case in listed]
        assert len(set(keys)) == len(keys)
        assert {case["part"] for case in listed} <= set(cases.MEASURES)
        assert all(set(case) <= set(records.KEYS) for case in listed)
        assert all(way in models.WAYS for case in listed for way in case.get("ways", []))
        assert all(peer in peers.PEERS for case in listed for peer in case.get("peers", []))


def test_data_that_is_not_there_has_a_twin_by_name(score, monkeypatch):
    from score import cases, data

    monkeypatch.delenv("DFGNN_DATA", raising=False)
    found, notes = cases.cases("cuda", is_quick=False)
    names = {case["graph"] for case in found}
    assert {"arxiv~", "Cora~", "64 molecules~", "ogbg-molhiv~", "reddit~"} <= names
    assert not names & {"ogbn-arxiv", "Cora", "64 molecules", "ogbg-molhiv", "ogbl-ddi"}
    assert any(note.startswith("ogbl-ddi: no copy of the data in DFGNN_DATA, left out") for note in notes)
    for name in ("Cora~", "64 molecules~", "cliques-3", "random-20-50"):
        graph = data.load(name, torch.device("cpu"))
        assert graph.num_edges > 0 and graph.num_src == graph.num_dst
    assert data.load("cliques-3", torch.device("cpu")).num_edges == sum(
        n * n for n in torch.randint(16, 65, (3,), generator=torch.Generator().manual_seed(0)).tolist()
    )


# ---- contestants in turns ----------------------------------------------------------------------------------


def test_contestants_take_turns_and_failures_are_named(score):
    order = []

    def steady(name):
        return compare.Contestant(name, "eager", "float32", lambda: compare.Step(lambda: order.append(name)))

    def broken():
        raise ImportError("no such library")

    calls = iter([None] * 4)

    def breaks_later():
        next(calls)  # StopIteration after four

    contestants = [
        steady("a"),
        compare.Contestant("absent", "eager", "float32", broken),
        compare.Contestant("tired", "eager", "float32", lambda: compare.Step(breaks_later)),
        steady("b"),
    ]
    a, absent, tired, b = compare.compare(contestants, torch.device("cpu"), 0.0)
    assert len(a["ms"]) == len(b["ms"]) == 5
    assert absent == {"library": "absent", "way": "eager", "dtype": "float32",
                      "failed": "ImportError: no such library"}  # fmt: skip
    assert tired["failed"].startswith("StopIteration") and "ms" not in tired
    one = re.sub(r"(.)\1*", r"\1", "".join(order))  # runs of calls are one sample
    assert one == "ab" * 7  # warming up, the turn that says how many calls a sample takes, and five


def test_a_lost_device_ends_the_run_with_a_name(score, monkeypatch):

    def lost(device):
        raise RuntimeError("misaligned address")

    def failing():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(compare.measure, "synchronize", lost)
    contestant = compare.Contestant("PyG", "compiled", "float32", failing)
    with pytest.raises(
        compare.LostDevice, match="PyG compiled float32: the device is lost, after RuntimeError: out"
    ):
        compare.compare([contestant], torch.device("cpu"), 0.0)


# ---- yardsticks ------------------------------------------------------------------------------------------


def test_blocks_of_columns():
    assert yardsticks.column_blocks(128, torch.float32) == (1, 2)
    assert yardsticks.column_blocks(512, torch.float32) == (1, 2, 4, 8)
    assert (
        yardsticks.column_blocks(100, torch.float32) == yardsticks.column_blocks(64, torch.bfloat16) == (1,)
    )


def test_the_floor_is_that_of_the_fastest_walk(monkeypatch):
    """The time of a stand-in sum is the square of its number of columns: eight blocks of 64 columns win."""
    graph = Graph.from_edge_index(torch.randint(20, (2, 60), generator=torch.Generator().manual_seed(0)), 20)

    def timings(call, device, budget):
        sums = call()
        assert sum(x.shape[1] for x in sums) == 512
        return {"eager": {"median": float(sum(x.shape[1] ** 2 for x in sums))}}

    monkeypatch.setattr(yardsticks, "timings", timings)
    found = yardsticks.measure_floor(graph, 512, torch.float32, 0.01)
    assert found["sparse"]["column_blocks"] == 8
    assert found["floor"] == {"eager": 8 * 64.0**2}
    assert "CUDA only" in found["gather_sum"]["unavailable"]


class OnGpu:
    """A graph that says that it is on a GPU."""

    def __init__(self, graph: Graph):
        self.graph, self.device = graph, torch.device("cuda")

    def __getattr__(self, name):
        return getattr(self.graph, name)


def test_our_sum_over_blocks_dry_on_cuda(monkeypatch):
    """The sum's kernel is replaced by one that is wrong for one schedule."""
    graph = Graph.from_edge_index(torch.randint(20, (2, 60), generator=torch.Generator().manual_seed(0)), 20)
    widths = []

    def gather_sum(graph, width, dtype, schedule):
        widths.append(width)
        if schedule == "packed":
            raise ValueError("not available")
        call = yardsticks.sparse_sum(graph, dtype)
        return lambda dense: call(dense) * (2 if schedule == "natural" else 1)

    monkeypatch.setattr(yardsticks, "gather_sum", gather_sum)
    with fake_cuda(monkeypatch) as calls:
        found = yardsticks.measure_floor(OnGpu(graph), 128, torch.float32, 0.001)
    assert set(widths) == {128, 64} and {"capture", "replay"} <= set(calls)
    assert found["gather_sum"]["schedule"] == "longest_first"
    problems = found["gather_sum"]["not_measured"]
    assert sum("not available" in line for line in problems) == 2
    assert sum("differs from torch.sparse" in line for line in problems) == 2
    assert set(found["floor"]) == {"eager", "kernels"} and found["fits_l2"]


def test_a_walk_over_blocks_that_is_wrong_is_no_floor(monkeypatch):
    graph = Graph.from_edge_index(torch.randint(20, (2, 60), generator=torch.Generator().manual_seed(0)), 20)
    right = yardsticks.by_blocks

    def wrong(call, dense, blocks):
        sums = right(call, dense, blocks)
        return sums if blocks == 1 else lambda: [2 * x for x in sums()]

    monkeypatch.setattr(yardsticks, "by_blocks", wrong)
    found = yardsticks.measure_floor(graph, 128, torch.float32, 0.001)
    assert found["sparse"]["column_blocks"] == 1
    assert "torch.sparse in 2 blocks of columns: RuntimeError: differs" in found["sparse"]["not_measured"][0]


# ---- tables ----------------------------------------------------------------------------------------------


def contestant(library, way, dtype, ms, **more):
    return {"library": library, "way": way, "dtype": dtype, "ms": [ms] * 5, **more}


@pytest.fixture
def results():
    case = {
        "part": "attention", "graph": "ogbn-arxiv", "layer": "gat", "heads": 4, "head_dim": 32,
        "mode": "train", "dtypes": ["float32", "bfloat16"], "run": 0, "nodes": 1_000,
        "edges": 2_484_941, "largest_degree": 30, "passes": 2,
        "floor": {"float32": {"kernels": 0.2}, "bfloat16": {"kernels": 0.1}},
        "byte_bound": {"float32": {"kernels": 0.25}, "bfloat16": {"kernels": 0.2}}, "copy_gb_s": 4e3,
        "preprocessing_ms": {"csr": 1.0, "reverse_csr": 0.5, "plan": 0.25, "reverse_plan": 0.25},
        "contestants": [
            contestant("dfgnn", "eager", "float32", 0.6, extra_mb=1.5, error={"out": 1e-7}),
            contestant("dfgnn", "captured", "float32", 0.5),
            contestant("PyG", "eager", "float32", 30.0, extra_mb=900.0, error={"out": 1e-7}),
            contestant("dfgnn", "eager", "bfloat16", 0.4),
            contestant("dfgnn", "captured", "bfloat16", 0.3),
            contestant("PyG", "eager", "bfloat16", 40.0),
            {"library": "DGL", "way": "eager", "dtype": "float32", "failed": "ModuleNotFoundError: dgl"},
        ],
    }  # fmt: skip
    other = copy.deepcopy(case) | {"graph": "reddit~"}
    for c in other["contestants"]:
        if c["library"] == "PyG":
            del c["ms"]
            c["failed"] = "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    compiled = copy.deepcopy(case) | {"part": "compiled", "compiled": True}
    compiled["contestants"] = [
        contestant("dfgnn", "eager", "float32", 0.6),
        contestant("dfgnn", "captured", "float32", 0.5),
        contestant("PyG", "compiled", "float32", 2.5),
    ]
    run = {"gpu": "NVIDIA H200", "driver": "1", "cuda": "13.0", "torch": "2.11", "commit": "abcdef",
           "date": "2026-01-01T", "uncommitted_changes": None, "torch_geometric": "2.8"}  # fmt: skip
    return {"cuda": {"schema": 1, "runs": [run], "cases": [case, other, compiled]}}


def test_the_strongest_alternative_is_named(score, results):
    text = module("pages").rendered("cuda-alternatives", results)
    assert "| ogbn-arxiv | 5, PyG compiled | 100, PyG fp32 |" in text  # bf16 of PyG is slower than its fp32
    assert "| reddit~ | – | – |" in text
    assert "| geometric mean of 2 | – | – |" in text  # no mean, because one of the two graphs has no value
    assert "PyG was not compiled" not in text
    del results["cuda"]["cases"][2]
    text = module("pages").rendered("cuda-alternatives", results)
    assert "| ogbn-arxiv | 60\\*, PyG | 100\\*, PyG fp32 |" in text and "\\* PyG was not compiled" in text
    assert "Not installed there: DGL." in text


def test_means_and_worst_beside_the_bound(score, results):
    results["cuda"]["cases"][1]["byte_bound"]["float32"]["kernels"] = 0.0625
    text = module("pages").rendered("cuda-bounds", results)
    assert "| 4×32 | fp32 | 2 | 4 (8.00, reddit~) | – | – |" in text
    assert "| 4×32 | bf16 | 2 | 1.5 (1.50, ogbn-arxiv) | – | – |" in text


def test_a_row_of_a_layer_is_its_least_gain(score, results):
    case = results["cuda"]["cases"][0] | {"part": "dropout"}
    other = copy.deepcopy(case) | {"graph": "cora~"}
    other["contestants"] = [
        contestant("dfgnn", "captured", "float32", 0.5), contestant("PyG", "eager", "float32", 2.0),
    ]  # fmt: skip
    results["cuda"]["cases"] = [case, other]
    text = module("pages").rendered("cuda-functions", results)
    assert "| GAT, dropout | 4 | cora~, 4×32, fp32 | 2, PyG | 0.5, dfgnn captured | 100 of 3 |" in text


def test_filling_replaces_what_is_between_and_nothing_else(score, results):
    pages = module("pages")
    text = "a <!-- scoreboard:headline -->old<!-- /scoreboard --> b\n\n"
    text += "<!-- scoreboard:cuda-setup -->\nold\n<!-- /scoreboard -->\n"
    new = pages.filled(text, results, "page.md")
    assert (
        "old" not in new
        and new.startswith("a <!-- scoreboard:headline -->On an NVIDIA")
        and new.endswith(".\n<!-- /scoreboard -->\n")
    )
    assert pages.filled(new, results, "page.md") == new
    with pytest.raises(ValueError, match=r"page.md: scoreboard:cuda-speed: expected one of headline"):
        pages.filled("<!-- scoreboard:cuda-speed -->\n<!-- /scoreboard -->", results, "page.md")
    with pytest.raises(ValueError, match="expected an end"):
        pages.filled("<!-- scoreboard:headline -->", results, "page.md")


def test_pictures(score, results, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "cuda.json").write_text(records.text(results["cuda"]))
    lines = module("charts").draw(tmp_path, tmp_path / "pictures")
    assert [Path(line).name for line in lines] == [
        "step-times.png",
        "step-times-dark.png",
        "attention-cuda.png",
    ]
    assert all(Path(line).stat().st_size > 5_000 for line in lines)


# ---- the documents ---------------------------------------------------------------------------------------


def test_tables_of_the_documents_are_those_of_the_results(score):
    """No figure is typed by hand: filling the pages again changes nothing."""
    pages = module("pages")
    found = pages.results_of(ROOT / "benchmarks" / "results")
    marked = [page for page in pages.pages_of(ROOT) if pages.MARKED.search(page.read_text())]
    assert ROOT / "docs" / "performance.md" in marked
    for page in marked:
        assert pages.filled(page.read_text(), found, page.name) == page.read_text(), page.name


def prose(page: Path) -> str:
    """The text of a page without what the scoreboard fills in, code, link targets, comments, and names of
    types and shapes: no figure of a measurement may be left in it."""
    text = re.sub(r"<!-- scoreboard:.*?<!-- /scoreboard -->", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "", text)
    return re.sub(r"\b(?:fp|bf|float|int)\d+\b|\d+ bits|\bGATv2\w*", "", text)


def test_every_figure_of_performance_stands_between_markers():
    left = re.findall(r".*\d.*", prose(ROOT / "docs" / "performance.md"))
    assert not left


FIGURE = re.compile(r"\d[\d.,]* (?:ms|µs|MB|GB|×|times as fast|x)(?!\w)")


def test_every_figure_of_the_readme_stands_between_markers():
    page = ROOT / "README.md"
    assert "<!-- scoreboard:" in page.read_text()
    assert not FIGURE.findall(prose(page))


def test_results_are_few_and_listed():
    """Every file has its command in the index, none is listed twice, and all are at most a megabyte."""
    folder = ROOT / "benchmarks" / "results"
    files = {path.name for path in folder.glob("*.json")}
    listed = re.findall(r"`([\w-]+\.json)`", (folder / "README.md").read_text().partition("| file |")[2])
    assert files <= set(listed)
    assert set(listed) <= files
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1_000_000
