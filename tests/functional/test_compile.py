"""Functions and layers of Graphs under torch.compile: never a break, and one compiled function for all."""

import gc
import logging
import warnings

import pytest
import torch
import torch._dynamo.utils
from covering import exhaustive, some
from every_layer import arguments, floats, made

from dfgnn import Graph, functional
from dfgnn.engine import edge_maps

FUNCTIONS = {
    "gat": lambda g, x, y: functional.gat_attention(g, x, x.sum(-1), y.sum(-1)),
    "gatv2": lambda g, x, y: functional.gatv2_attention(g, x, y, x.new_ones(x.shape[1:])),
    "dot": lambda g, x, y: functional.dot_attention(g, y, x, x),
    "agnn": lambda g, x, y: functional.agnn_attention(g, x),
    "attention": lambda g, x, y: functional.gat_attention(g, x, x.sum(-1), None, return_attention=True)[1],
    "edges": lambda g, x, y: functional.dot_attention(g, y, x, x, bias=x.new_ones(g.num_edges, 2)),
    "spmm": lambda g, x, y: functional.spmm(g, x.new_ones(g.num_edges, 2), x),
    "sddmm": lambda g, x, y: functional.sddmm(g, y, x),
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def make(k, device, loops=False):
    generator = torch.Generator().manual_seed(k)
    graph = Graph.from_edge_index(torch.randint(40 + k, (2, 200 + 7 * k), generator=generator), 40 + k)
    return (graph.add_self_loops() if loops else graph).to(device)


def run(function, graph, k, dtype=torch.float32):
    generator = torch.Generator().manual_seed(k)
    inputs = [torch.randn(graph.num_nodes, 2, 8, generator=generator) for _ in range(2)]
    inputs = [x.to(graph.device, dtype).requires_grad_() for x in inputs]
    out = function(graph, *inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)]


@pytest.mark.parametrize(
    "name, warm",
    [("gat", False), ("spmm", True)]
    + [
        pytest.param(n, n in ("dot", "edges"), marks=exhaustive)
        for n in FUNCTIONS
        if n not in ("gat", "spmm")
    ],
)
def test_functions(device, name, warm):
    function = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for k in range(3):
        graph = make(k, device)
        if warm:
            run(function, graph, k)
        got, want = run(compiled, graph, k), run(function, make(k, device), k)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert compiled_graphs() <= 2


@some([False, None], [False, True, None], "dynamic")
def test_with_sizes_that_change_or_not(device, dynamic):
    compiled = torch.compile(FUNCTIONS["gat"], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for k in range(3):
        want = run(FUNCTIONS["gat"], make(k, device), k)
        torch.testing.assert_close(run(compiled, make(k, device), k), want, rtol=1e-4, atol=1e-4)
    assert compiled_graphs() == {False: 3, True: 1, None: 2}[dynamic]


@pytest.mark.slow
@exhaustive
def test_inductor_without_a_word(device, caplog):
    function = FUNCTIONS["gatv2"]
    compiled = torch.compile(function, fullgraph=True)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error", UserWarning)
        for k in range(2):
            got = run(compiled, make(k, device), k)
            torch.testing.assert_close(got, run(function, make(k, device), k), rtol=1e-4, atol=1e-4)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert compiled_graphs() <= 2


def test_fifty_graphs(device):
    compiled = torch.compile(FUNCTIONS["dot"], fullgraph=True, backend="aot_eager")
    for k in range(50):
        run(compiled, make(k, device), k)
    assert compiled_graphs() <= 3


def test_dropout_follows_the_seed(device):
    def function(graph, x, y):
        return functional.dot_attention(graph, y, x, x, dropout_p=0.5)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    graph, found = make(0, device), []
    for call in (compiled, compiled, function):
        torch.manual_seed(5)
        found.append(run(call, graph, 0))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-4)
    assert not torch.equal(run(compiled, graph, 0)[0], found[0][0])


def test_autocast_inside(device):
    linear = torch.nn.Linear(16, 16).to(device)

    def function(graph, x, y):
        with torch.autocast(graph.device.type, torch.bfloat16):
            x = linear(x.flatten(1)).unflatten(1, (2, 8))
            return functional.dot_attention(graph, x, x, x)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for k in range(3):
        got, want = run(compiled, make(k, device), k), run(function, make(k, device), k)
        assert got[0].dtype == torch.bfloat16
        torch.testing.assert_close(got[:2], want[:2], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["dot", "spmm", "rows"])
def test_compiled_code_keeps_its_graph_until_backward(device, name):
    """Backward works after the caller has dropped the graph; that of gathered rows raises that it is gone."""
    x = torch.randn(40, 2, 8, device=device, requires_grad=True)
    function = FUNCTIONS.get(name, lambda graph, x, y: edge_maps.rows_of_destinations(graph, x))
    compiled, graph = torch.compile(function, fullgraph=True, backend="aot_eager"), make(0, device)
    want = torch.autograd.grad(function(graph, x, x).square().sum(), x)
    out = compiled(graph, x, x)
    del graph
    gc.collect()
    if name == "rows":
        with pytest.raises(RuntimeError, match="has to live until backward"):
            out.square().sum().backward()
    else:
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x), want)


