"""The training scripts of examples/: each trains for a few steps, resumes to the same bits, and gives the
same with either library's layers. Data sets are small ones in the published formats, made here."""

import gzip
import importlib
import json
import sys
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from covering import exhaustive

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--epochs", 4]
# Name of a run -> (script, its arguments).
RUNS = {
    "nodes": ("train_nodes", "--dataset", "minesweeper", "--layers", 3),
    "nodes-gt": ("train_nodes", "--dataset", "coauthor-cs", "--model", "gt", "--hidden", 16),
    "molhiv": ("train_ogbg_molhiv", "--width", 16, "--batch-size", 8),
    "molhiv-gatv2": ("train_ogbg_molhiv", "--width", 16, "--model", "gatv2", "--bonds", "--amp", "bf16"),
    "molhiv-gt": ("train_ogbg_molhiv", "--width", 16, "--model", "gt"),
    "sbm": ("train_sbm", "--layers", 2, "--width", 16, "--graphs", "12,4,4", "--batch-size", 4),
    "sbm-gat": ("train_sbm", "--dataset", "PATTERN", "--model", "gat", "--layers", 2, "--width", 16,
                "--graphs", "8,4,4"),
    "sbm-exphormer": ("train_sbm", "--model", "exphormer", "--layers", 2, "--width", 16, "--graphs", "12,4,4",
                      "--batch-size", 4),
    "ddi": ("train_ogbl_ddi", "--width", 8, "--batch-size", 64),
    "dblp": ("train_dblp",),
    "dblp-rgat": ("train_dblp", "--model", "rgat"),
    "arxiv": ("train_ogbn", "--width", 16),
    "arxiv-sampled": ("train_ogbn", "--width", 16, "--sampled", "--batch-size", 16, "--fanouts", "2,3,4"),
}  # fmt: skip


def each(*names, more=()):
    """Parametrizes over runs; ``more`` where tests are exhaustive."""
    rows = [*names, *(pytest.param(name, marks=exhaustive) for name in more)]
    return pytest.mark.parametrize("name", rows)


FULL_GRAPH = ["nodes", "nodes-gt", "dblp", "dblp-rgat", "arxiv"]


