"""Processes that die, fail, or stop, and those that wait for them."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from covering import some
from ranks import both, join, new_store, start

from dfgnn import functional
from dfgnn.distributed import DeadRankError, DistributedGraph, partition, watch
from dfgnn.distributed._watch import default_store  # the store to which a process writes that it has ended

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


@some(["killed", "failed", "out of reach"], ["killed", "failed", "stopped", "out of reach"], "what")
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
            if what in ("out of reach", "stopped"):  # survivors wait where nothing can raise: they are ended
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
    if rank == 2:  # after the failed agreement the ranks can agree again
        assert _agree.gather(rank, group) == list(range(dist.get_world_size(group)))


def test_a_rank_that_does_not_come(four):
    four.run(_come_late)


class _Runs:
    """An object that runs code when it is unpickled, as an attacker could put it into the store."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def _strangers_answer(group, path):
    """Rank 2's answer is such a pickle: no rank may unpickle it, and all ranks name rank 2 in their error."""
    from dfgnn.distributed import _agree

    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    for text in (pickle.dumps(_Runs(path)), b"[" * 200_000, b'{"value"', b"\xff", b"[1]", b'{"worth": 1}'):
        if rank == 2:
            name = dist.group.WORLD.group_name
            store.set(_agree._key(name, _agree._calls[name], rank), text)
            _agree._calls[name] += 1
        else:
            with pytest.raises(RuntimeError, match="rank 2: expected JSON in the store, got b"):
                _agree.gather(rank, dist.group.WORLD)
        dist.barrier()
    assert _agree.gather([rank, 2**70, "é", None, 0.1], dist.group.WORLD)[3] == [3, 2**70, "é", None, 0.1]


def test_what_is_in_the_store_is_data(four, tmp_path):
    four.run(_strangers_answer, str(tmp_path / "ran"))
    assert list(tmp_path.iterdir()) == []


def _fail_alone(group, folder):
    """When one rank cannot build its part, the others raise at once, and all ranks are in step afterwards."""
    begun, rank = time.monotonic(), dist.get_rank(group)
    edge_index, bad = torch.randint(9, (2, 50)), torch.full((2, 50), 9)
    others = pytest.raises(
        RuntimeError, match="rank 1 failed: ValueError: DistributedGraph.from_edge_index: "
    )
    for options in ({"edge_index": bad}, {"wire": torch.float64}, {"partition": torch.full((9,), 8)}):
        options = {"edge_index": edge_index, "num_nodes": 9, "group": group, **options}
        with pytest.raises(ValueError, match="expected") if rank == 1 else others:
            DistributedGraph.from_edge_index(**options if rank == 1 else {**options, "edge_index": edge_index,
                                             "wire": None, "partition": "contiguous"})  # fmt: skip
    missing = pytest.raises(RuntimeError, match="rank 1 failed: FileNotFoundError: from_partition: folder")
    with pytest.raises(FileNotFoundError) if rank == 1 else missing:
        DistributedGraph.from_partition(f"{folder}/none" if rank == 1 else folder, group)
    assert DistributedGraph.from_partition(folder, group).total == (9, 9, 50)
    assert time.monotonic() - begun < 20


def test_one_rank_fails(four, tmp_path):
    partition.write(torch.randint(9, (2, 50)), tmp_path, 4, 9)
    four.run(_fail_alone, str(tmp_path))


def _ends(rank, size, port, pipe):
    """Rank 1 takes part in one call and ends. The other ranks learn of it also without a watch; rank 2 only
    after rank 0 has ended because of it, and must still name rank 1."""
    join(rank, size, port)
    edge_index = torch.randint(9, (2, 50), generator=torch.Generator().manual_seed(0))
    part = DistributedGraph.from_edge_index(edge_index, 9)
    if rank == 1:
        return
    if rank == 2:
        default_store().wait(["dfgnn/ended/0"])
    begun, x = time.monotonic(), torch.randn(part.num_src, 2, 8)
    for call in (lambda: DistributedGraph.from_edge_index(edge_index, 9), lambda: part.gather(x)):
        try:
            call()
        except RuntimeError as error:
            pipe.send((type(error), str(error), time.monotonic() - begun))


PROGRAM = """
import sys, torch, torch.distributed as dist
from dfgnn.distributed import DistributedGraph

dist.init_process_group("gloo")
edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
try:
    DistributedGraph.from_edge_index(edge_index, 3)
    if dist.get_rank() == 1 and sys.argv[1] != "ends":
        raise KeyError("its data")
    if sys.argv[1] != "ends":
        DistributedGraph.from_edge_index(edge_index, 3)
except KeyError:
    if sys.argv[1] == "fails":
        raise
    dist.destroy_process_group()
    sys.exit(3)
finally:
    if dist.is_initialized():
        dist.destroy_process_group()
"""


