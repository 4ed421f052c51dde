"""Traffic: the motion of agents on maps."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

import torch

from . import Change, Steps, absent, put_on_path, random_edges, repository

# The key's and the value's terms of an edge, which `message` computes per edge, as one call.
_ONE_CALL = (
    "dfgnn.functional.dot_attention(edge_index, q, k, v, edge=dfgnn.functional.EdgeTerm("
    "dfgnn.functional.Projected(r, self.to_k_r.weight), "
    "dfgnn.functional.Projected(r, self.to_v_r.weight, self.to_v_r.bias)))"
)


def _lines(file: str) -> tuple[Change, ...]:
    call = "self.propagate(edge_index=edge_index, x_dst=x_dst, q=q, k=k, v=v, r=r)"
    return (
        Change(file, "import torch\n", "import dfgnn, torch\n"),
        Change(file, call, f"self.update({_ONE_CALL}, x_dst)"),
    )


def _qcnet(root: Path, scale: int = 1):
    put_on_path(root)
    importlib.import_module("torch_geometric")  # before the stand-in, whose version it could not read
    absent("torch_cluster")
    layer = importlib.import_module("layers.attention_layer").AttentionLayer
    model = torch.nn.ModuleList(layer(128, 8, 16, 0.0, bipartite=False, has_pos_emb=True) for _ in range(2))
    n, e = 2500 * scale, 25_000 * scale
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
    """torch_cluster.radius by the distances of all pairs: [2, E], indices of y and of x."""
    near = torch.cdist(y, x) <= r
    if batch_x is not None:
        near &= batch_y[:, None] == batch_x
    near &= near.cumsum(1) <= max_num_neighbors
    return near.nonzero().t().contiguous()


def _radius_graph(x, r, batch=None, loop=False, max_num_neighbors=32, **kwargs):
    dst, src = _radius(x, x, r, batch, batch, max_num_neighbors + (not loop))
    keep = slice(None) if loop else src != dst
    return torch.stack([src[keep], dst[keep]])


def _smart(root: Path, scale: int = 1):
    put_on_path(root)
    os.chdir(root)
    importlib.import_module("torch_geometric")  # before the stand-ins, whose versions it could not read
    absent("waymo_open_dataset", "waymo_open_dataset.protos", "torch_scatter")  # for metrics
    cluster = sys.modules["torch_cluster"] = ModuleType("torch_cluster")
    cluster.radius, cluster.radius_graph = _radius, _radius_graph  # type: ignore[attr-defined]
    lightning = importlib.import_module("pytorch_lightning")

    def run(steps: Steps) -> None:
        class Turns(lightning.Callback):
            def on_train_start(self, trainer, module):
                steps.ready()

            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                if not steps.begin():
                    sys.exit()

            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                steps.end(outputs["loss"])

        class Trainer(lightning.Trainer):
            def __init__(self, *args, callbacks, **options):  # without validation, which generates traffic
                options["check_val_every_n_epoch"] = 1 << 30
                super().__init__(*args, callbacks=[*callbacks, Turns()], **options)

        lightning.Trainer = Trainer
        sys.argv = ["train.py", "--save_ckpt_path", "checkpoints"]
        runpy.run_path("train.py", run_name="__main__")

    return run


_SMART = "train.py with configs/train on the eleven scenes of data/valid_demo, dropout off; means over scenes"
_CONFIG = "configs/train/train_scalable.yaml"
_HERE = (
    # The name of a transform's method in torch_geometric ≥ 2.3.
    Change("smart/transforms/target_builder.py", "def __call__(", "def forward("),
    # The scenes in the same order in every epoch and on both sides.
    Change("smart/datasets/scalable_dataset.py", "os.listdir(raw_dir)", "sorted(os.listdir(raw_dir))"),
    Change(_CONFIG, "shuffle: True", "shuffle: False"),
    Change(_CONFIG, 'accelerator: "gpu"', 'accelerator: "cpu"'),
    Change(_CONFIG, "dropout: 0.1", "dropout: 0.0"),
)
_NEEDS = ("pytorch_lightning", "easydict")
repository("SMART", "rainmaker22/SMART", _SMART, needs=_NEEDS, to_run_here=_HERE, epoch=11, large=0)(_smart)
repository(
    "SMART, one call", "rainmaker22/SMART", _SMART, needs=_NEEDS, to_run_here=_HERE, epoch=11, large=0,
    tolerance=1e-3,
    lines=_lines("smart/layers/attention_layer.py"),
)(_smart)  # fmt: skip
