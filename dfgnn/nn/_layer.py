"""What the layers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..graph import Graph
from ._graph import as_graph, check_in_degrees


class GraphLayer(nn.Module):
    """A layer that refuses destinations without in-edges unless ``allow_zero_in_degree``."""

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        self.allow_zero_in_degree = set_value

    def _graph(self, graph: Any) -> Graph:
        """The graph that the engine takes, once its in-degrees are known to be wanted."""
        fused = as_graph(graph)
        if not self.allow_zero_in_degree:
            check_in_degrees(graph, fused)
        return fused


class AttentionLayer(GraphLayer):
    """A layer with ``num_heads`` heads (H) of size ``out_feats`` (D)."""

    def _add_projections(self, in_feats: int | tuple[int, int]) -> None:
        """``fc``, or ``fc_src`` and ``fc_dst`` where the ends differ, as DGL names them."""
        width = self.num_heads * self.out_feats
        if isinstance(in_feats, tuple):
            self.fc_src = nn.Linear(in_feats[0], width, bias=False)
            self.fc_dst = nn.Linear(in_feats[1], width, bias=False)
        else:
            self.fc = nn.Linear(in_feats, width, bias=False)

    def _projections(self) -> tuple[nn.Module, nn.Module]:
        return (self.fc, self.fc) if hasattr(self, "fc") else (self.fc_src, self.fc_dst)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.out_feats))

    def _unpack(self, result: Tensor | tuple[Tensor, Tensor], prefix: Sequence[int]) -> tuple:
        """out ``[N_dst, *, H, D]`` and attention ``[E, *, H, 1]`` (or None) of what the engine returned.

        Leading dimensions beside the nodes, ``prefix``, are more heads to it.
        """
        out, attention = result if isinstance(result, tuple) else (result, None)
        out = out.unflatten(1, (*prefix, self.num_heads))
        if attention is not None:
            attention = attention.unflatten(1, (*prefix, self.num_heads)).unsqueeze(-1)
        return out, attention

    def extra_repr(self) -> str:
        return f"out_feats={self.out_feats}, num_heads={self.num_heads}"


def xavier(*weights: Tensor) -> None:
    """Xavier normal with gain sqrt(2), drawn in this order."""
    for weight in weights:
        nn.init.xavier_normal_(weight, gain=nn.init.calculate_gain("relu"))


def is_plain(fc: nn.Module) -> bool:
    """Whether the output of ``fc`` is its weight's alone: a Linear without bias, hooks or parametrisation."""
    hooked = fc._forward_hooks or fc._forward_pre_hooks or fc._backward_hooks or fc._backward_pre_hooks
    return type(fc) is nn.Linear and fc.bias is None and not hooked


def check_edge_rows(name: str, x: Tensor, graph: Graph, prefix: Sequence[int]) -> None:
    """Raise ValueError unless ``x`` is ``[E, *, any]`` with the features' leading dimensions."""
    expected = [graph.num_edges, *prefix]
    if list(x.shape[:-1]) != expected:
        shape = ", ".join(str(n) for n in expected)
        raise ValueError(f"{name}: expected shape [{shape}, any], a row per edge, got {list(x.shape)}")
