"""Graph: the edges on which attention runs, with cached CSRs and plans."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from itertools import count
from operator import index
from typing import Literal, overload

import torch
from torch import Tensor

from ..plan import Plan, Planner, Shape
from ..plan.planner import FixedPlanner
from ..plan.plans import check_shape
from ..plan.tuning import Tuning, autotune
from ..runtime.tracing import untraced
from ..runtime.wrong_call import says_calls
from ..sparse.csr import CSR
from ..sparse.degrees import DegreeStats
from ..sparse.fixed import FixedStructure
from ..sparse.structure import Side, Structure
from . import build, derived, fixed_capacity
from .constructors import Constructors
from .part import GraphPart
from .reorder import Reordering, reorder

# Unique number -> a weak reference to the graph; compiled code refers to graphs by these numbers. It is no
# WeakValueDictionary, which would call several Python functions per graph.
OF_NUMBER: dict[int, weakref.ref[Graph]] = {}
_numbers = count()
#: What DGL's and torch_geometric's graphs call it -> what it is here.
_OF_LIBRARIES = {
    **dict.fromkeys(("number_of_nodes", "num_vertices"), "num_nodes"),
    **dict.fromkeys(("number_of_edges", "nnz"), "num_edges"),
    **dict.fromkeys(("num_src_nodes", "number_of_src_nodes"), "num_src"),
    **dict.fromkeys(("num_dst_nodes", "number_of_dst_nodes"), "num_dst"),
    **dict.fromkeys(("edges", "all_edges", "adj", "adj_t", "adjacency_matrix"), "edge_index"),
}
_SLOTS, _set = ("_device", "_num_edges", "_number", "_planner", "_structure"), object.__setattr__


class Graph(Constructors):
    """A directed graph or a bipartite block, immutable, on one device.

    An edge src -> dst lets dst attend to src. Duplicates and self loops are kept. Structure is held as CSR by
    destination (`csr`) and, from the first use on, CSR by source (`reverse_csr`): indptr int64, indices and
    edge ids int32, so nodes and edges must each be fewer than 2**31. With more edges, `from_csr`, `from_coo`
    and `from_edge_index` make a `dfgnn.graph.RangedGraph`, which functions and layers also take.

    **Edge order.** Tensors with an edge dimension (bias, mask, weight, returned attention) are always in
    the user's order, which each constructor states; `edge_index` has the sources and destinations in that
    order.

    **Sharing.** A constructor does not copy tensors that are contiguous and have the dtypes above: do not
    modify these afterwards.

    **Waiting for the device.** Constructors wait once, to check the values (ValueError), to find sizes that
    were not passed and to see whether a sort or an edge permutation can be dropped. ``validate=False`` skips
    the checks that read values; if sizes are passed it does not wait, and wrong values then are undefined
    behaviour. (On the CPU the operator that sorts edges also checks them, so that only constructors from a
    CSR or a sparse matrix skip anything.) Later only `has_zero_in_degree`, `degree_stats`, `plan` and
    ``add_self_loops(remove_existing=True)`` wait; the first three once per graph, `plan` not at all for a
    `one_shot` graph. On a GPU results are ready in stream order, like any tensor: another stream has to wait
    for them.

    Everything derived is cached, and building it twice from two threads is harmless. Equality is identity.
    Pickling and copying keep both CSRs and drop plans.
    """

    __slots__ = ("__weakref__", *_SLOTS)
    _device: torch.device
    _num_edges: int
    _number: int
    _planner: Planner
    _structure: Structure

    def __init__(self, *args, **kwargs):
        raise TypeError(
            "Graph: expected one of Graph.from_edge_index, from_coo, from_csr, from_scipy, "
            "from_torch_sparse, from_dgl, from_pyg, got a direct call"
        )

    @classmethod
    def _make(cls, dst: Side, src: Side, once: bool = False) -> Graph:
        return cls._of(Structure(dst, src), once)

    @classmethod
    def _of(cls, structure: Structure, once: bool = True) -> Graph:
        self = object.__new__(cls)
        self.__setstate__((structure, once))
        return self

    def __getstate__(self):
        return self._structure, self._planner.once

    def __setstate__(self, state):
        structure, once = state
        fixed = isinstance(structure, FixedStructure)
        planner = FixedPlanner(structure) if fixed else Planner(structure, once)
        number = next(_numbers)
        for name, value in zip(_SLOTS, (*structure.place, number, planner, structure)):
            _set(self, name, value)
        OF_NUMBER[number] = weakref.ref(self, partial(OF_NUMBER.pop, number))

    def __getattr__(self, name):
        if name.startswith("_") or hasattr(type(self), name):
            return object.__getattribute__(self, name)  # raises; a property has an error of its own
        known = [x for x in dir(type(self)) if not x.startswith("_")]
        like = [_OF_LIBRARIES[name]] if name in _OF_LIBRARIES else get_close_matches(name, known, 1)
        hint = f"did you mean {like[0]}?" if like else "features are tensors that are given beside the graph"
        raise AttributeError(
            "Graph: expected an attribute of dfgnn.Graph, which has edges alone (help(dfgnn.Graph)), got "
            f"{name}; {hint}"
        )

    def __getitem__(self, key):
        raise TypeError(
            f"Graph: expected an attribute or method, got graph[{key!r:.40}]; graph.edge_index has edges, "
            "and the functions and layers take features beside the graph"
        )

    def __setattr__(self, name, value):
        raise AttributeError(f"Graph is immutable: cannot set {name}; Graph.from_edge_index makes another")

    def __delattr__(self, name):
        raise AttributeError(f"Graph is immutable: cannot delete {name}")

    # ---- fixed capacity --------------------------------------------------------------------------

    @classmethod
    def with_capacity(
        cls,
        num_nodes: int | tuple[int, int],
        num_edges: int,
        *,
        device: torch.device | str | None = None,
    ) -> Graph:
        """A graph of fixed size, into which `copy_` puts the edges of one batch after the other.

        Its shapes, and those of everything derived from it, follow from the capacity; only the device knows
        how much is in use. Kernels make CSRs and plans without waiting, so that a CUDA graph can contain a
        whole step: `copy_`, forward and backward. Features have ``num_nodes`` rows, edge tensors
        ``num_edges``. A node that is not in use has no edges: its output is 0 (or the layer's bias), and it
        gets no gradient from neighbours. An edge that is not in use has no effect: its attention is 0, and so
        are the gradients of its edge tensors. What these hold there may be NaN, except for the attributes of
        a compiled layer, which multiplies them by 0.

        num_nodes: the most nodes, or (sources, destinations).  num_edges: the most edges.  device: default
        torch's.

        `edge_index` is the buffer itself, int64 [2, num_edges]; torch_geometric's layers that are given it
        find this graph, also with loops. On a GPU there is one plan, that of a `one_shot` graph. `edge_mask`
        tells the edges in use. Second derivatives and forward mode raise NotImplementedError; `degree_stats`
        and `has_zero_in_degree` wait for the device. `to`, `reverse` and pickling copy the current edges.

        Raises TypeError (no integers) and ValueError (2**31 nodes or edges, edges without nodes).
        """
        return cls._of_buffer(fixed_capacity.make(num_nodes, num_edges, device))

    @classmethod
    def _over(cls, edges: Tensor, counts: Tensor, num_src: int, num_dst: int) -> Graph:
        """A graph of fixed capacity over buffers that the caller writes to: see `FixedStructure`. The caller
        must call ``_renew`` after writing."""
        return cls._of_buffer(FixedStructure(edges, counts, num_src, num_dst))

    @classmethod
    def _of_buffer(cls, structure: FixedStructure) -> Graph:
        graph = cls._of(structure)
        fixed_capacity.OF_BUFFER[structure.edges] = weakref.ref(graph)
        return graph

    def copy_(
        self,
        edge_index: Tensor,
        num_nodes: int | tuple[int, int] | Tensor | None = None,
        num_edges: int | Tensor | None = None,
        *,
        validate: bool = False,
    ) -> Graph:
        """Puts other edges into a graph made by `with_capacity`; returns it.

        edge_index: int32 or int64 [2, E'] on any device, E' <= E. num_nodes: how many are in use, or
        (sources, destinations); default all. num_edges: how many of the columns are; default all. Both may be
        tensors on the graph's device (num_nodes then [2] or []), which a CUDA graph reads anew at every
        replay.

        Values on the CPU are checked, others with ``validate``, which waits for the device. Without a check,
        an edge whose source or destination is not in use is left out.

        In a CUDA graph: call it in the captured region with buffers, or before each replay. The captured
        region must derive CSRs and plans itself: call `copy_` before capturing, which drops earlier ones.

        Raises TypeError (a graph of another kind, no index tensor) and ValueError (more than the capacity,
        shape, ids out of range where they are checked).
        """
        structure = self._structure
        if not isinstance(structure, FixedStructure):
            raise TypeError("Graph.copy_: expected a graph made by Graph.with_capacity, got another one")
        if structure.num_loops:
            raise TypeError("Graph.copy_: expected the graph without loops, of which this one is made")
        fixed_capacity.fill(structure, edge_index, num_nodes, num_edges, validate)
        return self

    def _renew(self) -> None:
        """Drops what was derived, after the buffers of a graph of fixed capacity were written to."""
        assert isinstance(self._structure, FixedStructure)
        self._structure.renew()

    @property
    def edge_mask(self) -> Tensor | None:
        """bool [num_edges], in the user's order: the edges in use of a graph of fixed capacity; else None."""
        structure = self._structure
        return structure.valid if isinstance(structure, FixedStructure) else None

    # ---- structure -------------------------------------------------------------------------------

    @property
    def num_src(self) -> int:
        return self._structure.src.num_rows

    @property
    def num_dst(self) -> int:
        return self._structure.dst.num_rows

    @property
    def num_nodes(self) -> int:
        """num_src and num_dst where they are equal. Raises AttributeError where sources and destinations are
        different nodes."""
        if self.num_src != self.num_dst:
            raise AttributeError(
                f"Graph.num_nodes: expected as many sources as destinations, got num_src={self.num_src} and "
                f"num_dst={self.num_dst}; ask for one of these"
            )
        return self.num_src

    @property
    def num_edges(self) -> int:
        return self._num_edges

    @property
    def device(self) -> torch.device:
        return self._device

    def csr(self) -> CSR:
        """Rows are destinations, indices are sources; eids maps a position to the user's order (or None)."""
        return self._structure.csr()

    def reverse_csr(self, need_eids: bool = False) -> CSR:
        """Rows are sources, indices are destinations. Built at the first call, then cached.

        eids is as in `csr` with need_eids; without, it is None and means nothing.
        """
        return self._structure.reverse_csr(need_eids)

    @property
    def edge_index(self) -> Tensor:
        """int64 [2, E], sources and destinations in the user's edge order; cached, not to be modified."""
        return self._structure.edge_index

    # ---- degrees ---------------------------------------------------------------------------------

    def in_degrees(self) -> Tensor:
        """int64 [num_dst]: the number of edges into each destination."""
        return self._structure.degrees(reverse=False)

    def out_degrees(self) -> Tensor:
        """int64 [num_src]: the number of edges out of each source."""
        return self._structure.degrees(reverse=True)

    @property
    def has_zero_in_degree(self) -> bool:
        """Whether some destination has no edge. Waits for the device the first time."""
        return self._structure.has_zero_in_degree

    def degree_stats(self, reverse: bool = False) -> DegreeStats:
        """Statistics of the in-degrees, or of the out-degrees. Waits for the device the first time."""
        return self._structure.degree_stats(reverse)

    # ---- plans -----------------------------------------------------------------------------------

    def plan(
        self,
        num_heads: int = 4,
        head_dim: int = 32,
        dtype: torch.dtype = torch.float32,
        reverse: bool = False,
        schedule: str = "auto",
        layer: str | None = "gat",
        edges: bool = False,
    ) -> Plan:
        """The work items of this graph for kernels: a `dfgnn.plan.Plan`, chosen once per set of arguments,
        cached.

        reverse: the plan over sources that backward uses. schedule: a name forces that schedule,
        "natural<=512" also its maximum edges per work item. layer: "gat", "gatv2" or "dot", or None for the
        plain products. edges: the call has edge tensors or dropout, or returns attention. After `autotune`,
        "auto" is the schedule that it chose for the layer.

        Raises ValueError (sizes, dtype, an unknown schedule or layer, a schedule that is not available) and
        TypeError (a schedule that is no string).
        """
        check_shape("Graph.plan", num_heads, head_dim, dtype)
        shape = Shape(index(num_heads), index(head_dim), dtype, layer)  # index, because sizes may be symbolic
        return self._planner.plan(shape, reverse, schedule, edges)

    def autotune(
        self,
        layer: str = "gat",
        num_heads: int = 4,
        head_dim: int = 32,
        dtype: torch.dtype = torch.float32,
        *,
        backward: bool = True,
        seconds: float = 1.0,
        file: str | os.PathLike[str] | None = None,
    ) -> Tuning:
        """Measures every plan for a layer's attention on this graph and makes the fastest the "auto" plan of
        this feature shape; returns a `dfgnn.plan.tuning.Tuning`, which prints all times.

        layer: "gat", "gatv2" or "dot". backward: also tune the plan over sources. seconds: about how long to
        measure each direction. file: a JSON file, or a link to one; an entry for this graph, device and shape
        is used without measuring, and new results are added. Many processes may use one file at the same
        time. Entries of other versions are left alone.

        The choice lives as long as the graph and its plans: copies, `to` and pickling drop it. A candidate
        (`dfgnn.plan.alternatives`) has to be 2 % faster than the estimated choice. Tuning allocates inputs,
        gradients and results. Results of attention depend on the plan by rounding only.

        Raises ValueError (unknown layer, sizes, dtype, a file that is no such JSON).
        """
        return autotune(
            self, layer, num_heads, head_dim, dtype, backward=backward, seconds=seconds, file=file
        )

    # ---- derived graphs --------------------------------------------------------------------------

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Graph:
        """This graph on another device, with its cached CSRs but without plans; itself if it is on that
        device.

        Raises ValueError (a string that names no device) and TypeError (nothing that can name one).
        """
        try:
            torch.device(device)
        except (RuntimeError, TypeError):
            kind = ValueError if isinstance(device, str) else TypeError
            raise kind(f"Graph.to: device: expected one such as 'cpu' or 'cuda:0', got {device!r}") from None
        device = torch.empty(0, device=device).device  # "cuda" becomes the current GPU
        if device == self._device:
            return self
        structure = self._structure
        with untraced(structure.indices):
            return Graph._of(structure.to(device, non_blocking), self.is_one_shot)

    def reverse(self) -> Graph:
        """The graph with all edges reversed, in the same order. Both graphs share their caches."""
        return Graph._of(self._structure.reversed(), self.is_one_shot)

    def one_shot(self) -> Graph:
        """This graph for use in a single training step, like a sampled mini-batch; both share what either
        caches.

        Its plans are made without degree statistics, so that nothing waits for the device: on a GPU "auto" is
        "packed" or, if the features do not allow it, "natural". A graph made from a DGL block is one already.
        """
        return Graph._of(self._structure, True)

    @property
    def is_one_shot(self) -> bool:
        """Whether it was made by `one_shot`."""
        return self._planner.once

    def reorder(self, method: str | Tensor | tuple[Tensor, Tensor]) -> Reordering[Graph]:
        """This graph with its nodes relabelled, as a `dfgnn.graph.Reordering`: the graph, the permutations,
        and functions that permute and restore node tensors. Edge e stays edge e, so edge tensors need no
        change.

        method: "degree": highest in-degree + out-degree first, stable.  "rcm": reverse Cuthill-McKee (scipy),
        a small bandwidth.  "community": Louvain's tree of communities (scikit-network), highest degree first
        within one.  Or a permutation, ``order[new] == old``, int32 or int64 [num_nodes].

        If num_src != num_dst, sources and destinations have different permutations: by their degrees, or by
        rcm or community of both together; a given permutation then is a tuple of two, for sources and
        destinations. With num_src == num_dst both have one permutation.

        Deterministic. rcm and community run on the CPU, in seconds for millions of edges. Raises ValueError
        (unknown method, no permutation), TypeError (not an int32 or int64 tensor) and ImportError (the
        library is not installed).
        """
        return reorder(self, method)

    @overload
    def add_self_loops(
        self, remove_existing: bool = False, return_edge_map: Literal[False] = False
    ) -> Graph: ...
    @overload
    def add_self_loops(
        self, remove_existing: bool = False, *, return_edge_map: Literal[True]
    ) -> tuple[Graph, Tensor]: ...
    @overload
    def add_self_loops(
        self, remove_existing: bool, return_edge_map: Literal[True]
    ) -> tuple[Graph, Tensor]: ...

    def add_self_loops(
        self, remove_existing: bool = False, return_edge_map: bool = False
    ) -> Graph | tuple[Graph, Tensor]:
        """A new graph with an edge i -> i for every i < min(num_src, num_dst), appended after the user's
        edges.

        remove_existing: existing loops are removed first, as in PyG's layers; the other edges keep their
        order. Otherwise existing loops stay, as in DGL's add_self_loop, and edge e stays edge e.

        return_edge_map: also return int64 [new E], each edge's position before, -1 for an appended loop.
        """
        graph, edge_map = build.with_self_loops(self, remove_existing)
        return (graph, edge_map) if return_edge_map else graph

    def edges_as_sources(self) -> Graph:
        """The graph on which rows of edges are rows of sources: its edge e leads from source e to the
        destination of this graph's edge e, so that num_src is num_edges. Cached as long as this graph lives.

        With it the functions take keys and values that edges have instead of nodes, [E, H, D]::

            edges = graph.edges_as_sources()
            out = dfgnn.functional.dot_attention(edges, query, key_of_edges, value_of_edges)
        """
        return derived.edges_as_sources(self)

    @staticmethod
    def batch(graphs: Sequence[Graph]) -> Graph:
        """The disjoint union: nodes and edges of the first graph come first, then those of the second, ….

        The reverse CSR is joined too where all graphs have it, without a sort. Raises TypeError (not graphs)
        and ValueError (none, several devices, 2**31 nodes or edges in all).
        """
        return build.batch(Graph, graphs)

    def __repr__(self) -> str:
        square, structure = self.num_src == self.num_dst, self._structure
        nodes = f"num_nodes={self.num_src}" if square else f"num_src={self.num_src}, num_dst={self.num_dst}"
        text = f"Graph({nodes}, num_edges={self.num_edges}, device='{self.device}'"
        for name, stats in (("in", structure.dst.stats), ("out", structure.src.stats)):
            if stats is not None:
                text += (
                    f", {name}_degree: mean {stats.mean:.1f}, max {stats.max}, p99 {stats.p99}, "
                    f"zero {stats.num_empty}"
                )
        return text + ")"


GraphPart.of_graphs = frozenset(dir(Graph))


for _name in ("add_self_loops", "autotune", "in_degrees", "out_degrees", "plan", "reorder", "to"):
    setattr(Graph, _name, says_calls(vars(Graph)[_name], f"Graph.{_name}"))
for _name, _kind in (("batch", staticmethod), ("with_capacity", classmethod)):
    setattr(Graph, _name, _kind(says_calls(vars(Graph)[_name].__func__, f"Graph.{_name}")))
