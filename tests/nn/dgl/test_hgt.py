"""HGTConv beside dgl.nn.HGTConv, and the typed maps that it is made of."""

import pytest
import torch
from dgl_compare import DTYPES, Contract, compare, dgl, dgl_graph
from graphs import make_graph

from dfgnn import Graph, reference
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
    found = [layer(g, x, ntype, etype, presorted=True) for layer in (ours, theirs)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("in_order", [False, True])
def test_maps_by_type(in_order, device):
    """Some types have many rows, some few and some none."""
    types = torch.cat([torch.full((9000,), 3), torch.tensor([0, 4, 0, 2]), torch.full((5000,), 4)])
    types = (types.sort().values if in_order else types.roll(2500)).to(device)
    linear = HGTConv(6, 5, 3, 6, 1).linear_k.to(device, torch.float64)
    x = torch.randn(len(types), 6, dtype=torch.float64, device=device).requires_grad_()
    out, expected = linear(x, types), (x.unsqueeze(-2) @ linear.W[types]).squeeze(-2)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(y, [x, linear.W], grad) for y in (out, expected)))


def test_keys_are_made_per_pair():
    """A source with many edges of a relation has one key for all of them."""
    graph, seen, layer = make_graph("super_source"), [], HGTConv(9, 5, 2, NTYPES, 2)

    def attention(relations, query, key, value, **options):
        seen.append((relations.num_src, key.shape, torch.equal(relations.edge_index[1], graph.edge_index[1])))
        return reference.dot_attention(relations, query, key, value, **options)

    layer.attention = attention
    square, etype = Graph.from_coo(*graph.edge_index, num_nodes=300), torch.arange(graph.num_edges) % 2
    layer(square, torch.randn(300, 9), torch.zeros(300, dtype=torch.long), etype)
    pairs = torch.stack([etype, graph.edge_index[0]]).unique(dim=1).shape[1]
    assert seen == [(pairs, (pairs, 2, 5), True)] and pairs < graph.num_edges / 10
