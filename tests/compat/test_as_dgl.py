"""A script that imports dgl, with DGL and without it: `install_as_dgl` and `dfgnn.run --as-dgl`."""

import importlib.util
from pathlib import Path

import pytest
import torch
from covering import exhaustive

SCRIPT = Path(__file__).with_name("as_dgl_script.py")
SECTIONS = ["se3_attention", "temporal_blocks", "simple_hgn", "typed_layers", "samples_and_batches",
            "graph_conv"]  # fmt: skip
HAS_DGL = importlib.util.find_spec("dgl") is not None


@pytest.fixture
def dfgnn_run(plain_python):
    """`dfgnn.run` of a process that has not imported dgl."""
    return plain_python.forks


@pytest.fixture(scope="module")
def ours(tmp_path_factory, plain_python):
    folder = tmp_path_factory.mktemp("ours")
    done = plain_python.forks("--as-dgl", "--force", SCRIPT, folder / "found.pt", cwd=folder)
    assert "2 x dfgnn.nn.dgl.GATConv: dfgnn" in done.stderr
    return torch.load(folder / "found.pt")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, plain_python):
    if not HAS_DGL:
        pytest.skip("dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
    folder = tmp_path_factory.mktemp("theirs")
    plain_python(SCRIPT.read_text(), folder / "found.pt", cwd=folder)
    return torch.load(folder / "found.pt")


def test_attention_of_its_own_is_named(dfgnn_run, tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import dgl, torch\n"
        "from dgl.ops import edge_softmax\n"
        "g = dgl.graph((torch.tensor([0, 1]), torch.tensor([1, 1])))\n"
        "edge_softmax(g, torch.zeros(2, 1))\n"
    )
    done = dfgnn_run("--as-dgl", "--force", script, cwd=tmp_path)
    assert "own.py:4: dgl.ops.edge_softmax" in done.stderr, done.stderr
    assert "what fits: dfgnn.functional.score_attention" in done.stderr


def test_the_script_is_compared_as_a_whole(ours):
    assert list(ours) == SECTIONS


@pytest.mark.parametrize("section", SECTIONS)
def test_same_as_dgl(ours, theirs, section):
    torch.testing.assert_close(ours[section], theirs[section], rtol=1e-4, atol=1e-5)


def test_an_equivariant_attention_block_is_that_in_plain_pytorch(ours):
    found = ours["se3_attention"]
    torch.testing.assert_close(found["out"], found["plain"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["grads"], found["plain_grads"], rtol=1e-4, atol=1e-5)


def test_it_is_refused_where_dgl_is_installed(tmp_path, dfgnn_run):
    folder = tmp_path / "dgl"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (tmp_path / "script.py").write_text("import dgl\nprint(dgl.__version__)\n")
    for options, code, text in (([], 2, "DGL is installed"), (["--force"], 0, "2.1.0+dfgnn")):
        done = dfgnn_run("--as-dgl", *options, "script.py", cwd=tmp_path, path=[tmp_path])
        assert done.returncode == code and text in done.stdout + done.stderr


def test_it_is_undone(plain_python):
    plain_python("""
import sys
import dfgnn.compat
before = "dgl" in sys.modules, list(sys.meta_path)
sys.modules["dgl"] = None  # hides one that is installed
with dfgnn.compat.install_as_dgl() as first:
    import dgl, dgl.nn.pytorch as dglnn
    second = dfgnn.compat.install_as_dgl()
    assert dgl.graph is dfgnn.compat.graph and "heterograph" in dir(dgl)
    assert dglnn.GATConv is dfgnn.nn.dgl.GATConv and "active" in repr(first)
import dgl.sparse  # the second holds
assert dgl.sparse.spmatrix is dfgnn.compat.sparse.spmatrix
import dgl.heterograph
assert callable(dgl.heterograph)
second.undo(), second.undo()
assert not [name for name in sys.modules if name.startswith("dgl.")] and sys.modules["dgl"] is None
assert sys.meta_path == before[1]
try:
    import dgl
except ImportError:
    pass
else:
    raise AssertionError("dgl is still there")
""")


MISSING = [
    ("from dgl import nothing", ImportError, "dgl.nothing: dfgnn stands for DGL here and has no such name"),
    ("import dgl; dgl.nothing", AttributeError, "dgl.nothing: dfgnn stands for DGL here"),
    ("import dgl.graphbolt", ImportError, "dfgnn.sampling samples mini-batches"),
    ("from dgl.distributed import DistGraph", ImportError, "dfgnn.distributed shares a graph"),
    ("from dgl.nn import NNConv", ImportError, "dgl.nn.NNConv: dfgnn stands for DGL here"),
    ("import dgl; dgl.graph(([0], [1])).nothing", AttributeError, "DGLGraph has no attribute 'nothing'"),
    ("import dgl; dgl.sparse.identity((2, 2)).sample", AttributeError, "no attribute 'sample'"),
]


def test_missing_names_say_so(plain_python):
    lines = ["import dfgnn.compat", "dfgnn.compat.install_as_dgl(force=True)"]
    for statement, error, text in MISSING:
        lines += ["try:", f"    exec({statement!r})", f"except {error.__name__} as error:"]
        lines += [f"    assert {text!r} in str(error) and 'docs/dgl_without_dgl.md' in str(error), error"]
        lines += ["else:", f"    raise AssertionError({statement!r})"]
    plain_python("\n".join(lines))


@exhaustive
def test_other_interpreters_of_the_script_have_it(tmp_path, dfgnn_run):
    (tmp_path / "script.py").write_text("""
import dgl
import torch.multiprocessing as processes

def work(queue):
    queue.put(dgl.__version__)

if __name__ == "__main__":
    context = processes.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    assert queue.get(timeout=200) == dgl.__version__ == "2.1.0+dfgnn"
    process.join()
""")
    done = dfgnn_run("--as-dgl", "--force", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_options_that_contradict_each_other(tmp_path, dfgnn_run):
    (tmp_path / "script.py").write_text("")
    for words, said in (
        (["--as-dgl", "--impl", "dgl"], "--impl dgl: expected another one with --as-dgl"),
        (["--force"], "expected --as-dgl with it"),
    ):
        done = dfgnn_run(*words, "script.py", cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr


def test_modules_of_compat_are_found_at_their_first_use():
    """Modules of dfgnn.compat are found below ``dgl`` as DGL's own are; the error for a missing name says
    where to read."""
    import dfgnn.compat as dgl

    assert dgl.nn.GraphConv and dgl.ops.gspmm and dgl.dataloading.NeighborSampler
    with pytest.raises(AttributeError, match=r"dgl\.nope: .*dgl_without_dgl"):
        dgl.nope  # noqa: B018
    with pytest.raises(ImportError):
        from dfgnn.compat import nope  # noqa: F401
