"""Functions of the libraries that attention is spelled out of, while dfgnn.patch holds: the same results from
dfgnn's kernels, or the original's where a call is not for these."""

import importlib
import itertools
import sys
import types
import warnings

import pytest
import torch
from covering import covered
from torch import nn

import dfgnn
from dfgnn.engine import by_index, operators
from dfgnn.switch import pieces

pyg = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
import torch_geometric.nn as pygnn  # noqa: E402

# In a dictionary, because dfgnn.patch replaces functions that are names of a module, this one included.
ORIGINALS = {
    name: getattr(importlib.import_module(f"torch_geometric.utils._{name}"), name)
    for name in ("softmax", "scatter")
}
N, E = 40, 9000


def softmax(*args, **kwargs):
    return ORIGINALS["softmax"](*args, **kwargs)


def scatter(*args, **kwargs):
    return ORIGINALS["scatter"](*args, **kwargs)


@pytest.fixture
def patched():
    pieces.served.clear()
    with dfgnn.patch("pyg"):
        yield pieces.served


def indices(kind):
    if kind == "random":
        return torch.randint(N, (E,))
    if kind == "sorted":
        return torch.randint(N, (E,)).sort().values
    if kind == "one group":
        return torch.full((E,), N - 1)
    return torch.arange(E) % 3 * 5  # most groups are empty


KINDS = "random", "sorted", "one group", "empty groups"
SHAPES, DTYPES = [(), (1,), (3,), (8,), (4, 5)], [torch.float32, torch.float64]


def compare(ours, theirs, x, *, tolerance):
    """Values, gradients and gradients of gradients."""
    results = []
    for function in (ours, theirs):
        x = x.detach().clone().requires_grad_()
        out = function(x)
        weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
        (grad,) = torch.autograd.grad((out * weight).sum(), x, create_graph=True)
        found = [out, grad]
        if grad.requires_grad:
            found += torch.autograd.grad((grad * torch.linspace(2, 1, grad.numel()).view_as(grad)).sum(), x)
        results.append(found)
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@covered(shape=SHAPES, dtype=DTYPES, count=[1, 2])
def test_softmax(patched, threads, shape, dtype, count):
    threads(count)
    x, tolerance = 3 * torch.randn(E, *shape, dtype=dtype), 1e-5 if dtype == torch.float32 else 1e-11
    for index in map(indices, KINDS):

        def call(function):
            return lambda x: function(x, index, num_nodes=N + 2)  # noqa: B023

        compare(call(pyg.utils.softmax), call(softmax), x, tolerance=tolerance)
        torch.testing.assert_close(pyg.utils.softmax(x, index), softmax(x, index))
    assert patched["torch_geometric.utils.softmax"] == 2 * len(KINDS)


@covered(shape=SHAPES, dtype=DTYPES)
def test_softmax_of_sorted_rows(patched, shape, dtype):
    count = torch.tensor([3, 0, 1, 500, 0, E - 504])
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), count.cumsum(0)])
    x = torch.randn(E, *shape, dtype=dtype)
    x[:3] = -torch.inf  # a group with only -inf: torch_geometric's softmax gives 0 here
    got, want = pyg.utils.softmax(x, ptr=ptr), softmax(x, ptr=ptr)
    torch.testing.assert_close(got, want)
    assert not got[:3].any() and patched["torch_geometric.utils.softmax"] == 1
    x[:3] = 0
    # First derivatives only, because torch_geometric's softmax with ptr cannot be differentiated twice.
    grads = []
    for function in (pyg.utils.softmax, softmax):
        leaf = x.clone().requires_grad_()
        weight = torch.linspace(-1, 2, x.numel(), dtype=dtype).view_as(x)
        grads += torch.autograd.grad((function(leaf, None, ptr) * weight).sum(), leaf)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_what_is_not_finite(patched, value):
    index, x = indices("random"), torch.randn(E, 3)
    x[7, 1] = value
    x[index == 5, 2] = value
    torch.testing.assert_close(pyg.utils.softmax(x, index), softmax(x, index), equal_nan=True)
    ptr = torch.tensor([0, 10, E])
    torch.testing.assert_close(pyg.utils.softmax(x, ptr=ptr), softmax(x, ptr=ptr), equal_nan=True)
    torch.testing.assert_close(pyg.utils.scatter(x, index), scatter(x, index), equal_nan=True)
    # With ptr, scores of inf and nan go to the original: it has its own way with inf.
    softmaxes = 2 if value == -torch.inf else 1
    assert patched == {"torch_geometric.utils.softmax": softmaxes, "torch_geometric.utils.scatter": 1}


