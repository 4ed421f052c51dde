"""Makes synthetic graphs: random *twins* of public data sets, and extreme shapes.

A twin (its name ends in ``~``) is a random graph with the published sizes and about the published degrees of
a data set; with a power law, nodes are in random order. Every function returns (src, dst, number of nodes)
with each undirected edge once, and the same graph at every call on the same kind of device. ``power_law`` may
repeat an edge; the others do not.

Sources of the sizes: Open Graph Benchmark (arXiv 2005.00687), GraphSAGE's Reddit (arXiv 1706.02216), for
PATTERN, CLUSTER and MNIST "Benchmarking GNNs" (arXiv 2003.00982), for COLLAB TUDataset (arXiv 2007.08663).
"""

import re
from functools import partial

import torch

# At most this number of edges is drawn at a time, to limit the memory of random numbers.
_PART = 20_000_000


# ---- single graphs ---------------------------------------------------------------------------------


def power_law(num_nodes: int, num_edges: int, max_degree: int, device="cpu", seed: int = 0):
    """Endpoints of num_edges / 2 undirected edges, each end drawn with probability ~ (rank + r0)^(-1/2), with
    r0 such that the largest expected degree is max_degree (Chung and Lu, PNAS 2002, with a bounded tail)."""
    rank = torch.arange(num_nodes, dtype=torch.float64, device=device)
    low, high = 1e-6, float(num_nodes)
    for _ in range(60):
        r0 = (low * high) ** 0.5
        weight = (rank + r0).rsqrt()
        low, high = (r0, high) if float(weight[0] / weight.sum()) * num_edges > max_degree else (low, r0)
    cumulative = weight.cumsum(0)
    generator = torch.Generator(device).manual_seed(seed)
    label = torch.randperm(num_nodes, generator=generator, device=device).to(torch.int32)
    edges = []
    for _ in range(2):
        parts = []
        for begin in range(0, num_edges // 2, _PART):
            count = min(num_edges // 2 - begin, _PART)
            u = torch.rand(count, dtype=torch.float64, generator=generator, device=device) * cumulative[-1]
            parts.append(label[torch.searchsorted(cumulative, u).clamp_(max=num_nodes - 1)])
        edges.append(torch.cat(parts))
    return edges[0], edges[1], num_nodes


def erdos_renyi(num_nodes: int, mean_degree: int, device="cpu", seed: int = 0):
    """num_nodes * mean_degree / 2 different pairs of nodes, all sets of that many equally likely.

    Raises ValueError if there are fewer pairs.
    """
    pairs, count = num_nodes * (num_nodes - 1) // 2, num_nodes * mean_degree // 2
    if count > pairs:
        raise ValueError(f"mean degree: expected at most {num_nodes - 1}, got {mean_degree}")
    generator = torch.Generator(device).manual_seed(seed)
    if 2 * count > pairs:
        chosen = torch.randperm(pairs, generator=generator, device=device)[:count]
        src, dst = torch.triu_indices(num_nodes, num_nodes, 1, device=device)[:, chosen]
        return src, dst, num_nodes
    keys = torch.empty(0, dtype=torch.int64, device=device)
    while len(keys) < count:  # about two rounds, because at most half of all pairs are drawn
        more = int(1.1 * (count - len(keys))) + 16
        ends = torch.randint(num_nodes, (2, more), generator=generator, device=device)
        low, high = ends.amin(0), ends.amax(0)
        keys = torch.cat([keys, (low * num_nodes + high)[low < high]]).unique()
    keys = keys[torch.randperm(len(keys), generator=generator, device=device)[:count]]
    return keys // num_nodes, keys % num_nodes, num_nodes


def star(leaves: int, device="cpu"):
    """Node 0 with an edge to each of the leaves 1, 2, ...: one super node."""
    leaf = torch.arange(1, leaves + 1, device=device)
    return torch.zeros_like(leaf), leaf, leaves + 1


def chain(num_nodes: int, device="cpu"):
    """The path 0 - 1 - 2 - ...: no row is long."""
    node = torch.arange(num_nodes, device=device)
    return node[:-1], node[1:], num_nodes


# ---- batches of small graphs -----------------------------------------------------------------------


def pattern(num_graphs: int, device="cpu"):
    """Like PATTERN: dense random graphs of 118 nodes, average degree 45."""
    generator = _seeded()
    sizes = torch.randint(108, 129, (num_graphs,), generator=generator).tolist()

    def graph(n):
        return (torch.rand(n, n, generator=generator) < 0.385).triu_(1).nonzero(), n

    return _batch(graph, sizes, device)


def cluster(num_graphs: int, device="cpu"):
    """CLUSTER by its definition: six communities of 5 to 34 nodes, edges with probability 0.55 within one and
    0.25 between two. Published averages: 117.2 nodes and 4,303.9 directed edges."""
    generator = _seeded()
    sizes = torch.randint(5, 35, (num_graphs, 6), generator=generator)

    def graph(sizes):
        community = torch.repeat_interleave(torch.arange(6), sizes)
        probability = torch.where(community[:, None] == community, 0.55, 0.25)
        n = len(community)
        return (torch.rand(n, n, generator=generator) < probability).triu_(1).nonzero(), n

    return _batch(graph, sizes, device)


def mnist(num_graphs: int, device="cpu"):
    """Like the superpixels of MNIST: 40 to 75 random points, each with edges to its 8 nearest.

    Published averages: 70.6 nodes and 564.5 directed edges, 8 per node. Two points that are each among the
    other's nearest share one undirected edge.
    """
    generator = _seeded()
    # How many points a graph has fewer than 75: 4.4 in the mean.
    missing = torch.empty(num_graphs).geometric_(1 / 5.4, generator=generator) - 1

    def graph(n):
        place = torch.rand(n, 2, generator=generator)
        nearest = torch.cdist(place, place).fill_diagonal_(torch.inf).topk(8, largest=False).indices
        near = torch.zeros(n, n, dtype=torch.bool).scatter_(1, nearest, True)
        return (near | near.T).triu_(1).nonzero(), n

    return _batch(graph, (75 - missing).clamp_(min=40).int().tolist(), device)


def molhiv(num_graphs: int, device="cpu"):
    """Like the molecules of ogbg-molhiv: chains of atoms that close to rings of six, some sharing a bond,
    with branches. Published: 25.5 nodes and 27.5 undirected edges on average; few atoms have 4 bonds, none
    here has more."""
    generator = _seeded()
    sizes = _log_normal(num_graphs, 23.4, 0.41, generator).clamp_(2, 222).tolist()

    def graph(n):
        draws = torch.rand(n, 3, generator=generator).tolist()
        bonds, degree, straight = [], [0] * n, 0
        for atom in range(1, n):
            other, straight = atom - 1, straight + 1
            branch, hub, back = draws[atom]
            joint = atom - 2 - int(7 * back)
            if branch < 0.2 and joint >= 0 and degree[joint] < (4 if hub < 0.6 else 3):
                other, straight = joint, 0
            new = [(other, atom)]
            if straight >= 5 and degree[atom - 5] == 2:
                new.append((atom - 5, atom))
                straight = 1  # the next ring may share the last bond
            for bond in new:
                for end in bond:
                    degree[end] += 1
            bonds += new
        return torch.tensor(bonds), n

    return _batch(graph, sizes, device)


def collab(num_graphs: int, device="cpu"):
    """Like the networks around an author of COLLAB: the author has an edge to all others, who are divided
    into fully connected groups, each a uniformly random share of those left.

    Published averages: 74.5 nodes (32 to 492) and 2,457.2 undirected edges.
    """
    generator = _seeded()
    sizes = (32 + _log_normal(num_graphs, 19, 1.3, generator).clamp_(max=460)).tolist()

    def graph(n):
        group = torch.zeros(n, dtype=torch.int64)  # 0: the author, node 0
        begin, label = 1, 1
        while begin < n:
            end = begin + 1 + int(float(torch.rand((), generator=generator)) * (n - begin))
            group[begin:end] = label
            begin, label = end, label + 1
        linked = group[:, None] == group
        linked[0] = True
        return linked.triu_(1).nonzero(), n

    return _batch(graph, sizes, device)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)  # on the CPU, so that all devices get the same graph


def _log_normal(count: int, median: float, sigma: float, generator) -> torch.Tensor:
    """``count`` integers in random order, one from each of ``count`` equally likely parts of the
    distribution, so that even a small batch has the mean of a heavy-tailed one."""
    part = (torch.randperm(count, generator=generator).double() + 0.5) / count
    return (median * torch.exp(sigma * torch.special.ndtri(part))).round_().long()


def _batch(graph, sizes, device):
    """One graph for each size, joined as a batch; graph(size) returns (edges [E, 2], number of nodes)."""
    edges, start = [], 0
    for size in sizes:
        ends, n = graph(size)
        edges.append(ends + start)
        start += n
    src, dst = torch.cat(edges).to(device).T
    return src, dst, start


# ---- by name ---------------------------------------------------------------------------------------

# Mean degrees of the sweep over Erdős–Rényi graphs, and their number of directed edges.
_SWEEP, _SWEEP_EDGES = (2, 8, 32, 128, 512), 4_000_000

# name: (function of the device, number of graphs in the batch)
_TWINS = {
    "reddit~": (partial(power_law, 232_965, 114_390_000, 20_390), 1),
    "proteins~": (partial(power_law, 132_534, 78_870_000, 7_472), 1),
    "products~": (partial(power_law, 2_449_029, 123_750_000, 17_151), 1),
    "arxiv~": (partial(power_law, 169_343, 2_315_598, 13_161), 1),
    "cora~": (partial(power_law, 2_708, 10_556, 168), 1),
    "pattern~": (partial(pattern, 1024), 1024),
    "cluster~": (partial(cluster, 1024), 1024),
    "mnist~": (partial(mnist, 1024), 1024),
    "molhiv~": (partial(molhiv, 1024), 1024),
    "collab~": (partial(collab, 256), 256),
    "star": (partial(star, 1_000_000), 1),
    "chain": (partial(chain, 1_000_000), 1),
}
NAMES = (*_TWINS, "er")


def expand(name: str) -> tuple[str, ...]:
    """The names of a sweep (``er``), or the name itself if it stands for one graph."""
    return tuple(f"er-{_SWEEP_EDGES // d}-{d}" for d in _SWEEP) if name == "er" else (name,)


def make(name: str, device="cpu"):
    """((src, dst, number of nodes), number of graphs) of a synthetic graph, or None for any other name.

    Besides ``NAMES`` there is ``er-N-D``: Erdős–Rényi with N nodes of mean degree D.
    """
    if name in _TWINS:
        function, graphs = _TWINS[name]
        return function(device=device), graphs
    sizes = re.fullmatch(r"er-([1-9]\d*)-([1-9]\d*)", name)
    if sizes is None:
        return None
    nodes, degree = map(int, sizes.groups())
    return erdos_renyi(nodes, degree, device=device), 1
