"""Attention with scores that are dot products."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..engine import edge_arguments as _edges
from ..engine import edge_projection, unchecked
from ..engine.argument_checks import Checker, for_device, with_feat
from ..engine.given import GraphLike, edges_as_sources, graph_of
from ..engine.paths import AttentionInputs, attend
from ..graph import Graph
from ..runtime.arguments import BIAS_AFTER, FEAT_IN_KEY, EdgeArgs, Numbers, Tensors
from ..runtime.batches import batched
from .additive import GatOptions, Options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AgnnOptions(Options, total=False):
    beta: float | Tensor


class DotOptions(GatOptions, total=False):
    scale: float | None
    key_at: str
    edge_feat_in: str
    edge_feat_value: Tensor | None
    edge_attr: Tensor | None
    edge_proj: Tensor | None
    edge_proj_bias: Tensor | None
    edge_proj_value: Tensor | None
    edge_proj_bias_value: Tensor | None


# fmt: off
@overload
def dot_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, *,
    return_attention: Literal[False] = ..., **options: Unpack[DotOptions],
) -> Tensor: ...
@overload
def dot_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, *,
    return_attention: Literal[True], **options: Unpack[DotOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def dot_attention(
    graph: GraphLike, query: Tensor, key: Tensor, value: Tensor, *,
    return_attention: bool, **options: Unpack[DotOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
@batched("query")
def dot_attention(
    graph: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    negative_slope: float = 1.0,
    edge_bias: Tensor | None = None,
    bias_after: bool = False,
    edge_gate: Tensor | None = None,
    edge_mask: Tensor | None = None,
    edge_weight: Tensor | None = None,
    edge_feat: Tensor | None = None,
    edge_feat_in: str = "both",
    edge_feat_value: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_proj: Tensor | None = None,
    edge_proj_bias: Tensor | None = None,
    edge_proj_value: Tensor | None = None,
    edge_proj_bias_value: Tensor | None = None,
    out_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    schedule: str = "auto",
    key_at: str = "nodes",
    sink: Tensor | None = None,
    size: tuple[int, int] | None = None,
    _seed: Tensor | None = None,
    _caller: str = "dot_attention",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Dot-product attention over a graph (Graph Transformer: Dwivedi and Bresson 2020, arXiv 2012.09699).

    .. math::
        s_{ij} = \mathrm{scale} \; c_{ij} \; q_i \cdot (k_j + e_{ij}) + b_{ij}, \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, (v_j + e^v_{ij})

    with e^v = e unless the two are given apart, and the dropout mask m_ij in {0, 1 / (1 - p)}. A destination
    without edges gets 0.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`.
        query: [num_dst, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for
            float64).
        key: [num_src, H, D], same dtype.
        value: [num_src, H, Dv], same dtype; Dv may differ from D. On CUDA fastest where D = Dv is a multiple
            of 16 bytes; other sizes are padded.
        scale: factor of the dot product; None for 1 / sqrt(D).
        negative_slope: of a LeakyReLU around the score (SuperGAT's SD attention); 1 for none.
        edge_feat: e [E, H, D], or [E, D] alike for all heads, same dtype, in the order in which the graph's
            edges were given.
        edge_feat_in: what e is added to: "key", "value" or "both" (TransformerConv). The value then is of
            size D, or e of size Dv where it is added to the value alone.
        edge_feat_value: e^v [E, H, Dv] or [E, Dv], where the value's feature is another than the key's, which
            edge_feat is then (None: 0).
        edge_attr: x [E, d], same dtype, same order, instead of edge_feat: e_ij = edge_proj x_ij +
            edge_proj_bias. The projection is folded into the attention, so that no E x H x D tensor exists:
            of edge size are [E, H] scores and weights, and their gradients. For any d, also above D: what it
            takes per edge are H d multiplications in place of H D d. Of edges of T kinds x may be unit
            vectors, ``F.one_hot(kind, T)``, and a column of edge_proj the feature of a kind.
        edge_proj: [H D, d], same dtype, as the weight of a Linear layer; with edge_feat_in="value" [H Dv, d].
        edge_proj_bias: [H D] likewise, or None.
        edge_proj_value, edge_proj_bias_value: [H Dv, d] and [H Dv] or None, where e^v is another projection
            of x (QCNet, HiVT, SMART); edge_proj and edge_proj_bias are then the key's (None: 0).
        edge_bias, bias_after, edge_gate, edge_mask, edge_weight: as in :func:`gat_attention`.
        out_bias, dropout_p, return_attention, schedule, sink: likewise.
        key_at: "edges": key and value have a row per edge, [E, H, D] and [E, H, Dv] in the order of the
            edges, and the queries alone lie at nodes. Edge e then is its own source; the graph of that is
            cached with the given one.
        size: (num_src, num_dst) of an ``edge_index``. None: as many as key and query have rows; with keys at
            edges as many destinations as query has, and no fewer sources.

    Returns:
        out [num_dst, H, Dv], or (out, attention [E, H]).

    Differentiable, deterministic, and without edge-sized tensors beyond those passed in or asked for, like
    :func:`gat_attention`, but for [E, H] with edge_feat_value, edge_feat [E, D] or edge_attr;
    raises as it does.

    Example, with relative positions r of which key and value have projections of their own::

        key_of, value_of = torch.nn.Linear(128, H * D), torch.nn.Linear(128, H * D)
        out = dot_attention(
            graph, q, k, v, edge_attr=r, edge_proj=key_of.weight, edge_proj_bias=key_of.bias,
            edge_proj_value=value_of.weight, edge_proj_bias_value=value_of.bias,
        )
    """
    if type(graph) is not Graph or size is not None:
        graph = graph_of(_caller, graph, size, None if key_at == "edges" else key, query)
    if key_at != "nodes":
        graph = edges_as_sources(_caller, graph, key_at)
    if (
        edge_bias is edge_gate is edge_mask is edge_weight is edge_feat is out_bias is sink is _seed is None
        and edge_feat_value is edge_attr is edge_proj is edge_proj_bias is None
        and edge_proj_value is edge_proj_bias_value is None
        and schedule == "auto"
        and edge_feat_in == "both"
        and not return_attention
    ):
        out = unchecked.attention(
            graph, "dot", (value, key, query, None), slope=negative_slope, scale=scale, dropout_p=dropout_p
        )
        if out is not None:
            return out
    check = Checker(_caller, graph, "query", query)
    graph = check.graph
    check.tensor("query", query, [(graph.num_dst, None, None)])
    heads, dim = query.shape[1:]
    if key_at == "nodes" and _per_edge(key, graph):
        raise check.error(
            ValueError, "key", f"shape [{graph.num_src}, {heads}, {dim}]",
            f'{list(key.shape)}; key_at="edges" is for keys and values with a row per edge',
        )  # fmt: skip
    check.tensor("key", key, [(graph.num_src, heads, dim)])
    scale = 1 / math.sqrt(dim) if scale is None else scale
    check.number("scale", scale)
    check.number("negative_slope", negative_slope)
    given = _edges.EdgeGiven(
        *(edge_feat_in, edge_feat, edge_feat_value, edge_attr),
        *(edge_proj, edge_proj_value, edge_proj_bias, edge_proj_bias_value),
        bias_after,
    )
    check.tensor("value", value, [(graph.num_src, heads, _edges.value_size(check, given, dim))])
    value_dim = value.shape[2]
    own, feat_flags, terms, key_bias, value_bias = _edges.sort_out(check, given, heads, dim, value_dim)
    own_dim = dim if feat_flags & FEAT_IN_KEY else value_dim
    edge = EdgeArgs(edge_bias, edge_gate, edge_mask, edge_weight, own, _seed)
    edge = check.options(edge, heads, own_dim, out_bias, value_dim, dropout_p)
    key = key if key_bias is None else key + key_bias
    value = value if value_bias is None else value + value_bias
    sink = check.sink(sink, heads)
    dst, src, values, own, out_bias = for_device(check, query, key, value, edge.edge_feat, out_bias)
    scalars = Numbers(
        float(negative_slope), float(scale), float(dropout_p), feat_flags | BIAS_AFTER * bool(bias_after)
    )
    tensors = Tensors(values, src, dst, None, *with_feat(edge, own), out_bias)
    inputs = AttentionInputs(graph, "dot", tensors, scalars, return_attention, schedule, sink, terms)
    out, attention = (attend if terms is None else edge_projection.attention)(inputs)
    return check.results(out, attention, value_dim, return_attention)


