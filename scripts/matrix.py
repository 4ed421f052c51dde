"""Try what a release consists of, in fresh environments that know no other index than its folder:

    python scripts/matrix.py --pythons python3.10,python3.13 --torches 2.10.0,2.13.0
    python scripts/matrix.py --environments build/matrix/3.11-2.15.0 --tests tests/compiling,tests/functional

For each Python and each torch an environment with torch is made below build/matrix, by that Python's pip with
its own settings, so that PIP_INDEX_URL chooses the variant of torch; --environments names ones that exist.
In a new environment above each of them, `pip install --no-index --find-links dist dfgnn` must choose the
wheel for this platform, then the wheel for any platform is installed by its name. In both the first attention
is compared with the reference, and `python -m dfgnn.env` must say what is loaded. --tests runs tests of this
source tree on the installed wheel; pytest and what the tests import are installed for it.

Prints a table, the slowest first: seconds of the installation without torch, and of a new process from its
start to its first result. Exit status 1: something did not pass.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dfgnn.runtime.programs import Parser, existing_folder, listed  # noqa: E402

FOLDER = ROOT / "build" / "matrix"
FIRST_RESULT = """
import torch, dfgnn
graph = dfgnn.Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 1, 0]]), num_nodes=4)
x, a, b = torch.randn(4, 2, 8), torch.randn(4, 2), torch.randn(4, 2)
out = dfgnn.functional.gat_attention(graph, x, a, b)
torch.testing.assert_close(out, dfgnn.reference.gat_attention(graph, x, a, b))
"""
TESTS_NEED = [
    "pytest>=9",
    "hypothesis>=6.100",
    "pytest-xdist>=3.6",
    "numpy",
    "scipy",
    "torch_geometric>=2.8,<2.9",
]


class Failed(Exception):
    """A step that did not pass, with the end of what it printed."""


class Row(NamedTuple):
    environment: str
    artifact: str
    megabytes: float
    install: float
    first: float
    note: str


def run(*command: Any) -> str:
    """What a command prints, which sees no packages but its environment's."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    done = subprocess.run([*map(str, command)], cwd=FOLDER, env=environment, **pipes)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}: {' '.join(done.stdout.strip().splitlines()[-3:])}")
    return done.stdout


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def with_torch(python: str, torch: str) -> Path:
    """The environment of this Python and torch, made unless it exists."""
    version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    place = FOLDER / f"{version}-{torch}"
    if not python_of(place).exists():
        run(python, "-m", "venv", place)
        run(python_of(place), "-m", "pip", "install", "--quiet", "--no-compile", f"torch=={torch}", "numpy")
    return place


def above(environment: Path, name: str) -> Path:
    """A new, empty environment that also sees the packages of another one, its pip too.

    Packages of its own would hide the other's: venv brings setuptools to Python 3.10 and 3.11, of a version
    that is too old for torch, and no index has a newer one here.
    """
    place = FOLDER / "tried" / name
    python = str(python_of(environment))
    run(python, "-m", "venv", "--clear", "--without-pip", place)
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, its = (run(python_of(of), "-c", find).strip() for of in (place, environment))
    Path(own, "below.pth").write_text(its + "\n")
    return place


def check(place: Path, compiled: bool) -> tuple[float, str]:
    """(seconds of a new process until its first result, what `python -m dfgnn.env` has to say)."""
    seconds = []
    for _ in range(2):  # the first process writes the modules' byte code, and reads from a cold disk
        start = time.perf_counter()
        printed = run(python_of(place), "-c", FIRST_RESULT)
        seconds.append(time.perf_counter() - start)
    said = printed.count("no compiled kernels")
    if said != (not compiled):
        raise Failed(f"the warning that there are no kernels was printed {said} times")
    report = json.loads(run(python_of(place), "-W", "ignore", "-m", "dfgnn.env", "--json"))
    loaded = {name: library["loaded"] for name, library in report["libraries"].items()}
    if loaded["cpu"] != compiled or bool(report["cpu"]["kernels"]) != compiled:
        raise Failed(f"dfgnn.env: {report['libraries']}, {report['cpu']}")
    kernels = report["cpu"]["kernels"] or "plain PyTorch"
    return seconds[0], f"torch {report['torch']}: {kernels}" + (
        ", CUDA library loaded" if loaded["cuda"] else ""
    )


def try_artifacts(environment: Path, dist: Path, tests: tuple[str, ...], options: list[str]) -> list[Row]:
    """options: of pip."""
    if any(environment.glob("lib/python3*/site-packages/dfgnn-*.dist-info")):
        raise Failed("has a dfgnn, which would be tried in place of the wheels: pip uninstall dfgnn there")
    rows = []
    (pure,) = dist.glob("*-none-any.whl")
    for name, wanted in (("wheel", "dfgnn"), ("pure wheel", pure)):
        place = above(environment, f"{environment.name}-{name.replace(' ', '-')}")
        pip = python_of(place), "-m", "pip", "--disable-pip-version-check"
        start = time.perf_counter()
        run(*pip, "install", *options, "--no-index", "--find-links", dist, wanted)
        install = time.perf_counter() - start
        (tag,) = place.glob("lib/python3*/site-packages/dfgnn-*.dist-info/WHEEL")
        tags = [line.split()[1] for line in tag.read_text().splitlines() if line.startswith("Tag:")]
        native = name == "wheel"
        if native == (tags == ["py3-none-any"]):
            raise Failed(f"pip chose the wheel for {', '.join(tags)}")
        chosen = (
            pure if not native else next(x for x in dist.glob("*.whl") if tags[0].split("-")[2] in x.name)
        )
        first, note = check(place, native)
        if native and tests:
            run(*pip, "install", "--quiet", *TESTS_NEED)
            last = run(place / "bin" / "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c",
                       ROOT / "pyproject.toml", "--numprocesses=2", *(ROOT / t for t in tests))  # fmt: skip
            note += "; tests: " + last.strip().splitlines()[-1].strip("= ")
        rows.append(Row(environment.name, name, chosen.stat().st_size / 1e6, install, first, note))
    return rows


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--dist", type=existing_folder, default=ROOT / "dist", help="what is tried")
    parser.add_argument("--pythons", type=listed(), default=(sys.executable,), help="interpreters")
    parser.add_argument("--torches", type=listed(), default=(), help="versions of torch for each of them")
    parser.add_argument("--environments", type=listed(existing_folder), default=(), help="that have torch")
    parser.add_argument(
        "--no-deps", action="store_true", help="where torch was installed without the packages that it names"
    )
    parser.add_argument("--tests", type=listed(), default=(), help="files and folders of tests")
    args = parser.parse_args()
    if not (args.torches or args.environments):
        parser.error("--torches or --environments: expected at least one")
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failures = []
    makers = [(f"{python}, torch {torch}", lambda p=python, t=torch: with_torch(p, t))
              for python in args.pythons for torch in args.torches]  # fmt: skip
    makers += [(place.name, place.absolute) for place in args.environments]
    for name, make in makers:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            rows += try_artifacts(make(), args.dist.absolute(), args.tests, ["--no-deps"] * args.no_deps)
        except Failed as error:
            failures.append(f"{name}: {error}")
    print("| Python-torch | artifact | MB | installation, s | first result, s | |\n|---|---|--:|--:|--:|---|")
    for row in sorted(rows, key=lambda row: -row.first):
        print(
            f"| {row.environment} | {row.artifact} | {row.megabytes:.1f} | {row.install:.1f} | "
            f"{row.first:.1f} | {row.note} |"
        )
    for failure in failures:
        print(f"matrix: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
