"""``--oracle``: the chosen plan against every other one."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy", reason="the benchmarks need numpy")

import numpy as np
import torch

from dfgnn import Graph
from dfgnn.bench import candidates, cli, report
from dfgnn.bench.workloads import LAYERS, Workload

# Maximum edges per work item by (schedule, direction), as the stand-in scheduler `_Work` gives it.
_BOUNDS = {
    ("natural", "forward"): 512,
    ("natural", "reverse"): 512,
    ("longest_first", "forward"): 512,
    ("longest_first", "reverse"): 256,
    ("packed", "forward"): 64,
    ("packed", "reverse"): 64,
}


class _Work:
    """A workload whose scheduler has three schedules and takes ``chosen`` (by direction) by itself."""

    graph = SimpleNamespace(device="cpu")
    layer = SimpleNamespace(attention=lambda graph, schedule: schedule)

    def __init__(self, chosen, partial_bytes=None):
        self.chosen, self.partial_bytes = chosen, partial_bytes or {}

    def plans(self, mode, schedule="auto"):
        directions = ("forward", "reverse") if mode == "train" else ("forward",)
        found = {}
        for direction in directions:
            name = self.chosen[direction] if schedule == "auto" else schedule
            found[direction] = SimpleNamespace(
                schedule=name,
                max_edges=_BOUNDS[name, direction],
                heads_per_tile=0,
                source_parts=1,
                items=[None] * 7,
                splits=[None] * 2,
                num_slots=5,
                partial_bytes=self.partial_bytes.get(name, 0),
            )
        return found

    def most_partial_bytes(self, direction):
        return 100

    def alternatives(self, mode):
        return ["natural", "longest_first", "packed"]

    def call(self, attention, mode):
        return attention


@pytest.fixture
def clock(monkeypatch):
    """Times by schedule, {kind: ms}; an exception is raised. Returns them, and the schedules measured."""
    times, asked = {}, []

    def timings(call, device, budget):
        asked.append(call())
        found = times[asked[-1]]
        if isinstance(found, Exception):
            raise found
        return {kind: {"median": ms} for kind, ms in found.items()}

    monkeypatch.setattr(candidates, "timings", timings)
    return times, asked


def _chosen(work, mode, **ms):
    plans = candidates.describe(work.plans(mode))
    return {"plan": plans} | {kind: {"median": value} for kind, value in ms.items()}


def test_chosen_is_measured_once_and_compared_with_the_best(clock):
    times, asked = clock
    times |= {
        "natural": {"eager": 9.0, "kernels": 2.0},
        "packed": {"eager": 1.0, "kernels": 8.0},
    }
    work = _Work({"forward": "longest_first"})
    found = candidates.measure_candidates(
        work, "forward", _chosen(work, "forward", eager=4.0, kernels=3.0), 0.1
    )
    assert asked == ["natural", "packed"]
    assert found["kind"] == "kernels"
    assert (found["chosen"], found["best"], found["ratio"]) == (
        "longest_first <= 512",
        "natural <= 512",
        pytest.approx(1.5),
    )
    ms = {name: candidate["ms"] for name, candidate in found["candidates"].items()}
    assert ms == {"longest_first <= 512": 3.0, "natural <= 512": 2.0, "packed <= 64": 8.0}


def test_mixed_plans_are_a_candidate_and_kinds_are_not_mixed(clock):
    times, asked = clock
    times |= {
        "natural": {"eager": 5.0, "kernels": 1.0},
        "longest_first": {"eager": 6.0},  # could not be captured
        "packed": RuntimeError("out of shared memory"),
    }
    work = _Work({"forward": "natural", "reverse": "longest_first"})
    found = candidates.measure_candidates(work, "train", _chosen(work, "train", eager=4.0, kernels=3.0), 0.1)
    assert asked == ["natural", "longest_first", "packed"]
    assert found["kind"] == "eager"
    assert found["best"] == found["chosen"] == "natural <= 512 / longest_first <= 256"
    assert found["ratio"] == 1
    assert found["candidates"]["packed <= 64 / packed <= 64"] == {
        "failed": "RuntimeError: out of shared memory"
    }
    assert "packed <= 64 / packed <= 64 not measured: RuntimeError" in report._oracle_text(found)


def test_what_takes_too_much_memory_is_not_the_best(clock):
    times, _ = clock
    times |= {"natural": {"eager": 2.0}, "packed": {"eager": 1.0}}
    work = _Work({"forward": "longest_first"}, partial_bytes={"natural": 100, "packed": 101})
    found = candidates.measure_candidates(work, "forward", _chosen(work, "forward", eager=3.0), 0.1)
    assert (found["best"], found["ratio"]) == ("natural <= 512", pytest.approx(1.5))
    assert found["candidates"]["packed <= 64"] == {"ms": 1.0, "too_large": True}
    assert "packed <= 64 1 ms (too large)" in report._oracle_text(found)


def test_the_memory_is_that_of_auto():
    """Candidates may take as much memory for partial results as the scheduler's own plans: beyond 16 MB, a
    share of the arrays that a pass sums up."""
    src, dst = torch.arange(120_000), torch.arange(120_000) % 100_000
    graph = Graph.from_edge_index(torch.stack([src, dst]), num_src=120_000, num_dst=100_000)
    work = Workload.make(LAYERS["dot"], graph, 4, 32, torch.float32)
    of_array = 4 * 32 * 4
    assert work.most_partial_bytes("forward") == int(0.85 * 100_000 * of_array)
    assert work.most_partial_bytes("reverse") == 2 * int(0.85 * 120_000 * of_array)


def _row(graph, ratio, several=True, mode="train"):
    names = ("a", "b") if several else ("a",)
    oracle = {"candidates": {name: {"ms": 1.0} for name in names}, "ratio": ratio}
    case = {"graph": graph, "layer": "gat", "heads": 4, "head_dim": 32, "dtype": "float32", "mode": mode}
    return case | {"schedule": "auto", "x_floor": {"eager": 1.0}, "peers": {}, "oracle": oracle}


def test_means_of_chosen_over_best():
    train, forward = report.means(
        [_row("a", 1.0, several=False), _row("b", 2.0), _row("c", 4.0), _row("a", 1.0, mode="forward")]
    )
    assert train["oracle"] == {
        "graphs": 3,
        "with_choice": 2,
        "mean": pytest.approx(2.0),
        "worst": {"graph": "c", "ratio": 4.0},
    }
    text = report.mean_line(train)
    assert "chosen / best plan 2.00, worst 4.00 on c (2 of 3 graphs with several candidates)" in text
    assert forward["oracle"]["with_choice"] == 1


def test_bounds_are_candidates(tmp_path, capsys):
    """A row of 6,000 edges. The CPU's own maximum per work item cuts it in two chunks, half that maximum in
    three, and twice that maximum leaves it whole."""
    path, results = tmp_path / "star.npz", tmp_path / "results.json"
    np.savez(path, indptr=np.r_[0, np.full(6001, 6000)], indices=np.arange(1, 6001))
    arguments = f"--device cpu --graphs {path} --layers gat --heads 1 --head-dim 4 --budget 0.001 --oracle"
    assert cli.main([*arguments.split(), "--mode", "forward", "--json", str(results)]) == 0
    (row,) = json.loads(results.read_text())["rows"]
    bounds = [f"natural <= {bound}" for bound in (4096, 2048, 8192)]
    assert list(row["oracle"]["candidates"]) == bounds
    assert row["oracle"]["chosen"] == bounds[0] and row["oracle"]["ratio"] >= 1


def test_a_graph_without_long_rows_has_one_candidate_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = "--device cpu --graphs er-50-4 --layers gat --heads 2 --head-dim 4 --budget 0.001 --oracle"
    assert cli.main([*arguments.split(), "--json", str(path)]) == 0
    results = json.loads(path.read_text())
    assert len(results["rows"]) == 2
    for row in results["rows"]:
        assert row["oracle"]["ratio"] == 1 and row["oracle"]["kind"] == "eager"
        assert row["oracle"]["candidates"] == {row["oracle"]["chosen"]: {"ms": row["eager"]["median"]}}
    assert all(record["oracle"]["with_choice"] == 0 for record in results["means"])
    text = capsys.readouterr().out
    assert text.count("chosen / best 1.00, there is one candidate only: natural <= 4096") == 2
