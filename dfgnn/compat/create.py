"""Functions that make DGLGraphs from data, or from other graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..graph import to_homogeneous as as_one
from ..graph.hetero import Relation
from ..nn import DGLError
from .edges import between, of_data
from .graph import ALL, HOMOGENEOUS, DGLGraph
from .sparse.structure import pairs


def _homogeneous(fused: Graph, nodes: Any = None, edges: Any = None) -> DGLGraph:
    frames = {"_N": dict(nodes or {})}, {HOMOGENEOUS: dict(edges or {})}
    return DGLGraph._of({HOMOGENEOUS: fused}, {"_N": fused.num_nodes}, frames)


def _only(where: str, g: Any) -> Graph:
    """The Graph of a DGLGraph with one type of nodes and edges."""
    if not isinstance(g, DGLGraph):
        raise DGLError(f"{where}: g: expected a DGLGraph, got {type(g).__name__}")
    if not g.is_homogeneous or g.is_block:
        raise DGLError(f"{where}: g: expected one type of nodes and of edges, got {g.canonical_etypes}")
    return g.fused


def graph(
    data: Any, ntype: Any = None, etype: Any = None, *, num_nodes: int | None = None, idtype: Any = None,
    device: Any = None, row_sorted: bool = False, col_sorted: bool = False,
) -> DGLGraph:  # fmt: skip
    """A graph from (sources, destinations), tensors or lists, or from another form that ``dgl.graph`` takes.
    idtype has no effect, because indices are stored as int32."""
    if ntype is not None or etype is not None:
        raise DGLError("dgl.graph: ntype and etype: expected None; dgl.heterograph makes graphs with types")
    return _homogeneous(of_data("dgl.graph", data, num_nodes, num_nodes, device))


def heterograph(
    data_dict: Mapping[Relation, Any],
    num_nodes_dict: Mapping[str, int] | None = None,
    idtype: Any = None,
    device: Any = None,
) -> DGLGraph:
    """A graph from a dictionary (type of sources, name, type of destinations) -> (sources, destinations)."""
    graphs: dict[Relation, Graph] = {}
    for relation in sorted(data_dict):  # DGL sorts types by name
        if not (isinstance(relation, tuple) and len(relation) == 3):
            raise DGLError(f"dgl.heterograph: expected keys (source, name, destination), got {relation!r}")
        sizes = (None, None) if num_nodes_dict is None else (num_nodes_dict[relation[k]] for k in (0, 2))
        graphs[relation] = of_data("dgl.heterograph", data_dict[relation], *_two(sizes), device)
    sizes_of: dict[str, int] = dict(num_nodes_dict or {})
    if num_nodes_dict is None:
        for relation, found in graphs.items():
            src, dst = found.edge_index
            for kind, ends in ((relation[0], src), (relation[2], dst)):
                largest = int(ends.max()) + 1 if len(ends) else 0
                sizes_of[kind] = max(sizes_of.get(kind, 0), largest)
        graphs = {r: between(found.edge_index, sizes_of[r[0]], sizes_of[r[2]]) for r, found in graphs.items()}
    return DGLGraph._of(graphs, {kind: sizes_of[kind] for kind in sorted(sizes_of)})


def _two(sizes: Any) -> tuple[int | None, int | None]:
    num_src, num_dst = sizes
    return num_src, num_dst


def from_scipy(sp_mat: Any, eweight_name: str | None = None, idtype: Any = None, device: Any = "cpu"):
    """A graph from a square matrix[source, destination]; eweight_name: name of the feature for its values."""
    g = _homogeneous(of_data("dgl.from_scipy", sp_mat, device=device))
    if eweight_name is not None:
        g.edata[eweight_name] = torch.as_tensor(sp_mat.tocoo().data, device=g.device)
    return g


def from_networkx(
    nx_graph: Any, node_attrs: Sequence[str] | None = None, edge_attrs: Sequence[str] | None = None,
    edge_id_attr_name: str | None = None, idtype: Any = None, device: Any = None,
) -> DGLGraph:  # fmt: skip
    """A graph from a networkx graph, with both directions of its edges if it is undirected. Nodes keep their
    order, or are sorted if they are numbers."""
    if edge_id_attr_name is not None or edge_attrs is not None:
        raise NotImplementedError("dgl.from_networkx: edge_attrs, edge_id_attr_name: expected None in dfgnn")
    g = _homogeneous(of_data("dgl.from_networkx", nx_graph, device=device))
    names = list(nx_graph.nodes)
    names = sorted(names) if all(isinstance(name, int) for name in names) else names
    for attribute in node_attrs or []:
        values = [torch.as_tensor(nx_graph.nodes[name][attribute]) for name in names]
        g.ndata[attribute] = torch.stack(values).to(g.device)
    return g


def rand_graph(num_nodes: int, num_edges: int, idtype: Any = None, device: Any = None) -> DGLGraph:
    ends = torch.randint(num_nodes, (2, num_edges), device=device)
    return _homogeneous(between(ends, num_nodes, num_nodes))


def to_homogeneous(
    g: DGLGraph, ndata: Sequence[str] | None = None, edata: Sequence[str] | None = None,
    store_type: bool = True, return_count: bool = False,
) -> Any:  # fmt: skip
    """All nodes and edges as one graph; features ``_TYPE`` and ``_ID`` hold each one's type and number."""
    found = as_one(g.graphs)
    sizes = [g.num_nodes(kind) for kind in found.node_types]
    counts = [graph.num_edges for graph in g.graphs.values()]
    nodes, edges = (
        {"_ID": torch.cat([torch.arange(n, device=g.device) for n in c])} for c in (sizes, counts)
    )
    if store_type:
        nodes, edges = {"_TYPE": found.ntype, **nodes}, {"_TYPE": found.etype, **edges}
    for name in ndata or []:
        nodes[name] = torch.cat([g.nodes[kind].data[name] for kind in found.node_types])
    for name in edata or []:
        edges[name] = torch.cat([g.edges[relation].data[name] for relation in g.graphs])
    whole = _homogeneous(found.graph, nodes, edges)
    return (whole, sizes, counts) if return_count else whole


