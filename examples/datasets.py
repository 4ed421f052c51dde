"""The data sets of the training scripts: from files below ``--root``, or downloaded to it by torch_geometric
or OGB."""

import contextlib
import gzip
import shutil
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

import dfgnn
from dfgnn.runtime.programs import downloading, refuse

SPLITS = ("train", "valid", "test")
# The only functions that torch.load may call for a pickled integer array, by NumPy 2's and NumPy 1's names.
_MAKE_ARRAY = np.empty(0).__reduce__()[0]
_ARRAY = [np.ndarray, np.dtype, type(np.dtype(np.int64)), _MAKE_ARRAY]
_ARRAY.append((_MAKE_ARRAY, "numpy.core.multiarray._reconstruct"))


class Nodes(SimpleNamespace):
    """x [N, F], edge_index [2, E], y [N] and splits, a list of {"train", "valid", "test": indices}."""

    def to(self, device):
        splits = [{k: i.to(device) for k, i in split.items()} for split in self.splits]
        return Nodes(
            x=self.x.to(device), edge_index=self.edge_index.to(device), y=self.y.to(device), splits=splits
        )


@contextlib.contextmanager
def _readable(folder: Path, name: str):
    """A folder for a loader that writes ``processed`` beside ``raw``, so that ``raw`` is not changed."""
    ready = (folder / name / "processed" / "data.pt").is_file()
    if not (folder / name / "raw").is_dir() or ready:
        yield str(folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(folder / name / "raw", Path(scratch, name, "raw"))
        yield scratch


@contextlib.contextmanager
def _download(name: str, root, folder=None):
    """A context with a folder for a loader that downloads to ``folder`` (default: ``root``); a failure ends
    the program with one line, and leaves no incomplete files."""
    try:
        with downloading(Path(root if folder is None else folder)) as place:
            yield str(place)
    except OSError as error:  # also those of urllib and aiohttp
        raise SystemExit(f"--root: {name} is not in {root}, and to download it failed: {error}") from error


def planetoid(name: str, root) -> Nodes:
    """Cora, CiteSeer or PubMed with the public split; rows of features add up to 1."""
    from torch_geometric.datasets import Planetoid

    folder = Path(root, "planetoid") if Path(root, "planetoid").is_dir() else Path(root)
    with _download(name, root, folder) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the age of the pickled files
        with _readable(Path(place), name) as readable:
            data = Planetoid(readable, name)[0]
    split = {k: mask.nonzero().squeeze(1) for k, mask in _masks(data)}
    total = data.x.sum(1, keepdim=True)
    x = data.x / torch.where(total > 0, total, 1)
    return Nodes(x=x, edge_index=data.edge_index, y=data.y, splits=[split])


def _masks(data):
    return ("train", data.train_mask), ("valid", data.val_mask), ("test", data.test_mask)


# Names of data sets -> (class of torch_geometric.datasets, its name there).
DOWNLOADS = {
    "amazon-computers": ("Amazon", "Computers"),
    "amazon-photo": ("Amazon", "Photo"),
    "coauthor-cs": ("Coauthor", "CS"),
    "coauthor-physics": ("Coauthor", "Physics"),
    "minesweeper": ("HeterophilousGraphDataset", "Minesweeper"),
    "tolokers": ("HeterophilousGraphDataset", "Tolokers"),
    "roman-empire": ("HeterophilousGraphDataset", "Roman-empire"),
    "amazon-ratings": ("HeterophilousGraphDataset", "Amazon-ratings"),
}


def nodes(name: str, root) -> Nodes:
    """A data set of ``root/nodes/*.npz`` with its published splits; else torch_geometric's of that name,
    split 60/20/20 at random if it has no split.

    Edges in both directions, and self loops; bags of words (amazon, coauthor) with rows that add up to 1.
    """
    from torch_geometric import datasets, utils

    path = Path(root, "nodes", f"{name}.npz")
    if path.is_file():
        with np.load(path) as file:
            found = {key: file[key] for key in file.files}
        x = torch.from_numpy(csr_to_dense(found, "x"))
        edges, y = torch.from_numpy(found["edges"].astype(np.int64)), torch.from_numpy(found["y"]).long()
        if "train" in found:
            splits = [{k: torch.from_numpy(found[k]).long() for k in SPLITS}]
        else:
            kinds = {"train": "train_masks", "valid": "val_masks", "test": "test_masks"}
            splits = [
                {k: torch.from_numpy(np.flatnonzero(found[mask][i])) for k, mask in kinds.items()}
                for i in range(len(found["train_masks"]))
            ]
    elif name in DOWNLOADS:
        cls, theirs = DOWNLOADS[name]
        with _download(name, root, Path(root, cls)) as place:
            data = getattr(datasets, cls)(place, theirs)[0]
        x, edges, y = data.x, data.edge_index, data.y
        if "train_mask" in data:
            masks = dict(_masks(data))
            splits = [{k: mask[:, i].nonzero().squeeze(1) for k, mask in masks.items()} for i in range(10)]
        else:
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
            parts = order.split([int(0.6 * len(y)), int(0.2 * len(y)), len(y)])[:2]
            splits = [{"train": parts[0], "valid": parts[1], "test": order[sum(map(len, parts)) :]}]
    else:
        refuse(f"--dataset: no {path}, and none of {', '.join(DOWNLOADS)}, got {name}")
    if name.startswith(("amazon-c", "amazon-p", "coauthor")):
        x = x / x.sum(1, keepdim=True).clamp(min=1)
    edges = utils.remove_self_loops(utils.to_undirected(edges, num_nodes=len(y)))[0]
    return Nodes(x=x, edge_index=utils.add_self_loops(edges, num_nodes=len(y))[0], y=y, splits=splits)


def csr_to_dense(arrays, name: str) -> np.ndarray:
    """float32, of the arrays ``name_indptr``, ``name_indices``, ``name_data`` and ``name_shape``."""
    indptr, shape = arrays[f"{name}_indptr"], arrays[f"{name}_shape"]
    dense = np.zeros(tuple(shape), dtype=np.float32)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    dense[rows, arrays[f"{name}_indices"]] = arrays[f"{name}_data"]
    return dense


def read_csv(path: Path, dtype=np.int64) -> np.ndarray:
    """A table of OGB's raw files, without a header."""
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=dtype, ndmin=2)


