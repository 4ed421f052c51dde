"""What every function promises, with each kind of tensor that it takes (every_function.py)."""

import math
from functools import partial

import pytest
import torch
from attention import DTYPES, Made, loss_of, relative_error, rounding_band
from covering import EXHAUSTIVE, covered, exhaustive, some
from every_function import CASES, B
from graphs import GRAPHS, make_graph, tiny_graph
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import grad, jvp, vmap

from dfgnn import Graph, functional, reference
from dfgnn.functional import dot as dot_functions

cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def case(name, monkeypatch):
    CASES[name].choose(monkeypatch)
    return CASES[name]


def run(case, graph, tensors, module=functional, modify=lambda x: x, autocast=None, **more):
    """The results and the gradients of all tensors, in one dictionary."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in tensors.items()}
    with torch.autocast(graph.device.type, autocast, enabled=autocast is not None):
        results = [modify(x) for x in case(graph, leaves, module, **more)]
    gradients = torch.autograd.grad(loss_of(results), list(leaves.values()), allow_unused=True)
    return dict(enumerate(x.detach() for x in results)) | dict(zip(leaves, gradients))


SHAPES = [
    *((1, 7, 4, 3), (3, 1, 5, 1), (8, 16, 8, 4), (3, 33, 7, 33), (2, 8, 8, 128), (4, 12, 64, 11)),
    *((2, 7, 300, 3), (2, 256, 1, 3), (8, 300, 64, 2), (1, 128, 32, 5)),
]  # heads, columns of keys and of values, attributes
MORE = {
    "alone": {},
    "attention": {"return_attention": True},
    "dropout": {"dropout_p": 0.4},
    "dropout and attention": {"dropout_p": 0.4, "return_attention": True},
    "mask": {"mask": 0.7},
    "activation": {"negative_slope": -0.5},
    "scale": {"scale": 2.5},
    "autocast": {"autocast": torch.bfloat16},  # which leaves the features' dtype alone
}
# The options that functions do not have.
LACKS = {
    "agnn_attention": {"negative_slope", "scale"},
    "score_attention": {"negative_slope", "scale"},
    "edge_product_attention": {"negative_slope", "scale"},
    "gat": {"scale"},
    "gatv2": {"scale"},
}
PIECES = "edge_softmax", "sddmm", "spmm"
# flex_attention and attention within blocks have criteria of their own, in test_adding_a_score.py and
# test_block_attention.py.
ACCURATE = [name for name, case in CASES.items() if "flex" not in name and not case.in_blocks]


@covered(further=False, name=ACCURATE, dtype=DTYPES, shape=SHAPES, more=MORE)
def test_accuracy(device, case, name, dtype, shape, more):
    """The results and all gradients: their error may be twice that of plain PyTorch in the same dtype."""
    turn = 5 * list(CASES).index(name) + 3 * SHAPES.index(shape) + DTYPES.index(dtype)
    graph, (heads, *dims) = make_graph(list(GRAPHS)[turn % len(GRAPHS)], device), shape
    if graph.num_edges * heads * max(dims) > 200_000:
        heads, dims = 2, [7, 5, 3]
    tensors = case.tensors(graph, *dims, dtype=dtype, batch=False, h=heads)
    if case.function == "dot_attention":  # the same with a LeakyReLU, as layers have it
        case = case._replace(function="dot")
    more = {n: x for n, x in more.items() if n not in LACKS.get(case.function, ()) and n not in case.options}
    more = {} if case.function in PIECES else more
    if "dropout_p" in more:
        more = {**more, "generator": torch.tensor([11], device=device)}
    if "mask" in more:
        more = {**more, "mask": torch.rand(graph.num_edges, heads, device=device) < more["mask"]}
    # No clamp in 16 bits: a score may be rounded to the other side of the clamp, where its gradient is 0.
    clamp = {"clamp": None} if "clamp" in case.options and dtype.itemsize == 2 else {}
    # The terms of a bias's gradient cancel.
    extra = 32 * torch.finfo(dtype).eps if any(name.endswith("_bias") for name in tensors) else 0.0
    autocast = more.pop("autocast", None)
    exact, low = (
        run(case, graph, {n: x.to(kind) for n, x in tensors.items()}, reference, **more, **clamp)
        for kind in (torch.float64, dtype)
    )
    found = run(case, graph, tensors, autocast=autocast, **more, **clamp)
    for name, expected in exact.items():
        x, plain = found[name], low[name]
        assert x.shape == expected.shape and x.dtype == plain.dtype and x.isfinite().all(), name
        floor = expected.numel() ** 0.5 if name not in (0, "value") or case.function in PIECES else 0.0
        error, allowed = (relative_error(y, expected, floor) for y in (x, plain))
        limit = 2 * allowed + 4 * rounding_band(dtype) + extra
        assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g} (plain PyTorch: {allowed:.3g})"


@cases
def test_autocast(device, case):
    """It leaves float64 alone. The CPU's kernels compute terms of edges that learn under it, where plain
    operations, which serve second derivatives, would without it."""
    graph = make_graph("random", device)
    tensors = case.tensors(graph, 4, 5, 3, batch=False)
    found = run(case, graph, tensors, autocast=torch.bfloat16)
    torch.testing.assert_close(found, run(case, graph, tensors, reference))


# Cases whose code other cases run, too: tested exhaustively only.
PARTS = [
    *("gat shared", "gat without sources", "gatv2 vectors", "dot sink", "gat sink", "terms in values"),
    *("terms shared in values", "projection of values, folded", "projection of values, unfolded"),
    *("products and scores", "spmm shared", "flex", "blocks, softcap"),
]


@some([name for name in CASES if name not in PARTS], CASES)
def test_derivatives(device, case):
    """First and second ones, forward mode, and batches of torch.func's."""
    graph = tiny_graph(device)
    tensors = case.tensors(graph, batch=False)
    leaves = tuple(x.requires_grad_() for x in tensors.values())

    def of(module):
        return lambda *x: case(graph, dict(zip(tensors, x)), module)

    assert torch.autograd.gradcheck(of(functional), leaves)
    assert torch.autograd.gradgradcheck(of(functional), leaves, fast_mode=True)
    x = tuple(t.detach() for t in leaves)
    batch = [torch.randn(3, *t.shape).to(t) for t in x]
    numbers, found = tuple(range(len(x))), []
    for module in (functional, reference):
        f = of(module)

        def loss(*x, f=f):
            return sum(y.square().sum() for y in f(*x))

        found.append([
            grad(loss, numbers)(*x), jvp(f, x, tuple(torch.ones_like(t) for t in x)), vmap(f)(*batch),
            vmap(grad(loss, numbers))(*batch),
        ])  # fmt: skip
    torch.testing.assert_close(*found)


