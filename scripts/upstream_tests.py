"""DGL's and torch_geometric's own tests of the layers, with their layers and with dfgnn's in their place; and
DGL's own tests of its names, with DGL and with dfgnn.compat in its place:

    python scripts/upstream_tests.py --dgl-tests DIR --pyg-tests DIR --dgl-names DIR

A DIR is a clone of the library's repository (dmlc/dgl at the tag of the installed version, such as 1.1.3;
pyg-team/pytorch_geometric). Every case runs twice in one process, once as it is and once under
``dfgnn.patch``, as upstream draws some of its graphs in an order that differs between processes. Prints what
passes and fails only with dfgnn's layers, and exits with 1 if that is anything. ``FULL_TEST=1`` in the
environment makes torch_geometric's tests include TorchScript.

Tests of names run in two processes. Concerned is a test that passes with DGL (dgl.sparse, which needs a
library that DGL's wheels lack for this torch, is not run there) and asks for no name that dfgnn.compat does
not have; those names are listed. It exits with 1 if a concerned test does not pass.
"""

import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

os.environ.setdefault("DGLBACKEND", "pytorch")

import pytest

import dfgnn
from dfgnn.runtime.programs import Parser, existing_folder
from dfgnn.switch.replace import LIBRARIES

#: Where the tests are in a repository, and which of them are of layers that dfgnn has.
SOURCES = {
    "dgl": (
        ["tests/python/pytorch/nn/test_nn.py"],
        " or ".join(f"test_{name}_conv" for name in ("gat", "gatv2", "egat", "edgegat", "dotgat", "agnn"))
        + " or test_hgt",
    ),
    "pyg": (
        [
            f"test/nn/conv/test_{name}_conv.py"
            for name in ("gat", "gatv2", "transformer", "agnn", "supergat", "rgat", "hgt")
        ],
        "",
    ),
}
UPSTREAM, OURS = "upstream", "dfgnn"


class Twice:
    """A pytest plugin: every test with the library's layers, and with dfgnn's."""

    def __init__(self, name: str):
        self.name = name
        self.outcomes: dict[str, dict[str, str]] = defaultdict(dict)  # case -> layers -> outcome
        self.fallbacks: set[str] = set()

    @pytest.fixture(autouse=True, params=[UPSTREAM, OURS])
    def dfgnn_layers(self, request):
        if request.param == UPSTREAM:
            yield
            return
        package = sys.modules[f"{LIBRARIES[self.name]}.nn"]
        before = dict(vars(package))
        with dfgnn.patch(self.name):
            # Classes that the test module has imported by name before the patch are replaced by hand.
            swapped = {x: vars(package)[name] for name, x in before.items() if vars(package)[name] is not x}
            names = [(k, x) for k, x in vars(request.module).items() if isinstance(x, type) and x in swapped]
            for name, cls in names:
                setattr(request.module, name, swapped[cls])
            yield
            for name, cls in names:
                setattr(request.module, name, cls)

    def pytest_collection_modifyitems(self, items):
        for item in items:
            layers = item.callspec.params["dfgnn_layers"]
            case = item.nodeid.replace(f"[{layers}]", "").replace(f"[{layers}-", "[")
            item.user_properties += [("case", case), ("layers", layers)]

    def pytest_runtest_logreport(self, report):
        # A test has reports for setup, call and teardown; the first that is not "passed" is its outcome.
        properties = dict(report.user_properties)
        outcomes = self.outcomes[properties["case"]]
        if outcomes.get(properties["layers"], "passed") == "passed":
            outcomes[properties["layers"]] = report.outcome

    def pytest_warning_recorded(self, warning_message):
        if warning_message.category.__name__ == "FallbackWarning":
            self.fallbacks.add(str(warning_message.message))

    def only_ours(self) -> list[str]:
        """The cases that pass with the library's layers and not with dfgnn's."""
        return [
            case
            for case, outcome in self.outcomes.items()
            if outcome.get(UPSTREAM) == "passed" and outcome.get(OURS) != "passed"
        ]

    def summary(self) -> str:
        counts = {
            layers: Counter(outcome.get(layers, "not run") for outcome in self.outcomes.values())
            for layers in (UPSTREAM, OURS)
        }
        lines = [f"{self.name}: {len(self.outcomes)} cases"]
        for layers, count in counts.items():
            text = ", ".join(f"{n} {outcome}" for outcome, n in sorted(count.items()))
            lines.append(f"  with {layers}'s layers: {text}")
        failures = self.only_ours()
        lines.append(f"  failing only with {OURS}'s: {len(failures)}")
        lines += [f"    {case}" for case in failures]
        lines += [f"  warned: {text}" for text in sorted(self.fallbacks)]
        return "\n".join(lines)


def run(library: str, root: Path, select: str) -> Twice:
    """The library's tests under ``root``; raises FileNotFoundError and RuntimeError where they cannot run."""
    files, expression = SOURCES[library]
    paths = [root / name for name in files]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"--{library}-tests: expected {', '.join(missing)} in a clone of the repository"
        )
    sys.path.insert(0, str(root / "tests"))  # where DGL's tests find their helpers
    plugin = Twice(library)
    # noconftest: those of whole repositories ask for packages that these tests do not need.
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", str(root), "-c", os.devnull]
    expression = " and ".join(f"({x})" for x in (expression, select) if x)
    try:
        code = pytest.main([*options, "-k", expression, *map(str, paths)], plugins=[plugin])
    finally:
        sys.path.remove(str(root / "tests"))
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not plugin.outcomes:
        raise RuntimeError(
            f"--{library}-tests: expected tests that can be collected, got {pytest.ExitCode(code)!r}"
        )
    return plugin


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    for library, package in LIBRARIES.items():
        parser.add_argument(
            f"--{library}-tests", type=existing_folder, metavar="DIR", help=f"a clone of {package}"
        )
    parser.add_argument(
        "--dgl-names", type=existing_folder, metavar="DIR", help="a clone of dgl, for dfgnn.compat"
    )
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only these tests, as pytest's -k")
    options = parser.parse_args(arguments)
    roots = {library: getattr(options, f"{library}_tests") for library in LIBRARIES}
    if not any(roots.values()) and not options.dgl_names:
        parser.error("expected --dgl-tests, --pyg-tests or --dgl-names")
    names = None
    try:
        if options.dgl_names:
            sys.path.insert(0, str(Path(__file__).parent))
            import upstream_names

            names = upstream_names.run(options.dgl_names.resolve(), options.k)
        plugins = [run(library, root.resolve(), options.k) for library, root in roots.items() if root]
    except (FileNotFoundError, RuntimeError) as error:
        parser.error(str(error))
    print()
    for plugin in plugins:
        print(plugin.summary())
    if names:
        print(names.summary())
    return int(any(plugin.only_ours() for plugin in plugins) or bool(names and names.failed))


if __name__ == "__main__":
    sys.exit(main())
