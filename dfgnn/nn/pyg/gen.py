"""GENConv with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor, nn

from ... import functional
from ...engine.edge_maps import by_edges, rows_of_sources
from .._errors import projected, wrong_argument
from ._base import FusedConv, is_batch, over_batch
from ._edges import edge_attributes
from ._x_and_edge_index import ends, graph_of
from .aggregation import SoftmaxAggregation, scores_of


class GENConv(FusedConv, torch_geometric.nn.GENConv):
    r"""Generalised graph convolution with a softmax over each channel (Li et al., "DeeperGCN: All You Need to
    Train Deeper GCNs", 2020).

    .. math::
        x_i' = \mathrm{MLP}(x_i + \sum_j \mathrm{softmax}_j(t \, m_{ij}) \circ m_{ij}), \qquad
        m_{ij} = \mathrm{ReLU}(x_j + W e_{ij}) + \epsilon

    A drop-in for ``torch_geometric.nn.GENConv`` with ``aggr="softmax"`` or ``"softmax_sg"``. Without edge
    attributes a message is that of its source, and there is no tensor of edge size; with them there are the
    messages ``[E, F]``.

    Example::

        import torch
        from dfgnn.nn.pyg import GENConv

        edge_index = torch.randint(100, (2, 600))
        conv = GENConv(16, 8, learn_t=True)
        out = conv(torch.randn(100, 16), edge_index)  # [100, 8]
    """

    _node_dim = -2

    attention: Any = staticmethod(functional.gat.gat)

    _aggregations = torch_geometric.nn.aggr.SoftmaxAggregation, SoftmaxAggregation

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, F]``, or a pair ``([N_src, F_src], [N_dst, F_dst] or None)``.
            edge_index: as in :meth:`GATConv.forward`.
            edge_attr: ``[E, edge_dim]``, or ``[E, out_channels]`` in a layer without ``edge_dim``; or None.
            size: (N_src, N_dst); needed where there are no destination features and N_dst differs.

        Returns:
            ``[N_dst, out_channels]``.
        """
        x_src, x_dst = ends(self, x)
        if is_batch(x):
            if self.training and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.modules()):
                what = "[N, F] in training, where a batch norm counts the rows of one set"
                raise wrong_argument(self, "x", what, "[B, N, F]", NotImplementedError)
            return over_batch(lambda x: self.forward(x, edge_index, edge_attr, size), x)
        graph, _ = graph_of(self, edge_index, x_src, x_dst, size)
        if hasattr(self, "lin_src"):
            x_src = projected(self, "x", self.lin_src, x_src)
        joins = None if hasattr(self, "lin_edge") else x_src.dtype
        attr = edge_attributes(self, edge_index, edge_attr, graph, joins=joins)
        if attr is None:
            message = x_src.relu() + self.eps
        else:
            attr = projected(self, "edge_attr", self.lin_edge, attr) if hasattr(self, "lin_edge") else attr
            if attr.shape[1] != x_src.shape[1]:
                what = f"{x_src.shape[1]} columns in a layer without edge_dim"
                raise wrong_argument(self, "edge_attr", what, list(attr.shape))
            message = (rows_of_sources(graph, x_src) + attr).relu() + self.eps
            graph = by_edges(graph)
        score = scores_of(self.aggr_module, message)
        out = self.attention(graph, message.unsqueeze(2), score, None, negative_slope=1.0).squeeze(2)
        if hasattr(self, "msg_norm"):
            out = self.msg_norm(x_src if x_dst is None else x_dst, out)
        if x_dst is not None:
            out = out + (self.lin_dst(x_dst) if hasattr(self, "lin_dst") else x_dst)
        return self.mlp(out)