def step(calls, layer, name, graph, *sets):
    """What a step of training gives, for each call of the layer: the results and all gradients."""
    shapes = (graph.num_src, *sets, 8), (graph.num_edges, *sets, 3)
    x, attr = (torch.randn(s, dtype=torch.float64, device=graph.device, requires_grad=True) for s in shapes)
    for call in calls:
        out = floats(call(*arguments(name, x, attr, graph)))
        wanted = [x, attr, *layer.parameters()]
        grads = torch.autograd.grad(
            sum(o.sin().sum() for o in out), wanted, allow_unused=True, materialize_grads=True
        )
        yield [*out, *grads]


# (layer, `dynamic` of torch.compile). With None a layer is recorded twice: with the first sizes as constants,
# then with symbolic sizes.
CASES = [("dgl GATConv", None), ("dgl AGNNConv", True), ("dgl EGATConv", True), ("dgl EdgeGATConv", True)]
CASES += [("dgl HGTConv", True), ("EdgeGraphTransformerConv no edges", True)]
# Cases of the exhaustive tests. Other layers run the same code, or are in test_recorded.py.
MORE = [(name, None) for name in ("dgl EdgeGATConv wide", "dgl HGTConv norm", "EdgeGraphTransformerLayer")]
MORE += [("GraphTransformerLayer", True), ("EdgeGraphTransformerConv", True), ("dgl EdgeGATConv", False)]


@pytest.mark.parametrize("name, dynamic", CASES + [pytest.param(*case, marks=exhaustive) for case in MORE])
def test_layers(device, name, dynamic):
    layer = made(name).to(device).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for k in range({None: 3, True: 2, False: 2}[dynamic]):
        torch.testing.assert_close(*step((compiled, layer), layer, name, make(k, device, loops=True)))
    assert compiled_graphs() <= {None: 2, True: 1, False: 2}[dynamic]


@pytest.mark.slow
@exhaustive
@pytest.mark.parametrize("name", ["dgl EGATConv", "dgl HGTConv"])
def test_inductor_takes_layers(device, name):
    layer = made(name).to(device).eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for k in range(2):
        torch.testing.assert_close(*step((compiled, layer), layer, name, make(k, device, loops=True)))


@some(["dgl GATConv"], ["dgl GATConv", "dgl EGATConv"])
def test_layers_with_a_batch_of_features(device, name):
    layer = made(name).to(device).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for k in range(3):
        torch.testing.assert_close(*step((compiled, layer), layer, name, make(k, device, loops=True), 2))


def test_types_out_of_range_and_written_to(device):
    layer, graph = made("dgl HGTConv").to(device).eval(), make(0, device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    attr = torch.zeros(graph.num_edges, 3, device=device)
    _, x, ntype, etype = arguments("dgl HGTConv", torch.randn(40, 8, device=device).double(), attr, graph)
    for _ in range(3):
        torch.testing.assert_close(compiled(graph, x, ntype, etype), layer(graph, x, ntype, etype))
        etype.copy_((etype + 1) % 2)
        ntype.copy_((ntype + 1) % 2)
    with pytest.raises(ValueError, match=r"etype: expected types in \[0, 2\), got 2"):
        compiled(graph, x, ntype, etype + 1)
    with pytest.raises(ValueError, match=r"types: expected types in \[0, 3\), got 3"):
        compiled(graph, x, ntype + 2, etype)


def test_destinations_without_edges_are_refused_when_it_runs(device):
    compiled = torch.compile(made("dgl GATConv").to(device), fullgraph=True, backend="aot_eager")
    x = torch.randn(40, 8, device=device).double()
    assert compiled(make(0, device, loops=True), x).isfinite().all()
    alone = Graph.from_edge_index(torch.tensor([[0], [1]], device=device), 40)
    for _ in range(2):
        with pytest.raises(ValueError, match="destinations without in-edges"):
            compiled(alone, x)


def test_a_graph_of_fixed_capacity(device):
    """Operators leave out nodes and edges that are not in use; their results are 0."""
    compiled = torch.compile(FUNCTIONS["attention"], fullgraph=True, backend="aot_eager")
    graph = Graph.with_capacity(40, 300, device=device)
    for k in range(3):
        edges = torch.randint(40, (2, 50 * k + 50), device=device)
        graph.copy_(edges)
        got = run(compiled, graph, k)
        want = run(FUNCTIONS["attention"], Graph.from_edge_index(edges, 40), k)
        torch.testing.assert_close([got[0][: edges.shape[1]], got[1]], want[:2], rtol=1e-4, atol=1e-4)
        assert not got[0][edges.shape[1] :].any()


@pytest.mark.parametrize("by", ["value", "scores"])
@pytest.mark.parametrize("name", ["gat_attention", "dot_attention"])
def test_second_derivatives_are_refused(name, by):
    """Second derivatives are refused also where the gradients of the results are constants, and with respect
    to inputs on which the first derivative does not depend."""
    edge_index = torch.randint(9, (2, 30))
    value, *scores = [torch.randn(9, 2, 4, requires_grad=True) for _ in range(3)]
    if name == "gat_attention":
        call, scores = functional.gat_attention, [x.detach().sum(-1).requires_grad_() for x in scores]
        order = [value, *scores]
    else:
        call, order = functional.dot_attention, [*scores, value]
    torch._dynamo.reset()
    out = torch.compile(call, backend="eager")(edge_index, *order)
    first = torch.autograd.grad(out.sum(), order, create_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(call(edge_index, *order).sum(), order))
    with pytest.raises(NotImplementedError, match="no second derivatives of compiled attention"):
        torch.autograd.grad(first[0].sum(), value if by == "value" else scores[0])
