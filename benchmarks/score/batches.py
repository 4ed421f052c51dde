"""Steps with other data each time: batches of molecules, sampled neighbourhoods; and features of edges."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import weather_mesh
from torch import Tensor, nn

import dfgnn
from dfgnn import sampling
from dfgnn.bench import graphs
from dfgnn.bench.attention import Bench
from dfgnn.bench.compare import Contestant, Step, compare

from .models import Model

BATCHES = 16  # batches of molecules in one timed step
FANOUTS, SEEDS = (5, 10, 15), 1_024


# ---- batches of molecules --------------------------------------------------------------------------------


class Molecules:
    """The structure of the molecules of ogbg-molhiv, or, for a name with ~, chains of six-rings; loops are
    among the edges. ``gather`` is the loader of both libraries: it makes a batch from the tensors of all.
    """

    def __init__(self, name: str, count: int):
        if name.endswith("~"):
            sizes = np.random.default_rng(0).integers(15, 37, count)
            ends = [_chain(n) for n in sizes.tolist()]
        else:
            sizes, ends = _published(count)
        self.num_nodes = torch.as_tensor(sizes)
        both = [
            torch.cat([e, e.flip(0), torch.arange(n).expand(2, -1)], 1) for e, n in zip(ends, sizes.tolist())
        ]
        self.num_edges = torch.tensor([e.shape[1] for e in both])
        self.edge_index = torch.cat(both, 1)
        self.first_node = self.num_nodes.cumsum(0) - self.num_nodes
        self.first_edge = self.num_edges.cumsum(0) - self.num_edges
        generator = torch.Generator().manual_seed(0)
        self.kind = torch.randint(32, (int(self.num_nodes.sum()),), generator=generator)
        self.y = torch.randint(2, (len(sizes), 1), generator=generator).float()

    def gather(self, ids: Tensor, device: torch.device) -> dict[str, Tensor]:
        nodes, edges = self.num_nodes[ids], self.num_edges[ids]
        starts = nodes.cumsum(0) - nodes
        of_node, of_edge = torch.repeat_interleave(nodes), torch.repeat_interleave(edges)
        node = torch.arange(len(of_node)) + (self.first_node[ids] - starts)[of_node]
        edge = torch.arange(len(of_edge)) + (self.first_edge[ids] - (edges.cumsum(0) - edges))[of_edge]
        batch = {
            "x": self.kind[node],
            "edge_index": self.edge_index[:, edge] + starts[of_edge],
            "y": self.y[ids],
            "batch": of_node,
        }
        return {name: t.to(device, non_blocking=True) for name, t in batch.items()}


def _chain(n: int) -> Tensor:
    atom = torch.arange(n - 1)
    ring = torch.arange(0, n - 5, 6)
    return torch.cat([torch.stack([atom, atom + 1]), torch.stack([ring, ring + 5])], 1)


def _published(count: int) -> tuple[np.ndarray, list[Tensor]]:
    folder = graphs.data_folder()
    if folder is None:
        raise OSError("molecules: set DFGNN_DATA to a folder with ogb/ogbg_molhiv (docs/benchmarks.md)")
    raw = folder / "ogb" / "ogbg_molhiv" / "raw"
    sizes, counts = (graphs.rows(raw / f"num-{of}-list.csv.gz", count)[:, 0] for of in ("node", "edge"))
    edges = torch.from_numpy(graphs.rows(raw / "edge.csv.gz", int(counts.sum()))).T
    return sizes, list(edges.split(counts.tolist(), 1))


class MoleculeNet(nn.Module):
    """Embeddings, GAT layers with batch norms and residuals, mean pooling."""

    def __init__(self, layers: int, heads: int, size: int):
        super().__init__()
        from torch_geometric import nn as library

        width = heads * size
        self.embed, self.out = nn.Embedding(32, width), nn.Linear(width, 1)
        self.convs = nn.ModuleList(
            library.GATConv(width, size, heads, add_self_loops=False) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        x = self.embed(batch["x"])
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x, batch["edge_index"])).relu() + x
        return self.out(global_mean_pool(x, batch["batch"], len(batch["y"])))


def measure_molecules(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """A pass over batches: the same loader for both libraries, which is measured alone, too."""
    device, size = bench.device, case["batch"]
    molecules = Molecules(case["graph"], BATCHES * size)
    order = torch.randperm(BATCHES * size, generator=torch.Generator().manual_seed(0)).split(size)

    def loader() -> Iterator[dict[str, Tensor]]:
        return (molecules.gather(ids, device) for ids in order)

    def alone() -> Step:
        return Step(lambda: [None for _ in loader()], calls=BATCHES)

    def training(library: str, way: str) -> Step:
        torch.manual_seed(0)
        model = MoleculeNet(case["layers"], case["heads"], case["head_dim"]).to(device)
        if library == "dfgnn":
            dfgnn.accelerate(model)

        def loss(batch) -> Tensor:
            return F.binary_cross_entropy_with_logits(model(batch), batch["y"])

        step = _stepper(loss, model, way)
        return Step(lambda: [step(batch) for batch in loader()], calls=BATCHES)

    contestants = [Contestant("the loader alone", "eager", "float32", alone)]
    for way, library in itertools.product(case["ways"], ("PyG", "dfgnn")):
        make = functools.partial(training, library, way)
        contestants.append(Contestant(library, way, "float32", make))
    found = compare(contestants, device, bench.seconds)
    nodes, edges = int(molecules.num_nodes.sum()) // BATCHES, molecules.edge_index.shape[1] // BATCHES
    return {"nodes": nodes, "edges": edges, "contestants": found}


def _stepper(loss: Callable, model: nn.Module, way: str) -> Callable[[Any], Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    if way == "captured":
        return dfgnn.capture(loss, model, optimizer)

    def step(batch) -> Tensor:
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


# ---- sampled neighbourhoods ------------------------------------------------------------------------------


def measure_sampled(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """A step on the sampled neighbourhood of some nodes, sampling and gathering of features included."""
    graph, device, width = bench.graph(case["graph"]), bench.device, case["heads"] * case["head_dim"]
    torch.manual_seed(0)
    x, y = torch.randn(graph.num_src, width).to(device), torch.randint(40, (graph.num_src,)).to(device)
    sampler = sampling.NeighborSampler(graph, FANOUTS)
    drawn = torch.Generator().manual_seed(0)

    def seeds() -> Tensor:
        nodes = torch.randint(graph.num_src, (2 * SEEDS,), generator=drawn).unique()
        return nodes[torch.randperm(len(nodes), generator=drawn)[:SEEDS]].to(device)

    def make(library: str, loader: str, way: str) -> Step:
        torch.manual_seed(0)
        model = Model(case, width, 40).to(device)
        if library == "dfgnn":
            dfgnn.accelerate(model)

        def loss(batch) -> Tensor:
            return F.cross_entropy(model(batch["x"], batch["edge_index"]), batch["y"])

        step = _stepper(loss, model, way)
        if loader == "NeighborLoader":
            batches = _neighbor_loader(graph, x, y, device)
            return Step(lambda: step(next(batches)))
        if device.type == "cuda":
            sampler.capture(seeds(), subgraph=True)

        def sampled():
            mine = seeds()
            sample = sampler.subgraph(mine)
            return step(_of_seeds(x, y, sample.nodes, sample.edge_index))

        return Step(sampled)

    own = "dfgnn.sampling"
    contestants = [
        Contestant("PyG", "NeighborLoader", "float32", lambda: make("PyG", "NeighborLoader", "eager"))
    ]
    for way, library in itertools.product(case["ways"], ("PyG", "dfgnn")):
        name = own if way == "eager" else f"{own}, {way}"
        build = functools.partial(make, library, own, way)
        contestants.append(Contestant(library, name, "float32", build))
    found = compare(contestants, device, bench.seconds)
    return {"nodes": graph.num_dst, "edges": graph.num_edges, "contestants": found}


def _of_seeds(x: Tensor, y: Tensor, nodes: Tensor, edge_index: Tensor) -> dict[str, Tensor]:
    """The batch of these nodes, of which the first ones count in the loss."""
    others = torch.arange(min(SEEDS, len(nodes)), len(nodes), device=x.device)
    return {"x": x[nodes], "edge_index": edge_index, "y": y[nodes].index_fill(0, others, -100)}


def _neighbor_loader(graph, x: Tensor, y: Tensor, device) -> Iterator[dict[str, Tensor]]:
    """Batches without end. Raises ImportError where PyG has no sampler (pyg-lib or torch-sparse)."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    data = Data(edge_index=graph.edge_index.cpu(), num_nodes=graph.num_src)
    options = {"batch_size": SEEDS, "shuffle": True, "drop_last": True}
    loader = NeighborLoader(data, num_neighbors=list(reversed(FANOUTS)), **options)

    def batches() -> Iterator[dict[str, Tensor]]:
        while True:
            for batch in loader:
                yield _of_seeds(x, y, batch.n_id.to(device), batch.edge_index.to(device))

    next(iter(loader))  # raises here, before anything is timed, if a package is missing
    return batches()


