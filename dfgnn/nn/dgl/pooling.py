"""GlobalAttentionPooling with DGL's contract."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ... import functional
from ...engine.argument_checks import no_graph
from ...engine.compiler_graph import EdgeList
from ...graph import Graph
from ...graph.cache import of_segments
from .._base import DGLLayer
from .._errors import wrong_argument


class GlobalAttentionPooling(DGLLayer):
    r"""A sum over the nodes of each graph of a batch, weighted by a softmax of a gate (Li et al., "Gated
    Graph Sequence Neural Networks", ICLR 2016).

    .. math::
        r = \sum_k \mathrm{softmax}_k(\mathrm{gate}(x_k)) \, \mathrm{feat}(x_k)

    A drop-in for ``dgl.nn.GlobalAttentionPooling``.

    Args:
        gate_nn: a module that makes ``[N, 1]`` of the features.
        feat_nn: a module for the features; None: they are taken as they are.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn.dgl import GlobalAttentionPooling

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        pool = GlobalAttentionPooling(torch.nn.Linear(16, 1))
        out = pool(graph, torch.randn(100, 16))  # [1, 16]
    """

    attention: Any = staticmethod(functional.gat.gat)

    def __init__(self, gate_nn: nn.Module, feat_nn: nn.Module | None = None):
        nn.Module.__init__(self)
        self.gate_nn = gate_nn
        self.feat_nn = feat_nn

    def forward(
        self, graph: Any, feat: Tensor, get_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            graph: a DGLGraph or a batch of them; or a dfgnn.Graph, which is one graph.
            feat: ``[N, F]``.
            get_attention: also return the weights.

        Returns:
            ``[B, F']`` for the B graphs of the batch, and with ``get_attention`` also ``[N, 1]``. A graph
            without nodes gets 0.

        Raises:
            TypeError, ValueError: ``graph`` or a tensor is not as described.
        """
        sizes = _sizes(graph, feat)
        gate = self.gate_nn(feat)
        if gate.shape != (len(feat), 1):
            raise wrong_argument(self, "gate_nn", f"a result of [{len(feat)}, 1]", list(gate.shape))
        values = feat if self.feat_nn is None else self.feat_nn(feat)
        if values.dim() != 2 or len(values) != len(feat):
            raise wrong_argument(self, "feat_nn", f"a result of [{len(feat)}, any]", list(values.shape))
        result = self.attention(
            _nodes_to_graphs(sizes, len(feat)), values.unsqueeze(1), gate.to(values.dtype), None,
            negative_slope=1.0, return_attention=get_attention,
        )  # fmt: skip
        if get_attention:
            return result[0].squeeze(1), result[1]
        return result.squeeze(1)


def _sizes(graph: Any, feat: Tensor) -> Tensor:
    """The number of nodes of each graph."""
    if isinstance(graph, Graph):
        sizes = torch.tensor([graph.num_nodes], device=graph.device)
    elif hasattr(graph, "batch_num_nodes"):
        sizes = graph.batch_num_nodes()
    else:
        text = no_graph(graph, "a DGLGraph or a dfgnn.Graph")
        if isinstance(graph, Tensor) and graph.dim() == 1:
            text = f"{text.partition(';')[0]}; dfgnn.nn.pyg.AttentionalAggregation takes a batch vector"
        raise TypeError(f"GlobalAttentionPooling: graph: {text}")
    if not isinstance(feat, Tensor) or feat.dim() != 2:
        got = list(feat.shape) if isinstance(feat, Tensor) else type(feat).__name__
        raise ValueError(f"GlobalAttentionPooling: feat: expected a tensor [N, F], got {got}")
    num_nodes = graph.num_nodes if isinstance(graph, Graph) else graph.num_nodes()
    if len(feat) != num_nodes:
        raise ValueError(
            f"GlobalAttentionPooling: feat: expected {num_nodes} rows, one per node, got {len(feat)}"
        )
    return sizes


def _nodes_to_graphs(sizes: Tensor, num_nodes: int) -> Graph:
    """The graph that leads from each node to its graph; cached as long as the tensor lives."""
    if torch.compiler.is_compiling():
        nodes = torch.arange(num_nodes, device=sizes.device)
        group = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes, output_size=num_nodes)
        return cast(Graph, EdgeList(torch.stack([nodes, group]), num_nodes, len(sizes)))
    return of_segments(sizes, num_nodes)
