"""Products of the rows of an edge's two nodes with the edge's own features, and scores that are their sums.

On the CPU an operator computes scores and products, and another one their gradients
(csrc/core/edge_products.h), without tensors of E x H x D other than these products and gradients. On CUDA,
and while a compiler records or torch.func is active, PyTorch's operations compute them. Eager calls on CUDA
that need the scores alone process a chunk of edges at a time (`flex`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graph import GraphPart
from ..runtime import eager as _eager
from ..runtime import ops as _ops
from ..runtime import rules
from ..runtime.compiling import sums_of_rows
from ..runtime.rules import Rule, rows_at
from . import flex as _flex
from . import operators
from . import plain as _plain
from .edge_rows import rows_of_destinations, rows_of_sources


def edge_products(
    graph, query: Tensor, key: Tensor, feat: Tensor, scale: float, with_products: bool
) -> tuple[Tensor, Tensor | None]:
    """The scores [E, H], from the CPU's operator in the accumulation type, else in the dtype of feat; and the
    products [E, H, D], or None without with_products."""
    if isinstance(graph, GraphPart):
        graph, (key,) = graph.gathered(key)
    fused = feat.device.type == "cpu" and not torch.compiler.is_compiling()
    fused = fused and not _eager.in_plain_operations()
    if fused and not _eager.transformed(query, key, feat):
        results = rules.apply(_EdgeProducts(graph, scale, with_products), query, key, feat)
        return results if with_products else (results, None)
    if with_products:
        ends = rows_of_destinations(graph, query.flatten(1)) * rows_of_sources(graph, key.flatten(1))
        products = ends.view_as(feat) * feat * scale
        return sums_of_rows(products), products

    def score_fn(q, k, e):
        return sums_of_rows(q * k * e) * scale

    chunk = _flex.chunk_size(query, key)
    return _flex.edge_scores(graph, score_fn, chunk, query, key, feat, ()), None


class _EdgeProducts(Rule):
    """Computes the scores, or (scores, products)."""

    __slots__ = "graph", "scale", "with_products"

    def __init__(self, graph, scale: float, with_products: bool):
        self.graph, self.scale, self.with_products = graph, scale, with_products

    def forward(self, query, key, feat):
        results = operators.edge_products(self.graph, query, key, feat, self.scale, self.with_products)
        return tuple(results) if self.with_products else results[0]

    def gradients(self, need, saved, grad, grad_products=None):
        if grad is None and grad_products is None:
            return None, None, None
        if not torch.is_grad_enabled():
            return _fused(self.graph, self.scale, saved, need, grad, grad_products)
        src, dst = _plain.ends_of(self.graph).edge_index

        def formula(query, key, feat):
            acc = _ops.acc_type(feat.dtype)
            products = rows_at(query.to(acc), dst) * rows_at(key.to(acc), src) * feat.to(acc) * self.scale
            return products.sum(2), products

        return rules.recorded_gradients(formula, saved, need, grad, grad_products)


def _fused(graph, scale: float, inputs, need, grad, grad_products) -> tuple[Tensor | None, ...]:
    query, key, feat = inputs
    if grad is None:
        grad = feat.new_zeros(feat.shape[:2], dtype=_ops.acc_type(feat.dtype))
    grads = grad, grad_products
    of_query = of_key = of_feat = None
    if need[0] or need[2]:
        of_query, of_feat = operators.edge_products_backward(
            graph, grads, query, key, feat, scale, False, need[2]
        )
    if need[1]:
        of_key, _ = operators.edge_products_backward(graph, grads, key, query, feat, scale, True, False)
    return of_query if need[0] else None, of_key, of_feat if need[2] else None
