"""The networks of demo_cluster.py, made of dfgnn's layers."""

import torch
import torch.nn.functional as F
from torch import nn

from dfgnn.nn import GraphTransformerConv
from dfgnn.nn.dgl import GATConv


class GATBlock(nn.Module):
    """Attention, batch norm, ELU, residual."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention = GATConv(width, width // heads, heads, allow_zero_in_degree=True)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, graph, x):
        return x + F.elu(self.norm(self.attention(graph, x).flatten(1)))


class GTBlock(nn.Module):
    """Attention with an output projection, then a feed-forward network; each with residual and batch norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention = GraphTransformerConv(width, width // heads, heads, allow_zero_in_degree=True)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList([nn.BatchNorm1d(width), nn.BatchNorm1d(width)])

    def forward(self, graph, x):
        x = self.norms[0](x + self.project(self.attention(graph, x).flatten(1)))
        return self.norms[1](x + self.feed_forward(x))


class NodeClassifier(nn.Module):
    """Embedded discrete node features, blocks of one kind, and a two-layer readout."""

    def __init__(self, block, num_features, classes, width=64, heads=8, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(num_features, width)
        self.blocks = nn.ModuleList([block(width, heads) for _ in range(layers)])
        self.readout = nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, classes))

    def forward(self, graph, features):
        x = self.embedding(features)
        for block in self.blocks:
            x = block(graph, x)
        return self.readout(x)


@torch.no_grad()
def accuracy(logits, labels):
    """Share of right classes, in percent."""
    return 100 * (logits.argmax(-1) == labels).double().mean().item()
