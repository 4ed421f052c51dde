"""Every call of the table of bad inputs raises its error, in words that name what is wrong."""

import importlib.util
from pathlib import Path

import bad_input
import bad_layers
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", [*bad_input.cases(), *bad_layers.cases()], ids=str)
def test_refused(case):
    with pytest.raises(case.error) as raised:
        case.call()
    message = str(raised.value)
    missing = [words for words in case.words if words not in message]
    assert not missing, f"expected {missing} in: {message}"


def test_the_page_is_up_to_date():
    """docs/internals/errors.md is what `python scripts/error_table.py` writes."""
    pytest.importorskip("torch_geometric")
    spec = importlib.util.spec_from_file_location("error_table", ROOT / "scripts" / "error_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / "docs" / "internals" / "errors.md").read_text() == script.page()
