"""Functions and layers of Graphs under torch.compile: never a break, and one compiled function for all."""

import gc
import logging
import warnings

import pytest
import torch
import torch._dynamo.utils
from covering import exhaustive, some

from dfgnn import Graph, functional, nn

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


def test_attention_keeps_its_graph_until_backward(device):
    """Attention's backward works after the caller has dropped the graph; spmm's raises that it is gone."""
    x = torch.randn(40, 2, 8, device=device, requires_grad=True)
    want = run(FUNCTIONS["dot"], make(0, device), 0)
    torch.manual_seed(0)
    for name in ("dot", "spmm"):
        compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
        graph = make(0, device)
        out = compiled(graph, x, x)
        del graph
        gc.collect()
        if name == "dot":
            out.square().sum().backward()
            assert x.grad.abs().sum() > 0 and x.grad.shape == want[1].shape
        else:
            with pytest.raises(RuntimeError, match="has to live until backward"):
                out.sum().backward()


def _of_edges(size):
    """Features of edges, as a layer's second argument."""
    return lambda graph: (torch.randn(graph.num_edges, size, device=graph.device),)


def _of_types(graph):
    def types(count, rows):
        return torch.arange(rows, device=graph.device) * 7 % 11 % count

    return types(3, graph.num_src), types(4, graph.num_edges)


def _nothing(graph):
    return ()


# Layers, and what they take beside a graph and features [N, 8].
LAYERS = {
    "GATConv": (lambda: nn.dgl.GATConv(8, 4, 2), _nothing),
    "AGNNConv": (lambda: nn.dgl.AGNNConv(), _nothing),
    "EGATConv": (lambda: nn.dgl.EGATConv(8, 3, 4, 5, 2), _of_edges(3)),
    "EdgeGATConv": (lambda: nn.dgl.EdgeGATConv(8, 3, 4, 2), _of_edges(3)),
    "EdgeGATConv wide": (lambda: nn.dgl.EdgeGATConv(8, 9, 4, 2), _of_edges(9)),
    "HGTConv": (lambda: nn.dgl.HGTConv(8, 4, 2, 3, 4, dropout=0.0), _of_types),
    "HGTConv norm": (lambda: nn.dgl.HGTConv(8, 3, 2, 3, 4, dropout=0.0, use_norm=True), _of_types),
    "GraphTransformerLayer": (lambda: nn.GraphTransformerLayer(8, 2), _nothing),
    "EdgeGraphTransformerConv": (lambda: nn.EdgeGraphTransformerConv(8, 3, 4, 2), _of_edges(3)),
    "EdgeGraphTransformerConv flex": (
        lambda: nn.EdgeGraphTransformerConv(8, 3, 4, 2, edge_out=False),
        _of_edges(3),
    ),
    "EdgeGraphTransformerLayer": (lambda: nn.EdgeGraphTransformerLayer(8, 2, 3), _of_edges(3)),
}


def train(call, layer, graph, x, *more):
    """What a step of training gives: the results and all gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    more = [t.clone().requires_grad_() if t.is_floating_point() else t for t in more]
    out = call(graph, x, *more)
    out = out if isinstance(out, tuple) else (out,)
    sum(o.sin().sum() for o in out).backward()
    inputs = [x, *(t for t in more if t.is_floating_point())]
    return [*out, *(t.grad for t in inputs), *(p.grad for p in layer.parameters())]


# (layer, `dynamic` of torch.compile). With None a layer is recorded twice: with the first sizes as constants,
# then with symbolic sizes.
CASES = [("GATConv", None), ("AGNNConv", True)]
CASES += [(name, True) for name in ("EGATConv", "EdgeGATConv", "HGTConv", "EdgeGraphTransformerConv flex")]
# Cases of the exhaustive tests. Other layers run the same code, or are in test_recorded.py.
MORE = [(name, None) for name in ("EdgeGATConv wide", "HGTConv norm", "EdgeGraphTransformerLayer")]
MORE += [("GraphTransformerLayer", True), ("EdgeGraphTransformerConv", True), ("EdgeGATConv", False)]


@pytest.mark.parametrize("name, dynamic", CASES + [pytest.param(*case, marks=exhaustive) for case in MORE])
def test_layers(device, name, dynamic):
    make_layer, more = LAYERS[name]
    layer = make_layer().to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for k in range({None: 3, True: 2, False: 2}[dynamic]):
        graph = make(k, device, loops=True)
        inputs = torch.randn(40 + k, 8, device=device), *more(graph)
        found = [train(call, layer, graph, *inputs) for call in (compiled, layer)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert compiled_graphs() <= {None: 2, True: 1, False: 2}[dynamic]


@pytest.mark.slow
@exhaustive
@pytest.mark.parametrize("name", ["EGATConv", "HGTConv"])
def test_inductor_takes_layers(device, name):
    make_layer, more = LAYERS[name]
    layer = make_layer().to(device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for k in range(2):
        graph = make(k, device, loops=True)
        inputs = torch.randn(40 + k, 8, device=device), *more(graph)
        found = [train(call, layer, graph, *inputs) for call in (compiled, layer)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@some(["GATConv"], ["GATConv", "EGATConv"])
def test_layers_with_a_batch_of_features(device, name):
    make_layer, more = LAYERS[name]
    layer = make_layer().to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for k in range(3):
        graph = make(k, device, loops=True)
        batch = [torch.stack([x, 2 * x], 1) for x in (torch.randn(40 + k, 8, device=device), *more(graph))]
        found = [train(call, layer, graph, *batch) for call in (compiled, layer)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_types_out_of_range_are_refused_when_it_runs(device):
    make_layer, more = LAYERS["HGTConv"]
    compiled = torch.compile(make_layer().to(device), fullgraph=True, backend="aot_eager")
    graph = make(0, device)
    x, (ntype, etype) = torch.randn(40, 8, device=device), more(graph)
    assert compiled(graph, x, ntype, etype).isfinite().all()
    with pytest.raises(ValueError, match=r"etype: expected types in \[0, 4\), got 4"):
        compiled(graph, x, ntype, etype + 1)
    with pytest.raises(ValueError, match=r"types: expected types in \[0, 3\), got 3"):
        compiled(graph, x, ntype + 1, etype)


def test_types_that_are_written_to(device):
    make_layer, more = LAYERS["HGTConv"]
    layer = make_layer().to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    graph = make(0, device)
    x, (ntype, etype) = torch.randn(40, 8, device=device), more(graph)
    for _ in range(3):
        torch.testing.assert_close(compiled(graph, x, ntype, etype), layer(graph, x, ntype, etype))
        etype.copy_((etype + 1) % 4)
        ntype.copy_((ntype + 1) % 3)


def test_destinations_without_edges_are_refused_when_it_runs(device):
    compiled = torch.compile(LAYERS["GATConv"][0]().to(device), fullgraph=True, backend="aot_eager")
    x = torch.randn(40, 8, device=device)
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
    """Also where the gradients of the results are constants, and by what leads to no such gradient."""
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
    for x, right in zip(first, torch.autograd.grad(call(edge_index, *order).sum(), order)):
        torch.testing.assert_close(x, right)
    with pytest.raises(NotImplementedError, match="no second derivatives of compiled attention"):
        torch.autograd.grad(first[0].sum(), value if by == "value" else scores[0])
