"""Run a script of yours with dfgnn's layers, unchanged: ``python -m dfgnn.run script.py arguments...``

While the script runs, the names of DGL's and torch_geometric's attention layers stand for dfgnn's
(:func:`dfgnn.patch`). At its end a report goes to standard error: which layers were constructed as dfgnn's,
which of these ran their library's own code and why, which layers of the libraries dfgnn does not have, the
time, and the peak of memory. With ``--impl pyg`` or ``--impl dgl`` nothing is replaced and the report is
the same, for comparison.

With either, where the process sees one GPU, the script's main thread computes backward itself
(``torch.autograd.set_multithreading_enabled(False)``), as PyTorch always does on the CPU: to hand over to the
GPU's thread of PyTorch's and back takes longer than a small layer. ``--backward-thread`` leaves it as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import resource
import runpy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .nn import _fallback
from .switch.replace import LIBRARIES, is_convolution, layers_of, patch


@contextlib.contextmanager
def constructions() -> Iterator[Counter[type]]:
    """Counts the layers of DGL, torch_geometric and dfgnn that are constructed meanwhile, by class."""
    made: Counter[type] = Counter()
    construct = nn.Module.__init__

    @functools.wraps(construct)
    def counted(self, *args, **kwargs):
        cls = type(self)
        # A layer may call the constructors of several bases.
        if any(is_convolution(base) for base in cls.__mro__) and "_modules" not in vars(self):
            made[cls] += 1
        construct(self, *args, **kwargs)

    nn.Module.__init__ = counted  # type: ignore[method-assign]
    try:
        yield made
    finally:
        nn.Module.__init__ = construct  # type: ignore[method-assign]


def describe(made: Counter[type]) -> list[dict[str, Any]]:
    """For each class: its name, how many were constructed, whether they are dfgnn's, and what fell back."""
    fused = {ours for library in LIBRARIES for ours in layers_of(library).values()}
    known = {theirs for library in LIBRARIES for theirs in layers_of(library)}
    rows: list[dict[str, Any]] = []
    for cls, count in made.items():
        is_ours = any(base in fused for base in cls.__mro__)
        reasons = sorted(reason for found, reason in _fallback.warned() if found is cls)
        if not is_ours and cls in known:
            reasons = ["was constructed by a name that dfgnn.patch does not reach, or without it"]
        elif not is_ours:
            reasons = ["no such layer in dfgnn"]
        name = f"{cls.__module__}.{cls.__qualname__}"
        rows.append({"layer": name, "constructed": count, "fused": is_ours, "fell_back": reasons})
    return rows


def text(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    lines = [f"dfgnn.run --impl {report['impl']} {report['script']}"]
    for row in report["layers"]:
        kind = "dfgnn" if row["fused"] else "not replaced"
        what = "ran its own forward" if row["fused"] else "why"
        shown = row["fell_back"] if row["fused"] or report["impl"] == "dfgnn" else []
        reasons = "".join(f"\n          {what}: {reason}" for reason in shown)
        lines.append(f"  {row['constructed']:5} x {row['layer']}: {kind}{reasons}")
    if not report["layers"]:
        lines.append("  no layer of DGL or torch_geometric was constructed")
    lines += [f"  {name}: not patched, {why}" for name, why in report["not_patched"].items()]
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in report["peak_memory"].items())
    lines.append(f"  {report['seconds']:.1f} s, peak memory: {memory}")
    if report["backward_in_calling_thread"]:
        lines.append("  backward ran in the thread that asked for it; --backward-thread: in PyTorch's")
    return "\n".join(lines)


def _patch_all() -> dict[str, str]:
    """Patch the libraries that are installed; why not, for one that cannot be imported."""
    failed = {}
    for library, package in LIBRARIES.items():
        if importlib.util.find_spec(package) is not None:
            try:
                patch(library)
            except Exception as error:  # a library that was built for another torch fails in many ways
                failed[package] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
    return failed


def _peak_memory() -> dict[str, int]:
    unit = 1 if sys.platform == "darwin" else 1024
    sizes = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_initialized():
        for k in range(torch.cuda.device_count()):
            sizes[f"cuda:{k}"] = torch.cuda.max_memory_allocated(k)
    return sizes


def _backward_in_calling_thread(args: argparse.Namespace) -> bool:
    """Whether backward is computed in the calling thread. A thread for each of several GPUs keeps all of them
    busy. (Counting them does not initialize CUDA, so that the script may fork.)"""
    return not args.backward_thread and torch.cuda.device_count() == 1


def main(argv: list[str] | None = None) -> int:
    """The program; returns what the script exited with."""
    parser = argparse.ArgumentParser(prog="python -m dfgnn.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--impl", choices=["dfgnn", *LIBRARIES], default="dfgnn", help="whose layers run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument(
        "--backward-thread", action="store_true", help="leave backward to PyTorch's thread for the GPU"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", help="the script, or with -m the module")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    rest.required = False  # argparse would name it beside a missing script
    args = parser.parse_args(argv)
    if not args.module and not Path(args.script).is_file():
        parser.error(f"script: expected a file, got {args.script}")

    os.environ.setdefault("DGLBACKEND", "pytorch")  # it would ask, and write the answer to the home directory
    not_patched = _patch_all() if args.impl == "dfgnn" else {}
    sys.argv = [args.script, *args.arguments]
    # As python script.py and python -m module do.
    sys.path[0] = os.getcwd() if args.module else str(Path(args.script).resolve().parent)
    code: Any = 0
    in_calling_thread = _backward_in_calling_thread(args)
    begin = time.perf_counter()
    with constructions() as made, torch.autograd.set_multithreading_enabled(not in_calling_thread):
        try:
            if args.module:
                runpy.run_module(args.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(args.script, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            report = {
                "impl": args.impl, "script": args.script, "arguments": args.arguments,
                "layers": describe(made), "not_patched": not_patched,
                "backward_in_calling_thread": in_calling_thread,
                "seconds": time.perf_counter() - begin, "peak_memory": _peak_memory(),
            }  # fmt: skip
            print(text(report), file=sys.stderr)
            if args.json is not None:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)  # sys.exit("a message")
    return 1


if __name__ == "__main__":
    sys.exit(main())
