"""Attention whose scores are products of an edge's ends and its own features."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from ..engine import edge_scores
from ..engine.argument_checks import Checker, GraphLike, graph_of
from ..graph import Graph
from ..runtime import ops as _ops
from ..runtime.attention_options import BiasOptions, EdgeProductResult, public
from ..runtime.batches import batched
from .gat import gat

if TYPE_CHECKING:
    from typing_extensions import Unpack


# fmt: off
@overload
def edge_product_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, edge_attr: Tensor, *,
    clamp: float | None = ..., return_edges: None = ..., return_attention: Literal[False] = ...,
    **options: Unpack[BiasOptions],
) -> Tensor: ...
@overload
def edge_product_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, edge_attr: Tensor, *,
    clamp: float | None = ..., return_edges: str | None = ..., return_attention: bool = ...,
    **options: Unpack[BiasOptions],
) -> Any: ...
# fmt: on
@public(BiasOptions)
@batched("query")
def edge_product_attention(
    graph: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor,
    *,
    clamp: float | None = None,
    return_edges: str | None = None,
    return_attention: bool = False,
    bias: Tensor | None = None,
    **options: Any,
) -> Any:
    r"""Attention whose scores are products with the edges' features (Dwivedi and Bresson 2020, arXiv
    2012.09699, section 2.3; SAN, arXiv 2106.03893; Exphormer, arXiv 2303.06147).

    .. math::
        t_{ijd} = q_{id} \, k_{jd} \, e_{ijd} / \sqrt{D}, \quad
        s_{ij} = \mathrm{clamp}(\sum_d t_{ijd}, \pm c) + b_{ij}, \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, v_j

    per head, with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0. For another
    factor than 1 / sqrt(D), multiply the query.

    The published codes compute exp(s) and divide by its sum, to which they add 1e-6. Here the softmax is
    exact. Theirs is smaller: with c = 5, where the sum is at least exp(-5), by a factor between 1 - 1.5e-4
    and 1 for all edges of a row.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`; its sizes are the rows of key and query.
        query: q [num_dst, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for
            float64).
        key: k [num_src, H, D], same dtype.
        value: v [num_src, H, Dv], same dtype.
        edge_attr: e [E, H, D], same dtype, in the order in which the graph's edges were given.
        clamp: c > 0; None: scores are not clamped. The gradient is 0 where they are. The bias is added
            behind it.
        return_edges: what is given on to the edges, as ``edges`` of an :class:`EdgeProductResult`:
            "products", t [E, H, D], or "scores", their sums [E, H] before the clamp; both in query's dtype.
        {options}

    Returns:
        out [num_dst, H, Dv]; or an EdgeProductResult where the edges or the attention are asked for.

    Differentiable in all floating-point tensors, any number of times, through all that is returned; second
    derivatives are plain tensor operations. Deterministic on the CPU, and there without other tensors of
    E x H x D than e, its gradient, and the products if they are asked for. On CUDA products are tensor
    operations, of a chunk of edges at a time where they are not asked for. Raises as :func:`gat_attention`
    does.

    Example::

        out, products, _ = edge_product_attention(graph, q, k, v, e, clamp=5.0, return_edges="products")
    """
    function = "edge_product_attention"
    if type(graph) is not Graph:
        graph = graph_of(function, graph, key, query)
    check = Checker(function, graph, "query", query)
    graph = check.graph
    check.tensor("query", query, [(graph.num_dst, None, None)])
    heads, dim = query.shape[1:]
    check.tensor("key", key, [(graph.num_src, heads, dim)])
    check.tensor("value", value, [(graph.num_src, heads, None)])
    check.tensor("edge_attr", edge_attr, [(graph.num_edges, heads, dim)])
    if clamp is not None:
        check.number("clamp", clamp)
        if not clamp > 0:
            raise check.error(ValueError, "clamp", "a number above 0 or None", clamp)
    if return_edges not in (None, "products", "scores"):
        raise check.error(ValueError, "return_edges", "None, 'products' or 'scores'", repr(return_edges))
    if bias is not None:
        check.tensor("bias", bias, [(graph.num_edges, heads)], (check.dtype, check.acc))
    raw, products = edge_scores.edge_products(
        graph, query, key, check.in_use(edge_attr), 1 / math.sqrt(dim), return_edges == "products"
    )
    score = raw if clamp is None else raw.clamp(-clamp, clamp)
    if bias is not None:
        score = score + bias
    found = gat(
        graph, value, None, None, negative_slope=1.0, bias=score, return_attention=return_attention,
        function=function, **options,
    )  # fmt: skip
    out, attention = found if return_attention else (found, None)
    if return_edges is None:
        return EdgeProductResult(out, None, attention) if return_attention else out
    # The scores are copied, because backward reads them and the caller may modify the returned tensor.
    edges = products if return_edges == "products" else _ops.as_type(raw, query.dtype).clone()
    return EdgeProductResult(out, check.in_use(edges), attention)
