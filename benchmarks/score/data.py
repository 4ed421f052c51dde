"""Graphs by name: those of dfgnn.bench, and the small ones that most people train.

``Cora``, ``CiteSeer``, ``PubMed``, ``minesweeper`` and ``N molecules`` come from the folder DFGNN_DATA;
a name with ~ is a random graph of as many nodes and edges. ``random-N-E`` has N nodes and E directed edges;
``cliques-G`` is a batch of G graphs of 16 to 64 nodes in which all pairs are connected.
"""

import pickle
import re
from pathlib import Path

import numpy as np
import torch

from dfgnn import Graph
from dfgnn.bench import graphs, twins

# name: nodes, directed edges without loops, largest degree
SIZES = {
    "Cora": (2_708, 10_556, 168),
    "CiteSeer": (3_327, 9_104, 99),
    "PubMed": (19_717, 88_648, 171),
    "minesweeper": (10_000, 78_804, 8),
}
# A real graph and the random one that stands for it where its data is not there.
TWINS = {"ogbn-arxiv": "arxiv~", "molhiv": "molhiv~", "collab": "collab~", **{n: f"{n}~" for n in SIZES}}


def chosen(name: str) -> str | None:
    """The name, or that of its twin where there is no copy of the data; None where it has no twin."""
    if name.endswith("~") or name.startswith(("random-", "cliques-")) or _has_copy(name):
        return name
    return f"{name}~" if name.endswith("molecules") else TWINS.get(name)


def _has_copy(name: str) -> bool:
    folder = graphs.data_folder()
    if folder is None:
        return False
    if name.endswith("molecules"):
        return (folder / "ogb/ogbg_molhiv/raw/edge.csv.gz").is_file()
    if name in SIZES:
        return _file(folder, name).is_file()
    return graphs.has_copy(name)


def _file(folder: Path, name: str) -> Path:
    if name == "minesweeper":
        return folder / "nodes" / "minesweeper.npz"
    return folder / "planetoid" / name / "raw" / f"ind.{name.lower()}.graph"


def load(name: str, device: torch.device, root: Path = graphs.ROOT) -> Graph:
    """The graph, symmetrised and with self loops (random-N-E as it was drawn).

    Raises OSError without the data, ValueError for an unknown name.
    """
    if sizes := re.fullmatch(r"random-(\d+)-(\d+)", name):
        nodes, edges = map(int, sizes.groups())
        ends = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
        return Graph.from_edge_index(ends.to(device), num_nodes=nodes)
    plain = name.removesuffix("~")
    if found := re.fullmatch(r"(\d+) molecules", plain):
        return _molecules(int(found[1]), name.endswith("~"), device, root)
    if found := re.fullmatch(r"cliques-(\d+)", name):
        sizes = torch.randint(16, 65, (int(found[1]),), generator=torch.Generator().manual_seed(0))
        return cliques(sizes.tolist(), device)
    if plain in SIZES:
        ends = twins.power_law(*SIZES[plain]) if name.endswith("~") else _read(graphs.data_folder(), name)
        return _with_loops(*ends, device)
    return graphs.load(name, device, root)


def cliques(sizes: list[int], device) -> Graph:
    """A batch of complete graphs with these numbers of nodes: an edge leads from each node to each, and to
    itself."""
    ends, start = [], 0
    for n in sizes:
        ends.append(torch.cartesian_prod(torch.arange(n), torch.arange(n)).T.flip(0) + start)
        start += n
    graph = Graph.from_edge_index(torch.cat(ends, 1).to(device), num_nodes=start)
    return graph


def _molecules(count: int, random: bool, device, root: Path) -> Graph:
    """The first ``count`` molecules of ogbg-molhiv, or chains of atoms like them."""
    if random:
        return _with_loops(*twins.molhiv(count), device)
    folder = graphs.data_folder()
    if folder is None:
        raise OSError(
            f"{count} molecules: set DFGNN_DATA to a folder with ogb/ogbg_molhiv (docs/benchmarks.md)"
        )
    (src, dst, n), _ = graphs.copy_of(folder / "ogb/ogbg_molhiv/raw/edge.csv.gz", count)
    return _with_loops(torch.as_tensor(src), torch.as_tensor(dst), n, device)


def _read(folder: Path | None, name: str):
    if folder is None:
        raise OSError(f"{name}: set DFGNN_DATA to a folder that has it (docs/benchmarks.md)")
    if name == "minesweeper":
        with np.load(_file(folder, name)) as file:
            return (*torch.from_numpy(file["edges"].astype(np.int64)), len(file["y"]))
    with open(_file(folder, name), "rb") as file:
        neighbours = pickle.load(file, encoding="latin1")
    src = np.concatenate([np.asarray(n, dtype=np.int64) for n in neighbours.values()])
    dst = np.repeat(np.fromiter(neighbours, np.int64), [len(n) for n in neighbours.values()])
    return torch.from_numpy(src), torch.from_numpy(dst), len(neighbours)


def _with_loops(src, dst, n: int, device) -> Graph:
    src, dst = src.long(), dst.long()
    keys = torch.cat([src * n + dst, dst * n + src]).unique()
    ends = torch.stack([keys // n, keys % n])
    loops = torch.arange(n).expand(2, -1)
    return Graph.from_edge_index(torch.cat([ends[:, ends[0] != ends[1]], loops], 1).to(device), num_nodes=n)
