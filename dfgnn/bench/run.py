"""Measures every layer, shape, dtype, mode and schedule on one graph; results are plain data."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..graph import Graph
from . import bounds, measure, peers
from .candidates import describe, measure_candidates
from .measure import timings
from .workloads import LAYERS, Workload, sample_rows
from .yardsticks import measure_floor

SAMPLE = 4096


@dataclass(frozen=True)
class Options:
    """What to measure on every graph.

    budget: seconds per measurement. check: compute errors of all results ("full"), of ``SAMPLE`` rows of the
    output ("sample"), or none ("none"). oracle: measure every candidate plan of the schedule "auto".
    """

    layers: tuple[str, ...] = ("gat", "gatv2", "dot")
    shapes: tuple[tuple[int, int], ...] = ((4, 32),)  # (heads, head size)
    dtypes: tuple[str, ...] = ("float32",)
    modes: tuple[str, ...] = ("forward", "train")
    schedules: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ()
    budget: float = 0.5
    check: str = "full"
    oracle: bool = False


def measure_graph(
    name: str, graph: Graph, options: Options, emit, graphs: int = 1, copy_gb_s: float | None = None
) -> dict:
    """{"graph", "yardsticks", "rows"} of one graph; calls ``emit(kind, record)`` for each finished record.

    graphs: how many small graphs it holds. copy_gb_s: this device's bandwidth of copying, for the byte bound.

    A row that could not be measured has ``failed`` with the reason instead of numbers.
    """
    result: dict[str, Any] = {"graph": _describe(name, graph, options, graphs), "yardsticks": [], "rows": []}
    emit("graph", result["graph"])
    floors = {}
    for dtype in options.dtypes:
        for heads, dim in options.shapes:
            key = heads * dim, dtype
            if key not in floors:
                floors[key] = measure_floor(graph, heads * dim, getattr(torch, dtype), options.budget)
                floors[key]["copy_gb_s"] = copy_gb_s
                result["yardsticks"].append({"graph": name, **floors[key]})
                emit("yardstick", floors[key])
            for layer in options.layers:
                for row in _measure_layer(graph, layer, heads, dim, dtype, floors[key], options):
                    result["rows"].append({"graph": name, **row})
                    emit("row", result["rows"][-1])
                _release(graph)
    return result


def _release(graph) -> None:
    """Frees memory that is no longer used, so that it does not limit the next measurement."""
    gc.collect()
    if graph.device.type == "cuda":
        torch.cuda.empty_cache()


def _describe(name: str, graph: Graph, options: Options, graphs: int) -> dict:
    stats = graph.degree_stats()
    info = {
        "name": name,
        "graphs": graphs,
        "nodes": graph.num_dst,
        "edges": graph.num_edges,
        "max_degree": stats.max,
        "mean_degree": stats.mean,
    }
    try:
        dtype = getattr(torch, options.dtypes[0])
        info["preprocessing_ms"] = preprocessing(graph, *options.shapes[0], dtype)
    except torch.OutOfMemoryError as error:
        info["preprocessing_ms"] = {"unavailable": measure.reason(error)}
    _release(graph)
    return info


def preprocessing(graph: Graph, heads: int, dim: int, dtype: torch.dtype) -> dict[str, float]:
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
        steps += [partial(fresh.plan, heads, dim, dtype, reverse=reverse) for reverse in (False, True)]
        times.append([csr_ms, *(measure.milliseconds(step, graph.device)[0] for step in steps)])
    names = ("csr", "reverse_csr", "plan", "reverse_plan")
    return {name: sorted(column)[1] for name, column in zip(names, zip(*times))}


def _measure_layer(graph, layer, heads, dim, dtype, floor, options):
    """The results of one layer, shape and dtype: a row for every mode and schedule."""
    row = {"layer": layer, "heads": heads, "head_dim": dim, "dtype": dtype}
    keys = [{**row, "mode": mode, "schedule": s} for mode in options.modes for s in options.schedules]
    try:
        work = Workload.make(LAYERS[layer], graph, heads, dim, getattr(torch, dtype))
    except torch.OutOfMemoryError as error:
        yield from ({**key, "failed": f"inputs: {measure.reason(error)}"} for key in keys)
        return
    check = _Check.make(work, options)
    by_mode = {mode: _measure_peers(work, layer, mode, check, options) for mode in options.modes}
    for key in keys:
        try:
            measured = _measure_row(work, key["mode"], key["schedule"], floor, check, options)
        except (RuntimeError, ValueError) as error:
            yield {**key, "failed": measure.reason(error)}
            continue
        measured["peers"] = {
            name: peer
            | {
                speedup: peer[kind]["median"] / measured[kind]["median"]
                for kind, speedup in peers.SPEEDUPS.items()
                if "median" in peer.get(kind, {}) and "median" in measured.get(kind, {})
            }
            for name, peer in by_mode[key["mode"]].items()
        }
        if options.oracle and key["schedule"] == "auto":
            measured["oracle"] = measure_candidates(work, key["mode"], measured, options.budget)
        yield {**key, **measured}


@dataclass(frozen=True)
class _Check:
    """Errors against float64, of all results or of some rows, or the reason why they were not computed."""

    reference: dict | None = None
    rows: torch.Tensor | None = None
    unavailable: str = ""

    @classmethod
    def make(cls, work: Workload, options: Options) -> "_Check":
        if options.check == "none":
            return cls(unavailable="--check none")
        rows = sample_rows(work.graph, SAMPLE) if options.check == "sample" else None
        try:
            return cls(work.reference("train" in options.modes, rows), rows)
        except torch.OutOfMemoryError as error:
            return cls(unavailable=measure.reason(error))

    def errors(self, work: Workload, results) -> dict:
        if self.reference is None:
            return {"unavailable": self.unavailable}
        by_tensor = work.errors(results, self.reference, self.rows)
        gradients = [value for name, value in by_tensor.items() if name != "out"]
        # max() alone would ignore NaN.
        worst = math.nan if any(map(math.isnan, gradients)) else max(gradients, default=None)
        sampled = {} if self.rows is None else {"rows": len(self.rows)}
        return {"out": by_tensor["out"], "gradients": worst, "by_tensor": by_tensor, **sampled}


def _measure_row(work: Workload, mode, schedule, floor, check: _Check, options) -> dict:
    graph, device = work.graph, work.graph.device
    row: dict[str, Any] = {"plan": describe(work.plans(mode, schedule))}
    call = work.call(work.attention(schedule), mode)
    results = call()
    row["error"] = check.errors(work, results)
    result_bytes = sum(t.nbytes for t in results)
    del results

    row |= timings(call, device, options.budget)
    passes, width = work.layer.passes[mode], work.heads * work.head_dim
    row["x_floor"] = {
        kind: row[kind]["median"] / (passes * ms)
        for kind, ms in floor["floor"].items()
        if "median" in row[kind]
    }
    row["x_bound"] = _times_bound(work, mode, row, floor)
    best = row.get("kernels", {}).get("median", row["eager"]["median"])
    row["gathered_gb_s"] = passes * graph.num_edges * width * work.dtype.itemsize / best / 1e6
    row["edge_tensor_mb"] = graph.num_edges * work.heads * 4 / 1e6
    row["extra_mb"] = measure.peak_extra(call, result_bytes, device) / 1e6
    return row


def _times_bound(work: Workload, mode: str, row: dict, floor: dict) -> dict[str, float]:
    """The ratio to the byte bound, by kind of timing."""
    if floor.get("copy_gb_s") is None:
        return {}
    graph, cuda = work.graph, work.graph.device.type == "cuda"
    sizes = graph.num_src, graph.num_dst, graph.num_edges, work.heads, work.head_dim, work.dtype.itemsize
    size, copy = bounds.Size(*sizes), floor["copy_gb_s"]
    return {
        kind: row[kind]["median"] / bounds.byte_bound(work.layer.name, mode, size, ms, copy, launches=cuda)
        for kind, ms in floor["floor"].items()
        if "median" in row[kind]
    }


def _measure_peers(work: Workload, layer: str, mode: str, check: _Check, options) -> dict:
    """{peer: {"eager", "error" and, of ``peers.CAPTURED``, "kernels"} or {"unavailable": reason}}"""
    results = {}
    for name in options.peers:
        try:
            results[name] = _measure_peer(work.in_one_dtype(), name, layer, mode, check, options)
        except Exception as error:  # an error of another library is recorded as its result
            results[name] = {"unavailable": measure.reason(error)}
        _release(work.graph)
    return results


def _measure_peer(work: Workload, name, layer, mode, check: _Check, options) -> dict:
    call = work.call(peers.PEERS[name](layer, work.graph), mode)
    error = check.errors(work, call())
    if name in peers.CAPTURED:
        return timings(call, work.graph.device, options.budget) | {"error": error}
    return {"eager": measure.eager(call, work.graph.device, options.budget)._asdict(), "error": error}
