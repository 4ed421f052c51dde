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


def _end_capture_of_random_numbers() -> None:
    """PyTorch's generator takes a capture that failed for going on, and refuses to draw outside of it. A
    whole capture tells it the end. If that fails, too, the first error is the one to be told."""
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
