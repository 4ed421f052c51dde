"""Compile csrc/ into libdfgnn_cpu.so and libdfgnn_cuda.so with ninja.

Neither library includes Python.h, and both see torch only through its stable ABI, so that one build serves
every Python and every torch >= 2.10. In-place builds and wheels share the objects in build/native.

Environment:
    DFGNN_CUDA            1: build the CUDA library; 0: do not; unset: where the installed torch has CUDA
    CUDA_HOME             the CUDA toolkit; without it, nvcc is taken from PATH
    TORCH_CUDA_ARCH_LIST  GPU architectures, e.g. "9.0;10.0+PTX" (default: 9.0)
    CXX, CXXFLAGS         the C++17 compiler (also nvcc's host compiler) and additional flags
    DFGNN_SANITIZE        sanitizers of GCC, e.g. "address,undefined": the CPU library alone, into
                          build/sanitized (make sanitize, scripts/sanitize_cpu.py)
    DFGNN_CPU_ISAS        what the CPU kernels are compiled for: all (the default), native (the best of this
                          processor alone), or some of base, avx2 and avx512, as in "base,avx2"
    DFGNN_TARGET          aarch64 or x86_64: compile for it on another machine, into build/<target>, with CXX
                          or Debian's cross compiler (make release)
    MAX_JOBS              compilations at once (default: the number of usable cores)

DFGNN_PURE=1 is setup.py's: nothing is compiled. As a program this module compiles the CPU
engine's objects alone, which need neither torch nor setuptools.
"""

import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent
SANITIZERS = os.environ.get("DFGNN_SANITIZE", "")
TARGET = os.environ.get("DFGNN_TARGET") or platform.machine()
CROSS = platform.machine() != TARGET
# Relative to ROOT, like the sources: no local path gets into a binary.
BUILD_DIR = Path("build", "sanitized" if SANITIZERS else TARGET if CROSS else "native")
# What the operators of csrc/torch/schemas.h look like to torch, a line each: all that an installation without
# kernels needs of the libraries. tests/build/test_uncompiled.py compares.
SCHEMAS = ROOT / "csrc/torch/schemas.txt"
# Libraries for another processor or with sanitizers stay in their build folder, because this checkout loads
# its libraries from dfgnn/lib.
IN_PLACE = ROOT / (BUILD_DIR if SANITIZERS or CROSS else "dfgnn/lib")

# The kernels of csrc/cpu/kernels are compiled once per instruction set; the engine picks one when it runs.
ISAS = {
    "base": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": shlex.split(
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512"
    ),
}
COMMON = ["-std=c++17", "-O3", "-Icsrc"]
HOST = ["-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall"]
# Not -ffast-math: infinities and NaNs must behave.
CPU = ["-fno-math-errno", "-ffp-contract=fast"]
# Operators check arguments and call kernels: -O3 brings nothing there, and takes twice as long to compile.
OPERATORS = ("-O1",)
DEFAULT_ARCHS = "9.0"
OLDEST_CUDA = 12, 5  # a launch attribute that older headers lack
CUDA_MINUTES = 10  # about what compiling the CUDA sources for one architecture takes on one core
LINK = ["--exclude-libs=ALL", "--wrap=log"]  # log: csrc/portable
# A cross build has no torch of its target to link with, only a stub library without symbols.
LINK += ["--unresolved-symbols=ignore-all"] if CROSS else ["--no-undefined"]
# The symbols of libtorch_cuda.so that csrc/torch may use. torch without CUDA has no such file, so all builds
# link with a stub of that soname that has these symbols; at run time torch's own library is already loaded.
CUDA_SHIMS = [
    "aoti_torch_create_cuda_guard",
    "aoti_torch_cuda_addmm_out",
    "aoti_torch_cuda_baddbmm_out",
    "aoti_torch_cuda_bmm_out",
    "aoti_torch_cuda_cat",
    "aoti_torch_cuda_guard_set_index",
    "aoti_torch_cuda_mm_out",
    "aoti_torch_delete_cuda_guard",
    "aoti_torch_get_current_cuda_stream",
]

