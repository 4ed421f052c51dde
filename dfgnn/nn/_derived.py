"""What layers derive from a graph or from a tensor of types, kept as long as that lives."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..graph import Graph

_of_graphs: weakref.WeakKeyDictionary[Graph, dict] = weakref.WeakKeyDictionary()
_of_tensors = WeakTensorKeyDictionary()


def of_graph(graph: Graph) -> dict:
    """A dict to keep values in that belong to this graph; they must not hold on to it."""
    return _of_graphs.setdefault(graph, {})


def of_tensor(tensor: Tensor) -> dict:
    """The same for a tensor; empty again after the tensor was written to, or got another memory by ``.data``.

    Not kept for an inference tensor, whose writes are not counted. What is written behind PyTorch's back
    (into ``.data``, by NumPy) is not noticed.
    """
    if tensor.is_inference():
        return {}
    state = tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    known = _of_tensors.get(tensor)
    if known is None or known[0] != state:
        _of_tensors[tensor] = known = (state, {})
    return known[1]
