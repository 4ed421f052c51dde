"""Samples neighbourhoods for mini-batch training, on the device where the graph is.

``NeighborSampler`` draws neighbours and returns sorted blocks, which layers need not sort or check again, or
one graph for all layers; ``prefetch`` makes the next batches while the current one is trained on;
``host_rows`` lets a GPU gather rows of features that stay in the host's memory.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import cache as graph_cache
from .build import of_blocks
from .graph import Graph
from .hops import Drawn, ReplayedHops, without_repetition

T = TypeVar("T")

# With at most this number of nodes in the graph per drawn edge, new nodes are found by marking them in a
# table of all nodes, which takes fewer kernels than a sort.
_MARKS = 64


def _with_room(count: int) -> int:
    """``count`` and room for larger samples than the recorded one: a quarter, and four standard deviations,
    which matter where counts are small."""
    return int(1.25 * count + 4 * count**0.5)


class Hop(NamedTuple):
    """One layer's part of a sample: edges from ``num_src`` nodes to the first ``num_dst`` of them."""

    graph: Graph | None  # None with graphs=False
    edge_index: Tensor  # int64 [2, E]: the graph's edges, for layers that take an edge_index
    edge_ids: Tensor  # int64 [E]: positions of these edges in the whole graph's order
    num_src: int
    num_dst: int


class Sample(NamedTuple):
    """Nodes and hops around some seeds; features of ``nodes`` are the input of the first layer."""

    nodes: Tensor  # int64 [n]: the sources of hops[0]; the seeds come first
    hops: list[Hop]  # in the order of the layers: the last one's destinations are the seeds

    def tensors(self) -> list[Tensor]:
        """All tensors that lie on the device."""
        tensors = [self.nodes]
        for hop in self.hops:
            tensors += [hop.edge_index, hop.edge_ids]
            if hop.graph is not None:
                for csr in (hop.graph.csr(), hop.graph.reverse_csr(need_eids=True)):
                    tensors += [x for x in csr if x is not None]
        return tensors


class Subgraph(NamedTuple):
    """One graph for all layers around some seeds, as torch_geometric's NeighborLoader makes it."""

    nodes: Tensor  # int64 [n]: the seeds come first
    edge_index: Tensor  # int64 [2, E]: indices into ``nodes``
    edge_ids: Tensor  # int64 [E]: positions of these edges in the whole graph's order

    def tensors(self) -> list[Tensor]:
        """All tensors that lie on the device."""
        return list(self)


