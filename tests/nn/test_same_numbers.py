"""Asking for the attention changes neither a layer's result nor its gradients, to the bit."""

import functools
import inspect
import random

import pytest
import torch
from covering import EXHAUSTIVE
from every_layer import ATTR, WITH_LOOPS, E, N, X, arguments, floats, made, names, of

from dfgnn import Graph, functional
from dfgnn.functional import EdgeTerm, Projected

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = 100 if EXHAUSTIVE else 12


HEADS, SIZE, WIDTH = (1, 2, 3, 4, 8), (1, 3, 4, 8, 16, 20), (1, 3, 8)


class Case:
    """A random graph, features and options, drawn from a seed."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.num_nodes = self.draw.randint(1, 60)
        num_edges = self.draw.randint(1, 400)
        self.edge_index = torch.randint(self.num_nodes, (2, num_edges))
        # One row too long to be grouped with other short rows (csrc/cpu/kernels/groups.h).
        if self.draw.random() < 0.2:
            self.edge_index[1, : num_edges // 2] = 0
        self.heads, self.size = self.draw.choice(HEADS), self.draw.choice(SIZE)
        self.width = self.draw.choice(WIDTH)
        self.dtype = self.draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        self.autocast = self.dtype == torch.float32 and self.draw.random() < 0.3
        self.dropout = self.draw.choice([0.0, 0.5])
        self.grad = self.draw.random() < 0.8

    def features(self, *shape):
        return torch.randn(shape).to(self.dtype).requires_grad_(self.grad)

    def flip(self):
        return self.draw.random() < 0.5

    @property
    def graph(self):
        return Graph.from_edge_index(self.edge_index, num_nodes=self.num_nodes)

    def edges(self):
        return self.features(self.edge_index.shape[1], self.width)


def _function(case, function, tensors, **options):
    options |= {"dropout_p": case.dropout}
    if case.flip():
        options["weight"] = case.features(case.edge_index.shape[1], case.heads)
    graph = case.graph
    return (
        lambda *xs, **asked: function(graph, *xs, **options, **asked),
        tensors,
        {"return_attention": True},
    )


def function_gat(case):
    ends = [case.features(case.num_nodes, case.heads) for _ in range(2)]
    bias = case.features(case.edge_index.shape[1], case.heads) if case.flip() else None
    feat = case.features(case.num_nodes, case.heads, case.size)
    return _function(case, functional.gat_attention, (feat, *ends), bias=bias)


def function_gatv2(case):
    ends = [case.features(case.num_nodes, case.heads, case.size) for _ in range(2)]
    att = case.features(case.heads, case.size)
    feat = case.features(case.edge_index.shape[1], case.heads, case.size) if case.flip() else None
    return _function(
        case, functional.gatv2_attention, (*ends, att), edge=None if feat is None else EdgeTerm(feat)
    )


def function_dot(case):
    three = [case.features(case.num_nodes, case.heads, case.size) for _ in range(3)]
    kind, options = case.draw.randrange(3), {}
    if kind == 1:
        term = case.features(case.edge_index.shape[1], case.heads, case.size)
        options["edge"] = EdgeTerm(term, term)
    elif kind == 2:
        term = Projected(case.edges(), case.features(case.heads * case.size, case.width))
        options["edge"] = EdgeTerm(term, term)
    return _function(case, functional.dot_attention, three, **options)


def function_agnn(case):
    feat = case.features(case.num_nodes, case.heads, case.size)
    return _function(case, functional.agnn_attention, (feat,))


def function_flex(case):
    three = [case.features(case.num_nodes, case.heads, case.size) for _ in range(3)]
    graph = case.graph

    def call(*xs, **asked):
        return functional.flex_attention(graph, _score, *xs, dropout_p=case.dropout, **asked)

    return call, three, {"return_attention": True}


def _score(q, k, e):
    return -(q - k).abs().sum(-1)


FUNCTIONS = [function_gat, function_gatv2, function_dot, function_agnn, function_flex]


def compared(call, leaves, autocast, asked):
    """The results without the attention, and the gradients of the leaves."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = call(**asked)
    outs = list(out[:-1] if asked else out) if isinstance(out, tuple) else [out]
    leaves = [x for x in leaves if x.requires_grad]
    torch.manual_seed(2)
    loss = sum((x * torch.randn(x.shape)).sum() for x in floats(outs))
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else []
    return [*outs, *(torch.zeros(()) if x is None else x for x in found), torch.random.get_rng_state()]


@pytest.mark.parametrize("subject", FUNCTIONS, ids=lambda subject: subject.__name__)
def test_functions(subject):
    differ = []
    for seed in range(SEEDS):
        case = Case(seed)
        call, tensors, asked = subject(case)
        call = functools.partial(call, *tensors)
        found, expected = (compared(call, tensors, case.autocast, given) for given in (asked, {}))
        if not all(map(torch.equal, found, expected)):
            differ.append(seed)
    assert not differ


ASKED = {
    name: word
    for name in names()
    for word in {"return_attention_weights", "return_attention", "get_attention"}
    & inspect.signature(made(name).forward).parameters.keys()
}
# Many edges into one node: a row too long to be grouped with others.
LONG = torch.cat([WITH_LOOPS.repeat(1, 10), torch.stack([WITH_LOOPS[0], torch.zeros(E).long()])], 1)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", ["autocast", torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ASKED)
def test_layers(name, dtype, train):
    autocast, dtype = dtype == "autocast", torch.float32 if dtype == "autocast" else dtype
    layer = made(name).to(dtype).train(train)
    for edges in (None, LONG if of(name) == "pyg" else Graph.from_edge_index(LONG, num_nodes=N)):
        x, attr = (
            t.detach().to(dtype).requires_grad_() for t in (X, ATTR if edges is None else ATTR.repeat(11, 1))
        )

        def call(x=x, attr=attr, edges=edges, **asked):
            bound = inspect.signature(layer.forward).bind(*arguments(name, x, attr, edges))
            bound.arguments.update(asked)
            return layer(*bound.args, **bound.kwargs)

        leaves = [x, attr, *layer.parameters()]
        found, expected = (compared(call, leaves, autocast, asked) for asked in ({ASKED[name]: True}, {}))
        assert all(torch.equal(*pair) for pair in zip(floats(found), floats(expected), strict=True))
