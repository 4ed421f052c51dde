"""Attention with scores that are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from ..engine.argument_checks import Checker, GraphLike, given_graph
from ..graph import Graph
from ..graph.derived import has_edges_as_sources
from ..runtime import ops as _ops
from ..runtime.attention_options import OF_LAYERS, AttentionResult, SinkOptions, public
from ..runtime.batches import batched
from .gat import gat

if TYPE_CHECKING:
    from typing_extensions import Unpack


# fmt: off
@overload
def score_attention(
    graph: GraphLike, score: Tensor, value: Tensor, *,
    return_attention: Literal[False] = ..., **options: Unpack[SinkOptions],
) -> Tensor: ...
@overload
def score_attention(
    graph: GraphLike, score: Tensor, value: Tensor, *,
    return_attention: Literal[True], **options: Unpack[SinkOptions],
) -> AttentionResult: ...
@overload
def score_attention(
    graph: GraphLike, score: Tensor, value: Tensor, *,
    return_attention: bool, **options: Unpack[SinkOptions],
) -> Tensor | AttentionResult: ...
# fmt: on
@public(SinkOptions, more=OF_LAYERS)
@batched("value")
def score_attention(graph: Any, score: Tensor, value: Tensor, **options: Any) -> Any:
    r"""Attention with scores of your own, one number per edge and head: softmax over the edges into each
    destination, dropout, and the weighted sum, in one call.

    .. math::
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, v_j

    with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0. It does what
    :func:`edge_softmax` and :func:`spmm` do in turn, without storing the weights.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`; an ``edge_index`` has as many sources, and destinations, as value has rows.
        score: s [E, H], or [E] for all heads alike, in the order of the edges; in value's dtype or float32.
            -inf masks an edge.
        value: v of the sources [num_src, H, D]; float32, float64, float16 or bfloat16. Values of edges
            [E, H, D] go with :meth:`dfgnn.Graph.edges_as_sources`.
        {options}

    Returns:
        out [num_dst, H, D], or an AttentionResult.

    Example::

        edges = Graph.cached(edge_index, num_nodes=len(x)).edges_as_sources()
        hidden = torch.cat([x[src], x[dst], distance], dim=1)
        out = score_attention(edges, mlp_score(hidden), mlp_value(hidden).view(-1, H, D))

    Differentiable and deterministic as :func:`gat_attention`, of which it is the case without terms of the
    ends and without LeakyReLU; raises as it does.
    """
    function = "score_attention"
    if type(graph) is not Graph:
        graph = given_graph(function, graph, value)
    check = Checker(function, graph, "value", value)
    graph = check.graph
    rows, num_edges = graph.num_src, graph.num_edges
    if value.dim() < 3 and value.shape[:1] == (num_edges,):
        way = f"{list(value.shape)}: are score and value swapped?"
        raise check.error(ValueError, "value", f"shape [{rows}, any, any], behind the score", way)
    if value.dim() == 3 and value.shape[0] != rows and value.shape[0] == num_edges:
        raise check.error(
            ValueError, "value", f"shape [{rows}, any, any]",
            f"{list(value.shape)}; values with a row per edge go with graph.edges_as_sources()",
        )  # fmt: skip
    check.tensor("value", value, [(rows, None, None)])
    heads = value.shape[1]
    check.tensor("score", score, [(num_edges,), (num_edges, heads)], (check.dtype, check.acc))
    if score.dim() == 1:
        score = score.unsqueeze(1).expand(-1, heads)
    more = dict(options, negative_slope=1.0, function=function)
    if has_edges_as_sources(graph):  # the scores are the sources' terms
        return gat(graph, value, _ops.as_type(check.in_use(score), check.acc), None, **more)
    return gat(graph, value, None, None, bias=score, **more)
