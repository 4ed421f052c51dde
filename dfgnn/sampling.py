"""Mini-batches of sampled neighbourhoods, made on the device where the graph is.

``NeighborSampler`` draws neighbours and gives blocks that are sorted already, so that no layer sorts or
checks them again, or one graph for all layers; ``prefetch`` makes the next batch while the current one is
trained on; ``host_rows`` lets a GPU gather rows of features that stay in the host's memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import _kept
from .graph import Graph

T = TypeVar("T")


class Hop(NamedTuple):
    """One layer's part of a sample: edges from ``num_src`` nodes to the first ``num_dst`` of them."""

    graph: Graph
    edge_index: Tensor  # int64 [2, E]: the graph's, for layers with torch_geometric's contract
    edge_ids: Tensor  # int64 [E]: where these edges are in the sampled graph's own order

    @property
    def num_dst(self) -> int:
        return self.graph.num_dst


class Sample(NamedTuple):
    """Nodes and hops around some seeds; features of ``nodes`` are the input of the first layer."""

    nodes: Tensor  # int64 [n]: the nodes of hops[0]'s sources; the seeds are the first ones
    hops: list[Hop]  # in the order of the layers: the last one's destinations are the seeds

    def tensors(self) -> list[Tensor]:
        """What lies on the device."""
        found = [self.nodes]
        for hop in self.hops:
            found += [hop.edge_index, hop.edge_ids]
            for csr in (hop.graph.csr(), hop.graph.reverse_csr(need_eids=True)):
                found += [x for x in csr if x is not None]
        return found


class Subgraph(NamedTuple):
    """One graph for all layers around some seeds, as torch_geometric's NeighborLoader gives them."""

    nodes: Tensor  # int64 [n]: the seeds first
    edge_index: Tensor  # int64 [2, E]: between places in ``nodes``
    edge_ids: Tensor  # int64 [E]: where these edges are in the sampled graph's own order

    def tensors(self) -> list[Tensor]:
        """What lies on the device."""
        return list(self)


