"""Exphormer's layer (Shirzad et al., ICML 2023, arXiv 2303.06147): attention over a graph's own edges, those
of an expander and those of virtual nodes, beside message passing.

Scores are products of queries, keys and what belongs to the edge's type, clamped to ±5 as in the published
code. A type's factor belongs to the key: with a source for each type and node, type * N + node, the scores
are sampled dot products, and nothing of E x width is made.
"""

import torch
from torch import nn
from torch_geometric.nn import ResGatedGraphConv

from dfgnn import Graph, functional

OWN, EXPANDER, TO_VIRTUAL, FROM_VIRTUAL = TYPES = range(4)


class Structure:
    """The edges of all types of a batch, virtual nodes behind the others; ``cycles`` random cycles through
    each graph's nodes, in both directions, are its expander."""

    def __init__(self, batch, cycles: int = 3, virtual: int = 2):
        graph_of, device = batch.batch, batch.batch.device
        n, graphs = len(graph_of), batch.num_graphs
        node = torch.arange(n, device=device)
        first = torch.searchsorted(graph_of, torch.arange(graphs, device=device))
        last = torch.cat([first[1:], first.new_tensor([n])]) - 1
        following = torch.where(node == last[graph_of], first[graph_of], node + 1)
        parts = [(batch.edge_index, OWN)]
        for _ in range(cycles):
            order = (graph_of + torch.rand(n, device=device, dtype=torch.float64)).argsort()
            cycle = torch.stack([order, order[following]])
            parts += [(cycle, EXPANDER), (cycle.flip(0), EXPANDER)]
        for k in range(virtual):
            ends = torch.stack([node, n + k * graphs + graph_of])
            parts += [(ends, TO_VIRTUAL), (ends.flip(0), FROM_VIRTUAL)]
        self.num_nodes, self.num_virtual, self.own = n + virtual * graphs, virtual * graphs, batch.edge_index
        self.edges = torch.cat([edges for edges, _ in parts], 1)
        self.types = torch.cat([edges.new_full(edges.shape[1:], kind) for edges, kind in parts])

    def graph(self) -> Graph:
        """A source for each type and node."""
        sources = self.types * self.num_nodes + self.edges[0]
        return Graph.from_edge_index(
            torch.stack([sources, self.edges[1]]),
            num_src=len(TYPES) * self.num_nodes, num_dst=self.num_nodes,
        )  # fmt: skip


class Attention(nn.Module):
    """``graph`` is the structure's, for dfgnn's operations; None: the published ones, with ``edge_attr``
    [E, width]."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.edge = nn.Linear(width, width, bias=False)

    def forward(self, x, structure, types, graph, edge_attr):
        query, key, value = self.project(x).view(len(x), 3, self.heads, -1).unbind(1)
        scale = query.shape[-1] ** -0.5
        if graph is not None:
            factor = self.edge(types).view(len(types), 1, self.heads, -1)
            score = functional.sddmm(graph, query, (key * factor).flatten(0, 1), scale=scale).clamp(-5, 5)
            value = value.repeat(len(types), 1, 1)
            # Scores as a bias to which nothing is added, and without the leaky ReLU.
            out = functional.gat_attention(graph, value, None, None, negative_slope=1.0, edge_bias=score)
            return out.flatten(1)
        src, dst = structure.edges
        factor = self.edge(edge_attr).view(len(src), self.heads, -1)
        score = (key[src] * query[dst] * factor * scale).sum(-1, keepdim=True).clamp(-5, 5).exp()
        total = torch.zeros_like(score[: len(x)]).index_add(0, dst, score)
        return (torch.zeros_like(value).index_add(0, dst, value[src] * score) / (total + 1e-6)).flatten(1)


class ExphormerLayer(nn.Module):
    def __init__(self, width, heads, dropout=0.1):
        super().__init__()
        self.local, self.attention = ResGatedGraphConv(width, width, aggr="mean"), Attention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, structure, *attention):
        own = x[: len(x) - structure.num_virtual]  # virtual nodes have no neighbours of their own
        local = own + self.dropout(torch.relu(self.norms[0](self.local(own, structure.own))))
        attended = self.norms[1](x + self.dropout(self.attention(x, structure, *attention)))
        x = attended + torch.cat([local, x[len(own) :]])
        return self.norms[2](x + self.dropout(self.feed_forward(x)))


class Exphormer(nn.Module):
    """Layers on the nodes and, behind them, virtual nodes, which begin alike for all graphs."""

    def __init__(self, impl, width, heads, layers, virtual=2):
        super().__init__()
        self.impl, self.virtual = impl, nn.Embedding(virtual, width)
        self.types = nn.Embedding(len(TYPES), width)
        self.layers = nn.ModuleList(ExphormerLayer(width, heads) for _ in range(layers))

    def forward(self, x, batch):
        structure = Structure(batch, virtual=len(self.virtual.weight))
        graph = edge_attr = None
        if self.impl == "dfgnn":
            graph = structure.graph()
        else:
            edge_attr = self.types(structure.types)
        graphs = structure.num_virtual // len(self.virtual.weight)
        y = torch.cat([x, self.virtual.weight.repeat_interleave(graphs, 0)])
        for layer in self.layers:
            y = layer(y, structure, self.types.weight, graph, edge_attr)
        return y[: len(x)]
