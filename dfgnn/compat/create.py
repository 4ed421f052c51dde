"""Functions that make DGLGraphs from data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph.hetero import Relation
from ..nn.dgl import DGLError
from .graph import DGLGraph, fused
from .ids import Ends, ends_of, ends_of_matrix, ends_of_networkx


def graph(
    data: Any, *, num_nodes: int | None = None, idtype: Any = None, device: Any = None,
    row_sorted: bool = False, col_sorted: bool = False,
) -> DGLGraph:  # fmt: skip
    """A graph from (sources, destinations), tensors or lists, or from another form that ``dgl.graph`` takes.

    num_nodes: by default the largest id + 1.  idtype: of the ids that methods return, by default that of the
    tensors given, or int64.  row_sorted, col_sorted: have no effect, because graphs are sorted in any case.
    """
    ends = ends_of("dgl.graph", data, idtype)
    if num_nodes is not None:
        ends = ends.sized("dgl.graph", num_nodes, num_nodes)
    return _of_ends(ends, device=device)


def _of_ends(ends: Ends, relation: Relation = ("_N", "_E", "_N"), device: Any = None) -> Any:
    kinds = list(dict.fromkeys((relation[0], relation[2])))
    sizes = [ends.num_src, ends.num_dst][: len(kinds)]
    if len(kinds) == 2 and kinds != sorted(kinds):  # DGL sorts types by name
        kinds, sizes = kinds[::-1], sizes[::-1]
    places = kinds.index(relation[0]), kinds.index(relation[2])
    made = DGLGraph._of(kinds, sizes, [relation[1]], [places], [fused(ends)], ends.src.dtype)
    return made.to(device)


def heterograph(
    data_dict: Mapping[Relation, Any],
    num_nodes_dict: Mapping[str, int] | None = None,
    idtype: Any = None,
    device: Any = None,
) -> DGLGraph:
    """A graph from a dictionary (type of sources, name, type of destinations) -> (sources, destinations)."""
    where = "dgl.heterograph"
    found: dict[Relation, Ends] = {}
    sizes = dict(num_nodes_dict or {})
    for relation, data in data_dict.items():
        if not (isinstance(relation, tuple) and len(relation) == 3):
            raise DGLError(f"{where}: expected keys (source, name, destination), got {relation!r}")
        ends = found[relation] = ends_of(where, data, idtype, bipartite=relation[0] != relation[2])
        if num_nodes_dict is None:
            for kind, need in ((relation[0], ends.num_src), (relation[2], ends.num_dst)):
                sizes[kind] = max(sizes.get(kind, 0), need)
    if not found:
        raise DGLError(f"{where}: data_dict: expected at least one relation, got none")
    dtypes = {ends.src.dtype for ends in found.values()}
    if len(dtypes) > 1:
        raise DGLError(f"{where}: data_dict: expected ids of one dtype, got {sorted(map(str, dtypes))}")
    kinds, relations = sorted(sizes), sorted(found)  # DGL sorts types by name
    if any(kind not in sizes for r in relations for kind in (r[0], r[2])):
        raise DGLError(f"{where}: num_nodes_dict: expected a number of all types, got {sizes}")
    graphs = [fused(found[r].sized(where, sizes[r[0]], sizes[r[2]])) for r in relations]
    places = [(kinds.index(begin), kinds.index(end)) for begin, _, end in relations]
    made = DGLGraph._of(
        kinds, [sizes[k] for k in kinds], [r[1] for r in relations], places, graphs, dtypes.pop()
    )
    return made.to(device)


def from_scipy(
    sp_mat: Any, eweight_name: str | None = None, idtype: Any = None, device: Any = None
) -> DGLGraph:
    """A graph from a square matrix[source, destination]; eweight_name: name of the feature for its values."""
    if sp_mat.shape[0] != sp_mat.shape[1]:
        raise DGLError(f"dgl.from_scipy: sp_mat: expected a square matrix, got {tuple(sp_mat.shape)}")
    return bipartite_from_scipy(sp_mat, "_N", "_E", "_N", eweight_name, idtype, device)


def bipartite_from_scipy(
    sp_mat: Any, utype: str, etype: str, vtype: str, eweight_name: str | None = None, idtype: Any = None,
    device: Any = None,
) -> DGLGraph:  # fmt: skip
    """A graph of one relation from a matrix[source, destination]; eweight_name: name of the feature for its
    values."""
    made = _of_ends(ends_of_matrix("dgl.from_scipy", sp_mat, idtype), (utype, etype, vtype))
    if eweight_name is not None:
        made.edata[eweight_name] = torch.tensor(sp_mat.tocoo().data)
    return made.to(device)


def from_networkx(
    nx_graph: Any, node_attrs: Sequence[str] | None = None, edge_attrs: Sequence[str] | None = None,
    edge_id_attr_name: str | None = None, idtype: Any = None, device: Any = None,
) -> DGLGraph:  # fmt: skip
    """A graph from a networkx graph, with both directions of its edges if it is undirected. Nodes are in the
    order of their sorted labels; edges in networkx' order, or by their attribute
    ``edge_id_attr_name``. node_attrs, edge_attrs: attributes that become features, edge_attrs of directed
    graphs alone."""
    where = "dgl.from_networkx"
    if not nx_graph.is_directed() and (edge_attrs is not None or edge_id_attr_name is not None):
        raise DGLError(f"{where}: edge_attrs, edge_id_attr_name: expected None for an undirected graph")
    ends = ends_of_networkx(where, nx_graph, idtype)
    attributes = [found for _, _, found in nx_graph.edges(data=True)]
    if edge_id_attr_name is not None and attributes:
        order = _order(where, edge_id_attr_name, attributes)
        ends = ends._replace(src=ends.src[order], dst=ends.dst[order])
        attributes = [attributes[k] for k in order]
    made = _of_ends(ends)
    nodes = [nx_graph.nodes[label] for label in sorted(nx_graph.nodes)] if node_attrs else []
    for name in node_attrs or ():
        made.ndata[name] = _stacked(where, name, nodes)
    for name in edge_attrs or ():
        made.edata[name] = _stacked(where, name, attributes)
    return made.to(device)


def _order(where: str, name: str, attributes: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of edges in the order of their ids."""
    numbers = [int(found.get(name, -1)) for found in attributes]
    if sorted(numbers) != list(range(len(numbers))):
        raise DGLError(
            f"{where}: edge_id_attr_name: expected ids {name!r} of all edges, from 0 to {len(numbers) - 1}"
        )
    return sorted(range(len(numbers)), key=numbers.__getitem__)


