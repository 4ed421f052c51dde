"""Asking for the attention changes neither a layer's result nor its gradients, to the bit."""

import random

import pytest
import torch
from covering import EXHAUSTIVE

from dfgnn import Graph, functional
from dfgnn import nn as layers
from dfgnn.functional import EdgeTerm, Projected
from dfgnn.nn import pyg

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
        self.training = self.draw.random() < 0.7
        self.grad = self.draw.random() < 0.8
        self.x = self.features(self.num_nodes, 7)

    def features(self, *shape):
        return torch.randn(shape).to(self.dtype).requires_grad_(self.grad)

    def flip(self):
        return self.draw.random() < 0.5

    @property
    def graph(self):
        return Graph.from_edge_index(self.edge_index, num_nodes=self.num_nodes)

    def edges(self):
        return self.features(self.edge_index.shape[1], self.width)

    def made(self, layer):
        return layer.to(self.dtype).train(self.training)


def gat(case):
    layer = pyg.GATConv(
        7, case.size, case.heads, dropout=case.dropout, concat=case.flip(), residual=case.flip(),
        bias=case.flip(), edge_dim=case.width if case.flip() else None, add_self_loops=case.flip(),
    )  # fmt: skip
    attr = None if layer.edge_dim is None else case.edges()
    return case.made(layer), (case.x, case.edge_index, attr), {"return_attention_weights": True}


def gatv2(case):
    layer = pyg.GATv2Conv(
        7, case.size, case.heads, dropout=case.dropout, concat=case.flip(), residual=case.flip(),
        bias=case.flip(), edge_dim=case.width if case.flip() else None, share_weights=case.flip(),
    )  # fmt: skip
    attr = None if layer.edge_dim is None else case.edges()
    return case.made(layer), (case.x, case.edge_index, attr), {"return_attention_weights": True}


def transformer(case):
    beta = case.flip()
    layer = pyg.TransformerConv(
        7, case.size, case.heads, dropout=case.dropout, concat=case.flip(), beta=beta, bias=case.flip(),
        edge_dim=case.width if case.flip() else None, root_weight=beta or case.flip(),
    )  # fmt: skip
    attr = None if layer.edge_dim is None else case.edges()
    return case.made(layer), (case.x, case.edge_index, attr), {"return_attention_weights": True}


def rgat(case):
    mod = None if case.dropout else case.draw.choice([None, "additive", "scaled", "f-additive", "f-scaled"])
    layer = pyg.RGATConv(
        7, case.size, 3, heads=case.heads, dropout=case.dropout, edge_dim=case.width if case.flip() else None,
        attention_mechanism=case.draw.choice(["across-relation", "within-relation"]),
        mod=mod,
    )  # fmt: skip
    edge_type = torch.randint(3, case.edge_index.shape[1:])
    attr = None if layer.lin_edge is None else case.edges()
    return case.made(layer), (case.x, case.edge_index, edge_type, attr), {"return_attention_weights": True}


def fa(case):
    layer = pyg.FAConv(7, dropout=case.dropout)
    x_0 = case.features(case.num_nodes, 7)
    return case.made(layer), (case.x, x_0, case.edge_index), {"return_attention_weights": True}


def dgl_gat(case):
    layer = layers.dgl.GATConv(
        7, case.size, case.heads, attn_drop=case.dropout, feat_drop=case.dropout * case.flip(),
        residual=case.flip(), bias=case.flip(), allow_zero_in_degree=True,
    )  # fmt: skip
    weight = torch.rand(case.edge_index.shape[1]).to(case.dtype) if case.flip() else None
    return case.made(layer), (case.graph, case.x, weight), {"get_attention": True}


def dgl_gatv2(case):
    layer = layers.dgl.GATv2Conv(
        7, case.size, case.heads, attn_drop=case.dropout, residual=case.flip(), bias=case.flip(),
        share_weights=case.flip(), allow_zero_in_degree=True,
    )  # fmt: skip
    return case.made(layer), (case.graph, case.x), {"get_attention": True}


def dotgat(case):
    layer = layers.dgl.DotGatConv(7, case.size, case.heads, allow_zero_in_degree=True)
    return case.made(layer), (case.graph, case.x), {"get_attention": True}


