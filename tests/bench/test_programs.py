"""Every program under benchmarks runs: on the CPU, and its branches for CUDA on a device that is none.

A dry run takes the very calls that a GPU would get, on the CPU's tensors: a program that has not kept up with
what it calls fails here and not on the machine that was hired for it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from covering import exhaustive, some

pytest.importorskip("torch_geometric", reason="the benchmarks compare with it")
pytest.importorskip("numpy", reason="the benchmarks need numpy")

import fake_cuda

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
# Modules that programs import, and programs whose tests are in files of their own.
ELSEWHERE = {"distributed_data", "distributed_timeline", "force_fields", "papers100m"}
PROGRAMS = {
    "reorder": ["--graphs", "cora~", "--repeats", "1"],
    "dgl_sparse": ["--nodes", "40", "--neighbours", "5", "--hidden", "8", "--heads", "2", "--repeats", "1"],
    "cookbook": ["--nodes", "50", "--edges", "300", "--rounds", "1"],
    "second_order": ["--graphs", "64", "--scores", "gat", "--heads", "1x4", "--dtypes", "float32",
                     "--device", "cpu", "--repeats", "1"],
    "forces": ["--graphs", "1", "--layers", "transformer", "--heads", "2x4", "--repeats", "1"],
    "two_checkouts": [str(ROOT), str(ROOT), "--graphs", "cora~", "--heads", "2x4", "--rounds", "1",
                      "--seconds", "0.01", "--device", "cpu"],
    "scaling": ["--graphs", "cora~", "--parts", "2", "--methods", "random", "contiguous"],
    "weather_mesh": ["--refinement", "1", "--grid", "60", "--heads", "2", "--head-dim", "8",
                     "--dtypes", "float32", "--budget", "0.001", "--layers"],
    "distributed": ["--sections", "full", "papers", "--graph", "cora~", "--steps", "1", "--models", "gat",
                    "--scale", "1000000"],
    "sums_in_16_bits": ["--degrees", "4"],
}  # fmt: skip
# Programs that print their results and write no file: their arguments, and what each line that they print is.
TIME, MEMORY = r"[\d.]+ ms", r"[\d.]+ MiB"
PRINTED = {
    "block_attention": (
        ["--device", "cpu", "--blocks", "4x2-5", "--heads", "2x8", "--dtypes", "float32",
         "--forces", "4x2-5", "--graphs", "4x2-5", "--rounds", "1"],
        ["CPU .*",
         rf"4x2-5 2x8 torch.float32: block {TIME}, {MEMORY}; padded SDPA {TIME}, {MEMORY} \([\d.]+x\)",
         *(rf"forces 4x2-5 2x8 torch.{dtype}: block {TIME}, {MEMORY}; plain {TIME}, {MEMORY} \([\d.]+x\); "
           rf"segments {TIME}, {MEMORY} \([\d.]+x\)"
           for dtype in ("float32", "float64")),
         rf"graphs 4x2-5 2x8 torch.float32: GPSConv {TIME}, {MEMORY}; "
         rf"torch_geometric's {TIME}, {MEMORY} \([\d.]+x\)"],
    ),
    "own_attention": (
        ["--cases", "mlp", "--repeats", "1", "--warmup", "0"],
        [r"     score_attention, values at edges",  # the form that dfgnn.compile found
         *(rf"mlp +12800 {name} +{TIME}  first +[\d.]+ s +differs ([\d.]+e-(0[5-9]|[1-9]\d)|0.0e\+00)"
           for name in ("eager", "inductor, default", "dfgnn, default"))],
    ),
}  # fmt: skip


# Those that start interpreters or Inductor, and so take longer than all others together.
LONG = {"own_attention", "sums_in_16_bits", "two_checkouts"}


def test_every_program_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PROGRAMS) | set(PRINTED) | ELSEWHERE


@pytest.fixture
def program(request, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    before, threads = set(sys.modules), torch.get_num_threads()
    yield __import__(request.param)
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def one_process(monkeypatch):
    """What torchrun sets, and gloo in the place of NCCL."""
    dist = torch.distributed
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    init, barrier = dist.init_process_group, dist.barrier
    store = dist.HashStore()

    def start(backend, timeout=None, device_id=None):
        return init("gloo", store=store, rank=0, world_size=1, timeout=timeout)

    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setattr(dist, "barrier", lambda device_ids=None: barrier())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def results_of(program, arguments, path: Path) -> dict:
    program.main([*arguments, "--json", str(path)])
    return json.loads(path.read_text())


def failures(value) -> list[str]:
    """The reasons of all failures, which lie under "failed" and "unavailable" anywhere in the results."""
    if isinstance(value, dict):
        own = [str(value[name]) for name in ("failed", "unavailable") if name in value]
        return own + [line for v in value.values() for line in failures(v)]
    return [line for v in value for line in failures(v)] if isinstance(value, list) else []


@some([name for name in PROGRAMS if name not in LONG], PROGRAMS, "program", indirect=True)
def test_on_the_cpu(program, one_process, tmp_path):
    if program.__name__ == "reorder":
        pytest.importorskip("sknetwork", reason="communities need scikit-network")
    results = results_of(program, PROGRAMS[program.__name__], tmp_path / "results.json")
    assert results["environment"]["device"] == "cpu"
    assert not failures(results)


@some([name for name in PRINTED if name not in LONG], PRINTED, "program", indirect=True)
def test_printed_on_the_cpu(program, capsys):
    arguments, lines = PRINTED[program.__name__]
    program.main(arguments)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(lines), printed
    for line, expected in zip(printed, lines):
        assert re.fullmatch(expected, line), (line, expected)


@pytest.mark.parametrize("program", ["block_attention"], indirect=True)
def test_check_of_block_attention(program, monkeypatch, capsys):
    """The program's check passes, and fails where a kernel is wrong."""
    arguments = ["--device", "cpu", "--check", "--dims", "7"]
    monkeypatch.setattr(program, "CHECKS", {"short": ([3, 0, 1, 5], None)})
    with pytest.raises(SystemExit, match="^0$"):
        program.main(arguments)
    assert "BAD" not in capsys.readouterr().out

    def wrong(*args, **options):
        return 1.1 * right(*args, **options)

    right = program.functional.block_attention
    monkeypatch.setattr(program.functional, "block_attention", wrong)
    with pytest.raises(SystemExit, match="^1$"):
        program.main(arguments)
    assert "BAD" in capsys.readouterr().out


