"""Dot attention with other terms of the edges in the key than in the value, and terms that heads share."""

import pytest
import torch
from attention import DTYPES, Made, check, make_inputs, run
from graphs import GRAPHS, make_graph, tiny_graph
from torch.func import grad, jvp, vmap

from dfgnn import Graph, functional, reference
from dfgnn.engine import edge_projection
from dfgnn.engine.traced_graph import EdgeList
from dfgnn.functional import dot as dot_functions

HEADS, DIM, VALUE_DIM, FEATURES = 3, 8, 5, 13
# What a call has of edges: tensors by name, of E edges, H heads, D and Dv elements per head and d features.
TERMS = {
    "of heads": dict(edge_feat="E H D", edge_feat_value="E H Dv"),
    "shared": dict(edge_feat="E D", edge_feat_value="E Dv"),
    "of heads, shared": dict(edge_feat="E H D", edge_feat_value="E Dv"),
    "shared, of heads": dict(edge_feat="E D", edge_feat_value="E H Dv"),
    "in values alone": dict(edge_feat_value="E H Dv"),
    "shared in values alone": dict(edge_feat_value="E Dv"),
    "projections": dict(edge_attr="E d", edge_proj="HD d", edge_proj_value="HDv d"),
    "projections with biases": dict(
        edge_attr="E d", edge_proj="HD d", edge_proj_bias="HD", edge_proj_value="HDv d",
        edge_proj_bias_value="HDv",
    ),
    "projection of values alone": dict(edge_attr="E d", edge_proj_value="HDv d", edge_proj_bias_value="HDv"),
}  # fmt: skip
ONE = {
    "shared": dict(edge_feat="E D"),
    "shared in keys": dict(edge_feat="E D", edge_feat_in="key"),
    "shared in values": dict(edge_feat="E Dv", edge_feat_in="value"),
    "projection": dict(edge_attr="E d", edge_proj="HD d"),
}
ALL = {**TERMS, **{f"one {name}": terms for name, terms in ONE.items()}}
WAYS = ("folded", "unfolded")


