"""Reads times and counts of each step from a trace of torch.profiler."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

STEP = "dfgnn.profile.step"
_ON_DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "set"}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Calls that return after the device has finished earlier work.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# The names of the operators that autograd runs in backward begin with this.
_BACKWARD = "autograd::engine"


class Span(NamedTuple):
    """An event with its beginning and end, in microseconds from the beginning of its step."""

    kind: str  # "operator", "other thread" (operators there), "launch", "wait"; "kernel", "copy", "set"
    name: str
    begin: float
    end: float


class Step(NamedTuple):
    """One step's times in milliseconds, its counts, and the events of its timeline."""

    host: list[Span]
    device: list[Span]
    kernels: int
    launches: int
    copies: int
    device_ms: float  # time in which the device was busy
    tklqt_ms: float  # total kernel launch and queueing time: see `profile`
    waits: int
    waits_ms: float
    by_kernel: Counter[str]  # milliseconds
    counts: Counter[str]
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
    start, _, thread = window

    def span(kind: str, event: dict) -> Span:
        begin = event["ts"] - start
        return Span(kind, event["name"], begin, begin + event["dur"])

    spans, backward_elsewhere = [], False
    for event in host:
        kind = "launch"
        if event["name"] in _WAITS:
            kind = "wait"
        elif event["cat"] == "cpu_op":
            kind = "operator" if event.get("tid") == thread else "other thread"
            if kind == "other thread" and event["name"].startswith(_BACKWARD):
                backward_elsewhere = True
        spans.append(span(kind, event))
    waits = [s for s in spans if s.kind == "wait"]
    on_device = sorted((span(_ON_DEVICE[e["cat"]], e) for e in device), key=lambda s: s.begin)
    kernels = [e for e in device if e["cat"] == "kernel"]
    by_kernel, counts = Counter[str](), Counter[str]()
    queued = 0.0
    for event in kernels:
        by_kernel[event["name"]] += event["dur"] / 1e3
        counts[event["name"]] += 1
        queued += event["ts"] - launches[event["args"]["correlation"]]["ts"]
    return Step(
        spans,
        on_device,
        len(kernels),
        len({e["args"]["correlation"] for e in kernels}),
        len(device) - len(kernels),
        _busy(on_device) / 1e3,
        queued / 1e3,
        len(waits),
        sum(s.end - s.begin for s in waits) / 1e3,
        by_kernel,
        counts,
        backward_elsewhere,
    )


def _busy(spans: list[Span]) -> float:
    """The length of the union of spans that are sorted by their beginning."""
    total, upto = 0.0, float("-inf")
    for span in spans:
        total += max(span.end - max(span.begin, upto), 0.0)
        upto = max(upto, span.end)
    return total