@exhaustive
@pytest.mark.parametrize("program", ["reorder", "weather_mesh", "distributed"], indirect=True)
def test_dry_on_cuda(program, one_process, tmp_path, monkeypatch):
    """scaling.py and cookbook.py have no branch for CUDA."""
    arguments = PROGRAMS[program.__name__]
    if program.__name__ == "reorder":
        pytest.importorskip("sknetwork", reason="communities need scikit-network")
    if program.__name__ == "distributed":
        monkeypatch.setattr(program, "DistributedDataParallel", lambda net, **options: net)
    else:
        arguments = [*arguments, "--device", "cuda"]
    with fake_cuda.fake_cuda(monkeypatch) as calls:
        results = results_of(program, arguments, tmp_path / "results.json")
    assert results["environment"]["gpu"] == "a fake"
    assert not failures(results)
    assert "synchronize" in calls


def test_the_plan_of_training_names_scripts():
    plan = json.loads((FOLDER / "training.json").read_text())
    missing = [entry["script"] for entry in plan if not (ROOT / entry["script"]).is_file()]
    assert plan and not missing


def test_training_asks_for_what_compare_takes(tmp_path):
    """training.sh, with a Python that prints what it was given."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "DFGNN_DATA": "/data"}
    command = ["bash", str(FOLDER / "training.sh"), str(tmp_path), "60"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    flags = {word for word in done.stdout.split() if word.startswith("--")}
    assert len(done.stdout.splitlines()) == 2
    text = (ROOT / "examples" / "compare.py").read_text()
    assert all(f'"{flag}"' in text for flag in flags - {"--root", "--device", "--max-seconds"})
