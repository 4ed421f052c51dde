"""Attention with a score written in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from ..engine import flex as _flex
from ..engine.argument_checks import Checker
from ..engine.given import GraphLike, graph_of
from ..graph import Graph
from ..runtime.batches import batched
from .additive import Options, gat_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FlexOptions(Options, total=False):
    params: Sequence[Tensor]
    out_bias: Tensor | None
    chunk_edges: int | None


# fmt: off
@overload
def flex_attention(
    graph: GraphLike, score_fn: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor,
    edge_feat: Tensor | None = ..., *,
    return_attention: Literal[False] = ..., **options: Unpack[FlexOptions],
) -> Tensor: ...
@overload
def flex_attention(
    graph: GraphLike, score_fn: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor,
    edge_feat: Tensor | None = ..., *,
    return_attention: Literal[True], **options: Unpack[FlexOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    graph: GraphLike, score_fn: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor,
    edge_feat: Tensor | None = ..., *,
    return_attention: bool, **options: Unpack[FlexOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
@batched("value")
def flex_attention(
    graph: Any,
    score_fn: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_feat: Tensor | None = None,
    *,
    params: Sequence[Tensor] = (),
    edge_mask: Tensor | None = None,
    edge_weight: Tensor | None = None,
    out_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    chunk_edges: int | None = None,
    schedule: str = "auto",
    size: tuple[int, int] | None = None,
    _seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention with a score that you write in PyTorch.

    .. math::
        s_{ij} = \mathrm{score\_fn}(q_i, k_j, e_{ij}), \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, v_j

    The score is computed for a chunk of edges at a time, and again in backward; softmax and aggregation are
    those of the fused engine. So no tensor of E x H x D exists, but the scores [E, H] do. Where the score is
    one of the engine's, its own function is much faster.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`.
        score_fn: called as ``score_fn(q, k, e, *params)`` with the rows of n edges, q and k [n, H, ...] of
            the destinations and sources, e [n, ...] or None; returns their scores [n, H]. It sees the edges
            in any number of chunks, none included. It may be compiled (``torch.compile(score_fn,
            dynamic=True)``).
        query: [num_dst, H, ...]; float32, float64, float16 or bfloat16.
        key: [num_src, H, ...], same dtype.
        value: [num_src, H, Dv], same dtype.
        edge_feat: [E, ...], same dtype, in the order in which the graph's edges were given; or None.
        params: other tensors that the score depends on. A captured tensor that requires a gradient is an
            error.
        chunk_edges: edges per call of score_fn; default: about 128 MB of query and key rows.
        edge_mask, edge_weight, out_bias, dropout_p, return_attention, schedule: as in :func:`gat_attention`.
        size: (num_src, num_dst) of an ``edge_index``. None: as many as key and query have rows.

    Returns:
        out [num_dst, H, Dv], or (out, attention [E, H]).

    Differentiable in query, key, value, edge_feat, params, edge_weight and out_bias. Backward computes the
    score again, from the same random numbers and under the same autocast; a second derivative computes it of
    all edges at a time. Deterministic on
    the CPU; on CUDA the gradients of query and key are added up by ``index_add_``, which is deterministic
    only under ``torch.use_deterministic_algorithms``. Raises as :func:`gat_attention` does.
    """
    if type(graph) is not Graph or size is not None:
        graph = graph_of("flex_attention", graph, size, key, query)
    check = Checker("flex_attention", graph, "query", query)
    graph = check.graph
    if not callable(score_fn):
        raise check.error(TypeError, "score_fn", "a function", type(score_fn).__name__)
    for name, x, rows in (("query", query, graph.num_dst), ("key", key, graph.num_src)):
        trailing = x.shape[2:] if isinstance(x, Tensor) else ()
        check.tensor(name, x, [(rows, query.shape[1] if query.dim() > 1 else None, *trailing)])
    check.tensor("value", value, [(graph.num_src, query.shape[1], None)])
    if edge_feat is not None:
        trailing = edge_feat.shape[1:] if isinstance(edge_feat, Tensor) else ()
        check.tensor("edge_feat", edge_feat, [(graph.num_edges, *trailing)])
    for k, x in enumerate(params):
        if not isinstance(x, Tensor):
            raise check.error(TypeError, f"params[{k}]", "a tensor", type(x).__name__)
    if chunk_edges is not None and not isinstance(chunk_edges, int):
        raise check.error(TypeError, "chunk_edges", "an integer", type(chunk_edges).__name__)
    if chunk_edges is not None and chunk_edges < 1:
        raise check.error(ValueError, "chunk_edges", "a number >= 1", chunk_edges)
    _flex.try_out(check.error, score_fn, query, key, edge_feat, params)
    chunk = chunk_edges or _flex.chunk_size(query, key)
    score = _flex.edge_scores(graph, score_fn, chunk, query, key, edge_feat, params)
    return gat_attention(  # type: ignore[call-overload]
        graph, value, None, None, negative_slope=1.0, edge_bias=score, edge_mask=edge_mask,
        edge_weight=edge_weight, out_bias=out_bias, dropout_p=dropout_p, return_attention=return_attention,
        schedule=schedule, _seed=_seed, _caller="flex_attention",
    )  # fmt: skip
