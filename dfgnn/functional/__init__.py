"""Fused graph attention: SDDMM, edge softmax and SpMM in one pass per direction, without edge tensors.

Notation: j -> i is an edge from source j to destination i; H heads; softmax runs over the in-edges of i. Each
function has a plain-PyTorch twin of the same name in :mod:`dfgnn.reference`.

**Graphs.** The first argument is a :class:`dfgnn.Graph`. It may be a DGLGraph (DGL's, or that of
:mod:`dfgnn.compat`) or an ``edge_index`` [2, E]: the graph is then made at the first call, cached as long as
that object lives, and made anew when the tensor was rewritten, as the layers do it. An ``edge_index`` does
not say how many nodes there are; the rows of the tensors do. Where they do not, make a Graph:
``Graph.from_edge_index(edge_index, num_src=..., num_dst=...)``.

**Edges.** What lies on edges is in the order in which the graph's edges were given: ``bias`` is added to the
scores, ``mask`` says which edges take part, ``weight`` multiplies after the softmax, and ``edge``, an
:class:`EdgeTerm`, is what edges add to keys, values or GAT's scores, as tensors or :class:`Projected`.

**Batches on one graph.** All but :func:`edge_softmax` take B sets of features at a time: features of nodes
with a dimension in front, ``[B, N, H, D]``, which the results have, too. The sets are further heads of one
call, so that the graph is read once. Other tensors have this dimension, too, ``[B, N, H]`` or ``[B, E, H]``
say, or are alike for all sets. A tensor of one scalar per edge that differs between sets is ``[B, E, 1]``;
a :class:`Projected` is alike for all. (:func:`edge_softmax` takes any
dimensions behind the edges.) Sets that lie behind the nodes, ``[N, B, H, D]``, are heads as they are:
``flatten(1, 2)``.
"""

from ..runtime.attention_options import AttentionResult, EdgeProductResult, EdgeTerm, Projected
from .blocks import block_attention
from .dot import agnn_attention, dot_attention
from .flex import flex_attention
from .gat import gat_attention, gatv2_attention
from .pieces import edge_softmax, sddmm, spmm
from .products import edge_product_attention
from .score import score_attention

__all__ = [
    "AttentionResult",
    "EdgeProductResult",
    "EdgeTerm",
    "Projected",
    "agnn_attention",
    "block_attention",
    "dot_attention",
    "edge_product_attention",
    "edge_softmax",
    "flex_attention",
    "gat_attention",
    "gatv2_attention",
    "score_attention",
    "sddmm",
    "spmm",
]
