"""Projected edge features: dot_attention with Projected terms, and the products behind it."""

import pytest
import torch
from attention import DTYPES, check, function, make_inputs, relative_error, rounding_band
from graphs import GRAPHS, make_graph, tiny_graph

from dfgnn import functional, reference
from dfgnn.engine import edge_maps as _edge_terms
from dfgnn.engine import operators
from dfgnn.functional import EdgeTerm, Projected
from dfgnn.plan.cost import lanes_per_head

SIZES = [(h, d) for d in (1, 7, 11, 33, 300) for h in (1, 3, 8, 16)]


def with_projection(inputs, graph, features, bias=False, where="both"):
    _, heads, dim = inputs["value" if where == "value" else "query"].shape
    like = inputs["query"]
    inputs["edge_attr"] = torch.randn(graph.num_edges, features).to(like)
    inputs[f"edge_{where}_weight"] = (torch.randn(heads * dim, features) / features**0.5).to(like)
    if bias:
        inputs[f"edge_{where}_bias"] = torch.randn(heads * dim).to(like)
    return inputs


# ---- the products ----------------------------------------------------------------------------------------


def plain_products(graph, rows, attr, weight):
    dst = graph.edge_index[1]
    dim = attr.shape[1]
    terms = weight[:, :, None] * attr[:, None]
    return {
        "dot": (rows[dst, :, :dim] * attr[:, None]).sum(-1),
        "sum": torch.zeros_like(rows[:, :, :dim]).index_add(0, dst, terms),
        "outer": (weight[:, :, None] * rows[dst, :, :dim]).sum(1),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRAPHS)
def test_products(device, name, dtype):
    graph = make_graph(name, device)
    turn = list(GRAPHS).index(name) * len(DTYPES) + DTYPES.index(dtype)
    for heads, dim in SIZES if device != "cpu" else (SIZES[(7 * turn + 3) % 20],):
        step = 16 // dtype.itemsize
        width = -(-dim // step) * step if device != "cpu" else dim
        # Heads are the outermost dimension in memory, as torch.bmm leaves them, and rows are padded.
        rows = torch.randn(heads, graph.num_dst, width).to(device, dtype).transpose(0, 1)
        attr = torch.randn(graph.num_edges, dim).to(device, dtype)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        weight = torch.randn(graph.num_edges, heads).to(device, acc)
        expected = plain_products(graph, rows.double(), attr.double(), weight.double())
        low = plain_products(graph, rows.to(acc), attr.to(acc), weight)
        found = {
            "dot": _edge_terms.edge_dot(graph, rows, attr, 0.5) * 2,
            "sum": _edge_terms.edge_sum(graph, weight, attr, width),
            "outer": _edge_terms.edge_outer(graph, weight, rows, dim, 0.5) * 2,
        }
        assert found["dot"].dtype == acc and found["sum"].dtype == found["outer"].dtype == dtype
        assert not found["sum"][:, :, dim:].any()
        found["sum"] = found["sum"][:, :, :dim]
        for what, x in found.items():
            assert x.shape == expected[what].shape
            error = relative_error(x, expected[what])
            limit = 2 * relative_error(low[what], expected[what]) + rounding_band(x.dtype)
            assert error <= limit, f"{what} H={heads} d={dim}: error {error:.3g} > {limit:.3g}"


@pytest.mark.parametrize("heads", [1, 4])
def test_products_of_any_order(device, heads):
    graph = tiny_graph(device)
    double = dict(dtype=torch.float64, device=device)
    rows, attr, weight = (
        torch.randn(n, **double, requires_grad=True) for n in ((4, heads, 2), (10, 2), (10, heads))
    )
    for call, inputs in (
        (lambda r, x: _edge_terms.edge_dot(graph, r, x, 0.3), (rows, attr)),
        (lambda w, x: _edge_terms.edge_sum(graph, w, x, 2), (weight, attr)),
        (lambda w, r: _edge_terms.edge_outer(graph, w, r, 2, 0.3), (weight, rows)),
    ):
        assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, inputs)


