"""Times of several ways to do the same, taken in turns in one process."""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime.cuda_graphs import capturing
from . import measure

# The least and the largest number of samples of each contestant.
LEAST, MOST = 5, 25
# Calls in one sample: enough for this many ms, so that waiting for the device does not count.
SAMPLE_MS = 5.0


class LostDevice(RuntimeError):
    """The device fails at everything, so that the run must end: later contestants would fail without
    fault."""


@dataclass(frozen=True)
class Step:
    """What a contestant runs.

    calls: how many of what is compared one call makes, where it replays a CUDA graph of several. kept: bytes
    of the results of a call, for its peak of memory; None: the memory is not measured. notes: errors and
    the like, for the record. holds: what a CUDA graph reads, which must live as long as the step.
    """

    call: Callable[[], Any]
    calls: int = 1
    kept: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    holds: Any = None


@dataclass(frozen=True)
class Contestant:
    """make() builds the step, and raises where the library, the device or the memory does not allow it."""

    library: str
    way: str  # eager, compiled, captured, compiled and captured
    dtype: str
    make: Callable[[], Step]


def compare(contestants: list[Contestant], device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """A record for each contestant: library, way, dtype, and ``ms``, its samples, or ``failed``, the reason.

    Contestants take turns, so that what disturbs one disturbs all, for about ``seconds`` and at least
    ``LEAST`` turns. Raises LostDevice.
    """
    records: list[dict[str, Any]] = []
    steps: dict[int, Step] = {}
    for number, contestant in enumerate(contestants):
        record: dict[str, Any] = {
            "library": contestant.library,
            "way": contestant.way,
            "dtype": contestant.dtype,
        }
        records.append(record)
        try:
            step = contestant.make()
            for _ in range(2):
                step.call()
            measure.synchronize(device)
            record |= step.notes
            if step.kept is not None:
                record["extra_mb"] = significant(measure.peak_extra(step.call, step.kept, device) / 1e6)
            steps[number] = step
        except Exception as error:  # whatever another library raises is its result
            _fail(record, error, device)
        # Outside `except`, where the error no longer keeps tensors of its frames alive.
        if "failed" in record:
            release(device)
    for number, samples in take_turns(steps, records, device, seconds).items():
        records[number]["ms"] = [significant(ms) for ms in samples]
    steps.clear()
    release(device)
    return records


def take_turns(steps: dict[int, Step], records: list[dict], device, seconds: float) -> dict[int, list[float]]:
    """Samples of each step, in ms; a step that fails on the way is left out and its record says why."""
    times: dict[int, list[float]] = {number: [] for number in steps}
    counts: dict[int, int] = {}

    def sample(number: int) -> None:
        step = steps[number]
        count = counts.get(number, 1)
        began = time.perf_counter()
        for _ in range(count):
            step.call()
        measure.synchronize(device)
        elapsed = (time.perf_counter() - began) * 1e3
        if number in counts:
            times[number].append(elapsed / count / step.calls)
        else:  # the first turn says how many calls a sample takes
            counts[number] = min(max(math.ceil(SAMPLE_MS / max(elapsed, 1e-3)), 1), 200)

    end = time.perf_counter() + seconds
    turn = 0
    while times and (turn <= LEAST or (turn <= MOST and time.perf_counter() < end)):
        for number in list(times):
            try:
                measure.synchronize(device)
                sample(number)
            except Exception as error:
                del times[number]
                _fail(records[number], error, device)
        turn += 1
    return times


def captured(call: Callable[[], Any], device: torch.device) -> Step:
    """Replays of a CUDA graph of as many calls as take about a sample's time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        milliseconds, _ = measure.milliseconds(call, device)
    torch.cuda.current_stream().wait_stream(stream)
    calls = min(max(math.ceil(SAMPLE_MS / max(milliseconds, 1e-3)), 1), 32)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(calls):
            call()
    return Step(graph.replay, calls=calls, holds=call)


def _fail(record: dict, error: Exception, device: torch.device) -> None:
    record["failed"] = measure.reason(error)[:200]
    try:
        measure.synchronize(device)
    except RuntimeError as lost:
        name = f"{record['library']} {record['way']} {record['dtype']}"
        raise LostDevice(f"{name}: the device is lost, after {record['failed']}") from lost


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def significant(value: float) -> float:
    """Four digits, which keeps the file short."""
    return float(f"{value:.4g}")
