"""Draws pictures of a result file: ``--plot FOLDER``, or ``dfgnn.bench plot RESULTS.json FOLDER`` later.

``bars-*``      one per layer, shape, dtype and mode: the ratio to passes x floor on every graph
``degrees-*``   one per graph: its degrees, and which rows each plan splits
``roofline-*``  one per feature width and dtype: gathered GB/s against the reuse of a graph's rows

A roofline's x is how many bytes a pass gathers for every byte that it must move (features once in and once
out, indices once). No kernel can gather faster than x times the bandwidth of copying, unless the graph's rows
stay in cache between calls; one without any cache would gather at the bandwidth of copying.

Pictures are drawn from the JSON alone. A picture for which the file lacks data is named instead of drawn.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..runtime.programs import Parser, existing_file, folder_to_write
from .palette import colour_of
from .peers import SPEEDUPS
from .report import geometric_mean, plan_text, read_json

_CASE = ("layer", "heads", "head_dim", "dtype", "mode")
_WHOLE, _SHARED, _SPLIT, _FLOOR = "#4c78a8", "#72b7b2", "#e45756", "#222222"
_COLOURS = {"gat": "#4c78a8", "gatv2": "#f58518", "dot": "#54a24b"}
_MARKERS = {"forward": "o", "train": "^"}


def main(argv: list[str]) -> int:
    parser = Parser(prog="dfgnn.bench plot", description="Draw the pictures of an earlier run into FOLDER.")
    parser.add_argument("results", type=existing_file, metavar="RESULTS.json", help="of --json")
    parser.add_argument("folder", type=folder_to_write, metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        require_matplotlib()
        results = read_json(args.results, _CASE)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    for line in draw(results, args.folder):
        print(line)
    return 0


def require_matplotlib() -> None:
    """Raises an ImportError that says what to install, unless matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib: pip install matplotlib ({error})") from error


