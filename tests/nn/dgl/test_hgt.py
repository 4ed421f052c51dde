"""HGTConv beside dgl.nn.HGTConv, and the typed maps that it is made of."""

import gc
import weakref

import pytest
import torch
from dgl_compare import DTYPES, Contract, assert_close, compare, dgl, dgl_block, dgl_graph
from graphs import make_graph

from dfgnn import Graph
from dfgnn.nn import _typed
from dfgnn.nn.dgl import HGTConv

NTYPES, ETYPES = 3, 4


@pytest.mark.filterwarnings("ignore:The input graph for the user-defined edge function")
class TestHGTConv(Contract):
    layer = HGTConv
    options = [{}, {"use_norm": True}]
    attention = pairs = False
    allows = False, False
    test_bipartite = None

    def arguments(self, in_feats):
        return in_feats, 5, 2, NTYPES, ETYPES, 0.0

    def more_inputs(self, g, dtype, prefix=()):
        return torch.randint(NTYPES, (g.num_src_nodes(),)), torch.randint(ETYPES, (g.num_edges(),))

    def pair(self, *args, **kwargs):
        """Priors and gates are given values, for they start at one."""
        theirs, ours = super().pair(*args, **kwargs)
        for parameter in (*theirs.relation_pri, theirs.skip):
            torch.nn.init.normal_(parameter)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours


@pytest.mark.parametrize("in_size", [9, 10])
@DTYPES
def test_presorted(in_size, dtype):
    """A heterograph made homogeneous: all types in order."""
    names = ("author", "paper", "field")
    relations = [(names[0], "writes", names[1]), (names[1], "cites", names[1]), (names[1], "of", names[2])]
    generator = torch.Generator().manual_seed(0)
    edges = {r: tuple(torch.randint(20, (2, 60), generator=generator)) for r in relations}
    g = dgl.to_homogeneous(dgl.heterograph(edges, num_nodes_dict=dict.fromkeys(names, 20)))
    ntype, etype = g.ndata[dgl.NTYPE], g.edata[dgl.ETYPE]
    x = torch.randn(60, in_size, dtype=dtype)
    theirs, ours = TestHGTConv().pair(in_size, dtype)
    compare(theirs, ours, g, x, ntype, etype, attention=False)
    expected = theirs(g, x, ntype, etype, presorted=True)
    assert_close(ours(g, x, ntype, etype, presorted=True), expected, 1e-5, "presorted")


@pytest.mark.parametrize("kind", ["one of each", "one type", "edges of one type", "types that do not occur"])
def test_types(kind):
    g = dgl_graph("duplicates")
    x, ntype, etype = TestHGTConv().inputs(g, dtype=torch.float64)
    if kind == "one of each":
        ntype = torch.arange(g.num_nodes()) % NTYPES
        etype = torch.arange(g.num_edges()).flip(0) % ETYPES
    elif kind == "one type":
        ntype, etype = torch.full_like(ntype, 1), torch.full_like(etype, 2)
    elif kind == "edges of one type":
        etype = torch.full_like(etype, 3)
    else:
        ntype, etype = ntype.clamp(max=1), etype.clamp(min=1, max=2)
    compare(*TestHGTConv().pair(dtype=torch.float64), g, x, ntype, etype, attention=False)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_integers_of_any_size(dtype):
    g = dgl_graph()
    x, ntype, etype = TestHGTConv().inputs(g)
    layer = TestHGTConv().pair()[1]
    assert torch.equal(layer(g, x, ntype.to(dtype), etype.to(dtype)), layer(g, x, ntype, etype))


def test_dropout_is_that_of_the_mapped_messages():
    g = dgl_graph()
    layers = TestHGTConv().pair(dtype=torch.float64)
    mask = torch.bernoulli(torch.full((g.num_nodes(), 10), 0.6, dtype=torch.float64)) / 0.6
    for layer in layers:
        layer.drop.forward = lambda h: h * mask
    compare(*layers, g, *TestHGTConv().inputs(g, dtype=torch.float64), attention=False)
    layer = HGTConv(9, 5, 2, NTYPES, ETYPES)
    assert layer.drop.p == 0.2
    inputs = TestHGTConv().inputs(g)
    assert not torch.equal(layer(g, *inputs), layer(g, *inputs))
    layer.eval()
    assert torch.equal(layer(g, *inputs), layer(g, *inputs))


def test_reset_parameters():
    layer = HGTConv(9, 5, 2, NTYPES, ETYPES, use_norm=True)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    torch.nn.init.normal_(layer.skip)
    torch.nn.init.normal_(layer.relation_pri[1])
    layer.reset_parameters()
    for name, x in layer.state_dict().items():
        random = name.endswith("W") or name == "residual_w"
        assert torch.equal(x, before[name]) != random
    assert layer.linear_k.W.abs().max().item() <= 1 / 3


