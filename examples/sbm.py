"""PATTERN and CLUSTER of "Benchmarking Graph Neural Networks" (arXiv 2003.00982), by their published recipes,
with the first eigenvectors of each graph's Laplacian as positions.

PATTERN: a stochastic block model of 5 communities of 5 to 35 nodes, edge probability 0.5 within a community
and 0.35 between two, and one more community of 20 nodes, the pattern, with 0.5 and 0.5. Features are 0, 1
or 2 at random; those of a pattern are one of 100 fixed ones. The class of a node is whether it is in the
pattern. For CLUSTER see cluster.py.
"""

import contextlib
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import cluster
import numpy as np
import torch
from datasets import GraphSet
from threadpoolctl import threadpool_limits

SIZES = {"CLUSTER": (10_000, 1_000, 1_000), "PATTERN": (10_000, 2_000, 2_000)}  # train, valid, test
CLASSES = {"CLUSTER": cluster.CLASSES, "PATTERN": 2}
NUM_FEATURES = {"CLUSTER": cluster.NUM_FEATURES, "PATTERN": 3}
POSITIONS, CYCLES = 10, 3  # of each node: eigenvectors, and random numbers for Exphormer's expander
PATTERNS = np.random.default_rng(20).integers(3, size=(100, 20))


def pattern_graph(generator):
    """(src, dst, features, labels) as numpy arrays; every edge is there in both directions."""
    sizes = [*generator.integers(5, 35, size=5, endpoint=True), PATTERNS.shape[1]]
    community = np.repeat(np.arange(6), sizes)
    features = generator.integers(3, size=len(community))
    features[community == 5] = PATTERNS[generator.integers(len(PATTERNS))]
    order = generator.permutation(len(community))
    community, features = community[order], features[order]
    same, in_pattern = community[:, None] == community, community == 5
    probability = np.where(same | in_pattern[:, None] | in_pattern, 0.5, 0.35)
    upper = np.triu(generator.random(probability.shape) < probability, k=1)
    src, dst = np.nonzero(upper | upper.T)
    return src, dst, features, in_pattern.astype(np.int64)


def positions(src, dst, num_nodes: int) -> np.ndarray:
    """[N, POSITIONS]: eigenvectors of I - D^(-1/2) A D^(-1/2) of the smallest eigenvalues but the first."""
    adjacency = np.zeros((num_nodes, num_nodes))
    adjacency[src, dst] = 1
    scale = adjacency.sum(1).clip(1) ** -0.5
    _, vectors = np.linalg.eigh(np.eye(num_nodes) - scale[:, None] * adjacency * scale)
    found = vectors[:, 1 : POSITIONS + 1].astype(np.float32)
    return np.pad(found, ((0, 0), (0, POSITIONS - found.shape[1])))


def make(name: str, seeds) -> list[tuple]:
    """A graph for each seed: (src, dst, features, labels, positions)."""
    recipe = cluster.make_graph if name == "CLUSTER" else pattern_graph
    graphs = [recipe(np.random.default_rng(seed)) for seed in seeds]
    with threadpool_limits(1):  # every core runs a process of its own already
        return [(*graph, positions(*graph[:2], len(graph[3]))) for graph in graphs]


def load(name: str, counts, root, device="cpu") -> tuple[GraphSet, dict[str, torch.Tensor]]:
    """The graphs ``counts`` of train, valid and test, from a file in ``root`` where they were made before."""
    path = Path(root, f"{name}-{'-'.join(map(str, counts))}.pt")
    if path.is_file():
        parts = torch.load(path)
    else:
        workers = min(os.cpu_count() or 1, 16, 1 + sum(counts) // 200)
        jobs = [range(k, sum(counts), workers) for k in range(workers)]
        if workers == 1:
            made = [make(name, jobs[0])]
        else:
            with ProcessPoolExecutor(workers) as pool:
                made = list(pool.map(partial(make, name), jobs))
        graphs = [made[k % workers][k // workers] for k in range(sum(counts))]
        joined = [np.concatenate([graph[k] for graph in graphs]) for k in range(5)]
        parts = {
            "num_nodes": torch.tensor([len(graph[3]) for graph in graphs]),
            "num_edges": torch.tensor([len(graph[0]) for graph in graphs]),
            "edge_index": torch.from_numpy(np.stack(joined[:2])).to(torch.int32),
            "x": torch.from_numpy(joined[2]),
            "y": torch.from_numpy(joined[3]),
            "positions": torch.from_numpy(joined[4]),
        }
        with contextlib.suppress(OSError):  # if the folder is read-only, they are made again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(parts, path.with_suffix(f".{os.getpid()}"))
            path.with_suffix(f".{os.getpid()}").replace(path)
    node = {k: parts[k] for k in ("x", "y", "positions")}
    node["cycles"] = torch.rand(len(parts["y"]), CYCLES, generator=torch.Generator().manual_seed(0))
    data = GraphSet(parts["num_nodes"], parts["num_edges"], parts["edge_index"], node, {}, {}, device)
    split = dict(zip(("train", "valid", "test"), torch.arange(sum(counts)).split(list(counts))))
    return data, split
