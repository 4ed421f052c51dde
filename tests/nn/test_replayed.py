"""Layers on an edge_index within the CUDA graphs of torch.compile, which sort it anew at every replay.

On the CPU, which has no CUDA graphs, the same operators run once Inductor's option for them is on.
"""

import subprocess
import sys
import textwrap
import warnings
import weakref

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config
from compiled_steps import assert_same_step, assert_same_under_autocast, recording, step
from covering import covered, exhaustive, some
from functorch.compile import min_cut_rematerialization_partition
from torch import library, nn

from dfgnn import Graph
from dfgnn.graph import in_cuda_graphs as _replayed
from dfgnn.nn import pyg
from dfgnn.nn.fused import traced as _traced

ops = torch.ops.dfgnn
COUNTERS = torch._dynamo.utils.counters


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo):
    COUNTERS.clear()


@pytest.fixture
def recorded(monkeypatch):
    """Makes layers compile on any device as for a CUDA graph."""
    monkeypatch.setattr(_replayed, "DEVICES", ("cpu", "cuda"))
    with torch._inductor.config.patch({"triton.cudagraphs": True, "force_disable_caches": True}):
        yield


class Model(nn.Module):
    """Two layers, of which the second one takes the first one's nodes."""

    def __init__(self, make):
        super().__init__()
        self.first, self.second = make(9), make(10)

    def forward(self, x, *edges):
        return self.second(self.first(x, *edges).relu(), *edges)


# Those with "edges" in their name take features of edges.
LAYERS = {
    "GATConv": lambda n: pyg.GATConv(n, 5, heads=2),
    "GATConv without loops": lambda n: pyg.GATConv(n, 10, add_self_loops=False),
    "GATConv edges": lambda n: pyg.GATConv(n, 5, heads=2, edge_dim=4, add_self_loops=False),
    "GATv2Conv": lambda n: pyg.GATv2Conv(n, 5, heads=2),
    "GATv2Conv edges": lambda n: pyg.GATv2Conv(n, 5, heads=2, edge_dim=4, add_self_loops=False),
    "TransformerConv": lambda n: pyg.TransformerConv(n, 5, heads=2),
    "TransformerConv edges": lambda n: pyg.TransformerConv(n, 5, heads=2, edge_dim=4),
    "ResGatedGraphConv": lambda n: pyg.ResGatedGraphConv(n, 10),
    "ResGatedGraphConv edges": lambda n: pyg.ResGatedGraphConv(n, 10, edge_dim=4),
}


def given(k, device, name="", num_src=40, num_dst=40, num_edges=200, dtype=torch.float64):
    generator = torch.Generator().manual_seed(k)
    ends = torch.stack([torch.randint(n, (num_edges,), generator=generator) for n in (num_src, num_dst)])
    x = torch.randn(num_src, 9, generator=generator, dtype=dtype)
    more = (torch.randn(num_edges, 4, generator=generator, dtype=dtype),) if "edges" in name else ()
    return tuple(t.to(device) for t in (x, ends, *more))


def compiled_model(name, device, dtype=torch.float64, backend="aot_eager"):
    """The model of these layers, and compiled; backend: a name, or a list for the operators that it gets."""
    model = Model(LAYERS[name]).to(device, dtype)
    if isinstance(backend, list):
        backend = recording(backend, min_cut_rematerialization_partition)
    return model, torch.compile(model, fullgraph=True, backend=backend)


@some(["GATConv", "GATv2Conv edges", "TransformerConv", "ResGatedGraphConv edges"], LAYERS)
def test_one_structure_and_no_operator_outside(name, device, recorded):
    found = []
    model, compiled = compiled_model(name, device, backend=found)
    assert_same_step(compiled, model, given(0, device, name))
    forward, backward = found
    assert [op for op in forward if not op.startswith("graph_")] == ["edge_structure"]
    assert all(op.startswith("graph_") for op in backward) and backward
    for op in (*forward, *backward):
        assert torch.Tag.cudagraph_unsafe not in getattr(ops, op).default.tags


def test_folded_projections_of_edges(device, recorded, monkeypatch):
    monkeypatch.setattr(_traced, "MOST_UNFOLDED", {"cpu": 1, "cuda": 1})
    name, found = "TransformerConv edges", []
    model, compiled = compiled_model(name, device, backend=found)
    assert_same_step(compiled, model, given(0, device, name))
    assert {"graph_edge_dot", "graph_edge_sum"} <= {*found[0]}
    assert {op for op in found[0] + found[1] if op.startswith("edge_")} == {"edge_structure"}


