"""GraphPart: the base class of graphs that are not one Graph, such as a part of a shared graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GraphPart:
    """One process's part of a graph: its destinations with all of their in-edges, and its sources.

    num_src, num_dst, num_edges count what this process holds, and all tensors have only its rows. Rows of
    other processes' sources are fetched when attention needs them.
    """

    num_src: int
    num_dst: int
    num_edges: int
    device: torch.device
    has_zero_in_degree: bool  # that of the whole graph, so that all processes have the same
    edge_mask = None  # as in a Graph without fixed capacity
    kind = "a graph that several processes share"
    of_graphs: frozenset[str] = frozenset()  # attributes of Graph that a part does not have, for errors

    # This is no abstract base class, with which isinstance would take ten times as long in every call.
    def attention(self, inputs: Any, attend: Callable[[Any], Any]) -> tuple[Tensor, Tensor | None]:
        """(out, attention). ``attend`` computes the attention of ``inputs``, `AttentionInputs` of the engine,
        on a Graph."""
        raise NotImplementedError

    def as_one(self) -> Any:
        """This part as a Graph whose sources are all that its edges need. Edges keep their order."""
        raise NotImplementedError

    def gathered(self, *tensors: Tensor) -> tuple[Any, list[Tensor]]:
        """`as_one`, and ``tensors`` ``[num_src, ...]`` with the rows of all of its sources.
        Differentiable."""
        raise NotImplementedError

    def with_self_loops(self) -> Any:
        """The part of the graph with every loop removed and one for each node appended; cached."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # Only graphs that one process holds have an edge_index, plans and the like.
        if not name.startswith("__") and name in self.of_graphs:
            raise NotImplementedError(
                f"{type(self).__name__}: {name} is not to be had of {self.kind}, nor are layers that use it"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
