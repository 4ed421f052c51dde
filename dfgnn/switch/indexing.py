"""The gradient of ``x[index]`` on a GPU, computed by dfgnn's sums, for :func:`dfgnn.patch`.

PyTorch sorts the index in each backward and then adds up the rows of one position by one warp. Scripts take
rows of nodes, and those of a few types of edges, by ``x[index]``: a hundred thousand rows of six types take
tens of milliseconds so. The sums here divide long rows, have the same order in each run, as PyTorch's have,
and are taken where they gain; all else goes to PyTorch's kernel.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..engine.edge_maps import sum_of_edges
from ..graph import Graph
from ..graph.cache import once
from ..runtime import torch_internals as internals

_OP = "_index_put_impl_"
# A gradient of fewer than _MANY numbers goes to PyTorch's kernel, which takes up to 0.3 ms for it; where
# positions have _LONG rows in the mean, one of fewer than _FEW.
_MANY, _FEW, _LONG = 1 << 22, 1 << 15, 256


class GradientOfIndexing:
    """Stands for PyTorch's ``index_put`` on a kind of device between `put` and `take_back`."""

    def __init__(self, served: Counter[str], kind: str = "CUDA"):
        self._served, self._kind = served, kind
        self._library: Any = None
        self._original: Any = None

    def put(self) -> None:
        if self._library is not None or not internals.can_override_kernels():
            return
        self._original = torch.library.get_kernel(f"aten::{_OP}", self._kind)
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # PyTorch tells that a kernel is overridden
            warnings.simplefilter("ignore", UserWarning)
            self._library.impl(_OP, self._index_put, self._kind, with_keyset=True)

    def take_back(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _index_put(self, keys, x, indices, values, accumulate=False, unsafe=False):
        # Gradients alone are unsafe: their index has been checked.
        if accumulate and unsafe and len(indices) == 1 and _gains(x, indices[0], values):
            sums = _sums(x, indices[0], values)
            if sums is not None:
                self._served["gradient of x[index]"] += 1
                return x.add_(sums)
        return self._original.call_boxed(keys, x, indices, values, accumulate, unsafe)


def _gains(x: Tensor, index: Tensor | None, values: Tensor) -> bool:
    if index is None or index.dtype != torch.int64 or x.dim() == 0 or x.shape[0] == 0:
        return False
    if x.dtype not in (torch.float32, torch.float64) or values.dtype != x.dtype:
        return False
    if values.numel() < (_FEW if index.numel() >= _LONG * x.shape[0] else _MANY):
        return False
    if values.shape != (*index.shape, *x.shape[1:]):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _sums(x: Tensor, index: Tensor, values: Tensor) -> Tensor | None:
    """The sums of the rows of values at each position of x; None if an index counts from the end."""

    def make() -> Graph | None:
        rows = index.reshape(-1)
        try:
            return Graph.from_edge_index(
                torch.stack([torch.zeros_like(rows), rows]), num_src=1, num_dst=x.shape[0]
            )
        except ValueError:
            return None

    graph = once((index,), ("gradient of indexing", x.shape[0]), make)
    return None if graph is None else sum_of_edges(graph, values.reshape(-1, *x.shape[1:]))
