"""What layers record under torch.compile: linear modules and one operator each, no Python of autograd."""

import logging
import re

import pytest
import torch
from compiled_steps import assert_same_step, assert_same_under_autocast, recording, step
from covering import covered, some
from torch import library

from dfgnn import Graph, nn
from dfgnn.nn.fused import traced as _traced
from dfgnn.nn.pyg import GATConv, GATv2Conv, TransformerConv

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LAYERS = {
    "GATConv": lambda: GATConv(9, 5, heads=3),
    "GATConv one head": lambda: GATConv(9, 5, bias=False),
    "GATv2Conv": lambda: GATv2Conv(9, 5, heads=3),
    "GATv2Conv edges": lambda: GATv2Conv(9, 5, heads=3, edge_dim=4),
    "GATv2Conv mean": lambda: GATv2Conv(9, 5, heads=3, concat=False, share_weights=True),
    "TransformerConv": lambda: TransformerConv(9, 5, heads=3),
    "TransformerConv beta": lambda: TransformerConv(9, 5, heads=3, beta=True, bias=False),
    "TransformerConv edges": lambda: TransformerConv(9, 5, heads=3, edge_dim=4),
    "DGL GATConv": lambda: nn.dgl.GATConv(9, 5, 3),
    "DGL GATv2Conv": lambda: nn.dgl.GATv2Conv(9, 5, 3),
    "DGL DotGatConv": lambda: nn.dgl.DotGatConv(9, 5, 3),
    "GraphTransformerConv": lambda: nn.GraphTransformerConv(9, 5, 3),
}


OF_EVERY_SCORE = ["GATConv", "GATv2Conv mean", "TransformerConv edges", "GraphTransformerConv"]
of_every_score = pytest.mark.parametrize("name", OF_EVERY_SCORE)


def given(name, device, num_src=30, num_dst=30):
    generator = torch.Generator().manual_seed(0)
    ends = [torch.randint(n, (100,), generator=generator) for n in (num_src, num_dst)]
    ends = torch.cat([torch.stack(ends), torch.arange(num_dst).expand(2, -1)], 1).to(device)
    x = torch.randn(num_src, 9, generator=generator).to(device)
    if "DGL" in name or name.startswith("Graph"):
        return Graph.from_edge_index(ends, num_src=num_src, num_dst=num_dst), x
    attr = torch.randn(ends.shape[1], 4, generator=generator).to(device)
    return (x, ends, attr) if "edges" in name else (x, ends)


def compiled_layer(name, device, **options):
    layer = LAYERS[name]().to(device)
    return layer, torch.compile(layer, fullgraph=True, **{"backend": "aot_eager", **options})


@some(["GATConv", "GATv2Conv", "TransformerConv beta", "TransformerConv edges", "DGL DotGatConv"], LAYERS)
def test_one_operator_each_way(name, device):
    layer, calls = LAYERS[name]().to(device), []
    if name.startswith("DGL G"):
        layer.set_allow_zero_in_degree(True)
    compiled = torch.compile(layer, fullgraph=True, backend=recording(calls))
    assert_same_step(compiled, layer, given(name, device))
    allowed = "check_in_degrees"  # a further operator of DGL's layers, which raises for rows without edges
    # The graph and its plan are looked up once, in forward.
    forward, backward = ([op for op in ops if op != allowed] for ops in calls)
    assert forward in (["edge_plan", f"planned_{x}"] for x in ("gat", "attend"))
    assert backward in ([f"planned_{x}_backward"] for x in ("gat", "attend"))
    for op in (*forward, *backward):
        dispatch = torch._C._dispatch_dump(f"dfgnn::{op}")
        assert re.search(r"Autograd\[alias\].*fallthrough", dispatch), op


@some(["GATConv", "TransformerConv edges"], [*OF_EVERY_SCORE, "DGL DotGatConv"])
def test_rows_with_padding(name, device, monkeypatch):
    """Rows in which each head is padded, as CUDA kernels need it; here on every device."""
    monkeypatch.setattr(_traced, "_rows", lambda heads, size, *_: _traced.Rows(heads, size, 3))
    layer, compiled = compiled_layer(name, device, dynamic=True)
    assert_same_step(compiled, layer, given(name, device))


