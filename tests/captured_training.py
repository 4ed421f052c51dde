"""Models, batches and losses of the tests of `dfgnn.capture`."""

import warnings

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from plain_training import plain_step
from torch import nn
from torch_geometric.data import Batch, Data

import dfgnn
import dfgnn.nn.pyg as fused
from dfgnn.capturing import CaptureWarning


def graphs(count, seed=0, low=3, high=20):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in torch.randint(low, high, (count,), generator=generator).tolist():
        edge_index = torch.randint(n, (2, 2 * n), generator=generator)
        found.append(
            Data(
                x=torch.randn(n, 6, generator=generator),
                edge_index=edge_index,
                edge_attr=torch.randn(2 * n, 2, generator=generator),
                y=torch.randint(3, (1,), generator=generator),
                node_y=torch.randint(3, (n,), generator=generator),
            )
        )
    return found


def batches(count, size=8, seed=0):
    """Batches of changing sizes; the last one has only half as many graphs."""
    found = graphs(count * size - size // 2, seed)
    return [Batch.from_data_list(found[k : k + size]) for k in range(0, len(found), size)]


class Gated(fused.ResGatedGraphConv):
    """The layer without edge attributes, because only then it is fused."""

    def forward(self, x, edge_index, edge_attr):
        return super().forward(x, edge_index)


class Net(nn.Module):
    """Convolutions with edge attributes and loops, a norm, and pooling that asks for the largest id."""

    def __init__(self, conv="gat", norm=None, pool=pyg.global_mean_pool, dropout=0.0):
        super().__init__()
        make = {
            "gat": lambda a, b: fused.GATConv(a, b, heads=2, edge_dim=2, dropout=dropout),
            "gatv2": lambda a, b: fused.GATv2Conv(a, b, heads=2, edge_dim=2, dropout=dropout),
            "transformer": lambda a, b: fused.TransformerConv(a, b, heads=2, edge_dim=2, dropout=dropout),
            "gen": lambda a, b: fused.GENConv(a, 2 * b, edge_dim=2, norm="layer"),
            "gated": lambda a, b: fused.ResGatedGraphConv(a, 2 * b, edge_dim=2),
            "gated_mean": lambda a, b: Gated(a, 2 * b, aggr="mean"),
        }[conv]
        self.first, self.second = make(6, 8), make(16, 8)
        self.norm, self.pool, self.dropout = norm or nn.BatchNorm1d(16), pool, dropout
        self.out = nn.Linear(16, 3)

    def forward(self, batch):
        h = self.first(batch.x, batch.edge_index, batch.edge_attr)
        takes_batch = isinstance(
            self.norm, (pyg.GraphNorm, pyg.InstanceNorm, pyg.LayerNorm, pyg.GraphSizeNorm)
        )
        h = self.norm(h, batch.batch) if takes_batch else self.norm(h)
        h = F.dropout(h.relu(), self.dropout, self.training)
        h = self.second(h, batch.edge_index, batch.edge_attr)
        return self.out(h if self.pool is None else self.pool(h, batch.batch))


def graph_loss(model):
    return lambda batch: F.cross_entropy(model(batch), batch.y)


def trained(data, device, make_net, make_loss=graph_loss, epochs=2, captured=True, **options):
    """(losses, the model, the captured step) of training on ``data``; captured=False trains eagerly."""
    torch.manual_seed(0)
    model = make_net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=device == "cuda")
    loss_fn = make_loss(model)
    if captured:
        step = dfgnn.capture(loss_fn, model, optimizer, debug=device == "cpu", **options)
    else:
        step = plain_step(loss_fn, optimizer, device)
    losses = torch.stack([step(batch) for _ in range(epochs) for batch in data]).cpu()
    return losses, model, step


def assert_same_training(data, device, make_net, make_loss=graph_loss, epochs=2, **options):
    """Losses and norms are those of plain training, without a warning; gives the model and the step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        got, model, step = trained(data, device, make_net, make_loss, epochs, **options)
    want, exact, _ = trained(data, device, make_net, make_loss, epochs, captured=False)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert step.replays == len(got) - 1 and step.eager_steps == 1
    for name, value in model.named_buffers():
        # The gradient of a bias before a norm is rounding error alone, which Adam turns into steps: running
        # means differ.
        if "running_var" in name or "tracked" in name:
            torch.testing.assert_close(value, exact.get_buffer(name), rtol=1e-3, atol=1e-4)
    return model, step


def full_graph(device):
    data = Batch.from_data_list(graphs(20)).to(device)
    del data.batch, data.ptr
    data = Data(**data.to_dict())
    data.train_mask = torch.arange(data.num_nodes, device=device) % 3 == 0
    return data
