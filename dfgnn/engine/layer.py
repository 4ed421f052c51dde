"""The autograd function of whole layers, whose operators compute them in one call forward and one backward
(csrc/torch/layer.h).

The launches around a layer's attention cost a small graph more than the attention does, and most of that is
the work of Python, autograd and the dispatcher per operation. So the operators do all of it below autograd.
"""

from __future__ import annotations

import torch

from ..runtime import rules
from ..runtime import torch_internals as internals
from ..runtime.arguments import ops
from ..runtime.eager import EagerFunction, called_directly, retains_graph, top_hooks
from ..runtime.ops import typed

__all__ = ["Layer", "run"]

_BelowAutograd = internals.BelowAutograd
_forward, _backward = ops.layer.default, ops.layer_backward.default
# Which of the tensors require gradients -> the bits by which the operator knows them.
_BITS: dict[tuple[bool, ...], int] = {}


def run(numbers, tensors):
    """(result, what backward reads beside it and the tensors, whether backward reads the result). numbers:
    `LayerNumbers`; tensors: `LayerTensors`."""
    try:
        with _BelowAutograd():
            return _forward(*numbers, *tensors)
    except RuntimeError as error:
        raise typed(error) from None


@called_directly
class Layer(EagerFunction):
    """call: a record with ``numbers``, which keeps the graph alive, and ``formula(*tensors)``, the layer in
    plain operations, for second derivatives."""

    @staticmethod
    def forward(ctx, call, *tensors):
        try:
            with _BelowAutograd():
                result, kept, reads_result = _forward(*call.numbers, *tensors)
        except RuntimeError as error:
            raise typed(error) from None
        ctx.call, ctx.output, ctx.version, out = call, None, None, None
        ctx.set_materialize_grads(False)
        if reads_result:
            # The user may modify the result in place. Had it been saved, backward would raise then.
            # So ctx holds a detached alias of the result (the result itself would be a reference cycle) and
            # its version counter, by which backward sees the change. While hooks for saved tensors are active
            # (activation checkpointing, offloading), the result is saved nevertheless, so that they see it.
            ctx.version = result._version
            if top_hooks(True) is None:
                ctx.output = result.detach()
            else:
                out = result
        ctx.save_for_backward(*tensors, kept, out)
        return result

    @staticmethod
    def backward(ctx, grad):
        need = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(need)
        call, out = ctx.call, ctx.output
        *tensors, kept, saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # backward was called with create_graph
            return None, *rules.recorded_gradients(call.formula, tensors, need[1:], grad)
        if out is None:
            out = saved
        elif not retains_graph():
            ctx.output = None
        if ctx.version is not None and out._version != ctx.version:
            out, *_ = run(call.numbers, tensors)
        bits = _BITS.get(need)
        if bits is None:
            bits = _BITS[need] = sum(1 << k for k, needed in enumerate(need[1:]) if needed)
        try:
            with _BelowAutograd():
                return None, *_backward(*call.numbers, *tensors, grad, out, kept, bits)
        except RuntimeError as error:
            raise typed(error) from None
