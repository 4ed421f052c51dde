"""Removes the wrappers of torch.func's transforms from tensors, and suspends transforms for structures."""

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from . import torch_internals as internals


@contextlib.contextmanager
def untransformed():
    """A context that suspends torch.func: structures that outlive a transform must not hold its wrappers."""
    if internals.transforms_active():
        with internals.temporarily_clear_interpreter_stack():
            yield
    else:
        yield


def any_batched(values: Iterable[Any]) -> bool:
    """Whether one of the values is a tensor that torch.func.vmap maps over."""
    for x in values:
        while isinstance(x, Tensor) and internals.is_wrapped_by_functorch(x):
            if internals.is_batched_by_functorch(x):
                return True
            x = internals.unwrap_functorch(x)
    return False


def unwrapped(x: Tensor) -> Tensor:
    """x, which determines a graph's structure, without torch.func's wrappers. Raises for a batch of vmap."""
    while internals.is_wrapped_by_functorch(x):
        if internals.is_batched_by_functorch(x):
            raise NotImplementedError(
                "torch.func.vmap: expected the same graph and types for all, got a batch"
            )
        x = internals.unwrap_functorch(x)
    return x
