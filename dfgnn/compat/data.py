"""Data sets of citations with the names of ``dgl.data``, which torch_geometric downloads; and files of
graphs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..nn.dgl import DGLError
from .block import DGLBlock
from .create import graph
from .frames import Frame
from .graph import DGLGraph


class CitationGraphDataset:
    """One graph with features ``feat``, whose rows add up to 1, ``label`` and the masks ``train_mask``,
    ``val_mask`` and ``test_mask``, with both directions of each edge and the loops of the raw files; edges
    are sorted.

    name: "cora", "citeseer" or "pubmed".  raw_dir: the folder of torch_geometric's files, by default
    ``~/.dgl``.  transform: applied to the graph when it is read.
    """

    def __init__(
        self, name: str, raw_dir: str | None = None, force_reload: bool = False, verbose: bool = True,
        transform: Callable[[DGLGraph], DGLGraph] | None = None,
    ):  # fmt: skip
        names = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
        if name.lower() not in names:
            raise DGLError(f"CitationGraphDataset: name: expected one of {list(names)}, got {name!r}")
        try:
            from torch_geometric.datasets import Planetoid
        except ImportError as error:
            raise ImportError("dfgnn.compat.data: expected torch_geometric, which reads the files") from error
        found = Planetoid(
            raw_dir or os.path.expanduser("~/.dgl"), names[name.lower()], force_reload=force_reload
        )
        read, self.num_classes, self._transform = found[0], found.num_classes, transform
        path = next(path for path in found.raw_paths if path.endswith(".graph"))
        self._graph = graph(_edges_of(path), num_nodes=read.num_nodes)
        feat = read.x / read.x.sum(1, keepdim=True).masked_fill(read.x.sum(1, keepdim=True) == 0, 1)
        masks = {name: read[name] for name in ("train_mask", "val_mask", "test_mask")}
        self._graph.ndata.update(feat=feat, label=read.y, **masks)
        if verbose:
            print(f"{names[name.lower()]}: {read.num_nodes} nodes, {self._graph.num_edges()} edges")

    @property
    def num_labels(self) -> int:
        return self.num_classes

    def __getitem__(self, idx: int) -> DGLGraph:
        if idx != 0:
            raise IndexError("this data set has one graph")
        return self._graph if self._transform is None else self._transform(self._graph)

    def __len__(self) -> int:
        return 1


def _edges_of(path: str) -> tuple[Tensor, Tensor]:
    """Both directions of each edge of a file that holds a dictionary node -> list of neighbours. (PyG's graph
    lacks the loops.)"""
    with open(path, "rb") as file:
        neighbours = pickle.load(file, encoding="latin1")
    ends = [(u, v) for u, near in neighbours.items() for v in near]
    edges = torch.tensor(ends, dtype=torch.int64).reshape(-1, 2)
    src, dst = torch.cat([edges, edges.flip(1)]).unique(dim=0).unbind(1)
    return src, dst


class CoraGraphDataset(CitationGraphDataset):
    __init__ = partialmethod(CitationGraphDataset.__init__, "cora")  # type: ignore[assignment]


class CiteseerGraphDataset(CitationGraphDataset):
    __init__ = partialmethod(CitationGraphDataset.__init__, "citeseer")  # type: ignore[assignment]


class PubmedGraphDataset(CitationGraphDataset):
    __init__ = partialmethod(CitationGraphDataset.__init__, "pubmed")  # type: ignore[assignment]


_MARK = "dfgnn.compat.save_graphs"


def save_graphs(
    filename: str, g_list: Any, labels: Mapping[str, Tensor] | None = None, formats: Any = None
) -> None:
    """Saves graphs with their features, and named tensors, to a file of PyTorch, which DGL cannot read; makes
    its folder. formats: has no effect."""
    graphs = [g_list] if isinstance(g_list, DGLGraph) else list(g_list)
    if not all(isinstance(g, DGLGraph) for g in graphs):
        raise DGLError("dgl.save_graphs: g_list: expected a DGLGraph or a list of them")
    content = [
        {
            "ntypes": g._ntypes, "sizes": g._sizes, "etypes": g._etypes, "ends": g._ends, "idtype": g.idtype,
            "edges": [found.edge_index for found in g._graphs], "block": g.is_block,
            "nodes": [dict(frame) for frame in g._node_frames],
            "features": [dict(frame) for frame in g._edge_frames],
            "sides": len(g._sides[0]) if g.is_block else None,
        }
        for g in graphs
    ]  # fmt: skip
    os.makedirs(os.path.dirname(os.path.abspath(filename)), exist_ok=True)
    torch.save({"format": _MARK, "graphs": content, "labels": dict(labels or {})}, filename)


def load_graphs(filename: str, idx_list: Any = None) -> tuple[list[DGLGraph], dict[str, Tensor]]:
    """Loads the graphs and tensors of a file of :func:`save_graphs`; idx_list: the places of those wanted."""
    if not os.path.exists(filename):
        raise DGLError(f"dgl.load_graphs: {filename}: expected a file, there is none")
    try:
        content = torch.load(filename, weights_only=True)
    except Exception as error:
        raise DGLError(
            f"dgl.load_graphs: {filename} was not written by dfgnn, which does not read DGL's own format: "
            "with DGL, save g.edges() and the features by torch.save"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _MARK:
        raise DGLError(f"dgl.load_graphs: {filename}: expected a file of save_graphs")
    graphs = [_of_file(saved) for saved in content["graphs"]]
    return (graphs if idx_list is None else [graphs[k] for k in idx_list]), content["labels"]


def _of_file(saved: Mapping[str, Any]) -> DGLGraph:
    sizes, ends = saved["sizes"], [tuple(pair) for pair in saved["ends"]]
    graphs = [
        Graph.from_coo(src, dst, num_src=sizes[begin], num_dst=sizes[end])
        for (src, dst), (begin, end) in zip(saved["edges"], ends)
    ]
    frames = [Frame(n, x) for n, x in zip(sizes, saved["nodes"])]
    edge_frames = [Frame(g.num_edges, x) for g, x in zip(graphs, saved["features"])]
    kind = DGLBlock if saved["block"] else DGLGraph
    return kind._of(
        saved["ntypes"], sizes, saved["etypes"], ends, graphs, saved["idtype"], (frames, edge_frames),
        saved["sides"],
    )  # fmt: skip
