"""The command line of ``python -m dfgnn.bench``, and the loop over cases."""

import argparse
import functools
import gc
import importlib
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import plan
from ..runtime import library
from ..runtime.programs import (
    Parser,
    device,
    file_to_write,
    interruptible,
    listed,
    number,
    one_of,
    positive,
    wrong,
)
from . import compare, datasets, graphs, measure, records, report, twins
from .attention import Bench, compare_attention
from .workloads import LAYERS, MODES

DTYPES = ("float32", "bfloat16", "float16", "float64")
PEERS = {"pyg": "PyG", "dgl": "DGL", "turbo-gnn": "turbo-gnn", "dgNN": "dgNN", "pyg-compile": "PyG compiled"}
# What a case of a mode is called in a file of results.
PARTS = {"train": "attention", "forward": "inference"}


def _schedule(text: str) -> str:
    try:
        plan.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _shape(text: str) -> tuple[int, int]:
    try:
        heads, dim = map(positive, text.split("x"))
    except (ValueError, argparse.ArgumentTypeError):
        raise wrong("heads x head size, such as 4x32", text) from None
    return heads, dim


def _module(name: str) -> ModuleType:
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"cannot import {name}: {error}") from error
    if not all(hasattr(found, part) for part in ("cases", "load", "MEASURES")):
        raise wrong("a module with cases, load and MEASURES", name)
    return found


def parser() -> Parser:
    result = Parser(
        prog="dfgnn.bench",
        description="Time the attention of dfgnn's layers beside other libraries and two yardsticks, "
        "the vendor's plain neighbour sum (torch.sparse) and our own. The contestants of a case take turns. "
        "Lists are separated by commas. The exit status is 1 if anything asked for could not be measured; a "
        "missing peer does not count.",
    )
    add = result.add_argument
    add("--layers", type=listed(one_of(*LAYERS)), default=tuple(LAYERS), help="whose attention")
    add(
        "--graphs",
        type=listed(),
        help=f"names ({', '.join(graphs.NAMES)}; er-N-D: Erdős–Rényi, N nodes, mean degree D; er: a sweep), "
        ".npz and .mtx files, or data sets of a library, such as ogb:ogbn-arxiv, pyg:Planetoid/Cora, "
        f"dgl:CoraGraphDataset, pyg:TUDataset/COLLAB@256 ({datasets.BATCH} graphs unless @ gives a number)",
    )
    add("--root", type=Path, metavar="FOLDER", default=graphs.ROOT, help="of what is downloaded")
    add("--heads", type=listed(positive), default=(4,), help="how many")
    add("--head-dim", type=listed(positive), default=(32,), metavar="SIZES", help="numbers of a head")
    add("--shapes", type=listed(_shape), help="heads x head size, as in 4x32,1x128; instead of the two above")
    add("--dtype", type=listed(one_of(*DTYPES)), default=("float32",), help=", ".join(DTYPES))
    add("--mode", type=listed(one_of(*MODES)), default=MODES, help="forward, train (forward and backward)")
    add(
        "--schedule",
        type=listed(_schedule),
        default=("auto",),
        help=f"auto, {', '.join(plan.SCHEDULES)}, or one with the most edges of an item, 'natural<=512'",
    )
    add("--peers", type=listed(one_of(*PEERS)), default=(), help=", ".join(PEERS))
    add("--oracle", action="store_true", help="measure every plan that the scheduler could have chosen, too")
    add("--device", type=device, help="default: cuda if there is one, else cpu")
    add("--threads", type=positive, help="of the CPU (default: torch's own number)")
    add(
        "--seconds",
        type=number(above=0),
        help="per case, at least five turns (default: 1; with --quick 0.1)",
    )
    add("--minutes", type=number(least=0), help="no case begins after this time (default: no end)")
    add("--quick", action="store_true", help="short measurements of a few small graphs")
    add(
        "--json",
        type=file_to_write,
        metavar="FILE",
        help="write all results to it, anew after every case; the same command goes on where one ended",
    )
    add("--fresh", action="store_true", help="forget what the file holds")
    add("--commit", metavar="NAME", help="of the code in the results (default: git rev-parse HEAD)")
    add(
        "--cases",
        type=_module,
        metavar="MODULE",
        help="a module that lists cases, in place of the options above that make them: cases(device, quick, "
        "compiles), load(graph, device) and MEASURES, the function of each part",
    )
    add("--parts", type=listed(), help="of --cases, only these")
    add("--no-compile", dest="compiles", action="store_false", help="of --cases, none with torch.compile")
    add("--list", action="store_true", help="print the cases in their order, measure nothing")
    return result


