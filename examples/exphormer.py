"""Exphormer's layer (Shirzad et al., ICML 2023, arXiv 2303.06147): attention over a graph's own edges, those
of an expander and those of virtual nodes, beside message passing along its own.

As in the published code scores are products of queries, keys and what belongs to the edge's type, clamped to
±5, a virtual node becomes what it attends to, and the expander of a graph is drawn once.
"""

import torch
from torch import nn
from torch_geometric.nn import ResGatedGraphConv

from dfgnn.nn import ExphormerAttention

EXPANDER, TO_VIRTUAL, FROM_VIRTUAL, OWN = TYPES = range(4)


class Structure:
    """The edges of all types of a batch, with virtual nodes after the others.

    ``batch.cycles`` [N, k] are random numbers: sorting each graph's nodes by them gives k cycles, which in
    both directions are its expander. ``mask``: the edges in use, if dfgnn.capture has padded the batch.
    Nothing waits for the device.
    """

    def __init__(self, batch, virtual: int):
        graph_of, device = batch.batch, batch.batch.device
        n, graphs = len(graph_of), batch.num_graphs
        node, each = torch.arange(n, device=device), torch.arange(graphs, device=device)
        first, end = (torch.searchsorted(graph_of, each, right=right) for right in (False, True))
        following = torch.where(node == end[graph_of] - 1, first[graph_of], node + 1)
        order = (graph_of + batch.cycles.double().t()).argsort(1)
        cycles = torch.stack([order, order[:, following]]).flatten(1)
        hubs = n + graph_of + graphs * torch.arange(virtual, device=device).unsqueeze(1)
        spokes = torch.stack([node.expand_as(hubs), hubs]).flatten(1)
        parts = [
            (cycles, EXPANDER), (cycles.flip(0), EXPANDER),
            (spokes, TO_VIRTUAL), (spokes.flip(0), FROM_VIRTUAL), (batch.edge_index, OWN),
        ]  # fmt: skip
        self.num_nodes = n + virtual * graphs
        self.edges = torch.cat([edges for edges, _ in parts], 1)
        self.types = torch.cat([edges.new_full(edges.shape[1:], kind) for edges, kind in parts])
        self.mask = None
        if "edge_mask" in batch:
            of_nodes = batch.node_mask.expand(2 * (len(order) + virtual), n)
            self.mask = torch.cat([of_nodes.flatten(), batch.edge_mask])

    def graph(self):
        """The graph in the form that dfgnn's layer takes."""
        sizes = self.num_nodes, len(TYPES)
        return ExphormerAttention.typed_graph(
            self.edges, self.types, *sizes, edge_mask=self.mask, validate=False
        )


class Attention(nn.Module):
    """The published operations; ``types`` [E, width] of the edges."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.edge = nn.Linear(width, width, bias=False)

    def forward(self, edges, x, types):
        query, key, value = self.project(x).view(len(x), 3, self.heads, -1).unbind(1)
        src, dst = edges
        factor = self.edge(types).view(len(src), self.heads, -1) * query.shape[-1] ** -0.5
        score = (key[src] * query[dst] * factor).sum(-1, keepdim=True).clamp(-5, 5).exp()
        total = torch.zeros_like(score[: len(x)]).index_add(0, dst, score)
        return (torch.zeros_like(value).index_add(0, dst, value[src] * score) / (total + 1e-6)).flatten(1)


class ExphormerLayer(nn.Module):
    def __init__(self, impl, width, heads, dropout=0.1):
        super().__init__()
        self.local = ResGatedGraphConv(width, width, aggr="mean")
        self.attention = (ExphormerAttention if impl == "dfgnn" else Attention)(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, virtual, own, edges, types):
        local = x + self.dropout(torch.relu(self.norms[0](self.local(x, own))))
        attended = self.attention(edges, torch.cat([x, virtual]), types)
        attended, virtual = attended.split([len(x), len(virtual)])
        x = local + self.norms[1](x + self.dropout(attended))
        return self.norms[2](x + self.dropout(self.feed_forward(x))), virtual


class Exphormer(nn.Module):
    """Layers on nodes and virtual nodes; the latter start with the same features in all graphs."""

    def __init__(self, impl, width, heads, layers, virtual=2):
        super().__init__()
        self.impl, self.virtual = impl, nn.Embedding(virtual, width)
        self.types = nn.Embedding(len(TYPES), width)
        self.layers = nn.ModuleList(ExphormerLayer(impl, width, heads) for _ in range(layers))

    def forward(self, x, batch):
        structure = Structure(batch, len(self.virtual.weight))
        if self.impl == "dfgnn":
            edges, types = structure.graph(), self.types.weight
        else:
            edges, types = structure.edges, self.types(structure.types)
        virtual = self.virtual.weight.repeat_interleave(batch.num_graphs, 0)
        for layer in self.layers:
            x, virtual = layer(x, virtual, batch.edge_index, edges, types)
        return x
