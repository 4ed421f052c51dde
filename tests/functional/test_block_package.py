"""A model with attention within blocks and over a graph, as a package of AOTInductor that C++ runs without
Python."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from covering import exhaustive

import dfgnn
from dfgnn import Graph, functional

TORCH = Path(torch.__file__).parent
LIBRARY = Path(dfgnn.__file__).parent / "lib" / "libdfgnn_cpu.so"


class Model(torch.nn.Module):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.rows = graph, torch.nn.Linear(16, 3 * 32)

    def forward(self, x, offsets, bias):
        query, key, value = self.rows(x).view(-1, 3, 2, 16).unbind(1)
        local = functional.dot_attention(self.graph, query, key, value)
        among = functional.block_attention(query, key, value, offsets, key_bias=bias)
        return (local + among).flatten(1)


@exhaustive
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="the package crashes in the process that loads it, seen with torch 2.11",
)
def test_a_program_in_cpp_runs_a_package(tmp_path):
    torch.manual_seed(0)
    graph = Graph.from_coo(torch.randint(20, (60,)), torch.randint(20, (60,)), num_nodes=20)
    model = Model(graph).eval()
    inputs = torch.randn(20, 16), torch.tensor([0, 5, 20]), torch.randn(20)
    with torch.no_grad():
        program = torch.export.export(model, inputs)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        torch.save([*inputs, model(*inputs)], tmp_path / "tensors.pt")
    source, binary, lib = Path(__file__).parent / "run_package.cpp", tmp_path / "run", TORCH / "lib"
    include = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    link = [f"-L{lib}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl", f"-Wl,-rpath,{lib}"]
    subprocess.run(["g++", "-std=c++20", "-O0", *include, str(source), "-o", str(binary), *link], check=True)
    given = [binary, LIBRARY, tmp_path / "model.pt2", tmp_path / "tensors.pt"]
    done = subprocess.run(list(map(str, given)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
