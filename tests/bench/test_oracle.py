"""``--oracle``: the chosen plan against every other one."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy", reason="the benchmarks need numpy")

import numpy as np
import torch

from dfgnn import Graph
from dfgnn.bench import attention, cli, report
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

    def __init__(self, chosen, partial_bytes=None):
        self.chosen, self.partial_bytes = chosen, partial_bytes or {}

    def plans(self, mode, schedule="auto"):
        if schedule == "tiles":
            raise ValueError("not available")
        found = {}
        for direction in ("forward", "reverse") if mode == "train" else ("forward",):
            name = self.chosen[direction] if schedule == "auto" else schedule
            found[direction] = SimpleNamespace(
                schedule=name,
                max_edges=_BOUNDS[name, direction],
                heads_per_tile=0,
                source_parts=1,
                partial_bytes=self.partial_bytes.get(name, 0),
            )
        return found

    def most_partial_bytes(self, direction):
        return 100

    def alternatives(self, mode):
        return ["natural", "longest_first", "packed", "tiles"]


def test_all_other_plans_are_contestants():
    forward = attention._alternatives(_Work({"forward": "longest_first"}), "forward")
    assert forward == {"natural <= 512": "natural", "packed <= 64": "packed", "tiles": "tiles"}
    mixed = attention._alternatives(_Work({"forward": "natural", "reverse": "longest_first"}), "train")
    assert list(mixed) == ["natural <= 512 / natural <= 512", "longest_first <= 512 / longest_first <= 256",
                           "packed <= 64 / packed <= 64", "tiles"]  # fmt: skip


def _result(times: dict[str, tuple[float, float | None]], too_large=()) -> dict:
    """A result with plans that have (eager, captured) times; the first plan is the one that was chosen."""
    ours = []
    for plan, pair in times.items():
        behind = "" if plan == next(iter(times)) else f", {plan}"
        for way, ms in zip(("eager", "captured"), pair):
            taken = {"ms": [ms]} if ms is not None else {"failed": "RuntimeError: memory"}
            large = {"too_large": True} if plan in too_large else {}
            ours.append(
                {"library": "dfgnn", "way": way + behind, "dtype": "float32", "plan": plan, **taken, **large}
            )
    return {"contestants": ours}


def test_chosen_is_compared_with_the_best():
    times = {"a": (4.0, 3.0), "b": (9.0, 2.0), "c": (1.0, 8.0)}
    assert report.oracle(_result(times)) == (1.5, "b")  # by captured calls
    assert report.oracle(_result({**times, "b": (9.0, None)})) == (4.0, "c")  # one could not be captured
    assert report.oracle(_result({"a": (4.0, 3.0), "b": (5.0, 6.0)})) == (1.0, "a")
    assert report.oracle(_result({"a": (4.0, 3.0)})) is None


def test_what_takes_too_much_memory_is_not_the_best():
    work = _Work({"forward": "longest_first"}, partial_bytes={"natural": 100, "packed": 101})
    assert attention._plan_notes(work, "forward", "natural") == {"plan": "natural <= 512"}
    assert attention._plan_notes(work, "forward", "packed") == {"plan": "packed <= 64", "too_large": True}
    times = {"a": (3.0, 3.0), "b": (2.0, 2.0), "c": (1.0, 1.0)}
    assert report.oracle(_result(times, too_large=["c"])) == (1.5, "b")


def test_the_memory_is_that_of_auto():
    """Candidates may take as much memory for partial results as the scheduler's own plans. Where that is more
    than 16 MB, it is a fixed fraction of the size of a pass's results."""
    src, dst = torch.arange(120_000), torch.arange(120_000) % 100_000
    graph = Graph.from_edge_index(torch.stack([src, dst]), num_src=120_000, num_dst=100_000)
    work = Workload.make(LAYERS["dot"], graph, 4, 32, torch.float32)
    of_array = 4 * 32 * 4
    assert work.most_partial_bytes("forward") == int(0.85 * 100_000 * of_array)
    assert work.most_partial_bytes("reverse") == 2 * int(0.85 * 120_000 * of_array)


def _run(graph, path, *more) -> list[dict]:
    arguments = f"--device cpu --graphs {graph} --layers gat --heads 2 --head-dim 4 --seconds 0.001 --quick"
    assert cli.main([*arguments.split(), "--oracle", "--json", str(path), *more]) == 0
    return json.loads(path.read_text())["cases"]


def test_bounds_are_candidates(tmp_path, capsys):
    """A row of 6,000 edges. The CPU's own maximum per work item cuts it in two chunks, half that maximum in
    three, and twice that maximum leaves it whole."""
    path = tmp_path / "star.npz"
    np.savez(path, indptr=np.r_[0, np.full(6001, 6000)], indices=np.arange(1, 6001))
    (case,) = _run(path, tmp_path / "results.json", "--mode", "forward")
    assert [c["plan"] for c in case["contestants"]] == [f"natural <= {b}" for b in (4096, 2048, 8192)]
    assert case["contestants"][0]["way"] == "eager"
    assert "chosen / best plan" in capsys.readouterr().out


def test_a_graph_without_long_rows_has_one_plan_on_the_cpu(tmp_path, capsys):
    cases = _run("er-50-4", tmp_path / "results.json")
    assert [len(case["contestants"]) for case in cases] == [1, 1]
    assert "chosen / best" not in capsys.readouterr().out
