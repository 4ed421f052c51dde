"""pyg.HGTConv beside torch_geometric's with the same parameters: outputs and gradients of all node types."""

import copy

import pytest
import torch
from pyg_compare import assert_same, compare, compare_low_precision, run, sparse_forms, torch_geometric
from pyg_layers import METADATA, RELATIONS, WIDTHS
from pyg_layers import NODES as SIZES
from pyg_layers import HGTConv as Subject
from pyg_layers import typed_edges as edge_indices
from pyg_layers import typed_features as features

from dfgnn import reference
from dfgnn.nn import FallbackWarning
from dfgnn.nn.pyg import HGTConv

pair = Subject().pair


@pytest.mark.parametrize("in_channels", [8, WIDTHS], ids=str)
def test_types_that_do_not_occur(in_channels):
    """A node type without features, and edge types without edges, in one call."""
    theirs, ours = pair(in_channels, 8, METADATA, 2)
    x = features(in_channels)
    edges = {edge_type: index for edge_type, index in edge_indices().items() if "c" not in edge_type}
    compare(theirs, ours, {name: x[name] for name in ("a", "b", "d")}, edges)


def test_results_are_of_the_destination_types():
    theirs, ours = pair(8, 8, METADATA, 2)
    expected, actual = theirs(features(), edge_indices()), ours(features(), edge_indices())
    assert list(actual) == list(expected) == ["a", "b", "d"]
    inputs = features(WIDTHS)
    before = copy.deepcopy(inputs)
    HGTConv(-1, 8, METADATA, 2).double()(inputs, edge_indices())
    assert all(torch.equal(inputs[name], before[name]) for name in SIZES)


def test_order_of_edge_types():
    """Whatever the order of the edge types in the dictionary, each takes its own weights."""
    theirs, ours = pair(8, 8, METADATA, 2)
    x, edges = features(), edge_indices()
    turned = dict(reversed(edges.items()))
    assert_same(run(ours, x, turned), run(theirs, x, edges), 1e-10)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "mixed"])
def test_sparse_adjacency(layout):
    theirs, ours = pair(8, 8, METADATA, 2)
    edges, given = {}, {}
    for edge_type, index in edge_indices().items():
        index = torch.unique(index, dim=1)
        sizes = SIZES[edge_type[0]], SIZES[edge_type[2]]
        forms = sparse_forms(index, *sizes) | {"mixed": index}
        forms["csc"] = torch_geometric.utils.to_torch_csc_tensor(index.flip(0), size=sizes[::-1])
        edges[edge_type], given[edge_type] = index, forms[layout]
    if layout == "mixed":
        given["a", "x", "b"] = sparse_forms(edges["a", "x", "b"], 20, 15)["coo"]
    x = features()
    compare(theirs, ours, x, given)
    compare(theirs, ours, x, edges, our_args=(x, given))


def test_no_edges_of_some_types():
    theirs, ours = pair(8, 8, METADATA, 2)
    nothing = dict.fromkeys(RELATIONS, torch.zeros(2, 0, dtype=torch.long))
    compare(theirs, ours, features(), nothing | {("a", "z", "a"): torch.tensor([[0, 1], [2, 2]])})
    compare(theirs, ours, features(sizes=SIZES | {"c": 0, "d": 0}), nothing)


# ---- rows and caches -------------------------------------------------------------------------------------


def test_keys_are_made_per_source_of_a_relation():
    """The kernels get one graph of all relations, with a row per (source, relation) pair. Of type c only the
    few nodes with edges have a row."""
    ours, seen = HGTConv(8, 8, METADATA, 2), []

    def attention(graph, query, key, value, **options):
        seen.append((graph.num_edges, query.shape, key.shape, value.shape))
        return reference.dot_attention(graph, query, key, value, **options)

    ours.attention = attention
    ours(features(dtype=torch.float32), edge_indices())
    num_rows = sum(5 if src == "c" else SIZES[src] for src, _, _ in RELATIONS)
    assert seen == [(360, (42, 2, 4), (num_rows, 2, 4), (num_rows, 2, 4))]


# ---- what else may be done to a layer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda layer: layer.k_rel.register_forward_hook(lambda module, args, out: 2 * out),
            "k_rel or v_rel",
        ),
        (
            lambda layer: layer.v_rel.register_forward_pre_hook(lambda m, args: (args[0] + 1, args[1])),
            "k_rel or",
        ),
        (lambda layer: setattr(layer, "k_rel", torch.nn.Identity()), "k_rel or v_rel"),
        (lambda layer: layer.register_message_forward_hook(lambda module, args, out: 2 * out), "hooks"),
    ],
    ids=["hook", "pre-hook", "replaced", "message hook"],
)
def test_fallback(change, reason):
    theirs, ours = pair(8, 8, METADATA, 2)

    x = features()

    class Mine(HGTConv):  # warnings are given once per class: a new class warns anew
        pass

    ours.__class__ = Mine
    for layer in (theirs, ours):
        change(layer)
    if isinstance(ours.k_rel, torch.nn.Identity):
        ours.k_rel.forward = theirs.k_rel.forward = lambda x, types: 3 * x
    with pytest.warns(FallbackWarning, match=f"Mine .*{reason}"):
        found = run(ours, x, edge_indices())
    assert_same(found, run(theirs, x, edge_indices()), 0)


def test_autocast_of_a_projected_result():
    """With other out than in channels the layer has no skip connection: the result is the bare projection."""
    theirs, ours = pair(12, 8, METADATA, 2, dtype=torch.float32)
    compare_low_precision(theirs, ours, features(12, torch.float32), edge_indices(), autocast=True)
