"""The choices of the native build; that it compiles is shown by every other test."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build_native():
    spec = importlib.util.spec_from_file_location("build_native", ROOT / "build_native.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arch_list", "expected"),
    [
        ("9.0", ["arch=compute_90,code=sm_90"]),
        ("9.0a;10.0+PTX", ["arch=compute_90a,code=sm_90a", "arch=compute_100,code=[sm_100,compute_100]"]),
        ("8.6 12.0f", ["arch=compute_86,code=sm_86", "arch=compute_120f,code=sm_120f"]),
    ],
)
def test_arch_flags(build_native, arch_list, expected):
    assert build_native.arch_flags(arch_list) == [f"-gencode={code}" for code in expected]


@pytest.mark.parametrize("arch_list", ["Hopper", "90", "9.0-PTX", "", ";"])
def test_arch_flags_refuse(build_native, arch_list):
    with pytest.raises(build_native.BuildError, match="TORCH_CUDA_ARCH_LIST"):
        build_native.arch_flags(arch_list)


@pytest.mark.parametrize(
    ("torch_has_cuda", "for_wheel", "choice", "expected"),
    [
        (True, False, "", True),
        (False, False, "", False),  # it could not be loaded
        (False, True, "", True),  # the wheel may go anywhere
        (False, False, "1", True),
        (True, True, "0", False),
    ],
)
def test_when_cuda_is_built(build_native, tmp_path, monkeypatch, torch_has_cuda, for_wheel, choice, expected):
    toolkit, torch = tmp_path / "cuda", tmp_path / "torch"
    for path, exists in ((toolkit / "bin/nvcc", True), (torch / "lib/libtorch_cuda.so", torch_has_cuda)):
        path.parent.mkdir(parents=True)
        if exists:
            path.touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("DFGNN_CUDA", choice)
    assert bool(build_native.cuda_compiler(torch, for_wheel)) == expected


def test_cuda_that_was_asked_for_is_never_left_out(build_native, tmp_path, monkeypatch):
    monkeypatch.setenv("DFGNN_CUDA", "1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(build_native.BuildError, match="CUDA_HOME is"):
        build_native.cuda_compiler(tmp_path, for_wheel=True)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build_native.BuildError, match="nvcc is missing"):
        build_native.cuda_compiler(tmp_path, for_wheel=True)
    monkeypatch.setenv("DFGNN_CUDA", "yes")
    with pytest.raises(build_native.BuildError, match='got "yes"'):
        build_native.cuda_compiler(tmp_path, for_wheel=True)


def test_every_source_is_compiled(build_native, tmp_path):
    """Sources are found by their place; one that lies elsewhere would never be linked."""
    ninja = build_native.NinjaFile()
    build_native.add_cpu(ninja, ["c++"], tmp_path, [])
    build_native.add_cuda(ninja, ["c++"], tmp_path, [], "nvcc")
    statements = "\n".join(ninja.text)
    existing = {
        str(path.relative_to(ROOT)) for suffix in ("cpp", "cu") for path in ROOT.glob(f"csrc/**/*.{suffix}")
    }
    assert existing
    assert {path for path in existing if f": compile {path}\n" not in statements} == set()
