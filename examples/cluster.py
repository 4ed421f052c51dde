"""The CLUSTER data set of "Benchmarking Graph Neural Networks" (arXiv 2003.00982), by its published recipe.

A stochastic block model with 6 communities of 5 to 34 nodes, edge probability 0.55 within a community and
0.25 between two. One node of each community r carries the feature r + 1, all others 0; the class to predict
is a node's community. Nodes are in random order.
"""

import numpy as np
import torch

from dfgnn import Graph

CLASSES = 6
NUM_FEATURES = CLASSES + 1
SIZES = (5, 34)
P_WITHIN, P_BETWEEN = 0.55, 0.25


def make_graph(generator):
    """(src, dst, features, labels) as numpy arrays; every edge is there in both directions."""
    sizes = generator.integers(SIZES[0], SIZES[1], size=CLASSES, endpoint=True)
    labels = generator.permutation(np.repeat(np.arange(CLASSES), sizes))
    probability = np.where(labels[:, None] == labels[None, :], P_WITHIN, P_BETWEEN)
    upper = np.triu(generator.random(probability.shape) < probability, k=1)
    src, dst = np.nonzero(upper | upper.T)
    features = np.zeros_like(labels)
    for community in range(CLASSES):
        features[generator.choice(np.flatnonzero(labels == community))] = community + 1
    return src, dst, features, labels


def make_batches(num_graphs, batch_size, seed, device="cpu"):
    """A list of (Graph, features, labels), each of ``batch_size`` graphs side by side."""
    generator = np.random.default_rng(seed)
    batches = []
    for first in range(0, num_graphs, batch_size):
        parts = [make_graph(generator) for _ in range(min(batch_size, num_graphs - first))]
        graphs = [Graph.from_coo(*map(torch.from_numpy, p[:2]), num_nodes=len(p[2])) for p in parts]
        features, labels = (torch.from_numpy(np.concatenate([p[k] for p in parts])) for k in (2, 3))
        batches.append((Graph.batch(graphs).to(device), features.to(device), labels.to(device)))
    return batches
