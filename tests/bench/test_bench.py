"""The benchmark command, on graphs of a few nodes."""

import json
import math
import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from dfgnn import Graph, reference
from dfgnn.runtime import timing as _timing

np = pytest.importorskip("numpy", reason="the benchmarks need numpy")

from dfgnn.bench import accuracy, cli, graphs, measure, peers, report, workloads  # noqa: E402


def _blocks(num_src=11, num_dst=9, num_edges=60):
    """A block with duplicate edges; destinations 7 and 8 have none."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(num_src, (num_edges,), generator=generator)
    dst = torch.randint(num_dst - 2, (num_edges,), generator=generator)
    return Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)


@pytest.fixture
def tiny(tmp_path):
    """A file with the path 0 - 1 - ... - 29 and all edges into node 3."""
    n = 30
    src = np.concatenate([np.arange(n - 1), np.arange(n)])
    dst = np.concatenate([np.arange(1, n), np.full(n, 3)])
    order = np.argsort(src, kind="stable")
    indptr = np.concatenate([[0], np.bincount(src, minlength=n).cumsum()])
    path = tmp_path / "tiny.npz"
    np.savez(path, num_nodes=n, indptr=indptr, indices=dst[order])
    return path


# ---- errors against float64 ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [2**28, 1000], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("layer", ["gat", "gatv2", "dot"])
def test_float64_values_are_the_reference_and_its_gradients(layer, chunk_bytes, monkeypatch):
    monkeypatch.setattr(accuracy, "_CHUNK_BYTES", chunk_bytes)
    graph, heads, dim, value_dim = _blocks(), 3, 4, 5
    sizes = {
        "gat": {"value": (11, heads, value_dim), "score_src": (11, heads), "score_dst": (9, heads)},
        "gatv2": {"key": (11, heads, dim), "query": (9, heads, dim), "att": (heads, dim)},
        "dot": {"query": (9, heads, dim), "key": (11, heads, dim), "value": (11, heads, value_dim)},
    }[layer]
    inputs = {name: torch.randn(size, dtype=torch.float64).requires_grad_() for name, size in sizes.items()}
    out = getattr(reference, f"{layer}_attention")(graph, **inputs)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, tuple(inputs.values()), grad_out)
    expected = {"out": out.detach(), **dict(zip(inputs, grads))}

    detached = {name: x.detach() for name, x in inputs.items()}
    found = getattr(accuracy, layer)(graph, **detached, grad_out=grad_out)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert accuracy.error(x, expected[name]) < 1e-10, name
    assert getattr(accuracy, layer)(graph, **detached).keys() == {"out"}


def test_error_is_relative_and_sees_nan():
    x = torch.tensor([3.0, 4.0])
    assert accuracy.error(x, x.double()) == 0
    assert accuracy.error(1.1 * x, x.double()) == pytest.approx(0.1)
    assert accuracy.error(x, torch.zeros(2, dtype=torch.float64)) == pytest.approx(5)
    assert math.isnan(accuracy.error(torch.tensor([math.nan, 1.0]), x.double()))


# ---- graphs ----------------------------------------------------------------------------------------


def _check_symmetric_with_loops(graph):
    src, dst = graph.edge_index
    n = graph.num_dst
    assert graph.num_src == n
    assert torch.equal((src * n + dst).sort().values, (dst * n + src).sort().values)
    assert len(torch.unique(src[src == dst])) == n


def test_synthetic_twin_has_the_published_size_and_tail():
    graph = graphs.load("cora~")
    _check_symmetric_with_loops(graph)
    assert (graph.num_dst, graph.num_edges) == (2708, 10556 + 2708)
    assert 0.7 * 168 < graph.degree_stats().max < 1.4 * 168
    assert torch.equal(graphs.load("cora~").csr().indices, graph.csr().indices)


def test_files_of_every_kind_give_the_same_graph(tiny, tmp_path):
    sparse = pytest.importorskip("scipy.sparse")
    from scipy.io import mmwrite

    expected = graphs.load(str(tiny))
    _check_symmetric_with_loops(expected)
    # 29 edges of the path, 27 more into node 3 (two are on the path), 30 loops.
    assert (expected.num_dst, expected.num_edges) == (30, 2 * (29 + 27) + 30)
    with np.load(tiny) as f:
        indptr, indices = f["indptr"], f["indices"]
    matrix = sparse.csr_array((np.ones(len(indices)), indices, indptr), shape=(30, 30))
    sparse.save_npz(tmp_path / "scipy.npz", matrix)
    mmwrite(tmp_path / "market.mtx", matrix)
    src = np.repeat(np.arange(30), np.diff(indptr))
    batch = {"node_ptr": [0, 30, 31], "edge_ptr": [0, len(src), len(src)], "src": src, "dst": indices}
    np.savez(tmp_path / "batch.npz", **batch)
    for name in ("scipy.npz", "market.mtx"):
        graph = graphs.load(str(tmp_path / name))
        assert all(torch.equal(a, b) for a, b in zip(graph.csr()[:2], expected.csr()[:2])), name
    graph = graphs.load(str(tmp_path / "batch.npz"))
    assert (graph.num_dst, graph.num_edges) == (31, expected.num_edges + 1)
    assert torch.equal(graph.csr().indices[:-1], expected.csr().indices)


def test_graphs_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match="got 'corra'"):
        graphs.load("corra")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="other.npz: expected indptr"):
        graphs.load(str(tmp_path / "other.npz"))
    with pytest.raises(FileNotFoundError):
        graphs.load(str(tmp_path / "none.npz"))


# ---- measuring -------------------------------------------------------------------------------------


def test_summary_keeps_the_percentiles_and_the_budget():
    asked = []

    def sample(count):
        asked.append(count)
        return [1.0 + i for i in range(count)][::-1]

    timing = _timing._summary(sample, budget=0.2)
    warm, timed = asked[2:]
    assert warm == 40  # a fifth of the budget, 40 ms, in calls of 1 ms
    assert timed == int(0.8 * 200 / 21)
    assert (timing.p20, timing.median, timing.p80, timing.samples) == (2.0, 4.0, 6.0, timed)


def test_peak_memory_on_the_cpu_is_exact():
    x = torch.zeros(1000)

    def call():
        once = torch.empty(50_000)  # 200 kB, gone before the next
        del once
        twice = torch.empty(30_000)  # 120 kB, still there with the next
        kept = torch.empty(40_000)  # 160 kB
        del twice
        return kept, x.view(10, 100)

    cpu = torch.device("cpu")
    assert measure.peak_extra(call, 0, cpu) == 280_000
    assert measure.peak_extra(call, 160_000, cpu) == 120_000
    assert measure.peak_extra(lambda: None, 0, cpu) == 0


@pytest.mark.parametrize("layer", ["gat", "gatv2", "dot"])
def test_sampled_rows_are_those_of_the_whole(layer):
    graph = _blocks(num_src=9)
    work = workloads.Workload.make(workloads.LAYERS[layer], graph, 2, 4, torch.float32)
    rows = workloads.sample_rows(graph, 4)
    assert len(rows.unique()) == 4 and graph.csr().indptr.diff().argmax() in rows
    whole, sample = work.reference(True), work.reference(True, rows)
    assert sample.keys() == {"out"} and accuracy.error(sample["out"], whole["out"][rows]) < 1e-12
    results = work.call(partial(work.layer.attention, graph), "train")()
    assert work.errors(results, sample, rows).keys() == {"out"}
    assert work.errors(results, sample, rows)["out"] < 1e-6
    wrong = results[0].clone()
    wrong[rows[-1]] += 1
    assert work.errors((wrong,), sample, rows)["out"] > 1e-2
    assert sorted(workloads.sample_rows(graph, 100).tolist()) == list(range(9))


def _run(*arguments):
    return cli.main(["--device", "cpu", "--budget", "0.001", "--heads", "2", "--head-dim", "4", *arguments])


def test_command_measures_every_case(tiny, tmp_path, capsys, monkeypatch):
    def copy(layer, graph):
        attention = getattr(reference, f"{layer}_attention")
        return lambda **inputs: attention(graph, **inputs)

    def missing(layer, graph):
        raise ImportError("no such library")

    monkeypatch.setattr(peers, "PEERS", {"copy": copy, "missing": missing})
    monkeypatch.setattr(cli, "PEERS", peers.PEERS)
    path = tmp_path / "new" / "results.json"
    status = _run(
        "--graphs", str(tiny), "--dtype", "float32,bfloat16", "--peers", "copy,missing", "--json", str(path)
    )  # fmt: skip
    text = capsys.readouterr().out
    results = json.loads(path.read_text())
    assert status == 0
    cases = {(r["layer"], r["dtype"], r["mode"]) for r in results["rows"]}
    assert len(results["rows"]) == len(cases) == 12
    for row in results["rows"]:
        bound = 1e-6 if row["dtype"] == "float32" else 2e-2
        assert row["error"]["out"] < bound
        assert (row["error"]["gradients"] is None) == (row["mode"] == "forward")
        assert row["mode"] == "forward" or row["error"]["gradients"] < bound
        assert row["eager"]["p20"] <= row["eager"]["median"] <= row["eager"]["p80"]
        assert row["plan"]["forward"]["schedule"] == "natural"
        assert ("reverse" in row["plan"]) == (row["mode"] == "train")
        assert 0 < row["extra_mb"] < 0.1
        assert row["peers"]["copy"]["error"]["out"] < bound
        speedup = row["peers"]["copy"]["eager"]["median"] / row["eager"]["median"]
        assert row["peers"]["copy"]["speedup"] == pytest.approx(speedup, rel=1e-5)  # six digits are kept
        assert row["peers"]["missing"] == {"unavailable": "ImportError: no such library"}
    floor = {y["dtype"]: y["floor"] for y in results["yardsticks"]}
    passes = {"gat": (1, 2), "gatv2": (1, 4), "dot": (2, 6)}
    for row in (r for r in results["rows"] if r["dtype"] == "float32"):
        expected = (
            row["eager"]["median"] / floor["float32"]["eager"] / passes[row["layer"]][row["mode"] == "train"]
        )
        assert row["x_floor"]["eager"] == pytest.approx(expected, rel=1e-5)
        assert row["x_bound"]["eager"] > 0
    assert all("x_bound" in mean for mean in results["means"] if mean["dtype"] == "float32")
    assert results["environment"]["device"] == "cpu" and results["copy_gb_s"] > 0
    graph = results["graphs"][0]
    assert graph["graphs"] == 1 and graph["max_degree"] == 30
    assert set(results["graphs"][0]["preprocessing_ms"]) == {"csr", "reverse_csr", "plan", "reverse_plan"}
    assert "missing: not measured: ImportError: no such library" in text
    assert text.count("x as fast") == 12


def test_what_cannot_be_measured_is_named_and_fails(tiny, tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = (
        "--layers",
        "gat",
        "--mode",
        "forward",
        "--schedule",
        "auto,longest_first",
        "--check",
        "none",
    )
    assert _run("--graphs", f"{tiny},nowhere", *arguments, "--json", str(path)) == 1
    results = json.loads(path.read_text())
    auto, forced = results["rows"]
    assert "failed" not in auto and auto["error"] == {"unavailable": "--check none"}
    assert "'longest_first' is not available" in forced["failed"]
    assert "got 'nowhere'" in results["graphs"][1]["unavailable"]
    assert "not measured: ValueError" in capsys.readouterr().out


def test_sampled_check_is_shown(tiny, tmp_path, capsys):
    path = tmp_path / "results.json"
    assert _run("--graphs", str(tiny), "--layers", "gat", "--check", "sample", "--json", str(path)) == 0
    for row in json.loads(path.read_text())["rows"]:
        assert row["error"]["rows"] == 30 and row["error"]["out"] < 1e-6
        assert row["error"]["gradients"] is None
    assert capsys.readouterr().out.count("error of 30 rows of the output") == 2


def _turbo_gnn():
    """A stand-in for turbo-gnn with its interface: rows are destinations, and its argument K holds a vector
    for each row, not for each neighbour."""

    class Adjacency:
        @classmethod
        def from_csr(cls, fwd_indptr, fwd_indices, bwd_indptr, bwd_indices, quantile=0.99, index_dtype=None):
            found = cls()
            found.graph = Graph.from_csr(fwd_indptr, fwd_indices)
            assert torch.equal(found.graph.reverse_csr().indices, bwd_indices)
            return found

    def gatv2_aggr(graph, x, x_neighbors, attention_weights, negative_slope=0.2, **warps):
        assert not warps or set(warps) >= {"forward_light_warps", "forward_heavy_warps"}
        out = reference.gatv2_attention(
            graph.graph, x, x_neighbors, attention_weights, negative_slope=negative_slope
        )
        return out.flatten(1)

    def graph_transformer_aggr(graph, x, Q, K, V, scale=None, **warps):
        assert x.shape == (len(Q), Q[0].numel())
        return reference.dot_attention(graph.graph, K, Q, V, scale=scale)

    module = ModuleType("turbo_gnn")
    module.AdjacencyForwardBackwardWithNodeBuckets = Adjacency
    module.gatv2_aggr, module.graph_transformer_aggr = gatv2_aggr, graph_transformer_aggr
    return module


@pytest.mark.parametrize("layer", ["gatv2", "dot"])
def test_turbo_gnn_gets_its_inputs(layer, monkeypatch):
    monkeypatch.setitem(sys.modules, "turbo_gnn", _turbo_gnn())
    graph = _blocks(num_src=9)
    work = workloads.Workload.make(workloads.LAYERS[layer], graph, 2, 4, torch.float32)
    results = work.call(peers.PEERS["turbo-gnn"](layer, graph), "train")()
    assert max(work.errors(results, work.reference(True)).values()) < 1e-5


class _FusedGatconv(ModuleType):
    """A stand-in for dgNN with its interface. Its backward checks that the edges of the CSR and of the CSC it
    gets are the same."""

    def gat_forward(self, attn_row, attn_col, row_ptr, col_ind, slope, feat, dropout):
        assert all(x.dtype is torch.int32 for x in (row_ptr, col_ind))
        self.graph = Graph.from_csr(row_ptr.long(), col_ind)
        out = reference.gat_attention(self.graph, feat, attn_col, attn_row, negative_slope=slope)
        return out, attn_row, attn_row, attn_row

    def gat_backward(
        self, slope, dropout, row_ptr, col_ind, col_ptr, row_ind, permute, largest, total, mask, feat,
        attn_row, attn_col, grad,
    ):  # fmt: skip
        src, dst = self.graph.edge_index
        assert torch.equal(dst[permute.long()], row_ind.long())
        assert torch.equal(
            src[permute.long()], torch.arange(len(col_ptr) - 1).repeat_interleave(col_ptr.diff())
        )
        leaves = [x.detach().requires_grad_() for x in (feat, attn_row, attn_col)]
        with torch.enable_grad():
            out = reference.gat_attention(self.graph, leaves[0], leaves[2], leaves[1], negative_slope=slope)
        return torch.autograd.grad(out, leaves, grad)


def test_dgnn_gets_its_inputs(monkeypatch):
    monkeypatch.setitem(sys.modules, "fused_gatconv", _FusedGatconv("fused_gatconv"))
    graph = _blocks(num_src=9)
    work = workloads.Workload.make(workloads.LAYERS["gat"], graph, 2, 4, torch.float32)
    results = work.call(peers.PEERS["dgNN"]("gat", graph), "train")()
    assert max(work.errors(results, work.reference(True)).values()) < 1e-5
    with pytest.raises(NotImplementedError, match="dgNN has no GATv2"):
        peers.PEERS["dgNN"]("gatv2", graph)


def test_turbo_gnn_has_no_gat(monkeypatch):
    monkeypatch.setitem(sys.modules, "turbo_gnn", _turbo_gnn())
    with pytest.raises(NotImplementedError, match="turbo-gnn has no GAT"):
        peers.PEERS["turbo-gnn"]("gat", _blocks(num_src=9))


@pytest.mark.parametrize(
    "argument",
    [
        ("--layers", "gta"),
        ("--shapes", "4x"),
        ("--heads", "0"),
        ("--dtype", "int8"),
        ("--oracle", "--schedule", "natural"),
    ],
)
def test_wrong_arguments_are_refused(argument):
    with pytest.raises(SystemExit) as error:
        cli.main(list(argument))
    assert error.value.code == 2


# ---- reports ---------------------------------------------------------------------------------------


def _row(graph="a", ratio=1.2, mode="train", **changes):
    case = {"graph": graph, "layer": "gat", "heads": 4, "head_dim": 32, "dtype": "float32"}
    return case | {"mode": mode, "schedule": "auto", "x_floor": {"eager": ratio}, "peers": {}} | changes


def test_means_are_over_graphs():
    rows = [
        _row("a", 1.0, peers={"other": {"speedup": 2.0}}),
        _row(
            "b",
            x_floor={"eager": 9.0, "kernels": 4.0},
            peers={"other": {"speedup": 8.0, "speedup_kernels": 3.0}},
        ),
        _row("c", mode="forward"),
        {key: value for key, value in _row("d").items() if key != "x_floor"} | {"failed": "memory"},
    ]
    train, forward = report.means(rows)
    assert (train["mode"], train["graphs"], train["x_floor"]) == ("train", 2, pytest.approx(2.0))
    assert train["worst"] == {"graph": "b", "x_floor": 4.0}
    of_kernels = {"graphs": 1, "mean": pytest.approx(3.0), "least": 3.0}
    eager = {"graphs": 2, "mean": pytest.approx(4.0), "least": 2.0}
    assert train["speedups"] == {"other": eager | {"kernels": of_kernels}}
    line = report.mean_line(train)
    assert "4.00 x faster than other on 2, least 2.00 (kernels 3.00 on 1, least 3.00)" in line
    assert (forward["mode"], forward["graphs"]) == ("forward", 1)
