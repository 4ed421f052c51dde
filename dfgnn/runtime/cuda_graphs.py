"""Captures CUDA graphs without what ends a capture from outside."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
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
    """Whether such a step runs, in any thread: backward may be in one of PyTorch's."""
    return _captured_steps > 0


def _end_capture_of_random_numbers() -> None:
    """PyTorch's generator takes a capture that failed for going on, and refuses to draw outside of it. A
    whole capture tells it the end. If that fails, too, the first error is the one to be told."""
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
