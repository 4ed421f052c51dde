"""The time limit of each test (pyproject.toml)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGS = """
import ctypes, threading

def wait_for_ever():
    threading.Event().wait()

def test_that_hangs():
    threading.Thread(target=wait_for_ever, daemon=True).start()
    ctypes.PyDLL(None).sleep(600)  # holds the GIL, as a thread does that waits for one that wants it
"""


def test_every_test_has_one():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 0 < options["faulthandler_timeout"] <= 900


def test_a_test_that_hangs_ends_with_all_stacks(tmp_path):
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_hangs.py"]
    command += [f"--config-file={ROOT / 'pyproject.toml'}", "--override-ini=faulthandler_timeout=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode and "Timeout" in done.stderr
    assert "in wait_for_ever" in done.stderr and "in test_that_hangs" in done.stderr
