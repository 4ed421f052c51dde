"""What the host costs: whole training steps of PyG's models and dfgnn's, on the sizes that most people train.

    python benchmarks/host.py --device cuda --json benchmarks/results/h200-host.json
    python benchmarks/host.py --device cpu --graphs cora molecules-64 --seconds 1

A step is forward, loss, backward and one step of Adam (fused on CUDA). Contestants: PyG's layers eagerly and
under torch.compile, dfgnn's likewise, both under bf16 autocast, both with a new edge_index tensor at every
step, and dfgnn's step captured in a CUDA graph (``dfgnn.capture``). They take turns step by step, so that
what disturbs one disturbs all; times are medians by the clock, of steps that each wait for the device.
``kernels`` counts what a step launches. ``function`` is a training step of the attention function alone: host
time, without waiting for the device. ``fresh`` has single layers with a new edge_index each time.

On CUDA all that is eager is measured in both ways: with backward in PyTorch's thread for the GPU, its
default, and, "calling thread", under ``torch.autograd.set_multithreading_enabled(False)``. ``speedup`` has
ratios of like with like, and of dfgnn in the calling thread over PyG's default.

Structure and sizes are of the data sets that DFGNN_DATA or a download has, else of random graphs of the same
numbers of nodes and edges (``random`` in the results); features and labels are random.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
import types
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric.nn as theirs
from torch import nn

import dfgnn
import dfgnn.bench.graphs
from dfgnn.bench import report
from dfgnn.nn import pyg as ours

# name: nodes, directed edges with loops left to the layers, features, classes
SIZES = {
    "cora": (2_708, 10_556, 1_433, 7),
    "citeseer": (3_327, 9_104, 3_703, 6),
    "pubmed": (19_717, 88_648, 500, 3),
    "molecules-64": (1_632, 3_504, 32, 2),
    "molecules-1024": (26_000, 56_000, 32, 2),
    "minesweeper": (10_000, 78_804, 64, 2),
    "arxiv": (169_343, 2_315_598, 128, 40),
}
PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
# graph: (conv, layers, heads, size of a head)
MODELS = (
    ("cora", "GATConv", 2, 8, 8),
    ("cora", "GATv2Conv", 2, 8, 8),
    ("cora", "TransformerConv", 2, 8, 8),
    ("pubmed", "GATConv", 2, 8, 8),
    ("pubmed", "GATv2Conv", 2, 8, 8),
    ("pubmed", "TransformerConv", 2, 8, 8),
    ("molecules-64", "GATConv", 4, 4, 32),
    ("molecules-64", "GATv2Conv", 4, 4, 32),
    ("molecules-64", "TransformerConv", 4, 4, 32),
    ("arxiv", "GATConv", 3, 4, 32),
    ("arxiv", "GATv2Conv", 3, 4, 32),
    ("arxiv", "TransformerConv", 3, 4, 32),
    ("citeseer", "GATConv", 2, 1, 64),
    ("molecules-1024", "GATConv", 4, 4, 32),
    ("minesweeper", "GATConv", 15, 1, 64),
)
HERE = ", calling thread"
FRESH = ((50, 200), (2_000, 5_000), (20_000, 100_000))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graphs", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--convs", nargs="+", default=["GATConv", "GATv2Conv", "TransformerConv"])
    parser.add_argument("--seconds", type=float, default=2.0, help="to measure a model for, at most")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out, which takes minutes"
    )
    parser.add_argument("--only", nargs="+", choices=["models", "fresh", "function"], default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--commit", help="to write into the JSON; default: that of the source tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print results of CUDA as tables; no run")
    return parser.parse_args()


@functools.cache
def edges_of(name: str, device: str) -> tuple[torch.Tensor, bool]:
    """edge_index, and whether it is random."""
    nodes, edges, *_ = SIZES[name]
    folder = os.environ.get("DFGNN_DATA")
    try:
        if name in PLANETOID:
            from torch_geometric.io import read_planetoid_data

            raw = Path(folder or "") / "planetoid" / PLANETOID[name] / "raw"
            return read_planetoid_data(str(raw), PLANETOID[name].lower()).edge_index.to(device), False
        if name.startswith("molecules"):
            graph = dfgnn.bench.graphs.load("molhiv")
            src, dst = graph.edge_index
            keep = (src < nodes) & (dst < nodes) & (src != dst)
            return graph.edge_index[:, keep].to(device), False
        if name == "arxiv":
            src, dst = dfgnn.bench.graphs.load("ogbn-arxiv").edge_index
            return torch.stack([src, dst])[:, src != dst].to(device), False
        import numpy

        with numpy.load(Path(folder or "") / "nodes" / "minesweeper.npz") as file:
            edge_index = torch.from_numpy(file["edges"]).long()
        return torch.cat([edge_index, edge_index.flip(0)], 1).to(device), False
    except (OSError, ImportError, ValueError, KeyError):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(nodes, (2, edges), generator=generator).to(device), True


class Model(nn.Module):
    """Layers with heads side by side and an ELU between them; the last one has one head per class set."""

    def __init__(self, library, conv, layers, features, heads, size, classes):
        super().__init__()
        make = getattr(library, conv)
        self.convs = nn.ModuleList()
        for k in range(layers):
            last = k == layers - 1
            self.convs.append(
                make(
                    features if k == 0 else heads * size,
                    classes if last else size,
                    heads=1 if last else heads,
                )
            )

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = F.elu(conv(x, edge_index))
        return self.convs[-1](x, edge_index)


def apart(model):
    """The model, with code of its own. torch.compile keeps what it made by code, and looks through what other
    models of the class have left there at every call, which takes longer than a small graph's step."""
    forward = type(model).forward
    code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    own = types.FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__)
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": own})
    return model