class NeighborSampler:
    """Draws up to ``fanouts[k]`` neighbours of each node, without repetition, for layer k.

    A node's neighbours are the sources of the edges into it; where it has no more than the fanout, all are
    taken. It runs on the graph's device, a GPU or the CPU, by tensor operations; on a GPU it waits for the
    device three times per hop, for the numbers of edges and nodes and for degrees. Keep the graph in the
    memory of the GPU.

    Args:
        graph: as many sources as destinations.
        fanouts: a number >= 1 per layer, in the order of the layers; -1: all neighbours.

    Raises TypeError and ValueError for anything else. (Hamilton et al., "Inductive Representation Learning on
    Large Graphs", NeurIPS 2017.)
    """

    def __init__(self, graph: Graph, fanouts: Sequence[int]):
        if not isinstance(graph, Graph):
            raise TypeError(f"NeighborSampler: graph: expected a dfgnn.Graph, got {type(graph).__name__}")
        if graph.num_src != graph.num_dst:
            raise ValueError(
                f"NeighborSampler: graph: expected as many sources as destinations, got {graph.num_src} and "
                f"{graph.num_dst}"
            )
        if not fanouts or any(
            isinstance(k, bool) or not isinstance(k, int) or k < -1 or k == 0 for k in fanouts
        ):
            raise ValueError(f"NeighborSampler: fanouts: expected integers >= 1 or -1, got {fanouts!r}")
        self.graph, self.fanouts = graph, tuple(fanouts)
        self._csr = graph.csr()

    def sample(self, seeds: Tensor, generator: torch.Generator | None = None) -> Sample:
        """The sampled neighbourhood of ``seeds``.

        Args:
            seeds: int64 [n] on the graph's device, each node at most once.
            generator: of the graph's device; None: torch's default one. Equal states give equal samples.

        Raises TypeError or ValueError: seeds of another type, shape or device, repeated or out of range.
        """
        self._check(seeds)
        # The place of each node in the sample; -1: it is not there. A table per sample, as several may be
        # drawn at the same time.
        place = seeds.new_full((self.graph.num_nodes,), -1)
        place[seeds] = torch.arange(len(seeds), device=seeds.device)
        nodes, hops = seeds, []
        for fanout in reversed(self.fanouts):
            num_dst = len(nodes)
            indptr, edges = self._draw(nodes, fanout, generator)
            sources = self._csr.indices[edges].long()
            new = sources[place[sources] < 0].unique()
            place[new] = torch.arange(num_dst, num_dst + len(new), device=seeds.device)
            nodes = torch.cat([nodes, new])
            hops.append(self._hop(indptr, place[sources], edges, len(nodes)))
        return Sample(nodes, hops[::-1])

    def subgraph(self, seeds: Tensor, generator: torch.Generator | None = None) -> Subgraph:
        """The sampled neighbourhood of ``seeds`` as one graph: a node's neighbours are drawn once, in the hop
        after the one that found it, by the last fanout for the seeds. Batches of it are what
        :func:`dfgnn.capture` replays. Arguments and errors as in :meth:`sample`.
        """
        self._check(seeds)
        place = seeds.new_full((self.graph.num_nodes,), -1)
        place[seeds] = torch.arange(len(seeds), device=seeds.device)
        nodes, frontier = seeds, seeds
        sources, rows, ids = [], [], []
        for fanout in reversed(self.fanouts):
            indptr, edges = self._draw(frontier, fanout, generator)
            of = self._csr.indices[edges].long()
            new = of[place[of] < 0].unique()
            place[new] = torch.arange(len(nodes), len(nodes) + len(new), device=seeds.device)
            own = torch.arange(len(nodes) - len(frontier), len(nodes), device=seeds.device)
            sources.append(place[of])
            rows.append(torch.repeat_interleave(own, indptr.diff(), output_size=len(edges)))
            ids.append(self._ids(edges))
            nodes, frontier = torch.cat([nodes, new]), new
        return Subgraph(nodes, torch.stack([torch.cat(sources), torch.cat(rows)]), torch.cat(ids))

    def _ids(self, edges: Tensor) -> Tensor:
        """The ids of edges of the CSR."""
        eids = self._csr.eids
        return edges if eids is None else eids[edges].long()

    def _check(self, seeds: Any) -> None:
        where = "NeighborSampler.sample: seeds: expected"
        if not isinstance(seeds, Tensor) or seeds.dtype != torch.int64:
            got = seeds.dtype if isinstance(seeds, Tensor) else type(seeds).__name__
            raise TypeError(f"{where} an int64 tensor, got {got}")
        if seeds.dim() != 1 or seeds.device != self.graph.device:
            raise ValueError(
                f"{where} shape [n] on {self.graph.device}, got {list(seeds.shape)} on {seeds.device}"
            )
        n = self.graph.num_nodes
        if len(seeds):
            low, high = seeds.aminmax()
            bad = (low < 0) | (high >= n)
            # One wait for both.
            out_of_range, different = torch.stack(
                [bad.long(), seeds.unique().numel() * torch.ones_like(low)]
            ).tolist()
            if out_of_range:
                raise ValueError(f"{where} nodes in 0 .. {n - 1}, got {int(low)} .. {int(high)}")
            if different < len(seeds):
                raise ValueError(f"{where} each node at most once, got {len(seeds) - different} repeated")

    def _draw(self, nodes: Tensor, fanout: int, generator) -> tuple[Tensor, Tensor]:
        """indptr [n + 1] and the positions in the CSR of the edges drawn, by node."""
        first = self._csr.indptr[nodes]
        degree = self._csr.indptr[nodes + 1] - first
        taken = degree if fanout == -1 else degree.clamp(max=fanout)
        indptr = torch.nn.functional.pad(taken.cumsum(0), (1, 0))
        if fanout == -1:
            total = int(indptr[-1])
            offset = torch.repeat_interleave(first - indptr[:-1], taken, output_size=total)
            return indptr, offset + torch.arange(total, device=nodes.device)
        column = torch.arange(fanout, device=nodes.device)
        chosen = self._without_repetition(degree, fanout, generator)
        chosen = torch.where((degree <= fanout)[:, None], column, chosen)
        return indptr, (first[:, None] + chosen)[column < taken[:, None]]

    @staticmethod
    def _without_repetition(degree: Tensor, count: int, generator) -> Tensor:
        """[n, count]: ``count`` different numbers below each degree that is larger.

        R. Floyd's algorithm: the t-th is drawn from 0 .. bound_t = degree - count + t, and replaced by
        bound_t where it is there already: drawn before, or the bound of a draw s < t that was replaced.
        All t at once: who was replaced follows from s by doubling the steps.
        """
        step = torch.arange(count, device=degree.device)
        first = (degree - count)[:, None]  # bound_0
        bound = first + step
        draws = torch.rand(len(degree), count, device=degree.device, generator=generator, dtype=torch.float64)
        drawn = torch.minimum((draws * (bound + 1)).long(), bound)
        ordered, at = drawn.sort(dim=1, stable=True)
        replaced = torch.zeros_like(drawn, dtype=torch.bool)
        replaced.scatter_(1, at[:, 1:], ordered[:, 1:] == ordered[:, :-1])
        follows = drawn - first
        follows = torch.where(follows < 0, step, follows)  # itself: of no other
        for _ in range((count - 1).bit_length()):
            replaced |= replaced.gather(1, follows)
            follows = follows.gather(1, follows)
        return torch.where(replaced, bound, drawn).sort(1).values

    def _hop(self, indptr: Tensor, sources: Tensor, edges: Tensor, num_src: int) -> Hop:
        num_dst = len(indptr) - 1
        rows = torch.repeat_interleave(
            torch.arange(num_dst, device=edges.device), indptr.diff(), output_size=len(edges)
        )
        edge_index = torch.stack([sources, rows])
        graph = Graph.from_edge_index(edge_index, num_src=num_src, num_dst=num_dst)
        if graph.device.type == "cuda":  # here, so that no layer makes it or waits for it
            graph.reverse_csr(need_eids=True)
        # Layers with torch_geometric's contract find the graph by this tensor, instead of sorting it.
        _kept.keep(edge_index, graph)
        return Hop(graph, edge_index, self._ids(edges))


