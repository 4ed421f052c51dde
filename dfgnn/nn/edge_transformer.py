"""A Graph Transformer whose scores are products with the edges' features, which it updates, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ._base import AttentionLayer, check_edge_rows, dropout_p, reset_linear
from ._errors import blaming, check_constructor, check_fits, wrong_features
from ._graph import names_of_ends, rows_in_use, split_ends
from ._sums_in_16_bits import normalized
from .graph_transformer import TransformerBlock, check_heads_and_norm, check_sets, swapped


class EdgeGraphTransformerConv(AttentionLayer):
    r"""Attention whose scores are products with the edges' features (Dwivedi and Bresson, "A Generalization
    of Transformer Networks to Graphs", 2020, equations 11 and 12; SAN and Exphormer score likewise).

    .. math::
        w_{ij} = Q h_i \circ K h_j \circ E e_{ij} / \sqrt{D}, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\mathrm{clamp}(\sum_d w_{ij,d}, \pm c)), \qquad
        h_i' = \sum_j \alpha_{ij} V h_j

    per head, over the edges j -> i. The published code adds 1e-6 to the softmax's sum; here it is exact.

    Args:
        in_feats: size of the nodes' features.
        edge_dim: size of the edges' features.
        out_feats, num_heads, attn_drop, bias, allow_zero_in_degree: as in :class:`GraphTransformerConv`.
        clamp: c; None: scores are not clamped.
        edge_out: also return w. Without it there is no tensor of E x H x D but E e
            (:func:`dfgnn.functional.edge_product_attention`).

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn import EdgeGraphTransformerConv

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        conv = EdgeGraphTransformerConv(16, 5, 8, num_heads=4)
        feat, edge_attr = torch.randn(100, 16), torch.randn(graph.num_edges, 5)
        out, edges = conv(graph, feat, edge_attr)  # [100, 4, 8], [700, 4, 8]
    """

    attention: Any = staticmethod(functional.edge_product_attention)

    _in_engine = {"attn_drop": (nn.Dropout, nn.Identity)}

    def __init__(
        self,
        in_feats: int,
        edge_dim: int,
        out_feats: int,
        num_heads: int,
        attn_drop: float = 0.0,
        bias: bool = False,
        clamp: float | None = 5.0,
        edge_out: bool = True,
        allow_zero_in_degree: bool = False,
    ):
        super().__init__()
        self._set_sizes(in_feats, out_feats, num_heads)
        self.allow_zero_in_degree = allow_zero_in_degree
        self.edge_dim, self.clamp, self.edge_out = edge_dim, clamp, edge_out
        width = num_heads * out_feats
        self.fc_query, self.fc_key, self.fc_value = (nn.Linear(in_feats, width, bias=bias) for _ in range(3))
        self.fc_edge = nn.Linear(edge_dim, width, bias=bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform for the projections, zero for their biases."""
        reset_linear(self.fc_query, self.fc_key, self.fc_value, self.fc_edge)

    def forward(
        self,
        graph: Any,
        feat: Tensor | tuple[Tensor, Tensor],
        edge_attr: Tensor,
        return_attention: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Apply the layer.

        Args:
            graph, feat, return_attention: as in :meth:`GraphTransformerConv.forward`, with one size of
                features.
            edge_attr: ``[E, *, edge_dim]``, in edge-id order.

        Returns:
            ``[N_dst, *, H, D]``; with ``edge_out`` then w ``[E, *, H, D]``; with ``return_attention`` then
            ``[E, *, H]``; both in edge-id order.

        Raises:
            As :meth:`GraphTransformerConv.forward`.
        """
        fused = self._graph(graph)
        h_src, h_dst = split_ends(self, fused, feat, nn.Identity())
        check_edge_rows(self, "edge_attr", edge_attr, self.fc_edge, fused, h_src.shape[1:-1])
        edge_attr = rows_in_use(fused, edge_attr)
        prefix = h_src.shape[1:-1]  # batch dimensions, which the attention folds into heads
        source, destination = names_of_ends("feat", feat)
        check_fits(self, destination, self.fc_query, h_dst)
        check_fits(self, source, self.fc_key, h_src)
        ends = (self.fc_query, h_dst), (self.fc_key, h_src), (self.fc_value, h_src), (self.fc_edge, edge_attr)
        query, key, value, edge = (fc(x).flatten(1) for fc, x in ends)
        value = self._rows(value)
        query, key, edge = map(self._rows, (query, key, edge))
        found = self.attention(
            fused, query, key, value, edge, clamp=self.clamp,
            dropout_p=dropout_p(self.attn_drop), return_edges="products" if self.edge_out else None,
            return_attention=return_attention,
        )  # fmt: skip
        heads = (*prefix, self.num_heads)
        if isinstance(found, tuple):
            return tuple(x.unflatten(1, heads) for x in found if x is not None)
        return found.unflatten(1, heads)

    def _rows(self, x: Tensor) -> Tensor:
        """``[N, * H, D]`` of ``[N, * H D]``."""
        return x.unflatten(1, (-1, self.out_feats))

    def extra_repr(self) -> str:
        return f"out_feats={self.out_feats}, num_heads={self.num_heads}, clamp={self.clamp}"


class EdgeGraphTransformerLayer(nn.Module):
    r"""A layer of a Graph Transformer with edge features, which it also gives on (Dwivedi and Bresson, "A
    Generalization of Transformer Networks to Graphs", 2020, section 2.3).

    .. math::
        \hat h_i = \mathrm{norm}(h_i + O_h \, \Vert_k \sum_j \alpha^k_{ij} V^k h_j), \qquad
        \hat e_{ij} = \mathrm{norm}(e_{ij} + O_e \, \Vert_k w^k_{ij}), \qquad
        x' = \mathrm{norm}(\hat x + W_2 \, \sigma(W_1 \hat x))

    with w and alpha of :class:`EdgeGraphTransformerConv`, x being h and e, and dropout before each residual
    and inside the feed-forward networks.

    Args:
        feats, num_heads: as in :class:`GraphTransformerLayer`, of the nodes' features.
        edge_dim: size of the edges' features, in and out; None: F.
        edge_out: give the edges' features on; False for a last layer, or edges that stay as they are.
        clamp: of the scores; None: none.
        ffn_feats: size inside the nodes' feed-forward network; None: 2 F. The edges' has 2 ``edge_dim``.
        norm, dropout, attn_drop, residual, bias, activation, allow_zero_in_degree: as in
            :class:`GraphTransformerLayer`, which raises the same errors.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn import EdgeGraphTransformerLayer

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        layer = EdgeGraphTransformerLayer(32, num_heads=4)
        x, e = torch.randn(100, 32), torch.randn(graph.num_edges, 32)
        x, e = layer(graph, x, e)  # [100, 32], [700, 32]
    """

    @check_constructor
    def __init__(
        self,
        feats: int,
        num_heads: int,
        edge_dim: int | None = None,
        edge_out: bool = True,
        clamp: float | None = 5.0,
        ffn_feats: int | None = None,
        norm: str | None = "batch",
        dropout: float = 0.0,
        attn_drop: float = 0.0,
        residual: bool = True,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = F.relu,
        allow_zero_in_degree: bool = False,
    ):
        super().__init__()
        check_heads_and_norm(type(self).__name__, feats, num_heads, norm)
        edge_dim = feats if edge_dim is None else edge_dim
        self.feats, self.edge_dim = feats, edge_dim
        self.conv = EdgeGraphTransformerConv(
            feats, edge_dim, feats // num_heads, num_heads, attn_drop=attn_drop, bias=bias, clamp=clamp,
            edge_out=edge_out, allow_zero_in_degree=allow_zero_in_degree,
        )  # fmt: skip
        inner = 2 * feats if ffn_feats is None else ffn_feats
        self.node = _Block(feats, feats, inner, norm, dropout, residual, activation)
        self.edge = (
            _Block(feats, edge_dim, 2 * edge_dim, norm, dropout, residual, activation) if edge_out else None
        )

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as their modules do."""
        for module in (self.conv, self.node, self.edge):
            if module is not None:
                module.reset_parameters()

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        self.conv.set_allow_zero_in_degree(set_value)

    @blaming
    def forward(
        self, graph: Any, feat: Tensor, edge_attr: Tensor, return_attention: bool = False
    ) -> tuple[Tensor, ...]:
        """Apply the layer.

        Args:
            graph, feat, return_attention: as in :meth:`GraphTransformerLayer.forward`.
            edge_attr: ``[E, edge_dim]``, or ``[B, E, edge_dim]``, in edge-id order.

        Returns:
            ``[N_dst, F]``; ``[E, edge_dim]``, which without ``edge_out`` is ``edge_attr``; and with
            ``return_attention`` ``[E, H]``; of sets of features with B in front.

        Raises:
            As :meth:`GraphTransformerConv.forward`.
        """
        check_sets(self, feat)
        batch = feat.shape[:-2]
        if not isinstance(edge_attr, Tensor):
            raise wrong_features(self, "edge_attr", edge_attr, f"[E, {self.edge_dim}]")
        if edge_attr.shape[:-2] != batch or edge_attr.dim() < 2 or edge_attr.shape[-1] != self.edge_dim:
            sizes = ", ".join(map(str, (*batch, "E", self.edge_dim)))
            got = list(edge_attr.shape)
            raise ValueError(f"EdgeGraphTransformerLayer: edge_attr: expected shape [{sizes}], got {got}")
        # The dimensions of nodes and edges come first, because the engine takes the batch as further heads.
        h, e = swapped(feat).contiguous(), swapped(edge_attr).contiguous()
        found: Any = self.conv(graph, h, e, return_attention)
        attended, *more = found if isinstance(found, tuple) else (found,)
        h = self.node(h[: len(attended)], attended.flatten(-2))
        if self.edge is not None:
            products, *more = more
            e = self.edge(e, products.flatten(-2))
        return tuple(map(swapped, (h, e, *more)))

    def extra_repr(self) -> str:
        return f"feats={self.feats}, edge_dim={self.edge_dim}"


class _Block(TransformerBlock):
    """x -> norm(x + O update) =: y -> norm(y + W2 act(W1 y))"""

    def __init__(self, *options: Any):
        super().__init__()
        self._set_up(*options)

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        x = normalized(self.norm1, self._add(x, self.fc_out(update)))
        return normalized(self.norm2, self._add(x, self._ffn(x)))