def main(argv: list[str] | None = None) -> int:
    usage = parser()
    args = usage.parse_args(argv)
    if args.oracle and "auto" not in args.schedule:
        usage.error("--oracle compares with what the scheduler chooses: --schedule has to hold auto")
    place = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda":
        try:
            library.require_cuda_library()
        except RuntimeError as error:
            usage.error(f"--device {place}: {error}")
        if place.index is not None:
            torch.cuda.set_device(place)
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # DGL reads it when it is imported
        torch.set_num_threads(args.threads)
    if args.cases:
        cases, notes = args.cases.cases(place.type, args.quick, args.compiles)
        cases = [case for case in cases if not args.graphs or case["graph"] in args.graphs]
        cases = [case for case in cases if not args.parts or case["part"] in args.parts]
        load, measures = args.cases.load, args.cases.MEASURES
    else:
        cases, notes = _cases(args, place), []
        load = functools.partial(graphs.load, root=args.root)
        measures = dict.fromkeys(PARTS.values(), compare_attention)
    if place.type == "cpu":
        cases = [{**case, "threads": torch.get_num_threads()} for case in cases]
    if args.list:
        print("\n".join(map(report.name_of, cases)))
        return 0
    print("\n".join(notes), end="\n" if notes else "")
    bench = Bench(place, args.seconds or (0.1 if args.quick else 1.0), load)
    with interruptible(
        f"{args.json} has the cases before this one" if args.json else "--json FILE keeps what is measured"
    ):
        return _run(cases, measures, bench, args)


def _cases(args: argparse.Namespace, place: torch.device) -> list[dict[str, Any]]:
    """The cases that the options name."""
    names = args.graphs or _default_graphs(place, args.quick)
    shapes = args.shapes or tuple(itertools.product(args.heads, args.head_dim))
    asked = [PEERS[name] for name in args.peers]
    more: dict[str, Any] = {"peers": [name for name in asked if name != "PyG compiled"]}
    more |= {"compiled": True} if "PyG compiled" in asked else {}
    more |= {"schedules": list(args.schedule)} if args.schedule != ("auto",) else {}
    more |= {"oracle": True} if args.oracle else {}
    return [
        {"part": PARTS[mode], "graph": graph, "layer": layer, "heads": heads, "head_dim": dim, "mode": mode,
         "dtypes": list(args.dtype), **more}
        for name in names
        for graph in twins.expand(name)
        for (heads, dim), layer, mode in itertools.product(shapes, args.layers, args.mode)
    ]  # fmt: skip


def _default_graphs(device: torch.device, quick: bool) -> tuple[str, ...]:
    if device.type == "cpu":
        return ("cora~",) if quick else ("cora~", "arxiv~")
    return ("cora~", "arxiv~", "pattern~") if quick else graphs.NAMES


def _run(cases: list[dict], measures: dict[str, Callable], bench: Bench, args) -> int:
    """Measures the cases in their order. Returns 1 if one could not be measured.

    The first case is measured three times: at first without a record, because the first calls of a process
    are slow; then for the file; and once more at the end. If a contestant's median then differs by more than
    5 %, a case of ``--cases`` is removed from the file again, and for other cases a line is printed.
    """
    environment = report.environment(bench.device, args.commit)
    if args.fresh and args.json:
        args.json.unlink(missing_ok=True)
    found = records.Records(args.json, environment)
    print(report.environment_line(environment), flush=True)
    gc.freeze()  # garbage collections during measurements need not visit imported modules
    end = time.monotonic() + 60 * args.minutes if args.minutes is not None else float("inf")
    wrong, shown = 0, ""

    def result_of(case: dict) -> dict:
        try:
            return measures[case["part"]](case, bench)
        except compare.LostDevice:
            raise
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            return {"unavailable": measure.reason(error)}

    left = [case for case in cases if not found.has(case)]
    first = left[0] if left and not args.quick else None
    if first is not None:
        result_of(first)
    for case in left:
        if time.monotonic() > end:
            missing = sum(not found.has(other) for other in cases)
            print(f"time is up: {missing} of {len(cases)} cases are left for the same command")
            break
        result = result_of(case)
        wrong += _is_wrong(result)
        found.add(case, result)
        if case["graph"] != shown and "nodes" in result:
            shown = case["graph"]
            print(f"\n{report.graph_line(shown, result)}")
        print(report.case_lines(case, result), flush=True)
    if first is not None and found.has(first):
        differ = records.differences(found.of(first), result_of(first))
        if differ and args.cases:
            found.remove(first)
            wrong += 1
        kept = "not kept" if args.cases else "not steady"
        if differ:
            print(f"{report.name_of(first)}: {kept}, because the same at the end gave {'; '.join(differ)}")
    if means := report.means(found.results["cases"]):
        print("\n".join(["", "geometric means over the graphs", *means]))
    return 1 if wrong else 0


def _is_wrong(result: dict) -> bool:
    """Whether the case, or a contestant of dfgnn in it, could not be measured."""
    ours = [c for c in result.get("contestants", []) if c["library"] == "dfgnn"]
    return "unavailable" in result or not ours or any("failed" in c for c in ours)
