"""Graphs of several relations as one: what RGAT and HGT derive from their edges, once per set of tensors."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import functional
from ...graph import Graph
from ...graph.cache import once, parts_of, state_of
from ...sparse import csr as _csr


class Lift:
    """``x -> x[index]`` as a sparse product, whose gradient is a sum in a fixed order; ``sum`` is that sum.

    index: int32 or int64 ``[M]`` of values in 0 .. num_rows - 1.
    """

    def __init__(self, index: Tensor, num_rows: int):
        indptr = torch.arange(len(index) + 1, device=index.device)
        self._down = Graph.from_csr(indptr, index, num_rows, validate=False)
        self._up = self._down.reverse()

    def __call__(self, x: Tensor) -> Tensor:
        """``[num_rows, *]`` to ``[M, *]``."""
        return _product(self._down, x)

    def sum(self, x: Tensor) -> Tensor:
        """``[M, *]`` to ``[num_rows, *]``: row r is the sum of those with index r."""
        return _product(self._up, x)


def _product(graph: Graph, x: Tensor) -> Tensor:
    out = functional.spmm(graph, x.new_ones(graph.num_edges), x.flatten(1).unsqueeze(1))
    return out.view(graph.num_dst, *x.shape[1:])


# ---- relations between the same nodes, told apart by the type of an edge ---------------------------------


class Pairs(NamedTuple):
    """The (node, relation) pairs that occur, those of a relation side by side."""

    lift: Lift  # from nodes to pairs
    sizes: list[int]  # the number of pairs of each relation

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x[p] @ weight[relation of p]`` of pair p: x ``[P, F]``, weight ``[R, F, K]``.

        Or weight ``[R, B, F / B, K / B]``, the diagonal blocks of such matrices. Returns ``[P, K]``.
        """
        if weight.dim() == 4:
            x = x.unflatten(1, weight.shape[1:3]).transpose(0, 1)
        parts = zip(x.split(self.sizes, dim=-2), weight.unbind())
        # Relations without edges are left out; without any, the weight's gradient still is zero, not None.
        products = [part @ matrix for part, matrix in parts if part.shape[-2]] or [x @ weight[0]]
        out = torch.cat([p.transpose(0, 1) for p in products]) if weight.dim() == 4 else torch.cat(products)
        return out.flatten(1)


class Relations(NamedTuple):
    """Edges from (source, relation) pairs."""

    graph: Graph  # to destinations, or within relations to (destination, relation) pairs
    src: Pairs
    dst: Pairs
    dst_to_edges: Lift | None  # from the destination's pair to the edge
    in_degrees: Tensor  # int64 [num_dst], of all relations


@torch.compiler.disable
def relations_of(
    edge_index: Any,
    edge_type: Tensor | None,
    num_src: int,
    num_dst: int,
    num_relations: int,
    *,
    within: bool,
    per_edge: bool,
) -> Relations:
    """The relations of ``edge_index``, cached as long as that tensor and ``edge_type`` live.

    Waits for the device where they are made: to check the values and to count the pairs.

    Args:
        edge_index: as in ``graph_of``; a sparse tensor has the sizes given here.
        edge_type: int32 or int64 ``[E]``, each in 0 .. num_relations - 1, in the order of the edges; None:
            the values of a sparse tensor.
        num_src, num_dst: numbers of nodes.
        within: softmax is to run over the edges of a relation alone.
        per_edge: also make ``dst_to_edges``.

    Raises:
        TypeError, ValueError: shapes, dtypes, devices or values are not as described.
    """
    parts = parts_of(edge_index)
    key: tuple = "relations_of", num_src, num_dst, num_relations, within, per_edge
    more_state: tuple = ()
    is_own = edge_type is None
    if is_own:
        edge_type = _values(edge_index)
        if edge_type is None:
            raise ValueError("edge_type: expected a tensor [E], as edge_index has no values, got None")
    edge_type = _csr.as_index("RGATConv", "edge_type", edge_type)
    if is_own and isinstance(edge_index, Tensor):
        # Its values are another object each time that one asks for them.
        key, more_state = (*key, "own types"), state_of(edge_type)
    else:
        parts = *parts, edge_type

    def build() -> Relations:
        src, dst = _ends("RGATConv", edge_index, num_src, num_dst)
        relation = _checked_types(edge_type, src, num_relations)
        src_pairs, src = _pairs(src, relation, num_src, num_relations)
        dst_pairs, pair = _pairs(dst, relation, num_dst, num_relations)
        num_src_pairs, num_dst_pairs = sum(src_pairs.sizes), sum(dst_pairs.sizes)
        ends, num_rows = (pair, num_dst_pairs) if within else (dst, num_dst)
        return Relations(
            Graph.from_coo(src, ends, num_src=num_src_pairs, num_dst=num_rows, validate=False),
            src_pairs,
            dst_pairs,
            Lift(pair, num_dst_pairs) if per_edge else None,
            torch.bincount(dst, minlength=num_dst),
        )

    return once(parts, key, build, more_state)


