"""GATConv on the CPU: dfgnn beside DGL and PyTorch Geometric (eager and compiled).

    python benchmarks/cpu_layers.py [--json benchmarks/results/cpu-layers.json] [sizes, threads, repetitions]

One random graph, one input, one set of weights for all. Every contestant runs in processes of its own:

* time: the median over all samples of all rounds; the contestants take turns in every round, so that when the
  machine is busy it is busy for all of them. "forward" is inference, "training" a forward and a backward that
  gives the gradients of the input and of all parameters.
* memory: the peak resident set of one warm training step (Linux: VmHWM, reset just before) less the one
  before, in a process that returns freed memory to the system at once. It holds output, gradients and all
  temporaries; input, weights and the graph in the library's formats are there already.
* error: the largest difference from a float64 computation by plain PyTorch operations, head by head, relative
  to the largest magnitude in the tensor; the worst of the output and of all gradients.
"""

import argparse
import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTESTANTS = ("dfgnn", "dgl", "pyg", "pyg compiled")
WARM_UP = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=1_500_000)
    parser.add_argument("--in-feats", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="processes per contestant")
    parser.add_argument("--samples", type=int, default=7, help="timed repetitions in each")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # inputs | time | memory | error, in a child process
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_inputs(args: argparse.Namespace) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    width = args.heads * args.head_dim

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = {
        "edges": torch.randint(args.nodes, (2, args.edges), generator=generator),
        "x": normal(args.nodes, args.in_feats),
        "grad_out": normal(args.nodes, args.heads, args.head_dim),
        "weight": normal(width, args.in_feats) * args.in_feats**-0.5,
        "attn_l": normal(1, args.heads, args.head_dim) * args.head_dim**-0.5,
        "attn_r": normal(1, args.heads, args.head_dim) * args.head_dim**-0.5,
        "bias": normal(width),
    }
    torch.save(inputs, args.folder / "inputs.pt")
    torch.save(oracle(args, inputs), args.folder / "oracle.pt")


def oracle(args: argparse.Namespace, inputs: dict) -> dict:
    """Output and gradients in float64."""
    import torch

    src, dst = inputs["edges"]
    x, weight, left, right, bias = (
        inputs[k].double().requires_grad_() for k in ("x", "weight", "attn_l", "attn_r", "bias")
    )
    outs = []
    for h in range(args.heads):  # one head at a time: an E x D array of float64 each
        rows = slice(h * args.head_dim, (h + 1) * args.head_dim)
        value = x @ weight[rows].T
        score = torch.nn.functional.leaky_relu((value @ left[0, h])[src] + (value @ right[0, h])[dst], 0.2)
        top = score.new_full((args.nodes,), -torch.inf).scatter_reduce(0, dst, score.detach(), "amax")
        alpha = (score - top[dst]).exp()
        alpha = alpha / alpha.new_zeros(args.nodes).index_add(0, dst, alpha)[dst]
        out = value.new_zeros(args.nodes, args.head_dim).index_add(0, dst, alpha[:, None] * value[src])
        out = out + bias[rows]
        out.backward(inputs["grad_out"][:, h].double())
        outs.append(out.detach())
    grads = {"x": x.grad, "weight": weight.grad, "attn_l": left.grad, "attn_r": right.grad, "bias": bias.grad}
    return {"out": torch.stack(outs, 1), **grads}


def build(name: str, args: argparse.Namespace, inputs: dict):
    """(call, {input name: module parameter}): call(x) is the layer on the graph, [N, H, D] or [N, H * D]."""
    import torch

    src, dst = inputs["edges"]
    if name == "dfgnn":
        from dfgnn import Graph
        from dfgnn.nn import GATConv

        graph = Graph.from_edge_index(inputs["edges"], num_nodes=args.nodes)
        layer = GATConv(args.in_feats, args.head_dim, args.heads, allow_zero_in_degree=True)
        names = {"weight": "fc.weight", "attn_l": "attn_l", "attn_r": "attn_r", "bias": "bias"}
        call = lambda x: layer(graph, x)  # noqa: E731
    elif name == "dgl":
        import dgl

        graph = dgl.graph((src, dst), num_nodes=args.nodes)
        layer = dgl.nn.GATConv(args.in_feats, args.head_dim, args.heads, allow_zero_in_degree=True)
        names = {"weight": "fc.weight", "attn_l": "attn_l", "attn_r": "attn_r", "bias": "bias"}
        call = lambda x: layer(graph, x)  # noqa: E731
    else:
        from torch_geometric.nn import GATConv

        layer = GATConv(args.in_feats, args.head_dim, args.heads, add_self_loops=False)
        names = {"weight": "lin.weight", "attn_l": "att_src", "attn_r": "att_dst", "bias": "bias"}
        run = torch.compile(layer) if name == "pyg compiled" else layer
        call = lambda x: run(x, inputs["edges"])  # noqa: E731
    parameters = dict(layer.named_parameters())
    assert len(parameters) == len(names), f"{name}: unexpected parameters {sorted(parameters)}"
    with torch.no_grad():
        for key, parameter in names.items():
            parameters[parameter].copy_(inputs[key].view_as(parameters[parameter]))
    return call, {key: parameters[parameter] for key, parameter in names.items()}


