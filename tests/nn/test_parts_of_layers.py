"""What layers are made of: maps by type, graphs of relations, and sums between nodes and edges."""

import gc
import weakref

import pytest
import torch
from graphs import make_graph

# Private helpers of layers, tested directly: gradients of any order, and sizes that are divided into chunks.
from dfgnn.nn import _typed
from dfgnn.nn.dgl import egat


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_typed_matmul(heads, in_order, device):
    """Some types have many rows, some few and some none."""
    types = torch.cat([torch.full((9000,), 3), torch.tensor([0, 4, 0, 2]), torch.full((5000,), 4)])
    types = types.sort().values if in_order else types.roll(2500)
    types = types.to(device)
    x = torch.randn(len(types), heads, 6, dtype=torch.float64, device=device).requires_grad_()
    weight = torch.randn(6, heads, 6, 5, dtype=torch.float64, device=device).requires_grad_()
    out = _typed.typed_matmul(x, weight, _typed.groups_of(types, 6), len(types))
    expected = (x.unsqueeze(-2) @ weight[types]).squeeze(-2)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [x, weight], grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [x, weight], grad))


# ---- what is cached, and for how long -------------------------------------------------------------------


def test_relations_are_kept_with_graph_and_types():
    graph = make_graph("random")
    etype = torch.randint(4, (graph.num_edges,))
    first = _typed.relations_of(graph, etype, 4)
    assert _typed.relations_of(graph, etype, 4) is first
    assert _typed.relations_of(graph, etype.clone(), 4) is not first
    assert _typed.relations_of(make_graph("random"), etype, 4) is not first
    etype[0] = (etype[0] + 1) % 4
    second = _typed.relations_of(graph, etype, 4)
    assert second is not first
    for kept, owner in ((weakref.ref(first.graph), None), (weakref.ref(second.graph), "graph")):
        if owner is not None:
            del graph, second
        else:
            del first
        gc.collect()
        assert kept() is None


def test_groups_of_destinations_are_kept():
    """The destinations of a block are its first sources: their groups by type are cached and not sorted anew
    at each call."""
    types = torch.randint(3, (50,))
    first = _typed.first_types(types, 17)
    assert torch.equal(first, types[:17]) and _typed.first_types(types, 17) is first
    kept = weakref.ref(types)
    del types
    assert kept() is None


def test_pairs_instead_of_edges():
    """Keys are computed per pair (source, relation) where these are fewer than edges: a source with many
    edges of a relation has one key for all."""
    graph = make_graph("super_source")
    etype = torch.arange(graph.num_edges) % 2
    relations = _typed.relations_of(graph, etype, 2)
    src, dst = graph.edge_index
    pairs = torch.stack([etype, src]).unique(dim=1)
    assert relations.graph.num_src == pairs.shape[1] < graph.num_edges / 10
    assert torch.equal(relations.graph.edge_index[1], dst)
    sources = torch.cat([group.read for group in relations.pairs.groups])
    assert torch.equal(sources, pairs[1])
    assert torch.equal(sources[relations.graph.edge_index[0]], src)


def test_relations_of_an_edge_index_are_kept_with_their_tensors():
    pytest.importorskip("torch_geometric")
    from dfgnn.nn.pyg._relations import relations_of

    edge_index, edge_type = make_graph("random").edge_index.clone(), torch.arange(400) % 5

    def relations(**options):
        options = {"within": False, "per_edge": True} | options
        return relations_of(edge_index, edge_type, (50, 50, 6), **options)

    first = relations()
    assert relations() is first and relations(within=True) is not first
    edge_type[0] = 5
    second = relations()
    assert second is not first
    assert [rows.stop - rows.start for kind, _, rows in second.src.groups if kind == 5] == [1]
    watched = weakref.ref(second.graph)
    del first, second
    assert watched() is not None
    edge_type = edge_type.clone()
    gc.collect()
    assert watched() is None


def test_the_joined_graph_is_kept_with_its_tensors():
    pytest.importorskip("torch_geometric")
    from pyg_layers import NODES as SIZES
    from pyg_layers import typed_edges

    from dfgnn.nn.pyg._relations import join

    edges = typed_edges()
    destinations = {name: SIZES[name] for name in ("a", "b", "d")}

    def joined():
        return join(edges, SIZES, destinations)

    first = joined()
    assert joined() is first
    assert join(dict(edges), SIZES, destinations) is first
    edges["a", "z", "a"][0, 0] = 19
    second = joined()
    # The rows of pairs begin with 20 of (a, to b) and 15 of (b, to a); those of (a, to a) follow.
    assert second is not first and 20 + 15 + 19 in second.graph.edge_index[0]
    watched = weakref.ref(second.graph)
    del first, second
    assert watched() is not None
    edges["a", "z", "a"] = edges["a", "z", "a"].clone()
    gc.collect()
    assert watched() is None


# ---- sums between nodes and edges ------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["random", "isolated", "fewer_sources", "no_edges", "no_nodes"])
@pytest.mark.parametrize("step", [1, 40, 1 << 20])
def test_add_ends(graph, step, device, monkeypatch):
    monkeypatch.setitem(egat._STEP, torch.device(device).type, step)
    graph = make_graph(graph, device)
    sizes = graph.num_edges, graph.num_src, graph.num_dst
    leaves = [torch.randn(n, 7, dtype=torch.float64, device=device).requires_grad_() for n in sizes]
    src, dst = graph.edge_index
    rows = leaves[0].clone()
    out = egat.add_ends(graph, rows, *leaves[1:])
    assert out.data_ptr() == rows.data_ptr()
    expected = leaves[0] + leaves[1][src] + leaves[2][dst]
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, grad))
