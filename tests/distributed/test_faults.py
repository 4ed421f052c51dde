"""Processes that die, fail, or stop, and those that wait for them."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import both, join, new_store, start

from dfgnn import functional
from dfgnn.distributed import DeadRankError, DistributedGraph, partition, watch

SIZE, VICTIM = 3, 1


def _train(rank, size, port, what, pipe):
    join(rank, size, port)
    try:
        with watch(timeout=2, interval=0.2):
            _, part = both(None, "random")
            x = torch.randn(part.num_src, 2, 8, requires_grad=True)
            for step in range(1000):
                functional.dot_attention(part, x, x, x).sum().backward()
                if rank == VICTIM and step == 3:
                    if what == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if what == "failed":
                        raise KeyError("what it lacks")
                    if what == "stopped":
                        os.kill(os.getpid(), signal.SIGSTOP)
                if rank != VICTIM and step == 3 and what == "out of reach":
                    time.sleep(1000)  # as in a kernel of NCCL, which nothing raises in
                if rank == VICTIM and step == 3 and what == "out of reach":
                    os._exit(7)
    except BaseException as error:
        pipe.send((type(error), str(error)))
        raise SystemExit(3) from None


@pytest.mark.parametrize("what", ["killed", "failed", "stopped", "out of reach"])
def test_a_dead_rank_is_named(what):
    import multiprocessing as mp

    store = new_store()
    ours, theirs = zip(*(mp.Pipe(duplex=False) for _ in range(SIZE)))
    begun = time.monotonic()
    processes = [start(_train, rank, SIZE, store.port, what, theirs[rank]) for rank in range(SIZE)]
    try:
        for rank in set(range(SIZE)) - {VICTIM}:
            processes[rank].join(60)
            assert processes[rank].exitcode is not None, f"rank {rank} waits"
            if what in ("out of reach", "stopped"):  # they wait where nothing can be raised
                assert processes[rank].exitcode == 1
                continue
            assert processes[rank].exitcode == 3
            kind, text = ours[rank].recv()
            assert kind is DeadRankError, text
            assert f"rank {VICTIM} (" in text
            lacks = "failed with KeyError: 'what it lacks'"
            assert (lacks if what == "failed" else "no sign of life for 2 s") in text
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - begun < 60


def test_watch_alone_and_its_arguments():
    with watch():
        pass
    with pytest.raises(ValueError, match="timeout: expected more than twice interval=1"), watch(timeout=2.0):
        pass


def _come_late(_):
    """One rank never comes to the agreement: the others say who."""
    from datetime import timedelta

    from dfgnn.distributed import _agree

    _agree.TIMEOUT, kept = timedelta(seconds=1), _agree.TIMEOUT
    rank, group = dist.get_rank(), dist.group.WORLD
    try:
        if rank != 2:
            with pytest.raises(RuntimeError, match="rank 2 did not come within 1 s"):
                _agree.gather(rank, group)
    finally:
        _agree.TIMEOUT = kept
    dist.barrier(group)
    if rank == 2:  # in step again
        assert _agree.gather(rank, group) == list(range(dist.get_world_size(group)))


def test_a_rank_that_does_not_come(four):
    four.run(_come_late)


# ---- parts on disk ---------------------------------------------------------------------------------------


def _from_files(group, folder, edge_index, features, weight):
    whole = DistributedGraph.from_edge_index(torch.from_numpy(edge_index), len(features), group=group)
    part = DistributedGraph.from_partition(folder, group)
    rank = dist.get_rank(group)
    assert torch.equal(part.edge_ids, whole.edge_ids) and torch.equal(part.dst_ids, whole.dst_ids)
    x = partition.load_nodes(folder, "x", rank)
    assert torch.equal(x, part.scatter(torch.from_numpy(features)))
    x, weight = x.view(-1, 2, 4), part.scatter(weight, "edges")
    out = [functional.dot_attention(g, x, x, x, edge_weight=weight) for g in (part, whole)]
    assert torch.equal(*out)


def test_parts_from_files(four, tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    edge_index = generator.integers(0, 90, (2, 1000)).astype(np.int32)
    features = generator.standard_normal((90, 8)).astype(np.float32)
    np.save(tmp_path / "edges.npy", edge_index)
    np.save(tmp_path / "features.npy", features)
    program = [sys.executable, "-m", "dfgnn.distributed.partition", "edges.npy", "parts", "--parts", "3"]
    program += ["--num-nodes", "90", "--nodes", "x=features.npy"]
    found = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert '"edges_between_parts": 0.6' in found.stdout
    weight = torch.randn(1000)
    folder = tmp_path / "parts"
    four.run(_from_files, folder, edge_index, features, weight, ranks=(0, 2, 3))

    monkeypatch.setattr(partition, "_PIECE", 64)  # many pieces give the same parts
    report = partition.write(edge_index, tmp_path / "again", 3, 90)
    for number in range(3):
        a, b = (partition.load(f, number, 3) for f in (folder, tmp_path / "again"))
        assert a.fingerprint == b.fingerprint
        assert torch.equal(a.src, b.src) and torch.equal(a.edge_ids, b.edge_ids)
        assert report["parts"][number]["nodes"] == len(a.dst_nodes.ids)

    partition.write(edge_index[:, ::-1].copy(), tmp_path / "other", 3, 90)
    (tmp_path / "other" / "part-1.pt").rename(folder / "part-1.pt")
    four.run(_mixed_files, folder, ranks=(0, 2, 3))


def _mixed_files(group, folder):
    with pytest.raises(ValueError, match="fingerprint: expected the same on all ranks"):
        DistributedGraph.from_partition(folder, group)


def test_wrong_files(tmp_path):
    edge_index = torch.randint(10, (2, 50))
    partition.write(edge_index, tmp_path / "two", 2, 10, torch.arange(10) % 2)
    with pytest.raises(ValueError, match="expected one of 1 parts, as there are processes, got one of 2"):
        DistributedGraph.from_partition(tmp_path / "two")
    with pytest.raises(FileNotFoundError, match=r"expected a file .*part-0\.pt"):
        DistributedGraph.from_partition(tmp_path / "none")
    with pytest.raises(FileExistsError, match="expected an empty one"):
        partition.write(edge_index, tmp_path / "two", 2, 10)
    with pytest.raises(ValueError, match=r"expected ids in 0 .. 8, got 0 .. 9"):
        partition.write(torch.tensor([[0], [9]]), tmp_path / "small", 2, 9)
    with pytest.raises(ValueError, match=r"expected shape \[2, E\]"):
        partition.write(edge_index.T, tmp_path / "turned", 2, 10)
    with pytest.raises(ValueError, match="expected 10 rows of 'x', got 9"):
        partition.write(edge_index, tmp_path / "x", 2, 10, nodes={"x": np.zeros(9)})
    partition.write(edge_index[:, :0], tmp_path / "empty", 1, 10)
    assert DistributedGraph.from_partition(tmp_path / "empty").total == (10, 10, 0)
