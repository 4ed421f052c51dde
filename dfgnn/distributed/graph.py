"""DistributedGraph: one process's part of a graph that several processes share, and the exchange of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import reference
from ..engine.argument_checks import refuse_transforms_of_shared_graphs
from ..engine.operators import DispatchedCall, graph_args
from ..graph import Graph, GraphPart
from ..graph.build import given_sizes
from ..runtime.arguments import (
    IDS_ELSEWHERE,
    PART_OF_ROWS,
    AttentionInputs,
    EdgeArgs,
    Numbers,
    Tensors,
    needs_rows,
)
from ..runtime.eager import needs_backward
from ..runtime.ops import acc_type
from ..sparse import csr as _csr
from ..sparse.csr import CSR
from ..sparse.structure import Side
from . import _agree, parts
from ._attention import Attention, Pair
from ._exchange import Exchange, Gather, rows_of_all
from ._watch import named
from .partition import load
from .parts import Nodes, Part, Partition

_WIRES = (None, torch.float16, torch.bfloat16)
_ALMOST_ALL = 0.9  # a process that needs more than this share of another's rows gets them all
_MASK_EDGES = 2**20  # a dropout mask is made for at most this number of edges at a time


class DistributedGraph(GraphPart):
    """A graph that the processes of a group share; each holds a part: some destinations with all of their
    in-edges, and the features of some sources (of a square graph: of the same nodes).

    The functions of :mod:`dfgnn.functional` and the layers take it in place of a graph, in all processes
    together, with the rows of the part: ``feat [num_src, ...]`` of ``src_ids``, results ``[num_dst, ...]`` of
    ``dst_ids``, edge tensors ``[num_edges, ...]`` of ``edge_ids``. Results and gradients equal those of one
    process with the whole graph, up to the order of sums, dropout included: its mask depends on the ids of
    the whole graph's edges, and its seed is rank 0's. Gradients of parameters come from the part's rows and
    must be summed over the processes, as DistributedDataParallel does (which takes the mean: multiply the
    loss by the number of processes).

    Rows of other sources that a part's edges need, its halo, are fetched by one all-to-all for each tensor,
    while the attention over the part's own sources runs; the two results are merged exactly. Gradients are
    returned in the same way. Backward is an exchange, too: all processes must run it.

    overlap: compute while rows are transferred; else wait for them, and attend once over all sources. Calls
    with ``return_attention`` always do the latter.  wire: float16 or bfloat16, to which rows ``[*, H, D]`` of
    wider types are converted for the transfer in both directions; None for no conversion.

    First derivatives only; torch.func, forward mode, torch.compile and layers over typed edges raise
    NotImplementedError.
    """

    _group: Any
    _src_nodes: Nodes
    _dst_nodes: Nodes
    _total_edges: int
    _fingerprint: int
    _num_own_edges: int
    _edge_ids: Tensor  # int32 where they fit
    _halo_places: Tensor  # int64 [num_halo]: the fetched sources, numbered part after part
    _graphs: dict[tuple[str, bool], Graph]
    _exchange: Exchange
    _with_loops: DistributedGraph | None
    _agreed: set[tuple]  # the kinds of calls that were found to be the same in all processes
    overlap: bool
    rank: int
    world_size: int

    def __init__(self, *args, **kwargs):
        raise TypeError(
            "DistributedGraph: expected DistributedGraph.from_edge_index or from_partition, got a direct call"
        )

    # ---- constructors ----------------------------------------------------------------------------

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_nodes: int | None = None,
        partition: Partition = "contiguous",
        group: Any = None,
        *,
        num_src: int | None = None,
        num_dst: int | None = None,
        overlap: bool = True,
        wire: torch.dtype | None = None,
    ) -> DistributedGraph:
        """Cuts this process's part out of the whole graph, which every process of the group passes.

        edge_index: int32 or int64 [2, E], [0] the sources and [1] the destinations, on the device that the
        part is to be on.  num_nodes: for a square graph; else num_src and num_dst, whose nodes are divided
        separately.  group: by default that of all processes; one process needs no group.

        partition: "contiguous", ranges of nodes with about equally many in-edges; "metis", parts with few
        edges between them (it needs pymetis and runs on the CPU in every process; divide large graphs once,
        by ``python -m dfgnn.distributed.partition``); or an integer tensor [num_nodes] with each node's rank,
        for a bipartite graph a pair of them.

        Raises the errors of :meth:`dfgnn.Graph.from_edge_index`, and ValueError for an unknown partition. The
        other processes then raise RuntimeError, which names this one. Raises ValueError in all processes
        where they differ in the graph, its partition or the options.
        """
        where = "DistributedGraph.from_edge_index"
        with _agree.failures_told(_shared_by(group)):
            part = cls._cut(where, edge_index, num_nodes, num_src, num_dst, partition, group)
        return cls._from_part(where, part, group, overlap, wire)

    @classmethod
    def _cut(cls, where: str, edge_index, num_nodes, num_src, num_dst, partition, group) -> Part:
        src, dst = _csr.ends_of(where, edge_index)
        num_src, num_dst = given_sizes(where, num_nodes, num_src, num_dst)
        if num_src is None or num_dst is None:
            raise TypeError(f"{where}: expected num_nodes, or num_src and num_dst, got neither")
        num_src = _csr.as_size(where, "num_src", num_src)
        num_dst = _csr.as_size(where, "num_dst", num_dst)
        for name, ends, size in (("edge_index[0]", src, num_src), ("edge_index[1]", dst, num_dst)):
            if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < size:
                got = f"{int(ends.min())} .. {int(ends.max())}"
                raise ValueError(f"{where}: {name}: expected ids in 0 .. {size - 1}, got {got}")
        rank, count = _rank(group), _size(group)
        square = num_nodes is not None
        owner = parts.owners(where, partition, torch.stack([src, dst]), num_src, num_dst, square, count)
        return parts.cut(torch.stack([src, dst]).to(torch.int64), owner, rank, count)

    @classmethod
    def from_partition(
        cls,
        folder: str | Path,
        group: Any = None,
        *,
        device: torch.device | str = "cpu",
        overlap: bool = True,
        wire: torch.dtype | None = None,
    ) -> DistributedGraph:
        """Reads this process's part of a graph that ``python -m dfgnn.distributed.partition`` divided; no
        process ever holds the whole graph.

        folder: what that program wrote, for as many parts as the group has processes.  device: where the part
        is to be.  The other arguments are those of :meth:`from_edge_index`.

        Raises FileNotFoundError (no such parts) and ValueError (a damaged part); the other processes then
        raise RuntimeError, which names this one. Raises ValueError in all processes where the number of parts
        is not that of processes, or parts belong to different graphs.
        """
        rank, count = _rank(group), _size(group)
        with _agree.failures_told(_shared_by(group)):
            part = load(folder, rank, count, torch.device(device))
        return cls._from_part("DistributedGraph.from_partition", part, group, overlap, wire)

    @classmethod
    def _from_part(cls, where: str, part: Part, group: Any, overlap: bool, wire) -> DistributedGraph:
        self = object.__new__(cls)
        self._group = None if part.num_parts == 1 else group or dist.group.WORLD
        src_nodes, dst_nodes = part.src_nodes, part.dst_nodes
        with _agree.failures_told(self._group):
            if wire not in _WIRES:
                raise ValueError(f"{where}: wire: expected None, torch.float16 or torch.bfloat16, got {wire}")
            self.overlap, self.rank, self.world_size = bool(overlap), part.number, part.num_parts
            self._src_nodes, self._dst_nodes = src_nodes, dst_nodes
            self._total_edges, self._fingerprint = part.num_edges, part.fingerprint
            self.device = part.dst.device
            self.num_src, self.num_dst = len(src_nodes.ids), len(dst_nodes.ids)
            self.num_edges = len(part.dst)
            for name in ("num_src", "num_dst", "num_edges"):
                _csr.as_size(where, name, getattr(self, name))
            has_empty = bool((_csr.count(part.dst, self.num_dst) == 0).any())
        _agree.require_same(
            where, self._group, num_src=src_nodes.offsets[-1], num_dst=dst_nodes.offsets[-1],
            num_edges=part.num_edges, parts=part.num_parts, square=src_nodes is dst_nodes,
            overlap=self.overlap, wire=wire, device=self.device.type, fingerprint=part.fingerprint,
        )  # fmt: skip
        told = _agree.gather([has_empty, self.num_edges], self._group)
        self.has_zero_in_degree = any(empty for empty, _ in told)
        if sum(count for _, count in told) != part.num_edges:
            counts = " + ".join(str(count) for _, count in told[:8]) + (" + ..." if len(told) > 8 else "")
            raise ValueError(f"{where}: expected parts of {part.num_edges} edges together, got {counts}")
        with _agree.failures_told(self._group):
            self._divide(part)
        self._exchange = self._make_exchange(wire)
        self._with_loops, self._agreed = None, set()
        return self

    def _divide(self, part: Part) -> None:
        """Makes two graphs: of the edges from own sources, and of those from the halo's, in order of nodes.
        Tensors of edge size are deleted as early as possible, because memory limits large graphs."""
        first, end = part.src_nodes.offsets[self.rank : self.rank + 2]
        is_own = (part.src >= first) & (part.src < end)
        own_edges, halo_edges = is_own.nonzero().squeeze(1), is_own.logical_not_().nonzero().squeeze(1)
        self._num_own_edges = len(own_edges)
        self._edge_ids = torch.cat([part.edge_ids[own_edges], part.edge_ids[halo_edges]])
        if part.num_edges < _csr.LIMIT:
            self._edge_ids = self._edge_ids.to(torch.int32)
        src = part.src[halo_edges]
        is_halo = torch.zeros(part.src_nodes.offsets[-1], dtype=torch.bool, device=self.device)
        is_halo[src.to(torch.int64)] = True
        # If almost all rows of a process are needed, it sends all of them, which saves a gather.
        for begin, stop in itertools.pairwise(part.src_nodes.offsets):
            rows = is_halo[begin:stop]
            if begin != first and int(rows.sum()) > _ALMOST_ALL * (stop - begin):
                rows.fill_(True)
        self._halo_places = is_halo.nonzero().squeeze(1)
        number = is_halo.cumsum(0, dtype=torch.int32).sub_(1)
        halo = number[src.to(torch.int64)], part.dst[halo_edges], len(self._halo_places)
        ends = {"own": (part.src[own_edges] - first, part.dst[own_edges], self.num_src), "halo": halo}
        del src, is_halo, number, halo, own_edges, halo_edges, is_own
        self._graphs = {}
        for which in ("own", "halo"):
            src, dst, num_src = ends.pop(which)
            self._graphs[which, False] = Graph.from_coo(
                src, dst, num_src=num_src, num_dst=self.num_dst, validate=False
            )

    def _make_exchange(self, wire) -> Exchange:
        """The exchange, after telling the other processes which of their sources this one needs."""
        first = self._src_nodes.offsets[self.rank]
        offsets = torch.tensor(self._src_nodes.offsets[1:], device=self.device)
        below = torch.searchsorted(self._halo_places, offsets).tolist()
        recv_counts = torch.tensor([0, *below]).diff().tolist()
        if self._group is None:
            exchange = Exchange(None, self.num_src, self._halo_places, [0], [0])
        else:
            send_counts = [counts[self.rank] for counts in _agree.gather(recv_counts, self._group)]
            asked = self._halo_places.new_empty(sum(send_counts))
            with named(self._group):
                dist.all_to_all_single(asked, self._halo_places, send_counts, recv_counts, group=self._group)
            exchange = Exchange(self._group, self.num_src, asked - first, send_counts, recv_counts)
        exchange.wire = wire
        return exchange

    # ---- sizes and ids ---------------------------------------------------------------------------

    @property
    def group(self) -> Any:
        """The process group; None for one process."""
        return self._group

    @property
    def src_ids(self) -> Tensor:
        """int64 [num_src]: the ids of this part's sources in the whole graph, in rising order."""
        return self._src_nodes.ids

    @property
    def dst_ids(self) -> Tensor:
        """int64 [num_dst]: the ids of this part's destinations, rising; src_ids if the graph is square."""
        return self._dst_nodes.ids

    @property
    def edge_ids(self) -> Tensor:
        """int64 [num_edges]: the id in the whole graph of each of this part's edges. Edges from own sources
        come first, then those from the halo's, each in rising order."""
        return self._edge_ids.to(torch.int64)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of this part of a square graph."""
        if self._src_nodes is not self._dst_nodes:
            raise AttributeError(
                "DistributedGraph.num_nodes: expected a square graph; ask for num_src or num_dst"
            )
        return self.num_src

    @property
    def num_halo(self) -> int:
        """The number of sources that are fetched from other parts: those that this part's edges need, and all
        of a part of which more than nine in ten are needed."""
        return self._exchange.num_halo

    @property
    def total(self) -> tuple[int, int, int]:
        """(num_src, num_dst, num_edges) of the whole graph."""
        return self._src_nodes.offsets[-1], self._dst_nodes.offsets[-1], self._total_edges

    def __repr__(self) -> str:
        src, dst, edges = self.total
        return (
            f"DistributedGraph(part {self.rank} of {self.world_size}: num_src={self.num_src} of {src}, "
            f"num_dst={self.num_dst} of {dst}, num_edges={self.num_edges} of {edges}, "
            f"num_halo={self.num_halo}, device='{self.device}')"
        )

    def scatter(self, x: Tensor, of: str = "dst") -> Tensor:
        """This part's rows, on its device, of a tensor x for the whole graph, which every process passes:
        [num_dst, ...] of [all nodes, ...]. of: "dst", "src" or "edges"."""
        ids, total = self._side("scatter", of)
        if x.dim() == 0 or len(x) != total:
            raise ValueError(f"DistributedGraph.scatter: x: expected {total} rows, got shape {list(x.shape)}")
        return x[ids.to(x.device)].to(self.device)

    def gather(self, x: Tensor, of: str = "dst") -> Tensor:
        """The tensor for the whole graph, in all processes, from each one's rows x; not differentiable."""
        ids, total = self._side("gather", of)
        if x.dim() == 0 or len(x) != len(ids):
            raise ValueError(
                f"DistributedGraph.gather: x: expected {len(ids)} rows, got shape {list(x.shape)}"
            )
        x = x.detach().contiguous()
        whole = x.new_empty(total, *x.shape[1:])
        for place, rows in zip(rows_of_all(ids, self._group), rows_of_all(x, self._group)):
            whole[place] = rows
        return whole

    def _side(self, where: str, of: str) -> tuple[Tensor, int]:
        sides = dict(
            zip(("src", "dst", "edges"), zip((self.src_ids, self.dst_ids, self.edge_ids), self.total))
        )
        if of not in sides:
            raise ValueError(f"DistributedGraph.{where}: of: expected 'dst', 'src' or 'edges', got {of!r}")
        return sides[of]

    # ---- the graphs that the engine computes with --------------------------------------------------

    def _graph(self, which: str, by_id: bool = False) -> Graph:
        """The graph of edges from "own" or "halo" sources, or of the "whole" part. by_id: its eids are ids in
        the whole graph, which dropout needs (they wrap at 2**32), not positions in edge tensors."""
        found = self._graphs.get((which, by_id))
        if found is None:
            found = self._graphs[which, by_id] = self._by_id(which) if by_id else self._whole()
        return found

    def _by_id(self, which: str) -> Graph:
        graph, own = self._graph(which), self._num_own_edges
        part = {"own": slice(0, own), "halo": slice(own, None), "whole": slice(None)}[which]
        csr, ids = graph.csr(), self._edge_ids[part].to(torch.int32)
        csr = CSR(csr.indptr, csr.indices, ids if csr.eids is None else ids[csr.eids])
        return Graph._make(Side(graph.num_dst, (csr, True)), Side(graph.num_src))

    def _whole(self) -> Graph:
        src, dst = self._ends()
        num_src = self.num_src + self.num_halo
        return Graph.from_coo(src, dst, num_src=num_src, num_dst=self.num_dst, validate=False)

    def _ends(self) -> tuple[Tensor, Tensor]:
        """int32 [num_edges] (sources, destinations); fetched sources are numbered after own ones."""
        (src, dst), (halo, dst_of_halo) = (
            self._graph(which)._structure.endpoints(torch.int32) for which in ("own", "halo")
        )
        return torch.cat([src, halo + self.num_src]), torch.cat([dst, dst_of_halo])

    def as_one(self) -> Graph:
        return self._graph("whole")

    def gathered(self, *tensors: Tensor) -> tuple[Graph, list[Tensor]]:
        return self.as_one(), [Gather.apply(self._exchange, x) for x in tensors]

    def with_self_loops(self) -> DistributedGraph:
        """The graph with its loops removed and one for each node appended, as torch_geometric's layers make
        it. All processes must call it together; the result is cached.

        Raises NotImplementedError for a bipartite graph.
        """
        if self._with_loops is None:
            self._with_loops = self._add_loops()
        return self._with_loops

    def _add_loops(self) -> DistributedGraph:
        nodes = self._dst_nodes
        if self._src_nodes is not nodes:
            raise NotImplementedError(
                "DistributedGraph.with_self_loops: expected a square graph; give a bipartite one its loops "
                "before it is divided"
            )
        first = nodes.offsets[self.rank]
        src, dst = (ends.to(torch.int64) for ends in self._ends())
        is_loop = src == dst
        removed = torch.cat(rows_of_all(self.edge_ids[is_loop], self._group)).sort().values
        remaining = is_loop.logical_not_().nonzero().squeeze(1)
        num_kept, total = self._total_edges - len(removed), nodes.offsets[-1]
        ids = self.edge_ids[remaining]
        loops = torch.arange(self.num_dst, device=self.device)
        own_places = loops + first
        part = Part(
            self.rank, nodes, nodes,
            src=torch.cat([torch.cat([own_places, self._halo_places])[src[remaining]], own_places]),
            dst=torch.cat([dst[remaining], loops]),
            edge_ids=torch.cat([ids - torch.searchsorted(removed, ids), num_kept + self.dst_ids]),
            num_edges=num_kept + total,
            fingerprint=self._fingerprint,
        )  # fmt: skip
        where = "DistributedGraph.with_self_loops"
        return self._from_part(where, part, self._group, self.overlap, self._exchange.wire)

    # ---- attention -------------------------------------------------------------------------------

    def attention(
        self, inputs: AttentionInputs, attend: Callable[[AttentionInputs], Any]
    ) -> tuple[Tensor, Tensor | None]:
        """See `GraphPart.attention`."""
        _, score, tensors, numbers, return_attention, schedule, sink, _ = inputs
        refuse_transforms_of_shared_graphs(*tensors)
        if sink is not None:
            raise NotImplementedError(
                "sink: expected None for a graph that several processes share, got a tensor"
            )
        backward = needs_backward(tensors)
        self._agree_on(score, tensors, numbers, return_attention, backward)
        edges = EdgeArgs(*(getattr(tensors, name) for name in EdgeArgs._fields))
        if edges.seed is not None:
            tensors = tensors._replace(seed=self._shared(edges.seed))
            # Kernels know one number per edge: its position in edge tensors, or the id by which dropout is
            # drawn. If edge tensors, or what the CPU saves for backward, need positions, the mask of dropout
            # becomes an edge weight.
            by_place = return_attention or any(x is not None for x in edges._replace(seed=None))
            if by_place or self.device.type == "cpu":
                tensors, numbers = self._with_mask(tensors, numbers)
        by_id = tensors.seed is not None
        edges = EdgeArgs(*(getattr(tensors, name) for name in EdgeArgs._fields))
        if return_attention or not self.overlap or self._group is None:  # one call, after all rows arrived
            value, src = tensors.value, tensors.src
            tensors = tensors._replace(
                value=Gather.apply(self._exchange, value),
                src=None if src is None else Gather.apply(self._exchange, src),
            )
            numbers = numbers._replace(flags=numbers.flags | IDS_ELSEWHERE * by_id)
            graph = self._graph("whole", by_id)
            return attend(inputs._replace(graph=graph, tensors=tensors, numbers=numbers))

        # Backward needs `positive` for the gradient of dst, unless there is an edge gate.
        with_positive = score == "additive" and backward and edges.edge_gate is None
        save_positive = with_positive and tensors.dst is not None and tensors.dst.requires_grad
        numbers = numbers._replace(flags=numbers.flags | PART_OF_ROWS | IDS_ELSEWHERE * by_id)
        has_edges = any(x is not None for x in edges)
        has_edges = has_edges or needs_rows(score, numbers.negative_slope)
        calls = []
        for which in ("own", "halo"):
            graph = self._graph(which, by_id)
            args = graph_args(graph, score, tensors.value, has_edges, backward, schedule)
            calls.append(DispatchedCall(graph, args, score, numbers, False, save_positive))
        pair = Pair(calls[0], calls[1], self._exchange, self._num_own_edges)
        if backward:
            return Attention.apply(pair, *tensors), None
        return pair.forward(tensors, pair.fetch(tensors))[0].out, None

    def _agree_on(self, score, tensors: Tensors, numbers: Numbers, return_attention, backward) -> None:
        """Checks that all processes make the same call, at the first call of each kind."""
        properties = {
            name: None if x is None else (str(x.dtype), list(x.shape[1:]), backward and x.requires_grad)
            for name, x in tensors._asdict().items()
        }
        key = score, *numbers, return_attention, *map(str, properties.values())
        if self._group is None or key in self._agreed:
            return
        _agree.require_same(
            f"{score} attention", self._group, score=score, return_attention=return_attention,
            **numbers._asdict(), **properties,
        )  # fmt: skip
        self._agreed.add(key)

    def _shared(self, seed: Tensor) -> Tensor:
        """Rank 0's seed."""
        if self._group is not None:
            seed = seed.clone()
            with named(self._group):
                dist.broadcast(seed, dist.get_global_rank(self._group, 0), group=self._group)
        return seed

    def _with_mask(self, tensors: Tensors, numbers: Numbers) -> tuple[Tensors, Numbers]:
        """The call with its dropout mask as edge weights."""
        heads, dtype = tensors.value.shape[1], acc_type(tensors.value.dtype)
        assert tensors.seed is not None
        seed = tensors.seed
        masks = [
            reference.dropout_mask(seed, ids, heads, numbers.dropout_p).to(dtype)
            for ids in self.edge_ids.split(_MASK_EDGES)
        ]
        weight = torch.cat(masks)
        if tensors.edge_weight is not None:
            weight = weight * tensors.edge_weight
        return tensors._replace(seed=None, edge_weight=weight), numbers._replace(dropout_p=0.0)


def _rank(group: Any) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _size(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _shared_by(group: Any) -> Any:
    """The group; None for one process."""
    return None if _size(group) == 1 else group or dist.group.WORLD
