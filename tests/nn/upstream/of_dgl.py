"""The layers of dfgnn.nn.dgl and DGL's, as subjects of test_like_upstream.py.

A test that imports this module is skipped where DGL is missing.
"""

import functools

import pytest
import torch
from beside import BOTH, Subject
from graphs import make_graph

from dfgnn import Graph, reference
from dfgnn.nn import dgl as ours

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")


def dgl_graph(name="random", index_dtype=torch.int64):
    """A square graph as DGLGraph, in which every node has an in-edge."""
    graph = make_graph(name)
    n = max(graph.num_src, graph.num_dst)
    return dgl.add_self_loop(dgl.graph(tuple(graph.edge_index), num_nodes=n, idtype=index_dtype))


def dgl_block():
    """A sampled block; its destinations are the first of its sources."""
    seeds = torch.arange(0, 50, 3)
    block = dgl.to_block(dgl.in_subgraph(dgl_graph(), seeds), seeds)
    assert block.num_dst_nodes() < block.num_src_nodes()
    return block


def dgl_bipartite():
    """30 sources, 80 destinations, each with an in-edge."""
    src, dst = make_graph("fewer_sources").edge_index
    src, dst = torch.cat([src, torch.arange(80) % 30]), torch.cat([dst, torch.arange(80)])
    return dgl.heterograph({("a", "to", "b"): (src, dst)}, num_nodes_dict={"a": 30, "b": 80})


def empty_graph(num_nodes):
    nothing = torch.zeros(0, dtype=torch.int64)
    return dgl.graph((nothing, nothing), num_nodes=num_nodes)


def with_empty_rows():
    graph = make_graph("isolated")
    return dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_src)


def our_graph(g):
    """The same edges as a dfgnn.Graph."""
    return Graph.from_coo(*g.edges(order="eid"), num_src=g.num_src_nodes(), num_dst=g.num_dst_nodes())


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


MAKE = {
    "block": dgl_block,
    "block, pair": dgl_block,
    "bipartite": dgl_bipartite,
    "isolated": with_empty_rows,
    "no edges": lambda: empty_graph(5),
}
# Graphs, and those that our layer gets for them: of DGL, with ids in either dtype, or a dfgnn.Graph.
SQUARE = [("random", "int32"), ("duplicates", "int64"), ("self_loops", "ours"), ("block", "int64")]
ONCE = [("super_row", "ours"), ("super_source", "int64"), ("mixed_degrees", "int32"), ("power_law", "ours")]
PAIRS = [("block, pair", "int64"), ("bipartite", "int64"), ("bipartite", "ours")]
ALLOWED = [("isolated", "int64"), ("no edges", "int64")]


class DGLSubject(Subject):
    library = "dgl"
    # The sizes of the features: as many as the output has (heads times size), fewer and more; and of pairs.
    sizes, pair_sizes = (9, 10, 50), ((9, 6), (9, 10), (50, 6))
    edges, once = SQUARE + PAIRS + ALLOWED, ONCE
    asked = {"get_attention": True}
    of_forward = "size", "edge_feats"
    allows = True  # whether DGL's constructor takes allow_zero_in_degree

    def __init__(self):
        super().__init__()
        self.theirs, self.ours = getattr(dgl.nn.pytorch, self.name), getattr(ours, self.name)

    def arguments(self, in_feats):
        """Positional arguments of the constructor."""
        return in_feats, 5, 2

    def more_inputs(self, g, dtype):
        """What follows the features in forward."""
        return ()

    def layers(self, in_feats=9, **options):
        return self.pair(*self.arguments(in_feats), **options)

    def inputs(self, g, in_feats=9, dtype=torch.float64):
        sizes = in_feats if isinstance(in_feats, tuple) else (in_feats,)
        counts = g.num_src_nodes(), g.num_dst_nodes()
        feats = tuple(torch.randn(n, size, dtype=dtype) for n, size in zip(counts, sizes))
        return feats if isinstance(in_feats, tuple) else feats[0], *self.more_inputs(g, dtype)

    def check_row(self, edges, dtype, accelerated, size=0, **options):
        name, form = edges
        g = MAKE[name]() if name in MAKE else dgl_graph(name)
        in_feats = self.pair_sizes[size] if edges in PAIRS else self.sizes[size]
        if name == "block, pair":
            in_feats = (self.sizes[size],) * 2
        if edges in ALLOWED and self.allows:
            options["allow_zero_in_degree"] = True
        layers = self.layers(in_feats, dtype=dtype, accelerate=accelerated, **options)
        inputs = self.inputs(g, in_feats, dtype)
        if name == "block, pair":
            inputs = (inputs[0][0], inputs[0][0][: g.num_dst_nodes()]), *inputs[1:]
        given = our_graph(g) if form == "ours" else g.int() if form == "int32" else g
        self.check(layers, (g, *inputs), (given, *inputs))


