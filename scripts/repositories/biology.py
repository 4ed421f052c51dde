"""Proteins, tissues and knowledge graphs, in repositories of 2023 to 2025."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from . import (
    Change,
    loaded,
    nearest,
    put_on_path,
    random_edges,
    repository,
    scatter_stand_in,
    without_init,
)


@repository(
    "PiFold",
    "A4Bio/PiFold",
    "StructureEncoder, 4 layers of 10, 4 heads of 32; batch of 8 proteins of 300 residues of 30 neighbours; "
    "torch_scatter's functions by torch_geometric's",
    to_run_here=(
        Change("methods/prodesign_module.py", "from utils import gather_nodes", "gather_nodes = None"),
    ),
)
def pifold(root: Path, scale: int = 1):
    scatter_stand_in()
    model = loaded(root / "methods/prodesign_module.py").StructureEncoder(128, 4)
    proteins, residues = 8 * scale, 300
    n = proteins * residues
    chains = torch.cumsum(torch.randn(proteins, residues, 3), 1)
    edges = torch.cat([nearest(chain, 30) + k * residues for k, chain in enumerate(chains)], 1)
    src, dst = edges
    batch = torch.arange(n) // residues
    x, attr = torch.randn(n, 128), torch.randn(len(src), 128)
    target = torch.randint(20, (n,))
    model.readout = torch.nn.Linear(128, 20)

    def loss():
        h, _ = model(x, attr, torch.stack([dst, src]), batch)
        return F.cross_entropy(model.readout(h), target)

    return model, loss


@repository(
    "STAGATE",
    "QIFEIDKN/STAGATE_pyG",
    "STAGATE, 3,000 genes, 512 and 30 hidden, decoder of the encoder's weights and attention; 4,200 spots of "
    "6 neighbours",
    to_run_here=(
        Change(
            "STAGATE_pyG/gat_conv.py",
            "from torch_sparse import SparseTensor, set_diag",
            "from torch_geometric.typing import SparseTensor",
        ),
    ),
)
def stagate(root: Path, scale: int = 1):
    without_init(root, "STAGATE_pyG")
    put_on_path(root)
    model = importlib.import_module("STAGATE_pyG.STAGATE").STAGATE([3000, 512, 30])
    n = 4200 * scale
    genes, edges = torch.randn(n, 3000).relu(), nearest(torch.rand(n, 2), 6)

    def loss():
        _, found = model(genes, edges)
        return F.mse_loss(genes, found)

    return model, loss


@repository(
    "DiffKG",
    "HKUDS/DiffKG",
    "its RGAT, 64 wide, 2 hops; 40,000 entities, 300,000 triples of 40 relations; torch_scatter's functions "
    "by torch_geometric's",
    large=4,
)
def diffkg(root: Path, scale: int = 1):
    scatter_stand_in()
    put_on_path(root)
    given, sys.argv = sys.argv, sys.argv[:1]  # its parameters are read when it is imported
    try:
        layer = importlib.import_module("Model").RGAT(64, 2, 0.0)
    finally:
        sys.argv = given
    n, e, relations = 40_000 * scale, 300_000 * scale, 40
    layer.entities = torch.nn.Parameter(torch.randn(n, 64) / 8)
    layer.relations = torch.nn.Parameter(torch.randn(relations, 64))
    triples = [random_edges(n, n, e), torch.randint(relations, (e,))]
    users, items = torch.randn(4096, 64), torch.randint(n, (2, 4096))

    def loss():
        found = layer(layer.entities, layer.relations, triples)
        scores = (users * (found[items[0]] - found[items[1]])).sum(-1)
        return -F.logsigmoid(scores).mean()

    return layer, loss
