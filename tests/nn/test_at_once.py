"""Layers as one operator (`dfgnn.nn.fused.operator_call`) compute the same as their operations one by one."""

import weakref

import pytest
import torch
from covering import covered
from graphs import make_graph
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dfgnn import nn as layers
from dfgnn.engine.autograd import Layer
from dfgnn.nn.fused import gated as _gated
from dfgnn.nn.fused import operator_call as _operator_call
from dfgnn.nn.fused.spec import LayerSpec
from dfgnn.runtime.arguments import LayerTensors as _LayerTensors
from dfgnn.runtime.cuda_graphs import capturing

IN = 6
# (heads, size of a head). On CUDA heads whose size is no multiple of 16 bytes are padded.
SHAPES = [(1, 8), (2, 4), (3, 5), (1, 7)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1.5e-2, torch.bfloat16: 0.12}


AS = "as on the device", "padded", "joined", "joined and padded"


@pytest.fixture
def compute_as(device, monkeypatch):
    """Lets the CPU run with padded heads, or with joined projections, which only GPUs need."""

    def compute_as(kind):
        if kind != AS[0] and device != "cpu":
            pytest.skip("for the CPU")
        if "padded" in kind:
            monkeypatch.setitem(_operator_call._LOAD, "cpu", 16)
        if "joined" in kind:
            monkeypatch.setitem(_operator_call._MOST_JOINED, "cpu", 2**22)

    return compute_as


each_kind = pytest.mark.parametrize("kind", AS)


def LayerTensors(x, x_dst, value_weight, **others):
    """The operator's tensors; those that are not given are None."""
    missing = dict.fromkeys(_LayerTensors._fields)
    return _LayerTensors(**missing | {"x": x, "x_dst": x_dst, "value_weight": value_weight} | others)


def make_pair(
    graph,
    score,
    heads,
    size,
    dtype,
    two_ends=False,
    skip=True,
    shared=(),
    bias=True,
    attributes=0,
    wide=False,
):
    def random(*shape, dtype=dtype):
        return (torch.randn(shape) / 2).to(graph.device, dtype).requires_grad_()

    width, vectors = (
        heads * size,
        {"dot": [], "additive_v2": ["attn"], "additive": ["attn", "attn_dst"]}[score],
    )
    names = {"value", "query"} | ({"skip"} if skip else set()) | ({"key"} if score == "dot" else set())
    sizes = dict.fromkeys(sorted(names - set(shared)), IN) | ({"edge": attributes} if attributes else {})
    tensors = {f"{name}_weight": random(width, columns) for name, columns in sizes.items()}
    if bias:
        biased = ["skip"] * skip if score == "additive" else sizes
        tensors |= {f"{name}_bias": random(width) for name in (*biased, "out")}
    if attributes:
        tensors["edge_attr"] = random(graph.num_edges, attributes)
        vectors += ["attn_edge"] * (score == "additive")
    of_vectors = torch.promote_types(dtype, torch.float32) if wide else dtype
    tensors |= {name: random(1, heads, size, dtype=of_vectors) for name in vectors}
    x, x_dst = random(graph.num_src, IN), random(graph.num_dst, IN) if two_ends else None
    return LayerTensors(x, x_dst, **tensors)


def run(graph, t, dropout_p, score, heads, **numbers):
    seed = torch.randint(2**62, (1,), device=graph.device) if dropout_p else None
    spec = LayerSpec(score, heads, None, dropout_p=dropout_p, **numbers)
    return _operator_call.computed(spec, graph, t._replace(seed=seed), t.x.dtype)


def run_pair(graph, tensors, score, heads, dropout_p=0.0):
    slope = 1.0 if score == "dot" else 0.2
    return run(graph, _LayerTensors(*tensors), dropout_p, score, heads, negative_slope=slope, scale=0.5)


