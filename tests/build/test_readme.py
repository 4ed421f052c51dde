"""README.md and the pages of docs/ are followed literally: every block of Python runs, every link leads
somewhere.

A page's blocks share one namespace, in their order; those of the README and of the cookbook run alone. A
block that needs a library which is not installed is left out, as are blocks that need its names; the reason
of the skip names them. ``docs/adding_a_score.md`` is run, and its results are checked, by
``test_adding_a_score.py``.
"""

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "LOG.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "scripts" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
ALONE = "README.md", "cookbook.md"
#: Columns of a block of code that fit beside a page's contents.
WIDEST = 80
#: Pages whose blocks are wider yet.
WIDE = {
    "adding_a_score.md",
    "architecture.md",
    "benchmarks.md",
    "numerics.md",
    "small_graphs.md",
    "training.md",
}
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
OPTIONAL = {
    "dgl": "dgl",
    "torch_geometric": "torch_geometric",
    "scipy": "scipy",
    "sknetwork": "scikit-network",
}


def blocks(page: Path):
    """(line, code) of each block."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]


def absent(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return True
    return False


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p) and p.name != "adding_a_score.md"], ids=name_of
)
def test_every_block_runs(page, monkeypatch, tmp_path):
    monkeypatch.setenv("DGLBACKEND", "pytorch")
    monkeypatch.chdir(tmp_path)  # for what a block writes
    left_out: list[str] = []
    for number, (line, code) in enumerate(blocks(page)):
        if not number or page.name in ALONE:
            module = ModuleType("a_page_of_the_documentation")
            # PyG looks up the module of a user's layer in sys.modules, for the types of its messages.
            monkeypatch.setitem(sys.modules, module.__name__, module)
        try:
            # Empty lines before it give errors the line of the page.
            exec(compile("\n" * line + code, str(page), "exec"), vars(module))
        except ImportError as error:
            names = [name for name, text in OPTIONAL.items() if text in str(error) and absent(name)]
            if not names:
                raise
            left_out.append(f"line {line} needs {', '.join(names)}")
        except NameError as error:
            if not left_out:
                raise
            left_out.append(f"line {line}: {error}")
    if left_out:
        pytest.skip(f"{name_of(page)}: all other blocks ran; {'; '.join(left_out)}")


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CONTRIBUTING.md"], ids=name_of)
def test_code_fits_beside_a_pages_contents(page):
    lines = [
        line
        for block in re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if len(line) > WIDEST
    ]
    assert bool(lines) == (page.name in WIDE), lines


def test_the_quickstart_is_short():
    text = (ROOT / "README.md").read_text().partition("## Quickstart")[2]
    code = BLOCK.search(text)[1]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 15


def anchors(page: Path) -> set[str]:
    """The names that headings have on GitHub and, by myst_heading_anchors, on the site."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists() and ROOT in (found, *found.parents), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(found), f"{name_of(page)}: {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_are_there(page):
    named = r"`((?:benchmarks|csrc|dfgnn|docs|examples|scripts|tests)/[\w./*-]+)`"
    missing = [path for path in re.findall(named, page.read_text()) if not any(ROOT.glob(path))]
    assert not missing


def test_citation_and_changelog_are_of_this_version():
    citation, changelog = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.md"))
    assert re.search(r"^version: (.*)$", citation, flags=re.MULTILINE)[1] == metadata.version("dfgnn")
    released = re.search(r'^date-released: "(.*)"$', citation, flags=re.MULTILINE)[1]
    assert f"## [{metadata.version('dfgnn')}] - {released}\n" in changelog
