"""Importing and building layers says nothing and leaves nothing behind, with DGL installed or not."""

import os
import subprocess
import sys

import pytest
from covering import exhaustive

CODE = """
import importlib, os, sys
if {blocked}:
    sys.modules["dgl"] = None
import dfgnn.nn, dfgnn.nn.pyg, dfgnn.compat
for name in dfgnn.nn.__all__:
    getattr(dfgnn.nn, name)
dfgnn.nn.GATConv(4, 4, 2)
assert "DGLBACKEND" not in os.environ
"""


@pytest.mark.parametrize(
    "blocked", [False, pytest.param(True, marks=exhaustive)], ids=["as-installed", "without-dgl"]
)
def test_import_neither_prints_nor_writes(tmp_path, blocked):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DGL") and k != "XDG_CONFIG_HOME"}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CODE.format(blocked=blocked)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
    assert list(tmp_path.rglob("*")) == []


@exhaustive
def test_a_backend_that_was_named_is_kept(tmp_path):
    pytest.importorskip("dgl", reason="DGL is not installed")
    code = "import os, dfgnn.nn\ndfgnn.nn.GATConv(4, 4, 2)\nassert os.environ['DGLBACKEND'] == 'pytorch'\n"
    environment = {**os.environ, "DGLBACKEND": "pytorch", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, timeout=300)
