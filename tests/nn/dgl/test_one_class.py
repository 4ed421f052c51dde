"""Layers of dfgnn.nn.dgl are subclasses of DGL's where DGL is installed, and elsewhere the same without that
base."""

import copy
import pickle

import pytest
import torch

import dfgnn

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")

# Every option that changes what a layer consists of.
CASES = [
    ("AGNNConv", (0.7,), {}),
    ("AGNNConv", (), {"learn_beta": False, "allow_zero_in_degree": True}),
    ("DotGatConv", (6, 4, 2), {}),
    ("DotGatConv", ((6, 5), 4, 2), {}),
    ("EGATConv", (6, 3, 4, 5, 2), {}),
    ("EGATConv", ((6, 7), 3, 4, 5, 2), {}),
    ("EdgeGATConv", (6, 3, 4, 2), {}),
    ("EdgeGATConv", ((6, 7), 3, 4, 2), {"residual": False, "bias": False}),
    ("GATConv", (6, 4, 2), {}),
    ("GATConv", ((8, 8), 4, 2), {"residual": True}),
    ("GATConv", (6, 4, 2), {"residual": True, "negative_slope": 0.3}),
    ("GATConv", ((6, 8), 4, 2), {"residual": True, "activation": torch.nn.ELU()}),
    ("GATConv", (6, 4, 2), {"bias": False, "feat_drop": 0.1, "attn_drop": 0.2}),
    ("GATv2Conv", (6, 4, 2), {}),
    ("GATv2Conv", (6, 4, 2), {"share_weights": True, "bias": False, "residual": True}),
    ("GATv2Conv", (8, 4, 2), {"residual": True, "activation": torch.nn.ELU()}),
    ("HGTConv", (6, 3, 2, 2, 3), {}),
    ("HGTConv", (6, 4, 2, 2, 3), {"use_norm": True}),
]
LAYERS = pytest.mark.parametrize(
    ("name", "args", "options"), CASES, ids=lambda x: x if type(x) is str else ""
)
PREAMBLE = """
import pickle, sys, warnings
import torch, dfgnn
assert not {"dgl", "torch_geometric"} & set(sys.modules)
"""


@pytest.fixture(scope="session")
def run(plain_python):
    return lambda code, *args: plain_python(PREAMBLE + code, *args)


@LAYERS
def test_is_dgls(name, args, options):
    cls = getattr(dfgnn.nn.dgl, name)
    assert issubclass(cls, getattr(dgl.nn, name))
    torch.manual_seed(5)
    ours = cls(*args, **options)
    torch.manual_seed(5)
    theirs = getattr(dgl.nn, name)(*args, **options)
    assert repr(ours) == repr(theirs)
    # The same attributes with the same values, and the same parameters in the same order.
    assert vars(ours).keys() == vars(theirs).keys()
    for key, value in vars(theirs).items():
        if isinstance(value, (int, float, tuple, str)):
            assert vars(ours)[key] == value, key
    assert ours._parameters.keys() == theirs._parameters.keys()
    assert ours._buffers.keys() == theirs._buffers.keys() and ours._modules.keys() == theirs._modules.keys()
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    assert all(torch.equal(x, state[key]) for key, x in ours.state_dict().items())
    if hasattr(theirs, "reset_parameters"):
        for layer in (ours, theirs):
            torch.manual_seed(6)
            layer.reset_parameters()
        assert all(torch.equal(x, theirs.state_dict()[key]) for key, x in ours.state_dict().items())
    for duplicate in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(duplicate) is cls and repr(duplicate) == repr(theirs)
    theirs.load_state_dict(ours.state_dict())


def test_accelerate_and_patch_use_it():
    layer = dgl.nn.GATConv(3, 4, 2)
    dfgnn.accelerate(layer)
    with dfgnn.patch("dgl"):
        assert type(layer) is dgl.nn.GATConv is dfgnn.nn.dgl.GATConv


def test_names_of_both():
    layer = dfgnn.nn.dgl.GATConv((3, 5), 4, 2, residual=True)
    assert (layer.num_heads, layer.out_feats, layer.negative_slope) == (2, 4, 0.2)
    assert (layer._in_src_feats, layer._in_dst_feats, layer.has_explicit_bias) == (3, 5, False)
    layer.negative_slope = 0.5
    layer.set_allow_zero_in_degree(True)
    assert layer.leaky_relu.negative_slope == 0.5 and layer._allow_zero_in_degree is True