_numbers = itertools.count()


class Training:
    """A model with its data, and a step of it."""

    def __init__(self, library, spec, edge_index, device, *, compiled=False, autocast=False, fresh=False):
        name, conv, layers, heads, size = spec
        nodes, _, features, classes = SIZES[name]
        torch.manual_seed(0)
        self.x = torch.randn(nodes, features, device=device)
        self.y = torch.randint(classes, (nodes,), device=device)
        self.model = Model(library, conv, layers, features, heads, size, classes).to(device)
        self.call = torch.compile(apart(self.model)) if compiled else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        self.edge_index, self.fresh, self.device, self.autocast = edge_index, fresh, device, autocast

    def loss(self, *_):
        edge_index = self.edge_index.clone() if self.fresh else self.edge_index
        if self.autocast:
            with torch.autocast(self.device, torch.bfloat16):
                return F.cross_entropy(self.call(self.x, edge_index), self.y)
        return F.cross_entropy(self.call(self.x, edge_index), self.y)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss


def both_ways(steps: dict, device: str) -> dict:
    """The steps, and on CUDA each with backward in the calling thread, too."""
    if device != "cuda":
        return steps

    def here(step):
        def call():
            with torch.autograd.set_multithreading_enabled(False):
                return step()

        return call

    found = {}
    for name, step in steps.items():
        found[name] = step
        if "compiled" not in name and "captured" not in name:
            found[name + HERE] = here(step) if callable(step) else step
    return found


def speedups(ms: dict) -> dict:
    """By a name of dfgnn's: how many times PyG's time, of like with like and of its default thread."""
    found = {}
    for name, took in ms.items():
        pairs = {name: name.replace("dfgnn", "PyG")}
        if name.endswith(HERE):
            pairs[f"{name} over PyG's default"] = pairs[name].removesuffix(HERE)
        for key, other in pairs.items():
            if name.startswith("dfgnn") and other in ms:
                found[key] = round(ms[other] / took, 2)
    return found