RULES = """\
rule compile
  command = $compiler $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $out
rule link
  command = $compiler -shared -Xlinker --no-as-needed $in -o $out $flags
  description = link $out
"""


WITHOUT_KERNELS = "DFGNN_PURE=1 installs without kernels, where PyTorch's operations compute everything"


class BuildError(RuntimeError):
    """The libraries cannot be built here; the message says what is missing."""


def find_torch() -> Path:
    """The directory of the torch package, found without importing it, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise BuildError(
            "torch is not installed here, and its headers are needed. Install torch >= 2.10, then build "
            "without isolation: pip install --no-build-isolation ."
        )
    return Path(spec.origin).parent


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        if not nvcc.is_file():
            raise BuildError(f"CUDA_HOME is {home}, but there is no {nvcc}")
        return str(nvcc)
    return shutil.which("nvcc")


@functools.cache
def nvcc_release(nvcc: str) -> tuple[int, int]:
    """The version of a CUDA compiler, e.g. (13, 0)."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if not found:
        raise BuildError(f"{nvcc} --version names no release of CUDA: {(done.stdout + done.stderr).strip()}")
    return int(found[1]), int(found[2])


def find_cxx() -> list[str]:
    """$CXX, which may hold arguments or a launcher such as ccache, or the first compiler in PATH."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in (f"{TARGET}-linux-gnu-g++",) if CROSS else ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    wanted = f"g++-{TARGET}-linux-gnu" if CROSS else "g++ or clang++"
    raise BuildError(f"no C++ compiler found: install {wanted}, or set CXX; {WITHOUT_KERNELS}")


def find_ninja() -> str:
    if importlib.util.find_spec("ninja"):
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    path = shutil.which("ninja")
    if path is None:
        raise BuildError("ninja is not installed: pip install ninja")
    return path


def arch_flags(arch_list: str) -> list[str]:
    """nvcc's flags for a TORCH_CUDA_ARCH_LIST such as "9.0a;10.0+PTX"."""
    flags = []
    for arch in arch_list.replace(";", " ").split():
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
        if not match:
            raise BuildError(f'TORCH_CUDA_ARCH_LIST: expected items like "9.0" or "10.0+PTX", got "{arch}"')
        number = "".join(match.group(1, 2, 3))
        code = f"[sm_{number},compute_{number}]" if match[4] else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code={code}")
    if not flags:
        raise BuildError("TORCH_CUDA_ARCH_LIST is empty")
    return flags


def torch_flags(torch: Path) -> list[str]:
    """Flags for torch's headers and the stable ABI of torch 2.10; messages name headers without directory."""
    include = str(torch / "include")
    version = "-DTORCH_TARGET_VERSION=0x020a000000000000"
    return ["-isystem", include, f"-ffile-prefix-map={include}/=", version]


def sources(pattern: str) -> list[Path]:
    """Sources by falling size: ninja starts with the first, and the longest should not be last."""
    found = sorted((ROOT / "csrc").glob(pattern), key=lambda path: (-path.stat().st_size, path))
    return [path.relative_to(ROOT) for path in found]


class NinjaFile:
    """Collects the text of a build.ninja: one statement per object and library, in the order of the calls."""

    def __init__(self):
        self.text = [RULES]

    def edge(self, rule: str, out: Path, inputs: list[Path], compiler: list[str], flags: list[str]) -> Path:
        def escape(path):
            return re.sub(r"([$ :])", r"$\1", str(path))

        self.text.append(f"build {escape(out)}: {rule} {' '.join(map(escape, inputs))}")
        for name, words in (("compiler", compiler), ("flags", flags)):
            self.text.append(f"  {name} = {shlex.join(words).replace('$', '$$')}")
        return out

    def compile(self, folder: str, source: Path, compiler: list[str], flags: list[str]) -> Path:
        out = BUILD_DIR / folder / source.with_suffix(source.suffix + ".o")
        return self.edge("compile", out, [source], compiler, flags)


