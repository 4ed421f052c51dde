"""scripts/users.py on a checkout that we wrote: what it trains, compares and reports."""

import json
from functools import partial
from pathlib import Path

import pytest
from covering import exhaustive

pytest.importorskip("torch_geometric")
ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch_geometric.nn import GATConv

class GATe(torch.nn.Module):
    def __init__(self, num_features, num_gnn_layers, n_hidden, n_heads, edge_updates, edge_dim):
        super().__init__()
        self.conv = GATConv(num_features, n_hidden // n_heads, n_heads, edge_dim=edge_dim)
        self.out = torch.nn.Linear(n_hidden, 2)

    def forward(self, x, edge_index, edge_attr):
        return SCALE * self.out(self.conv(x, edge_index, edge_attr)).relu()[edge_index[0]]
"""


RESULTS = ROOT / "benchmarks" / "results" / "cpu-users.json"


@pytest.fixture
def users(plain_python):
    environment = {"PYTHONPATH": str(ROOT)}
    return partial(plain_python.forks.program, ROOT / "scripts" / "users.py", environment=environment)


def test_the_page_shows_the_results(users):
    table = users(ROOT, "--table", "--json", RESULTS).stdout
    page = (ROOT / "docs" / "users.md").read_text()
    assert f"<!-- users -->\n{table}<!-- /users -->" in page
    for row in json.loads(RESULTS.read_text())["rows"]:
        losses = row["losses"]
        assert losses["with"] == pytest.approx(losses["without"], rel=row["tolerance"]), row["case"]
        assert row["lines"] <= 3


def test_the_page_shows_the_results_of_a_gpu(plain_python):
    results = RESULTS.with_name("h200-users.json")
    program = ROOT / "scripts" / "users_table.py"
    table = plain_python.forks.program(program, results, environment={"PYTHONPATH": str(ROOT)}).stdout
    page = (ROOT / "docs" / "users.md").read_text()
    assert f"<!-- users on a GPU -->\n{table}<!-- /users on a GPU -->" in page


SCALES = {
    "the same": "1.0",
    # With dfgnn the losses are others; the program must say so in its exit status and in a line.
    "others": "(2.0 if 'dfgnn' in __import__('sys').modules else 1.0)",
}


@exhaustive
@pytest.mark.parametrize("losses", SCALES)
def test_a_repository(users, tmp_path, losses):
    checkout, results = tmp_path / "Multi-GNN", tmp_path / "users.json"
    checkout.mkdir()
    (checkout / "models.py").write_text(MODEL.replace("SCALE", SCALES[losses]))
    done = users(tmp_path, "--only", "Multi-GNN", "SMART", "--steps", 2, "--rounds", 1, "--json", results)
    assert "SMART: no checkout of rainmaker22/SMART" in done.stderr
    (row,) = json.loads(results.read_text())["rows"]
    assert len(row["losses"]["with"]) == 2 and len(row["seconds"]["with"]) == 1
    is_same = row["losses"]["without"] == pytest.approx(row["losses"]["with"], rel=1e-4)
    assert is_same == (losses == "the same")
    if losses == "others":
        assert done.returncode == 1 and "Multi-GNN: losses differ by" in done.stdout
    (layer,) = row["report"]["layers"]
    assert layer["layer"].endswith("GATConv") and layer["fused"] and not layer["fell_back"]
    assert "| 1 GATConv fused; sums by an index on dfgnn's kernels |" in done.stdout
    table = users(tmp_path, "--table", "--json", results).stdout
    assert table.count("Multi-GNN") == 2  # its name and address


@exhaustive
def test_one_that_fails(users, tmp_path):
    (tmp_path / "Multi-GNN").mkdir()
    (tmp_path / "Multi-GNN" / "models.py").write_text("raise ImportError('of a dependency')")
    done = users(tmp_path, "--only", "Multi-GNN")
    assert done.returncode == 1 and "of a dependency" in done.stderr
