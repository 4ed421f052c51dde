"""Relabels a graph's nodes so that rows which are read together lie close in memory.

    r = graph.reorder("community")
    out = r.restore(model(r.graph, r.permute(x)))  # once around a model
    out = r(conv, x)                               # the same for one call

Labels of nodes do not change the result of attention, only its speed: neighbour rows that are close share
cache. ``benchmarks/reorder.py`` measures the speed-up of each order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..runtime.tracing import not_compiled, untraced
from ..sparse import csr as _csr
from .build import of_edges

_WHERE = "Graph.reorder"
# This type stands for `Graph`, which imports this module and so cannot be imported here.
G = TypeVar("G")


class Permutation(NamedTuple):
    """A relabelling of n nodes, two int64 [n] tensors: ``order[new] == old`` and ``rank[old] == new``."""

    order: Tensor
    rank: Tensor

    @classmethod
    def _of(cls, order: Tensor) -> Permutation:
        rank = torch.empty_like(order)
        rank[order] = torch.arange(order.numel(), device=order.device)
        return cls(order, rank)


class _Gather(torch.autograd.Function):
    """x[index] for a permutation. Its gradient is a gather by the inverse. The backward of index_select would
    add into zeros, on the CPU in twice the time, on CUDA with atomics."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, index, inverse):
        return x.index_select(0, index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad):
        index, inverse = ctx.saved_tensors
        return _Gather.apply(grad, inverse, index), None, None