def sanitizer_flags() -> list[str]:
    """Sanitizer flags for compiler and linker; the first error ends the process."""
    if not re.fullmatch(r"([a-z-]+(,[a-z-]+)*)?", SANITIZERS):
        raise BuildError(f'DFGNN_SANITIZE: expected names such as "address,undefined", got "{SANITIZERS}"')
    return [f"-fsanitize={SANITIZERS}", f"-fno-sanitize-recover={SANITIZERS}"] if SANITIZERS else []


def processor_flags() -> set[str]:
    """This processor's features, by the Linux kernel's names."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def chosen_isas() -> list[str]:
    """The instruction sets that the CPU kernels are compiled for, base first."""
    known = list(ISAS) if TARGET.lower() in ("x86_64", "amd64") else ["base"]
    choice = os.environ.get("DFGNN_CPU_ISAS") or "all"
    if choice == "all":
        return known
    if choice == "native":
        flags = processor_flags()
        return [isa for isa in known if {o[2:] for o in ISAS[isa] if "=" not in o} <= flags][-1:]
    names = choice.split(",")
    if not set(names) <= set(known):
        raise BuildError(f'DFGNN_CPU_ISAS: expected all, native or some of {",".join(known)}, got "{choice}"')
    return [isa for isa in known if isa in names]


def add_engine(ninja: NinjaFile, cxx: list[str], extra: list[str]) -> tuple[list[Path], list[Path]]:
    """The CPU engine, which sees no torch: objects for every processor, then those of kernels, base first."""
    isas = chosen_isas()
    dispatch = [*extra, f"-DDFGNN_ISAS(apply)={' '.join(f'apply({isa})' for isa in reversed(isas))}"]
    kernels = [
        ninja.compile(isa, source, cxx, [*cpu_flags(extra), f"-DDFGNN_ISA={isa}", *ISAS[isa]])
        for isa in isas
        for source in sources("cpu/kernels/*.cpp")
    ]
    common = [ninja.compile("cpu", source, cxx, cpu_flags(dispatch)) for source in sources("cpu/*.cpp")]
    common += [ninja.compile("cpu", source, cxx, cpu_flags(extra)) for source in sources("portable/*.cpp")]
    return common, kernels


def cpu_flags(extra: list[str], optimization: tuple[str, ...] = ()) -> list[str]:
    sanitizers = sanitizer_flags()
    debug = ["-O0", "-g1", "-fno-omit-frame-pointer", *sanitizers] if sanitizers else []
    return [*COMMON, *HOST, *CPU, *optimization, *debug, *extra]


def add_cpu(ninja: NinjaFile, cxx: list[str], torch: Path, extra: list[str]) -> Path:
    objects, kernels = add_engine(ninja, cxx, extra)
    for source in sources("torch/cpu*.cpp"):
        flags = [*cpu_flags(extra, OPERATORS), *torch_flags(torch)]
        objects.append(ninja.compile("cpu", source, cxx, flags))
    # Kernels last: the linker keeps the first copy of an inline function; it must be one that every processor
    # can run, and objects of kernels may use newer instructions.
    inputs = [*objects, *kernels, libtorch(ninja, "cpu", torch, cxx)]
    link = [f"-Wl,{','.join(LINK)}", *sanitizer_flags()]
    return ninja.edge("link", BUILD_DIR / "libdfgnn_cpu.so", inputs, cxx, link)


def libtorch(ninja: NinjaFile, name: str, torch: Path, cxx: list[str]) -> Path:
    """torch's library to link with, or a stub of the same name."""
    if name == "cpu" and not CROSS:
        return torch / "lib" / "libtorch_cpu.so"
    stub = ninja.compile(f"stub/{name}", BUILD_DIR / "stub.c", [*cxx, "-x", "c"], ["-fPIC"])
    path = BUILD_DIR / "stub" / f"libtorch_{name}.so"
    return ninja.edge("link", path, [stub], cxx, [f"-Wl,-soname,{path.name}"])


