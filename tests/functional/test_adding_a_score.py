"""docs/adding_a_score.md, followed literally, and flex_attention beyond it."""

import ast
import re
from pathlib import Path

import pytest
import torch
from attention import Made, relative_error, rounding_band
from covering import covered
from graphs import GRAPHS, make_graph

from dfgnn import functional, reference
from dfgnn.engine import plain as _plain
from dfgnn.runtime.arguments import Numbers, Tensors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_a_score.md"
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh"}
# Packages of dfgnn that may name a score, because they use it by the names of functions and layers.
USERS = {"nn", "bench", "compat", "switch", "run"}


def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_the_page_works_as_it_is_written():
    assert len(blocks()) >= 4
    names = {}
    for block in blocks():
        exec(block, names)
    graph, q, k, v = (names[n] for n in ("graph", "q", "k", "v"))
    expected = reference.flex_attention(
        graph, names["gaussian"], q, k, v, names["distance"], params=[names["log_width"]]
    )
    torch.testing.assert_close(names["out"], expected, rtol=1e-4, atol=1e-5)
    capped = reference.flex_attention(graph, lambda q, k, e: 10 * ((q * k).sum(-1) / 40).tanh(), q, k, v)
    torch.testing.assert_close(names["capped"], capped, rtol=1e-4, atol=1e-5)


def code(file):
    """A source without comments and docstrings."""
    if file.suffix != ".py":
        return re.sub(r"//[^\n]*", "", file.read_text())
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        is_documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if is_documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def test_the_page_names_all_files_that_know_a_score():
    files = [f for r in ("dfgnn", "csrc") for f in (ROOT / r).rglob("*.*") if f.suffix in SUFFIXES]
    files = [f.relative_to(ROOT) for f in files if f.relative_to(ROOT).parts[1] not in USERS]
    knowing = [f for f in files if re.search(r"additive_?v2|gatv2", code(ROOT / f), re.IGNORECASE)]
    text = PAGE.read_text()
    places = {f.name if f.parent.name != "instances" else "instances/" for f in knowing}
    assert {"arguments.py", "params.h", "instances/"} <= places
    assert not [place for place in places if place not in text]
    # A new score needs no change in compiling/, which recognises scores in a user's own code.
    needed = [f for f in knowing if f.suffix == ".py" and f.parts[1] != "compiling"]
    assert len(needed) <= 7, needed


def test_an_unknown_score_is_refused():
    graph, x = make_graph("random"), torch.randn(3, 2, 4)
    tensors = Tensors(x, None, x, None, *[None] * 7)
    with pytest.raises(ValueError, match="score: expected a number of"):
        _plain.attention(_plain.ends_of(graph), 7, Numbers(1.0, 1.0, 0.0, 0), tensors)


def gaussian(q, k, e, width):
    score = -(q - k).square().sum(-1) * width
    return score if e is None else score + e


@covered(1, dtype=[torch.float32, torch.float64, torch.bfloat16], name=tuple(GRAPHS))
def test_flex_attention(device, name, dtype):
    graph = make_graph(name, device)
    sizes = [(graph.num_dst, 3, 8), (graph.num_src, 3, 8), (graph.num_src, 3, 5), (graph.num_edges, 3), (3,)]
    inputs = [torch.randn(size).to(device, dtype) for size in sizes]
    inputs[-1] = inputs[-1].abs() / 8
    weight = torch.rand(graph.num_edges).to(device, dtype)
    mask = torch.rand(graph.num_edges, device=device) < 0.8
    options = {"mask": mask, "weight": weight, "return_attention": True, "dropout_p": 0.2}
    options["generator"] = torch.tensor([5], device=device)
    found, chunk = [], max(97, graph.num_edges // 6)  # the last chunk of most graphs is shorter
    for module, as_type in ((functional, dtype), (reference, dtype), (reference, torch.float64)):
        leaves = [x.to(as_type, copy=True).requires_grad_() for x in inputs]
        results = module.flex_attention(
            graph, gaussian, *leaves[:4], params=leaves[4:], kernel_options={"chunk_edges": chunk}, **options
        )
        loss = sum((x * torch.linspace(-1, 1, x.numel(), device=device).view(x.shape)).sum() for x in results)
        found.append([*results, *torch.autograd.grad(loss, leaves)])
    for ours, plain, exact in zip(*found):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype and ours.isfinite().all()
        # Where everything cancels, errors are measured against what does: |q - k|^2 of every edge.
        floor = 3 * (graph.num_edges / max(exact.shape[0], 1)) ** 0.5 * exact.numel() ** 0.5
        error, allowed = (relative_error(x, exact.double(), floor) for x in (ours, plain))
        # The gradient of params sums over all edges. Where rows have one edge each, all terms are 0 but for
        # the rounding of delta: hence 12 bands.
        assert error <= 3 * allowed + 12 * rounding_band(dtype)


def test_random_scores(device):
    """A score that draws random numbers: backward computes it with the numbers that forward drew, and does
    not change the state of torch's generators."""
    graph = make_graph("random", device)
    leaves = [torch.randn(50, 2, 3, dtype=torch.float64, device=device).requires_grad_() for _ in range(3)]

    def score(q, k, e):
        return (torch.nn.functional.dropout(q, 0.5) * k).sum(-1)

    def by_chunks(q, k, e):
        return torch.cat([score(*rows, None) for rows in zip(q.split(37), k.split(37))])

    found, states = [], []
    for attention in (functional.flex_attention, reference.flex_attention):
        ours = attention is functional.flex_attention
        torch.manual_seed(1)
        more = {"kernel_options": {"chunk_edges": 37}} if ours else {}
        out = attention(graph, score if ours else by_chunks, *leaves, **more)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        states.append(torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state())
    torch.testing.assert_close(*found)
    assert torch.equal(*states)
    with pytest.raises(NotImplementedError, match="chunk_edges"):
        out = functional.flex_attention(graph, score, *leaves, kernel_options={"chunk_edges": 37})
        torch.autograd.grad(out.square().sum(), leaves, create_graph=True)


def test_backward_outside_autocast(device):
    """Backward, outside autocast, computes the score again as forward did under it: in bfloat16."""
    graph = make_graph("random", device)
    query, key, value = (torch.randn(50, 2, 3, device=device).requires_grad_() for _ in range(3))
    weight = torch.randn(3, 3, device=device).requires_grad_()
    types = []

    def score(q, k, e, w):
        product = q @ w
        types.append(product.dtype)
        return (product * k).sum(-1)

    with torch.autocast(device, torch.bfloat16):
        out = functional.flex_attention(graph, score, query, key, value, params=[weight])
    out.square().sum().backward()
    assert set(types) == {torch.bfloat16}
    assert all(x.grad.dtype == x.dtype for x in (query, key, value, weight))


def test_no_tensor_of_edges_times_features():
    """Every tensor that is made has the rows of one chunk of edges, or one element per edge and head."""
    graph = make_graph("super_row")
    q, k, v = (
        torch.randn(n, 2, 64, requires_grad=True) for n in (graph.num_dst, graph.num_src, graph.num_src)
    )
    width = torch.ones(2, requires_grad=True)
    assert graph.edge_index.shape == (2, graph.num_edges)  # cached now, so that its making is not counted
    with Made() as made:
        functional.flex_attention(
            graph, gaussian, q, k, v, params=[width], kernel_options={"chunk_edges": 100}
        ).sum().backward()
    assert max(made.sizes) <= max(2 * graph.num_edges, v.numel(), 100 * 2 * 64)
