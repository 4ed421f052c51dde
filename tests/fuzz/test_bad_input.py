"""Every call of the table of bad inputs raises its error, in words that name what is wrong."""

import importlib.util
from pathlib import Path

import bad_input
import bad_layers
import pytest

ROOT = Path(__file__).parents[2]


CASES = [*bad_input.cases(), *bad_layers.cases()]


def what_is_wrong(case):
    """What is wrong with the error that the case raises, or None if the error is as it has to be."""
    try:
        case.call()
    except case.error as error:
        missing = [words for words in case.words if words not in str(error)]
        return f"{case}: expected {missing} in: {error}" if missing else None
    except Exception as error:
        return f"{case}: {error!r}"
    return f"{case}: no error"


@pytest.mark.parametrize("where", dict.fromkeys(case.where for case in CASES))
def test_refused(where):
    """All cases of the function ``where``, each with one wrong argument."""
    wrong = [text for case in CASES if case.where == where and (text := what_is_wrong(case))]
    assert not wrong, "\n".join(wrong)


def test_the_page_is_up_to_date():
    """docs/internals/errors.md is what `python scripts/error_table.py` writes."""
    pytest.importorskip("torch_geometric")
    spec = importlib.util.spec_from_file_location("error_table", ROOT / "scripts" / "error_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / "docs" / "internals" / "errors.md").read_text() == script.page()
