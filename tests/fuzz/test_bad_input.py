"""Every call of the table of bad inputs raises its error, in words that name what is wrong."""

import bad_blocks
import bad_graphs
import bad_input
import bad_layers
import pytest
from loading import load

CASES = [*bad_input.cases(), *bad_graphs.cases(), *bad_blocks.cases(), *bad_layers.cases()]


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


def test_the_page_of_errors():
    """What docs/conf.py writes as docs/internals/errors.md: every case, with the message of its error."""
    pytest.importorskip("torch_geometric")
    text = load("scripts/error_table.py").page()
    assert text.count("\n- ") == len(CASES) and all(f"## `{case.where}`" in text for case in CASES)
    assert "`dot_attention: edge.key: expected shape [5, 2, 8] or [5, 8], got [5, 1, 8]; " in text
