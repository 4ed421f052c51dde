"""HGTConv with DGL's contract."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ... import functional
from .._base import FusedLayer
from .._errors import check_takes
from .._graph import as_graph, split_ends
from .._linear import is_untouched
from .._sums_in_16_bits import normalized, rows_of_types
from .._typed import TypedLinear, check_types, first_types, groups_of, is_recorded, typed_sources


class HGTConv(FusedLayer):
    r"""Heterogeneous graph transformer layer (Hu et al., "Heterogeneous Graph Transformer", WWW 2020).

    .. math::
        s_{ij} = \frac{\mu_{r}}{\sqrt{D}} \langle K_{t(j)} h_j \, A_r, \; Q_{t(i)} h_i \rangle, \qquad
        m_i = \sum_j \mathrm{softmax}_j(s_{ij}) \, V_{t(j)} h_j \, M_r, \qquad
        h_i' = \beta_{t(i)} O_{t(i)} m_i + (1 - \beta_{t(i)}) h_i

    per head, over the edges j -> i of all types r = r(ij) together, for types t of nodes and beta the sigmoid
    of ``skip``; where sizes differ ``residual_w`` projects h_i. A drop-in for ``dgl.nn.HGTConv``. Keys and
    values are made once per source and type of its out-edges, not once per edge.

    Args:
        in_size: size of the input features.
        head_size: size of the output per head (D).
        num_heads: number of heads (H).
        num_ntypes: number of types of nodes.
        num_etypes: number of types of edges.
        dropout: dropout of O m, before the gate.
        use_norm: apply a LayerNorm to the result.

    Example::

        import torch
        from dfgnn import Graph
        from dfgnn.nn.dgl import HGTConv

        edge_index = torch.randint(100, (2, 600))
        graph = Graph.from_edge_index(edge_index, num_nodes=100).add_self_loops()
        ntype = torch.randint(3, (100,))
        etype = torch.randint(5, (graph.num_edges,))
        conv = HGTConv(32, 8, num_heads=4, num_ntypes=3, num_etypes=5)
        out = conv(graph, torch.randn(100, 32), ntype, etype)  # [100, 32]
    """

    attention: Any = staticmethod(functional.dot.dot)

    def __init__(
        self,
        in_size: int,
        head_size: int,
        num_heads: int,
        num_ntypes: int,
        num_etypes: int,
        dropout: float = 0.2,
        use_norm: bool = False,
    ):
        nn.Module.__init__(self)
        self.in_size = in_size
        self.head_size = head_size
        self.num_heads = num_heads
        self.sqrt_d = math.sqrt(head_size)
        self.use_norm = use_norm
        width = head_size * num_heads
        self.linear_k = TypedLinear(in_size, width, num_ntypes)
        self.linear_q = TypedLinear(in_size, width, num_ntypes)
        self.linear_v = TypedLinear(in_size, width, num_ntypes)
        self.linear_a = TypedLinear(width, width, num_ntypes)

        def per_head():
            return nn.ModuleList(TypedLinear(head_size, head_size, num_etypes) for _ in range(num_heads))

        self.relation_pri = nn.ParameterList(torch.ones(num_etypes) for _ in range(num_heads))
        self.relation_att = per_head()
        self.relation_msg = per_head()
        self.skip = nn.Parameter(torch.ones(num_ntypes))
        self.drop = nn.Dropout(dropout)
        if use_norm:
            self.norm = nn.LayerNorm(width)
        if in_size != width:
            self.residual_w = nn.Parameter(torch.empty(in_size, width))
            nn.init.xavier_uniform_(self.residual_w)

    @property
    def num_etypes(self) -> int:
        return len(self.relation_pri[0])

    # The forward of this class reads the weights of these modules without calling the modules.
    _in_engine = dict.fromkeys(("relation_att", "relation_msg"), (nn.ModuleList,))

    @classmethod
    def why_not(cls, layer: nn.Module) -> str | None:
        known = TypedLinear, getattr(sys.modules.get("dgl.nn.pytorch.linear"), "TypedLinear", TypedLinear)
        for name in cls._in_engine:
            for typed in getattr(layer, name):
                regular = type(typed) in known and getattr(typed, "regularizer", None) is None
                if not regular or not is_untouched(typed):
                    return f"a map of {name} was replaced or has hooks"
        return None

    def _read_parameters(self) -> list[Tensor]:
        maps = [typed.W for maps in (self.relation_att, self.relation_msg) for typed in maps]
        return [*self.relation_pri, *maps, *self._parameters.values()]  # type: ignore[list-item]

    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(input size) for typed maps, Xavier uniform for ``residual_w``, else 1."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        for ones in (*self.relation_pri, self.skip):
            nn.init.ones_(ones)
        if hasattr(self, "residual_w"):
            nn.init.xavier_uniform_(self.residual_w)

    def forward(self, g: Any, x: Tensor, ntype: Tensor, etype: Tensor, *, presorted: bool = False) -> Tensor:
        """Apply the layer.

        Args:
            g: a dfgnn.Graph, DGLGraph or block, without types of its own.
            x: ``[N, *, in_size]``, of which the first ``num_dst`` rows are the destinations where the graph
                has fewer destinations than sources.
            ntype: the type of each row of ``x``, integers ``[N]``.
            etype: the type of each edge, integers ``[E]``, in edge-id order. Both may have any order. What
                follows from them is computed once and cached as long as the tensor lives, so pass the same
                one again rather than a copy.
            presorted: has no meaning here; DGL's layer is faster where both tensors are sorted.

        Returns:
            ``[N_dst, *, H * D]``.

        Raises:
            TypeError, ValueError: ``g`` or a tensor is not as described.
        """
        fused = as_graph(g, self)
        x_src, x_dst = split_ends(self, fused, x, None, "x")
        if x.shape[0] != fused.num_src or x.shape[-1] != self.in_size:
            expected = f"[{fused.num_src}, *, {self.in_size}]"
            raise ValueError(f"HGTConv: x: expected shape {expected}, got {list(x.shape)}")
        check_takes(self, "x", self.linear_k.W, x)
        check_types(ntype, "HGTConv: ntype", fused.num_src)
        if not is_recorded(ntype):
            groups_of(ntype, self.linear_k.num_types, "HGTConv: ntype")
        # [num_etypes, H]. The priors mu and 1 / sqrt(D) are multiplied into the maps A of the keys.
        scale = torch.stack(tuple(self.relation_pri), 1) / math.sqrt(self.head_size)
        of_keys, of_values = _stack(self.relation_att) * scale[:, :, None, None], _stack(self.relation_msg)
        prefix = x_src.shape[1:-1]  # batch dimensions, which the attention folds into heads
        if prefix.numel() != 1:
            of_keys, of_values = (w.repeat(1, prefix.numel(), 1, 1) for w in (of_keys, of_values))
        key, value = (self._heads(linear(x_src, ntype)) for linear in (self.linear_k, self.linear_v))
        sources = typed_sources(fused, etype, self.num_etypes, "HGTConv: etype")
        key, value = sources.pairs.matmul(key, of_keys), sources.pairs.matmul(value, of_values)
        dst_type = first_types(ntype, fused.num_dst)
        query = self._heads(self.linear_q(x_dst, dst_type))
        h = self.attention(sources.graph, query, key, value, scale=1.0)
        h = h.unflatten(1, (*prefix, self.num_heads)).flatten(-2)
        h = self.drop(self.linear_a(h, dst_type))
        residual = x_dst @ self.residual_w if hasattr(self, "residual_w") else x_dst
        gate = torch.sigmoid(rows_of_types(self.skip, dst_type)).view(-1, *[1] * (h.dim() - 1))
        h = residual + gate * (h - residual)
        return normalized(self.norm, h) if self.use_norm else h

    def _heads(self, x: Tensor) -> Tensor:
        """``[N, * H, D]`` of ``[N, *, H D]``."""
        return x.unflatten(-1, (self.num_heads, self.head_size)).flatten(1, -2)


def _stack(maps: nn.ModuleList) -> Tensor:
    """``[T, H, D, D]``."""
    return torch.stack([typed.W for typed in maps], 1)  # type: ignore[misc]