class NeighborSampler:
    """Draws up to ``fanouts[k]`` neighbours of each node, without repetition, for layer k.

    A node's neighbours are the sources of the edges into it; if it has no more than the fanout, all are
    taken. It runs on the graph's device, a GPU or the CPU, by tensor operations. On a GPU it waits for the
    device twice per hop, for the numbers of edges and of nodes (after :meth:`capture` once), and once in
    :meth:`sample` to check the blocks. The graph should be in the GPU's memory.

    Args:
        graph: a graph with as many sources as destinations.
        fanouts: a number >= 1 per layer, in the order of the layers; -1 takes all neighbours.

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
        if graph.edge_mask is not None:  # copy_ would change the graph, but not the tables cached here
            raise ValueError("NeighborSampler: graph: expected one that stays, got one of fixed capacity")
        if (
            not isinstance(fanouts, Sequence)
            or not fanouts
            or any(isinstance(k, bool) or not isinstance(k, int) or k < -1 or k == 0 for k in fanouts)
        ):
            way = "" if isinstance(fanouts, Sequence) else "; give a sequence, a number per hop"
            what = "integers >= 1 or -1"
            raise ValueError(f"NeighborSampler: fanouts: expected {what}, got {fanouts!r}{way}")
        self.graph, self.fanouts = graph, tuple(fanouts)
        self._csr = graph.csr()
        indptr = self._csr.indptr
        # [N, 2]: where each node's edges begin and end; a view of indptr.
        self._bounds = indptr.unfold(0, 2, 1) if graph.num_nodes else indptr.new_empty(0, 2)
        self._recorded: dict[bool, ReplayedHops] = {}

    def capture(self, seeds: Tensor, *, subgraph: bool = False) -> None:
        """Record the hops of :meth:`sample`, or of :meth:`subgraph`, as CUDA graphs. Samples of at most as
        many seeds then take one launch per hop instead of forty, with bitwise the same results.

        seeds: as for ``sample``. The sample drawn for them determines the size of the buffers, with a quarter
        more room; a larger sample is drawn without CUDA graphs, with a warning. Call it before other threads
        use the GPU. On a CPU nothing is recorded.

        Raises ValueError where a fanout is -1, and the errors of ``sample``.
        """
        if -1 in self.fanouts:
            raise ValueError(f"NeighborSampler.capture: fanouts: expected numbers >= 1, got {self.fanouts}")
        self._check(seeds)
        if seeds.is_cuda and len(seeds) and self.graph.num_edges:
            self._record(seeds, not subgraph)

    def _record(self, seeds: Tensor, blocks: bool) -> None:
        self._recorded.pop(blocks, None)
        sizes = self._draw(seeds, torch.Generator(seeds.device).manual_seed(0), blocks).sizes
        # For how many of the sample's first nodes each hop draws nothing, because earlier hops have done so.
        before = [0, *sizes] if not blocks else [0] * len(sizes)
        rows = [size - sampled for size, sampled in zip(sizes[:-1], before)]
        rows = [rows[0], *map(_with_room, rows[1:])]
        most = _with_room(sizes[-1])
        self._recorded[blocks] = ReplayedHops(self._csr, self.fanouts[::-1], rows, most, blocks)

    def _drawn(self, seeds: Tensor, generator: torch.Generator | None, blocks: bool) -> Drawn:
        """The sample. blocks: each hop samples for all nodes; else only for those new in the hop before."""
        self._check(seeds)
        recorded = self._recorded.get(blocks)
        drawn = None if recorded is None else recorded.draw(seeds, generator)
        return self._draw(seeds, generator, blocks) if drawn is None else drawn

    def _draw(self, seeds: Tensor, generator: torch.Generator | None, blocks: bool) -> Drawn:
        place, nodes, begin = self._places(seeds), seeds, 0
        hops, sizes = [], [len(seeds)]
        for fanout in reversed(self.fanouts):
            rows, edges = self._neighbors(nodes[begin:], fanout, generator)
            if begin:
                rows = rows + begin
            begin = 0 if blocks else len(nodes)
            sources = self._csr.indices[edges].long()
            nodes = self._grown(nodes, sources, place)
            hops.append(torch.stack([place[sources], rows, self._ids(edges)]))
            sizes.append(len(nodes))
        return Drawn(nodes, hops, sizes)

    def sample(
        self, seeds: Tensor, generator: torch.Generator | None = None, *, graphs: bool = True
    ) -> Sample:
        """The sampled neighbourhood of ``seeds``.

        Args:
            seeds: int64 [n] on the graph's device, each node at most once.
            generator: one of the graph's device, None for torch's default. Equal states give equal samples.
            graphs: False leaves out the hops' graphs, which a step of :func:`dfgnn.capture` derives itself.

        Raises TypeError or ValueError: seeds of another type, shape or device, repeated or out of range.
        """
        drawn = self._drawn(seeds, generator, blocks=True)
        sizes = zip(drawn.sizes[1:], drawn.sizes)
        hops = [(x[:2], x[2], *n) for x, n in zip(drawn.hops, sizes)]
        return Sample(drawn.nodes, self._hops(hops, graphs))

    def subgraph(self, seeds: Tensor, generator: torch.Generator | None = None) -> Subgraph:
        """The sampled neighbourhood of ``seeds`` as one graph: a node's neighbours are drawn once, in the hop
        after the one that reached it; the seeds' with the last fanout. :func:`dfgnn.capture` can replay steps
        on it. Arguments and errors are those of :meth:`sample`.
        """
        drawn = self._drawn(seeds, generator, blocks=False)
        edges = torch.cat(drawn.hops, 1)
        return Subgraph(drawn.nodes, edges[:2], edges[2])

    def _ids(self, edges: Tensor) -> Tensor:
        """The ids, in the whole graph's order, of edges at these positions of the CSR."""
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
        if len(seeds) and not self.graph.num_nodes:
            raise ValueError(f"{where} none for a graph without nodes, got {len(seeds)}")

    def _places(self, seeds: Tensor) -> Tensor:
        """int64 [N]: the index of each node in the sample, which begins with the seeds; -1 for others. Each
        sample has its own table, because threads may sample at the same time. Raises ValueError."""
        place = seeds.new_full((self.graph.num_nodes,), -1)
        if not len(seeds):
            return place
        last, places = len(place) - 1, torch.arange(len(seeds), device=seeds.device)
        inside = seeds.clamp(0, last)
        place[inside] = places
        if ((inside != seeds) | (place[inside] != places)).any():  # one wait checks both
            where, (low, high) = "NeighborSampler.sample: seeds: expected", map(int, seeds.aminmax())
            if low < 0 or high > last:
                raise ValueError(f"{where} nodes in 0 .. {last}, got {low} .. {high}")
            repeated = len(seeds) - len(seeds.unique())
            raise ValueError(f"{where} each node at most once, got {repeated} repeated")
        return place

    def _grown(self, nodes: Tensor, sources: Tensor, place: Tensor) -> Tensor:
        """``nodes`` and the sources that are not among them yet, in rising order; updates ``place``."""
        fresh = place[sources] < 0
        if len(place) <= _MARKS * len(sources):  # reading marks is faster than sorting the sources
            marks = torch.zeros(len(place), dtype=torch.bool, device=place.device)
            new = marks.index_put_((sources,), fresh).nonzero().squeeze(1)
        else:
            new = sources[fresh].unique()
        num_nodes = len(nodes) + len(new)
        place[new] = torch.arange(len(nodes), num_nodes, device=place.device)
        return torch.cat([nodes, new])

    def _neighbors(self, nodes: Tensor, fanout: int, generator) -> tuple[Tensor, Tensor]:
        """For each drawn edge: the index in ``nodes`` of its destination, in rising order, and the edge's
        position in the CSR."""
        first, end = self._bounds[nodes].unbind(1)
        degree = end - first
        if fanout == -1:
            rows = torch.repeat_interleave(degree)
            offset = first + degree - degree.cumsum(0)
            return rows, offset[rows] + torch.arange(len(rows), device=nodes.device)
        draws = torch.rand(len(nodes), fanout, device=nodes.device, generator=generator, dtype=torch.float64)
        chosen = first[:, None] + without_repetition(degree, draws)
        rows, columns = (torch.arange(fanout, device=nodes.device) < degree[:, None]).nonzero().unbind(1)
        return rows, chosen[rows, columns]

    def _hops(self, drawn: Sequence[tuple[Tensor, Tensor, int, int]], with_graphs: bool) -> list[Hop]:
        """The hops in the layers' order, from (edges, ids, num_src, num_dst) in the order of drawing."""
        drawn = drawn[::-1]
        if not with_graphs:
            return [Hop(None, *hop) for hop in drawn]
        graphs = of_blocks(Graph, [(edge_index, n, m) for edge_index, _, n, m in drawn])
        hops = []
        for graph, (edge_index, ids, num_src, num_dst) in zip(graphs, drawn):
            if graph.device.type == "cuda":  # made now, so that no layer has to wait for it
                graph.reverse_csr(need_eids=True)
            # Layers that are called with edge_index find this graph in the cache, instead of sorting it.
            graph_cache.keep(edge_index, graph)
            hops.append(Hop(graph, edge_index, ids, num_src, num_dst))
        return hops


