"""What only the CPU engine has: threads and instruction sets."""

import functools
import math
import os
import platform
import re
from pathlib import Path

import pytest
import torch
from attention import DTYPES, SCORES, TERMS, VALUES, check, function, make_inputs, run
from covering import covered
from graphs import GRAPHS, make_graph

from dfgnn import Graph, functional
from dfgnn.bench.measure import peak_extra
from dfgnn.engine import operators
from dfgnn.runtime.arguments import ops

ISAS = ("base", "avx2", "avx512") if platform.machine() in ("x86_64", "AMD64") else ("base",)


def processor_has(isa):
    """Whether this processor has the instruction set, by the name of the kernels that torch chooses on it."""
    level = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}.get(torch.backends.cpu.get_cpu_capability(), 0)
    return ISAS.index(isa) <= level


def use(monkeypatch, isa):
    if not processor_has(isa):
        pytest.skip(f"this processor has no {isa}")
    if isa not in compiled() and os.environ.get("DFGNN_CPU_ISAS") != "all":
        pytest.skip(f"the CPU library was compiled without {isa} (DFGNN_CPU_ISAS)")
    monkeypatch.setenv("DFGNN_CPU_ISA", isa)


@functools.cache
def compiled():
    """The instruction sets that the library is compiled for, read from the error for an unknown one."""
    graph = make_graph("random")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFGNN_CPU_ISA", "none")
        with pytest.raises(RuntimeError) as error:
            function("gat")(graph, **make_inputs("gat", graph, 1, 4))
    return re.search(r"expected (.*), got 'none'", str(error.value))[1].split(", ")


WAYS = ("grouped", "single")  # values of DFGNN_CPU_ROWS: short rows computed in groups, or one at a time


@covered(
    way=WAYS,
    dtype=[torch.float32, torch.bfloat16],
    name=["super_row", "super_source", "mixed_degrees", "power_law"],
    score=SCORES,
)
def test_results_do_not_depend_on_the_number_of_threads(monkeypatch, threads, score, name, dtype, way):
    monkeypatch.setenv("DFGNN_CPU_ROWS", way)
    graph = make_graph(name)
    inputs = make_inputs(score, graph, 3, 8, dtype, term=True, weight=1)
    seed = torch.tensor([5])
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(
            run(function(score), graph, inputs, return_attention=True, dropout_p=0.2, generator=seed)
        )
    for other in results[1:]:
        for key, x in results[0].items():
            assert torch.equal(x, other[key]), key


# Numbers of heads and head sizes that fill vectors, do not, and overlap.
GROUPED_SHAPES = ((1, 1), (1, 7), (1, 64), (3, 8), (3, 1), (8, 8), (4, 16), (16, 8), (12, 7), (8, 33))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "super_row"])
@pytest.mark.parametrize("score", SCORES)
def test_groups_of_short_rows(monkeypatch, score, name, isa):
    use(monkeypatch, isa)
    monkeypatch.setenv("DFGNN_CPU_ROWS", "grouped")
    graph = make_graph(name)
    for turn, (heads, dim) in enumerate(GROUPED_SHAPES):
        if name != "random" and turn % 3 != len(name) % 3:
            continue
        dtype = DTYPES[turn % 4]
        check(score, graph, make_inputs(score, graph, heads, dim, dtype), note=f"H={heads} D={dim} {dtype}: ")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("score", SCORES)
def test_numbers_that_are_not_finite_reach_their_rows_only(monkeypatch, score, way):
    monkeypatch.setenv("DFGNN_CPU_ROWS", way)
    graph = make_graph("isolated")
    src, dst = graph.edge_index
    inputs = make_inputs(score, graph, 3, 8)
    clean = function(score)(graph, **inputs)
    for bad in (math.nan, math.inf):
        inputs[VALUES[score]][3, 1, 5] = bad
        out = function(score)(graph, **inputs)
        touched = torch.zeros(graph.num_dst, dtype=torch.bool)
        touched[dst[src == 3]] = True
        assert touched.any() and not touched.all()
        assert not out[touched, 1, 5].isfinite().any()
        assert torch.equal(out[~touched], clean[~touched])
        assert torch.equal(out[:, [0, 2]], clean[:, [0, 2]])
        # A value that is not finite has no effect where every edge to it is masked.
        masked = function(score)(graph, **inputs, mask=(src != 3) & ~touched[dst])
        assert (masked[touched] == 0).all() and masked.isfinite().all()


