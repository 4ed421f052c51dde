"""Benchmark graphs: synthetic ones, real ones from a data folder, files, and data sets of other libraries.

Every graph is symmetrised and gets self loops, like the inputs of an attention layer. Synthetic graphs are in
``twins``, data sets by library in ``datasets``. Real graphs are read from ``DFGNN_DATA`` (or
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
from . import datasets, twins

_FILES = {
    "ogbn-arxiv": "ogbn-arxiv",
    "debian-deps": "debian-deps",
    "github": "musae-github",
    "blogcatalog": "blogcatalog3",
}
_TU = {"reddit-binary": ("TU-REDDIT-BINARY", 256), "collab": ("TU-COLLAB", 256)}
_MOLECULES = 1024
_REAL = (*_FILES, "ogbl-ddi", "molhiv", *_TU)
NAMES = (*_REAL, *twins.NAMES)
# Where data sets of other libraries are kept unless another folder is given.
ROOT = Path("dataset")


def data_folder() -> Path | None:
    """Where the real graphs are, or None."""
    folder = Path(os.environ.get("DFGNN_DATA", Path(__file__).parents[3] / "shared" / "data"))
    return folder if folder.is_dir() else None


def load(name: str, device="cpu", root: Path = ROOT) -> Graph:
    """The graph alone of ``read``."""
    return read(name, device, root)[0]


def read(name: str, device="cpu", root: Path = ROOT) -> tuple[Graph, int]:
    """The benchmark graph of that name, in that file, or of that data set, and how many graphs it holds.

    root: the folder of the libraries' data sets.

    Raises ValueError for an unknown name or a file or data set without a graph, ImportError without the
    library, OSError (also FileNotFoundError) without the data.
    """
    (src, dst, n), graphs = twins.make(name, device) or _read(name, root)
    loop = torch.arange(n, dtype=torch.int32, device=device)
    src, dst = src.to(device, torch.int32), dst.to(device, torch.int32)
    src, dst = torch.cat([src, dst, loop]), torch.cat([dst, src, loop])
    # Neighbours of a row in rising order, as libraries keep them: the transposed graph's reverse CSR.
    csr = Graph.from_coo(dst, src, num_nodes=n, validate=False).reverse_csr()
    return Graph.from_csr(csr.indptr, csr.indices, num_src=n, validate=False), graphs


def _read(name: str, root: Path):
    """(src, dst, number of nodes), each undirected edge once, and the number of graphs."""
    if datasets.is_spec(name):
        ends, graphs = datasets.load(name, root)
    elif Path(name).suffix in (".npz", ".mtx"):
        ends, graphs = _file(Path(name))
    elif name in _REAL:
        ends, graphs = _real(name)
    else:
        raise ValueError(
            f"graph: expected a .npz or .mtx file, a data set (ogb:, pyg: or dgl:), er-N-D or one of "
            f"{', '.join(NAMES)}, got {name!r}"
        )
    return _unique_undirected(*ends), graphs


def _unique_undirected(src, dst, n):
    low, high = np.minimum(src, dst).astype(np.int64), np.maximum(src, dst)
    keys = np.unique(low * n + high)
    keys = keys[keys // n != keys % n]
    return torch.from_numpy(keys // n), torch.from_numpy(keys % n), int(n)


def _file(path: Path, graphs: int | None = None):
    """(src, dst, number of nodes) as they are in the file, and the number of graphs: of a batch, the first
    ``graphs``."""
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
            return (f["src"][:edges] + offset, f["dst"][:edges] + offset, int(node_ptr[graphs])), graphs
        if "indptr" in f and "format" not in f:
            n = int(f["num_nodes"]) if "num_nodes" in f else len(f["indptr"]) - 1
            return (np.repeat(np.arange(n), np.diff(f["indptr"])), f["indices"], n), 1
        if "format" not in f:
            raise ValueError(f"{path}: expected indptr and indices, node_ptr and edge_ptr, or a scipy matrix")
    import scipy.sparse

    return _square(path, scipy.sparse.load_npz(path).tocoo())


def _square(path: Path, matrix):
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{path}: expected a square matrix, got {matrix.shape[0]} x {matrix.shape[1]}")
    return (matrix.row, matrix.col, matrix.shape[0]), 1


def _rows(path: Path, count: int | None = None) -> np.ndarray:
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.int64, max_rows=count, ndmin=2)


def _real(name: str):
    """What ``_file`` gives, of a graph in the data folder."""
    folder = data_folder()
    if folder is None:
        raise FileNotFoundError(f"graph {name}: set DFGNN_DATA to the folder that holds graphs/ and ogb/")
    if name in _FILES:
        return _file(folder / "graphs" / f"{_FILES[name]}.npz")
    if name in _TU:
        file_name, graphs = _TU[name]
        return _file(folder / "graphs" / f"{file_name}.npz", graphs)
    if name == "ogbl-ddi":
        edges = _rows(folder / "ogb" / "ogbl_ddi" / "raw" / "edge.csv.gz")
        return (edges[:, 0], edges[:, 1], 4267), 1
    raw = folder / "ogb" / "ogbg_molhiv" / "raw"
    nodes = _rows(raw / "num-node-list.csv.gz", _MOLECULES)[:, 0]
    counts = _rows(raw / "num-edge-list.csv.gz", _MOLECULES)[:, 0]
    edges = _rows(raw / "edge.csv.gz", int(counts.sum()))
    offset = np.repeat(np.cumsum(nodes) - nodes, counts)
    return (edges[:, 0] + offset, edges[:, 1] + offset, int(nodes.sum())), _MOLECULES
