"""Run tests of the CPU engine with its library under AddressSanitizer and UndefinedBehaviorSanitizer.

    scripts/sanitize_cpu.py [--all] [arguments for pytest]

Builds the library with GCC into build/sanitized, then runs pytest with it. The first error of a sanitizer
ends the process. Leaks are not looked for: Python frees little at its end. --all: every test of the engine on
every instruction set, which takes long; otherwise a part of them on the basic one, which alone is compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = {"address": "libasan.so", "undefined": "libubsan.so"}
SHORT = [
    *(f"tests/functional/test_{name}.py" for name in ("cpu_engine", "every_function", "operators")),
    *("-k", "(instruction_set or not_finite or inconsistent or accuracy and agnn) and not avx"),
]
FILES = ("cpu_engine", "functional", "functional_contract", "edge_options", "every_function", "operators")
# Without tests that start a compiler: the preloaded sanitizer libraries would be loaded into it, too.
ALL = [*(f"tests/functional/test_{name}.py" for name in FILES), "-k", "not compile"]


def environment() -> dict[str, str]:
    compiler = os.environ.get("CXX", "g++")
    paths = []
    for name in SANITIZERS.values():
        command = [compiler, f"-print-file-name={name}"]
        paths.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if not Path(paths[-1]).is_absolute():
            raise SystemExit(f"{compiler} has no {name}: the sanitizers are those of GCC")
    return os.environ | {
        "DFGNN_LIBRARY_DIR": str(ROOT / "build" / "sanitized"),
        "LD_PRELOAD": " ".join(paths),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def main(arguments: list[str]) -> int:
    whole = "--all" in arguments
    build = os.environ | {
        "DFGNN_SANITIZE": ",".join(SANITIZERS),
        "DFGNN_CPU_ISAS": "all" if whole else "base",
    }
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_native"], cwd=ROOT, env=build, check=True)
    rest = [word for word in arguments if word != "--all"]
    # --capture=sys: a sanitizer writes its report to file descriptor 2 and ends the process. Were pytest to
    # capture that descriptor, as by default, the report would be lost.
    options = ["-q", "--capture=sys", "-m", "not gpu"]
    command = [sys.executable, "-m", "pytest", *options, *(ALL if whole else SHORT), *rest]
    for isa in ("base", "avx2", "avx512") if whole else ("base",):
        print(f"instruction set: {isa}", flush=True)
        env = environment() | {"DFGNN_CPU_ISA": isa}
        if code := subprocess.run(command, cwd=ROOT, env=env).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
