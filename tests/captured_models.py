"""Models whose calls dfgnn.run replays, for its tests."""

import contextlib
import copy

import fake_cuda
import torch
from torch import nn
from torch_geometric.nn import GATConv, MessagePassing
from torch_geometric.utils import softmax

from dfgnn.run import recorded
from dfgnn.run.captured import Captured
from dfgnn.runtime import cuda_graphs

N, E, D = 30, 200, 8


class Own(MessagePassing):
    """Asks for the largest index, too."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = nn.Linear(D, D)
        self.scale = 1.0

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x)) * self.scale

    def message(self, x_i, x_j, index):
        return softmax((x_i * x_j).sum(-1, keepdim=True), index) * x_j


class Model(nn.Module):
    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        self.conv, self.own = GATConv(D, D, heads=1), Own()
        self.norm = nn.BatchNorm1d(D) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, edge_index, scale=1.0):
        h = self.dropout(self.norm(self.conv(x, edge_index))).relu()
        return {"out": self.own(h, edge_index) * scale, "hidden": h}


def problem(device, dtype=torch.float64, model=None, **options):
    torch.manual_seed(0)
    model = (Model(**options) if model is None else model).to(device, dtype)
    x = torch.randn(N, D, dtype=dtype).to(device)
    edge_index = torch.randint(0, N, (2, E)).to(device)
    return model, x, edge_index


def trained(model, steps, calls, how=None):
    """The losses and parameters of some steps; ``calls(step)`` gives the arguments."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    with installed(how):
        for step in range(steps):
            torch.manual_seed(step)
            args = calls(step, model)
            optimizer.zero_grad()
            out = model(*args)
            loss = sum(x.square().mean() for x in (out.values() if isinstance(out, dict) else [out]))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses, [*model.parameters(), *model.buffers()]


@contextlib.contextmanager
def installed(how):
    """With None it does nothing."""
    if how is not None:
        how.install()
    try:
        yield
    finally:
        if how is not None:
            how.remove()


def capturing(device, monkeypatch, with_care=False):
    """What replays calls, also where that is not faster; on a CPU by a stand-in for CUDA graphs."""
    monkeypatch.setattr(recorded, "FASTER", 0.0)
    monkeypatch.setattr(recorded, "FASTER_WITH_CARE", 0.0)
    if device == "cpu":
        monkeypatch.setattr(cuda_graphs, "Recorder", fake_cuda.Recorder)
    return Captured(with_care)


def replayed(how):
    return sum(row["replayed"] for row in how.rows())
