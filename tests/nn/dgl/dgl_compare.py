"""DGL's layers beside ours: pairs with the same parameters, and the comparisons that every pair must pass."""

import pytest
import torch
from graphs import make_graph
from side_by_side import assert_same, assert_same_distribution, pair, run

from dfgnn import Graph, reference
from dfgnn.nn import ZeroInDegreeError

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
# In float32 the gradient of attn_r is a difference of sums; DGL's error in it is 4e-6, ours 3e-6.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


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


def our_graph(g):
    """The same edges as a dfgnn.Graph."""
    return Graph.from_coo(*g.edges(order="eid"), num_src=g.num_src_nodes(), num_dst=g.num_dst_nodes())


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def compare(theirs, ours, graph, *inputs, our_graph=None, attention=True):
    """Runs both layers forward and backward with the same random gradients, where they give the attention
    also with it."""
    dtype = as_tuple(inputs[0])[0].dtype
    our_graph = graph if our_graph is None else our_graph
    for asked in ({}, {"get_attention": True})[: 1 + attention]:
        found, expected = (
            run(layer, g, *inputs, **asked) for layer, g in ((ours, our_graph), (theirs, graph))
        )
        assert_same(found, expected, TOLERANCE[dtype])


class Contract:
    """What DGL's layers have in common; a subclass says which layer it is and how it is called.

    A test that does not apply is set to None there.
    """

    #: Our class; DGL's has the same name.
    layer: type
    #: Keyword arguments of the constructor, each of which is compared.
    options = [{}]
    #: Whether the forward takes get_attention, and a pair of features.
    attention = pairs = True
    #: Whether the constructor takes allow_zero_in_degree, of (DGL's layer, ours).
    allows = True, True

    def arguments(self, in_feats):
        """Positional arguments of the constructor."""
        return in_feats, 5, 2

    def more_inputs(self, g, dtype, prefix=()):
        """What follows the features in forward."""
        return ()

    @property
    def theirs(self):
        return getattr(dgl.nn.pytorch, self.layer.__name__)

    def pair(self, in_feats=9, dtype=torch.float32, **options):
        return pair(self.theirs, self.layer, *self.arguments(in_feats), dtype=dtype, **options)

    def inputs(self, g, in_feats=9, dtype=torch.float32, prefix=()):
        sizes = in_feats if isinstance(in_feats, tuple) else (in_feats,)
        counts = g.num_src_nodes(), g.num_dst_nodes()
        feats = tuple(torch.randn(n, *prefix, size, dtype=dtype) for n, size in zip(counts, sizes))
        feat = feats if isinstance(in_feats, tuple) else feats[0]
        return feat, *self.more_inputs(g, dtype, prefix)

    def compare(self, layers, g, in_feats=9, our_graph=None):
        dtype = next(iter(layers[1].state_dict().values())).dtype
        inputs = self.inputs(g, in_feats, dtype)
        compare(*layers, g, *inputs, our_graph=our_graph, attention=self.attention)

    def allowing(self):
        return {"allow_zero_in_degree": True} if self.allows[0] else {}

    # ---- results -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("in_feats", [9, 10, 50])
    @DTYPES
    def test_options(self, in_feats, dtype):
        """in_feats 10 is the size of the output (heads times size), 50 is larger; graphs have int32 and int64
        ids in turn."""
        graphs = dgl_graph(index_dtype=torch.int32), dgl_graph()
        for k, options in enumerate(self.options):
            self.compare(self.pair(in_feats, dtype, **options), graphs[k % 2], in_feats)

    @pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize(
        "name", ["duplicates", "self_loops", "super_row", "super_source", "mixed_degrees", "power_law"]
    )
    def test_graphs(self, name, index_dtype):
        g = dgl_graph(name, index_dtype)
        # Graphs with thousands of edges per node are compared in float64: in float32 the rounding errors of
        # DGL's own sums exceed the tolerance.
        large = name not in ("duplicates", "self_loops")
        layers = self.pair(dtype=torch.float64 if large else torch.float32, **self.options[-1])
        self.compare(layers, g)
        self.compare(layers, g, our_graph=our_graph(g))

    @pytest.mark.parametrize("in_feats", [9, 50])
    @DTYPES
    def test_block(self, in_feats, dtype):
        """One tensor, whose first rows are the destinations, or a pair."""
        block = dgl_block()
        inputs = self.inputs(block, in_feats, dtype)
        both = inputs[0], inputs[0][: block.num_dst_nodes()]
        for options in self.options[::3]:
            layers = self.pair(in_feats, dtype, **options)
            if self.block_as_one:
                compare(*layers, block, *inputs, attention=self.attention)
            else:
                one, two = layers[1](block, *inputs), layers[1](block, both, *inputs[1:])
                assert all(torch.equal(a, b) for a, b in zip(as_tuple(one), as_tuple(two)))
            if self.pairs:
                layers = self.pair((in_feats, in_feats), dtype, **options)
                compare(*layers, block, both, *inputs[1:], attention=self.attention)

    #: Whether DGL's layer takes one tensor for a block.
    block_as_one = True

    @DTYPES
    def test_bipartite(self, dtype):
        g = dgl_bipartite()
        sizes = ((9, 6), (9, 10), (50, 6)) if dtype == torch.float32 else ((50, 6), (9, 6), (9, 10))
        for k, options in enumerate(self.options):
            in_feats = sizes[k % 3]
            layers = self.pair(in_feats, dtype, **options)
            self.compare(layers, g, in_feats, our_graph=our_graph(g) if k % 2 else None)
        with pytest.raises(ValueError, match="feat"):
            layers[1](g, *self.inputs(g, 9, dtype))

    def test_zero_in_degree(self):
        graph = make_graph("isolated")
        g = dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_src)
        layers = self.pair()
        inputs = self.inputs(g)
        if self.allows[1]:
            for layer in layers:
                with pytest.raises(dgl.DGLError, match="in-?(edges|degree)"):
                    layer(g, *inputs)
            with pytest.raises(ZeroInDegreeError, match="allow_zero_in_degree"):
                layers[1](graph, *inputs)
            layers[1].set_allow_zero_in_degree(True)
            assert as_tuple(layers[1](g, *inputs))[0].isfinite().all()
        if self.allows[0] or not self.allows[1]:
            for options in self.options[::3]:
                self.compare(self.pair(**self.allowing(), **options), g)
                self.compare(self.pair(**self.allowing(), **options), empty_graph(5))

    def test_reset_parameters(self):
        """Both layers draw the same numbers anew; DGL's without such a method in its constructor."""
        theirs, ours = self.pair()
        for parameter in (*theirs.parameters(), *ours.parameters()):
            torch.nn.init.constant_(parameter, 0.3)
        torch.manual_seed(0)
        if hasattr(theirs, "reset_parameters"):
            theirs.reset_parameters()
        else:
            theirs = self.theirs(*self.arguments(9))
        torch.manual_seed(0)
        ours.reset_parameters()
        assert all(torch.equal(ours.state_dict()[name], x) for name, x in theirs.state_dict().items())

    def test_no_nodes(self):
        g = empty_graph(0)
        for options in self.options:
            ours = self.pair(**options)[1]
            feat, *more = self.inputs(g)
            outs = as_tuple(ours(g, feat.requires_grad_(), *more))
            sum(x.sum() for x in outs).backward()
            shapes = [x.shape[1:] for x in as_tuple(ours(dgl_graph(), *self.inputs(dgl_graph())))]
            assert [x.shape for x in outs] == [(0, *shape) for shape in shapes]


