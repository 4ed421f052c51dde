"""Citation networks and other graphs of one type."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from . import Batch, Change, absent, put_on_path, random_edges, repository, without_init


def _exphormer(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "graphgps", "graphgps.layer")
    module = importlib.import_module("graphgps.layer.Exphormer")
    size, n, e = 80, 10_000 * scale, 100_000 * scale
    model = torch.nn.ModuleList(module.ExphormerAttention(size, size, 2, use_bias=False) for _ in range(2))
    x, attr, edges = torch.randn(n, size), torch.randn(e, size), random_edges(n, n, e)
    target = torch.randn(n, size)

    def loss():
        batch = Batch(x=x, expander_edge_attr=attr, expander_edge_index=edges)
        batch.batch = torch.zeros(n, device=x.device)
        for layer in model:
            batch.x = batch.x + layer(batch)
        return (batch.x - target).square().mean()

    return model, loss


_FILE = "graphgps/layer/Exphormer.py"
_EXPHORMER = "ExphormerAttention, 2 layers, 2 heads of 40; 10,000 nodes, 100,000 edges with features of 80"
# PyTorch's own sums in place of torch_scatter's.
_SUMS = (
    Change(_FILE, "from torch_scatter import scatter\n", ""),
    *(
        Change(
            _FILE,
            f"scatter({what}, edge_index[1], dim=0, out=batch.{out}, reduce='add')",
            f"batch.{out}.index_add_(0, edge_index[1], {what})",
        )
        for what, out in (("msg", "wV"), ("score", "Z"))
    ),
)
repository("Exphormer", "hamed1375/Exphormer", _EXPHORMER, to_run_here=_SUMS)(_exphormer)
repository(
    "Exphormer, one call", "hamed1375/Exphormer", _EXPHORMER, to_run_here=_SUMS, tolerance=1e-3,
    lines=(
        Change(_FILE, "import numpy as np\n", "import numpy as np, dfgnn\n"),
        Change(
            _FILE,
            "self.propagate_attention(batch, edge_index)",
            "h_out = dfgnn.functional.edge_product_attention("
            "edge_index, batch.Q_h, batch.K_h, batch.V_h, batch.E, clamp=5.0)",
        ),
        Change(_FILE, "h_out = batch.wV / (batch.Z + 1e-6)", ""),
    ),
)(_exphormer)  # fmt: skip


def _graphmae(kind: str):
    def build(root: Path, scale: int = 1):
        put_on_path(root)
        absent("tensorboardX")
        without_init(root, "graphmae", "graphmae.models")
        dgl = importlib.import_module("dgl")
        model = importlib.import_module("graphmae.models.edcoder").PreModel(
            in_dim=500, num_hidden=256, num_layers=2, nhead=4, nhead_out=1, activation="prelu", feat_drop=0.0,
            attn_drop=0.0, negative_slope=0.2, residual=False, norm=None, mask_rate=0.5, encoder_type=kind,
            decoder_type=kind, loss_fn="sce", alpha_l=3,
        )  # fmt: skip
        n = 5000 * scale
        src, dst = random_edges(n, n, 25_000 * scale)
        graph = dgl.add_self_loop(dgl.remove_self_loop(dgl.graph((src, dst), num_nodes=n)))
        x = torch.randn(n, 500)
        return model, lambda: model(graph, x)[0]

    return build


# copy_src is a name that DGL 1.1 no longer has.
_COPIES = tuple(Change(f"graphmae/models/{name}.py", "fn.copy_src(", "fn.copy_u(") for name in ("gin", "gcn"))
for _kind, _name in (("gat", "GraphMAE"), ("gin", "GraphMAE's GIN")):
    repository(
        f"{_name}", "THUDM/GraphMAE", f"PreModel with {_kind.upper()}, 256 wide; 5,000 nodes, 30,000 edges",
        options=("--as-dgl", "--force"), large=0, to_run_here=_COPIES,
    )(_graphmae(_kind))  # fmt: skip


def _heterophilous(kind: str):
    def build(root: Path, scale: int = 1):
        put_on_path(root)
        dgl = importlib.import_module("dgl")
        model = importlib.import_module("model").Model(
            model_name=kind, num_layers=2, input_dim=300, hidden_dim=128, output_dim=18,
            hidden_dim_multiplier=1, num_heads=8, normalization="LayerNorm", dropout=0.0,
        )  # fmt: skip
        n = 22_662 * scale  # nodes and edges as in the data set Roman-empire
        src, dst = random_edges(n, n, 32_927 * scale)
        graph = dgl.graph((torch.cat([src, dst]), torch.cat([dst, src])), num_nodes=n)
        graph = dgl.add_self_loop(dgl.remove_self_loop(graph))
        x, labels = torch.randn(n, 300), torch.randint(18, (n,))
        return model, lambda: F.cross_entropy(model(graph, x), labels)

    return build


_YANDEX = "yandex-research/heterophilous-graphs"
_ROMAN = "2 layers, 8 heads, 128 wide; 22,662 nodes, 88,512 edges (Roman-empire)"
repository("heterophilous-graphs", _YANDEX, f"GT-sep, {_ROMAN}", large=0)(_heterophilous("GT-sep"))
repository(
    "heterophilous-graphs without DGL", _YANDEX, f"GT-sep, {_ROMAN}", options=("--as-dgl", "--force"), large=0
)(_heterophilous("GT-sep"))


@repository(
    "tunedGNN",
    "LUOyk1999/tunedGNN",
    "MPNNs with GATConv, 2 layers of 64; 13,752 nodes, 491,722 edges (Computers)",
)
def tuned_gnn(root: Path, scale: int = 1):
    put_on_path(root / "medium_graph")
    model = importlib.import_module("model").MPNNs(
        767, 64, 10, local_layers=2, dropout=0.0, ln=True, gnn="gat"
    )
    n = 13_752 * scale
    x, edges, labels = torch.randn(n, 767), random_edges(n, n, 491_722 * scale), torch.randint(10, (n,))
    return model, lambda: F.cross_entropy(model(x, edges), labels)


@repository("DeepRobust", "DSE-MSU/DeepRobust", "its GAT, 8 heads of 8; 2,485 nodes, 10,138 edges (Cora)")
def deep_robust(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "deeprobust", "deeprobust.graph", "deeprobust.graph.defense")
    absent("deeprobust.graph.utils")
    model = importlib.import_module("deeprobust.graph.defense.gat").GAT(1433, 8, 7, dropout=0.0, device="cpu")
    n = 2485 * scale
    data = SimpleNamespace(x=torch.randn(n, 1433), edge_index=random_edges(n, n, 10_138 * scale))
    labels = torch.randint(7, (n,))
    return model, lambda: F.nll_loss(model(data), labels)


def _pytorch_gat(root: Path, scale: int = 1):
    put_on_path(root)
    module = importlib.import_module("models.definitions.GAT")
    model = module.GAT(3, [4, 4, 6], [50, 64, 64, 121], dropout=0.0)
    n, e = 4000 * scale, 56_000 * scale
    x, edges, labels = torch.randn(n, 50), random_edges(n, n, e), torch.randint(2, (n, 121)).float()
    return model, lambda: F.binary_cross_entropy_with_logits(model((x, edges))[0], labels)


_GAT = "models/definitions/GAT.py"
_PPI = "GAT of 3 layers, 4, 4 and 6 heads of 64, 64 and 121; 4,000 nodes, 56,000 edges (two graphs of PPI)"
repository("pytorch-GAT", "gordicaleksa/pytorch-GAT", _PPI)(_pytorch_gat)
