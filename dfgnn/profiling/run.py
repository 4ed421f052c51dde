"""``dfgnn.profile``: runs a step under torch.profiler, and without it for times that it would lengthen."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from ..runtime import torch_internals as internals
from ..switch.replace import accelerate, restore
from . import trace
from .report import Comparison, Operator, Profile

__all__ = ["profile", "profile_accelerated"]


def profile(
    step: Callable[..., Any],
    *args: Any,
    steps: int = 10,
    warmup: int = 5,
    device: torch.device | str | None = None,
    name: str = "step",
) -> Profile:
    """Where the time of ``step(*args)`` goes, as a `Profile`: print it, ``plot`` it, ``compare`` two of them.

    The step runs warmup + 3 * steps times, and changes its model each time; on a GPU steps + 1 times more. It
    runs first without the profiler, for ``step_ms`` and ``host_ms``, then under torch.profiler for the rest,
    where each step begins with an idle device.

    - ``host_ms``: time of the host thread in a call that begins with an idle device, without waiting for it
    - ``device_ms``: time in which the device was busy with the step
    - ``step_ms``: time per step of steps back to back
    - ``tklqt_ms``: total kernel launch and queueing time, the sum over kernels of the time from the call that
      launched it to its start
    - ``calling_thread_ms``: ``step_ms`` under ``torch.autograd.set_multithreading_enabled(False)``, if
      backward ran in PyTorch's thread for the GPU; else None

    A step takes at least the longer of host and device time. So it is *launch-bound* where the host takes
    longer, and else *bandwidth-bound*, because attention on graphs reads more than it computes.

    Args:
        step: a whole training step, or another function that can be called repeatedly; args: its arguments.
        steps: how many steps each measurement takes.
        warmup: how many steps run before.
        device: what to measure; by default the current GPU if there is one, else the CPU. On the CPU there
            are no kernels, only host time by operator.
        name: a heading.

    Raises:
        TypeError: ``step`` cannot be called.
        ValueError: ``steps`` below 1, or ``warmup`` below 0.

    Source: TKLQT is that of "SKIP: System-Aware Kernel Inference Profiler" (Vellaisamy et al., 2025).
    """
    if not callable(step):
        raise TypeError(f"dfgnn.profile: step: expected a function, got {type(step).__name__}")
    if steps < 1 or warmup < 0:
        raise ValueError(f"dfgnn.profile: steps, warmup: expected at least 1 and 0, got {steps} and {warmup}")
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = target.type == "cuda"

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(target)

    def run() -> None:
        step(*args)

    for _ in range(warmup):
        run()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(target)
    times = _times(run, steps, wait, on_gpu)
    peak = torch.cuda.max_memory_allocated(target) if on_gpu else None
    profiler = _profiled(run, steps, wait, on_gpu)
    events = trace.events_of(profiler)
    spans = trace.steps_of(events)
    waits_ms = median(s.waits_ms for s in spans)
    return Profile(
        name=name,
        device=torch.cuda.get_device_name(target) if on_gpu else "CPU",
        on_gpu=on_gpu,
        step_ms=times.back_to_back,
        host_ms=max(times.call - waits_ms, 0.0),
        device_ms=median(s.device_ms for s in spans),
        tklqt_ms=median(s.tklqt_ms for s in spans),
        calling_thread_ms=times.in_calling_thread if any(s.backward_elsewhere for s in spans) else None,
        kernels=round(median(s.kernels for s in spans)),
        launches=round(median(s.launches for s in spans)),
        copies=round(median(s.copies for s in spans)),
        waits=round(median(s.waits for s in spans)),
        waits_ms=waits_ms,
        peak_bytes=_peak(events) if peak is None else peak,
        by_kernel=_by_kernel(spans, steps),
        by_operator=_by_operator(profiler, steps),
        timeline=sorted(spans, key=lambda s: s.host[-1].end if s.host else 0.0)[len(spans) // 2],
    )


class _Times(NamedTuple):
    """Milliseconds per step, without the profiler."""

    back_to_back: float
    in_calling_thread: float | None  # the same with backward in the thread that calls it
    call: float  # the median of calls that begin with an idle device, without waiting for it


def _times(run: Callable[[], None], steps: int, wait: Callable[[], None], on_gpu: bool) -> _Times:
    def back_to_back() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            run()
        wait()
        return (time.perf_counter() - begin) / steps * 1e3

    step_ms, in_calling_thread = back_to_back(), None
    if on_gpu and internals.is_multithreading_enabled():
        with torch.autograd.set_multithreading_enabled(False):
            run()
            wait()
            in_calling_thread = back_to_back()
    calls = []
    for _ in range(steps):
        begin = time.perf_counter()
        run()
        calls.append((time.perf_counter() - begin) * 1e3)
        wait()
    return _Times(step_ms, in_calling_thread, median(calls))


def _profiled(run: Callable[[], None], steps: int, wait: Callable[[], None], on_gpu: bool) -> Any:
    """The profiler after these steps."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch_profile(activities=activities, profile_memory=not on_gpu) as profiler:
        for _ in range(steps):
            with record_function(trace.STEP):
                run()
            wait()
    return profiler


def _by_operator(profiler: Any, steps: int) -> list[Operator]:
    """Host time and calls per step, the longest first."""
    operators = [
        Operator(o.key, o.self_cpu_time_total / steps / 1e3, o.count / steps)
        for o in profiler.key_averages()
        if o.key != trace.STEP and o.self_cpu_time_total and not o.key.startswith("cuda")
    ]
    return sorted(operators, key=lambda o: -o.ms)


def _by_kernel(spans: list[Any], steps: int) -> list[Operator]:
    """Device time and launches per step, the longest first."""
    kernels = [
        Operator(key, sum(s.by_kernel[key] for s in spans) / steps, sum(s.counts[key] for s in spans) / steps)
        for key in dict.fromkeys(key for s in spans for key in s.by_kernel)
    ]
    return sorted(kernels, key=lambda o: -o.ms)


def profile_accelerated(
    step: Callable[..., Any], model: torch.nn.Module, *args: Any, **options: Any
) -> Comparison:
    """`profile` of ``step(*args)`` before and after `dfgnn.accelerate` of the model that it trains, which is
    restored at the end. options: those of `profile`, except ``name``."""
    before = profile(step, *args, name="before", **options)
    accelerate(model)
    try:
        after = profile(step, *args, name="accelerated", **options)
    finally:
        restore(model)
    return before.compare(after)


def _peak(events: list[dict[str, Any]]) -> int | None:
    """The most bytes that tensors took during the steps, from the profiler's events of the CPU allocator."""
    totals = [
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    return int(max(totals) - min(0, *totals)) if totals else None
