"""Whole layers on the CPU beside those of DGL and torch_geometric, on the graphs that people have there.

    python benchmarks/cpu_table.py [--json benchmarks/results/cpu-table.json] [--threads 1 2]
        [--parts layers fresh epoch large] [--libraries dgl pyg] [--seconds 0.6]

Parts, each a training step (forward and backward with gradients of the input and of all parameters, eager):

* layers: one layer on a graph that stays, 64 or 128 columns in (Cora's first layer: 1,433)
* fresh: one layer with a new edge_index at every step, so that all that is derived from it is derived again;
  beside it the same with one edge_index
* epoch: a model of four layers on batches of real molecules (ogbg-molhiv), fresh, with its optimizer
* large: attention alone on 100,000 nodes and 1.5M random edges, as a multiple of its passes x the gather sum

The contestants take turns step by step, so that when the machine is busy it is busy for all of them. Each
number of threads has a process of its own. ``x``: times as fast, by medians, and by the fastest steps, which
other processes disturb less. Of dfgnn's time: ``kernel``, the attention operators; ``matmul``, which the
others pay as well; the rest is the host and everything else. Real graphs come from the folder DFGNN_DATA.
"""

import argparse
import copy
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import dfgnn
from dfgnn import functional
from dfgnn.bench import graphs, report

PARTS = ("layers", "fresh", "epoch", "large")
# (graph, heads, columns of a head, columns in)
SHAPES = (
    ("Cora", 8, 8, 64),
    ("Cora", 8, 8, 1433),
    ("Cora", 1, 7, 64),
    ("PubMed", 8, 8, 64),
    ("64 molecules", 4, 32, 128),
    ("512 molecules", 4, 32, 128),
    ("minesweeper", 1, 64, 64),
)
FRESH = ((50, 200), (2_000, 5_000), (8_000, 12_672), (20_000, 100_000))
LIBRARIES = {"dgl": "dgl", "pyg": "torch_geometric"}
LAYERS = {
    "GAT": ("GATConv", "GATConv"),
    "GATv2": ("GATv2Conv", "GATv2Conv"),
    "dot": ("DotGatConv", "TransformerConv"),
}
# Operators that make graphs; all others of dfgnn are attention.
STRUCTURE = ("coo_to_csr", "transpose_csr", "plan_rows", "graph_handle")
PASSES = {"GAT": 2, "GATv2": 4, "dot": 6}


# ---- graphs: edges [2, E], each in both directions, without loops, and the number of nodes ----------------


def molecules():
    """Edges [2, e] of every molecule, and the numbers of nodes."""
    folder = graphs.data_folder() / "ogb/ogbg_molhiv/raw"

    def table(name):
        with gzip.open(folder / f"{name}.csv.gz", "rt") as file:
            return np.loadtxt(file, dtype=np.int64, delimiter=",", ndmin=2)

    edges = np.split(table("edge").T, np.cumsum(table("num-edge-list")[:, 0])[:-1], axis=1)
    sizes = table("num-node-list")[:, 0]
    return [np.concatenate([e, e[::-1]], axis=1) for e in edges], sizes


def batch(edges, sizes):
    offsets = np.cumsum([0, *sizes])
    both = np.concatenate([e + k for e, k in zip(edges, offsets)], axis=1)
    return torch.from_numpy(both), int(offsets[-1])


