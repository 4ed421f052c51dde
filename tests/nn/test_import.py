"""Importing and building layers says nothing and leaves nothing behind, with DGL installed or not."""

import pytest
from covering import exhaustive

CODE = """
import importlib, os, sys, warnings
# What torch >= 2.14 says of torch_geometric's own import.
warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
for name in [name for name in os.environ if name.startswith("DGL") or name == "XDG_CONFIG_HOME"]:
    del os.environ[name]
if {blocked}:
    sys.modules["dgl"] = None
import dfgnn, dfgnn.nn
assert "torch_geometric" not in sys.modules and dfgnn.nn.pyg.GATConv
import dfgnn.nn, dfgnn.nn.pyg, dfgnn.compat
for name in dfgnn.nn.dgl.__all__:
    getattr(dfgnn.nn.dgl, name)
dfgnn.nn.dgl.GATConv(4, 4, 2)
assert "DGLBACKEND" not in os.environ
"""


@pytest.mark.parametrize(
    "blocked", [False, pytest.param(True, marks=exhaustive)], ids=["as-installed", "without-dgl"]
)
def test_import_neither_prints_nor_writes(plain_python, tmp_path, blocked):
    done = plain_python(CODE.format(blocked=blocked), cwd=tmp_path, environment={"HOME": str(tmp_path)})
    assert done.stdout + done.stderr == ""
    assert list(tmp_path.rglob("*")) == []


@exhaustive
def test_a_backend_that_was_named_is_kept(plain_python, tmp_path):
    pytest.importorskip("dgl", reason="DGL is not installed")
    code = "import os, dfgnn\ndfgnn.nn.dgl.GATConv(4, 4, 2)\nassert os.environ['DGLBACKEND'] == 'pytorch'\n"
    plain_python(code, cwd=tmp_path, environment={"DGLBACKEND": "pytorch", "HOME": str(tmp_path)})
