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

from dfgnn.bench import accuracy, attention, cli, graphs, measure, peers, report, workloads  # noqa: E402


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


# ---- the command -----------------------------------------------------------------------------------


def _run(*arguments):
    short = "--device", "cpu", "--seconds", "0.001", "--quick", "--heads", "2", "--head-dim", "4"
    return cli.main([*short, *arguments])


def _contestants(case: dict) -> dict[tuple[str, str], dict]:
    return {(c["library"], c["way"], c["dtype"]): c for c in case["contestants"]}


def test_command_measures_every_case(tiny, tmp_path, capsys, monkeypatch):
    def copy(layer, graph, dropout):
        attention = getattr(reference, f"{layer}_attention")
        return lambda **inputs: attention(graph, **inputs)

    def missing(layer, graph, dropout):
        raise ImportError("no such library")

    monkeypatch.setattr(peers, "PEERS", {"PyG": copy, "DGL": missing})
    path = tmp_path / "new" / "results.json"
    asked = "--graphs", str(tiny), "--dtype", "float32,bfloat16", "--peers", "pyg,dgl", "--json", str(path)
    assert _run(*asked) == 0
    text, results = capsys.readouterr().out, json.loads(path.read_text())
    assert {(c["layer"], c["mode"]) for c in results["cases"]} == {
        (layer, mode) for layer in ("gat", "gatv2", "dot") for mode in ("forward", "train")
    }
    passes = {"gat": (1, 2), "gatv2": (1, 4), "dot": (2, 6)}
    for case in results["cases"]:
        train = case["mode"] == "train"
        assert case["passes"] == passes[case["layer"]][train] and case["largest_degree"] == 30
        assert set(case["preprocessing_ms"]) == {"csr", "reverse_csr", "plan", "reverse_plan"}
        for (library, way, dtype), c in _contestants(case).items():
            if library == "DGL":
                assert c["failed"] == "ImportError: no such library"
                continue
            bound = 1e-6 if dtype == "float32" else 2e-2 if library == "dfgnn" else 5e-2
            assert way == "eager" and len(c["ms"]) >= 5 and c["error"]["out"] < bound
            assert ("gradients" in c["error"]) == train and c["error"].get("gradients", 0) < bound
            assert 0 < c["extra_mb"] < 0.1
            if library == "dfgnn":
                assert c["plan"] == " / ".join(["natural <= 4096"] * (1 + train))
        assert case["floor"]["float32"]["eager"] > 0 < case["byte_bound"]["float32"]["eager"]
    assert results["runs"][0]["device"] == "cpu" and results["cases"][0]["copy_gb_s"] > 0
    assert text.count("DGL eager fp32: not measured: ImportError: no such library") == 6
    assert text.count("x as fast") == 12
    before = path.read_text()
    assert _run(*asked) == 0  # all of it is there
    assert json.loads(path.read_text())["cases"] == json.loads(before)["cases"]


def test_the_times_that_are_printed():
    """Times passes x floor, times the byte bound, and how many times as fast the fastest way of dfgnn is."""
    case = {"part": "attention", "graph": "a", "layer": "gat", "heads": 4, "head_dim": 8, "mode": "train",
            "dtypes": ["float32"]}  # fmt: skip
    more = {"dtype": "float32", "error": {"out": 1e-7, "gradients": 2e-7}, "extra_mb": 1.0}
    result = {
        "passes": 2,
        "floor": {"float32": {"eager": 1.0, "kernels": 0.5, "by": {}}},
        "byte_bound": {"float32": {"eager": 3.0, "kernels": 0.8}},
        "contestants": [
            {"library": "dfgnn", "way": "eager", "ms": [6.0, 5.0, 7.0], **more},
            {"library": "dfgnn", "way": "captured", "dtype": "float32", "ms": [2.0]},
            {"library": "PyG", "way": "eager", "ms": [50.0], **more},
        ],
    }
    assert report.case_lines(case, result).splitlines() == [
        "attention a gat 4x8 train float32",
        "    fp32 2 x floor of 1 ms eager, byte bound 3; 0.5 ms kernels, byte bound 0.8",
        "    dfgnn eager fp32: 6 ms (5 to 7), 3.00 x floor, 2.00 x bound, error 1.0e-07 / 2.0e-07, 1.0 MB",
        "    dfgnn captured fp32: 2 ms (2 to 2), 2.00 x floor, 2.50 x bound",
        "    PyG eager fp32: 50 ms (50 to 50), dfgnn is 25.00 x as fast, error 1.0e-07 / 2.0e-07, 1.0 MB",
    ]


def test_what_cannot_be_measured_is_named_and_fails(tiny, tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = "--layers", "gat", "--mode", "forward", "--schedule", "auto,longest_first"
    assert _run("--graphs", f"{tiny},nowhere", *arguments, "--json", str(path)) == 1
    first, second = json.loads(path.read_text())["cases"]
    ways = _contestants(first)
    assert "ms" in ways["dfgnn", "eager", "float32"]
    assert "'longest_first' is not available" in ways["dfgnn", "eager, longest_first", "float32"]["failed"]
    assert "got 'nowhere'" in second["unavailable"]
    assert "not measured: ValueError" in capsys.readouterr().out


def test_rows_are_sampled_of_large_graphs(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attention, "MOST_EXACT", 0)
    path = tmp_path / "results.json"
    assert _run("--graphs", str(tiny), "--layers", "gat", "--json", str(path)) == 0
    for case in json.loads(path.read_text())["cases"]:
        (ours,) = case["contestants"]
        assert ours["error"]["rows"] == 30 and ours["error"]["out"] < 1e-6
        assert "gradients" not in ours["error"]
    assert capsys.readouterr().out.count("of 30 rows") == 2


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


# ---- means over graphs -----------------------------------------------------------------------------


def _case(graph, ms, bound=1.0, mode="train", **more):
    ours = {"library": "dfgnn", "way": "eager", "dtype": "float32", "ms": [ms]}
    return {"part": "attention", "graph": graph, "layer": "gat", "heads": 4, "head_dim": 32, "mode": mode,
            "dtypes": ["float32"], "byte_bound": {"float32": {"eager": bound}}, "contestants": [ours],
            **more}  # fmt: skip


def test_means_are_over_graphs():
    cases = [_case("a", 1.0), _case("b", 9.0, 2.25), _case("c", 5.0, mode="forward")]
    cases.append({**_case("d", 1.0), "unavailable": "memory"})
    del cases[-1]["contestants"]
    (line,) = report.means(cases)
    assert line == "  gat 4x32 train eager fp32, times byte bound: 2.00 on 2 graphs, worst 4.00 on b"


def test_means_of_chosen_over_best():
    def with_plans(graph, chosen, best):
        plans = {"eager": ("a", chosen), "eager, b": ("b", best)}
        ours = [
            {"library": "dfgnn", "way": way, "dtype": "float32", "ms": [ms], "plan": plan}
            for way, (plan, ms) in plans.items()
        ]
        return _case(graph, 1.0, oracle=True, contestants=ours)

    lines = report.means([with_plans("a", 4.0, 2.0), with_plans("b", 4.0, 5.0), with_plans("c", 8.0, 2.0)])
    assert "  gat 4x32 train chosen / best plan: 2.00 on 3 graphs, worst 4.00 on c" in lines
