"""GATConv with DGL's contract, and what it shares with EdgeGATConv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ... import functional
from ...graph import Graph
from .._base import LeakyLayer, add_bias, check_per_edge, dropout_p, xavier, zero
from .._errors import check_fits, projected
from .._graph import split_ends
from .._linear import score_terms
from ..fused.operator_call import fused_layer, is_first_rows, refuse_parameters
from ..fused.spec import LayerSpec


class AdditiveConv(LeakyLayer):
    """Projections and both ends' score terms of additive attention, and a bias, which a subclass sets."""

    attention: Any = staticmethod(functional.gat.gat)
    bias: Tensor | None

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        num_heads: int,
        feat_drop: float,
        attn_drop: float,
        negative_slope: float,
        allow_zero_in_degree: bool,
    ):
        nn.Module.__init__(self)
        self._set_sizes(in_feats, out_feats, num_heads)
        self.allow_zero_in_degree = allow_zero_in_degree
        self._add_projections(in_feats)
        self.attn_l = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.attn_r = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self._add_pointwise(feat_drop, attn_drop, negative_slope)

    def _weights(self) -> list[Tensor]:
        projections = dict.fromkeys(self._projections())
        return [fc.weight for fc in projections] + [self.attn_l, self.attn_r]

    def _attend_additive(
        self, graph: Graph, ends: tuple[Tensor, Tensor, Tensor], get_attention: bool, **options
    ) -> tuple[Tensor, Any]:
        """out ``[N_dst, *, H, D]`` with the bias but not the residual; attention ``[E, *, H, 1]`` or None.

        ends: as from `_project`. options: further arguments of the attention function.
        """
        feat_src, score_src, score_dst = ends
        prefix = feat_src.shape[1:-2]
        bias = None if self.bias is None else self._heads(self.bias)
        fused_bias = None
        if bias is not None and bias.dtype == feat_src.dtype:
            fused_bias, bias = bias.expand(*prefix, -1, -1).flatten(0, -2), None
        result = self.attention(
            graph,
            feat_src.flatten(1, -2),
            score_src.flatten(1),
            score_dst.flatten(1),
            negative_slope=self.negative_slope,
            out_bias=fused_bias,
            dropout_p=dropout_p(self.attn_drop),
            return_attention=get_attention,
            **options,
        )
        out, attention = self._unpack(result, prefix)
        return (out if bias is None else out + bias), attention

    def _spec(self, shared: bool) -> LayerSpec:
        """shared: the destinations are the first sources."""
        bias, (fc_src, fc_dst) = self.bias, self._projections()
        query = None if shared and fc_src is fc_dst else fc_dst
        return LayerSpec(
            "additive", self.num_heads, fc_src, query=query, vectors=(self.attn_l, self.attn_r), bias=bias,
            negative_slope=self.negative_slope, dropout_p=dropout_p(self.attn_drop), wide=bias,
        )  # fmt: skip

    def _project(self, h_src: Tensor, h_dst: Tensor, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Projected source features ``[N_src, *, H, D]`` and both score terms ``[N, *, H]``.

        shared: the destinations are the first sources.
        """
        refuse_parameters(self, self._spec(shared))
        fc_src, fc_dst = self._projections()
        feat_src = self._heads(projected(self, "feat" if shared else "feat[0]", fc_src, h_src))
        if shared:
            score_src, score_dst = score_terms(fc_src, h_src, feat_src, self.attn_l, self.attn_r)
            return feat_src, score_src, score_dst[: len(h_dst)]
        check_fits(self, "feat[1]", fc_dst, h_dst)
        (score_src,) = score_terms(fc_src, h_src, feat_src, self.attn_l)
        (score_dst,) = score_terms(fc_dst, h_dst, None, self.attn_r)
        return feat_src, score_src, score_dst


class GATConv(AdditiveConv):
    r"""Graph attention layer (Velickovic et al., "Graph Attention Networks", ICLR 2018).

    .. math::
        h_i' = \sum_j \alpha_{ij} W h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\mathrm{LeakyReLU}(a_l^T W h_j + a_r^T W h_i))

    per head, over the edges j -> i. A drop-in for ``dgl.nn.GATConv``.

    Args:
        in_feats: size of the input features, or a pair for sources and destinations, which then have a
            projection each.
        out_feats: size of the output per head (D).
        num_heads: number of heads (H).
        feat_drop: dropout of the input features; the residual sees them dropped too.
        attn_drop: dropout of the attention weights.
        negative_slope: of the LeakyReLU.
        residual: add the destination features, projected by ``res_fc`` where their size is not H * D. That
            projection holds the bias then, and ``bias`` does not exist.
        activation: applied to the result, or None.
        allow_zero_in_degree: let destinations without in-edges through; their aggregate is 0, to which
            residual, bias and activation still apply.
        bias: learn an additive bias.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn.dgl import GATConv

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        conv = GATConv(16, 8, num_heads=4)
        out = conv(graph, torch.randn(100, 16))  # [100, 4, 8]
    """

    FUSED_OPTIONS = (
        "in_feats out_feats num_heads feat_drop attn_drop negative_slope residual activation "
        "allow_zero_in_degree bias"
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
    ):
        super().__init__(
            in_feats, out_feats, num_heads, feat_drop, attn_drop, negative_slope, allow_zero_in_degree
        )
        width = num_heads * out_feats
        self.has_linear_res = residual and self._in_dst_feats != width
        self.has_explicit_bias = bias and not self.has_linear_res
        if self.has_linear_res:
            self.res_fc = nn.Linear(self._in_dst_feats, width, bias=bias)
        elif residual:
            self.res_fc = nn.Identity()
        else:
            self.register_buffer("res_fc", None)
        add_bias(self, self.has_explicit_bias, width)
        self.reset_parameters()
        self.activation = activation

    def reset_parameters(self) -> None:
        """Xavier normal with gain sqrt(2) for projections and attention vectors, zero for biases."""
        xavier(*self._weights())
        zero(self.bias)
        if isinstance(self.res_fc, nn.Linear):
            xavier(self.res_fc.weight)
            zero(self.res_fc.bias)

    def forward(
        self,
        graph: Any,
        feat: Tensor | tuple[Tensor, Tensor],
        edge_weight: Tensor | None = None,
        get_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            graph: a dfgnn.Graph, DGLGraph or block.
            feat: ``[N, *, F]``, of which the first ``num_dst`` rows are the destinations where the graph has
                fewer destinations than sources; or a pair ``([N_src, *, F_src], [N_dst, *, F_dst])``.
            edge_weight: ``[E]``, multiplied into the attention weights after softmax and dropout; or None.
            get_attention: also return the attention weights.

        Returns:
            ``[N_dst, *, H, D]``, and with ``get_attention`` also ``[E, *, H, 1]``: the weights that the
            features were multiplied with, in edge-id order.

        Raises:
            DGLError (for a DGL graph), ZeroInDegreeError: a destination has no in-edges, unless allowed.
            TypeError, ValueError: ``graph`` or a tensor is not as described.
        """
        fused = self._graph(graph)
        h_src, h_dst = split_ends(self, fused, feat, self.feat_drop)
        shared = not isinstance(feat, tuple)
        whole, options = None, {} if edge_weight is None else {"weight": edge_weight}
        if edge_weight is None:
            spec = self._spec(shared or is_first_rows(h_dst, h_src))
            end = None if spec.query is None or h_dst is h_src else h_dst
            whole, seed = fused_layer(self, spec, fused, h_src, end, get_attention)
            if whole is not None and not get_attention:
                return self._finish(self._heads(whole), h_dst)
            options = {} if seed is None else {"generator": seed}
        shapes = (fused.num_edges,), (fused.num_edges, h_src.shape[1:-1].numel() * self.num_heads)
        check_per_edge(self, "edge_weight", edge_weight, shapes)
        ends = self._project(h_src, h_dst, shared)
        out, attention = self._attend_additive(fused, ends, get_attention, **options)
        out = self._finish(out if whole is None else self._heads(whole), h_dst)
        return (out, attention) if get_attention else out
