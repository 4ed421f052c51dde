"""Graphs of fixed capacity compared with exact ones: what is in use is the same, what is not is 0."""

import copy
import gc
import pickle

import pytest
import torch
from every_layer import arguments, floats, made

from dfgnn import Graph, functional, reference
from dfgnn.engine.edge_maps import sum_of_edges
from dfgnn.runtime.cuda_graphs import capturing

NODES, EDGES = 50, 700
# (nodes, edges) in use in successive batches: none, few, all; more edges than a work item takes.
BATCHES = [(37, 120), (NODES, EDGES), (3, 0), (20, EDGES - 1), (1, 600), (0, 0), (NODES, 1)]


def edges_of(num_nodes, num_edges, device="cpu"):
    generator = torch.Generator().manual_seed(num_edges)
    return torch.randint(max(num_nodes, 1), (2, num_edges), generator=generator).to(device)


def padded(x, size, value):
    return torch.cat([x, x.new_full((size - len(x), *x.shape[1:]), value)]).requires_grad_()


@pytest.mark.parametrize("reverse", [False, True])
def test_sums_of_edges_are_of_the_last_batch(device, reverse):
    graph = Graph.with_capacity(NODES, EDGES, device=device)
    for num_nodes, num_edges in BATCHES:
        edges = edges_of(num_nodes, num_edges, device)
        graph.copy_(edges, num_nodes)
        rows = torch.randn(EDGES, 4, device=device)
        rows[num_edges:] = float("nan")
        rows.requires_grad_()
        sums, end = sum_of_edges(graph, rows, reverse), edges[0 if reverse else 1]
        want = torch.zeros_like(sums).index_add(0, end, rows.detach()[:num_edges])
        torch.testing.assert_close(sums, want, rtol=1e-4, atol=1e-4)
        factor = torch.randn_like(sums)
        (sums * factor).sum().backward()
        torch.testing.assert_close(rows.grad[:num_edges], factor[end])


def test_structure(device):
    graph = Graph.with_capacity((9, 5), 12, device=device)
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (9, 5, 12)
    assert graph.device.type == device
    assert not graph.edge_mask.any() and graph.csr().indptr.tolist() == [0] * 6
    edges = torch.tensor([[7, 0, 3], [1, 1, 0]], device=device)
    graph.copy_(edges, (8, 2))
    assert graph.edge_mask.tolist() == [True] * 3 + [False] * 9
    assert graph.csr().indptr.tolist() == [0, 1, 3, 3, 3, 3]
    assert graph.csr().indices[:3].tolist() == [3, 7, 0]
    assert graph.csr().eids[:3].tolist() == [2, 0, 1]
    assert graph.reverse_csr().indices[:3].tolist() == [1, 0, 1]
    assert (
        graph.edge_index[:, :3].equal(edges)
        and (torch.tensor([8, 4], device=device) == graph.edge_index[:, 3:].T).all()
    )
    assert graph.in_degrees().tolist() == [1, 2, 0, 0, 0]
    assert not graph.has_zero_in_degree
    assert graph.copy_(edges, (8, 3)).has_zero_in_degree
    assert Graph.from_edge_index(edges).edge_mask is None
    for twin in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), graph.to("cpu"), graph.one_shot()):
        assert twin.csr().indptr.tolist() == [0, 1, 3, 3, 3, 3] and twin.edge_mask.sum() == 3
    back = graph.reverse()
    assert (back.num_src, back.num_dst) == (5, 9) and back.csr().indices[:3].tolist() == [1, 0, 1]


def test_sizes_on_the_device(device):
    graph = Graph.with_capacity(6, 8, device=device)
    edges = torch.tensor([[0, 1, 2, 5], [1, 2, 9, 3]], device=device)
    graph.copy_(edges, torch.tensor(5, device=device), torch.tensor(3, device=device))
    # Three edges are in use; the third leads to 9, which is no node, and is dropped.
    assert graph.edge_mask.tolist() == [True, True] + [False] * 6
    with_pair = graph.copy_(edges, torch.tensor([6, 6], device=device), torch.tensor(4, device=device))
    assert with_pair.edge_mask.tolist() == [True, True, False, True] + [False] * 4


