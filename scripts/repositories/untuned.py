"""Repositories that were picked after dfgnn was written, so that nothing in it was made for them."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from . import Change, absent, put_on_path, random_edges, repository, without_dropout, without_init


def _molecules(count: int, atoms: int, bonds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Edges [2, 2 · bonds · count] of a batch of graphs, in both directions, and the graph of each node."""
    edges = torch.cat([random_edges(atoms, atoms, bonds) + atoms * k for k in range(count)], 1)
    return torch.cat([edges, edges.flip(0)], 1), torch.arange(count).repeat_interleave(atoms)


@repository(
    "GraphDTA",
    "thinng/GraphDTA",
    "GATNet, GATConv of 10 heads of 78 and of 1 of 128; batch of 128 molecules of 34 atoms, and proteins",
)
def graph_dta(root: Path, scale: int = 1):
    put_on_path(root)
    # eval() also switches off functional dropout, which the argument does not.
    model = importlib.import_module("models.gat").GATNet(dropout=0.0).eval()
    count = 128 * scale
    edges, batch = _molecules(count, 34, 37)
    data = SimpleNamespace(x=torch.rand(count * 34, 78), edge_index=edges, batch=batch)
    data.target, affinity = torch.randint(26, (count, 1000)), torch.rand(count, 1)
    return model, lambda: F.mse_loss(model(data), affinity)


@repository(
    "GraphMVP",
    "chao1224/GraphMVP",
    "GNN of its GATConv, 5 layers, 2 heads of 300, bond embeddings; batch of 128 molecules of 25 atoms",
    to_run_here=(
        Change(
            "src_classification/models/molecule_gnn_model.py", "from torch_scatter import scatter_add", ""
        ),
    ),
)
def graph_mvp(root: Path, scale: int = 1):
    put_on_path(root / "src_classification")
    without_init(root / "src_classification", "models")
    model = importlib.import_module("models.molecule_gnn_model").GNN(5, 300, gnn_type="gat")
    edges, _ = _molecules(128 * scale, 25, 27)
    n, e = 128 * 25 * scale, edges.shape[1]
    x = torch.stack([torch.randint(119, (n,)), torch.randint(3, (n,))], 1)
    attr = torch.stack([torch.randint(4, (e,)), torch.randint(3, (e,))], 1)
    target = torch.randn(n, 300)
    return model, lambda: (model(x, edges, attr) - target).square().mean()


def _antifraud(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "methods", "methods.gtan")
    dgl = importlib.import_module("dgl")
    module = importlib.import_module("methods.gtan.gtan_model")
    model = module.GraphAttnModel(
        in_feats=126, hidden_dim=64, n_layers=2, n_classes=2, heads=[4, 4], activation=torch.nn.PReLU(),
        n2v_feat=False, drop=[0.0, 0.0],
    )  # fmt: skip
    counts, roots = (12_000, 2000, 128), 128  # sources of each block, then the seeds
    x, marks = torch.randn(counts[0], 126), torch.randint(3, (counts[0],))
    labels = torch.randint(2, (roots,))

    def loss():
        blocks = []
        for src, dst in itertools.pairwise(counts):
            heads = torch.arange(dst).repeat_interleave(12)
            ends = torch.cat([torch.arange(dst), torch.randint(src, (len(heads),))])
            blocks.append(dgl.create_block((ends, torch.cat([torch.arange(dst), heads])), src, dst))
        return F.cross_entropy(model(blocks, x, marks), labels)

    return model, loss


_GTAN = "GTAN, 2 layers, 4 heads of 64; two new sampled blocks of 26,000 and 1,664 edges per step"
_FRAUD = "AI4Risk/antifraud"
repository("antifraud", _FRAUD, _GTAN, large=0)(_antifraud)
repository("antifraud without DGL", _FRAUD, _GTAN, options=("--as-dgl", "--force"), large=0)(_antifraud)


def _benchmarking(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "nets", "nets.SBMs_node_classification", "layers")
    dgl = importlib.import_module("dgl")
    network = importlib.import_module("nets.SBMs_node_classification.gat_net").GATNet
    model = network({
        "in_dim": 3, "hidden_dim": 19, "out_dim": 152, "n_classes": 2, "n_heads": 8, "in_feat_dropout": 0.0,
        "dropout": 0.0, "L": 4, "readout": "mean", "batch_norm": True, "residual": True, "device": "cpu",
    })  # fmt: skip
    n, e = 117, 4750  # PATTERN's mean graph
    graphs = [dgl.graph(tuple(random_edges(n, n, e)), num_nodes=n) for _ in range(16)]
    kinds, labels = torch.randint(3, (16 * n,)), torch.randint(2, (16 * n,))

    def loss():
        return model.loss(model(dgl.batch(graphs), kinds, None), labels)

    return model, loss


_SBM = "GAT, 4 layers, 8 heads of 19; batch of 16 graphs of 117 nodes and 4,750 edges (PATTERN)"
_BENCHMARKING = "graphdeeplearning/benchmarking-gnns"
repository("benchmarking-gnns", _BENCHMARKING, _SBM, large=0)(_benchmarking)
repository("benchmarking-gnns without DGL", _BENCHMARKING, _SBM, options=("--as-dgl", "--force"), large=0)(
    _benchmarking
)


