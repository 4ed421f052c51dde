"""Compile the CPU engine for another processor and run it under an emulator, and compare it with plain loops.

    scripts/cross_check_cpu.py [aarch64]

Needs Debian's g++-aarch64-linux-gnu and qemu-user. The engine alone, its base path, without torch
(engine_check.cpp); "native" takes this machine's compiler and no emulator.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import build_native  # noqa: E402

TARGETS = {"aarch64": (["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64"]), "native": (["g++"], [])}


def main(target: str = "aarch64") -> int:
    if target not in TARGETS:
        print(f"cross_check_cpu: expected {' or '.join(TARGETS)}, got {target!r}", file=sys.stderr)
        return 2
    compiler, emulator = TARGETS[target]
    missing = [program for program in (compiler[0], *emulator) if shutil.which(program) is None]
    if missing:
        print(f"cross_check_cpu: {', '.join(missing)} is not installed", file=sys.stderr)
        return 2
    csrc = ROOT / "csrc"
    sources = [*sorted((csrc / "cpu").glob("**/*.cpp")), ROOT / "scripts/engine_check.cpp"]
    # Hardly optimized, in half of the time: nothing of it is timed.
    flags = [*build_native.COMMON, *build_native.HOST, *build_native.CPU, "-O1", f"-I{csrc}"]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "engine_check"
        command = [
            *compiler,
            *flags,
            "-DDFGNN_ISAS(apply)=apply(base)",
            "-DDFGNN_ISA=base",
            *sources,
            "-o",
            program,
        ]
        subprocess.run(command, check=True, cwd=ROOT)
        return subprocess.run([*emulator, program], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
