"""GeneralConv with attention, with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from ... import functional
from ...engine.edge_maps import sum_of_features
from ...functional.dot import dot
from ...runtime.attention_options import EdgeTerm
from .._errors import check_fits, projected, wrong_argument
from .._linear import plain_linear
from ._base import FusedConv, is_batch, over_batch
from ._edges import edge_attributes
from ._x_and_edge_index import both_ends, graph_of

_SLOPE = 0.2  # of the LeakyReLU around the scores


class GeneralConv(FusedConv, torch_geometric.nn.GeneralConv):
    r"""The layer of a design space (You et al., "Design Space for Graph Neural Networks", NeurIPS 2020), with
    ``attention=True``.

    .. math::
        x_i' = \frac{1}{H} \sum_h \sum_j \alpha_{ij} m_{ij} + W_s x_i, \qquad
        m_{ij} = W x_j + W_e e_{ij} \;(+ W_i x_i), \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\mathrm{LeakyReLU}(a^T m_{ij}))
        \;\mathrm{or}\; \mathrm{softmax}_j(\mathrm{LeakyReLU}(m_{ij}^T m_{ji} / \sqrt{C}))

    A drop-in for ``torch_geometric.nn.GeneralConv``. The edges' part of the messages is projected per node:
    of edge size is ``[E, H]``. Without attention, and with that of dot products where messages have a part of
    the edge or of both ends, torch_geometric's own forward runs.

    Example::

        import torch
        from dfgnn.nn.pyg import GeneralConv

        edge_index = torch.randint(100, (2, 600))
        conv = GeneralConv(16, 8, attention=True, heads=4)
        out = conv(torch.randn(100, 16), edge_index)  # [100, 8]
    """

    @staticmethod
    def _special_reason(layer: Any) -> str | None:
        if not layer.attention:
            return "attention=False"
        factors = layer.directed_msg and layer.in_edge_channels is None
        if layer.attention_type != "additive" and not factors:
            return "attention_type='dot_product' with edge features or directed_msg=False"
        lin = getattr(layer, "lin_edge", None)  # its weight is read without calling it
        if lin is not None and plain_linear(lin) is None:
            return "lin_edge was replaced or has hooks"
        # lin_msg and lin_msg_i are called with the rows of nodes, where torch_geometric's forward calls them
        # with those of edges. So hooks would not see what they expect.
        ends = (layer.lin_msg,) if layer.directed_msg else (layer.lin_msg, layer.lin_msg_i)
        if any(plain_linear(lin) is None for lin in ends):
            return "lin_msg or lin_msg_i was replaced or has hooks"
        return None

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, F]``, or a pair ``([N_src, F_src], [N_dst, F_dst])``.
            edge_index: as in :meth:`GATConv.forward`.
            edge_attr: ``[E, in_edge_channels]``, or None.
            size: (N_src, N_dst), checked.

        Returns:
            ``[N_dst, out_channels]``.
        """
        x_src, x_dst = both_ends(self, x)
        if is_batch(x):
            return over_batch(lambda x: self.forward(x, edge_index, edge_attr, size), x)
        graph, _ = graph_of(self, edge_index, x_src, x_dst, size)
        attr = edge_attributes(self, edge_index, edge_attr, graph)
        if attr is not None and self.in_edge_channels is None:
            raise wrong_argument(self, "edge_attr", "None in a layer without in_edge_channels", "a tensor")
        feat = self._heads(projected(self, "x", self.lin_msg, x_src))
        if self.attention_type != "additive":
            # The query is divided by `scaler`, a tensor: exporters cannot read its value for the argument
            # `scale`.
            query = self._heads(self.lin_msg(x_dst)) / self.scaler
            out = dot(graph, query, feat, feat, scale=1.0, negative_slope=_SLOPE)
        else:
            out = self._additive(graph, feat, x_dst, attr)
        out = out.mean(1) + self.lin_self(x_dst)
        return F.normalize(out, p=2, dim=-1) if self.normalize_l2 else out

    def _additive(self, graph: Any, feat: Tensor, x_dst: Tensor, attr: Tensor | None) -> Tensor:
        score_src = (feat * self.att_msg).sum(-1)
        score_dst = bias = None
        # `constant` is the part that all messages into a node have in common. The weights of these messages
        # add up to 1, so that `constant` is added to the result once, if the node has any edges.
        constant: Tensor | None = None
        if not self.directed_msg:
            constant = self._heads(self.lin_msg_i(x_dst))
            score_dst = (constant * self.att_msg).sum(-1)
        if attr is not None:
            check_fits(self, "edge_attr", self.lin_edge, attr)
            weight, offset = self._heads(self.lin_edge.weight.t()), self.lin_edge.bias  # weight: [d, H, C]
            bias = F.linear(attr, (weight * self.att_msg).sum(-1).t())
            if offset is not None:
                offset = self._heads(offset)
                bias = bias + (offset * self.att_msg[0]).sum(-1)
                constant = offset if constant is None else constant + offset
        result: Any = functional.gat_attention(
            graph, feat, score_src, score_dst, edge=EdgeTerm(score=bias), negative_slope=_SLOPE,
            return_attention=attr is not None,
        )  # fmt: skip
        out: Tensor
        if attr is None:
            out = result
        else:
            out, attention = result
            sums = sum_of_features(graph, attention, attr.to(feat.dtype))
            out = out + (sums.transpose(0, 1) @ weight.transpose(0, 1)).transpose(0, 1)
        if constant is not None:
            has_edges = (graph.in_degrees() > 0).to(out).view(-1, 1, 1)
            out = out + has_edges * constant
        return out
