"""Graphs whose nodes and edges have types, and temporal graphs."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
import torch.nn.functional as F

from . import Change, absent, no_gpu, put_on_path, random_edges, repository, without_dropout, without_init


def _simple_hgn(root: Path, scale: int = 1):
    put_on_path(root / "NC" / "benchmark" / "methods" / "baseline")
    no_gpu()
    dgl = importlib.import_module("dgl")
    counts, sizes, etypes = (4932, 2393, 6124, 7971), (3489, 3341, 3341, 64), 6  # IMDB
    n = sum(counts)
    src, dst = random_edges(n, n, 86_642)
    graph = dgl.add_self_loop(dgl.remove_self_loop(dgl.graph((src, dst), num_nodes=n)))
    kinds = torch.randint(etypes, (graph.num_edges(),))
    features = [torch.randn(count, size) for count, size in zip(counts, sizes, strict=True)]
    labels = torch.randint(5, (1000,))
    model = importlib.import_module("GNN").myGAT(
        graph, 64, etypes, list(sizes), 64, 5, 2, [8, 8, 1], F.elu, 0.0, 0.0, 0.05, True, 0.05
    )

    def loss():
        return F.cross_entropy(model(features, kinds)[:1000], labels)

    return model, loss


_HGN = "Simple-HGN (myGAT), 3 layers, 8 heads of 64; 21,420 nodes, 108,062 edges of 6 types (IMDB)"
repository("HGB", "THUDM/HGB", _HGN, large=0)(_simple_hgn)
repository("HGB without DGL", "THUDM/HGB", _HGN, options=("--as-dgl", "--force"), large=0)(_simple_hgn)


@repository(
    "RelGNN",
    "snap-stanford/RelGNN",
    "RelGNN_HeteroConv, 2 layers; 4 types, routes of 10,000 to 40,000 edges",
    slow_to_compile=True,
)
def relgnn(root: Path, scale: int = 1):
    put_on_path(root / "examples")
    conv = importlib.import_module("relgnn_conv").RelGNNConv
    hetero = importlib.import_module("relgnn_hetero_conv").RelGNN_HeteroConv
    counts = {"drivers": 800, "races": 1000, "results": 12_000, "standings": 14_000}
    counts = {name: count * scale for name, count in counts.items()}
    relations = [
        ("results", "drivers"),
        ("results", "races"),
        ("standings", "drivers"),
        ("standings", "races"),
    ]
    edges = {}
    for fact, entity in relations:
        dst = torch.randint(counts[entity], (counts[fact],))
        src = torch.arange(counts[fact])
        edges[fact, "to", entity] = torch.stack([src, dst])
        edges[entity, "from", fact] = torch.stack([dst, src])
    routes = [("dim-dim", *relation) for relation in edges]
    routes += [
        ("dim-fact-dim", fact, "to", a, b, "from", fact)
        for fact in ("results", "standings")
        for a, b in (("drivers", "races"), ("races", "drivers"))
    ]
    size, layers = 128, torch.nn.ModuleList()
    for _ in range(2):
        convs = {route: conv(route[0], size, size, 1, "sum") for route in routes}
        layers.append(hetero(convs, aggr="sum"))
    x = {name: torch.randn(count, size) for name, count in counts.items()}
    target = torch.randn(counts["drivers"], size)

    def loss():
        h = x
        for layer in layers:
            h = {name: value.relu() for name, value in layer(h, edges).items()}
        return (h["drivers"] - target).square().mean()

    return layers, loss


@repository(
    "Multi-GNN",
    "IBM/Multi-GNN",
    "GATe, 2 layers, 4 heads of 16, edge_dim 64; a new batch of 20,000 edges per step",
)
def multi_gnn(root: Path, scale: int = 1):
    put_on_path(root)
    model = importlib.import_module("models").GATe(
        num_features=1, num_gnn_layers=2, n_hidden=64, n_heads=4, edge_updates=True, edge_dim=5
    )
    without_dropout(model)
    n, e = 12_000 * scale, 20_000 * scale
    device = next(model.parameters()).device

    def loss():
        edge_index = torch.randint(n, (2, e), device=device)
        x, attr = torch.randn(n, 1, device=device), torch.randn(e, 5, device=device)
        return F.cross_entropy(model(x, edge_index, attr), (attr[:, 0] > 1).long())

    return model, loss


@repository(
    "pyHGT",
    "acbull/pyHGT",
    "GNN of HGTConv, 2 layers, 8 heads of 16; 4,000 nodes of 4 types, 24,000 edges of 5",
    slow_to_compile=True,
)
def py_hgt(root: Path, scale: int = 1):
    put_on_path(root)
    without_init(root, "pyHGT")
    model = importlib.import_module("pyHGT.model").GNN(
        in_dim=129, n_hid=128, num_types=4, num_relations=5, n_heads=8, n_layers=2, dropout=0.0,
        prev_norm=True, last_norm=True,
    )  # fmt: skip
    n, e = 4000 * scale, 24_000 * scale
    x, kinds, times = torch.randn(n, 129), torch.randint(4, (n,)), torch.randint(120, (e,))
    edges, relations, target = random_edges(n, n, e), torch.randint(5, (e,)), torch.randn(n, 128)

    def loss():
        return (model(x, kinds, times, edges, relations) - target).square().mean()

    return model, loss


_CPU = Change("layers.py", "cuda:0", "cpu")
_COPY = Change("layers.py", "copy_src", "copy_u")  # DGL 1.1 no longer has the old name


@repository(
    "tgl",
    "amazon-science/tgl",
    "TransfomerAttentionLayer of TGN, 2 heads of 50; 1,800 roots of 10 neighbours, a new block per step",
    options=("--as-dgl", "--force"),
    large=0,
    to_run_here=(_CPU, _COPY),
)
def tgl(root: Path, scale: int = 1):
    put_on_path(root)
    dgl = importlib.import_module("dgl")
    layer = importlib.import_module("layers").TransfomerAttentionLayer(100, 172, 100, 2, 0.0, 0.0, 100)
    roots, count = 1800 * scale, 10
    e = roots * count
    target = torch.randn(roots, 100)

    def loss():
        src = torch.arange(roots, roots + e)
        dst = torch.arange(roots).repeat_interleave(count)
        block = dgl.create_block((src, dst), num_src_nodes=roots + e, num_dst_nodes=roots)
        block.srcdata["h"] = torch.randn(roots + e, 100)
        block.edata["dt"], block.edata["f"] = torch.rand(e), torch.randn(e, 172)
        return (layer(block) - target).square().mean()

    return layer, loss


@repository(
    "qagnn",
    "michiyasunaga/qagnn",
    "GATConvE, 2 layers, 4 heads of 50; batch of 10 graphs of 200 nodes, 20,000 edges",
    to_run_here=(
        Change(
            "modeling/modeling_qagnn.py",
            "from torch_scatter import scatter_add, scatter",
            "from torch_geometric.utils import scatter",
        ),
    ),
)
def qagnn(root: Path, scale: int = 1):
    put_on_path(root)
    absent("transformers")
    for name in ("modeling.modeling_encoder", "utils.data_utils", "utils.utils"):
        absent(name)
    passing = importlib.import_module("modeling.modeling_qagnn").QAGNN_Message_Passing
    model = passing(None, 2, 4, 38, 200, 200, 200, dropout=0.0)
    graphs, n, e = 10 * scale, 200, 2000
    x, kinds, scores = torch.randn(graphs, n, 200), torch.randint(4, (graphs, n)), torch.randn(graphs, n, 1)
    edges = torch.cat([random_edges(n, n, e) + n * graph for graph in range(graphs)], 1)
    relations, target = torch.randint(38, (graphs * e,)), torch.randn(graphs, n, 200)

    def loss():
        return (model(x, (edges, relations), kinds, scores) - target).square().mean()

    return model, loss
