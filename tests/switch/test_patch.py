"""patch: scripts that construct DGL's or torch_geometric's layers get dfgnn's, for as long as they shall."""

import copy
import inspect
import pickle
import sys
import threading
import types
import warnings

import pytest
import torch

import dfgnn

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
pyg = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")

PLACES = {"dgl": (dgl.nn, dgl.nn.pytorch, dgl.nn.pytorch.conv, dgl.nn.conv), "pyg": (pyg.nn, pyg.nn.conv)}
NAMES = {
    "dgl": ["AGNNConv", "DotGatConv", "EGATConv", "EdgeGATConv", "GATConv", "GATv2Conv", "HGTConv"],
    "pyg": [
        "AGNNConv", "GATConv", "GATv2Conv", "HGTConv", "RGATConv", "SuperGATConv", "TransformerConv"
    ],
}  # fmt: skip
UPSTREAM = {
    library: {name: getattr(PLACES[library][0], name) for name in names} for library, names in NAMES.items()
}
LIBRARIES = pytest.mark.parametrize("library", ["dgl", "pyg"])


def is_patched(library):
    """Whether the names of a library stand for dfgnn's classes; all of them, everywhere, or none."""
    found = {
        vars(place)[name] is not cls for name, cls in UPSTREAM[library].items() for place in PLACES[library]
    }
    assert len(found) == 1
    return found.pop()


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    assert not is_patched("dgl") and not is_patched("pyg")


@LIBRARIES
def test_names(library):
    with dfgnn.patch(library):
        assert is_patched(library)
        for name, cls in UPSTREAM[library].items():
            ours = getattr(PLACES[library][0], name)
            assert ours.__module__.startswith(f"dfgnn.nn.{library}")
            assert issubclass(ours, cls) and ours.__name__ == name
            assert all(vars(place)[name] is ours for place in PLACES[library])
            assert getattr(sys.modules[cls.__module__], name) is cls
    assert not is_patched(library)


@LIBRARIES
def test_as_a_call(library):
    patch = dfgnn.patch(library)
    assert is_patched(library) and "active" in repr(patch)
    patch.undo()
    assert not is_patched(library) and "undone" in repr(patch)
    patch.undo()
    assert not is_patched(library)


def test_the_other_library_is_left_alone():
    with dfgnn.patch("dgl"):
        assert not is_patched("pyg")
        with dfgnn.patch("pyg"):
            assert is_patched("dgl") and is_patched("pyg")
        assert is_patched("dgl") and not is_patched("pyg")


@LIBRARIES
def test_nested(library):
    with dfgnn.patch(library):
        with dfgnn.patch(library) as inner:
            pass
        assert is_patched(library)
        inner.undo()  # undone a second time, which must not undo the outer patch
        assert is_patched(library)
    assert not is_patched(library)


@LIBRARIES
def test_undone_in_any_order(library):
    first, second = dfgnn.patch(library), dfgnn.patch(library)
    first.undo()
    assert is_patched(library)
    second.undo()
    assert not is_patched(library)


def test_threads():
    def work():
        for _ in range(5):
            with dfgnn.patch("dgl"):
                if not is_patched("dgl"):
                    errors.append("not patched")

    errors = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    with dfgnn.patch("dgl"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


@LIBRARIES
def test_missing_library(library, plain_python):
    package = {"dgl": "dgl", "pyg": "torch_geometric"}[library]
    code = f"""
import sys, dfgnn
sys.modules[{package!r}] = None
try:
    dfgnn.patch({library!r})
except ImportError as error:
    print(error)
"""
    assert plain_python(code).stdout.startswith(f"patch: library: expected {package} to be installed")


# ---- layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@LIBRARIES
def test_copies(library, duplicate):
    before = PLACES[library][0].GATConv(3, 4, 2)
    with dfgnn.patch(library):
        during = PLACES[library][0].GATConv(3, 4, 2)
        assert type(duplicate(before)) is type(before) and type(duplicate(during)) is type(during)
    assert type(duplicate(before)) is type(before) and type(duplicate(during)) is type(during)


def test_subclasses_that_are_made_while_it_holds():
    with dfgnn.patch("dgl"):

        class Own(dgl.nn.GATConv):
            def __init__(self):
                super().__init__(6, 4, 2)

        class Old(dgl.nn.GATConv):
            def __init__(self):
                super(Old, self).__init__(6, 4, 2)  # noqa: UP008

    g, x = dgl.add_self_loop(dgl.rand_graph(20, 60)), torch.randn(20, 6)
    for cls in (Own, Old):
        layer = cls()
        theirs = dgl.nn.GATConv(6, 4, 2)
        theirs.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(g, x), theirs(g, x))


# ---- names that were imported before ---------------------------------------------------------------------


@pytest.fixture
def user_module():
    """A module of a program that imported layers by name, and holds one where no name is looked up."""
    module = types.ModuleType("some_program")
    code = """
from dgl.nn import GATConv
from torch_geometric.nn import GATConv as PyG, GCNConv, HGTConv
from torch_geometric.nn.conv.gatv2_conv import GATv2Conv

LAYERS = {"gat": GATConv}
other = 3

def build():
    return GATConv(3, 4, 2), PyG(3, 4)

def build_by_default(cls=PyG):
    return cls(3, 4)

def build_from_dict():
    return LAYERS["gat"](3, 4, 2)
"""
    sys.modules["some_program"] = module
    exec(code, vars(module))
    yield module
    del sys.modules["some_program"]


