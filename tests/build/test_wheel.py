"""The wheel: its tag and contents, and that it computes where it is installed; the sdist: that it can be
tested."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from covering import exhaustive

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree"),
]


def run(*command, **options):
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The path of a wheel without CUDA. It shares the objects of the in-place build: where these are up to
    date, nothing is compiled."""
    folder = tmp_path_factory.mktemp("dist")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    environment = {**os.environ, "DFGNN_CUDA": "0"}
    run("-m", "pip", "wheel", *options, "--wheel-dir", folder, ROOT, env=environment, cwd=folder)
    (path,) = folder.iterdir()
    return path


def test_wheel_is_for_every_python(wheel):
    name, _, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("dfgnn", "py3", "none")
    assert platform.startswith(("linux_", "manylinux"))


def test_wheel_holds_the_package_and_one_library(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "dfgnn").rglob("*.py")}
    assert package <= names
    assert {name for name in names if name.endswith(".so")} == {"dfgnn/lib/libdfgnn_cpu.so"}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"dfgnn"}


@exhaustive
def test_wheel_computes_without_the_source_tree(wheel, tmp_path):
    options = ["--no-deps", "--no-index", "--disable-pip-version-check"]
    run("-m", "pip", "install", *options, "--target", tmp_path / "site", wheel)
    code = """
import torch
torch.version.cuda = torch.version.cuda or "13.0"  # the wheel has no CUDA library: as on a torch with CUDA
import dfgnn
print(dfgnn.__file__)

graph = dfgnn.Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 1, 0]]), num_nodes=4)
inputs = torch.randn(4, 2, 8, dtype=torch.float64), torch.randn(4, 2).double(), torch.randn(4, 2).double()
out, expected = (f.gat_attention(graph, *inputs) for f in (dfgnn.functional, dfgnn.reference))
torch.testing.assert_close(out, expected)

from dfgnn.runtime.library import require_cuda_library
try:
    require_cuda_library()
except RuntimeError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    file, message = run("-c", code, env=environment, cwd=tmp_path).strip().split("\n")
    assert Path(file).is_relative_to(tmp_path)
    assert "built without CUDA" in message
    assert "DFGNN_CUDA=1 pip install" in message


def test_sdist_holds_what_its_tests_need(tmp_path):
    """The sdist has the tests' helpers, constraints.txt and the sources, so that `make test` works in it."""
    options = ["--formats=gztar", f"--dist-dir={tmp_path}"]
    run("setup.py", "--quiet", "egg_info", f"--egg-base={tmp_path}", "sdist", *options, cwd=ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("csrc", "dfgnn", "docs", "examples", "scripts", "tests")
    wanted = {
        str(file.relative_to(ROOT))
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".h", ".cpp", ".cu", ".cuh", ".md", ".sh", ".typed")
    }
    assert wanted | {"Makefile", "constraints.txt", "build_native.py", "pyproject.toml"} <= names