def contestants(spec, edge_index, device, with_compiled) -> dict:
    """name: a step, or why there is none."""

    def train(*args, **kwargs):
        return lambda: Training(*args, spec, edge_index, device, **kwargs).step

    makers = {"PyG": train(theirs), "dfgnn": train(ours)}
    if with_compiled:
        makers |= {"PyG compiled": train(theirs, compiled=True), "dfgnn compiled": train(ours, compiled=True)}
    makers |= {
        "PyG bf16": train(theirs, autocast=True),
        "dfgnn bf16": train(ours, autocast=True),
        "PyG fresh": train(theirs, fresh=True),
        "dfgnn fresh": train(ours, fresh=True),
    }
    if device == "cuda" and hasattr(dfgnn, "capture"):

        def captured():
            from torch_geometric.data import Data

            training = Training(ours, spec, edge_index, device)
            data = Data(x=training.x, edge_index=edge_index, y=training.y)

            def loss(batch):
                return F.cross_entropy(training.model(batch.x, batch.edge_index), batch.y)

            step = dfgnn.capture(loss, training.model, training.optimizer)
            return lambda: step(data)

        makers["dfgnn captured"] = captured
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
            for _ in range(3):
                found[name]()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return both_ways(found, device)


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def alternate(steps: dict, seconds: float, device: str) -> dict[str, list[float]]:
    """Milliseconds of each step, taken in turns, of runs of a few steps that wait for the device once."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, step in steps.items():
            synchronize(device)
            start = time.perf_counter()
            try:
                for _ in range(3):
                    step()
                synchronize(device)
            except RuntimeError as error:
                raise RuntimeError(f"{name}: {error}") from error
            times[name].append((time.perf_counter() - start) / 3 * 1e3)
    return times


def kernels(step, device) -> int | None:
    """Kernels, copies and fills that a step launches; None on the CPU."""
    if device != "cuda":
        return None
    step(), torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def run_models(args, results):
    for spec in MODELS:
        name, conv, layers, heads, size = spec
        if name not in args.graphs or conv not in args.convs:
            continue
        torch._dynamo.reset()
        edge_index, is_random = edges_of(name, args.device)
        found = contestants(spec, edge_index, args.device, not args.no_compile)
        steps = {key: step for key, step in found.items() if callable(step)}
        times = alternate(steps, args.seconds, args.device)
        row = {
            "graph": name, "random": is_random, "nodes": SIZES[name][0], "edges": edge_index.shape[1],
            "model": f"{conv} x {layers}, {heads} x {size}",
            "ms": {key: round(statistics.median(values), 4) for key, values in times.items()},
            "least_ms": {key: round(min(values), 4) for key, values in times.items()},
            "speedup": speedups({key: statistics.median(values) for key, values in times.items()}),
            "kernels": {key: kernels(step, args.device) for key, step in steps.items() if HERE not in key},
            "failed": {key: why for key, why in found.items() if not callable(why)},
        }  # fmt: skip
        results["models"].append(row)
        report.write_json(args.json, results)  # whatever becomes of the rest
        text = "  ".join(f"{key} {value:.3f}" for key, value in row["ms"].items())
        print(f"{name:15} {row['model']:26} {text}", flush=True)
        for key, why in row["failed"].items():
            print(f"{'':15} {key}: {why}", flush=True)


def run_fresh(args, results):
    for nodes, edges in FRESH:
        edge_index = torch.randint(nodes, (2, edges), device=args.device)
        x = torch.randn(nodes, 64, device=args.device, requires_grad=True)
        for conv in args.convs:
            steps = {}
            for key, library in (("PyG", theirs), ("dfgnn", ours)):
                layer = getattr(library, conv)(64, 16, heads=4).to(args.device)

                def step(layer=layer, fresh=True, x=x, edge_index=edge_index):
                    out = layer(x, edge_index.clone() if fresh else edge_index)
                    torch.autograd.grad(out.sum(), (x, *layer.parameters()))

                steps[key] = step
                steps[f"{key}, same graph"] = functools.partial(step, fresh=False)
            steps = both_ways(steps, args.device)
            for step in steps.values():
                step()
            times = alternate(steps, args.seconds / 2, args.device)
            row = {"nodes": nodes, "edges": edges, "layer": conv}
            row["ms"] = {key: round(statistics.median(values), 4) for key, values in times.items()}
            default = {key: step for key, step in steps.items() if HERE not in key}
            row["kernels"] = {key: kernels(step, args.device) for key, step in default.items()}
            row["speedup"] = speedups(row["ms"])
            results["fresh"].append(row)
            print(f"fresh {nodes:7,} {edges:8,} {conv:16} {row['ms']} {row['speedup']}", flush=True)


def function_steps(graph, heads, size, device) -> dict:
    """A training step of each function."""
    from dfgnn import functional

    def made(*shape):
        return torch.randn(*shape, device=device, requires_grad=True)

    nodes = graph.num_dst
    feat, grad = made(nodes, heads, size), torch.randn(nodes, heads, size, device=device)
    arguments = {
        "gat_attention": (feat, made(nodes, heads), made(nodes, heads)),
        "gatv2_attention": (feat, made(nodes, heads, size), made(heads, size)),
        "dot_attention": (feat, made(nodes, heads, size), made(nodes, heads, size)),
    }

    def step(function, tensors):
        torch.autograd.grad(function(graph, *tensors), tensors, grad)

    return {
        name: functools.partial(step, getattr(functional, name), tensors)
        for name, tensors in arguments.items()
    }


def run_function(args, results):
    for name, heads, size in (("molecules-1024", 4, 32), ("molecules-64", 4, 32), ("cora", 8, 8)):
        graph = dfgnn.Graph.from_edge_index(edges_of(name, args.device)[0], SIZES[name][0])
        steps = both_ways(function_steps(graph, heads, size, args.device), args.device)
        times: dict[str, list[float]] = {key: [] for key in steps}
        for _ in range(10):  # in turns of 30 steps, of which the first ones warm up
            for key, step in steps.items():
                for k in range(30):
                    synchronize(args.device)
                    start = time.perf_counter()
                    step()
                    took = time.perf_counter() - start  # on CUDA: until the last kernel is launched
                    if k >= 5:
                        times[key].append(took * 1e6)
        row = {"graph": name, "heads": heads, "size": size}
        row["us"] = {key: round(statistics.median(values), 1) for key, values in times.items()}
        row["least_us"] = {key: round(min(values), 1) for key, values in times.items()}
        results["function"].append(row)
        print(f"function {name:15} {heads} x {size}, us of the host: {row['us']}", flush=True)


def tables(results: dict) -> str:
    """For docs/small_graphs.md: slowest gain first, by dfgnn in the calling thread over PyG there."""

    def row(*cells) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    def times(of: dict, name: str, bold: bool = False) -> str:
        text, factor = f"{of['ms'][name]:.2f}", of["speedup"].get(name)
        text = f"**{text}**" if bold else text
        return text if factor is None else f"{text} ({factor:.2f})"

    ours, default = "dfgnn" + HERE, f"dfgnn{HERE} over PyG's default"
    more = ["dfgnn bf16" + HERE, "PyG fresh" + HERE, "dfgnn fresh" + HERE, "dfgnn captured"]
    heads = ["PyG", "dfgnn", "PyG" + HERE, ours, "over PyG's default"]
    lines = [row("model", "graph", *heads, *more, "kernels PyG / dfgnn / fresh")]
    lines.append("|---|---|" + "--:|" * (len(heads) + len(more)) + "---|")
    for of in sorted(results["models"], key=lambda of: of["speedup"][ours]):
        cells = [times(of, name, name == ours) for name in heads[:-1]] + [f"{of['speedup'][default]:.2f}"]
        launched = " / ".join(str(of["kernels"][name]) for name in ("PyG", "dfgnn", "dfgnn fresh"))
        cells += [times(of, name) if name in of["ms"] else "" for name in more]
        lines.append(row(of["model"], of["graph"], *cells, launched))
    same = "dfgnn, same graph"
    lines += ["", row("layer", "nodes / edges", *heads, same + HERE, "kernels PyG / dfgnn / same")]
    lines.append("|---|---|" + "--:|" * (len(heads) + 1) + "---|")
    for of in sorted(results["fresh"], key=lambda of: of["speedup"][ours]):
        cells = [times(of, name, name == ours) for name in heads[:-1]] + [f"{of['speedup'][default]:.2f}"]
        launched = " / ".join(str(of["kernels"][name]) for name in ("PyG", "dfgnn", same))
        size = f"{of['nodes']:,} / {of['edges']:,}"
        lines.append(row(of["layer"], size, *cells, times(of, same + HERE), launched))
    lines += [
        "",
        row("function, µs of the host", "graph", "PyTorch's thread", "calling thread"),
        "|---|---|--:|--:|",
    ]
    for of in results["function"]:
        for name in (name for name in of["us"] if HERE not in name):
            shape = f"{of['graph']}, {of['heads']} × {of['size']}"
            lines.append(row(name, shape, of["us"][name], of["us"][name + HERE]))
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    if args.table:
        print(tables(json.loads(args.table.read_text())))
        return
    warnings.filterwarnings("ignore")
    if args.threads:
        torch.set_num_threads(args.threads)
    environment = report.environment(torch.device(args.device), args.commit)
    environment["torch_geometric"] = theirs.__package__ and sys.modules["torch_geometric"].__version__
    results: dict = {"environment": environment, "function": [], "fresh": [], "models": []}
    for part, run in (("function", run_function), ("fresh", run_fresh), ("models", run_models)):
        if args.only is None or part in args.only:
            run(args, results)
            report.write_json(args.json, results)


if __name__ == "__main__":
    main()
