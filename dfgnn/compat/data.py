"""Data sets of ``dgl.data``, which torch_geometric downloads and reads; and files of graphs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch

from .block import DGLBlock
from .create import graph
from .edges import between
from .graph import DGLGraph


class _Citation:
    """One graph with ``feat``, ``label`` and masks of nodes, like ``dgl.data``'s: rows of features add up to
    1. raw_dir: the folder of torch_geometric's files, by default ``~/.dgl``."""

    _name = ""

    def __init__(
        self,
        raw_dir: str | None = None,
        transform: Callable[[DGLGraph], DGLGraph] | None = None,
        **_: Any,
    ):
        data = _torch_geometric("Planetoid")(raw_dir or os.path.expanduser("~/.dgl"), self._name)
        self.num_classes, found = data.num_classes, data[0]
        self._graph = graph(tuple(found.edge_index), num_nodes=found.num_nodes)
        feat = found.x / found.x.sum(1, keepdim=True).clamp(min=1)
        self._graph.ndata.update(feat=feat, label=found.y)
        for name in ("train_mask", "val_mask", "test_mask"):
            self._graph.ndata[name] = found[name]
        if transform is not None:
            self._graph = transform(self._graph)

    def __getitem__(self, k: int) -> DGLGraph:
        if k:
            raise IndexError("this data set has one graph")
        return self._graph

    def __len__(self) -> int:
        return 1


class CoraGraphDataset(_Citation):
    _name = "Cora"


class CiteseerGraphDataset(_Citation):
    _name = "CiteSeer"


class PubmedGraphDataset(_Citation):
    _name = "PubMed"


def load_data(args: Any) -> _Citation:
    """The data set named by ``args.dataset``: cora, citeseer or pubmed."""
    known = {"cora": CoraGraphDataset, "citeseer": CiteseerGraphDataset, "pubmed": PubmedGraphDataset}
    if args.dataset not in known:
        raise ValueError(f"dgl.data.load_data: dataset: expected one of {list(known)}, got {args.dataset!r}")
    return known[args.dataset]()


class PPIDataset:
    """Graphs of proteins with ``feat`` and ``label``. mode: "train", "valid" or "test"."""

    num_labels = num_classes = 121

    def __init__(
        self, mode: str = "train", raw_dir: str | None = None,
        transform: Callable[[DGLGraph], DGLGraph] | None = None, **_: Any,
    ):  # fmt: skip
        if mode not in ("train", "valid", "test"):
            raise ValueError(f"PPIDataset: mode: expected train, valid or test, got {mode!r}")
        found = _torch_geometric("PPI")(_folder(raw_dir, "PPI"), {"valid": "val"}.get(mode, mode))
        self._graphs = []
        for sample in found:
            g = graph(tuple(sample.edge_index), num_nodes=sample.num_nodes)
            g.ndata.update(feat=sample.x, label=sample.y)
            self._graphs.append(g if transform is None else transform(g))

    def __getitem__(self, k: int) -> DGLGraph:
        return self._graphs[k]

    def __len__(self) -> int:
        return len(self._graphs)


class TUDataset:
    """Pairs of a graph and its label; graphs may have ``node_labels``, ``node_attr`` and ``edge_attr``."""

    def __init__(
        self, name: str, raw_dir: str | None = None,
        transform: Callable[[DGLGraph], DGLGraph] | None = None, **_: Any,
    ):  # fmt: skip
        found = _torch_geometric("TUDataset")(
            _folder(raw_dir, "TU"), name, use_node_attr=True, use_edge_attr=True
        )
        self.num_classes = self.num_labels = found.num_classes
        attributes, self._samples = found.num_node_attributes, []
        for sample in found:
            g = graph(tuple(sample.edge_index), num_nodes=sample.num_nodes)
            if sample.x is not None:
                if attributes:
                    g.ndata["node_attr"] = sample.x[:, :attributes]
                if sample.x.shape[1] > attributes:
                    g.ndata["node_labels"] = sample.x[:, attributes:].argmax(1, keepdim=True)
            if sample.edge_attr is not None:
                g.edata["edge_attr"] = sample.edge_attr
            self._samples.append((g if transform is None else transform(g), sample.y.view(-1)))

    def __getitem__(self, k: int) -> tuple[DGLGraph, Any]:
        return self._samples[k]

    def __len__(self) -> int:
        return len(self._samples)


def _torch_geometric(name: str) -> Any:
    try:
        from torch_geometric import datasets
    except ImportError as error:
        raise ImportError("dfgnn.compat.data: expected torch_geometric, which reads the files") from error
    return getattr(datasets, name)


def _folder(raw_dir: str | None, name: str) -> str:
    return os.path.join(raw_dir or os.path.expanduser("~/.dgl"), name)


class Subset:
    """The samples of a data set that have these indices."""

    def __init__(self, dataset: Any, indices: Any):
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, k: int) -> Any:
        return self.dataset[int(self.indices[k])]

    def __len__(self) -> int:
        return len(self.indices)


_MARK = "dfgnn.compat.save_graphs"


def save_graphs(
    filename: str, g_list: Any, labels: dict[str, Any] | None = None, formats: Any = None
) -> None:
    """Saves graphs with their features, and named tensors, to a file of PyTorch, which DGL cannot read."""
    graphs = [g_list] if isinstance(g_list, DGLGraph) else list(g_list)
    content = [
        {
            "ends": {r: found.edge_index for r, found in g.graphs.items()},
            "sizes": dict(g._sizes), "block": g.is_block,
            "nodes": {kind: dict(frame) for kind, frame in g._nodes.items()},
            "edges": {r: dict(frame) for r, frame in g._edges.items()},
        }
        for g in graphs
    ]  # fmt: skip
    torch.save({"format": _MARK, "graphs": content, "labels": dict(labels or {})}, filename)


def load_graphs(filename: str, idx_list: Any = None) -> tuple[list[DGLGraph], dict[str, Any]]:
    """Loads the graphs and tensors of a file of :func:`save_graphs`."""
    try:
        content = torch.load(filename, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"dgl.load_graphs: {filename} was not written by dfgnn, which does not read DGL's own format: "
            "with DGL, save g.edges() and the features by torch.save"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _MARK:
        raise ValueError(f"dgl.load_graphs: {filename}: expected a file of save_graphs")
    graphs = []
    for saved in content["graphs"]:
        sizes = saved["sizes"]
        fused = {r: between(ends, sizes[r[0]], sizes[r[2]]) for r, ends in saved["ends"].items()}
        kind = DGLBlock if saved["block"] else DGLGraph
        graphs.append(kind._of(fused, sizes, (saved["nodes"], saved["edges"])))
    chosen = graphs if idx_list is None else [graphs[k] for k in idx_list]
    return chosen, content["labels"]


def register_data_args(parser: argparse.ArgumentParser) -> None:
    """Adds the argument ``--dataset`` of DGL's examples."""
    parser.add_argument("--dataset", type=str, required=False, help="cora, citeseer, pubmed")
