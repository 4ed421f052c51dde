"""AGNNConv with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from ... import functional
from ...runtime.eager import without_autocast
from ._base import FusedConv
from ._x_and_edge_index import check_rows, graph_of


class AGNNConv(FusedConv, torch_geometric.nn.AGNNConv):
    r"""Attention by similarity (Thekumparampil et al., "Attention-based Graph Neural Network for
    Semi-Supervised Learning", 2018).

    .. math::
        x_i' = \sum_j \mathrm{softmax}_j(\beta \cos(x_i, x_j)) \, x_j

    over the edges j -> i, which include loops. A drop-in for ``torch_geometric.nn.AGNNConv``, without tensors
    of edge size.

    Example::

        import torch
        from dfgnn.nn.pyg import AGNNConv

        edge_index = torch.randint(100, (2, 600))
        out = AGNNConv()(torch.randn(100, 16), edge_index)  # [100, 16]
    """

    _node_dim = -2

    attention: Any = staticmethod(functional.dot.agnn)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, F]``.
            edge_index: as in :meth:`GATConv.forward`.

        Returns:
            ``[N, F]``.
        """
        check_rows(self, "x", x)
        graph, _ = graph_of(self, edge_index, x, x, self_loops=self.add_self_loops)
        with without_autocast(x):  # it would compute norms in float32
            out = self.attention(graph, x.unsqueeze(-2), beta=self.beta).squeeze(-2)
        return out.to(torch.promote_types(x.dtype, self.beta.dtype))  # the dtypes may differ under autocast
