"""Attention functions on a graph, beside other libraries' operations and two yardsticks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dfgnn import Graph, functional
from dfgnn.bench import bounds, peers, run, yardsticks
from dfgnn.bench.measure import reason
from dfgnn.bench.workloads import LAYERS, Workload, sample_rows

from . import data
from .turns import Contestant, Step, captured, compare, release, significant

PEERS = {"PyG": peers.pyg, "DGL": peers.dgl, "turbo-gnn": peers.turbo_gnn, "dgNN": peers.dgnn}
# Graphs with more edges are not captured with PyG: it stores several arrays [E, H, D], and a CUDA graph would
# hold that memory in addition to that of the eager calls.
MOST_CAPTURED_EDGES = 20_000_000
# Graphs that stay in memory between cases.
MOST_KEPT_EDGES = 10_000_000
# With at most E x H x D = this number, errors are those of all results; with more, of some rows of the output
# only.
MOST_EXACT = 2**28


class Bench:
    """The device, graphs, and what was measured of them: yardsticks and preprocessing.

    Graphs of few edges stay in memory; of larger ones the last.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.name, self._graphs = "", dict[str, Graph]()
        self._floors: dict[tuple, dict] = {}
        self._preprocessing: dict[tuple, dict] = {}

    def graph(self, name: str) -> Graph:
        """The graph of that name, which is in use from now on."""
        self.name = name
        if name not in self._graphs:
            few = {k: g for k, g in self._graphs.items() if g.num_edges <= MOST_KEPT_EDGES}
            self._graphs = few
            release(self.device)
            few[name] = data.load(name, self.device)
        return self._graphs[name]

    @functools.cached_property
    def copy_gb_s(self) -> float:
        return significant(yardsticks.copy_bandwidth(self.device, 0.2))

    def floor(self, width: int, dtype: str) -> dict[str, Any]:
        """The yardsticks of the graph in use: ms of the faster of two plain neighbour sums, by kind of
        timing; and under "by" those of each (torch.sparse's, and our gather_sum)."""
        key = self.name, width, dtype
        if key not in self._floors:
            budget = min(self.seconds / 20, 0.1)
            found = yardsticks.measure_floor(self._graphs[self.name], width, getattr(torch, dtype), budget)
            self._floors[key] = {
                kind: significant(ms) if isinstance(ms, float) else ms for kind, ms in found["floor"].items()
            } | {"by": {name: _winner(found[name]) for name in ("sparse", "gather_sum")}}
        return self._floors[key]

    def preprocessing(self, heads: int, head_dim: int) -> dict[str, float]:
        key = self.name, heads, head_dim
        if key not in self._preprocessing:
            found = run.preprocessing(self._graphs[self.name], heads, head_dim, torch.float32)
            self._preprocessing[key] = {name: significant(ms) for name, ms in found.items()}
        return self._preprocessing[key]


def _winner(yardstick: dict[str, Any]) -> dict[str, Any]:
    """One yardstick's milliseconds, schedule and number of column blocks, or the reason why it has none."""
    kept = {key: yardstick[key] for key in ("unavailable", "schedule", "column_blocks") if key in yardstick}
    medians = {
        kind: significant(yardstick[kind]["median"])
        for kind in ("eager", "kernels")
        if "median" in yardstick.get(kind, {})
    }
    return kept | medians