def test_results_before_outlive_a_copy(device):
    """Backward of one batch is right after the next batch has been copied into the graph."""
    graph = Graph.with_capacity(NODES, EDGES, device=device)
    gradients = []
    for late in (False, True):
        x = torch.linspace(-1, 1, NODES * 8, device=device).view(NODES, 1, 8).requires_grad_()
        out = functional.dot_attention(graph.copy_(edges_of(30, 90, device)), x, x, x)
        if late:
            graph.copy_(edges_of(40, 500, device)).csr()
        out.square().sum().backward()
        gradients.append(x.grad)
    assert gradients[0].abs().sum() > 0 and gradients[0].equal(gradients[1])


def on_a_fixed_and_an_exact_graph(call, layer, graph, edge_index, inputs, padding):
    """What ``call`` computes on both, and its gradients; checks that no gradient goes to unused edges.

    inputs: the features of nodes and, if there are any, of edges. padding: the value of unused rows of edges.
    """
    num_nodes, num_edges, found = len(inputs[0]), edge_index.shape[1], []
    for fixed in (True, False):
        layer.zero_grad()
        if fixed:
            graph.copy_(edge_index, num_nodes)
            fills = (1.0, NODES), (padding, EDGES)
            given, where = [padded(x, size, fill) for x, (fill, size) in zip(inputs, fills)], graph
        else:
            given = [x.clone().requires_grad_() for x in inputs]
            where = Graph.from_edge_index(edge_index, num_nodes)
        out = call(where, *given)
        out[:num_nodes].square().sum().backward()
        if fixed and len(given) == 2:
            assert not given[1].grad[num_edges:].any()
        gradients = [x.grad[: len(of)] for x, of in zip(given, inputs)]
        found.append([out[:num_nodes], *gradients, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


# Compiled layers with loops gather edge attributes by positions that are computed from the edges.
COMPILED = [
    "GATConv",
    "TransformerConv",
    "AGNNConv",
    "ResGatedGraphConv attributes",
    "GENConv",
    "GeneralConv",
]
EAGER = [*COMPILED, "GATConv attributes", "GATv2Conv attributes", "TransformerConv attributes", "GATEConv"]


@pytest.mark.parametrize(
    "name, compiled", [*((name, False) for name in EAGER), *((name, True) for name in COMPILED)]
)
def test_layers_of_pyg_find_it_by_its_edge_index(device, name, compiled):
    """The edges contain loops, which the layers replace by loops of their own with filled-in attributes."""
    pytest.importorskip("torch_geometric")
    layer = made(f"pyg {name}").to(device).eval()
    fused = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    graph = Graph.with_capacity(NODES, EDGES, device=device)

    def call(where, x, attr=None):
        run = fused if where is graph else layer
        return floats(run(*arguments(f"pyg {name}", x, attr, where.edge_index)))[0]

    padding = 5.0 if compiled else float("nan")  # compiled layers multiply numbers of unused edges by 0
    for num_nodes, num_edges in ((NODES, 120), *BATCHES[:2]) if compiled else BATCHES[:4]:
        edge_index = edges_of(num_nodes, num_edges, device)
        edge_index[:, : num_edges // 4] = edge_index[0, : num_edges // 4]  # loops
        inputs = features(num_nodes, num_edges, device)
        given = inputs[:1] if name in ("GATConv", "TransformerConv", "AGNNConv") else inputs
        on_a_fixed_and_an_exact_graph(call, layer, graph, edge_index, given, padding)


def features(num_nodes, num_edges, device):
    return [torch.randn(n, k, device=device).double() for n, k in ((num_nodes, 8), (num_edges, 3))]


@pytest.mark.parametrize(
    "name", ["GraphTransformerConv attributes", "EdgeGraphTransformerConv", "dgl EdgeGATConv", "dgl EGATConv"]
)
def test_layers_of_a_graph_leave_out_unused_edges(device, name):
    layer = made(name).to(device)
    layer.set_allow_zero_in_degree(True)

    def call(where, x, attr):
        return floats(layer(*arguments(name, x, attr, where)))[0]

    graph = Graph.with_capacity(NODES, EDGES, device=device)
    for num_nodes, num_edges in BATCHES[:3]:
        edge_index = edges_of(num_nodes, num_edges, device)
        inputs = features(num_nodes, num_edges, device)
        on_a_fixed_and_an_exact_graph(call, layer, graph, edge_index, inputs, float("nan"))


def test_the_buffer_keeps_no_graph_alive():
    graph = Graph.with_capacity(5, 5)
    edges = graph.edge_index
    from dfgnn.graph.fixed_capacity import OF_BUFFER

    assert OF_BUFFER[edges]() is graph
    del graph
    gc.collect()
    assert OF_BUFFER[edges]() is None
    del edges
    gc.collect()


def test_what_it_does_not_do(device):
    graph = Graph.with_capacity(4, 4, device=device).copy_(torch.tensor([[0, 1], [1, 2]]))
    x = torch.randn(4, 1, 8, device=device, requires_grad=True)
    out = functional.dot_attention(graph, x, x, x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="expected an exact one"):
        reference.dot_attention(graph, x, x, x)
    with pytest.raises(NotImplementedError, match="remove_existing"):
        graph.add_self_loops()
    with pytest.raises(ValueError, match="expected 'auto' or 'natural' for a graph of fixed capacity"):
        graph.plan(schedule="longest_first")
    with pytest.raises(ValueError, match="expected 4 source and 4 destination rows"):
        from dfgnn.graph.cache import graph_of

        graph_of(graph.edge_index, 5, 5)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda g: g.copy_(torch.zeros(2, 5, dtype=torch.long)), ValueError, "at most 4 edges, the capacity"),
        (lambda g: g.copy_(torch.zeros(2, 1, dtype=torch.long), 4), ValueError, "at most 3 sources"),
        (lambda g: g.copy_(torch.zeros(2, 1, dtype=torch.long), (3, 4)), ValueError, "at most 3 destinat"),
        (lambda g: g.copy_(torch.zeros(2, 1, dtype=torch.long), 3, 2), ValueError, "at most 1, those given"),
        (lambda g: g.copy_(torch.tensor([[0], [3]])), ValueError, r"edge_index\[1\]: expected values in \[0"),
        (lambda g: g.copy_(torch.tensor([[2], [0]]), 2), ValueError, r"edge_index\[0\]: expected values in"),
        (lambda g: g.copy_(torch.zeros(2, 1)), TypeError, "int32 or torch.int64"),
        (lambda g: g.copy_(torch.zeros(3, 1, dtype=torch.long)), ValueError, "shape"),
        (lambda g: g.add_self_loops(True).copy_(torch.tensor([[0], [0]])), TypeError, "without loops"),
        (lambda g: Graph.from_edge_index(torch.tensor([[0], [0]])).copy_(None), TypeError, "with_capacity"),
        (lambda g: Graph.with_capacity(0, 3), ValueError, "expected nodes for 3 edges"),
        (lambda g: Graph.with_capacity(3.0, 3), TypeError, "num_nodes: expected an integer, got float"),
        (lambda g: Graph.with_capacity(2**31, 3), ValueError, "num_nodes"),
    ],
)
def test_bad_input(call, error, message):
    graph = Graph.with_capacity(3, 4)
    with pytest.raises(error, match=message):
        call(graph)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """One captured step, which includes the copy into the graph and the planning, replayed on every batch."""
    edges = torch.zeros(2, EDGES, dtype=torch.long, device="cuda")
    sizes = torch.zeros(2, dtype=torch.long, device="cuda")
    graph = Graph.with_capacity(NODES, EDGES, device="cuda")
    x = torch.randn(NODES, 2, 8, device="cuda", requires_grad=True)
    att = torch.randn(2, 8, device="cuda")

    def step():
        graph.copy_(edges, sizes[0], sizes[1])
        x.grad = None
        out = functional.gatv2_attention(graph, x, x, att)
        (out + functional.dot_attention(graph, x, x, x)).square().sum().backward()
        return out

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with capturing(captured):
        out = step()
    for num_nodes, num_edges in BATCHES:
        edge_index = edges_of(num_nodes, num_edges, "cuda")
        edges[:, :num_edges] = edge_index
        sizes.copy_(torch.tensor([num_nodes, num_edges]))
        captured.replay()
        y = x.detach()[:num_nodes].clone().requires_grad_()
        exact = Graph.from_edge_index(edge_index, num_nodes).one_shot()
        want = functional.gatv2_attention(exact, y, y, att)
        (want + functional.dot_attention(exact, y, y, y)).square().sum().backward()
        torch.testing.assert_close(out[:num_nodes], want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.grad[:num_nodes], y.grad, rtol=1e-4, atol=1e-4)
        assert not out[num_nodes:].any() and not x.grad[num_nodes:].any()