@some(["TransformerConv edges"], ["TransformerConv edges", "GATConv", "GATv2Conv edges", "ResGatedGraphConv"])
def test_other_edges_and_other_sizes(name, device, recorded):
    """Edges of the same shape in turns, as replays get them, and of other shapes."""
    model, compiled = compiled_model(name, device)
    cases = [given(k, device, name) for k in range(2)]
    cases += [given(k, device, name, 30 + k, 30 + k, 100 + 7 * k) for k in range(2)]
    cases += [given(5, device, name, 20, 20, 2000)]  # rows that a GPU cuts
    for case in (0, 1, 0, 1, 2, 3, 0, 4):
        assert_same_step(compiled, model, cases[case])
    with torch.no_grad():
        torch.testing.assert_close(compiled(*cases[1]), model(*cases[1]))
    assert COUNTERS["stats"]["unique_graphs"] <= 3


@some(["GATConv"], ["GATConv", "TransformerConv edges"])
def test_an_edge_index_that_is_written_to(name, device, recorded):
    """Writes to an edge_index between calls, and between two layers, which then cannot share a structure."""
    model = Model(LAYERS[name]).double().to(device)

    def function(x, ends, *more):
        x = model.first(x, ends, *more).relu()
        ends = ends.clone()
        ends[0] = (ends[0] + 1) % 40
        return model.second(x, ends, *more)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, ends, *more = given(0, device, name)
    for _ in range(2):
        torch.testing.assert_close(*(step(call, model, (x, ends, *more)) for call in (compiled, function)))
        ends.copy_(ends.flip(0))


def test_twice_before_backward(device, recorded):
    model, compiled = compiled_model("GATConv", device)
    cases = [given(k, device) for k in range(2)]
    found = []
    for call in (compiled, model):
        loss = sum(call(*case).sin().sum() for case in cases)
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*found)


@covered(1, loops=[False, True], sizes=[(40, 17), (17, 40)])
def test_bipartite(device, recorded, sizes, loops):
    layer = pyg.GATConv((9, 9), 5, heads=2, add_self_loops=loops).double().to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for k in range(2):
        x, ends = given(k, device, num_src=sizes[0], num_dst=sizes[1])
        other = torch.randn(sizes[1], 9, dtype=x.dtype, device=device)
        torch.testing.assert_close(compiled((x, other), ends), layer((x, other), ends))


@some(["GATConv", "TransformerConv edges"], ["GATConv", "GATv2Conv edges", "TransformerConv edges"])
def test_dropout_is_that_of_eager_calls(name, device, recorded):
    model, compiled = compiled_model(name, device)
    model.first.dropout = model.second.dropout = 0.5
    for k in range(2):
        found = []
        for call in (compiled, model):
            torch.manual_seed(k)
            found.append(step(call, model, given(k, device, name)))
        torch.testing.assert_close(*found)


@some(
    ["GATConv", "TransformerConv"],
    ["GATConv", "GATv2Conv edges", "TransformerConv", "ResGatedGraphConv edges"],
)
def test_autocast(name, device, recorded):
    model, compiled = compiled_model(name, device, torch.float32)
    assert_same_under_autocast(compiled, model, given(0, device, name, dtype=torch.float32), device)


@pytest.mark.slow
@exhaustive
def test_inductor(device, recorded):
    """Inductor's code runs without CUDA graphs on the CPU, and with its own CUDA graphs on a GPU."""
    model, compiled = compiled_model("TransformerConv edges", device, backend="inductor")
    for k in (0, 1, 0):
        assert_same_step(compiled, model, given(k, device, "edges"))


@covered(1, dtype=[torch.int32, torch.int64], loops=[False, True])
def test_nodes_out_of_range_are_refused(device, recorded, dtype, loops):
    layer = pyg.GATConv(9, 5, heads=2, add_self_loops=loops).double().to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, ends = given(0, device)
    ends = ends.to(dtype)
    torch.testing.assert_close(compiled(x, ends), layer(x, ends))
    for row, value in ((0, 40), (1, 40), (0, -1), (1, -1)):
        wrong = ends.clone()
        wrong[row, 7] = value
        with pytest.raises(
            ValueError, match=rf"edge_index\[{row}\]: expected values in .*=40\), got {value}"
        ):
            compiled(x, wrong)