class DropoutContract(Contract):
    """Layers with feat_drop and attn_drop."""

    @pytest.mark.parametrize("in_feats", [9, 50])
    def test_injected_masks(self, in_feats, monkeypatch):
        """Both layers with the same masks of features and attention."""
        g = dgl_graph()
        theirs, ours = self.pair(in_feats, torch.float64, feat_drop=0.3, attn_drop=0.4, residual=True)
        seed = torch.tensor([21])
        feat_mask = torch.bernoulli(torch.full((g.num_nodes(), in_feats), 0.7, dtype=torch.float64)) / 0.7
        mask = reference.dropout_mask(int(seed), g.num_edges(), 2, 0.4)[..., None]
        theirs.feat_drop.forward = ours.feat_drop.forward = lambda x: x * feat_mask
        theirs.attn_drop.forward = lambda a: a * mask
        attention = self.layer.attention
        seeded = staticmethod(lambda *args, **keywords: attention(*args, **keywords, generator=seed))
        monkeypatch.setattr(self.layer, "attention", seeded)
        self.compare((theirs, ours), g, in_feats)

    def test_dropout_distribution(self):
        """Mean and deviation of many draws agree with DGL's, and eval mode has no dropout."""
        g, copies = dgl_graph("duplicates"), 500
        batch = dgl.batch([g] * copies)
        layers = self.pair(dtype=torch.float64, feat_drop=0.2, attn_drop=0.4)
        inputs = self.inputs(g, dtype=torch.float64)
        many = [x.repeat(copies, *[1] * (x.dim() - 1)) for x in inputs]
        assert_same_distribution(*layers, lambda layer: layer(batch, *many), copies)
        for layer in layers:
            layer.eval()
        self.compare(layers, g)

    def test_attention_is_returned_after_dropout(self):
        g = dgl_graph("duplicates")
        layer = self.layer(*self.arguments(9), attn_drop=0.5)
        attention = layer(g, *self.inputs(g), get_attention=True)[-1]
        assert 0.3 < (attention == 0).float().mean().item() < 0.7
