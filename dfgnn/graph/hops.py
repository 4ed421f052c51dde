"""Samples neighbours without repetition; on a GPU by CUDA graphs, in buffers of fixed size."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.cuda_graphs import capturing
from ..sparse.csr import CSR

# Up to this fanout, `_seen_before` compares all pairs of draws, which takes fewer kernels than a sort.
_PAIRS = 32


def without_repetition(degree: Tensor, draws: Tensor) -> Tensor:
    """int64 [n, k]: k different numbers below each degree, in rising order; 0 .. k - 1 if the degree is <= k.

    draws: float64 [n, k] in [0, 1). R. Floyd's algorithm: number t is drawn from 0 .. bound_t, where bound_t
    is degree - k + t. It is replaced by bound_t if it has occurred before: as an earlier draw, or as bound_s
    of a number s < t that was itself replaced. All t are computed in parallel: points[t] is the s of the
    second case, k once number t is known to be replaced, and 0 if t depends on no other number, because
    number 0 is never replaced. Pointer doubling resolves chains of such s.
    """
    n, k = draws.shape
    first = (degree - k).clamp_(min=0)[:, None]  # bound_0
    bound = first + torch.arange(k, device=degree.device)
    drawn = (draws * (bound + 1)).long()
    points = drawn.new_full((n, k + 1), k)
    torch.sub(drawn, first, out=points[:, :k]).clamp_(min=0).masked_fill_(_seen_before(drawn), k)
    for _ in range(max(k - 2, 0).bit_length()):
        points = points.gather(1, points)
    return torch.where(points[:, :k] == k, bound, drawn).sort(1).values


def _seen_before(x: Tensor) -> Tensor:
    """bool [n, k]: whether the number occurs earlier in its row."""
    if x.shape[1] <= _PAIRS:
        return (x[:, :, None] == x[:, None]).tril_(-1).any(2)
    ordered, at = x.sort(dim=1, stable=True)
    seen = torch.zeros_like(x, dtype=torch.bool)
    return seen.scatter_(1, at[:, 1:], ordered[:, 1:] == ordered[:, :-1])


class Drawn(NamedTuple):
    """A sample's nodes and hops, in the order in which they were drawn."""

    nodes: Tensor  # int64 [n]: the seeds first
    hops: list[Tensor]  # int64 [3, E]: index into nodes of the source, of the destination, and the edge's id
    sizes: list[int]  # number of nodes before the first hop, after it, ...


