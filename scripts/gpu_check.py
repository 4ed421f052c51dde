"""Check the CUDA kernels on a GPU and record the result: GPU tests, then compute-sanitizer on a small suite.

    scripts/gpu_check.sh [--no-sanitizer] [--resume] [--jobs N] [--parts N] [--sanitizer PATH]
        [--pytest-args "-k gat"] [--commit H]

The record names the sources that it is about by a hash, so that tests/test_gpu_check.py can tell when it is
out of date. It is written after every step: a tool that is missing from it has not run. The exit status is 0
only if all that ran was clean. The package is imported from the source tree, with the libraries in dfgnn/lib.
"""

import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path("benchmarks/results/gpu-check.json")
TOOLS = {
    "memcheck": [],
    "racecheck": [],
    "initcheck": [],
    "synccheck": [],
}
TIMEOUT = 1800  # seconds of one step


# A string of C++ is kept, a comment is not. No source has a raw string or continues a comment by a backslash.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def without_comments(source: str) -> str:
    """The source of C++ or CUDA without its comments, and with one space for any run of white space."""
    code = _STRING_OR_COMMENT.sub(lambda found: " " if found[0][0] == "/" else found[0], source)
    return " ".join(code.split())


def source_hash(root: Path = ROOT) -> str:
    """sha256 over the names and the code, without comments, of all that the CUDA library is compiled from."""
    digest = hashlib.sha256()
    files = [path for folder in ("core", "cuda", "torch") for path in (root / "csrc" / folder).rglob("*")]
    files = [path for path in files if not path.name.startswith("cpu")]  # the operators of the CPU library
    for path in sorted(path for path in files if path.suffix in (".h", ".cuh", ".cu", ".cpp")):
        content = without_comments(path.read_text()).encode()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def failures(record: dict) -> list[str]:
    """The failures in the record, one line each."""
    found = []
    tests = record.get("tests")
    if tests is not None:
        if tests["failed"]:
            found.append(f"{tests['failed']} GPU tests failed")
        elif tests["exit_code"]:
            found.append(f"pytest ended with exit code {tests['exit_code']}")
        elif not tests["passed"]:
            found.append("no GPU test passed")
    for tool, result in record.get("sanitizer", {}).items():
        if result["errors"] is None or result["exit_code"]:
            found.append(f"{tool} did not finish (exit code {result['exit_code']})")
        if result["errors"]:
            found.append(f"{tool}: {result['errors']} errors")
    return found


def missing(record: dict) -> list[str]:
    """The steps that are missing in the record or incomplete."""
    steps = [] if record.get("tests") else ["the GPU tests"]
    if record.get("tests", {}).get("arguments"):
        steps.append("the GPU tests left out by " + record["tests"]["arguments"])
    return steps + [tool for tool in TOOLS if tool not in record.get("sanitizer", {})]


def read_junit(path: Path) -> dict:
    """Numbers of passed, failed (or in error) and skipped tests in a JUnit file; 0 where pytest crashed."""
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    if path.exists():
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            for key in counts:
                counts[key] += int(suite.get(key, 0))
    failed, skipped = counts["failures"] + counts["errors"], counts["skipped"]
    return {"passed": counts["tests"] - failed - skipped, "failed": failed, "skipped": skipped}


def count_errors(output: str) -> int | None:
    """The number in compute-sanitizer's last summary line, or None without one.

    Racecheck's warnings (hazards that it judges harmless) count too.
    """
    found = None
    for line in output.splitlines():
        if match := re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", line):
            found = int(match[1] or match[2])
    return found


def run_tests(arguments: str, jobs: int = 1) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        options = ["-m", "gpu", "-q", f"--junitxml={junit}", *shlex.split(arguments)]
        if jobs > 1:  # several processes share the GPU (pytest-xdist)
            options += ["-n", str(jobs)]
        code, _ = _run([sys.executable, "-m", "pytest", *options], capture=False)
        return {**read_junit(junit), "exit_code": code, "arguments": arguments}


