"""Splits a loader's batch into named tensors, and rebuilds one like it from a step's buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph import Graph, sampling
from ..graph import cache as graph_cache
from ..graph.fixed_capacity import of_buffer

# The names of the arguments of ``step(x, edge_index, y, batch)``, by position.
NAMES = ("x", "edge_index", "y", "batch")
# What the rows of a tensor can stand for: nodes, edges or graphs. "index": a tensor [2, E] of node ids, whose
# columns are edges; "graph_of": each node's graph id; "offsets": a row more than there are graphs (PyG's
# ptr); "fixed": a tensor of the same size in all batches.
NODE, EDGE, GRAPH, INDEX, GRAPH_OF, OFFSETS, FIXED = (
    "node", "edge", "graph", "index", "graph_of", "offsets", "fixed"
)  # fmt: skip


class Level(NamedTuple):
    """What the rows of a tensor stand for. hop: the number of the hop whose edges, or sources, they are; one
    past the last hop stands for the last one's destinations."""

    kind: str
    hop: int = 0


class Sizes(NamedTuple):
    """Sizes of a batch, or of buffers. For a sample of several hops, ``nodes`` and ``edges`` are the first
    hop's sources and edges, and hops: its destinations, the edges of the second, its destinations, ..."""

    nodes: int
    edges: int
    graphs: int
    hops: tuple[int, ...] = ()

    def fits(self, other: Sizes) -> bool:
        return all(a >= b for a, b in zip((*self[:3], *self.hops), (*other[:3], *other.hops)))

    def counts(self) -> tuple[int, ...]:
        """Nodes, edges, nodes, ... of the hops in turn."""
        return self.nodes, self.edges, *self.hops

    def ends(self) -> list[tuple[int, int, int]]:
        """Sources, destinations and edges of each graph."""
        if not self.hops:
            return [(self.nodes, self.nodes, self.edges)]
        n = self.counts()
        return [(n[k], n[k + 2], n[k + 1]) for k in range(0, len(n) - 2, 2)]

    def numbers(self) -> list[int]:
        return [x for ends in self.ends() for x in ends] + [self.graphs]

    def masks(self) -> dict[str, tuple[int, int]]:
        """Name of each mask -> (index into ``numbers`` of how many rows are in use, number of rows)."""
        if not self.hops:
            return dict(zip(("node_mask", "edge_mask", "graph_mask"), zip((0, 2, 3), self[:3])))
        masks: dict[str, tuple[int, int]] = {}
        for k, (src, dst, edges) in enumerate(self.ends()):
            masks |= {f"node_masks.{k}": (3 * k, src), f"edge_masks.{k}": (3 * k + 2, edges)}
            masks[f"node_masks.{k + 1}"] = 3 * k + 1, dst
        return masks

    def with_spare(self) -> Sizes:
        """These sizes with one more graph, and one more node at both ends of each hop, to which padding
        belongs."""
        hops = tuple(size + (k % 2 == 0) for k, size in enumerate(self.hops))
        return Sizes(self.nodes + 1, self.edges, self.graphs + 1, hops)

    def __str__(self) -> str:
        if self.hops:
            return " / ".join(
                f"{size:,} {'edges' if k % 2 else 'nodes'}" for k, size in enumerate(self.counts())
            )
        return f"{self.nodes:,} nodes / {self.edges:,} edges / {self.graphs:,} graphs"


class Sample(NamedTuple):
    """A batch, taken apart into named tensors."""

    tensors: dict[str, Tensor]
    sizes: Sizes
    batch: Any  # the object that the loader gave
    rebuild: Callable[[dict[str, Tensor], Sizes], Any]  # makes a batch of the same kind from other tensors
    constants: dict[str, Any] = {}  # numbers and texts, which become part of a CUDA graph


