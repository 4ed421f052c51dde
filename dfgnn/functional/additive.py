"""Attention with the scores of GAT and GATv2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch.nn.functional as F
from torch import Tensor

from ..engine import pair_scores, unchecked
from ..engine.argument_checks import Checker, for_device, with_feat
from ..engine.given import GraphLike, graph_of
from ..engine.paths import AttentionInputs, attend
from ..graph import Graph
from ..runtime import ops as _ops
from ..runtime.arguments import BIAS_AFTER, FEAT_IN_KEY, FEAT_IN_VALUE, EdgeArgs, Numbers, Tensors
from ..runtime.batches import batched

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """Options of all attention functions, for type checkers, which see what ``return_attention`` returns."""

    edge_mask: Tensor | None
    edge_weight: Tensor | None
    dropout_p: float
    schedule: str
    size: tuple[int, int] | None


class ScoreOptions(Options, total=False):
    out_bias: Tensor | None
    sink: Tensor | None
    negative_slope: float
    edge_bias: Tensor | None
    edge_gate: Tensor | None
    edge_feat: Tensor | None


class GatV2Options(ScoreOptions, total=False):
    edge_attr: Tensor | None
    edge_proj: Tensor | None


class GatOptions(ScoreOptions, total=False):
    bias_after: bool


# fmt: off
@overload
def gat_attention(
    graph: GraphLike, feat: Tensor, alpha_src: Tensor | None, alpha_dst: Tensor | None, *,
    return_attention: Literal[False] = ..., **options: Unpack[GatOptions],
) -> Tensor: ...
@overload
def gat_attention(
    graph: GraphLike, feat: Tensor, alpha_src: Tensor | None, alpha_dst: Tensor | None, *,
    return_attention: Literal[True], **options: Unpack[GatOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gat_attention(
    graph: GraphLike, feat: Tensor, alpha_src: Tensor | None, alpha_dst: Tensor | None, *,
    return_attention: bool, **options: Unpack[GatOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
@batched("feat")
def gat_attention(
    graph: Any,
    feat: Tensor,
    alpha_src: Tensor | None,
    alpha_dst: Tensor | None,
    *,
    negative_slope: float = 0.2,
    edge_bias: Tensor | None = None,
    bias_after: bool = False,
    edge_gate: Tensor | None = None,
    edge_mask: Tensor | None = None,
    edge_weight: Tensor | None = None,
    edge_feat: Tensor | None = None,
    out_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    schedule: str = "auto",
    sink: Tensor | None = None,
    size: tuple[int, int] | None = None,
    _seed: Tensor | None = None,
    _caller: str = "gat_attention",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Additive attention of GAT (Veličković et al., ICLR 2018, arXiv 1710.10903).

    .. math::
        s_{ij} = \mathrm{LeakyReLU}(c_{ij} (\alpha^{src}_j + \alpha^{dst}_i) + b_{ij}), \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, (\mathrm{feat}_j + e_{ij})

    with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0.

    Args:
        graph: the edges, on the device of the tensors: a Graph; or a DGLGraph or an ``edge_index`` [2, E],
            from which the graph is made at the first call and found again as long as that object lives (see
            :meth:`dfgnn.Graph.cached`), with the edges in its order.
        feat: values [num_src, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for
            float64). On CUDA fastest where D is a multiple of 16 bytes; other sizes are padded.
        alpha_src: source term [num_src, H], in feat's dtype or float32; None for 0.
        alpha_dst: destination term [num_dst, H], likewise.
        negative_slope: of LeakyReLU.
        edge_bias: b [E, H], in the order in which the graph's edges were given; in feat's dtype or float32.
        bias_after: add b after LeakyReLU instead of before it.
        edge_gate: c [E] or [E, H], same order and dtypes; multiplies what the two ends give.
        edge_mask: bool [E] or [E, H], same order; where it is False there is no edge, as with an edge_bias
            of -inf. Its weight is 0, which makes NaN of a source value that is not finite.
        edge_weight: w [E] or [E, H], same order and dtypes; multiplies after softmax and is not renormalised.
        edge_feat: e [E, H, D] in feat's dtype, same order; added to the value, as in EdgeGAT.
        out_bias: [H, D] in feat's dtype, added to every row of out: the bias of a layer, without a second
            output that is saved for backward.
        dropout_p: probability of dropping an attention weight. The mask is a function (Philox) of a seed
            drawn from torch's generator of the device, the edge and the head; it is never stored.
        return_attention: also return w m softmax(s), [E, H] in feat's dtype and the given edge order.
        schedule: "auto", or a name from ``dfgnn.plan.SCHEDULES``, which may carry bounds, as in
            "natural<=512 heads<=2" (see there).
        sink: [H], in feat's dtype or float32: one more score of every softmax, which brings no value and
            takes exp(sink) of its mass, so that the weights of a row add up to less than 1. A destination
            without edges still gets 0. With it the gradients of ``create_graph``, torch.func and forward mode
            are plain tensor operations. Not for graphs that several processes share.
        size: (num_src, num_dst) of an ``edge_index``. None: as many as feat and alpha_dst have rows, and
            without alpha_dst as many destinations as sources.

    Returns:
        out [num_dst, H, D], or (out, attention).

    Differentiable in every floating-point tensor, any number of times and in forward mode; under torch.func's
    transforms, too. Third derivatives, second ones that vmap runs over, and forward mode are plain
    tensor operations, with temporaries of E x H x D; all else is fused. The results may be modified in place.
    Deterministic: equal inputs give bitwise equal results, whatever ``torch.use_deterministic_algorithms``
    says (but third derivatives and forward mode on CUDA, which follow it). Memory beyond inputs, outputs and
    gradients is O(N H D); edge-sized tensors exist only where one is passed in or asked for (edge_gate, and a
    loss over the returned attention, take one [E, H] more in backward).

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, device, shape or range.
        RuntimeError: CUDA tensors without CUDA support in this installation.
    """
    if type(graph) is not Graph or size is not None:
        graph = graph_of(_caller, graph, size, feat, alpha_dst)
    if (
        edge_bias is edge_gate is edge_mask is edge_weight is edge_feat is out_bias is sink is _seed is None
        and schedule == "auto"
        and not return_attention
        and alpha_src is not None
        and alpha_dst is not None
    ):
        given = feat, alpha_src, alpha_dst, None
        out = unchecked.attention(graph, "additive", given, slope=negative_slope, dropout_p=dropout_p)
        if out is not None:
            return out
    check = Checker(_caller, graph, "feat", feat)
    graph = check.graph
    check.tensor("feat", feat, [(graph.num_src, None, None)])
    check.number("negative_slope", negative_slope)
    heads, dim = feat.shape[1:]
    alpha_types = (check.dtype, check.acc)
    if alpha_src is None:
        alpha_src = feat.new_zeros(graph.num_src, heads, dtype=check.acc)
    else:
        check.tensor("alpha_src", alpha_src, [(graph.num_src, heads)], alpha_types)
        alpha_src = _ops.as_type(alpha_src, check.acc)
    if alpha_dst is not None:
        check.tensor("alpha_dst", alpha_dst, [(graph.num_dst, heads)], alpha_types)
        alpha_dst = _ops.as_type(alpha_dst, check.acc)
    edge = EdgeArgs(edge_bias, edge_gate, edge_mask, edge_weight, edge_feat, _seed)
    edge = check.options(edge, heads, dim, out_bias, dim, dropout_p)
    sink = check.sink(sink, heads)
    values, edge_feat, out_bias = for_device(check, feat, edge.edge_feat, out_bias)
    tensors = Tensors(values, alpha_src, alpha_dst, None, *with_feat(edge, edge_feat), out_bias)
    flags = FEAT_IN_VALUE | BIAS_AFTER * bool(bias_after)
    scalars = Numbers(float(negative_slope), 1.0, float(dropout_p), flags)
    inputs = AttentionInputs(graph, "additive", tensors, scalars, return_attention, schedule, sink)
    out, attention = attend(inputs)
    return check.results(out, attention, dim, return_attention)