def run_tool(sanitizer: str, tool: str, parts: int = 1) -> dict:
    """Errors and exit code over all parts of the suite, whose processes run at the same time."""
    suite = str(ROOT / "scripts" / "sanitize_suite.py")
    command = [sanitizer, "--tool", tool, *TOOLS[tool], sys.executable, suite]

    def run(part: int) -> dict:
        # Without torch's cache every tensor is a separate allocation, whose bounds memcheck knows.
        which = [f"{part}/{parts}"]
        code, output = _run([*command, *which], capture=True, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        result = {"errors": count_errors(output), "exit_code": code}
        if failures({"sanitizer": {tool: result}}):
            print("\n".join(output.splitlines()[:60] + ["..."] + output.splitlines()[-20:]))
        return result

    with ThreadPoolExecutor(parts) as pool:
        return together(list(pool.map(run, range(1, parts + 1))))


def together(results: list[dict]) -> dict:
    errors = [result["errors"] for result in results]
    code = next((result["exit_code"] for result in results if result["exit_code"]), 0)
    return {"errors": None if None in errors else sum(errors), "exit_code": code}


def _run(command: list[str], capture: bool, **variables: str) -> tuple[int, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, **variables}
    stream = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if capture else {}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, errors="replace", timeout=TIMEOUT, **stream)
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return 124, output if isinstance(output, str) else output.decode(errors="replace")
    return done.returncode, done.stdout or ""


def _first_line(*command: str) -> str | None:
    """The first line that a command prints, or None if it does not exist or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def find_sanitizer(path: str | None) -> str | None:
    """--sanitizer, or the one in CUDA_HOME, PATH or the toolkit's usual place."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    names = [path] if path else [str(home / "bin" / "compute-sanitizer"), "compute-sanitizer"]
    return next((found for name in names if (found := shutil.which(name))), None)


def describe(commit: str | None) -> dict:
    import torch

    library = ROOT / "dfgnn" / "lib" / "libdfgnn_cuda.so"
    return {
        "sources_sha256": source_hash(),
        "library_sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "commit": commit or _first_line("git", "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def clean_tools(path: Path, record: dict) -> dict:
    """The sanitizer's clean results in the record at ``path``, if it is about the library of ``record``."""
    last = json.loads(path.read_text()) if path.exists() else {}
    if any(last.get(key) != record[key] for key in ("sources_sha256", "library_sha256", "gpu", "driver")):
        return {}
    return {tool: r for tool, r in last.get("sanitizer", {}).items() if r == {"errors": 0, "exit_code": 0}}


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from dfgnn.runtime.programs import Parser, existing_file, file_to_write, positive

    parser = Parser(description=__doc__)
    parser.add_argument("--no-sanitizer", action="store_true", help="run the tests only")
    parser.add_argument("--sanitizer", type=existing_file, metavar="FILE", help="compute-sanitizer")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the sanitizer's clean results of the last record, if it is about this very library",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        default=1,
        help="processes of the tests (needs pytest-xdist); above 1 the tools run at the same time, too",
    )
    parser.add_argument(
        "--parts",
        type=positive,
        metavar="N",
        default=1,
        help="processes of each tool, which share the suite (each a GPU context)",
    )
    parser.add_argument(
        "--pytest-args", default="", metavar="TEXT", help="further arguments of pytest, in one string"
    )
    parser.add_argument("--commit", metavar="NAME", help="recorded where git does not know it")
    parser.add_argument(
        "--output", type=file_to_write, default=ROOT / RECORD, metavar="FILE", help="the record"
    )
    args = parser.parse_args()

    import torch

    from dfgnn.runtime import library as _library

    if not torch.cuda.is_available():
        return _refuse("torch sees no CUDA GPU here")
    _library.require_cuda_library()
    sanitizer = None if args.no_sanitizer else find_sanitizer(args.sanitizer and str(args.sanitizer))
    if not args.no_sanitizer and sanitizer is None:
        return _refuse("compute-sanitizer was not found: give --sanitizer PATH, or --no-sanitizer")

    record = describe(args.commit)
    args.output.parent.mkdir(parents=True, exist_ok=True)

    def write():
        args.output.write_text(json.dumps(record, indent=2) + "\n")

    kept = clean_tools(args.output, record) if args.resume else {}
    if sanitizer:
        version = [line for line in _output(sanitizer, "--version").splitlines() if "Version" in line]
        record["sanitizer_version"] = version[0].strip() if version else None
        record["sanitizer"] = dict(kept)
    with ThreadPoolExecutor(1 if args.jobs == 1 else 1 + len(TOOLS)) as pool:
        steps = {pool.submit(run_tests, args.pytest_args, args.jobs): "tests"}
        if sanitizer:
            steps |= {pool.submit(run_tool, sanitizer, t, args.parts): t for t in TOOLS if t not in kept}
        for step in as_completed(steps):
            name = steps[step]
            (record if name == "tests" else record["sanitizer"])[name] = step.result()
            write()
            print(f"{name}: {step.result()}", flush=True)

    print(json.dumps(record, indent=2))
    for line in failures(record):
        print(f"gpu_check: FAILED: {line}", file=sys.stderr)
    return 1 if failures(record) else 0


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def _refuse(reason: str) -> int:
    print(f"gpu_check: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