def formula_of(monkeypatch, run, *args, **kwargs):
    """The same call, operation by operation."""

    def at_once(kind, graph, handle, *tensors, original=Layer.at_once):
        if hasattr(kind, "formula"):
            return kind.formula(graph, *tensors)
        return original(kind, graph, handle, *tensors)  # the attention within

    with monkeypatch.context() as patch:
        patch.setattr(Layer, "at_once", staticmethod(at_once))
        return run(*args, **kwargs)


def gradients(out, tensors, **kwargs):
    loss = (out * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum()
    wanted = [x for x in tensors if x is not None and x.requires_grad]
    return torch.autograd.grad(loss, wanted, **kwargs)


def assert_close(found, expected, dtype):
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        scale = max(y.abs().max().item(), 1) if y.numel() else 1
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE[dtype] * scale)


PAIRS = {
    "gat": ("additive", {"skip": False}),
    "gat one projection": ("additive", {"skip": False, "shared": ("query",)}),
    "gat one projection, no bias": ("additive", {"skip": False, "shared": ("query",), "bias": False}),
    "gat one projection, vectors in float32": (
        "additive",
        {"skip": False, "shared": ("query",), "wide": True},
    ),
    "gat one projection, attributes": ("additive", {"skip": False, "shared": ("query",), "attributes": 3}),
    "gat two ends": ("additive", {"two_ends": True}),
    "gat with attributes, two ends": ("additive", {"attributes": 3, "two_ends": True, "bias": False}),
    "v2": ("additive_v2", {"skip": False}),
    "v2 one projection": ("additive_v2", {"skip": False, "shared": ("query",)}),
    "v2 two ends": ("additive_v2", {"skip": False, "two_ends": True}),
    "v2 with attributes of edges": ("additive_v2", {"skip": False, "attributes": 3}),
    "v2 with attributes, two ends": ("additive_v2", {"attributes": 9, "two_ends": True, "bias": False}),
    "dot": ("dot", {}),
    "dot no bias, no skip": ("dot", {"skip": False, "bias": False}),
    "dot two ends": ("dot", {"two_ends": True}),
    "dot one projection": ("dot", {"skip": False, "shared": ("key", "query"), "bias": False}),
    "dot key is value": ("dot", {"skip": False, "shared": ("key",)}),
    "dot with attributes of edges": ("dot", {"attributes": 3}),
    "dot with attributes, two ends": ("dot", {"attributes": 9, "two_ends": True, "bias": False}),
}


@covered(
    case=list(PAIRS), shape=SHAPES, dtype=tuple(TOLERANCE), kind=AS,
    hard=["isolated", "super_row", "no_edges", "duplicates"],
)  # fmt: skip
def test_pairs(device, monkeypatch, compute_as, case, shape, dtype, kind, hard):
    compute_as(kind)
    score, options = PAIRS[case]
    takes_any = options.get("two_ends") or "query" in options.get("shared", ())
    graph = make_graph(hard if takes_any or hard in ("isolated", "duplicates") else "random", device)
    graph = graph.reverse() if hard == "no_edges" else graph  # so that all destinations are sources
    tensors = make_pair(graph, score, *shape, dtype, **options)
    out = run_pair(graph, tensors, score, shape[0])
    expected = formula_of(monkeypatch, run_pair, graph, tensors, score, shape[0])
    assert_close([out, *gradients(out, tensors)], [expected, *gradients(expected, tensors)], dtype)
    with torch.no_grad():
        assert torch.equal(run_pair(graph, tensors, score, shape[0]), out)


@pytest.mark.gpu
def test_a_constant_first_used_in_a_cuda_graph():
    """Such a constant gets its value only at a replay, and so must not be cached for other calls."""
    _gated._constants.clear()
    like, stream = (torch.float32, torch.device("cuda")), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream=stream):
        inside = _gated.constant(1, *like)
    assert not _gated._constants
    assert _gated.constant(1, *like) == 1
    graph.replay()
    assert inside == 1 and _gated._constants


