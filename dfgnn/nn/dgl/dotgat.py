"""DotGatConv with DGL's contract."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from ... import functional
from .._base import AttentionLayer
from .._graph import split_ends
from ..fused.spec import LayerSpec


class DotGatConv(AttentionLayer):
    r"""Graph attention layer (Velickovic et al., "Graph Attention Networks", ICLR 2018) with dot products.

    .. math::
        h_i' = \sum_j \alpha_{ij} W h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\langle W h_j, W h_i \rangle / \sqrt{D})

    per head, over the edges j -> i. A drop-in for ``dgl.nn.DotGatConv``.

    Args:
        in_feats, out_feats, num_heads, allow_zero_in_degree: as in :class:`GATConv`.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn.dgl import DotGatConv

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        conv = DotGatConv(16, 8, num_heads=4)
        out = conv(graph, torch.randn(100, 16))  # [100, 4, 8]
    """

    attention: Any = staticmethod(functional.dot.dot)

    # True only with two projections: given a pair of features, DGL's layer with one projection raises an
    # error.
    _one_name_for_ends = property(lambda self: "fc_src" in self._modules)  # type: ignore[assignment]

    FUSED_OPTIONS = "in_feats out_feats num_heads allow_zero_in_degree"

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        num_heads: int,
        allow_zero_in_degree: bool = False,
    ):
        nn.Module.__init__(self)
        self._set_sizes(in_feats, out_feats, num_heads)
        self.allow_zero_in_degree = allow_zero_in_degree
        self._add_projections(in_feats)

    def reset_parameters(self) -> None:
        """The initialisation of ``nn.Linear``."""
        for fc in dict.fromkeys(self._projections()):
            fc.reset_parameters()

    def forward(
        self, graph: Any, feat: Tensor | tuple[Tensor, Tensor], get_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            graph, feat, get_attention: as in :meth:`GATConv.forward`.

        Returns:
            ``[N_dst, *, H, D]``, and with ``get_attention`` also ``[E, *, H, 1]``, in edge-id order.
        """
        fused = self._graph(graph)
        h_src, h_dst = split_ends(self, fused, feat, None)
        out, attention = self._attend(
            self._spec(isinstance(feat, tuple)), fused, feat, (h_src, h_dst), get_attention
        )
        return (out, attention) if get_attention else out

    def _spec(self, is_pair: bool) -> LayerSpec:
        fc_src, fc_dst = self._projections()
        one = fc_src is fc_dst and not is_pair
        return LayerSpec(
            "dot", self.num_heads, fc_src, query=None if one else fc_dst, scale=1 / math.sqrt(self.out_feats)
        )
