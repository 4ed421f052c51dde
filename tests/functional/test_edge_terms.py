"""Dot attention with other terms of the edges in the key than in the value, and terms that heads share."""

import pytest
import torch
from attention import Made, check, function, make_inputs
from graphs import make_graph

from dfgnn import Graph, functional
from dfgnn.engine import edge_projection
from dfgnn.functional import EdgeTerm
from dfgnn.functional import dot as dot_functions

HEADS, DIM, VALUE_DIM, FEATURES = 3, 8, 5, 13
# What a call has of edges: tensors by name, of E edges, H heads, D and Dv elements per head and d features.
TERMS = {
    "of heads": dict(edge_key="E H D", edge_value="E H Dv"),
    "shared": dict(edge_key="E D", edge_value="E Dv"),
    "of heads, shared": dict(edge_key="E H D", edge_value="E Dv"),
    "shared, of heads": dict(edge_key="E D", edge_value="E H Dv"),
    "in values alone": dict(edge_value="E H Dv"),
    "shared in values alone": dict(edge_value="E Dv"),
    "projections": dict(edge_attr="E d", edge_key_weight="HD d", edge_value_weight="HDv d"),
    "projections with biases": dict(
        edge_attr="E d", edge_key_weight="HD d", edge_key_bias="HD", edge_value_weight="HDv d",
        edge_value_bias="HDv",
    ),
    "projection of values alone": dict(edge_attr="E d", edge_value_weight="HDv d", edge_value_bias="HDv"),
    "in keys, projected in values": dict(edge_key="E H D", edge_attr="E d", edge_value_weight="HDv d"),
}  # fmt: skip
ONE = {
    "shared": dict(edge_both="E D"),
    "shared in keys": dict(edge_key="E D"),
    "projection": dict(edge_attr="E d", edge_both_weight="HD d", edge_both_bias="HD"),
    "projection in keys": dict(edge_attr="E d", edge_key_weight="HD d", edge_key_bias="HD"),
}
ALL = {**TERMS, **{f"one {name}": terms for name, terms in ONE.items()}}


def with_terms(inputs, graph, terms, features=FEATURES):
    """Adds tensors of these shapes to inputs."""
    like, value_dim = inputs["query"], inputs["value"].shape[2]
    heads, dim = like.shape[1:]
    sizes = {
        **dict(E=graph.num_edges, H=heads, D=dim, Dv=value_dim),
        **dict(d=features, HD=heads * dim, HDv=heads * value_dim),
    }
    for name, text in terms.items():
        x = torch.randn([sizes[part] for part in text.split()])
        inputs[name] = (x / features**0.5 if "weight" in name else x).to(like)


def value_dim_of(terms):
    """The size of values: that of keys where both have one term."""
    return DIM if any("both" in name for name in terms) else VALUE_DIM


@pytest.fixture
def way(request, monkeypatch):
    """Forces that projections are folded into query and output, or not, whatever the sizes."""
    monkeypatch.setattr(edge_projection, "_unfolds", lambda inputs: _unfolds(request.param, inputs.terms))


def _unfolds(way, terms):
    return way == "unfolded" and not (terms.key_proj is None and terms.value_proj is None)


@pytest.mark.parametrize("way", ("folded", "unfolded"), indirect=True)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_padded_heads(terms, way, monkeypatch):
    """CUDA kernels take heads of a multiple of 16 bytes. Here the CPU kernels get heads that are padded."""

    def padded(check, *tensors):
        size = max(-(-x.shape[-1] // 4) * 4 for x in tensors if x is not None)
        return tuple(x if x is None else torch.nn.functional.pad(x, (0, size - x.shape[-1])) for x in tensors)

    monkeypatch.setattr(dot_functions, "for_device", padded)
    graph = make_graph("random")
    inputs = make_inputs("dot", graph, HEADS, 7, torch.float32, value_dim=VALUE_DIM)
    with_terms(inputs, graph, terms)
    check("dot", graph, inputs, extra=32 * torch.finfo(torch.float32).eps)


def test_one_tensor_in_both_is_one_term(device):
    graph = make_graph("random", device)
    inputs = make_inputs("dot", graph, HEADS, DIM, torch.float64)
    for shape in ((graph.num_edges, HEADS, DIM), (graph.num_edges, DIM)):
        feat = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        found = []
        for key, value in ((feat, feat), (feat, feat.clone())):
            out = functional.dot_attention(graph, **inputs, edge=EdgeTerm(key, value))
            found.append((out, *torch.autograd.grad(out.square().sum(), feat)))
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("terms", ALL)
def test_terms_that_learn_under_autocast(device, terms):
    """Edge terms with gradients under autocast: the CPU kernels run, where without autocast plain operations
    would (they serve second derivatives)."""
    graph = make_graph("random", device)
    inputs = make_inputs("dot", graph, HEADS, DIM, torch.float64, value_dim=value_dim_of(ALL[terms]))
    with_terms(inputs, graph, ALL[terms])
    with torch.autocast(device, dtype=torch.bfloat16):
        check("dot", graph, inputs)


def call_with(graph, inputs, module=functional, **options):
    return lambda *tensors: function("dot", module)(graph, **dict(zip(inputs, tensors)), **options)


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


@pytest.mark.parametrize("terms", ["of heads", "shared", "projections"])
def test_no_further_tensor_of_edges_and_channels(device, terms):
    """Beside the arguments and their gradients, neither forward nor backward makes a tensor of that size."""
    graph = Graph.from_coo(*torch.randint(50, (2, 4000)), num_src=50, num_dst=50).to(device)
    inputs = make_inputs("dot", graph, 4, 64)
    with_terms(inputs, graph, TERMS[terms], 8)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    allowed = {"of heads": (4000, 4, 64), "shared": (4000, 64), "projections": (4000, 16)}[terms]
    most = allowed[0] * allowed[1] * (allowed[2] if len(allowed) == 3 else 1)
    made = {"of heads": 2, "shared": 2, "projections": 1}[terms]  # the gradients of what is given

    with Made() as tensors:
        function("dot")(graph, **leaves).sum().backward()
    large = [n for n in tensors.sizes if n >= min(most, 4000 * 16)]
    assert max(tensors.sizes) <= most and len(large) <= made
