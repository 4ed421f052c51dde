"""Training on batches of small graphs, which a GraphSet gathers on the device."""

import torch
from harness import Task, capture
from torch import nn


class GraphBatches(Task):
    """``loss_of(batch)`` gives the loss; ``data`` is a GraphSet and ``split`` has the numbers of its graphs.

    ``--capture`` replays steps from CUDA graphs, whatever the sizes of the batches, by ``dfgnn.capture``.
    """

    batch_size, eval_batch_size = 32, 1024

    def __init__(self, args, seed, data, split):
        super().__init__(args, seed)
        self.data, self.split = data, split
        self.steps = -(-len(split["train"]) // self.batch_size)
        self.captured = None

    def epoch(self):
        total = torch.zeros((), device=self.device)
        batches = self.data.batches(self.split["train"], self.batch_size, shuffle=True)
        for _ in range(self.steps):
            with self.stages("batch"):
                batch = next(batches)
            total += self.step(batch)
        return total / self.steps

    def can_capture(self):
        # GradScaler waits for the device, and so do torch_geometric's layers.
        return self.args.amp != "fp16" and self.args.impl == "dfgnn"

    def step(self, batch):
        if not self.args.capture:
            return self.optimize(lambda: self.loss_of(batch))
        if self.captured is None:
            self.captured = capture(self.loss_under_amp, self.model, self.optimizer)
        return self.captured(batch)

    def loss_under_amp(self, batch):
        with self.autocast():
            return self.loss_of(batch)

    def outputs(self, name: str):
        """The batches of a part of the data with the model's outputs for them."""
        for batch in self.data.batches(self.split[name], self.eval_batch_size):
            with self.autocast():
                yield batch, self.model(batch).float()


class UnitVectors(nn.Module):
    """Integer features, each below one of ``sizes``, as unit vectors side by side: ``[N, features]`` ->
    ``[N, sum(sizes)]``."""

    def __init__(self, sizes):
        super().__init__()
        self.size = sum(sizes)
        self.register_buffer("first", torch.tensor([0, *sizes]).cumsum(0)[:-1], persistent=False)

    def forward(self, x):
        return torch.zeros(len(x), self.size, device=x.device).scatter_(1, x + self.first, 1.0)


class Embeddings(nn.Module):
    """The sum of an embedding for each of several integer features; ``[N, features]`` -> ``[N, width]``.

    It multiplies by unit vectors, whose gradient is a product, too; a look-up's would sort indices on a GPU.
    """

    def __init__(self, sizes, width: int):
        super().__init__()
        self.units, self.table = UnitVectors(sizes), nn.Parameter(torch.empty(sum(sizes), width))
        with torch.no_grad():
            for part in self.table.split(list(sizes)):
                nn.init.xavier_uniform_(part)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.units(x) @ self.table


def mean_pool(x: torch.Tensor, batch) -> torch.Tensor:
    """[G, F], the mean over each graph's nodes, by a matrix product rather than atomics, so that it is
    deterministic."""
    graphs = torch.arange(len(batch.y), device=x.device)
    member = (graphs[:, None] == batch.batch).to(x.dtype)
    return member @ x / member.sum(1, keepdim=True).clamp(min=1)