def name_of(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def with_terms(inputs, graph, terms, features=FEATURES):
    """inputs with tensors of these shapes, and the options among ``terms``."""
    like, value_dim = inputs["query"], inputs["value"].shape[2]
    heads, dim = like.shape[1:]
    sizes = {
        **dict(E=graph.num_edges, H=heads, D=dim, Dv=value_dim),
        **dict(d=features, HD=heads * dim, HDv=heads * value_dim),
    }
    options = {}
    for name, text in terms.items():
        if name == "edge_feat_in":
            options[name] = text
            continue
        x = torch.randn([sizes[part] for part in text.split()])
        inputs[name] = (x / features**0.5 if "proj" in name else x).to(like)
    return options


@pytest.fixture
def way(request, monkeypatch):
    """Projections folded or not, whatever the sizes say."""
    monkeypatch.setattr(edge_projection, "_unfolds", lambda inputs, terms: _unfolds(request.param, terms))


def _unfolds(way, terms):
    return way == "unfolded" and not (terms.key_proj is None and terms.value_proj is None)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", GRAPHS)
def test_attention(device, name, dtype):
    graph = make_graph(name, device)
    turn = list(GRAPHS).index(name) * len(DTYPES) + DTYPES.index(dtype)
    text = list(ALL)[turn % len(ALL)]
    heads, dim = ((1, 7), (3, 1), (8, 16), (3, 33))[(turn + turn // 4) % 4]
    features = (1, 4, 33, 128)[turn // 3 % 4]
    if graph.num_edges * heads * max(dim, features) > 500_000:
        heads, dim, features = 2, 7, 9
    inputs = make_inputs("dot", graph, heads, dim, dtype)
    options = with_terms(inputs, graph, ALL[text], features) | dict(return_attention=turn % 2 == 0)
    extra = 32 * torch.finfo(dtype).eps * ("biases" in text)  # whose gradient is of what cancels
    check("dot", graph, inputs, f"{text} H={heads} D={dim} d={features}: ", extra=extra, **options)


OPTIONS = {
    "dropout": dict(dropout_p=0.4),
    "dropout and attention": dict(dropout_p=0.4, return_attention=True),
    "activation": dict(negative_slope=0.2),
    "scale": dict(scale=2.5),
}
EDGES = {
    "none": {},
    "bias and weight": dict(edge_bias=True, edge_weight="H"),
    "gate": dict(edge_gate="H", edge_bias=True, edge_weight=1),
}


# Those with a projection, which may be folded or not.
PROJECTED = {name: terms for name, terms in ALL.items() if any("proj" in key for key in terms)}


@pytest.mark.parametrize(
    "terms, way",
    [*((name, "folded") for name in ALL), *((name, "unfolded") for name in PROJECTED)],
    indirect=["way"],
)
@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
def test_options(device, terms, edges, way):
    graph, turn = make_graph("random", device), list(ALL).index(terms)
    terms = ALL[terms]
    options = list(OPTIONS.values())[(turn + len(edges)) % len(OPTIONS)]
    both = "edge_feat_in" not in terms and not any("value" in name for name in terms)
    dtype = (torch.float64, torch.float32)[turn % 2]
    inputs = make_inputs("dot", graph, HEADS, DIM, dtype, value_dim=DIM if both else VALUE_DIM, **edges)
    more = with_terms(inputs, graph, terms) | options
    inputs["out_bias"] = torch.randn(HEADS, inputs["value"].shape[2]).to(device, dtype)
    mask = torch.rand(graph.num_edges, HEADS, device=device) < 0.8
    more |= dict(edge_mask=mask, _seed=torch.tensor([11], device=device))
    check("dot", graph, inputs, extra=32 * torch.finfo(dtype).eps, **more)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_padded_heads(terms, way, monkeypatch):
    """CUDA's kernels take heads of a multiple of 16 bytes. Here a CPU's get heads padded alike."""

    def padded(check, *tensors):
        size = max(-(-x.shape[-1] // 4) * 4 for x in tensors if x is not None)
        return tuple(x if x is None else torch.nn.functional.pad(x, (0, size - x.shape[-1])) for x in tensors)

    monkeypatch.setattr(dot_functions, "for_device", padded)
    graph = make_graph("random")
    inputs = make_inputs("dot", graph, HEADS, 7, torch.float32, value_dim=VALUE_DIM)
    options = with_terms(inputs, graph, terms)
    check("dot", graph, inputs, extra=32 * torch.finfo(torch.float32).eps, **options)


def test_bias_behind_the_activation(device):
    """Where only the value has a term, or the engine has the key's."""
    graph = make_graph("mixed_degrees", device)
    for terms in (TERMS["shared in values alone"], TERMS["in values alone"], dict(edge_feat="E H D")):
        inputs = make_inputs("dot", graph, HEADS, DIM, torch.float64, edge_bias=True)
        with_terms(inputs, graph, terms)
        check("dot", graph, inputs, bias_after=True, negative_slope=0.2)


@pytest.mark.parametrize("sizes", [(37, 8, 16, 128), (400, 8, 16, 128), (400, 2, 4, 7)], ids=str)
def test_both_ways_where_the_sizes_decide(sizes):
    """Which way is taken changes rounding alone."""
    edges, heads, dim, features = sizes
    graph = Graph.from_edge_index(torch.randint(30, (2, edges)), num_nodes=30)
    inputs = make_inputs("dot", graph, heads, dim, torch.float64)
    with_terms(inputs, graph, TERMS["projections with biases"], features)
    found = run(functional.dot_attention, graph, inputs)
    for name, x in run(reference.dot_attention, graph, inputs).items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_one_tensor_in_both_is_one_term(device):
    graph = make_graph("random", device)
    inputs = make_inputs("dot", graph, HEADS, DIM, torch.float64)
    for shape in ((graph.num_edges, HEADS, DIM), (graph.num_edges, DIM)):
        feat = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        found = []
        for more in ({}, {"edge_feat_value": feat}, {"edge_feat_value": feat.clone()}):
            out = functional.dot_attention(graph, **inputs, edge_feat=feat, **more)
            found.append((out, *torch.autograd.grad(out.square().sum(), feat)))
        torch.testing.assert_close(found[1], found[0])
        torch.testing.assert_close(found[2], found[0])


def test_only_some_gradients(device):
    """Each alone as together with the others."""
    graph = make_graph("random", device)
    for terms in (*TERMS.values(), ONE["projection"]):
        dim = 4 if terms is ONE["projection"] else 3
        inputs = make_inputs(
            "dot", graph, 2, 4, torch.float64, value_dim=dim, edge_bias=True, edge_weight="H"
        )
        with_terms(inputs, graph, terms, 3)
        everything = run(functional.dot_attention, graph, inputs)
        for name, x in inputs.items():
            leaf = x.clone().requires_grad_()
            out = functional.dot_attention(graph, **{**inputs, name: leaf})
            generator = torch.Generator().manual_seed(1)
            (found,) = torch.autograd.grad(out, leaf, torch.randn(out.shape, generator=generator).to(out))
            torch.testing.assert_close(
                found, everything["grad_" + name], msg=lambda m, n=name: f"{n}: {m}", atol=1e-12, rtol=1e-9
            )


def call_with(graph, inputs, module=functional, **options):
    return lambda *tensors: module.dot_attention(graph, **dict(zip(inputs, tensors)), **options)


@pytest.mark.parametrize(
    "terms, way",
    [
        *((name, "folded") for name in ("of heads", "shared", "of heads, shared", "one shared")),
        *((name, way) for name in ("projections", "one projection") for way in WAYS),
    ],
    indirect=["way"],
)
def test_second_derivatives(device, terms, way):
    graph = tiny_graph(device)
    inputs = make_inputs("dot", graph, 2, 2, torch.float64)
    with_terms(inputs, graph, ALL[terms], 2)
    leaves = [x.requires_grad_() for x in inputs.values()]
    call = call_with(graph, inputs)
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("terms", ["of heads", "of heads, shared", "projections", "one projection"])
def test_transforms(device, terms):
    graph = tiny_graph(device)
    inputs = make_inputs("dot", graph, 2, 2, torch.float64)
    with_terms(inputs, graph, ALL[terms], 3)
    x, batch = tuple(inputs.values()), [torch.randn(3, *x.shape).to(x) for x in inputs.values()]
    found = []
    for module in (functional, reference):
        f = call_with(graph, inputs, module)

        def loss(*tensors, f=f):
            return f(*tensors).square().sum()

        found.append(
            [
                grad(loss, tuple(range(len(x))))(*x),
                jvp(f, x, tuple(torch.ones_like(t) for t in x)),
                vmap(f)(*batch),
                vmap(grad(loss, (0, 3, 4)))(*batch),
            ]
        )
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("terms", ["shared, of heads", "projections with biases", "one projection"])
def test_compiled(device, terms):
    """Through an edge_index and through a graph, with gradients, in one graph each."""
    edge_index = torch.randint(20, (2, 90), device=device)
    graph = Graph.from_edge_index(edge_index, num_nodes=20)
    inputs = make_inputs("dot", graph, 2, 8, torch.float64)
    with_terms(inputs, graph, ALL[terms], 3)

    def by_edges(edge_index, *tensors):
        return call_with(EdgeList(edge_index, 20, 20), inputs)(*tensors)

    def by_graph(edge_index, *tensors):
        return call_with(graph, inputs)(*tensors)

    found = []
    torch._dynamo.reset()
    for call in (
        by_graph,
        *(torch.compile(f, fullgraph=True, backend="aot_eager") for f in (by_graph, by_edges)),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        out = call(edge_index, *leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("terms", ["of heads", "projections"])
def test_exported(terms):
    graph = make_graph("random")
    inputs = make_inputs("dot", graph, 2, 8)
    with_terms(inputs, graph, TERMS[terms], 3)

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return call_with(graph, inputs)(*tensors)

    x = tuple(inputs.values())
    torch.testing.assert_close(torch.export.export(Module(), x).module()(*x), Module()(*x))


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("terms", ["of heads", "projections", "one projection"])
def test_the_result_may_be_modified(device, terms, hooks):
    graph = make_graph("random", device)
    inputs = make_inputs("dot", graph, 2, 4, torch.float64)
    with_terms(inputs, graph, ALL[terms], 3)
    found = []
    for modify in (lambda x: x.tanh_(), lambda x: x.clone().tanh_()):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]

        def forward(*tensors, modify=modify):
            return modify(call_with(graph, inputs)(*tensors))

        if hooks:
            out = torch.utils.checkpoint.checkpoint(forward, *leaves, use_reentrant=False)
        else:
            out = forward(*leaves)
        loss = out.square().sum()
        found.append([out, *torch.autograd.grad(loss, leaves, retain_graph=True)])
        again = torch.autograd.grad(loss, leaves)
        assert all(torch.equal(a, b) for a, b in zip(again, found[-1][1:]))
    torch.testing.assert_close(*found)


def test_sets_of_features(device):
    """A batch in front of nodes; edges' tensors alike for all, or with a batch of their own."""
    graph = make_graph("random", device)
    one = make_inputs("dot", graph, 2, 4, torch.float64, value_dim=3)
    sets = {name: torch.randn(3, *x.shape).to(x) for name, x in one.items()}
    for name, terms in TERMS.items():
        for own in (False, True):
            edges = dict(one)
            with_terms(edges, graph, terms, 3)
            edges = {n: x for n, x in edges.items() if n not in one}
            in_batch = {n: torch.randn(3, *x.shape).to(x) for n, x in edges.items() if own and x.dim() == 3}
            found = functional.dot_attention(graph, **sets, **edges | in_batch)
            expected = [
                reference.dot_attention(
                    graph,
                    **{n: x[k] for n, x in sets.items()},
                    **edges | {n: x[k] for n, x in in_batch.items()},
                )
                for k in range(3)
            ]
            torch.testing.assert_close(found, torch.stack(expected), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("terms", ["of heads", "shared", "projections"])
def test_no_further_tensor_of_edges_and_channels(device, terms):
    """Beside what is given and its gradient, neither forward nor backward."""
    graph = Graph.from_coo(*torch.randint(50, (2, 4000)), num_src=50, num_dst=50).to(device)
    inputs = make_inputs("dot", graph, 4, 64)
    with_terms(inputs, graph, TERMS[terms], 8)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    allowed = {"of heads": (4000, 4, 64), "shared": (4000, 64), "projections": (4000, 16)}[terms]
    most = allowed[0] * allowed[1] * (allowed[2] if len(allowed) == 3 else 1)
    made = {"of heads": 2, "shared": 2, "projections": 1}[terms]  # the gradients of what is given

    with Made() as tensors:
        functional.dot_attention(graph, **leaves).sum().backward()
    large = [n for n in tensors.sizes if n >= min(most, 4000 * 16)]
    assert max(tensors.sizes) <= most and len(large) <= made


def test_wrong_arguments():
    graph = make_graph("random")
    base = make_inputs("dot", graph, 3, 8, value_dim=5)
    feats, edges = {**base}, graph.num_edges
    with_terms(feats, graph, TERMS["of heads"])
    proj = {**base}
    with_terms(proj, graph, TERMS["projections with biases"])
    kinds = dict(edge_type=torch.zeros(edges, dtype=torch.int64), edge_table=torch.randn(2, 3, 8))
    for given, change, kind, message in (
        (feats, dict(edge_feat=torch.ones(edges, 3, 5)), ValueError, "edge_feat: expected shape"),
        (feats, dict(edge_feat_value=torch.ones(edges, 8)), ValueError, "edge_feat_value: expected shape"),
        (feats, dict(edge_feat_value=feats["edge_feat_value"].double()), TypeError, "feat_value: expected"),
        (feats, dict(edge_feat_in="key"), ValueError, "edge_feat_in: expected 'both' with edge_feat_value"),
        (feats, dict(bias_after=True), ValueError, "bias_after: expected False with edge_feat_value"),
        (base, dict(edge_feat=torch.ones(edges, 8), edge_feat_in="key", bias_after=True), ValueError,
         r"bias_after: expected False with edge_feat \[E, D\]"),
        (feats, dict(edge_proj_value=proj["edge_proj_value"]), ValueError, "None without edge_attr"),
        (proj, dict(edge_feat_value=feats["edge_feat_value"]), ValueError, "edge_feat_value: expected None"),
        (proj, dict(edge_feat_in="value"), ValueError, "edge_feat_in: expected 'both' with edge_proj_value"),
        (proj, dict(edge_proj_value=proj["edge_proj"]), ValueError, r"expected shape \[15, 13\]"),
        (proj, dict(edge_proj=None), ValueError, "edge_proj_bias: expected None without edge_proj"),
        (proj, dict(edge_proj_bias_value=proj["edge_proj_bias"]), ValueError, "bias_value: expected"),
        (base, dict(edge_attr=proj["edge_attr"], edge_proj=proj["edge_proj"], edge_feat_in="key",
                    edge_proj_bias_value=proj["edge_proj_bias_value"]), ValueError,
         "edge_proj_bias_value: expected None without edge_proj_value"),
        (base, dict(edge_attr=proj["edge_attr"], edge_feat_in="key"), ValueError, "edge_proj: expected"),
        ({**base, **kinds}, dict(edge_proj_value=proj["edge_proj_value"]), ValueError, "None with edge_type"),
        ({**base, **kinds}, dict(edge_feat_value=feats["edge_feat_value"]), ValueError,
         "edge_feat_value: expected None"),
    ):  # fmt: skip
        with pytest.raises(kind, match="dot_attention: .*" + message):
            functional.dot_attention(graph, **{**given, **change})
