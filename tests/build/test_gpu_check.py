"""The record of the last check on a GPU, and the scripts that make it."""

import itertools
import json
import shutil
import sys
import warnings

import pytest
from loading import ROOT, load

gpu_check = load("scripts/gpu_check.py")


def test_the_record_is_clean_and_of_these_sources():
    path = ROOT / gpu_check.RECORD
    if not path.exists():
        warnings.warn(f"{gpu_check.RECORD} is missing: run scripts/gpu_check.sh on a GPU", stacklevel=1)
        return
    record = json.loads(path.read_text())
    assert not gpu_check.failures(record), f"the last check, on {record['date']}, was not clean"
    if gpu_check.missing(record):
        warnings.warn(f"{gpu_check.RECORD} lacks {', '.join(gpu_check.missing(record))}", stacklevel=1)
    if record["sources_sha256"] != gpu_check.source_hash():
        warnings.warn(
            f"the CUDA sources have changed since {gpu_check.RECORD} was written ({record['date']}): "
            "run scripts/gpu_check.sh on a GPU",
            stacklevel=1,
        )


@pytest.fixture
def sources(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    return tmp_path


def test_hash_does_not_depend_on_the_place(sources):
    assert gpu_check.source_hash(sources) == gpu_check.source_hash()


@pytest.mark.parametrize(
    "name",
    ["core/params.h", "cuda/attention/lanes.cuh", "cuda/attention/instances/dot_f32.cu", "torch/cuda.cpp"],
)
def test_hash_changes_with_a_source(sources, name):
    before = gpu_check.source_hash(sources)
    path = sources / "csrc" / name
    path.write_text(path.read_text() + "int x;\n")
    changed = gpu_check.source_hash(sources)
    path.rename(path.with_stem("other"))
    assert len({before, changed, gpu_check.source_hash(sources)}) == 3


def test_hash_ignores_what_the_cuda_library_is_not_made_of(sources):
    before = gpu_check.source_hash(sources)
    for name in ("cpu/new.cpp", "torch/cpu.cpp"):
        (sources / "csrc" / name).write_text("int x;")
    (sources / "csrc" / "cuda" / "notes.txt").write_text("text")
    params = sources / "csrc" / "core" / "params.h"
    params.write_text(f"// One comment.\n/* And\n another. */{params.read_text()}\n  // A third, '\"'.\n")
    assert gpu_check.source_hash(sources) == before


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('f("// kept"); // gone', 'f("// kept");'),
        ("a /* b\n c */ d", "a d"),
        ("f('\"'); // a \"quoted\" word\ng('\\\\');", "f('\"'); g('\\\\');"),
        ("int   x;\n\n\tint y;", "int x; int y;"),
    ],
)
def test_comments_and_layout_are_not_code(source, expected):
    assert gpu_check.without_comments(source) == expected


CLEAN = {
    "tests": {"passed": 9, "failed": 0, "skipped": 1, "exit_code": 0, "arguments": ""},
    "sanitizer": {tool: {"errors": 0, "exit_code": 0} for tool in gpu_check.TOOLS},
}


def test_a_clean_record():
    assert gpu_check.failures(CLEAN) == [] == gpu_check.missing(CLEAN)


@pytest.mark.parametrize(
    "tests",
    [{"failed": 1, "exit_code": 1}, {"exit_code": 3}, {"passed": 0}, {"passed": 0, "exit_code": 5}],
    ids=str,
)
def test_failures_of_the_tests(tests):
    assert gpu_check.failures({**CLEAN, "tests": {**CLEAN["tests"], **tests}})


@pytest.mark.parametrize(
    "result", [{"errors": 2}, {"exit_code": 1}, {"errors": None, "exit_code": 124}], ids=str
)
@pytest.mark.parametrize("tool", gpu_check.TOOLS)
def test_failures_of_a_tool(tool, result):
    sanitizer = {**CLEAN["sanitizer"], tool: {**CLEAN["sanitizer"][tool], **result}}
    (line,) = gpu_check.failures({**CLEAN, "sanitizer": sanitizer})
    assert tool in line


def test_missing_steps():
    assert gpu_check.missing({"tests": CLEAN["tests"]}) == list(gpu_check.TOOLS)
    assert len(gpu_check.missing({})) == 1 + len(gpu_check.TOOLS)
    (line,) = gpu_check.missing({**CLEAN, "tests": {**CLEAN["tests"], "arguments": "-k gat"}})
    assert "-k gat" in line


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("========= COMPUTE-SANITIZER\n3 calls\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 1 error\n", 1),
        ("========= ERROR SUMMARY: 100 errors were not printed\n========= ERROR SUMMARY: 112 errors\n", 112),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", 3),
        ("========= Error: Device not supported\n", None),
    ],
)
def test_errors_in_the_output_of_the_sanitizer(output, errors):
    assert gpu_check.count_errors(output) == errors