# ---- features of edges -----------------------------------------------------------------------------------


@functools.cache
def _meshes(refinement: int, grid: int, device: torch.device) -> dict[str, tuple[Tensor, int, int]]:
    return weather_mesh.shapes(refinement, grid, device)


def measure_edges(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """Dot-product attention with raw features of edges on a mesh of a weather model, compared with PyG's
    operations."""
    device, heads, dim = bench.device, case["heads"], case["head_dim"]
    edge_index, num_src, num_dst = _meshes(case["refinement"], case["grid"], device)[case["graph"]]
    contestants = []
    for dtype in case["dtypes"]:
        calls = functools.cache(
            functools.partial(
                weather_mesh.contestants,
                edge_index,
                num_src,
                num_dst,
                heads,
                dim,
                getattr(torch, dtype),
                None,
            )
        )

        def make(way: str, calls=calls) -> Step:
            call, leaves = calls()[way]
            grad = torch.randn_like(call().detach())

            def step():
                return torch.autograd.grad(call(), leaves, grad)

            return Step(step, 1, sum(t.nbytes for t in leaves))

        for way in weather_mesh.WAYS:
            library, name = ("PyG", "eager") if way == "PyG" else ("dfgnn", way)
            contestants.append(Contestant(library, name, dtype, functools.partial(make, way)))
    found = compare(contestants, device, bench.seconds)
    return {"nodes": num_dst, "edges": edge_index.shape[1], "contestants": found}