def _stacked(where: str, name: str, attributes: Sequence[Mapping[str, Any]]) -> Tensor:
    values: list[Any] = [found.get(name) for found in attributes]
    if any(value is None for value in values):
        raise DGLError(f"{where}: attribute {name!r}: expected one of every node (or edge), some have none")
    return torch.stack(values) if values and isinstance(values[0], Tensor) else torch.tensor(values)


def rand_graph(num_nodes: int, num_edges: int, idtype: Any = torch.int64, device: Any = None) -> DGLGraph:
    """A graph of edges whose ends are drawn from all nodes."""
    src, dst = torch.randint(num_nodes, (2, num_edges), dtype=idtype, device=device)
    return _of_ends(Ends(src, dst, num_nodes, num_nodes))


def to_homogeneous(
    G: DGLGraph, ndata: Sequence[str] | None = None, edata: Sequence[str] | None = None,
    store_type: bool = True, return_count: bool = False,
) -> Any:  # fmt: skip
    """All nodes and edges as one graph; features ``_TYPE`` and ``_ID`` hold each one's type and number.

    ndata, edata: features that all types have and that are kept.
    """
    g = G
    first = [sum(g._sizes[:k]) for k in range(len(g._sizes))]
    ends = [
        (src + first[begin], dst + first[end])
        for (src, dst), (begin, end) in zip(map(g._uv, range(len(g._graphs))), g._ends)
    ]
    src, dst = (torch.cat(x) for x in zip(*ends))
    made = _of_ends(Ends(src, dst, sum(g._sizes), sum(g._sizes)))
    counts = [graph.num_edges for graph in g._graphs]
    for frames, frame, sizes, names in (
        (g._node_frames, made._node_frames[0], g._sizes, ndata),
        (g._edge_frames, made._edge_frames[0], counts, edata),
    ):
        for name in names or ():
            parts = [x[name] for x in frames if x.rows and name in x]
            if sum(map(len, parts)) != frame.rows or len({(x.shape[1:], x.dtype) for x in parts}) > 1:
                raise DGLError(
                    f"dgl.to_homogeneous: feature {name!r}: expected it, of one shape and dtype, in all types"
                )
            frame[name] = torch.cat(parts)
        frame["_ID"] = torch.cat([torch.arange(n, dtype=g.idtype, device=g.device) for n in sizes])
        if store_type:
            kinds = torch.arange(len(sizes), device=g.device)
            frame["_TYPE"] = kinds.repeat_interleave(torch.tensor(sizes, device=g.device))
    return (made, list(g._sizes), counts) if return_count else made
