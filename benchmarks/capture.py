"""Training steps as CUDA graphs: torch_geometric eager, dfgnn eager, and dfgnn.capture, on one GPU.

    python benchmarks/capture.py [--data FOLDER] [--json benchmarks/results/h100-capture.json]

``full``         2 layers of GAT, GATv2 and TransformerConv on Cora, PubMed and one batch of 64 molecules
``molhiv``       an epoch of ogbg-molhiv, shuffled, in batches of 32 and of 512: 4 layers of GATConv with
                 batch norms and mean pooling. With the DataLoader of torch_geometric, and captured also with
                 a loader that gathers the tensors of the whole data set; the loaders alone beside them
``minesweeper``  15 layers of GATConv with residuals, normalisation and dropout, as tunedGNN trains

A step is loss, backward and a fused Adam. Contestants take turns; times are medians of rounds. Loss curves
of the first steps, from the same weights and without dropout, are compared. ``--data`` has the files of
Planetoid (planetoid/), OGB (ogb/ogbg_molhiv/raw) and nodes/minesweeper.npz.
"""

import argparse
import copy
import gzip
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_mean_pool

import dfgnn
from dfgnn.bench import report

DEVICE = torch.device("cuda")
LAYERS = ("GATConv", "GATv2Conv", "TransformerConv")
# Values of the nine features of an atom, as in ogb.utils.features.
ATOMS = (119, 5, 12, 12, 10, 6, 6, 2, 2)
ROUNDS = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("DFGNN_DATA")
    parser.add_argument("--data", type=Path, default=default, required=default is None)
    parser.add_argument("--only", nargs="+", choices=("full", "molhiv", "minesweeper"))
    parser.add_argument("--compiled", action="store_true", help="also torch_geometric under torch.compile")
    parser.add_argument("--commit", help="to write into the JSON; default: that of the source tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


# ---- data ------------------------------------------------------------------------------------------------


def planetoid(root: Path, name: str) -> Data:
    from torch_geometric.io import read_planetoid_data

    return read_planetoid_data(str(root / "planetoid" / name / "raw"), name)


def table(path: Path, dtype=np.int64) -> np.ndarray:
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=dtype, ndmin=2)


class Molecules:
    """ogbg-molhiv as it is published; every edge is listed once and meant both ways."""

    def __init__(self, root: Path):
        raw = root / "ogb" / "ogbg_molhiv" / "raw"
        self.x = torch.from_numpy(table(raw / "node-feat.csv.gz"))
        ends = torch.from_numpy(table(raw / "edge.csv.gz")).t()
        nodes = torch.from_numpy(table(raw / "num-node-list.csv.gz")).view(-1)
        edges = 2 * torch.from_numpy(table(raw / "num-edge-list.csv.gz")).view(-1)
        self.edge_index = torch.stack([ends, ends.flip(0)], -1).flatten(1).contiguous()
        self.y = torch.from_numpy(table(raw / "graph-label.csv.gz", np.float32)).view(-1, 1)
        self.num_nodes, self.num_edges = nodes, edges
        self.first_node = nodes.cumsum(0) - nodes
        self.first_edge = edges.cumsum(0) - edges
        self.train = torch.from_numpy(table(raw.parent / "split" / "scaffold" / "train.csv.gz")).view(-1)

    def graphs(self, ids: Tensor) -> list[Data]:
        found = []
        for k in ids.tolist():
            n, e = int(self.first_node[k]), int(self.first_edge[k])
            found.append(
                Data(
                    x=self.x[n : n + int(self.num_nodes[k])],
                    edge_index=self.edge_index[:, e : e + int(self.num_edges[k])],
                    y=self.y[k : k + 1],
                )
            )
        return found

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        """The batch of these graphs, from the tensors of all."""
        nodes, edges = self.num_nodes[ids], self.num_edges[ids]
        starts = nodes.cumsum(0) - nodes
        of_node = torch.repeat_interleave(nodes)
        of_edge = torch.repeat_interleave(edges)
        node = torch.arange(len(of_node)) + (self.first_node[ids] - starts)[of_node]
        edge = torch.arange(len(of_edge)) + (self.first_edge[ids] - (edges.cumsum(0) - edges))[of_edge]
        return {
            "x": self.x[node],
            "edge_index": self.edge_index[:, edge] + starts[of_edge],
            "y": self.y[ids],
            "batch": of_node,
        }


class TensorLoader:
    """Batches by gathering from the tensors of the whole data set."""

    def __init__(self, molecules: Molecules, ids: Tensor, batch_size: int, generator: torch.Generator):
        self.molecules, self.ids, self.batch_size, self.generator = molecules, ids, batch_size, generator

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = self.ids[torch.randperm(len(self.ids), generator=self.generator)]
        for ids in order.split(self.batch_size):
            yield self.molecules.gather(ids)


