"""Wrong arguments end every program before its work begins, with the exit status 2 and a sentence."""

import importlib
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from covering import exhaustive

from dfgnn.runtime import programs

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="needs the source tree")

TRAINING = ("nodes", "planetoid", "sbm", "dblp", "ogbn", "ogbl_ddi", "ogbg_molhiv")

# Program -> (arguments, regular expression for the last line of stderr).
WRONG = {
    "dfgnn.bench": [
        ("--head-dim 0", r"argument --head-dim: expected an integer of at least 1, got '0'"),
        ("--head-dim 32,x", r"argument --head-dim: expected an integer of at least 1, got 'x'"),
        ("--heads 4,,8", r"argument --heads: expected values separated by commas, got '4,,8'"),
        ("--shapes 4x", r"argument --shapes: expected heads x head size, such as 4x32, got '4x'"),
        ("--layers gat,nothing", r"argument --layers: expected one of gat, .*, got 'nothing'"),
        ("--dtype float8", r"argument --dtype: expected one of float32, .*, got 'float8'"),
        ("--mode backward", r"argument --mode: expected one of forward, train, got 'backward'"),
        ("--schedule fast", r"argument --schedule: .*fast"),
        ("--schedule natural --oracle", r"--oracle .* --schedule has to hold auto"),
        ("--peers nobody", r"argument --peers: expected one of .*, got 'nobody'"),
        ("--seconds 0", r"argument --seconds: expected a number above 0, got '0'"),
        ("--seconds nan", r"argument --seconds: expected a number above 0, got 'nan'"),
        ("--cases nowhere", r"argument --cases: cannot import nowhere: No module named 'nowhere'"),
        ("--cases json", r"argument --cases: expected a module with cases, load and MEASURES, got 'json'"),
        ("--device tpu", r"argument --device: expected cpu, cuda or cuda:N, got 'tpu'"),
        ("--device meta", r"argument --device: expected cpu, cuda or cuda:N, got 'meta'"),
        ("--device cuda", r"--device: got 'cuda', .* finds no GPU"),
        ("--json /dev/null/x.json", r"argument --json: cannot write .*: /dev/null is not a folder"),
        ("--json {folder}", r"argument --json: cannot write .*: it is a folder"),
        ("--nothing", r"unrecognized arguments: --nothing"),
    ],
    "dfgnn.env": [
        ("--nothing", r"unrecognized arguments: --nothing"),
    ],
    "dfgnn.distributed.partition": [
        ("missing.npy parts --parts 2", r"EDGES.npy: there is no file missing.npy"),
        ("{file} parts --parts 0", r"--parts: expected an integer of at least 1"),
        ("{file} {folder} --parts 2", r"folder: expected one that is empty or new"),
        ("{file} parts --parts 2 --nodes x", r"--nodes: expected NAME=FILE, got 'x'"),
    ],
    "examples/train_planetoid.py": [
        ("--epochs many", r"--epochs: expected an integer of at least 1, got 'many'"),
        ("--seeds 0", r"--seeds: expected an integer of at least 1, got '0'"),
        ("--first-seed=-1", r"--first-seed: expected an integer of at least 0"),
        ("--checkpoint-every 0", r"--checkpoint-every: expected an integer of at"),
        ("--max-seconds 0", r"--max-seconds: expected a number above 0, got '0'"),
        ("--dataset Nora", r"argument --dataset: invalid choice: 'Nora'"),
        ("--patience 0", r"--patience: expected an integer of at least 1"),
        ("--device cuda:7", r"finds no GPU: python -m"),
        ("--resume", r"--resume: needs --checkpoint DIR"),
        ("--capture --device cpu", r"--capture: needs a GPU, got --device cpu"),
        ("--json {folder}", r"argument --json: cannot write .*: it is a folder"),
        ("--json {file}/x.json", r"argument --json: cannot write .* not a folder"),
        ("--checkpoint {file}", r"argument --checkpoint: cannot write .* not a folder"),
        ("--logdir {file}", r"argument --logdir: cannot write .* not a folder"),
    ],
    "examples/train_nodes.py": [
        ("--dropout 1.5", r"--dropout: expected a number of at least 0 and below 1, got"),
        ("--dropout 1", r"--dropout: expected a number of at least 0 and below 1, got"),
        ("--lr 0", r"--lr: expected a number above 0, got '0'"),
        ("--dataset x --root {folder}", r"--dataset: no .*x.npz, and none of amazon"),
    ],
    "examples/train_sbm.py": [
        ("--graphs 10,10", r"--graphs: expected 3 values separated by commas, got '10,10'"),
        ("--graphs 10,0,10", r"--graphs: expected an integer of at least 1, got '0'"),
    ],
    "examples/train_ogbn.py": [
        ("--fanouts 5,x,2", r"--fanouts: expected an integer of at least -1, got 'x'"),
        ("--fanouts 5,0,2", r"--fanouts: expected a number of neighbours, or -1, got '0'"),
        ("--sampled --fanouts 5,2", r"--fanouts: expected a number for each of 3 layers"),
        ("--batch-size 0", r"--batch-size: expected an integer of at least 1"),
    ],
    "examples/train_ogbl_ddi.py": [
        ("--heads 0", r"--heads: expected an integer of at least 1, got '0'"),
    ],
    "examples/train_ogbg_molhiv.py": [
        ("--train-graphs 0", r"--train-graphs: expected an integer of at least 1"),
    ],
    "examples/train_cluster.py": [
        ("--epochs 0", r"--epochs: expected an integer of at least 1, got '0'"),
        ("--heads 7", r"--heads: expected a number that divides --width 64, got 7"),
        ("--evaluate missing.pt", r"--evaluate: there is no file missing.pt"),
        ("--save {folder}", r"--save: cannot write .*: it is a folder"),
    ],
    "examples/demo_cluster.py": [
        ("--epochs 0", r"--epochs: expected an integer of at least 1, got '0'"),
        ("--unfused-steps 0", r"--unfused-steps: expected an integer of at least 1"),
    ],
    "examples/train_forces.py": [
        ("--epochs 0", r"--epochs: expected an integer of at least 1, got '0'"),
        ("--width 30 --heads 4", r"--width: expected a multiple of --heads, 4, got 30"),
        ("--picture {folder}", r"--picture: cannot write .*: it is a folder"),
    ],
    "examples/train_distributed.py": [
        ("graph --epochs 0", r"--epochs: expected an integer of at least 1"),
        ("nothing", r"argument mode: invalid choice: 'nothing'"),
        ("graph --resume", r"--resume: needs --checkpoint DIR"),
        ("graph --parts missing", r"--parts: there is no folder missing"),
    ],
    "examples/compare.py": [
        ("", r"required: --out"),
        ("--out {folder}/new", r"expected a script, --plan FILE, or .*plan.json of an earlier"),
        ("--out {folder}/new missing.py", r"there is no script missing.py"),
        ("--out {folder}/new --plan missing", r"--plan: there is no file missing"),
        ("--out {folder}/new --plan {file}", r"is no plan: "),
        ("--out {folder}/new --plan {plan} --only b", r"--only: .* has no b; it has a"),
        ("--out {folder}/new --processes 0 {file}", r"--processes: expected an integer of at"),
    ],
    "scripts/fuzz.py": [
        ("--seconds 0", r"--seconds: expected a number above 0, got '0'"),
    ],
    "scripts/soak.py": [
        ("--steps 5", r"--steps: expected an integer of at least 100, got '5'"),
        ("--device cuda", r"--device: got 'cuda', .* finds no GPU"),
    ],
    "scripts/gpu_check.py": [
        ("--jobs 0", r"--jobs: expected an integer of at least 1, got '0'"),
        ("--sanitizer missing", r"--sanitizer: there is no file missing"),
    ],
    "scripts/gradient_errors.py": [
        ("--page missing.md", r"--page: there is no file missing.md"),
        ("--page {file}", r"--page: expected the marks .* in "),
        ("--add {empty}", r"--add: .* is no file of results: it lacks rows"),
    ],
    "scripts/upstream_tests.py": [
        ("", r"expected --dgl-tests, --pyg-tests or --dgl-names"),
        ("--pyg-tests missing", r"--pyg-tests: there is no folder missing"),
    ],
    "scripts/sass_waits.py": [
        ("missing.so kernel", r"there is no file missing.so"),
    ],
    "scripts/sanitize_suite.py": [
        ("3/2", r"expected K/N with 1 <= K <= N, got '3/2'"),
    ],
    "scripts/release.py": [
        ("--targets riscv", r"--targets: expected one of x86_64, aarch64, got 'riscv'"),
    ],
    "scripts/hub_layout.py": [
        ("missing.whl", r"there is no file missing.whl"),
        ("{file}", r"expected a wheel for manylinux, as make release builds it"),
    ],
    "scripts/matrix.py": [
        ("--dist missing", r"--dist: there is no folder missing"),
        ("--dist {folder}", r"--torches or --environments: expected at least one"),
    ],
    "scripts/cross_check_cpu.py": [
        ("riscv", r"expected aarch64 or native, got 'riscv'"),
    ],
}  # fmt: skip
CALLS = [(program, *call) for program, calls in WRONG.items() for call in calls]
CALLS += [(f"examples/train_{x}.py", "--epochs 0", r"--epochs: expected an integer of at") for x in TRAINING]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """A function that runs a program in this process, where torch is imported already, and returns (exit
    status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("DGLBACKEND", "pytorch")

    def call(program, *arguments):
        name = str(ROOT / program) if program.endswith(".py") else program
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            if program.endswith(".py"):
                runpy.run_path(name, run_name="__main__")
            else:
                with warnings.catch_warnings():  # runpy warns of modules that are imported already
                    warnings.simplefilter("ignore", RuntimeWarning)
                    runpy.run_module(name, run_name="__main__")
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    return call


@pytest.mark.parametrize(("program", "arguments", "message"), CALLS)
def test_wrong_arguments(run, tmp_path, program, arguments, message):
    if program.startswith("examples/train_") or program.startswith("examples/demo"):
        pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
        pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    if "finds no GPU" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    files = {"folder": tmp_path, "file": tmp_path / "file", "empty": tmp_path / "empty.json"}
    files["plan"] = tmp_path / "plan.json"
    files["file"].write_text("neither JSON nor anything else")
    files["empty"].write_text("{}")
    files["plan"].write_text('[{"name": "a", "script": "a.py"}]')
    before = sorted(tmp_path.rglob("*"))
    status, out, err = run(program, *arguments.format(**files).split())
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert re.search(message, last), last
    assert sorted(tmp_path.rglob("*")) == before


PROGRAMS = [
    "dfgnn.bench", "dfgnn.env", "dfgnn.distributed.partition",
    *(f"examples/{name}.py" for name in ("demo_cluster", "train_cluster", "train_distributed", "compare")),
    "examples/train_forces.py",
    *(f"examples/train_{name}.py" for name in TRAINING),
    *(f"scripts/{name}.py" for name in ("fuzz", "soak", "gpu_check", "release")),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_has_defaults_and_names(run, monkeypatch, program):
    """Every option with a default tells it, and stands for its value by a name, not by an example."""
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    options = []
    add = programs.Parser.add_argument

    def watch(self, *args, **kwargs):
        options.append(add(self, *args, **kwargs))
        return options[-1]

    monkeypatch.setattr(programs.Parser, "add_argument", watch)
    status, out, _ = run(program, "--help")
    assert status == 0 and "Traceback" not in out
    for action in options:
        if action.option_strings and action.default not in (None, False, (), "", [], "==SUPPRESS=="):
            assert "default" in action.help, action.option_strings
        assert not re.fullmatch(r"[\d.,x]+", str(action.metavar or "")), action.option_strings


class Loader:
    """Writes a file as a library does, and fails or not."""

    def __init__(self, folder, fails):
        (folder / "raw").mkdir(exist_ok=True)
        (folder / "raw" / "part").write_text("half")
        if fails:
            raise fails


@pytest.mark.parametrize("fails", [OSError("no network"), KeyboardInterrupt()], ids=["network", "ctrl-c"])
@pytest.mark.parametrize("there", [False, True])
def test_failed_downloads_leave_nothing_behind(tmp_path, fails, there):
    folder = tmp_path / "data" / "sets"
    if there:
        folder.mkdir(parents=True)
        (folder / "other").write_text("stays")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(type(fails)), programs.downloading(folder) as place:
        assert not there or (place / "other").read_text() == "stays"
        Loader(place, fails)
    assert sorted(tmp_path.rglob("*")) == before


def test_downloads_that_succeed_stay(tmp_path):
    with programs.downloading(tmp_path / "new") as place:
        Loader(place, None)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "new", "new/raw", "new/raw/part"
    ]  # fmt: skip
    with programs.downloading(tmp_path / "new") as place:
        assert (place / "raw" / "part").read_text() == "half"
    assert (tmp_path / "new" / "raw" / "part").read_text() == "half"


class Counting:
    """A task of examples/harness.py without a model to train: epoch k has the score ``scores[k]``, and Ctrl-C
    arrives in epoch ``interrupt``."""

    def __new__(cls, args, seed, scores, interrupt=None):
        harness = importlib.import_module("harness")

        class Task(harness.Task):
            def __init__(self):
                super().__init__(args, seed)
                self.model = torch.nn.Linear(1, 1)
                self.optimizer = self.adam(0.1)
                self.best = harness.Best(patience=2)

            def epoch(self):
                return 0.0

            def scores(self):
                k = Counting.epochs = Counting.epochs + 1
                if k == interrupt:
                    raise KeyboardInterrupt
                return {"valid": scores[k - 1], "test": scores[k - 1]}

        return Task()


@pytest.fixture
def harness(monkeypatch):
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(Counting, "epochs", 0, raising=False)
    return importlib.import_module("harness")


@pytest.mark.parametrize(
    ("scores", "epochs"), [((1, 2, 3, 4), 4), ((3, 2, 1, 0), 3)], ids=["epochs", "patience"]
)
def test_progress_ends_at_100_percent(harness, capsys, scores, epochs):
    args = harness.parser("", epochs=4).parse_args(["--device", "cpu"])
    harness.main(args, lambda args, seed: Counting(args, seed, scores))
    last = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert "100%|" in last and f" {epochs}/{epochs} " in last


def test_interrupted_and_resumed(harness, tmp_path, capsys):
    """Ctrl-C tells how to go on, and a run that goes on tells from where."""
    options = ["--device", "cpu", "--quiet", "--checkpoint", str(tmp_path), "--checkpoint-every", "2"]
    args = harness.parser("", epochs=4).parse_args(options)
    with pytest.raises(SystemExit) as ended:
        harness.main(args, lambda args, seed: Counting(args, seed, (1, 2, 3, 4), interrupt=4))
    assert ended.value.code == 130
    assert f"with --resume the same command goes on from what is in {tmp_path}" in capsys.readouterr().err
    args = harness.parser("", epochs=4).parse_args([*options, "--resume"])
    Counting.epochs = 2
    (record,) = harness.main(args, lambda args, seed: Counting(args, seed, (1, 2, 3, 4)))
    assert record["epochs"] == 4
    assert f"seed 0: goes on after epoch 2, from {tmp_path / 'seed-0.pt'}" in capsys.readouterr().out
    args = harness.parser("", epochs=4).parse_args(["--device", "cpu", "--quiet"])
    Counting.epochs = 0
    with pytest.raises(SystemExit):
        harness.main(args, lambda args, seed: Counting(args, seed, (1, 2), interrupt=2))
    assert "nothing of this run is kept: --checkpoint DIR would" in capsys.readouterr().err


@exhaustive
def test_the_benchmark_is_interrupted_in_one_line(tmp_path):
    command = [sys.executable, "-m", "dfgnn.bench", "--device", "cpu", "--graphs", "er-2000-20"]
    command += ["--seconds", "5", "--json", str(tmp_path / "out.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    process.stdout.readline()  # the line that names the machine: measuring begins after it
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.strip() == f"interrupted; {tmp_path / 'out.json'} has the cases before this one"
