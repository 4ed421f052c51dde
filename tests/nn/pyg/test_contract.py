"""What every layer of dfgnn.nn.pyg keeps of torch_geometric's layer with the same parameters.

pyg_layers.py says which options and inputs a layer takes. What is particular to one stands in its own file.
"""

import copy
import pickle

import pytest
import torch
from covering import exhaustive
from pyg_compare import assert_same, assert_same_dropout_distribution, compare_low_precision, edges, run
from pyg_layers import BIPARTITE, SPARSE, SUBJECTS

from dfgnn.nn import FallbackWarning


def each(items, where=lambda subject: True, few=None):
    """Parametrises over the subjects and, for each, over ``items`` of it: pairs of id and value. few: the ids
    that are not for exhaustive tests alone."""
    given = [
        (f"{subject.name} {name}".strip(), subject, item)
        for subject in SUBJECTS
        if where(subject)
        for name, item in items(subject)
    ]
    return pytest.mark.parametrize(
        ("subject", "item"),
        [
            pytest.param(subject, item, id=id, marks=[exhaustive] * (few is not None and id not in few))
            for id, subject, item in given
        ],
    )


def numbered(name):
    return lambda subject: enumerate(getattr(subject, name))


def kinds(subject):
    return subject.kinds.items()


# ---- options and inputs ----------------------------------------------------------------------------------


@each(numbered("constructor"))
def test_constructor_options(subject, item):
    options = dict(item)
    args, dtype = options.pop("args", subject.args), options.pop("dtype")
    layers = subject.pair(*args, dtype=dtype, **options)
    inputs = subject.inputs(dtype=dtype, in_channels=args[0] if args else 9, **options)
    subject.check(layers, inputs)
    if subject.has_attention:
        subject.check(layers, inputs, asked=False)
        assert getattr(layers[1], "_alpha", None) is None


@each(lambda s: [(f"{name} {graph}", (k, graph)) for k, name in enumerate(s.kinds) for graph in s.graphs])
def test_graphs(subject, item):
    """Edges in int32 and features in float32 for every other kind of the layer, and for every other graph."""
    turn, graph = item
    options = list(subject.kinds.values())[turn]
    is_small = (turn + subject.graphs.index(graph)) % 2 == 0
    dtype = torch.float32 if is_small else torch.float64
    layers = subject.pair(dtype=dtype, **options)
    inputs = subject.inputs(graph, dtype=dtype, **options)
    ours = _with_index_dtype(inputs, torch.int32) if is_small else inputs
    subject.check(layers, inputs, ours, asked=not is_small)  # edges are returned in the type that was given