def take_apart(args: tuple[Any, ...]) -> Sample:
    """The arguments of a step, taken apart: one torch_geometric Data or Batch, one dict, tensors in the order
    of `NAMES`, or nothing."""
    if not args:
        return Sample({}, Sizes(0, 0, 0), args, lambda new, sizes: args)
    if len(args) == 1 and hasattr(args[0], "edge_index") and hasattr(args[0], "keys"):
        return _of_data(args[0])
    if len(args) == 1 and isinstance(args[0], dict):
        return _of_dict(args[0])
    if 2 <= len(args) <= len(NAMES) and all(isinstance(x, Tensor) for x in args):
        tensors = dict(zip(NAMES, args))
        return Sample(tensors, _sizes(tensors), args, lambda new, sizes: tuple(new[n] for n in tensors))
    kinds = ", ".join(type(x).__name__ for x in args)
    raise TypeError(
        "dfgnn.capture: step: expected a torch_geometric Data or Batch, a dict of tensors, or tensors "
        f"({', '.join(NAMES)}), got ({kinds})"
    )


def objects_in(args: tuple[Any, ...]) -> list[Any]:
    """The current values of a batch: the user may assign other tensors to attributes of the same object."""
    batch: Any = args[0] if len(args) == 1 else None
    if hasattr(batch, "to_dict"):  # torch_geometric's Data
        batch = batch.to_dict()
    return list(batch.values()) if isinstance(batch, dict) else list(args)


def _of_data(data: Any) -> Sample:
    tensors = {key: data[key] for key in data.keys() if isinstance(data[key], Tensor)}  # noqa: SIM118
    if not isinstance(tensors.get("edge_index"), Tensor) or tensors["edge_index"].dim() != 2:
        raise TypeError("dfgnn.capture: step: expected a batch with an edge_index [2, E]")
    num_graphs = int(getattr(data, "num_graphs", 1)) if "batch" in tensors else 1
    sizes = Sizes(int(data.num_nodes), tensors["edge_index"].shape[1], num_graphs)
    has_number = "num_nodes" in data

    def rebuild(tensors: dict[str, Tensor], new: Sizes) -> Any:
        twin = copy.copy(data)
        for key, value in tensors.items():
            twin[key] = value
        if hasattr(data, "_num_graphs"):
            twin._num_graphs = new.graphs
        if has_number:
            twin.num_nodes = new.nodes
        return twin

    constants = {key: data[key] for key in data.keys() if key != "num_nodes"}  # noqa: SIM118
    return Sample(tensors, sizes, data, rebuild, _constants(constants))


def _of_dict(batch: dict[str, Any]) -> Sample:
    hops = [name for name, value in batch.items() if isinstance(value, sampling.Sample)]
    if hops:
        return _of_hops(batch, *hops)
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    missing = [name for name in NAMES[:2] if name not in tensors]
    if missing:
        raise TypeError(
            f"dfgnn.capture: step: expected tensors x and edge_index in the dict, got no {missing}"
        )
    return Sample(tensors, _sizes(tensors), batch, lambda new, sizes: {**batch, **new}, _constants(batch))


def _of_hops(batch: dict[str, Any], key: str, *more: str) -> Sample:
    """Takes apart a dict with a sample of `dfgnn.sampling.NeighborSampler`, in which each hop has its own
    graph."""
    if more:
        raise TypeError(f"dfgnn.capture: step: expected one sample in the dict, got {[key, *more]}")
    nodes, hops = batch[key]
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    tensors[f"{key}.nodes"] = nodes
    counts = [len(nodes)]
    for k, hop in enumerate(hops):
        tensors |= {f"{key}.{k}.edge_index": hop.edge_index, f"{key}.{k}.edge_ids": hop.edge_ids}
        counts += [hop.edge_index.shape[1], hop.num_dst]

    def rebuild(tensors_by_name: dict[str, Tensor], new: Sizes) -> dict[str, Any]:
        masks: dict[str, list[Tensor]] = {"node_masks": [], "edge_masks": []}
        for name in new.masks():
            masks[name.partition(".")[0]].append(tensors_by_name[name])
        new_hops = []
        for k, (hop, (num_src, num_dst, _)) in enumerate(zip(hops, new.ends())):
            edge_index, ids = tensors_by_name[f"{key}.{k}.edge_index"], tensors_by_name[f"{key}.{k}.edge_ids"]
            graph = hop.graph if edge_index is hop.edge_index else None
            if graph is None:
                graph = _graph_of(edge_index, num_src, num_dst)
            new_hops.append(sampling.Hop(graph, edge_index, ids, num_src, num_dst))
        replaced = {name: tensors_by_name[name] for name in batch if name in tensors_by_name}
        return {**batch, **replaced, **masks, key: sampling.Sample(tensors_by_name[f"{key}.nodes"], new_hops)}

    sizes = Sizes(counts[0], counts[1], 1, tuple(counts[2:]))
    return Sample(tensors, sizes, batch, rebuild, _constants(batch))


