"""Rows by an index, ``x[index]``, in traced code of a script.

PyTorch's indexing takes rows of any shape by any indices. On the CPU both directions take two to six times as
long as a gather and a sum of rows. On a GPU its backward adds the gradients of a row one after the other, so
that a table of a few relations, which 200,000 edges index, takes tens of milliseconds; there groups of edges
are summed first, in an order that is the same at every run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..compiling.operations import arguments, name, value
from ..engine import by_index
from ..runtime import eager, rules

# The least number of elements for which `rows` is taken, without gradients and with them. An autograd
# function in Python costs about 20 µs more than PyTorch's.
_LEAST, _LEAST_TRAINED = 1 << 14, 1 << 16
# On a GPU gradients are summed by groups of edges for tables of at most _MOST_ROWS rows that at least
# _LEAST_EDGES edges each index in the mean. A group has _GROUP edges.
_MOST_ROWS, _LEAST_EDGES, _GROUP = 64, 256, 128


def rewritten(graph_module: GraphModule) -> bool:
    """Replaces each x[index] in a graph by a call of `rows`. Returns whether there was any."""
    found = False
    for node in graph_module.graph.nodes:
        given = arguments(node) if name(node) == "getitem" else {}
        x, index = value(given.get("input")), value(given.get("index"))
        if not isinstance(x, Tensor) or not isinstance(index, Tensor) or index.dtype != torch.int64:
            continue
        if index.dim() == 1 and x.dim() > 1 and x.dtype in by_index.DTYPES:
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
    if x.is_cuda:
        few = trains and len(x) <= _MOST_ROWS and len(index) >= _LEAST_EDGES * len(x)
        if not few or not index.is_cuda or not (eager.is_eager(x) and eager.is_eager(index)):
            return None
        return rules.apply(_Table(len(x)), x, index)
    numbers = len(index) * (x.numel() // len(x))
    if numbers < (_LEAST_TRAINED if trains else _LEAST) or not by_index.takes_rows(x):
        return None
    if not x.is_contiguous() or not index.is_cpu or not eager.is_eager(index):
        return None
    try:
        return by_index.rows(x, index)
    except (IndexError, RuntimeError):  # a negative number, which only the original takes, or its own error
        return None


class _Table(rules.Rule):
    """x[index] for a table x of few rows."""

    __slots__ = ("num_rows",)

    def __init__(self, num_rows: int):
        self.num_rows = num_rows

    def forward(self, x, index):
        return x[index]

    def saved(self, tensors, result):
        return tensors[1:]

    def gradients(self, need, saved, grad):
        return table_sums(grad, saved[0], self.num_rows), None


def table_sums(grad: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """``[num_rows, ...]``: the sums of the rows ``[E, ...]`` of the same number, which may be negative. Each
    group of _GROUP edges adds up into rows of its own, so that no row is one long sum."""
    groups = -(-len(index) // _GROUP)
    place = index.remainder(num_rows) * groups + torch.arange(len(index), device=index.device) // _GROUP
    sums = grad.new_zeros(num_rows * groups, *grad.shape[1:])
    return sums.index_put((place,), grad, accumulate=True).unflatten(0, (num_rows, groups)).sum(1)
