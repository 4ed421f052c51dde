"""An installation without kernels, as the wheel for any platform makes it: it is right, and says so."""

import os
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
from covering import exhaustive

from dfgnn.runtime import library

ROOT = Path(__file__).resolve().parents[2]
# Compares functions and layers with the reference in float64, on graphs that are hard for the operators in
# Python: empty, isolated rows, loops, duplicates, a super node, bipartite, edges given in sorted orders.
COMPARE = """
import torch, dfgnn
from dfgnn import Graph, functional, nn, reference
torch.manual_seed(0)
n = 40
random = torch.randint(n, (2, 200))
graphs = [
    Graph.from_edge_index(random, n),
    Graph.from_edge_index(random.sort(1).values, n).add_self_loops(remove_existing=True),
    Graph.from_edge_index(random[:, random[0].argsort()], n),
    Graph.from_edge_index(random[:, random[1].argsort()].int(), n).reverse(),
    Graph.from_edge_index(torch.stack([torch.arange(n), torch.full((n,), 7)]).repeat(1, 3), n),
    Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.long), n),
    Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.long), 0),
    Graph.from_coo(random[0] % 9, random[1], num_src=9, num_dst=n),
]
for graph in graphs:
    for heads, dim in ((1, 1), (3, 7), (8, 33)):
        def rows(count, *shape):
            return torch.randn(count, heads, *shape, dtype=torch.float64, requires_grad=True)
        cases = {
            "gat_attention": (rows(graph.num_src, dim), rows(graph.num_src), rows(graph.num_dst)),
            "gatv2_attention": (rows(graph.num_dst, dim), rows(graph.num_src, dim), rows(1, dim)[0].detach()),
            "dot_attention": (rows(graph.num_dst, dim), rows(graph.num_src, dim), rows(graph.num_src, dim)),
            "spmm": (rows(graph.num_edges), rows(graph.num_src, dim)),
            "sddmm": (rows(graph.num_dst, dim), rows(graph.num_src, dim)),
        }
        for name, inputs in cases.items():
            leaves = [x for x in inputs if x.requires_grad]
            found = []
            for module in (functional, reference):
                out = getattr(module, name)(graph, *inputs)
                found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
            torch.testing.assert_close(*found)
    x = torch.randn(graph.num_src, 5)
    y = x[: graph.num_dst] if graph.num_src >= graph.num_dst else torch.randn(graph.num_dst, 5)
    layer = nn.dgl.GATConv(5, 4, 2, allow_zero_in_degree=True)
    layer(graph, x if graph.num_src == graph.num_dst else (x, y)).sum().backward()
offsets = torch.tensor([0, 3, 3, 10])
q, k, v = (torch.randn(10, 2, 4, dtype=torch.float64) for _ in range(3))
block = torch.repeat_interleave(torch.arange(3), offsets.diff())
pairs = Graph.from_edge_index((block[:, None] == block).nonzero().t(), 10)
expected = reference.dot_attention(pairs, q, k, v)
torch.testing.assert_close(functional.block_attention(q, k, v, offsets), expected)
try:
    graphs[0].plan(num_heads=2, head_dim=4)
except NotImplementedError as error:
    assert "dfgnn::plan_rows needs a compiled library" in str(error), error
else:
    raise AssertionError("a plan without kernels")
"""


@pytest.fixture
def without_kernels(tmp_path, build_native, plain_python):
    """Runs code in a process that finds no libraries."""
    shutil.copy(build_native.SCHEMAS, tmp_path)
    return partial(plain_python, environment={"DFGNN_LIBRARY_DIR": str(tmp_path)})


def test_the_file_of_schemas_says_what_the_library_registers(build_native, monkeypatch, tmp_path):
    kept = build_native.SCHEMAS
    monkeypatch.setattr(build_native, "SCHEMAS", tmp_path / "schemas.txt")
    build_native.write_schemas(library.DIRECTORY / "libdfgnn_cpu.so")
    renew = "renew it: make build; python -c 'import build_native; build_native.write_schemas()'"
    assert kept.read_text() == build_native.SCHEMAS.read_text(), renew


def test_functions_and_layers_are_right_and_the_warning_comes_once(without_kernels):
    done = without_kernels(COMPARE)
    assert done.stderr.count("no compiled kernels in this installation") == 1


def test_the_report_says_that_there_are_no_kernels(without_kernels):
    done = without_kernels("import runpy; runpy.run_module('dfgnn.env', run_name='__main__')")
    assert "library    cpu: not loaded, no file" in done.stdout
    assert "no kernels" in done.stdout and "the wheel for any platform" in done.stdout
    assert "build from source with a C++ compiler" in done.stdout  # as those can who had none at first


@pytest.mark.slow
@exhaustive
def test_pip_takes_the_wheel_of_the_platform_where_one_fits(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    for pure in ("0", "1"):
        environment = {**os.environ, "DFGNN_CUDA": "0", "DFGNN_PURE": pure}
        made = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path / "dist", ROOT]
        subprocess.run(
            [*pip, *made], env=environment, check=True, capture_output=True, cwd=tmp_path, timeout=900
        )
    names = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert len(names) == 2 and "none-any" in names[0] and "linux" in names[1]
    contents = zipfile.ZipFile(tmp_path / "dist" / names[0]).namelist()
    assert "dfgnn/lib/schemas.txt" in contents and not any(name.endswith(".so") for name in contents)
    fetch = [*pip, "download", "dfgnn", "--no-deps", "--no-index", "--find-links", tmp_path / "dist"]
    subprocess.run([*fetch, "-d", tmp_path / "taken"], check=True, capture_output=True, cwd=tmp_path)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == [names[1]]
    elsewhere = ["--only-binary=:all:", "--platform=macosx_15_0_arm64", "-d", tmp_path / "elsewhere"]
    subprocess.run([*fetch, *elsewhere], check=True, capture_output=True, cwd=tmp_path)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [names[0]]
