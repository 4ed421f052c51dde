"""``python -m dfgnn.env`` prints versions, libraries, CPU and GPUs, and what is off and why, for issue
reports.

``--json`` prints the same as JSON. Nothing is downloaded and nothing is changed; on every visible GPU a few
numbers are computed, to see whether the compiled library has code for it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

from . import __version__, functional
from .graph import Graph
from .runtime import library as _library

__all__ = ["cpu_name", "driver", "main", "report", "text"]

_PACKAGES = ("torch_geometric", "dgl", "numpy", "scipy", "scikit-network", "matplotlib", "ogb")
_ISA = "DFGNN_CPU_ISA"  # the environment variable that selects the CPU kernels' instruction set
# Processor architecture -> its newest instruction set with kernels; other architectures have "base" alone.
_NEWEST = {"x86_64": "avx512"}


def report() -> dict:
    """Versions, libraries, CPU, GPUs, and ``off``: a list of {what, why, todo}."""
    off: list[dict[str, str]] = []
    return {
        "dfgnn": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "driver": driver(),
        "packages": {name: version(name) for name in _PACKAGES},
        "libraries": _libraries(off),
        "cpu": _cpu(off),
        "gpus": _gpus(off),
        "off": off,
    }


def text(info: dict) -> str:
    """A report as lines to read."""
    lines = [
        f"dfgnn      {info['dfgnn']}",
        f"torch      {info['torch']}, CUDA {info['cuda'] or 'none'}, driver {info['driver'] or 'none'}",
        f"Python     {info['python']}, {info['platform']}",
    ]
    have = [f"{name} {version}" for name, version in info["packages"].items() if version]
    missing = [name for name, version in info["packages"].items() if not version]
    lines.append(
        f"packages   {', '.join(have) or 'none'}" + (f"; no {', '.join(missing)}" if missing else "")
    )
    for name, library in info["libraries"].items():
        state = "loaded" if library["loaded"] else "not loaded"
        lines.append(f"library    {name}: {state}, {library['path'] or 'no file'}")
    cpu = info["cpu"]
    lines.append(f"CPU        {cpu['name']}: {cpu['kernels'] or 'no'} kernels, {cpu['threads']} threads")
    for k, gpu in enumerate(info["gpus"]):
        lines.append(
            f"GPU {k}      {gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB: "
            + ("computes" if gpu["computes"] else "does not compute")
        )
    if not info["gpus"]:
        lines.append("GPU        none")
    for item in info["off"]:
        lines += [f"off        {item['what']}", f"  why      {item['why']}", f"  to do    {item['todo']}"]
    return "\n".join(lines)


def version(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """The version of NVIDIA's driver, or None."""
    try:
        process = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.split("\n")[0].strip() or None if process.returncode == 0 else None


def cpu_name() -> str:
    """The processor's model, or its architecture if the model is not known."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _libraries(off: list) -> dict[str, dict]:
    paths = {name: _library.DIRECTORY / f"libdfgnn_{name}.so" for name in ("cpu", "cuda")}
    loaded = {"cpu": _library.compiled, "cuda": _library.has_cuda_library()}
    if not loaded["cuda"]:
        try:
            _library.require_cuda_library()
        except RuntimeError as error:
            why = str(error).partition(": ")[2]
        if torch.version.cuda is None:
            todo = "a CUDA build of torch, then dfgnn again"
        else:
            todo = "nvcc (the CUDA toolkit), then in a clone: DFGNN_CUDA=1 pip install --no-build-isolation ."
        if torch.cuda.device_count() == 0:
            todo = f"without an NVIDIA GPU nothing; with one, {todo}"
        off.append({"what": "CUDA kernels", "why": why, "todo": todo})
    return {
        name: {"path": str(path) if path.is_file() else None, "loaded": loaded[name]}
        for name, path in paths.items()
    }


def _cpu(off: list) -> dict:
    if not _library.compiled:
        off.append(
            {
                "what": "CPU kernels",
                "why": "this installation has none: it is the wheel for any platform, or DFGNN_PURE was 1",
                "todo": "on Linux: pip uninstall dfgnn, then install a wheel for Linux, or build from source "
                "with a C++ compiler and without DFGNN_PURE; elsewhere nothing",
            }
        )
        return {"name": cpu_name(), "kernels": None, "threads": torch.get_num_threads()}
    forced = os.environ.get(_ISA)
    newest = _NEWEST.get(platform.machine(), "base")
    kernels: str | None
    kernels, why = (forced, _fails(torch.device("cpu"))) if forced else _best_kernels(newest)
    compile_again = "compile the CPU library here again, with DFGNN_CPU_ISAS=all or native"
    if kernels is None or (forced and why):
        kernels = None
        off.append({"what": "CPU kernels", "why": why, "todo": f"unset {_ISA}" if forced else compile_again})
    elif kernels != newest:
        if forced:
            reason, todo = f"{_ISA}={forced}", f"unset {_ISA}"
        elif why and "compiled for" in why:
            reason, todo = why.partition(": ")[2].partition(" alone")[0] + " alone", compile_again
        else:
            reason = "this processor has no AVX-512 (F, BW, VL, DQ)"
            todo = f"nothing: {kernels} is the best for this processor"
        off.append({"what": f"{newest} kernels", "why": reason, "todo": todo})
    return {
        "name": cpu_name(),
        "kernels": kernels,
        "threads": torch.get_num_threads(),
    }


def _best_kernels(newest: str) -> tuple[str | None, str | None]:
    """(the best instruction set whose kernels run here, or None if none do; why it is not the newest)."""
    why = _fails(torch.device("cpu"))
    if why:
        return None, why
    reasons = {}
    try:
        for name in ("avx512", "avx2", "base"):
            os.environ[_ISA] = name
            reasons[name] = _fails(torch.device("cpu"))
            if reasons[name] is None:
                return name, reasons.get(newest)
    finally:
        os.environ.pop(_ISA, None)
    return None, reasons["base"]


def _gpus(off: list) -> list[dict]:
    gpus = []
    for k in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(k)
        capability = f"{properties.major}.{properties.minor}"
        why = (
            _fails(torch.device("cuda", k))
            if _library.has_cuda_library()
            else "the CUDA library is not loaded"
        )
        if why and _library.has_cuda_library():
            command = "DFGNN_CUDA=1 pip install --no-build-isolation ."
            todo = f'if it has no code for this GPU: TORCH_CUDA_ARCH_LIST="{capability}" {command}'
            off.append({"what": f"GPU {k}", "why": why, "todo": todo})
        gpus.append(
            {
                "name": properties.name,
                "capability": capability,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "computes": why is None,
            }
        )
    return gpus


def _fails(device: torch.device) -> str | None:
    """The error of a small attention call on this device, in one line; None if it succeeds."""
    try:
        ends = torch.tensor([0, 1], device=device)
        feat, score = torch.ones(2, 1, 4, device=device), torch.zeros(2, 1, device=device)
        out = functional.gat_attention(Graph.from_coo(ends, ends, num_nodes=2), feat, score, score)
        return None if bool((out == 1).all()) else f"wrong results: {out.flatten().tolist()}"
    except RuntimeError as error:  # errors of torch's devices and of the libraries
        return str(error).strip().splitlines()[0]


def main(argv: list[str] | None = None) -> int:
    """Prints the report; the exit status is 0 even if something is off."""
    parser = argparse.ArgumentParser(prog="python -m dfgnn.env", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    arguments = parser.parse_args(argv)
    info = report()
    print(json.dumps(info, indent=1) if arguments.json else text(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