@covered(shape=[(8,), (13,), (4, 5)], dtype=DTYPES, count=[1, 2])
def test_sums(patched, threads, shape, dtype, count):
    threads(count)
    x, tolerance = torch.randn(E, *shape, dtype=dtype), 1e-3 if dtype == torch.float32 else 1e-9
    for index in map(indices, KINDS):

        def call(function):
            return lambda x: function(x, index, 0, N, "add").square()  # noqa: B023

        compare(call(pyg.utils.scatter), call(scatter), x, tolerance=tolerance)
    assert patched["torch_geometric.utils.scatter"] == len(KINDS)


def test_gradcheck():
    index = torch.tensor([2, 0, 2, 2, 1, 0, 5])
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    for function in (by_index.softmax, by_index.sums):
        assert torch.autograd.gradcheck(lambda x: function(x, index, 6), x)  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda x: function(x, index, 6), x)  # noqa: B023
        third = torch.autograd.functional.hessian(lambda x: (function(x, index, 6) ** 3).sum(), x)  # noqa: B023
        assert third.isfinite().all()


@pytest.mark.parametrize(("place", "value"), [("source", 7), ("source", -1), ("index", 6), ("index", -1)])
def test_numbers_out_of_range(place, value):
    given = {"source": torch.tensor([0, 6, 2]), "index": torch.tensor([5, 0, 1])}
    given[place][1] = value
    with pytest.raises(RuntimeError, match=rf"index_sum: {place}: expected numbers in .*, got {value}"):
        operators.index_sum(torch.ones(7, 3), given["index"], 6, given["source"])


def test_results_do_not_depend_on_threads(threads):
    index, x, found = torch.randint(N, (60_000,)), torch.randn(60_000, 8), []
    for number in (1, 2, 3):
        threads(number)
        more = by_index.sums_of_sources(dfgnn.Graph.from_coo(index.flip(0), index, num_nodes=N), x[:N])
        found.append((by_index.softmax(x, index, N), by_index.sums(x, index, N), more))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_a_result_may_be_modified(patched):
    index, x = indices("random"), torch.randn(E, 4, requires_grad=True)
    out = pyg.utils.softmax(x, index)
    out *= 2
    out.sum().backward()
    pyg.utils.scatter(x, index).mul_(2).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


