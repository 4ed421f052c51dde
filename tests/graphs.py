"""Small graphs that are hard for attention kernels: each entry of GRAPHS is one way to go wrong.

A builder returns (src, dst, num_src, num_dst); edges are in no particular order unless the name says sorted.
"""

import torch

from dfgnn import Graph


def _random(num_src, num_dst, num_edges):
    generator = torch.Generator().manual_seed(num_edges)
    src = torch.randint(num_src, (num_edges,), generator=generator)
    dst = torch.randint(num_dst, (num_edges,), generator=generator)
    return src, dst, num_src, num_dst


def _shuffled(src, dst, num_src, num_dst):
    order = torch.randperm(len(src), generator=torch.Generator().manual_seed(len(src)))
    return src[order], dst[order], num_src, num_dst


def _no_nodes():
    return _random(1, 1, 0)[:2] + (0, 0)


def _no_edges():
    return _random(1, 1, 0)[:2] + (5, 7)


def _no_destinations():
    return _random(1, 1, 0)[:2] + (5, 0)


def _one_edge():
    return torch.tensor([0]), torch.tensor([0]), 1, 1


def _self_loops():
    return torch.arange(20), torch.arange(20), 20, 20


def _isolated():
    """Every edge is between multiples of three: two rows in three are empty, the last ones too."""
    src, dst, n, _ = _random(17, 17, 90)
    return 3 * src, 3 * dst, 3 * n + 2, 3 * n + 2


def _duplicates():
    src, dst, n, _ = _random(6, 6, 15)
    return _shuffled(src.repeat(9), dst.repeat(9), n, n)


def _super_row():
    """One destination has all edges, more than a work item takes, so that its row must be split."""
    src = torch.arange(9000) % 300
    return _shuffled(src, torch.full_like(src, 2), 300, 4)


def _super_source():
    """One source has all edges: the same for backward."""
    dst = torch.arange(9000) % 300
    return _shuffled(torch.full_like(dst, 2), dst, 4, 300)


def _mixed_degrees():
    """Super nodes in both directions, and rows of every degree from 0 to 70."""
    degree = torch.arange(71)
    dst = torch.cat([torch.repeat_interleave(degree), torch.full((1500,), 71), torch.full((1300,), 35)])
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(72, (len(dst),), generator=generator)
    src[torch.rand(len(src), generator=generator) < 0.4] = 5
    return _shuffled(src, dst, 72, 72)


def _power_law():
    generator = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, 3000, generator=generator) ** 4 * 400).long()
    return ends[0], ends[1], 400, 400


def _complete():
    n = 24
    return torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n), n, n


def _sorted():
    """Edges in CSR order already, as a sampled block has them: such a graph stores no edge ids."""
    src, dst, num_src, num_dst = _random(60, 40, 300)
    dst, order = torch.sort(dst, stable=True)
    return src[order], dst, num_src, num_dst


GRAPHS = {
    "no_nodes": _no_nodes,
    "no_edges": _no_edges,
    "no_destinations": _no_destinations,
    "one_edge": _one_edge,
    "self_loops": _self_loops,
    "isolated": _isolated,
    "duplicates": _duplicates,
    "super_row": _super_row,
    "super_source": _super_source,
    "mixed_degrees": _mixed_degrees,
    "power_law": _power_law,
    "complete": _complete,
    "sorted": _sorted,
    "fewer_destinations": lambda: _random(80, 30, 400),
    "fewer_sources": lambda: _random(30, 80, 400),
    "random": lambda: _random(50, 50, 400),
}


def edges(name, device="cpu", dtype=torch.int64):
    src, dst, num_src, num_dst = GRAPHS[name]()
    return src.to(device, dtype), dst.to(device, dtype), num_src, num_dst


def make_graph(name, device="cpu", index_dtype=torch.int64):
    src, dst, num_src, num_dst = edges(name, device, index_dtype)
    return Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst)


def tiny_graph(device="cpu"):
    """For gradcheck: 5 sources, 4 destinations, duplicates, an empty row and an unused source."""
    src, dst = torch.tensor([[0, 1, 1, 2, 2, 2, 0, 3, 1, 1], [2, 0, 0, 2, 2, 1, 0, 2, 1, 2]], device=device)
    return Graph.from_coo(src, dst, num_src=5, num_dst=4)