def _programs(how):
    """Two processes that run PROGRAM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [
        subprocess.Popen([sys.executable, "-c", PROGRAM, how], env={**os.environ, **names, "RANK": str(rank)},
                         stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]  # fmt: skip


def test_a_rank_that_ends_is_named():
    """Rank 2, too, which calls only after rank 0 has ended because of rank 1."""
    import multiprocessing as mp

    store = new_store()
    ours, theirs = zip(*(mp.Pipe(duplex=False) for _ in range(SIZE)))
    processes = [start(_ends, rank, SIZE, store.port, theirs[rank]) for rank in range(SIZE)]
    try:
        for rank in (0, 2):
            for _ in range(2):
                assert ours[rank].poll(120)
                kind, text, seconds = ours[rank].recv()
                assert kind is DeadRankError and "rank 1 (" in text and "has ended" in text, text
                assert seconds < 15
    finally:
        for process in processes:
            process.kill()


@some(["fails"], ["fails", "catches", "ends"], "how")
def test_a_program_that_ends_is_named(how):
    """A program that ends early is named also if it ended with an error or had caught one. Programs that all
    end together say nothing."""
    programs = _programs(how)
    try:
        said = [program.communicate(timeout=120)[1] for program in programs]
    finally:
        for process in programs:
            process.kill()
    if how == "ends":
        assert [p.returncode for p in programs] == [0, 0] and "c10d" not in said[0] + said[1], said
        return
    ended = "has ended: KeyError: 'its data'\n" if how == "fails" else "has ended\n"
    assert "DeadRankError: rank 1 (" in said[0] and ended in said[0], said[0]
    if how == "catches":
        assert programs[1].returncode == 3 and "KeyError" not in said[1], said[1]


# ---- parts on disk ---------------------------------------------------------------------------------------


def _from_files(group, folder, edge_index, features, weight):
    whole = DistributedGraph.from_edge_index(torch.from_numpy(edge_index), len(features), group=group)
    part = DistributedGraph.from_partition(folder, group)
    rank = dist.get_rank(group)
    assert torch.equal(part.edge_ids, whole.edge_ids) and torch.equal(part.dst_ids, whole.dst_ids)
    x = partition.load_nodes(folder, "x", rank)
    assert torch.equal(x, part.scatter(torch.from_numpy(features)))
    x, weight = x.view(-1, 2, 4), part.scatter(weight, "edges")
    out = [functional.dot_attention(g, x, x, x, weight=weight) for g in (part, whole)]
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

    monkeypatch.setattr(partition, "_PIECE", 64)  # edges are read 64 at a time; the parts stay the same
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


def test_wrong_files(tmp_path, capsys):
    edge_index = torch.randint(10, (2, 50))
    partition.write(edge_index, tmp_path / "two", 2, 10, torch.arange(10) % 2)
    with pytest.raises(ValueError, match="expected a graph in 1 parts, one per process, got one in 2"):
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
    np.save(tmp_path / "words.npy", np.array([["a"], ["b"]]))
    np.save(tmp_path / "floats.npy", np.zeros((2, 3)))
    (tmp_path / "text.npy").write_text("0 1")
    numbers = "EDGES.npy: expected an array of numbers"
    for file, words in (
        ("words", numbers),
        ("text", numbers),
        ("floats", "edge_index: expected dtype torch.int32"),
    ):
        with pytest.raises(SystemExit, match="2"):
            partition.main([str(tmp_path / f"{file}.npy"), str(tmp_path / "x"), "--parts", "2"])
        assert words in capsys.readouterr().err
    assert not any((tmp_path / name).exists() for name in ("small", "turned", "x"))  # nothing was written
    partition.write(edge_index[:, :0], tmp_path / "empty", 1, 10)
    assert DistributedGraph.from_partition(tmp_path / "empty").total == (10, 10, 0)


CHANGES = {
    "no dictionary": (lambda x: [x], "cannot be read: it holds a list"),
    "no version": (lambda x: x.pop("version"), "cannot be read: it holds a dict"),
    "version": (lambda x: x.update(version=2), "expected version 1 of the format, got 2"),
    "without src": (lambda x: x.pop("src"), "src: expected a Tensor, got nothing"),
    "ids in a list": (lambda x: x.update(ids=[0, 1]), "ids: expected a Tensor, got list"),
    "number": (lambda x: x.update(number=1), "number: expected 0, got 1"),
    "num_edges": (lambda x: x.update(num_edges=2.5), "num_edges: expected a int, got float"),
    "fewer edges": (lambda x: x.update(num_edges=3), "src: expected at most num_edges=3"),
    "offsets fall": (lambda x: x.update(offsets=[0, 11, 10]), "offsets: expected integers that rise from 0"),
    "offsets from 1": (lambda x: x.update(offsets=[1, 5, 10]), "offsets: expected integers that rise from 0"),
    "offsets of text": (lambda x: x.update(offsets=[0, "5", 10]), "offsets: expected integers that rise"),
    "more parts": (lambda x: x.update(offsets=[0, 5, 6, 10]), "expected a graph in 2 parts, .* got one in 3"),
    "other sizes": (lambda x: x.update(offsets=[0, 4, 10]), r"ids: expected int64 \[4\], got .* \[5\]"),
    "short dst": (lambda x: x.update(dst=x["dst"][1:]), "dst: expected int64"),
    "short edge_ids": (lambda x: x.update(edge_ids=x["edge_ids"][1:]), "edge_ids: expected int64"),
    "floats": (lambda x: x.update(src=x["src"].double()), "src: expected int64"),
    "a matrix": (lambda x: x.update(src=x["src"][None]), "src: expected int64"),
    "a scalar": (lambda x: x.update(src=torch.tensor(1)), "src: expected int64"),
    "sparse": (lambda x: x.update(src=x["src"].to_sparse()), "src: expected int64"),
    "src too large": (lambda x: x["src"][3:4].fill_(10), r"src: expected numbers in 0 \.\. 9, got . \.\. 10"),
    "src negative": (lambda x: x["src"][3:4].fill_(-1), r"src: expected numbers in 0 \.\. 9, got -1"),
    "dst of another": (lambda x: x["dst"][3:4].fill_(5), r"dst: expected numbers in 0 \.\. 4, got . \.\. 5"),
    "ids too large": (lambda x: x["ids"][4:].fill_(2**40), "ids: expected numbers in 0"),
    "ids twice": (lambda x: x["ids"][:2].fill_(0), "ids: expected numbers that rise"),
    "edge_ids twice": (lambda x: x["edge_ids"][:2].fill_(0), "edge_ids: expected numbers that rise"),
    "edge_ids too large": (lambda x: x["edge_ids"][-1:].fill_(50), "edge_ids: expected numbers in 0"),
    "lost edges": (
        lambda x: x.update({name: x[name][1:] for name in ("src", "dst", "edge_ids")}),
        "parts of 50 edges together",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def in_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    edge_index = torch.randint(10, (2, 50), generator=torch.Generator().manual_seed(1))
    partition.write(edge_index, folder, 2, 10, torch.arange(10) % 2, {"x": np.zeros((10, 3))})
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_a_part_with_other_contents(name, in_two, tmp_path):
    change, message = CHANGES[name]
    found = torch.load(in_two / "part-0.pt")
    changed = change(found)
    torch.save(changed if isinstance(changed, list) else found, tmp_path / "part-0.pt")
    if name == "lost edges":  # the file is consistent in itself; only all ranks together see the loss
        found.update(offsets=[0, 10], ids=torch.arange(10))
        torch.save(found, tmp_path / "part-0.pt")
        with pytest.raises(ValueError, match=message):
            DistributedGraph.from_partition(tmp_path)
        return
    with pytest.raises(ValueError, match=r"from_partition: .*part-0\.pt: .*" + message):
        partition.load(tmp_path, 0, 2)


def test_every_damaged_byte_is_noticed(in_two, tmp_path):
    """A file with bytes changed or cut off anywhere gives a clear error, or exactly what was written."""
    good, expected = (in_two / "part-0.pt").read_bytes(), partition.load(in_two, 0, 2)
    path = tmp_path / "part-0.pt"
    for place in range(0, len(good), 41):
        other = bytes([good[place] ^ 0x11])
        for text in (good[:place] + other + good[place + 1 :], good[:place]):
            path.write_bytes(text)
            try:
                found = partition.load(tmp_path, 0, 2)
            except ValueError as error:
                assert str(path) in str(error)
                continue
            assert len(text) == len(good)  # a truncated file is never accepted
            assert all(
                torch.equal(getattr(found, x), getattr(expected, x)) for x in ("src", "dst", "edge_ids")
            )
            assert torch.equal(found.dst_nodes.ids, expected.dst_nodes.ids) and found[6:] == expected[6:]


def test_files_that_are_no_parts(in_two, tmp_path):
    path = tmp_path / "part-0.pt"
    path.write_text("no file of parts")
    with pytest.raises(ValueError, match="expected a file of python -m dfgnn.distributed.partition"):
        partition.load(tmp_path, 0, 2)
    path.write_bytes(pickle.dumps(_Runs(str(tmp_path / "ran"))))
    with pytest.raises(ValueError, match="expected a file of python -m dfgnn.distributed.partition"):
        partition.load(tmp_path, 0, 2)
    torch.save(_Runs(str(tmp_path / "ran")), path)
    with pytest.raises(ValueError, match="expected a file of python -m dfgnn.distributed.partition"):
        partition.load(tmp_path, 0, 2)
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()
    path.mkdir()
    with pytest.raises(FileNotFoundError, match="expected a file"):
        partition.load(tmp_path, 0, 2)

    assert partition.load_nodes(in_two, "x", 1).shape == (5, 3)
    for name, array in (("cut", None), ("other", np.zeros((4, 3))), ("text", np.array(["a"] * 5))):
        if array is None:
            (in_two / "cut-0.npy").write_bytes((in_two / "x-0.npy").read_bytes()[:-5])
        else:
            np.save(in_two / f"{name}-0.npy", array)
        with pytest.raises(ValueError, match=rf"load_nodes: .*{name}-0\.npy: expected"):
            partition.load_nodes(in_two, name, 0)
