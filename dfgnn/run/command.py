"""The command ``python -m dfgnn.run``: its arguments, one run of a program, and the report on it."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..compat import install_as_dgl
from ..runtime.wrong_call import DOCS
from ..switch import pieces
from . import index_sums, own
from .captured import Captured
from .captured import lines as of_captured
from .compiled import Compiled
from .gains import Gains, Waits, of_waits
from .gains import lines as of_gains
from .layers import LIBRARIES, Layers, import_libraries
from .program import NotRunnableError, Program, of_module, of_path


def text(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    failed = f": failed with {report['failed']}" if report["failed"] else ""
    lines = [f"dfgnn.run --impl {report['impl']} {report['script']}{failed}"]
    lines += _rows(report, report["layers"])
    if not report["layers"]:
        so_far = " before it failed" if failed else ""
        where = " in this process" if report["children"] else ""
        lines.append(f"  no layer of DGL or torch_geometric was constructed{where}{so_far}")
    for rows in report["children"]:
        which = "a process" if rows["processes"] == 1 else f"each of {rows['processes']} processes"
        lines += [f"  in {which} that it started:", *_rows(report, rows["layers"], "  ")]
    for command in report["programs"]:
        lines.append(f"  it started another program, which has the libraries' own layers: {command}")
    lines += [f"  {name}: not patched, {why}" for name, why in report["not_patched"].items()]
    lines += _traced(report["traced"])
    if any(row["tried"] for row in report["traced"]):
        lines.append(
            f"  samples of these modules, and recording them, took {report['sampling_seconds']:.1f} s"
        )
    if report["own_attention"] and report["impl"] == "dfgnn":
        lines.append("  attention of its own, which dfgnn does not compute as a whole:")
        for use in report["own_attention"]:
            where = f" in {use['where']}" if use["where"] else ""
            lines.append(f"    {use['file']}:{use['line']}{where}: {use['function']}")
            lines.append(f"        what fits: dfgnn.functional.{use['fits']}; recipe: {DOCS}/{use['recipe']}")
    if report["compiled"] is not None:
        lines += _compiled(report["compiled"])
    if report["captured"] is not None:
        lines += of_captured(report["captured"])
    if report["gains"] is not None:
        lines += of_gains(report["gains"])
    lines += of_waits(report["waits"])
    lines += [f"  {count} calls of {name} ran on dfgnn's kernels" for name, count in report["served"].items()]
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in report["peak_memory"].items())
    lines.append(f"  {report['seconds']:.1f} s, peak memory: {memory}")
    if report["backward_in_calling_thread"]:
        lines.append("  backward ran in the thread that asked for it; --backward-thread: in PyTorch's")
    return "\n".join(lines)


def _rows(report: dict[str, Any], rows: list[dict[str, Any]], indent: str = "") -> list[str]:
    lines = []
    for row in rows:
        kind = "dfgnn" if row["fused"] else "not replaced"
        what = "ran its own forward" if row["fused"] else "why"
        reasons = row["fell_back"] if row["fused"] or report["impl"] == "dfgnn" else []
        notes = [f"{what}: {reason}" for reason in reasons] + [row["note"]] * (row["note"] is not None)
        lines.append(f"{indent}  {row['constructed']:5} x {row['layer']}: {kind}")
        lines += [f"{indent}          {note}" for note in notes]
    return lines


def _compiled(report: dict[str, Any]) -> list[str]:
    lines = [f"  {count:5} x {name}: compiled" for name, count in report["modules"].items()]
    return lines + _attention(report) or ["  --compile: no module has message passing of its own"]


def _attention(report: dict[str, Any]) -> list[str]:
    return [
        f"          {x['file']}:{x['line']}: {x['form'] or 'as it was: ' + x['reason']}"
        for x in report["attention"]
    ]


def _traced(rows: list[dict[str, Any]]) -> list[str]:
    """What became of modules with message passing of their own."""
    lines = []
    for row in (row for row in rows if row["tried"]):
        took = "; a call, forward and backward: {} ms as written, {} ms traced".format(*row["milliseconds"])
        what = "traced" if row["traced"] else f"as written: {row['reason']}"
        if row["traced_in_graphs"] != row["traced"]:
            what += ", traced in CUDA graphs" if row["traced_in_graphs"] else ", as written in CUDA graphs"
            took += "; of it the GPU {} and {}".format(*row["milliseconds_of_gpu"])
        lines += [f"  {row['modules']:5} x {row['class']}: {what}{took * any(row['milliseconds'])}"]
        lines += _attention(row)
    return lines


def _of_children(layers: Layers) -> list[dict[str, Any]]:
    """The reports' rows for child processes; processes that constructed the same layers share one entry."""
    by_rows: dict[str, list[Any]] = {}
    for rows in layers.of_children():
        by_rows.setdefault(json.dumps(rows), []).append(rows)
    return [{"processes": len(same), "layers": same[0]} for same in by_rows.values()]


