"""GATConv with DGL's contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ._graph import as_graph, check_in_degrees, split_ends


class GATConv(nn.Module):
    r"""Graph attention layer (Velickovic et al., "Graph Attention Networks", ICLR 2018).

    .. math::
        h_i' = \sum_j \alpha_{ij} W h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\mathrm{LeakyReLU}(a_l^T W h_j + a_r^T W h_i))

    per head, over the edges j -> i. A drop-in for ``dgl.nn.GATConv``: same arguments, parameters,
    initialisation, state_dict and results.

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

    Differentiable once, with respect to features, parameters and edge weights.
    """

    #: What computes the attention; ``reference.gat_attention`` makes it the same layer on plain PyTorch.
    attention = staticmethod(functional.gat_attention)

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
        super().__init__()
        self.num_heads = num_heads
        self.out_feats = out_feats
        self.negative_slope = negative_slope
        self.allow_zero_in_degree = allow_zero_in_degree
        width = num_heads * out_feats
        if isinstance(in_feats, tuple):
            self.fc_src = nn.Linear(in_feats[0], width, bias=False)
            self.fc_dst = nn.Linear(in_feats[1], width, bias=False)
        else:
            self.fc = nn.Linear(in_feats, width, bias=False)
        self.attn_l = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.attn_r = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.feat_drop = nn.Dropout(feat_drop)
        self.attn_drop = nn.Dropout(attn_drop)
        self.res_fc = None
        if residual:
            dst_feats = in_feats[1] if isinstance(in_feats, tuple) else in_feats
            self.res_fc = nn.Linear(dst_feats, width, bias=bias) if dst_feats != width else nn.Identity()
        explicit_bias = bias and not isinstance(self.res_fc, nn.Linear)
        self.register_parameter("bias", nn.Parameter(torch.empty(width)) if explicit_bias else None)
        self.activation = activation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier normal with gain sqrt(2) for projections and attention vectors, zero for biases."""
        projections = [self.fc] if hasattr(self, "fc") else [self.fc_src, self.fc_dst]
        weights = [fc.weight for fc in projections] + [self.attn_l, self.attn_r]
        if isinstance(self.res_fc, nn.Linear):
            weights.append(self.res_fc.weight)
            if self.res_fc.bias is not None:
                nn.init.zeros_(self.res_fc.bias)
        for weight in weights:
            nn.init.xavier_normal_(weight, gain=nn.init.calculate_gain("relu"))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        self.allow_zero_in_degree = set_value

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
        fused = as_graph(graph)
        if not self.allow_zero_in_degree:
            check_in_degrees(graph, fused)
        h_src, h_dst = split_ends(fused, feat, self.feat_drop)
        prefix = h_src.shape[1:-1]
        feat_src, alpha_src, alpha_dst = self._project(h_src, h_dst, shared=not isinstance(feat, tuple))
        # Leading dimensions beside the nodes are more heads to the engine.
        bias = None if self.bias is None else self.bias.view(self.num_heads, self.out_feats)
        fuse_bias = bias is not None and bias.dtype == feat_src.dtype
        result = self.attention(
            fused,
            feat_src.flatten(1, -2),
            alpha_src.flatten(1),
            alpha_dst.flatten(1),
            negative_slope=self.negative_slope,
            edge_weight=edge_weight,
            out_bias=bias.expand(*prefix, -1, -1).flatten(0, -2) if fuse_bias else None,
            dropout_p=self.attn_drop.p if self.attn_drop.training else 0.0,
            return_attention=get_attention,
        )
        out, attention = result if get_attention else (result, None)
        out = out.view(fused.num_dst, *prefix, self.num_heads, self.out_feats)
        if self.res_fc is not None:
            out = out + self.res_fc(h_dst).unflatten(-1, (self.num_heads, self.out_feats))
        if bias is not None and not fuse_bias:
            out = out + bias
        if self.activation is not None:
            out = self.activation(out)
        if get_attention:
            return out, attention.view(fused.num_edges, *prefix, self.num_heads, 1)
        return out

    def _project(self, h_src: Tensor, h_dst: Tensor, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Projected source features ``[N_src, *, H, D]`` and both score terms ``[N, *, H]``."""
        fc_src, fc_dst = (self.fc, self.fc) if hasattr(self, "fc") else (self.fc_src, self.fc_dst)
        feat_src = self._heads(fc_src(h_src))
        if self._folds(fc_src, h_src) and self._folds(fc_dst, h_dst):
            if shared:
                alphas = self._folded_terms(fc_src, h_src, torch.cat([self.attn_l, self.attn_r]))
                return feat_src, alphas[0], alphas[1][: len(h_dst)]
            alpha_src = self._folded_terms(fc_src, h_src, self.attn_l)[0]
            return feat_src, alpha_src, self._folded_terms(fc_dst, h_dst, self.attn_r)[0]
        feat_dst = feat_src[: len(h_dst)] if shared else self._heads(fc_dst(h_dst))
        return feat_src, (feat_src * self.attn_l).sum(-1), (feat_dst * self.attn_r).sum(-1)

    def _folded_terms(self, fc: nn.Linear, h: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        """<W h, a> per head as <W^T a, h>, for each a in ``vectors [k, H, D]``: no N x H x D temporary."""
        weight = fc.weight.unflatten(0, (self.num_heads, self.out_feats))
        folded = (vectors[..., None] * weight).sum(2)
        return F.linear(h, folded.flatten(0, 1)).unflatten(-1, folded.shape[:2]).unbind(-2)

    def _folds(self, fc: nn.Module, h: Tensor) -> bool:
        # The output of fc must be its weight's alone. Wide inputs cost more to read a second time than the
        # temporary does, and under autocast the sum over D is taken in float32 only when it is written out.
        hooked = fc._forward_hooks or fc._forward_pre_hooks or fc._backward_hooks or fc._backward_pre_hooks
        plain = type(fc) is nn.Linear and fc.bias is None and not hooked
        narrow = h.shape[-1] <= 2 * self.num_heads * self.out_feats
        return plain and narrow and not torch.is_autocast_enabled(h.device.type)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.out_feats))

    def extra_repr(self) -> str:
        return f"out_feats={self.out_feats}, num_heads={self.num_heads}, negative_slope={self.negative_slope}"
