"""Backward of dot attention on a GPU has a pass over destinations and one over sources. Where α and ds (the
score's gradient) of the edges are small compared with the features, the first pass saves them for the second,
which otherwise computes them again. Both ways give the same gradients, and memory has a bound."""

import pytest
import torch
from attention import make_inputs, relative_error, rounding_band
from graphs import make_graph

from dfgnn import Graph, functional
from dfgnn.engine import operators
from dfgnn.plan import cost
from dfgnn.plan.plans import Shape
from dfgnn.runtime.arguments import NO_EDGES, Numbers

pytestmark = pytest.mark.gpu
SHAPES = (4, 32), (8, 8), (1, 64), (2, 16), (1, 304), (3, 40)


@pytest.fixture
def device():
    return "cuda"


def sparse(device, degree=5, nodes=400):
    """A random graph of `degree` edges per node on average, of some destinations far more, in no order."""
    generator = torch.Generator().manual_seed(degree)
    src = torch.randint(nodes, (degree * nodes,), generator=generator)
    dst = (torch.rand(degree * nodes, generator=generator) ** 2 * nodes).long()
    return Graph.from_coo(src.to(device), dst.to(device), num_src=nodes, num_dst=nodes)


def backward(graph, tensors, args, dim):
    """The gradients by the long operators, and the bytes that backward takes at the peak."""
    call = operators.DispatchedCall(graph, args, "dot", Numbers(0.2, dim**-0.5, 0.0, 6), False, False)
    out, attention, kept = call.run(tensors)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = call.run_backward((grad, None), tensors, out, attention, kept, 31)
    return [g for g in grads if g is not None and g.numel()], torch.cuda.max_memory_allocated() - before


def call_of(graph, heads, dim, dtype, device):
    x = make_inputs("dot", graph, heads, dim, dtype)
    out_bias = torch.randn(heads, dim).to(device, dtype)
    args = graph._planner.handle(heads, dim, dtype, "dot", "auto", False, True).args
    return (x["value"], x["key"], x["query"], None, *NO_EDGES, out_bias), args


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads,dim", SHAPES)
def test_both_ways(device, heads, dim, dtype):
    torch.manual_seed(0)
    graph = sparse(device, 3 if dim == 8 else 5)
    tensors, args = call_of(graph, heads, dim, dtype, device)
    assert args.eids is not None and args.tiles is None
    handed, most = backward(graph, tensors, args, dim)
    alone, least = backward(graph, tensors, args._replace(eids=None, rev_eids=None), dim)
    numbers = 2 * graph.num_edges * heads * max(dtype.itemsize, 4)
    assert most - least > numbers / 4  # else nothing was saved, and the second way was compared with itself
    for x, y in zip(handed, alone, strict=True):
        band = rounding_band(dtype) * (8 if dtype in (torch.float32, torch.float64) else 1)
        assert relative_error(x, y.double()) <= band


@pytest.mark.parametrize("name", ["super_row", "super_source", "isolated", "duplicates", "one_edge"])
def test_both_ways_on_hard_graphs(device, name):
    torch.manual_seed(0)
    graph = make_graph(name, device)
    tensors, args = call_of(graph, 1, 256, torch.float32, device)
    csr, reverse = graph.csr(), graph.reverse_csr(need_eids=True)
    handed, _ = backward(graph, tensors, args._replace(eids=csr.eids, rev_eids=reverse.eids), 256)
    alone, _ = backward(graph, tensors, args._replace(eids=None, rev_eids=None), 256)
    for x, y in zip(handed, alone, strict=True):
        assert relative_error(x, y.double(), floor=1.0) <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degree", [4, 9, 13, 20, 40])
@pytest.mark.parametrize("score", ["dot", "gatv2"])
def test_memory(device, score, degree, dtype):
    """Beyond inputs, results and gradients, at most three times a feature of all nodes."""
    nodes, heads, dim = 60_000, 4, 32
    graph = sparse(device, degree, nodes)
    x = make_inputs(score, graph, heads, dim, dtype)
    x = {name: t.requires_grad_() for name, t in x.items()}
    function = {"dot": functional.dot_attention, "gatv2": functional.gatv2_attention}[score]
    for _ in range(2):  # the first pass makes the plans, which do not count
        for t in x.values():
            t.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = function(graph, **x)
        out.backward(out.detach())
    grads = sum(t.grad.numel() * t.grad.itemsize for t in x.values())
    array = nodes * heads * dim * dtype.itemsize
    beyond = torch.cuda.max_memory_allocated() - before - grads - array
    assert beyond <= 3.1 * array


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_graphs_need_no_ids(device, dtype):
    graph = sparse(device, 100)
    direction = graph._planner._direction(False)
    assert not cost.saves_alpha_ds(Shape(4, 32, dtype, "dot"), direction)
    assert graph._planner.handle(4, 32, dtype, "dot", "auto", False, True).args.eids is None
