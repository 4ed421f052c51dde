"""Layers of dfgnn.nn.dgl are subclasses of DGL's where DGL is installed, and elsewhere the same without that
base."""

import pickle

import pytest
import torch
from of_dgl import SUBJECTS, dgl

import dfgnn

# With every option that changes what a layer consists of.
CASES = [(subject.name, *each) for subject in SUBJECTS for each in subject.constructors()]
PREAMBLE = """
import pickle, sys, warnings
import torch, dfgnn
assert not {"dgl", "torch_geometric"} & set(sys.modules)
"""


@pytest.fixture(scope="session")
def run(plain_python):
    return lambda code, *args: plain_python(PREAMBLE + code, *args)


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


def test_without_dgl(without_dgl):
    for (name, args, options), (keys, text, state) in zip(CASES, without_dgl, strict=True):
        theirs = getattr(dgl.nn, name)(*args, **options)
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
