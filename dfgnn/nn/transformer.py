"""Multi-head dot-product attention over a graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import functional
from ._graph import split_ends
from ._layer import AttentionLayer


class GraphTransformerConv(AttentionLayer):
    r"""The attention of a Graph Transformer, without its residual, normalisation and feed-forward parts
    (Dwivedi and Bresson, "A Generalization of Transformer Networks to Graphs", 2020).

    .. math::
        h_i' = \sum_j \alpha_{ij} V h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\langle Q h_i, K h_j \rangle / \sqrt{D} + b_{ij})

    per head, over the edges j -> i.

    Args:
        in_feats: size of the input features, or a pair for sources (keys, values) and destinations (queries).
        out_feats: size of the output per head (D).
        num_heads: number of heads (H).
        feat_drop: dropout of the input features.
        attn_drop: dropout of the attention weights.
        bias: let the three projections have a bias.
        allow_zero_in_degree: let destinations without in-edges through; their output is 0.

    Differentiable once, with respect to features, parameters, edge biases and edge weights.
    """

    #: What computes the attention; ``reference.dot_attention`` makes it the same layer on plain PyTorch.
    attention = staticmethod(functional.dot_attention)

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        num_heads: int,
        feat_drop: float = 0.0,
        attn_drop: float = 0.0,
        bias: bool = True,
        allow_zero_in_degree: bool = False,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.out_feats = out_feats
        self.allow_zero_in_degree = allow_zero_in_degree
        src_feats, dst_feats = in_feats if isinstance(in_feats, tuple) else (in_feats, in_feats)
        self.fc_query = nn.Linear(dst_feats, num_heads * out_feats, bias=bias)
        self.fc_key = nn.Linear(src_feats, num_heads * out_feats, bias=bias)
        self.fc_value = nn.Linear(src_feats, num_heads * out_feats, bias=bias)
        self.feat_drop = nn.Dropout(feat_drop)
        self.attn_drop = nn.Dropout(attn_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform for the projections, zero for their biases."""
        for fc in (self.fc_query, self.fc_key, self.fc_value):
            nn.init.xavier_uniform_(fc.weight)
            if fc.bias is not None:
                nn.init.zeros_(fc.bias)

    def forward(
        self,
        graph: Any,
        feat: Tensor | tuple[Tensor, Tensor],
        edge_bias: Tensor | None = None,
        edge_weight: Tensor | None = None,
        get_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            graph: a dfgnn.Graph, DGLGraph or block.
            feat: ``[N, *, F]``, of which the first ``num_dst`` rows are the destinations where the graph has
                fewer destinations than sources; or a pair ``([N_src, *, F_src], [N_dst, *, F_dst])``.
            edge_bias: ``[E, H]``, added to the scores before softmax (-inf masks an edge); or None.
            edge_weight: ``[E]`` or ``[E, H]``, multiplied into the attention weights after softmax and
                dropout; or None.
            get_attention: also return the attention weights.

        Returns:
            ``[N_dst, *, H, D]``, and with ``get_attention`` also ``[E, *, H, 1]``, in edge-id order.

        Raises:
            DGLError (for a DGL graph), ZeroInDegreeError: a destination has no in-edges, unless allowed.
            TypeError, ValueError: ``graph`` or a tensor is not as described.
        """
        fused = self._graph(graph)
        h_src, h_dst = split_ends(fused, feat, self.feat_drop)
        prefix = h_src.shape[1:-1]
        ends = (self.fc_query, h_dst), (self.fc_key, h_src), (self.fc_value, h_src)
        result = self.attention(
            fused,
            *(self._heads(fc(h)).flatten(1, -2) for fc, h in ends),
            edge_bias=edge_bias,
            edge_weight=edge_weight,
            dropout_p=self.attn_drop.p if self.attn_drop.training else 0.0,
            return_attention=get_attention,
        )
        out, attention = self._unpack(result, prefix)
        return (out, attention) if get_attention else out