def ogb_folder(name: str, root, download) -> Path:
    """The folder with OGB's raw files of a data set; ``download(root)`` has OGB fetch them."""
    places = [Path(root, "ogb", name.replace("-", "_")), Path(root, name.replace("-", "_"))]
    if not any((place / "raw").is_dir() for place in places):
        with _download(name, root) as place:
            download(place)
    return next(place for place in places if (place / "raw").is_dir())


class GraphSet:
    """Many small graphs, kept on one device as one; a batch is gathered there.

    Tensors of nodes (``x``, ...) and of edges (``edge_index`` with each graph's own numbers, ...) lie one
    graph after another.
    """

    def __init__(self, num_nodes, num_edges, edge_index, node: dict, edge: dict, graph: dict, device="cpu"):
        self.device = torch.device(device)
        self.num_nodes, self.num_edges = (torch.as_tensor(n).long() for n in (num_nodes, num_edges))
        self._first = [n.cumsum(0) - n for n in (self.num_nodes, self.num_edges)]
        self.edge_index = edge_index.to(self.device)
        self.node, self.edge, self.graph = (
            {k: x.to(self.device) for k, x in part.items()} for part in (node, edge, graph)
        )

    def __len__(self) -> int:
        return len(self.num_nodes)

    def batch(self, ids: Tensor):
        """The graphs with these numbers (on the CPU), side by side, as torch_geometric's loaders give
        them."""
        from torch_geometric.data import Batch

        nodes, node_graph, node_start = self._rows(0, self.num_nodes, ids)
        edges, edge_graph, _ = self._rows(1, self.num_edges, ids)
        # Edges are stored as int32, of which half as many bytes are read; layers take int64.
        edge_index = self.edge_index[:, edges].long() + node_start[edge_graph]
        batch = Batch(
            edge_index=edge_index,
            batch=node_graph,
            **{k: x[nodes] for k, x in self.node.items()},
            **{k: x[edges] for k, x in self.edge.items()},
            **{k: x[ids.to(self.device)] for k, x in self.graph.items()},
        )
        batch._num_graphs = len(ids)
        return batch

    def _rows(self, kind: int, sizes: Tensor, ids: Tensor):
        """(rows of these graphs' tensors, for each row the position of its graph in ``ids``, the first row of
        each graph in the batch). kind: 0 for nodes, 1 for edges."""
        size, first = sizes[ids], self._first[kind][ids]
        total, start = int(size.sum()), size.cumsum(0) - size
        # One copy to the device, and no wait: the sizes are known on the CPU.
        size, shift, start = torch.stack([size, first - start, start]).to(self.device, non_blocking=True)
        owner = torch.repeat_interleave(torch.arange(len(ids), device=self.device), size, output_size=total)
        return torch.arange(total, device=self.device) + shift[owner], owner, start

    def batches(self, ids: Tensor, batch_size: int, shuffle: bool = False):
        """Batches of these graphs, in an order that torch's generator draws."""
        order = ids[torch.randperm(len(ids))] if shuffle else ids
        return (self.batch(part) for part in order.split(batch_size))


