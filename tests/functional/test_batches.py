"""Sets of features on one graph, [B, N, H, D]: as one call for each, with all gradients."""

import pytest
import torch
from graphs import make_graph

from dfgnn import functional

B, H, D = 3, 2, 4


@pytest.mark.parametrize("beta", [(1,), (H, 1), (1, H, D), (B, 1, H, 1)], ids=str)
def test_beta(device, beta):
    graph = make_graph("random", device)
    x = torch.randn(B, graph.num_src, H, D, dtype=torch.float64, device=device)
    beta = torch.rand(beta, dtype=torch.float64, device=device)
    betas = beta if beta.dim() == 4 else [beta] * B
    each = [functional.agnn_attention(graph, x[k], beta=betas[k]) for k in range(B)]
    torch.testing.assert_close(functional.agnn_attention(graph, x, beta=beta), torch.stack(each))


def test_masks(device):
    graph = make_graph("random", device)
    x = torch.randn(B, graph.num_src, H, D, dtype=torch.float64, device=device)
    for shape in ((graph.num_edges,), (graph.num_edges, H), (B, graph.num_edges, H), (B, graph.num_edges, 1)):
        mask = torch.rand(shape, device=device) < 0.5
        each = [
            functional.dot_attention(
                graph, x[k], x[k], x[k], mask=mask[k].expand(-1, H) if mask.dim() == 3 else mask
            )
            for k in range(B)
        ]
        found = functional.dot_attention(graph, x, x, x, mask=mask)
        torch.testing.assert_close(found, torch.stack(each))


def test_dropout_is_another_for_each_set(device):
    graph = make_graph("random", device)
    x = torch.randn(1, graph.num_src, H, D, device=device).expand(B, -1, -1, -1)
    out, attention = functional.dot_attention(graph, x, x, x, dropout_p=0.5, return_attention=True)
    assert not torch.equal(attention[0], attention[1])
    kept = (attention > 0).double().mean((1, 2))
    assert ((kept - 0.5).abs() < 0.2).all()


def test_in_place_and_second_order(device):
    graph = make_graph("random", device)
    x = torch.randn(B, graph.num_src, H, D, dtype=torch.float64, device=device, requires_grad=True)

    def penalty(attention):
        (grad,) = torch.autograd.grad(attention().square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    found = penalty(lambda: functional.dot_attention(graph, x, x, x).relu_())
    expected = penalty(lambda: torch.stack([functional.dot_attention(graph, y, y, y).relu() for y in x]))
    torch.testing.assert_close(found, expected)
