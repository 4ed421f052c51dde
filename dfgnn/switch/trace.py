"""Reads times and counts of each step from a trace of torch.profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

STEP = "dfgnn.profile.step"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Calls that return after the device has finished earlier work.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# The names of the operators that autograd runs in backward begin with this.
_BACKWARD = "autograd::engine"


class Step(NamedTuple):
    """One step's times in milliseconds, and its counts."""

    kernels: int
    launches: int
    copies: int
    device_ms: float  # time in which the device was busy
    tklqt_ms: float  # total kernel launch and queueing time: see `profile`
    waits: int
    waits_ms: float
    backward_elsewhere: bool  # in another thread than the step


def events_of(profiler: Any) -> list[dict[str, Any]]:
    """The events in the Chrome trace of a torch.profiler.profile that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(errors="replace"))["traceEvents"]


def steps_of(events: list[dict[str, Any]]) -> list[Step]:
    """The steps, which are ranges named ``STEP``; a kernel belongs to the step that launched it."""
    complete = [event for event in events if event.get("ph") == "X"]
    windows = sorted(
        (e["ts"], e["ts"] + e["dur"], e.get("tid"))
        for e in complete
        if e.get("cat") == "user_annotation" and e["name"] == STEP
    )
    launches = {
        e["args"]["correlation"]: e
        for e in complete
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    host: dict[int, list[dict]] = defaultdict(list)
    device: dict[int, list[dict]] = defaultdict(list)
    for event in complete:
        category = event.get("cat")
        if category in _ON_DEVICE:
            launch = launches.get(event.get("args", {}).get("correlation"))
            place = None if launch is None else _window(windows, launch["ts"])
            if place is not None:
                device[place].append(event)
        elif category == "cpu_op" or category in _LAUNCHES:
            place = _window(windows, event["ts"])
            if place is not None:
                host[place].append(event)
    return [_step(window, host[k], device[k], launches) for k, window in enumerate(windows)]


def _window(windows, time: float) -> int | None:
    return next((k for k, (begin, end, _) in enumerate(windows) if begin <= time < end), None)


def _step(window, host: list[dict], device: list[dict], launches: dict[Any, dict]) -> Step:
    _, _, thread = window
    waits = [e for e in host if e["name"] in _WAITS]
    kernels = [e for e in device if e["cat"] == "kernel"]
    correlations = [e["args"]["correlation"] for e in kernels]
    return Step(
        len(kernels),
        len(set(correlations)),
        len(device) - len(kernels),
        _busy(sorted((e["ts"], e["ts"] + e["dur"]) for e in device)) / 1e3,
        sum(e["ts"] - launches[c]["ts"] for e, c in zip(kernels, correlations)) / 1e3,
        len(waits),
        sum(e["dur"] for e in waits) / 1e3,
        any(
            e["cat"] == "cpu_op" and e.get("tid") != thread and e["name"].startswith(_BACKWARD) for e in host
        ),
    )


def _busy(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans, given as (beginning, end) in the order of their beginnings."""
    total, upto = 0.0, float("-inf")
    for begin, end in spans:
        total += max(end - max(begin, upto), 0.0)
        upto = max(upto, end)
    return total


def peak_of(events: list[dict[str, Any]]) -> int | None:
    """The most bytes that tensors took during the steps, by the events of the CPU's allocator."""
    totals = [
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    return int(max(totals) - min(0, *totals)) if totals else None
