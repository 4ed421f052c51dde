"""The names of torch_geometric's layers that need another library, which are GATConv without it."""

import pytest
import torch
from pyg_compare import edges, torch_geometric

from dfgnn.nn.pyg import CuGraphGATConv, FusedGATConv, GATConv

PyG = torch_geometric.nn
N = 50


def gradients(out, *wanted):
    return [out, *torch.autograd.grad(out.sin().sum(), wanted)]


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_cugraph(concat, bias):
    options = {"heads": 3, "concat": concat, "bias": bias}
    ours = CuGraphGATConv(9, 4, **options).double()
    assert isinstance(ours, PyG.CuGraphGATConv)
    gat = PyG.GATConv(9, 4, add_self_loops=False, **options).double()
    with torch.no_grad():
        gat.lin.weight.copy_(ours.lin.weight)
        for vector, part in zip((gat.att_src, gat.att_dst), ours.att.chunk(2)):
            vector.copy_(part.view(1, 3, 4))
    x, edge_index = torch.randn(N, 9, dtype=torch.float64, requires_grad=True), edges()
    expected = gradients(gat(x, edge_index), x, gat.lin.weight)
    for given in (edge_index, torch_geometric.EdgeIndex(edge_index, sparse_size=(N, N))):
        torch.testing.assert_close(gradients(ours(x, given), x, ours.lin.weight), expected)
    names = ["att", *(["bias"] if bias else []), "lin.weight"]
    assert sorted(ours.state_dict()) == names and ours.att.shape == (24,)
    with pytest.raises(NotImplementedError, match="edge_attr: expected None"):
        ours(x, edge_index, torch.randn(edge_index.shape[1], 3))


@pytest.mark.parametrize("concat", [True, False])
def test_dgnn(concat):
    options = {"heads": 3, "concat": concat, "add_self_loops": False}
    ours = FusedGATConv(9, 4, **options).double()
    assert isinstance(ours, PyG.FusedGATConv)
    gat = PyG.GATConv(9, 4, **options).double()
    gat.load_state_dict(ours.state_dict())
    x, edge_index = torch.randn(N, 9, dtype=torch.float64, requires_grad=True), edges()
    expected = gradients(gat(x, edge_index.flip(0)), x, gat.lin.weight)  # rows are destinations
    formats = FusedGATConv.to_graph_format(edge_index, size=(N, N))
    torch.testing.assert_close(gradients(ours(x, *formats), x, ours.lin.weight), expected)
    batch = torch.stack([x, 2 * x])
    torch.testing.assert_close(ours(batch, *formats), torch.stack([ours(x, *formats) for x in batch]))
    theirs = GATConv(9, 4, **options).double()
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs(x, edge_index.flip(0)), expected[0])


def test_errors():
    with pytest.raises(ValueError, match="FusedGATConv: add_self_loops: expected False"):
        FusedGATConv(9, 4)
    with pytest.raises(ValueError, match="FusedGATConv: edge_dim: expected None"):
        FusedGATConv(9, 4, add_self_loops=False, edge_dim=3)
    layer = FusedGATConv(9, 4, add_self_loops=False)
    formats = FusedGATConv.to_graph_format(edges(), size=(N, N))
    with pytest.raises(ValueError, match="csr: expected 31 pointers"):
        layer(torch.randn(30, 9), *formats)
    with pytest.raises(NotImplementedError, match="aggr='max'"):
        FusedGATConv(9, 4, add_self_loops=False, aggr="max")(torch.randn(N, 9), *formats)
