"""Arguments, and the loop over graphs."""

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch

from .. import plan as schedule
from ..runtime import library as _library
from . import compare, datasets, graphs, measure, plots, report, twins
from .peers import PEERS
from .run import SAMPLE, Options, measure_graph
from .workloads import LAYERS, MODES
from .yardsticks import copy_bandwidth

DTYPES = ("float32", "bfloat16", "float16", "float64")


def _list(*allowed: str):
    def parse(text: str) -> tuple[str, ...]:
        values = tuple(text.split(","))
        for value in values:
            if allowed and value not in allowed:
                raise argparse.ArgumentTypeError(f"expected {', '.join(allowed)}, got {value!r}")
        return values

    return parse


def _schedules(text: str) -> tuple[str, ...]:
    values = tuple(text.split(","))
    for value in values:
        try:
            schedule.parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return values


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    shapes = []
    for shape in text.split(","):
        heads, dim = _sizes(shape.replace("x", ","))  # or ValueError
        shapes.append((heads, dim))
    return tuple(shapes)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="dfgnn.bench",
        description="Time the attention of dfgnn's layers beside two yardsticks, the vendor's plain "
        "neighbour sum (torch.sparse) and our own. Lists are separated by commas. The exit status is 1 if "
        "anything asked for could not be measured; a missing peer does not count.",
        epilog="dfgnn.bench compare BEFORE.json AFTER.json lists regressions; "
        "dfgnn.bench plot RESULTS.json FOLDER draws the pictures of an earlier run.",
    )
    add = result.add_argument
    add("--layers", type=_list(*LAYERS), default=tuple(LAYERS))
    add(
        "--graphs",
        type=_list(),
        help=f"names ({', '.join(graphs.NAMES)}; er-N-D: Erdős–Rényi, N nodes, mean degree D; er: a sweep), "
        ".npz and .mtx files, or data sets of a library, such as ogb:ogbn-arxiv, pyg:Planetoid/Cora, "
        f"dgl:CoraGraphDataset, pyg:TUDataset/COLLAB@256 ({datasets.BATCH} graphs unless @ gives a number)",
    )
    add("--root", type=Path, default=graphs.ROOT, help="folder of what is downloaded (%(default)s)")
    add("--heads", type=_sizes, default=(4,), metavar="4")
    add("--head-dim", type=_sizes, default=(32,), metavar="32")
    add("--shapes", type=_shapes, metavar="4x32,1x128", help="heads x head size, instead of the two above")
    add("--dtype", type=_list(*DTYPES), default=("float32",), help=", ".join(DTYPES))
    add("--mode", type=_list(*MODES), default=MODES, help="forward, train (forward and backward)")
    add(
        "--schedule",
        type=_schedules,
        default=("auto",),
        metavar="auto",
        help=f"auto, {', '.join(schedule.SCHEDULES)}, or one with the most edges of an item, 'natural<=512'",
    )
    add("--peers", type=_list(*PEERS), default=(), help=", ".join(PEERS))
    add("--device", type=torch.device, help="cuda if there is one, else cpu")
    add("--budget", type=float, help="seconds per measurement (0.5; with --quick 0.1)")
    add(
        "--check",
        choices=("full", "sample", "none"),
        default="full",
        help=f"errors against float64: of all results (full), of {SAMPLE} rows of the output, or none",
    )
    add("--oracle", action="store_true", help="measure every plan that the scheduler could have chosen, too")
    add("--quick", action="store_true", help="short measurements of a few small graphs")
    add("--json", type=Path, help="write all results to this file, anew after every graph")
    add("--plot", type=Path, metavar="FOLDER", help="draw pictures of the results (needs matplotlib)")
    add("--commit", help="name of the code in the results (default: git rev-parse HEAD)")
    return result


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        return compare.main(argv[1:])
    if argv[:1] == ["plot"]:
        return plots.main(argv[1:])
    usage = parser()
    args = usage.parse_args(argv)
    if args.oracle and "auto" not in args.schedule:
        usage.error("--oracle compares with what the scheduler chooses: --schedule has to hold auto")
    if args.plot:  # before an hour of measurements
        try:
            plots.require_matplotlib()
        except ImportError as error:
            usage.error(str(error))
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        _library.require_cuda_library()
        device = torch.empty(0, device=device).device  # "cuda" becomes the current GPU
        torch.cuda.set_device(device)
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
    return _run(args.graphs or _default_graphs(device, args.quick), device, options, args)


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
        found = measure_graph(label, graph, options, emit, count, results["copy_gb_s"])
        results["graphs"].append(found["graph"])
        results["yardsticks"] += found["yardsticks"]
        results["rows"] += found["rows"]
        results["means"] = report.means(results["rows"])
        report.write_json(args.json, results)
        del graph, found
        gc.collect()
    print("\ngeometric means over the graphs")
    for record in results["means"]:
        print(report.mean_line(record))
    report.write_json(args.json, results)
    if args.plot:
        for line in plots.draw(results, args.plot):
            print(line)
    missing = [graph for graph in results["graphs"] if "unavailable" in graph]
    missing += [row for row in results["rows"] if "failed" in row]
    if missing:
        print(f"{len(missing)} graphs or rows were not measured")
    return 1 if missing else 0
