"""Tensors and structures under the function transforms of torch.func."""

import contextlib

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


@contextlib.contextmanager
def untransformed():
    """Where structures are made that outlive a function of torch.func: they must not get its wrappers."""
    if torch._C._are_functorch_transforms_active():
        with temporarily_clear_interpreter_stack():
            yield
    else:
        yield


def unwrapped(x: Tensor) -> Tensor:
    """A tensor that decides about structure, without torch.func's wrappers; a batch of them has none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            raise NotImplementedError(
                "torch.func.vmap: expected the same graph and types for all, got a batch"
            )
        x = torch._C._functorch.get_unwrapped(x)
    return x
