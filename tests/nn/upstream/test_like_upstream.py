"""What every layer keeps of the other library's layer with the same parameters: results, attention and all
gradients, parameters and attributes, dropout, precision. What is particular to one stands in its own file."""

import copy
import importlib

import pytest
import torch
from beside import compare_low_precision, run
from covering import exhaustive, id_of
from side_by_side import assert_same_distribution

LIBRARIES = {}
for library in ("pyg", "dgl"):
    try:
        LIBRARIES[library] = importlib.import_module(f"of_{library}").SUBJECTS
    except pytest.skip.Exception:  # its package is missing
        LIBRARIES[library] = []
SUBJECTS = [subject for subjects in LIBRARIES.values() for subject in subjects]


def each(items, of=SUBJECTS, few=None):
    """Parametrizes over the subjects and, for each, over ``items`` of it: pairs of id and value. few: the ids
    that are not for exhaustive tests alone."""
    given = [
        (f"{subject.library} {subject.name} {name}".strip(), subject, item)
        for subject in of
        for name, item in items(subject)
    ]
    return pytest.mark.parametrize(
        ("subject", "item"),
        [
            pytest.param(subject, item, id=id, marks=[exhaustive] * (few is not None and id not in few))
            for id, subject, item in given
        ],
    )


# ---- results --------------------------------------------------------------------------------------------


def rows(subject):
    for row in subject.rows():
        yield "-".join(map(id_of, row.values())).replace(" ", ""), row


@pytest.mark.filterwarnings("ignore:The input graph for the user-defined edge function")
@each(rows)
def test_results(subject, item):
    subject.check_row(**item)


# ---- state ----------------------------------------------------------------------------------------------


def drawn(subject, args, options):
    """The other library's layer and ours, each initialised by its own constructor from the same seed."""
    layers = []
    for cls in (subject.theirs, subject.ours):
        torch.manual_seed(5)
        layers.append(cls(*copy.deepcopy(args), **subject.base | options))
    return layers


def assert_same_state(theirs, ours):
    assert repr(ours) == repr(theirs) and isinstance(ours, type(theirs))
    assert theirs.__dict__.keys() == ours.__dict__.keys() - {"_dfgnn_prepared", "_is_torch_compile"}
    for key, value in vars(theirs).items():
        if isinstance(value, (int, float, tuple, str)):
            assert vars(ours)[key] == value, key
    for kind in ("_parameters", "_buffers", "_modules"):
        assert getattr(theirs, kind).keys() == getattr(ours, kind).keys()
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert list(expected) == list(actual)
    # torch_geometric leaves the parameter l2 of RGATConv uninitialised.
    assert all(torch.equal(expected[name], actual[name]) for name in expected if name != "l2")
    theirs.load_state_dict(actual)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{s.library} {s.name}")
def test_state_and_initialisation(subject):
    """State and initialisation are upstream's, also after reset_parameters; DGL's layers without that method
    draw in the constructor."""
    for args, options in subject.constructors():
        theirs, ours = drawn(subject, args, options)
        assert_same_state(theirs, ours)
        if hasattr(theirs, "reset_parameters"):
            for layer in (theirs, ours):
                torch.manual_seed(6)
                layer.reset_parameters()
        elif hasattr(ours, "reset_parameters"):
            with torch.no_grad():
                for parameter in ours.parameters():
                    parameter.fill_(0.3)
            torch.manual_seed(5)
            ours.reset_parameters()
        assert_same_state(theirs, ours)


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@each(lambda subject: enumerate(subject.lazy))
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


@each(lambda subject: enumerate(subject.lazy), few=("pyg GATv2Conv 1", "pyg HGTConv 0"))
def test_lazy_where_the_first_call_is_compiled(subject, item):
    torch._dynamo.reset()
    test_lazy(subject, item, first=lambda layer: torch.compile(layer, backend="eager"))


# ---- dropout --------------------------------------------------------------------------------------------


@each(lambda subject: enumerate(subject.dropout))
def test_injected_mask(monkeypatch, subject, item):
    """Both layers with the same masks: attention is returned before or after dropout as the other library's
    is, with its gradient."""
    layers, inputs = subject.with_same_masks(monkeypatch, item)
    subject.check(layers, *inputs)
    subject.check([layer.eval() for layer in layers], *inputs)


@each(lambda s: [("", None)] if s.dropout and s.copies else [], few=("pyg GATConv", "dgl GATv2Conv"))
def test_dropout_distribution(monkeypatch, subject, item):
    """Mean and deviation of many draws agree with the other library's."""
    assert_same_distribution(*subject.copies(monkeypatch))


# ---- precision and memory -------------------------------------------------------------------------------


def low_precision(subject):
    for name, options in subject.low.items():
        yield name, options
        if subject.has_concat and "concat" not in options:
            yield f"{name} mean", options | {"concat": False}


@pytest.mark.parametrize("dtype", ["autocast", torch.float16, torch.bfloat16], ids=str)
@each(low_precision, of=LIBRARIES["pyg"])
def test_low_precision(subject, item, dtype):
    layers = subject.pair(*subject.low_args, dtype=torch.float32, **item)
    inputs = subject.inputs(dtype=torch.float32, in_channels=(*subject.low_args, 9)[0], **item)
    options = {"autocast": True} if dtype == "autocast" else {"dtype": dtype}
    compare_low_precision(*map(subject.wrapped, layers), *inputs, **options | subject.asked)


@each(lambda subject: enumerate(subject.large))
def test_no_tensor_of_edges_and_features(subject, item):
    """Neither forward nor backward holds a row for each edge."""
    layer, inputs, elements = subject.of_many_edges(*item)
    with torch.profiler.profile(profile_memory=True) as profile:
        outputs = run(layer, *inputs)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert outputs and 0 < largest < elements * 4 / 2
