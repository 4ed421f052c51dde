"""What is particular to single layers of dfgnn.nn.dgl, compared with DGL's."""

import pytest
import torch
from beside import accelerated, compare
from graphs import make_graph
from of_dgl import ETYPES, NTYPES, SUBJECTS, as_tuple, dgl, dgl_bipartite, dgl_graph, empty_graph
from of_dgl import AGNNConv as AGNN
from of_dgl import EGATConv as EGAT
from of_dgl import GATv2Conv as GATv2
from of_dgl import HGTConv as HGT

from dfgnn import Graph, reference
from dfgnn.nn.dgl import DotGatConv, EGATConv, GATConv, GlobalAttentionPooling, HGTConv

pytestmark = pytest.mark.filterwarnings("ignore:The input graph for the user-defined edge function")


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_no_nodes(subject):
    """DGL's layers cannot take such a graph."""
    layer = subject.layers(dtype=torch.float32)[1]
    inputs = subject.inputs(empty_graph(0), dtype=torch.float32)
    outs = as_tuple(layer(empty_graph(0), inputs[0].requires_grad_(), *inputs[1:]))
    sum(x.sum() for x in outs).backward()
    g = dgl_graph()
    shapes = [x.shape[1:] for x in as_tuple(layer(g, *subject.inputs(g, dtype=torch.float32)))]
    assert [x.shape for x in outs] == [(0, *shape) for shape in shapes]


def test_attention_is_returned_after_dropout():
    g = dgl_graph("duplicates")
    attention = GATConv(9, 5, 2, attn_drop=0.5)(g, torch.randn(g.num_nodes(), 9), get_attention=True)[-1]
    assert 0.3 < (attention == 0).float().mean().item() < 0.7


# ---- AGNNConv, DotGatConv, GATv2Conv ----------------------------------------------------------------------


def test_rows_of_zeros():
    """Their norm is taken as 1e-12, as in DGL: their cosines are 0."""
    g = dgl_graph()
    feat = torch.randn(g.num_nodes(), 9, dtype=torch.float64)
    feat[::4] = 0
    compare(*AGNN().layers(), g, feat)


def test_pair_of_features_with_one_projection():
    """DGL's layer raises there; ours projects both ends with it."""
    g = dgl_graph()
    layer = DotGatConv(9, 5, 2)
    x = torch.randn(g.num_nodes(), 9)
    assert torch.equal(layer(g, (x, x)), layer(g, x))
    assert not torch.equal(layer(g, (x, x.flip(0))), layer(g, x))


@pytest.mark.parametrize("share_weights", [False, True])
def test_pair_of_features_with_one_size(share_weights):
    g = dgl_graph()
    feats = torch.randn(g.num_nodes(), 9), torch.randn(g.num_nodes(), 9)
    compare(*GATv2().layers(dtype=torch.float32, share_weights=share_weights), g, feats)


def test_shared_projection_runs_once():
    """A hook on it sees one call, whose output serves both ends, as in DGL."""
    g = dgl_graph()
    layers, calls = GATv2().layers(dtype=torch.float32, share_weights=True), []
    for layer in layers:
        layer.fc_src.register_forward_hook(lambda module, args, out: calls.append(1) or 2 * out)
        layer(g, torch.randn(g.num_nodes(), 9))
    assert len(calls) == 2
    compare(*layers, g, torch.randn(g.num_nodes(), 9))


# ---- EGATConv -------------------------------------------------------------------------------------------


def without_bias(in_feats=9, dtype=torch.float32):
    """DGL's constructor fails with bias=False, its forward does not."""
    theirs = dgl.nn.pytorch.EGATConv(in_feats, 4, 5, 3, 2).to(dtype)
    del theirs.bias
    theirs.bias = None
    ours = EGATConv(in_feats, 4, 5, 3, 2, bias=False).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_bias(dtype):
    for g, sizes in ((dgl_graph(), 9), (dgl_bipartite(), (9, 6))):
        EGAT().check(without_bias(sizes, dtype), (g, *EGAT().inputs(g, sizes, dtype)))


@pytest.mark.parametrize("change", ["no weight", "no gradients"])
def test_inputs(change):
    g, layers = dgl_graph(), EGAT().layers()
    feat, efeats, _ = EGAT().inputs(g)
    if change == "no gradients":
        for layer in layers:
            layer.requires_grad_(False)
            layer.attn.requires_grad_()
    compare(*layers, g, feat, efeats)


@pytest.mark.parametrize("bias", [False, True])
def test_a_replaced_edge_projection_takes_effect(bias):
    """What a replaced projection of edges returns is used and not modified, even if it is its input."""
    g = dgl_graph()
    theirs, ours = EGAT().layers(dtype=torch.float32) if bias else without_bias()
    efeats = torch.randn(g.num_edges(), 6)
    before = efeats.clone()
    for replacement in (torch.nn.Identity(), torch.nn.Linear(6, 6, bias=True)):
        theirs.fc_fij = ours.fc_fij = replacement
        compare(theirs, ours, g, torch.randn(g.num_nodes(), 9), efeats)
        with torch.no_grad():
            ours(g, torch.randn(g.num_nodes(), 9), efeats)
    assert torch.equal(efeats, before)


