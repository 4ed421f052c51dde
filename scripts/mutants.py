"""Check the tests: make each fault of mutants.txt in a copy of the project, and see that a test notices it.

    python scripts/mutants.py [--only EXPRESSION] [--jobs 2] [--list]

A fault (a mutant) is a small change of one file: a wrong sign, a check left out, a stale cache. It is killed
if the tests that are named with it fail, and survives if they pass, which shows that a test is missing.
All faults in C++ are compiled into one library, in which an environment variable activates one of them. The
copies are in build/mutants, so that a second run compiles only what has changed.

Prints a line per fault with the test that noticed it, and exits with 1 if one survives or cannot be made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
SECONDS = 900  # time limit of a fault's tests: a fault may make a loop endless
NATIVE = (".cpp", ".h")
SWITCH = """\
#pragma once
#include <cstdlib>
inline const long dfgnn_mutant = std::getenv("DFGNN_MUTANT") ? std::atol(std::getenv("DFGNN_MUTANT")) : 0;
"""


class Mutant(NamedTuple):
    name: str
    file: str
    tests: list[str]  # arguments of pytest
    before: str
    after: str

    @property
    def number(self) -> int:
        """A hash of the name, which stays when other faults are added: files need not be compiled again."""
        return zlib.crc32(self.name.encode())

    @property
    def is_native(self) -> bool:
        return self.file.endswith(NATIVE)

    def apply(self, text: str) -> str:
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {text.count(self.before)} places with these lines, not one")
        return text.replace(self.before, self.after.replace("MUTATED", f"(dfgnn_mutant == {self.number})"))


def read_mutants() -> list[Mutant]:
    text = re.sub(r"^#.*\n", "", (ROOT / "scripts/mutants.txt").read_text(), flags=re.MULTILINE)
    found = []
    for paragraph in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        name, file, tests, *lines = paragraph.rstrip("\n").split("\n")
        sides = ("".join(f"{line[1:]}\n" for line in lines if line[:1] == sign) for sign in "-+")
        found.append(Mutant(name, file, shlex.split(tests), *sides))
    return found


def copy_tree(to: Path) -> None:
    """Brings a copy of what git knows or would add up to date; files that are equal stay as they are."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    names = [name for name in names if name and (ROOT / name).is_file()]
    for old in (path for path in to.rglob("*.py") if "build" not in path.parts[len(to.parts) :]):
        if str(old.relative_to(to)) not in names:
            old.unlink()
    for name in names:
        write(to / name, (ROOT / name).read_bytes())


def write(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def build(mutants: list[Mutant]) -> Path:
    """A copy of the project with all faults of C++ in its library; returns the library."""
    tree = FOLDER / "native"
    texts: dict[str, str] = {}
    for mutant in mutants:
        if mutant.is_native:
            texts[mutant.file] = mutant.apply(texts.get(mutant.file) or (ROOT / mutant.file).read_text())
    command = ["git", "ls-files", "csrc", "build_native.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        data = texts[name].encode() if name in texts else (ROOT / name).read_bytes()
        write(tree / name, data)
    write(tree / "mutant.h", SWITCH.encode())
    flags = f"{os.environ.get('CXXFLAGS', '')} -O1 -w -include {tree / 'mutant.h'}"  # -O1: in half the time
    environment = os.environ | {"CXXFLAGS": flags, "DFGNN_CUDA": "0", "DFGNN_CPU_ISAS": "native"}
    command = [sys.executable, "-c", "import build_native; build_native.build(only='cpu')"]
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    return tree / "dfgnn/lib/libdfgnn_cpu.so"


def prepare(tree: Path, library: Path) -> Path:
    copy_tree(tree)
    target = tree / "dfgnn/lib" / library.name
    target.parent.mkdir(exist_ok=True)
    shutil.copy2(library, target)
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "dfgnn", "tests"], cwd=tree, check=False)
    return tree


# A process that imports the libraries once and forks for the tests of each fault.
SERVER = """
import json, os, signal, sys, time
import pytest, torch
for name in ("torch._dynamo", "torch_geometric.nn"):
    try:
        __import__(name)
    except ImportError:
        pass
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    end, status = time.monotonic() + order["seconds"], None
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = "late"
        else:
            time.sleep(0.05)
    print(json.dumps(status), flush=True)
else:
    os._exit(0)
os.setpgid(0, 0)
os.environ.update(order["environment"])
os.chdir(order["tree"])
sys.path[0] = order["tree"]
sys.dont_write_bytecode = True
os.dup2(os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
os.dup2(1, 2)
os._exit(pytest.main(order["words"]))
"""


class Job:
    """A copy of the project, and a process that runs tests in it."""

    def __init__(self, tree: Path):
        self.tree = tree
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, tests: list[str], number: int) -> tuple[int | str, str]:
        """The exit status of pytest, and what it printed."""
        log = self.tree / "mutant.log"
        words = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", *tests]
        environment = {"PYTHONPATH": str(self.tree), "DFGNN_MUTANT": str(number), "OMP_NUM_THREADS": "1"}
        order = {"words": words, "environment": environment, "tree": str(self.tree), "log": str(log)}
        assert self.process.stdin and self.process.stdout
        print(json.dumps({**order, "seconds": SECONDS}), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline()), log.read_text(errors="replace")


def outcome(mutant: Mutant, job: Job) -> tuple[bool, str]:
    """Whether the fault is killed, and in words by what."""
    if mutant.is_native:
        status, text = job.run(mutant.tests, mutant.number)
    else:
        path = job.tree / mutant.file
        original, times = path.read_text(), path.stat()
        try:
            path.write_text(mutant.apply(original))
            status, text = job.run(mutant.tests, 0)
        except ValueError as error:
            return False, str(error)
        finally:
            path.write_text(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its .pyc file is valid again
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, flags=re.MULTILINE)
    if status == 0:
        return False, "SURVIVED: " + text.strip().rpartition("\n")[2]
    if status == "late":
        return True, f"no end within {SECONDS} s"
    if isinstance(status, int) and status < 0:
        return True, f"signal {-status}"
    if failed and status in (1, 2):  # 2: a test module could not be imported
        return True, failed[1]
    return False, f"pytest ended with {status}: {text.strip()[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="faults whose file and name it matches")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at once")
    parser.add_argument("--list", action="store_true", help="print the faults")
    args = parser.parse_args()
    mutants = read_mutants()
    chosen = [m for m in mutants if re.search(args.only, f"{m.file}: {m.name}")]
    if args.list:
        print("\n".join(f"{m.file}: {m.name}" for m in chosen))
        return 0
    native = any(mutant.is_native for mutant in chosen)
    library = build(mutants) if native else ROOT / "dfgnn/lib/libdfgnn_cpu.so"
    jobs: Queue[Job] = Queue()
    for number in range(args.jobs):
        jobs.put(Job(prepare(FOLDER / f"job{number}", library)))

    def tried(mutant: Mutant) -> bool:
        job, begin = jobs.get(), time.monotonic()
        try:
            killed, words = outcome(mutant, job)
        finally:
            jobs.put(job)
        seconds = time.monotonic() - begin
        print(f"{'killed' if killed else '------'} {seconds:4.0f} s  {mutant.name}: {words}", flush=True)
        return killed

    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(tried, chosen))
    print(f"{sum(results)} of {len(results)} killed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
