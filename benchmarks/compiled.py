"""What torch.compile makes of whole training steps: PyG's models and dfgnn's, eager and compiled, in turns.

    python benchmarks/compiled.py --device cuda --json benchmarks/results/h200-compile.json
    python benchmarks/compiled.py --device cpu --graphs cora --convs GATConv

Models, graphs and steps are those of host.py. "compiled" is ``torch.compile(model)``, "reduce-overhead" the
mode of that name (CUDA graphs). ``said`` is what was written to the log or warned of while a contestant
compiled and ran, ``breaks`` the graph breaks, ``skipped`` how often CUDA graphs were given up, ``parts`` into
how many they were divided: 0 is one. "Graph": dfgnn.nn's layers on a Graph, which was used before.
``--prepare`` compiles without timing, to fill the compiler's cache. An error after which the device does not
answer ends the run, with the contestant's name.
"""

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path

import host
import torch
import torch_geometric
import torch_geometric.nn as theirs
from torch._dynamo.utils import counters

import dfgnn
from dfgnn.bench import report
from dfgnn.nn import pyg as ours


class Held(torch.nn.Module):
    """dfgnn.nn's layer for a Graph, called as torch_geometric's."""

    def __init__(self, layer, skip=None):
        super().__init__()
        self.layer, self.skip = layer, skip

    def forward(self, x, graph):
        out = self.layer(graph, x).flatten(1)
        return out if self.skip is None else out + self.skip(x)


class OfGraphs:
    """torch_geometric's names of the layers that take a Graph."""

    @staticmethod
    def GATConv(size, out, heads):
        return Held(dfgnn.nn.GATConv(size, out, heads))

    @staticmethod
    def GATv2Conv(size, out, heads):
        return Held(dfgnn.nn.GATv2Conv(size, out, heads))

    @staticmethod
    def TransformerConv(size, out, heads):
        layer = dfgnn.nn.GraphTransformerConv(size, out, heads, allow_zero_in_degree=True)
        return Held(layer, torch.nn.Linear(size, heads * out))


CONTESTANTS = {
    "PyG": (theirs, None),
    "dfgnn": (ours, None),
    "PyG compiled": (theirs, {}),
    "dfgnn compiled": (ours, {"fullgraph": True}),
    "dfgnn reduce-overhead": (ours, {"fullgraph": True, "mode": "reduce-overhead"}),
    "dfgnn reduce-overhead, Graph": (OfGraphs, {"fullgraph": True, "mode": "reduce-overhead"}),
    "PyG reduce-overhead": (theirs, {"mode": "reduce-overhead"}),
}


class Said(logging.Handler):
    """What loggers and warnings say."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage()[:300])

    def show(self, message, kind, *_):
        self.lines.append(f"{kind.__name__}: {message}"[:300])

    def __enter__(self):
        self.lines = []
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, kind, *_: self.lines.append(
            f"{kind.__name__}: {message}"[:300]
        )
        for name in ("", "torch", "torch._inductor", "torch._dynamo"):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *error):
        self.caught.__exit__(*error)
        for name in ("", "torch", "torch._inductor", "torch._dynamo"):
            logging.getLogger(name).removeHandler(self)


def make(spec, edge_index, device, name):
    library, options = CONTESTANTS[name]
    if library is OfGraphs:
        graph = dfgnn.Graph.from_edge_index(edge_index, host.SIZES[spec[0]][0])
        loops = spec[1] != "TransformerConv"
        edge_index = graph.add_self_loops(remove_existing=True) if loops else graph
    training = host.Training(library, spec, edge_index, device)
    if library is OfGraphs:
        training.step()
    if options is not None:
        training.call = torch.compile(host.apart(training.model), **options)
    return training.step


def check_device(name: str, error: Exception, device: str) -> None:
    """Ends the run where the device has failed, and would fail whoever comes next."""
    try:
        host.synchronize(device)
    except RuntimeError:
        sys.exit(f"{name}: the device is lost, after {type(error).__name__}: {error}")


def contestants(spec, edge_index, args) -> tuple[dict, dict]:
    steps, notes = {}, {}
    for name in args.contestants:
        counters.clear()
        start = time.perf_counter()
        with Said() as said:
            try:
                step = make(spec, edge_index, args.device, name)
                for _ in range(5):
                    step()
                host.synchronize(args.device)
                steps[name] = step
            except Exception as error:
                said.lines.append(f"{type(error).__name__}: {error}"[:300])
                check_device(f"{spec[0]}, {spec[1]}: {name}", error, args.device)
        notes[name] = {
            "seconds": round(time.perf_counter() - start, 1),
            "said": sorted(set(said.lines)),
            "breaks": sum(counters["graph_break"].values()),
            "skipped": counters["inductor"]["cudagraph_skips"],
            "parts": counters["inductor"]["cudagraph_partitions"],
        }
    return steps, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graphs", nargs="+", default=["cora", "molecules-64"])
    parser.add_argument("--convs", nargs="+", default=["GATConv", "GATv2Conv", "TransformerConv"])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--seconds", type=float, default=1.5, help="to measure a model for")
    parser.add_argument("--prepare", action="store_true", help="compile only")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--commit", help="to write into the JSON; default: that of the source tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    environment = report.environment(torch.device(args.device), args.commit)
    environment["torch_geometric"] = torch_geometric.__version__
    results: dict = {"environment": environment, "models": []}
    for spec in host.MODELS:
        name, conv, layers, heads, size = spec
        if name not in args.graphs or conv not in args.convs:
            continue
        torch._dynamo.reset()
        edge_index, is_random = host.edges_of(name, args.device)
        steps, notes = contestants(spec, edge_index, args)
        if args.prepare:
            print(name, conv, {key: note["seconds"] for key, note in notes.items()}, flush=True)
            continue
        times = host.alternate(steps, args.seconds, args.device)
        row = {
            "graph": name, "random": is_random, "nodes": host.SIZES[name][0], "edges": edge_index.shape[1],
            "model": f"{conv} x {layers}, {heads} x {size}",
            "ms": {key: round(statistics.median(values), 4) for key, values in times.items()},
            "least_ms": {key: round(min(values), 4) for key, values in times.items()},
            "compiling": notes,
        }  # fmt: skip
        results["models"].append(row)
        report.write_json(args.json, results)  # whatever becomes of the rest
        print(f"{name:15} {row['model']:26} {json.dumps(row['ms'])}", flush=True)
        for key, note in notes.items():
            print(f"{'':15} {key}: {note}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
