"""What eager calls have in common: when they are such, and autograd functions with little Python around."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import torch_internals as internals

# Cheap enough to be asked at every call.
top_hooks = internals.top_saved_tensors_hooks
retains_graph = internals.backward_keeps_graph
transforms_active = internals.transforms_active
_is_wrapped = internals.is_wrapped_by_functorch
_num_dispatch_modes = internals.num_dispatch_modes


def transformed(*tensors: Tensor | None) -> bool:
    """Whether torch.func is at work, or forward mode on these tensors; compilers have a way of their own."""
    if torch.compiler.is_compiling():
        return False
    return transforms_active() or (
        forward_ad._current_level >= 0
        and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    )


PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_eager(x: Tensor) -> bool:
    """Whether x is computed with at once, by itself: no compiler, transform or mode is at work."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN_TYPES
        and not transforms_active()
        and forward_ad._current_level < 0
        and not _num_dispatch_modes()
        and not internals.is_functional_tensor(x)
        and not _is_wrapped(x)  # by a transform that has ended
        and not internals.exports_onnx()
    )


def why_not_eager(x: Tensor) -> str:
    """Why `is_eager` is False of x, in words."""
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
    """One that ``at_once`` applies where `is_eager` holds: without what ``apply`` does for torch.func in
    Python at every call."""

    at_once = internals.function_apply


def called_directly(cls: type[EagerFunction]) -> type[EagerFunction]:
    """Lets the engine call the class's backward itself, in place of what looks for it."""
    cls._backward_cls.apply = cls.backward  # type: ignore[attr-defined]
    return cls


def keep_aside(ctx, *results: Tensor | None) -> tuple[Tensor | None, ...]:
    """Keeps results that backward reads where a user may modify them: see `_autograd`. Returns what is to be
    saved of them, as the last of all."""
    # Detached: a result that its own node holds would never be freed.
    kept = None if top_hooks(True) is not None else [None if x is None else x.detach() for x in results]
    ctx.kept, ctx.versions = kept, [None if x is None else x._version for x in results]
    return results if kept is None else ()


def taken_back(ctx, saved: tuple) -> tuple[Any, tuple]:
    """The results of `keep_aside`, or None where one was modified; and what else was saved."""
    results = ctx.kept
    if results is None:
        count = len(ctx.versions)
        saved, results = saved[:-count], saved[-count:]
    elif not retains_graph():
        ctx.kept = None
    for x, version in zip(results, ctx.versions):
        if x is not None and x._version != version:
            return None, saved
    return results, saved
