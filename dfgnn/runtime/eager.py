"""Tells whether a call is plain eager, and makes autograd functions that cost such calls little Python."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import library
from . import torch_internals as internals

# These C functions of PyTorch are fast enough to be called at every attention call.
top_hooks = internals.top_saved_tensors_hooks
retains_graph = internals.backward_keeps_graph
transforms_active = internals.transforms_active
_is_wrapped = internals.is_wrapped_by_functorch
_num_dispatch_modes = internals.num_dispatch_modes

#: Whether only PyTorch's own operations may be used: in what becomes an ONNX file, because other programs do
#: not have ours; and always in an installation without kernels.
in_plain_operations = internals.exports_onnx if library.compiled else lambda: True


def transformed(*tensors: Tensor | None) -> bool:
    """Whether torch.func is active, or forward mode on these tensors. False under compilers."""
    if torch.compiler.is_compiling():
        return False
    return transforms_active() or (
        forward_ad._current_level >= 0
        and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    )


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active. False under compilers."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def needs_backward(tensors: Iterable[Tensor | None]) -> bool:
    """Whether gradients are recorded of what is computed from these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def in_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x. The device meta has none, and torch raises for it."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on the device of x."""
    return torch.autocast(x.device.type, enabled=False) if in_autocast(x) else nullcontext()


PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_eager(x: Tensor) -> bool:
    """Whether operations on x run eagerly: no compiler, transform, dispatch mode or subclass intervenes."""
    return not torch.compiler.is_compiling() and runs_eagerly(x)


def runs_eagerly(x: Tensor) -> bool:
    """`is_eager` for callers that know that no compiler is recording."""
    return (
        type(x) in PLAIN_TYPES
        and not transforms_active()
        and forward_ad._current_level < 0
        and not (_num_dispatch_modes() and internals.dispatch_mode_intervenes())
        and not internals.is_functional_tensor(x)
        and not _is_wrapped(x)  # a tensor may outlive the transform that wrapped it
        and not in_plain_operations()
    )


def why_not_eager(x: Tensor) -> str:
    """The reason why `is_eager(x)` is False, for users."""
    if not library.compiled:
        return "this installation of dfgnn has no compiled kernels"
    if torch.compiler.is_compiling() or internals.exports_onnx():
        return "a compiler is recording"
    if type(x) not in PLAIN_TYPES:
        return f"the features are a {type(x).__name__}, a subclass of torch.Tensor"
    if transforms_active() or _is_wrapped(x):
        return "a transform of torch.func is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    return "a dispatch mode of torch is active"


class EagerFunction(torch.autograd.Function):
    """A Function with ``at_once``, which is ``apply`` without the Python code that supports torch.func. It is
    for calls for which `is_eager` holds."""

    at_once = internals.function_apply


def called_directly(cls: type[EagerFunction]) -> type[EagerFunction]:
    """A decorator: autograd's engine calls the class's backward directly, without looking it up in Python."""
    cls._backward_cls.apply = cls.backward  # type: ignore[attr-defined]
    return cls


def save_results(ctx, *results: Tensor | None) -> tuple[Tensor | None, ...]:
    """Saves results for backward without ``save_for_backward``, which would raise if the user modified them
    in place: `restored_results` then returns None instead. Returns the tensors that the caller must pass to
    ``save_for_backward`` after all others."""
    versions, kept = [], []  # loops, because a comprehension would be one more Python frame
    for x in results:
        versions.append(None if x is None else x._version)
        # Detached, because a node that holds its own result is never freed.
        kept.append(None if x is None else x.detach())
    ctx.versions = versions
    if top_hooks(True) is None:  # without saved-tensor hooks, which save_for_backward alone calls
        ctx.kept = kept
        return ()
    ctx.kept = None
    return results


def restored_results(ctx, saved: tuple) -> tuple[Any, tuple]:
    """(the results of `save_results`, or None where one was modified since; the other saved tensors)."""
    results = ctx.kept
    if results is None:
        count = len(ctx.versions)
        saved, results = saved[:-count], saved[-count:]
    elif not retains_graph():  # this backward is the last one, so that the results can be freed
        ctx.kept = None
    for x, version in zip(results, ctx.versions):
        if x is not None and x._version != version:
            return None, saved
    return results, saved
