"""Graph Transformers: the attention alone, and a whole layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..runtime.attention_options import EdgeTerm, Projected
from ._base import AttentionLayer, check_per_edge, dropout_p, reset_linear
from ._errors import blaming, check_constructor, wrong_argument, wrong_features
from ._graph import rows_in_use, split_ends
from ._linear import is_product, under_autocast
from ._sums_in_16_bits import normalized
from .fused.spec import LayerSpec

#: Values of the argument ``norm`` -> the modules that they stand for.
NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, None: nn.Identity}


def check_heads_and_norm(layer: str, feats: int, num_heads: int, norm: str | None) -> None:
    """Raise ValueError unless ``feats`` is a multiple of ``num_heads`` and ``norm`` one of `NORMS`."""
    if num_heads < 1 or feats % num_heads:
        raise ValueError(f"{layer}: feats: expected a multiple of num_heads={num_heads}, got {feats}")
    if norm not in NORMS:
        raise ValueError(f"{layer}: norm: expected 'batch', 'layer' or None, got {norm!r}")


class GraphTransformerConv(AttentionLayer):
    r"""The attention of a Graph Transformer, without its residual, normalisation and feed-forward parts
    (Dwivedi and Bresson, "A Generalization of Transformer Networks to Graphs", 2020).

    .. math::
        h_i' = \sum_j \alpha_{ij} V h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\langle Q h_i, K h_j \rangle / \sqrt{D} + b_{ij})

    per head, over the edges j -> i. With ``edge_dim``, W x_ij of the edges' features x is added to K h_j
    and to V h_j (as in Shi et al., "Masked Label Prediction", IJCAI 2021); where they are fewer than D, on
    large graphs without a tensor of E x H x D.

    Args:
        in_feats: size of the input features, or a pair for sources (keys, values) and destinations (queries).
        out_feats: size of the output per head (D).
        num_heads: number of heads (H).
        feat_drop: dropout of the input features.
        attn_drop: dropout of the attention weights.
        bias: let the three projections have a bias.
        allow_zero_in_degree: let destinations without in-edges through; their output is 0.
        edge_dim: size of the edges' features; None: there are none.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn import GraphTransformerConv

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        conv = GraphTransformerConv(16, 8, num_heads=4)
        bias = torch.randn(graph.num_edges, 4)
        out = conv(graph, torch.randn(100, 16), edge_bias=bias)  # [100, 4, 8]
    """

    attention: Any = staticmethod(functional.dot.dot)

    _in_engine = {"attn_drop": (nn.Dropout, nn.Identity)}

    FUSED_OPTIONS = "in_feats out_feats num_heads feat_drop attn_drop bias allow_zero_in_degree edge_dim"

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        num_heads: int,
        feat_drop: float = 0.0,
        attn_drop: float = 0.0,
        bias: bool = True,
        allow_zero_in_degree: bool = False,
        edge_dim: int | None = None,
    ):
        super().__init__()
        self._set_sizes(in_feats, out_feats, num_heads)
        self.allow_zero_in_degree = allow_zero_in_degree
        src_feats, dst_feats = self._in_src_feats, self._in_dst_feats
        self.fc_query = nn.Linear(dst_feats, num_heads * out_feats, bias=bias)
        self.fc_key = nn.Linear(src_feats, num_heads * out_feats, bias=bias)
        self.fc_value = nn.Linear(src_feats, num_heads * out_feats, bias=bias)
        self.edge_dim = edge_dim
        self.fc_edge = None if edge_dim is None else nn.Linear(edge_dim, num_heads * out_feats, bias=False)
        self.feat_drop = nn.Dropout(feat_drop)
        self.attn_drop = nn.Dropout(attn_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform for the projections, zero for their biases."""
        reset_linear(self.fc_query, self.fc_key, self.fc_value, self.fc_edge)

    def forward(
        self,
        graph: Any,
        feat: Tensor | tuple[Tensor, Tensor],
        edge_bias: Tensor | None = None,
        edge_weight: Tensor | None = None,
        return_attention: bool = False,
        edge_attr: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            graph: a dfgnn.Graph, DGLGraph or block.
            feat: ``[N, *, F]``, of which the first ``num_dst`` rows are the destinations where the graph has
                fewer destinations than sources; or a pair ``([N_src, *, F_src], [N_dst, *, F_dst])``.
            edge_bias: ``[E, H]``, added to the scores before softmax (-inf masks an edge); or None.
            edge_weight: ``[E]`` or ``[E, H]``, multiplied into the attention weights after softmax and
                dropout; or None.
            return_attention: also return the attention weights.
            edge_attr: ``[E, edge_dim]``, in edge-id order, alike for all of ``*``; in a layer with
                ``edge_dim``.

        Returns:
            ``[N_dst, *, H, D]``, and with ``return_attention`` also ``[E, *, H, 1]``, in edge-id order.

        Raises:
            DGLError (for a DGL graph), ZeroInDegreeError: a destination has no in-edges, unless allowed.
            TypeError, ValueError: ``graph`` or a tensor is not as described.
        """
        fused = self._graph(graph)
        h_src, h_dst = split_ends(self, fused, feat, self.feat_drop)
        self._check_edges(fused, edge_attr)
        if edge_attr is not None:
            edge_attr = rows_in_use(fused, edge_attr)
        options = {}
        if edge_bias is not None or edge_weight is not None:
            per_head = fused.num_edges, h_src.shape[1:-1].numel() * self.num_heads
            check_per_edge(self, "edge_bias", edge_bias, (per_head,))
            check_per_edge(self, "edge_weight", edge_weight, (per_head[:1], per_head))
            options = {"bias": edge_bias, "weight": edge_weight}
        out, attention = self._attend(
            self._spec(edge_attr), fused, feat, (h_src, h_dst), return_attention, options
        )
        return (out, attention) if return_attention else out

    def _spec(self, edge_attr: Tensor | None) -> LayerSpec:
        return LayerSpec(
            "dot", self.num_heads, self.fc_value, self.fc_key, self.fc_query,
            edges=None if edge_attr is None else (edge_attr, self.fc_edge),
            scale=1 / math.sqrt(self.out_feats), dropout_p=dropout_p(self.attn_drop),
        )  # fmt: skip

    def _check_edges(self, graph: Any, edge_attr: Tensor | None) -> None:
        if self.fc_edge is None and edge_attr is None:
            return
        expected = None if self.fc_edge is None else [graph.num_edges, self.edge_dim]
        got = None if edge_attr is None else list(edge_attr.shape)
        if self.fc_edge is None or edge_attr is None or got != expected:
            wanted = expected or "None without edge_dim"
            way = f"; make the layer with edge_dim={got[-1]}" if got and self.fc_edge is None else ""
            raise ValueError(f"{type(self).__name__}: edge_attr: expected {wanted}, got {got}{way}")

    def _edges(self, spec: LayerSpec, sets: int) -> dict[str, Any]:
        if spec.edges is None:
            return {}
        edge_attr, linear = spec.edges
        if edge_attr.shape[1] < self.out_feats and is_product(linear):
            edge_attr, proj = under_autocast(edge_attr, linear.weight)
            term: Any = Projected(edge_attr, proj.repeat(sets, 1))
        else:
            term = self._heads(linear(edge_attr)).repeat(1, sets, 1)
        return {"edge": EdgeTerm(term, term)}

    def extra_repr(self) -> str:
        return f"out_feats={self.out_feats}, num_heads={self.num_heads}"


class TransformerBlock(nn.Module):
    """What follows the attention of a layer: its projection and a feed-forward network, each with dropout, a
    residual and a normalisation."""

    def _set_up(
        self, update_feats: int, feats: int, inner: int, norm: str | None, dropout: float, residual: bool,
        activation: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """update_feats: columns of the attention's result. inner: columns within the feed-forward network."""
        self.residual, self.activation = residual, activation
        self.fc_out = nn.Linear(update_feats, feats)
        self.ffn1, self.ffn2 = nn.Linear(feats, inner), nn.Linear(inner, feats)
        self.norm1, self.norm2 = NORMS[norm](feats), NORMS[norm](feats)
        self.dropout = nn.Dropout(dropout)

    def _ffn(self, x: Tensor) -> Tensor:
        return self.ffn2(self.dropout(self.activation(self.ffn1(x))))

    def _add(self, x: Tensor, update: Tensor) -> Tensor:
        update = self.dropout(update)
        return x + update if self.residual else update

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as their modules do."""
        for module in self.children():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]


class GraphTransformerLayer(TransformerBlock):
    r"""A layer of a Graph Transformer: attention over the edges, then a feed-forward network, each with a
    residual and a normalisation (Dwivedi and Bresson, "A Generalization of Transformer Networks to Graphs",
    2020, arXiv 2012.09699; also DGL's example graphtransformer).

    .. math::
        \hat h_i = \mathrm{norm}_1(h_i + O \, \Vert_k \sum_j \alpha^k_{ij} V^k h_j), \qquad
        h_i' = \mathrm{norm}_2(\hat h_i + W_2 \, \sigma(W_1 \hat h_i))

    with :math:`\alpha^k_{ij} = \mathrm{softmax}_j(\langle Q^k h_i, K^k h_j \rangle / \sqrt{D} + b^k_{ij})`
    over the edges j -> i, and dropout before each residual and inside the feed-forward network. With
    ``norm_first`` the normalisations come before the attention and the network instead of after the sums
    (Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020).

    Args:
        feats: size of input and output (F); a multiple of ``num_heads``.
        num_heads: number of heads (H), each of size D = F / H.
        ffn_feats: size inside the feed-forward network; None: 2 F.
        norm: "batch", "layer" or None.
        norm_first: normalise before, not after.
        dropout: of what is added to a residual and of the network's inner features.
        attn_drop: dropout of the attention weights.
        residual: add the residuals.
        bias: let queries, keys and values have a bias; the other projections have one.
        activation: the network's.
        allow_zero_in_degree: let destinations without in-edges through, whose attention is 0.
        edge_dim: size of the edges' features, of which a projection is added to keys and values (see
            :class:`GraphTransformerConv`); None: there are none.

    Raises:
        ValueError: ``feats`` is not a multiple of ``num_heads``, or ``norm`` is none of the above.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn import GraphTransformerLayer

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        layer = GraphTransformerLayer(32, num_heads=4)
        out = layer(graph, torch.randn(100, 32))  # [100, 32]
    """

    @check_constructor
    def __init__(
        self,
        feats: int,
        num_heads: int,
        ffn_feats: int | None = None,
        norm: str | None = "batch",
        norm_first: bool = False,
        dropout: float = 0.0,
        attn_drop: float = 0.0,
        residual: bool = True,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = F.relu,
        allow_zero_in_degree: bool = False,
        edge_dim: int | None = None,
    ):
        super().__init__()
        check_heads_and_norm(type(self).__name__, feats, num_heads, norm)
        self.feats = feats
        self.norm_first = norm_first
        self.conv = GraphTransformerConv(
            feats, feats // num_heads, num_heads, attn_drop=attn_drop, bias=bias,
            allow_zero_in_degree=allow_zero_in_degree, edge_dim=edge_dim,
        )  # fmt: skip
        inner = 2 * feats if ffn_feats is None else ffn_feats
        self._set_up(feats, feats, inner, norm, dropout, residual, activation)

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        self.conv.set_allow_zero_in_degree(set_value)

    @blaming
    def forward(
        self,
        graph: Any,
        feat: Tensor,
        edge_bias: Tensor | None = None,
        return_attention: bool = False,
        edge_attr: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            graph: a dfgnn.Graph, DGLGraph or block.
            feat: ``[N, F]``, or ``[B, N, F]``: B sets of features on the same graph, whose attention is one
                call of the engine. The first ``num_dst`` of N are the destinations where the graph has fewer
                destinations than sources. "batch" normalises over all B N rows.
            edge_bias: ``[E, H]``, or ``[B, E, H]`` for each set its own, added to the scores before softmax
                (-inf masks an edge); or None.
            return_attention: also return the attention weights.
            edge_attr: ``[E, edge_dim]``, in edge-id order, alike for all sets; in a layer with ``edge_dim``.

        Returns:
            ``[N_dst, F]`` or ``[B, N_dst, F]``, and with ``return_attention`` also ``[E, H]`` or
            ``[B, E, H]``, in edge-id order.

        Raises:
            As :meth:`GraphTransformerConv.forward`.
        """
        check_sets(self, feat)
        # The dimension of nodes comes first, because the engine takes the batch as further heads; contiguous,
        # so that linear layers read one matrix.
        h = swapped(feat).contiguous()
        edge_bias = None if edge_bias is None else self._edge_bias(edge_bias, h.shape[1:-1])
        x = normalized(self.norm1, h) if self.norm_first else h
        result = self.conv(graph, x, edge_bias, return_attention=return_attention, edge_attr=edge_attr)
        attended = result[0] if return_attention else result
        h = self._add(h[: len(attended)], self.fc_out(attended.flatten(-2)))
        if not self.norm_first:
            h = normalized(self.norm1, h)
        x = normalized(self.norm2, h) if self.norm_first else h
        h = self._add(h, self._ffn(x))
        if not self.norm_first:
            h = normalized(self.norm2, h)
        return (swapped(h), swapped(result[1].squeeze(-1))) if return_attention else swapped(h)

    def _edge_bias(self, edge_bias: Tensor, batch: tuple[int, ...]) -> Tensor:
        """edge_bias as ``[E, B * H]``: the elements of a batch are heads, in this order."""
        heads = self.conv.num_heads
        shape = list(edge_bias.shape)
        if shape[-1:] != [heads] or len(shape) not in (2, 2 + len(batch)):
            sizes = f"[E, {heads}]" + (f" or [{batch[0]}, E, {heads}]" if batch else "")
            raise ValueError(f"GraphTransformerLayer: edge_bias: expected shape {sizes}, got {shape}")
        if len(shape) == 3 and shape[0] != batch[0]:
            raise ValueError(
                f"GraphTransformerLayer: edge_bias: expected {batch[0]} sets like feat, got {shape[0]}"
            )
        edge_bias = edge_bias.transpose(0, 1) if len(shape) == 3 else edge_bias.unsqueeze(1)
        return edge_bias.expand(-1, *(batch or (1,)), -1).flatten(1)

    def extra_repr(self) -> str:
        return f"feats={self.feats}, norm_first={self.norm_first}, residual={self.residual}"


def check_sets(layer: nn.Module, feat: Any) -> None:
    """feat: one set of features ``[N, layer.feats]`` or several, ``[B, N, layer.feats]``; else TypeError or
    ValueError."""
    shapes = f"[N, {layer.feats}] or [B, N, {layer.feats}]"
    if not isinstance(feat, Tensor):
        raise wrong_features(layer, "feat", feat, shapes)
    if feat.dim() not in (2, 3) or feat.shape[-1] != layer.feats or 0 in feat.shape[:-2]:
        raise wrong_argument(layer, "feat", f"shape {shapes} with B > 0", list(feat.shape))


def swapped(x: Tensor) -> Tensor:
    """``[B, N, F]`` <-> ``[N, B, F]``; a single set stays ``[N, F]``."""
    return x.transpose(0, 1) if x.dim() == 3 else x