def resident(field: str) -> float:
    """VmRSS or VmHWM of this process in MB (10^6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"no {field} in /proc/self/status")


def child(args: argparse.Namespace) -> dict:
    import torch

    torch.set_num_threads(args.threads)
    if args.job == "inputs":
        make_inputs(args)
        return {}
    inputs = torch.load(args.folder / "inputs.pt")
    call, parameters = build(args.name, args, inputs)
    x = inputs["x"].requires_grad_()
    grad_out = inputs["grad_out"]

    def forward():
        with torch.no_grad():
            return call(x)

    def training():
        for tensor in (x, *parameters.values()):
            tensor.grad = None
        out = call(x)
        out.backward(grad_out.view_as(out))
        return out.detach()

    if args.job == "time":
        seconds = {}
        for key, step in (("forward", forward), ("training", training)):
            for _ in range(WARM_UP):
                step()
            seconds[key] = []
            for _ in range(args.samples):
                start = time.perf_counter()
                step()
                seconds[key].append(time.perf_counter() - start)
        return seconds
    if args.job == "memory":
        for _ in range(WARM_UP):
            training()
        for tensor in (x, *parameters.values()):
            tensor.grad = None
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS
        training()
        return {"peak_mb": resident("VmHWM") - before}
    expected = torch.load(args.folder / "oracle.pt")
    found = {"out": training().view_as(expected["out"]), "x": x.grad}
    found |= {key: parameter.grad.view_as(expected[key]) for key, parameter in parameters.items()}
    scale = {key: e.abs().max() for key, e in expected.items()}
    return {"error": {key: float((f - expected[key]).abs().max() / scale[key]) for key, f in found.items()}}


def spawn(args: argparse.Namespace, folder: str, job: str, name: str = "") -> dict:
    sizes = [f"--{key}={getattr(args, key.replace('-', '_'))}" for key in SIZES]
    command = [sys.executable, __file__, "--job", job, "--name", name, "--folder", folder, *sizes]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "MKL_NUM_THREADS": str(args.threads),
        "DGLBACKEND": "pytorch",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if job == "memory":
        # Every freed array goes back to the system, so that the resident set shows what is in use.
        env |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ({job}) failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


SIZES = ("nodes", "edges", "in-feats", "heads", "head-dim", "threads", "samples")


def measure(args: argparse.Namespace) -> dict:
    results = {name: {"forward": [], "training": []} for name in args.contestants}
    with tempfile.TemporaryDirectory() as folder:
        spawn(args, folder, "inputs")
        for k in range(args.rounds):
            for name in args.contestants:
                print(f"\rround {k + 1} of {args.rounds}: {name:15}", end="", file=sys.stderr, flush=True)
                for key, seconds in spawn(args, folder, "time", name).items():
                    results[name][key] += seconds
        for name in args.contestants:
            print(f"\rmemory and error: {name:15}", end="", file=sys.stderr, flush=True)
            results[name] |= spawn(args, folder, "memory", name) | spawn(args, folder, "error", name)
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    return {
        name: {
            "forward_ms": summary(r["forward"]),
            "training_ms": summary(r["training"]),
            "peak_mb": round(r["peak_mb"], 1),
            "error": r["error"],
        }
        for name, r in results.items()
    }


def summary(seconds: list[float]) -> dict:
    ms = [1e3 * s for s in seconds]
    return {"median": round(statistics.median(ms), 2), "min": round(min(ms), 2), "samples": len(ms)}


def git(*command: str) -> str | None:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def environment(args: argparse.Namespace) -> dict:
    def version(package):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    changes = git("status", "--porcelain", "csrc", "dfgnn")
    return {
        "config": {key.replace("-", "_"): getattr(args, key.replace("-", "_")) for key in (*SIZES, "rounds")},
        "dtype": "float32",
        "cpu": cpu[1] if cpu else platform.processor(),
        "python": platform.python_version(),
        "versions": {p: version(p) for p in ("torch", "dgl", "torch_geometric", "numpy")},
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(changes) if changes is not None else None,
    }


def table(results: dict) -> str:
    own = results.get("dfgnn")
    lines = [
        f"{'':14}{'forward':>12}{'training':>12}{'peak memory':>14}{'error':>11}{'training vs dfgnn':>20}"
    ]
    for name, r in results.items():
        ratio = f"{r['training_ms']['median'] / own['training_ms']['median']:.2f} x" if own else ""
        lines.append(
            f"{name:14}{r['forward_ms']['median']:9.1f} ms{r['training_ms']['median']:9.1f} ms"
            f"{r['peak_mb']:11.1f} MB{max(r['error'].values()):11.1e}{ratio:>20}"
        )
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    if args.job:
        print(json.dumps(child(args)))
        return
    results = measure(args)
    print(table(results))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**environment(args), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
