"""RangedGraph: a graph with more edges than kernels can count, divided into ranges of destinations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..sparse import csr as _csr
from .part import GraphPart

# At most this number of values is given to a torch operation, because some operations count in 32 bits.
_CHUNK = 2**30


class Range(NamedTuple):
    """The graph of all sources and the destinations from ``first`` on. place: its edges' positions in the
    user's order."""

    graph: Any  # Graph
    first: int
    place: slice | Tensor


class RangedGraph(GraphPart):
    """A graph of 2**31 edges or more, made by `Graph.from_csr`, `from_coo` and `from_edge_index`.

    It consists of graphs of consecutive destinations, each with fewer edges. Functions and layers compute one
    after the other: outputs are concatenated, gradients of sources added up in the features' dtype. Edge
    tensors are in the user's order, indexed in 64 bits, and copied if that is not sorted by destination. The
    dropout mask of an edge depends on its position within its range. Projected edge features, flex_attention
    and compilers raise NotImplementedError.

    Attributes: num_src, num_dst, num_edges, device, ranges (a tuple of `Range`).
    """

    kind = "a graph of 2**31 edges or more"

    def __init__(self, num_src: int, num_dst: int, ranges: list[Range]) -> None:
        self.num_src, self.num_dst, self.ranges = num_src, num_dst, tuple(ranges)
        self.num_edges = sum(part.graph.num_edges for part in ranges)
        self.device = ranges[0].graph.device

    @property
    def has_zero_in_degree(self) -> bool:  # type: ignore[override]
        """Whether some destination has no edge. Waits for the device the first time."""
        return any(part.graph.has_zero_in_degree for part in self.ranges)

    def in_degrees(self) -> Tensor:
        """int64 [num_dst]: the number of edges into each destination."""
        return torch.cat([part.graph.in_degrees() for part in self.ranges])

    def out_degrees(self) -> Tensor:
        """int64 [num_src]: the number of edges out of each source."""
        return torch.stack([part.graph.out_degrees() for part in self.ranges]).sum(0)

    def ends(self) -> tuple[Tensor, Tensor]:
        """The sources and destinations of all edges, int32 [E], in the user's order."""
        src, dst = (torch.empty(self.num_edges, dtype=torch.int32, device=self.device) for _ in range(2))
        for graph, first, place in self.ranges:
            src[place], local = graph._structure.endpoints(torch.int32)
            dst[place] = local + first
        return src, dst

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> RangedGraph:
        """This graph on another device; itself if it is on that device."""
        graphs = [part.graph.to(device, non_blocking) for part in self.ranges]
        if graphs[0] is self.ranges[0].graph:
            return self
        places = [p.place if isinstance(p.place, slice) else p.place.to(device) for p in self.ranges]
        moved = [Range(g, part.first, place) for g, part, place in zip(graphs, self.ranges, places)]
        return RangedGraph(self.num_src, self.num_dst, moved)

    def reverse(self) -> Any:
        """The graph with all edges reversed, in the same order."""
        src, dst = self.ends()
        return self._like(dst, src, self.num_dst, self.num_src)

    def with_self_loops(self) -> Any:
        """The graph with every loop removed and one for each node appended, as in PyG's layers."""
        src, dst = self.ends()
        kept = [a != b for a, b in zip(src.split(_CHUNK), dst.split(_CHUNK))]
        loops = torch.arange(min(self.num_src, self.num_dst), dtype=torch.int32, device=self.device)
        src, dst = (torch.cat([*(c[k] for c, k in zip(x.split(_CHUNK), kept)), loops]) for x in (src, dst))
        return self._like(src, dst, self.num_src, self.num_dst)

    def _like(self, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Any:
        make = type(self.ranges[0].graph).from_coo
        return make(src, dst, num_src=num_src, num_dst=num_dst, validate=False)

    def attention(self, inputs: Any, attend: Callable[[Any], Any]) -> tuple[Tensor, Tensor | None]:
        """See `GraphPart.attention`. It calls ``attend`` for each range."""
        if torch.compiler.is_compiling():
            raise NotImplementedError(f"compilers do not know {self.kind}")
        tensors, outs, weights = inputs.tensors, [], []
        for k, (graph, first, place) in enumerate(self.ranges):
            rows = {
                name: x[place] for name, x in tensors._asdict().items() if name in _OF_EDGES and x is not None
            }
            if tensors.dst is not None:
                rows["dst"] = tensors.dst[first : first + graph.num_dst]
            if tensors.seed is not None:
                rows["seed"] = tensors.seed + k  # because positions of edges begin at 0 in each range
            out, weight = attend(inputs._replace(graph=graph, tensors=tensors._replace(**rows)))
            outs.append(out)
            weights.append(weight)
        return torch.cat(outs), self._of_edges(weights) if inputs.return_attention else None

    def sddmm(self, product: Callable, rows: Tensor, feat: Tensor, reverse: bool) -> Tensor:
        """``product(graph, rows, feat, reverse)`` of all ranges, [E, H]; see `engine.edge_maps.sddmm`."""
        found = []
        for graph, first, _ in self.ranges:
            own = slice(first, first + graph.num_dst)
            found.append(product(graph, *((rows, feat[own]) if reverse else (rows[own], feat)), reverse))
        return self._of_edges(found)

    def spmm(self, product: Callable, weight: Tensor, feat: Tensor, reverse: bool) -> Tensor:
        """``product(graph, weight, feat, reverse)`` of all ranges; see `engine.edge_maps.spmm`."""
        found = []
        for graph, first, place in self.ranges:
            own = feat[first : first + graph.num_dst] if reverse else feat
            found.append(product(graph, weight[place], own, reverse))
        return sum(found[1:], found[0]) if reverse else torch.cat(found)

    def _of_edges(self, parts: list[Tensor]) -> Tensor:
        """Edge tensors of the ranges, joined in the user's order."""
        result = parts[0].new_empty(self.num_edges, *parts[0].shape[1:])
        for (_, _, place), part in zip(self.ranges, parts):
            if isinstance(place, slice):
                result = result.slice_scatter(part, 0, place.start, place.stop)
            else:
                result = result.index_copy(0, place, part)
        return result

    def as_one(self):
        raise NotImplementedError(
            f"terms of edges other than one tensor [E, H, D] and functions of scores do not know {self.kind}"
        )

    def gathered(self, *tensors):
        return self.as_one()

    def __repr__(self) -> str:
        return (
            f"RangedGraph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges}, "
            f"{len(self.ranges)} ranges of destinations, device='{self.device}')"
        )


_OF_EDGES = ("edge_bias", "edge_gate", "edge_mask", "edge_weight", "edge_feat")


def from_csr(make: Callable, where: str, indptr, indices, num_src: int, eids, validate: bool) -> RangedGraph:
    """make: `Graph.from_csr`; eids: int64 or int32, or None."""
    num_dst = indptr.numel() - 1
    indptr = indptr.long()
    ends = indptr[0].item(), indptr[-1].item()
    if ends != (0, indices.numel()) or (validate and (indptr.diff() < 0).any()):
        raise ValueError(
            f"{where}: indptr: expected values that rise from 0 to the number of edges, {indices.numel()}, "
            f"got {ends[0]} to {ends[1]}"
        )
    if validate and eids is not None:
        _check_permutation(where, eids)
    ranges = []
    for first, last in pairwise(_bounds(where, indptr)):
        begin, end = indptr[first].item(), indptr[last].item()
        graph = make(
            indptr[first : last + 1] - begin, indices[begin:end].contiguous(), num_src, validate=validate
        )
        place = slice(begin, end) if eids is None else eids[begin:end].long()
        ranges.append(Range(graph, first, place))
    return RangedGraph(num_src, num_dst, ranges)


def from_coo(make: Callable, given: _csr.UserEdges, validate: bool) -> RangedGraph:
    """make: `Graph.from_coo`."""
    where, names, src, dst, num_src, num_dst = given
    sizes = [int(torch.stack([c.max() for c in x.split(_CHUNK)]).max()) + 1 for x in (src, dst)]
    least = [int(torch.stack([c.min() for c in x.split(_CHUNK)]).min()) for x in (src, dst)]
    if num_src is None and num_dst is None:
        num_src = num_dst = max(sizes)
    num_src = sizes[0] if num_src is None else num_src
    num_dst = sizes[1] if num_dst is None else num_dst
    for name, low, size, label, number in zip(
        names, least, sizes, ("num_src", "num_dst"), (num_src, num_dst)
    ):
        if low < 0 or size > _csr.as_size(where, label, number):
            found = low if low < 0 else size - 1
            raise ValueError(f"{where}: {name}: expected values in [0, {label}={number}), got {found}")
    degree = dst.new_zeros(num_dst, dtype=torch.int64)
    for chunk in dst.split(_CHUNK):
        degree += torch.bincount(chunk, minlength=num_dst)
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    ranges = []
    for first, last in pairwise(_bounds(where, indptr)):
        place = torch.cat(list(_within(dst, first, last)))
        at: slice | Tensor = place
        if place[-1] - place[0] + 1 == len(place):  # a slice can express consecutive positions
            at = slice(int(place[0]), int(place[-1]) + 1)
        graph = make(src[at], dst[at] - first, num_src=num_src, num_dst=last - first, validate=validate)
        ranges.append(Range(graph, first, at))
    return RangedGraph(num_src, num_dst, ranges)


def _within(ids: Tensor, first: int, last: int) -> Iterator[Tensor]:
    for k, chunk in enumerate(ids.split(_CHUNK)):
        yield ((chunk >= first) & (chunk < last)).nonzero().squeeze(1) + k * _CHUNK


def _bounds(where: str, indptr: Tensor) -> list[int]:
    """The first destinations of as few ranges as possible, each with fewer than `MOST_EDGES` edges; and the
    number of destinations."""
    bounds, num_dst = [0], indptr.numel() - 1
    while bounds[-1] < num_dst:
        first = bounds[-1]
        last = int(torch.searchsorted(indptr, indptr[first] + _csr.MOST_EDGES - 1, right=True)) - 1
        if last <= first:
            raise ValueError(f"{where}: destination {first}: expected fewer than 2**31 edges into it")
        bounds.append(last)
    return bounds


def _check_permutation(where: str, eids: Tensor) -> None:
    seen = torch.zeros(eids.numel(), dtype=torch.bool, device=eids.device)
    for chunk in eids.split(_CHUNK):
        if ((chunk < 0) | (chunk >= eids.numel())).any():
            raise ValueError(f"{where}: eids: expected values in [0, {eids.numel()})")
        seen[chunk.long()] = True
    if not all(chunk.all() for chunk in seen.split(_CHUNK)):
        raise ValueError(f"{where}: eids: expected each edge once")
