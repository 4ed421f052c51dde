"""What distributed.py trains on: batches of molecules and a network for them, and a part of a graph of the
size of ogbn-papers100M that each process draws."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dfgnn.bench import graphs
from dfgnn.distributed.parts import Nodes, Part
from dfgnn.nn import pyg

PAPERS_NODES, PAPERS_EDGES, PAPERS_FEATURES, PAPERS_CLASSES = 111_059_956, 1_615_685_872, 128, 172


class Batches:
    """Random batches of a set of graphs that lies on the device."""

    def __init__(self, name, device, seed):
        path = graphs.data_folder() / "ogb" / "ogbg_molhiv" / "raw" if name == "ogbg-molhiv" else None
        if path is not None:
            counts = [graphs._rows(path / f"num-{what}-list.csv.gz")[:, 0] for what in ("node", "edge")]
            self.nodes, self.num_edges = (torch.from_numpy(c) for c in counts)
            ends = torch.from_numpy(graphs._rows(path / "edge.csv.gz")).T.contiguous()
        else:  # rings, for a run without data
            self.nodes = self.num_edges = torch.full((2000,), 25)
            place = torch.arange(25).repeat(2000)
            ends = torch.stack([place, (place + 1) % 25])
        self.ends = torch.cat([ends, ends.flip(0)], 1).to(device)  # the second half: the other direction
        self.half = ends.shape[1]
        self.node_start = self.nodes.cumsum(0) - self.nodes
        self.edge_start = self.num_edges.cumsum(0) - self.num_edges
        self.device, self.generator = device, torch.Generator().manual_seed(seed)
        generator = torch.Generator(device).manual_seed(0)
        total = int(self.nodes.sum())
        self.x = torch.randint(100, (total,), generator=generator, device=device)
        self.labels = (torch.rand(len(self.nodes), generator=generator, device=device) < 0.04).float()

    def draw(self, size):
        """(edge_index without loops, node features, graph of each node, labels)."""
        ids = torch.randint(len(self.nodes), (size,), generator=self.generator)
        nodes, edges = self.nodes[ids], self.num_edges[ids]
        n, e = int(nodes.sum()), int(edges.sum())
        host = torch.stack([ids, nodes, edges, self.node_start[ids], self.edge_start[ids]])
        if self.device.type == "cuda":
            host = host.pin_memory()  # a copy from pageable memory would make the host wait
        ids, nodes, edges, node_start, edge_start = host.to(self.device, non_blocking=True)
        of_node = torch.repeat_interleave(torch.arange(size, device=self.device), nodes, output_size=n)
        of_edge = torch.repeat_interleave(torch.arange(size, device=self.device), edges, output_size=e)
        first_node, first_edge = nodes.cumsum(0) - nodes, edges.cumsum(0) - edges
        rows = torch.arange(n, device=self.device) + (node_start - first_node)[of_node]
        place = torch.arange(e, device=self.device) + (edge_start - first_edge)[of_edge]
        both = torch.cat([place, place + self.half])
        ends = self.ends[:, both] + first_node[torch.cat([of_edge, of_edge])]
        return ends, self.x[rows], of_node, self.labels[ids]

    def most(self, size):
        """(nodes, edges, graphs), a capacity that a random batch exceeds with a probability of about 1e-9:
        mean + 6 standard deviations."""
        sums = [
            size * x.mean() + 6 * size**0.5 * x.std()
            for x in (self.nodes.double(), 2 * self.num_edges.double())
        ]
        return *(int(x) + 64 for x in sums), size + 1


class GraphNet(nn.Module):
    """Embedding, four GAT layers 8 x 30 with residuals and batch norms, the mean over nodes, a classifier."""

    def __init__(self, width=240):
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.layers = nn.ModuleList(pyg.GATConv(width, width // 8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))
        self.head = nn.Linear(width, 1)

    def forward(self, edge_index, x, of_node, size):
        x = self.embedding(x)
        for layer, norm in zip(self.layers, self.norms):
            x = x + F.elu(norm(layer(x, edge_index)))
        sums = x.new_zeros(size, x.shape[1]).index_add(0, of_node, x)
        counts = x.new_zeros(size).index_add(0, of_node, x.new_ones(len(x)))
        return self.head(sums / counts.clamp(min=1).unsqueeze(1)).squeeze(1)


def power_law_part(rank, count, num_nodes, num_edges, device):
    """Part of a graph whose in- and out-degrees fall with a node's rank as (rank + r0)^(-1/2), about as
    ``papers100m.py`` has it: the in-edges of the nodes of one of ``count`` ranges, in the order of
    destinations. Every process draws its own edges."""
    offsets = [num_nodes * k // count for k in range(count + 1)]
    first, end = offsets[rank : rank + 2]
    half = num_edges / (2 * 100_000 * (num_nodes / PAPERS_NODES) ** 0.5)
    r0 = half * half / max(num_nodes - 2 * half, 1)
    start, span = math.sqrt(r0), math.sqrt(num_nodes + r0) - math.sqrt(r0)
    common = torch.Generator(device).manual_seed(0)
    order = torch.randperm(num_nodes, generator=common, device=device, dtype=torch.int32)
    own = torch.Generator(device).manual_seed(1 + rank)
    # This part has every count-th of the sorted degrees, in random order.
    shares = torch.arange(rank, num_nodes + 1, count, dtype=torch.float64, device=device)[: end - first]
    degrees = (shares + r0 + 1).sqrt_().sub_((shares + r0).sqrt_()).mul_(num_edges / span).round_().long()
    degrees = degrees[torch.randperm(len(degrees), generator=own, device=device)]
    degrees = F.pad(degrees, (0, end - first - len(degrees)))
    total = int(degrees.sum())
    nodes = torch.arange(end - first, dtype=torch.int32, device=device)
    dst = torch.repeat_interleave(nodes, degrees, output_size=total)
    src = torch.empty(total, dtype=torch.int32, device=device)
    for begin in range(0, total, 2**26):
        piece = src[begin : begin + 2**26]
        share = torch.rand(len(piece), dtype=torch.float64, generator=own, device=device)
        place = share.mul_(span).add_(start).square_().sub_(r0).long().clamp_(0, num_nodes - 1)
        piece.copy_(order[place])
    del order
    totals = [0] * count
    dist.all_gather_object(totals, total)
    before = sum(totals[:rank])
    ids = torch.arange(before, before + total, dtype=torch.int32, device=device)
    mine = Nodes(torch.arange(first, end, device=device), offsets)
    return Part(rank, mine, mine, src, dst, ids, sum(totals), num_nodes ^ num_edges)
