"""ResGatedGraphConv with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor, nn
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from ...engine.edge_maps import rows_of_destinations, rows_of_sources, sum_of_edges
from ...graph import GraphPart
from .._errors import NO_EDGE_DIM, projected, wrong_argument
from .._linear import is_untouched, plain_linear
from ..fused.operator_call import fused_layer
from ..fused.spec import LayerSpec
from ._base import PyGLayer, is_batch, over_batch
from ._edges import edge_attributes
from ._x_and_edge_index import both_ends, layer_graph


class ResGatedGraphConv(PyGLayer, torch_geometric.nn.ResGatedGraphConv):
    r"""Message passing with a gate for each channel (Bresson and Laurent, "Residual Gated Graph ConvNets",
    2017).

    .. math::
        x_i' = W_s x_i + b + \sum_j \sigma(W_k x_i + W_q x_j) \circ W_v x_j

    A drop-in for ``torch_geometric.nn.ResGatedGraphConv`` with ``aggr="add"`` or ``"mean"``. Attributes of
    edges are projected apart from nodes. There are tensors ``[E, C]``; without attributes one of them, the
    gates, is saved for backward.

    Example::

        import torch
        from dfgnn.nn.pyg import ResGatedGraphConv

        edge_index = torch.randint(100, (2, 600))
        conv = ResGatedGraphConv(16, 8)
        out = conv(torch.randn(100, 16), edge_index)  # [100, 8]
    """

    _node_dim = -2

    FUSED_OPTIONS = "in_channels out_channels act edge_dim root_weight bias"

    _aggregations = SumAggregation, MeanAggregation

    @staticmethod
    def _special_reason(layer: Any) -> str | None:
        if layer.edge_dim is not None:  # then `_gated` reads the weights without calling the modules
            for name in ("lin_key", "lin_query", "lin_value"):
                if plain_linear(getattr(layer, name)) is None:
                    return f"{name} was replaced or has hooks"
        return None

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: Any, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, F]``, or a pair ``([N_src, F_src], [N_dst, F_dst])``.
            edge_index: as in :meth:`GATConv.forward`.
            edge_attr: ``[E, edge_dim]``; None in a layer without ``edge_dim``.

        Returns:
            ``[N_dst, out_channels]``.

        Raises:
            TypeError, ValueError: an argument is not as described, or sizes differ.
            NotImplementedError: a graph that several processes share.
        """
        x_src, x_dst = both_ends(self, x)
        if is_batch(x):
            return over_batch(lambda x: self.forward(x, edge_index, edge_attr), x)
        if isinstance(edge_index, GraphPart):
            raise wrong_argument(self, "edge_index", "a whole graph", edge_index.kind, NotImplementedError)
        graph, _ = layer_graph(self, edge_index, x_src, x_dst)
        attr = edge_attributes(self, edge_index, edge_attr, graph, joins=x_src.dtype)
        if (attr is None) != (self.edge_dim is None):
            wanted = ("a tensor [E, edge_dim]", "None") if attr is None else NO_EDGE_DIM
            raise wrong_argument(self, "edge_attr", *wanted)
        mean = type(self.aggr_module) is MeanAggregation
        if attr is None and x_src is x_dst:
            out = self._whole(graph, x_src, mean)
            if out is not None:
                return out
        out = self._gated(graph, x_src, x_dst, attr, mean)
        if self.root_weight:
            out = out + self.lin_skip(x_dst)
        return out if self.bias is None else out + self.bias

    def _whole(self, graph: Any, x: Tensor, mean: bool) -> Tensor | None:
        """The result of `fused_layer`."""
        if type(self.act) is not nn.Sigmoid or not is_untouched(self.act):
            return None
        spec = LayerSpec(
            "gate", 1, self.lin_value, self.lin_query, self.lin_key,
            self.lin_skip if self.root_weight else None, bias=self.bias, mean=mean,
        )  # fmt: skip
        return fused_layer(self, spec, graph, x)[0]

    def _gated(self, graph: Any, x_src: Tensor, x_dst: Tensor, attr: Tensor | None, mean: bool) -> Tensor:
        lins = (self.lin_key, x_dst), (self.lin_query, x_src), (self.lin_value, x_src)
        if attr is None:
            key, query, value = (projected(self, "x", lin, x) for lin, x in lins)
            value = rows_of_sources(graph, value)
        else:
            sizes = x_dst.shape[-1], x_src.shape[-1], x_src.shape[-1]
            weights = [lin.weight.split([size, self.edge_dim], 1) for (lin, _), size in zip(lins, sizes)]
            (key, query, value) = (
                F.linear(x, weight, lin.bias) for (lin, x), (weight, _) in zip(lins, weights)
            )
            of_gate, of_value = weights[0][1] + weights[1][1], weights[2][1]
            value = rows_of_sources(graph, value) + F.linear(attr, of_value)
        before = rows_of_destinations(graph, key) + rows_of_sources(graph, query)
        if attr is not None:
            before = before + F.linear(attr, of_gate)
        message = self.act(before) * value
        out = sum_of_edges(graph, message)
        if mean:
            count = sum_of_edges(graph, torch.ones_like(message[:, :1]))
            out = out / count.clamp(min=1)
        return out