# fmt: off
@overload
def gatv2_attention(
    graph: GraphLike, x_src: Tensor, x_dst: Tensor, attn: Tensor, *,
    return_attention: Literal[False] = ..., **options: Unpack[GatV2Options],
) -> Tensor: ...
@overload
def gatv2_attention(
    graph: GraphLike, x_src: Tensor, x_dst: Tensor, attn: Tensor, *,
    return_attention: Literal[True], **options: Unpack[GatV2Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def gatv2_attention(
    graph: GraphLike, x_src: Tensor, x_dst: Tensor, attn: Tensor, *,
    return_attention: bool, **options: Unpack[GatV2Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
@batched("x_src")
def gatv2_attention(
    graph: Any,
    x_src: Tensor,
    x_dst: Tensor,
    attn: Tensor,
    *,
    negative_slope: float = 0.2,
    edge_feat: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_proj: Tensor | None = None,
    edge_bias: Tensor | None = None,
    edge_gate: Tensor | None = None,
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
    r"""Dynamic attention of GATv2 (Brody, Alon and Yahav, ICLR 2022, arXiv 2105.14491).

    .. math::
        s_{ij} = c_{ij} \, a \cdot \mathrm{LeakyReLU}(x^{src}_j + x^{dst}_i + e_{ij}) + b_{ij}, \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, x^{src}_j

    with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0.

    Args:
        graph: the edges, on the device of the tensors: a Graph, a DGLGraph or an ``edge_index``, as in
            :func:`gat_attention`.
        x_src: projected sources [num_src, H, D]; float32, float64, float16 or bfloat16.
        x_dst: projected destinations [num_dst, H, D], same dtype.
        attn: the attention vector a [H, D], same dtype.
        negative_slope: of LeakyReLU.
        edge_feat: e [E, H, D], same dtype, in the order in which the graph's edges were given.
        edge_attr: x [E, d], same dtype, same order, instead of edge_feat: e_ij = edge_proj x_ij. On the CPU,
            in float32 and float64, e is computed for some edges at a time, in forward and in derivatives of
            any order: what is kept of E x H x D are the signs of the sums in the score, a byte each.
            Elsewhere, under autocast, torch.compile and torch.func it is projected first.
        edge_proj: [H D, d], same dtype, as the weight of a Linear layer.
        edge_bias, edge_gate, edge_mask, edge_weight, out_bias, dropout_p, return_attention, schedule, sink:
            as in :func:`gat_attention`.
        size: (num_src, num_dst) of an ``edge_index``. None: as many as x_src and x_dst have rows.

    Returns:
        out [num_dst, H, D], or (out, attention [E, H]).

    Differentiable as :func:`gat_attention`. Deterministic: the gradient of ``attn`` is summed in a fixed
    order, too. No edge-sized tensors beyond those passed in or asked for; raises as
    :func:`gat_attention` does.
    """
    if type(graph) is not Graph or size is not None:
        graph = graph_of("gatv2_attention", graph, size, x_src, x_dst)
    if (
        edge_bias is edge_gate is edge_mask is edge_weight is edge_feat is edge_attr is edge_proj is None
        and out_bias is sink is _seed is None
        and schedule == "auto"
        and not return_attention
    ):
        given = x_src, None, x_dst, attn
        out = unchecked.attention(graph, "additive_v2", given, slope=negative_slope, dropout_p=dropout_p)
        if out is not None:
            return out
    check = Checker("gatv2_attention", graph, "x_src", x_src)
    graph = check.graph
    check.tensor("x_src", x_src, [(graph.num_src, None, None)])
    heads, dim = x_src.shape[1:]
    check.tensor("x_dst", x_dst, [(graph.num_dst, heads, dim)])
    check.tensor("attn", attn, [(heads, dim)])
    check.number("negative_slope", negative_slope)
    projects = edge_attr is not None or edge_proj is not None
    if projects:
        edge_feat = _projected(check, edge_feat, edge_attr, edge_proj, (x_src, x_dst, attn))
    edge = EdgeArgs(edge_bias, edge_gate, edge_mask, edge_weight, edge_feat, _seed)
    edge = check.options(edge, heads, dim, out_bias, dim, dropout_p)
    sink = check.sink(sink, heads)
    src, dst, attn, edge_feat, out_bias = for_device(check, x_src, x_dst, attn, edge.edge_feat, out_bias)
    tensors = Tensors(src, None, dst, attn, *with_feat(edge, edge_feat), out_bias)
    scalars = Numbers(float(negative_slope), 1.0, float(dropout_p), FEAT_IN_KEY)
    inputs = AttentionInputs(graph, "additive_v2", tensors, scalars, return_attention, schedule, sink)
    if projects and edge_feat is None:
        out, attention = pair_scores.attention(inputs, edge_attr, edge_proj)  # type: ignore[arg-type]
    else:
        out, attention = attend(inputs)
    return check.results(out, attention, dim, return_attention)


def _projected(check: Checker, edge_feat, edge_attr, edge_proj, tensors) -> Tensor | None:
    """edge_proj edge_attr [E, H, D]; None where the scores are computed without it."""
    if edge_feat is not None:
        raise check.error(ValueError, "edge_attr", "None beside edge_feat", "both")
    heads, dim = tensors[0].shape[1:]
    check.tensor("edge_attr", edge_attr, [(check.graph.num_edges, None)])
    check.tensor("edge_proj", edge_proj, [(heads * dim, edge_attr.shape[1])])
    if edge_attr.shape[1] and pair_scores.takes(check.graph, *tensors, edge_attr, edge_proj):
        return None
    return F.linear(check.in_use(edge_attr), edge_proj).unflatten(1, (heads, dim))