def _pairs(node: Tensor, relation: Tensor, num_nodes: int, num_relations: int) -> tuple[Pairs, Tensor]:
    """The pairs of the edges' ends, and the pair of each edge."""
    step = max(num_nodes, 1)
    occurring, pair = torch.unique(relation * step + node, return_inverse=True)
    sizes = torch.bincount(occurring // step, minlength=num_relations).tolist()
    return Pairs(Lift(occurring % step, num_nodes), sizes), pair


def _checked_types(edge_type: Tensor, src: Tensor, num_relations: int) -> Tensor:
    if len(edge_type) != len(src):
        raise ValueError(f"RGATConv: edge_type: expected shape [{len(src)}], got {list(edge_type.shape)}")
    _csr.same_device("RGATConv", "edge_type", edge_type, "edge_index", src)
    if len(edge_type):
        low, high = torch.stack(torch.aminmax(edge_type)).tolist()
        if low < 0 or high >= num_relations:
            raise ValueError(
                f"RGATConv: edge_type: expected values in [0, num_relations={num_relations}), "
                f"got {low if low < 0 else high}"
            )
    return edge_type.to(torch.int64)


# ---- relations between nodes of several types ------------------------------------------------------------


class Joined(NamedTuple):
    """The edges of all relations in one graph."""

    #: Sources are those of the relations, one relation after the other; destinations the nodes of all types.
    graph: Graph
    #: The nodes that are a relation's sources; None where these are all nodes of the type.
    rows: tuple[Tensor | None, ...]


@torch.compiler.disable
def join(
    edge_index_dict: dict[tuple[str, str, str], Any], num_src: dict[str, int], num_dst: dict[str, int]
) -> Joined:
    """The relations of ``edge_index_dict`` in its order, cached as long as its tensors live.

    Waits for the device where it is made: to check the values and to count the sources.

    Args:
        edge_index_dict: edges as in ``graph_of``, by (source type, name, destination type).
        num_src: number of nodes of each type that is a source.
        num_dst: likewise of destinations, in the order in which their rows follow one another.

    Raises:
        TypeError, ValueError: edges are not as described, or a node is out of range.
    """
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
            few = 2 * len(found) <= num_nodes  # else what they are gathered from is hardly larger
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
        names = "edge_index[0]", "edge_index[1]"
        _csr.check_coo(where, names, src, dst, num_src, num_dst, square=False, validate=True)
        return src.to(torch.int64), dst.to(torch.int64)
    src, dst = Graph.from_pyg(edge_index).edge_index
    return src, dst


def _values(edge_index: Any) -> Tensor | None:
    if not isinstance(edge_index, Tensor):
        return edge_index.storage.value()
    if edge_index.layout == torch.strided:
        return None
    return edge_index._values() if edge_index.layout == torch.sparse_coo else edge_index.values()