@LAYERS
def test_without_dgl(name, args, options, without_dgl):
    theirs = getattr(dgl.nn, name)(*args, **options)
    keys, text, state = without_dgl[CASES.index((name, args, options))]
    assert keys == sorted(vars(theirs)) and text == repr(theirs) and state == list(theirs.state_dict())


@pytest.fixture(scope="module")
def without_dgl(tmp_path_factory, run):
    """(sorted attributes, repr, names in the state_dict) of each case, from a process without DGL."""
    path = tmp_path_factory.mktemp("one_class") / "cases.pickle"
    path.write_bytes(pickle.dumps(CASES))
    code = """
sys.modules["dgl"] = None
found = []
with warnings.catch_warnings():
    warnings.simplefilter("error")
    for name, args, options in pickle.load(open(sys.argv[1], "rb")):
        layer = getattr(dfgnn.nn.dgl, name)(*args, **options)
        assert type(layer).__module__ == "dfgnn.nn.dgl"
        found.append((sorted(vars(layer)), repr(layer), list(layer.state_dict())))
open(sys.argv[1], "wb").write(pickle.dumps(found))
"""
    run(code, path)
    return pickle.loads(path.read_bytes())


def test_pickles_go_across(tmp_path, run):
    """A layer pickled with DGL installed loads without it, and the reverse."""
    graph, x = (
        dfgnn.Graph.from_coo(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), num_nodes=3),
        torch.randn(3, 6),
    )
    layers = dfgnn.nn.dgl.GATConv(6, 3, 2, residual=True), dfgnn.nn.dgl.HGTConv(6, 3, 2, 1, 1)
    model = torch.nn.ModuleList(layers)
    types = torch.zeros(3, dtype=torch.int64)
    model.eval()
    expected = model[0](graph, x), model[1](graph, x, types, types)
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((model, x, expected)))
    code = """
sys.modules["dgl"] = None
model, x, expected = pickle.load(open(sys.argv[1], "rb"))
graph = dfgnn.Graph.from_coo(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), num_nodes=3)
types = torch.zeros(3, dtype=torch.int64)
torch.testing.assert_close((model[0](graph, x), model[1](graph, x, types, types)), expected)
open(sys.argv[1], "wb").write(pickle.dumps(model))
"""
    run(code, path)
    back = pickle.loads(path.read_bytes())
    assert isinstance(back[0], dgl.nn.GATConv) and isinstance(back[1], dgl.nn.HGTConv)
    assert torch.equal(back[0](graph, x), expected[0])


@pytest.mark.parametrize("error", ["ImportError", "FileNotFoundError", "AttributeError"])
def test_a_dgl_that_cannot_be_imported(error, tmp_path, run):
    (tmp_path / "dgl").mkdir()
    (tmp_path / "dgl" / "__init__.py").write_text(f"raise {error}('made for another torch')\n")
    code = """
sys.path.insert(0, sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    layer = dfgnn.nn.dgl.GATConv(3, 4, 2)
(warning,) = [w for w in caught if "made for another torch" in str(w.message)]
assert sys.argv[2] in str(warning.message) and warning.category is RuntimeWarning
graph = dfgnn.Graph.from_coo(torch.tensor([0, 1]), torch.tensor([1, 0]), num_nodes=2)
assert layer(graph, torch.randn(2, 3)).shape == (2, 2, 4)
print(dfgnn.accelerate(torch.nn.Sequential(layer)))
"""
    run(code, tmp_path, error)


def test_the_class_is_made_once(run):
    """Whichever thread asks first."""
    code = """
import threading
found, names = [], dfgnn.nn.dgl.__all__
def work():
    found.append([getattr(dfgnn.nn.dgl, name) for name in names])
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(found) == 8 and all(classes == found[0] for classes in found)
assert isinstance(found[0][0](), sys.modules["dgl"].nn.AGNNConv)
"""
    run(code)


def test_unknown_names():
    with pytest.raises(AttributeError, match="has no attribute 'GCNConv'"):
        _ = dfgnn.nn.dgl.GCNConv
    assert {"GATConv", "HGTConv"} <= set(dir(dfgnn.nn.dgl))
    where = "torch_geometric's layers are in dfgnn.nn.pyg, DGL's in dfgnn.nn.dgl"
    with pytest.raises(AttributeError, match=f"has no attribute 'GATConv'; {where}"):
        _ = dfgnn.nn.GATConv
    assert {"GraphTransformerLayer", "dgl", "pyg"} <= set(dir(dfgnn.nn)) and "GATConv" not in dir(dfgnn.nn)
