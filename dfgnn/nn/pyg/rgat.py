"""RGATConv with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor, nn

from ... import functional
from ...engine.compiler_graph import EdgeList
from ...graph import Graph
from ...runtime.attention_options import EdgeTerm
from ...runtime.tracing import any_batched
from .._errors import check_fits, check_takes, wrong_argument
from .._linear import is_product
from .._typed import Pairs
from ._base import FusedConv, is_batch, over_batch
from ._edges import attention_result, given_attributes
from ._relations import Relations, relations_of
from ._x_and_edge_index import both_ends, for_upstream, sizes_of

_MODS = "additive", "scaled", "f-additive", "f-scaled"


class RGATConv(FusedConv, torch_geometric.nn.RGATConv):
    r"""Relational graph attention (Busbridge et al., "Relational Graph Attention Networks", 2019).

    .. math::
        x_i' = \sum_r \sum_{j \in N_r(i)} \alpha^{(r)}_{ij} W_r x_j, \qquad
        s^{(r)}_{ij} = \mathrm{LeakyReLU}(Q W_r x_i + K W_r x_j + E W_e e_{ij})
        \;\mathrm{or}\; (Q W_r x_i) (K W_r x_j) (E W_e e_{ij})

    with the softmax over all edges into i, or over those of a relation. A drop-in for
    ``torch_geometric.nn.RGATConv``. Features are transformed once for each source and relation that it has
    edges of, and all relations run in one launch. The only tensors of edge size hold one number per edge and
    head: the destination's score term, which depends on the relation, and the attention where it is asked
    for.

    Example::

        import torch
        from dfgnn.nn.pyg import RGATConv

        edge_index = torch.randint(100, (2, 600))
        edge_type = torch.randint(3, (600,))
        conv = RGATConv(16, 8, num_relations=3, heads=4)
        out = conv(torch.randn(100, 16), edge_index, edge_type)  # [100, 32]
    """

    attention: Any = staticmethod(functional.gat.gat)

    def reset_parameters(self) -> None:
        """torch_geometric's, which computes the value of `l2` but does not assign it: in a new layer `l2`
        would be uninitialised memory, now and then NaN."""
        super().reset_parameters()
        nn.init.constant_(self.l2, 1 / self.out_channels)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_type: Tensor | None = None,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Apply the layer.

        Args:
            x: ``[N, F]``, or a pair ``([N_src, F], [N_dst, F])``.
            edge_index: as in :meth:`GATConv.forward`.
            edge_type: int32 or int64 ``[E]``, the relation of each edge; None: the values of a sparse tensor.
            edge_attr: ``[E]`` or ``[E, edge_dim]``, or one row for all edges. None: the values of a sparse
                tensor, if an edge has several of them.
            size: (N_src, N_dst), checked.
            return_attention_weights: a bool, whichever, also returns the attention, before dropout.

        Returns:
            ``[N_dst, H * D * C]``, or ``[N_dst, D * C]`` with ``concat=False``, D being ``dim``; and where
            attention is asked for, a pair of the edges and ``[E, H * D]``, or a SparseTensor of both.
        """
        x_src, x_dst = both_ends(self, x)
        if is_batch(x):
            more = edge_index, edge_type, edge_attr, size, return_attention_weights
            return over_batch(lambda x: self.forward(x, *more), x)
        weight = self.weight if self.num_bases is None else self.basis
        for end in (x_src,) if x_dst is x_src else (x_src, x_dst):
            check_takes(self, "x", weight.flatten(1, -2), end)
        num_src, num_dst = sizes_of(self, edge_index, x_src, x_dst, size)
        edge_index = for_upstream(edge_index)
        edge_attr = self._edge_attributes(edge_index, edge_attr)
        within = self.attention_mechanism == "within-relation"
        sizes, per_edge = (num_src, num_dst, self.num_relations), not (within and self._is_additive)
        relations = relations_of(edge_index, edge_type, sizes, within=within, per_edge=per_edge)
        term = None if edge_attr is None else self._edge_term(edge_attr, edge_type)
        value, scores = self._scores(relations, x_src, x_dst, term)
        asked = isinstance(return_attention_weights, bool)
        bias = self.bias
        fuse_bias = self.concat and not within and self.mod not in _MODS
        if bias is not None and fuse_bias and bias.dtype == value.dtype:  # the dtypes differ under autocast
            scores["out_bias"], bias = bias.view(value.shape[1:]), None
        out, alpha = self._aggregate(relations.graph, value, scores, asked)
        if within:
            out = relations.to_nodes(out)
        out = self._scale(out, relations.in_degrees)
        out = out.flatten(1) if self.concat else out.unflatten(1, (self.heads, -1)).mean(1).flatten(1)
        if bias is not None:
            out = out + bias
        if not asked:
            return out
        if isinstance(relations.graph, EdgeList) or any_batched((alpha,)):
            return out, (edge_index, alpha)
        return out, attention_result(edge_index, alpha, relations.graph, False)

    def _edge_attributes(self, edge_index: Any, edge_attr: Tensor | None) -> Tensor | None:
        """``[E, edge_dim]`` or ``[1, edge_dim]``; from a sparse tensor's values where they are not given."""
        num_edges, edge_attr = given_attributes(self, edge_index, edge_attr)
        if edge_attr is None:
            return None
        if self.lin_edge is None:
            raise ValueError("RGATConv: edge_attr: expected None, as the layer has no edge_dim, got a tensor")
        edge_attr = edge_attr.unsqueeze(1) if edge_attr.dim() == 1 else edge_attr
        if edge_attr.shape not in ((num_edges, self.edge_dim), (1, self.edge_dim)):
            raise wrong_argument(
                self, "edge_attr", f"shape [{num_edges}, {self.edge_dim}]", list(edge_attr.shape)
            )
        check_fits(self, "edge_attr", self.lin_edge, edge_attr)
        return edge_attr

    @property
    def _is_additive(self) -> bool:
        return self.attention_mode == "additive-self-attention"

    def _scores(
        self, relations: Relations, x_src: Tensor, x_dst: Tensor, per_edge: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The values ``[P, H * D, C]`` of the sources' pairs, and the arguments that make the scores.

        per_edge: the term of the edges' attributes, ``[E, H * D]`` or ``[1, H * D]``.
        """
        if self.num_bases is None:
            weight = self.weight
        else:
            weight = (self.att @ self.basis.flatten(1)).unflatten(1, self.basis.shape[1:])
        value = _of_pairs(relations.src, x_src, weight)
        # W_r x_i is needed only for its product with q (i: the destination, r: the relation). It need not be
        # computed: q . (W_r x_i) = (W_r^T q) . x_i.
        blocks = self.q.unflatten(0, (*weight.shape[1:-2], weight.shape[-1]))
        query = _of_pairs(relations.dst, x_dst, (weight @ blocks).flatten(1, -2))
        scores: dict[str, Any] = {"score_src": value @ self.k, "score_dst": None}
        if relations.to_edges is None:
            scores["score_dst"] = query
        else:
            query = relations.to_edges(query)
            if per_edge is None:
                per_edge = query
            else:
                per_edge = query + per_edge if self._is_additive else query * per_edge
        if per_edge is not None:
            per_edge = per_edge.expand(relations.graph.num_edges, -1)
        if not self._is_additive:
            scores["gate"] = per_edge
        elif per_edge is not None:
            scores["edge"] = EdgeTerm(score=per_edge)
        scores["negative_slope"] = self.negative_slope if self._is_additive else 1.0
        value = value.unflatten(1, (self.heads, 1, -1)).expand(-1, -1, self.dim, -1)
        return value.flatten(1, 2), scores

    def _edge_term(self, edge_attr: Tensor, edge_type: Tensor | None) -> Tensor:
        """The term of the edges' attributes in the scores, ``[E, H * D]`` or ``[1, H * D]``."""
        if is_product(self.lin_edge):
            return edge_attr @ (self.lin_edge.weight.t() @ self.e)
        rows = self.lin_edge(edge_attr)
        if len(rows) != len(edge_attr) and edge_type is not None:  # a hook returned a row per type
            rows = rows.index_select(0, edge_type)
        return rows @ self.e

    def _aggregate(
        self, graph: Graph, value: Tensor, scores: dict[str, Any], asked: bool
    ) -> tuple[Tensor, Any]:
        """The weighted sums, and the attention without dropout, which is None unless asked for."""
        dropout_p = self.dropout if self.training and self.mod not in _MODS else 0.0
        wanted = self.mod == "f-additive" or (asked and dropout_p == 0)
        result = self.attention(graph, value, **scores, dropout_p=dropout_p, return_attention=wanted)
        out: Tensor = result[0] if wanted else result
        alpha: Any = result[1] if wanted else None
        if self.mod == "additive":
            out = out + self.w * functional.spmm(graph, value.new_ones(graph.num_edges), value)
        elif self.mod == "f-additive":
            out = out + functional.spmm(graph, (alpha > 0).to(value.dtype), value)
        if asked and alpha is None:
            scores = {**scores, "out_bias": None}
            _, alpha = self.attention(graph, value[..., :1].detach(), **scores, return_attention=True)
        return out, alpha

    def _scale(self, out: Tensor, in_degrees: Tensor) -> Tensor:
        """``out [N, H * D, C]``; multiplied by a function of the in-degrees if ``mod`` asks for that."""
        if self.mod == "scaled":
            degree = in_degrees.to(out.dtype).unsqueeze(1)
            degree = self.activation(degree @ self.l1 + self.b1) @ self.l2 + self.b2
            return out * degree.unsqueeze(1)
        if self.mod == "f-scaled":
            return out * in_degrees.to(out.dtype).view(-1, 1, 1)
        return out


def _of_pairs(pairs: Pairs, x: Tensor, weight: Tensor) -> Tensor:
    """``[P, K]``: x ``[N, F]`` of each pair's node times the weight ``[R, F, K]`` of its relation, or the
    diagonal blocks ``[R, B, F / B, K / B]`` of one."""
    blocks = weight if weight.dim() == 4 else weight.unsqueeze(1)
    return pairs.matmul(x.unflatten(1, blocks.shape[1:3]), blocks).flatten(1)
