"""Attention whose scores are products of an edge's ends and its own features."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from ..engine import edge_products as _edge_products
from ..engine.argument_checks import Checker
from ..engine.given import GraphLike, graph_of
from ..graph import Graph
from ..runtime import ops as _ops
from ..runtime.batches import batched
from .additive import Options, gat_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EdgeProductOptions(Options, total=False):
    scale: float | None
    clamp: float | None
    edge_bias: Tensor | None
    out_bias: Tensor | None


# fmt: off
@overload
def edge_product_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, edge_feat: Tensor, *,
    return_edges: None = ..., return_attention: Literal[False] = ..., **options: Unpack[EdgeProductOptions],
) -> Tensor: ...
@overload
def edge_product_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, edge_feat: Tensor, *,
    return_edges: str | None = ..., return_attention: bool = ..., **options: Unpack[EdgeProductOptions],
) -> Any: ...
# fmt: on
@batched("query")
def edge_product_attention(
    graph: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_feat: Tensor,
    *,
    scale: float | None = None,
    clamp: float | None = None,
    edge_bias: Tensor | None = None,
    edge_mask: Tensor | None = None,
    edge_weight: Tensor | None = None,
    out_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_edges: str | None = None,
    return_attention: bool = False,
    schedule: str = "auto",
    size: tuple[int, int] | None = None,
    _seed: Tensor | None = None,
) -> Any:
    r"""Attention whose scores are products with the edges' features (Dwivedi and Bresson 2020, arXiv
    2012.09699, section 2.3; SAN, arXiv 2106.03893; Exphormer, arXiv 2303.06147).

    .. math::
        t_{ijd} = \mathrm{scale} \; q_{id} \, k_{jd} \, e_{ijd}, \quad
        s_{ij} = \mathrm{clamp}(\sum_d t_{ijd}, \pm c) + b_{ij}, \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, v_j

    per head, with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0.

    The published codes compute exp(s) and divide by its sum, to which they add 1e-6. Here the softmax is
    exact. Theirs is smaller: with c = 5, where the sum is at least exp(-5), by a factor between 1 - 1.5e-4
    and 1 for all edges of a row.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`.
        query: [num_dst, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for
            float64).
        key: [num_src, H, D], same dtype.
        value: [num_src, H, Dv], same dtype.
        edge_feat: e [E, H, D], same dtype, in the order in which the graph's edges were given.
        scale: factor of the products; None for 1 / sqrt(D).
        clamp: c > 0; None: scores are not clamped. The gradient is 0 where they are.
        edge_bias: b [E, H], same order, behind the clamp; in feat's dtype or float32.
        edge_mask, edge_weight, out_bias, dropout_p, return_attention, schedule: as in :func:`gat_attention`.
        return_edges: what is given on to the edges: "products", t [E, H, D], or "scores", their sums
            [E, H] before the clamp; both in query's dtype.
        size: (num_src, num_dst) of an ``edge_index``; None: the rows of key and of query.

    Returns:
        out [num_dst, H, Dv]; or a tuple of it, what return_edges names, and attention [E, H], as asked for.

    Differentiable in all floating-point tensors, any number of times, through all that is returned; second
    derivatives are plain tensor operations. Deterministic on the CPU, and there without other tensors of
    E x H x D than e, its gradient, and the products if they are asked for. On CUDA products are tensor
    operations, of a chunk of edges at a time where they are not asked for. Raises as :func:`gat_attention`
    does.

    Example::

        out, products = edge_product_attention(graph, q, k, v, e, clamp=5.0, return_edges="products")
    """
    if type(graph) is not Graph or size is not None:
        graph = graph_of("edge_product_attention", graph, size, key, query)
    check = Checker("edge_product_attention", graph, "query", query)
    graph = check.graph
    check.tensor("query", query, [(graph.num_dst, None, None)])
    heads, dim = query.shape[1:]
    check.tensor("key", key, [(graph.num_src, heads, dim)])
    check.tensor("value", value, [(graph.num_src, heads, None)])
    check.tensor("edge_feat", edge_feat, [(graph.num_edges, heads, dim)])
    scale = 1 / math.sqrt(dim) if scale is None else scale
    check.number("scale", scale)
    if clamp is not None:
        check.number("clamp", clamp)
        if not clamp > 0:
            raise check.error(ValueError, "clamp", "a number above 0 or None", clamp)
    if return_edges not in (None, "products", "scores"):
        raise check.error(ValueError, "return_edges", "None, 'products' or 'scores'", repr(return_edges))
    if edge_bias is not None:
        check.tensor("edge_bias", edge_bias, [(graph.num_edges, heads)], (check.dtype, check.acc))
    raw, products = _edge_products.edge_products(
        graph, query, key, check.in_use(edge_feat), float(scale), return_edges == "products"
    )
    score = raw if clamp is None else raw.clamp(-clamp, clamp)
    if edge_bias is not None:
        score = score + edge_bias
    ends = value.new_zeros(graph.num_src, heads)
    found = gat_attention(  # type: ignore[call-overload]
        graph, value, ends, None, negative_slope=1.0, edge_bias=score, edge_mask=edge_mask,
        edge_weight=edge_weight, out_bias=out_bias, dropout_p=dropout_p, return_attention=return_attention,
        schedule=schedule, _seed=_seed, _caller="edge_product_attention",
    )  # fmt: skip
    if return_edges is None:
        return found
    out, *attention = found if return_attention else (found,)
    # The scores are copied, because backward reads them and the caller may modify the returned tensor.
    edges = products if return_edges == "products" else _ops.as_type(raw, query.dtype).clone()
    return out, check.in_use(edges), *attention
