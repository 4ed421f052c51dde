"""Measures reordering: a training step of attention before and after ``graph.reorder(method)``.

    python benchmarks/reorder.py --device cpu --json benchmarks/results/cpu-reorder.json
    python benchmarks/reorder.py --graphs ogbn-arxiv,debian-deps --heads 8 --head-dim 64

A step is forward and backward of the attention function with the gradients of all its inputs, float32. Its
time is taken three ways: on the original graph; on the reordered one, all tensors in the new order ("new");
and on the reordered one through ``r(function, ...)``, which permutes the inputs and restores the output at
every call ("kept"). All are run in turn, --repeats times. A speed-up is the median over the turns of original
/ reordered in the same turn, so that a machine that others use too does not favour one of them; medians and
minima of the times are in the JSON. Reordering itself is timed three times, with the new graph and both of
its CSRs. Needs the extras bench and reorder.

"random" is a random permutation: what it loses is what the original order of the graph is worth. Printed
in addition to the speed-ups: the largest difference of an output, in the user's order, from the original's,
relative to the largest value.
"""

import argparse
import math
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from score import json_files

from dfgnn import Graph
from dfgnn.bench import graphs, measure, report, workloads
from dfgnn.graph import METHODS

GRAPHS = ("ogbn-arxiv", "debian-deps", "github", "blogcatalog", "ogbl-ddi", "collab", "reddit-binary")
LAYERS = ("gat", "dot")
_REORDERINGS = 3
# A sample consists of as many calls as take about this time.
_SAMPLE_MS = 20


def reorder(graph, method):
    if method == "random":
        generator = torch.Generator().manual_seed(0)
        method = torch.randperm(graph.num_src, generator=generator).to(graph.device)
    r = graph.reorder(method)
    r.graph.csr(), r.graph.reverse_csr()
    return r


def permuted(work, r):
    """The same workload on the new graph, its tensors in the new order."""
    inputs = {name: r.permute(x.detach()).requires_grad_() for name, x in work.inputs.items()}
    return replace(work, graph=r.graph, inputs=inputs, grad_out=r.permute(work.grad_out))


def kept(work, r):
    """The attention of a workload on the new graph, its arguments and result in the user's order."""

    def attention(**inputs):
        def of_nodes(graph, *nodes):
            return work.layer.attention(graph, **dict(zip(inputs, nodes)))

        return r(of_nodes, *inputs.values())

    return attention


def times_of(steps, device, repeats):
    """{name: ms of a call, one for each turn}."""
    calls = {}
    for name, step in steps.items():
        step()  # the first call plans and allocates
        calls[name] = max(math.ceil(_SAMPLE_MS / measure.milliseconds(step, device)[0]), 1)

    def sample(step, count):
        for _ in range(count):
            step()

    times = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            elapsed, _ = measure.milliseconds(partial(sample, step, calls[name]), device)
            times[name].append(elapsed / calls[name])
    return times


def summary(times, original):
    return {
        "median": statistics.median(times),
        "min": min(times),
        "speedup": statistics.median(before / after for before, after in zip(original, times)),
    }


def measure_layer(layer, graph, reordered, args):
    """{"original": times, method: {"new": times, "kept": times, "difference": of the output}}."""
    work = workloads.Workload.make(workloads.LAYERS[layer], graph, args.heads, args.head_dim, torch.float32)
    attention = partial(work.layer.attention, graph)
    steps = {"original": work.call(attention, "train")}
    differences = {}
    (expected,) = work.call(attention, "forward")()
    for method, r in reordered.items():
        new = permuted(work, r)
        steps[method, "new"] = new.call(partial(work.layer.attention, r.graph), "train")
        steps[method, "kept"] = work.call(kept(work, r), "train")
        (out,) = new.call(partial(work.layer.attention, r.graph), "forward")()
        differences[method] = float((r.restore(out) - expected).abs().max() / expected.abs().max())
    times = times_of(steps, graph.device, args.repeats)
    original = times.pop("original")
    row = {"original": {"median": statistics.median(original), "min": min(original)}}
    for method, difference in differences.items():
        kinds = {kind: summary(times[method, kind], original) for kind in ("new", "kept")}
        row[method] = kinds | {"difference": difference}
    return row


def measure_graph(name, device, args):
    try:
        graph = graphs.load(name, device)
    except (OSError, ImportError) as error:
        return {"graph": name, "unavailable": measure.reason(error)}
    graph.reverse_csr()
    reordered, milliseconds = {}, {}
    for method in (*METHODS, "random"):
        runs = [measure.milliseconds(partial(reorder, graph, method), device) for _ in range(_REORDERINGS)]
        times = [elapsed for elapsed, _ in runs]
        milliseconds[method] = {"median": statistics.median(times), "min": min(times)}
        reordered[method] = runs[0][1]
    layers = {layer: measure_layer(layer, graph, reordered, args) for layer in LAYERS}
    sizes = {"graph": name, "nodes": graph.num_src, "edges": graph.num_edges}
    return sizes | {"reorder_ms": milliseconds, "layers": layers}


def text(row) -> str:
    if "unavailable" in row:
        return f"{row['graph']}: not measured: {row['unavailable']}"
    lines = [f"{row['graph']}: {row['nodes']:,} nodes, {row['edges']:,} edges"]
    for layer, found in row["layers"].items():
        lines.append(f"  {layer:10} original {found['original']['median']:9.2f} ms")
        for method, ms in row["reorder_ms"].items():
            new, other = found[method]["new"], found[method]["kept"]
            lines.append(
                f"    {method:10} new {new['median']:12.2f} ms {new['speedup']:5.2f} x   "
                f"kept {other['median']:9.2f} ms {other['speedup']:5.2f} x   "
                f"reordering {ms['median']:7.0f} ms   differs {found[method]['difference']:.0e}"
            )
    return "\n".join(lines)


def warm_up(device) -> None:
    """Imports the libraries before anything is timed."""
    ring = torch.arange(8, device=device)
    graph = Graph.from_coo(ring, ring.roll(1))
    for method in METHODS:
        graph.reorder(method)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", default=",".join(GRAPHS), help="comma-separated names of dfgnn-bench")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--commit", help="recorded; default: that of the working tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    environment = report.environment(device, args.commit)
    print(report.environment_line(environment))
    shape = {"heads": args.heads, "head_dim": args.head_dim, "dtype": "float32", "repeats": args.repeats}
    results = {"environment": environment, "threads": args.threads, **shape, "graphs": []}
    warm_up(device)
    for name in args.graphs.split(","):
        results["graphs"].append(measure_graph(name, device, args))
        print(text(results["graphs"][-1]), flush=True)
        json_files.write_json(args.json, results)


if __name__ == "__main__":
    main()
