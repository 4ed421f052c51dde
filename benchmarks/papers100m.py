"""GAT on a power-law graph of the size of ogbn-papers100M, forward and backward, on one GPU.

    python benchmarks/papers100m.py --device cuda --json FILE
    python benchmarks/papers100m.py --device cpu --scale 10000
    python benchmarks/papers100m.py --device cuda --nodes 50000000 --edges 2300000000 --head-dim 16

111,059,956 nodes and 1,615,685,872 directed edges (published: Open Graph Benchmark, arXiv 2005.00687), one
head of 64 elements, bfloat16. ``--scale S`` divides nodes and edges by S. In- and out-degrees follow a power
law with a bounded tail, each in an order of its own. Rows are drawn one after the other, so that the CSR
needs no sort.

GPU memory in GB (10^9 bytes); features [N, 1, 64] take 14.2, a float32 per node 0.44:

    CSR           indices int32 6.5, indptr int64 0.9; the same for the reverse: 14.7
    plans         16 bytes per item, about one item per node and direction: 3.6
    inputs        features and gradient of the output 28.4, two score terms 0.9
    results       output and gradient of the features 28.4, gradients of the terms 0.9
    peak extra    V+ (``positive``) 14.2, statistics and mass of the softmax 1.3, four numbers per node
                  1.8, partial rows
    sum           about 94 of the 150 that an H200 has

    reverse CSR   before there are features, a stable sort of E int32 keys: the CSR 7.4, keys 6.5, positions
                  12.9 twice, the radix sort's second buffers 19.4: about 60
    a plan        ten or so int64 per item: about 15 in addition to what there is

The floor is a plain neighbour sum over the same graph and features: the faster of our gather sum and
torch.sparse. torch.sparse runs last: should it fail at this size, it may take the CUDA context with it. What
cannot be measured is named.

Errors are against float64 from the edges of sampled nodes alone: the first node, the last, the one with most
edges, and random ones. ``out`` and the gradient of the features: the worst row's ||x - exact|| / ||exact||;
they are rounded to bfloat16 once, which 2^-8 bounds. The terms' gradients: that of all sampled nodes
together. Exits with 1 if an error exceeds its bound.
"""

import argparse
import gc
import math
from collections import namedtuple
from pathlib import Path

import torch
from score import json_files
from torch import Tensor

from dfgnn import Graph, functional
from dfgnn.bench import accuracy, measure, report, yardsticks
from dfgnn.bench.workloads import edges_into
from dfgnn.plan import ROW_SCHEDULES

NODES, EDGES = 111_059_956, 1_615_685_872
# About the largest degree. With --scale S it is divided by sqrt(S), as in a power law of exponent 3.
MAX_DEGREE = 100_000
HEADS, HEAD_DIM, DTYPE = 1, 64, torch.bfloat16
PASSES = 2
BOUNDS = {"out": 2**-8, "value": 2**-8, "score_src": 2e-2, "score_dst": 2e-2}

# Edges drawn or searched at a time, and edges of one float64 computation.
_PART, _EXACT_PART = 2**26, 2**20

Drawn = namedtuple("Drawn", "indptr indices")


class Edges:
    """The CSR as it was drawn, for the checks."""

    def __init__(self, csr: Drawn, num_nodes: int):
        self._csr, self.num_src, self.num_edges = csr, num_nodes, len(csr.indices)
        self.device = csr.indices.device

    def csr(self) -> Drawn:
        return self._csr

    def in_degrees(self) -> Tensor:
        return self._csr.indptr.diff()


# ---- the graph -------------------------------------------------------------------------------------


def power_law(num_nodes: int, num_edges: int, max_degree: float, device) -> tuple[Tensor, Tensor]:
    """indptr int64, indices int32 of a CSR by destination with exactly these sizes.

    A node's share of the edges falls with its rank as (rank + r0)^(-1/2), with r0 from max_degree: ranks
    below x have (sqrt(x + r0) - sqrt(r0)) / span of them. In-degrees are these shares rounded; sources are
    drawn, and may repeat.
    """
    generator = torch.Generator(device).manual_seed(0)
    half = num_edges / (2 * max_degree)
    r0 = half * half / (num_nodes - 2 * half)
    start, span = math.sqrt(r0), math.sqrt(num_nodes + r0) - math.sqrt(r0)

    def order():
        return torch.randperm(num_nodes, generator=generator, device=device, dtype=torch.int32)

    bounds = torch.arange(num_nodes + 1, dtype=torch.float64, device=device).add_(r0).sqrt_().sub_(start)
    bounds = bounds.mul_(num_edges / span).round_().long()
    indptr = torch.zeros_like(bounds)
    torch.cumsum(bounds.diff()[order()], 0, out=indptr[1:])
    del bounds

    node = order()
    indices = torch.empty(num_edges, dtype=torch.int32, device=device)
    for begin in range(0, num_edges, _PART):
        part = indices[begin : begin + _PART]
        share = torch.rand(len(part), dtype=torch.float64, generator=generator, device=device)
        rank = share.mul_(span).add_(start).square_().sub_(r0).long().clamp_(0, num_nodes - 1)
        part.copy_(node[rank])
    return indptr, indices


