"""The path `eager` for calls without options, entered without the checks of the public functions.

On a small graph the host's work per call is most of what a step costs, and checking every argument is most of
that work. So only what the operators cannot see is looked at here. A call that is not of this kind, or that
the operators refuse, is left to the checks, which know all options and name what is wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..runtime.arguments import PLAN_LAYERS, Numbers, needs_rows
from ..runtime.eager import PLAIN_TYPES, is_eager
from ..runtime.ops import acc_type
from . import paths
from .argument_checks import DTYPES
from .autograd import Attention
from .operators import EagerCall

# dtype -> accumulation type, in which the kernels also take the score terms of additive attention.
_ACC = {dtype: acc_type(dtype) for dtype in DTYPES}
_NUMBERS = float, int
_NO_EDGE_TENSORS = (None,) * 5
_new = tuple.__new__  # makes a named tuple from all of its fields, without the Python frame of its __new__


def are_none(options: dict[str, Any]) -> bool:
    """Whether none of the options is given."""
    for x in options.values():  # noqa: SIM110 - a comprehension is a frame of its own before Python 3.12
        if x is not None:
            return False
    return True


def attention(
    graph: Any,
    score: str,
    tensors: tuple[Any, Any, Any, Any],
    *,
    slope: Any = 1.0,
    scale: Any = 1.0,
    dropout_p: Any,
) -> Tensor | None:
    """out, computed without checking the arguments, or None if they must be checked. tensors: the first four
    of `Tensors`.

    Calls that :func:`dfgnn.explain` watches are left to `paths.attend`, which reports them.
    """
    value, src, dst, attn = tensors
    if type(graph) is not Graph or type(value) not in PLAIN_TYPES or type(dst) not in PLAIN_TYPES:
        return None
    if paths.recorder is not None or not is_eager(value):
        return None
    # The library of the CPU and that of CUDA number their graphs independently. On tensors of another device,
    # the graph's number could stand for another graph.
    if value.dim() != 3 or value.device != graph._device:
        return None
    dtype, (_, heads, dim) = value.dtype, value.shape
    if dtype not in _ACC or not heads or not dim or value.is_cuda and dim * dtype.itemsize % 16:
        return None
    if value.is_meta:  # without a kernel that would refuse it
        return None
    acc, train, additive = _ACC[dtype], torch.is_grad_enabled(), score == "additive"
    backward = train and value.requires_grad
    for x in (src, dst, attn):
        if x is not None:
            if type(x) not in PLAIN_TYPES or not (x.dtype is dtype or additive and x.dtype is acc):
                return None
            backward = backward or (train and x.requires_grad)
    if additive:
        src, dst = src if src.dtype is acc else src.to(acc), dst if dst.dtype is acc else dst.to(acc)
    elif dst.shape[2:] != value.shape[2:]:
        return None
    if scale is None:
        scale = 1 / math.sqrt(dim)
    for number in (slope, scale, dropout_p):
        if type(number) not in _NUMBERS:
            return None
    given: tuple[Any, ...] = value, src, dst, attn
    if dropout_p:
        if not 0 < dropout_p <= 1:
            return None
        given += *_NO_EDGE_TENSORS, torch.randint(0, 2**62, (1,), device=graph._device)
    edges = dropout_p > 0 or needs_rows(score, slope)
    handle = graph._planner.handle(heads, dim, dtype, PLAN_LAYERS[score], "auto", edges, backward)
    numbers = _new(Numbers, (slope, scale, dropout_p, 0))
    positive = additive and backward and dst.requires_grad
    call = _new(EagerCall, (graph, handle, score, numbers, False, positive, 0))
    try:
        return Attention.at_once(call, None, *given)[0] if backward else call.run(given)[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the operator refuses an argument; the caller's checks name it in their error
        return None
