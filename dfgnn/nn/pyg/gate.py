"""GATEConv, the layer inside AttentiveFP, with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn.models.attentive_fp
from torch import Tensor

from ... import functional
from ...engine.edge_maps import rows_of_sources
from ...runtime.attention_options import EdgeTerm
from .._errors import check_fits, check_takes, wrong_argument
from .._linear import is_product
from ._base import PyGLayer, is_batch, over_batch
from ._edges import edge_attributes
from ._x_and_edge_index import check_rows, layer_graph


class GATEConv(PyGLayer, torch_geometric.nn.models.attentive_fp.GATEConv):
    r"""The attention with edge features of AttentiveFP (Xiong et al., "Pushing the Boundaries of Molecular
    Representation for Drug Discovery with the Graph Attention Mechanism", 2020).

    .. math::
        x_i' = \sum_j \alpha_{ij} W_2 x_j + b, \qquad \alpha_{ij} = \mathrm{softmax}_j(\mathrm{LeakyReLU}(
            a_l^T \mathrm{LeakyReLU}(W_1 [x_j \Vert e_{ij}]) + a_r^T x_i))

    A drop-in for ``torch_geometric.nn.models.attentive_fp.GATEConv``. One tensor ``[E, C]`` exists, inside
    the inner LeakyReLU.

    Example::

        import torch
        from dfgnn.nn.pyg import GATEConv

        edge_index = torch.randint(100, (2, 600))
        conv = GATEConv(16, 16, edge_dim=5)
        x, edge_attr = torch.randn(100, 16), torch.randn(600, 5)
        out = conv(x, edge_index, edge_attr)  # [100, 16]
    """

    attention: Any = staticmethod(functional.gat.gat)

    @staticmethod
    def _special_reason(layer: Any) -> str | None:
        # The weight of lin1 is read without calling lin1. lin2 is called with the rows of nodes, where
        # torch_geometric's forward calls it with those of edges. So hooks would not see what they expect.
        if not (is_product(layer.lin1) and is_product(layer.lin2)):
            return "lin1 or lin2 was replaced or has hooks"
        return None

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, F]``.
            edge_index: as in :meth:`GATConv.forward`.
            edge_attr: ``[E, edge_dim]``.

        Returns:
            ``[N, out_channels]``.
        """
        check_rows(self, "x", x)
        if is_batch(x):
            return over_batch(lambda x: self.forward(x, edge_index, edge_attr), x)
        graph, _ = layer_graph(self, edge_index, x, x)
        attr = edge_attributes(self, edge_index, edge_attr, graph, joins=x.dtype)
        if attr is None:
            raise ValueError("GATEConv: edge_attr: expected [E, edge_dim], got None")
        sizes = self.att_r.shape[1], self.att_l.shape[1]
        if sizes[0] != sizes[1]:  # torch_geometric's constructor takes them, and its forward fails
            what = f"in_channels={sizes[0]}, as the layer's lin2 is applied to x, too"
            raise wrong_argument(
                self, "out_channels", what, f"{sizes[1]}; project x before or after the layer"
            )
        check_fits(self, "x", self.lin2, x)
        of_nodes, of_edges = self.lin1.weight.split([x.shape[1], self.lin1.weight.shape[1] - x.shape[1]], 1)
        if not torch.compiler.is_compiling():
            check_takes(self, "edge_attr", of_edges, attr)
        rows = rows_of_sources(graph, F.linear(x, of_nodes)) + F.linear(attr, of_edges)
        score = F.leaky_relu(rows) @ self.att_l.t()
        feat = self.lin2(x).unsqueeze(1)
        out = self.attention(
            graph, feat, None, x @ self.att_r.t(), edge=EdgeTerm(score=score), negative_slope=0.01,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return out.squeeze(1) + self.bias
