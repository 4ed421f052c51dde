"""Attention with scores that are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..engine.argument_checks import Checker
from ..engine.given import GraphLike, edges_as_sources, graph_of
from ..graph import Graph
from ..runtime import ops as _ops
from ..runtime.batches import batched
from .additive import Options, gat_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ScoredOptions(Options, total=False):
    out_bias: Tensor | None
    sink: Tensor | None
    value_at: str


# fmt: off
@overload
def score_attention(
    graph: GraphLike, score: Tensor, value: Tensor, *,
    return_attention: Literal[False] = ..., **options: Unpack[ScoredOptions],
) -> Tensor: ...
@overload
def score_attention(
    graph: GraphLike, score: Tensor, value: Tensor, *,
    return_attention: Literal[True], **options: Unpack[ScoredOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def score_attention(
    graph: GraphLike, score: Tensor, value: Tensor, *,
    return_attention: bool, **options: Unpack[ScoredOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
@batched("value")
def score_attention(
    graph: Any,
    score: Tensor,
    value: Tensor,
    *,
    value_at: str = "auto",
    edge_mask: Tensor | None = None,
    edge_weight: Tensor | None = None,
    out_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    schedule: str = "auto",
    sink: Tensor | None = None,
    size: tuple[int, int] | None = None,
    _seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention with scores of your own, one number per edge and head: softmax over the edges into each
    destination, dropout, and the weighted sum, in one call.

    .. math::
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, v_j

    with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0. It does what
    :func:`edge_softmax` and :func:`spmm` do in turn, without storing the weights.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`.
        score: s [E, H], or [E] for all heads alike, in the order of the edges; in value's dtype or float32.
            -inf masks an edge.
        value: v of the sources [num_src, H, D], or of the edges [E, H, D] in their order; float32, float64,
            float16 or bfloat16.
        value_at: "nodes" or "edges", where value has its rows. "auto" tells by their number, and refuses to
            where the graph has as many sources as edges: code that meets many graphs had better say it.
        size: (num_src, num_dst) of an ``edge_index``. None: as many sources as value has rows, and as many
            destinations. It has to be given with values at edges, which do not tell how many nodes there are.
        edge_mask, edge_weight, out_bias, dropout_p, return_attention, schedule, sink: as in
            :func:`gat_attention`.

    Returns:
        out [num_dst, H, D], or (out, attention [E, H]).

    Example:
        >>> hidden = torch.cat([x[src], x[dst], distance], dim=1)
        >>> out = score_attention(edge_index, mlp_score(hidden), mlp_value(hidden).view(-1, H, D),
        ...                       value_at="edges", size=(len(x), len(x)))

    Differentiable and deterministic as :func:`gat_attention`, of which it is the case without terms of the
    ends and without LeakyReLU; raises as it does.
    """
    name = "score_attention"
    if type(graph) is not Graph or size is not None:
        if size is None and value_at != "nodes" and type(graph) is Tensor and graph.layout == torch.strided:
            _refuse_unknown_sizes(graph, value, value_at)
        graph = graph_of(name, graph, size, value)
    check = Checker(name, graph, "value", value)
    graph = check.graph
    at_edges = _at_edges(check, graph, value, value_at)
    rows = graph.num_edges if at_edges else graph.num_src
    check.tensor("value", value, [(rows, None, None)])
    heads, per_edge = value.shape[1], (graph.num_edges,)
    check.tensor("score", score, [per_edge, (*per_edge, heads)], (check.dtype, check.acc))
    if score.dim() == 1:
        score = score.unsqueeze(1).expand(-1, heads)
    options: dict[str, Any] = dict(
        negative_slope=1.0, edge_mask=edge_mask, edge_weight=edge_weight, out_bias=out_bias,
        dropout_p=dropout_p, return_attention=return_attention, schedule=schedule, sink=sink, _seed=_seed,
        _caller=name,
    )  # fmt: skip
    if at_edges:  # the edges are the sources of the graph `edges`, and their scores the sources' terms
        edges = edges_as_sources(name, graph, "edges")
        return gat_attention(edges, value, _ops.as_type(check.in_use(score), check.acc), None, **options)
    return gat_attention(graph, value, None, None, edge_bias=score, **options)


def _refuse_unknown_sizes(edge_index: Tensor, value: Any, value_at: str) -> None:
    """Raises if an ``edge_index`` without a size comes with a value per edge."""
    per_edge = value_at == "edges" or (
        isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == edge_index.shape[-1]
    )
    if per_edge:
        raise ValueError(
            "score_attention: size: expected (num_src, num_dst) with an edge_index, as a value per edge does "
            'not tell how many nodes there are (value_at="nodes" for a value per source), got None'
        )


def _at_edges(check: Checker, graph: Any, value: Tensor, value_at: Any) -> bool:
    if value_at not in ("auto", "nodes", "edges"):
        raise check.error(ValueError, "value_at", "'auto', 'nodes' or 'edges'", repr(value_at))
    if value_at != "auto":
        return value_at == "edges"
    num_src, num_edges = graph.num_src, graph.num_edges
    if value.dim() == 0 or value.shape[0] != num_edges:
        return False
    if num_src == num_edges:
        raise check.error(
            ValueError, "value_at", f"'nodes' or 'edges', as there are {num_edges} of both", "'auto'"
        )
    return True