# ---- models ----------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    def __init__(self, layer: str, features: int, classes: int, pooled: bool):
        super().__init__()
        make = getattr(pyg, layer)
        self.first = make(features, 8, heads=8)
        self.second = make(64, 8, heads=8)
        self.out = nn.Linear(64, classes)
        self.pooled = pooled

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None) -> Tensor:
        x = self.second(self.first(x, edge_index).relu(), edge_index).relu()
        return self.out(global_mean_pool(x, batch) if self.pooled else x)


class MoleculeNet(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4):
        super().__init__()
        self.register_buffer("starts", torch.tensor([0, *np.cumsum(ATOMS)[:-1]]))
        self.atoms = nn.Embedding(sum(ATOMS), width)
        self.convs = nn.ModuleList(pyg.GATConv(width, width // 4, heads=4) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.atoms(x + self.starts).sum(1)
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x, edge_index)).relu() + x
        return self.out(global_mean_pool(x, batch))


class Deep(nn.Module):
    """As tunedGNN's (Luo, Shi and Wu, NeurIPS 2024) for minesweeper."""

    def __init__(self, features: int, classes: int, width: int = 64, layers: int = 15, dropout: float = 0.2):
        super().__init__()
        sizes = [features, *[width] * (layers - 1)]
        self.convs = nn.ModuleList(
            pyg.GATConv(size, width, add_self_loops=False, bias=False) for size in sizes
        )
        self.lins = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in sizes)
        self.out, self.dropout = nn.Linear(width, classes), dropout

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        for conv, lin, norm in zip(self.convs, self.lins, self.norms):
            x = F.dropout(norm(conv(x, edge_index) + lin(x)).relu(), self.dropout, self.training)
        return self.out(x)


# ---- contestants -----------------------------------------------------------------------------------------


def field(batch, name: str):
    return batch[name] if isinstance(batch, dict) or name in batch else None