def molhiv(root, device="cpu") -> tuple[GraphSet, dict[str, Tensor]]:
    """ogbg-molhiv: x [N, 9] and edge_attr [E, 3], integers; y [G, 1]; the scaffold split."""

    def download(place):
        from ogb.graphproppred import GraphPropPredDataset

        GraphPropPredDataset("ogbg-molhiv", place)

    folder = ogb_folder("ogbg-molhiv", root, download)
    names = ("num-node-list", "num-edge-list", "edge", "node-feat", "edge-feat", "graph-label")
    num_nodes, num_edges, edge, x, edge_attr, y = (
        torch.from_numpy(read_csv(folder / "raw" / f"{name}.csv.gz")) for name in names
    )
    # Each bond is stored once; both directions of it follow each other.
    both = torch.stack([edge, edge.flip(1)], 1).reshape(-1, 2).t().contiguous()
    data = GraphSet(
        num_nodes[:, 0], 2 * num_edges[:, 0], both.int(), {"x": x},
        {"edge_attr": edge_attr.repeat_interleave(2, 0)}, {"y": y.float()}, device,
    )  # fmt: skip
    split = {
        k: torch.from_numpy(read_csv(folder / "split" / "scaffold" / f"{k}.csv.gz")[:, 0]) for k in SPLITS
    }
    return data, split


def arxiv(root) -> Nodes:
    """ogbn-arxiv: edges in both directions and self loops, the split by time; x only if OGB's file is
    there."""
    from torch_geometric.utils import add_self_loops, to_undirected

    def download(place):
        from ogb.nodeproppred import NodePropPredDataset

        NodePropPredDataset("ogbn-arxiv", place)

    folder = ogb_folder("ogbn-arxiv", root, download)
    y = torch.from_numpy(read_csv(folder / "raw" / "node-label.csv.gz")[:, 0])
    edges = torch.from_numpy(read_csv(folder / "raw" / "edge.csv.gz")).t()
    edges = add_self_loops(to_undirected(edges, num_nodes=len(y)), num_nodes=len(y))[0]
    split = {k: torch.from_numpy(read_csv(folder / "split" / "time" / f"{k}.csv.gz")[:, 0]) for k in SPLITS}
    features = folder / "raw" / "node-feat.csv.gz"
    x = torch.from_numpy(read_csv(features, np.float32)) if features.is_file() else None
    return Nodes(x=x, edge_index=edges, y=y, splits=[split])


