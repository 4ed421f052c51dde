"""Edges in the forms that torch_geometric's layers take.

A test that imports this module is skipped where torch_geometric is missing.
"""

import pytest
import torch
from graphs import make_graph

torch_geometric = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
SPARSE = "coo", "csr"
SIZES = {"random": 50, "complete": 24, "no edges": 4, "no nodes": 0}
BIPARTITE = {"fewer_sources": (30, 80), "fewer_destinations": (80, 30)}


def edges(name="random", dtype=torch.int64):
    """edge_index of one of ``graphs.GRAPHS``."""
    return make_graph(name).edge_index.to(dtype).clone()


def sparse_forms(edge_index, num_src, num_dst, values=None):
    """The transposed adjacency matrix of distinct edges in the layouts that torch_geometric takes."""
    dst_src = edge_index.flip(0)
    values = torch.ones(edge_index.shape[1]) if values is None else values
    shape = num_dst, num_src, *values.shape[1:]
    coo = torch.sparse_coo_tensor(dst_src, values, shape).coalesce()
    return {
        "coo": coo,
        "csr": torch_geometric.utils.to_torch_csr_tensor(coo.indices(), coo.values(), (num_dst, num_src)),
    }


def graph_edges(name, distinct=False):
    """edge_index and the numbers of sources and of destinations; some nodes of most graphs are isolated."""
    if name in ("no edges", "no nodes"):
        return torch.zeros(2, 0, dtype=torch.long), SIZES[name], SIZES[name]
    edge_index = edges(name)
    if distinct:
        edge_index = torch.unique(edge_index, dim=1)
    num_nodes = SIZES.get(name, int(edge_index.max()) + 3)
    return edge_index, *BIPARTITE.get(name, (num_nodes, num_nodes))


def in_form(edge_index, num_src, num_dst, form, values=None):
    if form in SPARSE:
        return sparse_forms(edge_index, num_src, num_dst, values)[form]
    if form.startswith("EdgeIndex"):
        edge_index = torch_geometric.EdgeIndex(edge_index, sparse_size=(num_src, num_dst))
        _, _, order = form.partition(" by ")
        return edge_index.sort_by(order).values if order else edge_index
    return edge_index


def as_int32(value):
    if isinstance(value, tuple):
        return tuple(map(as_int32, value))
    if isinstance(value, dict):
        return {key: as_int32(item) for key, item in value.items()}
    return value if value.is_floating_point() else value.to(torch.int32)