def _constants(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in batch.items() if isinstance(x, (bool, int, float, complex, str))}


def _graph_of(edge_index: Tensor, num_src: int, num_dst: int) -> Graph:
    """The graph of a buffer; a new one for a hop that came without a graph or from another device."""
    graph = of_buffer(edge_index)
    if graph is None:
        graph = Graph.from_edge_index(edge_index, num_src=num_src, num_dst=num_dst)
        graph_cache.keep(edge_index, graph)  # layers that are called with edge_index find it there
    return graph


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


def levels_of(sample: Sample) -> dict[str, Level]:
    """What the rows of each tensor stand for."""
    of = _level_of_hop if sample.sizes.hops else _level
    return {name: of(name, x, sample.sizes) for name, x in sample.tensors.items()}


def _level(name: str, x: Tensor, sizes: Sizes) -> Level:
    rows = len(x) if x.dim() else -1
    if name == "edge_index":
        return Level(INDEX)
    if name == "batch":
        return Level(GRAPH_OF)
    if name == "ptr" and rows == sizes.graphs + 1:
        return Level(OFFSETS)
    if "index" in name and x.dim() == 2 and x.shape == (2, sizes.edges):
        return Level(INDEX)
    if rows == sizes.edges and (rows != sizes.nodes or "edge" in name):
        return Level(EDGE)
    if rows == sizes.nodes:
        return Level(NODE)
    return Level(GRAPH if rows == sizes.graphs else FIXED)


def _level_of_hop(name: str, x: Tensor, sizes: Sizes) -> Level:
    parts, rows = name.split("."), len(x) if x.dim() else -1
    if len(parts) == 3:
        return Level(INDEX if parts[2] == "edge_index" else EDGE, int(parts[1]))
    counts = sizes.counts()
    nodes = [Level(NODE, k) for k, size in enumerate(counts[::2]) if size == rows]
    edges = [Level(EDGE, k) for k, size in enumerate(counts[1::2]) if size == rows]
    if name == "y":  # labels belong to the seeds, if the number of rows allows that
        nodes.reverse()
    return next(iter(edges + nodes if "edge" in name else nodes + edges), Level(FIXED))


def rows_of(level: Level, sizes: Sizes) -> int:
    """How many rows (for "index", columns) a tensor of a level has."""
    if level.kind in (NODE, GRAPH_OF):
        return sizes.counts()[2 * level.hop]
    if level.kind in (EDGE, INDEX):
        return sizes.counts()[2 * level.hop + 1]
    return sizes.graphs + (level.kind == OFFSETS)


def misfit(
    sample: Sample, levels: dict[str, Level], shapes: dict[str, tuple], constants: dict[str, Any]
) -> str | None:
    """Why a batch does not fit the levels, shapes and constants of the first one; None if it does."""
    if sample.tensors.keys() != levels.keys():
        return f"expected tensors {', '.join(levels)}, got {', '.join(sample.tensors)}"
    for name, x in sample.tensors.items():
        level, (shape, dtype) = levels[name], shapes[name]
        want = list(shape)
        if level.kind != FIXED:
            want[1 if level.kind == INDEX else 0] = rows_of(level, sample.sizes)
        if list(x.shape) != want or x.dtype != dtype:
            return f"{name}: expected {dtype} {want}, got {x.dtype} {list(x.shape)}"
    if sample.constants != constants:
        other = {k for k, _ in constants.items() ^ sample.constants.items()}
        return f"{', '.join(sorted(other))}: expected the first batch's values; what changes must be a tensor"
    return None


def to_device(sample: Sample, device: torch.device) -> dict[str, Tensor]:
    return {name: x.to(device, non_blocking=True) for name, x in sample.tensors.items()}
