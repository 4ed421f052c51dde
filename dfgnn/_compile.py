"""Structures that are built once and kept, whoever asks first: torch.compile, an exporter, a transform.

A graph keeps what it derives from its tensors. What is derived while somebody traces would be fake, a proxy
or tied to a transform that ends, and every later call would get it. So it is built aside, from plain tensors
to plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

# Not torch.compiler.disable: that one imports the compiler when it is applied, this one at the first call.
from torch._compile import _disable_dynamo as not_compiled

__all__ = ["is_plain", "not_compiled", "untraced", "without_gradient"]


def is_plain(x: Tensor) -> bool:
    """Whether x holds numbers: not a fake or functional tensor, nor one that a transform has wrapped."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._is_functional_tensor(x)
    )


def without_gradient(x: Tensor) -> Tensor:
    """What torch.func.grad, vjp or jvp has wrapped; for indices, which have no gradient."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(x):
        x = functorch.get_unwrapped(x)
    return x


@contextmanager
def untraced(*tensors: Tensor | None) -> Iterator[None]:
    """Without the modes and transforms around: FakeTensorMode, make_fx, torch.export, torch.func, inference
    mode. If one of the tensors that are worked on is not plain, all but inference mode stay.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # autograd refuses to save inference tensors
        if all(x is None or is_plain(x) for x in tensors):
            if torch._C._functorch.peek_interpreter_stack() is not None:
                from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

                stack.enter_context(temporarily_clear_interpreter_stack())
            if torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch():
                from torch.utils._python_dispatch import _disable_current_modes

                stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C.DisableTorchFunction())
        yield
