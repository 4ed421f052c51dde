"""HANConv with torch_geometric's contract."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.conv.han_conv import group

from ... import functional
from .._errors import projected, wrong_argument
from ._base import PyGLayer, is_batch, over_batch
from ._x_and_edge_index import check_dicts, check_rows, layer_graph, no_features


class HANConv(PyGLayer, torch_geometric.nn.HANConv):
    r"""Heterogeneous graph attention (Wang et al., "Heterogeneous Graph Attention Network", WWW 2019).

    GAT over the edges of each type, then an attention over the types of edges into a type of nodes. A drop-in
    for ``torch_geometric.nn.HANConv``: its subclass, with the same arguments, parameters, state_dict and
    results, without tensors of edge size.

    Example::

        import torch
        from dfgnn.nn.pyg import HANConv

        edge_index = torch.randint(100, (2, 600))
        metadata = ['paper', 'author'], [('author', 'writes', 'paper')]
        conv = HANConv(16, 32, metadata, heads=4)
        x = {'paper': torch.randn(100, 16), 'author': torch.randn(100, 16)}
        out = conv(x, {('author', 'writes', 'paper'): edge_index})['paper']  # [100, 32]
    """

    attention: Any = staticmethod(functional.gat.gat)

    def forward(
        self,
        x_dict: dict[str, Tensor],
        edge_index_dict: dict[tuple[str, str, str], Any],
        return_semantic_attention_weights: bool = False,
    ) -> Any:
        """Apply the layer.

        Args:
            x_dict: ``[N, F]`` of each node type.
            edge_index_dict: the edges of each edge type: int32 or int64 ``[2, E]`` tensor or EdgeIndex; or
                SparseTensor or torch.sparse tensor, transposed; or a dfgnn.Graph.
            return_semantic_attention_weights: also return the weights of the edge types.

        Returns:
            ``[N, out_channels]`` of each node type, None where no edges lead to it; and where they are asked
            for, the weights ``[number of edge types]`` likewise.
        """
        check_dicts(self, x_dict, edge_index_dict)
        if any(map(is_batch, x_dict.values())):
            more = edge_index_dict, return_semantic_attention_weights
            return over_batch(lambda xs: self.forward(xs, *more), x_dict)
        feats: dict[str, Tensor] = {}
        outs: dict[str, list[Tensor]] = {}
        for node_type, x in x_dict.items():
            if node_type not in self.proj:
                known = f"node types of the metadata {list(self.proj)}"
                raise wrong_argument(self, "x_dict", known, node_type)
            check_rows(self, f"x_dict[{node_type!r}]", x)
            feats[node_type] = projected(self, f"x_dict[{node_type!r}]", self.proj[node_type], x).unflatten(
                1, (self.heads, -1)
            )
            outs[node_type] = []
        for edge_type, edge_index in edge_index_dict.items():
            name = "__".join(edge_type)
            if name not in self.lin_src:
                known = f"edge types of the metadata {[tuple(x.split('__')) for x in self.lin_src]}"
                raise wrong_argument(self, "edge_index_dict", known, repr(edge_type))
            src, _, dst = edge_type
            if not {src, dst} <= {*feats}:
                raise no_features(self, {src, dst} - {*feats}, edge_type, feats)
            # Sizes are those of the projected rows: a hook on the projection may return more than it got.
            graph, _ = layer_graph(self, edge_index, feats[src][:, 0], feats[dst][:, 0])
            score_src = (feats[src] * self.lin_src[name]).sum(-1)
            score_dst = (feats[dst] * self.lin_dst[name]).sum(-1)
            out = self.attention(
                graph, feats[src], score_src, score_dst, negative_slope=self.negative_slope,
                dropout_p=self.dropout if self.training else 0.0,
            )  # fmt: skip
            dtype = torch.promote_types(out.dtype, score_src.dtype)  # the dtypes differ under autocast
            outs[dst].append(F.relu(out.flatten(1).to(dtype)))
        found = {node_type: group(xs, self.q, self.k_lin) for node_type, xs in outs.items()}
        out_dict = {node_type: out for node_type, (out, _) in found.items()}
        if not return_semantic_attention_weights:
            return out_dict
        return out_dict, {node_type: weights for node_type, (_, weights) in found.items()}
