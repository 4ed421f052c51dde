#!/usr/bin/env python
"""The bar chart of README.md, from the results in benchmarks/results.

    python scripts/readme_chart.py [docs/pictures/step-times.png]

Beside it goes the same on a dark ground, step-times-dark.png.

Training steps (forward + backward) in milliseconds. On the GPU the attention alone, of one run, beside PyG's
operations and turbo-gnn's kernels; on the CPU whole layers, projections included, the fastest of steps that
alternate with DGL's or PyG's. DGL is in the second panel only, because it has no release for the torch of the
GPU's run.
"""

import json
import sys
from pathlib import Path

from dfgnn.bench.palette import COLOURS, ON_DARK
from dfgnn.runtime.programs import Parser, file_to_write

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "step-times.png"
GRAPH = "ogbn-arxiv"
NAMES = {"gat": "GAT", "gatv2": "GATv2", "dot": "dot product"}
CPU = {"part": "layers", "graph": "PubMed", "threads": 2}
LIBRARIES = {"dgl": "DGL", "pyg": "PyG"}


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def gpu(results: dict) -> dict[str, dict[str, float]]:
    """Layer -> library -> ms: attention in float32 on GRAPH; calls from Python, as a user makes them."""
    bars = {}
    for row in results["rows"]:
        if (row["graph"], row["dtype"], row["mode"]) == (GRAPH, "float32", "train"):
            times = bars[NAMES[row["layer"]]] = {"dfgnn": row["eager"]["median"]}
            for name, peer in row["peers"].items():
                if "eager" in peer:
                    times["PyG" if name == "pyg" else name] = peer["eager"]["median"]
    return bars


def cpu(runs: list[dict]) -> dict[str, dict[str, float]]:
    """Layer -> library -> ms: where both libraries have it, dfgnn's is the slower of its two of that name."""
    bars: dict[str, dict[str, float]] = {}
    for run in (run for run in runs if CPU.items() <= run.items()):
        dot = {"dgl": "DotGatConv", "pyg": "TransformerConv"}[run["library"]]
        times = bars.setdefault(dot if run["layer"] == "dot" else f"{run['layer']}Conv", {"dfgnn": 0.0})
        times["dfgnn"] = max(times["dfgnn"], run["dfgnn"]["min"])
        times[LIBRARIES[run["library"]]] = run["theirs"]["min"]
    return bars


def panel(axes, title: str, groups: dict[str, dict[str, float]]) -> None:
    place, ticks = 0.0, []
    for group, bars in groups.items():
        places = [place + k for k in range(len(bars))]
        for y, (library, value) in zip(places, bars.items()):
            axes.barh(y, value, color=COLOURS[library], height=0.85)
            text = f" {library} {value:.3g} ms" if value < 1000 else f" {library} {value:,.0f} ms"
            axes.text(value, y, text, va="center", fontsize=9)
        ticks.append((sum(places) / len(places), group))
        place = places[-1] + 1.8
    axes.set_yticks(*zip(*ticks))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(value for bars in groups.values() for value in bars.values()))
    axes.set_xlabel("milliseconds for a training step, less is better")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("picture", nargs="?", type=file_to_write, default=PICTURE, metavar="FILE.png")
    picture = parser.parse_args(argv).picture
    import matplotlib

    matplotlib.use("Agg")
    draw(picture)
    with matplotlib.rc_context(ON_DARK):
        draw(picture.with_stem(f"{picture.stem}-dark"))
    return 0


def draw(path: Path) -> None:
    from matplotlib import pyplot

    peers, table = map(read, ("h200-peers.json", "cpu-table.json"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    edges = next(graph["edges"] for graph in peers["graphs"] if graph["name"] == GRAPH)
    panel(left, f"{peers['environment']['gpu']}: attention on {GRAPH}, {edges:,} edges", gpu(peers))
    edges = next(run["edges"] for run in table["runs"] if run["graph"] == CPU["graph"])
    cpu_name = table["environment"]["cpu"].replace("(R)", "").removesuffix(" Processor")
    title = f"{cpu_name}, {CPU['threads']} threads: layers on {CPU['graph']}, {edges:,} edges"
    panel(right, title, cpu(table["runs"]))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
