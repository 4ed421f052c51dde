"""What is published together with the wheels: the conda recipe, the Hub's layout of a wheel, and that they
agree."""

import json
import re
import runpy
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

import dfgnn
from dfgnn.runtime import library

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"

pytestmark = pytest.mark.skipif(not RECIPE.is_file(), reason="needs the source tree")


def test_the_recipe_is_of_this_version_and_these_architectures():
    text = RECIPE.read_text()
    assert re.search(r'^  version: "(.*)"$', text, re.MULTILINE)[1] == dfgnn.__version__
    archs = runpy.run_path(str(ROOT / "scripts" / "release.py"))["ARCHS"]
    assert f'TORCH_CUDA_ARCH_LIST: "{archs}"' in text
    hub = runpy.run_path(str(ROOT / "scripts" / "hub_layout.py"))["ARCHS"]
    assert ";".join(hub) == archs.removesuffix("+PTX")


def test_the_hub_loads_the_package_under_another_name(plain_python, tmp_path):
    """The test imports the folder's __init__.py under the name in metadata.json, as the package `kernels`
    does."""
    wheel = tmp_path / f"dfgnn-{dfgnn.__version__}-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (ROOT / "dfgnn").rglob("*.py"):
            archive.write(path, path.relative_to(ROOT))
        archive.write(library.DIRECTORY / "libdfgnn_cpu.so", "dfgnn/lib/libdfgnn_cpu.so")
    layout = ROOT / "scripts" / "hub_layout.py"
    done = plain_python.forks.program(layout, wheel, "--folder", tmp_path / "hub")
    assert done.returncode == 0, done.stderr
    place = tmp_path / "hub" / "build" / "torch-stable-abi210-cpu-x86_64-linux"
    assert done.stdout.strip() == str(place)
    metadata = json.loads((place / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cpu"} and metadata["python-depends"] == []
    code = """
import importlib.util, sys, torch
name, path = sys.argv[1:]
spec = importlib.util.spec_from_file_location(name, path)
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
graph = module.Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 1, 0]]), num_nodes=4)
inputs = torch.randn(4, 2, 8), torch.randn(4, 2), torch.randn(4, 2)
expected = module.reference.gat_attention(graph, *inputs)
torch.testing.assert_close(module.functional.gat_attention(graph, *inputs), expected)
assert "dfgnn" not in sys.modules
"""
    plain_python(code, metadata["id"], place / "__init__.py", cwd=tmp_path)


def test_matrix_tries_in_an_environment_that_hides_nothing_of_the_one_below(monkeypatch, tmp_path):
    """venv's own setuptools, of Python 3.10 and 3.11, was too old for torch, and no index has a newer one."""
    above = runpy.run_path(str(ROOT / "scripts" / "matrix.py"))["above"]
    monkeypatch.setitem(above.__globals__, "FOLDER", tmp_path)
    below = tmp_path / "below"
    venv.create(below, symlinks=True, with_pip=False)
    (packages,) = below.glob("lib/python3*/site-packages")
    (packages / "marker.py").write_text("")
    place = above(below, "tried")
    code = "from importlib.util import find_spec as f; import marker; print(f('pip'), f('setuptools'))"
    command = [place / "bin" / "python", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.stdout, done.stderr) == ("None None\n", "")


def test_matrix_refuses_an_environment_that_has_dfgnn(tmp_path):
    matrix = runpy.run_path(str(ROOT / "scripts" / "matrix.py"))
    (tmp_path / "lib/python3.11/site-packages/dfgnn-0.1.0.dist-info").mkdir(parents=True)
    with pytest.raises(matrix["Failed"], match="pip uninstall dfgnn there"):
        matrix["try_artifacts"](tmp_path, tmp_path, (), [])
