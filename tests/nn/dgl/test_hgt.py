"""HGTConv beside dgl.nn.HGTConv, and the typed maps that it is made of."""

import pytest
import torch
from dgl_compare import DTYPES, Contract, compare, dgl, dgl_graph

from dfgnn.nn.dgl import HGTConv

NTYPES, ETYPES = 3, 4


@pytest.mark.filterwarnings("ignore:The input graph for the user-defined edge function")
class TestHGTConv(Contract):
    layer = HGTConv
    options = [{}, {"use_norm": True}]
    attention = pairs = False
    allows = False, False
    test_bipartite = test_reset_parameters = None

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
