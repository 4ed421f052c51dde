"""The rules of docs/architecture.md, "Rooms and rules": no arrow runs up, no circle."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Packages of dfgnn/ ("rooms"), the lowest first: each may import those of the lines above it, but none of its
# own line.
FLOORS = """
runtime
sparse
plan
graph
reference capturing
engine
functional
distributed
nn compiling
compat switch
__init__
env run
bench
"""
# Folders of csrc/, and what each may include besides itself and the standard library.
SEES = {
    "core": "",
    "cpu": "core",
    "cuda": "core",
    "torch": "core cpu/blocks.h cpu/by_index.h cpu/checksum.h cpu/engine.h cpu/edge_products.h "
    "cpu/edge_terms.h cpu/pair_scores.h cpu/second_order.h cpu/structure.h cpu/terms.h "
    "cuda/attention/blocks.h cuda/attention/merge_parts.h cuda/engine.h cuda/edges/edge_terms.h "
    "cuda/graph/structure.h cuda/attention/terms.h cuda/second_order/second_order.h",
}


def test_the_page_has_these_rooms():
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms and rules")[2]
    lines = text.partition("```text\n")[2].partition("```")[0].splitlines()
    rooms = [name.rstrip("/") for line in lines for name in line.partition("  ")[0].split()]
    assert [{"dfgnn": "__init__"}.get(name, name) for name in rooms] == FLOORS.split()


def imports() -> dict[str, set[str]]:
    """Modules of dfgnn and the modules that they import, at any place, as paths from dfgnn/."""
    package = ROOT / "dfgnn"
    files = {path.relative_to(package).with_suffix("").as_posix(): path for path in package.rglob("*.py")}

    def module(name: str) -> str | None:
        return next((m for m in (name, f"{name}/__init__".lstrip("/")) if m in files), None)

    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        folder = name.split("/")[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("dfgnn")):
                base = ["dfgnn", *folder][: len(folder) + 2 - node.level] if node.level else []
                whole = "/".join([*base, *(node.module or "").split(".")]).strip("/")
                targets = [module(f"{whole}/{alias.name}"[6:]) or module(whole[6:]) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.split(".")[0] == "dfgnn"]
                targets = [module(n.replace(".", "/")[6:]) for n in names]
            else:
                continue
            found[name] |= {target for target in targets if target and target != name}
    return found


def includes() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Files of csrc with the files, and with the system headers, that they include."""
    own: dict[str, set[str]] = {}
    system: dict[str, set[str]] = {}
    for path in (p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"}):
        name, text = path.relative_to(ROOT / "csrc").as_posix(), path.read_text()
        found = [(path.parent / x, ROOT / "csrc" / x) for x in re.findall(r'#include "(.+)"', text)]
        targets = [next(p for p in places if p.is_file()).resolve() for places in found]
        own[name] = {target.relative_to(ROOT / "csrc").as_posix() for target in targets}
        system[name] = set(re.findall(r"#include <(.+)>", text))
    return own, system


def test_python():
    floor = {room: i for i, rooms in enumerate(FLOORS.split("\n")) for room in rooms.split()}
    found = imports()
    assert found["plan/tuning"] >= {"runtime/arguments", "runtime/timing", "plan/planner"}
    assert found["bench/workloads"] >= {"functional/__init__", "graph/__init__"}
    for name, targets in found.items():
        room = name.split("/")[0]
        for other in {target.split("/")[0] for target in targets} - {room}:
            assert floor[other] < floor[room], f"dfgnn/{name} imports {other}"
    assert list(TopologicalSorter(found).static_order())  # raises CycleError, which names the circle


def test_cpp():
    own, system = includes()
    assert own["torch/attention.h"] and system["torch/checks.h"]
    for name, targets in own.items():
        room = name.split("/")[0]
        for target in targets:
            allowed = {room, *SEES[room].split()}
            assert allowed & {target, target.split("/")[0]}, f"csrc/{name} includes {target}"
    for name, headers in system.items():
        for header in headers:
            room = name.split("/")[0]
            assert room == "torch" or not re.match("torch|ATen|c10|Python", header), (name, header)
            assert room == "cuda" or not header.startswith("cuda"), (name, header)
    assert list(TopologicalSorter(own).static_order())


@pytest.mark.parametrize("broken", ["reads_up", "circle"])
def test_the_rules_notice(broken, tmp_path, monkeypatch):
    """A room that imports a higher one, and two modules that import each other, one of them within a
    function, break the rules."""
    for name in ("runtime/ops", "sparse/csr", "plan/a", "plan/b"):
        path = tmp_path / f"dfgnn/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if broken == "reads_up":
        (tmp_path / "dfgnn/runtime/ops.py").write_text("def f():\n    from ..sparse.csr import CSR\n")
    else:
        (tmp_path / "dfgnn/plan/a.py").write_text("from .b import x\n")
        (tmp_path / "dfgnn/plan/b.py").write_text("def f():\n    from dfgnn.plan import a\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    found = imports()
    if broken == "reads_up":
        assert found["runtime/ops"] == {"sparse/csr"}
    else:
        assert found["plan/a"] == {"plan/b"} and found["plan/b"] == {"plan/a"}
        with pytest.raises(ValueError, match="cycle"):
            list(TopologicalSorter(found).static_order())


def test_private_names_of_torch_are_in_one_file():
    """When a release of PyTorch renames a private name, only that file has to change."""
    private = re.compile(r"torch\.(ops\.\w+\.)?_[A-Za-z]|from torch[\w.]* import _|from torch\._")
    places = {p.name for p in (ROOT / "dfgnn").rglob("*.py") if private.search(p.read_text())}
    assert places == {"torch_internals.py"}


def test_every_fault_can_be_made(monkeypatch):
    """Each fault of scripts/mutants.txt finds the lines that it replaces exactly once in its file. Those of
    C++ are all in one library, where the switch MUTATED turns one of them on."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import mutants

    faults = mutants.read_mutants()
    texts = {fault.file: (ROOT / fault.file).read_text() for fault in faults}
    assert len(faults) > 60 and [f.name for f in faults if texts[f.file].count(f.before) != 1] == []
    assert [f.name for f in faults if f.is_native and "MUTATED" not in f.after] == []
