"""scripts/upstream_tests.py on tests of our own in the places of upstream's: what it runs and reports."""

import re
from functools import partial
from pathlib import Path

import pytest
from covering import exhaustive

pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
SCRIPT = Path(__file__).parents[2] / "scripts" / "upstream_tests.py"

DGL = """
import dgl.nn.pytorch as nn
import pytest
from dgl.nn import GATConv
from helper import SIZE


@pytest.mark.parametrize("heads", [1, 2])
def test_gat_conv(heads):
    nn.GATConv(SIZE, 3, heads)


def test_gatv2_conv():
    assert nn.GATv2Conv(2, 3, 1).__class__.__module__.startswith("dgl."), "fails only with dfgnn's"


def test_agnn_conv():
    assert not nn.AGNNConv().__class__.__module__.startswith("dgl."), "fails only with DGL's"


def test_dotgat_conv():
    assert GATConv is nn.GATConv and False, "fails with both"


def test_hgt():
    assert GATConv is nn.GATConv, "also where it was imported by name"


def test_gated_graph_conv():
    assert False, "not run"
"""
PYG = """
from torch_geometric.nn import {0} as Layer


def test_conv():
    assert Layer.__name__ == "{0}"
"""
NAMES = {
    "gat": "GATConv", "gatv2": "GATv2Conv", "transformer": "TransformerConv", "agnn": "AGNNConv",
    "supergat": "SuperGATConv", "rgat": "RGATConv", "hgt": "HGTConv",
}  # fmt: skip


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def repositories(tmp_path):
    write(tmp_path / "dgl/tests/helper.py", "SIZE = 5\n")
    write(tmp_path / "dgl/tests/python/pytorch/nn/test_nn.py", DGL)
    write(tmp_path / "dgl/conftest.py", "import a_package_that_is_not_there\n")
    for file, name in NAMES.items():
        write(tmp_path / f"pyg/test/nn/conv/test_{file}_conv.py", PYG.format(name))
    return tmp_path


@pytest.fixture
def run(plain_python):
    return partial(plain_python.forks.program, SCRIPT, environment={"DGLBACKEND": "pytorch"})


@exhaustive
def test_both_libraries(run, repositories):
    result = run("--dgl-tests", repositories / "dgl", "--pyg-tests", repositories / "pyg")
    report = result.stdout[result.stdout.index("\ndgl: ") + 1 :]
    assert report.splitlines() == [
        "dgl: 6 cases",
        "  with upstream's layers: 2 failed, 4 passed",
        "  with dfgnn's layers: 2 failed, 4 passed",
        "  failing only with dfgnn's: 1",
        "    tests/python/pytorch/nn/test_nn.py::test_gatv2_conv",
        "pyg: 7 cases",
        "  with upstream's layers: 7 passed",
        "  with dfgnn's layers: 7 passed",
        "  failing only with dfgnn's: 0",
    ]
    assert result.returncode == 1


NAMES_OF_DGL = """
import backend as F
import dgl
import pytest
from dgl import topk_nodes


def test_names():
    g = dgl.graph((F.tensor([0, 1]), F.tensor([1, 2])))
    assert g.num_nodes() == 3 and F.array_equal(g.in_degrees(), F.tensor([0, 1, 1]))


def test_absent():
    g = dgl.graph(([0], [1]))
    g.ndata["h"] = F.tensor([[1.0], [2.0]])
    assert topk_nodes(g, "h", 1)[0].item() == 2


def test_fails_with_both():
    assert False


def test_fails_with_ours():
    assert "dfgnn" not in dgl.__version__
"""
BACKEND = """
import torch
from dgl.backend import *

array_equal = torch.equal
"""


@exhaustive
def test_names_of_dgl(run, repositories):
    write(repositories / "dgl/tests/python/common/test_some.py", NAMES_OF_DGL)
    write(repositories / "dgl/tests/backend/__init__.py", BACKEND)
    result = run("--dgl-names", repositories / "dgl", "-k", "test_some and not dotgat")
    report = result.stdout[result.stdout.index("\nnames of dgl: ") + 1 :].splitlines()
    assert report[0] == "names of dgl: 2 cases concerned, 1 passed", report
    assert report[1].startswith("    tests/python/common/test_some.py::test_fails_with_ours: AssertionError")
    assert sorted(report[2:4]) == [
        "  1 cases not concerned: asks for names that are absent",
        "  1 cases not concerned: failed with DGL",
    ]
    assert report[4] == "  absent names: dgl.topk_nodes" and result.returncode == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "expected --dgl-tests, --pyg-tests or --dgl-names"),
        (["--dgl-names", "pyg"], "--dgl-names: expected .*common in a clone"),
        (["--dgl-tests", "pyg"], "--dgl-tests: expected .*test_nn.py in a clone"),
        pytest.param(
            ["--dgl-tests", "dgl", "-k", "no_such_test"],
            "--dgl-tests: expected tests that can be collected",
            marks=exhaustive,
        ),
    ],
)
def test_errors(run, repositories, arguments, message):
    paths = [repositories / x if x in ("dgl", "pyg") else x for x in arguments]
    result = run(*paths)
    assert result.returncode == 2
    assert re.search(message, result.stderr), result.stderr
