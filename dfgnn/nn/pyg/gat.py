"""GATConv with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from ... import functional
from ...runtime.attention_options import EdgeTerm
from ...runtime.eager import in_autocast, without_autocast
from ...runtime.torch_internals import is_exporting
from .._errors import check_fits, projected
from .._linear import folded_terms, is_product, score_terms
from ..fused.operator_call import is_first_rows, refuse_parameters
from ..fused.spec import LayerSpec
from ._base import PyGLayer
from ._edges import edge_attributes
from ._x_and_edge_index import ends, layer_graph, wants_attention


class GATConv(PyGLayer, torch_geometric.nn.GATConv):
    r"""Graph attention layer (Velickovic et al., "Graph Attention Networks", ICLR 2018).

    .. math::
        x_i' = \sum_j \alpha_{ij} W x_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\mathrm{LeakyReLU}(
            a_s^T W x_j + a_t^T W x_i + a_e^T W_e e_{ij}))

    per head, over the edges j -> i, which include loops. A drop-in for ``torch_geometric.nn.GATConv``. No
    tensor of edge size is made besides ``edge_attr`` and one score per edge and head where it is given.

    Example::

        import torch
        from dfgnn.nn.pyg import GATConv

        edge_index = torch.randint(100, (2, 600))
        conv = GATConv(16, 8, heads=4)
        out = conv(torch.randn(100, 16), edge_index)  # [100, 32]
    """

    FUSED_OPTIONS = (
        "in_channels out_channels heads concat negative_slope dropout add_self_loops edge_dim fill_value "
        "bias residual"
    )

    attention: Any = staticmethod(functional.gat.gat)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Apply the layer.

        Args:
            x: ``[N, F]``, or a pair ``([N_src, F_src], [N_dst, F_dst] or None)``.
            edge_index: int32 or int64 ``[2, E]`` tensor or EdgeIndex; or SparseTensor or torch.sparse tensor,
                transposed; or a dfgnn.Graph.
            edge_attr: ``[E]`` or ``[E, edge_dim]``; ignored in a layer without ``edge_dim``.
            size: (N_src, N_dst); needed where there are no destination features and N_dst differs.
            return_attention_weights: also return the attention, after dropout. False asks for it, too, with
                torch_geometric before 2.8, as there.

        Returns:
            ``[N_dst, H * C]``, or ``[N_dst, C]`` with ``concat=False``; and where attention is asked for, a
            pair of the edges, loops included, and ``[E', H]``, or a SparseTensor of both.
        """
        x_src, x_dst = ends(self, x)
        wanted = wants_attention(return_attention_weights)
        graph, edge_map = layer_graph(self, edge_index, x_src, x_dst, size, self.add_self_loops)
        if self.lin_edge is not None:
            edge_attr = edge_attributes(self, edge_index, edge_attr, graph, edge_map, self.fill_value)
        else:
            edge_attr = None
        if edge_attr is not None and _is_empty(edge_attr):
            edge_attr = None  # as in torch_geometric: the projection's gradient is then None, and not zero
        is_square = x_dst is x_src or (x_dst is not None and is_first_rows(x_dst, x_src))
        out = seed = None
        if x_dst is not None:
            spec = self._spec(edge_attr, is_square)
            own_dst = None if x_dst is x_src or (spec.query is None and spec.skip is None) else x_dst
            out, seed = self._fused(spec, graph, x_src, own_dst, x_dst, wanted)
            if out is not None and not wanted:
                return out
        # Modules are called in torch_geometric's order: a lazy module draws its parameters at its first call.
        res = None if out is not None or x_dst is None else self.res
        res = None if res is None else projected(self, "x", res, x_dst)  # type: ignore[arg-type]
        feat, score_src, score_dst = self._project(x_src, x_dst)
        edge = None if edge_attr is None else EdgeTerm(score=self._edge_term(edge_attr))
        dtype = torch.promote_types(feat.dtype, self.att_src.dtype)  # the dtypes differ under autocast
        options = self._options(seed, negative_slope=self.negative_slope, edge=edge)
        values = feat if out is None else feat[..., :1]  # one column suffices for the attention alone
        inputs = values, score_src, score_dst
        return self._result(edge_index, graph, out, inputs, options, dtype, res, wanted)

    def _spec(self, edge_attr: Tensor | None, is_square: bool) -> LayerSpec:
        """is_square: the destinations are the first sources."""
        vectors: tuple[Tensor, ...] = self.att_src, self.att_dst
        edges, joined, shared = None, self._joins_heads(), self.lin
        if edge_attr is not None:
            vectors, edges = (*vectors, self.att_edge), (edge_attr, self.lin_edge)
        return LayerSpec(
            "additive", self.heads, self.lin_src if shared is None else shared,
            query=self.lin_dst if shared is None else None if is_square else shared,
            skip=self.res if joined else None, edges=edges, vectors=vectors,
            bias=self.bias if joined else None,
            negative_slope=self.negative_slope, dropout_p=self.dropout if self.training else 0.0,
            wide=vectors[0],
        )  # fmt: skip

    def _project(self, x_src: Tensor, x_dst: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Projected sources ``[N_src, H, C]`` and both score terms ``[N, H]``."""
        refuse_parameters(self, self._spec(None, True))
        lin_src, lin_dst = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
        source, destination = ("x", "x") if x_src is x_dst else ("x[0]", "x[1]")
        feat = self._heads(projected(self, source, lin_src, x_src))
        vectors = _no_wider(self.att_src, x_src), _no_wider(self.att_dst, x_src)
        if lin_src is lin_dst and x_src is x_dst:
            score_src, score_dst = score_terms(lin_src, x_src, feat, *vectors)
            return feat, score_src, score_dst
        (score_src,) = score_terms(lin_src, x_src, feat, vectors[0])
        if x_dst is None:
            return feat, score_src, None
        check_fits(self, destination, lin_dst, x_dst)
        (score_dst,) = score_terms(lin_dst, x_dst, None, _no_wider(self.att_dst, x_dst))
        return feat, score_src, score_dst

    def _edge_term(self, edge_attr: Tensor) -> Tensor:
        """The edges' term of the scores, ``[E, H]``."""
        lin = self.lin_edge
        check_fits(self, "edge_attr", lin, edge_attr)
        vector = _no_wider(self.att_edge, edge_attr)
        if not is_product(lin):
            return (self._heads(lin(edge_attr)) * vector).sum(-1)
        if not in_autocast(edge_attr):
            return folded_terms(lin, edge_attr, vector)[0]
        with without_autocast(edge_attr):
            term = folded_terms(lin, edge_attr.to(lin.weight), vector)[0]
        # Parameters may have the 16-bit type that is not autocast's.
        return term.to(torch.promote_types(term.dtype, torch.float32))


def _is_empty(x: Tensor) -> bool:
    """Whether x has no rows. An exported program and fake tensors have a number of rows that nobody knows."""
    if is_exporting() or not (torch.compiler.is_compiling() or type(x.shape[0]) is int):
        return False
    return x.shape[0] == 0


def _no_wider(vector: Tensor, x: Tensor) -> Tensor:
    """The attention vector, in the features' dtype if it is float64 and they are not: the terms are computed
    in the features' precision, and the layer's result alone is promoted, as in GATv2Conv."""
    return vector if vector.dtype != torch.float64 or x.dtype == torch.float64 else vector.to(x.dtype)
