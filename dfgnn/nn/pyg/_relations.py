"""Graphs of several relations as one: what RGAT and HGT derive from their edges, once per set of tensors.

While a compiler records, it is not known which (node, relation) pairs occur. Then there are all of them,
numbered relation by relation, and an `EdgeList` represents the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...engine.compiler_graph import EdgeList, is_traced
from ...graph import Graph
from ...graph.cache import once, parts_of, state_of
from ...sparse import csr as _csr
from .._errors import wrong_argument
from .._sums_in_16_bits import rows_of_types
from .._typed import Pairs, pairs_of, sum_of_sources

# ---- relations between the same nodes, told apart by the type of an edge ---------------------------------


class Relations(NamedTuple):
    """A graph whose sources are the (source, relation) pairs of a graph with several relations."""

    #: From the pairs ``src`` to the destinations, or, for a softmax within relations, to the pairs ``dst``.
    graph: Graph
    src: Pairs  # (source, relation)
    dst: Pairs  # (destination, relation)
    to_edges: Callable[[Tensor], Tensor] | None  # rows of the pairs ``dst`` -> each edge's row
    to_nodes: Callable[[Tensor], Tensor]  # rows of the pairs ``dst`` -> sums over relations, a row per node
    in_degrees: Tensor  # int64 [num_dst], of all relations


def relations_of(
    edge_index: Any,
    edge_type: Tensor | None,
    sizes: tuple[int, int, int],
    *,
    within: bool,
    per_edge: bool,
) -> Relations:
    """The relations of ``edge_index``, cached as long as that tensor and ``edge_type`` live.

    Waits for the device where they are made: to check the values and to count the pairs.

    Args:
        edge_index: as in ``layer_graph``; a sparse tensor has the sizes given here.
        edge_type: int32 or int64 ``[E]``, each in 0 .. num_relations - 1, in the order of the edges; None:
            the values of a sparse tensor.
        sizes: (num_src, num_dst, num_relations).
        within: softmax is to run over the edges of a relation alone.
        per_edge: also make ``to_edges``.

    Raises:
        TypeError, ValueError: shapes, dtypes, devices or values are not as described.
    """
    is_dense = type(edge_index) is Tensor and edge_index.layout == torch.strided
    if is_traced(edge_index) or (is_dense and is_traced(edge_type)):
        return _all_relations(edge_index, edge_type, sizes, within, per_edge)
    return _occurring_relations(edge_index, edge_type, sizes, within, per_edge)


@torch.compiler.disable
def _occurring_relations(
    edge_index: Any, edge_type: Tensor | None, sizes: tuple[int, int, int], within: bool, per_edge: bool
) -> Relations:
    num_src, num_dst, num_relations = sizes
    parts = parts_of(edge_index)
    key: tuple = "relations_of", sizes, within, per_edge
    more_state: tuple = ()
    types = _values(edge_index) if edge_type is None else edge_type
    if types is None:
        raise _no_types()
    types = _csr.as_index("RGATConv", "edge_type", types)
    if edge_type is None and isinstance(edge_index, Tensor):
        # A sparse tensor returns its values as a new object each time, which cannot be a key of the cache.
        key, more_state = (*key, "own types"), state_of(types)
    else:
        parts = *parts, types

    def build() -> Relations:
        src, dst = _ends("RGATConv", edge_index, num_src, num_dst)
        relation = _checked_types(types, src, num_relations)
        sources, src = pairs_of(src, relation, num_src, with_lift=True)
        destinations, pair = pairs_of(dst, relation, num_dst, with_lift=True)
        num_pairs, lift = destinations.num_pairs, cast(Graph, destinations.lift)
        ends, num_rows = (pair, num_pairs) if within else (dst, num_dst)
        indptr = torch.arange(len(pair) + 1, device=dst.device)
        to_edges = Graph.from_csr(indptr, pair, num_pairs, validate=False)
        return Relations(
            Graph.from_coo(src, ends, num_src=sources.num_pairs, num_dst=num_rows, validate=False),
            sources,
            destinations,
            partial(sum_of_sources, to_edges) if per_edge else None,
            partial(sum_of_sources, lift.reverse()),
            torch.bincount(dst, minlength=num_dst),
        )

    return once(parts, key, build, more_state)


_OF_TYPES = (
    "HGTConv: edge_index_dict: expected ids below the rows of their type in x_dict; the layer uncompiled "
    "names the wrong ones, of those of all types in a row, where one out of range is -1"
)


def _or_none(ids: Tensor, count: Any, first: Any) -> Tensor:
    """``first + ids``, with -1, which is refused, for ids that would be those of the next type's nodes."""
    return (ids + first).masked_fill((ids < 0) | (ids >= count), -1)


def _all_relations(
    edge_index: Tensor, edge_type: Tensor | None, sizes: tuple[int, int, int], within: bool, per_edge: bool
) -> Relations:
    """The relations with all pairs as sources. Values are checked when the graph is made."""
    num_src, num_dst, num_relations = sizes
    if edge_type is None:
        raise _no_types()
    src, dst = edge_index.to(torch.int64)
    relation = edge_type.to(torch.int64)
    pair = relation * num_dst + dst
    ends, num_rows = (pair, num_relations * num_dst) if within else (dst, num_dst)
    where = (
        "RGATConv: edge_type or edge_index: expected types below num_relations and ids below the rows of x; "
        "the layer uncompiled names the wrong ones, of edge_type * rows + id, or -1 for an id out of range"
    )
    pairs = torch.stack([_or_none(src, num_src, relation * num_src), ends])
    graph = EdgeList(pairs, num_relations * num_src, num_rows, where=where)
    # For a type that does not exist an error is raised when the graph is made. `to_edges` may run before
    # that, and must not read out of bounds.
    index = pair.clamp(0, num_relations * num_dst - 1) if per_edge else pair
    return Relations(
        cast(Graph, graph),
        Pairs(None, num_relations * num_src),
        Pairs(None, num_relations * num_dst),
        (lambda x: rows_of_types(x, index)) if per_edge else None,
        lambda x: x.unflatten(0, (num_relations, -1)).sum(0),
        dst.new_zeros(num_dst).index_add(0, dst, torch.ones_like(dst)),
    )