# ---- attention -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 8, 8), (0, 2, 8, 8), (37, 5, 40, 16), (5000, 3, 64, 24), (300, 2, 136, 8)], ids=str
)
def test_gradient_of_the_projection(device, dtype, shape):
    """Sums over nodes of products of rows: any number of rows, columns and features; rows with a stride."""
    rows, heads, size, width = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes):
        x = torch.randn(rows, 2, heads, *sizes, generator=generator, dtype=torch.float64)
        return x.to(device, dtype)[:, 1]

    x, y, u, v = draw(size), draw(width), draw(size), draw(width)
    found = _edge_terms.grad_proj(x, y, u, v, 0.3)
    x, y, u, v = (t.double() for t in (x, y, u, v))
    expected = 0.3 * torch.einsum("nhd,nhc->hdc", x, y) + torch.einsum("nhd,nhc->hdc", u, v)
    assert found.dtype == dtype and found.shape == expected.shape
    assert relative_error(found, expected) <= 4 * rounding_band(dtype)


def test_second_derivatives_of_one_tensor_in_two_places(device):
    """A tensor that is both query and (a part of) key gets the sum of two gradients."""
    graph = tiny_graph(device)
    inputs = with_projection(make_inputs("dot", graph, 2, 2, torch.float64), graph, 3)
    x, value, attr, proj = (inputs[name] for name in ("query", "value", "edge_attr", "edge_both_weight"))

    def call(x):
        y = torch.cat([x, x[:1]])  # num_src = num_dst + 1
        term = Projected(attr, proj)
        return functional.dot_attention(graph, x, y, value, edge=EdgeTerm(term, term))

    assert torch.autograd.gradgradcheck(call, x.requires_grad_())


def test_autocast_casts_a_projection(device):
    """Autocast casts a projection as it casts a linear layer: attributes and parameters may be in float32
    while the rows have 16 bits."""
    graph, size = tiny_graph(device), 8
    query = torch.randn(graph.num_dst, 2, size, device=device).bfloat16()
    rows = torch.randn(graph.num_src, 2, size, device=device).bfloat16()
    attr = torch.randn(graph.num_edges, 3, device=device, requires_grad=True)
    weight = torch.randn(2 * size, 3, device=device, requires_grad=True)
    term = Projected(attr, weight)
    expected = Projected(attr.bfloat16(), weight.bfloat16())
    with torch.autocast(device, torch.bfloat16):
        out = functional.dot_attention(graph, query, rows, rows, edge=EdgeTerm(term, term))
    assert torch.equal(
        out, functional.dot_attention(graph, query, rows, rows, edge=EdgeTerm(expected, expected))
    )
    grads = torch.autograd.grad(out.float().sum(), (attr, weight))
    assert all(grad.dtype == torch.float32 and grad.abs().sum() > 0 for grad in grads)
    with pytest.raises(TypeError, match="edge.key.attr"):
        functional.dot_attention(graph, query, rows, rows, edge=EdgeTerm(term, term))


# ---- the attention's own kernels -------------------------------------------------------------------------


@pytest.fixture
def gpu():
    return "cuda"


@pytest.fixture
def passes(monkeypatch):
    """The list grows by one with each forward or backward pass of the kernels with projected attributes."""
    count = []
    for name in ("attend_projected", "attend_projected_backward"):
        call = getattr(operators, name)
        monkeypatch.setattr(operators, name, lambda *args, call=call: count.append(1) or call(*args))
    return count


