"""Rows by an index, ``x[index]``, on the CPU, while a script runs under ``python -m dfgnn.run``.

PyTorch's indexing takes any shape and any indices: for rows both directions take two to six times as long as
a gather and a sum of rows, which are these, with the same results to the bit. (On a GPU its backward is what
takes long: :mod:`dfgnn.switch.indexing`.)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..engine import by_index
from ..nn._fused_or_upstream import foreign_mode
from ..runtime import eager
from ..runtime import torch_internals as internals
from ..switch.pieces import served

_original: Any = Tensor.__getitem__
# An autograd function in Python costs about 20 µs more than PyTorch's.
_LEAST, _LEAST_TRAINED = 1 << 14, 1 << 16


@functools.wraps(_original)
def getitem(x: Any, index: Any) -> Any:
    """``torch.Tensor.__getitem__``"""
    if type(index) is Tensor and x.is_cpu and index.dtype == torch.int64:
        rows = _rows(x, index)
        if rows is not None:
            served["torch.Tensor.__getitem__"] += 1
            return rows
    return _original(x, index)


def _rows(x: Tensor, index: Tensor) -> Tensor | None:
    if torch.compiler.is_compiling() or internals.tracing_state() is not None or foreign_mode() is not None:
        return None
    if index.dim() != 1 or x.dim() < 2 or not len(x) or not by_index.takes_rows(x) or not x.is_contiguous():
        return None
    trains = x.requires_grad and torch.is_grad_enabled()
    numbers = len(index) * (x.numel() // len(x))
    if numbers < (_LEAST_TRAINED if trains else _LEAST) or not index.is_cpu or not eager.is_eager(index):
        return None
    try:
        return by_index.rows(x, index)
    except (IndexError, RuntimeError):  # a negative number, which only the original takes, or its own error
        return None


def install() -> None:
    Tensor.__getitem__ = getitem  # type: ignore[method-assign]


def remove() -> None:
    if vars(Tensor).get("__getitem__") is getitem:
        del Tensor.__getitem__