def _no_types() -> ValueError:
    return ValueError("RGATConv: edge_type: expected a tensor [E], as edge_index has no values, got None")


def _checked_types(edge_type: Tensor, src: Tensor, num_relations: int) -> Tensor:
    if len(edge_type) != len(src):
        raise ValueError(
            f"RGATConv: edge_type: expected shape [{len(src)}], a type per edge, got {list(edge_type.shape)}"
        )
    _csr.same_device("RGATConv", "edge_type", edge_type, "edge_index", src)
    if len(edge_type):
        low, high = torch.stack(torch.aminmax(edge_type)).tolist()
        if low < 0 or high >= num_relations:
            what = f"values in [0, num_relations={num_relations})"
            raise wrong_argument("RGATConv", "edge_type", what, low if low < 0 else high)
    return edge_type.to(torch.int64)


# ---- relations between nodes of several types ------------------------------------------------------------

EdgeTypes = dict[tuple[str, str, str], Any]


class Joined(NamedTuple):
    """The edges of all relations in one graph."""

    #: The sources are those of each relation, one relation after the other; the destinations are the nodes of
    #: all destination types, one type after the other.
    graph: Graph
    #: For each relation, the nodes of the source type that are its sources; None if it has all of them.
    rows: tuple[Tensor | None, ...]


def join(edge_index_dict: EdgeTypes, num_src: dict[str, int], num_dst: dict[str, int]) -> Joined:
    """The relations of ``edge_index_dict`` in its order, cached as long as its tensors live.

    Waits for the device where it is made: to check the values and to count the sources.

    Args:
        edge_index_dict: edges as in ``layer_graph``, by (source type, name, destination type).
        num_src: number of nodes of each type that is a source.
        num_dst: likewise of destinations, in the order in which their rows follow one another.

    Raises:
        TypeError, ValueError: edges are not as described, or a node is out of range.
    """
    if not all(map(is_traced, edge_index_dict.values())):
        return _join_occurring(edge_index_dict, num_src, num_dst)
    starts, num_rows = {}, 0  # a loop, as itertools.accumulate would make constants of symbolic sizes
    for kind, count in num_dst.items():
        starts[kind], num_rows = num_rows, num_rows + count
    ends, total = [], 0
    for (src_type, _, dst_type), edge_index in edge_index_dict.items():
        src, dst = edge_index.to(torch.int64)
        src, dst = (
            _or_none(src, num_src[src_type], total), _or_none(dst, num_dst[dst_type], starts[dst_type])
        )  # fmt: skip
        ends.append(torch.stack([src, dst]))
        total = total + num_src[src_type]
    graph = EdgeList(torch.cat(ends, 1), total, num_rows, where=_OF_TYPES)
    return Joined(cast(Graph, graph), (None,) * len(edge_index_dict))


@torch.compiler.disable
def _join_occurring(edge_index_dict: EdgeTypes, num_src: dict[str, int], num_dst: dict[str, int]) -> Joined:
    parts = tuple(part for edge_index in edge_index_dict.values() for part in parts_of(edge_index))
    key = "join", *edge_index_dict, *num_src.items(), *num_dst.items()

    def build() -> Joined:
        starts = dict(zip(num_dst, accumulate(num_dst.values(), initial=0)))
        sources, destinations, rows, total = [], [], [], 0
        for (src_type, name, dst_type), edge_index in edge_index_dict.items():
            num_nodes = num_src[src_type]
            where = f"HGTConv: edge_index_dict[{src_type!r}, {name!r}, {dst_type!r}]"
            src, dst = _ends(where, edge_index, num_nodes, num_dst[dst_type])
            occurs = torch.zeros(num_nodes, dtype=torch.bool, device=src.device)
            occurs[src] = True
            found = occurs.nonzero().squeeze(1)
            few = 2 * len(found) <= num_nodes  # otherwise leaving out the others would save little
            if few:
                src, num_nodes = (occurs.cumsum(0) - 1)[src], len(found)
            rows.append(found if few else None)
            sources.append(src + total)
            destinations.append(dst + starts[dst_type])
            total += num_nodes
        ends = torch.cat(sources), torch.cat(destinations)
        graph = Graph.from_coo(*ends, num_src=total, num_dst=sum(num_dst.values()), validate=False)
        return Joined(graph, tuple(rows))

    return once(parts, key, build)


def _ends(where: str, edge_index: Any, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """int64 sources and destinations, checked."""
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        src, dst = _csr.as_index(where, "edge_index", edge_index, (2, None))
        _csr.UserEdges(where, _csr.EDGE_INDEX, src, dst, num_src, num_dst).checked(validate=True)
        return src.to(torch.int64), dst.to(torch.int64)
    src, dst = Graph.from_pyg(edge_index).edge_index
    return src, dst


def _values(edge_index: Any) -> Tensor | None:
    if not isinstance(edge_index, Tensor):
        return edge_index.storage.value()
    if edge_index.layout == torch.strided:
        return None
    return edge_index._values() if edge_index.layout == torch.sparse_coo else edge_index.values()
