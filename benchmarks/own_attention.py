"""Attention that its author wrote, as it is, compiled by Inductor and compiled with dfgnn.

    python benchmarks/own_attention.py
    python benchmarks/own_attention.py --device cuda --modes default,reduce-overhead --scale 8
    python benchmarks/own_attention.py --device cuda --cases gat --edges 8192,65536,524288

A step is forward and backward of a model of two layers: "eager", "inductor" (``torch.compile``) and "dfgnn"
(``dfgnn.compile``) in turns in one process, the latter two in each of --modes. Printed are the least time of
a step (on a CPU processor time of one thread, on a GPU from idle to idle), the seconds of
the first step, which compiles, on a GPU the memory that a step adds, its kernels and their time, and the
largest difference of gradients from the eager ones, relative to the largest gradient. The cases:

weather   a mesh: dot products with a projected edge in key and value, 16 heads of 16
motion    the same with two different projections of 128 attributes, 8 heads of 16
exp       exponentials of clamped scores, divided after the sum (Exphormer, DGL's graph transformer), 4 x 13
mlp       scores and values by MLPs at edges, 16 heads of 8
gat       GAT on a wide graph, 4 heads of 32
gatv2     GATv2 likewise
hgn       GAT whose weights are mixed with others, as in Simple-HGN, 8 heads of 64
"""

import argparse
import gc
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dfgnn
from dfgnn.compiling.backend import listeners
from dfgnn.compiling.report import Report
from dfgnn.runtime import programs


def gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


def summed(x: Tensor, index: Tensor, count: int) -> Tensor:
    return x.new_zeros(count, *x.shape[1:]).index_add_(0, index, x)


def softmax(score: Tensor, index: Tensor, count: int) -> Tensor:
    wide = index.view(-1, 1).expand_as(score)
    most = score.new_zeros(count, score.shape[1]).scatter_reduce_(
        0, wide, score.detach(), "amax", include_self=False
    )
    e = (score - gathered(most, index)).exp()
    return e / gathered(summed(e, index, count) + 1e-16, index)


class Layer(nn.Module):
    def __init__(self, kind: str, heads: int, dim: int, attributes: int):
        super().__init__()
        width = heads * dim
        self.kind, self.heads, self.dim = kind, heads, dim
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.edge = nn.Linear(attributes, width)
        self.edge_value = nn.Linear(attributes, width) if kind == "motion" else None
        self.vector = nn.Parameter(torch.randn(2, 1, heads, dim) / dim**0.5)
        if kind == "mlp":
            self.score = nn.Sequential(
                nn.Linear(2 * width + attributes, width), nn.ReLU(), nn.Linear(width, heads)
            )
            self.value = nn.Sequential(
                nn.Linear(width + attributes, width), nn.ReLU(), nn.Linear(width, width)
            )

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        count, (q, k, v) = len(x), self.qkv(self.norm(x)).view(len(x), 3, self.heads, self.dim).unbind(1)
        if self.kind in ("weather", "motion"):
            e = self.edge(attr).view(-1, self.heads, self.dim)
            f = e if self.edge_value is None else self.edge_value(attr).view(-1, self.heads, self.dim)
            score = (gathered(q, dst) * (gathered(k, src) + e)).sum(-1) / self.dim**0.5
            out = summed((gathered(v, src) + f) * softmax(score, dst, count).unsqueeze(-1), dst, count)
        elif self.kind == "exp":
            e = self.edge(attr).view(-1, self.heads, self.dim)
            product = gathered(q, dst) * gathered(k, src) / self.dim**0.5 * e
            weight = product.sum(-1, keepdim=True).clamp(-5, 5).exp()
            out = summed(gathered(v, src) * weight, dst, count) / (summed(weight, dst, count) + 1e-6)
        elif self.kind == "mlp":
            score = self.score(torch.cat([gathered(x, dst), gathered(x, src), attr], 1))
            value = self.value(torch.cat([gathered(x, src), attr], 1)).view(-1, self.heads, self.dim)
            out = summed(value * softmax(score, dst, count).unsqueeze(-1), dst, count)
        elif self.kind in ("gat", "hgn"):
            of_src, of_dst = ((v * vector).sum(-1) for vector in self.vector)
            score = F.leaky_relu(gathered(of_src, src) + gathered(of_dst, dst), 0.2)
            weight = softmax(score, dst, count)
            if self.kind == "hgn":
                weight = 0.95 * weight + 0.05 * attr
            out = summed(gathered(v, src) * weight.unsqueeze(-1), dst, count)
        else:
            score = (F.leaky_relu(gathered(v, src) + gathered(q, dst), 0.2) * self.vector[0]).sum(-1)
            out = summed(gathered(v, src) * softmax(score, dst, count).unsqueeze(-1), dst, count)
        return x + self.out(out.flatten(1))