OTHERS = {
    "another dimension": lambda f, x, i: f(x.t(), i, dim=1),
    "integers": lambda f, x, i: f((9 * x).long().abs(), i),
    "16 bits": lambda f, x, i: f(x.bfloat16(), i),
    "int32": lambda f, x, i: f(x, i.int()),
    "a row too many": lambda f, x, i: f(x[1:], i),
    "out of range": lambda f, x, i: f(x, i, num_nodes=3),
    "below zero": lambda f, x, i: f(x, i - 1, num_nodes=N),
    "no rows": lambda f, x, i: f(x[:0], i[:0], num_nodes=3),
    "no index": lambda f, x, i: f(x),
    "a matrix": lambda f, x, i: f(x, i[:, None].expand_as(x)),
    "ptr of fewer": lambda f, x, i: f(x, ptr=torch.tensor([0, 5, 9])),
    "ptr that falls": lambda f, x, i: f(x, ptr=torch.tensor([0, 9, 5, E])),
    "wrong type": lambda f, x, i: f(x.tolist(), i),
    "dim": lambda f, x, i: f(x, i, dim=7),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_other_calls_are_the_originals(patched, call):
    index, x = indices("random"), torch.randn(E, 4)
    found = []
    for function in (pyg.utils.softmax, softmax):
        try:
            found.append(call(function, x, index))
        except Exception as error:
            found.append((type(error), str(error)))
    got, want = found
    assert not patched
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


def test_other_reductions_and_small_sums(patched):
    index, x = indices("random"), torch.randn(E, 4)
    for reduce in ("mean", "max", "min", "mul"):
        assert torch.equal(pyg.utils.scatter(x, index, reduce=reduce), scatter(x, index, reduce=reduce))
    pyg.utils.scatter(x[:50], index[:50])
    pyg.utils.scatter(x[:500].requires_grad_(), index[:500])
    with pytest.raises(ValueError, match="Encountered invalid `reduce` argument 'no'"):
        pyg.utils.scatter(x, index, reduce="no")
    with pytest.raises(RuntimeError, match="out of bounds"):
        pyg.utils.scatter(x, index, dim_size=3)
    assert not patched


def test_compilers_transforms_and_scripts(patched):
    index, x = indices("random"), torch.randn(E, 4)
    expected = softmax(x, index, num_nodes=N)

    def call(x):
        return pyg.utils.softmax(x, index, num_nodes=N) + pyg.utils.scatter(x, index, dim_size=N)[index]

    want = expected + scatter(x, index, dim_size=N)[index]
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)
    torch.testing.assert_close(torch.func.vmap(call)(x[None])[0], want)
    torch.func.jvp(call, (x,), (x,))
    torch.testing.assert_close(torch.jit.trace(call, x, check_trace=False)(x), want)
    here = pyg.utils.softmax

    @torch.jit.script
    def scripted(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return here(x, index)

    torch.testing.assert_close(scripted(x, index), expected)
    assert not patched


def test_names(patched):
    """A function is replaced where it was imported by name, in torch_geometric itself, and restored when the
    patch is undone."""
    user = types.ModuleType("a_user_of_softmax")
    user.softmax, user.other = ORIGINALS.values()
    home = importlib.import_module("torch_geometric.utils._softmax")  # whose name stays the original's
    sys.modules[user.__name__] = user
    try:
        with dfgnn.patch("pyg"):
            from torch_geometric.nn.conv import point_transformer_conv

            assert user.softmax is pieces.softmax is point_transformer_conv.softmax is pyg.utils.softmax
            assert user.other is pieces.scatter and home.softmax is ORIGINALS["softmax"]
        assert user.softmax is pieces.softmax  # the fixture's patch holds
    finally:
        del sys.modules[user.__name__]


def test_undone():
    with dfgnn.patch("pyg"):
        held = pyg.utils.softmax
        assert held is not ORIGINALS["softmax"]
    assert pyg.utils.softmax is ORIGINALS["softmax"]
    assert pyg.nn.aggr.base.scatter is ORIGINALS["scatter"]
    pieces.served.clear()
    x, index = torch.randn(E, 2), indices("random")
    assert torch.equal(held(x, index), softmax(x, index)) and not pieces.served


class Own(pygnn.MessagePassing):
    """Attention as many write it."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = nn.Linear(6, 8)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x).view(-1, 2, 4))

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = pyg.utils.softmax((x_i * x_j).sum(-1), index, ptr, size_i)
        return alpha.unsqueeze(-1) * x_j


def test_message_passing_of_ones_own():
    module, edge_index = Own(), torch.stack([torch.randint(N, (E,)), indices("random")])
    x = torch.randn(N, 6)

    def run():
        module.zero_grad()
        out = module(x, edge_index)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in module.parameters())]

    expected = run()
    pieces.served.clear()
    with dfgnn.patch("pyg"):
        torch.testing.assert_close(run(), expected, rtol=1e-3, atol=1e-4)
    assert dict(pieces.served) == {"torch_geometric.utils.softmax": 1, "torch_geometric.utils.scatter": 1}


def test_our_layers_stay_fused():
    """dfgnn's layers check whether functions that their library's methods call were replaced; those that
    dfgnn.patch itself has replaced must not make them fall back."""
    x, edge_index = torch.randn(N, 8), torch.stack([torch.randint(N, (E,)), indices("random")])
    with dfgnn.patch("pyg"), warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = [pygnn.GATConv(8, 4), pygnn.TransformerConv(8, 4), pygnn.AGNNConv()]
        for layer in layers:
            layer(x, edge_index)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layer in layers:
            layer(x, edge_index)


# ---- torch_scatter ---------------------------------------------------------------------------------------


def test_torch_scatter(monkeypatch):
    """A stand-in with its signatures, as the package may not be installed."""
    module, calls = types.ModuleType("torch_scatter"), []

    def scatter_sum(src, index, dim=-1, out=None, dim_size=None):
        calls.append("sum")
        size = int(index.max()) + 1 if dim_size is None else dim_size
        out = src.new_zeros(size, *src.shape[1:]) if out is None else out
        return out.index_add_(dim, index, src)

    def scatter_softmax(src, index, dim=-1, dim_size=None):
        calls.append("softmax")
        return softmax(src, index, dim=dim, num_nodes=dim_size)

    def whole(src, index, dim=-1, out=None, dim_size=None, reduce="sum"):
        calls.append(reduce)
        return scatter(src, index, dim, dim_size, reduce)

    theirs = {"scatter_sum": scatter_sum, "scatter_add": lambda *a, **k: scatter_sum(*a, **k),
              "scatter_softmax": scatter_softmax, "scatter": whole}  # fmt: skip
    for name, function in theirs.items():
        function.__module__ = "torch_scatter"
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "torch_scatter", module)
    monkeypatch.setattr(pieces, "_of_torch_scatter", {})
    index, x = indices("random"), torch.randn(E, 8)
    pieces.served.clear()
    with dfgnn.patch("pyg"):
        torch.testing.assert_close(module.scatter_softmax(x, index, dim=0), softmax(x, index))
        torch.testing.assert_close(module.scatter_softmax(x[:, 0], index), softmax(x[:, 0], index))
        for function in (module.scatter_sum, module.scatter_add, module.scatter):
            torch.testing.assert_close(function(x, index, dim=0, dim_size=N + 1), scatter(x, index, 0, N + 1))
        assert calls == [] and pieces.served.total() == 5
        out = torch.ones(N, 8)
        assert module.scatter_sum(x, index, 0, out) is out
        module.scatter(x, index, 0, reduce="max")
        assert calls == ["sum", "max"] and pieces.served.total() == 5
    assert {name: getattr(module, name) for name in theirs} == theirs


# ---- DGL -------------------------------------------------------------------------------------------------


def test_dgl():
    dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
    import dgl.function as fn

    graphs = [
        dgl.graph((torch.randint(N, (E,)), torch.randint(N, (E,))), num_nodes=N + 3),
        dgl.heterograph({("a", "to", "b"): (torch.randint(N, (E,)), torch.randint(9, (E,)))}),
    ]

    def step(g, heads, size):
        torch.manual_seed(3)
        x = torch.randn(g.num_src_nodes(), heads, size, requires_grad=True)
        score = torch.randn(E, heads, 1, requires_grad=True)
        with g.local_scope():
            g.srcdata["x"], g.edata["a"] = x, dgl.ops.edge_softmax(g, score)
            g.update_all(fn.u_mul_e("x", "a", "m"), fn.sum("m", "out"))
            g.update_all(fn.copy_e("a", "m"), fn.sum("m", "total"))
            out = g.dstdata["out"].square().sum(), (g.dstdata["total"] * out_of(g, heads)).sum()
        sum(out).backward()
        return [*map(torch.Tensor.detach, out), x.grad, score.grad]

    def out_of(g, heads):
        return torch.linspace(0, 1, g.num_dst_nodes() * heads).view(-1, heads, 1)

    sums = {"dgl.ops.u_mul_e_sum": 1, "dgl.ops.copy_e_sum": 1}
    # With one head DGL's softmax trains faster, so that dfgnn leaves it in place.
    for g, heads in itertools.product(graphs, (4, 1)):
        expected = step(g, heads, 8)
        pieces.served.clear()
        with dfgnn.patch("dgl"):
            found = step(g, heads, 8)
            partial = dgl.ops.edge_softmax(g, torch.randn(3, 1), torch.arange(3, dtype=g.idtype))
            assert partial.shape == (3, 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert dict(pieces.served) == ({"dgl.ops.edge_softmax": 1, **sums} if heads == 4 else sums)
        pieces.served.clear()
        step(g, heads, 8)
        assert not pieces.served


def test_gradients_of_a_large_sum():
    """Their rows are gathered by another of PyTorch's functions."""
    rows, index = torch.randn(20_000, 256, requires_grad=True), torch.randint(90, (20_000,))
    given = torch.randn(256, 100).t()  # not contiguous
    (got,) = torch.autograd.grad(by_index.sums(rows, index, 100), rows, given)
    assert torch.equal(got, given[index])