@pytest.mark.parametrize("step", [1, 40])
def test_edges_are_summed_in_chunks(step, monkeypatch):
    monkeypatch.setattr("dfgnn.nn.dgl.egat._STEP", {"cpu": step})
    for g, sizes in ((dgl_graph("duplicates"), 9), (dgl_bipartite(), (9, 6))):
        EGAT().check(EGAT().layers(sizes), (g, *EGAT().inputs(g, sizes)))


# ---- HGTConv --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_size", [9, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_presorted(in_size, dtype):
    """A heterograph made homogeneous: all types in order."""
    names = ("author", "paper", "field")
    relations = [(names[0], "writes", names[1]), (names[1], "cites", names[1]), (names[1], "of", names[2])]
    generator = torch.Generator().manual_seed(0)
    edges = {r: tuple(torch.randint(20, (2, 60), generator=generator)) for r in relations}
    g = dgl.to_homogeneous(dgl.heterograph(edges, num_nodes_dict=dict.fromkeys(names, 20)))
    ntype, etype = g.ndata[dgl.NTYPE], g.edata[dgl.ETYPE]
    x = torch.randn(60, in_size, dtype=dtype)
    theirs, ours = HGT().layers(in_size, dtype=dtype)
    compare(theirs, ours, g, x, ntype, etype)
    found = [layer(g, x, ntype, etype, presorted=True) for layer in (ours, theirs)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["one of each", "one type", "edges of one type", "types that do not occur"])
def test_types(kind):
    g = dgl_graph("duplicates")
    x, ntype, etype = HGT().inputs(g)
    if kind == "one of each":
        ntype = torch.arange(g.num_nodes()) % NTYPES
        etype = torch.arange(g.num_edges()).flip(0) % ETYPES
    elif kind == "one type":
        ntype, etype = torch.full_like(ntype, 1), torch.full_like(etype, 2)
    elif kind == "edges of one type":
        etype = torch.full_like(etype, 3)
    else:
        ntype, etype = ntype.clamp(max=1), etype.clamp(min=1, max=2)
    compare(*HGT().layers(), g, x, ntype, etype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_integers_of_any_size(dtype):
    g = dgl_graph()
    x, ntype, etype = HGT().inputs(g)
    layer = HGT().layers()[1]
    assert torch.equal(layer(g, x, ntype.to(dtype), etype.to(dtype)), layer(g, x, ntype, etype))


def test_dropout_is_that_of_the_mapped_messages():
    g = dgl_graph()
    layers = HGT().layers()
    mask = torch.bernoulli(torch.full((g.num_nodes(), 10), 0.6, dtype=torch.float64)) / 0.6
    for layer in layers:
        layer.drop.forward = lambda h: h * mask
    compare(*layers, g, *HGT().inputs(g))
    layer = HGTConv(9, 5, 2, NTYPES, ETYPES)
    assert layer.drop.p == 0.2
    inputs = HGT().inputs(g, dtype=torch.float32)
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


# ---- GlobalAttentionPooling -----------------------------------------------------------------------------


def graphs_of(*sizes):
    return dgl.batch([dgl.rand_graph(n, n) for n in sizes])


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("sizes", [(5, 1, 8), (7,), (3, 3)], ids=str)
def test_pooling(sizes, features):
    graph = graphs_of(*sizes) if len(sizes) > 1 else dgl.rand_graph(*sizes, 9)
    nn = torch.nn.Linear(6, 4) if features else None
    theirs = dgl.nn.GlobalAttentionPooling(torch.nn.Linear(6, 1), nn).double()
    ours = accelerated(theirs)
    assert type(ours) is GlobalAttentionPooling and isinstance(ours, dgl.nn.GlobalAttentionPooling)
    x = torch.randn(graph.num_nodes(), 6, dtype=torch.float64)
    for asked in (False, False, True, True):
        compare(theirs, ours, graph, x, get_attention=asked)
    assert ours.state_dict().keys() == theirs.state_dict().keys() and repr(ours) == repr(theirs)


def test_a_graph_of_ours_is_one_graph_to_pool():
    layer = GlobalAttentionPooling(torch.nn.Linear(6, 1))
    graph = Graph.from_edge_index(torch.randint(9, (2, 20)), 9)
    x = torch.randn(9, 6)
    expected = (layer.gate_nn(x).softmax(0) * x).sum(0, keepdim=True)
    torch.testing.assert_close(layer(graph, x), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(graph, x), expected)


def test_errors_of_pooling():
    layer, g = GlobalAttentionPooling(torch.nn.Linear(6, 1)), graphs_of(4, 5)
    with pytest.raises(ValueError, match="feat: expected 9 rows"):
        layer(g, torch.randn(8, 6))
    with pytest.raises(TypeError, match="graph: expected a DGLGraph or a dfgnn.Graph, got int"):
        layer(3, torch.randn(8, 6))
    with pytest.raises(ValueError, match=r"gate_nn: expected a result of \[9, 1\]"):
        GlobalAttentionPooling(torch.nn.Linear(6, 2))(g, torch.randn(9, 6))
