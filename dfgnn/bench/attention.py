"""Attention functions on a graph, compared with other libraries' operations and two yardsticks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from . import bounds, measure, peers, yardsticks
from .compare import Contestant, Step, captured, compare, release, significant
from .workloads import LAYERS, Workload, sample_rows

# Graphs with more edges are not captured with PyG: it stores several arrays [E, H, D], and a CUDA graph would
# hold that memory in addition to that of the eager calls.
MOST_CAPTURED_EDGES = 20_000_000
# Graphs that stay in memory between cases.
MOST_KEPT_EDGES = 10_000_000
# With at most E x H x D = this number, errors are those of all results; with more, of some rows of the output
# only.
MOST_EXACT = 2**28
SAMPLE = 4096


class Bench:
    """The device, graphs, and what was measured of them: yardsticks and preprocessing.

    seconds: per case. load(name, device): the graph of that name. Graphs of few edges stay in memory; of
    larger ones the last.
    """

    def __init__(
        self, device: torch.device, seconds: float, load: Callable[[str, torch.device], Graph]
    ) -> None:
        self.device, self.seconds, self.load = device, seconds, load
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
            few[name] = self.load(name, self.device)
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
            found = _preprocessing(self._graphs[self.name], heads, head_dim, torch.float32)
            self._preprocessing[key] = {name: significant(ms) for name, ms in found.items()}
        return self._preprocessing[key]


def _preprocessing(graph: Graph, heads: int, dim: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds to make, from edges in random order, both CSRs and both plans; medians of three."""
    csr = graph.csr()
    dst = torch.repeat_interleave(
        torch.arange(graph.num_dst, dtype=torch.int32, device=graph.device),
        csr.indptr.diff(),
        output_size=graph.num_edges,
    )
    order = torch.randperm(graph.num_edges, device=graph.device)
    src, dst = csr.indices[order], dst[order]
    del order
    times = []
    for _ in range(3):
        csr_ms, fresh = measure.milliseconds(
            lambda: Graph.from_coo(src, dst, num_src=graph.num_src, num_dst=graph.num_dst), graph.device
        )
        steps: list[Callable] = [fresh.reverse_csr]
        steps += [functools.partial(fresh.plan, heads, dim, dtype, reverse=r) for r in (False, True)]
        times.append([csr_ms, *(measure.milliseconds(step, graph.device)[0] for step in steps)])
    names = ("csr", "reverse_csr", "plan", "reverse_plan")
    return {name: sorted(column)[1] for name, column in zip(names, zip(*times))}


def _winner(yardstick: dict[str, Any]) -> dict[str, Any]:
    """One yardstick's milliseconds, schedule and number of column blocks, or the reason why it has none."""
    kept = {key: yardstick[key] for key in ("unavailable", "schedule", "column_blocks") if key in yardstick}
    medians = {
        kind: significant(yardstick[kind]["median"])
        for kind in ("eager", "kernels")
        if "median" in yardstick.get(kind, {})
    }
    return kept | medians


