"""The autograd function of computations of several operations: attention with edge terms, and layers whose
edges have gates or types. Other layers are one operator (`engine.layer`).

The launches around a layer's attention cost a small graph more than the attention does, and most of that is
the work of autograd and the dispatcher per operation. A fused layer is therefore one node of the autograd
graph, which calls operators below autograd. Its results are those of the single operations up to rounding.

What is computed is an object with these methods (see `edge_projection`, and `gated` and `typed` in nn/whole):

- ``forward(tensors)``: (result, made, out). made: the other tensors that backward takes; out: the output of
  the attention operator as backward reads it, which may be the result itself, or None.
- ``rerun(tensors, made)``: ``out`` again. It is called if ``out`` is the result and the caller modified it.
- ``backward(tensors, grad, made, out, need)``: the gradients of the tensors. need: a bool per tensor.
- ``formula(*tensors)``: the result in plain operations, for second derivatives.
"""

from __future__ import annotations

import torch

from ..runtime import ops as _ops
from ..runtime import rules
from ..runtime.eager import EagerFunction, called_directly, retains_graph, top_hooks

__all__ = ["FusedFunction"]


@called_directly
class FusedFunction(EagerFunction):
    @staticmethod
    def forward(ctx, call, *tensors):
        result, made, out = _ops.call(call.forward, tensors)
        ctx.call, ctx.output, ctx.version = call, None, None
        ctx.set_materialize_grads(False)
        if out is result:
            # The user may modify the result in place. Had it been saved, backward would raise then.
            # So ctx holds a detached alias of the result (the result itself would be a reference cycle) and
            # its version counter, by which backward sees the change. While hooks for saved tensors are active
            # (activation checkpointing, offloading), the result is saved nevertheless, so that they see it.
            ctx.version = out._version
            if top_hooks(True) is None:
                ctx.output, out = out.detach(), None
        ctx.save_for_backward(*tensors, *made, out)
        return result

    @staticmethod
    def backward(ctx, grad):
        call, need, out = ctx.call, ctx.needs_input_grad[1:], ctx.output
        count = len(need)
        if grad is None:
            return (None,) * (1 + count)
        *saved, last = ctx.saved_tensors
        tensors, made = saved[:count], saved[count:]
        if torch.is_grad_enabled():  # backward was called with create_graph
            return None, *rules.recorded_gradients(call.formula, tensors, need, grad)
        if out is None:
            out = last
        elif not retains_graph():
            ctx.output = None
        if ctx.version is not None and out._version != ctx.version:
            out = _ops.call(call.rerun, tensors, made)
        return None, *_ops.call(call.backward, tensors, grad, made, out, need)
