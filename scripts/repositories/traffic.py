"""Traffic: the motion of agents on maps."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from . import Change, absent, put_on_path, random_edges, repository, without_dropout

# The key's and the value's terms of an edge, which `message` computes per edge, as one call.
_ONE_CALL = (
    "dfgnn.functional.dot_attention(edge_index, q, k, v, edge_attr=r, edge_proj=self.to_k_r.weight, "
    "edge_proj_value=self.to_v_r.weight, edge_proj_bias_value=self.to_v_r.bias)"
)


def _lines(file: str) -> tuple[Change, ...]:
    call = "self.propagate(edge_index=edge_index, x_dst=x_dst, q=q, k=k, v=v, r=r)"
    return (
        Change(file, "import torch\n", "import dfgnn, torch\n"),
        Change(file, call, f"self.update({_ONE_CALL}, x_dst)"),
    )


def _qcnet(root: Path):
    put_on_path(root)
    importlib.import_module("torch_geometric")  # which asks for torch_cluster's version
    absent("torch_cluster")
    layer = importlib.import_module("layers.attention_layer").AttentionLayer
    model = torch.nn.ModuleList(layer(128, 8, 16, 0.0, bipartite=False, has_pos_emb=True) for _ in range(2))
    n, e = 2500, 25_000
    x, r, edges, target = torch.randn(n, 128), torch.randn(e, 128), random_edges(n, n, e), torch.randn(n, 128)

    def loss():
        h = x
        for layer in model:
            h = layer(h, r, edges)
        return (h - target).square().mean()

    return model, loss


_QCNET = "AttentionLayer, 2 layers, 8 heads of 16, relative positions of 128; 2,500 agents, 25,000 edges"
repository("QCNet", "ZikangZhou/QCNet", _QCNET)(_qcnet)
repository(
    "QCNet, one call", "ZikangZhou/QCNet", _QCNET, lines=_lines("layers/attention_layer.py"), tolerance=1e-3
)(_qcnet)


def _radius(x, y, r, batch_x=None, batch_y=None, max_num_neighbors=32):
    """torch_cluster's, by all distances: [2, E] of (y's, x's) indices."""
    near = torch.cdist(y, x) <= r
    if batch_x is not None:
        near &= batch_y[:, None] == batch_x
    near &= near.cumsum(1) <= max_num_neighbors
    return near.nonzero().t().contiguous()


def _radius_graph(x, r, batch=None, loop=False, max_num_neighbors=32, **kwargs):
    dst, src = _radius(x, x, r, batch, batch, max_num_neighbors + (not loop))
    keep = slice(None) if loop else src != dst
    return torch.stack([src[keep], dst[keep]])


def _smart(root: Path):
    put_on_path(root)
    os.chdir(root)
    importlib.import_module("torch_geometric")  # which asks for the versions of torch_cluster and others
    absent("waymo_open_dataset", "waymo_open_dataset.protos", "torch_scatter")  # for metrics
    cluster = sys.modules["torch_cluster"] = ModuleType("torch_cluster")
    cluster.radius, cluster.radius_graph = _radius, _radius_graph  # type: ignore[attr-defined]
    config = importlib.import_module("smart.utils.config").load_config_act(
        "configs/train/train_scalable.yaml"
    )
    datamodule = importlib.import_module("smart.datamodules").MultiDataModule
    config.Dataset.update(num_workers=0, pin_memory=False, persistent_workers=False, shuffle=False)
    with tempfile.TemporaryDirectory() as temporary:
        scenes = sorted((root / "data" / "valid_demo").iterdir(), key=lambda path: path.stat().st_size)
        folders = []  # one for each scene, which keeps their order
        for path in scenes[:2]:
            folders.append(Path(temporary, path.stem))
            folders[-1].mkdir()
            (folders[-1] / path.name).symlink_to(path.resolve())
        config.Dataset.update(train_raw_dir=folders, val_raw_dir=folders)
        data = datamodule(**config.Dataset)
        data.setup()
        batches = list(data.train_dataloader())
    model = without_dropout(importlib.import_module("smart.model").SMART(config.Model))
    model.log = lambda *args, **kwargs: None  # there is no trainer
    step = iter(range(1 << 30))

    def loss():
        return model.training_step(batches[next(step) % len(batches)].clone(), 0)

    return model, loss


_SMART = "the model of configs/train on the two smallest scenes of data/valid_demo, in turns, dropout off"
_NEEDS = ("pytorch_lightning", "easydict")
# The name of a transform's method in torch_geometric ≥ 2.3.
_FORWARD = Change("smart/transforms/target_builder.py", "def __call__(", "def forward(")
repository("SMART", "rainmaker22/SMART", _SMART, needs=_NEEDS, to_run_here=(_FORWARD,))(_smart)
repository(
    "SMART, one call", "rainmaker22/SMART", _SMART, needs=_NEEDS, to_run_here=(_FORWARD,), tolerance=1e-3,
    lines=_lines("smart/layers/attention_layer.py"),
)(_smart)  # fmt: skip
