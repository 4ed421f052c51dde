"""pyg.RGATConv beside torch_geometric's with the same parameters: outputs, attention, all gradients."""

import pytest
import torch
from pyg_compare import compare, edges, sparse_forms
from pyg_layers import MECHANISMS, NUM_RELATIONS
from pyg_layers import RGATConv as Subject
from pyg_layers import edge_types as types

from dfgnn import reference
from dfgnn.nn.pyg import RGATConv

N, R = 50, NUM_RELATIONS  # nodes of the graph "random", relations
KIND = pytest.mark.parametrize("kind", Subject.kinds.values(), ids=Subject.kinds)


def pair(*args, **kwargs):
    return Subject().pair(*args, **{"heads": 1} | kwargs)


@KIND
@pytest.mark.parametrize("num_src, num_dst", [(30, 80), (80, 30)])
def test_size(kind, num_src, num_dst):
    theirs, ours = pair(6, 5, R, heads=2, mod="scaled", **kind)
    edge_index = edges("fewer_sources" if num_src == 30 else "fewer_destinations")
    x = torch.randn(num_src, 6, dtype=torch.float64), torch.randn(num_dst, 6, dtype=torch.float64)
    compare(theirs, ours, x, edge_index, types(400), size=(num_src, num_dst), return_attention_weights=True)


@KIND
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_types_of_a_sparse_adjacency(kind, layout):
    edge_index = torch.unique(edges(), dim=1)
    num_edges = edge_index.shape[1]
    x = torch.randn(N, 6, dtype=torch.float64)
    theirs, ours = pair(6, 5, R, heads=2, **kind)
    adjacency = sparse_forms(edge_index, N, N, types(num_edges))[layout]
    for asked in (None, True):
        # torch_geometric documents that the matrix's values may be the types, but fails with that: it gets
        # them as an argument.
        compare(
            theirs, ours, x, adjacency, adjacency.values(), return_attention_weights=asked,
            our_args=(x, adjacency),
        )  # fmt: skip


@KIND
def test_forms_of_edge_attr(kind):
    x = torch.randn(N, 6, dtype=torch.float64)
    theirs, ours = pair(6, 5, R, heads=2, edge_dim=1, **kind)
    compare(theirs, ours, x, edges(), types(400), torch.randn(400, dtype=torch.float64))
    compare(theirs, ours, x, edges(), types(400), torch.randn(1, 1, dtype=torch.float64))
    compare(theirs, ours, x, edges(), types(400))  # edge attributes may be left out


@KIND
@pytest.mark.parametrize(
    "options", [{"mod": "additive", "num_bases": 2}, {"mod": "scaled", "num_blocks": 2}], ids=str
)
def test_no_edges_of_composed_weights(kind, options):
    theirs, ours = pair(6, 4, R, heads=2, edge_dim=3, **kind, **options)
    edge_index, edge_type = torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    x, attr = torch.randn(4, 6, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.float64)
    compare(theirs, ours, x, edge_index, edge_type, attr, return_attention_weights=True)


def test_every_parameter_is_initialised():
    """torch_geometric leaves l2, which mod="scaled" multiplies by, as its memory happens to be."""
    layer = RGATConv(6, 5, R, heads=2, mod="scaled")
    for reset in (False, True):
        if reset:
            with torch.no_grad():
                layer.l2.fill_(float("nan"))
            layer.reset_parameters()
        assert torch.equal(layer.l2, torch.full((5, 5), 1 / 5))


# ---- rows and caches -------------------------------------------------------------------------------------


@KIND
def test_features_are_made_per_pair(kind):
    """The engine gets a row for each (source, relation) pair, once, however many edges come from it."""
    ours = RGATConv(6, 5, R, heads=2, **kind)
    edge_index, edge_type, seen = edges("super_source"), types(9000), []

    def attention(graph, feat, *args, **kwargs):
        seen.append((graph.num_src, graph.num_dst, feat.shape))
        return reference.gat_attention(graph, feat, *args, **kwargs)

    ours.attention = attention
    ours(torch.randn(300, 6), edge_index, edge_type)
    num_dst = 300 if kind["attention_mechanism"] == MECHANISMS["across"] else 300 * 3 + 3
    pairs = torch.stack([edge_index[1], edge_type]).unique(dim=1).shape[1]
    assert seen == [(4, 300 if num_dst == 300 else pairs, (4, 2, 5))]


def test_types_that_are_the_values_of_a_matrix_may_change():
    """The graph of a sparse matrix is cached by its indices. Its values, here the types, may change in place
    without a new version counter: they must be read at each call."""
    _, ours = pair(6, 5, R)
    edge_index = torch.unique(edges(), dim=1)
    matrix = sparse_forms(edge_index, N, N, types(edge_index.shape[1]))["coo"].coalesce()
    x = torch.randn(N, 6, dtype=torch.float64)
    for _ in range(2):
        expected = ours(x, matrix, matrix.values().clone())
        assert torch.equal(ours(x, matrix), expected)
        matrix.values().numpy()[:] = matrix.values().numpy()[::-1].copy()
    assert not torch.equal(ours(x, matrix), expected)


def test_no_dropout_with_a_mod():
    """`dropout` is set after construction, because the constructor refuses it together with `mod`: it has no
    effect then."""
    theirs, ours = pair(6, 5, R, mod="f-scaled")
    theirs.dropout = ours.dropout = 0.5
    compare(theirs, ours, torch.randn(N, 6, dtype=torch.float64), edges(), types(400))


def test_attention_that_underflows():
    """mod="f-additive" adds one to attention weights above zero; weights that underflow to zero stay zero."""
    theirs, ours = pair(6, 5, R, mod="f-additive", dtype=torch.float32)
    with torch.no_grad():
        theirs.k.mul_(1e3), ours.k.mul_(1e3)
    x = torch.randn(N, 6)
    _, (_, alpha) = theirs(x, edges(), types(400), return_attention_weights=True)
    assert 0.1 < (alpha == 0).float().mean().item() < 0.9
    torch.testing.assert_close(
        ours(x, edges(), types(400)), theirs(x, edges(), types(400)), rtol=1e-3, atol=1e-3
    )