def _peak_memory() -> dict[str, int]:
    unit = 1 if sys.platform == "darwin" else 1024
    sizes = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_initialized():
        for k in range(torch.cuda.device_count()):
            sizes[f"cuda:{k}"] = torch.cuda.max_memory_allocated(k)
    return sizes


def _backward_in_calling_thread(args: argparse.Namespace) -> bool:
    """Whether backward is to run in the calling thread: only with one GPU, because it takes PyTorch's threads
    to keep several busy. (Counting GPUs does not initialize CUDA, so the script may still fork.)"""
    return not args.backward_thread and torch.cuda.device_count() == 1


class _Run:
    """One run of a program, and the report on it."""

    def __init__(self, args: argparse.Namespace, layers: Layers, not_patched: dict[str, str]):
        self.args, self.layers, self.not_patched = args, layers, not_patched
        self.in_calling_thread = _backward_in_calling_thread(args)
        takes_own = args.compile or (args.impl == "dfgnn" and not args.as_written)
        self.compiled = Compiled(layers.started, args.compile) if takes_own else None
        self.captured = Captured(not args.capture_all) if args.capture or args.capture_all else None
        self.gains = Gains() if args.gain else None
        alone = args.impl == "dfgnn" and not (self.captured or self.gains or args.compile)
        self.waits = Waits() if alone and torch.cuda.is_available() else None
        self.sums = index_sums.of_this_machine() if args.impl == "dfgnn" else []
        self.failed: str | None = None
        self.stderr, self.process = sys.stderr, os.getpid()
        # Absolute, because the script may chdir. All of torchrun's processes get it; only the first writes.
        writes = args.json is not None and int(os.environ.get("RANK") or 0) == 0
        self.json = Path(os.path.abspath(args.json)) if writes else None

    def run(self, program: Program) -> None:
        # Registered first, so that it runs last: after the script's threads and the traceback of its error.
        atexit.register(self.report)
        if self.in_calling_thread:
            torch.autograd.set_multithreading_enabled(False)
        self.layers.install()
        if self.compiled is not None:
            self.compiled.install()
        for part in (self.captured, self.gains, self.waits, *self.sums):
            if part is not None:
                part.install()
        self.served_before = pieces.served.copy()
        self.begin = time.perf_counter()
        try:
            program.run()
        except SystemExit as stop:
            if stop.code not in (None, 0):
                self.failed = f"SystemExit: {stop.code}"
            raise
        except BaseException as error:
            self.failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            if isinstance(error, ModuleNotFoundError) and error.name == "dgl":
                self.failed += "; with --as-dgl, dgl is dfgnn.compat"
            self._show_as_python(program, error)
            raise

    def _show_as_python(self, program: Program, error: BaseException) -> None:
        """Makes Python print this error without the frames of dfgnn that called the script."""
        hook = sys.excepthook

        def without_ours(kind, value, trace):
            if value is error:
                trace = program.own_traceback(error)
                value = value.with_traceback(trace)
            hook(kind, value, trace)

        sys.excepthook = without_ours

    def report(self) -> None:
        if os.getpid() != self.process:  # in a fork of the script, which also runs exit handlers
            return
        with contextlib.suppress(RuntimeError):  # a CUDA error that ended the script is raised again
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        seconds = time.perf_counter() - self.begin
        traced = [] if self.compiled is None else self.compiled.traced()
        served = pieces.served - self.served_before
        served += Counter({"sums by an index": sum(x.count for x in self.sums)})  # without those that are 0
        done = {(x["file"], x["line"]) for row in traced for x in row["attention"] if x["form"]}
        report = {
            "impl": self.args.impl, "script": self.args.script, "arguments": self.args.arguments,
            "failed": self.failed, "layers": self.layers.rows(), "children": _of_children(self.layers),
            "programs": self.layers.programs, "not_patched": self.not_patched,
            "served": dict(served),
            "own_attention": [
                use._asdict() for use in own.uses(self.layers.started) if (use.file, use.line) not in done
            ],
            "compiled": self.compiled.rows() if self.compiled and self.args.compile else None,
            "traced": traced, "sampling_seconds": 0.0 if self.compiled is None else self.compiled.seconds,
            "captured": None if self.captured is None else self.captured.rows(),
            "gains": None if self.gains is None else self.gains.rows(),
            "waits": {} if self.waits is None else self.waits.found,
            "backward_in_calling_thread": self.in_calling_thread, "seconds": seconds,
            "peak_memory": _peak_memory(),
        }  # fmt: skip
        if self.compiled is not None:
            self.compiled.remove()
        for part in (self.captured, self.gains, self.waits, *self.sums):
            if part is not None:
                part.remove()
        self.layers.remove()
        self._say(text(report))
        if self.json is not None:
            try:
                self.json.write_text(json.dumps(report, indent=1) + "\n")
            except OSError as error:
                self._say(f"dfgnn.run: --json: the report could not be written: {error}")

    def _say(self, text: str) -> None:
        if self.stderr is None:  # stderr was closed before Python started
            return
        try:
            print(text, file=self.stderr, flush=True)
        except (OSError, ValueError):  # stderr was closed meanwhile
            if sys.stderr is self.stderr:
                sys.stderr = None  # type: ignore[assignment]  # or Python fails in flushing it, with status 120


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            like = difflib.get_close_matches(unknown.split()[0], self._option_string_actions, 1)
            hint = f"did you mean {like[0]}?" if like else "options of the script go behind its name"
            message = f"{unknown}: expected one of the options above, got {unknown}; {hint}"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m dfgnn.run", description="Run a script of yours with dfgnn's layers, unchanged."
    )
    parser.add_argument("--impl", choices=["dfgnn", *LIBRARIES], default="dfgnn", help="whose layers run")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report there, too; under torchrun that of rank 0"
    )
    parser.add_argument(
        "--backward-thread", action="store_true", help="leave backward to PyTorch's thread for the GPU"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile modules with message passing of their own"
    )
    parser.add_argument(
        "--capture", action="store_true", help="replay calls of models that stay the same as CUDA graphs"
    )
    parser.add_argument(
        "--capture-all",
        action="store_true",
        help="also of large models, and of those that gain 7 percent",
    )
    parser.add_argument(
        "--as-written", action="store_true", help="trace no module with message passing of its own"
    )
    parser.add_argument(
        "--gain", action="store_true", help="measure in the script what one line more would gain"
    )
    parser.add_argument("--as-dgl", action="store_true", help="dgl is dfgnn's, for scripts that import it")
    parser.add_argument("--force", action="store_true", help="with --as-dgl: also where DGL is installed")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", help="the script, or with -m the module")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    rest.required = False  # else argparse would name it, too, when the script is missing
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command. Exceptions of the script, SystemExit too, propagate; the report is made at exit."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    first = len(words) - len(args.arguments)
    if first > 1 and words[first - 1] == "--" and words[first - 2] == args.script:
        args.arguments.insert(0, "--")  # argparse has removed it, but it belongs to the script
    if not args.module and not os.path.exists(args.script):
        parser.error(f"script: expected a file, got {args.script}")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json: expected a file in a folder that is there, got {args.json}")

    args.capture |= args.capture_all
    if args.gain and (args.compile or args.capture):
        parser.error("--gain: expected it without --compile and --capture, which it is compared with")
    if args.compile and args.capture:
        parser.error("--capture: expected it without --compile")
    if args.force and not args.as_dgl:
        parser.error("--force: expected --as-dgl with it")
    if args.as_dgl:
        if args.impl == "dgl":
            parser.error("--impl dgl: expected another one with --as-dgl, which stands for DGL")
        try:
            install_as_dgl(args.force)
        except RuntimeError as error:
            parser.error(f"--as-dgl: {error}")
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL writes a file to the home directory
    not_patched = import_libraries(args.impl)
    run = _Run(args, Layers(args.impl, _backward_in_calling_thread(args)), not_patched)
    try:
        program = (of_module if args.module else of_path)(args.script, args.arguments)
    except NotRunnableError as error:
        run.layers.remove()
        parser.exit(error.status, f"{parser.prog}: {error}\n")
    run.run(program)
    return 0
