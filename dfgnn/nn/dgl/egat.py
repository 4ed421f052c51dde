"""EGATConv with DGL's contract."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import functional
from ...engine import plain as _plain
from ...engine.edge_maps import rows_of_destinations, rows_of_sources, sum_of_edges
from ...graph import Graph
from ...runtime import eager as _eager
from .._base import GraphLayer, add_bias, as_pair, check_edge_rows, check_per_edge, renamed, xavier, zero
from .._errors import projected
from .._graph import names_of_ends, rows_in_use, split_ends
from .._linear import is_product


class EGATConv(GraphLayer):
    r"""Graph attention layer that updates edge features, too (Kamiński et al., "Rossmann-Toolbox", 2021).

    .. math::
        f_{ij} = \mathrm{LeakyReLU}(W_{ni} h_j + W_{nj} h_i + W_{fij} e_{ij} + b), \qquad
        h_i' = \sum_j \mathrm{softmax}_j(a^T f_{ij}) \, W h_j

    per head, over the edges j -> i, with a slope of 0.01. A drop-in for ``dgl.nn.EGATConv``; there,
    ``bias=False`` raises.

    Args:
        in_node_feats: size of the node features, or a pair for sources and destinations.
        in_edge_feats: size of the edge features.
        out_node_feats: size of the nodes' output per head (D).
        out_edge_feats: size of the edges' output per head (D_e).
        num_heads: number of heads (H).
        bias: learn the additive bias b.
        allow_zero_in_degree: let destinations without in-edges through; their output is 0.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn.dgl import EGATConv

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        conv = EGATConv(16, 5, 8, 6, num_heads=4)
        nfeats, efeats = torch.randn(100, 16), torch.randn(graph.num_edges, 5)
        out, edges = conv(graph, nfeats, efeats)  # [100, 4, 8], [700, 4, 6]
    """

    attention: Any = staticmethod(functional.gat.gat)

    bias: Tensor | None

    # DGL's EGATConv always refuses graphs with in-degree 0, and so its instances lack this attribute. One
    # that becomes this class by assignment of `__class__` finds it here.
    _allow_zero_in_degree = False
    num_heads = renamed("_num_heads")
    out_node_feats = renamed("_out_node_feats")
    out_edge_feats = renamed("_out_edge_feats")

    def __init__(
        self,
        in_node_feats: int | tuple[int, int],
        in_edge_feats: int,
        out_node_feats: int,
        out_edge_feats: int,
        num_heads: int,
        bias: bool = True,
        allow_zero_in_degree: bool = False,
    ):
        nn.Module.__init__(self)
        self._num_heads = num_heads
        self._in_src_node_feats, self._in_dst_node_feats = src_feats, dst_feats = as_pair(in_node_feats)
        self._out_node_feats = out_node_feats
        self._out_edge_feats = out_edge_feats
        if allow_zero_in_degree:
            self.allow_zero_in_degree = True
        edge_width = num_heads * out_edge_feats
        self.fc_node_src = nn.Linear(src_feats, num_heads * out_node_feats, bias=False)
        self.fc_ni = nn.Linear(src_feats, edge_width, bias=False)
        self.fc_nj = nn.Linear(dst_feats, edge_width, bias=False)
        self.fc_fij = nn.Linear(in_edge_feats, edge_width, bias=False)
        self.attn = nn.Parameter(torch.empty(1, num_heads, out_edge_feats))
        add_bias(self, bias, edge_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier normal with gain sqrt(2) for projections and attention vector, zero for the bias."""
        projections = (self.fc_node_src, self.fc_ni, self.fc_fij, self.fc_nj)
        xavier(*(fc.weight for fc in projections), self.attn)
        zero(self.bias)

    def forward(
        self,
        graph: Any,
        nfeats: Tensor | tuple[Tensor, Tensor],
        efeats: Tensor,
        edge_weight: Tensor | None = None,
        get_attention: bool = False,
    ) -> tuple[Tensor, ...]:
        """Apply the layer.

        Args:
            graph, nfeats, get_attention: as graph, feat, get_attention in :meth:`GATConv.forward`.
            efeats: ``[E, *, F_e]``, in edge-id order.
            edge_weight: ``[E]``, multiplied into the attention weights after softmax; or None.

        Returns:
            ``[N_dst, *, H, D]`` and ``[E, *, H, D_e]``, and with ``get_attention`` also ``[E, *, H, 1]``: the
            weights that the features were multiplied with. Edge tensors are in edge-id order.
        """
        fused = self._graph(graph)
        h_src, h_dst = split_ends(self, fused, nfeats, None, "nfeats")
        prefix = h_src.shape[1:-1]
        check_edge_rows(self, "efeats", efeats, self.fc_fij, fused, prefix)
        efeats = rows_in_use(fused, efeats)
        shapes = (fused.num_edges,), (fused.num_edges, prefix.numel() * self.num_heads)
        check_per_edge(self, "edge_weight", edge_weight, shapes)
        source, destination = names_of_ends("nfeats", nfeats)
        ends = projected(self, source, self.fc_ni, h_src), projected(self, destination, self.fc_nj, h_dst)
        f = add_ends(fused, self._edge_term(efeats).flatten(1), *(x.flatten(1) for x in ends))
        f = F.leaky_relu_(f).unflatten(1, (*prefix, self.num_heads, self.out_edge_feats))
        score = self._score(f).flatten(1)
        feat = self.fc_node_src(h_src).unflatten(-1, (self.num_heads, self.out_node_feats)).flatten(1, -2)
        # The score, which contains the terms of both nodes, is the edge bias; the sources' own terms are 0.
        result = self.attention(
            fused,
            feat,
            None,
            None,
            negative_slope=1.0,
            bias=score,
            weight=edge_weight,
            return_attention=get_attention,
        )
        heads = (*prefix, self.num_heads)
        if not get_attention:
            return result.unflatten(1, heads), f
        out, attention = result
        return out.unflatten(1, heads), f, attention.unflatten(1, heads).unsqueeze(-1)

    def _edge_term(self, efeats: Tensor) -> Tensor:
        """W e + b as a new tensor, to which the terms of both nodes are added in place."""
        if is_product(self.fc_fij):
            return F.linear(efeats, self.fc_fij.weight, self.bias)
        term = self.fc_fij(efeats)
        return term.clone() if self.bias is None else term + self.bias

    def _score(self, f: Tensor) -> Tensor:
        """<f, attn> per head, ``[E, *, H]``."""
        if f.dtype != self.attn.dtype:  # under autocast, where this sum is taken in float32
            return (f * self.attn).sum(-1)
        # One product of [E, H D_e] with the block-diagonal matrix of all heads' vectors [H, H D_e]: unlike
        # f * attn it makes no temporary of E x H x D_e.
        return F.linear(f.flatten(-2), torch.block_diag(*self.attn[0]))