# fmt: off
@overload
def agnn_attention(
    graph: GraphLike, x_src: Tensor, x_dst: Tensor | None = ..., *,
    return_attention: Literal[False] = ..., **options: Unpack[AgnnOptions],
) -> Tensor: ...
@overload
def agnn_attention(
    graph: GraphLike, x_src: Tensor, x_dst: Tensor | None = ..., *,
    return_attention: Literal[True], **options: Unpack[AgnnOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def agnn_attention(
    graph: GraphLike, x_src: Tensor, x_dst: Tensor | None = ..., *,
    return_attention: bool, **options: Unpack[AgnnOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
@batched("x_src")
def agnn_attention(
    graph: Any,
    x_src: Tensor,
    x_dst: Tensor | None = None,
    *,
    beta: float | Tensor = 1.0,
    edge_mask: Tensor | None = None,
    edge_weight: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    schedule: str = "auto",
    size: tuple[int, int] | None = None,
    _seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Cosine attention of AGNN (Thekumparampil et al. 2018, arXiv 1803.03735).

    .. math::
        s_{ij} = \beta \cos(x^{dst}_i, x^{src}_j), \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, x^{src}_j

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`.
        x_src: [num_src, H, D]; float32, float64, float16 or bfloat16.
        x_dst: [num_dst, H, D], same dtype; None: x_src, for a graph with num_src = num_dst.
        beta: a number, or a tensor that broadcasts against [num_dst, H, D], such as the learned [1].
        edge_mask, edge_weight, dropout_p, return_attention, schedule: as in :func:`gat_attention`.
        size: (num_src, num_dst) of an ``edge_index``. None: as many as x_src and x_dst have rows.

    Returns:
        out [num_dst, H, D], or (out, attention [E, H]).

    Differentiable in x_src, x_dst, beta and edge_weight; raises as :func:`gat_attention` does.
    """
    if type(graph) is not Graph or size is not None:
        graph = graph_of("agnn_attention", graph, size, x_src, x_dst)
    check = Checker("agnn_attention", graph, "x_src", x_src)
    graph = check.graph
    check.tensor("x_src", x_src, [(graph.num_src, None, None)])
    if x_dst is None and graph.num_dst != graph.num_src:
        raise check.error(ValueError, "x_dst", f"a tensor, as num_dst = {graph.num_dst} is not num_src", None)
    if x_dst is not None:
        check.tensor("x_dst", x_dst, [(graph.num_dst, *x_src.shape[1:])])
    if not isinstance(beta, (Tensor, numbers.Real)):
        raise check.error(TypeError, "beta", "a number or a tensor", type(beta).__name__)
    wanted = (graph.num_dst, *x_src.shape[1:])
    if isinstance(beta, Tensor) and not _broadcasts(beta.shape, wanted):
        raise check.error(
            ValueError, "beta", f"a shape that broadcasts against {list(wanted)}", list(beta.shape)
        )
    # Cast back, because under autocast on a GPU `normalize` returns float32.
    key = torch.nn.functional.normalize(x_src, dim=-1).to(x_src.dtype)
    query = key if x_dst is None else torch.nn.functional.normalize(x_dst, dim=-1).to(x_src.dtype)
    query = (beta * query).to(x_src.dtype)
    return dot_attention(  # type: ignore[call-overload]
        graph, query, key, x_src, scale=1.0, edge_mask=edge_mask, edge_weight=edge_weight,
        dropout_p=dropout_p, return_attention=return_attention, schedule=schedule, _seed=_seed,
        _caller="agnn_attention",
    )  # fmt: skip


def _per_edge(x: Any, graph: Any) -> bool:
    """Whether x has a row per edge, and so none per source."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] == graph.num_src:
        return False  # before num_edges is read, whose value may be unknown while a compiler records
    return x.shape[0] == graph.num_edges


def _broadcasts(shape, wanted) -> bool:
    """Whether a tensor of this shape expands to the wanted one."""
    return len(shape) <= len(wanted) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(wanted)))
