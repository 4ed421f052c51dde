"""GATv2Conv with DGL's contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ... import functional
from .._base import LeakyLayer, dropout_p, xavier, zero
from .._graph import split_ends
from ..fused.spec import LayerSpec


class GATv2Conv(LeakyLayer):
    r"""Graph attention layer with dynamic attention (Brody, Alon and Yahav, "How Attentive are Graph
    Attention Networks?", ICLR 2022).

    .. math::
        h_i' = \sum_j \alpha_{ij} z_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(a^T \mathrm{LeakyReLU}(z_j + W_{dst} h_i + b_{dst})), \qquad
        z_j = W_{src} h_j + b_{src}

    per head, over the edges j -> i. A drop-in for ``dgl.nn.GATv2Conv``.

    Args:
        in_feats, out_feats, num_heads, feat_drop, attn_drop: as in :class:`GATConv`.
        negative_slope, activation, allow_zero_in_degree: as there.
        residual: add the destination features, projected by ``res_fc`` where their size is not H * D.
        bias: let the projections, ``res_fc`` included, have a bias; the output has none of its own.
        share_weights: one projection for both ends, ``fc_dst`` being ``fc_src``. A pair of sizes has two all
            the same.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn.dgl import GATv2Conv

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        conv = GATv2Conv(16, 8, num_heads=4)
        out = conv(graph, torch.randn(100, 16))  # [100, 4, 8]
    """

    attention: Any = staticmethod(functional.gat.gatv2)

    FUSED_OPTIONS = (
        "in_feats out_feats num_heads feat_drop attn_drop negative_slope residual activation "
        "allow_zero_in_degree bias share_weights"
    )

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        num_heads: int,
        feat_drop: float = 0.0,
        attn_drop: float = 0.0,
        negative_slope: float = 0.2,
        residual: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
        allow_zero_in_degree: bool = False,
        bias: bool = True,
        share_weights: bool = False,
    ):
        nn.Module.__init__(self)
        self._set_sizes(in_feats, out_feats, num_heads)
        self.allow_zero_in_degree = allow_zero_in_degree
        width = num_heads * out_feats
        src_feats, dst_feats = self._in_src_feats, self._in_dst_feats
        self.fc_src = nn.Linear(src_feats, width, bias=bias)
        one = share_weights and not isinstance(in_feats, tuple)
        self.fc_dst = self.fc_src if one else nn.Linear(dst_feats, width, bias=bias)
        self.attn = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self._add_pointwise(feat_drop, attn_drop, negative_slope)
        if residual:
            self.res_fc = nn.Linear(dst_feats, width, bias=bias) if dst_feats != width else nn.Identity()
        else:
            self.register_buffer("res_fc", None)
        self.activation = activation
        self.share_weights = share_weights
        self.bias = bias
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier normal with gain sqrt(2) for projections and attention vector, zero for biases.

        With ``share_weights`` and a pair of sizes ``fc_dst`` keeps what it has, as in DGL.
        """
        projections = [self.fc_src] if self.share_weights else [self.fc_src, self.fc_dst]
        residual = [self.res_fc] if isinstance(self.res_fc, nn.Linear) else []
        xavier(*(fc.weight for fc in projections), self.attn, *(fc.weight for fc in residual))
        zero(*(fc.bias for fc in projections + residual))

    def forward(
        self, graph: Any, feat: Tensor | tuple[Tensor, Tensor], get_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            graph, feat, get_attention: as in :meth:`GATConv.forward`.

        Returns:
            ``[N_dst, *, H, D]``, and with ``get_attention`` also ``[E, *, H, 1]``: the weights after dropout,
            in edge-id order.
        """
        fused = self._graph(graph)
        h_src, h_dst = split_ends(self, fused, feat, self.feat_drop)
        one = self.share_weights and not isinstance(feat, tuple)
        out, attention = self._attend(self._spec(one), fused, feat, (h_src, h_dst), get_attention)
        out = self._finish(out, h_dst)
        return (out, attention) if get_attention else out

    def _spec(self, one: bool) -> LayerSpec:
        """one: ``fc_src`` projects the destinations, too."""
        return LayerSpec(
            "additive_v2", self.num_heads, self.fc_src, query=None if one else self.fc_dst,
            vectors=(self.attn,), negative_slope=self.negative_slope, dropout_p=dropout_p(self.attn_drop),
        )  # fmt: skip
