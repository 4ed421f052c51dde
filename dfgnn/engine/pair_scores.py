"""GATv2's scores of edges whose attributes x_e are projected, without a tensor of E x H x D numbers.

    score_e = sum_d a_d L(m_d),    m = u_j + v_i + W x_e  for an edge e = (j -> i) and a head

L is LeakyReLU, d a column of the head, a (``attn``) the attention vector, u (``src``) and v (``dst``) are
rows of nodes, x is ``attr``, W ``proj``, and ``positive`` says where m > 0.

LeakyReLU acts on every column of W x_e, so the projection cannot be folded into the nodes' rows, as that of
dot products is (`edge_projection`). But L(m) = sigma m with a slope sigma that is constant almost everywhere.
Given sigma, of which a byte per column says whether it is 1, scores are linear in each of u, v, x, W and a,
and derivatives of any order consist of two products, each the transpose of the other
(csrc/core/pair_scores.h): scores with given slopes (`_Linear`), and sums over edges of a scalar per edge
times its slopes (`_Sums`). Both compute W x_e, or what W^T is multiplied with, for a block of edges at a
time.

`attention` adds the scores as an edge bias to an attention without other scores, which knows every option.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..runtime import eager as _eager
from ..runtime import rules
from ..runtime.arguments import Numbers
from ..runtime.rules import Rule
from . import operators, paths
from .paths import AttentionInputs, attend

#: The columns of a head are padded to a multiple of this: the width of the kernels' narrowest vector.
_COLUMNS = 4


class _Rule(Rule):
    __slots__ = "graph", "slope"

    def __init__(self, graph: Graph, slope: float):
        self.graph, self.slope = graph, slope


class _Scores(_Rule):
    """Computes (scores [E, H], where m > 0 [E, H, D])."""

    __slots__ = ()

    def forward(self, src, dst, attn, attr, proj):
        return operators.pair_scores(self.graph, src, dst, attn, attr, proj, None, self.slope)

    def saved(self, tensors, results):
        return *tensors, results[1]

    def gradients(self, need, saved, grad, _=None):
        src, dst, attn, attr, proj, positive = saved
        if grad is None:
            return (None,) * 5
        shape = attn.shape
        weighted = attn.reshape(-1, 1) * proj if need[3] else None
        attr_given = attr if need[2] or need[4] else None
        of_src, of_dst, of_attr, of_proj = rules.apply(
            _Sums(self.graph, self.slope), grad, positive, attr_given, weighted
        )
        of_attn = None
        if need[2]:
            # The gradient of a is sum_e grad_e sigma_e m_e, with a sum for each term of m: W x_e, u_j, v_i.
            of_attn = (proj * of_proj).sum(1).view(shape)
            of_attn = of_attn + (src * of_src).sum(0) + (dst * of_dst).sum(0)
        return (
            attn * of_src if need[0] else None,
            attn * of_dst if need[1] else None,
            of_attn,
            of_attr,
            attn.reshape(-1, 1) * of_proj if need[4] else None,
        )


class _Linear(_Rule):
    """Computes scores with a = 1 and given slopes. src, dst: [N, H, D]; attr, proj: both or none."""

    __slots__ = ()

    def forward(self, positive, src, dst, attr, proj):
        return operators.pair_scores(self.graph, src, dst, None, attr, proj, positive, self.slope)[0]

    def gradients(self, need, saved, grad):
        positive, _, _, attr, proj = saved
        of_src, of_dst, of_attr, of_proj = rules.apply(
            _Sums(self.graph, self.slope), grad, positive, attr, proj
        )
        return None, of_src, of_dst, of_attr, of_proj


class _Sums(_Rule):
    """Computes, with s_e = weight_e sigma_e [H, D]: the sums of s_e over the edges of each source and of each
    destination, [N, H, D]; W^T s_e of each edge [E, d], or None without W; and sum_e s_e x_e^T [H D, d], or
    None without x."""

    __slots__ = ()

    def forward(self, weight, positive, attr, proj):
        return operators.pair_sums(self.graph, weight, positive, attr, proj, self.slope)

    def gradients(self, need, saved, of_src, of_dst, of_attr, of_proj):
        weight, positive, attr, proj = saved
        call = self.graph, self.slope
        # The gradient of weight_e is sigma_e . (of_src_j + of_dst_i + of_proj x_e + W of_attr_e).
        pairs = [(x, w) for x, w in ((attr, of_proj), (of_attr, proj)) if x is not None and w is not None]
        if not pairs:
            joined = None, None
        else:
            joined = pairs[0] if len(pairs) == 1 else tuple(torch.cat(x, 1) for x in zip(*pairs))
        of_weight = None
        if need[0] and (pairs or of_src is not None or of_dst is not None):
            of_weight = rules.apply(_Linear(*call), positive, of_src, of_dst, *joined)
        of_given: Any = (None, None)
        if of_proj is not None and need[2] or of_attr is not None and need[3]:
            _, _, *of_given = rules.apply(
                _Sums(*call), weight, positive, of_attr if need[3] else None, of_proj if need[2] else None
            )
        return of_weight, None, *of_given


def takes(graph: Any, *tensors: Tensor | None) -> bool:
    """Whether these operators compute the scores: for eager calls on the CPU, in float32 and float64."""
    like = tensors[0]
    assert like is not None
    return (
        like.device.type == "cpu"
        and like.dtype in (torch.float32, torch.float64)
        and type(graph) is Graph
        and graph.edge_mask is None
        and not torch.compiler.is_compiling()
        and not _eager.in_plain_operations()
        and not torch.is_autocast_enabled("cpu")
        and not _eager.transformed(*(x for x in tensors if x is not None))
    )


def attention(inputs: AttentionInputs, attr: Tensor, proj: Tensor) -> tuple[Tensor, Any]:
    """(out, attention) of GATv2 with projected attributes, as of `paths.attend`. attr: [E, d]; proj:
    [H D, d]."""
    tensors, numbers = inputs.tensors, inputs.numbers
    src, dst, attn = tensors.value, tensors.dst, tensors.attn
    assert dst is not None and attn is not None
    heads, dim = attn.shape
    rows, padding = src, -dim % _COLUMNS
    if padding:
        rows, dst, attn = (torch.nn.functional.pad(x, (0, padding)) for x in (src, dst, attn))
        proj = torch.nn.functional.pad(proj.unflatten(0, (heads, dim)), (0, 0, 0, padding)).flatten(0, 1)
    if paths.recorder is not None:
        paths.recorder.took("edge projection", paths.describe("additive_v2", src))
    score, _ = rules.apply(_Scores(inputs.graph, numbers.negative_slope), rows, dst, attn, attr, proj)
    if tensors.edge_gate is not None:
        score = score * tensors.edge_gate
    if tensors.edge_bias is not None:
        score = score + tensors.edge_bias
    ends = src.new_zeros(src.shape[:2])  # additive score terms of 0: the bias is the whole score
    rest = tensors._replace(src=ends, dst=None, attn=None, edge_bias=score, edge_gate=None)
    plain = Numbers(1.0, 1.0, numbers.dropout_p, 0)
    return attend(inputs._replace(score="additive", tensors=rest, numbers=plain))
