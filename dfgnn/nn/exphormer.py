"""Exphormer's attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..graph import Graph
from ..sparse.fixed import FixedStructure
from ._errors import blaming, check_constructor, wrong_argument
from ._linear import is_product
from .fused.typed import TypedSpec, typed_attention, typed_layer

_WHERE = "ExphormerAttention"


class ExphormerAttention(nn.Module):
    r"""Attention over edges of a few types (Shirzad et al., "Exphormer: Sparse Transformers for Graphs", ICML
    2023): those of a graph, of an expander, of virtual nodes.

    .. math::
        \alpha_{ij} = \mathrm{softmax}_j(\mathrm{clamp}(\sum_d (Q x_i)_d (K x_j)_d (E t_{ij})_d /
        \sqrt D, \pm c)), \qquad x_i' = \sum_j \alpha_{ij} V x_j

    per head, t being what belongs to the type of the edge j -> i. The published code adds 1e-6 to the
    softmax's sum; here it is exact.

    The factor of a type belongs to the key. So the graph has a source for each type and node
    (`typed_graph`), scores are sampled dot products, and of edge size are the scores ``[E, H]`` alone.

    Args:
        feats: size of the features, in and out (F); a multiple of ``num_heads``.
        num_heads: number of heads (H), each of size D = F / H.
        type_dim: size of t; None: F.
        clamp: c; None: scores are not clamped.

    Parameters are ``project``, of queries, keys and values one after the other, and ``edge``.
    Raises:
        ValueError: ``feats`` is not a multiple of ``num_heads``, or ``clamp`` not above 0.

    Example::

        import torch
        from dfgnn.nn import ExphormerAttention

        edge_index = torch.randint(100, (2, 600))
        edge_type = torch.randint(3, (600,))
        layer = ExphormerAttention(32, num_heads=4, type_dim=16)
        typed = layer.typed_graph(edge_index, edge_type, num_nodes=100, num_types=3)
        out = layer(typed, torch.randn(100, 32), torch.randn(3, 16))  # [100, 32]
    """

    @check_constructor
    def __init__(
        self, feats: int, num_heads: int, type_dim: int | None = None, clamp: float | None = 5.0
    ) -> None:
        super().__init__()
        if num_heads < 1 or feats < 1 or feats % num_heads:
            raise ValueError(f"{_WHERE}: feats: expected a multiple of num_heads = {num_heads}, got {feats}")
        self.feats, self.num_heads, self.clamp = feats, num_heads, clamp
        self.type_dim = feats if type_dim is None else type_dim
        self.project = nn.Linear(feats, 3 * feats, bias=False)
        self.edge = nn.Linear(self.type_dim, feats, bias=False)

    @staticmethod
    def typed_graph(
        edge_index: Tensor,
        edge_type: Tensor,
        num_nodes: int,
        num_types: int,
        *,
        edge_mask: Tensor | None = None,
        validate: bool = True,
    ) -> Graph:
        """The graph that `forward` takes: source t N + j is the node j at edges of type t.

        Args:
            edge_index: int64 ``[2, E]``, sources and destinations.
            edge_type: integers ``[E]``, below ``num_types``.
            num_nodes: N.
            num_types: T.
            edge_mask: bool ``[E]``, which of the columns are edges: for edges that are padded, as
                `dfgnn.capture` does it. Then nothing is waited for, and the graph is one of fixed capacity,
                as from `Graph.with_capacity`.
            validate: check ids and types, for which the device is waited for; as in `Graph.from_edge_index`.
                Never with ``edge_mask``.

        Raises:
            TypeError: types are no integers.
            ValueError: sizes differ, or an id or type is out of range.
        """
        shape = list(edge_index.shape)
        if len(shape) != 2 or shape[0] != 2:
            raise ValueError(f"{_WHERE}.typed_graph: edge_index: expected shape [2, E], got {shape}")
        if list(edge_type.shape) != shape[1:]:
            raise wrong_argument(
                f"{_WHERE}.typed_graph", "edge_type", f"shape {shape[1:]}", list(edge_type.shape)
            )
        if edge_type.is_floating_point() or edge_type.is_complex() or edge_type.dtype == torch.bool:
            raise TypeError(f"{_WHERE}.typed_graph: edge_type: expected integers, got {edge_type.dtype}")
        src, dst = edge_index
        if validate and edge_mask is None and src.numel():
            ends = torch.stack([*src.aminmax(), *edge_type.aminmax()]).tolist()
            for name, found, size in (
                ("edge_index[0]", ends[:2], num_nodes),
                ("edge_type", ends[2:], num_types),
            ):
                if found[0] < 0 or found[1] >= size:
                    raise wrong_argument(f"{_WHERE}.typed_graph", name, f"values in [0, {size})", found)
        sizes = num_types * num_nodes, num_nodes
        # edge_type may be uint8, in which its product with num_nodes would overflow.
        edges = torch.stack([edge_type.long() * num_nodes + src, dst])
        if edge_mask is None:
            return Graph.from_edge_index(edges, num_src=sizes[0], num_dst=sizes[1], validate=validate)
        if edge_mask.dtype != torch.bool or edge_mask.shape != edge_type.shape:
            raise wrong_argument(
                f"{_WHERE}.typed_graph",
                "edge_mask",
                f"bool {shape[1:]}",
                f"{edge_mask.dtype} {list(edge_mask.shape)}",
            )
        # Edges outside the mask get the id -1, which is no node: the structure leaves them out.
        return Graph._of(FixedStructure(torch.where(edge_mask, edges, -1), None, *sizes))

    @blaming
    def forward(self, graph: Any, feat: Tensor, type_feat: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            graph: as from `typed_graph`, of N nodes and T types.
            feat: ``[N, F]``.
            type_feat: t, ``[T, type_dim]``.

        Returns:
            ``[N, F]``; 0 for a node without in-edges.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        if not isinstance(graph, Graph):
            raise TypeError(f"{_WHERE}: graph: expected a dfgnn.Graph, got {type(graph).__name__}")
        for name, x, size in (("feat", feat, self.feats), ("type_feat", type_feat, self.type_dim)):
            if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != size:
                got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{_WHERE}: {name}: expected shape [any, {size}], got {got}")
        sizes = len(type_feat) * len(feat), len(feat)
        if (graph.num_src, graph.num_dst) != sizes:
            raise wrong_argument(
                _WHERE,
                "graph",
                f"{sizes[0]} sources, one for each type and node, and {sizes[1]} destinations",
                f"{graph.num_src} and {graph.num_dst}; {_WHERE}.typed_graph makes it, and type_feat has "
                f"{len(type_feat)} rows, one per type of edges",
            )
        factor = self.edge(type_feat)
        scale = 1 / math.sqrt(self.feats // self.num_heads)
        spec = TypedSpec(graph, self.num_heads, scale, self.clamp)
        if is_product(self.project):
            return typed_layer(spec, feat, self.project.weight, factor)
        return typed_attention(spec, self.project(feat), factor)

    def extra_repr(self) -> str:
        return f"feats={self.feats}, num_heads={self.num_heads}, clamp={self.clamp}"