@of_every_score
def test_autocast(name, device):
    layer, compiled = compiled_layer(name, device)
    assert_same_under_autocast(compiled, layer, given(name, device), device)


@some(["DGL GATv2Conv"], [name for name in LAYERS if "DGL" in name])
def test_a_block(name, device):
    """A compiled layer takes a block, whose destinations are its first sources."""
    layer, compiled = compiled_layer(name, device)
    for num_dst in (12, 17):
        assert_same_step(compiled, layer, given(name, device, 30, num_dst))


@pytest.mark.parametrize("name", ["GATConv one head", "TransformerConv beta", "DGL GATv2Conv"])
def test_without_gradients(name, device):
    (layer, compiled), inputs = compiled_layer(name, device), given(name, device)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), layer(*inputs))


def test_a_method_replaced_on_the_class_after_a_call_is_seen_after_a_reset(device):
    """A documented limit: compiled calls do not check whether methods of the class were replaced."""

    class Changed(GATConv):
        pass

    layer, inputs = Changed(9, 5, heads=3).to(device), given("GATConv", device)
    compiled = torch.compile(layer, backend="aot_eager")
    before = compiled(*inputs)
    Changed.message = lambda self, x_j, alpha: 0 * x_j
    want = layer(*inputs)
    assert not torch.allclose(before, want)
    torch.compiler.reset()
    torch.testing.assert_close(compiled(*inputs), want)


def test_a_layer_whose_first_call_is_compiled(plain_python):
    """Dynamo cannot guard a dict whose keys are classes, and that of the known classes is empty then."""
    plain_python("""
import torch
from dfgnn.nn.pyg import ResGatedGraphConv
layer = ResGatedGraphConv(9, 5, edge_dim=4)
given = torch.randn(30, 9), torch.randint(30, (2, 90)), torch.randn(90, 4)
out = torch.compile(layer, backend="eager", fullgraph=True)(*given)
torch.testing.assert_close(out, layer(*given))
""")


def test_hooks_on_a_projection_run(device):
    (layer, compiled), inputs = compiled_layer("GATConv", device), given("GATConv", device)
    layer.lin.register_forward_hook(lambda module, args, out: 2 * out)
    torch.testing.assert_close(compiled(*inputs), layer(*inputs))


def test_a_projection_of_edges_that_is_large_is_folded(device, monkeypatch):
    calls = []
    monkeypatch.setattr(_traced, "MOST_UNFOLDED", {"cpu": 1, "cuda": 1})
    layer, compiled = compiled_layer("TransformerConv edges", device, backend=recording(calls))
    assert_same_step(compiled, layer, given("edges", device))
    assert "planned_edge_dot" in calls[0]


def test_no_operator_has_two_arguments_of_one_name():
    """torch defines and calls such an operator; only Inductor refuses it, within CUDA graphs."""
    schemas = [x for x in torch._C._jit_get_all_schemas() if x.name.startswith("dfgnn::")]
    assert len(schemas) > 50
    for schema in schemas:
        names = [argument.name for argument in schema.arguments]
        assert len(names) == len(set(names)), schema


SHAPES = [(0, 30, 3, 5, torch.float32), (3, 30, 3, 5, torch.float64), (1, 7, 1, 8, torch.bfloat16)]


def both_ways(name, edges, sizes, key, arguments):
    """The operator on a plan, and the one that finds the plan itself within CUDA graphs: each with its
    arguments."""
    ops = torch.ops.dfgnn
    graph = (edges, -1, *sizes, False, edges.shape[1], "a layer")
    plan = ops.edge_plan(*graph, *key)
    yield getattr(ops, f"planned_{name}").default, (plan, sizes[1], edges.shape[1], *arguments)
    yield getattr(ops, f"graph_{name}").default, (*graph, *key, *arguments)


