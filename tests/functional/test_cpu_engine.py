"""What only the CPU engine has: threads and instruction sets."""

import platform
import re
from pathlib import Path

import pytest
import torch
from attention import SCORES, check, function, make_inputs, run
from graphs import make_graph

from dfgnn import Graph, functional

ISAS = ("base", "avx2", "avx512") if platform.machine() in ("x86_64", "AMD64") else ("base",)


def processor_has(isa):
    """What torch says of this processor; its names are those of its own kernels."""
    level = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}.get(torch.backends.cpu.get_cpu_capability(), 0)
    return ISAS.index(isa) <= level


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["super_row", "super_source", "mixed_degrees", "power_law"])
@pytest.mark.parametrize("score", SCORES)
def test_results_do_not_depend_on_the_number_of_threads(threads, score, name, dtype):
    graph = make_graph(name)
    inputs = make_inputs(score, graph, 3, 8, dtype, edge_bias=True, edge_weight=1)
    seed = torch.tensor([5])
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(run(function(score), graph, inputs, return_attention=True, dropout_p=0.2, _seed=seed))
    for other in results[1:]:
        for key, x in results[0].items():
            assert torch.equal(x, other[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("score", SCORES)
def test_every_instruction_set(monkeypatch, score, isa, dtype):
    if not processor_has(isa):
        pytest.skip(f"this processor has no {isa}")
    monkeypatch.setenv("DFGNN_CPU_ISA", isa)
    graph = make_graph("mixed_degrees")
    for heads, dim in ((1, 7), (3, 8), (8, 33)):
        inputs = make_inputs(score, graph, heads, dim, dtype, edge_bias=True, edge_weight="H")
        seed = torch.tensor([5])
        check(score, graph, inputs, note=f"H={heads} D={dim}: ", dropout_p=0.2, _seed=seed)


def test_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("DFGNN_CPU_ISA", "sse9")
    graph = make_graph("random")
    with pytest.raises(RuntimeError, match="DFGNN_CPU_ISA.*sse9"):
        function("gat")(graph, **make_inputs("gat", graph, 1, 4))


def mapping_flags(address):
    """The kernel's flags of the mapping that holds an address, or None where it does not tell."""
    path, inside = Path("/proc/self/smaps"), False
    for line in path.read_text().splitlines() if path.exists() else ():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return None


def test_large_results_ask_for_huge_pages():
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists() or "[never]" in path.read_text():
        pytest.skip("this system has no transparent huge pages")
    other = torch.empty(2**24)
    if mapping_flags(other.data_ptr() + 2**24) is None:
        pytest.skip("this system does not tell the flags of a mapping")
    num_nodes, heads, dim = 50_000, 4, 32  # 25.6 MB
    graph = Graph.from_edge_index(torch.randint(num_nodes, (2, 1000)), num_nodes=num_nodes)
    q, k, v = torch.randn(3, num_nodes, heads, dim, requires_grad=True).unbind()
    out = functional.dot_attention(graph, q, k, v)
    assert "hg" in mapping_flags(out.data_ptr() + out.nbytes // 2)
    for gradient in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert "hg" in mapping_flags(gradient.data_ptr() + gradient.nbytes // 2)