#: nodes, edges, heads, columns, attributes
CASES = {
    "weather": (5248, 41984, 16, 16, 11),
    "motion": (2500, 25000, 8, 16, 128),
    "exp": (10000, 100000, 4, 13, 52),
    "mlp": (400, 12800, 16, 8, 84),
    "gat": (13752, 491722, 4, 32, 1),
    "gatv2": (13752, 491722, 4, 32, 1),
    "hgn": (21420, 108062, 8, 64, 8),
}


class Model(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.layers = nn.ModuleList(Layer(*args) for _ in range(2))

    def forward(self, x, edge_index, attr):
        for layer in self.layers:
            x = layer(x, edge_index, attr)
        return x.square().mean()


def contestants(model: Model, modes: list[str], options: dict | None) -> dict[str, Callable]:
    made: dict[str, Callable] = {"eager": model}
    for mode in modes:
        given = None if mode == "default" else mode
        made[f"inductor, {mode}"] = torch.compile(model, mode=given)
        made[f"dfgnn, {mode}"] = dfgnn.compile(model, mode=given, options=options)
    return made


def kernels(run: Callable) -> str:
    """How many kernels a call launches, and their time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    found = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return f"{len(found):4} kernels {sum(event.self_device_time_total for event in found) / 1e3:7.2f} ms"


def measure(case: str, edges: int, args: argparse.Namespace) -> None:
    """edges: 0: the case's number."""
    nodes, given, heads, dim, attributes = CASES[case]
    nodes, edges = (nodes * edges // given, edges) if edges else (nodes * args.scale, given * args.scale)
    cuda = args.device.startswith("cuda")
    torch.manual_seed(0)
    model = Model(case, heads, dim, attributes).to(args.device)
    x = torch.randn(nodes, heads * dim, device=args.device)
    edge_index = torch.randint(nodes, (2, edges), device=args.device)
    attr = torch.randn(edges, attributes, device=args.device)

    def step(run: Callable) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        run(x, edge_index, attr).backward()
        if cuda:
            torch.cuda.synchronize()
        return [p.grad for p in model.parameters() if p.grad is not None]

    runs, first, least, memory, differs = contestants(model, args.modes, args.options), {}, {}, {}, {}
    launched, exact = {}, list[Tensor]()
    torch._dynamo.reset()
    for name, run in list(runs.items()):
        begin = time.perf_counter()
        try:
            found = [g.clone() for g in step(run)]
        except Exception as error:
            print(f"{case:8} {name:26} failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            del runs[name]
            continue
        first[name], exact = time.perf_counter() - begin, exact or found
        top = max(g.abs().max() for g in exact)
        differs[name] = float(max((a - b).abs().max() for a, b in zip(found, exact)) / top)
        for _ in range(args.warmup):
            step(run)
        launched[name] = kernels(lambda run=run: step(run)) if cuda else ""
        gc.collect()
    clock = time.perf_counter if cuda else time.process_time
    for name, run in [*runs.items()] * args.repeats:  # in turns: the speed of a host changes
        step(run)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = clock()
        step(run)
        least[name] = min(least.get(name, math.inf), clock() - start)
        if cuda:
            memory[name] = torch.cuda.max_memory_allocated() - before
    for name in runs:
        size = f"{memory[name] / 2**20:9.0f} MiB" if name in memory else ""
        print(
            f"{case:8} {edges:8} {name:26} {1e3 * least[name]:9.2f} ms  first {first[name]:6.1f} s {size}  "
            f"{launched[name]}  "
            f"differs {differs[name]:.1e}",
            flush=True,
        )


def told(report: Report) -> None:
    """Prints what `dfgnn.compile` found: the forms of attention that it replaced, and reasons for others."""
    print("   ", *{x.form or x.reason: x for x in report.found}, sep="  ")


def main(argv: list[str] | None = None) -> None:
    parser = programs.Parser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), default=list(CASES), help="some of them"
    )
    parser.add_argument(
        "--modes", type=lambda text: text.split(","), default=["default"], help="Inductor's modes"
    )
    parser.add_argument("--scale", type=programs.integer(1), default=1, help="multiplies nodes and edges")
    parser.add_argument(
        "--edges", type=lambda text: [int(x) for x in text.split(",")], default=[0],
        help="numbers of edges in place of the cases', with nodes in proportion",
    )  # fmt: skip
    parser.add_argument(
        "--all", action="store_const", const={"dfgnn.min_elements": 0}, dest="options",
        help="rewrite attention of any size",
    )  # fmt: skip
    parser.add_argument("--repeats", type=programs.integer(1), default=10, help="steps that are timed")
    parser.add_argument("--warmup", type=programs.integer(0), default=3, help="steps before them")
    args = parser.parse_args(argv)
    for case in args.cases:
        if case not in CASES:
            programs.refuse(f"--cases: expected some of {', '.join(CASES)}, got {case!r}")
    torch.set_num_threads(1)
    listeners.append(told)
    try:
        for case in args.cases:
            for edges in args.edges:
                measure(case, edges, args)
    finally:
        listeners.remove(told)


if __name__ == "__main__":
    main()
