"""Graphs of several relations while a compiler records: every (node, relation) pair, occurring or not.

Which pairs occur depends on values. So the edges' sources are numbered relation by relation over all nodes,
in tensor operations, and an `EdgeList` of these represents the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engine.traced_graph import EdgeList
from ._relations import Joined, Relations


class Everywhere:
    """`Lift` for all pairs, whether they occur or not."""

    def __init__(self, num_relations: int):
        self._num_relations = num_relations

    def __call__(self, x: Tensor) -> Tensor:
        return x  # `AllPairs.matmul` has it for every relation

    def sum(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self._num_relations, -1)).sum(0)


class AllPairs:
    """`Pairs` for all pairs, whether they occur or not."""

    def __init__(self, num_relations: int):
        self.lift = Everywhere(num_relations)

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """``[R N, K]`` of x ``[N, F]`` and weight ``[R, F, K]``, or ``[R, B, F / B, K / B]``."""
        if weight.dim() == 3:
            return torch.matmul(x, weight).flatten(0, 1)
        blocks = torch.matmul(x.unflatten(1, weight.shape[1:3]).transpose(0, 1), weight)  # [R, B, N, K / B]
        return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


def relations_of(
    edge_index: Tensor, edge_type: Tensor | None, num_src: int, num_dst: int, num_relations: int,
    *, within: bool, per_edge: bool,
) -> Relations:  # fmt: skip
    """As `_relations.relations_of`; values are checked when the graph is made."""
    if edge_type is None:
        raise ValueError("edge_type: expected a tensor [E], as edge_index has no values, got None")
    src, dst = edge_index.to(torch.int64)
    relation = edge_type.to(torch.int64)
    pair = relation * num_dst + dst
    ends, num_rows = (pair, num_relations * num_dst) if within else (dst, num_dst)
    graph = EdgeList(torch.stack([relation * num_src + src, ends]), num_relations * num_src, num_rows)
    degrees = dst.new_zeros(num_dst).index_add(0, dst, torch.ones_like(dst))
    pairs: Any = AllPairs(num_relations)
    # Of a type that there is not, the graph says so; what comes before it must not read out of bounds.
    to_edges: Any = _Select(pair.clamp(0, num_relations * num_dst - 1)) if per_edge else None
    return Relations(graph, pairs, pairs, to_edges, degrees)  # type: ignore[arg-type]


class _Select:
    def __init__(self, index: Tensor):
        self._index = index

    def __call__(self, x: Tensor) -> Tensor:
        return x.index_select(0, self._index)


def join(
    edge_index_dict: dict[tuple[str, str, str], Tensor], num_src: dict[str, int], num_dst: dict[str, int]
) -> Joined:
    """As `_relations.join`, with all nodes of a type as the sources of each of its relations."""
    starts, num_rows = {}, 0  # accumulate would make constants of the sizes
    for kind, count in num_dst.items():
        starts[kind], num_rows = num_rows, num_rows + count
    ends, total = [], 0
    for (src_type, _, dst_type), edge_index in edge_index_dict.items():
        src, dst = edge_index.to(torch.int64)
        ends.append(torch.stack([src + total, dst + starts[dst_type]]))
        total = total + num_src[src_type]
    graph = EdgeList(torch.cat(ends, 1), total, num_rows)
    return Joined(graph, (None,) * len(edge_index_dict))  # type: ignore[arg-type]
