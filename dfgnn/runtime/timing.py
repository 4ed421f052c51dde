"""Times a call: eagerly, and on a GPU also its kernels alone.

*Eager* are calls back to back, as a training script makes them, launch overhead and allocator included.
*Kernels* (CUDA only) are the same calls replayed from a CUDA graph, which leaves the kernels' time alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .cuda_graphs import capturing

# A CUDA graph holds as many calls as take about this number of milliseconds, so that the time of launching
# the graph does not count.
_GRAPH_MS = 2.0


class Timing(NamedTuple):
    """Milliseconds per call: median, 20th and 80th percentile of ``samples`` calls."""

    median: float
    p20: float
    p80: float
    samples: int


def reason(error: BaseException) -> str:
    """An exception in one line, for a table."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:400]


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
    with capturing(graph):
        for _ in range(repeats):
            fn()
    timing = _summary(_by_events(graph.replay), budget)
    median, p20, p80 = (t / repeats for t in timing[:3])
    return Timing(median, p20, p80, timing.samples)


def timings(call: Callable, device: torch.device, budget: float) -> dict[str, dict[str, Any]]:
    """``eager`` and, on CUDA, ``kernels`` (or why it could not be captured)."""
    measured = eager(call, device, budget)
    result: dict[str, dict[str, Any]] = {"eager": measured._asdict()}
    if device.type == "cuda":
        try:
            result["kernels"] = kernels(call, budget, measured.median)._asdict()
        except RuntimeError as error:
            result["kernels"] = {"unavailable": reason(error)}
    return result


def _by_events(fn: Callable) -> Callable[[int], list[float]]:
    def sample(count):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            fn()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    return sample


def _by_clock(fn: Callable) -> Callable[[int], list[float]]:
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

    sample(1)  # the first call compiles, plans and allocates
    (once,) = sample(1)
    warm = sorted(sample(count(0.2, once, 1, 100)))
    times = sorted(sample(count(0.8, warm[len(warm) // 2], 5, 1000)))
    n = len(times)
    return Timing(times[n // 2], times[n // 5], times[n - 1 - n // 5], n)
