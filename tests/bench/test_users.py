"""scripts/users.py on a checkout that we wrote: what it trains, compares and reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_page_shows_the_results():
    table = users(ROOT, "--table", "--json", RESULTS).stdout
    page = (ROOT / "docs" / "users.md").read_text()
    assert f"<!-- users -->\n{table}<!-- /users -->" in page
    for row in json.loads(RESULTS.read_text())["rows"]:
        losses = row["losses"]
        assert losses["with"] == pytest.approx(losses["without"], rel=row["tolerance"]), row["case"]
        assert row["lines"] <= 3


def users(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "users.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_a_repository(tmp_path):
    checkout, results = tmp_path / "Multi-GNN", tmp_path / "users.json"
    checkout.mkdir()
    (checkout / "models.py").write_text(MODEL.replace("SCALE", "1.0"))
    done = users(tmp_path, "--only", "Multi-GNN", "SMART", "--steps", 2, "--rounds", 1, "--json", results)
    assert "SMART: no checkout of rainmaker22/SMART" in done.stderr
    (row,) = json.loads(results.read_text())["rows"]
    assert row["losses"]["without"] == pytest.approx(row["losses"]["with"], rel=1e-4)
    assert len(row["losses"]["with"]) == 2 and len(row["seconds"]["with"]) == 1
    (layer,) = row["report"]["layers"]
    assert layer["layer"].endswith("GATConv") and layer["fused"] and not layer["fell_back"]
    assert "| 1 GATConv fused |" in done.stdout
    assert (
        users(tmp_path, "--table", "--json", results).stdout.count("Multi-GNN") == 2
    )  # its name and address


def test_losses_that_differ(tmp_path):
    """The exit status and a line say so; here they depend on whether dfgnn is there."""
    (tmp_path / "Multi-GNN").mkdir()
    scale = "(2.0 if 'dfgnn' in __import__('sys').modules else 1.0)"
    (tmp_path / "Multi-GNN" / "models.py").write_text(MODEL.replace("SCALE", scale))
    done = users(tmp_path, "--only", "Multi-GNN", "--steps", 2, "--rounds", 1)
    assert done.returncode == 1 and "Multi-GNN: losses differ by" in done.stdout


def test_one_that_fails(tmp_path):
    (tmp_path / "Multi-GNN").mkdir()
    (tmp_path / "Multi-GNN" / "models.py").write_text("raise ImportError('of a dependency')")
    done = users(tmp_path, "--only", "Multi-GNN")
    assert done.returncode == 1 and "of a dependency" in done.stderr
