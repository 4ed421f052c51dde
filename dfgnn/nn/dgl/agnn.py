"""AGNNConv with DGL's contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import functional
from .._base import GraphLayer
from .._graph import split_ends


class AGNNConv(GraphLayer):
    r"""Attention-based propagation (Thekumparampil et al., "Attention-based Graph Neural Network for
    Semi-supervised Learning", 2018).

    .. math::
        h_i' = \sum_j \alpha_{ij} h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\beta \cos(h_j, h_i))

    over the edges j -> i. A drop-in for ``dgl.nn.AGNNConv``.

    Args:
        init_beta: the first value of beta.
        learn_beta: make beta a parameter; a buffer otherwise.
        allow_zero_in_degree: let destinations without in-edges through; their output is 0.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn.dgl import AGNNConv

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        out = AGNNConv()(graph, torch.randn(100, 16))  # [100, 16]
    """

    attention: Any = staticmethod(functional.dot.agnn)

    _one_name_for_ends = True

    def __init__(self, init_beta: float = 1.0, learn_beta: bool = True, allow_zero_in_degree: bool = False):
        nn.Module.__init__(self)
        self.allow_zero_in_degree = allow_zero_in_degree
        beta = torch.tensor([init_beta], dtype=torch.get_default_dtype())
        if learn_beta:
            self.beta = nn.Parameter(beta)
        else:
            self.register_buffer("beta", beta)

    def forward(self, graph: Any, feat: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Apply the layer.

        Args:
            graph, feat: as in :meth:`GATConv.forward`, with one size of features. The cosine is taken over
                the last dimension; others besides the nodes are heads.

        Returns:
            ``[N_dst, *, F]``.
        """
        fused = self._graph(graph)
        h_src, h_dst = split_ends(self, fused, feat, None)
        x_dst = None if h_dst is h_src else _three_dims(h_dst)
        out = self.attention(fused, _three_dims(h_src), x_dst, beta=self.beta)
        return out.reshape(fused.num_dst, *h_src.shape[1:])


def _three_dims(x: Tensor) -> Tensor:
    """``[N, *, F]`` as ``[N, H, F]``."""
    if x.dim() < 2:
        raise ValueError(f"AGNNConv: feat: expected shape [N, *, F], got {list(x.shape)}")
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
