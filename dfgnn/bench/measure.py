"""Measures the time (``dfgnn.runtime.timing``) and the memory of one call."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ..runtime.timing import Timing, eager, kernels, reason, timings

__all__ = ["Timing", "eager", "kernels", "milliseconds", "peak_extra", "reason", "synchronize", "timings"]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(fn: Callable, device: torch.device) -> tuple[float, Any]:
    """Wall-clock time of one call that may wait for the device, and its result."""
    synchronize(device)
    start = time.perf_counter()
    result = fn()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3, result


def peak_extra(fn: Callable, result_bytes: int, device: torch.device) -> int:
    """Peak bytes of torch's memory during a call, less those used before and ``result_bytes``.

    Memory that a library allocates without torch's allocator is not counted.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - result_bytes
    return max(_cpu_memory(fn), default=0) - result_bytes


def _cpu_memory(fn: Callable) -> list[int]:
    """The bytes that the call holds in torch's CPU allocator, after every allocation and release."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints its start and end on stderr
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])
    return list(accumulate(event["args"]["Bytes"] for event in changes))
