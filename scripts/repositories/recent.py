"""Repositories of 2025 and 2026, most of them, read for the table of a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F

from . import (
    Change,
    absent,
    loaded,
    nearest,
    put_on_path,
    random_edges,
    repository,
    scatter_stand_in,
    without_dropout,
    without_init,
)


def _lightning() -> None:
    """A stand-in for lightning, of which the modules below use only that its modules are modules."""
    if "lightning" not in sys.modules and importlib.util.find_spec("lightning") is None:
        module = sys.modules["lightning"] = ModuleType("lightning")
        module.LightningModule = torch.nn.Module  # type: ignore[attr-defined]


@repository(
    "gridfm-graphkit",
    "gridfm/gridfm-graphkit",
    "GNN_TransformerConv, 6 layers, 8 heads of 48, lines of 2; batch of 4 grids of 2,000 buses",
    large=4,
)
def gridfm(root: Path, scale: int = 1):
    module = loaded(root / "gridfm_graphkit/models/graphTransformer.py")
    model = module.GNN_TransformerConv(9, 48, 6, 2, 6, heads=8)
    n, e = 8000 * scale, 24_000 * scale
    x, edges, attr, target = torch.randn(n, 9), random_edges(n, n, e), torch.randn(e, 2), torch.randn(n, 6)
    return model, lambda: (model(x, None, edges, attr, None) - target).square().mean()


@repository(
    "novae",
    "MICS-Lab/novae",
    "GraphEncoder (GATv2 of PyG's models), 10 layers, 8 heads of 16; batch of 512 neighbourhoods of 20 cells",
)
def novae(root: Path, scale: int = 1):
    put_on_path(root)
    _lightning()
    without_init(root, "novae", "novae.module")
    pool = importlib.import_module("novae.module.aggregate").AttentionAggregation
    sys.modules["novae.module"].AttentionAggregation = pool  # type: ignore[attr-defined]
    model = importlib.import_module("novae.module.encode").GraphEncoder(100, 128, 10, 64, 8, 0)
    batches, cells = 512 * scale, 20
    n = batches * cells
    edges = torch.cat([random_edges(cells, cells, 60) + cells * k for k in range(64)], 1)
    offset = torch.arange(batches // 64).repeat_interleave(edges.shape[1]) * (64 * cells)
    edges = edges.repeat(1, batches // 64) + offset
    data = SimpleNamespace(x=torch.randn(n, 100), edge_index=edges, edge_attr=torch.rand(edges.shape[1], 1))
    data.batch = torch.arange(batches).repeat_interleave(cells)
    target = torch.randn(batches, 64)
    return model, lambda: (model(data) - target).square().mean()


@repository(
    "segger",
    "EliHei2/segger_dev",
    "Segger by to_hetero, 5 GATv2Conv(-1, -1) of 3 heads of 32; 40,000 transcripts and 3,000 nuclei",
    large=4,
)
def segger(root: Path, scale: int = 1):
    made = loaded(root / "src/segger/models/segger_model.py").Segger(500)
    hetero = importlib.import_module("torch_geometric.nn").to_hetero
    relations = [("tx", "neighbors", "tx"), ("tx", "belongs", "bd")]
    counts = {"tx": 40_000 * scale, "bd": 3000 * scale}
    model = hetero(made, (list(counts), relations), aggr="sum")
    x = {"tx": torch.randint(500, (counts["tx"],)).float(), "bd": torch.randn(counts["bd"], 4)}
    edges = {
        relations[0]: random_edges(counts["tx"], counts["tx"], 200_000 * scale),
        relations[1]: random_edges(counts["tx"], counts["bd"], 40_000 * scale),
    }
    labels = torch.randint(2, (40_000 * scale,)).float()

    def loss():
        z = model(x, edges)
        src, dst = edges[relations[1]]
        scores = (z["tx"][src] * z["bd"][dst]).sum(-1)
        return F.binary_cross_entropy_with_logits(scores, labels)

    with torch.no_grad():
        loss()  # the sizes of its lazy layers
    return model, loss


@repository(
    "HydraGNN",
    "ORNL/HydraGNN",
    "HydraGPSConv of GATv2Conv and all pairs, 3 layers, 4 heads of 16; batch of 64 molecules of 25 atoms",
    large=4,
)
def hydra(root: Path, scale: int = 1):
    convolution = loaded(root / "hydragnn/globalAtt/gps.py").HydraGPSConv
    nn = importlib.import_module("torch_geometric.nn")

    def local(width: int, heads: int):  # as in hydragnn/models/GATStack.py
        gat = nn.GATv2Conv(width, width, heads, edge_dim=8)
        arguments = "inv_node_feat, equiv_node_feat, edge_index, edge_attr"
        both = "inv_node_feat, equiv_node_feat"
        return nn.Sequential(arguments, [
            (gat, "inv_node_feat, edge_index, edge_attr -> inv_node_feat"),
            (torch.nn.Linear(width * heads, width), "inv_node_feat -> inv_node_feat"),
            (lambda x, y: [x, y], f"{both} -> {both}"),
        ])  # fmt: skip

    model = torch.nn.ModuleList(convolution(64, local(64, 4), heads=4) for _ in range(3))
    atoms, count = 25, 64 * scale
    n = atoms * count
    edges = torch.cat([random_edges(atoms, atoms, 100) + atoms * k for k in range(count)], 1)
    x, attr, target = torch.randn(n, 64), torch.randn(edges.shape[1], 8), torch.randn(n, 64)
    batch, pos = torch.arange(count).repeat_interleave(atoms), torch.randn(n, 3)

    def loss():
        h, v = x, pos
        for layer in model:
            h, v = layer(h, v, graph_batch=batch, edge_index=edges, edge_attr=attr)
        return (h - target).square().mean()

    return model, loss


_GIGL = "gigl/src/common/models/pyg/nn/conv"


@repository(
    "GiGL's SimpleHGN",
    "Snapchat/GiGL",
    "SimpleHGNConv, 2 layers, 4 heads of 32, 4 edge types, edges of 16; 10,000 nodes, 100,000 edges",
)
def gigl_simple_hgn(root: Path, scale: int = 1):
    convolution = loaded(root / _GIGL / "simplehgn_conv.py").SimpleHGNConv
    model = torch.nn.ModuleList(convolution(128, 32, 4, 16, num_heads=4) for _ in range(2))
    n, e = 10_000 * scale, 100_000 * scale
    x, edges, kinds, attr = (
        torch.randn(n, 128),
        random_edges(n, n, e),
        torch.randint(4, (e,)),
        torch.randn(e, 16),
    )
    kinds, target = kinds.sort().values, torch.randn(n, 128)

    def loss():
        h = x
        for layer in model:
            h = F.elu(layer(edges, h, kinds, attr))
        return (h - target).square().mean()

    return model, loss


@repository(
    "GiGL's HGT",
    "Snapchat/GiGL",
    "HGTConv, 2 layers, 4 heads of 32; HeteroData of users, items and stories, 150,000 edges",
    slow_to_compile=True,
)
def gigl_hgt(root: Path, scale: int = 1):
    convolution = loaded(root / _GIGL / "hgt_conv.py").HGTConv
    counts = {name: count * scale for name, count in (("user", 8000), ("item", 4000), ("story", 2000))}
    kinds = [("user", "views", "item"), ("item", "viewed", "user"), ("user", "posts", "story")]
    kinds += [("story", "posted", "user"), ("user", "knows", "user")]
    model = torch.nn.ModuleList(convolution(128, 128, (list(counts), kinds), heads=4) for _ in range(2))
    x = {name: torch.randn(count, 128) for name, count in counts.items()}
    edges = {kind: random_edges(counts[kind[0]], counts[kind[2]], 30_000 * scale) for kind in kinds}
    target = torch.randn(counts["user"], 128)

    def loss():
        h = x
        for layer in model:
            h = {name: F.gelu(value) for name, value in layer(h, edges).items()}
        return (h["user"] - target).square().mean() + h["item"].square().mean()

    return model, loss


@repository(
    "torchmd-net",
    "torchmd/torchmd-net",
    "TorchMD_ET, 6 layers, 8 heads of 16, SiLU times a cut-off; 64 molecules of 21 atoms, all pairs",
    tolerance=1e-3,
    slow_to_compile=True,
)
def torchmd(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "torchmdnet", "torchmdnet.models")
    absent("torchmdnet.extensions", "torchmdnet.extensions.ops")
    model = importlib.import_module("torchmdnet.models.torchmd_et").TorchMD_ET()
    atoms, count = 21, 64 * scale
    n = atoms * count
    pairs = torch.cartesian_prod(torch.arange(atoms), torch.arange(atoms)).t()
    offset = (atoms * torch.arange(count)).repeat_interleave(atoms * atoms)
    edges = pairs.repeat(1, count) + offset

    class Distance(torch.nn.Module):  # in place of the extension that searches neighbours
        def forward(self, pos, batch, box):
            vector = pos[edges[0]] - pos[edges[1]]
            return edges, vector.square().sum(-1).add(1e-12).sqrt(), vector

    model.distance = Distance()
    z, pos, target = torch.randint(1, 10, (n,)), 1.5 * torch.randn(n, 3), torch.randn(n, 128)
    batch = torch.arange(count).repeat_interleave(atoms)
    return model, lambda: (model(z, pos, batch)[0] - target).square().mean()


def _tgm(root: Path, name: str):
    put_on_path(root)
    without_init(root, "tgm", "tgm.nn", "tgm.nn.modules", "tgm.nn.encoder")
    return importlib.import_module(f"tgm.nn.{name}")


@repository(
    "tgm's TGN",
    "tgm-team/tgm",
    "GraphAttentionEmbedding, TransformerConv of 2 heads of 50, edges of 272; a new batch of 10,000 events",
)
def tgm_tgn(root: Path, scale: int = 1):
    encoder = _tgm(root, "encoder.tgn")
    times = importlib.import_module("tgm.nn.modules.time_encoding").Time2Vec(time_dim=100)
    model = without_dropout(encoder.GraphAttentionEmbedding(100, 100, 172, times))
    n, e = 2000 * scale, 10_000 * scale
    x = torch.randn(n, 100, requires_grad=True)
    device, target = x.device, torch.randn(n, 100)

    def loss():
        edges = torch.randint(n, (2, e), device=device)
        last, now = torch.rand(n, device=device), torch.rand(e, device=device)
        return (model(x, last, edges, now, torch.randn(e, 172, device=device)) - target).square().mean()

    return model, loss


@repository(
    "tgm's TGAT",
    "tgm-team/tgm",
    "TemporalAttention of padded neighbours, 2 heads; 6,000 roots of 20 neighbours",
)
def tgm_tgat(root: Path, scale: int = 1):
    attention = _tgm(root, "modules.attention").TemporalAttention
    model = attention(2, 100, 172, 100, dropout=0.0)
    n, k = 6000 * scale, 20
    inputs = (torch.randn(n, 100), torch.randn(n, 100), torch.randn(n, k, 172), torch.randn(n, k, 100))
    inputs += (torch.randn(n, k, 100), torch.rand(n, k) < 0.8)
    target = torch.randn(n, 200)
    return model, lambda: (model(*inputs) - target).square().mean()


@repository(
    "KGRec",
    "HKUDS/KGRec",
    "AttnHGCN, 2 hops, 2 heads of 32; 20,000 users, 40,000 entities, 200,000 triples, 200,000 clicks; "
    "torch_scatter's sums by torch_geometric's",
    large=4,
)
def kgrec(root: Path, scale: int = 1):
    scatter_stand_in()
    users, entities, e = 20_000 * scale, 40_000 * scale, 200_000 * scale
    model = loaded(root / "modules/AttnHGCN.py").AttnHGCN(64, 2, users, 10, 0.0, 0.0)
    model.user, model.entity = (
        torch.nn.Parameter(torch.nn.init.xavier_uniform_(torch.empty(n, 64))) for n in (users, entities)
    )
    triples, kinds = random_edges(entities, entities, e), torch.randint(1, 10, (e,))
    clicks = random_edges(users, entities // 2, e)
    weights, users_of, items = (
        torch.rand(e),
        torch.randint(users, (4096,)),
        torch.randint(entities // 2, (2, 4096)),
    )

    def loss():
        entity, user = model(model.user, model.entity, triples, kinds, clicks, weights)
        scores = (user[users_of] * (entity[items[0]] - entity[items[1]])).sum(-1)
        return -F.logsigmoid(scores).mean()

    return model, loss


def _own_attention_layer(file: str, package: str):
    def build(root: Path, scale: int = 1):
        put_on_path(root)
        names = package.split(".")
        without_init(root, *(".".join(names[: k + 1]) for k in range(len(names))))
        utils = package.rpartition(".")[0] + ".utils"
        absent(utils)
        sys.modules[utils].weight_init = lambda module: None  # PyTorch's own initial values
        layer = importlib.import_module(f"{package}.{file}").AttentionLayer
        model = torch.nn.ModuleList(
            layer(128, 8, 16, 0.0, bipartite=False, has_pos_emb=True) for _ in range(2)
        )
        n, e = 2500 * scale, 50_000 * scale
        x, r, edges = torch.randn(n, 128), torch.randn(e, 128), random_edges(n, n, e)
        target = torch.randn(n, 128)

        def loss():
            h = x
            for layer in model:
                h = layer(h, r, edges)
            return (h - target).square().mean()

        return model, loss

    return build


repository(
    "catk", "NVlabs/catk",
    "AttentionLayer, 2 layers, 8 heads of 16, relative positions of 128; 2,500 agents, 50,000 edges",
)(_own_attention_layer("attention_layer", "src.smart.layers"))  # fmt: skip


@repository(
    "HiVT",
    "ZikangZhou/HiVT",
    "AAEncoder, 8 heads of 8, neighbours in each agent's frame; 8,000 agents, 80,000 edges",
    large=4,
)
def hivt(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "models")
    absent("pytorch_lightning")
    embedding = importlib.import_module("models.embedding")
    for name in ("MultipleInputEmbedding", "SingleInputEmbedding"):
        setattr(sys.modules["models"], name, getattr(embedding, name))
    encoder = importlib.import_module("models.local_encoder").AAEncoder
    model = encoder(20, 2, 2, 64, num_heads=8, dropout=0.0)
    n, e = 8000 * scale, 80_000 * scale
    x, attr, past, target = torch.randn(n, 2), torch.randn(e, 2), torch.rand(n) < 0.1, torch.randn(n, 64)
    edges, angle = random_edges(n, n, e), 6.28 * torch.rand(n)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2)

    def loss():
        out = model(x=x, t=0, edge_index=edges, edge_attr=attr, bos_mask=past, rotate_mat=turn)
        return (out - target).square().mean()

    return model, loss


@repository(
    "Matformer",
    "YKQ98/Matformer",
    "MatformerConv, 5 layers, 4 heads of 128, gates for a softmax; 64 crystals of 10 atoms, 12 neighbours",
    to_run_here=(
        Change(
            "matformer/models/transformer.py",
            "from torch_sparse import SparseTensor",
            "SparseTensor = Tensor",
        ),
        Change("matformer/models/transformer.py", "from matformer.models.utils import softmax", ""),
        Change("matformer/models/transformer.py", "from torch_scatter import scatter", ""),
    ),
)
def matformer(root: Path, scale: int = 1):
    convolution = loaded(root / "matformer/models/transformer.py").MatformerConv
    model = torch.nn.ModuleList(convolution(128, 128, 4, edge_dim=128) for _ in range(5))
    n, k = 640 * scale, 12
    edges = nearest(torch.randn(n, 3), k)
    x, attr, target = torch.randn(n, 128), torch.randn(n * k, 128), torch.randn(n, 128)

    def loss():
        h = x
        for layer in model:
            h = layer(h, edges, attr)
        return (h - target).square().mean()

    return model, loss