def host_rows(x: Tensor) -> Tensor:
    """A view of ``x``, in the host's pinned memory, as a tensor on the GPU.

    Indexing it (``host_rows(x)[nodes]``, ``index_select``) lets the GPU read just these rows over the bus,
    for features that do not fit into the GPU's memory. ``x`` is copied to pinned memory if it is not there
    yet; the memory lives as long as the view. Elementwise operations on the whole would read all of it.

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
    # The protocol has no name for bfloat16, so that bytes are passed.
    return torch.as_tensor(_PinnedMemory(pinned), device="cuda").view(x.dtype).view(x.shape)


class _PinnedMemory:
    """Pinned memory under the protocol for GPU arrays; its addresses are the same on the GPU."""

    def __init__(self, pinned: Tensor):
        self._pinned = pinned
        size = pinned.numel() * pinned.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pinned.data_ptr(), False), "version": 2,
        }  # fmt: skip


def prefetch(
    make: Callable[[T], Any],
    items: Iterable[T],
    device: torch.device | str,
    depth: int = 2,
    *,
    thread: bool = True,
) -> Iterator[Any]:
    """Yields ``make(item)`` for each of the items, in their order, made up to ``depth`` items ahead.

    A thread calls ``make``, on a GPU on a separate stream of high priority; the caller's stream waits for its
    results. With ``thread=False``, the caller's thread calls it whenever the caller asks for the next result:
    Python's lock lets only one thread run anyway, so a second one helps only where one of them waits.

    Tensors in the results (in tuples, lists, dictionaries, samples and objects with ``tensors()``) are safe
    to use until the caller drops them. An exception in ``make`` is raised here. ``make`` should draw random
    numbers from a generator that nothing else uses, so that they do not depend on which side is faster.
    Raises ValueError: depth < 1.
    """
    device = torch.device(device)
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"prefetch: depth: expected an integer >= 1, got {depth!r}")
    # High priority, so that its small kernels need not wait until all blocks of a large one have begun.
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with contextlib.closing((_by_thread if thread else _in_turns)(make, items, stream, depth)) as results:
        for value, event in results:
            if event is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(event)
                for tensor in _tensors(value):
                    if tensor.is_cuda:
                        tensor.record_stream(current)
            yield value


def _results(make: Callable[[T], Any], items: Iterable[T], stream: Any) -> Iterator[tuple[Any, Any]]:
    """The results of ``make``, each with an event that is recorded after it (None without a stream)."""
    items = iter(items)
    while True:
        with torch.cuda.stream(stream):
            try:
                item = next(items)
            except StopIteration:
                return
            value, event = make(item), None
            if stream is not None:
                event = torch.cuda.Event()
                event.record(stream)
        yield value, event


def _in_turns(make, items, stream, depth) -> Generator[tuple[Any, Any], None, None]:
    """`_results`, made ``depth`` items ahead by the thread that asks for them."""
    results = _results(make, items, stream)
    ready: collections.deque = collections.deque()
    ready.extend(itertools.islice(results, depth))
    while ready:
        yield ready.popleft()
        ready.extend(itertools.islice(results, 1))


def _by_thread(make, items, stream, depth) -> Generator[tuple[Any, Any], None, None]:
    """`_results`, made up to ``depth`` items ahead by another thread."""
    ready: queue.Queue = queue.Queue(depth)
    stop = threading.Event()

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
            for result in _results(make, items, stream):
                if not put((result, None)):
                    return
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=work, name="dfgnn.sampling.prefetch", daemon=True)
    thread.start()
    try:
        while True:
            result, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield result
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
