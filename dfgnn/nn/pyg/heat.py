"""HEATConv with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.dense import HeteroLinear

from ... import functional
from ...engine.edge_maps import sum_of_features
from ...runtime.attention_options import EdgeTerm
from .._errors import check_takes, projected
from .._linear import is_untouched, plain_linear
from .._sums_in_16_bits import HALF, rows_of_types
from .._typed import check_types, groups_of, is_recorded, typed_linear
from ._base import FusedConv, is_batch, over_batch
from ._edges import edge_attributes
from ._x_and_edge_index import check_rows, graph_of


class HEATConv(FusedConv, torch_geometric.nn.HEATConv):
    r"""Heterogeneous edge-enhanced attention (Mo et al., "Heterogeneous Edge-Enhanced Graph Attention Network
    for Multi-Agent Trajectory Prediction", 2021).

    .. math::
        x_i' = \sum_j \alpha_{ij} W [H x_j \Vert e_{ij}], \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\mathrm{LeakyReLU}(
            a^T [H x_i \Vert H x_j \Vert t_{ij} \Vert e_{ij}]))

    with H of a node's type and embeddings t of an edge's type and e of its attributes. A drop-in for
    ``torch_geometric.nn.HEATConv``. The edges' part of the messages is projected per node: of edge size are e
    and ``[E, H]``.

    Example::

        import torch
        from dfgnn.nn.pyg import HEATConv

        edge_index = torch.randint(100, (2, 600))
        conv = HEATConv(16, 8, 2, 3, 4, 5, 6, heads=4)
        node_type, edge_type = torch.randint(2, (100,)), torch.randint(3, (600,))
        x, edge_attr = torch.randn(100, 16), torch.randn(600, 5)
        out = conv(x, edge_index, node_type, edge_type, edge_attr)  # [100, 32]
    """

    attention: Any = staticmethod(functional.gat.gat)

    @staticmethod
    def _special_reason(layer: Any) -> str | None:
        for lin in (layer.att, layer.lin):  # their weights are read without calling them
            if plain_linear(lin) is None:
                return "att or lin was replaced or has hooks"
        kinds = layer.edge_type_emb
        if type(kinds) is not torch.nn.Embedding or not is_untouched(kinds):
            return "edge_type_emb was replaced or has hooks"
        if kinds.max_norm is not None or kinds.scale_grad_by_freq or kinds.sparse:
            return "edge_type_emb has options of its own"
        return None

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        node_type: Tensor,
        edge_type: Tensor,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, F]``.
            edge_index: as in :meth:`GATConv.forward`.
            node_type: the type of each node, integers ``[N]``.
            edge_type: the type of each edge, integers ``[E]``.
            edge_attr: ``[E, edge_dim]``.

        Returns:
            ``[N, H * C]``, or ``[N, C]`` with ``concat=False``.
        """
        check_rows(self, "x", x)
        if is_batch(x):
            return over_batch(lambda x: self.forward(x, edge_index, node_type, edge_type, edge_attr), x)
        graph, _ = graph_of(self, edge_index, x, x)
        attr = edge_attributes(self, edge_index, edge_attr, graph)
        if attr is None:
            raise ValueError("HEATConv: edge_attr: expected [E, edge_dim], got None")
        self._check(x, node_type, edge_type, graph.num_edges)
        x = self._of_node_types(x, node_type.long())
        attr = F.leaky_relu(projected(self, "edge_attr", self.edge_attr_emb, attr), self.negative_slope)
        channels, kinds = self.out_channels, self.edge_type_emb
        sizes = [channels, channels, kinds.embedding_dim, attr.shape[1]]
        of_dst, of_src, of_type, of_attr = self.att.weight.split(sizes, dim=1)
        # The embeddings are projected per type, not per edge, and each edge looks its type's result up. This
        # gives the same gradients.
        types = F.linear(F.leaky_relu(kinds.weight, self.negative_slope), of_type)
        score = F.linear(attr, of_attr) + rows_of_types(types, edge_type.long())
        of_nodes, of_edges = self.lin.weight.split(sizes[1::2], dim=1)
        feat = F.linear(x, of_nodes, self.lin.bias).unsqueeze(1).expand(-1, self.heads, -1)
        out, attention = self.attention(
            graph, feat, F.linear(x, of_src), F.linear(x, of_dst), edge=EdgeTerm(score=score.to(feat.dtype)),
            negative_slope=self.negative_slope, dropout_p=self.dropout if self.training else 0.0,
            return_attention=True,
        )  # fmt: skip
        out = out + F.linear(sum_of_features(graph, attention, attr.to(feat.dtype)), of_edges)
        if not self.concat:
            out = out.mean(1)
        if self.root_weight:
            out = out + (x.unsqueeze(1) if self.concat else x)
        return out.flatten(1)

    def _of_node_types(self, x: Tensor, types: Tensor) -> Tensor:
        """`hetero_lin`, whose own gradient of the bias, that of bias[types], loses sums in 16 bits."""
        lin = self.hetero_lin
        if x.is_meta:  # the module reads the types; the map of one type has the shape
            return F.linear(x, lin.weight[0].t(), None if lin.bias is None else lin.bias[0])
        plain = type(lin) is HeteroLinear and lin.bias is not None and is_untouched(lin)
        if not (plain and x.dtype in HALF and x.dtype == lin.weight.dtype):
            return lin(x, types)
        out = typed_linear(x.unsqueeze(1), lin.weight, types, "HEATConv: node_type").squeeze(1)
        return out + rows_of_types(lin.bias, types)

    def _check(self, x: Tensor, node_type: Tensor, edge_type: Tensor, num_edges: int) -> None:
        """Raise for types that do not exist: `hetero_lin` would write out of bounds."""
        check_types(node_type, "HEATConv: node_type", len(x))
        check_types(edge_type, "HEATConv: edge_type", num_edges)
        if is_recorded(node_type):
            return
        groups_of(node_type, self.hetero_lin.num_types, "HEATConv: node_type")
        groups_of(edge_type, self.edge_type_emb.num_embeddings, "HEATConv: edge_type")
        if not isinstance(self.hetero_lin.weight, torch.nn.UninitializedParameter):
            check_takes(self, "x", self.hetero_lin.weight, x)
