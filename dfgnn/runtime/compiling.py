"""Structures that are built once and kept, whoever asks first: torch.compile, an exporter, a transform.

A graph keeps what it derives from its tensors. What is derived while somebody traces would be fake, a proxy
or tied to a transform that ends, and every later call would get it. So it is built aside, from plain tensors
to plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import torch_internals as internals
from .torch_internals import is_exporting

__all__ = ["has_numbers", "is_exporting", "is_plain", "not_compiled", "untraced", "without_gradient"]


F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(fn: F) -> F:
    """fn, which torch.compile runs as it is. Where nothing is compiled that costs next to nothing: what is
    built for a small graph passes several of these."""
    disabled = internals.disable_dynamo(fn)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling() or internals.get_eval_frame_callback() is not None:
            return disabled(*args, **kwargs)
        return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


def is_plain(x: Tensor) -> bool:
    """Whether x holds numbers: not a fake or functional tensor, nor one that a transform has wrapped."""
    return type(x) in (Tensor, torch.nn.Parameter) and has_numbers(x)


def has_numbers(x: Tensor) -> bool:
    """`is_plain`, and of a subclass that leaves operators alone."""
    return (
        type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not internals.is_wrapped_by_functorch(x)
        and not internals.is_functional_tensor(x)
    )


def without_gradient(x: Tensor) -> Tensor:
    """What torch.func.grad, vjp or jvp has wrapped; for indices, which have no gradient."""
    while internals.is_wrapped_for_gradients(x):
        x = internals.unwrap_functorch(x)
    return x


def untraced(*tensors: Tensor | None) -> AbstractContextManager[None]:
    """Without the modes and transforms around: FakeTensorMode, make_fx, torch.export, torch.func, inference
    mode. If one of the tensors that are worked on is not plain, all but inference mode stay.
    """
    # Almost always there are none, and to leave them all takes as long as to sort a small graph.
    something = (
        torch.is_inference_mode_enabled()
        or internals.interpreter_stack_top() is not None
        or internals.num_dispatch_modes()
        or internals.num_function_modes()
        or internals.num_dispatch_modes_before_dispatch()
    )
    return _aside(*tensors) if something else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _aside(*tensors: Tensor | None) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # autograd refuses to save inference tensors
        if all(x is None or is_plain(x) for x in tensors):
            if internals.interpreter_stack_top() is not None:
                stack.enter_context(internals.temporarily_clear_interpreter_stack())
            if internals.num_dispatch_modes() or internals.num_dispatch_modes_before_dispatch():
                stack.enter_context(internals.disable_current_modes())
            stack.enter_context(internals.DisableTorchFunction())
        yield
