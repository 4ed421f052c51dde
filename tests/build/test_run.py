"""python -m dfgnn.run: a script unchanged, with either library's layers, and what the report says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import helper
import torch
from torch_geometric.nn import GAT, GATConv, GCNConv

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GATConv(8, 4, heads=2)
        self.second = GCNConv(8, 8)
        self.third = GATConv(8, 4, aggr="max")
        self.rest = GAT(4, 4, num_layers=2)

    def forward(self, x, edge_index):
        x = self.second(self.first(x, edge_index), edge_index)
        return self.rest(self.third(x, edge_index), edge_index)

torch.manual_seed(0)
edge_index = torch.randint(10, (2, 30))
out = Network()(torch.randn(10, 8), edge_index)
print(__name__, sys.argv[1:], helper.NAME, f"{float(out.sum().detach()):.4f}")
if "fail" in sys.argv:
    sys.exit("no more")
if "raise" in sys.argv:
    raise ValueError("as told")
"""


def run(folder, *words):
    (folder / "script.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("NAME = 'beside the script'")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dfgnn.run", "--json", str(folder / "report.json"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=folder)
    return done, json.loads((folder / "report.json").read_text())


def test_report(tmp_path):
    ours, report = run(tmp_path, tmp_path / "script.py", "a", "--flag")
    theirs, plain = run(tmp_path, "--impl", "pyg", tmp_path / "script.py", "a", "--flag")
    assert ours.returncode == theirs.returncode == 0, ours.stderr
    # The script sees its own arguments and neighbours, and computes the same.
    assert ours.stdout == theirs.stdout and ours.stdout.startswith(
        "__main__ ['a', '--flag'] beside the script"
    )
    rows = {row["layer"]: row for row in report["layers"]}
    assert rows["dfgnn.nn.pyg.gat.GATConv"]["constructed"] == 4
    assert rows["dfgnn.nn.pyg.gat.GATConv"]["fell_back"] == ["aggr='max'"]
    assert rows["torch_geometric.nn.conv.gcn_conv.GCNConv"]["fell_back"] == ["no such layer in dfgnn"]
    assert [row["fused"] for row in plain["layers"]] == [False, False]
    assert report["seconds"] > 0 and report["peak_memory"]["host"] > 1e6
    assert "ran its own forward: aggr='max'" in ours.stderr and "why: no such layer" in ours.stderr
    assert "why" not in theirs.stderr and "peak memory: host" in theirs.stderr


@pytest.mark.parametrize("how, said", [("fail", "no more"), ("raise", "ValueError: as told")])
def test_a_script_that_fails(how, said, tmp_path):
    done, report = run(tmp_path, "script.py", how)
    assert done.returncode == 1 and said in done.stderr
    assert report["layers"]


@pytest.mark.parametrize("gpus, options, enabled", [(1, [], False), (1, ["--backward-thread"], True),
                                                    (2, [], True), (0, [], True)])  # fmt: skip
def test_backward_in_the_calling_thread(gpus, options, enabled, tmp_path, monkeypatch, capsys):
    """Where one GPU is seen, and as long as the script runs."""
    import torch

    import dfgnn.run

    script = tmp_path / "script.py"
    script.write_text("import torch\nprint('enabled:', torch._C._is_multithreading_enabled())")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "report.json"
    assert dfgnn.run.main(["--impl", "pyg", *options, "--json", str(path), str(script)]) == 0
    printed = capsys.readouterr()
    assert f"enabled: {enabled}" in printed.out
    assert ("backward ran in the thread" in printed.err) == (not enabled)
    assert json.loads(path.read_text())["backward_in_calling_thread"] == (not enabled)
    assert torch._C._is_multithreading_enabled()


def test_module_and_missing_script(tmp_path):
    done, report = run(tmp_path, "-m", "script", "b")
    assert done.returncode == 0 and "__main__ ['b']" in done.stdout and report["layers"][0]["fused"]
    for arguments, error in (
        (["nothing.py"], "error: script: expected a file, got nothing.py\n"),
        ([], "error: the following arguments are required: script\n"),
    ):
        command = [sys.executable, "-m", "dfgnn.run", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
        assert done.returncode == 2 and done.stderr.endswith(error)


def test_a_dgl_script(tmp_path):
    pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
    text = "import dgl, torch\nfrom dgl.nn import GATConv\ng = dgl.add_self_loop(dgl.rand_graph(9, 20))\n"
    (tmp_path / "other.py").write_text(text + "print(GATConv(4, 2, 2)(g, torch.randn(9, 4)).shape)")
    done, report = run(tmp_path, tmp_path / "other.py")
    assert done.returncode == 0 and "torch.Size([9, 2, 2])" in done.stdout
    assert [(row["layer"], row["fused"]) for row in report["layers"]] == [("dfgnn.nn.dgl.GATConv", True)]