@repository(
    "DySAT",
    "FeiGSSS/DySAT_pytorch",
    "DySAT, structural attention of 16 heads of 8 over 8 snapshots of 2,000 nodes and 12,000 edges",
    to_run_here=(
        Change("models/layers.py", "from torch_scatter import", "from torch_geometric.utils import"),
    ),
)
def dysat(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "models")
    absent("utils", "utils.utilities")
    data = importlib.import_module("torch_geometric.data").Data
    settings = SimpleNamespace(
        window=-1, structural_head_config="16", structural_layer_config="128", temporal_head_config="16",
        temporal_layer_config="128", spatial_drop=0.0, temporal_drop=0.0, residual=True,
    )  # fmt: skip
    model = importlib.import_module("models.model").DySAT(settings, 143, 8)
    n, e = 2000 * scale, 12_000 * scale
    edges = [random_edges(n, n, e) for _ in range(8)]
    x, target = torch.randn(n, 143), torch.randn(n, 8, 128)

    def loss():
        graphs = [data(x=x, edge_index=pairs, edge_weight=torch.ones(e, device=x.device)) for pairs in edges]
        return (model(graphs) - target).square().mean()

    return model, loss


@repository(
    "Polynormer",
    "cornell-zhang/Polynormer",
    "Polynormer, 3 GATConv of 8 heads of 32, then its global attention; 6,000 nodes, 46,500 edges",
)
def polynormer(root: Path, scale: int = 1):
    put_on_path(root)
    model = importlib.import_module("model").Polynormer(
        300, 32, 5, local_layers=3, global_layers=1, in_dropout=0.0, dropout=0.0, global_dropout=0.0, heads=8
    )
    model._global = True  # the state after the repository's warm-up epochs: global attention is on
    n = 6000 * scale
    x, edges, labels = torch.randn(n, 300), random_edges(n, n, 46_500 * scale), torch.randint(5, (n,))
    return model, lambda: F.cross_entropy(model(x, edges), labels)


@repository(
    "G-Retriever",
    "XiaoxinHe/G-Retriever",
    "GraphTransformer, 4 TransformerConv of 4 heads of 256, edges of 1,024; a batch of 8 graphs of 20 nodes",
)
def g_retriever(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "src", "src.model")
    network = importlib.import_module("src.model.gnn").GraphTransformer
    model = without_dropout(network(1024, 1024, 1024, 4, 0.0, num_heads=4))
    edges, _ = _molecules(8 * scale, 20, 20)
    n, e = 160 * scale, edges.shape[1]
    x, attr, target = torch.randn(n, 1024), torch.randn(e, 1024), torch.randn(n, 1024)
    return model, lambda: (model(x, edges, attr)[0] - target).square().mean()


@repository(
    "DiffAttConv",
    "A-ICLR/ICLR-2026-submit",
    "MPNNs of DiffAttConv, 3 layers of 64, 4 heads; 22,662 nodes, 65,854 edges (Roman-empire)",
    needs=("scipy",),
)
def difference_attention(root: Path, scale: int = 1):
    put_on_path(root / "heterophilic_test" / "medium_graph")
    network = importlib.import_module("model").MPNNs
    model = network(300, 64, 18, local_layers=3, dropout=0.0, heads=4, res=True, ln=True, gnn="DTrans")
    n = 22_662 * scale
    x, labels = torch.randn(n, 300), torch.randint(18, (n,))
    half = random_edges(n, n, 32_927 * scale)
    edges = torch.cat([half, half.flip(0)], 1)
    return model, lambda: F.cross_entropy(model(x, edges), labels)


@repository(
    "predicting-choice",
    "wilsoncwc/predicting-choice",
    "GAINConv (attention of GAT in GIN), 3 layers of 1 head of 128; streets: 20,000 nodes, 50,000 edges",
    # A comment that torch_geometric reads since, and that does not name all arguments.
    to_run_here=(Change("models/gain.py", "# propagate_type: (x: OptPairTensor)", ""),),
)
def predicting_choice(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "models")
    absent("torch_sparse")
    # Not its GAIN, a BasicGNN, which was written for a PyG of 2022 and fails with today's.
    layer, linear = importlib.import_module("models.gain").GAINConv, torch.nn.Linear
    widths = (24, 128, 128, 10)  # of one head each: its bias fits no other number
    model = torch.nn.ModuleList(layer(linear(b, b), a, b) for a, b in itertools.pairwise(widths))
    n = 20_000 * scale
    x, edges, labels = torch.randn(n, 24), random_edges(n, n, 50_000 * scale), torch.randint(10, (n,))

    def loss():
        h = x
        for layer in model:
            h = layer(h, edges).relu()
        return F.cross_entropy(h, labels)

    return model, loss


@repository(
    "method-embedding",
    "VitalyRomanov/method-embedding",
    "GAT of DGL's GATConv, 3 layers, 8, 8 and 1 heads of 64; source code as 20,000 nodes, 80,000 edges",
    large=0,
)
def method_embedding(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "SourceCodeTools", "SourceCodeTools.models", "SourceCodeTools.models.graph")
    absent("SourceCodeTools.models.Embedder")
    dgl = importlib.import_module("dgl")
    network = importlib.import_module("SourceCodeTools.models.graph.gat").GAT
    n = 20_000 * scale
    graph = dgl.add_self_loop(dgl.graph(tuple(random_edges(n, n, 60_000 * scale)), num_nodes=n))
    model = network(graph, 2, 100, 64, 50, [8, 8, 1], F.elu, 0.0, 0.0, 0.2, False)
    torch.nn.init.normal_(model.embed)
    labels = torch.randint(50, (n,))
    return model, lambda: F.cross_entropy(model(), labels)