# (heads, head size). In bfloat16 kernels load pairs of vectors: by the instruction set, a head of these sizes
# is less than a pair, one pair, or several.
PAIRED_SHAPES = ((2, 8), (3, 16), (2, 32), (1, 64), (3, 96), (8, 4), (32, 2))


@pytest.mark.parametrize("isa", ISAS)
@covered(way=WAYS, score=SCORES, shape=PAIRED_SHAPES)
def test_pairs_of_vectors(monkeypatch, score, isa, way, shape):
    use(monkeypatch, isa)
    monkeypatch.setenv("DFGNN_CPU_ROWS", way)
    turn, (heads, dim) = PAIRED_SHAPES.index(shape), shape
    graph = make_graph(("random", "isolated", "mixed_degrees", "super_source")[turn % 4])
    inputs = make_inputs(score, graph, heads, dim, torch.bfloat16, weight="H")
    inputs["out_bias"] = torch.randn(heads, dim).bfloat16()
    check(score, graph, inputs, dropout_p=0.2, generator=torch.tensor([5]))


@pytest.mark.parametrize("isa", ISAS)
@covered(dim=[4, 8, 16, 32, 96], dtype=[torch.float32, torch.float64, torch.bfloat16], score=["gatv2", "dot"])
def test_both_ways_find_the_same_scores(monkeypatch, score, isa, dtype, dim):
    """Large scores, nearly equal in a row: attention shows how they were rounded."""
    use(monkeypatch, isa)
    graph = make_graph("random")
    inputs = make_inputs(score, graph, 3, dim, dtype)
    near = inputs["key"]
    near.copy_(3e3 * (near[:1] + 1e-3 * near))
    attention = []
    for way in WAYS:
        monkeypatch.setenv("DFGNN_CPU_ROWS", way)
        attention.append(function(score)(graph, **inputs, return_attention=True)[1])
    assert attention[0].std() > 0.1
    torch.testing.assert_close(*attention, rtol=32 * torch.finfo(attention[0].dtype).eps, atol=0)


@pytest.mark.parametrize("isa", ISAS)
@covered(
    dtype=DTYPES, score=SCORES, case=[("mixed_degrees", 1, 7), ("mixed_degrees", 3, 8), ("random", 8, 33)]
)
def test_every_instruction_set(monkeypatch, score, isa, dtype, case):
    use(monkeypatch, isa)
    name, heads, dim = case
    graph = make_graph(name)
    inputs = make_inputs(score, graph, heads, dim, dtype, term=True, weight="H")
    check(score, graph, inputs, dropout_p=0.2, generator=torch.tensor([5]))


def on_grid(score, graph, dim, shift, dtype):
    """Inputs and options whose scores, all shifted by the same edge bias ``shift``, are exact in the
    accumulation type: they are multiples of its unit in the last place at ``shift``."""
    acc = torch.promote_types(dtype, torch.float32)
    shift = torch.finfo(acc).min if shift == "lowest" else shift
    unit = 2.0 ** max(-6, math.frexp(shift)[1] + math.frexp(torch.finfo(acc).eps)[1] - 1)
    if unit > 2**20:
        unit = 0  # every other score would overflow the 16 bits of some inputs
    inputs = {
        name: torch.randint(-2, 3, x.shape).to(dtype)
        for name, x in make_inputs(score, graph, 2, dim, dtype, term=True).items()
    }
    inputs.pop(TERMS[score])
    inputs["bias"] = torch.full((graph.num_edges, 2), shift, dtype=acc)
    options = {"scale": unit} if score == "dot" else {"negative_slope": 0.5}
    if score == "gatv2":
        inputs["att"] *= 2 * unit
    if score == "gat":
        inputs["score_src"], inputs["score_dst"] = (
            inputs[name].to(acc) * (2 * unit) for name in ("score_src", "score_dst")
        )
    return inputs, options