def draw(results: dict, folder: Path) -> list[str]:
    """Writes every picture as a PNG and returns a line for each: its path, or why it was not drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = dict.fromkeys(tuple(row[key] for key in _CASE) for row in results["rows"])
    jobs: list[tuple[str, Callable, Any]] = []
    jobs += [("bars-{}-{}x{}-{}-{}".format(*case), bars, case) for case in cases]
    jobs += [(f"degrees-{graph['name']}", degrees, graph["name"]) for graph in results["graphs"]]
    kinds = dict.fromkeys((row["heads"] * row["head_dim"], row["dtype"]) for row in results["rows"])
    jobs += [(f"roofline-{width}-{dtype}", roofline, (width, dtype)) for width, dtype in kinds]
    lines = []
    for name, function, argument in jobs:
        path = folder / (re.sub(r"[^\w.~-]+", "-", name) + ".png")
        try:
            function(results, argument).savefig(path)
        except LookupError as error:
            lines.append(f"{path.name}: not drawn: {error.args[0]}")
        else:
            lines.append(str(path))
    return lines


def bars(results: dict, case: tuple):
    """Ratios to passes x floor: a group of bars for each graph, a bar for each schedule and peer.

    Ratios are of kernel times if every measured row and peer has them. Raises LookupError if no row has a
    ratio.
    """
    rows = [row for row in results["rows"] if tuple(row[key] for key in _CASE) == case]
    times = [row["x_floor"] for row in rows if "x_floor" in row]
    peers = [ratios for row in rows for ratios in row.get("peers", {}).values() if "speedup" in ratios]
    by_kernels = all("kernels" in x for x in times) and all(SPEEDUPS["kernels"] in ratios for ratios in peers)
    kind = "kernels" if by_kernels else "eager"
    series: dict[str, dict[str, float | None]] = {}
    for row in rows:
        ratio = row.get("x_floor", {}).get(kind)
        name = "dfgnn" if row["schedule"] == "auto" else f"dfgnn {row['schedule']}"
        series.setdefault(name, {})[row["graph"]] = ratio
        for peer, ratios in row.get("peers", {}).items():
            slower = ratios.get(SPEEDUPS[kind])
            series.setdefault(peer, {})[row["graph"]] = ratio * slower if ratio and slower else None
    values = [v for by_graph in series.values() for v in by_graph.values() if v]
    if not values:
        raise LookupError("no row has a ratio to the floor")

    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    figure = _figure(max(5.0, 1.5 + 0.22 * len(graphs) * (len(series) + 1)), 4.2)
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    if max(values) > 8:
        axes.set_yscale("log")
    for k, (name, by_graph) in enumerate(series.items()):
        place = [i + (k + 0.5) * width - 0.4 for i in range(len(graphs))]
        drawn = {x: by_graph[g] for x, g in zip(place, graphs) if by_graph.get(g)}
        if drawn:
            label = f"{name}, mean {geometric_mean(drawn.values()):.2f}"
            axes.bar(
                list(drawn), list(drawn.values()), width, label=label, color=colour_of(name, f"C{k + 4}")
            )
        else:
            axes.plot([], [], " ", label=f"{name}, not measured")
        for x in set(place) - set(drawn):
            axes.text(x, min(*values, 1), "not measured", rotation=90, size=6, ha="center", va="bottom")
    axes.axhline(1, color=_FLOOR, linestyle="--", linewidth=1, label="floor: passes x plain sum")
    axes.set_xticks(range(len(graphs)), graphs, rotation=30, ha="right")
    axes.set_ylabel(f"time / (passes x floor), {kind}")
    axes.set_title("{} {}x{} {} {}".format(*case))
    _legend(figure)
    return figure


def degrees(results: dict, name: str):
    """Rows and edges by degree, in powers of two, above a strip for every plan of the graph's rows.

    Raises LookupError if the file does not hold the degrees or a plan.
    """
    graph = next(graph for graph in results["graphs"] if graph["name"] == name)
    if "degrees" not in graph:
        raise LookupError(graph.get("unavailable", "the file holds no degrees: it is of an earlier version"))
    plans: dict[str, dict] = {}
    for row in results["rows"]:
        for direction, plan in row.get("plan", {}).items() if row["graph"] == name else ():
            plans.setdefault(f"{direction}: {plan_text({direction: plan})}", plan)
    if not plans:
        raise LookupError("no row was measured, so that there is no plan")
    counts = graph["degrees"]

    figure = _figure(7.0, 3.2 + 0.32 * len(plans))
    above, below = figure.subplots(2, sharex=True, height_ratios=(3.2, 0.32 * len(plans)))
    bins = range(1, len(counts["rows"]) + 1)  # 0 is for rows without edges
    above.bar([x - 0.2 for x in (0, *bins)], [counts["empty"], *counts["rows"]], 0.4, label="rows")
    above.bar([x + 0.2 for x in bins], counts["edges"], 0.4, label="edges", color="#b8b8b8")
    above.set_yscale("log")
    above.set_ylim(bottom=0.5)  # so that a bin with one row is visible
    _legend(figure)
    above.set_title(f"{name}: {graph['nodes']:,} rows, {graph['edges']:,} edges")
    start, end = (-0.5 if counts["empty"] else 0.5), _place(graph["max_degree"] + 1)
    for y, plan in enumerate(plans.values()):
        for left, right, text, color in _bands(plan, start, end):
            below.barh(y, right - left, left=left, color=color)
            if right - left > 0.5:
                below.text((left + right) / 2, y, text, ha="center", va="center", size=6, color="white")
    below.set_yticks(range(len(plans)), list(plans), size=7)
    ticks = [0, *bins]
    below.set_xticks(ticks, ["0", *(f"$2^{{{k}}}$" for k in range(len(bins)))])
    below.set_xlabel("degree (from this power of two to the next)")
    return figure


def _bands(plan: dict, start: float, end: float) -> list[tuple]:
    """(lowest degree, highest degree, how the plan treats rows of these degrees, colour)."""
    if plan["schedule"] == "tiles":
        return [(start, end, "windows of 64 rows", _SHARED)]
    if plan.get("source_parts", 1) > 1:
        return [(start, end, "cut where sources pass to the next part", _SPLIT)]
    cut = min(_place(plan["max_edges"] + 1), end)
    packed = plan["schedule"] == "packed"
    whole = ("several rows per warp", _SHARED) if packed else ("whole rows", _WHOLE)
    return [(start, cut, *whole), (cut, end, "split", _SPLIT)]


def roofline(results: dict, kind: tuple):
    """Gathered GB/s of every row of a (feature width, dtype), against the reuse of the graph's rows.

    Raises LookupError if the file does not hold the bandwidth of copying, or no row was measured.
    """
    if "copy_gb_s" not in results:
        raise LookupError("the file holds no bandwidth of copying: it is of an earlier version")
    width, dtype = kind
    rows = [
        row
        for row in results["rows"]
        if (row["heads"] * row["head_dim"], row["dtype"]) == kind and "gathered_gb_s" in row
    ]
    if not rows:
        raise LookupError("no row was measured")
    itemsize = getattr(torch, dtype).itemsize
    sizes = {graph["name"]: graph for graph in results["graphs"] if "nodes" in graph}

    def gathered(graph):
        return sizes[graph]["edges"] * width * itemsize

    def reuse(graph):
        moved = 2 * sizes[graph]["nodes"] * width * itemsize + 4 * sizes[graph]["edges"]
        return gathered(graph) / moved

    figure = _figure(7.0, 5.0)
    axes = figure.add_subplot(xscale="log", yscale="log")
    for layer, mode in dict.fromkeys((row["layer"], row["mode"]) for row in rows):
        mine = [row for row in rows if (row["layer"], row["mode"]) == (layer, mode)]
        axes.plot(
            [reuse(row["graph"]) for row in mine],
            [row["gathered_gb_s"] for row in mine],
            _MARKERS[mode],
            color=_COLOURS[layer],
            alpha=0.7,
            label=f"{layer} {mode}",
        )
    floors = {
        y["graph"]: gathered(y["graph"]) / y["floor"].get("kernels", y["floor"].get("eager")) / 1e6
        for y in results["yardsticks"]
        if (y["width"], y["dtype"]) == kind and y["floor"]
    }
    x = [reuse(graph) for graph in floors]
    axes.plot(x, list(floors.values()), "_", color=_FLOOR, markersize=16, label="floor: plain sum")
    for graph, y in floors.items():
        axes.annotate(graph, (reuse(graph), y), (4, 4), textcoords="offset points", size=6)
    copy = results["copy_gb_s"]
    span = [min(*x, 1.0), max(*x, 1.0) * 1.5] if x else [1.0, 1.5]
    axes.plot(span, [copy * value for value in span], color=_FLOOR, label="copying x reuse")
    axes.axhline(copy, color=_FLOOR, linestyle=":", label=f"copying, {copy:.0f} GB/s")
    axes.set_xlabel("reuse: bytes gathered / bytes that have to be moved, per pass")
    axes.set_ylabel("gathered GB/s")
    axes.set_title(f"F = {width}, {dtype}")
    axes.set_xticks([k * 10**e for e in range(-1, 5) for k in (1, 2, 5)], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.8 * span[0], 1.2 * span[1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    _legend(figure)
    return figure


def _place(degree: int) -> float:
    """Where a degree starts on the axis of ``degrees``."""
    return math.log2(degree) + 0.5


def _figure(width: float, height: float):
    from matplotlib.figure import Figure  # pyplot would need a display, and figures to be closed

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def _legend(figure) -> None:
    """Puts the legend below the axes, where it hides nothing."""
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
