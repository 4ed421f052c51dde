"""The backward of attention's backward, without tensors of E x H x D beside its arguments and results.

docs/internals/second_derivatives.md derives the formulas. One operator computes all of it
(csrc/cpu/kernels/second_order.cpp, csrc/cuda/second_order). Third derivatives and forward mode are plain
operations (`plain`). A cotangent is the gradient that comes into a backward pass: here that of a result of
the backward operator.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..runtime import ops as _ops
from ..runtime import transforms
from ..runtime.arguments import NEED_BIAS, NEED_FEAT, NEED_GATE, NEED_WEIGHT, SCORES, Numbers, Tensors
from ..runtime.eager import transformed
from . import operators, plain

Gradients = dict[str, Tensor]

_PRIMALS = "grad_out", "grad_attention", *Tensors._fields
_RESULTS = "grad_out", "grad_attention", *plain.GRADIENTS.values()
_OF_EDGES = {
    "edge_bias": NEED_BIAS,
    "edge_gate": NEED_GATE,
    "edge_weight": NEED_WEIGHT,
    "edge_feat": NEED_FEAT,
}
_LAYERS = {SCORES[score]: name for score, name in operators.PLAN_LAYERS.items()}


def backward_of_backward(
    graph: Any,
    score: int,
    numbers: Numbers,
    primals: dict[str, Any],
    grads: dict[str, Tensor | None],
    wanted: Collection[str],
) -> Gradients:
    """Gradients, by name, of the backward operator's arguments: grad_out, grad_attention and the tensors.

    primals: these arguments and ``stats``, each a tensor or None. grads: the cotangents of the operator's
    results, None where there is none. wanted: names of primals whose gradients are needed; the result may
    contain others, too.
    """
    stats = primals.pop("stats")
    tensors = [x for x in (*primals.values(), *grads.values()) if isinstance(x, Tensor)]
    # `ends_of` is called even if `ends` is not used, because it raises for a graph of fixed capacity.
    ends, call = plain.ends_of(graph), _Call(graph, score, numbers, wanted)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors) or transformed(*tensors)
    if type(graph) is not Graph:
        return plain.backward_of_backward(ends, score, numbers, primals, grads)
    if not _cotangents(primals, grads):
        return {}
    if not recorded:
        return call.run(primals, grads, stats)
    of = (grads.get(name) for name in plain.GRADIENTS)
    results = _SecondOrder.apply(call, stats, *(primals[name] for name in _PRIMALS), *of)
    return {name: x for name, x in zip(_RESULTS, results) if x.dim() > 0}


def _cotangents(primals: dict[str, Any], grads: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The cotangents that are not None, by the names of the tensors whose gradients they belong to."""
    found = {}
    for result, name in plain.GRADIENTS.items():
        grad, primal = grads.get(result), primals[name]
        if primal is None or grad is None or not grad.numel():
            continue
        # The backward operator returns the gradient of attn as partial sums. Each of these has the cotangent
        # of their total, so that the first suffices.
        found[name] = grad[0].view(primal.shape) if name == "attn" else grad
    return found


class _Call:
    """The arguments of `backward_of_backward` other than tensors, and the computation."""

    def __init__(self, graph: Any, score: int, numbers: Numbers, wanted: Collection[str]):
        self.graph, self.score, self.numbers, self.wanted = graph, score, numbers, wanted

    def run(self, primals: dict[str, Any], grads: dict[str, Tensor | None], stats: Tensor) -> Gradients:
        given = _cotangents(primals, grads)
        with torch.no_grad(), transforms.untransformed():
            found = self._by_operator(primals, given, stats)
            return {name: _like(primals[name], x) for name, x in found.items()}

    def _by_operator(self, primals: dict[str, Any], given: dict[str, Tensor], stats: Tensor) -> Gradients:
        tensors = Tensors(*(primals[name] for name in Tensors._fields))._replace(out_bias=None)
        _, heads, dim = tensors.value.shape
        layer = _LAYERS[self.score]
        handle = self.graph._planner.handle(heads, dim, tensors.value.dtype, layer, "auto", True, True)
        results = operators.second_order(
            handle, self.score, self.numbers, (primals["grad_out"], primals["grad_attention"]), tensors,
            stats, [given.get(name) for name in plain.GRADIENTS.values()],
            sum(bit for name, bit in _OF_EDGES.items() if name in self.wanted),
        )  # fmt: skip
        found = {name: x for name, x in zip(_RESULTS, results) if x is not None}
        if "attn" in found:
            found["attn"] = _ops.total(found["attn"])
        return found

    def by_plain_operations(self, tensors) -> tuple[Tensor, ...]:
        """The results of `_SecondOrder`, from its tensors except stats."""
        primals, grads = _named(tensors)
        ends = plain.ends_of(self.graph)
        return self.in_order(
            plain.backward_of_backward(ends, self.score, self.numbers, primals, grads), primals
        )

    def in_order(self, found: Gradients, primals: dict[str, Any]) -> tuple[Tensor, ...]:
        """The wanted gradients in the order of `_RESULTS`, with a scalar for each that is missing."""
        there = found.keys() & self.wanted
        return tuple(found[n] if n in there else primals["grad_out"].new_empty(()) for n in _RESULTS)


def _named(tensors) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Splits the tensors into primals and grads of `backward_of_backward`."""
    count = len(_PRIMALS)
    return dict(zip(_PRIMALS, tensors[:count])), dict(zip(plain.GRADIENTS, tensors[count:]))


class _SecondOrder(torch.autograd.Function):
    """Calls the operator. Third derivatives and torch.func go through plain operations."""

    @staticmethod
    def forward(call: _Call, stats, *tensors):
        primals, grads = _named(tensors)
        return call.in_order(call.run(primals, grads, stats), primals)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call, _, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        call, tensors, need = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[2:]
        places = [k for k, needed in enumerate(need) if needed]

        def formula(*learning):
            merged = list(tensors)
            for k, x in zip(places, learning):
                merged[k] = x
            results = call.by_plain_operations(merged)
            return tuple(x for x, grad in zip(results, grads) if grad is not None)

        _, pull = torch.func.vjp(formula, *(tensors[k] for k in places))
        found = dict(zip(places, pull(tuple(grad for grad in grads if grad is not None))))
        return None, None, *(found.get(k) for k in range(len(need)))

    @staticmethod
    def vmap(info, in_dims, call, stats, *tensors):
        def formula(*tensors):
            return call.by_plain_operations(tensors)

        results = torch.vmap(formula, in_dims[2:], randomness=info.randomness)(*tensors)
        return results, (0,) * len(results)


def _like(primal: Tensor, x: Tensor) -> Tensor:
    """x, the gradient of ``primal``, in its dtype; summed over the heads if ``primal`` is an edge tensor with
    one column for all heads."""
    return _ops.per_edge(primal, x) if x.dim() == 2 else _ops.as_type(x, primal.dtype)