def load(name: str):
    folder = graphs.data_folder()
    if name in ("Cora", "PubMed"):
        with open(folder / f"planetoid/{name}/raw/ind.{name.lower()}.graph", "rb") as file:
            neighbours = pickle.load(file, encoding="latin1")
        src = np.concatenate([np.asarray(n, dtype=np.int64) for n in neighbours.values()])
        dst = np.repeat(np.fromiter(neighbours, np.int64), [len(n) for n in neighbours.values()])
        n = len(neighbours)
    elif name == "minesweeper":
        with np.load(folder / "nodes/minesweeper.npz") as file:
            (src, dst), n = file["edges"].astype(np.int64), len(file["y"])
    else:
        count = int(name.split()[0])
        edges, sizes = molecules()
        return batch(edges[:count], sizes[:count])
    keys = np.unique(np.concatenate([src * n + dst, dst * n + src]))
    keys = keys[keys // n != keys % n]
    return torch.from_numpy(np.stack([keys // n, keys % n])), n


# ---- contestants -------------------------------------------------------------------------------------------


def layer_of(library: str, kind: str, in_feats: int, heads: int, dim: int):
    name = LAYERS[kind][list(LIBRARIES).index(library)]
    if library == "dgl":
        from dgl import nn

        return getattr(nn, name)(in_feats, dim, heads)
    from torch_geometric import nn

    return getattr(nn, name)(in_feats, dim, heads)


def accelerated(layer):
    ours = copy.deepcopy(layer)
    changed = dfgnn.accelerate(ours)
    assert changed.replaced, f"not replaced: {changed}"
    return ours


def training_step(layer, graph, x, library):
    arguments = (graph, x) if library == "dgl" else (x, graph)
    leaves = (x, *layer.parameters())
    grad = None

    def step():
        nonlocal grad
        out = layer(*arguments)
        grad = torch.randn_like(out) if grad is None else grad
        return [out, *torch.autograd.grad(out, leaves, grad)]

    return step


def alternate(steps: dict, seconds: float, warm_up: int = 3, least: int = 5) -> dict:
    """{name: times in ms} of functions that take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(warm_up):
        for step in steps.values():
            step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(steps))]) < least:
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: summary_of(t) for name, t in times.items()}


def summary_of(times: list[float]) -> dict:
    return {"median": round(statistics.median(times), 4), "min": round(min(times), 4), "samples": len(times)}


def parts_of(step, steps: int = 10) -> dict:
    """Milliseconds of a step in the attention operators and in matrix products."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            step()
    spent = {"kernel": 0.0, "matmul": 0.0}
    for event in profile.key_averages():
        if event.key.startswith("dfgnn::") and event.key.removeprefix("dfgnn::") not in STRUCTURE:
            spent["kernel"] += event.self_cpu_time_total
        elif event.key in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"):
            spent["matmul"] += event.self_cpu_time_total
    return {name: round(us / 1e3 / steps, 4) for name, us in spent.items()}


def difference(found, expected) -> float:
    """The largest of all results, relative to the largest value of each."""
    return max(
        float((a.detach() - b.detach()).abs().max() / b.detach().abs().max().clamp(min=1))
        for a, b in zip(found, expected)
        if b.numel()
    )


def with_ratios(row: dict, theirs: dict, ours: dict) -> dict:
    return {
        **row,
        "theirs": theirs,
        "dfgnn": ours,
        "x": round(theirs["median"] / ours["median"], 3),
        "x_min": round(theirs["min"] / ours["min"], 3),
    }


# ---- parts -------------------------------------------------------------------------------------------------


def run_layers(args):
    for name, shapes in itertools.groupby(SHAPES, lambda shape: shape[0]):
        edge_index, n = load(name)
        for _, heads, dim, in_feats in shapes:
            for library, kind in itertools.product(args.libraries, args.layers):
                torch.manual_seed(0)
                x = torch.randn(n, in_feats, requires_grad=True)
                graph = edge_index
                if library == "dgl":
                    import dgl

                    graph = dgl.add_self_loop(dgl.graph(tuple(edge_index), num_nodes=n))
                theirs = layer_of(library, kind, in_feats, heads, dim)
                steps = {
                    "theirs": training_step(theirs, graph, x, library),
                    "dfgnn": training_step(accelerated(theirs), graph, x, library),
                }
                torch.manual_seed(1)
                expected = steps["theirs"]()
                torch.manual_seed(1)
                row = {
                    "part": "layers", "graph": name, "nodes": n, "edges": edge_index.shape[1], "layer": kind,
                    "shape": f"{heads}x{dim}", "in": in_feats, "library": library,
                    "difference": difference(steps["dfgnn"](), expected),
                }  # fmt: skip
                times = alternate(steps, args.seconds)
                yield with_ratios(row, times["theirs"], {**times["dfgnn"], **parts_of(steps["dfgnn"])})


def run_fresh(args):
    for (n, num_edges), kind in itertools.product(FRESH, args.layers):
        yield fresh(n, num_edges, kind, args.seconds)


def fresh(n: int, num_edges: int, kind: str, seconds: float) -> dict:
    in_feats, heads, dim = 32, 4, 8
    torch.manual_seed(0)
    edge_index = torch.randint(n, (2, num_edges))
    x = torch.randn(n, in_feats, requires_grad=True)
    theirs = layer_of("pyg", kind, in_feats, heads, dim)
    ours = accelerated(theirs)
    grad = torch.randn(n, heads * dim)

    def step(layer, edges):
        out = layer(x, edges)
        return [out, *torch.autograd.grad(out, (x, *layer.parameters()), grad)]

    steps = {
        "theirs": lambda: step(theirs, edge_index.clone()),
        "dfgnn": lambda: step(ours, edge_index.clone()),
        "same": lambda: step(ours, edge_index),
    }
    row = {
        "part": "fresh", "graph": "random", "nodes": n, "edges": num_edges, "layer": kind,
        "shape": f"{heads}x{dim}", "in": in_feats, "library": "pyg",
        "difference": difference(steps["dfgnn"](), steps["theirs"]()),
    }  # fmt: skip
    times = alternate(steps, seconds)
    ours_of = {**times["dfgnn"], **parts_of(steps["dfgnn"]), "same_graph": times["same"]}
    return with_ratios(row, times["theirs"], ours_of)


class Model(torch.nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 128)
        self.layers = torch.nn.ModuleList(layer_of("pyg", kind, 128, 4, 32) for _ in range(4))
        self.out = torch.nn.Linear(128, 1)

    def forward(self, kinds, edge_index, graph_of_node, num_graphs):
        x = self.embed(kinds)
        for layer in self.layers:
            x = torch.relu(layer(x, edge_index))
        pooled = x.new_zeros(num_graphs, 128).index_add(0, graph_of_node, x)
        return self.out(pooled)


def run_epoch(args):
    edges, sizes = molecules()
    for size, kind in itertools.product((32, 256), args.layers):
        yield epoch(edges, sizes, size, kind, None if args.whole_epoch else 4 * args.seconds)


def epoch(edges, sizes, size: int, kind: str, seconds: float | None) -> dict:
    """seconds: as many batches as fit; None: all."""
    torch.manual_seed(0)
    theirs = Model(kind)
    models = {"theirs": theirs, "dfgnn": accelerated(theirs)}
    optimizers = {name: torch.optim.Adam(model.parameters(), 1e-4) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    order = np.random.default_rng(0).permutation(len(sizes))
    end, loss = time.perf_counter() + (seconds or np.inf), {}
    for start in range(0, len(order) - size + 1, size):
        if time.perf_counter() > end and len(times["dfgnn"]) > 1:
            break
        chosen = order[start : start + size]
        given, n = batch([edges[k] for k in chosen], sizes[chosen])
        kinds = torch.randint(32, (n,))
        graph_of_node = torch.from_numpy(np.repeat(np.arange(size), sizes[chosen]))
        labels = torch.randint(2, (size, 1)).float()
        for name, model in models.items():
            edge_index = given.clone()
            began = time.perf_counter()
            optimizers[name].zero_grad()
            found = model(kinds, edge_index, graph_of_node, size)
            loss[name] = torch.nn.functional.binary_cross_entropy_with_logits(found, labels)
            loss[name].backward()
            optimizers[name].step()
            if start >= 3 * size:  # those before warm up
                times[name].append(1e3 * (time.perf_counter() - began))
    spent = {name: {**summary_of(t), "sum": round(sum(t), 2)} for name, t in times.items()}
    row = {
        "part": "epoch", "graph": f"molhiv, batches of {size}", "nodes": n, "edges": given.shape[1],
        "layer": kind, "shape": "4x32", "in": 128, "library": "pyg",
        "difference": abs(loss["dfgnn"].item() - loss["theirs"].item()),
    }  # fmt: skip
    found = with_ratios(row, spent["theirs"], spent["dfgnn"])
    return {**found, "x_sum": round(spent["theirs"]["sum"] / spent["dfgnn"]["sum"], 3)}


def run_large(args):
    n, num_edges = 100_000, 1_500_000
    torch.manual_seed(0)
    src, dst = torch.randint(n, (2, num_edges))
    # Sorted, so that the sum of neighbours, of weight 1, reads its weights one after another.
    graph = dfgnn.Graph.from_coo(src, dst.sort().values, num_nodes=n)
    for kind, dtype in itertools.product(args.layers, (torch.float32, torch.bfloat16)):
        yield large(graph, kind, dtype, 4 * args.seconds)


def large(graph, kind: str, dtype: torch.dtype, seconds: float) -> dict:
    n, heads, dim = graph.num_src, 4, 32
    rows = [torch.randn(n, heads, dim).to(dtype) for _ in range({"GAT": 1, "GATv2": 2, "dot": 3}[kind])]
    dense, weights = rows[0].flatten(1).unsqueeze(1), torch.ones(graph.num_edges, 1, dtype=dtype)
    if kind == "GAT":
        rows += [torch.randn(n, heads) for _ in range(2)]
    elif kind == "GATv2":
        rows.append(torch.randn(heads, dim).to(dtype))
    leaves = [x.requires_grad_() for x in rows]
    names = {"GAT": "gat_attention", "GATv2": "gatv2_attention", "dot": "dot_attention"}
    call = getattr(functional, names[kind])
    grad = torch.randn(n, heads, dim).to(dtype)

    def forward():
        with torch.no_grad():
            return call(graph, *leaves)

    steps = {
        "sum": lambda: functional.spmm(graph, weights, dense.detach()),
        "forward": forward,
        "training": lambda: torch.autograd.grad(call(graph, *leaves), leaves, grad),
    }
    times = alternate(steps, seconds, 1)
    floors = {
        "x_floor" + end: round(times["training"][key] / PASSES[kind] / times["sum"][key], 3)
        for key, end in (("median", ""), ("min", "_min"))
    }
    return {
        "part": "large", "graph": "random", "nodes": n, "edges": graph.num_edges, "layer": kind,
        "shape": f"{heads}x{dim}", "type": str(dtype).removeprefix("torch."), "passes": PASSES[kind],
        "times": times, **floors,
    }  # fmt: skip


# ---- the program -------------------------------------------------------------------------------------------


def line(row: dict) -> str:
    text = f"{row['part']:6} {row['threads']} {row['graph']:23} {row['nodes']:7,} {row['edges']:9,} "
    text += f"{row['shape']:>5} "
    if row["part"] == "large":
        text += f"{row['type']:9} {row['layer']:6}"
        for name, t in row["times"].items():
            text += f" {name} {t['median']:.1f} (min {t['min']:.1f})"
        return f"{text} ms: {row['x_floor']:.2f} x passes x sum (min {row['x_floor_min']:.2f})"
    theirs, ours = row["theirs"], row["dfgnn"]
    text += (
        f"{row['in']:5} {row['library']} {row['layer']:6} {theirs['median']:8.3f} {ours['median']:8.3f} ms "
    )
    text += f"{row['x']:6.2f} x (min {theirs['min']:8.3f} {ours['min']:8.3f} {row['x_min']:6.2f} x)"
    if "kernel" in ours:
        rest = ours["min"] - ours["kernel"] - ours["matmul"]
        text += f" kernel {ours['kernel']:.3f} matmul {ours['matmul']:.3f} rest {rest:.3f}"
    if "same_graph" in ours:
        text += f" same graph {ours['same_graph']['min']:.3f}"
    if "x_sum" in row:
        text += f" sum {row['x_sum']:.2f} x of {ours['samples']} batches"
    return text + f" differs {row['difference']:.0e}"


def child(args, threads: int) -> None:
    torch.set_num_threads(threads)
    rows = []
    for part in args.parts:
        run = {"layers": run_layers, "fresh": run_fresh, "epoch": run_epoch, "large": run_large}[part]
        if part in ("fresh", "epoch") and "pyg" not in args.libraries:
            continue
        for row in run(args):
            rows.append({"threads": threads, **row})
            print(line(rows[-1]), flush=True)
    args.rows.write_text(json.dumps(rows))


def summary(rows: list[dict]) -> list[dict]:
    """Geometric means over graphs and layers, and the worst, by part, library and number of threads."""

    def key(row):
        return row["part"], row["threads"], row["library"]

    found = []
    ratios = sorted((row for row in rows if "x" in row), key=key)
    for group, members in itertools.groupby(ratios, key):
        members = sorted(members, key=lambda row: row["x"])
        names = "graph", "nodes", "layer", "shape", "in", "x", "x_min"
        found.append(
            {
                **dict(zip(("part", "threads", "library"), group)),
                "mean": round(report.geometric_mean(row["x"] for row in members), 3),
                "mean_min": round(report.geometric_mean(row["x_min"] for row in members), 3),
                "worst": {name: members[0][name] for name in names},
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    installed = [name for name, module in LIBRARIES.items() if importlib.util.find_spec(module)]
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=installed)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=tuple(LAYERS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.6, help="per comparison of one layer")
    parser.add_argument("--whole-epoch", action="store_true", help="epoch: all batches, not as many as fit")
    parser.add_argument("--commit", help="to write into the JSON; default: that of the source tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # in a child process: its results
    args = parser.parse_args()
    if args.rows:
        return child(args, args.threads[0])
    rows = []
    for threads in args.threads:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "rows.json"
            # The last --threads counts. DGL has the number of threads from the environment.
            more = ["--threads", str(threads), "--rows", str(found)]
            command = [sys.executable, __file__, *sys.argv[1:], *more]
            env = {**os.environ, "OMP_NUM_THREADS": str(threads), "DGLBACKEND": "pytorch"}
            subprocess.run(command, env=env, check=True)
            rows += json.loads(found.read_text())
    print("\nworst first:")
    for row in sorted((row for row in rows if "x" in row), key=lambda row: row["x"])[:12]:
        print(line(row))
    means = summary(rows)
    for m in means:
        print(
            f"{m['part']:6} {m['threads']} thread(s) {m['library']}: geometric mean {m['mean']:.2f} x "
            f"(fastest steps {m['mean_min']:.2f} x), worst {m['worst']['x']:.2f} x"
        )
    if args.json:
        environment = report.environment(torch.device("cpu"), args.commit)
        for name in args.libraries:
            environment[LIBRARIES[name]] = importlib.metadata.version(LIBRARIES[name])
        results = {"environment": environment, "summary": means, "runs": rows}
        report.write_json(args.json, results)


if __name__ == "__main__":
    main()
