"""sddmm, spmm, edge_softmax and agnn_attention against their plain twins."""

import pytest
import torch
from attention import DTYPES, relative_error, rounding_band, shapes
from graphs import GRAPHS, make_graph

from dfgnn import functional, reference


def compare(name, graph, inputs, note="", band=1.0, **options):
    """Results and gradients of functional.name, whose error may be twice that of the plain twin."""
    found = []
    for module, dtype in ((functional, None), (reference, None), (reference, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in inputs]
        out = getattr(module, name)(graph, *leaves, **options)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)
        found.append([out, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), leaves)])
    for what, (ours, plain, exact) in enumerate(zip(*found)):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype and ours.isfinite().all()
        floor = exact.numel() ** 0.5 * 1e-3
        error, allowed = (relative_error(x, exact, floor) for x in (ours, plain))
        limit = 2 * allowed + band * rounding_band(inputs[0].dtype)
        assert error <= limit, f"{note}{what}: error {error:.3g} > {limit:.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRAPHS)
def test_sddmm_and_spmm(device, name, dtype):
    graph = make_graph(name, device)
    turn = list(GRAPHS).index(name) * len(DTYPES) + DTYPES.index(dtype)
    for heads, dim in shapes(device, turn, graph.num_edges):
        rows = torch.randn(graph.num_dst, heads, dim).to(device, dtype)
        value = torch.randn(graph.num_src, heads, dim).to(device, dtype)
        weight = torch.randn(graph.num_edges, heads).to(device, dtype)
        compare("sddmm", graph, (rows, value), f"H={heads} D={dim}: ", 2)
        compare("spmm", graph, (weight, value), f"H={heads} D={dim}: ", 2)


def test_edge_softmax_of_masked_edges(device):
    graph = make_graph("random", device)
    score = torch.randn(graph.num_edges, 3, device=device)
    score[graph.edge_index[1] < 5] = -torch.inf
    out = functional.edge_softmax(graph, score)
    torch.testing.assert_close(out, reference.edge_softmax(graph, score))
    assert functional.edge_softmax(graph, score[:, :0]).shape == (graph.num_edges, 0)
    with pytest.raises(ValueError, match="score: expected shape .*, got"):
        functional.edge_softmax(graph, score[1:])
