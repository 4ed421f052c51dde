"""A layer of torch_geometric and dfgnn's in its place, on the CPU, with a new edge_index at every step.

    python benchmarks/fresh_graphs.py [--json benchmarks/results/cpu-fresh-graphs.json] [--threads 1 2]

What a loader of mini-batches does: the edges are a new tensor each time, so that whatever a layer derives
from them (here CSR, reverse CSR and plans) is derived again. A step is forward and backward of one layer,
with gradients of the input and of all parameters. The contestants, torch_geometric's layer, dfgnn's, and
dfgnn's with the same tensor at every step, take turns step by step, so that when the machine is busy it is
busy for all of them. Times are medians by the clock; beside them those of the processor's time of the whole
process, which other processes disturb less.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch_geometric
import torch_geometric.nn

from dfgnn.bench import report
from dfgnn.nn import pyg

SIZES = ((50, 200), (2_000, 5_000), (8_000, 12_672), (20_000, 100_000))
LAYERS = ("GATConv", "GATv2Conv", "TransformerConv")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-channels", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--out-channels", type=int, default=8, help="per head")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--seconds", type=float, default=3.0, help="to measure a layer on a graph for")
    parser.add_argument("--commit", help="to write into the JSON; default: that of the source tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


def summary(seconds: list[float]) -> dict:
    ms = [1e3 * s for s in seconds]
    fifths = statistics.quantiles(ms, n=5)
    found = {"median": statistics.median(ms), "p20": fifths[0], "p80": fifths[-1]}
    return {key: round(value, 4) for key, value in found.items()}


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def measure(name: str, num_nodes: int, num_edges: int, args: argparse.Namespace) -> dict:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    x = torch.randn(num_nodes, args.in_channels, generator=generator).requires_grad_()
    shape = args.in_channels, args.out_channels, args.heads
    theirs, ours = (getattr(library, name)(*shape) for library in (torch_geometric.nn, pyg))
    ours.load_state_dict(theirs.state_dict())
    grad = torch.randn(num_nodes, args.heads * args.out_channels, generator=generator)

    def step(layer, edges) -> list[torch.Tensor]:
        out = layer(x, edges)
        return [out, *torch.autograd.grad(out, (x, *layer.parameters()), grad)]

    expected, found = step(theirs, edge_index), step(ours, edge_index)
    difference = max(map(relative_difference, found, expected))

    contestants = {"pyg": (theirs, True), "dfgnn": (ours, True), "dfgnn, same graph": (ours, False)}
    clock: dict[str, list[float]] = {key: [] for key in contestants}
    processor: dict[str, list[float]] = {key: [] for key in contestants}
    end = time.perf_counter() + args.seconds
    warm_up = 5
    while warm_up or time.perf_counter() < end or len(clock["pyg"]) < 10:
        for key, (layer, fresh) in contestants.items():
            edges = edge_index.clone() if fresh else edge_index
            began = time.perf_counter(), time.process_time()
            step(layer, edges)
            took = time.perf_counter() - began[0], time.process_time() - began[1]
            if not warm_up:
                clock[key].append(took[0]), processor[key].append(took[1])
        warm_up = max(warm_up - 1, 0)
    result = {
        key: {"ms": summary(clock[key]), "processor_ms": summary(processor[key])} for key in contestants
    }
    medians = {key: result[key]["ms"]["median"] for key in contestants}
    spent = {key: result[key]["processor_ms"]["median"] for key in contestants}
    return {
        **result,
        "samples": len(clock["pyg"]),
        "speedup": round(medians["pyg"] / medians["dfgnn"], 3),
        "speedup_processor": round(spent["pyg"] / spent["dfgnn"], 3),
        "planning_share": round(1 - medians["dfgnn, same graph"] / medians["dfgnn"], 3),
        "difference": difference,
    }


def main() -> None:
    args = arguments()
    environment = report.environment(torch.device("cpu"), args.commit)
    environment["torch_geometric"] = torch_geometric.__version__
    results = {
        "environment": environment,
        "shape": {key: getattr(args, key) for key in ("in_channels", "heads", "out_channels")},
        "runs": [],
    }
    print(f"{'threads':>7} {'nodes':>7} {'edges':>8} {'layer':16} {'pyg':>9} {'dfgnn':>9} {'same graph':>11}")
    for threads in args.threads:
        torch.set_num_threads(threads)
        for num_nodes, num_edges in SIZES:
            for name in args.layers:
                found = measure(name, num_nodes, num_edges, args)
                ms = [found[key]["ms"]["median"] for key in ("pyg", "dfgnn", "dfgnn, same graph")]
                print(
                    f"{threads:7} {num_nodes:7,} {num_edges:8,} {name:16} {ms[0]:6.3f} ms {ms[1]:6.3f} ms "
                    f"{ms[2]:8.3f} ms  {found['speedup']:.2f} x ({found['speedup_processor']:.2f} x by "
                    f"processor time), graph {100 * found['planning_share']:.0f} %",
                    flush=True,
                )
                run = {"threads": threads, "nodes": num_nodes, "edges": num_edges, "layer": name}
                results["runs"].append({**run, "load": round(os.getloadavg()[0], 1), **found})
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written: {args.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