def add_self_loop(
    g: DGLGraph, edge_feat_names: Any = None, fill_data: Any = 1.0, etype: Any = None
) -> DGLGraph:
    """Appends a loop for every node; fill_data: the features of these loops, a number, or "sum", "mean",
    "max" or "min" of the features of the edges into the node."""
    from ..ops import gspmm

    graph = _only("dgl.add_self_loop", g)
    n, edges = graph.num_nodes, {}
    for name, x in g.edata.items():
        if edge_feat_names is not None and name not in edge_feat_names:
            continue
        if isinstance(fill_data, str):
            loop = gspmm(graph, "copy_rhs", fill_data, None, x)
            loop = torch.where(graph.in_degrees().view(-1, *[1] * (x.dim() - 1)) == 0, 0, loop)
        else:
            loop = x.new_full((n, *x.shape[1:]), fill_data)
        edges[name] = torch.cat([x, loop])
    return _homogeneous(graph.add_self_loops(), g.ndata, edges)


def remove_self_loop(g: DGLGraph, etype: Any = None) -> DGLGraph:
    src, dst = _only("dgl.remove_self_loop", g).edge_index
    return _kept(g, src != dst)


def remove_edges(g: DGLGraph, eids: Any, etype: Any = None) -> DGLGraph:
    g = g.clone()
    g.remove_edges(eids, etype)
    return g


def add_edges(g: DGLGraph, u: Any, v: Any, data: Any = None, etype: Any = None) -> DGLGraph:
    g = g.clone()
    g.add_edges(u, v, data, etype)
    return g


def add_nodes(g: DGLGraph, num: int, data: Any = None, ntype: str | None = None) -> DGLGraph:
    g = g.clone()
    g.add_nodes(num, data, ntype)
    return g


def _kept(g: DGLGraph, keep: Tensor) -> DGLGraph:
    fused = Graph.from_edge_index(g.fused.edge_index[:, keep], g.num_nodes())
    return _homogeneous(fused, g.ndata, {k: x[keep] for k, x in g.edata.items()})


def reverse(g: DGLGraph, copy_ndata: bool = True, copy_edata: bool = False) -> DGLGraph:
    graph = _only("dgl.reverse", g)
    return _homogeneous(graph.reverse(), g.ndata if copy_ndata else None, g.edata if copy_edata else None)


def add_reverse_edges(g: DGLGraph, copy_ndata: bool = True, copy_edata: bool = False) -> DGLGraph:
    """Appends the reverse of every edge."""
    ends = _only("dgl.add_reverse_edges", g).edge_index
    both = torch.cat([ends, ends.flip(0)], 1)
    edges = {k: torch.cat([x, x]) for k, x in g.edata.items()} if copy_edata else None
    return _homogeneous(Graph.from_edge_index(both, g.num_nodes()), g.ndata if copy_ndata else None, edges)


