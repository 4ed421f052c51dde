"""SuperGATConv with torch_geometric's contract."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from ... import functional
from ...graph import Graph
from ...graph.build import from_coo
from ...sparse import csr as _csr
from .._errors import projected, wrong_argument
from .._linear import score_terms
from ._base import FusedConv, is_batch, over_batch
from ._x_and_edge_index import check_rows, graph_of


class SuperGATConv(FusedConv, torch_geometric.nn.SuperGATConv):
    r"""Self-supervised graph attention (Kim and Oh, "How to Find Your Friendly Neighborhood", ICLR 2021).

    .. math::
        x_i' = \sum_j \alpha_{ij} W x_j, \qquad
        s^{MX}_{ij} = \mathrm{LeakyReLU}((a_l^T W x_j + a_r^T W x_i) \, \sigma(\phi_{ij})), \quad
        s^{SD}_{ij} = \mathrm{LeakyReLU}(\phi_{ij} / \sqrt{C}), \quad
        \phi_{ij} = (W x_i)^T W x_j

    per head, with the softmax over the edges into i, which include loops. In training the layer keeps the
    logits of edges and of sampled pairs without an edge, for :meth:`get_attention_loss`. A drop-in for
    ``torch_geometric.nn.SuperGATConv``. Tensors of edge size hold one number per edge and head: the gate of
    MX, and the logits.

    Example::

        import torch
        from dfgnn.nn.pyg import SuperGATConv

        edge_index = torch.randint(100, (2, 600))
        conv = SuperGATConv(16, 8, heads=4)
        out = conv(torch.randn(100, 16), edge_index)  # [100, 32]
        loss = out.square().mean() + conv.get_attention_loss()
    """

    attention: Any = staticmethod(functional.gat.gat)
    dot_attention: Any = staticmethod(functional.dot.dot)

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        neg_edge_index: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, F]``.
            edge_index: as in :meth:`GATConv.forward`.
            neg_edge_index: ``[2, E_neg]``, pairs without an edge; None: they are sampled, in training.
            batch: int64 ``[N]``, the graph that each node belongs to; sampled pairs are of the same graph.

        Returns:
            ``[N, H * C]``, or ``[N, C]`` with ``concat=False``.
        """
        check_rows(self, "x", x)
        if is_batch(x):
            if self.training:
                what = "[N, F] in training, where logits of samples are kept"
                raise wrong_argument(self, "x", what, "[B, N, F]", NotImplementedError)
            return over_batch(lambda x: self.forward(x, edge_index, neg_edge_index, batch), x)
        graph, _ = graph_of(self, edge_index, x, x, self_loops=self.add_self_loops)
        negatives = None
        if self.training and neg_edge_index is not None:
            negatives = _graph_of_samples("neg_edge_index", neg_edge_index, len(x))
        feat = self._heads(projected(self, "x", self.lin, x))
        fused_bias, bias = self._split_bias(feat.dtype)
        options = self._options(negative_slope=self.negative_slope, out_bias=fused_bias)
        logits = None
        if self.attention_type == "MX":
            logits = self._logits(graph, feat)
            terms = score_terms(self.lin, x, feat, self.att_l, self.att_r)
            out = self.attention(graph, feat, *terms, gate=logits.sigmoid(), **options)
        else:
            out = self.dot_attention(graph, feat, feat, feat, scale=self._scale, **options)
        if self.training and not x.is_meta:  # samples depend on values
            self._keep_logits(feat, graph, logits, negatives, batch)
        return self._merged(out, bias)

    @property
    def _scale(self) -> float:
        return 1.0 if self.attention_type == "MX" else 1 / math.sqrt(self.out_channels)

    def _logits(self, graph: Graph, feat: Tensor) -> Tensor:
        """phi of the edges, ``[E, H]``; divided by sqrt(C) for SD."""
        return functional.sddmm(graph, feat, feat) * self._scale

    @torch.compiler.disable  # negative_sampling draws samples in Python
    def _keep_logits(
        self,
        feat: Tensor,
        graph: Graph,
        logits: Tensor | None,
        negatives: Graph | None,
        batch: Tensor | None,
    ) -> None:
        """Set what get_attention_loss compares: the logits of edges and of pairs without one, and 1 or 0.

        logits: of all edges, or None if they are not computed yet. The samples are drawn in torch_geometric's
        order.
        """
        edge_index, num_nodes = graph.edge_index, len(feat)
        positives = self.positive_sampling(edge_index)
        if negatives is None:
            samples = self.negative_sampling(edge_index, num_nodes, batch)
            samples = samples.to(torch.int64)  # float32 if the library found no samples
            negatives = _graph_of_samples("negative_sampling", samples, num_nodes)
        if positives is not edge_index:
            logits = self._logits(_graph_of_samples("positive_sampling", positives, num_nodes), feat)
        elif logits is None:
            logits = self._logits(graph, feat)
        self.att_x = torch.cat([logits, self._logits(negatives, feat)])
        self.att_y = self.att_x.new_zeros(len(self.att_x))
        self.att_y[: len(logits)] = 1


def _graph_of_samples(name: str, edge_index: Tensor, num_nodes: int) -> Graph:
    src, dst = _csr.as_index("SuperGATConv", name, edge_index, (2, None))
    names = f"{name}[0]", f"{name}[1]"
    return from_coo(Graph, _csr.UserEdges("SuperGATConv", names, src, dst, num_nodes, num_nodes))