# Device type -> how many elements a step of `_AddEnds` gathers. On the CPU a step fits into the cache, and
# all steps are several times as fast as one gather of all edges; a GPU needs enough elements to be busy.
_STEP = {"cpu": 1 << 20, "cuda": 1 << 24}


def add_ends(graph: Graph, rows: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """rows[e] + src[j] + dst[i] for every edge e from j to i. Unless a compiler or a transform is active, it
    overwrites ``rows``.

    rows: [E, D].  src: [N_src, D].  dst: [N_dst, D]. Gradients are deterministic, unlike those of indexing.
    """
    # A compiler fuses the additions with what follows; on meta there is nothing to add.
    if torch.compiler.is_compiling() or rows.is_meta:
        return rows + rows_of_sources(graph, src) + rows_of_destinations(graph, dst)
    if _eager.transformed(rows, src, dst):
        j, i = _plain.ends_of(graph).edge_index
        return rows + src[j] + dst[i]
    return _AddEnds.apply(rows, src, dst, graph)


class _AddEnds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, src, dst, graph):
        ctx.graph = graph
        ctx.mark_dirty(rows)
        step = max(1, _STEP[rows.device.type] // max(1, rows.shape[1]))
        for part, j, i in zip(rows.split(step), *(ends.split(step) for ends in graph.edge_index)):
            part += src.index_select(0, j)
            part += dst.index_select(0, i)
        return rows

    @staticmethod
    def backward(ctx, grad):
        sums = [
            sum_of_edges(ctx.graph, grad, reverse) if needed else None
            for needed, reverse in zip(ctx.needs_input_grad[1:3], (True, False))
        ]
        return grad, *sums, None
