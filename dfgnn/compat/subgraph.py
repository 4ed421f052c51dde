"""DGL's subgraph functions: the part of a graph that given nodes, edges or types determine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..nn import DGLError
from .edges import between
from .graph import DGLGraph


def _chosen(x: Any, size: int, device: Any) -> Tensor:
    """The ids of nodes or edges that are given as ids or as a mask."""
    x = torch.as_tensor(x, device=device)
    if x.dtype == torch.bool:
        if x.shape != (size,):
            raise DGLError(f"expected a mask of {size}, got {list(x.shape)}")
        return x.nonzero().squeeze(1)
    return x.long().reshape(-1)


def node_subgraph(
    graph: DGLGraph,
    nodes: Any,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Any = None,
) -> DGLGraph:
    """The edges between these nodes, which are renumbered in this order. nodes: numbers or a mask, or a
    dictionary of such by type. output_device: where the new graph is; None: where this one is."""
    if not relabel_nodes:
        raise NotImplementedError("dgl.node_subgraph: relabel_nodes: expected True in dfgnn")
    given = nodes if isinstance(nodes, dict) else {graph._kind(None): nodes}
    kept = {kind: _chosen(given.get(kind, ()), size, graph.device) for kind, size in graph._sizes.items()}
    graphs, edges = {}, {}
    places = {kind: _places(chosen, graph._sizes[kind]) for kind, chosen in kept.items()}
    for relation, fused in graph.graphs.items():
        src, dst = fused.edge_index
        src, dst = places[relation[0]][src], places[relation[2]][dst]
        eids = ((src >= 0) & (dst >= 0)).nonzero().squeeze(1)
        eids = eids[src[eids].argsort(stable=True)]  # by source, as DGL sorts them
        sizes = len(kept[relation[0]]), len(kept[relation[2]])
        graphs[relation] = Graph.from_coo(src[eids], dst[eids], num_src=sizes[0], num_dst=sizes[1])
        edges[relation] = _rows(graph._edges[relation], eids, store_ids)
    nodes_of = {kind: _rows(graph._nodes[kind], chosen, store_ids) for kind, chosen in kept.items()}
    sizes_of = {kind: len(x) for kind, x in kept.items()}
    return _moved(DGLGraph._of(graphs, sizes_of, (nodes_of, edges)), output_device)


def _moved(graph: DGLGraph, device: Any) -> DGLGraph:
    return graph if device is None else graph.to(device)


def _rows(frame: Any, which: Tensor, store_ids: bool) -> dict[str, Tensor]:
    rows = {name: x[which] for name, x in frame.items()}
    return {**rows, "_ID": which} if store_ids else rows


def edge_subgraph(
    graph: DGLGraph,
    edges: Any,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Any = None,
) -> DGLGraph:
    """These edges; with relabel_nodes only the nodes at their ends, in the order in which sources and
    then destinations come. output_device: where the new graph is; None: where this one is."""
    given = edges if isinstance(edges, dict) else {graph._relation(None): edges}
    chosen = {graph._relation(r): _chosen(x, graph.num_edges(r), graph.device) for r, x in given.items()}
    none = torch.zeros(0, dtype=torch.int64, device=graph.device)
    graphs, frames = {}, {}
    for relation, fused in graph.graphs.items():
        eids = chosen.get(relation, none)
        graphs[relation] = between(fused.edge_index[:, eids], fused.num_src, fused.num_dst)
        frames[relation] = _rows(graph._edges[relation], eids, store_ids)
    nodes = {kind: dict(frame) for kind, frame in graph._nodes.items()}
    whole = DGLGraph._of(graphs, graph._sizes, (nodes, frames))
    if not relabel_nodes:
        return _moved(whole, output_device)
    used: dict[Any, list[Tensor]] = {kind: [none] for kind in graph._sizes}
    for relation, fused in graphs.items():
        for kind, ends in zip((relation[0], relation[2]), fused.edge_index):
            used[kind].append(ends)
    kept = {kind: first_seen(torch.cat(parts)) for kind, parts in used.items()}
    places = {kind: _places(nodes, graph._sizes[kind]) for kind, nodes in kept.items()}
    sizes = {kind: len(nodes) for kind, nodes in kept.items()}
    for relation, fused in graphs.items():
        ends = [places[kind][x] for kind, x in zip((relation[0], relation[2]), fused.edge_index)]
        graphs[relation] = between(ends, sizes[relation[0]], sizes[relation[2]])
    rows = {kind: _rows(graph._nodes[kind], nodes, store_ids) for kind, nodes in kept.items()}
    return _moved(DGLGraph._of(graphs, sizes, (rows, frames)), output_device)


def _places(nodes: Tensor, size: int) -> Tensor:
    """Where in ``nodes`` each of ``size`` nodes is, or -1."""
    place = torch.full((size,), -1, dtype=torch.int64, device=nodes.device)
    return place.index_copy(0, nodes, torch.arange(len(nodes), device=nodes.device))


def first_seen(x: Tensor) -> Tensor:
    """Different numbers of x in the order in which they come first."""
    values, place = x.unique(return_inverse=True)
    at = torch.full_like(values, len(x)).scatter_reduce(
        0, place, torch.arange(len(x), device=x.device), "amin"
    )
    return values[at.argsort()]


def in_subgraph(graph: DGLGraph, nodes: Any, *, relabel_nodes: bool = False, **options: Any) -> DGLGraph:
    """The edges into these nodes; options: as for :func:`edge_subgraph`."""
    return edge_subgraph(graph, graph.in_edges(nodes, form="eid"), relabel_nodes=relabel_nodes, **options)


def out_subgraph(graph: DGLGraph, nodes: Any, *, relabel_nodes: bool = False, **options: Any) -> DGLGraph:
    """The edges out of these nodes; options: as for :func:`edge_subgraph`."""
    return edge_subgraph(graph, graph.out_edges(nodes, form="eid"), relabel_nodes=relabel_nodes, **options)


def edge_type_subgraph(graph: DGLGraph, etypes: Sequence[Any]) -> DGLGraph:
    """The graph of these relations and the types at their ends; it shares the features."""
    relations = [graph._relation(etype) for etype in etypes]
    kinds = {kind for relation in relations for kind in (relation[0], relation[2])}
    sizes = {kind: size for kind, size in graph._sizes.items() if kind in kinds}
    graphs = {relation: graph.graphs[relation] for relation in graph.graphs if relation in relations}
    return DGLGraph._of(graphs, sizes, (graph._nodes, graph._edges))


def node_type_subgraph(graph: DGLGraph, ntypes: Sequence[str]) -> DGLGraph:
    """The graph of these types and the relations between them; it shares the features."""
    sizes = {kind: size for kind, size in graph._sizes.items() if kind in ntypes}
    graphs = {r: fused for r, fused in graph.graphs.items() if r[0] in sizes and r[2] in sizes}
    return DGLGraph._of(graphs, sizes, (graph._nodes, graph._edges))


DGLGraph.subgraph = node_subgraph  # type: ignore[attr-defined]
DGLGraph.edge_subgraph = edge_subgraph  # type: ignore[attr-defined]
