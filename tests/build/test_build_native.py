"""The choices of the native build; that it compiles is shown by every other test."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
    ("torch_has_cuda", "choice", "expected"),
    [
        (True, "", True),
        (False, "", False),  # torch without CUDA could not load the CUDA library, which takes long to compile
        (False, "1", True),
        (True, "0", False),
    ],
)
def test_when_cuda_is_built(build_native, tmp_path, monkeypatch, torch_has_cuda, choice, expected):
    toolkit, torch = tmp_path / "cuda", tmp_path / "torch"
    for path, exists in ((toolkit / "bin/nvcc", True), (torch / "lib/libtorch_cuda.so", torch_has_cuda)):
        path.parent.mkdir(parents=True)
        if exists:
            path.touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("DFGNN_CUDA", choice)
    assert bool(build_native.cuda_compiler(torch)) == expected


def test_cuda_that_was_asked_for_is_never_left_out(build_native, tmp_path, monkeypatch):
    monkeypatch.setenv("DFGNN_CUDA", "1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(build_native.BuildError, match="CUDA_HOME is"):
        build_native.cuda_compiler(tmp_path)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build_native.BuildError, match="nvcc is missing"):
        build_native.cuda_compiler(tmp_path)
    monkeypatch.setenv("DFGNN_CUDA", "yes")
    with pytest.raises(build_native.BuildError, match='got "yes"'):
        build_native.cuda_compiler(tmp_path)


def test_a_broken_toolkit_matters_only_where_cuda_is_built(build_native, tmp_path, monkeypatch):
    monkeypatch.delenv("DFGNN_CUDA", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build_native.cuda_compiler(tmp_path) is None


def test_what_cuda_takes_is_said(build_native, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0")
    build_native.say_what_cuda_takes(jobs=2)
    said = capsys.readouterr().out
    assert "for 8.0;9.0;10.0, about 15 minutes with 2 at once" in said and "DFGNN_CUDA=0" in said


@pytest.mark.parametrize(
    ("choice", "flags", "expected"),
    [
        (None, "", ["base", "avx2", "avx512"]),
        ("all", "", ["base", "avx2", "avx512"]),
        ("native", "sse2", ["base"]),
        ("native", "sse2 avx2 fma f16c", ["avx2"]),
        ("native", "sse2 avx2 fma f16c avx512f", ["avx2"]),
        ("native", "avx2 fma f16c avx512f avx512bw avx512vl avx512dq", ["avx512"]),
        ("avx512,base", "", ["base", "avx512"]),  # the linker wants base first
    ],
)
def test_instruction_sets(build_native, monkeypatch, choice, flags, expected):
    monkeypatch.setattr(build_native, "TARGET", "x86_64")
    monkeypatch.setattr(build_native, "processor_flags", lambda: set(flags.split()))
    monkeypatch.delenv("DFGNN_CPU_ISAS", raising=False)
    if choice is not None:
        monkeypatch.setenv("DFGNN_CPU_ISAS", choice)
    assert build_native.chosen_isas() == expected
    ninja = build_native.NinjaFile()
    build_native.add_engine(ninja, ["c++"], [])
    applied = " ".join(f"apply({isa})" for isa in reversed(expected))  # best first
    assert f"-DDFGNN_ISAS(apply)={applied}" in "".join(ninja.text)
    for isa in ("base", "avx2", "avx512"):
        assert (f"-DDFGNN_ISA={isa}" in "".join(ninja.text)) == (isa in expected)


@pytest.mark.parametrize(("machine", "choice"), [("x86_64", "avx"), ("aarch64", "avx2")])
def test_instruction_sets_refuse(build_native, monkeypatch, machine, choice):
    monkeypatch.setattr(build_native, "TARGET", machine)
    monkeypatch.setenv("DFGNN_CPU_ISAS", choice)
    with pytest.raises(build_native.BuildError, match=f'DFGNN_CPU_ISAS: expected .* got "{choice}"'):
        build_native.chosen_isas()
    monkeypatch.setenv("DFGNN_CPU_ISAS", "native")
    assert machine == "x86_64" or build_native.chosen_isas() == ["base"]


def test_the_engine_needs_no_torch(build_native):
    """It can thus be compiled while torch is being installed; the library is linked from these objects."""
    engine, whole = build_native.NinjaFile(), build_native.NinjaFile()
    build_native.add_engine(engine, ["c++"], [])
    build_native.add_cpu(whole, ["c++"], Path("torch"), [])
    assert set(engine.text) <= set(whole.text)
    assert "torch" not in "".join(engine.text)


def test_every_source_is_compiled(build_native, tmp_path):
    """The build finds sources by glob patterns; one in another folder would never be compiled or linked."""
    ninja = build_native.NinjaFile()
    build_native.add_cpu(ninja, ["c++"], tmp_path, [])
    build_native.add_cuda(ninja, ["c++"], tmp_path, [], "nvcc")
    statements = "\n".join(ninja.text)
    existing = {
        str(path.relative_to(ROOT)) for suffix in ("cpp", "cu") for path in ROOT.glob(f"csrc/**/*.{suffix}")
    }
    assert existing
    assert {path for path in existing if f": compile {path}\n" not in statements} == set()


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "dfgnn/lib"),
        ({"DFGNN_TARGET": "x86_64"}, "dfgnn/lib"),
        ({"DFGNN_TARGET": "aarch64"}, "build/aarch64"),
        ({"DFGNN_SANITIZE": "address"}, "build/sanitized"),
    ],
)
def test_libraries_that_do_not_load_here_stay_in_their_build_folder(
    monkeypatch, load_build_native, environment, folder
):
    """Libraries for another processor would otherwise replace the ones that this checkout imports."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("DFGNN_TARGET", "DFGNN_SANITIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    module = load_build_native()
    assert ROOT / folder == module.IN_PLACE
    assert module.build.__defaults__[0] == ROOT / folder


def test_links_where_libstdcxx_is_static(build_native, tmp_path):
    """Some toolchains have libstdc++ as an archive alone, which defines what csrc/portable defines, too."""
    cxx = build_native.find_cxx()
    found = subprocess.run([*cxx, "-print-file-name=libstdc++.a"], capture_output=True, text=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip("this compiler has no static libstdc++")
    user = tmp_path / "user.cpp"  # std::string throws by functions of the same member of the archive
    user.write_text("#include <string>\nstd::string f(std::string s) { return s.substr(7).append(s, 8); }\n")
    flags = [*build_native.COMMON, *build_native.HOST, "-shared", "-static-libstdc++", "-Wl,--wrap=log"]
    command = [*cxx, *flags, "csrc/portable/glibc.cpp", str(user), "-o", str(tmp_path / "library.so")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_sources_that_cannot_be_written(build_native, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(build_native.BuildError, match="cannot be written.*copy the sources"):
        build_native.build()


def test_tools_that_are_missing_are_named(build_native, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        build_native.BuildError, match="no C.. compiler found: install g.. or clang.., or set CXX"
    ):
        build_native.find_cxx()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(build_native.BuildError, match="pip install ninja"):
        build_native.find_ninja()
    with pytest.raises(build_native.BuildError, match="torch is not installed"):
        build_native.find_torch()
