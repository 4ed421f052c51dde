"""benchmarks/papers100m.py at a ten-thousandth of its size, on the CPU."""

import json

import pytest
import torch
from loading import ROOT, load

import dfgnn

ARGUMENTS = ["--device", "cpu", "--scale", "10000", "--rows", "32", "--budget", "0.01"]


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        return load("benchmarks/papers100m.py")


@pytest.fixture(scope="module")
def case(bench):
    """A small graph, inputs, sampled nodes, a training step and its float64 values."""
    graph = dfgnn.Graph.from_csr(*bench.power_law(2_000, 30_000, 500, "cpu"))
    inputs, grad_out = bench.make_inputs(graph)
    sources = bench.sample(graph.out_degrees(), 16)
    rows = torch.cat([bench.destinations_of(graph, sources), torch.tensor([0, 1999])]).unique()
    exact = bench.exact_gat(graph, {k: x.detach() for k, x in inputs.items()}, grad_out, rows, sources)
    return bench.train(graph, inputs, grad_out), exact, rows, sources


def test_graph_has_the_sizes_and_a_bounded_tail(bench):
    indptr, indices = bench.power_law(11_105, 161_568, 1_000, "cpu")
    assert (len(indptr) - 1, int(indptr[-1]), len(indices)) == (11_105, 161_568, 161_568)
    graph = dfgnn.Graph.from_csr(indptr, indices)  # checks the values
    for reverse in (False, True):
        stats = graph.degree_stats(reverse=reverse)
        assert 500 < stats.max < 1_100
        assert stats.p50 < stats.mean < 4 * stats.p50
    assert graph.in_degrees().argmax() != graph.out_degrees().argmax()


def test_float64_of_some_rows_is_that_of_the_whole_graph(bench, monkeypatch):
    monkeypatch.setattr(bench, "_EXACT_PART", 300)
    monkeypatch.setattr(bench, "_PART", 1_000)
    graph = dfgnn.Graph.from_csr(*bench.power_law(500, 7_000, 200, "cpu"))
    inputs, grad_out = bench.make_inputs(graph)
    inputs = {name: x.detach() for name, x in inputs.items()}
    sources = bench.sample(graph.out_degrees(), 5)
    rows = bench.destinations_of(graph, sources)
    assert rows.tolist() == graph.edge_index[1][torch.isin(graph.edge_index[0], sources)].unique().tolist()

    whole = bench.accuracy.gat(graph, **inputs, grad_out=grad_out)
    some = bench.exact_gat(graph, inputs, grad_out, rows, sources)
    for name, x in some.items():
        torch.testing.assert_close(x, whole[name][rows if name in ("out", "score_dst") else sources])
    dense = inputs["value"].double().flatten(1)
    sums = torch.zeros_like(dense).index_add_(0, graph.edge_index[1], dense[graph.edge_index[0]])
    torch.testing.assert_close(bench.exact_sum(graph, dense, rows), sums[rows])


def test_right_results_are_within_the_bounds(bench, case):
    results, exact, rows, sources = case
    found = bench.errors(results, exact, rows, sources)
    assert set(found) == set(bench.BOUNDS)
    assert bench.wrong(found) == []


@pytest.mark.parametrize("name", ["out", "value", "score_src", "score_dst"])
@pytest.mark.parametrize("defect", [lambda x: x * 1.03, torch.zeros_like, lambda x: x * torch.nan])
def test_a_wrong_result_is_found(bench, case, name, defect):
    results, exact, rows, sources = case
    found = bench.errors(results | {name: defect(results[name])}, exact, rows, sources)
    assert bench.wrong(found) == [name]


@pytest.mark.parametrize("name", ["out", "value"])
def test_a_single_wrong_row_is_found(bench, case, name):
    results, exact, rows, sources = case
    damaged = results[name].clone()
    damaged[-1] *= 1.02  # the last node is always sampled
    assert bench.wrong(bench.errors(results | {name: damaged}, exact, rows, sources)) == [name]


def test_writes_results_and_names_what_it_cannot_measure(bench, tmp_path, capsys):
    path = tmp_path / "results.json"
    assert bench.main([*ARGUMENTS, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["graph"]["nodes"] == 11_105 and result["graph"]["edges"] == 161_568
    assert result["environment"]["device"] == "cpu" and result["training"]["median"] > 0
    assert all(found.keys() & {"median", "unavailable"} for found in result["yardsticks"].values())
    assert set(result["memory_gb"]) == {"csr", "plans", "inputs", "results", "peak_extra"}
    assert result["check"]["wrong"] == []
    assert "time / (2 passes x floor)" in capsys.readouterr().out


def test_a_graph_of_ranges(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(dfgnn.sparse.csr, "MOST_EDGES", 100_000)
    path = tmp_path / "results.json"
    sizes = ["--nodes", "9000", "--edges", "210000", "--head-dim", "16"]
    assert bench.main([*ARGUMENTS, *sizes, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["graph"] == {"nodes": 9000, "edges": 210_000, "ranges": 3}
    assert result["check"]["wrong"] == [] and result["check"]["destinations"] > 32


def test_a_wrong_kernel_fails_the_run(bench, monkeypatch, capsys):
    right = bench.functional.gat_attention
    monkeypatch.setattr(
        bench.functional, "gat_attention", lambda *args, **kwargs: right(*args, **kwargs, negative_slope=0.3)
    )
    assert bench.main(ARGUMENTS) == 1
    assert "WRONG: out" in capsys.readouterr().out