def add_cuda(ninja: NinjaFile, cxx: list[str], torch: Path, extra: list[str], nvcc: str) -> Path:
    # nvcc also calls the host compiler and the linker, because it knows where its headers and libraries are.
    compiler = [nvcc, f"-ccbin={cxx[-1]}"] if os.environ.get("CXX") else [nvcc]
    archs = arch_flags(os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHS))
    if len(archs) > 1 and nvcc_release(nvcc) >= (12, 8):
        archs.append("--compress-mode=size")  # code for several architectures in a quarter of the space
    device = [*COMMON, f"-Xcompiler={','.join(HOST + extra)}", "--expt-relaxed-constexpr", *archs]
    host = [*COMMON, f"-Xcompiler={','.join(HOST + extra + torch_flags(torch))}", "-DUSE_CUDA"]
    objects = [ninja.compile("cuda", source, compiler, device) for source in sources("cuda/**/*.cu")]
    objects += [ninja.compile("cuda", source, compiler, host) for source in sources("torch/cuda*.cpp")]
    objects += [ninja.compile("cuda", source, compiler, host) for source in sources("portable/*.cpp")]
    inputs = [*objects, torch / "lib" / "libtorch_cpu.so", libtorch(ninja, "cuda", torch, cxx)]
    link = ["-cudart=static", *archs, f"-Xlinker={','.join(LINK)}"]
    return ninja.edge("link", BUILD_DIR / "libdfgnn_cuda.so", inputs, compiler, link)


def cuda_compiler(torch: Path) -> str | None:
    """nvcc if the CUDA library is to be built, else None: as DFGNN_CUDA says or, if that is not set, if the
    installed torch has CUDA and nvcc is found."""
    choice = os.environ.get("DFGNN_CUDA", "")
    if choice not in ("", "0", "1"):
        raise BuildError(f'DFGNN_CUDA: expected "0", "1" or nothing, got "{choice}"')
    if choice == "0":
        return None
    if choice == "1":
        nvcc = find_nvcc()
        if nvcc is None:
            raise BuildError(
                "DFGNN_CUDA=1, but nvcc is missing: install the CUDA toolkit, or set CUDA_HOME or PATH"
            )
    else:
        nvcc = find_nvcc() if (torch / "lib" / "libtorch_cuda.so").exists() else None
    if nvcc and nvcc_release(nvcc) < OLDEST_CUDA:
        release = "{}.{}".format(*nvcc_release(nvcc))
        oldest = "{}.{}".format(*OLDEST_CUDA)
        raise BuildError(
            f"{nvcc} is of CUDA {release}, and at least {oldest} is needed: install a newer toolkit and set "
            "CUDA_HOME, or leave the CUDA library out by DFGNN_CUDA=0"
        )
    return nvcc


