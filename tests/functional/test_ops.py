"""dfgnn.ops compared with dgl.ops: every name, results and gradients, on multigraphs, blocks and empty
rows."""

import itertools

import pytest
import torch
from covering import covered

from dfgnn import Graph, ops
from dfgnn.engine import by_index  # its `is_few` is patched, so that small graphs take the kernels, too

try:
    import dgl
except Exception:  # not installed, or built for another torch
    dgl = None

SIZES = {"square": (7, 7, 30), "block": (9, 5, 24), "no edges": (4, 3, 0)}
SHAPES = [
    ((), ()), ((3,), (3,)), ((2, 4), (2, 1)), ((2, 1), (1, 4)), ((2, 4), (2, 4)), ((4,), (2, 1)),
    ((1, 4), (2, 4)), ((5, 2), (2,)), ((2, 3, 4), (3, 1)),
]  # fmt: skip
BINARY = [name for name in ops.__all__ if len(name.split("_")) == 3 and not name.startswith(("copy", "seg"))]
REDUCE = [name for name in ops.__all__ if name.split("_")[-1] in ops.REDUCERS]


def graphs(kind, device="cpu"):
    num_src, num_dst, num_edges = SIZES[kind]
    src, dst = torch.randint(num_src, (num_edges,)), torch.randint(max(num_dst - 1, 1), (num_edges,))
    ours = Graph.from_coo(src.to(device), dst.to(device), num_src=num_src, num_dst=num_dst)
    if dgl is None:
        return ours, None
    make = dgl.graph((src, dst), num_nodes=num_src) if num_src == num_dst else None
    theirs = make if make is not None else dgl.create_block((src, dst), num_src, num_dst)
    return ours, theirs


def rows(graph, target):
    return {"u": graph.num_src, "v": graph.num_dst, "e": graph.num_edges}[target]


def grads(out, inputs):
    finite = torch.where(torch.isfinite(out), out, torch.zeros_like(out))
    weight = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((finite * weight).sum(), inputs, allow_unused=True)


def compare(name, kind, arguments):
    """The same numbers from both, and the same gradients."""
    ours, theirs = graphs(kind)
    inputs = [torch.rand(rows(ours, t), *shape, dtype=torch.float64) + 0.5 for t, shape in arguments]
    inputs = [x.requires_grad_() for x in inputs]
    out = getattr(ops, name)(ours, *inputs)
    want = getattr(dgl.ops, name)(theirs, *inputs)
    assert out.shape == want.shape and out.dtype == want.dtype
    torch.testing.assert_close(out, want)
    if want.requires_grad:
        torch.testing.assert_close(grads(out, inputs), grads(want, inputs))


def by_kernels(monkeypatch):
    """Kernels on graphs of this size, too, which otherwise take PyTorch's operations."""
    monkeypatch.setattr(by_index, "is_few", lambda numbers: False)


needs_dgl = pytest.mark.skipif(
    dgl is None, reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)"
)


def test_every_name_is_there():
    assert len(BINARY) == 30 and len(REDUCE) == 24
    if dgl is not None:
        theirs = [n for n in dir(dgl.ops) if not n.startswith("_") and callable(getattr(dgl.ops, n))]
        assert set(theirs) <= set(ops.__all__)


@needs_dgl
@covered(name=BINARY, kind=tuple(SIZES), shapes=SHAPES, few=[True, False])
def test_edges(name, kind, shapes, few, monkeypatch):
    if not few:
        by_kernels(monkeypatch)
    (lhs, op, rhs), (x, y) = name.split("_"), shapes
    if op == "dot" and (not x or x[-1] != y[-1]):
        x = y = (2, 4)
    compare(name, kind, [(lhs, x), (rhs, y)])


@needs_dgl
@covered(name=REDUCE, kind=["square", "block"], shapes=SHAPES, few=[True, False])
def test_reductions(name, kind, shapes, few, monkeypatch):
    if not few:
        by_kernels(monkeypatch)
    x, y = shapes
    if name.startswith("copy"):
        compare(name, kind, [(name.split("_")[1], x)])
    else:
        compare(name, kind, [("u", x), ("e", y)])