def structural_features(edge_index: Tensor, num_nodes: int, dim: int = 128, seed: int = 0) -> Tensor:
    """[N, dim], from the edges alone: random vectors averaged over 1, 2 and 3 steps of random walks (FastRP,
    Chen et al., CIKM 2019), and the logarithm of the degree as the last column."""
    generator = torch.Generator().manual_seed(seed)
    dst = edge_index[1]
    degree = torch.bincount(dst, minlength=num_nodes).float().clamp(min=1)
    graph, weight_of = dfgnn.Graph.from_edge_index(edge_index, num_nodes), (1 / degree)[dst]
    x = torch.randn(num_nodes, dim - 1, generator=generator) / degree.sqrt().unsqueeze(1)
    parts = []
    for weight in (0.5, 1.0, 1.0):
        x = dfgnn.functional.spmm(graph, weight_of, x.unsqueeze(1)).squeeze(1)
        parts.append(weight * torch.nn.functional.normalize(x))
    total = torch.stack(parts).sum(0)
    total = (total - total.mean(0)) / total.std(0)
    level = degree.log()
    return torch.cat([total, ((level - level.mean()) / level.std()).unsqueeze(1)], 1)


def ddi(root) -> dict[str, Tensor]:
    """ogbl-ddi: "train" [2, E] (each pair once), and pairs [2, n] "valid", "valid_neg", "test",
    "test_neg"."""

    def download(place):
        from ogb.linkproppred import LinkPropPredDataset

        LinkPropPredDataset("ogbl-ddi", place)

    folder = ogb_folder("ogbl-ddi", root, download)
    found = {"train": torch.from_numpy(read_csv(folder / "raw" / "edge.csv.gz")).t().contiguous()}
    for split in ("valid", "test"):
        with torch.serialization.safe_globals(_ARRAY):
            pairs = torch.load(folder / "split" / "target" / f"{split}.pt", weights_only=True)
        found[split], found[f"{split}_neg"] = (
            torch.as_tensor(pairs[k]).t().contiguous() for k in ("edge", "edge_neg")
        )
    return found


def dblp(root) -> SimpleNamespace:
    """Authors, papers, terms and conferences: ``x`` by type (conferences have none: ones), ``edges`` by
    (source, relation, destination) in both directions, ``y`` and ``split`` of the authors."""
    path = Path(root, "nodes", "dblp.npz")
    if not path.is_file():
        from torch_geometric.datasets import DBLP

        with _download("DBLP", root, Path(root, "DBLP")) as place:
            data = DBLP(place)[0]
        split = {k: mask.nonzero().squeeze(1) for k, mask in _masks(data["author"])}
        data["conference"].x = torch.ones(data["conference"].num_nodes, 1)
        return SimpleNamespace(x=data.x_dict, edges=data.edge_index_dict, y=data["author"].y, split=split)
    with np.load(path) as file:
        found = {key: file[key] for key in file.files}
    x = {"author": csr_to_dense(found, "a"), "paper": csr_to_dense(found, "p"), "term": found["t"]}
    x = {k: torch.from_numpy(np.asarray(v, dtype=np.float32)) for k, v in x.items()}
    edges = {}
    for name, other in (("pa", "author"), ("pc", "conference"), ("pt", "term")):
        pairs = torch.from_numpy(found[name].astype(np.int64))
        pairs = pairs if len(pairs) == 2 else pairs.t()
        edges["paper", "to", other] = pairs.contiguous()
        edges[other, "to", "paper"] = pairs.flip(0).contiguous()
    x["conference"] = torch.ones(int(edges["paper", "to", "conference"][1].max()) + 1, 1)
    split = {k: torch.from_numpy(found[k[:3]] if k == "valid" else found[k]).long() for k in SPLITS}
    return SimpleNamespace(x=x, edges=edges, y=torch.from_numpy(found["y"]).long(), split=split)