def measure(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """A comparison of one layer's attention on one graph; ``case["dtypes"]`` take turns, too."""
    graph = bench.graph(case["graph"])
    layer, heads, dim, mode = case["layer"], case["heads"], case["head_dim"], case["mode"]
    dropout, cuda = case.get("dropout", 0.0), bench.device.type == "cuda"
    contestants = []
    floors, bound = {}, {}
    for dtype in case["dtypes"]:
        if not case.get("compiled"):
            floors[dtype] = bench.floor(heads * dim, dtype)
            bound[dtype] = _byte_bounds(layer, mode, graph, heads, dim, dtype, floors[dtype], bench)
        work = functools.cache(functools.partial(_workload, graph, layer, heads, dim, dtype))
        exact = None if dropout else functools.cache(functools.partial(_exact, work, mode))
        contestants += _contestants(case, graph, work, exact, dtype, cuda)
    found = compare(contestants, bench.device, bench.seconds)
    try:
        preprocessing = bench.preprocessing(heads, dim)
    except torch.OutOfMemoryError as error:
        preprocessing = {"unavailable": reason(error)}
    return {
        "nodes": graph.num_dst,
        "edges": graph.num_edges,
        "largest_degree": graph.degree_stats().max,
        "passes": LAYERS[layer].passes[mode],
        "floor": floors,
        "byte_bound": bound,
        "copy_gb_s": bench.copy_gb_s,
        "preprocessing_ms": preprocessing,
        "contestants": found,
    }


def _workload(graph, layer: str, heads: int, dim: int, dtype: str) -> Workload:
    return Workload.make(LAYERS[layer], graph, heads, dim, getattr(torch, dtype))


def _contestants(case, graph, work, exact, dtype: str, cuda: bool) -> list[Contestant]:
    layer, mode, dropout = case["layer"], case["mode"], case.get("dropout", 0.0)

    def ours():
        options = {"dropout_p": dropout} if dropout else {}
        return work(), work().call(functools.partial(work().layer.attention, graph, **options), mode)

    def theirs(build: Callable):
        same = work().in_one_dtype()
        return same, same.call(build(layer, graph, dropout), mode)

    made: dict[tuple[str, str], Callable] = {("dfgnn", "eager"): ours}
    if cuda:
        made["dfgnn", "captured"] = ours
    if case.get("compiled"):
        # Compiled PyG is measured with the first dtype only, because compiling takes most of the time. With
        # the other dtypes dfgnn alone is measured, and compared with that.
        if dtype == case["dtypes"][0]:
            made["PyG", "compiled"] = functools.partial(theirs, peers.pyg_compile)
            if cuda and graph.num_edges <= MOST_CAPTURED_EDGES:
                made["PyG", "compiled and captured"] = made["PyG", "compiled"]
    else:
        for library in case["peers"]:
            made[library, "eager"] = functools.partial(theirs, PEERS[library])
        if cuda and "PyG" in case["peers"] and graph.num_edges <= MOST_CAPTURED_EDGES:
            made["PyG", "captured"] = made["PyG", "eager"]

    def step(make: Callable, way: str) -> Step:
        own, call = make()
        if way.endswith("captured"):
            call()  # compiles
            return captured(call, graph.device)
        results = call()
        return Step(call, 1, sum(t.nbytes for t in results), _errors(own, results, exact))

    return [
        Contestant(library, way, dtype, functools.partial(step, make, way))
        for (library, way), make in made.items()
    ]


def _exact(work: Callable[[], Workload], mode: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """float64 values of all results, or of some rows of the output."""
    mine = work()
    everything = mine.graph.num_edges * mine.heads * mine.head_dim <= MOST_EXACT
    rows = None if everything else sample_rows(mine.graph, run.SAMPLE)
    return mine.reference(mode == "train", rows), rows


def _errors(work: Workload, results, exact) -> dict[str, Any]:
    """{"error"}: of the output and the worst of the gradients, relative to float64."""
    if exact is None:
        return {}
    try:
        reference, rows = exact()
    except torch.OutOfMemoryError:
        return {}
    by_tensor = work.errors(results, reference, rows)
    found = {"out": by_tensor.pop("out")}
    if by_tensor:
        found["gradients"] = max(by_tensor.values())
    if rows is not None:
        found["rows"] = len(rows)
    return {"error": {name: significant(value) for name, value in found.items()}}


def _byte_bounds(layer, mode, graph, heads, dim, dtype: str, floor, bench: Bench) -> dict[str, float]:
    itemsize = getattr(torch, dtype).itemsize
    size = bounds.Size(graph.num_src, graph.num_dst, graph.num_edges, heads, dim, itemsize)
    cuda = bench.device.type == "cuda"
    return {
        kind: significant(bounds.byte_bound(layer, mode, size, ms, bench.copy_gb_s, launches=cuda))
        for kind, ms in floor.items()
        if kind != "by"
    }


# ---- all pairs of small graphs ---------------------------------------------------------------------------


def measure_dense(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """Attention among all pairs of each small graph of a batch: dot-product attention on a graph of cliques,
    beside what needs no graph: attention over padded rows, and FlexAttention with a mask of the graphs."""
    graph = bench.graph(case["graph"])
    heads, dim, device = case["heads"], case["head_dim"], bench.device
    sizes = _clique_sizes(graph.in_degrees())
    contestants = []
    for dtype in case["dtypes"]:
        generator = torch.Generator().manual_seed(0)
        query, key, value, grad = (
            torch.randn(graph.num_src, heads, dim, generator=generator).to(device, getattr(torch, dtype))
            for _ in range(4)
        )
        leaves = [t.requires_grad_() for t in (query, key, value)]
        ways = {
            ("dfgnn", "eager"): functools.partial(functional.dot_attention, graph),
            ("padded SDPA", "eager"): _padded(sizes, device),
        }
        if device.type == "cuda":
            ways["FlexAttention", "compiled"] = _flex(sizes, device)
        for (library, way), attention in ways.items():

            def make(attention=attention, leaves=leaves, grad=grad) -> Step:
                def call():
                    return torch.autograd.grad(attention(*leaves), leaves, grad)

                with torch.no_grad():
                    out = attention(*leaves)
                    expected = functional.dot_attention(graph, *(t.double() for t in leaves))
                    error = float((out.double() - expected).norm() / expected.norm())
                results = call()
                kept = sum(t.nbytes for t in results)
                return Step(call, 1, kept, {"error": {"out": significant(error)}})

            contestants.append(Contestant(library, way, dtype, make))
    found = compare(contestants, device, bench.seconds)
    return {"nodes": graph.num_dst, "edges": graph.num_edges, "contestants": found}


def _clique_sizes(degree: Tensor) -> list[int]:
    """The number of nodes of each clique in a batch of cliques with loops: a node's degree is that number."""
    sizes, place, values = [], 0, degree.tolist()
    while place < len(values):
        sizes.append(values[place])
        place += values[place]
    return sizes


def _padded(sizes: list[int], device) -> Callable:
    """Scaled dot-product attention of [graphs, heads, most nodes, D], with padding there and back."""
    most = max(sizes)
    row = torch.cat([torch.arange(n) + k * most for k, n in enumerate(sizes)]).to(device)
    mask = (torch.arange(most) < torch.tensor(sizes)[:, None])[:, None, None].to(device)

    def attention(query, key, value):
        def padded(x):
            wide = x.new_zeros(len(sizes) * most, *x.shape[1:]).index_copy(0, row, x)
            return wide.view(len(sizes), most, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(padded(query), padded(key), padded(value), attn_mask=mask)
        return out.transpose(1, 2).flatten(0, 1)[row]

    return attention


def _flex(sizes: list[int], device) -> Callable:
    """FlexAttention over all nodes in one sequence; pairs of different graphs are masked."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    graph_of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)

    def same_graph(batch, head, q, k):
        return graph_of[q] == graph_of[k]

    n = len(graph_of)
    mask = create_block_mask(same_graph, None, None, n, n, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(query, key, value):
        batch = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        return compiled(*batch, block_mask=mask).squeeze(0).transpose(0, 1)

    return attention
