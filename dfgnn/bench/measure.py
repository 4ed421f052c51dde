"""Time and memory of one call.

A call is timed in two ways. *Eager*: calls back to back, as a training script makes them, launch overhead
and allocator included. *Kernels* (CUDA only): the same calls replayed from a CUDA graph, where only the
kernels are left.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity

# Calls in one CUDA graph: enough for this many ms, so that launching the graph itself does not count.
_GRAPH_MS = 2.0


class Timing(NamedTuple):
    """Milliseconds per call: median, 20th and 80th percentile of that many samples."""

    median: float
    p20: float
    p80: float
    samples: int


def reason(error: BaseException) -> str:
    """An exception in one line, for a table."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:400]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(fn: Callable, device: torch.device) -> tuple[float, object]:
    """Wall-clock time of one call that may wait for the device, and its result."""
    synchronize(device)
    start = time.perf_counter()
    result = fn()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3, result


def eager(fn: Callable, device: torch.device, budget: float) -> Timing:
    """Calls back to back for about ``budget`` seconds."""
    return _summary((_by_events if device.type == "cuda" else _by_clock)(fn), budget)


def kernels(fn: Callable, budget: float, eager_ms: float) -> Timing:
    """Replays of a CUDA graph of ``fn`` for about ``budget`` seconds; ``eager_ms`` is the time of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    repeats = min(math.ceil(_GRAPH_MS / eager_ms), 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            fn()
    timing = _summary(_by_events(graph.replay), budget)
    return Timing(*(t / repeats for t in timing[:3]), timing.samples)


def peak_extra(fn: Callable, kept: int, device: torch.device) -> int:
    """Peak bytes of torch's memory during a call, above what was there before and ``kept`` bytes of results.

    What a library takes beside torch's allocator is not in it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - kept
    return max(_cpu_memory(fn), default=0) - kept


def _cpu_memory(fn: Callable) -> list[int]:
    """Bytes that the call holds in torch's CPU allocator, after every allocation and release."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its start and end on stderr
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])
    return list(accumulate(event["args"]["Bytes"] for event in changes))


def _by_events(fn):
    def sample(count):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            fn()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    return sample


def _by_clock(fn):
    def sample(count):
        times = [time.perf_counter()]
        for _ in range(count):
            fn()
            times.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in pairwise(times)]

    return sample


def _summary(sample: Callable[[int], list[float]], budget: float) -> Timing:
    def count(share, ms, least, most):
        return min(max(int(share * budget * 1e3 / ms), least), most)

    sample(1)  # compilation, plans, the allocator
    (once,) = sample(1)
    warm = sorted(sample(count(0.2, once, 1, 100)))
    times = sorted(sample(count(0.8, warm[len(warm) // 2], 5, 1000)))
    n = len(times)
    return Timing(times[n // 2], times[n // 5], times[n - 1 - n // 5], n)
