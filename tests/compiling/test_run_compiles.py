"""What ``dfgnn.run`` compiles in a script, what compiling would gain, and compiled code on disk."""

import json
import re

import pytest
import torch
from torch_geometric.nn import GATConv

import dfgnn
from dfgnn.run.gains import CAPTURE, COMPILE, FLAG, Gains, lines

SCRIPT = """
import torch
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

class Mine(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.weight = torch.nn.Parameter(torch.ones(8))
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * self.weight)
    def message(self, x_i, x_j, index, size_i):
        weight = softmax((x_i * x_j).sum(-1), index, num_nodes=size_i)
        return weight.unsqueeze(-1) * x_j

class Other(torch.nn.Module):
    def forward(self, x):
        return x.sin()

x, edge_index = torch.randn(5, 8), torch.tensor([[0, 1, 2], [1, 2, 2]])
model = torch.nn.Sequential(Other())
with torch.no_grad():
    print(Mine()(x, edge_index).shape, model(x).shape)
"""


@pytest.mark.slow
def test_run(dfgnn_run, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = dfgnn_run("--compile", "--json", "report.json", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([5, 8])" in done.stdout and "1 x __main__.Mine: compiled" in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())["compiled"]
    assert report["modules"] == {"__main__.Mine": 1}
    assert report["attention"] == [{"file": "script.py", "line": 13, "form": "dot_attention", "reason": ""}]


TRAINING = """
layer = Mine()
for _ in range(4):
    loss = torch.rand(()) + layer(torch.randn(5, 8), edge_index).sum()
    loss.backward()
    print(loss.item())
"""


@pytest.mark.gpu
def test_run_measures_what_capturing_would_gain():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GATConv(8, 4)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index).relu()

    model = Net().to("cuda")
    x, edge_index = torch.randn(50, 8, device="cuda"), torch.randint(50, (2, 200), device="cuda")
    dfgnn.accelerate(model)
    gains = Gains()
    gains.install()
    try:
        for _ in range(4):
            model(x, edge_index).sum().backward()
    finally:
        gains.remove()
    (row,) = gains.rows()
    assert row["class"].endswith("Net") and set(row["lines"]) == {COMPILE, FLAG, CAPTURE}
    slower = row["lines"].pop(FLAG)  # of one small layer, as fast as the others that share the GPU let it be
    assert isinstance(slower, float) or slower == "RuntimeError: its CUDA graphs are not faster"
    assert all(isinstance(took, float) for took in row["lines"].values()), row
    row["lines"][FLAG] = slower
    assert len(lines([row])) == 2


@pytest.mark.slow
def test_run_measures_what_compiling_would_gain(dfgnn_run, tmp_path):
    """The gain is measured in a class's third call, and does not change the script's numbers."""
    script = f"{SCRIPT}torch.manual_seed(0)\n{TRAINING}"
    (tmp_path / "script.py").write_text(script)
    printed = []
    for options in ((), ("--gain", "--json", "report.json")):
        done = dfgnn_run(*options, "script.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    (row,) = json.loads((tmp_path / "report.json").read_text())["gains"]
    assert row["class"] == "__main__.Mine" and row["calls"] == 3
    ((line, took),) = row["lines"].items()
    assert line == "dfgnn.compile(model)" and row["milliseconds"] > 0 and took > 0
    assert f"a call of __main__.Mine, forward and backward, takes {row['milliseconds']:.2f} ms" in done.stderr
    assert f"    {line}: {took:.2f} ms, " in done.stderr


def test_compiled_code_on_disk_is_of_one_version():
    assert re.search(r"\bdfgnn \d+\.\d+", torch.compiler.config.cache_key_tag)
