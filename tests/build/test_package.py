"""What `import dfgnn` does and does not do, and what the compiled libraries depend on."""

import re
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from covering import exhaustive

import dfgnn
from dfgnn.runtime import library as _library

LIBRARIES = sorted(_library.DIRECTORY.glob("libdfgnn_*.so"))


def undefined_symbols(library):
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    lines = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    )
    return [line.split()[-1] for line in lines.stdout.splitlines()]


def test_import_is_light():
    """Only torch, what torch imports, and the standard library: what is optional is imported on use."""
    code = """
import sys, torch
before = set(sys.modules)
import dfgnn
print(*set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert packages == {"dfgnn"}


IMPORTS = """
import importlib, os, sys, warnings
# What torch >= 2.14 says of torch_geometric's own import.
warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
for name in [name for name in os.environ if name.startswith("DGL") or name == "XDG_CONFIG_HOME"]:
    del os.environ[name]
if {blocked}:
    sys.modules["dgl"] = None
import dfgnn, dfgnn.nn
assert "torch_geometric" not in sys.modules and dfgnn.nn.pyg.GATConv
import dfgnn.nn, dfgnn.nn.pyg, dfgnn.compat
for name in dfgnn.nn.dgl.__all__:
    getattr(dfgnn.nn.dgl, name)
dfgnn.nn.dgl.GATConv(4, 4, 2)
assert "DGLBACKEND" not in os.environ
"""


@pytest.mark.parametrize(
    "blocked", [False, pytest.param(True, marks=exhaustive)], ids=["as-installed", "without-dgl"]
)
def test_import_neither_prints_nor_writes(plain_python, tmp_path, blocked):
    """Importing and building layers says nothing and leaves nothing behind, with DGL installed or not."""
    done = plain_python(IMPORTS.format(blocked=blocked), cwd=tmp_path, environment={"HOME": str(tmp_path)})
    assert done.stdout + done.stderr == ""
    assert list(tmp_path.rglob("*")) == []


@exhaustive
def test_a_backend_that_was_named_is_kept(plain_python, tmp_path):
    pytest.importorskip("dgl", reason="DGL is not installed")
    code = "import os, dfgnn\ndfgnn.nn.dgl.GATConv(4, 4, 2)\nassert os.environ['DGLBACKEND'] == 'pytorch'\n"
    plain_python(code, cwd=tmp_path, environment={"DGLBACKEND": "pytorch", "HOME": str(tmp_path)})


def test_scripts_run_without_numpy():
    """Which torch does not ask for."""
    code = "import sys; sys.modules['numpy'] = None; import dfgnn.run.command"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_the_benchmark_says_that_it_needs_numpy(plain_python):
    code = "import sys; sys.modules['numpy'] = None; import dfgnn.bench"
    result = plain_python(code, status=1)
    assert result.stderr.rstrip().endswith("needs NumPy: pip install numpy (the extra 'bench' has all of it)")


def test_public_names():
    assert set(dfgnn.__all__) <= set(dir(dfgnn))
    for name in dfgnn.__all__:
        assert getattr(dfgnn, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dfgnn.no_such_name


def test_version_is_that_of_the_distribution():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", dfgnn.__version__)
    assert metadata.version("dfgnn") == dfgnn.__version__


def test_there_is_a_cpu_library():
    assert "libdfgnn_cpu.so" in [library.name for library in LIBRARIES]


def test_the_cpu_library_loads_on_older_systems():
    """It needs at most glibc 2.28 and the libstdc++ of GCC 8: manylinux_2_28 (csrc/portable). The CUDA
    library is not checked: the CUDA runtime in it asks for the glibc of the system that compiles it."""
    (library,) = (path for path in LIBRARIES if path.name == "libdfgnn_cpu.so")
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
    versions = [re.fullmatch(r".*@(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", x) for x in undefined_symbols(library)]
    assert any(versions)
    for match in filter(None, versions):
        assert tuple(map(int, match[2].split("."))) <= newest[match[1]], match[0]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_libraries_use_the_stable_abi_only(library):
    """Neither the C++ symbols of torch, which change with its version, nor Python's."""
    symbols = undefined_symbols(library)
    assert any(symbol.startswith(("aoti_torch_", "torch_")) for symbol in symbols)
    unstable = re.compile(r"_ZN?K?(2at|3c10|5torch)|_ZT[ISV]N(2at|3c10|5torch)|_?Py[A-Z_]")
    assert [symbol for symbol in symbols if unstable.match(symbol)] == []


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_libraries_find_torch_and_only_torch(library):
    """torch's libraries are needed by name, not by path: they are loaded already. cudart is linked in."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    system = {
        name
        for name in needed
        if re.match(r"(libstdc\+\+|libm|libgcc_s|libc|libdl|librt|ld-linux.*)\.so", name)
    }
    expected = {"libtorch_cpu.so", "libtorch_cuda.so"} if "cuda" in library.name else {"libtorch_cpu.so"}
    assert needed - system - {"libpthread.so.0"} == expected
    assert "RUNPATH" not in dynamic
    assert "RPATH" not in dynamic


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_on_a_torch_without_cuda_is_refused():
    with pytest.raises(RuntimeError, match="no CUDA support. Install a CUDA build of torch"):
        _library.require_cuda_library()


@pytest.mark.gpu
def test_the_cuda_library_is_usable():
    _library.require_cuda_library()


def test_missing_cpu_library_says_how_to_build(tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "DIRECTORY", tmp_path)
    with pytest.raises(ImportError, match="python setup.py build_native"):
        _library._load_cpu()


def test_library_that_does_not_load_names_the_torch_version(tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "DIRECTORY", tmp_path)
    (tmp_path / "libdfgnn_cpu.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match=re.escape(torch.__version__)):
        _library._load_cpu()


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "built without CUDA"), (b"not a library", "does not load into torch")]
)
def test_cuda_library_missing_or_broken(content, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "DIRECTORY", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if content:
        (tmp_path / "libdfgnn_cuda.so").write_bytes(content)
    monkeypatch.setattr(_library, "_cuda_problem", _library._load_cuda())
    with pytest.raises(RuntimeError, match=problem):
        _library.require_cuda_library()
