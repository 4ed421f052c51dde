"""HGTConv with torch_geometric's contract."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.dense import HeteroLinear

from ... import functional
from .._errors import check_fits, wrong_argument
from .._fused_or_upstream import foreign_tensor
from .._linear import is_untouched
from .._typed import Group, typed_matmul
from ._base import PyGLayer, is_batch, over_batch
from ._relations import join
from ._x_and_edge_index import check_dicts, check_rows, for_upstream, no_features, sizes_of


class HGTConv(PyGLayer, torch_geometric.nn.HGTConv):
    r"""Heterogeneous graph transformer (Hu et al., "Heterogeneous Graph Transformer", WWW 2020).

    .. math::
        a_i = \sum_r \sum_{j \in N_r(i)} \alpha_{ij} M_r V x_j, \qquad
        \alpha_{ij} = \mathrm{softmax}(p_r \langle Q x_i, A_r K x_j \rangle / \sqrt{D}), \qquad
        x_i' = \sigma(\beta) \, O \, \mathrm{gelu}(a_i) + (1 - \sigma(\beta)) \, x_i

    per head, with Q, K, V, O and beta of a node's type, and the softmax over the edges of all relations r
    into i. A drop-in for ``torch_geometric.nn.HGTConv``. All relations run in one launch, without tensors of
    edge size.

    Edge types may come in any order; torch_geometric's own forward needs that of the metadata.

    Example::

        import torch
        from dfgnn.nn.pyg import HGTConv

        edge_index = torch.randint(100, (2, 600))
        metadata = ['paper', 'author'], [('author', 'writes', 'paper')]
        conv = HGTConv(16, 32, metadata, heads=4)
        x = {'paper': torch.randn(100, 16), 'author': torch.randn(100, 16)}
        out = conv(x, {('author', 'writes', 'paper'): edge_index})['paper']  # [100, 32]
    """

    attention: Any = staticmethod(functional.dot.dot)

    @staticmethod
    def _special_reason(layer: Any) -> str | None:
        for lin in (layer.k_rel, layer.v_rel):  # their weights are read without calling them
            if type(lin) is not HeteroLinear or lin.bias is not None or not is_untouched(lin):
                return "k_rel or v_rel was replaced or has hooks"
        if not torch.compiler.is_compiling():
            for module in (layer.k_rel, layer.v_rel, layer.p_rel, layer.skip):
                foreign = foreign_tensor(module._parameters.values())
                if foreign is not None:
                    return f"a parameter is a {foreign}"
        return None

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Any]
    ) -> dict[str, Tensor | None]:
        """Apply the layer.

        Args:
            x_dict: ``[N, F]`` of each node type.
            edge_index_dict: the edges of each edge type: int32 or int64 ``[2, E]`` tensor or EdgeIndex; or
                SparseTensor or torch.sparse tensor, transposed; or a dfgnn.Graph.

        Returns:
            ``[N, out_channels]`` of each node type in ``x_dict`` that is a destination in the metadata.
        """
        check_dicts(self, x_dict, edge_index_dict)
        self._check_inputs(x_dict, edge_index_dict)
        edge_index_dict = {kind: for_upstream(edges) for kind, edges in edge_index_dict.items()}
        if any(map(is_batch, x_dict.values())):
            return over_batch(lambda xs: self.forward(xs, edge_index_dict), x_dict)
        sizes = {node_type: x.shape[0] for node_type, x in x_dict.items()}
        kqv_dict = {
            node_type: kqv.unflatten(1, (3, self.heads, -1)).unbind(1)  # [N, H, D] each
            for node_type, kqv in self.kqv_lin(x_dict).items()
        }
        dst_types = [t for t in kqv_dict if t in self.dst_node_types]
        joined = join(edge_index_dict, sizes, {t: sizes[t] for t in dst_types})
        key, value = self._keys_and_values(kqv_dict, edge_index_dict, joined.rows)
        # No row of the other types is a query. They are among them so that the gradients of a type without
        # edges are zero, as in torch_geometric, and not None, for which optimizers keep their state.
        query = torch.cat([kqv[1] if t in dst_types else kqv[1][:0] for t, kqv in kqv_dict.items()])
        out = self.attention(joined.graph, query, key, value, scale=1 / math.sqrt(query.shape[-1]))
        outs = out.flatten(1).split([sizes[t] for t in dst_types])
        out_dict = self.out_lin({t: F.gelu(out) for t, out in zip(dst_types, outs)})
        return {t: self._with_skip(t, x_dict[t], out_dict[t]) for t in dst_types}

    def _with_skip(self, node_type: str, x: Tensor, out: Tensor) -> Tensor:
        if out.shape[-1] != x.shape[-1]:
            return out
        skip = self.skip[node_type].sigmoid()
        return skip * out + (1 - skip) * x

    def _check_inputs(self, x_dict: dict[str, Tensor], edge_index_dict: dict) -> None:
        projections = self.kqv_lin.lins
        for node_type, x in x_dict.items():
            check_rows(self, f"x_dict[{node_type!r}]", x)
            if node_type in projections:
                check_fits(self, f"x_dict[{node_type!r}]", projections[node_type], x)
        if not edge_index_dict:
            raise ValueError("HGTConv: edge_index_dict: expected at least one edge type, got none")
        for edge_type, edge_index in edge_index_dict.items():
            if edge_type not in self.edge_types_map:
                raise wrong_argument(
                    self, "edge_index_dict", f"edge types of the metadata {self.edge_types}", edge_type
                )
            missing = {edge_type[0], edge_type[-1]} - set(x_dict)
            if missing:
                raise no_features(self, missing, edge_type, x_dict)
            sizes_of(self, edge_index, x_dict[edge_type[0]], x_dict[edge_type[-1]], None)

    def _keys_and_values(
        self, kqv_dict: dict[str, tuple[Tensor, ...]], edge_types: Any, rows: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the sources of each edge type, one type after the other: ``[P, H, D]``."""
        # The library's weights have the matrix of edge type t and head h at h * (number of edge types) + t.
        weights = [lin.weight.unflatten(0, (self.heads, -1)) for lin in (self.k_rel, self.v_rel)]
        keys, values = [], []
        for edge_type, nodes in zip(edge_types, rows):
            number = self.edge_types_map[edge_type]
            prior = self.p_rel["__".join(edge_type)].view(-1, 1, 1)
            key, _, value = kqv_dict[edge_type[0]]
            count = key.shape[0] if nodes is None else len(nodes)
            group = Group(0, slice(None) if nodes is None else nodes, slice(None))
            # The prior p_r is multiplied into the weight rather than into the keys, which are larger.
            keys.append(typed_matmul(key, (prior * weights[0][:, number])[None], [group], count))
            values.append(typed_matmul(value, weights[1][:, number][None], [group], count))
        return torch.cat(keys), torch.cat(values)