# ---- float64 from the edges of some rows -------------------------------------------------------------


def sample(degrees: Tensor, count: int) -> Tensor:
    """Nodes in rising order: the first, the last, the one with most edges, and ``count`` random ones."""
    generator = torch.Generator(degrees.device).manual_seed(1)
    some = torch.randint(len(degrees), (count,), generator=generator, device=degrees.device)
    ends = torch.tensor([0, len(degrees) - 1], device=degrees.device)
    return torch.cat([ends, degrees.argmax()[None], some]).unique()


def destinations_of(graph: Graph, sources: Tensor) -> Tensor:
    """The rows that hold these sources, in rising order, found in the forward CSR."""
    csr = graph.csr()
    wanted = torch.zeros(graph.num_src, dtype=torch.bool, device=graph.device)
    wanted[sources] = True
    found = []
    for begin in range(0, graph.num_edges, _PART):
        place = wanted[csr.indices[begin : begin + _PART]].nonzero().squeeze(1) + begin
        found.append(torch.searchsorted(csr.indptr, place, right=True) - 1)
    return torch.cat(found).unique()


def blocks(graph: Graph, rows: Tensor):
    """Yields (rows, block, sources) with about ``_EXACT_PART`` edges each: some of the rows, the graph of
    their edges with destinations and sources renumbered 0, 1, ..., and the original ids of the sources."""
    csr = graph.csr()
    degrees = csr.indptr[rows + 1] - csr.indptr[rows]
    counts = torch.bincount(degrees.cumsum(0) // _EXACT_PART).tolist()
    for part in rows.split(counts):
        if len(part):
            indptr, sources = edges_into(graph, part)
            sources, local = sources.unique(return_inverse=True)
            yield part, Graph.from_csr(indptr, local, num_src=len(sources)), sources


def exact_gat(graph: Graph, inputs: dict, grad_out: Tensor, rows: Tensor, sources: Tensor) -> dict:
    """float64 results by name: ``out`` and ``score_dst``'s gradient for rows; the gradients of ``value`` and
    ``score_src`` for sources, in rising order. rows must include all destinations of sources."""
    value, score_src, score_dst = inputs.values()
    by_row = {"out": [], "score_dst": []}
    by_source = {
        name: torch.zeros(len(sources), *inputs[name].shape[1:], dtype=torch.float64, device=graph.device)
        for name in ("value", "score_src")
    }
    for part, block, ids in blocks(graph, rows):
        ends = {"value": value[ids], "score_src": score_src[ids], "score_dst": score_dst[part]}
        exact = accuracy.gat(block, **ends, grad_out=grad_out[part])
        for name, found in by_row.items():
            found.append(exact[name])
        place = torch.searchsorted(sources, ids).clamp_(max=len(sources) - 1)
        hit = sources[place] == ids
        for name, total in by_source.items():
            total.index_add_(0, place[hit], exact[name][hit])
    return {name: torch.cat(found) for name, found in by_row.items()} | by_source


def exact_sum(graph: Graph, dense: Tensor, rows: Tensor) -> Tensor:
    """The plain neighbour sum of rows in float64."""
    sums = []
    for part, block, ids in blocks(graph, rows):
        csr = block.csr()
        place = torch.repeat_interleave(torch.arange(len(part), device=rows.device), csr.indptr.diff())
        edges = dense[ids].double()[csr.indices]
        sums.append(edges.new_zeros(len(part), edges.shape[1]).index_add_(0, place, edges))
    return torch.cat(sums)


def errors(results: dict, exact: dict, rows: Tensor, sources: Tensor) -> dict[str, float]:
    """The errors of results [N, ...] against ``exact_gat``, by name."""
    found = {}
    for name, reference in exact.items():
        x = results[name][rows if name in ("out", "score_dst") else sources]
        if name in ("out", "value"):
            difference = (x.double() - reference).flatten(1).norm(dim=1)
            found[name] = float((difference / reference.flatten(1).norm(dim=1).clamp(min=1e-30)).max())
        else:
            found[name] = accuracy.error(x, reference)
    return found


def wrong(found: dict[str, float], ranges: int = 1) -> list[str]:
    """The names whose error exceeds its bound or is NaN. Gradients of sources are rounded once for each range
    of destinations, and once when these are added up."""
    return [name for name, error in found.items() if not error <= BOUNDS[name] * (1 + (ranges > 1))]


# ---- measurements ----------------------------------------------------------------------------------


class Phases:
    """Records the time and, on CUDA, the peak of allocated memory of every phase in ``records``."""

    def __init__(self, device: torch.device):
        self.device, self.records = device, {}

    def __call__(self, name: str, fn):
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ms, result = measure.milliseconds(fn, self.device)
        self.records[name] = {"ms": ms}
        if self.device.type == "cuda":
            self.records[name]["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        peak = f", peak {self.records[name]['peak_gb']:.1f} GB" if "peak_gb" in self.records[name] else ""
        print(f"  {name}: {ms:.0f} ms{peak}", flush=True)
        return result


def yardstick(make, dense: Tensor, exact: Tensor, rows: Tensor, budget: float) -> dict:
    """The timing of a plain sum, or the reason why it has none: it fails, or its sampled rows are wrong."""
    try:
        call = make()
        error = accuracy.error(call(dense)[rows], exact)
        if not error < 1e-2:
            return {"unavailable": f"wrong: error {error:.1e}"}
        return measure.eager(lambda: call(dense), dense.device, budget)._asdict() | {"error": error}
    except (RuntimeError, ValueError) as error:
        return {"unavailable": measure.reason(error)}


def gather_sums(graph: Graph, dense: Tensor, exact: Tensor, rows: Tensor, budget: float) -> dict:
    """Our plain sum with every schedule, on a copy of the graph, so that its plans are freed afterwards."""
    csr = graph.csr()
    own = Graph.from_csr(csr.indptr, csr.indices, validate=False)
    width, dtype = dense.shape[1], dense.dtype
    return {
        f"gather_sum {schedule}": yardstick(
            lambda schedule=schedule: yardsticks.gather_sum(own, width, dtype, schedule),
            dense,
            exact,
            rows,
            budget,
        )
        for schedule in ROW_SCHEDULES
    }


def gigabytes(*tensors: Tensor) -> float:
    return sum(t.nbytes for t in tensors) / 1e9


def make_inputs(graph: Graph, head_dim: int = HEAD_DIM) -> tuple[dict[str, Tensor], Tensor]:
    """Standard normal inputs of ``gat_attention`` by name, and the gradient of its output."""
    generator = torch.Generator(graph.device).manual_seed(2)

    def normal(*shape, dtype=DTYPE):  # drawn in this dtype, because float32 would take another 28 GB
        x = torch.randn(graph.num_src, *shape, dtype=dtype, generator=generator, device=graph.device)
        return x.requires_grad_()

    inputs = {"value": normal(HEADS, head_dim)}
    inputs |= {name: normal(HEADS, dtype=torch.float32) for name in ("score_src", "score_dst")}
    return inputs, normal(HEADS, head_dim).detach()


def train(graph: Graph, inputs: dict, grad_out: Tensor) -> dict[str, Tensor]:
    """A training step: ``out`` and the gradients of the inputs by name."""
    out = functional.gat_attention(graph, **inputs)
    grads = torch.autograd.grad(out, tuple(inputs.values()), grad_out)
    return {"out": out.detach(), **dict(zip(inputs, grads))}


def check(graph: Graph, drawn: Edges, inputs: dict, grad_out: Tensor, rows: Tensor, count: int) -> dict:
    """Errors of a step for ``rows``, for about ``count`` sources, and for the destinations of these."""
    results = train(graph, inputs, grad_out)
    sources = sample(graph.out_degrees(), count)
    rows = torch.cat([rows, destinations_of(drawn, sources)]).unique()
    constants = {name: x.detach() for name, x in inputs.items()}
    found = errors(results, exact_gat(drawn, constants, grad_out, rows, sources), rows, sources)
    return {
        "destinations": len(rows),
        "sources": len(sources),
        "errors": found,
        "bounds": BOUNDS,
        "wrong": wrong(found, 1 if isinstance(graph, Graph) else len(graph.ranges)),
    }


def run(args: argparse.Namespace) -> dict:
    device = torch.device(args.device)
    environment = report.environment(device, args.commit)
    n, num_edges = args.nodes or int(NODES / args.scale), args.edges or int(EDGES / args.scale)
    print(report.environment_line(environment))
    print(f"{n:,} nodes, {num_edges:,} edges, {HEADS} x {args.head_dim} {DTYPE}")

    phases = Phases(device)
    max_degree = MAX_DEGREE / args.scale**0.5
    drawn = Edges(Drawn(*power_law(n, num_edges, max_degree, device)), n)
    # No validation, because ids were drawn in range, and checking would read all edges again.
    graph = phases("graph", lambda: Graph.from_csr(*drawn.csr(), validate=False))
    in_one_piece = isinstance(graph, Graph)
    plans, sums, rows = {}, {}, sample(drawn.in_degrees(), args.rows)
    if in_one_piece:
        phases("reverse CSR", graph.reverse_csr)
        plans = {
            name: phases(name, lambda side=side: graph.plan(HEADS, args.head_dim, DTYPE, reverse=side))
            for name, side in (("plan", False), ("reverse plan", True))
        }
    inputs, grad_out = make_inputs(graph, args.head_dim)
    if in_one_piece:
        dense = inputs["value"].detach().view(n, -1)
        exact = exact_sum(drawn, dense, rows)
        sums = phases("gather sums", lambda: gather_sums(graph, dense, exact, rows, args.budget))
    checked = phases("first step and check", lambda: check(graph, drawn, inputs, grad_out, rows, args.rows))

    def step():
        return train(graph, inputs, grad_out)

    training = phases("training", lambda: measure.eager(step, device, args.budget))
    kept = sum(t.nbytes for t in (grad_out, *inputs.values()))  # bytes of the results: output and gradients
    memory = {
        "csr": gigabytes(*graph.csr()[:2], *graph.reverse_csr()[:2]) if in_one_piece else None,
        "plans": gigabytes(*(t for plan in plans.values() for t in (plan.items, plan.splits))),
        "inputs": gigabytes(grad_out, *inputs.values()),
        "results": kept / 1e9,
        "peak_extra": phases("memory", lambda: measure.peak_extra(step, kept, device)) / 1e9,
    }
    if in_one_piece:
        sums["torch.sparse"] = yardstick(
            lambda: yardsticks.sparse_sum(graph, DTYPE), dense, exact, rows, args.budget
        )
    times = [found["median"] for found in sums.values() if "median" in found]
    return {
        "environment": environment,
        "scale": args.scale,
        "graph": {"nodes": n, "edges": num_edges, "ranges": 1 if in_one_piece else len(graph.ranges)}
        | {name: repr(plan) for name, plan in plans.items()},
        "heads": HEADS,
        "head_dim": args.head_dim,
        "dtype": str(DTYPE).removeprefix("torch."),
        "phases": phases.records,
        "yardsticks": sums,
        "floor_ms": min(times, default=None),
        "training": training._asdict(),
        "x_floor": training.median / (PASSES * min(times)) if times else None,
        "memory_gb": memory,
        "check": checked,
    }


def text(result: dict) -> str:
    lines = [
        f"  {name}: {found['median']:.4g} ms" if "median" in found else f"  {name}: {found['unavailable']}"
        for name, found in result["yardsticks"].items()
    ]
    ratio = f"{result['x_floor']:.2f}" if result["x_floor"] else "not measured"
    lines.append(
        f"training step: {result['training']['median']:.4g} ms; time / ({PASSES} passes x floor): {ratio}"
    )
    memory = {name: gb for name, gb in result["memory_gb"].items() if gb is not None}
    lines.append("memory, GB: " + ", ".join(f"{name} {gb:.3g}" for name, gb in memory.items()))
    check = result["check"]
    lines.append(
        f"errors of {check['destinations']:,} destinations and {check['sources']:,} sources: "
        + ", ".join(f"{name} {e:.1e} (bound {BOUNDS[name]:.1e})" for name, e in check["errors"].items())
    )
    if check["wrong"]:
        lines.append("WRONG: " + ", ".join(check["wrong"]))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="divides nodes and edges")
    parser.add_argument("--nodes", type=int, help="instead of the published number")
    parser.add_argument("--edges", type=int, help="instead of the published number")
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM)
    parser.add_argument("--rows", type=int, default=4096, help="sampled destinations, and sources")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds per measurement")
    parser.add_argument("--commit", help="recorded; default: that of the working tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args(argv)
    result = run(args)
    print(text(result))
    json_files.write_json(args.json, result)
    return 1 if result["check"]["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