@dataclass(frozen=True, eq=False)
class Reordering(Generic[G]):
    """A relabelled graph, with functions to permute tensors to its order and back.

    graph: the new graph. Its edge e is the old graph's edge e: tensors with an edge dimension (bias,
    weight, returned attention, …) stay as they are, and so does the mask of dropout for a seed.

    src, dst: the `Permutation` of sources and of destinations, on the graph's device; the same one if
    num_src == num_dst. Node ids, such as those of a training set, become ``r.dst.rank[ids]``. In a sampled
    block the destinations are no longer the first sources: pass layers the pair ``(x, x[:num_dst])``.

    Each of `permute` and `restore` copies its N x F values once, and their gradient once in backward. Around
    a whole model that is little; around every call it may cost more time than the new order saves.
    """

    graph: G
    src: Permutation
    dst: Permutation

    def permute(self, x: Tensor) -> Tensor:
        """x [num_src, ...] or [num_dst, ...] in the user's order -> the same in the new graph's order.

        Any dtype; differentiable, any number of times. Raises TypeError (no tensor) and ValueError (device,
        neither number of nodes).
        """
        side = self._side("permute", x)
        return _Gather.apply(x, side.order, side.rank)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of `permute`: x in the new graph's order -> the same in the user's order."""
        side = self._side("restore", x)
        return _Gather.apply(x, side.rank, side.order)

    def __call__(self, function: Callable, *nodes, **options):
        """``function(graph, *nodes, **options)`` on the new graph, nodes and result in the user's order.

        nodes: tensors that `permute` takes, None, or tuples of those. options: everything else, passed on
        unchanged: edge tensors, parameters. If the result is a tuple, only its first element is restored;
        others, like returned attention, are left alone.
        """

        def permuted(x):
            if isinstance(x, tuple):
                return tuple(map(permuted, x))
            return None if x is None else self.permute(x)

        result = function(self.graph, *map(permuted, nodes), **options)
        if isinstance(result, tuple):
            return self.restore(result[0]), *result[1:]
        return self.restore(result)

    def _side(self, method: str, x) -> Permutation:
        """The permutation for x, by its number of rows, which tells sources from destinations if they have
        permutations of their own."""
        where = f"Reordering.{method}"
        if not isinstance(x, Tensor):
            raise TypeError(f"{where}: x: {_csr.no_tensor('x', x)}")
        _csr.same_device(where, "x", x, "the graph", self.src.order)
        for side in (self.src, self.dst):
            if x.dim() and len(x) == len(side.order):
                return side
        num_src, num_dst = (len(side.order) for side in (self.src, self.dst))
        raise ValueError(
            f"{where}: x: expected num_src={num_src} or num_dst={num_dst} rows, got shape {list(x.shape)}"
        )


# ---- orders ------------------------------------------------------------------------------------------

# Each function returns int64 [num_nodes], the old node of every new one. If num_src != num_dst, the nodes
# are the sources and then the destinations, ordered together.


def _degrees(graph: Any) -> Tensor:
    if graph.num_src == graph.num_dst:
        return graph.out_degrees() + graph.in_degrees()
    return torch.cat([graph.out_degrees(), graph.in_degrees()])


def _by_degree(graph: Any) -> Tensor:
    return torch.argsort(_degrees(graph), descending=True, stable=True)


def _by_rcm(graph: Any) -> Tensor:
    csgraph = _needed("scipy.sparse.csgraph", "scipy", "rcm")
    order = csgraph.reverse_cuthill_mckee(_adjacency(graph, "rcm"))
    return torch.from_numpy(order.astype("int64", order="C"))  # a copy: scipy returns a reversed view


def _by_community(graph: Any) -> Tensor:
    """Orders nodes by Louvain's tree of communities; within the smallest communities, highest degree first.

    All levels of the tree count, because a community of the top level, with thousands of nodes, exceeds a
    cache.
    """
    np = _needed("numpy", "numpy", "community")
    # Louvain and not Leiden: scikit-network 0.33's Leiden does not return on debian-deps, a benchmark graph.
    louvain = _needed("sknetwork.clustering", "scikit-network", "community").Louvain
    adjacency = _adjacency(graph, "community")
    keys = [-_degrees(graph).cpu().numpy()]
    communities = np.arange(adjacency.shape[0])  # each node's community, at the current level
    while True:
        level = louvain(n_aggregations=1, return_probs=False)
        communities = level.fit_predict(adjacency)[communities]
        if level.aggregate_.shape == adjacency.shape:  # nothing was merged
            return torch.from_numpy(np.lexsort(keys))
        keys.append(communities)
        adjacency = level.aggregate_


_ORDERS = {"degree": _by_degree, "rcm": _by_rcm, "community": _by_community}
METHODS = tuple(_ORDERS)


def _needed(module: str, package: str, method: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{_WHERE}: method {method!r} needs {package}, which cannot be imported: pip install {package}"
        ) from error


def _adjacency(graph: Any, method: str):
    """scipy.sparse [num_nodes, num_nodes]: how many edges lead from the column's node to the row's."""
    np, sparse = _needed("numpy", "numpy", method), _needed("scipy.sparse", "scipy", method)
    src, dst = (ends.cpu().numpy() for ends in graph._structure.endpoints(torch.int32))
    num_nodes = graph.num_src
    if graph.num_src != graph.num_dst:
        dst, num_nodes = dst + graph.num_src, graph.num_src + graph.num_dst
    return sparse.coo_matrix((np.ones(len(src)), (dst, src)), shape=(num_nodes, num_nodes)).tocsr()


def _found(graph: Any, method: str) -> tuple[Permutation, Permutation]:
    if method not in _ORDERS:
        raise ValueError(
            f"{_WHERE}: method: expected one of {', '.join(METHODS)}, or a permutation, got {method!r}"
        )
    num_src, num_dst = graph.num_src, graph.num_dst
    if graph.num_edges:
        order = _ORDERS[method](graph).to(graph.device)
    else:  # nothing to order by; the libraries refuse such graphs
        order = torch.arange(num_src if num_src == num_dst else num_src + num_dst, device=graph.device)
    if num_src == num_dst:
        return (Permutation._of(order),) * 2
    is_src = order < num_src
    return Permutation._of(order[is_src]), Permutation._of(order[~is_src] - num_src)


def _given(graph: Any, order) -> tuple[Permutation, Permutation]:
    def checked(name: str, order, size_name: str, size: int) -> Permutation:
        order = _csr.as_index(_WHERE, name, order, (size,))
        if order.device != graph.device:
            raise ValueError(f"{_WHERE}: {name}: expected device {graph.device}, got {order.device}")
        order = order.to(torch.int64, copy=True)
        missing = (~torch.isin(torch.arange(size, device=order.device), order)).nonzero()
        if len(missing):
            raise ValueError(
                f"{_WHERE}: {name}: expected every number in [0, {size_name}={size}) once, "
                f"got none that is {int(missing[0])}"
            )
        return Permutation._of(order)

    if graph.num_src == graph.num_dst:
        return (checked("method", order, "num_nodes", graph.num_src),) * 2
    if not isinstance(order, tuple) or len(order) != 2:
        got = f"{len(order)} of them" if isinstance(order, tuple) else type(order).__name__
        raise ValueError(
            f"{_WHERE}: method: expected a tuple of two permutations, of num_src={graph.num_src} and of "
            f"num_dst={graph.num_dst} nodes, got {got}"
        )
    return (
        checked("method[0]", order[0], "num_src", graph.num_src),
        checked("method[1]", order[1], "num_dst", graph.num_dst),
    )


@not_compiled
def reorder(graph: Any, method: str | Tensor | tuple[Tensor, Tensor]) -> Reordering[Any]:
    """See `Graph.reorder`."""
    with untraced(graph._structure.indices):
        src, dst = _found(graph, method) if isinstance(method, str) else _given(graph, method)
        old_src, old_dst = graph._structure.endpoints(torch.int32)
        new_src, new_dst = src.rank.to(torch.int32)[old_src], dst.rank.to(torch.int32)[old_dst]
        # Sorted by source first: the CSR by destination is its transpose, in which indices rise.
        by_src = _csr.from_coo(new_dst, new_src, graph.num_src, rows_sorted=False)
        found = _csr.Edges(graph.num_src, graph.num_dst, by_src, True, None)
        return Reordering(of_edges(type(graph), found), src, dst)