# One case of every operator, each with a Graph or an edge_index: operators get the same tensors of both.
COMPILED = [
    *("gat edges", "gat sink", "gatv2", "dot edges", "dot at edges", "terms of heads"),
    *("products", "score at edges", "agnn beta", "flex", "softmax", "sddmm", "spmm shared"),
    *("blocks", "blocks of pairs"),
    *("projections with biases, folded", "one projection, unfolded"),
]
FORMS = [(name, ("graph", "edge_index")[k % 2]) for k, name in enumerate(COMPILED)]
if EXHAUSTIVE:
    more = [name for name in CASES if name not in COMPILED]
    FORMS += [
        pytest.param(name, ("graph", "edge_index")[k % 2], marks=exhaustive) for k, name in enumerate(more)
    ]


@pytest.mark.parametrize("name, form", FORMS)
def test_compiled(device, case, form):
    """The compiled call runs twice; the second finds what the first has cached for the edges."""
    graph = make_graph("fewer_destinations", device)
    tensors = case.tensors(graph, 8, 4, 3, batch=False)
    edges = graph
    if form == "edge_index":
        edges, sizes = graph.edge_index.clone(), dict(num_src=graph.num_src, num_dst=graph.num_dst)
    torch._dynamo.reset()

    # No full graph for flex_attention: its loop over chunks of edges breaks the recording.
    @partial(torch.compile, fullgraph="flex" not in case.function, backend="aot_eager")
    def compiled(edges, x):
        return case(Graph.cached(edges, **sizes) if form == "edge_index" else edges, x)

    expected = run(case, graph, tensors)
    for _ in range(2):
        leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        results = compiled(edges, leaves)
        gradients = torch.autograd.grad(loss_of(results), list(leaves.values()), allow_unused=True)
        torch.testing.assert_close(dict(enumerate(results)) | dict(zip(leaves, gradients)), expected)


