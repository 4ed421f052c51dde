"""Tells plain tensors from traced ones, and computes outside of compilers, modes and transforms.

A graph caches what it derives from its tensors. What is derived while torch.compile, an exporter or
torch.func traces would be a fake tensor, a proxy or tied to a transform that ends, and every later call would
get it. `not_compiled` and `untraced` suspend the tracing, so that plain tensors give plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import torch_internals as internals

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(fn: F) -> F:
    """A decorator: torch.compile runs fn without tracing it. If nothing is compiled, this costs almost
    nothing, which matters because the first call with a small graph runs several such functions."""
    disabled = internals.disable_dynamo(fn)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        recording = internals.is_dynamo_recording() or internals.compiler._is_compiling_flag
        if recording or internals.get_eval_frame_callback() is not None:
            return disabled(*args, **kwargs)
        return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


def is_plain(x: Tensor) -> bool:
    """Whether x is a plain tensor with values: no fake or functional one, and not wrapped by a transform."""
    return type(x) in (Tensor, torch.nn.Parameter) and has_numbers(x)


def has_numbers(x: Tensor) -> bool:
    """Like `is_plain`, but x may be of a subclass that does not override ``__torch_dispatch__``."""
    return (
        type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not internals.is_wrapped_by_functorch(x)
        and not internals.is_functional_tensor(x)
    )


def sums_of_rows(x: Tensor) -> Tensor:
    """``x.sum(-1)`` of edges' rows. In an ONNX file it is a product: of a tensor without edges ONNX Runtime
    (1.24, say) returns the tensor itself as the sum, and the next operation refuses its shape."""
    return (x @ x.new_ones(x.shape[-1], 1)).squeeze(-1) if internals.exports_onnx() else x.sum(-1)


def without_gradient(x: Tensor) -> Tensor:
    """x without the wrappers of torch.func.grad, vjp and jvp; for indices, which have no gradient."""
    while internals.is_wrapped_for_gradients(x):
        x = internals.unwrap_functorch(x)
    return x


def untraced(*tensors: Tensor | None) -> AbstractContextManager[None]:
    """A context that suspends active modes and transforms: FakeTensorMode, make_fx, torch.export, torch.func,
    inference mode. Only inference mode is suspended if one of ``tensors``, with which the context computes,
    is not plain."""
    # Usually no mode is active, and suspending all would take as long as sorting a small graph.
    return _suspended(*tensors) if in_a_mode() else _NOTHING


def in_a_mode() -> bool:
    """Whether there is something that `untraced` suspends."""
    return bool(
        torch.is_inference_mode_enabled()
        or internals.interpreter_stack_top() is not None
        or internals.num_dispatch_modes()
        or internals.num_function_modes()
        or _modes_before_dispatch()
    )


_modes_before_dispatch = functools.partial(internals.is_key_included, internals.PRE_DISPATCH)
_NOTHING = nullcontext()


@contextmanager
def _suspended(*tensors: Tensor | None) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # autograd refuses to save inference tensors
        if all(x is None or is_plain(x) for x in tensors):
            if internals.interpreter_stack_top() is not None:
                stack.enter_context(internals.temporarily_clear_interpreter_stack())
            if internals.num_dispatch_modes() or _modes_before_dispatch():
                stack.enter_context(internals.disable_current_modes())
            stack.enter_context(internals.DisableTorchFunction())
        yield


@contextmanager
def untransformed() -> Iterator[None]:
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
