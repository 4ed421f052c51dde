"""The example: that of a whole graph and that of batches, on several processes, stopped and gone on with."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dfgnn.distributed import average_gradients, partition

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = "--nodes 300 --width 16"


def _losses(group, runs):
    """The losses that ``main`` of the example returns for each of these argument strings."""
    sys.path.insert(0, str(EXAMPLES))
    import train_distributed

    return [train_distributed.main(line.split()) for line in runs]


@pytest.mark.parametrize("shard", ["", "--shard"])
def test_resume_is_an_uninterrupted_run(four, tmp_path, shard):
    """Dropout is on: a checkpoint holds the states of the random generators, too."""
    stopped = f"graph {SMALL} {shard} --checkpoint {tmp_path}"
    runs = f"graph {SMALL} {shard} --epochs 3", f"{stopped} --epochs 2", f"{stopped} --epochs 3 --resume"
    for whole, first, resumed in four.run(_losses, runs):
        assert whole == resumed != first
        assert torch.tensor([whole, first]).isfinite().all()


def test_processes_train_what_one_trains(four, tmp_path, monkeypatch):
    """Without dropout the loss depends neither on the number of processes that share the graph nor on whether
    its parts come from files."""
    generator = np.random.default_rng(0)
    np.save(tmp_path / "edges.npy", generator.integers(0, 200, (2, 2000)))
    nodes = {
        "x": generator.standard_normal((200, 8)).astype(np.float32),
        "y": generator.integers(0, 4, 200),
        "train": generator.random(200) < 0.5,
    }
    edges = np.load(tmp_path / "edges.npy")
    for count in (1, 4):
        partition.write(edges, tmp_path / str(count), count, 200, nodes=nodes)
    line = "graph --width 16 --epochs 3 --dropout 0 --parts {}".format
    found = four.run(_losses, [line(tmp_path / "4")])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (alone,) = _losses(None, [line(tmp_path / "1")])
    for (loss,) in found:
        assert loss == pytest.approx(alone, rel=1e-5)


def test_batches(four):
    losses = four.run(_losses, ["batches --nodes 4000 --batch 1 --epochs 2 --width 16 --lr 0.01"])
    # All processes have the same loss, and it is near that of guessing one of six classes, log 6 = 1.79.
    assert len({loss for (loss,) in losses}) == 1 and losses[0][0] < 1.9


def _averaged(group):
    """Each rank's own gradients, and those that the example averages; rank 0 alone uses the last layer."""
    rank = torch.distributed.get_rank(group)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).double(), nn.Linear(3, 1), nn.Linear(2, 2))
    net[2].weight.requires_grad_(False)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(rank))
    hidden = net[1](net[0](x).double()).float()
    loss = net[2](hidden).square().sum()
    if rank == 0:
        loss = loss + net[3].weight.sum()
    loss.backward()
    own = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    average_gradients(net, group)
    return own, [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def test_averaged_gradients(four):
    found = four.run(_averaged)
    for k, first in enumerate(found[0][1]):
        own = [grads[k] for grads, _ in found]
        if first is None:  # a parameter that requires no gradient
            assert all(grad is None for grad in own)
            continue
        expected = sum(grad for grad in own if grad is not None) / 4
        for _, means in found:
            torch.testing.assert_close(means[k], expected if torch.is_tensor(expected) else first * 0)


def test_averaged_gradients_alone():
    net = nn.Linear(2, 1)
    net(torch.ones(3, 2)).sum().backward()
    before = net.weight.grad.clone()
    average_gradients(net)
    assert torch.equal(net.weight.grad, before)
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got Tensor"):
        average_gradients(torch.ones(2))