def host_rows(x: Tensor) -> Tensor:
    """A tensor on the GPU whose memory is that of ``x``, in the host's pinned memory.

    Indexing it (``host_rows(x)[nodes]``, ``index_select``) lets the GPU read just these rows over the bus,
    for features that do not fit into its own memory. ``x`` is pinned (a copy, if it is not yet); it lives
    as long as the view. Elementwise operations on the whole would read all of it.

    Raises TypeError (no CPU tensor), ValueError (not contiguous) and RuntimeError (no CUDA device).
    """
    if not isinstance(x, Tensor) or x.device.type != "cpu":
        raise TypeError(
            f"host_rows: x: expected a tensor on the CPU, got {getattr(x, 'device', type(x).__name__)}"
        )
    if not x.is_contiguous():
        raise ValueError("host_rows: x: expected a contiguous tensor")
    if not torch.cuda.is_available():
        raise RuntimeError("host_rows: expected a CUDA device, found none")
    if x.numel() == 0:
        return x.to("cuda")
    pinned = x if x.is_pinned() else x.pin_memory()
    # bfloat16 has no name in this protocol; the bytes have.
    return torch.as_tensor(_PinnedMemory(pinned), device="cuda").view(x.dtype).view(x.shape)


class _PinnedMemory:
    """Pinned memory under the protocol for arrays on a GPU, which has the same addresses there."""

    def __init__(self, pinned: Tensor):
        self._pinned = pinned
        size = pinned.numel() * pinned.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pinned.data_ptr(), False), "version": 2,
        }  # fmt: skip


def prefetch(
    make: Callable[[T], Any], items: Iterable[T], device: torch.device | str, depth: int = 2
) -> Iterator[Any]:
    """``make(item)`` for each of the items, in their order, up to ``depth`` of them ahead of the caller.

    A thread calls ``make``, on a GPU on a stream of its own; the caller's stream waits for what it made.
    Tensors in the results (in tuples, lists, dictionaries, samples and what has ``tensors()``) are safe to
    use until the caller drops them. An exception in ``make`` is raised here. Random numbers are those that
    ``make`` draws, from a generator that only it uses, so that they do not depend on the speed of either
    side.
    """
    device = torch.device(device)
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"prefetch: depth: expected an integer >= 1, got {depth!r}")
    ready: queue.Queue = queue.Queue(depth)
    stop = threading.Event()
    cuda = device.type == "cuda"
    stream = torch.cuda.Stream(device) if cuda else None

    def put(entry) -> bool:
        while not stop.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def work() -> None:
        try:
            with torch.cuda.stream(stream):
                for item in items:
                    value, event = make(item), None
                    if stream is not None:
                        event = torch.cuda.Event()
                        event.record(stream)
                    if not put((value, event, None)):
                        return
            put((None, None, StopIteration()))
        except BaseException as error:
            put((None, None, error))

    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    thread = threading.Thread(target=work, name="dfgnn.sampling.prefetch", daemon=True)
    thread.start()
    try:
        while True:
            value, event, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            if event is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(event)
                for tensor in _tensors(value):
                    if tensor.is_cuda:
                        tensor.record_stream(current)
            yield value
    finally:
        stop.set()
        thread.join()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "tensors"):
        yield from value.tensors()
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
