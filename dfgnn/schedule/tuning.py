"""Autotuning: the plans of a graph by measurement instead of by estimate."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from .. import schedule as scheduler
from ..bench.workloads import LAYERS, Workload, plan_shape
from ..bench.yardsticks import timings
from ..functional import DTYPES
from ..graph import Graph

__all__ = ["Tuning", "autotune"]

_WHERE = "Graph.autotune"
# A candidate has to beat the estimate's choice by this factor: less is noise.
_GAIN = 1.02
# Places of `indices` that are summed at a time.
_PART = 2**24


@dataclass(frozen=True)
class Tuning:
    """What `Graph.autotune` kept.

    forward, reverse: a schedule with its bound, "natural<=512"; reverse is None without backward.
    milliseconds: of every candidate by direction, the plan of the estimate first; empty if the choice was
    read from the file.
    """

    forward: str
    reverse: str | None
    milliseconds: dict[str, dict[str, float]]

    def __str__(self) -> str:
        lines = []
        for direction, chosen in (("forward", self.forward), ("reverse", self.reverse)):
            if chosen is None:
                continue
            times = self.milliseconds.get(direction, {})
            text = ", ".join(f"{name} {ms:.4g} ms" for name, ms in times.items()) or "from the file"
            lines.append(f"{direction}: {chosen} ({text})")
        return "\n".join(lines)


def autotune(
    graph: Graph,
    layer: str,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    backward: bool,
    seconds: float,
    file: str | os.PathLike | None,
) -> Tuning:
    """See `Graph.autotune`."""
    if layer not in LAYERS:
        raise ValueError(f"{_WHERE}: layer: expected one of {', '.join(LAYERS)}, got {layer!r}")
    for name, size in (("num_heads", num_heads), ("head_dim", head_dim)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{_WHERE}: {name}: expected a positive integer, got {size!r}")
    if dtype not in DTYPES:
        raise ValueError(f"{_WHERE}: dtype: expected one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    if seconds <= 0:
        raise ValueError(f"{_WHERE}: seconds: expected a positive number, got {seconds!r}")
    path = None if file is None else Path(file)
    entries = _read(path) if path else {}
    shape = plan_shape(LAYERS[layer], graph, num_heads, head_dim, dtype)
    directions = {"forward": False, "reverse": True} if backward else {"forward": False}
    key = _key(graph, layer, num_heads, head_dim, dtype) if path else None

    known = entries.get(key, {})
    if all(name in known for name in directions):
        for name, reverse in directions.items():
            _keep(graph, shape, reverse, known[name], "measured earlier, read from a file")
        return Tuning(known["forward"], known["reverse"] if backward else None, {})

    work = Workload.make(LAYERS[layer], graph, num_heads, head_dim, dtype)
    chosen, times = {}, {}
    for name, reverse in directions.items():
        chosen[name], times[name] = _tune(graph, work, shape, reverse, seconds)
    if path:
        _write(path, _read(path) | {key: known | chosen})
    return Tuning(chosen["forward"], chosen.get("reverse"), times)


def _auto(shape: dict, reverse: bool, edges: bool) -> tuple:
    return shape["num_heads"], shape["head_dim"], shape["dtype"], reverse, "auto", shape["layer"], edges


def _keep(graph: Graph, shape: dict, reverse: bool, schedule: str, why: str) -> None:
    """Makes a schedule the layer's "auto": one on rows for all calls, tiles for those that can take them."""
    plan = replace(graph.plan(**shape, reverse=reverse, schedule=schedule), why=why)
    for edges in (False,) if plan.tiles is not None else (False, True):
        graph._plans[_auto(shape, reverse, edges)] = plan


def _tune(graph: Graph, work: Workload, shape: dict, reverse: bool, seconds: float):
    """The fastest schedule of a direction, which becomes "auto", and the times in ms of all."""
    before = dict(graph._plans)
    estimate = scheduler.plan(graph, reverse=reverse, **shape)
    first = f"{estimate.schedule}<={estimate.max_edges}"
    names = [first, *(x for x in scheduler.alternatives(graph, reverse=reverse, **shape) if x != first)]
    call = work.call(
        lambda **inputs: work.layer.attention(graph, **inputs), "train" if reverse else "forward"
    )
    try:
        times = {}
        for name in names:
            _keep(graph, shape, reverse, name, "a candidate")
            found = timings(call, graph.device, seconds / len(names))
            times[name] = found.get("kernels", {}).get("median", found["eager"]["median"])
        best = min(times, key=times.get)
        if times[best] * _GAIN > times[first]:
            best = first
    except BaseException:
        graph._plans.clear()
        graph._plans.update(before)
        raise
    on_rows = [name for name in times if not name.startswith("tiles")]
    for name in (min(on_rows, key=times.get), best):  # the first for calls with edge tensors
        why = f"fastest of {len(times)} measured: {times[name]:.4g} ms, the estimate's {times[first]:.4g} ms"
        _keep(graph, shape, reverse, name, why)
    kept = {key: graph._plans[key] for edges in (True, False) if (key := _auto(shape, reverse, edges))}
    graph._plans.clear()  # the others' items
    graph._plans.update(before | kept)
    return best, times


# ---- the file --------------------------------------------------------------------------------------


def _key(graph: Graph, layer: str, num_heads: int, head_dim: int, dtype: torch.dtype) -> str:
    """Names the graph by its degrees and a checksum of its edges, the device, and the shape."""
    device = graph.device
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()}"
    stats = asdict(graph.degree_stats()) | {"checksum": _checksum(graph)}
    shape = f"{layer} {num_heads}x{head_dim} {str(dtype).removeprefix('torch.')}"
    return f"{place} | {shape} | " + " ".join(f"{name}={value:.6g}" for name, value in stats.items())


def _checksum(graph: Graph) -> int:
    """Of the CSR by destination, so that a reordered graph is another one."""
    total = 0
    for tensor in graph.csr()[:2]:
        for begin in range(0, tensor.numel(), _PART):
            part = tensor[begin : begin + _PART].long()
            place = torch.arange(begin + 1, begin + 1 + part.numel(), device=part.device)
            total += int(((part + 1) * (place * 2654435761 % 1000003)).sum())
    return total % 10**6


def _read(path: Path) -> dict:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{_WHERE}: file: expected JSON of an earlier call in {path}, got {error}"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise ValueError(f"{_WHERE}: file: expected JSON of an earlier call in {path}, got another JSON")
    return found


def _write(path: Path, entries: dict) -> None:
    """In one step, so that a process which reads at the same time sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as new:
        new.write(json.dumps(entries, indent=1) + "\n")
    os.replace(new.name, path)
