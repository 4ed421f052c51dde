"""The backward of the backward of attention alone: its time and memory, compared with those of plain
operations.

    python benchmarks/second_order.py --json benchmarks/results/h100-second-order.json
    python benchmarks/second_order.py --graphs super --scores dot --heads 8x8
    python benchmarks/second_order.py --table benchmarks/results/h100-second-order.json

Graphs are those of forces.py, and "super": 300,000 random edges between 20,000 nodes each, 5,000 of which end
in one node, and 5,000 begin in one. "kernels_ms" adds up the durations of a call's kernels. A kernel of ours
may start before the one in front of it ends, and waits for it: "busy_ms" counts such times once.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from forces import make
from score import json_files
from torch.profiler import ProfilerActivity, profile

from dfgnn import Graph, functional, reference
from dfgnn.bench import report
from dfgnn.bench.measure import peak_extra

FUNCTIONS = {"dot": "dot_attention", "gatv2": "gatv2_attention", "gat": "gat_attention"}
CONTESTANTS = {"operator": functional, "plain": reference}
CALLS = 5  # of one profile


def make_graph(name: str, device: torch.device) -> Graph:
    if name == "super":
        generator = torch.Generator().manual_seed(0)
        src, dst = torch.randint(20_000, (2, 300_000), generator=generator)
        dst[:5000], src[5000:10_000], nodes = 3, 7, 20_000
    else:
        position, (src, dst) = make(name)
        nodes = len(position)
    return Graph.from_coo(src.to(device), dst.to(device), num_src=nodes, num_dst=nodes)


def make_inputs(graph: Graph, score: str, shape: tuple[int, int], edge_feat: bool, dtype: torch.dtype):
    rows = graph.num_src, *shape
    sizes = {
        "dot": {"query": rows, "key": rows, "value": rows},
        "gatv2": {"query": rows, "key": rows, "att": shape},
        "gat": {"value": rows, "score_src": rows[:2], "score_dst": rows[:2]},
    }[score]
    if edge_feat:
        sizes["edge_feat"] = graph.num_edges, *shape
    made = {name: torch.randn(size, device=graph.device, dtype=dtype) for name, size in sizes.items()}
    return {name: x.requires_grad_() for name, x in made.items()}


def make_calls(attention: Callable, graph: Graph, inputs: dict) -> dict[str, Callable]:
    leaves = list(inputs.values())
    out = attention(graph, **inputs)
    grad = torch.randn_like(out).requires_grad_()
    grads = torch.autograd.grad(out, leaves, grad, create_graph=True)
    cotangents = [torch.randn_like(x) for x in grads]
    return {
        "forward": lambda: attention(graph, **inputs),
        "backward": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        "second": lambda: torch.autograd.grad(grads, [*leaves, grad], cotangents, retain_graph=True),
    }


def kernels(call: Callable) -> dict[str, float]:
    """kernels_ms and busy_ms of a call on a GPU."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, last = 0.0, 0.0
    for begin, end in spans:
        busy += max(end - max(begin, last), 0)
        last = max(last, end)
    total = sum(end - begin for begin, end in spans)
    return {"kernels_ms": total / CALLS / 1e3, "busy_ms": busy / CALLS / 1e3}


def measure(call: Callable, device: torch.device, repeats: int) -> dict[str, float]:
    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    once()
    found = {"wall_ms": min(once() for _ in range(repeats)), "mib": peak_extra(call, 0, device) / 2**20}
    return found | (kernels(call) if device.type == "cuda" else {})


def row(graph: Graph, score: str, edge_feat: bool, shape: tuple[int, int], dtype, repeats: int) -> dict:
    inputs = make_inputs(graph, score, shape, edge_feat, dtype)
    found = {}
    for name, module in CONTESTANTS.items():
        calls = make_calls(getattr(module, FUNCTIONS[score]), graph, inputs)
        if name == "operator":
            found |= {what: measure(calls[what], graph.device, repeats) for what in ("forward", "backward")}
        found[name] = measure(calls["second"], graph.device, repeats)
    return found


def table(path: Path) -> str:
    """A table of the results in float32 with a line per graph and score: times of kernels (on CPUs wall
    time), where the operator is slowest compared with the others first."""
    cases: dict[tuple, list[dict]] = {}
    for case in json_files.read_json(path, ("graph", "score"))["rows"]:
        if case["dtype"] == "float32":
            cases.setdefault((case["graph"], case["score"], case["edge_feat"]), []).append(case)
    on_gpu = all("kernels_ms" in case["operator"] for of in cases.values() for case in of)
    key = "kernels_ms" if on_gpu else "wall_ms"
    others = [name for name in ("products", "plain") if any(name in c for of in cases.values() for c in of)]

    def worst(of: list[dict]) -> float:
        return max(c["operator"][key] / c[n][key] for c in of for n in others if n in c)

    def cell(of: list[dict], name: str, key: str) -> str:
        return ", ".join(f"{c[name][key]:.3g}" if name in c else "–" for c in of)

    head = ["graph, score", "heads", "forward", "backward", "operator", *others]
    head += [f"wall: {', '.join(['operator', *others])}"]
    lines = [head]
    for (graph, score, edge_feat), of in sorted(cases.items(), key=lambda item: -worst(item[1])):
        name = f"{graph}, {score}{' with features' if edge_feat else ''}"
        heads = ", ".join(c["heads"].replace("x", " × ") for c in of)
        times = [cell(of, n, key) for n in ("forward", "backward", "operator", *others)]
        walls = "; ".join(cell(of, n, "wall_ms") for n in ("operator", *others))
        lines.append([name, heads, *times, walls])
    first, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([first, "|---" * len(head) + "|", *rest])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", default="64,512,8000,super")
    parser.add_argument("--scores", default="dot,dot+feat,gatv2,gatv2+feat,gat")
    parser.add_argument("--heads", default="8x8,4x32,1x64")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", help="to be recorded, where there is no repository")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a file of --json as a table")
    args = parser.parse_args(argv)
    if args.table:
        print(table(args.table))
        return
    warnings.simplefilter("ignore")
    rows = []
    for name in args.graphs.split(","):
        graph = make_graph(name, args.device)
        for score in args.scores.split(","):
            of, _, feat = score.partition("+")
            for heads in args.heads.split(","):
                for dtype in args.dtypes.split(","):
                    case = {"graph": name, "edges": graph.num_edges, "score": of, "edge_feat": bool(feat),
                            "heads": heads, "dtype": dtype}  # fmt: skip
                    h, d = map(int, heads.split("x"))
                    case |= row(graph, of, bool(feat), (h, d), getattr(torch, dtype), args.repeats)
                    rows.append(case)
                    print(case, flush=True)
                    environment = report.environment(args.device, args.commit)
                    json_files.write_json(args.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
