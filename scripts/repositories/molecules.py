"""Molecules and proteins."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from . import absent, nearest, no_gpu, put_on_path, repository, scatter_stand_in


@repository(
    "targetdiff",
    "guanjq/targetdiff",
    "UniTransformer, 2 layers of 9, 16 heads of 8; 400 atoms of 32 neighbours",
)
def targetdiff(root: Path, scale: int = 1):
    put_on_path(root)
    scatter_stand_in()
    module = importlib.import_module("models.uni_transformer")
    model = module.UniTransformerO2TwoUpdateGeneral(
        num_blocks=1, num_layers=2, hidden_dim=128, n_heads=16, k=32, num_r_gaussian=20, edge_feat_dim=4,
        cutoff_mode="knn", ew_net_type="global", x2h_out_fc=False,
    )  # fmt: skip
    n = 400 * scale
    h, x, ligand = torch.randn(n, 128), 6 * torch.randn(n, 3), torch.arange(n) < 25
    # In place of torch_cluster's knn_graph, which a compiler does not see into, either.
    model._connect_edge = torch.compiler.disable(lambda x, ligand, batch: nearest(x, 32))
    noise = torch.randn(n, 3)

    def loss():
        out = model(h, x, ligand, torch.zeros(n, dtype=torch.long, device=x.device))
        return (out["x"] - x - noise).square().mean() + out["h"].square().mean()

    return model, loss


@repository(
    "RFdiffusion",
    "RosettaCommons/RFdiffusion",
    "SE3TransformerWrapper of its top-k configuration; 64 residues, pair features of 64",
    options=("--as-dgl", "--force"),
    large=0,
    needs=("e3nn", "opt_einsum"),
)
def rfdiffusion(root: Path, scale: int = 1):
    put_on_path(root, root / "env" / "SE3Transformer")
    absent("icecream")
    no_gpu()
    util = importlib.import_module("rfdiffusion.util_module")
    network = importlib.import_module("rfdiffusion.SE3_network")
    model = network.SE3TransformerWrapper(
        num_layers=1, num_channels=32, num_degrees=2, n_heads=4, div=4, l0_in_features=64, l0_out_features=64,
        l1_in_features=3, l1_out_features=2, num_edge_features=64,
    )  # fmt: skip
    residues = 64
    xyz, index = 8 * torch.randn(1, residues, 3), torch.arange(residues)[None]
    pair, node = torch.randn(1, residues, residues, 64), torch.randn(residues, 64, 1)
    vectors, target = torch.randn(residues, 3, 3), torch.randn(residues, 2, 3)

    def loss():
        graph, edges = util.make_topk_graph(xyz, pair, index, top_k=32, kmin=9)
        out = model(graph, node, vectors, edges)
        return (out["1"] - target).square().mean() + out["0"].square().mean()

    return model, loss
