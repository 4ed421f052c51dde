"""Reads benchmark graphs: synthetic ones, real ones from a data folder, files, and libraries' data sets.

Every graph is symmetrised and gets self loops, like the inputs of an attention layer. Synthetic graphs are
in ``twins``, data sets of libraries in ``datasets``, others in ``sources``. Names of real graphs stand for
one of these (``ALIASES``), which is downloaded unless the folder that the environment variable ``DFGNN_DATA``
names has a copy. Files:

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
from . import datasets, sources, twins

# Real graphs that a library publishes -> what `datasets` calls them.
ALIASES = {
    "ogbn-arxiv": "ogb:ogbn-arxiv",
    "ogbl-ddi": "ogb:ogbl-ddi",
    "molhiv": "ogb:ogbg-molhiv@1024",
    "reddit-binary": "pyg:TUDataset/REDDIT-BINARY@256",
    "collab": "pyg:TUDataset/COLLAB@256",
}
_REAL = (*ALIASES, *sources.SOURCES)
NAMES = (*_REAL, *twins.NAMES)
# Real graph -> its copy in the folder DFGNN_DATA, and how many graphs of a batch are used (None: all).
_COPIES = {
    "ogbn-arxiv": ("graphs/ogbn-arxiv.npz", None),
    "debian-deps": ("graphs/debian-deps.npz", None),
    "github": ("graphs/musae-github.npz", None),
    "blogcatalog": ("graphs/blogcatalog3.npz", None),
    "reddit-binary": ("graphs/TU-REDDIT-BINARY.npz", 256),
    "collab": ("graphs/TU-COLLAB.npz", 256),
    "ogbl-ddi": ("ogb/ogbl_ddi/raw/edge.csv.gz", None),
    "molhiv": ("ogb/ogbg_molhiv/raw/edge.csv.gz", 1024),
}
# Where downloads are kept unless another folder is given.
ROOT = Path("dataset")


def data_folder() -> Path | None:
    """The folder that ``DFGNN_DATA`` names, with copies of real graphs, or None where it is not set.

    Raises FileNotFoundError if there is no such folder.
    """
    name = os.environ.get("DFGNN_DATA")
    if not name:
        return None
    if not Path(name).is_dir():
        raise FileNotFoundError(f"DFGNN_DATA: expected a folder, got {name!r}")
    return Path(name)


def has_copy(name: str) -> bool:
    """Whether the folder of :func:`data_folder` has the real graph of that name."""
    folder = data_folder()
    return folder is not None and name in _COPIES and (folder / _COPIES[name][0]).is_file()


def load(name: str, device="cpu", root: Path = ROOT) -> Graph:
    """The graph that ``read`` returns."""
    return read(name, device, root)[0]


def read(name: str, device="cpu", root: Path = ROOT) -> tuple[Graph, int]:
    """The benchmark graph of that name, in that file, or of that data set, and how many graphs it holds.

    root: the folder of what is downloaded.

    Raises ValueError for an unknown name or a file or data set without a graph, ImportError without the
    library, OSError (also FileNotFoundError) without the data.
    """
    (src, dst, n), graphs = twins.make(name, device) or _read(name, root)
    loop = torch.arange(n, dtype=torch.int32, device=device)
    src, dst = src.to(device, torch.int32), dst.to(device, torch.int32)
    src, dst = torch.cat([src, dst, loop]), torch.cat([dst, src, loop])
    # The transposed graph's reverse CSR has the neighbours of a row in rising order, as libraries keep them.
    csr = Graph.from_coo(dst, src, num_nodes=n, validate=False).reverse_csr()
    return Graph.from_csr(csr.indptr, csr.indices, num_src=n, validate=False), graphs


def _read(name: str, root: Path):
    """(src, dst, number of nodes), each undirected edge once, and the number of graphs."""
    if datasets.is_spec(name):
        edges, graphs = datasets.load(name, root)
    elif Path(name).suffix in (".npz", ".mtx"):
        edges, graphs = _file(Path(name))
    elif name in _REAL:
        edges, graphs = _real(name, root)
    else:
        raise ValueError(
            f"graph: expected a .npz or .mtx file, a data set (ogb:, pyg: or dgl:), er-N-D or one of "
            f"{', '.join(NAMES)}, got {name!r}"
        )
    return _unique_undirected(*edges), graphs


def _unique_undirected(src, dst, n):
    low, high = np.minimum(src, dst).astype(np.int64), np.maximum(src, dst)
    keys = np.unique(low * n + high)
    keys = keys[keys // n != keys % n]
    return torch.from_numpy(keys // n), torch.from_numpy(keys % n), int(n)


def _file(path: Path, graphs: int | None = None):
    """(src, dst, number of nodes) from the file, and the number of graphs. graphs: how many of a batch to
    read; None for all."""
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


def rows(path: Path, count: int | None = None) -> np.ndarray:
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.int64, max_rows=count, ndmin=2)


def _real(name: str, root: Path):
    """A real graph in the form of ``_file``: from the copy in the data folder, else downloaded."""
    folder = data_folder()
    file, count = _COPIES[name]
    if folder is not None and (folder / file).is_file():
        ends, graphs = copy_of(folder / file, count)
        if name in sources.SOURCES:
            sources.verify(name, ends, str(folder / file))
        return ends, graphs
    return datasets.load(ALIASES[name], root) if name in ALIASES else (sources.load(name, root), 1)


def copy_of(path: Path, graphs: int | None):
    """A graph in the form of ``_file``; also from OGB's raw files, which list the graphs' edges in turn."""
    if path.suffix == ".npz":
        return _file(path, graphs)
    nodes = rows(path.with_name("num-node-list.csv.gz"), graphs)[:, 0]
    counts = rows(path.with_name("num-edge-list.csv.gz"), graphs)[:, 0]
    edges = rows(path, int(counts.sum()))
    offset = np.repeat(np.cumsum(nodes) - nodes, counts)
    return (edges[:, 0] + offset, edges[:, 1] + offset, int(nodes.sum())), len(nodes)