def compare_attention(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """A comparison of one layer's attention on one graph; ``case["dtypes"]`` take turns, too, and so do the
    schedules of ``case["schedules"]`` and, with ``case["oracle"]``, all plans that the scheduler could have
    chosen."""
    graph = bench.graph(case["graph"])
    layer, heads, dim, mode = case["layer"], case["heads"], case["head_dim"], case["mode"]
    dropout, cuda = case.get("dropout", 0.0), bench.device.type == "cuda"
    contestants = []
    floors, bound = {}, {}
    for dtype in case["dtypes"]:
        if case["part"] != "compiled":  # whose yardsticks stand at the same case of another part
            floors[dtype] = bench.floor(heads * dim, dtype)
            bound[dtype] = _byte_bounds(layer, mode, graph, heads, dim, dtype, floors[dtype], bench)
        work = functools.cache(functools.partial(_workload, graph, layer, heads, dim, dtype))
        exact = None if dropout else functools.cache(functools.partial(_exact, work, mode))
        contestants += _contestants(case, graph, work, exact, dtype, cuda)
    found = compare(contestants, bench.device, bench.seconds)
    try:
        preprocessing: dict[str, Any] = dict(bench.preprocessing(heads, dim))
    except torch.OutOfMemoryError as error:
        preprocessing = {"unavailable": measure.reason(error)}
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

    def ours(schedule: str) -> tuple[Workload, Callable, dict[str, Any]]:
        options = {"dropout_p": dropout} if dropout else {}
        attention = functools.partial(work().attention(schedule), **options)
        return work(), work().call(attention, mode), _plan_notes(work(), mode, schedule)

    def theirs(build: Callable) -> tuple[Workload, Callable, dict[str, Any]]:
        same = work().in_one_dtype()
        return same, same.call(build(layer, graph, dropout), mode), {}

    schedules = {name: name for name in case.get("schedules", ["auto"])}
    if case.get("oracle"):
        schedules |= _alternatives(work(), mode)
    made: dict[tuple[str, str], Callable] = {}
    for name, schedule in schedules.items():
        behind = "" if name == "auto" else f", {name}"
        for way in ("eager", "captured") if cuda else ("eager",):
            made["dfgnn", way + behind] = functools.partial(ours, schedule)
    # PyG compiled is measured with the first dtype only, because compiling takes most of the time. With the
    # other dtypes dfgnn alone is measured, and compared with that.
    if case.get("compiled") and dtype == case["dtypes"][0]:
        made["PyG", "compiled"] = functools.partial(theirs, peers.pyg_compile)
        if cuda and graph.num_edges <= MOST_CAPTURED_EDGES:
            made["PyG", "compiled and captured"] = made["PyG", "compiled"]
    for library in case["peers"]:
        made[library, "eager"] = functools.partial(theirs, peers.PEERS[library])
    if cuda and "PyG" in case["peers"] and graph.num_edges <= MOST_CAPTURED_EDGES:
        made["PyG", "captured"] = made["PyG", "eager"]

    def step(make: Callable, way: str) -> Step:
        own, call, notes = make()
        if "captured" in way:
            call()  # compiles
            return dataclasses.replace(captured(call, graph.device), notes=notes)
        results = call()
        return Step(call, 1, sum(t.nbytes for t in results), notes | _errors(own, results, exact))

    return [
        Contestant(library, way, dtype, functools.partial(step, make, way))
        for (library, way), make in made.items()
    ]


def _alternatives(work: Workload, mode: str) -> dict[str, str]:
    """Text of the plans -> schedule, of all that the scheduler could have chosen and did not."""
    found, chosen = dict[str, str](), _plan_text(work.plans(mode))
    for schedule in work.alternatives(mode):
        try:
            text = _plan_text(work.plans(mode, schedule))
        except ValueError:
            text = schedule  # not available: the contestant says so
        if text != chosen:
            found.setdefault(text, schedule)
    return found


def _plan_notes(work: Workload, mode: str, schedule: str) -> dict[str, Any]:
    """What a record tells of the plans. A contestant whose partial rows take more memory than "auto" may use
    is "too_large"."""
    plans = work.plans(mode, schedule)
    most = {name: work.most_partial_bytes(name) for name in plans}
    too_large = any(plan.partial_bytes > most[name] for name, plan in plans.items())
    return {"plan": _plan_text(plans)} | ({"too_large": True} if too_large else {})


def _plan_text(plans: dict) -> str:
    def text(plan) -> str:
        heads = f" heads <= {plan.heads_per_tile}" if plan.heads_per_tile else ""
        parts = f" sources / {plan.source_parts}" if plan.source_parts > 1 else ""
        return f"{plan.schedule} <= {plan.max_edges}{heads}{parts}"

    return " / ".join(map(text, plans.values()))


def _exact(work: Callable[[], Workload], mode: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """float64 values of all results, or of some rows of the output."""
    mine = work()
    everything = mine.graph.num_edges * mine.heads * mine.head_dim <= MOST_EXACT
    rows = None if everything else sample_rows(mine.graph, SAMPLE)
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
    return {"error": {name: value if name == "rows" else significant(value) for name, value in found.items()}}


def _byte_bounds(layer, mode, graph, heads, dim, dtype: str, floor, bench: Bench) -> dict[str, float]:
    itemsize = getattr(torch, dtype).itemsize
    size = bounds.Size(graph.num_src, graph.num_dst, graph.num_edges, heads, dim, itemsize)
    cuda = bench.device.type == "cuda"
    return {
        kind: significant(bounds.byte_bound(layer, mode, size, ms, bench.copy_gb_s, launches=cuda))
        for kind, ms in floor.items()
        if kind != "by"
    }
