"""Batches as named tensors: what a loader gives, taken apart, and put together again for the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Positions of the arguments of ``step(x, edge_index, y, batch)``.
NAMES = ("x", "edge_index", "y", "batch")
# What a size is counted in. "index": node ids by edge; "graph_of": of a node; "offsets": of graphs; "fixed":
# of one size in all batches.
NODE, EDGE, GRAPH, INDEX, GRAPH_OF, OFFSETS, FIXED = (
    "node", "edge", "graph", "index", "graph_of", "offsets", "fixed"
)  # fmt: skip


class Sizes(NamedTuple):
    """Of a batch, or the most that a buffer takes."""

    nodes: int
    edges: int
    graphs: int

    def fits(self, other: Sizes) -> bool:
        return all(a >= b for a, b in zip(self, other))


class Sample(NamedTuple):
    """A batch taken apart."""

    tensors: dict[str, Tensor]
    sizes: Sizes
    given: Any  # as the loader gave it
    rebuild: Callable[[dict[str, Tensor], Sizes], Any]  # the like of it, of other tensors


def take_apart(args: tuple[Any, ...]) -> Sample:
    """What a step was called with: one torch_geometric Data or Batch, one dict, tensors as in `NAMES`, or
    nothing."""
    if not args:
        return Sample({}, Sizes(0, 0, 0), args, lambda found, sizes: args)
    if len(args) == 1 and hasattr(args[0], "edge_index") and hasattr(args[0], "keys"):
        return _of_data(args[0])
    if len(args) == 1 and isinstance(args[0], dict):
        return _of_dict(args[0])
    if 2 <= len(args) <= len(NAMES) and all(isinstance(x, Tensor) for x in args):
        tensors = dict(zip(NAMES, args))
        return Sample(tensors, _sizes(tensors), args, lambda found, sizes: tuple(found[n] for n in tensors))
    kinds = ", ".join(type(x).__name__ for x in args)
    raise TypeError(
        "dfgnn.capture: step: expected a torch_geometric Data or Batch, a dict of tensors, or tensors "
        f"({', '.join(NAMES)}), got ({kinds})"
    )


def _of_data(data: Any) -> Sample:
    tensors = {key: data[key] for key in data.keys() if isinstance(data[key], Tensor)}  # noqa: SIM118
    if not isinstance(tensors.get("edge_index"), Tensor) or tensors["edge_index"].dim() != 2:
        raise TypeError("dfgnn.capture: step: expected a batch with an edge_index [2, E]")
    num_graphs = int(getattr(data, "num_graphs", 1)) if "batch" in tensors else 1
    sizes = Sizes(int(data.num_nodes), tensors["edge_index"].shape[1], num_graphs)
    has_number = "num_nodes" in data

    def rebuild(found: dict[str, Tensor], new: Sizes) -> Any:
        twin = copy.copy(data)
        for key, value in found.items():
            twin[key] = value
        if hasattr(data, "_num_graphs"):
            twin._num_graphs = new.graphs
        if has_number:
            twin.num_nodes = new.nodes
        return twin

    return Sample(tensors, sizes, data, rebuild)


def _of_dict(given: dict[str, Any]) -> Sample:
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    missing = [name for name in NAMES[:2] if name not in tensors]
    if missing:
        raise TypeError(
            f"dfgnn.capture: step: expected tensors x and edge_index in the dict, got no {missing}"
        )
    return Sample(tensors, _sizes(tensors), given, lambda found, sizes: {**given, **found})


def _sizes(tensors: dict[str, Tensor]) -> Sizes:
    edge_index = tensors["edge_index"]
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"dfgnn.capture: edge_index: expected shape [2, E], got {list(edge_index.shape)}")
    num_nodes, num_graphs, y, batch = len(tensors["x"]), 1, tensors.get("y"), tensors.get("batch")
    if batch is not None and y is not None and y.dim() and len(y) != num_nodes:
        num_graphs = len(y)
    elif batch is not None:
        num_graphs = int(batch.max()) + 1 if batch.numel() else 0
    return Sizes(num_nodes, edge_index.shape[1], num_graphs)


def levels_of(sample: Sample) -> dict[str, str]:
    """What each tensor has one row for."""
    return {name: _level(name, x, sample) for name, x in sample.tensors.items()}


def _level(name: str, x: Tensor, sample: Sample) -> str:
    sizes, rows = sample.sizes, len(x) if x.dim() else -1
    if name == "edge_index":
        return INDEX
    if name == "batch":
        return GRAPH_OF
    if name == "ptr" and rows == sizes.graphs + 1:
        return OFFSETS
    if "index" in name and x.dim() == 2 and x.shape == (2, sizes.edges):
        return INDEX
    if rows == sizes.edges and (rows != sizes.nodes or "edge" in name):
        return EDGE
    if rows == sizes.nodes:
        return NODE
    return GRAPH if rows == sizes.graphs else FIXED


def rows_of(level: str, sizes: Sizes) -> int:
    """How many rows (of "index" columns) a tensor of a level has."""
    if level in (NODE, GRAPH_OF):
        return sizes.nodes
    if level in (EDGE, INDEX):
        return sizes.edges
    return sizes.graphs + (level == OFFSETS)


def misfit(sample: Sample, levels: dict[str, str], shapes: dict[str, tuple]) -> str | None:
    """Why a batch is not like the one that levels and shapes are of."""
    if sample.tensors.keys() != levels.keys():
        return f"expected tensors {', '.join(levels)}, got {', '.join(sample.tensors)}"
    for name, x in sample.tensors.items():
        level, (shape, dtype) = levels[name], shapes[name]
        at = 1 if level == INDEX else 0
        want = list(shape)
        if level != FIXED:
            want[at] = rows_of(level, sample.sizes)
        if list(x.shape) != want or x.dtype != dtype:
            return f"{name}: expected {dtype} {want}, got {x.dtype} {list(x.shape)}"
    return None


def to_device(sample: Sample, device: torch.device) -> dict[str, Tensor]:
    return {name: x.to(device, non_blocking=True) for name, x in sample.tensors.items()}