# ---- caches ----------------------------------------------------------------------------------------------


def test_relations_are_kept_with_graph_and_types():
    graph = make_graph("random")
    etype = torch.randint(ETYPES, (graph.num_edges,))
    first = _typed.relations_of(graph, etype, ETYPES)
    assert _typed.relations_of(graph, etype, ETYPES) is first
    assert _typed.relations_of(graph, etype.clone(), ETYPES) is not first
    assert _typed.relations_of(make_graph("random"), etype, ETYPES) is not first
    etype[0] = (etype[0] + 1) % ETYPES
    second = _typed.relations_of(graph, etype, ETYPES)
    assert second is not first
    for kept, owner in ((weakref.ref(first.graph), None), (weakref.ref(second.graph), "graph")):
        if owner is not None:
            del graph, second
        else:
            del first
        gc.collect()
        assert kept() is None


def test_types_written_to_in_place_take_effect():
    g = dgl_graph()
    x, ntype, etype = TestHGTConv().inputs(g)
    layer = TestHGTConv().pair()[1]
    for types, number in ((ntype, NTYPES), (etype, ETYPES)):
        before = layer(g, x, ntype, etype)
        types.copy_((types + 1) % number)
        after = layer(g, x, ntype, etype)
        assert not torch.allclose(before, after)
        assert torch.equal(after, layer(g, x, ntype.clone(), etype.clone()))


def test_groups_of_destinations_are_kept():
    """The destinations of a block are its first sources: their groups by type are cached and not sorted anew
    at each call."""
    block = dgl_block()
    _, ntype, _ = TestHGTConv().inputs(block)
    first = _typed.first_types(ntype, block.num_dst_nodes())
    assert torch.equal(first, ntype[: block.num_dst_nodes()])
    assert _typed.first_types(ntype, block.num_dst_nodes()) is first
    kept = weakref.ref(ntype)
    del ntype
    assert kept() is None


def test_inference_mode():
    """What a call in inference mode has cached can be used in training afterwards."""
    g = dgl_graph()
    x, ntype, etype = TestHGTConv().inputs(g)
    layer = TestHGTConv().pair()[1]
    with torch.inference_mode():
        expected = layer(g, x, ntype, etype)
        inference_types = ntype.clone(), etype.clone()
    for types in ((ntype, etype), inference_types):
        out = layer(g, x, *types)
        out.sum().backward()
        assert torch.equal(out, expected)


def test_pairs_instead_of_edges():
    """Keys are computed per pair (source, relation) where these are fewer than edges: a source with many
    edges of a relation has one key for all."""
    g = dgl_graph("super_source")
    etype = torch.arange(g.num_edges()) % 2
    relations = _typed.relations_of(Graph.from_dgl(g), etype, 2)
    src, dst = g.edges(order="eid")
    pairs = torch.stack([etype, src]).unique(dim=1)
    assert relations.graph.num_src == pairs.shape[1] < g.num_edges() / 10
    assert torch.equal(relations.graph.edge_index[1], dst)
    sources = torch.cat([group.read for group in relations.pairs.groups])
    assert torch.equal(sources, pairs[1])
    assert torch.equal(sources[relations.graph.edge_index[0]], src)


# ---- the typed map ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [False, True])
@DTYPES
def test_typed_linear(in_order, dtype):
    """Beside DGL's TypedLinear."""
    theirs = dgl.nn.pytorch.TypedLinear(7, 6, 5).to(dtype)
    ours = _typed.TypedLinear(7, 6, 5).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    x, types = torch.randn(40, 7, dtype=dtype), torch.randint(5, (40,))
    types = types.sort().values if in_order else types
    x = x.requires_grad_()
    grad = torch.randn(40, 6, dtype=dtype)
    expected, actual = theirs(x, types, in_order), ours(x, types, in_order)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    assert_close(actual, expected, tolerance, "output")
    for name, one, other in zip(
        ("x", "W"),
        torch.autograd.grad(actual, [x, ours.W], grad),
        torch.autograd.grad(expected, [x, theirs.W], grad),
    ):
        assert_close(one, other, tolerance, name)
    assert torch.autograd.gradcheck(
        lambda x, w: _typed.typed_matmul(x[:, None], w[:, None], _typed.groups_of(types, 5), 40),
        (x.double(), ours.W.double()),
    )


def test_typed_linear_without_rows():
    out = _typed.TypedLinear(7, 6, 5)(torch.randn(0, 7), torch.zeros(0, dtype=torch.int64))
    assert out.shape == (0, 6)