class WithDropout(DGLSubject):
    """A layer with feat_drop and attn_drop."""

    dropout = [9, 50]  # sizes of the features

    def with_same_masks(self, monkeypatch, in_feats):
        g = dgl_graph()
        theirs, layer = self.layers(in_feats, feat_drop=0.3, attn_drop=0.4, residual=True)
        seed = torch.tensor([21])
        feat_mask = torch.bernoulli(torch.full((g.num_nodes(), in_feats), 0.7, dtype=torch.float64)) / 0.7
        mask = reference.dropout_mask(int(seed), g.num_edges(), 2, 0.4)[..., None]
        feat_drop = lambda x, drop: x * feat_mask if drop.training else x  # noqa: E731
        for one in (theirs, layer):
            one.feat_drop.forward = functools.partial(feat_drop, drop=one.feat_drop)
        theirs.attn_drop.forward = lambda a: a * mask if theirs.training else a
        attention = self.ours.attention
        seeded = staticmethod(lambda *args, **keywords: attention(*args, **keywords, generator=seed))
        monkeypatch.setattr(self.ours, "attention", seeded)
        return (theirs, layer), ((g, *self.inputs(g, in_feats)),)

    def copies(self, monkeypatch, copies=500):
        g = dgl_graph("duplicates")
        batch, inputs = dgl.batch([g] * copies), self.inputs(g)
        many = [x.repeat(copies, *[1] * (x.dim() - 1)) for x in inputs]
        layers = self.layers(feat_drop=0.2, attn_drop=0.4)
        return *layers, lambda layer: layer(batch, *many)


class GATConv(WithDropout):
    options = dict(
        residual=BOTH, bias=BOTH, activation=(None, torch.nn.functional.elu), negative_slope=(0.2, 0.05),
        size=(0, 1, 2),
    )  # fmt: skip

    def more_inputs(self, g, dtype):
        return (torch.rand(g.num_edges(), dtype=dtype),)


class GATv2Conv(WithDropout):
    options = GATConv.options | {"share_weights": BOTH}

    def adjusted(self, row):
        # Pairs of different sizes have no projection in common.
        row["share_weights"] &= row.get("edges") not in PAIRS
        return row


class DotGatConv(DGLSubject):
    options = dict(size=(0, 1, 2))


class AGNNConv(DGLSubject):
    options = dict(kind=({}, {"init_beta": 3.0}, {"init_beta": -0.5, "learn_beta": False}))
    pair_sizes = ((9, 9),)
    asked = {}

    def arguments(self, in_feats):
        return ()

    args = ()


class EGATConv(DGLSubject):
    options = dict(size=(0, 1, 2))
    args = 9, 4, 5, 3, 2
    edges = [each for each in SQUARE if each[0] != "block"] + PAIRS
    allows = False

    def arguments(self, in_feats):
        return in_feats, 4, 5, 3, 2

    def more_inputs(self, g, dtype):
        return torch.randn(g.num_edges(), 4, dtype=dtype), torch.rand(g.num_edges(), dtype=dtype)


class EdgeGATConv(WithDropout):
    """Narrow edge features are summed before they are projected, wide ones are projected before."""

    options = GATConv.options | {"edge_feats": (4, 40)}
    args = 9, 4, 5, 2
    large = [((9, 4, 32, 8), {})]
    edge_feats = 4

    def arguments(self, in_feats):
        return in_feats, self.edge_feats, 5, 2

    def more_inputs(self, g, dtype):
        return (torch.randn(g.num_edges(), self.edge_feats, dtype=dtype),)

    def check_row(self, edge_feats=4, **row):
        self.edge_feats = edge_feats
        try:
            super().check_row(**row)
        finally:
            self.edge_feats = 4

    def of_many_edges(self, args, options):
        """Narrow edge features are never projected."""
        g = dgl_graph("super_row")
        return self.ours(*args), (g, *self.inputs(g, dtype=torch.float32)), g.num_edges() * 8 * 32


NTYPES, ETYPES = 3, 4


class HGTConv(DGLSubject):
    options = dict(use_norm=BOTH, size=(0, 1, 2))
    args = 9, 5, 2, NTYPES, ETYPES, 0.0
    edges = SQUARE + ALLOWED
    asked = {}
    allows = False

    def arguments(self, in_feats):
        return in_feats, 5, 2, NTYPES, ETYPES, 0.0

    def more_inputs(self, g, dtype):
        return torch.randint(NTYPES, (g.num_src_nodes(),)), torch.randint(ETYPES, (g.num_edges(),))

    def prepare(self, layer):
        """Priors and gates are given values, for they start at one."""
        for parameter in (*layer.relation_pri, layer.skip):
            torch.nn.init.normal_(parameter)


SUBJECTS = [cls() for cls in (GATConv, GATv2Conv, DotGatConv, AGNNConv, EGATConv, EdgeGATConv, HGTConv)]