@covered(shape=SHAPES, score=[0, 1, 2])
def test_shapes_told_to_compilers(score, shape):
    """The fake kernels give the shapes of all results, also of those saved for backward."""
    heads, rows, h, d, dtype = shape
    edges, acc = torch.randint(rows, (2, 60)), torch.promote_types(dtype, torch.float32)
    x = torch.randn(rows, h * d, dtype=dtype)
    x = x if heads else x.view(rows, h, d)
    terms = torch.randn(rows, h, dtype=acc)
    src, dst = ((terms, terms), (x, x), (None, x))[score]
    attn = torch.randn(h, d, dtype=dtype) if score == 2 else None
    bias = torch.randn(60, h, dtype=acc)
    given = edges, (rows, rows), (h, d, dtype, ("gat", "dot", "gatv2")[score], "auto", True, True)
    tensors = x, src, dst, attn, bias, None, None, None, None, None, None
    numbers = 0.2, 1.0, 0.0, 0
    for positive in {False, score == 0}:
        args = heads, score, *tensors, *numbers, True, positive
        for op, given_args in both_ways("attend", *given, args):
            library.opcheck(op, given_args, test_utils="test_faketensor")
            out, *saved, _ = op(*given_args)
        for need in (0, 3):
            if score == 0 and need and not positive:
                continue
            args = heads, torch.ones_like(out), None, score, *tensors, out, *saved, None, *numbers, need
            for op, given_args in both_ways("attend_backward", *given, args):
                library.opcheck(op, given_args, test_utils="test_faketensor")


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [5, 3], ids=["", "vectors without the padding"])
def test_shapes_of_gat_told_to_compilers(train, bias, size):
    given = torch.randint(20, (2, 60)), (30, 20), (3, 5, torch.float32, "gat", "auto", False, train)
    vectors = torch.randn(1, 3, size), torch.randn(1, 3, size)
    tensors = torch.randn(30, 15), *vectors, None, torch.randn(15) if bias else None
    for op, args in both_ways("gat", *given, (*tensors, 0.2, 0.0, train)):
        library.opcheck(op, args, test_utils="test_faketensor")
        out, kept = op(*args)
    if train:
        args = torch.ones_like(out), *tensors, out, kept, 0.2, 0.0
        for op, given_args in both_ways("gat_backward", *given, args):
            library.opcheck(op, given_args, test_utils="test_faketensor")


def test_a_plan_of_another_graph_is_refused():
    """Operators compare the plan's graph with the sizes from which a compiler has taken the shapes."""
    ops, edges, x = torch.ops.dfgnn, torch.randint(20, (2, 60)), torch.randn(20, 3, 5)
    plan = ops.edge_plan(edges, -1, 20, 20, False, 60, "", 3, 5, torch.float32, "dot", "auto", True, False)
    more = 0, 1, x, x, x, *[None] * 8, 1.0, 1.0, 0.0, 0, False, False
    for sizes in ((19, 60), (20, 59)):
        with pytest.raises(RuntimeError, match="plan: expected that of a graph of"):
            ops.planned_attend(plan, *sizes, *more)
    for wrong in (plan.float(), plan[:1], torch.tensor([10**9, 0])):
        with pytest.raises(
            RuntimeError, match=r"plan: expected int64 \[2\]|expected a number that graph_handle"
        ):
            ops.planned_attend(wrong, 20, 60, *more)


def test_a_graph_of_dgl_is_named_where_it_breaks():
    dgl = pytest.importorskip("dgl")
    graph = dgl.add_self_loop(dgl.rand_graph(20, 40))
    layer, x = LAYERS["DGL GATConv"](), torch.randn(20, 9)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(graph, x), layer(graph, x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"graph: expected a dfgnn.Graph \(Graph.from_dgl\)"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(graph, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(Graph.from_dgl(graph), x), layer(graph, x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_reduce_overhead_says_nothing(name, caplog):
    """CUDA graphs are not given up, whether or not the attention is in them."""
    gpu = "cuda"
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    layer = LAYERS[name]().to(gpu)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    inputs = given(name, gpu)
    want = step(layer, layer, inputs)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            got = [x.clone() for x in step(compiled, layer, inputs)]
            torch.testing.assert_close(got, list(want), rtol=1e-3, atol=1e-3)
    assert counters["cudagraph_skips"] == 0
    assert not [r.getMessage() for r in caplog.records if "cudagraph" in r.getMessage()]
