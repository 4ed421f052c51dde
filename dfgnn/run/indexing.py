"""Rows by an index, ``x[index]``, in traced code of a script.

PyTorch's indexing takes rows of any shape by any indices. On the CPU both directions take two to six times as
long as a gather and a sum of rows. For gradients of all other indexing see :mod:`dfgnn.run.index_sums`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..compiling.operations import arguments, name, value
from ..engine import by_index
from ..runtime import eager

# The least number of elements for which `rows` is taken, without gradients and with them. An autograd
# function in Python costs about 20 µs more than PyTorch's.
_LEAST, _LEAST_TRAINED = 1 << 14, 1 << 16


def rewritten(graph_module: GraphModule) -> bool:
    """Replaces each x[index] in a graph by a call of `rows`. Returns whether there was any."""
    found = False
    for node in graph_module.graph.nodes:
        given = arguments(node) if name(node) == "getitem" else {}
        x, index = value(given.get("input")), value(given.get("index"))
        if not isinstance(x, Tensor) or not isinstance(index, Tensor) or index.dtype != torch.int64:
            continue
        if index.dim() == 1 and x.dim() > 1 and x.is_cpu and x.dtype in by_index.DTYPES:
            node.op, node.target, node.args = "call_function", rows, (given["input"], given["index"])
            found = True
    graph_module.recompile()
    return found


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]"""
    out = _rows(x, index) if len(x) else None
    return x[index] if out is None else out


def _rows(x: Tensor, index: Tensor) -> Tensor | None:
    trains = x.requires_grad and torch.is_grad_enabled()
    numbers = len(index) * (x.numel() // len(x))
    if numbers < (_LEAST_TRAINED if trains else _LEAST) or not by_index.takes_rows(x):
        return None
    if not x.is_contiguous() or not index.is_cpu or not eager.is_eager(index):
        return None
    try:
        return by_index.rows(x, index)
    except (IndexError, RuntimeError):  # a negative number, which only the original takes, or its own error
        return None
