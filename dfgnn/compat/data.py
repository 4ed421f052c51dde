"""DGL's citation data sets, read by torch_geometric, which downloads them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from .graph import DGLGraph, graph


class _Citation:
    """One graph with ``feat``, ``label`` and masks of nodes, as of ``dgl.data``: features with rows that add
    up to 1. raw_dir: the folder that holds, or is to hold, torch_geometric's files; default ``~/.dgl``."""

    _name = ""

    def __init__(
        self,
        raw_dir: str | None = None,
        transform: Callable[[DGLGraph], DGLGraph] | None = None,
        **_: Any,
    ):
        try:
            from torch_geometric.datasets import Planetoid
        except ImportError as error:
            raise ImportError("dfgnn.compat.data: expected torch_geometric, which reads the files") from error
        data = Planetoid(raw_dir or os.path.expanduser("~/.dgl"), self._name)
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


def register_data_args(parser: argparse.ArgumentParser) -> None:
    """``--dataset``, as DGL's examples have it."""
    parser.add_argument("--dataset", type=str, required=False, help="cora, citeseer, pubmed")
