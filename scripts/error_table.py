"""The errors that bad input gives, as the page docs/internals/errors.md, which docs/conf.py writes when the
site is built.

The calls are those of bad_input.py, bad_graphs.py, bad_blocks.py and bad_layers.py in tests/fuzz; the
messages are what they raise.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzz"))

import bad_blocks
import bad_graphs
import bad_input
import bad_layers

_HEAD = """# Errors: what wrong arguments give

What wrong arguments give: the exception and its message, which says what was expected and what came.
Nothing has been computed or changed by then. The calls are those of `tests/fuzz/bad_input.py`,
`bad_graphs.py`, `bad_blocks.py` and `bad_layers.py`, which the tests check.

In the examples the graph has 4 sources, 3 destinations and 5 edges; there are 2 heads of 8 elements.
"""


def raised(case) -> Exception:
    """The error that the call of the case has to raise."""
    try:
        case.call()
    except case.error as error:
        return error
    raise AssertionError(f"{case}: no error")


def _code(text: str) -> str:
    """`text` as code, which Markdown leaves unchanged."""
    text, fence = " ".join(text.split()), "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def page() -> str:
    parts = [_HEAD]
    sections: dict[str, list] = {}
    for case in (*bad_input.cases(), *bad_graphs.cases(), *bad_blocks.cases(), *bad_layers.cases()):
        sections.setdefault(case.where, []).append(case)
    for where, group in sections.items():
        parts.append(f"\n## `{where}`\n\n")
        for case in group:
            error, argument = raised(case), f"`{case.argument}`, " if case.argument else ""
            parts.append(f"- {argument}{case.wrong}: {type(error).__name__}\\\n  {_code(str(error))}\n")
    return "".join(parts)
