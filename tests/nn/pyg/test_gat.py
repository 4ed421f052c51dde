"""pyg.GATConv beside torch_geometric's with the same parameters: outputs, attention, all gradients."""

import copy

import pytest
import torch
from pyg_compare import compare, edges, pair, run, sparse_forms, torch_geometric

from dfgnn import Graph
from dfgnn.nn.pyg import GATConv

PyGConv = torch_geometric.nn.GATConv
N = 50  # nodes of the graph "random"


@pytest.mark.parametrize(
    "fill_value",
    ["mean", "add", "min", "max", "mul", 0.5, 2, None, torch.tensor(0.3), torch.tensor([0.5, -1.0, 2.0])],
    ids=str,
)
@pytest.mark.parametrize("name", ["duplicates", "isolated"])
def test_fill_value(fill_value, name):
    edge_index = edges(name)
    n = int(edge_index.max()) + 2
    if not isinstance(fill_value, torch.Tensor) or fill_value.dim() == 1:
        edge_attr = torch.randn(edge_index.shape[1], 3, dtype=torch.float64)
        theirs, ours = pair(PyGConv, GATConv, 7, 5, 2, edge_dim=3, fill_value=fill_value)
        compare(theirs, ours, torch.randn(n, 7, dtype=torch.float64), edge_index, edge_attr)
    if not isinstance(fill_value, torch.Tensor) or fill_value.dim() == 0:
        edge_attr = torch.randn(edge_index.shape[1], dtype=torch.float64)
        theirs, ours = pair(PyGConv, GATConv, 7, 5, 2, edge_dim=1, fill_value=fill_value)
        compare(theirs, ours, torch.randn(n, 7, dtype=torch.float64), edge_index, edge_attr)


@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("name", ["fewer_sources", "fewer_destinations"])
def test_size(add_self_loops, name):
    num_src, num_dst = (30, 80) if name == "fewer_sources" else (80, 30)
    x = torch.randn(num_src, 9, dtype=torch.float64)
    theirs, ours = pair(PyGConv, GATConv, 9, 5, 2, edge_dim=3, add_self_loops=add_self_loops)
    size = num_src, num_dst
    compare(theirs, ours, (x, torch.randn(num_dst, 9, dtype=torch.float64)), edges(name), size=size)
    compare(theirs, ours, (x, None), edges(name), size=size, return_attention_weights=True)


@pytest.mark.parametrize("residual", [False, True])
def test_sources_alone(residual):
    theirs, ours = pair(PyGConv, GATConv, 9, 5, 2, residual=residual)
    x = torch.randn(N, 9, dtype=torch.float64)
    compare(theirs, ours, (x, None), edges())
    compare(theirs, ours, (x, x), edges(), return_attention_weights=True)


def test_one_tensor_for_two_projections():
    theirs, ours = pair(PyGConv, GATConv, (9, 9), 5, 2, residual=True)
    compare(theirs, ours, torch.randn(N, 9, dtype=torch.float64), edges())


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_loops_of_more_destinations_than_sources(reduction):
    """torch_geometric fills in the attributes of loops only if every destination is a source, too; dfgnn also
    where it is not."""
    edge_index = torch.tensor([[0, 1, 2, 0], [1, 2, 4, 3]])
    attr = torch.randn(4, 3, dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    theirs, ours = pair(PyGConv, GATConv, (6, 6), 5, 2, edge_dim=3, fill_value=reduction)
    without = copy.copy(theirs)
    without.add_self_loops = False
    reduce = torch_geometric.utils.scatter(attr, edge_index[1], 0, 5, reduction)[:3]
    kept = edge_index[0] != edge_index[1]
    loops = torch.arange(3).repeat(2, 1)
    expected = without(x, torch.cat([edge_index[:, kept], loops], 1), torch.cat([attr[kept], reduce]))
    torch.testing.assert_close(ours(x, edge_index, attr), expected, rtol=1e-10, atol=1e-10)


def test_sparse_sources_alone():
    edge_index = torch.unique(edges("fewer_destinations"), dim=1)
    theirs, ours = pair(PyGConv, GATConv, (9, 6), 5, 2)
    x = torch.randn(80, 9, dtype=torch.float64)
    for adjacency in sparse_forms(edge_index, 80, 30).values():
        compare(theirs, ours, (x, None), adjacency, return_attention_weights=True)


def test_attention_is_returned_with_edges_as_they_were_given():
    edge_index, x = torch.unique(edges(), dim=1).contiguous(), torch.randn(N, 9)
    layer = GATConv(9, 5, 2, edge_dim=3)
    attr = torch.randn(edge_index.shape[1], 3)
    given = torch_geometric.EdgeIndex(edge_index, sparse_size=(N, N))
    _, (returned, _) = layer(x, given, attr, return_attention_weights=True)
    assert isinstance(returned, torch_geometric.EdgeIndex)
    for adjacency in sparse_forms(edge_index, N, N, attr).values():
        _, (matrix, alpha) = layer(x, adjacency, return_attention_weights=True)
        assert matrix.shape == (N, N, 2) and torch.equal(matrix.values(), alpha)


def test_no_projection_of_destinations_where_it_is_not_needed():
    layer = GATConv((9, 6), 5, 2)
    assert run(layer, (torch.randn(30, 9), torch.randn(80, 6)), edges("fewer_sources"))[
        "grad lin_dst.weight"
    ].any()
    pair = torch.randn(30, 9), torch.randn(80, 6)
    assert layer(pair, edges("fewer_sources")).grad_fn.name() == "LayerBackward"
    with torch.profiler.profile(record_shapes=True) as seen:
        layer(pair, edges("fewer_sources"), return_attention_weights=True)
    shapes = [event.input_shapes[:2] for event in seen.events() if event.name == "aten::linear"]
    assert [[30, 9], [10, 9]] in shapes and [[80, 6], [10, 6]] not in shapes


def test_attributes_of_edges_at_fixed_capacity():
    """The layer is one operator there, too, and unused edges and nodes, whatever their rows hold, have no
    part in results and gradients."""
    layer, edge_index = (
        GATConv(6, 4, 2, edge_dim=3, add_self_loops=False).double(),
        torch.randint(20, (2, 70)),
    )
    buffer = Graph.with_capacity((30, 30), 100)
    x, attr = torch.randn(30, 6).double(), torch.randn(100, 3).double()
    attr[70:] = float("nan")
    for count in (70, 40):
        buffer.copy_(edge_index[:, :count], (20, 20))
        exact = Graph.from_edge_index(edge_index[:, :count], num_nodes=20)
        found = []
        for graph, nodes, edges_in_use in ((buffer, 30, 100), (exact, 20, count)):
            leaves = x[:nodes].clone().requires_grad_(), attr[:edges_in_use].clone().requires_grad_()
            out = layer(leaves[0], graph, leaves[1])
            assert out.grad_fn.name() == "LayerBackward"
            grads = torch.autograd.grad(out[:20].sin().sum(), [*leaves, *layer.parameters()])
            found.append((out[:20], grads[0][:20], grads[1][:count], *grads[2:]))
            assert not grads[1][count:].any()
        torch.testing.assert_close(*found)
        attr[count:] = float("nan")
