"""Graphs with several types of nodes and edges, as plain dictionaries of graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .graph import Graph

Relation = tuple[str, str, str]  # type of the sources, name, type of the destinations


class Homogeneous(NamedTuple):
    """All nodes and edges of a heterogeneous graph as one graph; see :func:`to_homogeneous`."""

    graph: Graph
    ntype: Tensor  # int64 [N]: the index of each node's type in ``node_types``
    etype: Tensor  # int64 [E]: the index of each edge's relation in ``relations``
    node_types: tuple[str, ...]
    relations: tuple[Relation, ...]
    first: dict[str, int]  # type -> number of its first node


def heterograph(
    edges: Mapping[Relation, tuple[Tensor, Tensor]], num_nodes: Mapping[str, int] | None = None
) -> dict[Relation, Graph]:
    """A graph per relation, from (sources, destinations) by (type of sources, name, type of destinations).

    The argument is that of ``dgl.heterograph``; the result is a plain dictionary, in the same order, whose
    graphs layers and functions take one by one. num_nodes: by type; else the largest number + 1 over all
    relations.

    Raises TypeError and ValueError: keys that are no such triples, sizes that are missing or too small, and
    what :meth:`Graph.from_coo` raises.
    """
    if not isinstance(edges, Mapping):
        raise TypeError(f"heterograph: edges: expected a dictionary, got {type(edges).__name__}")
    sizes = dict(num_nodes) if num_nodes is not None else {}
    for relation, ends in edges.items():
        if not (
            isinstance(relation, tuple) and len(relation) == 3 and all(isinstance(x, str) for x in relation)
        ):
            raise TypeError(
                f"heterograph: edges: expected keys (source type, name, destination type), got {relation!r}"
            )
        if not (isinstance(ends, (tuple, list)) and len(ends) == 2):
            raise TypeError(f"heterograph: edges[{relation!r}]: expected a pair (sources, destinations)")
        for kind, x in zip((relation[0], relation[2]), ends):
            if num_nodes is None:
                sizes[kind] = max(sizes.get(kind, 0), int(x.max()) + 1 if len(x) else 0)
            elif kind not in sizes:
                raise ValueError(
                    f"heterograph: num_nodes: expected a number for {kind!r}, got {sorted(sizes)}"
                )
    return {
        relation: Graph.from_coo(*ends, num_src=sizes[relation[0]], num_dst=sizes[relation[2]])
        for relation, ends in edges.items()
    }


def to_homogeneous(graphs: Mapping[Relation, Graph]) -> Homogeneous:
    """One graph of all nodes and edges, as layers with types take it (:class:`dfgnn.nn.dgl.HGTConv`).

    Nodes are numbered one type after the other, types in alphabetical order, as ``dgl.to_homogeneous`` does;
    edges follow each other relation by relation, in the order of the dictionary.

    Raises ValueError: no graph, or two that disagree about the number of nodes of a type.
    """
    if not graphs:
        raise ValueError("to_homogeneous: graphs: expected at least one relation, got none")
    sizes: dict[str, int] = {}
    for (src, _, dst), graph in graphs.items():
        for kind, size in ((src, graph.num_src), (dst, graph.num_dst)):
            if sizes.setdefault(kind, size) != size:
                raise ValueError(
                    f"to_homogeneous: graphs: expected one number of nodes of type {kind!r}, "
                    f"got {sizes[kind]} and {size}"
                )
    node_types = tuple(sorted(sizes))
    counts = torch.tensor([sizes[kind] for kind in node_types])
    first = dict(zip(node_types, (counts.cumsum(0) - counts).tolist()))
    device = next(iter(graphs.values())).device
    ends, kinds = [], []
    for k, ((src, _, dst), graph) in enumerate(graphs.items()):
        shift = torch.tensor([[first[src]], [first[dst]]], device=device)
        ends.append(graph.edge_index + shift)
        kinds.append(torch.full((graph.num_edges,), k, device=device))
    ntype = torch.arange(len(node_types)).repeat_interleave(counts).to(device)
    whole = Graph.from_edge_index(torch.cat(ends, 1), num_nodes=int(counts.sum()))
    return Homogeneous(whole, ntype, torch.cat(kinds), node_types, tuple(graphs), first)