def edgegat(case):
    layer = layers.dgl.EdgeGATConv(
        7, case.width, case.size, case.heads, attn_drop=case.dropout, allow_zero_in_degree=True
    )
    return case.made(layer), (case.graph, case.x, case.edges()), {"get_attention": True}


def egat(case):
    layer = layers.dgl.EGATConv(7, case.width, case.size, 4, case.heads, allow_zero_in_degree=True)
    return case.made(layer), (case.graph, case.x, case.edges()), {"get_attention": True}


def pooling(case):
    layer = layers.dgl.GlobalAttentionPooling(torch.nn.Linear(7, 1))
    return case.made(layer), (case.graph, case.x), {"get_attention": True}


def graph_transformer(case):
    edge_dim = case.width if case.flip() else None
    layer = layers.GraphTransformerConv(
        7, case.size, case.heads, attn_drop=case.dropout, bias=case.flip(), edge_dim=edge_dim,
        allow_zero_in_degree=True,
    )  # fmt: skip
    bias = case.features(case.edge_index.shape[1], case.heads) if case.flip() else None
    attr = None if edge_dim is None else case.edges()
    return case.made(layer), (case.graph, case.x, bias), {"return_attention": True, "edge_attr": attr}


def graph_transformer_layer(case):
    layer = layers.GraphTransformerLayer(
        case.heads * 4, case.heads, dropout=case.dropout, attn_drop=case.dropout, norm="layer",
        allow_zero_in_degree=True,
    )  # fmt: skip
    x = case.features(case.num_nodes, case.heads * 4)
    return case.made(layer), (case.graph, x), {"return_attention": True}


def edge_transformer(case):
    layer = layers.EdgeGraphTransformerConv(
        7, case.width, case.size, case.heads, attn_drop=case.dropout, edge_out=case.flip(),
        allow_zero_in_degree=True,
    )  # fmt: skip
    return case.made(layer), (case.graph, case.x, case.edges()), {"return_attention": True}


def edge_transformer_layer(case):
    layer = layers.EdgeGraphTransformerLayer(
        case.heads * 4, case.heads, edge_dim=case.width, edge_out=case.flip(), norm="layer",
        attn_drop=case.dropout, allow_zero_in_degree=True,
    )  # fmt: skip
    x = case.features(case.num_nodes, case.heads * 4)
    return case.made(layer), (case.graph, x, case.edges()), {"return_attention": True}


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


SUBJECTS = [
    gat, gatv2, transformer, rgat, fa, dgl_gat, dgl_gatv2, dotgat, edgegat, egat, pooling, graph_transformer,
    graph_transformer_layer, edge_transformer, edge_transformer_layer, function_gat, function_gatv2,
    function_dot, function_agnn, function_flex,
]  # fmt: skip


def run(case, layer, args, options):
    """The results without the attention, and the gradients of all inputs and parameters."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        out = layer(*args, **options)
    outs = list(out[:-1] if _asked(options) else out) if isinstance(out, tuple) else [out]
    parameters = list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []
    leaves = [x for x in (*parameters, *args, *options.values()) if isinstance(x, torch.Tensor)]
    leaves = [x for x in leaves if x.requires_grad]
    found = []
    if leaves:
        torch.manual_seed(2)
        loss = sum((x * torch.randn(x.shape)).sum() for x in outs)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return outs, [torch.zeros(()) if x is None else x for x in found], torch.random.get_rng_state()


def _asked(options):
    return any(name.startswith(("get_", "return_")) for name in options)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
def test_asking_for_the_attention_changes_nothing(subject):
    differ = []
    for seed in range(SEEDS):
        case = Case(seed)
        layer, args, options = subject(case)
        plain = {name: x for name, x in options.items() if name.startswith("edge")}
        found, expected = (run(case, layer, args, given) for given in (options, plain))
        for what, ours, theirs in zip(("result", "gradient"), found, expected):
            if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                differ.append((seed, what))
    assert not differ, f"{len(differ)} of {2 * SEEDS}: {differ[:6]}"
