"""What holds for all Markdown pages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDEST = 160  # characters of a table's cell, with the spaces around it


def test_cells_of_tables_are_short():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]
    rows = [(page, line) for page in pages for line in page.read_text().split("\n") if line.startswith("|")]
    assert len(rows) > 300
    wide = [(page.name, cell) for page, row in rows for cell in row.split("|") if len(cell) > WIDEST]
    assert not wide, wide
