"""``dfgnn.profile``: what a step waits for. Tables and timelines are torch.profiler's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from ..runtime import torch_internals as internals
from ..runtime.wrong_call import says_calls
from . import trace

# A launch-bound step with at most this number of launches spends the host's time on something else.
_FEW = 10
# Advice is given if it gains at least this share of a step's time.
_GAIN = 0.05


@dataclass(frozen=True, repr=False)
class Profile:
    """The measurements of one step: see `dfgnn.profile`. Printing it shows them, a verdict and advice."""

    device: str
    on_gpu: bool
    step_ms: float
    host_ms: float
    device_ms: float
    tklqt_ms: float
    kernels: int
    launches: int  # calls that launch kernels: a CUDA graph has many kernels and one launch
    copies: int  # copies between host and device, and fills of memory
    waits: int  # calls that wait for the device
    waits_ms: float
    peak_bytes: int | None
    calling_thread_ms: float | None = None  # step time with backward in the calling thread, if it was not
    profiler: Any = None  # torch.profiler's: key_averages().table(), export_chrome_trace(path)

    @property
    def verdict(self) -> str:
        """ "launch-bound", "bandwidth-bound", or on the CPU "host"."""
        if not self.on_gpu:
            return "host"
        return "launch-bound" if self.host_ms > self.device_ms else "bandwidth-bound"

    @property
    def advice(self) -> list[str]:
        """What makes the step faster, in words."""
        by = "cuda" if self.verdict == "bandwidth-bound" else "cpu"
        table = f'.profiler.key_averages().table(sort_by="self_{by}_time_total") has the times by operator'
        if not self.on_gpu:
            return [f"the step runs on the CPU: {table}"]
        lines = []
        if self.verdict == "launch-bound":
            idle = 1 - min(self.device_ms / self.step_ms, 1.0)
            lines.append(
                f"the device is idle for {idle:.0%} of a step: faster kernels change nothing, fewer do"
            )
            if self.launches > _FEW:
                lines.append(
                    f"dfgnn.capture replays the {self.launches} launches as one CUDA graph; "
                    "torch.compile fuses what lies between attentions"
                )
            else:
                lines.append("there are few launches left: look at the loader and at what else the host does")
            if self.calling_thread_ms is not None and self.calling_thread_ms < (1 - _GAIN) * self.step_ms:
                lines.append(
                    "backward runs in another thread; in the calling one, by "
                    "torch.autograd.set_multithreading_enabled(False), which suits a single GPU, a step "
                    f"takes {self.calling_thread_ms:.3f} ms"
                )
        else:
            lines.append(f"the device is at work for {self.device_ms:.3f} ms of the step: {table}")
            lines.append(
                "bfloat16 autocast halves what is read, Graph.autotune and Graph.reorder change how; "
                "capture will not help much"
            )
        if self.waits:
            lines.append(
                f"the host waits {self.waits} times for the device in each step ({self.waits_ms:.3f} ms): "
                "look for .item(), .cpu(), boolean indexing and prints"
            )
        return lines

    def __repr__(self) -> str:
        rows = [("time per step", f"{self.step_ms:.3f} ms"), ("host time", f"{self.host_ms:.3f} ms")]
        if self.calling_thread_ms is not None:
            rows.insert(1, ("  backward in the calling thread", f"{self.calling_thread_ms:.3f} ms"))
        if self.on_gpu:
            copied = f", {self.copies} copies and settings" if self.copies else ""
            rows += [
                ("device time", f"{self.device_ms:.3f} ms"),
                ("kernels", f"{self.kernels} in {self.launches} launches{copied}"),
                ("kernel launch and queueing (TKLQT)", f"{self.tklqt_ms:.3f} ms"),
                ("waits for the device", f"{self.waits} ({self.waits_ms:.3f} ms)"),
            ]
        if self.peak_bytes is not None:
            rows.append(("peak memory", f"{self.peak_bytes / 2**20:.1f} MiB"))
        lines = [f"a step on {self.device}: {self.verdict}"]
        lines += [f"  {label:<36}{value}" for label, value in rows]
        return "\n".join([*lines, *(f"  -> {text}" for text in self.advice)])


@says_calls
def profile(
    step: Callable[..., Any],
    *args: Any,
    steps: int = 10,
    warmup: int = 5,
    device: torch.device | str | None = None,
) -> Profile:
    """What ``step(*args)`` waits for, as a `Profile`, to be printed.

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
    - ``profiler``: torch.profiler's own, for ``key_averages().table()`` and ``export_chrome_trace(path)``

    A step takes at least the longer of host and device time. So it is *launch-bound* where the host takes
    longer, and else *bandwidth-bound*, because attention on graphs reads more than it computes. On the CPU
    there are no kernels, and the verdict is *host*.

    Args:
        step: a whole training step, or another function that can be called repeatedly; args: its arguments.
        steps: how many steps each measurement takes.
        warmup: how many steps run before.
        device: what to measure; by default the current GPU if there is one, else the CPU.

    Raises:
        TypeError: ``step`` cannot be called.
        ValueError: ``steps`` below 1, or ``warmup`` below 0.

    Source: TKLQT is that of "SKIP: System-Aware Kernel Inference Profiler" (Vellaisamy et al., 2025).

    Example::

        >>> import torch, dfgnn
        >>> x = torch.randn(64, 64)
        >>> found = dfgnn.profile(lambda: x @ x, steps=2, device="cpu")
        >>> found.verdict, found.kernels
        ('host', 0)
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
    found = trace.steps_of(events)
    waits_ms = median(s.waits_ms for s in found)
    return Profile(
        device=torch.cuda.get_device_name(target) if on_gpu else "CPU",
        on_gpu=on_gpu,
        step_ms=times.back_to_back,
        host_ms=max(times.call - waits_ms, 0.0),
        device_ms=median(s.device_ms for s in found),
        tklqt_ms=median(s.tklqt_ms for s in found),
        calling_thread_ms=times.in_calling_thread if any(s.backward_elsewhere for s in found) else None,
        kernels=round(median(s.kernels for s in found)),
        launches=round(median(s.launches for s in found)),
        copies=round(median(s.copies for s in found)),
        waits=round(median(s.waits for s in found)),
        waits_ms=waits_ms,
        peak_bytes=trace.peak_of(events) if peak is None else peak,
        profiler=profiler,
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
