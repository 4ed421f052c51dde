"""The examples run, their data set has the published statistics, and their last lines are as promised."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import exhaustive

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("DFGNN_DATA", "no folder"))


@pytest.fixture
def run_example(dfgnn_run):
    """Gives what a program of examples/ prints, in a process that has imported the libraries."""

    def run(name, *arguments):
        done = dfgnn_run.program(ROOT / "examples" / name, *arguments, path=[ROOT / "examples"])
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import cluster

    return cluster


def test_cluster_follows_the_recipe(cluster):
    generator = np.random.default_rng(0)
    edges, pairs, sizes = np.zeros(2), np.zeros(2), []
    for _ in range(150):
        src, dst, features, labels = cluster.make_graph(generator)
        counts = np.bincount(labels, minlength=6)
        sizes.extend(counts)
        for community in range(6):
            marked = np.flatnonzero(features == community + 1)
            assert len(marked) == 1 and labels[marked[0]] == community
        assert np.count_nonzero(features) == 6
        adjacency = np.zeros((len(labels), len(labels)), dtype=bool)
        adjacency[src, dst] = True
        assert adjacency.sum() == len(src) and not adjacency.diagonal().any()
        assert (adjacency == adjacency.T).all()
        within = labels[:, None] == labels[None, :]
        edges += adjacency[within].sum(), adjacency[~within].sum()
        pairs += within.sum() - len(labels), (~within).sum()
    assert np.abs(edges / pairs - [0.55, 0.25]).max() < 0.01
    assert min(sizes) == 5 and max(sizes) == 34 and abs(np.mean(sizes) - 19.5) < 1
    # Nodes are in random order: consecutive ones share a community about as often as any two nodes do.
    assert np.mean(labels[1:] == labels[:-1]) < 0.5


def test_cluster_batches(cluster):
    batches = cluster.make_batches(5, batch_size=2, seed=3)
    assert len(batches) == 3
    for graph, features, labels in batches:
        assert graph.num_src == graph.num_dst == len(features) == len(labels)
    again = cluster.make_batches(5, batch_size=2, seed=3)
    assert all(torch.equal(a[2], b[2]) for a, b in zip(batches, again))


@exhaustive
def test_demo_ends_with_a_table_and_a_picture(run_example):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    small = ["--epochs", 1, "--graphs", 8, "--batch-size", 4, "--layers", 2, "--device", "cpu"]
    lines = run_example("demo_cluster.py", *small).splitlines()
    header = next(k for k, line in enumerate(lines) if line.startswith("model"))
    rows = [re.split(r"\s{2,}", line) for line in lines[header + 1 : header + 5]]
    assert [row[:2] for row in rows] == [
        ["Graph Transformer", "dfgnn"],
        ["Graph Transformer", "unfused PyTorch"],
        ["GAT", "dfgnn"],
        ["GAT", "unfused PyTorch"],
    ]
    assert all(re.fullmatch(r"[\d.]+ %", row[2]) and row[4].endswith("MiB") for row in rows)
    said = [re.fullmatch(r"  ([\d.]+) times as fast, [\d.]+ times less memory", line) for line in lines]
    shown = [re.fullmatch(r"  (dfgnn|unfused PyTorch) +(█+) \d+ ms", line) for line in lines]
    assert len(list(filter(None, said))) == 2 and said[-1]
    assert [match[1] for match in filter(None, shown)] == ["dfgnn", "unfused PyTorch"] * 2
    assert max(len(match[2]) for match in filter(None, shown)) == 40  # the longest bar
    # Both ways to compute the same parameters' attention agree on nearly every node.
    for fused, unfused in (rows[:2], rows[2:]):
        assert abs(float(fused[2].split()[0]) - float(unfused[2].split()[0])) < 1.0


@exhaustive
def test_planetoid_prints_the_accuracy_last(run_example):
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    if not (DATA / "planetoid" / "Cora" / "raw").is_dir():
        pytest.skip("set DFGNN_DATA to a folder with planetoid/Cora (docs/benchmarks.md)")
    processed = DATA / "planetoid" / "Cora" / "processed"
    before = processed.exists()
    arguments = ["--dataset", "Cora", "--model", "gt", "--root", DATA / "planetoid", "--device", "cpu"]
    last = run_example("train_planetoid.py", *arguments, "--seeds", 1, "--epochs", 30).splitlines()[-1]
    match = re.fullmatch(r"test accuracy: (\d+\.\d\d) ± (\d+\.\d\d) %", last)
    assert match and float(match[1]) > 70
    assert processed.exists() == before, "the loader's files were left beside raw/"


@exhaustive
def test_forces_have_the_losses_of_plain_operations(run_example, tmp_path):
    """The potential learns, and every implementation takes the same steps."""
    size = [
        "--atoms",
        "27",
        "--frames",
        "12",
        "--test-frames",
        "2",
        "--batch-size",
        "4",
        "--epochs",
        "1",
        "--quiet",
    ]
    firsts = []
    for impl in ("dfgnn", "plain", "pyg"):
        picture = tmp_path / f"{impl}.png"
        out = run_example("train_forces.py", "--impl", impl, *size, "--picture", picture)
        firsts.append(re.search(r"first steps ([\d., ]+);", out)[1])
        assert picture.stat().st_size > 1000
    losses = np.array([[float(x) for x in text.split(", ")] for text in firsts])
    assert losses.shape == (3, 3) and np.abs(losses - losses[0]).max() <= 2e-4


def test_the_tutorial(monkeypatch, tmp_path, capsys):
    """All cells of the notebook, in their order; none has outputs, which would grow old."""
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    raw = DATA / "planetoid" / "Cora" / "raw"
    if not raw.is_dir():
        pytest.skip("set DFGNN_DATA to a folder with planetoid/Cora (docs/benchmarks.md)")
    (tmp_path / "Cora").mkdir()
    (tmp_path / "Cora" / "raw").symlink_to(raw)
    monkeypatch.setenv("PLANETOID", str(tmp_path))
    cells = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    names = {}
    for cell in code:
        exec(compile("".join(cell["source"]), f"tutorial.ipynb, {cell['id']}", "exec"), names)
    assert names["report"].replaced
    assert all(accuracy > 75 for accuracy, _ in names["results"].values())
    assert "dfgnn" in capsys.readouterr().out.splitlines()[-1]
