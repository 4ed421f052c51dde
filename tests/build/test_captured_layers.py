"""dfgnn.run's CUDA graphs: arguments that a script has computed, dfgnn's layers, its own attention."""

import copy
from types import SimpleNamespace

import pytest
import torch
from captured_models import D, capturing, installed, problem, replayed, trained
from covering import some
from every_layer import arguments, floats, made, names, on
from torch import nn
from torch_geometric.nn import GATConv

from dfgnn.run import compiled, recorded
from dfgnn.runtime import cuda_graphs


@pytest.fixture
def how(device, monkeypatch):
    return capturing(device, monkeypatch)


class Behind(nn.Module):
    """Reads what the script has left on the object, of which its features are made, and replaces both."""

    def __init__(self):
        super().__init__()
        self.conv, self.lin = GATConv(D, D), nn.Linear(D, D)

    def forward(self, data):
        left, data.left = data.left, self.lin(data.x).tanh()
        data.x = self.conv(data.x, data.edge_index) * data.left + left
        return data


@pytest.mark.parametrize("again", [False, True], ids=["once", "second derivatives"])
def test_arguments_that_are_made_of_each_other(device, how, again):
    """Gradients of one do not run the script's graph behind another."""
    _, x, edge_index = problem(device)
    model = Behind().to(device, torch.float64)
    found = []
    for one, way in ((copy.deepcopy(model), how), (model, None)):
        with installed(way):
            for k in range(7):
                start = (x + k / 8).requires_grad_()
                left = (start * 2).tanh()
                data = one(SimpleNamespace(x=start.exp() * left, left=left, edge_index=edge_index))
                loss = data.x.square().mean()
                if again:
                    (grad,) = torch.autograd.grad(loss, start, create_graph=True)
                    loss = loss + grad.square().sum()
                loss.backward()
                found.append([loss.detach(), start.grad])
        found[-1] += [p.grad for p in one.parameters()]
    torch.testing.assert_close(found[:7], found[7:], rtol=1e-8, atol=1e-9)
    assert replayed(how) == (1 if again else 4), str(how.rows())


class OfOurs(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return sum(x.square().mean() for x in floats(self.layer(*args)))


SOME = [
    "pyg GATConv", "pyg GATConv pair", "pyg GATv2Conv attributes", "pyg TransformerConv", "pyg SuperGATConv",
    "pyg HGTConv", "pyg GPSConv", "dgl GATConv weights", "dgl DotGatConv", "dgl GlobalAttentionPooling",
    "GraphTransformerLayer", "EdgeGraphTransformerConv",
]  # fmt: skip


@some(SOME, names())
def test_layers_of_ours(device, how, name):
    """What our layers keep for their next call does not count as a change. SuperGATConv is not captured,
    because it waits for the edges that it draws. The graph of GlobalAttentionPooling ends with the call; the
    stand-in for CUDA graphs calls its operator again, a GPU does not."""
    model = OfOurs(made(name)).to(device)
    args = on(device, arguments(name))

    def gradients(model, way=None):
        found = []
        with installed(way):
            for k in range(6):
                torch.manual_seed(k)
                loss = model(*args)
                loss.backward()
                found.append(loss.detach())
        return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients(copy.deepcopy(model))
    torch.testing.assert_close(gradients(model, how), expected, rtol=1e-8, atol=1e-8)
    without = "SuperGATConv" in name or (device == "cpu" and "GlobalAttentionPooling" in name)
    assert without or replayed(how) >= 2, str(how.rows())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recognised_attention(device, how, monkeypatch, dropout):
    """Is one of two ways to compute a recorded graph, and taken where it is faster."""
    took = iter([[3.0, 2.0], [3.0, 1.0]])
    monkeypatch.setattr(recorded, "milliseconds", lambda *args: next(took))
    model, x, edge_index = problem(device, dropout=dropout)
    found, expected = (
        trained(model, 6, lambda step, model: (x + step, edge_index), way) for way in (how, None)
    )
    for a, b in zip([*found[0], *found[1]], [*expected[0], *expected[1]]):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    assert replayed(how) == 3, str(how.rows())
    assert how.rows()[0]["milliseconds"] == [3.0, 1.0]


def test_attention_that_is_traced_in_cuda_graphs_alone(device, monkeypatch):
    torch._dynamo.reset()
    sample, traced, runs = compiled._Trial._sample, compiled._Trial._traced, []

    def faster_on_a_gpu(trial, *args):
        sample(trial, *args)
        trial.kept_in_graphs = True
        return "traced it is not faster"

    monkeypatch.setattr(compiled._Trial, "_sample", faster_on_a_gpu)
    monkeypatch.setattr(compiled._Trial, "_traced", lambda *args: runs.append(1) or traced(*args))
    monkeypatch.setattr(compiled, "_LEAST", 0)
    with installed(whole := compiled.Compiled("/", False)):
        model, x, edge_index = problem(device, dtype=torch.float32)
        expected = model(x, edge_index)["out"]
        assert not runs
        with cuda_graphs.captured_step():
            found = model(x, edge_index)["out"]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert runs, str(whole.traced())