def test_the_buffer_of_a_graph_of_fixed_capacity_is_refused(device, recorded):
    """The edge_index buffer of a graph of fixed capacity raises, because replays cannot know which of its
    edges are in use."""
    model, compiled = compiled_model("GATConv", device, torch.float32)
    graph, (x, ends) = Graph.with_capacity(40, 300, device=device), given(0, device, dtype=torch.float32)
    graph.copy_(ends)
    with pytest.raises(NotImplementedError, match="edge_index: expected no buffer of a graph of fixed capa"):
        compiled(x, graph.edge_index)
    torch.testing.assert_close(compiled(x, ends), model(x, ends))


@some([None], [None, True], "dynamic")
def test_large_graphs_stay_outside(device, recorded, monkeypatch, dynamic):
    monkeypatch.setattr(_replayed, "MOST_EDGES", 200)
    model, found = Model(LAYERS["GATConv"]).double().to(device), []
    compiled = torch.compile(model, fullgraph=True, backend=recording(found), dynamic=dynamic)
    for num_edges in (200, 201, 300, 150):
        assert_same_step(compiled, model, given(0, device, num_edges=num_edges))
    kinds = {op.partition("_")[0] for ops in found for op in ops if op != "edge_structure"}
    assert kinds == {"graph", "edge", "planned"}


@pytest.mark.parametrize("cuts", [True, False])
def test_cuts_of_cuda_graphs_are_told(device, recorded, monkeypatch, cuts):
    """torch 2.11 had other gradients in a CUDA graph that it cut at such an operator."""
    monkeypatch.setattr(_replayed, "MOST_EDGES", 200)
    model = Model(LAYERS["GATConv"]).double().to(device)
    partition = torch._inductor.config.patch(graph_partition=cuts)
    with partition, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.compile(model, backend=recording([]))(*given(0, device, num_edges=300))
    assert any("graph_partition = False" in str(x.message) for x in seen) is cuts


@some([pyg.GATConv], [pyg.GATConv, pyg.GATv2Conv], "conv")
def test_what_has_the_number_of_edges_with_loops_stays_outside(device, recorded, conv):
    """Edge attributes have one row per edge with loops; that number is unknown before the edges are read, so
    that these layers do not sort within the CUDA graph."""
    layer, found = conv(9, 5, heads=2, edge_dim=4).double().to(device), []
    compiled = torch.compile(layer, fullgraph=True, backend=recording(found))
    assert_same_step(compiled, layer, given(0, device, "edges"))
    assert found and not any(op.startswith("graph") for ops in found for op in ops)


def test_other_compilers_and_modes_take_the_graph_that_is_kept(device, monkeypatch):
    monkeypatch.setattr(_replayed, "DEVICES", ("cpu", "cuda"))
    found, inputs = [], given(0, device)
    compiled_model("GATConv", device, backend=found)[1](*inputs)
    assert found[0] == ["edge_plan", "planned_gat", "planned_gat"]
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        # An eager call does not sort the edges at each call either, even with Inductor's option on.
        assert not _replayed.is_recorded(inputs[1])


@exhaustive
def test_the_mode_reduce_overhead_is_seen(monkeypatch):
    """mode="reduce-overhead" is noticed while AOTAutograd traces; on the CPU it makes no CUDA graphs."""
    seen, is_recorded = set(), _replayed.is_recorded
    monkeypatch.setattr(_replayed, "DEVICES", ("cpu",))
    monkeypatch.setattr(_replayed, "is_recorded", lambda x: seen.add(is_recorded(x)) or is_recorded(x))
    model, inputs = Model(LAYERS["GATConv"]), given(0, "cpu", dtype=torch.float32)
    for mode, want in ((None, {False}), ("reduce-overhead", {True, False})):
        torch._dynamo.reset()
        seen.clear()
        with torch._inductor.config.patch(force_disable_caches=True):
            compiled = torch.compile(model, fullgraph=True, mode=mode)
            assert_same_step(compiled, model, inputs)
        assert seen == want


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("num_src, num_dst, num_edges", [(40, 17, 1000), (3, 5, 0), (17, 40, 300)])
def test_shapes_told_to_compilers(device, loops, num_src, num_dst, num_edges):
    _, ends = given(0, device, num_src=num_src, num_dst=num_dst, num_edges=num_edges)
    args = ends, num_src, num_dst, loops
    library.opcheck(ops.edge_structure, args, test_utils=("test_schema", "test_faketensor"))
    room = num_edges + (min(num_src, num_dst) if loops else 0)
    graph = _replayed.unpacked(ops.edge_structure(*args), num_src, num_dst, room)
    kept = ends[:, ends[0] != ends[1]] if loops else ends
    more = torch.arange(min(num_src, num_dst) if loops else 0, device=device)
    want = torch.cat([kept, more.expand(2, -1)], 1)
    indptr, indices, eids = graph.csr()
    torch.testing.assert_close(indptr.diff(), torch.bincount(want[1], minlength=num_dst))
    used = int(indptr[-1])
    torch.testing.assert_close(want[0][eids[:used].long()], indices[:used].long())