@pytest.mark.parametrize("isa", ISAS)
@covered(
    score=SCORES,
    shift=(0, 1e4, 1e6, 1e7, -1e9, "lowest"),
    dtype=DTYPES,
    name=("random", "mixed_degrees", "super_row"),
)
def test_softmax_is_exact_at_any_shift(monkeypatch, score, shift, dtype, name, isa):
    use(monkeypatch, isa)
    graph = make_graph(name)
    inputs, options = on_grid(score, graph, 6, shift, dtype)
    check(score, graph, inputs, return_attention=True, **options)


@pytest.mark.parametrize("variable, value", [("DFGNN_CPU_ISA", "sse9"), ("DFGNN_CPU_ROWS", "several")])
def test_unknown_instruction_set_or_way_of_rows(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    graph = make_graph("random")
    with pytest.raises(RuntimeError, match=f"{variable}.*{value}"):
        function("gat")(graph, **make_inputs("gat", graph, 1, 4))


def mapping_flags(address):
    """The Linux kernel's flags (VmFlags) of the memory mapping that holds an address; None if unknown."""
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_backward_keeps_numbers_of_edges_where_they_are_few(monkeypatch, score, way):
    """Backward stores α and ds (the score's gradient) of each edge, [E, 2, H], only if they take no more
    memory than the gradients of the nodes' features."""
    monkeypatch.setenv("DFGNN_CPU_ROWS", way)
    heads, dim = 2, 16
    for edges, kept in ((400, True), (40_000, False)):
        torch.manual_seed(0)
        graph = Graph.from_coo(*torch.randint(100, (2, edges)), num_nodes=100)
        inputs = make_inputs(score, graph, heads, dim)
        check(score, graph, inputs, note=f"{edges} edges: ")
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        out = function(score)(graph, **leaves)
        grad = torch.ones_like(out)
        extra = peak_extra(lambda: torch.autograd.grad(out, tuple(leaves.values()), grad), 0, out.device)  # noqa: B023
        assert (extra > 4 * 2 * heads * edges) == kept


@pytest.mark.parametrize("missing", ["eids", "rev_eids"])
@pytest.mark.parametrize("edges", ["permuted", "by source", "by destination"])
def test_edge_ids_of_one_direction_alone(missing, edges):
    """Without eids an edge's id is its position in the CSR: they may be left out only where that is true."""
    src, dst = torch.tensor([[3, 0, 2, 1, 0, 2], [1, 2, 0, 2, 0, 1]])
    order = {"permuted": torch.arange(6), "by source": src.argsort(), "by destination": dst.argsort()}[edges]
    graph = Graph.from_coo(src[order], dst[order], num_nodes=4)
    args = graph._planner.arguments(2, 4, torch.float32, "dot", schedule="auto", edges=True, backward=True)
    q, k, v, grad = torch.randn(4, 4, 2, 4)
    options = (torch.randn(6, 2), *5 * [None], None)

    def backward(args):
        out, stats, *_ = ops.attention_forward(
            1, v, k, q, None, *options, *args, 4, 1.0, 0.5, 0.0, 0, False, False
        )
        return ops.attention_backward(
            grad, None, 1, v, k, q, None, *options, out, stats, None, None, None, *args, 1.0, 0.5, 0.0, 0, 3
        )

    expected = backward(args)
    wrong = args._replace(**{missing: None})
    if getattr(args, missing) is None:  # already left out: each edge's id is its position in this CSR
        assert edges == ("by source" if missing == "rev_eids" else "by destination")
        assert all(torch.equal(x, y) for x, y in zip(expected, backward(wrong), strict=True))
        return
    with pytest.raises(RuntimeError, match="attention_backward: eids, rev_eids: expected those of both"):
        backward(wrong)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads, width", [(1, 1), (1, 11), (8, 3), (2, 33)])
def test_sums_of_edge_attributes_over_a_long_row(monkeypatch, isa, heads, width):
    """All weights and all attributes are equal, so that the rounding errors of the sum do not average out."""
    use(monkeypatch, isa)
    num_edges = 20_000
    zeros = torch.zeros(num_edges, dtype=torch.int64)
    graph = Graph.from_coo(zeros, zeros, num_nodes=1)
    weight = torch.full((num_edges, heads), 1 / 7)
    attr = torch.randn(width).expand(num_edges, width).contiguous()
    got = operators.edge_sum(graph, weight, attr, width)[0]
    want = torch.einsum("eh,ec->hc", weight.double(), attr.double())
    assert ((got - want) / want).abs().max() < 2e-6
