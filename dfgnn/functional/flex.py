"""``flex_attention``: attention with a score that the user writes in Python. `edge_scores` computes such
scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from ..engine import edge_scores
from ..engine.argument_checks import Checker, GraphLike, given_graph
from ..graph import Graph
from ..runtime.attention_options import AttentionResult, SinkOptions, public
from ..runtime.batches import batched
from .gat import gat

if TYPE_CHECKING:
    from typing_extensions import Unpack


# fmt: off
@overload
def flex_attention(
    graph: GraphLike, score_fn: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor,
    edge_attr: Tensor | None = ..., *, params: Sequence[Tensor] = ...,
    return_attention: Literal[False] = ..., **options: Unpack[SinkOptions],
) -> Tensor: ...
@overload
def flex_attention(
    graph: GraphLike, score_fn: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor,
    edge_attr: Tensor | None = ..., *, params: Sequence[Tensor] = ...,
    return_attention: Literal[True], **options: Unpack[SinkOptions],
) -> AttentionResult: ...
@overload
def flex_attention(
    graph: GraphLike, score_fn: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor,
    edge_attr: Tensor | None = ..., *, params: Sequence[Tensor] = ...,
    return_attention: bool, **options: Unpack[SinkOptions],
) -> Tensor | AttentionResult: ...
# fmt: on
@public(SinkOptions)
@batched("value")
def flex_attention(
    graph: Any,
    score_fn: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor | None = None,
    *,
    params: Sequence[Tensor] = (),
    kernel_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    r"""Attention with a score that you write in PyTorch.

    .. math::
        s_{ij} = \mathrm{score\_fn}(q_i, k_j, e_{ij}), \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, v_j

    The score is computed for a chunk of edges at a time, and again in backward; softmax and aggregation are
    those of the fused engine. So no tensor of E x H x D exists, but the scores [E, H] do. Where the score is
    one of the engine's, its own function is much faster.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`; its sizes are the rows of key and query.
        score_fn: called as ``score_fn(q, k, e, *params)`` with the rows of n edges, q and k [n, H, ...] of
            the destinations and sources, e [n, ...], or None without edge_attr; returns their scores [n, H].
            It sees the edges in any number of chunks, none included. It may be compiled
            (``torch.compile(score_fn, dynamic=True)``).
        query: [num_dst, H, ...]; float32, float64, float16 or bfloat16.
        key: [num_src, H, ...], same dtype.
        value: [num_src, H, Dv], same dtype.
        edge_attr: [E, ...], same dtype, in the order in which the graph's edges were given; or None.
        params: other tensors that the score depends on. A captured tensor that requires a gradient is an
            error.
        {options}

    ``kernel_options["chunk_edges"]`` is the number of edges per call of score_fn; default: about 128 MB of
    query and key rows.

    Returns:
        out [num_dst, H, Dv], or an AttentionResult.

    Differentiable in query, key, value, edge_attr, params, weight and sink. Backward computes the
    score again, from the same random numbers and under the same autocast; a second derivative computes it of
    all edges at a time. Deterministic on
    the CPU; on CUDA the gradients of query and key are added up by ``index_add_``, which is deterministic
    only under ``torch.use_deterministic_algorithms``. Raises as :func:`gat_attention` does.

    Example::

        def score(q, k, e):  # e: the edges' distances, [n]
            return (q * k).sum(-1).tanh() - e.unsqueeze(1)

        out = flex_attention(edge_index, score, q, k, v, distance)
    """
    function = "flex_attention"
    if type(graph) is not Graph:
        graph = given_graph(function, graph, key, query)
    check = Checker(function, graph, "query", query)
    graph = check.graph
    if not callable(score_fn):
        raise check.error(TypeError, "score_fn", "a function, the second argument", type(score_fn).__name__)
    for name, x, rows in (("query", query, graph.num_dst), ("key", key, graph.num_src)):
        trailing = x.shape[2:] if isinstance(x, Tensor) else ()
        check.tensor(name, x, [(rows, query.shape[1] if query.dim() > 1 else None, *trailing)])
    check.tensor("value", value, [(graph.num_src, query.shape[1], None)])
    if edge_attr is not None:
        trailing = edge_attr.shape[1:] if isinstance(edge_attr, Tensor) else ()
        check.tensor("edge_attr", edge_attr, [(graph.num_edges, *trailing)])
    for k, x in enumerate(params):
        if not isinstance(x, Tensor):
            raise check.error(TypeError, f"params[{k}]", "a tensor", type(x).__name__)
    of_kernels = dict(check.kernel_options(kernel_options, ("schedule", "chunk_edges")))
    chunk = of_kernels.pop("chunk_edges", None)
    where = 'kernel_options["chunk_edges"]'
    if chunk is not None and not isinstance(chunk, int):
        raise check.error(TypeError, where, "an integer", type(chunk).__name__)
    if chunk is not None and chunk < 1:
        raise check.error(ValueError, where, "a number >= 1", chunk)
    edge_scores.try_out(check.error, score_fn, query, key, edge_attr, params)
    chunk = chunk or edge_scores.chunk_size(query, key)
    score = edge_scores.edge_scores(graph, score_fn, chunk, query, key, edge_attr, params)
    return gat(
        graph, value, None, None, negative_slope=1.0, bias=score, kernel_options=of_kernels or None,
        function=function, **options,
    )  # fmt: skip
