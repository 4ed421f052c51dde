"""FAConv with torch_geometric's contract."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from ... import functional
from ...engine.edge_maps import rows_of_destinations, rows_of_sources
from ...graph import Graph
from ...graph.cache import once, parts_of
from ...runtime import torch_internals as internals
from .._errors import wrong_argument
from .._fused_or_upstream import warn
from ._base import LIBRARY, PyGLayer, is_batch, over_batch
from ._x_and_edge_index import check_rows, for_upstream, layer_graph


class FAConv(PyGLayer, torch_geometric.nn.FAConv):
    r"""Frequency adaptive convolution (Bo et al., "Beyond Low-Frequency Information in Graph Convolutional
    Networks", AAAI 2021), whose scores are not normalised.

    .. math::
        x_i' = \epsilon x_i^{(0)} + \sum_j \frac{\tanh(a_l^T x_j + a_r^T x_i)}{\sqrt{d_i d_j}} x_j

    A drop-in for ``torch_geometric.nn.FAConv``. Of edge size are the scores. The edges with their loops and
    weights are cached as long as an ``edge_index`` tensor lives. Sparse tensors, and under compilers a layer
    with ``cached=True`` and calls that ask for the attention, take torch_geometric's own forward. Degrees are
    counted in float32 at least.

    Example::

        import torch
        from dfgnn.nn.pyg import FAConv

        edge_index = torch.randint(100, (2, 600))
        x = torch.randn(100, 16)
        out = FAConv(16)(x, x, edge_index)  # [100, 16]
    """

    _node_dim = -2

    def _check_x_0(self, x: Tensor, x_0: Any) -> None:
        """Raise ValueError unless x_0 broadcasts to x, as in torch_geometric's layer."""
        got: Any = type(x_0).__name__
        if isinstance(x_0, Tensor):
            if all(n in (1, m) for n, m in zip(x_0.shape[::-1], x.shape[::-1])):
                return
            got = list(x_0.shape)
        way = f"{got}; the order is x, x_0, edge_index"
        raise wrong_argument(self, "x_0", f"shape {list(x.shape)}, as x", way)

    def forward(
        self,
        x: Tensor,
        x_0: Tensor,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Apply the layer.

        Args:
            x, x_0: ``[N, channels]``, now and before the first layer.
            edge_index: int32 or int64 ``[2, E]`` tensor or EdgeIndex; or a dfgnn.Graph.
            edge_weight: ``[E]`` in a layer with ``normalize=False``, else None.
            return_attention_weights: a bool, whichever, also returns the edges and tanh of their scores.

        Returns:
            ``[N, channels]``; and where it is asked for, a pair of the edges and ``[E']``.
        """
        recording = torch.compiler.is_compiling()
        asked = isinstance(return_attention_weights, bool)
        if self._is_sparse(edge_index) or recording and (self.cached or asked):
            return super().forward(x, x_0, for_upstream(edge_index), edge_weight, return_attention_weights)
        check_rows(self, "x", x)
        edge_index = for_upstream(edge_index)
        if is_batch(x):
            if x_0.shape[:-2] != x.shape[:-2]:
                batch = f"a batch as x, {list(x.shape[:-2])}"
                raise wrong_argument(self, "x_0", batch, list(x_0.shape[:-2]))
            more = edge_index, edge_weight, return_attention_weights
            return over_batch(lambda x, x_0: self.forward(x, x_0, *more), x, x_0)
        if self.normalize and edge_weight is not None:
            got = "a tensor; make the layer with normalize=False"
            raise wrong_argument(self, "edge_weight", "None in a layer with normalize=True", got)
        if not self.normalize and edge_weight is None:
            raise wrong_argument(self, "edge_weight", "a tensor [E] in a layer with normalize=False", "None")
        if self.normalize and not recording:
            edge_index, edge_weight = self._normalized(edge_index, x)
        graph, _ = layer_graph(self, edge_index, x, x)
        of_loops = None
        if edge_weight is None:
            edge_weight, of_loops = self._weights(graph, edge_index, x.dtype)
        left, right = self.att_l(x), self.att_r(x)
        alpha = (rows_of_sources(graph, left) + rows_of_destinations(graph, right)).tanh().squeeze(-1)
        weight = F.dropout(alpha, p=self.dropout, training=self.training) * edge_weight
        dtype = torch.promote_types(weight.dtype, x.dtype)
        out = functional.spmm(graph, weight.to(dtype), x.to(dtype).unsqueeze(1)).squeeze(1)
        if of_loops is not None:
            own = F.dropout((left + right).tanh(), p=self.dropout, training=self.training)
            out = out + own * of_loops.unsqueeze(1) * x
        if self.eps != 0.0:
            if getattr(x_0, "shape", None) != x.shape:
                self._check_x_0(x, x_0)
            out = out + self.eps * x_0
        if not asked:
            return out
        # The edges of `_normalized` are cached, so that the caller, who may modify the result, gets a copy.
        return out, (edge_index.clone() if self.normalize else edge_index, alpha)

    def _is_sparse(self, edge_index: Any) -> bool:
        sparse = (
            not isinstance(edge_index, (Tensor, Graph))
            or isinstance(edge_index, Tensor)
            and edge_index.layout != torch.strided
        )
        if sparse:
            warn(type(self), LIBRARY, "a sparse tensor as edges", stacklevel=7)
        return sparse

    def _normalized(self, edge_index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The edges with loops, and 1 / sqrt(d_i d_j) of each."""
        cached: Any = vars(self)["_cached_edge_index"]
        if cached is not None:
            return cached
        (edge_index,) = parts_of(edge_index)

        def build() -> tuple[Tensor, Tensor]:
            exact = torch.promote_types(x.dtype, torch.float32)  # a degree in 16 bits may stop at 256
            with internals.meta_counts_all() if x.is_meta else nullcontext():
                edges, weight = gcn_norm(
                    edge_index, None, len(x), False, self.add_self_loops, self.flow, dtype=exact
                )
            return (edges.clone() if edges is edge_index else edges), weight.to(x.dtype)

        key = "gcn_norm", len(x), self.add_self_loops, x.dtype
        found = once(parts_of(edge_index), key, build)
        if self.cached:
            self._cached_edge_index = found
        return found

    def _weights(self, graph: Graph, edge_index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """While a compiler records: 1 / sqrt(d_i d_j) of each edge, and of each node's loop. How many loops
        there are is not known then, so that those among the edges stay, with the weight 0."""
        ones = (edge_index[0] != edge_index[1]) if self.add_self_loops else torch.ones_like(edge_index[0])
        degree = ones.new_zeros(graph.num_dst, dtype=torch.int64).index_add(0, edge_index[1], ones.long())
        degree = degree + int(self.add_self_loops)
        scale = degree.to(torch.promote_types(dtype, torch.float32)).rsqrt().masked_fill(degree == 0, 0)
        weight = rows_of_sources(graph, scale) * rows_of_destinations(graph, scale)
        if not self.add_self_loops:
            return weight.to(dtype), None
        return (weight * ones).to(dtype), scale.square().to(dtype)
