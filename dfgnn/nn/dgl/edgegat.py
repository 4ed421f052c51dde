"""EdgeGATConv with DGL's contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.edge_maps import sum_of_features
from ...runtime.attention_options import EdgeTerm
from .._base import add_bias, check_edge_rows, xavier, zero
from .._graph import rows_in_use, split_ends
from .._linear import folded_terms, folds
from .gat import AdditiveConv


class EdgeGATConv(AdditiveConv):
    r"""Graph attention layer with edge features (Monninger et al., "SCENE: Reasoning about Traffic Scenes
    using Heterogeneous Graph Neural Networks", RA-L 2023).

    .. math::
        h_i' = W_{res} h_i + \sum_j \alpha_{ij} (W h_j + W_e e_{ij}), \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\mathrm{LeakyReLU}(a_l^T W h_j + a_r^T W h_i + a_e^T W_e e_{ij}))

    per head, over the edges j -> i. A drop-in for ``dgl.nn.EdgeGATConv``.

    Args:
        edge_feats: size of the edge features.
        residual: add the destination features, always projected by ``res_fc``, which has no bias.
        in_feats, out_feats, num_heads, feat_drop, attn_drop: as in :class:`GATConv`.
        negative_slope, activation, allow_zero_in_degree, bias: as there.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn.dgl import EdgeGATConv

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        conv = EdgeGATConv(16, 5, 8, num_heads=4)
        feat, edge_feat = torch.randn(100, 16), torch.randn(graph.num_edges, 5)
        out = conv(graph, feat, edge_feat)  # [100, 4, 8]
    """

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        edge_feats: int,
        out_feats: int,
        num_heads: int,
        feat_drop: float = 0.0,
        attn_drop: float = 0.0,
        negative_slope: float = 0.2,
        residual: bool = True,
        activation: Callable[[Tensor], Tensor] | None = None,
        allow_zero_in_degree: bool = False,
        bias: bool = True,
    ):
        super().__init__(
            in_feats, out_feats, num_heads, feat_drop, attn_drop, negative_slope, allow_zero_in_degree
        )
        width = num_heads * out_feats
        add_bias(self, bias, width)
        if residual:
            self.res_fc = nn.Linear(self._in_dst_feats, width, bias=False)
        else:
            self.register_buffer("res_fc", None)
        self._edge_feats = edge_feats
        self.fc_edge = nn.Linear(edge_feats, width, bias=False)
        self.attn_edge = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.reset_parameters()
        self.activation = activation

    def reset_parameters(self) -> None:
        """Xavier normal with gain sqrt(2) for projections and attention vectors, zero for the bias."""
        xavier(*self._weights(), self.fc_edge.weight, self.attn_edge)
        if isinstance(self.res_fc, nn.Linear):
            xavier(self.res_fc.weight)
        zero(self.bias)

    def forward(
        self,
        graph: Any,
        feat: Tensor | tuple[Tensor, Tensor],
        edge_feat: Tensor,
        get_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            graph, feat, get_attention: as in :meth:`GATConv.forward`.
            edge_feat: ``[E, *, F_e]``, in edge-id order.

        Returns:
            ``[N_dst, *, H, D]``, and with ``get_attention`` also ``[E, *, H, 1]``: the weights after dropout,
            in edge-id order.
        """
        fused = self._graph(graph)
        h_src, h_dst = split_ends(self, fused, feat, self.feat_drop)
        check_edge_rows(self, "edge_feat", edge_feat, self.fc_edge, fused, h_src.shape[1:-1])
        edge_feat = rows_in_use(fused, edge_feat)
        # Nodes are projected before edges as in DGL's layer, because parametrizations may draw random
        # numbers.
        ends = self._project(h_src, h_dst, not isinstance(feat, tuple))
        # Folded sums read the edge features [E, F_e] once per head. If F_e is larger than H * D, it is faster
        # to project the features first.
        width = self.num_heads * self.out_feats
        if edge_feat.dim() == 2 and edge_feat.shape[1] <= width and folds(self.fc_edge, edge_feat, width):
            (term,) = folded_terms(self.fc_edge, edge_feat, self.attn_edge)
            out, attention = self._attend_additive(fused, ends, get_attention=True, edge=EdgeTerm(score=term))
            # sum_j alpha_ij W_e e_ij as W_e (sum_j alpha_ij e_ij): no E x H x D tensor exists.
            sums = sum_of_features(fused, attention.squeeze(-1), edge_feat)
            heads = self._heads(self.fc_edge.weight.t())  # [F_e, H, D]
            out = out + torch.bmm(sums.transpose(0, 1), heads.transpose(0, 1)).transpose(0, 1)
        else:
            message = self._heads(self.fc_edge(edge_feat))
            term = (message * self.attn_edge).sum(-1)
            out, attention = self._attend_additive(
                fused, ends, get_attention, edge=EdgeTerm(score=term.flatten(1), value=message.flatten(1, -2))
            )
        out = self._finish(out, h_dst)
        return (out, attention) if get_attention else out
