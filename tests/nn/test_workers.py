"""Accelerated layers in the worker processes of a data loader, beside the same layers in this one."""

import copy

import pytest
import torch

import dfgnn

PyG = pytest.importorskip("torch_geometric.nn")
loader = pytest.importorskip("torch_geometric.loader")
data = pytest.importorskip("torch_geometric.data")

N = 60
EDGES = torch.randint(N, (2, 400), generator=torch.Generator().manual_seed(0))


class Encoded(torch.utils.data.Dataset):
    """Subgraphs whose features a layer has computed, where they are drawn."""

    def __init__(self, layer):
        self.layer = layer

    def __len__(self):
        return 6

    def __getitem__(self, number):
        draw = torch.Generator().manual_seed(number)
        kept = torch.rand(EDGES.shape[1], generator=draw) < 0.5
        x = torch.randn(N, 8, generator=draw, dtype=torch.float64)
        with torch.no_grad():
            return data.Data(x=self.layer(x, EDGES[:, kept]), edge_index=EDGES[:, kept])


def step(encoder, model, **options):
    """Outputs of all batches and gradients of the model."""
    model.zero_grad()
    outs = [model(batch.x, batch.edge_index) for batch in loader.DataLoader(Encoded(encoder), 2, **options)]
    sum(out.square().sum() for out in outs).backward()
    return [*outs, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", ["GATConv", "TransformerConv"])
def test_workers(name):
    torch.manual_seed(0)
    layers = [getattr(PyG, name)(8, 8).double() for _ in range(2)]
    expected = step(*layers)
    ours = [copy.deepcopy(layer) for layer in layers]
    assert all(dfgnn.accelerate(layer).replaced for layer in ours)
    step(*ours)  # the engine's threads and cached graphs exist before the fork
    for options in ({"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        actual = step(*ours, multiprocessing_context="fork", **options)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