@cases
def test_results_may_be_modified(device, case):
    """Results may be modified also under hooks for saved tensors, and under torch.utils.checkpoint, which
    computes them again."""
    graph = make_graph("random", device)
    tensors = case.tensors(graph, 4, 3, batch=False)
    expected = run(case, graph, tensors, modify=lambda x: x.clone().tanh_())
    torch.testing.assert_close(run(case, graph, tensors, modify=lambda x: x.tanh_()), expected)
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}

    def forward(*x):
        return [y.tanh_() for y in case(graph, dict(zip(leaves, x)))]

    for hooks in (saved_tensors_hooks(lambda x: x, lambda x: x), save_on_cpu()):
        with hooks:
            loss = loss_of(forward(*leaves.values()))
        found = torch.autograd.grad(loss, list(leaves.values()))
        torch.testing.assert_close(dict(zip(leaves, found)), {n: expected[n] for n in leaves})
    loss = loss_of(torch.utils.checkpoint.checkpoint(forward, *leaves.values(), use_reentrant=False))
    found = [torch.autograd.grad(loss, list(leaves.values()), retain_graph=k == 0) for k in range(2)]
    torch.testing.assert_close(dict(zip(leaves, found[0])), {n: expected[n] for n in leaves})
    if device == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(*found))
    else:  # on a GPU edge_product_attention and flex_attention use index_add, whose order of sums varies
        torch.testing.assert_close(*found)


@cases
def test_only_some_gradients(device, case):
    """The gradient of each tensor alone is the same as with all others."""
    graph = make_graph("random", device)
    tensors = case.tensors(graph, 4, 3, batch=False)
    everything = run(case, graph, tensors)
    for name, x in tensors.items():
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss_of(case(graph, {**tensors, name: leaf})), leaf)
        torch.testing.assert_close(
            found, everything[name], msg=lambda m, n=name: f"{n}: {m}", atol=1e-12, rtol=1e-9
        )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.has_batch])
@pytest.mark.parametrize("shape", ["random", "fewer_sources"])
def test_sets_of_features(device, case, shape):
    """One call on several sets of features gives the results and gradients of one call for each set."""
    graph = make_graph(shape, device)
    tensors = case.tensors(graph, 4, 3)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    found = case(graph, leaves)
    each = [case(graph, {n: x[k] if n in case.has_batch else x for n, x in leaves.items()}) for k in range(B)]
    expected = tuple(torch.stack(xs) for xs in zip(*each))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(case(graph, leaves, reference), expected)
    gradients = (torch.autograd.grad(loss_of(x), list(leaves.values())) for x in (found, expected))
    torch.testing.assert_close(*gradients)


# (nodes, edges) in use in successive batches: some, all, more edges than a work item takes, none.
BATCHES = [(37, 120), (50, 400), (60, 5000), (3, 0), (50, 400)]


@pytest.mark.parametrize("name", ACCURATE)
def test_fixed_capacity(device, case):
    """In a graph of fixed capacity, with one batch after the other, rows of nodes and edges that are not in
    use are 0, and so are their gradients."""
    padded, sizes, letters = Graph.with_capacity(60, 5000, device=device), {"n": 60, "m": 60, "e": 5000}, {}
    for part in case.text.split():
        name, dims = part.split(":")
        letters[name] = dims.replace("b", "")[0]
    drops = case.function not in ("edge_softmax", "sddmm", "spmm")
    more = {"dropout_p": 0.3, "generator": torch.tensor([7], device=device)} if drops else {}
    for num_nodes, num_edges in BATCHES:
        generator = torch.Generator().manual_seed(num_edges)
        edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator).to(device)
        graph = Graph.from_edge_index(edge_index, num_nodes)
        padded.copy_(edge_index, num_nodes)
        tensors = case.tensors(graph, 4, 3, batch=False)
        expected = run(case, graph, tensors, **more)
        leaves = {}
        for name, x in tensors.items():
            letter = letters[name]
            unused = (sizes[letter] - len(x) if letter in sizes else 0, *x.shape[1:])
            leaves[name] = torch.cat([x, x.new_full(unused, math.nan if letter == "e" else 7.0)])
            leaves[name].requires_grad_()
        results = case(padded, leaves, **more)
        for k, x in enumerate(results):
            torch.testing.assert_close(x[: len(expected[k])], expected[k])
            assert "out_bias" in leaves or not x[len(expected[k]) :].any()
        used = [x[: len(expected[k])] for k, x in enumerate(results)]
        gradients = torch.autograd.grad(loss_of(used), list(leaves.values()))
        for name, x in zip(leaves, gradients):
            torch.testing.assert_close(x[: len(tensors[name])], expected[name])
            assert not x[len(tensors[name]) :].any(), name


