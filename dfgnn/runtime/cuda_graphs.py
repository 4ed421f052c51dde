"""Captures CUDA graphs, and protects a capture from code outside of it that would end it with an error."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def capturing(graph: Any, **options: Any) -> Iterator[None]:
    """``torch.cuda.graph(graph, **options)`` while Python's garbage collector rests: a CUDA graph to which
    nothing refers any more, and which it frees in the meantime, ends the capture with an error (PyTorch does
    not collect before since 2.9). After a capture that failed, random numbers can be drawn again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    except BaseException:
        _end_capture_of_random_numbers()
        raise
    finally:
        if enabled:
            gc.enable()


class Recorder:
    """Records CUDA graphs of a device, on a stream and in a memory pool of their own."""

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self._device = device
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the stream on which graphs are recorded is the current one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextlib.contextmanager
    def without_waiting(self) -> Iterator[None]:
        """A context in which PyTorch raises a RuntimeError ("synchronizing") where it would wait."""
        self._stream.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def recorded(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """(what ``run`` returns, a function that replays it: computes it again in the same memory)."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        # thread_local, because a data loader may pin memory in another thread meanwhile.
        with capturing(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        # Capturing sets the offset of random numbers that replays read to 0, by a kernel on `_stream`, after
        # which the replays must run.
        current.wait_stream(self._stream)
        return out, graph.replay


_captured_steps = 0


@contextlib.contextmanager
def captured_step() -> Iterator[None]:
    """A context of a step that `dfgnn.capture` captures later, or captures."""
    global _captured_steps
    _captured_steps += 1
    try:
        yield
    finally:
        _captured_steps -= 1


def in_captured_step() -> bool:
    """Whether a step within `captured_step` runs, in any thread, because backward may run in one of
    PyTorch's."""
    return _captured_steps > 0


def _end_capture_of_random_numbers() -> None:
    """Resets PyTorch's generator after a capture that failed. The generator believes that this capture still
    goes on, and refuses to draw outside of it, until another capture ends. If that one fails, too, its error
    is dropped, because the first one is the cause."""
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