class ReplayedHops:
    """Samples hops in buffers of fixed shapes, on a GPU by replaying one CUDA graph per hop.

    The samples are bitwise those of plain operations, because random numbers are drawn outside of the graphs,
    and only for as many nodes as a hop has. A hop samples for the nodes that the hop before has added, or
    with ``blocks`` for all nodes of the sample so far; rows[k] is the most nodes that hop k samples for,
    ``most`` the most nodes of a sample.
    """

    def __init__(self, csr: CSR, fanouts: Sequence[int], rows: Sequence[int], most: int, blocks: bool):
        self._csr, self._blocks, self._rows, self._most = csr, blocks, tuple(rows), most
        device, num_nodes = csr.indptr.device, csr.indptr.numel() - 1
        whole = {"dtype": torch.int64, "device": device}
        # _place: the index in _nodes of each node of the graph, or -1. Scatter has no mask, so that elements
        # which are not to be written go to the last element of a buffer, which is one longer than needed
        # (in _place that index is called ``nowhere``).
        self._place = torch.full((num_nodes + 1,), -1, **whole)  # type: ignore[call-overload]
        self._nodes = torch.zeros(most + 1, **whole)  # type: ignore[call-overload]
        self._seeds = torch.zeros(rows[0], **whole)  # type: ignore[call-overload]
        self._range = torch.zeros(2, **whole)  # type: ignore[call-overload] # nodes to sample for
        # [edges of the hop, nodes so far, whether the seeds are valid]
        self._numbers = torch.zeros(3, **whole)  # type: ignore[call-overload]
        self._draws = [torch.zeros(n, k, dtype=torch.float64, device=device) for n, k in zip(rows, fanouts)]
        self._found = [x.new_zeros((3, x.numel() + 1), dtype=torch.int64) for x in self._draws]
        self._lock, self._last = threading.Lock(), None
        self._graphs: list[Any] = [None] * len(self._draws)
        if device.type == "cuda":
            self._capture(device)

    def _capture(self, device: torch.device) -> None:
        stream, pool = torch.cuda.Stream(device, priority=-1), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream(device))
        for k in range(len(self._graphs)):
            with torch.cuda.stream(stream):
                self._hop(k)
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._hop(k)
            self._graphs[k] = graph
        torch.cuda.current_stream(device).wait_stream(stream)

    def draw(self, seeds: Tensor, generator: torch.Generator | None) -> Drawn | None:
        """A sample; None, with the generator unchanged, where seeds are invalid or buffers are too small."""
        if not 0 < len(seeds) <= self._rows[0]:
            return None
        if generator is None:
            cuda = seeds.is_cuda
            generator = torch.cuda.default_generators[seeds.device.index] if cuda else torch.default_generator
        with self._lock:  # there is one set of buffers
            before = generator.get_state()
            if self._last is not None:
                torch.cuda.current_stream(seeds.device).wait_event(self._last)
            found = self._draw(seeds, generator)
            if found is None:
                generator.set_state(before)
            if seeds.is_cuda:
                self._last = torch.cuda.current_stream(seeds.device).record_event()
            return found

    def _draw(self, seeds: Tensor, generator: torch.Generator) -> Drawn | None:
        self._seeds[: len(seeds)].copy_(seeds)
        self._range[0].fill_(0)
        self._range[1].fill_(len(seeds))
        begin, hops, sizes = 0, [], [len(seeds)]
        for k, (graph, draws) in enumerate(zip(self._graphs, self._draws)):
            rows = sizes[-1] - begin
            if rows > len(draws):
                self._has_no_room(sizes)
                return None
            draws[:rows].uniform_(generator=generator)
            if graph is None:
                self._hop(k)
            else:
                graph.replay()
            num_edges, num_nodes, right = self._numbers.tolist()  # waits for the GPU
            if not right:
                return None
            if num_nodes > self._most:
                self._has_no_room([*sizes, num_nodes])
                return None
            begin = 0 if self._blocks else sizes[-1]
            sizes.append(num_nodes)
            hops.append(self._found[k][:, :num_edges].clone())
        return Drawn(self._nodes[: sizes[-1]].clone(), hops, sizes)

    def _has_no_room(self, sizes: list[int]) -> None:
        warnings.warn(
            f"NeighborSampler: {sizes[0]} seeds have {sizes[-1]} nodes after hop {len(sizes) - 1}, and CUDA "
            f"graphs have room for {self._rows} per hop, {self._most} in all: it is drawn without them",
            stacklevel=2,
        )

    def _begin(self) -> None:
        """Enters the seeds into the sample, and checks that they are nodes and distinct."""
        nowhere, places = len(self._place) - 1, torch.arange(len(self._seeds), device=self._seeds.device)
        used = places < self._range[1]
        inside = torch.where(used, self._seeds.clamp(0, nowhere - 1), nowhere)
        self._place.fill_(-1).scatter_(0, inside, places)
        right = (inside == self._seeds) & (self._place[inside] == places)
        self._numbers[2].copy_((right | ~used).all())
        self._nodes[: len(places)].copy_(inside)

    def _hop(self, k: int) -> None:
        if k == 0:
            self._begin()
        draws, hop_edges, nowhere = self._draws[k], self._found[k], len(self._place) - 1
        begin, end = self._range.unbind()
        rows = torch.arange(len(draws), device=draws.device) + begin
        nodes = self._nodes[torch.minimum(rows, end - 1)]
        first, behind = self._csr.indptr.unfold(0, 2, 1)[nodes].unbind(1)
        degree = (behind - first) * (rows < end)
        column = torch.arange(draws.shape[1], device=draws.device)
        is_drawn = column < degree[:, None]
        edges = torch.where(is_drawn, first[:, None] + without_repetition(degree, draws), 0)
        # An unused draw counts as an edge from the node itself, which adds no node.
        sources = torch.where(is_drawn, self._csr.indices[edges], nodes[:, None])
        # New nodes are sorted to find each once; in 32 bits, because a sort then takes half of the passes.
        new = torch.where(self._place[sources] < 0, sources, nowhere).flatten().int().sort().values.long()
        is_first = new < nowhere
        is_first[1:] &= new[1:] != new[:-1]
        place = is_first.cumsum(0) + (end - 1)
        at = torch.where(is_first, place, self._most).clamp_(max=self._most)
        self._nodes.scatter_(0, at, new)
        self._place.scatter_(0, torch.where(is_first, new, nowhere), at)
        # The drawn edges are written one behind the other, without gaps for missing neighbours.
        counts = degree.clamp(max=len(column))
        ends = counts.cumsum(0)
        to = torch.where(is_drawn, (ends - counts)[:, None] + column, is_drawn.numel())
        ids = edges if self._csr.eids is None else self._csr.eids[edges].long()
        values = torch.stack([self._place[sources], rows[:, None].expand_as(ids), ids]).flatten(1)
        hop_edges.scatter_(1, to.flatten().expand(3, -1), values)
        self._numbers[:2].copy_(torch.stack([ends[-1], place[-1] + 1]))
        if not self._blocks:
            self._range[0].copy_(end)
        self._range[1].copy_(place[-1] + 1)
