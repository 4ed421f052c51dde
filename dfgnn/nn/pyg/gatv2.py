"""GATv2Conv with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from ... import functional
from ...graph import Graph
from ...runtime.attention_options import EdgeTerm, Projected
from ...runtime.eager import is_eager
from .._errors import NO_EDGE_DIM, check_fits, projected, wrong_argument
from .._linear import is_product
from ..fused.operator_call import refuse_parameters
from ..fused.spec import LayerSpec
from ..fused.traced import folds
from ._base import PyGLayer
from ._edges import edge_attributes, given_attributes
from ._x_and_edge_index import both_ends, layer_graph, wants_attention


class GATv2Conv(PyGLayer, torch_geometric.nn.GATv2Conv):
    r"""Graph attention layer with dynamic attention (Brody, Alon and Yahav, "How Attentive are Graph
    Attention Networks?", ICLR 2022).

    .. math::
        x_i' = \sum_j \alpha_{ij} W_l x_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(a^T \mathrm{LeakyReLU}(W_l x_j + W_r x_i + W_e e_{ij}))

    per head, over the edges j -> i, which include loops. A drop-in for ``torch_geometric.nn.GATv2Conv``. Of
    edge size are scores, and on the CPU the signs of what LeakyReLU is applied to; elsewhere projected
    attributes ``[E, H, C]``.

    Example::

        import torch
        from dfgnn.nn.pyg import GATv2Conv

        edge_index = torch.randint(100, (2, 600))
        conv = GATv2Conv(16, 8, heads=4, edge_dim=5)
        x, edge_attr = torch.randn(100, 16), torch.randn(600, 5)
        out = conv(x, edge_index, edge_attr)  # [100, 32]
    """

    FUSED_OPTIONS = (
        "in_channels out_channels heads concat negative_slope dropout add_self_loops edge_dim fill_value "
        "bias share_weights residual"
    )

    attention: Any = staticmethod(functional.gat.gatv2)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Apply the layer.

        Args:
            x: ``[N, F]``, or a pair ``([N_src, F_src], [N_dst, F_dst])``.
            edge_index, return_attention_weights: as in :meth:`GATConv.forward`.
            edge_attr: ``[E]`` or ``[E, edge_dim]``.

        Returns:
            As :meth:`GATConv.forward`.
        """
        x_src, x_dst = both_ends(self, x)
        graph, edge_map = layer_graph(self, edge_index, x_src, x_dst, self_loops=self.add_self_loops)
        wanted = wants_attention(return_attention_weights)
        edge_attr = self._attributes(edge_index, edge_attr, graph, edge_map)
        own_dst = None if x_dst is x_src else x_dst
        spec = self._spec(x, edge_attr)
        out, seed = self._fused(spec, graph, x_src, own_dst, x_dst, wanted)
        if out is not None and not wanted:
            return out
        # Modules are called in torch_geometric's order: a lazy module draws its parameters at its first call.
        res = None if out is not None else self.res
        res = None if res is None else projected(self, "x", res, x_dst)
        refuse_parameters(self, spec)
        source, destination = ("x", "x") if x_src is x_dst else ("x[0]", "x[1]")
        feat = feat_dst = self._heads(projected(self, source, self.lin_l, x_src))
        if not self._shared(x):
            feat_dst = self._heads(projected(self, destination, self.lin_r, x_dst))
        edge = None if edge_attr is None else self._term(edge_attr)
        dtype = torch.promote_types(feat.dtype, self.att.dtype)  # the dtypes differ under autocast
        inputs = feat_dst, feat, self.att[0].to(feat.dtype)
        options = self._options(seed, negative_slope=self.negative_slope, edge=edge)
        return self._result(edge_index, graph, out, inputs, options, dtype, res, wanted)

    def _shared(self, x: Tensor | tuple[Tensor, Tensor]) -> bool:
        """Whether ``lin_l`` also projects the destinations. One of the two modules may have been replaced."""
        if isinstance(x, Tensor):
            return self.share_weights
        return x[0] is x[1] and self.lin_l is self.lin_r

    def _spec(self, x: Tensor | tuple[Tensor, Tensor], edge_attr: Tensor | None) -> LayerSpec:
        attn, joined = self.att, self._joins_heads()
        edges = None if edge_attr is None else (edge_attr, self.lin_edge)
        return LayerSpec(
            "additive_v2", self.heads, self.lin_l, query=None if self._shared(x) else self.lin_r,
            skip=self.res if joined else None, edges=edges, vectors=(attn,),
            bias=self.bias if joined else None, negative_slope=self.negative_slope,
            dropout_p=self.dropout if self.training else 0.0, wide=attn,
        )  # fmt: skip

    def _attributes(
        self, edge_index: Any, edge_attr: Tensor | None, graph: Graph, edge_map: Tensor | None
    ) -> Tensor | None:
        """The attributes ``[E', F]`` of the graph's edges, loops included, if there are any."""
        if self.lin_edge is not None:
            return edge_attributes(self, edge_index, edge_attr, graph, edge_map, self.fill_value)
        if given_attributes(self, edge_index, edge_attr)[1] is not None:
            raise wrong_argument(self, "edge_attr", *NO_EDGE_DIM)
        return None

    def _term(self, edge_attr: Tensor) -> EdgeTerm:
        """The edges' term of the keys: the projected attributes ``[E', H, C]``, or, on the CPU where these
        would be large, the attributes and their projection."""
        width = self.heads * self.out_channels
        takes_both = is_eager(edge_attr) and edge_attr.dim() == 2 and is_product(self.lin_edge)
        if takes_both and folds(edge_attr, self.heads, width, "additive_v2"):
            check_fits(self, "edge_attr", self.lin_edge, edge_attr)
            if not torch.is_autocast_enabled("cpu"):
                return EdgeTerm(Projected(edge_attr, self.lin_edge.weight))
        return EdgeTerm(self._heads(projected(self, "edge_attr", self.lin_edge, edge_attr)))