def test_a_constant_made_within_inference_mode_serves_training():
    _gated._constants.clear()
    x, like = torch.randn(5, requires_grad=True), (torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        _gated.constant(2, *like)
    (grad,) = torch.autograd.grad((_gated.constant(2, *like) * x).sum(), x)
    assert torch.equal(grad, torch.full((5,), 2.0))


def calls(device, shape=(2, 4), dtype=torch.float64, dropout_p=0.0):
    graph = make_graph("random", device)
    for score, options in PAIRS.values():
        pair = make_pair(graph, score, *shape, dtype, **options)

        def run(*tensors, score=score):
            return run_pair(graph, tensors, score, shape[0], dropout_p)

        yield run, pair


@each_kind
def test_dropout_is_that_of_the_functions(device, monkeypatch, compute_as, kind):
    compute_as(kind)
    for run, tensors in calls(device, dropout_p=0.4):
        torch.manual_seed(3)
        out = run(*tensors)
        torch.manual_seed(3)
        expected = formula_of(monkeypatch, run, *tensors)
        assert_close([out, *gradients(out, tensors)], [expected, *gradients(expected, tensors)], out.dtype)


@covered(1, shape=[(2, 4), (1, 7)], kind=AS)
def test_second_derivatives(device, monkeypatch, compute_as, shape, kind):
    compute_as(kind)
    for run, tensors in calls(device, shape):

        def twice(out, tensors=tensors):
            first = gradients(out, tensors, create_graph=True)
            return gradients(sum(g.square().sum() for g in first), tensors, allow_unused=True)

        found, expected = twice(run(*tensors)), twice(formula_of(monkeypatch, run, *tensors))
        for x, y in zip(found, expected, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert_close([x], [y], torch.float64)


def keeping(to):
    return lambda x: to.append(x) or x


@each_kind
def test_hooks_of_saved_tensors_and_checkpoints(device, compute_as, kind):
    compute_as(kind)
    for run, tensors in calls(device):
        out = run(*tensors)
        expected = gradients(out, tensors)
        packed: list = []
        with torch.autograd.graph.saved_tensors_hooks(keeping(packed), lambda x: x):
            again = run(*tensors)
        shared = any(x.data_ptr() == again.data_ptr() for x in packed)
        # One more than the tensors: what backward reads besides them, with `out` where there is a skip.
        assert shared or len(packed) == 1 + sum(x is not None for x in tensors)
        assert_close(gradients(again, tensors), expected, torch.float64)
        out = checkpoint(run, *tensors, use_reentrant=False)
        assert_close(gradients(out, tensors), expected, torch.float64)


@each_kind
def test_backward_twice_and_frozen_parameters(device, compute_as, kind):
    compute_as(kind)
    for run, tensors in calls(device):
        out = run(*tensors)
        expected = gradients(out, tensors, retain_graph=True)
        assert_close(gradients(out, tensors), expected, torch.float64)
        wanted = [x for x in tensors if x is not None]
        for x in wanted:  # each alone, and all but each
            for learns in ({id(x)}, {id(t) for t in wanted if t is not x}):
                some = [t if t is None or id(t) in learns else t.detach() for t in tensors]
                chosen = [g for t, g in zip(wanted, expected) if id(t) in learns]
                assert_close(gradients(run(*some), some), chosen, torch.float64)


@each_kind
def test_nothing_outlives_the_result(device, compute_as, kind, no_collection):
    compute_as(kind)
    for run, tensors in calls(device):
        out = run(*tensors)
        node = weakref.ref(out.grad_fn)
        del out
        assert node() is None


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


MODULES = {
    "GATConv": lambda: layers.dgl.GATConv(IN, 4, 2, allow_zero_in_degree=True),
    "GATv2Conv": lambda: layers.dgl.GATv2Conv(IN, 4, 2, allow_zero_in_degree=True),
    "DotGatConv": lambda: layers.dgl.DotGatConv(IN, 4, 2, allow_zero_in_degree=True),
    "GraphTransformerConv": lambda: layers.GraphTransformerConv(IN, 4, 2, allow_zero_in_degree=True),
    "with attributes": lambda: WithAttributes(),
}


class WithAttributes(layers.GraphTransformerConv):
    """A layer with edge_dim that brings them along."""

    def __init__(self):
        super().__init__(IN, 4, 2, allow_zero_in_degree=True, edge_dim=3)
        self.edge_attr = nn.Parameter(torch.linspace(-1, 1, 1200).view(400, 3))

    def forward(self, graph, feat, **options):
        return super().forward(graph, feat, edge_attr=self.edge_attr, **options)


@pytest.mark.parametrize("name", MODULES)
def test_modules_take_it_where_they_can(monkeypatch, name):
    graph, module = make_graph("random"), MODULES[name]()
    x = torch.randn(graph.num_src, IN, requires_grad=True)
    calls = []
    apply = Layer.at_once

    def at_once(kind, *args):
        if hasattr(kind, "formula"):  # else it is attention alone
            calls.append(1)
        return apply(kind, *args)

    monkeypatch.setattr(Layer, "at_once", staticmethod(at_once))
    plain = module(graph, x)
    assert len(calls) == 1
    # A hook on a projection must run, and a dispatch mode must see every operation: neither call is fused.
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    seen = []
    for linear in linears:
        handle = linear.register_forward_hook(lambda *args: seen.append(1))
        torch.testing.assert_close(module(graph, x), plain)
        handle.remove()
    with Operators() as modes:
        torch.testing.assert_close(module(graph, x), plain)
    assert len(calls) == 1 and len(seen) == len(linears) and any("mm" in op for op in modes.names)
    # The attention is computed in addition to the fused layer.
    ask = "return_attention" if hasattr(module, "edge_dim") else "get_attention"
    asked, attention = module(graph, x, **{ask: True})
    assert len(calls) == 2 and torch.equal(asked, plain) and attention.shape == (graph.num_edges, 2, 1)
    # Inputs that the fused layer does not take: another number of dimensions, and torch.func.
    module(graph, torch.randn(graph.num_src, 2, IN))
    torch.func.grad(lambda x: module(graph, x).sum())(x)
    assert len(calls) == 2
    module.double()(graph, x.double())
    assert len(calls) == 3


@pytest.mark.parametrize("two_ends", [False, True])
def test_gradients_of_projections_of_the_same_features_are_one_product(monkeypatch, two_ends):
    """The gradients of the weights of one end are parts of one product, and so are those of their biases."""
    monkeypatch.setitem(_operator_call._MOST_JOINED, "cpu", 2**22)
    graph = make_graph("random")
    for attributes in (0, 3):
        tensors = make_pair(graph, "dot", 2, 4, torch.float32, two_ends=two_ends, attributes=attributes)
        out = run_pair(graph, tensors, "dot", 2)
        for kind in ("weight", "bias"):
            names = [f"{name}_{kind}" for name in ("value", "key", "query", "skip")]
            found = torch.autograd.grad(out.sum(), [getattr(tensors, n) for n in names], retain_graph=True)
            storages = [x.untyped_storage().data_ptr() for x in found]
            assert storages[0] == storages[1] and storages[2] == storages[3]
            assert (storages[0] == storages[2]) is not two_ends


def test_a_layer_that_has_learnt_more_takes_the_long_way():
    """A subclass with an option of its own is not fused, because the fused layer does not know the option."""

    class Louder(layers.dgl.GATConv):
        FUSED_OPTIONS = layers.dgl.GATConv.FUSED_OPTIONS

        def __init__(self, *args, volume=1.0, in_feats=IN, out_feats=4, num_heads=2):
            super().__init__(in_feats, out_feats, num_heads, allow_zero_in_degree=True)

    class Renamed(layers.dgl.GATConv):
        """What a user adds beneath the layer's own constructor is the user's to compute."""

        def __init__(self, size):
            super().__init__(IN, size, 2, allow_zero_in_degree=True)

    assert _operator_call.knows_all_of(layers.dgl.GATConv) and _operator_call.knows_all_of(Renamed)
    assert not _operator_call.knows_all_of(Louder) and not _operator_call.knows_all_of(nn.Linear)
    graph = make_graph("random")
    x = torch.randn(graph.num_src, IN, requires_grad=True)
    short, long = Renamed(4)(graph, x), Louder()(graph, x)
    assert (
        "LayerBackward" in str(short.grad_fn.next_functions[0][0]) or "LayerBackward" in short.grad_fn.name()
    )
    assert "LayerBackward" not in long.grad_fn.name()


@covered(small=[True, False], dtype=[torch.bfloat16, torch.float16], name=list(MODULES), kind=AS)
def test_autocast(device, monkeypatch, compute_as, name, dtype, small, kind):
    compute_as(kind)
    graph, module = make_graph("random", device), MODULES[name]().to(device)
    x = torch.randn(graph.num_src, IN, device=device, requires_grad=True)
    tensors = [x, *module.parameters()]
    monkeypatch.setattr(_operator_call, "_is_small", lambda *args: small)

    def run(autocast=True):
        with torch.autocast(device, dtype, enabled=autocast):
            return module(graph, x)

    out = run()
    found = [out, *gradients(out, tensors)]
    # A small layer computes in float32 and rounds its result, which is then that without autocast.
    wide = run(autocast=False)
    assert torch.equal(out, wide.to(out.dtype)) == small
    if small:
        assert_close(found, [wide.to(out.dtype), *gradients(wide, tensors)], torch.bfloat16)
        return
    with monkeypatch.context() as patch:
        patch.setattr(_operator_call, "knows_all_of", lambda cls: False)
        out = run()
    assert_close(found, [out, *gradients(out, tensors)], torch.bfloat16)


def test_small_under_autocast(monkeypatch):
    """Whether a layer counts as small is decided by the size of its products and of what it gathers; features
    that have 16 bits stay in 16 bits."""
    graph = make_graph("random")
    x, weight = torch.randn(graph.num_src, IN), torch.randn(8, IN)

    def computed_in(x, weight=weight, x_dst=None):
        with torch.autocast("cpu", torch.bfloat16):
            return _operator_call.cast_by_autocast(graph, x, x_dst, weight)[0].dtype

    assert computed_in(x) == torch.float32
    assert computed_in(x.bfloat16()) == computed_in(x, weight.bfloat16()) == torch.bfloat16
    assert computed_in(x, x_dst=x.bfloat16()) == torch.bfloat16
    for name, most in (
        ("_MOST_PRODUCTS", len(x) * weight.numel()),
        ("_MOST_GATHERED", graph.num_edges * len(weight)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(_operator_call, name, most)
            assert computed_in(x) == torch.float32
            patch.setattr(_operator_call, name, most - 1)
            assert computed_in(x) == torch.bfloat16


def test_a_small_pair_launches_little(monkeypatch):
    """On a GPU small projections are one product backward, and their biases' gradients one sum with that of
    the bias of the result."""
    monkeypatch.setitem(_operator_call._MOST_JOINED, "cpu", 2**22)
    graph = make_graph("random", "cpu")
    for score in ("additive_v2", "dot"):
        tensors = make_pair(graph, score, 2, 4, torch.float32, skip=False)
        out = run_pair(graph, tensors, score, 2)
        with torch.profiler.profile() as profiler:
            out.backward(torch.ones_like(out))
        calls = {o.key: o.count for o in profiler.key_averages()}
        assert calls["aten::sum"] == 1  # and none of the vectors' partial sums, where there is one
        assert "aten::copy_" not in calls  # each gradient lies where it was computed


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
def test_projections_of_small_features_are_one_product(bias):
    """So many columns take a GPU no longer than those of one projection."""
    graph = make_graph("random", "cuda")
    tensors = make_pair(graph, "dot", 2, 4, torch.float32, bias=bias)
    run_pair(graph, tensors, "dot", 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run_pair(graph, tensors, "dot", 2)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    products = [name for name in names if "gemm" in name.lower() or "gemv" in name.lower()]
    assert len(products) == 1, names
