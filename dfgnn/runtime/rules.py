"""One autograd function for every map that knows its own gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library

from .eager import EagerFunction, called_directly, transforms_active
from .torch_internals import is_wrapped_by_functorch


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """x[index], in plain operations whose backward adds rows up in the same order at every run: on a CPU that
    of index_select does, whose sums on a GPU are atomic, and there that of indexing, which sorts."""
    return x.index_select(0, index) if x.is_cpu else x[index]


class Rule:
    """A map of tensors and its gradients. What is not a tensor is an attribute of the rule.

    Most rules are linear in each of their tensors. Their gradients are calls of other rules of the same
    family, so that they may be differentiated any number of times, also under torch.func.
    """

    __slots__ = ()

    def forward(self, *tensors: Any) -> Any:
        """A tensor or a tuple of tensors."""
        raise NotImplementedError

    def saved(self, tensors: tuple[Any, ...], results: Any) -> tuple[Any, ...]:
        """The tensors that `gradients` reads."""
        return tensors

    def gradients(self, need: Any, saved: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors for which ``need`` is True, else None.

        grads: of the results. If there are several results, it is None for one that was not used.
        """
        raise NotImplementedError

    def vmap(self, info: Any, dims: tuple[int | None, ...], *tensors: Any) -> tuple[Any, Any]:
        """(results, their dimensions) of what torch.func.vmap maps over these dimensions of the tensors."""
        raise NotImplementedError(f"torch.func.vmap: {type(self).__name__} maps over no samples")


@called_directly
class ByRule(EagerFunction):
    @staticmethod
    def forward(ctx, rule, *tensors):
        results = rule.forward(*tensors)
        ctx.rule = rule
        if type(results) is tuple:
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(*rule.saved(tensors, results))
        return results

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.rule.gradients(ctx.needs_input_grad[1:], ctx.saved_tensors, *grads)


class _Transformed(torch.autograd.Function):
    """`ByRule` in the form that torch.func sees through."""

    @staticmethod
    def forward(rule, *tensors):
        return rule.forward(*tensors)

    @staticmethod
    def setup_context(ctx, inputs, results):
        ctx.rule, *tensors = inputs
        ctx.set_materialize_grads(type(results) is not tuple)
        ctx.save_for_backward(*ctx.rule.saved(tuple(tensors), results))

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.rule.gradients(ctx.needs_input_grad[1:], ctx.saved_tensors, *grads)

    @staticmethod
    def vmap(info, in_dims, rule, *tensors):
        return rule.vmap(info, in_dims[1:], *tensors)


class _Once(torch.autograd.Function):
    """Gradients whose own gradients are refused."""

    @staticmethod
    def forward(ctx, compute, *inputs):
        return compute()

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "torch.compile: create_graph: expected no second derivatives of compiled attention; take them "
            "of the function or the layer where it is not compiled"
        )


def once(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """`Rule.gradients` that cannot be differentiated themselves.

    torch's `once_differentiable` raises only on the way back to what the gradients of the results depend on.
    Second derivatives by other tensors would silently be those of a constant.
    """

    @functools.wraps(gradients)
    def call(self, need, saved, *grads):
        if torch.is_grad_enabled() and not (transforms_active() or torch.compiler.is_compiling()):
            return _Once.apply(lambda: gradients(self, need, saved, *grads), *saved, *grads)
        with torch.no_grad():
            return gradients(self, need, saved, *grads)

    return call


def apply(rule: Rule, *tensors: Tensor | None) -> Any:
    """``rule.forward(*tensors)``, with its gradients where they are recorded."""
    if transforms_active():
        return _Transformed.apply(rule, *tensors)
    in_python = torch.compiler.is_compiling()
    for x in tensors:  # Function.apply, unlike `at_once`, unwraps tensors of transforms that have ended
        in_python = in_python or (x is not None and is_wrapped_by_functorch(x))
    if in_python:
        return ByRule.apply(rule, *tensors)
    return ByRule.at_once(rule, *tensors) if torch.is_grad_enabled() else rule.forward(*tensors)


def register(op: Any, rule: Callable[..., Rule], count: int) -> None:
    """Gives an operator the gradients of a rule, for callers that go through torch's dispatcher. Its first
    ``count`` arguments are the rule's tensors; the rule is made of the others."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rule = rule(*inputs[count:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*ctx.rule.saved(inputs[:count], output))

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.rule.gradients(ctx.needs_input_grad[:count], ctx.saved_tensors, *grads)
        return *found, *(None,) * (len(ctx.needs_input_grad) - count)

    library.register_autograd(op, backward, setup_context=setup)


def recorded_gradients(
    formula: Callable[..., Any], inputs: Sequence[Any], need: Sequence[bool], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of inputs through formula(*inputs), in plain operations that are recorded for second
    derivatives.

    need: which gradients are needed. grads: of the results, None for one that was not used.
    """
    # Views, so that a tensor that was given twice has two gradients here.
    views = [x.view_as(x) if needed else x for x, needed in zip(inputs, need)]
    results = formula(*views)
    # A result need not depend on a tensor whose gradient is needed: a returned attention not on the value.
    pairs = zip(results if isinstance(results, tuple) else (results,), grads)
    used = [(x, grad) for x, grad in pairs if grad is not None and x.requires_grad]
    if not used:
        return (None,) * len(need)
    outputs, of_outputs = zip(*used)
    wanted = [x for x, needed in zip(views, need) if needed]
    found = iter(torch.autograd.grad(outputs, wanted, of_outputs, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in need)
