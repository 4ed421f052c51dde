"""Tensors and structures under the function transforms of torch.func."""

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from . import torch_internals as internals


@contextlib.contextmanager
def untransformed():
    """Where structures are made that outlive a function of torch.func: they must not get its wrappers."""
    if internals.transforms_active():
        with internals.temporarily_clear_interpreter_stack():
            yield
    else:
        yield


def any_batched(values: Iterable[Any]) -> bool:
    """Whether one of these is a tensor that torch.func.vmap runs over."""
    for x in values:
        while isinstance(x, Tensor) and internals.is_wrapped_by_functorch(x):
            if internals.is_batched_by_functorch(x):
                return True
            x = internals.unwrap_functorch(x)
    return False


def unwrapped(x: Tensor) -> Tensor:
    """A tensor that decides about structure, without torch.func's wrappers; a batch of them has none."""
    while internals.is_wrapped_by_functorch(x):
        if internals.is_batched_by_functorch(x):
            raise NotImplementedError(
                "torch.func.vmap: expected the same graph and types for all, got a batch"
            )
        x = internals.unwrap_functorch(x)
    return x
