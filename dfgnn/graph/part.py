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
    has_zero_in_degree: bool  # about the whole graph, so that it is the same in all processes
    edge_mask = None  # as in a Graph without fixed capacity
    kind = "a graph that several processes share"
    of_graphs: frozenset[str] = frozenset()  # names of Graph's attributes, for errors

    # Not an abstract base class, with which isinstance would take ten times as long in every call.
    def attention(self, inputs: Any, attend: Callable[[Any], Any]) -> tuple[Tensor, Tensor | None]:
        """(out, attention). inputs: the `AttentionInputs` of engine/paths.py, whose ``attend`` computes the
        same on a Graph."""
        raise NotImplementedError

    def as_one(self) -> Any:
        """This part as a Graph, whose sources are all that its edges need; edges keep their order."""
        raise NotImplementedError

    def gathered(self, *tensors: Tensor) -> tuple[Any, list[Tensor]]:
        """`as_one`, and ``tensors`` ``[num_src, ...]`` with the rows of all of its sources;
        differentiable."""
        raise NotImplementedError

    def with_self_loops(self) -> Any:
        """The part of the graph with every loop removed and one for each node appended; cached."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # edge_index, plans and the like exist only for graphs that one process holds.
        if not name.startswith("__") and name in self.of_graphs:
            raise NotImplementedError(
                f"{type(self).__name__}: {name} is not to be had of {self.kind}, nor are layers that use it"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