def to_bidirected(g: DGLGraph, copy_ndata: bool = False) -> DGLGraph:
    """The graph with both directions of every edge, each once."""
    n = g.num_nodes()
    src, dst = _only("dgl.to_bidirected", g).edge_index
    keys = torch.cat([src * n + dst, dst * n + src]).unique()
    fused = Graph.from_coo(keys // n, keys % n, num_nodes=n)
    return _homogeneous(fused, g.ndata if copy_ndata else None)


def to_simple(
    g: DGLGraph, return_counts: str | None = "count", writeback_mapping: bool = False,
    copy_ndata: bool = True, copy_edata: bool = False, aggregator: str = "arbitrary",
) -> DGLGraph:  # fmt: skip
    """The graph with every edge once, sorted; return_counts: the name of a feature for its count."""
    if writeback_mapping or copy_edata:
        raise NotImplementedError("dgl.to_simple: writeback_mapping, copy_edata: expected False in dfgnn")
    n = g.num_nodes()
    src, dst = _only("dgl.to_simple", g).edge_index
    keys, counts = (src * n + dst).unique(return_counts=True)
    fused = Graph.from_coo(keys // n, keys % n, num_nodes=n)
    edges = None if return_counts is None else {return_counts: counts}
    return _homogeneous(fused, g.ndata if copy_ndata else None, edges)


def metapath_reachable_graph(g: DGLGraph, metapath: Sequence[Any]) -> DGLGraph:
    """The graph with an edge from each node to all nodes that it reaches along these relations in turn."""
    relations = [g.to_canonical_etype(etype) for etype in metapath]
    kinds = relations[0][0], relations[-1][2]
    begin = end = torch.arange(g.num_nodes(kinds[0]), device=g.device)
    for relation in relations:
        place, edge = pairs(end, g.graphs[relation].reverse())
        begin, end = begin[place], g.graphs[relation].edge_index[1][edge]
        size = max(g.num_nodes(relation[2]), 1)
        keys = (begin * size + end).unique()
        begin, end = keys // size, keys % size
    fused = between((begin, end), g.num_nodes(kinds[0]), g.num_nodes(kinds[1]))
    sizes = {kind: g.num_nodes(kind) for kind in kinds}
    nodes = {kind: dict(g.nodes[kind].data) for kind in sizes}
    return DGLGraph._of({(kinds[0], "_E", kinds[1]): fused}, sizes, (nodes, {}))


def batch(graphs: Sequence[DGLGraph], ndata: Any = ALL, edata: Any = ALL) -> DGLGraph:
    """The disjoint union of graphs with the same types; features that all of them have are concatenated."""
    graphs = list(graphs)
    if not graphs:
        raise DGLError("dgl.batch: graphs: expected at least one graph, got none")
    first = graphs[0]
    if any(list(g.graphs) != list(first.graphs) or g.ntypes != first.ntypes for g in graphs):
        raise DGLError("dgl.batch: graphs: expected the same types of nodes and edges in all of them")
    frames = (
        {kind: _joined([g._nodes[kind] for g in graphs], ndata) for kind in first._sizes},
        {r: _joined([g._edges[r] for g in graphs], edata) for r in first.graphs},
    )
    fused = {r: Graph.batch([g.graphs[r] for g in graphs]) for r in first.graphs}
    sizes = {kind: sum(g._sizes[kind] for g in graphs) for kind in first._sizes}
    whole = DGLGraph._of(fused, sizes, frames)
    for kind in first._sizes:
        whole._batch_nodes[kind] = torch.cat([g.batch_num_nodes(kind) for g in graphs])
    for relation in first.graphs:
        whole._batch_edges[relation] = torch.cat([g.batch_num_edges(relation) for g in graphs])
    return whole


def _joined(frames: Sequence[Any], names: Any) -> dict[str, Tensor]:
    filled = [frame for frame in frames if frame.rows] or frames[:1]
    wanted = dict.fromkeys(n for f in filled for n in f) if names == ALL else (names or ())
    for name in wanted:
        if any(name not in frame for frame in filled):
            raise DGLError(
                f"dgl.batch: expected feature {name!r} in all graphs, or in none, got some with it"
            )
    return {name: torch.cat([frame[name] for frame in filled]) for name in wanted}


def unbatch(g: DGLGraph) -> list[DGLGraph]:
    """Splits a batch into its graphs."""
    nodes = {kind: g.batch_num_nodes(kind).tolist() for kind in g._sizes}
    edges = {r: g.batch_num_edges(r).tolist() for r in g.graphs}
    node_frames = {kind: _split(g._nodes[kind], counts) for kind, counts in nodes.items()}
    edge_frames = {r: _split(g._edges[r], counts) for r, counts in edges.items()}
    ends = {r: list(graph.edge_index.split(edges[r], 1)) for r, graph in g.graphs.items()}
    first, found = dict.fromkeys(nodes, 0), []
    for k in range(g.batch_size):
        graphs = {}
        for r in g.graphs:
            src, dst = ends[r][k][0] - first[r[0]], ends[r][k][1] - first[r[2]]
            graphs[r] = Graph.from_coo(src, dst, num_src=nodes[r[0]][k], num_dst=nodes[r[2]][k])
        sizes = {kind: nodes[kind][k] for kind in nodes}
        frames = ({kind: x[k] for kind, x in part.items()} for part in (node_frames, edge_frames))
        found.append(DGLGraph._of(graphs, sizes, tuple(frames)))
        first = {kind: first[kind] + sizes[kind] for kind in nodes}
    return found


def _split(frame: Any, counts: list[int]) -> list[dict[str, Tensor]]:
    parts = {name: x.split(counts) for name, x in frame.items()}
    return [{name: x[k] for name, x in parts.items()} for k in range(len(counts))]


DGLGraph.add_self_loop = add_self_loop  # type: ignore[attr-defined]
DGLGraph.remove_self_loop = remove_self_loop  # type: ignore[attr-defined]
