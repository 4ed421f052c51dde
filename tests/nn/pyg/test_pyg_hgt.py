"""pyg.HGTConv beside torch_geometric's with the same parameters: outputs and gradients of all node types."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from pyg_compare import (
    assert_same,
    compare,
    compare_low_precision,
    run,
    sparse_forms,
    torch_geometric,
)
from pyg_compare import pair as plain_pair
from torch.nn.utils import parametrizations

from dfgnn import reference
from dfgnn.nn.pyg import FallbackWarning, HGTConv
from dfgnn.nn.pyg._relations import join

PyGConv = torch_geometric.nn.HGTConv
SIZES = {"a": 20, "b": 15, "c": 30, "d": 7}
# c is a source alone, and few of its nodes are; nothing leads from d; two relations join the same types.
EDGE_TYPES = [
    ("a", "x", "b"),
    ("b", "y", "a"),
    ("a", "z", "a"),
    ("c", "x", "a"),
    ("a", "w", "b"),
    ("b", "x", "d"),
]
METADATA = list(SIZES), EDGE_TYPES


def features(widths=8, dtype=torch.float64, sizes=SIZES):
    widths = widths if isinstance(widths, dict) else dict.fromkeys(sizes, widths)
    return {name: torch.randn(size, widths[name], dtype=dtype) for name, size in sizes.items()}


def edge_indices(dtype=torch.int64, num_edges=60):
    """Multigraphs, each with destinations that no edge leads to."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for src, name, dst in EDGE_TYPES:
        ends = [
            torch.randint(size - 2, (num_edges,), generator=generator) for size in (SIZES[src], SIZES[dst])
        ]
        found[src, name, dst] = torch.stack(ends).to(dtype)
    found["c", "x", "a"][0] %= 5
    return found


def pair(*args, **kwargs):
    """skip and p_rel start at one: they get other values."""
    theirs, ours = plain_pair(PyGConv, HGTConv, *args, **kwargs)
    for name, parameter in theirs.named_parameters():
        if name.startswith(("skip", "p_rel")):
            torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("in_channels", [8, 12, {"a": 8, "b": 5, "c": 9, "d": 12}], ids=str)