@needs_dgl
@pytest.mark.parametrize("name", ["copy_u", "copy_v", "copy_e"])
@pytest.mark.parametrize("few", [True, False])
def test_copies(name, few, monkeypatch):
    if not few:
        by_kernels(monkeypatch)
    for (shape, _), kind in itertools.product(SHAPES, SIZES):
        compare(name, kind, [(name[-1], shape)])


@needs_dgl
@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_edge_softmax(norm_by):
    ours, theirs = graphs("square")
    logits = torch.randn(30, 2, 1, dtype=torch.float64)
    want = dgl.ops.edge_softmax(theirs, logits, norm_by=norm_by)
    torch.testing.assert_close(ops.edge_softmax(ours, logits, norm_by=norm_by), want)
    eids = torch.randperm(30)[:11]
    want = dgl.ops.edge_softmax(theirs, logits[:11], eids=eids, norm_by=norm_by)
    # Both libraries return the values in the order of eids.
    torch.testing.assert_close(ops.edge_softmax(ours, logits[:11], eids, norm_by), want)


@needs_dgl
def test_segments():
    lengths, value = torch.tensor([3, 0, 2, 5]), torch.randn(10, 4)
    for reducer in ops.REDUCERS:
        want = dgl.ops.segment_reduce(lengths, value, reducer)
        torch.testing.assert_close(ops.segment_reduce(lengths, value, reducer), want)
    torch.testing.assert_close(ops.segment_softmax(lengths, value), dgl.ops.segment_softmax(lengths, value))
    weight, index = torch.randn(4, 4, 6), torch.randint(4, (10,))
    want = dgl.ops.segment_mm(value, weight, lengths)
    torch.testing.assert_close(ops.segment_mm(value, weight, lengths), want)
    want = dgl.ops.gather_mm(value, weight, idx_b=index)
    torch.testing.assert_close(ops.gather_mm(value, weight, idx_b=index), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_and_devices(dtype, device):
    """Against plain operations."""
    graph, _ = graphs("block", device)
    x = torch.randn(9, 2, 3, device=device, dtype=dtype, requires_grad=True)
    e = torch.randn(24, 2, 1, device=device, dtype=dtype, requires_grad=True)
    out = ops.u_mul_e_sum(graph, x, e)
    message = x.double()[graph.edge_index[0]] * e.double()
    want = torch.zeros(5, 2, 3, device=device, dtype=torch.float64).index_add(0, graph.edge_index[1], message)
    tolerance = {"rtol": 0.02, "atol": 0.03} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, want.to(dtype), **tolerance)
    found, wanted = (torch.autograd.grad(o.double().square().sum(), [x, e]) for o in (out, want))
    loose = {"rtol": 0.1, "atol": 0.3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, wanted, **loose)
    high = ops.copy_e_max(graph, e)
    assert torch.equal(high[-1], torch.full_like(high[-1], -torch.inf))
    assert torch.equal(ops.copy_u(graph, x), x[graph.edge_index[0]])


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 8), (40,)], ids=str)
@pytest.mark.parametrize("edges", [60, 5000])
def test_sums_without_a_factor(edges, shape, device):
    """Small tensors, for which PyTorch's operations run, and large ones, for which kernels do; with first and
    second derivatives."""
    src, dst = torch.randint(70, (edges,), device=device), torch.randint(90, (edges,), device=device)
    graph = Graph.from_coo(src, dst, num_src=70, num_dst=100)

    def plain(x, picked):
        zeros = torch.zeros(100, *shape, dtype=x.dtype, device=device)
        return zeros.index_add(0, dst, x[src] if picked else x)

    for function, picked in ((ops.copy_u_sum, True), (ops.copy_e_sum, False)):
        x = torch.randn(70 if picked else edges, *shape, dtype=torch.float64, device=device)
        found = []
        for call in (lambda x: function(graph, x), lambda x: plain(x, picked)):  # noqa: B023
            leaf = x.clone().requires_grad_()
            out = call(leaf)
            (first,) = torch.autograd.grad(out.pow(3).sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), leaf)
            found.append((out, first, second, call(x)))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("name", ["copy_u", "copy_e", "u_add_e"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("few", [True, False])
def test_extremes_beside_loops(few, name, kind, size, device, monkeypatch):
    """max and min of small integers, many of them equal: on the CPU the first of those gets the gradient."""
    if not few:
        by_kernels(monkeypatch)
    graph, _ = graphs(size, device)
    tensors = [torch.randint(3, (rows(graph, t), 2, 3), device=device).double() for t in "ue"]
    tensors = [x.requires_grad_() for x, t in zip(tensors, "ue") if t in name.split("_")]
    message = tensors[0] if name == "copy_e" else tensors[0][graph.edge_index[0]]
    message = message + tensors[1] if name == "u_add_e" else message
    want = torch.full((graph.num_dst, 2, 3), -torch.inf if kind == "max" else torch.inf)
    want = want.to(device, torch.float64)
    parts = []
    for node in range(graph.num_dst):
        into = message[graph.edge_index[1] == node]
        if len(into):
            first = getattr(into.detach(), f"arg{kind}")(0, keepdim=True)
            parts.append(into.gather(0, first) if device == "cpu" else getattr(into, f"a{kind}")(0)[None])
            want[node] = parts[-1][0].detach()
    out = getattr(ops, f"{name}_{kind}")(graph, *tensors)
    assert torch.equal(out, want)
    filled = out[torch.isfinite(out).all(-1).all(-1)]
    weight = torch.rand_like(filled)
    found = torch.autograd.grad((filled * weight).sum(), tensors)
    if not parts:
        assert all(not x.any() for x in found)
        return
    wanted = torch.autograd.grad((torch.cat(parts) * weight).sum(), tensors)
    torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_extremes_of_what_is_not_finite(dtype, device):
    """NaN is the maximum and the minimum, infinities compare as numbers, and PyTorch gives no warning."""
    graph = Graph.from_coo(
        torch.tensor([0, 1, 2, 2, 0], device=device),
        torch.tensor([0, 0, 1, 1, 3], device=device),
        num_src=3,
        num_dst=4,
    )
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[1.0, nan], [2.0, 3.0], [-inf, inf]], device=device, dtype=dtype, requires_grad=True)
    out = ops.copy_u_max(graph, x)
    want = [[2.0, nan], [-inf, inf], [-inf, -inf], [1.0, nan]]
    torch.testing.assert_close(out, torch.tensor(want, device=device, dtype=dtype), equal_nan=True)
    (found,) = torch.autograd.grad(out[:2].sum(), x)
    assert found[1, 0] == 1 and found[2, 1] == 1


