"""The backward of attention's backward, without tensors of E x H x D besides its arguments and results.

docs/internals/second_derivatives.md derives the formulas. One operator computes all of it
(csrc/cpu/kernels/second_order.cpp, csrc/cuda/second_order). Third derivatives, and second ones under vmap,
are plain operations (`plain`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..runtime import ops as _ops
from ..runtime import rules, tracing
from ..runtime.arguments import NEED_BIAS, NEED_FEAT, NEED_GATE, NEED_WEIGHT, SCORES, Numbers, Tensors
from ..runtime.eager import transformed
from . import operators
from .plain import GRADIENTS, ends_of, plain_backward_of_backward

Gradients = dict[str, Tensor]

_PRIMALS = "grad_out", "grad_attention", *Tensors._fields
_RESULTS = "grad_out", "grad_attention", *GRADIENTS.values()
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
    ends, call = ends_of(graph), _Call(graph, score, numbers, wanted)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors) or transformed(*tensors)
    if type(graph) is not Graph:
        return plain_backward_of_backward(ends, score, numbers, primals, grads)
    if not _cotangents(primals, grads):
        return {}
    if not recorded:
        return call.run(primals, grads, stats)
    of = (grads.get(name) for name in GRADIENTS)
    results = rules.apply(call, stats, *(primals[name] for name in _PRIMALS), *of)
    return {name: x for name, x in zip(_RESULTS, results) if x.dim() > 0}


def _cotangents(primals: dict[str, Any], grads: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The cotangents that are not None, by the names of the tensors whose gradients they belong to."""
    found = {}
    for result, name in GRADIENTS.items():
        grad, primal = grads.get(result), primals[name]
        if primal is None or grad is None or not grad.numel():
            continue
        # The backward operator returns the gradient of attn as partial sums. Each of these has the cotangent
        # of their total, so that the first suffices.
        found[name] = grad[0].view(primal.shape) if name == "attn" else grad
    return found


@dataclass(slots=True, eq=False)
class _Call(rules.Rule):
    """The operator of (stats, the primals, the grads of `backward_of_backward`). Third derivatives and
    torch.func.vmap go through plain operations."""

    graph: Any
    score: int
    numbers: Numbers
    wanted: Collection[str]

    def forward(self, stats, *tensors):
        primals, grads = _named(tensors)
        return self.in_order(self.run(primals, grads, stats), primals)

    def saved(self, tensors, results):
        return tensors[1:]

    def gradients(self, need, saved, *grads):
        places = [k for k, needed in enumerate(need[1:]) if needed]

        def formula(*learning):
            merged = list(saved)
            for k, x in zip(places, learning):
                merged[k] = x
            results = self.by_plain_operations(merged)
            return tuple(x for x, grad in zip(results, grads) if grad is not None)

        _, pull = torch.func.vjp(formula, *(saved[k] for k in places))
        found = dict(zip(places, pull(tuple(grad for grad in grads if grad is not None))))
        return None, *(found.get(k) for k in range(len(saved)))

    def vmap(self, info, dims, stats, *tensors):
        formula = torch.vmap(lambda *x: self.by_plain_operations(x), dims[1:], randomness=info.randomness)
        results = formula(*tensors)
        return results, (0,) * len(results)

    def run(self, primals: dict[str, Any], grads: dict[str, Tensor | None], stats: Tensor) -> Gradients:
        given = _cotangents(primals, grads)
        with torch.no_grad(), tracing.untransformed():
            found = self._by_operator(primals, given, stats)
            return {name: _like(primals[name], x) for name, x in found.items()}

    def _by_operator(self, primals: dict[str, Any], given: dict[str, Tensor], stats: Tensor) -> Gradients:
        tensors = Tensors(*(primals[name] for name in Tensors._fields))._replace(out_bias=None)
        _, heads, dim = tensors.value.shape
        layer = _LAYERS[self.score]
        handle = self.graph._planner.handle(heads, dim, tensors.value.dtype, layer, "auto", True, True)
        results = operators.second_order(
            handle, self.score, self.numbers, (primals["grad_out"], primals["grad_attention"]), tensors,
            stats, [given.get(name) for name in GRADIENTS.values()],
            sum(bit for name, bit in _OF_EDGES.items() if name in self.wanted),
        )  # fmt: skip
        found = {name: x for name, x in zip(_RESULTS, results) if x is not None}
        if "attn" in found:
            found["attn"] = _ops.total(found["attn"])
        return found

    def by_plain_operations(self, tensors) -> tuple[Tensor, ...]:
        """The results, from all tensors but stats."""
        primals, grads = _named(tensors)
        ends = ends_of(self.graph)
        return self.in_order(
            plain_backward_of_backward(ends, self.score, self.numbers, primals, grads), primals
        )

    def in_order(self, found: Gradients, primals: dict[str, Any]) -> tuple[Tensor, ...]:
        """The wanted gradients in the order of `_RESULTS`, with a scalar for each that is missing."""
        there = found.keys() & self.wanted
        return tuple(found[n] if n in there else primals["grad_out"].new_empty(()) for n in _RESULTS)


def _named(tensors) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Splits the tensors into primals and grads of `backward_of_backward`."""
    count = len(_PRIMALS)
    return dict(zip(_PRIMALS, tensors[:count])), dict(zip(GRADIENTS, tensors[count:]))


def _like(primal: Tensor, x: Tensor) -> Tensor:
    """x, the gradient of ``primal``, in its dtype; summed over the heads if ``primal`` is an edge tensor with
    one column for all heads."""
    return _ops.per_edge(primal, x) if x.dim() == 2 else _ops.as_type(x, primal.dtype)