TERMS = [name for name in CASES if name.startswith(("term", "one ", "proj"))]


@pytest.mark.parametrize("name", TERMS)
def test_padded_heads(case, monkeypatch):
    """CUDA kernels take heads of a multiple of 16 bytes. Here the CPU kernels get heads that are padded."""

    def padded(check, *tensors):
        size = max(-(-x.shape[-1] // 4) * 4 for x in tensors if x is not None)
        return tuple(x if x is None else torch.nn.functional.pad(x, (0, size - x.shape[-1])) for x in tensors)

    graph = make_graph("random")
    tensors = case.tensors(graph, 7, 5, 13, batch=False)
    expected = run(case, graph, tensors, reference)
    monkeypatch.setattr(dot_functions, "for_device", padded)
    torch.testing.assert_close(run(case, graph, tensors), expected)


@pytest.mark.parametrize(
    "name", ["terms of heads", "projections, folded", "gat edges", "score", "blocks", "blocks of pairs"]
)
def test_exported(case):
    graph = make_graph("random")
    tensors = case.tensors(graph, 8, 5, 3, torch.float32, batch=False)

    class Module(torch.nn.Module):
        def forward(self, *x):
            return case(graph, dict(zip(tensors, x)))

    x = tuple(tensors.values())
    torch.testing.assert_close(torch.export.export(Module(), x).module()(*x), Module()(*x))


# Call -> the largest tensors that it may make, and how many of that size: the gradients of what is given.
LARGEST = {
    "terms of heads": ((4000, 4, 64), 2), "terms shared": ((4000, 64), 2), "products": ((4000, 4, 64), 1),
    "projections, folded": ((4000, 16), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGEST)
def test_no_further_tensor_of_edges_and_channels(device, name):
    """Besides the arguments and their gradients, neither forward nor backward makes a tensor of that size."""
    if name == "products" and device != "cpu":
        pytest.skip("on a GPU these are plain operations")
    graph = Graph.from_coo(*torch.randint(50, (2, 4000)), num_src=50, num_dst=50).to(device)
    tensors = CASES[name].tensors(graph, 64, 64, 8, torch.float32, batch=False, h=4)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    most, number = math.prod(LARGEST[name][0]), LARGEST[name][1]
    with Made() as made:
        CASES[name](graph, leaves)[0].sum().backward()
    large = [n for n in made.sizes if n >= min(most, 4000 * 16)]
    assert max(made.sizes) <= most and len(large) <= number
    with Made() as made:  # which notices a call that makes such a tensor
        leaves["query"].detach()[graph.edge_index[1]] * 1
    assert max(made.sizes) == 4000 * 4 * 64


@pytest.mark.parametrize("given", ["Graph", "Graph on meta", "edge_index"])
@cases
def test_on_meta(case, given):
    """Tensors on the device meta have shapes alone, and so have the results of every function there and their
    gradients (of layers: tests/nn/test_every_layer.py)."""
    graph = make_graph("isolated")
    tensors = case.tensors(graph, 4, 5, 3, batch=False)
    expected = case(graph, tensors)
    leaves = {key: x.to("meta").requires_grad_() for key, x in tensors.items()}
    edges = graph.to("meta") if given == "Graph on meta" else graph
    if given == "edge_index":
        edges = graph.edge_index.to("meta")
        edges = Graph.cached(edges, num_src=graph.num_src, num_dst=graph.num_dst)
    found = case(edges, leaves)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert all(x.is_meta for x in found)
    gradients = torch.autograd.grad(sum(x.sum() for x in found), [*leaves.values()], allow_unused=True)
    for x, found in zip(leaves.values(), gradients):
        assert found is None or found.is_meta and found.shape == x.shape