def make_step(kind: str, model: nn.Module, loss: Callable) -> Callable:
    """pyg, pyg compiled, dfgnn, captured."""
    model = copy.deepcopy(model).to(DEVICE)
    if kind in ("dfgnn", "captured"):
        dfgnn.accelerate(model)
    called = torch.compile(model, dynamic=True) if kind == "pyg compiled" else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def loss_fn(batch):
        return loss(called(field(batch, "x"), field(batch, "edge_index"), field(batch, "batch")), batch)

    if kind == "captured":
        return dfgnn.capture(loss_fn, model, optimizer)

    def step(batch):
        if isinstance(batch, dict):
            batch = {key: value.to(DEVICE, non_blocking=True) for key, value in batch.items()}
        else:
            batch = batch.to(DEVICE, non_blocking=True)
        optimizer.zero_grad()
        value = loss_fn(batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def take_turns(steps: dict[str, Callable], batch, count: int = 20) -> dict[str, float]:
    """Milliseconds per step."""
    for step in steps.values():
        for _ in range(5):
            step(batch)
    found: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(ROUNDS):
        for key, step in steps.items():
            found[key].append(seconds(lambda step=step: [step(batch) for _ in range(count)]) / count * 1e3)
    return {key: round(statistics.median(values), 4) for key, values in found.items()}


def curve_difference(make: Callable[[str], Callable], batches: list) -> dict[str, float]:
    """The largest difference of the losses from torch_geometric's, relative to their mean; and that of its
    own second run, which adds up by atomics in another order."""
    curves = []
    for kind in ("pyg", "captured", "pyg"):
        step = make(kind)
        curves.append(torch.stack([step(batch) for batch in batches]).double().cpu())
    exact = curves[0]
    captured, again = (float((curve - exact).abs().max() / exact.mean()) for curve in curves[1:])
    return {"captured": captured, "pyg again": again}


def row(name: str, times: dict[str, float], **more) -> dict:
    base = times["pyg"]
    speedups = {key: round(base / value, 2) for key, value in times.items() if key != "pyg"}
    text = "  ".join(f"{key} {value:.3f} ms" for key, value in times.items())
    print(f"{name:32} {text}   {speedups}  {more or ''}", flush=True)
    return {"name": name, "ms": times, "speedup": speedups, **more}


# ---- sets ------------------------------------------------------------------------------------------------


def full(args: argparse.Namespace, molecules: Molecules) -> list[dict]:
    graphs = {name: planetoid(args.data, name) for name in ("Cora", "PubMed")}
    graphs["64 molecules"] = Batch.from_data_list(molecules.graphs(molecules.train[:64]))
    rows = []
    for name, data in graphs.items():
        pooled = "batch" in data
        data.x = data.x.float()
        data = data.to(DEVICE)
        classes = 1 if pooled else int(data.y.max()) + 1

        def loss(out, batch, pooled=pooled):
            if pooled:
                return F.binary_cross_entropy_with_logits(out, batch.y)
            return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

        for layer in LAYERS:
            torch.manual_seed(0)
            model = TwoLayers(layer, data.num_features, classes, pooled)
            kinds = ["pyg", *(["pyg compiled"] if args.compiled else []), "dfgnn", "captured"]
            steps = {kind: make_step(kind, model, loss) for kind in kinds}
            times = take_turns(steps, data)
            difference = curve_difference(lambda kind, m=model, f=loss: make_step(kind, m, f), [data] * 30)
            rows.append(row(f"{layer}, {name}", times, loss_difference=difference))
    return rows


def molhiv(args: argparse.Namespace, molecules: Molecules) -> list[dict]:
    def loss(out, batch):
        return F.binary_cross_entropy_with_logits(out, field(batch, "y"))

    rows = []
    ids = molecules.train
    graphs = molecules.graphs(ids)
    for size in (32, 512):
        torch.manual_seed(0)
        model = MoleculeNet()

        def loader(seed: int, size=size) -> DataLoader:
            generator = torch.Generator().manual_seed(seed)
            return DataLoader(graphs, batch_size=size, shuffle=True, generator=generator)

        def tensors(seed: int, size=size) -> TensorLoader:
            return TensorLoader(molecules, ids, size, torch.Generator().manual_seed(seed))

        few = [batch for batch, _ in zip(loader(7), range(60))]
        difference = curve_difference(lambda kind, m=model: make_step(kind, m, loss), few)
        kinds = {"pyg": loader, "dfgnn": loader, "captured": loader, "captured, tensors": tensors}
        times, steps = {}, {}
        for kind, batches in kinds.items():
            step = steps[kind] = make_step(kind.partition(",")[0], model, loss)
            for batch, _ in zip(batches(1), range(12)):
                step(batch)
            times[kind] = round(seconds(lambda b=batches, s=step: [s(x) for x in b(2)]) * 1e3, 1)
        alone = {
            "DataLoader": round(seconds(lambda: [None for _ in loader(2)]) * 1e3, 1),
            "tensors": round(seconds(lambda: [None for _ in tensors(2)]) * 1e3, 1),
        }
        share = round(alone["tensors"] / times["captured, tensors"], 3)
        rows.append(
            row(
                f"epoch of molhiv, batches of {size}",
                times,
                loss_difference=difference,
                loaders_ms=alone,
                loader_share=share,
                captured=repr(steps["captured, tensors"]),
            )
        )
    return rows


def minesweeper(args: argparse.Namespace) -> list[dict]:
    file = np.load(args.data / "nodes" / "minesweeper.npz")
    shape = tuple(file["x_shape"])
    x = torch.sparse_csr_tensor(
        torch.from_numpy(file["x_indptr"]).long(),
        torch.from_numpy(file["x_indices"]).long(),
        torch.from_numpy(file["x_data"]).float(),
        size=shape,
    ).to_dense()
    edges = torch.from_numpy(file["edges"]).long()
    y = torch.from_numpy(file["y"]).long()
    mask = torch.from_numpy(file["train_masks"][0]).bool()
    edge_index = torch_geometric.utils.to_undirected(edges)
    data = Data(x=x, edge_index=edge_index, y=y, train_mask=mask).to(DEVICE)

    def loss(out, batch):
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

    torch.manual_seed(0)
    model = Deep(data.num_features, 2)
    steps = {kind: make_step(kind, model, loss) for kind in ("pyg", "dfgnn", "captured")}
    times = take_turns(steps, data)
    plain = Deep(data.num_features, 2, dropout=0.0)
    difference = curve_difference(lambda kind: make_step(kind, plain, loss), [data] * 20)
    return [row("minesweeper, 15 layers", times, loss_difference=difference)]


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/capture.py: expected a CUDA GPU, found none")
    environment = report.environment(DEVICE, args.commit)
    environment["torch_geometric"] = torch_geometric.__version__
    only = args.only or ("full", "molhiv", "minesweeper")
    rows: list[dict] = []
    molecules = Molecules(args.data) if {"full", "molhiv"} & set(only) else None
    if "full" in only:
        rows += full(args, molecules)
    if "molhiv" in only:
        rows += molhiv(args, molecules)
    if "minesweeper" in only:
        rows += minesweeper(args)
    if args.json:
        report.write_json(args.json, {"environment": environment, "rows": rows})
        print(f"written: {args.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
