"""The command line of ``python -m dfgnn.bench``, and the loop over graphs."""

import argparse
import gc
from pathlib import Path
from typing import Any

import torch

from .. import plan as schedule
from ..runtime import library as _library
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
from . import datasets, graphs, measure, report, twins
from .peers import PEERS
from .run import SAMPLE, Options, measure_graph
from .workloads import LAYERS, MODES
from .yardsticks import copy_bandwidth

DTYPES = ("float32", "bfloat16", "float16", "float64")


def _schedule(text: str) -> str:
    try:
        schedule.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _shape(text: str) -> tuple[int, int]:
    try:
        heads, dim = map(positive, text.split("x"))
    except (ValueError, argparse.ArgumentTypeError):
        raise wrong("heads x head size, such as 4x32", text) from None
    return heads, dim


def parser() -> Parser:
    result = Parser(
        prog="dfgnn.bench",
        description="Time the attention of dfgnn's layers beside two yardsticks, the vendor's plain "
        "neighbour sum (torch.sparse) and our own. Lists are separated by commas. The exit status is 1 if "
        "anything asked for could not be measured; a missing peer does not count.",
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
        help=f"auto, {', '.join(schedule.SCHEDULES)}, or one with the most edges of an item, 'natural<=512'",
    )
    add("--peers", type=listed(one_of(*PEERS)), default=(), help=", ".join(PEERS))
    add("--device", type=device, help="default: cuda if there is one, else cpu")
    add(
        "--budget",
        type=number(above=0),
        metavar="SECONDS",
        help="per measurement (default: 0.5; with --quick 0.1)",
    )
    add(
        "--check",
        choices=("full", "sample", "none"),
        default="full",
        help=f"errors against float64: of all results (full), of {SAMPLE} rows of the output, or none",
    )
    add("--oracle", action="store_true", help="measure every plan that the scheduler could have chosen, too")
    add("--quick", action="store_true", help="short measurements of a few small graphs")
    add("--json", type=file_to_write, metavar="FILE", help="write all results to it, anew after every graph")
    add("--commit", metavar="NAME", help="of the code in the results (default: git rev-parse HEAD)")
    return result


def main(argv: list[str] | None = None) -> int:
    usage = parser()
    args = usage.parse_args(argv)
    if args.oracle and "auto" not in args.schedule:
        usage.error("--oracle compares with what the scheduler chooses: --schedule has to hold auto")
    place = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda":
        try:
            _library.require_cuda_library()
        except RuntimeError as error:
            usage.error(f"--device {place}: {error}")
        place = torch.empty(0, device=place).device  # "cuda" becomes the current GPU
        torch.cuda.set_device(place)
    options = Options(
        layers=args.layers,
        shapes=args.shapes or tuple((h, d) for h in args.heads for d in args.head_dim),
        dtypes=args.dtype,
        modes=args.mode,
        schedules=args.schedule,
        peers=args.peers,
        budget=args.budget or (0.1 if args.quick else 0.5),
        check=args.check,
        oracle=args.oracle,
    )
    with interruptible(
        f"{args.json} has the graphs before this one" if args.json else "--json FILE keeps what is measured"
    ):
        return _run(args.graphs or _default_graphs(place, args.quick), place, options, args)


def _default_graphs(device: torch.device, quick: bool) -> tuple[str, ...]:
    if device.type == "cpu":
        return ("cora~",) if quick else ("cora~", "arxiv~")
    return ("cora~", "arxiv~", "pattern~") if quick else graphs.NAMES


def _run(names, device, options: Options, args) -> int:
    names = [each for name in names for each in twins.expand(name)]
    results: dict[str, Any] = {
        "environment": report.environment(device, args.commit),
        "options": vars(options),
        "copy_gb_s": copy_bandwidth(device, options.budget),
        "graphs": [],
        "yardsticks": [],
        "rows": [],
        "means": [],
    }
    text = {"graph": report.graph_lines, "yardstick": report.yardstick_lines, "row": report.row_lines}

    def emit(kind: str, record: dict) -> None:
        print(text[kind](record), flush=True)

    print(report.environment_line(results["environment"]))
    print(f"copying memory: {results['copy_gb_s']:.0f} GB/s, read and written")
    for name in names:
        label = name if datasets.is_spec(name) else Path(name).name
        try:
            graph, count = graphs.read(name, device, args.root)
        except (OSError, ValueError, ImportError, torch.OutOfMemoryError) as error:
            results["graphs"].append({"name": label, "unavailable": measure.reason(error)})
            emit("graph", results["graphs"][-1])
            continue
        measured = measure_graph(label, graph, options, emit, count, results["copy_gb_s"])
        results["graphs"].append(measured["graph"])
        results["yardsticks"] += measured["yardsticks"]
        results["rows"] += measured["rows"]
        results["means"] = report.means(results["rows"])
        report.write_json(args.json, results)
        del graph, measured
        gc.collect()
    print("\ngeometric means over the graphs")
    for record in results["means"]:
        print(report.mean_line(record))
    report.write_json(args.json, results)
    missing = [graph for graph in results["graphs"] if "unavailable" in graph]
    missing += [row for row in results["rows"] if "failed" in row]
    if missing:
        print(f"{len(missing)} graphs or rows were not measured")
    return 1 if missing else 0
