"""Attention with scores that are dot products."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..engine import argument_checks, edge_projection, paths
from ..engine.argument_checks import Checker, GraphLike, for_device, given_graph, with_feat
from ..engine.paths import AttentionInputs, attend
from ..graph import Graph
from ..runtime.arguments import BIAS_AFTER, Numbers, Tensors
from ..runtime.attention_options import (
    OF_LAYERS,
    AttentionResult,
    EdgeOptions,
    EdgeTerm,
    ScoreOptions,
    inner,
    public,
)
from ..runtime.batches import batched

if TYPE_CHECKING:
    from typing_extensions import Unpack


# fmt: off
@overload
def dot_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, *, scale: float | Tensor | None = ...,
    return_attention: Literal[False] = ..., **options: Unpack[EdgeOptions],
) -> Tensor: ...
@overload
def dot_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, *, scale: float | Tensor | None = ...,
    return_attention: Literal[True], **options: Unpack[EdgeOptions],
) -> AttentionResult: ...
@overload
def dot_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, *, scale: float | Tensor | None = ...,
    return_attention: bool, **options: Unpack[EdgeOptions],
) -> Tensor | AttentionResult: ...
# fmt: on
@public(EdgeOptions, more=(*OF_LAYERS, "negative_slope", "function"))
@batched("query")
def dot_attention(
    graph: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | Tensor | None = None,
    negative_slope: float = 1.0,
    edge: EdgeTerm | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    function: str = "dot_attention",
    **options: Any,
) -> Any:
    r"""Dot-product attention over a graph (Graph Transformer: Dwivedi and Bresson 2020, arXiv 2012.09699).

    .. math::
        s_{ij} = \mathrm{scale} \; q_i \cdot (k_j + e^k_{ij}) + b_{ij}, \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, (v_j + e^v_{ij})

    with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`; its sizes are the rows of key and query. Keys and values of edges, with a
            row per edge, go with :meth:`dfgnn.Graph.edges_as_sources`.
        query: q [num_dst, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for
            float64).
        key: k [num_src, H, D], same dtype.
        value: v [num_src, H, Dv], same dtype; Dv may differ from D. On CUDA fastest where D = Dv is a
            multiple of 16 bytes; other sizes are padded.
        scale: factor of the dot product; None for 1 / sqrt(D). A tensor per edge, [E] or [E, H], in query's
            dtype or float32, takes the place of 1 / sqrt(D).
        {options}

    ``edge.key`` is e^k [E, H, D] or [E, D], and ``edge.value`` e^v [E, H, Dv] or [E, Dv]; of one tensor for
    both, as in TransformerConv, one gradient is computed. A Projected is folded into the attention, so that
    no E x H x D tensor exists: of edge size are [E, H] scores and weights, and their gradients. For any d,
    also above D: what it takes per edge are H d multiplications in place of H D d. Key and value may have
    projections of their own (QCNet, HiVT, SMART).

    Returns:
        out [num_dst, H, Dv], or an AttentionResult.

    Differentiable, deterministic, and without edge-sized tensors beyond those passed in or asked for, like
    :func:`gat_attention`, but for [E, H] with two different terms of edges, [E, D] or a Projected;
    raises as it does.

    Example, with relative positions r of which key and value have projections of their own::

        key_of, value_of = torch.nn.Linear(128, H * D), torch.nn.Linear(128, H * D)
        edge = EdgeTerm(
            key=Projected(r, key_of.weight, key_of.bias), value=Projected(r, value_of.weight, value_of.bias)
        )
        out = dot_attention(graph, q, k, v, edge=edge)
    """
    if type(graph) is not Graph:
        graph = given_graph(function, graph, key, query)
    if edge is None and not return_attention and paths.are_none(options):
        numbers = {"slope": negative_slope, "scale": scale, "dropout_p": dropout_p}
        out = paths.unchecked(graph, "dot", value, (key, query), **numbers)
        if out is not None:
            return out
    check = Checker(function, graph, "query", query)
    graph = check.graph
    check.tensor("query", query, [(graph.num_dst, None, None)])
    heads, dim = query.shape[1:]
    if _per_edge(key, graph):
        raise check.error(
            ValueError, "key", f"shape [{graph.num_src}, {heads}, {dim}]",
            f"{list(key.shape)}; keys and values with a row per edge go with graph.edges_as_sources()",
        )  # fmt: skip
    check.tensor("key", key, [(graph.num_src, heads, dim)])
    check.tensor("value", value, [(graph.num_src, heads, None)])
    value_dim = value.shape[2]
    if isinstance(scale, Tensor):
        if scale.dim() == 0:
            query = (query * scale).to(query.dtype)
        else:
            shapes = [(graph.num_edges,), (graph.num_edges, heads)]
            check.tensor("scale", scale, shapes, (check.dtype, check.acc))
            options["gate"] = scale
        scale = 1.0
    scale = 1 / math.sqrt(dim) if scale is None else scale
    check.number("scale", scale)
    check.number("negative_slope", negative_slope)
    own, flags, terms, key_bias, value_bias = argument_checks.sort_out(check, edge, heads, dim, value_dim)
    per_edge, sink, schedule, out_bias = check.settings(options, heads, value_dim, dropout_p)
    if negative_slope != 1 and per_edge.edge_bias is not None:
        if terms is not None and terms.key is not None:  # which would be added where the bias is
            raise NotImplementedError(
                f"{function}: a LeakyReLU, a bias and this term of the edges in the key"
            )
        flags |= BIAS_AFTER
    key = key if key_bias is None else key + key_bias
    value = value if value_bias is None else value + value_bias
    dst, src, values, own, out_bias = for_device(check, query, key, value, own, out_bias)
    tensors = Tensors(values, src, dst, None, *with_feat(per_edge, own), out_bias)
    scalars = Numbers(float(negative_slope), float(scale), float(dropout_p), flags)
    inputs = AttentionInputs(graph, "dot", tensors, scalars, return_attention, schedule, sink, terms)
    out, attention = (attend if terms is None else edge_projection.attention)(inputs)
    return check.results(out, attention, value_dim, return_attention)


#: `dot_attention` for calls within the library, whose types do not state `OF_LAYERS` and the function's name.
dot: Any = inner(dot_attention)


# fmt: off
@overload
def agnn_attention(
    graph: GraphLike, value: Tensor, query: Tensor | None = ..., *, beta: float | Tensor = ...,
    return_attention: Literal[False] = ..., **options: Unpack[ScoreOptions],
) -> Tensor: ...
@overload
def agnn_attention(
    graph: GraphLike, value: Tensor, query: Tensor | None = ..., *, beta: float | Tensor = ...,
    return_attention: Literal[True], **options: Unpack[ScoreOptions],
) -> AttentionResult: ...
@overload
def agnn_attention(
    graph: GraphLike, value: Tensor, query: Tensor | None = ..., *, beta: float | Tensor = ...,
    return_attention: bool, **options: Unpack[ScoreOptions],
) -> Tensor | AttentionResult: ...
# fmt: on
@public(ScoreOptions, more=OF_LAYERS)
@batched("value")
def agnn_attention(
    graph: Any,
    value: Tensor,
    query: Tensor | None = None,
    *,
    beta: float | Tensor = 1.0,
    **options: Any,
) -> Any:
    r"""Cosine attention of AGNN (Thekumparampil et al. 2018, arXiv 1803.03735).

    .. math::
        s_{ij} = \beta \cos(q_i, v_j) + b_{ij}, \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, v_j

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`; its sizes are the rows of value and query.
        value: v [num_src, H, D], which are the keys, too; float32, float64, float16 or bfloat16.
        query: q [num_dst, H, D], same dtype; None: value, for a graph with num_src = num_dst.
        beta: a number, or a tensor that broadcasts against [num_dst, H, D], such as the learned [1].
        {options}

    Returns:
        out [num_dst, H, D], or an AttentionResult.

    Differentiable in value, query, beta, bias, weight and sink; raises as :func:`gat_attention` does.

    Example::

        out = agnn_attention(edge_index, x.unsqueeze(1), beta=torch.nn.Parameter(torch.ones(1)))
    """
    function = "agnn_attention"
    if type(graph) is not Graph:
        graph = given_graph(function, graph, value, query)
    check = Checker(function, graph, "value", value)
    graph = check.graph
    check.tensor("value", value, [(graph.num_src, None, None)])
    if query is None and graph.num_dst != graph.num_src:
        raise check.error(ValueError, "query", f"a tensor, as num_dst = {graph.num_dst} is not num_src", None)
    if query is not None:
        check.tensor("query", query, [(graph.num_dst, *value.shape[1:])])
    if not isinstance(beta, (Tensor, numbers.Real)):
        raise check.error(TypeError, "beta", "a number or a tensor", type(beta).__name__)
    wanted = (graph.num_dst, *value.shape[1:])
    if isinstance(beta, Tensor) and not _broadcasts(beta.shape, wanted):
        raise check.error(
            ValueError,
            "beta",
            f"a shape that broadcasts against {list(wanted)}",
            f"{list(beta.shape)}; beta.unsqueeze(1) of a number per head does",
        )
    # Cast back, because under autocast on a GPU `normalize` returns float32.
    key = torch.nn.functional.normalize(value, dim=-1).to(value.dtype)
    unit = key if query is None else torch.nn.functional.normalize(query, dim=-1).to(value.dtype)
    unit = (beta * unit).to(value.dtype)
    return dot(graph, unit, key, value, scale=1.0, function=function, **options)


def _per_edge(x: Any, graph: Any) -> bool:
    """Whether x has a row per edge, and so none per source."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] == graph.num_src:
        return False  # before num_edges is read, whose value may be unknown while a compiler records
    return x.shape[0] == graph.num_edges


agnn: Any = inner(agnn_attention)


def _broadcasts(shape, wanted) -> bool:
    """Whether a tensor of this shape expands to the wanted one."""
    return len(shape) <= len(wanted) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(wanted)))