def is_ours(layer):
    return type(layer).__module__.startswith("dfgnn.")


def test_names_imported_before(user_module):
    before = dict(vars(user_module))
    with dfgnn.patch("dgl"):
        gat, gatv = user_module.build()
        assert is_ours(gat) and not is_ours(gatv)
        with dfgnn.patch("pyg"):
            assert all(map(is_ours, user_module.build()))
            assert is_ours(user_module.GATv2Conv(3, 4)) and user_module.HGTConv is pyg.nn.HGTConv
            assert user_module.GCNConv is before["GCNConv"] and before["LAYERS"] == user_module.LAYERS
        assert user_module.PyG is before["PyG"] and is_ours(user_module.build()[0])
    assert vars(user_module) == before
    assert not any(map(is_ours, user_module.build()))


def test_names_in_main(plain_python):
    plain_python("""
import warnings
warnings.simplefilter("error", UserWarning)
from torch_geometric.nn import GATConv
import dfgnn, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GATConv(3, 4)

before = GATConv
with dfgnn.patch("pyg"):
    model = Net()
assert type(model.conv).__module__ == "dfgnn.nn.pyg.gat" and GATConv is before
""")


def test_names_bound_meanwhile_stay(user_module):
    """Undoing gives back what the patch has changed, and nothing else."""
    with dfgnn.patch("dgl"):
        user_module.late = dgl.nn.GATv2Conv
        user_module.GATConv = str
    assert user_module.GATConv is str and is_ours(user_module.late(3, 4, 2))


def test_nested_patches_of_names(user_module):
    first = dfgnn.patch("dgl")
    user_module.again = UPSTREAM["dgl"]["DotGatConv"]
    second = dfgnn.patch("dgl")
    assert is_ours(user_module.again(3, 4, 2))
    first.undo()
    assert is_ours(user_module.build()[0]) and is_ours(user_module.again(3, 4, 2))
    second.undo()
    assert not is_ours(user_module.build()[0]) and user_module.again is UPSTREAM["dgl"]["DotGatConv"]


def test_what_names_do_not_reach(user_module):
    """Classes in a dictionary and in a default argument, and one's own modules that hold them."""
    constructors = {cls: vars(cls)["__init__"] for classes in UPSTREAM.values() for cls in classes.values()}
    with dfgnn.patch("dgl"), dfgnn.patch("pyg"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layers = user_module.build_from_dict(), user_module.build_by_default()
            assert all(map(is_ours, layers)) and type(layers[0]) is type(user_module.build()[0])
            own = type("Own", (UPSTREAM["pyg"]["GATConv"],), {"__module__": __name__})(3, 4)
            assert type(own).__mro__[1] is UPSTREAM["pyg"]["GATConv"]
            user_module.build()
        assert all(type(copy.deepcopy(layer)) is type(layer) for layer in layers)
        assert list(inspect.signature(UPSTREAM["dgl"]["AGNNConv"]).parameters) == [
            "init_beta", "learn_beta", "allow_zero_in_degree"
        ]  # fmt: skip
    assert all(vars(cls)["__init__"] is construct for cls, construct in constructors.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_ours(user_module.build_from_dict())


def test_attentive_fp():
    """AttentiveFP constructs its first layer in the module that defines the layer's class, where patch leaves
    the name of the class as it is."""
    from torch_geometric.nn.models import attentive_fp

    def build():
        torch.manual_seed(2)
        return attentive_fp.AttentiveFP(6, 8, 4, edge_dim=3, num_layers=2, num_timesteps=2).eval()

    upstream, plain = attentive_fp.GATEConv, build()
    with dfgnn.patch("pyg"):
        model = build()
        assert attentive_fp.GATEConv is upstream
        assert all(map(is_ours, (model.gate_conv, *model.atom_convs, model.mol_conv)))
        again = pickle.loads(pickle.dumps([plain, model]))
    assert type(again[0].gate_conv) is upstream and is_ours(again[1].gate_conv)
    edge_index, batch = torch.randint(20, (2, 60)), torch.arange(20) // 5
    inputs = torch.randn(20, 6), edge_index, torch.randn(60, 3), batch
    torch.testing.assert_close(model(*inputs), plain(*inputs))
    assert type(build().gate_conv) is upstream


SCRIPT = """
import dgl
import torch
from dgl.nn import GATConv
from dgl.nn.pytorch import GATv2Conv, HeteroGraphConv
from torch_geometric.nn import GATConv as PyGConv
import torch_geometric.nn as gnn

layers = [GATConv(3, 4, 2), GATv2Conv(3, 4, 2), PyGConv(3, 4), gnn.HGTConv(3, 4, (["a"], [("a", "b", "a")]))]
"""


def test_before_the_library_is_imported(plain_python):
    """The first lines of a script, in a process of its own."""
    code = f"import dfgnn\ndfgnn.patch('dgl')\ndfgnn.patch('pyg')\n{SCRIPT}\nprint(*map(type, layers))"
    assert plain_python(code).stdout.count("<class 'dfgnn.nn.") == 4


def test_accelerated_models_and_patches_meet():
    model = torch.nn.Sequential(dgl.nn.GATConv(3, 4, 2))
    with dfgnn.patch("dgl"):
        assert len(dfgnn.accelerate(model).replaced) == 1
        model.append(dgl.nn.GATConv(8, 4, 2))
        assert type(model[0]) is type(model[1])
        assert dfgnn.restore(model) == ["0"]
    assert type(model[0]) is dgl.nn.GATConv and type(model[1]) is not dgl.nn.GATConv
