"""The autograd function of whole layers, whose operators compute them in one call forward and one backward
(csrc/torch/layer.h).

The launches around a layer's attention cost a small graph more than the attention does, and most of that is
the work of Python, autograd and the dispatcher per operation. So the operators do all of it below autograd,
and this calls them in as few Python frames as there can be.
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
_forward = internals.without_frame(ops.layer.default)
_backward = internals.without_frame(ops.layer_backward.default)
# Which of the tensors require gradients -> the bits by which the operator knows them.
_BITS: dict[tuple[bool, ...], int] = {}
_NOT_TENSORS = 4  # the arguments of `Layer` before the tensors
_NO_GRADIENTS = (None,) * _NOT_TENSORS


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
    """numbers, tensors: as for `run`. handle: it keeps what belongs to the graph's number in the library.
    ``formula(numbers, graph, *tensors)`` is the layer in plain operations, for second derivatives."""

    @staticmethod
    def forward(ctx, formula, numbers, graph, handle, *tensors):
        try:
            with _BelowAutograd():
                result, kept, reads_result = _forward(*numbers, *tensors)
        except RuntimeError as error:
            raise typed(error) from None
        ctx.call, ctx.output, ctx.version, out = (formula, numbers, graph, handle), None, None, None
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
        # What ctx.set_materialize_grads(False) and ctx.save_for_backward set, without their frames.
        ctx.materialize_grads, ctx.to_save = False, (*tensors, kept, out)
        return result

    @staticmethod
    def backward(ctx, grad):
        need = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(need)
        (formula, numbers, graph, _), out = ctx.call, ctx.output
        *tensors, kept, saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # backward was called with create_graph

            def plain(*tensors):
                return formula(numbers, graph, *tensors)

            return *_NO_GRADIENTS, *rules.recorded_gradients(plain, tensors, need[_NOT_TENSORS:], grad)
        if out is None:
            out = saved
        elif not retains_graph():
            ctx.output = None
        if ctx.version is not None and out._version != ctx.version:
            out, *_ = run(numbers, tensors)
        bits = _BITS.get(need)
        if bits is None:
            wanted = enumerate(need[_NOT_TENSORS:])
            bits = _BITS[need] = sum(1 << k for k, needed in wanted if needed)
        try:
            with _BelowAutograd():
                return *_NO_GRADIENTS, *_backward(*numbers, *tensors, grad, out, kept, bits)
        except RuntimeError as error:
            raise typed(error) from None