def write_csv(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        np.savetxt(file, np.asarray(rows), fmt="%d", delimiter=",")


def as_csr(name: str, dense) -> dict:
    rows, columns = np.nonzero(dense)
    indptr = np.searchsorted(rows, np.arange(len(dense) + 1)).astype(np.int32)
    return {
        f"{name}_indptr": indptr,
        f"{name}_indices": columns.astype(np.int16),
        f"{name}_data": dense[rows, columns].astype(np.uint8),
        f"{name}_shape": np.array(dense.shape),
    }


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with the data sets."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (root / "nodes").mkdir()
    n = 80
    for name, classes in (("minesweeper", 2), ("coauthor-cs", 4)):
        x, y = rng.integers(3, size=(n, 7)), rng.integers(classes, size=n)
        x[np.arange(n), y] += 3
        edges = rng.integers(n, size=(2, 300)).astype(np.int32)
        parts = rng.permutation(n)
        if name == "minesweeper":
            masks = np.zeros((3, 10, n), dtype=bool)
            for k in range(10):
                for mask, part in zip(masks, np.split(rng.permutation(n), [40, 60])):
                    mask[k, part] = True
            split = dict(zip(("train_masks", "val_masks", "test_masks"), masks))
        else:
            split = dict(zip(("train", "valid", "test"), np.split(parts, [40, 60])))
        np.savez(root / "nodes" / f"{name}.npz", edges=edges, y=y.astype(np.int8), **as_csr("x", x), **split)
    pairs = {"pa": (30, 20), "pc": (30, 4), "pt": (30, 15)}  # 30 papers
    pairs = {k: np.stack([rng.integers(size, size=60) for size in sizes]) for k, sizes in pairs.items()}
    pairs["pc"][1, :4] = np.arange(4)
    np.savez(
        root / "nodes" / "dblp.npz", **as_csr("a", rng.integers(2, size=(20, 6))),
        **as_csr("p", rng.integers(2, size=(30, 9))), t=rng.normal(size=(15, 5)).astype(np.float16), **pairs,
        y=(np.arange(20) % 4).astype(np.int8), train=np.arange(8), val=np.arange(8, 14),
        test=np.arange(14, 20),
    )  # fmt: skip

    folder = root / "ogb" / "ogbg_molhiv"
    nodes, edges = rng.integers(3, 9, size=60), rng.integers(2, 9, size=60)
    write_csv(folder / "raw" / "num-node-list.csv.gz", nodes)
    write_csv(folder / "raw" / "num-edge-list.csv.gz", edges)
    ends = [rng.integers(k, size=(m, 2)) for k, m in zip(nodes, edges)]
    write_csv(folder / "raw" / "edge.csv.gz", np.concatenate(ends))
    write_csv(folder / "raw" / "node-feat.csv.gz", rng.integers(2, size=(nodes.sum(), 9)))
    write_csv(folder / "raw" / "edge-feat.csv.gz", rng.integers(2, size=(edges.sum(), 3)))
    write_csv(folder / "raw" / "graph-label.csv.gz", np.arange(60) % 2)
    for name, part in zip(("train", "valid", "test"), np.split(np.arange(60), [40, 50])):
        write_csv(folder / "split" / "scaffold" / f"{name}.csv.gz", part)

    folder = root / "ogb" / "ogbn_arxiv"
    write_csv(folder / "raw" / "edge.csv.gz", rng.integers(120, size=(500, 2)))
    write_csv(folder / "raw" / "node-label.csv.gz", rng.integers(5, size=120))
    for name, part in zip(("train", "valid", "test"), np.split(np.arange(120), [70, 90])):
        write_csv(folder / "split" / "time" / f"{name}.csv.gz", part)

    folder = root / "ogb" / "ogbl_ddi"
    write_csv(folder / "raw" / "edge.csv.gz", rng.integers(40, size=(200, 2)))
    (folder / "split" / "target").mkdir(parents=True)
    for name in ("valid", "test"):
        found = {k: torch.from_numpy(rng.integers(40, size=(30, 2))) for k in ("edge", "edge_neg")}
        torch.save(found, folder / "split" / "target" / f"{name}.pt")
    return root


@pytest.fixture
def train(data, tmp_path, monkeypatch):
    """A function that runs one of RUNS with more arguments and gives the records of its runs."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))

    def run(name, *arguments, device="cpu"):
        script, *own = RUNS[name]
        path = tmp_path / "records.jsonl"
        path.unlink(missing_ok=True)
        root = data / "sbm" if script == "train_sbm" else data
        words = [
            script,
            "--root",
            root,
            "--device",
            device,
            "--quiet",
            "--json",
            path,
            *SHORT,
            *own,
            *arguments,
        ]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        importlib.import_module(script).main()
        return [json.loads(line) for line in path.read_text().splitlines()]

    return run


def curve(record):
    """Loss, validation and test score of every epoch."""
    return [entry[1:] for entry in record["history"]]


# One run of every script.
RESUMED = "molhiv-gatv2", "sbm-gat", "ddi", "dblp-rgat", "arxiv-sampled"


@each(*RESUMED, more=[name for name in RUNS if name not in RESUMED])
def test_resumed_is_uninterrupted_bitwise(name, train, tmp_path, device):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    (straight,) = train(name, "--checkpoint", whole, device=device)
    assert straight["epochs"] == 4 and all(np.isfinite(curve(straight)).ravel())
    train(name, "--checkpoint", cut, "--epochs", 2, device=device)
    (resumed,) = train(name, "--checkpoint", cut, "--resume", device=device)
    a, b = (torch.load(folder / "seed-0.pt", weights_only=False) for folder in (whole, cut))
    assert a["model"].keys() == b["model"].keys()
    if name == "sbm-exphormer" and device == "cuda":  # torch_geometric's local layer adds up by atomics
        np.testing.assert_allclose(curve(resumed), curve(straight), rtol=1e-3)
        return
    assert curve(resumed) == curve(straight)
    # torch_geometric's RGATConv leaves its parameter l2 uninitialised, and does not use it in this mode.
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"] if not k.endswith("l2"))
    assert a["best"] == b["best"]


# Runs in which both implementations draw the same random numbers, so that their losses can be compared.
@each("nodes-gt", "molhiv", "dblp", more=("nodes", "molhiv-gt", "sbm-exphormer"))
def test_the_same_as_torch_geometric(name, train, device):
    options = ["--dropout", 0] if name.startswith("nodes") else []
    (ours,), (theirs,) = (train(name, "--impl", impl, *options, device=device) for impl in ("dfgnn", "pyg"))
    losses = [[entry[0] for entry in curve(record)] for record in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=2e-3)
    assert losses[0][0] != losses[0][-1]


@each("nodes", "arxiv-sampled", more=("molhiv", "ddi"))
def test_dgl(name, train):
    pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
    (record,) = train(name, "--impl", "dgl")
    assert all(np.isfinite(curve(record)).ravel())


def test_finished_runs_are_not_repeated(train, tmp_path):
    first = train("nodes", "--checkpoint", tmp_path / "c", "--seeds", 2)
    again = train("nodes", "--checkpoint", tmp_path / "c", "--seeds", 2, "--resume")
    assert [r["seed"] for r in again] == [0, 1]
    assert [curve(r) for r in again] == [curve(r) for r in first]
    assert curve(first[0]) != curve(first[1])


@pytest.mark.parametrize("name", FULL_GRAPH)
@pytest.mark.gpu
def test_captured_is_eager(name, train, tmp_path):
    (eager,) = train(name, "--epochs", 7, device="cuda")
    (captured,) = train(name, "--epochs", 7, "--capture", device="cuda")
    np.testing.assert_allclose(curve(captured), curve(eager), rtol=1e-3, atol=1e-6)
    (cut,) = train(name, "--epochs", 5, "--capture", "--checkpoint", tmp_path / "c", device="cuda")
    (resumed,) = train(
        name, "--epochs", 7, "--capture", "--checkpoint", tmp_path / "c", "--resume", device="cuda"
    )
    assert curve(resumed) == curve(captured)


@each("molhiv-gt", "sbm", more=("molhiv", "sbm-exphormer"))
def test_captured_batches_are_eager(name, train, device, monkeypatch):
    """Steps with --capture run on padded batches, on a GPU as CUDA graphs, and have the losses of plain
    steps. Dropout is off, because its masks would differ."""
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    (eager,) = train(name, device=device)
    if device == "cpu":
        from graph_batches import GraphBatches

        import dfgnn

        def step(self, batch):
            if self.captured is None:
                self.captured = dfgnn.capture(self.loss_of, self.model, self.optimizer, debug=True)
            return self.captured(batch)

        monkeypatch.setattr(GraphBatches, "step", step)
    (captured,) = train(name, *["--capture"] * (device == "cuda"), device=device)
    losses = [[entry[0] for entry in curve(record)] for record in (eager, captured)]
    np.testing.assert_allclose(*losses, rtol=2e-3)


@pytest.mark.parametrize("loader", ["dfgnn", "subgraph"])
@pytest.mark.parametrize("amp", [(), ("--amp", "bf16")])
@pytest.mark.gpu
def test_captured_samples_are_eager(loader, amp, train):
    options = "--dropout", 0, "--loader", loader, *amp
    (eager,), (captured,) = (
        train("arxiv-sampled", *options, *more, device="cuda") for more in ((), ("--capture",))
    )
    losses = [[entry[0] for entry in curve(record)] for record in (eager, captured)]
    np.testing.assert_allclose(*losses, rtol=2e-2 if amp else 2e-3)


def test_capture_where_it_cannot(train, capsys):
    with pytest.raises(SystemExit) as end:
        train("nodes", "--capture")
    assert end.value.code == 2
    assert "error: --capture: needs a GPU, got --device cpu\n" in capsys.readouterr().err


@exhaustive
def test_stages_profile_curves_and_compile(train, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    (record,) = train(
        "nodes",
        "--stages",
        "--profile",
        "--layers",
        1,
        "--epochs",
        2,
        "--logdir",
        tmp_path / "log",
        "--compile",
    )
    assert record["stages"].keys() == {"forward", "backward", "update"} and min(record["stages"].values()) > 0
    assert record["profile"]["operators"] > 0 and list(tmp_path.glob("log/dfgnn-seed-0/events*"))


def test_without_a_network_the_folder_is_named(monkeypatch, tmp_path):
    import torch_geometric.datasets

    monkeypatch.syspath_prepend(ROOT / "examples")
    datasets = importlib.import_module("datasets")

    def offline(*args):
        raise URLError("Name or service not known")

    for cls in ("Planetoid", "HeterophilousGraphDataset", "DBLP"):
        monkeypatch.setattr(torch_geometric.datasets, cls, offline)
    for load in (
        lambda: datasets.planetoid("Cora", tmp_path),
        lambda: datasets.nodes("minesweeper", tmp_path),
        lambda: datasets.dblp(tmp_path),
        lambda: datasets.ogb_folder("ogbn-arxiv", tmp_path, offline),
    ):
        with pytest.raises(SystemExit, match=f"is not in {tmp_path}, .* Name or service not known"):
            load()


def test_scores_are_ogbs(monkeypatch):
    """The examples' Hits@20 and torchmetrics' ROC-AUC equal those of OGB's evaluators."""
    monkeypatch.setenv("OUTDATED_IGNORE", "1")
    pytest.importorskip("ogb", reason="ogb is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from ogb.graphproppred import Evaluator
    from ogb.linkproppred import Evaluator as LinkEvaluator
    from torchmetrics.functional.classification import binary_auroc
    from train_ogbl_ddi import hits

    # Scores take few different values, so that there are ties.
    positive, negative = torch.randint(60, (500,)).float(), torch.randint(60, (700,)).float()
    theirs = LinkEvaluator("ogbl-ddi").eval({"y_pred_pos": positive, "y_pred_neg": negative})["hits@20"]
    assert 0 < theirs < 1 and hits(positive, negative, 20) == pytest.approx(theirs)
    y, score = torch.randint(2, (300, 1)), torch.randint(9, (300, 1)).float()
    theirs = Evaluator("ogbg-molhiv").eval({"y_true": y, "y_pred": score})["rocauc"]
    # torchmetrics applies a sigmoid to what is not in 0 .. 1.
    assert float(binary_auroc(score.squeeze(1) / 9, y.squeeze(1))) == pytest.approx(theirs, abs=1e-6)


@exhaustive
def test_compare(data, tmp_path):
    """Two variants of a script: scores, short runs, table and pictures."""
    import subprocess

    arguments = [ROOT / "examples" / "compare.py", "--out", tmp_path, "--common",
                 f"--root {data} --epochs 3 --device cpu",
                 ROOT / "examples" / "train_nodes.py", "--dataset", "minesweeper", "--seeds", 2]  # fmt: skip
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["variant"] for row in rows] == ["dfgnn", "pyg"]
    assert all(row["seeds"] == [0, 1] and row["seconds_per_epoch"] > 0 for row in rows)
    assert (tmp_path / "table.md").read_text().count("\n") == 4
    assert (tmp_path / "scores.png").stat().st_size > 0 and (tmp_path / "costs.png").stat().st_size > 0


@pytest.mark.gpu
def test_the_first_replay_waits_for_the_capture(late_capture, monkeypatch):
    """Capturing writes to the state of dropout's generator, on its own stream, and a replay reads it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from harness import Replayed

    x = torch.ones(1000, device="cuda")

    def step():
        late_capture()
        return torch.nn.functional.dropout(x, 0.5)

    found = []
    for call in (step, Replayed(step)):
        torch.manual_seed(0)
        found.append(torch.stack([call().clone() for _ in range(5)]))
    assert torch.equal(*found)
