"""The choices of the native build; that it compiles is shown by every other test."""

import os
import shutil
import signal
import subprocess
import sys
import time
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
            path.write_text("#!/bin/sh\necho release 13.0,\n")
            path.chmod(0o755)
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


def toolkit(folder, release):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return str(nvcc)


def test_nvcc_that_is_too_old(build_native, tmp_path, monkeypatch):
    monkeypatch.setenv("DFGNN_CUDA", "1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    toolkit(tmp_path, "12.4")
    with pytest.raises(build_native.BuildError, match=r"is of CUDA 12\.4, and at least 12\.5 is needed"):
        build_native.cuda_compiler(tmp_path)


@pytest.mark.parametrize(("its", "said"), [("'12.8'", True), ("'13.2'", False), ("None", False)])
def test_nvcc_of_another_major_version(build_native, tmp_path, capsys, its, said):
    (tmp_path / "version.py").write_text(f"cuda: Optional[str] = {its}\nhip: Optional[str] = None\n")
    build_native.say_what_differs(toolkit(tmp_path, "13.0"), tmp_path)
    assert ("nvcc is of CUDA 13, torch of CUDA 12.8: that works" in capsys.readouterr().out) == said


def test_code_for_several_architectures_is_compressed(build_native, tmp_path, monkeypatch):
    def flags(release, archs):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", archs)
        ninja = build_native.NinjaFile()
        build_native.add_cuda(ninja, ["c++"], tmp_path, [], toolkit(tmp_path / release, release))
        return "".join(ninja.text)

    assert "--compress-mode=size" in flags("13.0", "8.0;9.0")
    assert "--compress-mode=size" not in flags("13.0", "9.0")
    assert "--compress-mode=size" not in flags("12.6", "8.0;9.0")  # which does not know it


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
    """The engine includes nothing of torch, so that it can be compiled while torch is being installed."""
    engine, whole = build_native.NinjaFile(), build_native.NinjaFile()
    build_native.add_engine(engine, ["c++"], [])
    build_native.add_cpu(whole, ["c++"], Path("torch"), [])
    assert set(engine.text) <= set(whole.text)
    assert "torch" not in "".join(engine.text)


def test_every_source_is_compiled(build_native, tmp_path):
    """The build finds sources by glob patterns; one in another folder would never be compiled or linked."""
    ninja = build_native.NinjaFile()
    build_native.add_cpu(ninja, ["c++"], tmp_path, [])
    build_native.add_cuda(ninja, ["c++"], tmp_path, [], "nvcc")  # for one architecture: nvcc is not called
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


def test_setuptools_that_is_too_old_is_told(tmp_path):
    (tmp_path / "setuptools").mkdir()
    (tmp_path / "setuptools/__init__.py").write_text("__version__ = '65.5.0'")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and "here is 65.5.0: pip install 'setuptools>=77.0.3'" in done.stderr


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


@pytest.fixture
def small_tree(tmp_path):
    """A function that starts a build of three small files, by a compiler that takes so many seconds for each
    and notes when it begins and ends; and a function that returns these notes."""
    for name in ("cpu/one", "cpu/kernels/two", "portable/three"):
        path = tmp_path / "csrc" / f"{name}.cpp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"int f_{path.stem}() {{ return 1; }}\n")
    shutil.copy(ROOT / "build_native.py", tmp_path)
    compiler = tmp_path / "compiler"
    notes_file, cxx = tmp_path / "notes", shutil.which("g++") or shutil.which("c++")
    compiler.write_text(
        f"#!/bin/sh\nfor last; do :; done\necho begin >> {notes_file}\necho half > $last\n"
        f'sleep $SECONDS_EACH\n{cxx} "$@" && echo end >> {notes_file}\n'
    )
    compiler.chmod(0o755)

    def start(seconds):
        changes = {
            "CXX": str(compiler),
            "DFGNN_CPU_ISAS": "native",
            "SECONDS_EACH": str(seconds),
            "MAX_JOBS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "build_native.py"],
            cwd=tmp_path,
            env={**os.environ, **changes},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def notes():
        return notes_file.read_text().split() if notes_file.exists() else []

    return start, notes


def _wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("nothing happened within 30 seconds")


def test_two_builds_at_once(small_tree):
    """The second one waits, says so, and finds nothing left to do."""
    start, notes = small_tree
    first = start(1)
    _wait_for(notes)
    second = start(0)
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert "waiting for another build" in outputs[1] and "no work to do" in outputs[1]
    assert notes() == ["begin", "end"] * 3


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_an_interrupted_build_is_continued(small_tree, how):
    """What was half written is compiled again. A compiler that survived a killed build is waited for."""
    start, notes = small_tree
    first = start(2)
    _wait_for(lambda: notes().count("begin") == 2)
    os.killpg(first.pid, how)
    first.communicate(timeout=60)
    assert first.returncode != 0
    second = start(0)
    output = second.communicate(timeout=60)[0]
    assert second.returncode == 0, output
    # The file that was finished before is kept; the one that was interrupted begins a second time.
    survived = ["end"] if how == signal.SIGKILL else []
    assert notes() == ["begin", "end", "begin", *survived, *["begin", "end"] * 2]
