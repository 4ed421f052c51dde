"""scripts/gradient_errors.py, and its table in docs/numerics.md."""

import importlib.util
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("gradient_errors", ROOT / "scripts" / "gradient_errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", ["a common part, 3 + 0.1 ε", "sharp scores", "edge weights", "dropout 0.5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["GAT", "GATv2", "dot"])
def test_at_most_twice_the_error_of_plain_operations(program, name, dtype, case):
    errors = program.measure(name, case, dtype, "cpu")
    assert 0 < errors["plain"] < 10 and errors["CPU"] <= 2 * errors["plain"]


def test_rows_of_one_edge(program):
    """Nothing to distribute: the gradients of the scores are 0, or rounding of numbers around 100."""
    for name in program.FUNCTIONS:
        assert program.measure(name, "rows of one edge", torch.bfloat16, "cpu")["CPU"] < 1e-4


def test_the_page_has_the_table(program):
    table = (ROOT / "docs" / "numerics.md").read_text().partition(program.BEGIN)[2].partition(program.END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    kinds = [str(dtype).removeprefix("torch.") for dtype in program.DTYPES]
    expected = [[f, c, k] for f in program.FUNCTIONS for c in program.CASES for k in kinds]
    assert [row[:3] for row in rows[2:]] == expected and all(len(row) == 5 and row[4] for row in rows[2:])