def _with_index_dtype(value, dtype):
    if isinstance(value, tuple):
        return tuple(_with_index_dtype(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _with_index_dtype(item, dtype) for key, item in value.items()}
    return value if value.is_floating_point() else value.to(dtype)


@pytest.mark.parametrize("graph", BIPARTITE)
@each(numbered("pairs"), lambda subject: subject.pairs)
def test_bipartite(subject, item, graph):
    args, options = item
    layers = subject.pair(*args, **options)
    subject.check(layers, subject.inputs(graph, in_channels=args[0], **options))


@each(lambda subject: [(f"{form} {kind}", (form, kind)) for form, kind in subject.forms()])
def test_forms_of_edges(subject, item):
    form, options = item[0], subject.kinds[item[1]]
    layers, inputs = subject.pair(**options), subject.inputs(form=form, **options)
    # torch_geometric cannot return attention as a sparse matrix if that has several values per entry.
    subject.check(layers, inputs, asked=form not in SPARSE or options.get("edge_dim") is None)


@pytest.mark.parametrize("layout", SPARSE)
@each(numbered("pairs"), lambda subject: subject.pairs)
def test_sparse_bipartite(subject, item, layout):
    args, options = item
    layers = subject.pair(*args, **options)
    inputs = subject.inputs("fewer_destinations", layout, in_channels=args[0], **options)
    subject.check(layers, inputs, asked=options.get("edge_dim") is None)


@pytest.mark.parametrize("graph", ["no nodes", "no edges"])
@each(kinds)
def test_no_edges(subject, item, graph):
    layers = subject.pair(**item)
    subject.check(layers, subject.inputs(graph, **item))


# ---- state -----------------------------------------------------------------------------------------------


def drawn(subject, args, options):
    """torch_geometric's layer and ours, each initialised by its own constructor from the same seed."""
    layers = []
    for cls in (subject.theirs, subject.ours):
        torch.manual_seed(5)
        layers.append(cls(*copy.deepcopy(args), **subject.base | options))
    return layers


def assert_same_state(theirs, ours):
    assert repr(ours) == repr(theirs) and isinstance(ours, type(theirs))
    assert theirs.__dict__.keys() == ours.__dict__.keys() - {"_dfgnn_prepared", "_is_torch_compile"}
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == actual.keys()
    # torch_geometric leaves the parameter l2 of RGATConv uninitialised.
    assert all(torch.equal(expected[name], actual[name]) for name in expected if name != "l2")
    theirs.load_state_dict(actual)


@each(numbered("states"))
def test_state_and_initialisation(subject, item):
    args, options = item
    theirs, ours = drawn(subject, args, options)
    assert_same_state(theirs, ours)
    subject.check((theirs, ours), subject.inputs(dtype=torch.float32, in_channels=_first(args), **options))
    assert_same_state(theirs, ours)


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@each(numbered("lazy"), lambda subject: subject.lazy)
def test_lazy(subject, item, first=lambda layer: layer):
    args, options = item
    theirs, ours = drawn(subject, args, options)
    options = {name: 3 if name == "edge_dim" else value for name, value in options.items()}
    in_channels = args[0] if subject.name == "HGTConv" else 9
    inputs = subject.inputs(dtype=torch.float32, in_channels=in_channels, **options)
    for layer in (theirs, first(ours)):
        torch.manual_seed(6)
        layer(*inputs)
    assert_same_state(theirs, ours)
    subject.check((theirs, ours), inputs)


@each(numbered("lazy"), lambda subject: subject.lazy, few=("GATv2Conv 1", "HGTConv 0"))
def test_lazy_where_the_first_call_is_compiled(subject, item):
    torch._dynamo.reset()
    test_lazy(subject, item, first=lambda layer: torch.compile(layer, backend="eager"))


def _first(args):
    return args[0] if args else 9


@each(kinds)
def test_assigning_the_class(subject, item):
    """An instance of torch_geometric's becomes ours and its own again, with everything that it has."""
    theirs, _ = subject.pair(**item)
    layer, inputs = copy.deepcopy(theirs), subject.inputs(**item)
    layer.__class__ = subject.ours
    assert type(pickle.loads(pickle.dumps(layer))) is subject.ours
    subject.check((theirs, layer), inputs)
    theirs.eval(), layer.eval()
    layer.__class__ = subject.theirs
    assert_same(run(layer, *inputs), run(theirs, *inputs), 0)


# ---- dropout ---------------------------------------------------------------------------------------------


@each(
    lambda s: [(name, o | {"concat": k % 2 == 0}) for k, (name, o) in enumerate(s.kinds.items())],
    lambda subject: subject.has_dropout,
)
def test_injected_mask(monkeypatch, subject, item):
    """Attention is returned before or after dropout as torch_geometric's is, with its gradient."""
    layers = subject.pair(dropout=0.4, **item)
    subject.inject_dropout(monkeypatch, layers[1])
    inputs = subject.inputs(**item)
    subject.check(layers, inputs, asked=False)
    subject.check(layers, inputs)
    subject.check([layer.eval() for layer in layers], inputs)


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s.has_dropout], ids=lambda s: s.name)
def test_dropout_distribution(monkeypatch, subject):
    theirs, ours = subject.pair(dropout=0.4)
    if subject.name == "SuperGATConv":  # negative samples do not matter here and are slow to draw
        for layer in (theirs, ours):
            monkeypatch.setattr(layer, "negative_sampling", lambda edge_index, *args: edge_index[:, :1])
    edge_index = edges("duplicates")
    x = torch.randn(6, subject.args[0], dtype=torch.float64)
    types = subject.edge_arguments(edge_index, 6, 6, "tensor", None)[1:]

    def of_copies(layer):
        def forward(x, edge_index):
            return layer(x, edge_index, *(t.repeat(edge_index.shape[1] // len(t)) for t in types))

        return forward

    assert_same_dropout_distribution(of_copies(theirs), of_copies(ours), x, edge_index)


# ---- what else may be done to a layer --------------------------------------------------------------------


@each(lambda s: [("hook", {})] + ([] if s.name in ("HGTConv", "GATEConv") else [("aggr", {"aggr": "max"})]))
def test_fallback(subject, item):
    """With a hook on messages, or with another aggregation, torch_geometric's own forward runs, with a
    warning."""
    layers = subject.pair(**item)
    if not item:
        for layer in layers:
            layer.register_message_forward_hook(lambda module, args, out: 2 * out)
    theirs, ours = map(subject.wrapped, layers)
    inputs = subject.inputs()
    asked = {"return_attention_weights": True} if subject.has_attention else {}
    with pytest.warns(FallbackWarning, match=f"{subject.name} .*{'aggr' if item else 'hooks'}"):
        found = run(ours, *inputs, **asked)
    assert_same(found, run(theirs, *inputs, **asked), 1e-12)


# ---- precision and memory --------------------------------------------------------------------------------


def low_precision(subject):
    for name, options in subject.low.items():
        yield name, options
        if subject.has_concat and "concat" not in options:
            yield f"{name} mean", options | {"concat": False}


@pytest.mark.parametrize("dtype", ["autocast", torch.float16, torch.bfloat16], ids=str)
@each(low_precision)
def test_low_precision(subject, item, dtype):
    layers = subject.pair(*subject.low_args, dtype=torch.float32, **item)
    in_channels = _first(subject.low_args)
    inputs = subject.inputs(dtype=torch.float32, in_channels=in_channels, **item)
    options = {"autocast": True} if dtype == "autocast" else {"dtype": dtype}
    if subject.has_attention:
        options["return_attention_weights"] = True
    compare_low_precision(*map(subject.wrapped, layers), *inputs, **options)


@each(kinds, lambda subject: subject.large)
def test_no_tensor_of_edges_and_features(subject, item):
    """Neither forward nor backward holds a row for each edge."""
    if "edge_dim" in item and subject.name == "GATv2Conv":
        pytest.skip("its scores take the projected attributes of an edge, a row each")
    args, options = subject.large
    layer = subject.pair(*args, dtype=torch.float32, **item | options)[1]
    in_channels = args[0] if args else 256
    x, edge_index, *rest = subject.inputs("super_row", dtype=torch.float32, in_channels=in_channels, **item)
    with torch.profiler.profile(profile_memory=True) as profile:
        outputs = run(layer, x, edge_index, *rest)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert outputs and 0 < largest < 9000 * 256 * 4 / 2
