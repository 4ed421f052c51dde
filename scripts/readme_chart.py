#!/usr/bin/env python
"""The bar chart of README.md, from the results in benchmarks/results.

    python scripts/readme_chart.py [docs/pictures/step-times.png]

Training steps (forward + backward) in milliseconds. On the GPU the attention alone, of one run, beside PyG's
operations and turbo-gnn's kernels; on the CPU whole layers, projections included, beside DGL's and PyG's. DGL
is in the second panel only, because it has no release for the torch of the GPU's run.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "step-times.png"
COLORS = {"dfgnn": "#c0392b", "PyG": "#7f8c8d", "turbo-gnn": "#2e86c1", "DGL": "#b7950b"}
GRAPH = "ogbn-arxiv"
NAMES = {"gat": "GAT", "gatv2": "GATv2", "dot": "dot product"}
LAYERS = ("GATConv", "GATv2Conv", "AGNNConv")  # what both DGL and PyG have


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


def cpu(dgl: dict, pyg: dict) -> dict[str, dict[str, float]]:
    """Layer -> library -> ms: dfgnn's is the slower of its two layers of that name."""
    runs = {"DGL": dgl["graphs"][0], "PyG": pyg["graphs"][0]}
    if len({(run["graph"], run["nodes"], run["edges"]) for run in runs.values()}) != 1:
        raise ValueError("expected results of DGL and PyG on the same graph")
    bars = {}
    for layer in LAYERS:
        found = {name: run["layers"][layer] for name, run in runs.items()}
        ours = max(times["dfgnn"]["training"]["median"] for times in found.values())
        theirs = {name: times["upstream"]["training"]["median"] for name, times in found.items()}
        bars[layer] = {"dfgnn": ours, **theirs}
    return bars


def panel(axes, title: str, groups: dict[str, dict[str, float]]) -> None:
    place, ticks = 0.0, []
    for group, bars in groups.items():
        places = [place + k for k in range(len(bars))]
        for y, (library, value) in zip(places, bars.items()):
            axes.barh(y, value, color=COLORS[library], height=0.85)
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peers, dgl, pyg = map(read, ("h200-peers.json", "cpu-layers-dgl.json", "cpu-layers-pyg.json"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.9), layout="constrained")
    edges = next(graph["edges"] for graph in peers["graphs"] if graph["name"] == GRAPH)
    panel(left, f"{peers['environment']['gpu']}: attention on {GRAPH}, {edges / 1e6:.1f}M edges", gpu(peers))
    graph, host = dgl["graphs"][0], dgl["environment"]
    title = f"{host['cpu']}, {host['threads']} threads: whole layers, {graph['edges']:,} edges"
    panel(right, title, cpu(dgl, pyg))
    figure.savefig(argv[0] if argv else PICTURE, dpi=110, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
