"""What functions and layers know of a graph that several processes share: `dfgnn.distributed` makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GraphPart:
    """One process's part of a graph: its destinations with all of their in-edges, and its sources.

    num_src, num_dst, num_edges count what this process holds, and all tensors have its rows alone. What a
    destination's edges need of other processes' sources is fetched where it is used.
    """

    num_src: int
    num_dst: int
    num_edges: int
    device: torch.device
    has_zero_in_degree: bool  # of the whole graph: the same in all processes
    edge_mask = None  # as of a Graph that is of no fixed capacity
    kind = "a graph that several processes share"
    of_graphs: frozenset[str] = frozenset()  # the names that Graph has

    # No abstract base class: isinstance, which every call asks, would take ten times as long.
    def attention(
        self, score: str, tensors: Any, numbers: Any, return_attention: bool, schedule: str
    ) -> tuple[Tensor, Tensor | None]:
        """(out, attention) of checked arguments; tensors, numbers: as in `_arguments`."""
        raise NotImplementedError

    def as_one(self) -> Any:
        """This part as a Graph of its own, whose sources are all that its edges need; edges keep their
        order."""
        raise NotImplementedError

    def gathered(self, *tensors: Tensor) -> tuple[Any, list[Tensor]]:
        """`as_one`, and the rows of its sources of ``tensors`` ``[num_src, ...]``; differentiable."""
        raise NotImplementedError

    def with_self_loops(self) -> Any:
        """The part of the graph with every loop removed and one for each node appended, made once."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # Ends of edges and plans belong to graphs that one process holds.
        if not name.startswith("__") and name in self.of_graphs:
            raise NotImplementedError(
                f"{type(self).__name__}: {name} is not to be had of {self.kind}, nor are layers that use it"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
