"""The measurements of one graph, as plain data."""

import gc
import math
from dataclasses import dataclass
from functools import partial

import torch

from ..graph import Graph
from . import measure, peers
from .workloads import LAYERS, Workload
from .yardsticks import measure_floor, timings


@dataclass(frozen=True)
class Options:
    """What to measure on every graph. budget: seconds per measurement; check: "full" or "none"."""

    layers: tuple[str, ...] = ("gat", "gatv2", "dot")
    shapes: tuple[tuple[int, int], ...] = ((4, 32),)  # (heads, head size)
    dtypes: tuple[str, ...] = ("float32",)
    modes: tuple[str, ...] = ("forward", "train")
    schedules: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ()
    budget: float = 0.5
    check: str = "full"


def measure_graph(name: str, graph: Graph, options: Options, emit) -> dict:
    """{"graph", "yardsticks", "rows"} of one graph; ``emit(kind, record)`` gets each record when it is there.

    A row that could not be measured has ``failed`` with the reason instead of numbers.
    """
    result = {"graph": _describe(name, graph, options), "yardsticks": [], "rows": []}
    emit("graph", result["graph"])
    floors = {}
    for dtype in options.dtypes:
        for heads, dim in options.shapes:
            key = heads * dim, dtype
            if key not in floors:
                floors[key] = measure_floor(graph, heads * dim, getattr(torch, dtype), options.budget)
                result["yardsticks"].append({"graph": name, **floors[key]})
                emit("yardstick", floors[key])
            for layer in options.layers:
                for row in _measure_layer(graph, layer, heads, dim, dtype, floors[key], options):
                    result["rows"].append({"graph": name, **row})
                    emit("row", result["rows"][-1])
                _release(graph)
    return result


def _release(graph) -> None:
    gc.collect()
    if graph.device.type == "cuda":
        torch.cuda.empty_cache()


def _describe(name: str, graph: Graph, options: Options) -> dict:
    stats = graph.degree_stats()
    info = {
        "name": name,
        "nodes": graph.num_dst,
        "edges": graph.num_edges,
        "max_degree": stats.max,
        "mean_degree": stats.mean,
    }
    try:
        dtype = getattr(torch, options.dtypes[0])
        info["preprocessing_ms"] = _preprocessing(graph, *options.shapes[0], dtype)
    except torch.OutOfMemoryError as error:
        info["preprocessing_ms"] = {"unavailable": measure.reason(error)}
    _release(graph)
    return info


def _preprocessing(graph: Graph, heads: int, dim: int, dtype: torch.dtype) -> dict[str, float]:
    """From edges in random order: CSR, reverse CSR, plan of either direction; medians of three, in ms."""
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
        steps = [fresh.reverse_csr]
        steps += [partial(fresh.plan, heads, dim, dtype, reverse=reverse) for reverse in (False, True)]
        times.append([csr_ms, *(measure.milliseconds(step, graph.device)[0] for step in steps)])
    names = ("csr", "reverse_csr", "plan", "reverse_plan")
    return {name: sorted(column)[1] for name, column in zip(names, zip(*times))}


def _measure_layer(graph, layer, heads, dim, dtype, floor, options):
    """Rows of one layer, shape and dtype: every mode and schedule."""
    row = {"layer": layer, "heads": heads, "head_dim": dim, "dtype": dtype}
    keys = [{**row, "mode": mode, "schedule": s} for mode in options.modes for s in options.schedules]
    try:
        work = Workload.make(LAYERS[layer], graph, heads, dim, getattr(torch, dtype))
    except torch.OutOfMemoryError as error:
        yield from ({**key, "failed": f"inputs: {measure.reason(error)}"} for key in keys)
        return
    reference, unchecked = None, "--check none"
    if options.check == "full":
        try:
            reference = work.reference("train" in options.modes)
        except torch.OutOfMemoryError as error:
            unchecked = measure.reason(error)
    found = {mode: _measure_peers(work, layer, mode, reference, options) for mode in options.modes}
    for key in keys:
        try:
            measured = _measure_row(work, key["mode"], key["schedule"], floor, reference, options)
        except (RuntimeError, ValueError) as error:
            yield {**key, "failed": measure.reason(error)}
            continue
        if reference is None:
            measured["error"] = {"unavailable": unchecked}
        own = measured["eager"]["median"]
        measured["peers"] = {
            name: peer | ({"speedup": peer["eager"]["median"] / own} if "eager" in peer else {})
            for name, peer in found[key["mode"]].items()
        }
        yield {**key, **measured}


def _plan(work: Workload, schedule: str, reverse: bool) -> dict:
    step = 16 // work.dtype.itemsize if work.graph.device.type == "cuda" else 1
    padded = -(-work.head_dim // step) * step  # as the function does
    plan = work.graph.plan(work.heads, padded, work.dtype, reverse=reverse, schedule=schedule)
    return {"schedule": plan.schedule, "max_edges": plan.max_edges}


def _measure_row(work: Workload, mode, schedule, floor, reference, options) -> dict:
    graph, device = work.graph, work.graph.device
    plan = {"forward": _plan(work, schedule, False)}
    if mode == "train":
        plan["reverse"] = _plan(work, schedule, True)
    call = work.call(partial(work.layer.attention, graph, schedule=schedule), mode)
    results = call()
    row = {"plan": plan}
    if reference is not None:
        row["error"] = _errors(work.errors(results, reference))
    kept = sum(t.nbytes for t in results)
    del results

    row |= timings(call, device, options.budget)
    passes, width = work.layer.passes[mode], work.heads * work.head_dim
    row["x_floor"] = {
        kind: row[kind]["median"] / (passes * ms)
        for kind, ms in floor["floor"].items()
        if "median" in row[kind]
    }
    best = row.get("kernels", {}).get("median", row["eager"]["median"])
    row["gathered_gb_s"] = passes * graph.num_edges * width * work.dtype.itemsize / best / 1e6
    row["edge_tensor_mb"] = graph.num_edges * work.heads * 4 / 1e6
    if device.type == "cuda":
        row["extra_mb"] = measure.peak_extra(call, kept) / 1e6
    return row


def _errors(by_tensor: dict[str, float]) -> dict:
    gradients = [value for name, value in by_tensor.items() if name != "out"]
    # max() passes over NaN.
    worst = math.nan if any(map(math.isnan, gradients)) else max(gradients, default=None)
    return {"out": by_tensor["out"], "gradients": worst, "by_tensor": by_tensor}


def _measure_peers(work: Workload, layer: str, mode: str, reference, options) -> dict:
    """{peer: {"eager", "error"} or {"unavailable": reason}}"""
    found = {}
    for name in options.peers:
        try:
            found[name] = _measure_peer(work.in_one_dtype(), name, layer, mode, reference, options)
        except Exception as error:  # whatever another library raises is its result
            found[name] = {"unavailable": measure.reason(error)}
        _release(work.graph)
    return found


def _measure_peer(work: Workload, name, layer, mode, reference, options) -> dict:
    call = work.call(peers.PEERS[name](layer, work.graph), mode)
    errors = _errors(work.errors(call(), reference)) if reference is not None else None
    return {"eager": measure.eager(call, work.graph.device, options.budget)._asdict(), "error": errors}