@pytest.mark.parametrize(("out_channels", "heads"), [(8, 1), (12, 3), (8, 8), (16, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_constructor_options(in_channels, out_channels, heads, dtype):
    theirs, ours = pair(in_channels, out_channels, METADATA, heads, dtype=dtype)
    x = features(in_channels, dtype)
    compare(theirs, ours, x, edge_indices())
    # A node type of which nothing is known any more, and edge types that do not occur.
    edges = {edge_type: index for edge_type, index in edge_indices().items() if "c" not in edge_type}
    compare(theirs, ours, {name: x[name] for name in ("a", "b", "d")}, edges)


@pytest.mark.parametrize("num_edges", [1, 7, 900])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_graphs(num_edges, index_dtype):
    theirs, ours = pair(8, 8, METADATA, 2)
    x = features()
    given = x, edge_indices(index_dtype, num_edges)
    compare(theirs, ours, x, edge_indices(num_edges=num_edges), our_args=given)


def test_results_are_of_the_destination_types():
    theirs, ours = pair(8, 8, METADATA, 2)
    expected, actual = theirs(features(), edge_indices()), ours(features(), edge_indices())
    assert list(actual) == list(expected) == ["a", "b", "d"]
    inputs = features({"a": 8, "b": 5, "c": 9, "d": 12})
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


@pytest.mark.parametrize("sort_order", [None, "row", "col"])
def test_edge_index_class(sort_order):
    theirs, ours = pair(8, 8, METADATA, 2)
    x, plain, given = features(), {}, {}
    for edge_type, index in edge_indices().items():
        index = torch_geometric.EdgeIndex(index, sparse_size=(SIZES[edge_type[0]], SIZES[edge_type[2]]))
        given[edge_type] = index if sort_order is None else index.sort_by(sort_order).values
        plain[edge_type] = given[edge_type].as_tensor()
    compare(theirs, ours, x, plain, our_args=(x, given))


def test_no_edges():
    theirs, ours = pair(8, 8, METADATA, 2)
    nothing = dict.fromkeys(EDGE_TYPES, torch.zeros(2, 0, dtype=torch.long))
    compare(theirs, ours, features(), nothing)
    compare(theirs, ours, features(), nothing | {("a", "z", "a"): torch.tensor([[0, 1], [2, 2]])})
    compare(theirs, ours, features(sizes=SIZES | {"c": 0, "d": 0}), nothing)
    compare(theirs, ours, features(sizes=dict.fromkeys(SIZES, 0)), nothing)


EDGE = "a", "x", "b"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda x, e: (x, {}), ValueError, "edge_index_dict: expected at least one edge type"),
        (lambda x, e: (x, {("a", "q", "b"): e[EDGE]}), ValueError, "expected edge types of the metadata"),
        (lambda x, e: ({"a": x["a"]}, {EDGE: e[EDGE]}), ValueError, "x_dict: expected features of {'b'}"),
        (lambda x, e: (x | {"a": x["a"][0]}, e), ValueError, r"x_dict\['a'\]: expected shape \[N, F\]"),
        (lambda x, e: (x | {"a": None}, e), TypeError, r"x_dict\['a'\]: expected a tensor"),
        (lambda x, e: (x, {EDGE: e[EDGE][:1]}), ValueError, r"'x', 'b'\]: edge_index: expected shape"),
        (lambda x, e: (x, {EDGE: e[EDGE].double()}), TypeError, r"'b'\]: edge_index: expected dtype"),
        (lambda x, e: (x, {EDGE: e[EDGE].tolist()}), TypeError, "edge_index: expected a .* got list"),
        (lambda x, e: (x, {EDGE: e[EDGE] + 10}), ValueError, r"'b'\]: edge_index\[.\]: expected values in"),
        (lambda x, e: (x, {EDGE: e[EDGE].flip(0).sub(9)}), ValueError, "expected values in"),
        (
            lambda x, e: (x, {EDGE: sparse_forms(e[EDGE], 20, 16)["coo"]}),
            ValueError,
            "x: expected 16 destination rows",
        ),
    ],
)
def test_errors(change, error, match):
    layer = HGTConv(8, 8, METADATA)
    with pytest.raises(error, match=match):
        layer(*change(features(dtype=torch.float32), edge_indices()))


# Rows and caches


def test_keys_are_made_per_source_of_a_relation():
    """The engine gets all relations at once; of c, which has few sources, no row for the others."""
    ours, seen = HGTConv(8, 8, METADATA, 2), []

    def attention(graph, query, key, value, **options):
        seen.append((graph.num_edges, query.shape, key.shape, value.shape))
        return reference.dot_attention(graph, query, key, value, **options)

    ours.attention = attention
    ours(features(dtype=torch.float32), edge_indices())
    num_rows = sum(5 if src == "c" else SIZES[src] for src, _, _ in EDGE_TYPES)
    assert seen == [(360, (42, 2, 4), (num_rows, 2, 4), (num_rows, 2, 4))]


def test_no_tensor_of_edges_and_features():
    layer = HGTConv(16, 256, METADATA, heads=8)
    x = {name: value.requires_grad_() for name, value in features(16, torch.float32).items()}
    edges = edge_indices(num_edges=1500)
    with torch.profiler.profile(profile_memory=True) as profile:
        sum(out.sum() for out in layer(x, edges).values()).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 6 * 1500 * 256 * 4 / 2