IN_ONE = {
    torch.float16: ((32, 16), (64, 11), (40, 3), (256, 64), (128, 32)),
    torch.bfloat16: ((32, 5), (64, 16), (200, 7)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["auto", "natural<=32", "longest_first", "packed"])
@pytest.mark.parametrize("dtype", IN_ONE)
@pytest.mark.parametrize(
    "name", ["one_edge", "mixed_degrees", "super_source", "super_row", "power_law", "random"]
)
def test_in_one(gpu, passes, name, dtype, schedule):
    graph = make_graph(name, gpu)
    for turn, (dim, features) in enumerate(IN_ONE[dtype]):
        heads = (1, 3, 4, 16)[turn % 4]
        if graph.num_edges * heads * max(dim, features) > 5_000_000:
            heads, dim, features = 2, 32, 7
        if schedule == "packed":
            heads = 1
            if lanes_per_head(1, dim, dtype) == 32:
                continue
        passes.clear()
        inputs = with_projection(make_inputs("dot", graph, heads, dim, dtype), graph, features)
        check("dot", graph, inputs, f"H={heads} D={dim} d={features}: ", schedule=schedule)
        assert len(passes) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("learned", [False, True], ids=["", "learned features"])
@pytest.mark.parametrize("dtype", IN_ONE)
def test_options_in_one(gpu, passes, dtype, learned):
    """One pass of these kernels with all options, compared with separate operations with the same dropout
    mask."""
    graph = make_graph("mixed_degrees", gpu)
    heads, dim, features = 3, 64, 11
    inputs = with_projection(make_inputs("dot", graph, heads, dim, dtype), graph, features)
    more = dict(
        bias=torch.randn(graph.num_edges, heads, device=gpu),
        weight=torch.rand(graph.num_edges, device=gpu),
        mask=torch.rand(graph.num_edges, heads, device=gpu) < 0.8,
        out_bias=torch.randn(heads, dim).to(gpu, dtype),
        generator=torch.tensor([11], device=gpu),
    )
    names = [name for name in inputs if learned or name != "edge_attr"]

    def results(module, kind):
        given = {n: x.to(kind) if x.is_floating_point() else x for n, x in {**inputs, **more}.items()}
        leaves = [given[n].requires_grad_() for n in names]
        options = dict(dropout_p=0.4, scale=0.2)
        out = function("dot", module)(graph, **given, **options)
        grad = torch.linspace(-1, 1, out.numel(), device=gpu).view_as(out).to(kind)
        return dict(zip(("out", *names), (out, *torch.autograd.grad(out, leaves, grad))))

    found, exact, low = (
        results(functional, dtype), results(reference, torch.float64), results(reference, dtype),
    )  # fmt: skip
    assert len(passes) == 2
    for name, x in exact.items():
        error, limit = relative_error(found[name], x), 2 * relative_error(low[name], x) + rounding_band(dtype)
        assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g}"
    again = results(functional, dtype)
    assert all(torch.equal(x, again[name]) for name, x in found.items())


@pytest.mark.parametrize("rows", [0, 1, 511, 512, 513, 2000])
def test_sums_over_rows_in_chunks(rows, device):
    x, y = torch.randn(rows, 3, 5, device=device).double(), torch.randn(rows, 3, 2, device=device).double()
    expected = torch.einsum("nhd,nhw->hdw", x, y)
    torch.testing.assert_close(_edge_terms._in_chunks(x, y), expected)


def test_a_gradient_summed_in_chunks(monkeypatch):
    """Sums in chunks, as on a GPU in float32, give all derivatives, and the same gradients under a
    compiler."""
    monkeypatch.setattr(_edge_terms, "_splits", lambda x: True)
    x = torch.randn(7, 3, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_edge_terms._by_head, (x, w))
    assert torch.autograd.gradgradcheck(_edge_terms._by_head, (x, w))
    found = torch.autograd.grad(torch.compile(_edge_terms._by_head, fullgraph=True)(x, w).cos().sum(), w)
    expected = torch.autograd.grad(torch.bmm(x.transpose(0, 1), w).cos().sum(), w)
    torch.testing.assert_close(found, expected)