@pytest.mark.parametrize("few", [True, False])
def test_gradients_are_checked(few, device, monkeypatch):
    if not few:
        by_kernels(monkeypatch)
    graph, _ = graphs("block", device)
    x = torch.randn(9, 2, dtype=torch.float64, device=device, requires_grad=True)
    v = torch.randn(5, 2, dtype=torch.float64, device=device, requires_grad=True)
    e = torch.rand(24, 2, dtype=torch.float64, device=device) + 0.5
    e.requires_grad_()
    for function in (ops.u_add_v, ops.u_dot_v, ops.v_sub_u):
        first = v if function is ops.v_sub_u else x
        second = x if function is ops.v_sub_u else v
        assert torch.autograd.gradcheck(lambda a, b, f=function: f(graph, a, b), (first, second))
    for function in (ops.copy_u_max, ops.copy_u_min):
        assert torch.autograd.gradcheck(lambda a, f=function: f(graph, a)[:4], (x,))
    for function in (ops.u_mul_e_max, ops.u_sub_e_min):
        assert torch.autograd.gradcheck(lambda a, b, f=function: f(graph, a, b)[:4], (x, e))
    for function in (ops.u_mul_e_mean, ops.u_div_e_sum):
        inputs = (x, e)
        assert torch.autograd.gradcheck(lambda a, b, f=function: f(graph, a, b), inputs)
        assert torch.autograd.gradgradcheck(lambda a, b, f=function: f(graph, a, b), inputs)