def test_numbers_in_a_junit_file(tmp_path):
    path = tmp_path / "junit.xml"
    assert gpu_check.read_junit(path) == {"passed": 0, "failed": 0, "skipped": 0}
    path.write_text('<testsuites><testsuite tests="10" failures="1" errors="2" skipped="3"/></testsuites>')
    assert gpu_check.read_junit(path) == {"passed": 4, "failed": 3, "skipped": 3}


def test_a_tool_is_run_on_the_suite(tmp_path, monkeypatch, capfd):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text('#!/bin/sh\necho "$@ $PYTORCH_NO_CUDA_MEMORY_CACHING"\necho "ERROR SUMMARY: 4 errors"\n')
    fake.chmod(0o755)
    assert gpu_check.run_tool(str(fake), "initcheck") == {"errors": 4, "exit_code": 0}
    suite = ROOT / "scripts" / "sanitize_suite.py"
    said = f"--tool initcheck {sys.executable} {suite}"
    assert f"{said} 1/1 1" in capfd.readouterr().out
    assert gpu_check.run_tool(str(fake), "initcheck", 3) == {"errors": 12, "exit_code": 0}
    out = capfd.readouterr().out
    assert all(f"{said} {k}/3 1" in out for k in (1, 2, 3))


def test_parts_of_a_tool_together():
    clean, bad = {"errors": 0, "exit_code": 0}, {"errors": None, "exit_code": 124}
    assert gpu_check.together([clean, clean]) == clean
    assert gpu_check.together([clean, bad, {"errors": 3, "exit_code": 1}]) == bad
    assert gpu_check.together([clean, {"errors": 3, "exit_code": 1}]) == {"errors": 3, "exit_code": 1}


def test_the_parts_of_the_suite_are_all_of_it(monkeypatch):
    suite = load("scripts/sanitize_suite.py")
    made = []
    take = suite.shared(lambda number: made.append(number))
    for part in range(3):
        monkeypatch.setattr(suite, "_mine", itertools.cycle([k == part for k in range(3)]))
        for number in range(10):
            take(number)
    assert sorted(made) == list(range(10))


def test_the_suite_runs():
    suite = load("scripts/sanitize_suite.py")
    calls = 5 * len(suite.DTYPES) + 2 * 2 * len(suite.CASES)
    others = suite.forced(suite.local("cpu")) + suite.of_capacity(suite.bipartite("cpu"))
    blocks = 2 * len(suite.DTYPES)
    assert suite.run("cpu", dims=(7,)) == calls + blocks + others


def test_resume_keeps_clean_tools_of_the_same_library_only(tmp_path):
    record = {"sources_sha256": "a", "library_sha256": "b", "gpu": "c", "driver": "d"}
    clean, dirty = {"errors": 0, "exit_code": 0}, {"errors": 2, "exit_code": 1}
    path = tmp_path / "record.json"
    assert gpu_check.clean_tools(path, record) == {}
    path.write_text(json.dumps({**record, "sanitizer": {"memcheck": clean, "racecheck": dirty}}))
    assert gpu_check.clean_tools(path, record) == {"memcheck": clean}
    for key in record:
        assert gpu_check.clean_tools(path, {**record, key: "other"}) == {}


def test_a_record_of_kept_tools_is_written_whole(tmp_path, monkeypatch):
    path, identity = tmp_path / "record.json", dict.fromkeys(("sources_sha256", "library_sha256"), "a")
    identity |= {"gpu": "c", "driver": "d"}
    path.write_text(json.dumps({**identity, **CLEAN}))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--resume", "--output", str(path)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("dfgnn.runtime.library.require_cuda_library", lambda: None)
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda path: "sanitizer")
    monkeypatch.setattr(gpu_check, "_output", lambda *command: "Version 1\n")
    monkeypatch.setattr(gpu_check, "describe", lambda commit: dict(identity))
    monkeypatch.setattr(gpu_check, "run_tests", lambda arguments, jobs: CLEAN["tests"])
    assert gpu_check.main() == 0
    record = json.loads(path.read_text())
    assert gpu_check.missing(record) == [] and record["sanitizer"] == CLEAN["sanitizer"]