def test_nothing_is_kept_of_a_graph(device, monkeypatch, no_collection):
    """Structures made within a CUDA graph are not cached: a cache would hold memory that belongs to the
    graph."""
    _, ends = given(0, device)
    made = ops.edge_structure(ends, 40, 40, True)
    x, vectors = torch.randn(40, 16, device=device), torch.randn(2, 1, 2, 8, device=device)
    refs, unpacked = [], _replayed.unpacked

    def watched(*args):
        graph = unpacked(*args)
        refs.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(_replayed, "unpacked", watched)
    args = made, -1, 40, 40, True, 240, "a layer"
    tensors = x, *vectors, None, None
    args += 2, 8, torch.float32, "gat", "auto", False, True
    out, kept = ops.graph_gat(*args, *tensors, 0.2, 0.0, True)
    ops.graph_gat_backward(*args, out, *tensors, out, kept, 0.2, 0.0)
    assert len(refs) == 2 and not any(ref() for ref in refs)


# ---- CUDA graphs ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_one_cuda_graph_each_way(name, caplog):
    model = Model(LAYERS[name]).double().cuda()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    cases = [given(k, "cuda", name) for k in range(2)]
    want = [step(model, model, case) for case in cases]
    for k in (0, 0, 0, 1, 0, 1):
        got = [x.clone() for x in step(compiled, model, cases[k])]
        torch.testing.assert_close(got, want[k])
    counters = COUNTERS["inductor"]
    assert counters["cudagraph_skips"] == counters["cudagraph_partitions"] == 0  # not even two
    assert not [r.getMessage() for r in caplog.records if "cudagraph" in r.getMessage()]


@pytest.mark.gpu
def test_cuda_graphs_twice_before_backward_and_other_sizes():
    model = Model(LAYERS["GATConv"]).double().cuda()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    cases = [given(k, "cuda", num_edges=3000 + k // 2) for k in range(4)]
    for k in (0, 0, 0, 2, 2, 0):
        found = []
        for call in (model, compiled):
            loss = sum(call(*case).sin().sum() for case in cases[k : k + 2])
            found.append([x.clone() for x in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GATConv", "TransformerConv edges"])
def test_cuda_graphs_with_dropout_and_autocast(name):
    model = Model(LAYERS[name]).cuda()
    inputs = given(0, "cuda", name, dtype=torch.float32)

    def function(*inputs):
        with torch.autocast("cuda", torch.bfloat16):
            return model(*inputs)

    want = step(function, model, inputs)[0].float()
    model.first.dropout = 0.2
    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    # Results are cloned, because the next replay writes to the same memory.
    outs = torch.stack([step(compiled, model, inputs)[0].float().clone() for _ in range(300)])
    assert COUNTERS["inductor"]["cudagraph_skips"] == COUNTERS["inductor"]["cudagraph_partitions"] == 0
    assert len(outs.flatten(1).unique(dim=0)) == len(outs)
    assert (outs.mean(0) - want).abs().max() < 0.3 * want.abs().max()


@pytest.mark.gpu
def test_a_replay_with_a_node_out_of_range_fails():
    """A device-side assertion fails, after which the process cannot use the GPU: so in a process of its
    own."""
    code = """
        import torch
        from dfgnn.nn.pyg import GATConv
        layer = GATConv(8, 4, heads=2).cuda()
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        x, edges = torch.randn(40, 8, device="cuda"), torch.randint(40, (2, 200), device="cuda")
        try:
            compiled(x, edges + 30)
        except ValueError as error:
            assert "expected values in" in str(error)
            print("refused")
        for _ in range(3):
            compiled(x, edges).sum().item()
        print("replayed")
        edges[1, 3] = 40
        compiled(x, edges)
        torch.cuda.synchronize()
        print("not reached")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.stdout.split() == ["refused", "replayed"], done.stderr[-2000:]
    assert "assert" in done.stderr