@pytest.mark.parametrize("call, error, message", [
    (lambda g, x, e: ops.u_add_v("g", x, x), TypeError, "u_add_v: graph: expected a dfgnn.Graph, got str"),
    (lambda g, x, e: ops.u_add_v(g, [1], x), TypeError, "u_add_v: x: expected a tensor, got list"),
    (lambda g, x, e: ops.u_add_v(g, x.int(), x), TypeError, "u_add_v: x: expected float32.*got torch.int32"),
    (lambda g, x, e: ops.u_add_v(g, x, x.double()), TypeError, "u_add_v: y: expected torch.float32 like x"),
    (lambda g, x, e: ops.u_add_v(g, x[:3], x),
     ValueError, r"u_add_v: x: expected shape \[7, ...\], a row per source"),
    (lambda g, x, e: ops.u_add_e_sum(g, x, x),
     ValueError, r"u_add_e_sum: y: expected shape \[30, ...\], a row per edge"),
    (lambda g, x, e: ops.u_mul_e_max(g, x, e[:, :2]),
     ValueError, "y: expected a shape that broadcasts against .3., got .2."),
    (lambda g, x, e: ops.gspmm(g, "pow", "sum", x, e), ValueError, "gspmm: op: expected one of add"),
    (lambda g, x, e: ops.gspmm(g, "mul", "prod", x, e), ValueError, "gspmm: reduce_op: expected one of sum"),
    (lambda g, x, e: ops.gsddmm(g, "pow", x, x), ValueError, "gsddmm: op: expected one of add"),
    (lambda g, x, e: ops.gsddmm(g, "add", x, x, "w"),
     ValueError, "gsddmm: lhs_target: expected 'u', 'v' or 'e', got 'w'"),
    (lambda g, x, e: ops.edge_softmax(g, e, norm_by="both"),
     ValueError, "norm_by: expected 'src' or 'dst', got 'both'"),
    (lambda g, x, e: ops.edge_softmax(g, e[:4], torch.arange(4).view(2, 2)),
     ValueError, r"edge_softmax: eids: expected a vector of ids, int32 or int64, got \[2, 2\], torch.int64"),
    (lambda g, x, e: ops.edge_softmax(g, e[:3], torch.arange(3).short()),
     ValueError, r"edge_softmax: eids: expected a vector of ids, int32 or int64, got \[3\], torch.int16"),
    (lambda g, x, e: ops.edge_softmax(g, e[:3], torch.arange(28, 31)),
     ValueError, "edge_softmax: eids: expected ids from 0 to 29"),
    (lambda g, x, e: ops.edge_softmax(g, e, torch.arange(3)),
     ValueError, r"edge_softmax: logits: expected shape \[3, ...\], a row per id in eids, got \[30, 3\]"),
    (lambda g, x, e: ops.segment_reduce(torch.tensor([1]), x),
     ValueError, "seglen: expected lengths that add up to 7"),
    (lambda g, x, e: ops.segment_reduce(torch.tensor([0, 0, 0, 1, 1, 1, 1]), x),
     ValueError, r"got 4 in all, of shape \[7\]; batch.bincount\(\) are those of a sorted batch vector"),
    (lambda g, x, e: ops.segment_mm(x, torch.ones(2, 3, 1), torch.tensor([9, -2])),
     ValueError, "segment_mm: seglen_a: expected lengths that add up to 7, the rows of a, got some below 0"),
    (lambda g, x, e: ops.gather_mm(x, torch.ones(2, 3, 1), idx_b=torch.arange(7)),
     ValueError, r"gather_mm: idx_b: expected numbers in \[0, 2\), the matrices of b, got 0 to 6"),
])  # fmt: skip
def test_bad_input(call, error, message):
    graph, _ = graphs("square")
    with pytest.raises(error, match=message):
        call(graph, torch.randn(7, 3), torch.randn(30, 3))


def test_modules_are_imported_like_dgls():
    import dfgnn.ops
    import dfgnn.sampling
    from dfgnn.graph import sampling

    assert dfgnn.ops is ops and dfgnn.sampling is sampling
