"""TransformerConv with torch_geometric's contract."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from ... import functional
from ...graph import Graph, GraphPart
from ...runtime.attention_options import EdgeTerm, Projected
from ...runtime.eager import in_autocast
from .._errors import NO_EDGE_DIM, check_fits, projected, wrong_argument
from .._linear import is_product
from ..fused.spec import LayerSpec
from ..fused.traced import folds
from ._base import PyGLayer
from ._edges import edge_attributes, given_attributes, promoted
from ._x_and_edge_index import both_ends, for_upstream, layer_graph


class TransformerConv(PyGLayer, torch_geometric.nn.TransformerConv):
    r"""Graph transformer layer (Shi et al., "Masked Label Prediction: Unified Message Passing Model for
    Semi-Supervised Classification", IJCAI 2021).

    .. math::
        x_i' = W_{skip} x_i + \sum_j \alpha_{ij} (W_v x_j + W_e e_{ij}), \qquad
        \alpha_{ij} = \mathrm{softmax}_j((W_q x_i)^T (W_k x_j + W_e e_{ij}) / \sqrt{C})

    per head, over the edges j -> i; with ``beta`` a learned gate weighs the two terms. A drop-in for
    ``torch_geometric.nn.TransformerConv``. With fewer edge attributes than channels, their projection is
    folded into the attention on large graphs, and only ``[E, H]`` is of edge size; else they are projected to
    ``[E, H, C]``.

    Example::

        import torch
        from dfgnn.nn.pyg import TransformerConv

        edge_index = torch.randint(100, (2, 600))
        conv = TransformerConv(16, 8, heads=4, edge_dim=5)
        x, edge_attr = torch.randn(100, 16), torch.randn(600, 5)
        out = conv(x, edge_index, edge_attr)  # [100, 32]
    """

    FUSED_OPTIONS = "in_channels out_channels heads concat beta dropout edge_dim bias root_weight"

    attention: Any = staticmethod(functional.dot.dot)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Apply the layer.

        Args:
            x: ``[N, F]``, or a pair ``([N_src, F_src], [N_dst, F_dst])``.
            edge_index: as in :meth:`GATConv.forward`.
            edge_attr: ``[E]`` or ``[E, edge_dim]``; in a layer without ``edge_dim`` it must broadcast to
                ``[E, H, C]`` and is added to the values.
            return_attention_weights: True or False: also return the attention, before dropout.

        Returns:
            ``[N_dst, H * C]``, or ``[N_dst, C]`` with ``concat=False``; and where attention is asked for, a
            pair of ``edge_index`` and ``[E, H]``, or a SparseTensor of both.
        """
        x_src, x_dst = both_ends(self, x)
        graph, _ = layer_graph(self, edge_index, x_src, x_dst)
        want_attention = isinstance(return_attention_weights, bool)
        fused, seed = self._whole(edge_index, graph, x_src, x_dst, edge_attr, want_attention)
        if fused is not None and not want_attention:
            return fused
        source, destination = ("x", "x") if x_src is x_dst else ("x[0]", "x[1]")
        # Modules are called in torch_geometric's order: a lazy module draws its parameters at its first call.
        query, key, value = (
            self._heads(projected(self, name, lin, end))
            for name, lin, end in (
                (destination, self.lin_query, x_dst),
                (source, self.lin_key, x_src),
                (source, self.lin_value, x_src),
            )
        )
        term = self._edge_term(edge_index, edge_attr, graph, query.dtype)
        dtype = query.dtype
        if isinstance(term, Tensor) and term.dtype != dtype:  # float32 under autocast, without edge_dim
            wide = torch.promote_types(term.dtype, dtype)
            query, key, value, term = query.to(wide), key.to(wide), value.to(wide), term.to(wide)
        in_key = None if self.lin_edge is None else term
        if x_src.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            dtype = torch.promote_types(dtype, torch.float32)  # the library's layer sums scores in float32
        out = fused
        if out is None:
            out = self.attention(
                graph, query, key, value, edge=None if term is None else EdgeTerm(in_key, term),
                **self._options(seed),
            )  # fmt: skip
            wide = torch.promote_types(dtype, value.dtype)
            out = self._with_skip(self._merged(out, None, dtype=wide), x_dst)
        if not want_attention:
            return out
        # A second call computes the attention, without dropout: asking for it must not change `out`.
        nothing = key.new_zeros(*key.shape[:-1], 1)
        attention = self.attention(
            graph, query, key, nothing, edge=EdgeTerm(in_key), return_attention=True
        )[1].to(dtype)  # fmt: skip
        return self._with_attention(edge_index, out, attention)

    def _with_attention(self, edge_index: Any, out: Tensor, attention: Tensor) -> tuple[Tensor, Any]:
        if isinstance(edge_index, (Tensor, Graph, GraphPart)):
            return out, (for_upstream(edge_index), attention)
        if attention.dim() == 3:
            raise NotImplementedError(
                "TransformerConv: edge_index: expected a dense tensor for the attention of a batch"
            )
        return out, edge_index.set_value(attention, layout="coo")

    def _with_skip(self, out: Tensor, x_dst: Tensor) -> Tensor:
        if not self.root_weight:
            return out
        skip = self.lin_skip(x_dst)
        if self.lin_beta is None:
            return out + skip
        more = out - skip
        gate = self.lin_beta(torch.cat([out, skip, more], dim=-1)).sigmoid()
        return out - gate * more  # which is gate * skip + (1 - gate) * out

    def _whole(self, edge_index, graph: Graph, x_src: Tensor, x_dst: Tensor, edge_attr, wanted: bool):
        """The result and the seed of `fused_layer`."""
        edges = None
        if self.lin_edge is not None:
            attr = edge_attributes(self, edge_index, edge_attr, graph)
            if attr is None:
                return None, None
            edges = attr, self.lin_edge
        elif given_attributes(self, edge_index, edge_attr)[1] is not None:
            return None, None
        spec = self._spec(edges, x_src)
        return self._fused(spec, graph, x_src, None if x_dst is x_src else x_dst, x_dst, wanted)

    def _joins_skip(self) -> bool:
        """Whether the fused layer also projects the skip connection and adds it: if it has H * C columns
        (heads are not averaged) and no gate (beta). Otherwise `_with_skip` adds it afterwards."""
        return self.lin_beta is None and self._joins_heads()

    def _finisher(self) -> Any:
        return None if self._joins_skip() else type(self)._finish

    def _finish(self, out: Tensor, x_dst: Tensor) -> Tensor:
        joined = self.concat or self.heads == 1
        if joined and self.lin_beta is None:
            return out
        return self._with_skip(out if joined else out.view(-1, self.heads, self.out_channels).mean(1), x_dst)

    def _spec(self, edges: tuple[Tensor, Any] | None, x: Tensor) -> LayerSpec:
        is_wide = x.is_cuda and torch.is_autocast_enabled("cuda")  # see `dtype` in `forward`
        return LayerSpec(
            "dot", self.heads, self.lin_value, self.lin_key, self.lin_query,
            self.lin_skip if self.root_weight and self._joins_skip() else None, edges,
            scale=1 / math.sqrt(self.out_channels), dropout_p=self.dropout if self.training else 0.0,
            wide=torch.float32 if is_wide else None,
        )  # fmt: skip

    def _folds(self, attr: Tensor) -> bool:
        if torch.compiler.is_compiling() or attr.dim() != 2:
            return False
        return folds(attr, self.heads, self.heads * self.out_channels)

    def _edge_term(
        self, edge_index: Any, edge_attr: Tensor | None, graph: Graph, dtype: torch.dtype
    ) -> Tensor | Projected | None:
        """What edges add, if they have attributes: where it pays the attributes and their projection, else
        the projected attributes ``[E, H, C]``."""
        if self.lin_edge is not None:
            edge_attr = edge_attributes(self, edge_index, edge_attr, graph)
            if edge_attr is None:
                raise wrong_argument(
                    self, "edge_attr", f"[E, {self.edge_dim}] in a layer with edge_dim", "None; give it one"
                )
            check_fits(self, "edge_attr", self.lin_edge, edge_attr)
            fewer = edge_attr.shape[1] < self.out_channels
            if is_product(self.lin_edge) and (fewer or self._folds(edge_attr)):
                proj = self.lin_edge.weight
                if in_autocast(edge_attr):  # cast as lin_edge would cast them
                    edge_attr, proj = edge_attr.to(dtype), proj.to(dtype)
                return Projected(edge_attr, proj)
            return self._heads(self.lin_edge(edge_attr))
        num_edges, edge_attr = given_attributes(self, edge_index, edge_attr)
        if edge_attr is None:
            return None
        heads, channels = self.heads, self.out_channels
        try:
            return promoted(edge_attr, dtype).expand(num_edges, heads, channels)
        except RuntimeError:
            what = f"a tensor that broadcasts to [{num_edges}, {heads}, {channels}]"
            what, way = f"{NO_EDGE_DIM[0]}, or {what}", NO_EDGE_DIM[1].removeprefix("a tensor")
            raise wrong_argument(self, "edge_attr", what, f"{list(edge_attr.shape)}{way}") from None
