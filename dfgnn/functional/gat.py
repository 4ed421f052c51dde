"""Attention with the scores of GAT and GATv2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch.nn.functional as F
from torch import Tensor

from ..engine import edge_scores, paths
from ..engine.argument_checks import (
    Checker,
    GraphLike,
    check_term,
    for_device,
    given_graph,
    given_terms,
    projected,
    with_feat,
)
from ..engine.edge_maps import rows_of_destinations, rows_of_sources
from ..engine.paths import AttentionInputs, attend
from ..graph import Graph
from ..runtime import ops as _ops
from ..runtime.arguments import BIAS_AFTER, FEAT_IN_KEY, FEAT_IN_VALUE, Numbers, Tensors
from ..runtime.attention_options import (
    OF_LAYERS,
    AttentionResult,
    EdgeOptions,
    EdgeTerm,
    Projected,
    inner,
    public,
)
from ..runtime.batches import batched

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _raw(graph: Any, src: Any, dst: Any, gate: Any, term: Tensor) -> Tensor:
    """The score before the LeakyReLU, [E, H]."""
    ends = None if src is None else rows_of_sources(graph, src)
    if dst is not None:
        of_dst = rows_of_destinations(graph, dst)
        ends = of_dst if ends is None else ends + of_dst
    if ends is None:
        return term
    return (ends if gate is None else ends * gate) + term


# fmt: off
@overload
def gat_attention(
    graph: GraphLike, value: Tensor, score_src: Tensor | None, score_dst: Tensor | None, *,
    negative_slope: float = ..., return_attention: Literal[False] = ..., **options: Unpack[EdgeOptions],
) -> Tensor: ...
@overload
def gat_attention(
    graph: GraphLike, value: Tensor, score_src: Tensor | None, score_dst: Tensor | None, *,
    negative_slope: float = ..., return_attention: Literal[True], **options: Unpack[EdgeOptions],
) -> AttentionResult: ...
@overload
def gat_attention(
    graph: GraphLike, value: Tensor, score_src: Tensor | None, score_dst: Tensor | None, *,
    negative_slope: float = ..., return_attention: bool, **options: Unpack[EdgeOptions],
) -> Tensor | AttentionResult: ...
# fmt: on
@public(EdgeOptions, more=(*OF_LAYERS, "function"))
@batched("value")
def gat_attention(
    graph: Any,
    value: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    *,
    negative_slope: float = 0.2,
    edge: EdgeTerm | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    function: str = "gat_attention",
    **options: Any,
) -> Any:
    r"""Additive attention of GAT (Veličković et al., ICLR 2018, arXiv 1710.10903).

    .. math::
        s_{ij} = \mathrm{LeakyReLU}(s^{src}_j + s^{dst}_i + e^s_{ij}) + b_{ij}, \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, (v_j + e^v_{ij})

    with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0.

    Args:
        graph: the edges, on the device of the tensors: a Graph; or a DGLGraph or an ``edge_index`` [2, E],
            from which the graph is made at the first call and found again as long as that object lives (see
            :meth:`dfgnn.Graph.cached`), with the edges in its order. An ``edge_index`` has as many sources as
            value has rows and as many destinations as score_dst, or without it as many as sources.
        value: v [num_src, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for
            float64). On CUDA fastest where D is a multiple of 16 bytes; other sizes are padded.
        score_src: s^src [num_src, H], the source's term, in value's dtype or float32; None for 0.
        score_dst: s^dst [num_dst, H], the destination's term, likewise.
        negative_slope: of LeakyReLU.
        {options}

    ``edge.score`` is e^s [E, H], in value's dtype or float32, and ``edge.value`` e^v [E, H, D] or [E, D], as
    in EdgeGAT; a Projected is projected first. With a bias in addition to ``edge.score`` scores [E, H] are
    computed by tensor operations.

    Returns:
        out [num_dst, H, D], or an AttentionResult.

    Differentiable in every floating-point tensor, any number of times and in forward mode; under torch.func's
    transforms, too. Third derivatives, second ones that vmap runs over, and forward mode are plain
    tensor operations, with temporaries of E x H x D; all else is fused. The results may be modified in place.
    Deterministic: equal inputs give bitwise equal results, whatever ``torch.use_deterministic_algorithms``
    says (but third derivatives and forward mode on CUDA, which follow it). Memory beyond inputs, outputs and
    gradients is O(N H D); edge-sized tensors exist only where one is passed in or asked for (a
    loss over the returned attention takes one [E, H] more in backward).

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, device, shape or range.
        RuntimeError: CUDA tensors without CUDA support in this installation.

    Example::

        value = lin(x).view(-1, H, D)
        score_src, score_dst = (value * att_src).sum(-1), (value * att_dst).sum(-1)
        out = gat_attention(edge_index, value, score_src, score_dst, edge=EdgeTerm(score=lin_edge(edge_attr)))
    """
    if type(graph) is not Graph:
        graph = given_graph(function, graph, value, score_dst)
    if (
        edge is None
        and not return_attention
        and score_src is not None
        and score_dst is not None
        and paths.are_none(options)
    ):
        ends = score_src, score_dst
        out = paths.unchecked(graph, "additive", value, ends, slope=negative_slope, dropout_p=dropout_p)
        if out is not None:
            return out
    check = Checker(function, graph, "value", value)
    graph = check.graph
    check.tensor("value", value, [(graph.num_src, None, None)])
    check.number("negative_slope", negative_slope)
    heads, dim = value.shape[1:]
    floats = (check.dtype, check.acc)
    if score_src is not None:
        check.tensor("score_src", score_src, [(graph.num_src, heads)], floats)
        score_src = _ops.as_type(score_src, check.acc)
    if score_dst is not None:
        check.tensor("score_dst", score_dst, [(graph.num_dst, heads)], floats)
        score_dst = _ops.as_type(score_dst, check.acc)
    feat: Tensor | None = None
    term: Tensor | None = None
    if edge is not None:
        given_terms(check, edge, ("score", "value"))
        if edge.value is not None:
            check_term(check, "value", edge.value, heads, dim)
            feat = projected(check, edge.value, heads, dim)
        if edge.score is not None:
            check_term(check, "score", edge.score, heads, None)
            term = projected(check, edge.score, heads, None)
    per_edge, sink, schedule, out_bias = check.settings(options, heads, dim, dropout_p)
    flags, bias = FEAT_IN_VALUE, per_edge.edge_bias
    if bias is None:
        per_edge = per_edge._replace(edge_bias=term) if term is not None else per_edge
    elif negative_slope == 1:
        per_edge = per_edge if term is None else per_edge._replace(edge_bias=bias + term)
    elif term is None:
        flags |= BIAS_AFTER
    else:  # kernels add one term of edges, before the LeakyReLU or after it
        score = _raw(graph, score_src, score_dst, per_edge.edge_gate, term)
        bias = F.leaky_relu(score, negative_slope) + bias
        per_edge, negative_slope = per_edge._replace(edge_bias=bias, edge_gate=None), 1.0
        score_src = score_dst = None
    if score_src is None:
        score_src = value.new_zeros(graph.num_src, heads, dtype=check.acc)
    values, feat, out_bias = for_device(check, value, feat, out_bias)
    tensors = Tensors(values, score_src, score_dst, None, *with_feat(per_edge, feat), out_bias)
    scalars = Numbers(float(negative_slope), 1.0, float(dropout_p), flags)
    out, attention = attend(
        AttentionInputs(graph, "additive", tensors, scalars, return_attention, schedule, sink)
    )
    return check.results(out, attention, dim, return_attention)


# fmt: off
@overload
def gatv2_attention(
    graph: GraphLike, query: Tensor, key: Tensor, att: Tensor, *,
    negative_slope: float = ..., return_attention: Literal[False] = ..., **options: Unpack[EdgeOptions],
) -> Tensor: ...
@overload
def gatv2_attention(
    graph: GraphLike, query: Tensor, key: Tensor, att: Tensor, *,
    negative_slope: float = ..., return_attention: Literal[True], **options: Unpack[EdgeOptions],
) -> AttentionResult: ...
@overload
def gatv2_attention(
    graph: GraphLike, query: Tensor, key: Tensor, att: Tensor, *,
    negative_slope: float = ..., return_attention: bool, **options: Unpack[EdgeOptions],
) -> Tensor | AttentionResult: ...
# fmt: on
@public(EdgeOptions, more=OF_LAYERS)
@batched("query")
def gatv2_attention(
    graph: Any,
    query: Tensor,
    key: Tensor,
    att: Tensor,
    *,
    negative_slope: float = 0.2,
    edge: EdgeTerm | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    **options: Any,
) -> Any:
    r"""Dynamic attention of GATv2 (Brody, Alon and Yahav, ICLR 2022, arXiv 2105.14491).

    .. math::
        s_{ij} = a \cdot \mathrm{LeakyReLU}(q_i + k_j + e_{ij}) + b_{ij}, \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, k_j

    with the dropout mask m_ij in {0, 1 / (1 - p)}. The keys are the values, as in the paper. A destination
    without edges gets 0.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`; its sizes are the rows of key and query.
        query: q [num_dst, H, D], the projected destinations (PyG's ``x_r``, ``lin_r(x)``); float32, float64,
            float16 or bfloat16.
        key: k [num_src, H, D], the projected sources (``x_l``, ``lin_l(x)``), same dtype. With shared weights
            both are one tensor.
        att: the attention vector a [H, D], same dtype.
        negative_slope: of LeakyReLU.
        {options}

    ``edge.key`` is e [E, H, D] or [E, D]. With a Projected, on the CPU in float32 and float64, e is computed
    for some edges at a time, in forward and in derivatives of any order: what is kept of E x H x D are the
    signs of the sums in the score, a byte each. Elsewhere, under autocast, torch.compile and torch.func it is
    projected first.

    Returns:
        out [num_dst, H, D], or an AttentionResult.

    Differentiable as :func:`gat_attention`. Deterministic: the gradient of ``att`` is summed in a fixed
    order, too. No edge-sized tensors beyond those passed in or asked for; raises as
    :func:`gat_attention` does.

    Example::

        query, key = lin_r(x).view(-1, H, D), lin_l(x).view(-1, H, D)
        out = gatv2_attention(edge_index, query, key, att, mask=keep)
    """
    function = "gatv2_attention"
    if type(graph) is not Graph:
        graph = given_graph(function, graph, key, query)
    if edge is None and not return_attention and paths.are_none(options):
        others = att, query
        out = paths.unchecked(graph, "additive_v2", key, others, slope=negative_slope, dropout_p=dropout_p)
        if out is not None:
            return out
    check = Checker(function, graph, "query", query)
    graph = check.graph
    check.tensor("query", query, [(graph.num_dst, None, None)])
    heads, dim = query.shape[1:]
    check.tensor("key", key, [(graph.num_src, heads, dim)])
    check.tensor("att", att, [(heads, dim)])
    check.number("negative_slope", negative_slope)
    term = None if edge is None else given_terms(check, edge, ("key",)).key
    scored = None  # the edges' attributes and projection, if the scores are computed from these
    if term is not None:
        check_term(check, "key", term, heads, dim)
        if isinstance(term, Projected) and edge_scores.takes(graph, query, key, att, *term[:2]):
            if term.bias is not None:
                query = query + term.bias.unflatten(0, (heads, dim))
            scored, term = term, None
        else:
            term = projected(check, term, heads, dim)
    per_edge, sink, schedule, out_bias = check.settings(options, heads, dim, dropout_p)
    src, dst, att, term, out_bias = for_device(check, key, query, att, term, out_bias)
    tensors = Tensors(src, None, dst, att, *with_feat(per_edge, term), out_bias)
    scalars = Numbers(float(negative_slope), 1.0, float(dropout_p), FEAT_IN_KEY)
    inputs = AttentionInputs(graph, "additive_v2", tensors, scalars, return_attention, schedule, sink)
    if scored is None:
        out, attention = attend(inputs)
    else:
        out, attention = edge_scores.attention(inputs, scored.attr, scored.weight)
    return check.results(out, attention, dim, return_attention)


#: Both for calls within the library, whose types do not state `OF_LAYERS` and the function's name.
gat: Any = inner(gat_attention)
gatv2: Any = inner(gatv2_attention)