def torch_cuda(torch: Path) -> str | None:
    """The version of CUDA that this torch was built for, such as "13.0", without importing it."""
    found = re.search(r"^cuda\b[^=\n]*= ['\"]([\d.]+)['\"]", (torch / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else None


def say_what_differs(nvcc: str, torch: Path) -> None:
    """Says that another major version than torch's is all right, for those who know that extensions of torch
    must otherwise have the same."""
    ours, its = nvcc_release(nvcc)[0], torch_cuda(torch)
    if its and int(its.split(".")[0]) != ours:
        print(
            f"nvcc is of CUDA {ours}, torch of CUDA {its}: that works, because the library brings its own "
            f"CUDA runtime; the driver has to be one for CUDA {ours}",
            flush=True,
        )


def say_what_cuda_takes(jobs: int) -> None:
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHS)
    minutes = CUDA_MINUTES * len(arch_flags(archs)) / jobs
    print(
        f"compiling the CUDA kernels for {archs}, about {minutes:.0f} minutes with {jobs} at once; "
        "DFGNN_CUDA=0 leaves them out",
        flush=True,
    )


def check_place() -> None:
    """Objects are made beside the sources, by setuptools too."""
    if not os.access(ROOT, os.W_OK):
        raise BuildError(
            f"{ROOT} cannot be written, and what is compiled goes to its folder build: copy the sources to a "
            "place of your own, and build there"
        )


def wait_for_other_builds(lock: IO[str], directory: Path) -> None:
    import fcntl  # not on Windows, where setup.py makes an installation without kernels

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another build in {directory}", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def install(library: Path, folder: Path) -> None:
    """Copy to a new file and rename it: processes that have the old library mapped are not affected."""
    target = folder / library.name
    if target.exists() and target.stat().st_mtime_ns == library.stat().st_mtime_ns:
        return
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library, folder / ".copy")
    os.replace(folder / ".copy", target)


def write_schemas(library: Path = IN_PLACE / "libdfgnn_cpu.so") -> None:
    """Write SCHEMAS anew, from a compiled library."""
    code = """
import sys, torch
torch.ops.load_library(sys.argv[1])
print(*sorted(str(s)[7:] for s in torch._C._jit_get_all_schemas() if s.name.startswith("dfgnn::")), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code, library], stdout=subprocess.PIPE, check=True)
    SCHEMAS.write_bytes(done.stdout)


def build(folder: Path = IN_PLACE, only: str | None = None) -> list[Path]:
    """Bring the libraries up to date and put them into `folder`; returns their paths there.

    `only` ("cpu" or "cuda") leaves the other library as it is. Without it, a CUDA library that is not to be
    built is removed from `folder`, so that no stale one gets loaded or packed. "engine" only compiles the
    objects that need no torch, which can be done while torch is being installed.
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the kernels build on Linux, this is {sys.platform}; {WITHOUT_KERNELS}")
    check_place()
    cxx, extra = find_cxx(), shlex.split(os.environ.get("CXXFLAGS", ""))
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    ninja, libraries = NinjaFile(), []
    if only == "engine":
        add_engine(ninja, cxx, extra)
    else:
        torch = find_torch()
        nvcc = None if SANITIZERS or CROSS else cuda_compiler(torch)
        if only == "cuda" and nvcc is None:
            raise BuildError("the CUDA library alone: set DFGNN_CUDA=1 and have nvcc in CUDA_HOME or PATH")
        if only != "cuda":
            libraries.append(add_cpu(ninja, cxx, torch, extra))
        if nvcc and only != "cpu":
            libraries.append(add_cuda(ninja, cxx, torch, extra, nvcc))
            say_what_differs(nvcc, torch)
            if not (ROOT / libraries[-1]).exists():
                say_what_cuda_takes(jobs)
        elif only is None:
            (folder / "libdfgnn_cuda.so").unlink(missing_ok=True)

    directory = ROOT / BUILD_DIR
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        wait_for_other_builds(lock, directory)
        stub = "".join(f"void {name}(void) {{}}\n" for name in CUDA_SHIMS)
        if not (directory / "stub.c").exists() or (directory / "stub.c").read_text() != stub:
            (directory / "stub.c").write_text(stub)
        (directory / "build.ninja").write_text("\n".join([f"builddir = {BUILD_DIR}", *ninja.text, ""]))
        command = [find_ninja(), "-f", str(BUILD_DIR / "build.ninja"), "-j", str(jobs)]
        # ninja inherits the lock: if this process alone is killed, no second build begins beside it.
        if subprocess.run(command, cwd=ROOT, pass_fds=[lock.fileno()]).returncode:
            raise BuildError("compilation failed, see above")
        for library in libraries:
            install(ROOT / library, folder)
    return [folder / library.name for library in libraries]


if __name__ == "__main__":
    try:
        build(only="engine")
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
