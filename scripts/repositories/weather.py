"""Meshes: weather models and simulations."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import torch

from . import Change, absent, nearest, put_on_path, repository, without_init


def _gencast(root: Path, module: str):
    put_on_path(root)
    packages = "graph_weather", "models", "gencast", "layers", "experimental"
    without_init(root, *(".".join(packages[: k + 1]) for k in range(len(packages))))
    return importlib.import_module(f"graph_weather.models.gencast.layers.{module}")


def _sphere(count: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(count, 3), dim=1)


@repository(
    "graph_weather",
    "openclimatefix/graph_weather",
    "GenCast's CondTransformerBlock, 4 heads of 32, edge_dim 4; mesh of 2,562 nodes, 20,496 edges",
)
def graph_weather(root: Path, scale: int = 1):
    block = _gencast(root, "modules").CondTransformerBlock
    model = block(input_dim=128, output_dim=32, num_heads=4, conditioning_dim=16, edges_dim=4)
    n = 2562 * scale
    edges = nearest(_sphere(n), 8)
    x, attr, noise = torch.randn(n, 128), torch.randn(edges.shape[1], 4), torch.randn(n, 16)
    target = torch.randn(n, 128)

    def loss():
        return (model(x, edges, attr, noise) - target).square().mean()

    return model, loss


@repository(
    "graph_weather, dgl.sparse",
    "openclimatefix/graph_weather",
    "GenCast's SparseTransformer, 4 heads of 128; mesh of 2,562 nodes of 216 neighbours",
    options=("--as-dgl", "--force"),
    large=0,
    dgl_sparse=True,
)
def graph_weather_sparse(root: Path, scale: int = 1):
    block = _gencast(root, "experimental.sparse_transformer").SparseTransformer
    model = block(conditioning_dim=16, input_dim=512, output_dim=512, num_heads=4)
    edges = nearest(_sphere(2562), 216).flip(0)
    x, noise, target = torch.randn(2562, 512), torch.randn(2562, 16), torch.randn(2562, 512)

    def loss():
        return (model(x, edges, noise) - target).square().mean()

    return model, loss


@repository(
    "graph-physics, dgl.sparse",
    "DonsetPG/graph-physics",
    "2 Transformer blocks, 4 heads of 32; simulation mesh of 5,000 nodes, 30,000 edges",
    options=("--as-dgl", "--force"),
    large=0,
    dgl_sparse=True,
)
def graph_physics(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "graphphysics", "graphphysics.models")
    block = importlib.import_module("graphphysics.models.layers").Transformer
    model = torch.nn.ModuleList(block(128, 128, 4) for _ in range(2))
    sparse = importlib.import_module("dgl.sparse")
    n = 5000 * scale
    edges = nearest(torch.rand(n, 2), 6).flip(0)
    x, target = torch.randn(n, 128), torch.randn(n, 128)

    def loss():
        adj = sparse.spmatrix(indices=edges, shape=(n, n))
        h = x
        for layer in model:
            h = layer(h, adj)
        return (h - target).square().mean()

    return model, loss


def _anemoi(root: Path, scale: int = 1):
    put_on_path(root / "models" / "src")
    packages = "anemoi", "anemoi.models", "anemoi.models.layers", "anemoi.models.distributed"
    without_init(root / "models" / "src", *packages, "anemoi.models.triton")
    absent("anemoi.utils", "anemoi.utils.config", "hydra", "hydra.errors", "hydra.utils")
    block = importlib.import_module("anemoi.models.layers.block").GraphTransformerProcessorBlock
    shards = importlib.import_module("anemoi.models.distributed.shapes").GraphShardInfo()
    nn = torch.nn
    kernels = SimpleNamespace(
        Linear=nn.Linear,
        LayerNorm=nn.LayerNorm,
        QueryNorm=nn.LayerNorm,
        KeyNorm=nn.LayerNorm,
        Activation=nn.GELU,
    )
    model = block(
        in_channels=256, hidden_dim=512, out_channels=256, num_heads=16, edge_dim=11, layer_kernels=kernels,
        graph_attention_backend="pyg",
    )  # fmt: skip
    n = 5248 * scale  # the points of an o32 grid
    edges = nearest(_sphere(n), 8)
    x, attr, target = torch.randn(n, 256), torch.randn(edges.shape[1], 11), torch.randn(n, 256)

    def loss():
        out = model(x, attr, edges, shards, 1, n)
        out = out[0] if isinstance(out, tuple) else out
        return (out - target).square().mean()

    return model, loss


_O32 = "GraphTransformerProcessorBlock, 16 heads of 16; o32 mesh of 5,248 nodes, 41,984 edges"
_BLOCK = "models/src/anemoi/models/layers/block.py"
repository("anemoi", "ecmwf/anemoi-core", _O32, needs=("einops",))(_anemoi)
repository(
    "anemoi, one call", "ecmwf/anemoi-core", _O32, needs=("einops",), tolerance=1e-3,
    lines=(
        Change(_BLOCK, "import torch\n", "import dfgnn, torch\n"),
        Change(
            _BLOCK,
            "self.conv = GraphTransformerConv(out_channels=self.out_channels_conv)",
            "self.conv = lambda q, k, v, e, edges, size: "
            "dfgnn.functional.dot_attention(edges, q, k, v, edge=dfgnn.functional.EdgeTerm(e, e))",
        ),
    ),
)(_anemoi)  # fmt: skip