def test_the_joined_graph_is_kept_with_its_tensors():
    edges = edge_indices()
    destinations = {name: SIZES[name] for name in ("a", "b", "d")}

    def joined():
        return join(edges, SIZES, destinations)

    first = joined()
    assert joined() is first
    assert join(dict(edges), SIZES, destinations) is first
    edges["a", "z", "a"][0, 0] = 19
    second = joined()
    # Rows of the sources: 20 of a to b, 15 of b, and then a to a.
    assert second is not first and 20 + 15 + 19 in second.graph.edge_index[0]
    watched = weakref.ref(second.graph)
    del first, second
    assert watched() is not None
    edges["a", "z", "a"] = edges["a", "z", "a"].clone()
    gc.collect()
    assert watched() is None


# State


@pytest.mark.parametrize("in_channels", [8, {"a": 8, "b": 5, "c": 9, "d": 12}], ids=str)
def test_state_and_initialisation(in_channels):
    layers = []
    for cls in (PyGConv, HGTConv):
        torch.manual_seed(5)
        layers.append(cls(copy.copy(in_channels), 8, METADATA, 2))
    theirs, ours = layers
    assert repr(ours) == repr(theirs) and isinstance(ours, PyGConv)
    assert theirs.__dict__.keys() == ours.__dict__.keys()
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    theirs.load_state_dict(actual)


def test_lazy():
    layers = []
    widths = {"a": 8, "b": 5, "c": 9, "d": 12}
    for cls in (PyGConv, HGTConv):
        torch.manual_seed(5)
        layers.append(cls(-1, 8, METADATA, 2))
        layers[-1](features(widths, torch.float32), edge_indices())
    theirs, ours = layers
    ours.load_state_dict(theirs.state_dict())  # drawn after the features, from one stream
    compare(*layers, features(widths, torch.float32), edge_indices())


def test_assigning_the_class():
    theirs, _ = pair(8, 8, METADATA, 2)
    layer, x = copy.deepcopy(theirs), features()
    layer.__class__ = HGTConv
    compare(theirs, layer, x, edge_indices())
    assert type(pickle.loads(pickle.dumps(layer))) is HGTConv
    layer.__class__ = PyGConv
    assert_same(run(layer, x, edge_indices()), run(theirs, x, edge_indices()), 0)


def test_pickle_and_deepcopy():
    layer = HGTConv(8, 8, METADATA, 2)
    x = features(dtype=torch.float32)
    expected = layer(x, edge_indices())
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        found = other(x, edge_indices())
        assert type(other) is HGTConv and all(torch.equal(found[name], expected[name]) for name in expected)


# What else may be done to a layer


@pytest.mark.parametrize(
    "change",
    [
        lambda lin: lin.register_forward_hook(lambda module, args, out: 2 * out),
        lambda lin: lin.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        parametrizations.weight_norm,
    ],
    ids=["forward hook", "forward pre-hook", "parametrization"],
)
@pytest.mark.parametrize("name", ["kqv_lin", "out_lin"])
def test_changes_of_a_projection_take_effect(change, name):
    theirs, ours = pair(8, 8, METADATA, 2)
    for layer in (theirs, ours):
        change(getattr(layer, name).lins["a"])
    compare(theirs, ours, features(), edge_indices())


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

    class Mine(HGTConv):  # a class of its own, for a warning of its own
        pass

    ours.__class__ = Mine
    for layer in (theirs, ours):
        change(layer)
    if isinstance(ours.k_rel, torch.nn.Identity):
        ours.k_rel.forward = theirs.k_rel.forward = lambda x, types: 3 * x
    with pytest.warns(FallbackWarning, match=f"Mine .*{reason}"):
        found = run(ours, x, edge_indices())
    assert_same(found, run(theirs, x, edge_indices()), 0)


# Precision


@pytest.mark.parametrize("widths", [8, 12])
def test_autocast(widths):
    theirs, ours = pair(widths, 8, METADATA, 2, dtype=torch.float32)
    compare_low_precision(theirs, ours, features(widths, torch.float32), edge_indices(), autocast=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision(dtype):
    theirs, ours = pair(8, 8, METADATA, 2, dtype=torch.float32)
    compare_low_precision(theirs, ours, features(dtype=torch.float32), edge_indices(), dtype=dtype)
