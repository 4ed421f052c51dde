"""Benchmark graphs: real ones from a data folder, synthetic twins, batches of small graphs.

Every graph is symmetrised and gets self loops, like the inputs of an attention layer. A name that ends in
``~`` is a synthetic twin: a random graph with the published numbers of nodes and edges and about the
published maximum degree, its nodes in random order. Real graphs are read from ``DFGNN_DATA`` (or
``../shared/data``). Files:

``.npz``   ``indptr, indices`` and optionally ``num_nodes``; or a batch, ``node_ptr, edge_ptr, src, dst`` with
           ids that start at 0 in every graph; or what ``scipy.sparse.save_npz`` writes.
``.mtx``   Matrix Market, a square matrix; its values are ignored. Needs scipy.
"""

import gzip
import os
from pathlib import Path

import numpy as np
import torch

from ..graph import Graph

# name: nodes, directed edges without self loops, maximum degree (Open Graph Benchmark; GraphSAGE's Reddit)
_POWER_LAW = {
    "reddit~": (232_965, 114_390_000, 20_390),
    "proteins~": (132_534, 78_870_000, 7_472),
    "products~": (2_449_029, 123_750_000, 17_151),
    "arxiv~": (169_343, 2_315_598, 13_161),
    "cora~": (2_708, 10_556, 168),
}
_FILES = {
    "ogbn-arxiv": "ogbn-arxiv",
    "debian-deps": "debian-deps",
    "github": "musae-github",
    "blogcatalog": "blogcatalog3",
}
_TU = {"reddit-binary": ("TU-REDDIT-BINARY", 256), "collab": ("TU-COLLAB", 256)}
# Edges drawn at a time, which bounds the memory of their random numbers.
_PART = 20_000_000
NAMES = (*_FILES, "ogbl-ddi", "molhiv", *_TU, "pattern~", *_POWER_LAW)


def data_folder() -> Path | None:
    """Where the real graphs are, or None."""
    folder = Path(os.environ.get("DFGNN_DATA", Path(__file__).parents[3] / "shared" / "data"))
    return folder if folder.is_dir() else None


def load(name: str, device="cpu") -> Graph:
    """The benchmark graph of that name, or in that file.

    Raises ValueError for an unknown name or a file without a graph, FileNotFoundError without the data.
    """
    if Path(name).suffix in (".npz", ".mtx"):
        src, dst, n = _unique_undirected(*_file(Path(name)))
    elif name in _POWER_LAW:
        src, dst, n = power_law(*_POWER_LAW[name], device=device)
    elif name == "pattern~":
        src, dst, n = _pattern(1024, device)
    elif name in NAMES:
        src, dst, n = _real(name)
    else:
        raise ValueError(f"graph: expected a .npz or .mtx file or one of {', '.join(NAMES)}, got {name!r}")
    loop = torch.arange(n, dtype=torch.int32, device=device)
    src, dst = src.to(device, torch.int32), dst.to(device, torch.int32)
    src, dst = torch.cat([src, dst, loop]), torch.cat([dst, src, loop])
    csr = Graph.from_coo(src, dst, num_nodes=n, validate=False).csr()
    return Graph.from_csr(csr.indptr, csr.indices, num_src=n, validate=False)


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
    ends = []
    for _ in range(2):
        parts = []
        for begin in range(0, num_edges // 2, _PART):
            count = min(num_edges // 2 - begin, _PART)
            u = torch.rand(count, dtype=torch.float64, generator=generator, device=device) * cumulative[-1]
            parts.append(label[torch.searchsorted(cumulative, u).clamp_(max=num_nodes - 1)])
        ends.append(torch.cat(parts))
    return ends[0], ends[1], num_nodes


def _pattern(num_graphs: int, device):
    """Like PATTERN ("Benchmarking GNNs"): dense random graphs of 118 nodes, average degree 45."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(108, 129, (num_graphs,), generator=generator)
    src, dst, start = [], [], 0
    for n in sizes.tolist():
        edges = (torch.rand(n, n, generator=generator) < 0.385).triu_(1).nonzero()
        src.append(edges[:, 0] + start)
        dst.append(edges[:, 1] + start)
        start += n
    return torch.cat(src), torch.cat(dst), start


def _unique_undirected(src, dst, n):
    low, high = np.minimum(src, dst).astype(np.int64), np.maximum(src, dst)
    keys = np.unique(low * n + high)
    keys = keys[keys // n != keys % n]
    return torch.from_numpy(keys // n), torch.from_numpy(keys % n), int(n)


def _file(path: Path, graphs: int | None = None):
    """Endpoints as they are in the file, and the number of nodes; of a batch, the first ``graphs`` graphs."""
    if path.suffix == ".mtx":
        import scipy.io
        import scipy.sparse

        return _square(path, scipy.sparse.coo_array(scipy.io.mmread(path)))
    with np.load(path) as f:
        if "node_ptr" in f:
            node_ptr, edge_ptr = f["node_ptr"], f["edge_ptr"]
            graphs = len(node_ptr) - 1 if graphs is None else graphs
            edges = int(edge_ptr[graphs])
            offset = np.repeat(node_ptr[:graphs], np.diff(edge_ptr[: graphs + 1]))
            return f["src"][:edges] + offset, f["dst"][:edges] + offset, int(node_ptr[graphs])
        if "indptr" in f and "format" not in f:
            n = int(f["num_nodes"]) if "num_nodes" in f else len(f["indptr"]) - 1
            return np.repeat(np.arange(n), np.diff(f["indptr"])), f["indices"], n
        if "format" not in f:
            raise ValueError(f"{path}: expected indptr and indices, node_ptr and edge_ptr, or a scipy matrix")
    import scipy.sparse

    return _square(path, scipy.sparse.load_npz(path).tocoo())


def _square(path: Path, matrix):
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{path}: expected a square matrix, got {matrix.shape[0]} x {matrix.shape[1]}")
    return matrix.row, matrix.col, matrix.shape[0]


def _rows(path: Path, count: int | None = None) -> np.ndarray:
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.int64, max_rows=count, ndmin=2)


def _real(name: str):
    folder = data_folder()
    if folder is None:
        raise FileNotFoundError(f"graph {name}: set DFGNN_DATA to the folder that holds graphs/ and ogb/")
    if name in _FILES:
        return _unique_undirected(*_file(folder / "graphs" / f"{_FILES[name]}.npz"))
    if name in _TU:
        file_name, graphs = _TU[name]
        return _unique_undirected(*_file(folder / "graphs" / f"{file_name}.npz", graphs))
    if name == "ogbl-ddi":
        edges = _rows(folder / "ogb" / "ogbl_ddi" / "raw" / "edge.csv.gz")
        return _unique_undirected(edges[:, 0], edges[:, 1], 4267)
    raw = folder / "ogb" / "ogbg_molhiv" / "raw"
    graphs = 1024
    nodes = _rows(raw / "num-node-list.csv.gz", graphs)[:, 0]
    counts = _rows(raw / "num-edge-list.csv.gz", graphs)[:, 0]
    edges = _rows(raw / "edge.csv.gz", int(counts.sum()))
    offset = np.repeat(np.cumsum(nodes) - nodes, counts)
    return _unique_undirected(edges[:, 0] + offset, edges[:, 1] + offset, int(nodes.sum()))
