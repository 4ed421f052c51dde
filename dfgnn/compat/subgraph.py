"""DGL's subgraph functions: the part of a graph that given nodes, edges or types determine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..nn.dgl import DGLError
from .graph import DGLGraph
from .ids import by_type


def _by_type(where: str, graph: DGLGraph, given: Any, of: str) -> Mapping[Any, Any]:
    if graph.is_block:
        raise DGLError(f"dgl.{where}: graph: expected no block")
    return by_type(f"dgl.{where}", of, graph.ntypes if of == "nodes" else graph.canonical_etypes, given)


def _chosen(where: str, graph: DGLGraph, of: str, x: Any, size: int) -> Tensor:
    """The ids of nodes or edges that are given as ids, or as a mask in a tensor of booleans."""
    if isinstance(x, Tensor) and x.dtype == torch.bool:
        if x.dim() != 1:
            raise DGLError(f"dgl.{where}: {of}: expected a mask of {size}, got shape {list(x.shape)}")
        x = x.to(graph.device).nonzero().squeeze(1)
    return graph._ids(x, size, f"dgl.{where}", of).long()


def _nodes(where: str, graph: DGLGraph, nodes: Any, mask: bool) -> dict[int, Tensor]:
    """The ids of nodes by the types' places; none of types that are not named."""
    found = {k: torch.zeros(0, dtype=torch.int64, device=graph.device) for k in range(len(graph.ntypes))}
    for kind, x in _by_type(where, graph, nodes, "nodes").items():
        place = graph.get_ntype_id(kind)
        size = graph._sizes[place]
        found[place] = (
            _chosen(where, graph, "nodes", x, size)
            if mask
            else graph._ids(x, size, f"dgl.{where}", "nodes").long()
        )
    return found


def _part(
    graph: DGLGraph, nodes: dict[int, Tensor] | None, edges: dict[int, Tensor], store_ids: bool, device: Any
) -> Any:
    """The graph of these nodes (None: of all, which keep their ids) and edges."""
    parts = graph._selected(nodes or {}, edges, store_ids and nodes is not None, store_ids)
    sizes, graphs, node_frames, edge_frames = parts
    made = graph._with(graphs, node_frames, edge_frames, sizes=sizes)
    return made if device is None else made.to(device)


def node_subgraph(
    graph: DGLGraph,
    nodes: Any,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Any = None,
) -> Any:
    """The edges between these nodes, which are renumbered in this order. nodes: different ids or a mask, or a
    dictionary of such by type. relabel_nodes: False keeps all nodes and their ids. output_device: where the
    new graph is; None: where this one is."""
    kept = _nodes("node_subgraph", graph, nodes, mask=True)
    if any(len(x.unique()) < len(x) for x in kept.values()):
        raise DGLError("dgl.node_subgraph: nodes: expected different ids, got some more than once")
    order = {}
    for place, chosen in kept.items():
        order[place] = torch.full((graph._sizes[place],), -1, dtype=torch.int64, device=graph.device)
        order[place][chosen] = torch.arange(len(chosen), device=graph.device)
    edges = {}
    for k, fused in enumerate(graph._graphs):
        src, dst = (order[kind][x] for kind, x in zip(graph._ends[k], fused.edge_index))
        eids = ((src >= 0) & (dst >= 0)).nonzero().squeeze(1)
        edges[k] = eids[src[eids].argsort(stable=True)]  # by source, as DGL sorts them
    return _part(graph, kept if relabel_nodes else None, edges, store_ids, output_device)


def edge_subgraph(
    graph: DGLGraph,
    edges: Any,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Any = None,
) -> Any:
    """These edges; with relabel_nodes only the nodes at their ends, in the order in which sources and
    then destinations come. edges: ids or a mask, or a dictionary of such by relation. output_device: where
    the new graph is; None: where this one is."""
    chosen = {k: torch.zeros(0, dtype=torch.int64, device=graph.device) for k in range(len(graph._graphs))}
    for etype, x in _by_type("edge_subgraph", graph, edges, "edges").items():
        place = graph.get_etype_id(etype)
        chosen[place] = _chosen("edge_subgraph", graph, "edges", x, graph._graphs[place].num_edges)
    return _of_edges(graph, chosen, relabel_nodes, store_ids, output_device)


def _of_edges(graph: DGLGraph, edges: dict[int, Tensor], relabel: bool, store_ids: bool, device: Any) -> Any:
    if not relabel:
        return _part(graph, None, edges, store_ids, device)
    none = torch.zeros(0, dtype=torch.int64, device=graph.device)
    used: dict[int, list[Tensor]] = {k: [none] for k in range(len(graph.ntypes))}
    for k, eids in edges.items():
        for kind, ends in zip(graph._ends[k], graph._graphs[k].edge_index):
            used[kind].append(ends[eids])
    nodes = {kind: first_seen(torch.cat(parts)) for kind, parts in used.items()}
    return _part(graph, nodes, edges, store_ids, device)


def first_seen(x: Tensor) -> Tensor:
    """Different numbers of x in the order in which they come first."""
    values, place = x.unique(return_inverse=True)
    at = torch.full_like(values, len(x)).scatter_reduce(
        0, place, torch.arange(len(x), dtype=x.dtype, device=x.device), "amin"
    )
    return values[at.argsort()]


def _subgraph_at(name: str, end: int) -> Any:
    """The function of this name: of the edges that begin (end 0) or end (1) at given nodes."""

    def subgraph(
        graph: DGLGraph,
        nodes: Any,
        *,
        relabel_nodes: bool = False,
        store_ids: bool = True,
        output_device: Any = None,
    ) -> Any:
        kept = _nodes(name, graph, nodes, mask=False)
        query = (graph.out_edges, graph.in_edges)[end]
        edges = {
            k: query(kept[ends[end]], "eid", graph.canonical_etypes[k]).long()
            for k, ends in enumerate(graph._ends)
        }
        return _of_edges(graph, edges, relabel_nodes, store_ids, output_device)

    subgraph.__name__ = subgraph.__qualname__ = name
    way = ("out of", "into")[end]
    subgraph.__doc__ = f"The edges {way} these nodes; options: as for :func:`edge_subgraph`."
    return subgraph


in_subgraph, out_subgraph = _subgraph_at("in_subgraph", 1), _subgraph_at("out_subgraph", 0)


def edge_type_subgraph(graph: DGLGraph, etypes: Sequence[Any], output_device: Any = None) -> Any:
    """The graph of these relations and the types at their ends; it shares the features."""
    chosen = [graph.get_etype_id(etype) for etype in etypes]
    kinds = sorted({kind for k in chosen for kind in graph._ends[k]})
    made = graph._only(kinds, chosen, DGLGraph)
    return made if output_device is None else made.to(output_device)


def node_type_subgraph(graph: DGLGraph, ntypes: Sequence[str], output_device: Any = None) -> Any:
    """The graph of the relations between these types; it shares the features."""
    kinds = {graph.get_ntype_id(ntype) for ntype in ntypes}
    found = [r for r, ends in zip(graph.canonical_etypes, graph._ends) if kinds.issuperset(ends)]
    if not found:
        raise DGLError(
            f"dgl.node_type_subgraph: ntypes: expected types with relations between them, got {ntypes}"
        )
    return edge_type_subgraph(graph, found, output_device)


DGLGraph.subgraph = node_subgraph  # type: ignore[attr-defined]
for _function in (edge_subgraph, in_subgraph, out_subgraph, edge_type_subgraph, node_type_subgraph):
    setattr(DGLGraph, _function.__name__, _function)
