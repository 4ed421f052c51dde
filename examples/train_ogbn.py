"""Node classification on a large graph: full graph, or ``--sampled`` neighbourhoods.

    python examples/train_ogbn.py --dataset ogbn-arxiv
    python examples/train_ogbn.py --dataset ogbn-arxiv --sampled --stages
    python examples/train_ogbn.py --dataset reddit~ --impl pyg --amp bf16 --epochs 20

ogbn-arxiv has OGB's features where its file is there, and else features of the structure alone (averages of
random vectors along random walks). A name with ~ is a random graph with the size and about the degrees of
that data set (python -m dfgnn.bench --help has them), with random features and labels, for time and memory;
reddit~/8 has an eighth of its edges.

Three layers of 4 heads and 128 numbers, x = relu(norm(attention(x) + linear(x))), dropout, a linear head.
Sampled: ``--fanouts`` neighbours per layer; ``--loader dfgnn`` samples on the device, a block for each layer,
``subgraph`` one graph for all layers, whose steps ``--capture`` replays, and ``pyg`` such graphs with
torch_geometric's NeighborLoader, which needs pyg-lib or torch-sparse. ``--host-features`` leaves features in
pinned host memory.
"""

import datasets
import harness
import torch
import torch.nn.functional as F
from layers import conv, prepare
from node_classification import FullGraph
from torch import nn

from dfgnn import Graph, sampling

LAYERS = {"gat": "GATConv", "gatv2": "GATv2Conv", "gt": "TransformerConv"}


class Network(nn.Module):
    def __init__(self, args, in_channels, classes):
        super().__init__()
        options = {"root_weight": False} if args.model == "gt" else {"add_self_loops": False}
        width, heads = args.width, args.heads
        sizes = [in_channels] + [width] * (args.layers - 1)
        self.convs = nn.ModuleList(
            conv(args.impl, LAYERS[args.model], size, width // heads, heads, **options) for size in sizes
        )
        self.lins = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in sizes)
        self.head = nn.Linear(width, classes)
        self.dropout = args.dropout

    def forward(self, x, edges):
        """edges: an edge_index for all layers, or a list of (edge_index, number of destinations)."""
        for k, (layer, lin, norm) in enumerate(zip(self.convs, self.lins, self.norms)):
            if isinstance(edges, list):
                edge_index, num_dst = edges[k]
                target = x[:num_dst]
                h = layer((x, target), edge_index) + lin(target)
            else:
                h = layer(x, edges) + lin(x)
            x = F.dropout(F.relu(norm(h)), self.dropout, self.training)
        return self.head(x)


class Sampled(FullGraph):
    """Trains on sampled neighbourhoods, made two batches ahead; scores are those of the full graph."""

    def __init__(self, args, seed, model, data):
        super().__init__(args, seed, model, (data.x, data.edge_index), data.y, data.splits[0])
        self.graph = Graph.from_edge_index(data.edge_index, len(data.y))
        self.sampler = sampling.NeighborSampler(self.graph, args.fanouts)
        self.features = data.rows
        train, self.captured = self.split["train"], None
        self.steps = min(-(-len(train) // args.batch_size), args.max_steps or len(train))
        generator = torch.Generator().manual_seed(seed)
        some = train[torch.randperm(len(train), generator=generator)[: 4 * args.batch_size].to(train.device)]
        if self.device.type == "cuda" and args.loader != "pyg" and min(args.fanouts) > 0:
            self.sampler.capture(some[: args.batch_size], subgraph=args.loader == "subgraph")
        if args.capture:
            generator = torch.Generator(self.device).manual_seed(seed)
            found = [self.sampler.subgraph(seeds, generator) for seeds in some.split(args.batch_size)]
            largest = [max(len(sample[k]) for sample in found) for k in (0, 2)]  # nodes, edges
            # Samples of as many seeds are alike in size, and what a capacity has beyond them takes time, too.
            self.capacities = [tuple(int(room * n) for n in largest) for room in (1.05, 1.5)]
        if args.loader == "pyg":
            from torch_geometric.data import Data
            from torch_geometric.loader import NeighborLoader

            graph = Data(edge_index=data.edge_index.cpu(), num_nodes=len(data.y))
            self.loader = NeighborLoader(
                graph, args.fanouts[::-1], train.cpu(), batch_size=args.batch_size, shuffle=True,
                num_workers=args.workers, persistent_workers=args.workers > 0,
            )  # fmt: skip

    def can_capture(self):
        return self.args.loader == "subgraph" and self.args.impl == "dfgnn" and self.args.amp != "fp16"

    def batches(self):
        """x of the sampled nodes, edges of the layers, labels: of the seeds, or of all (-100: none)."""
        if self.args.loader == "pyg":
            for batch in self.loader:
                batch = batch.to(self.device, non_blocking=True)
                y = self.of_seeds(batch.n_id, batch.batch_size)
                yield {"x": self.gather(batch.n_id), "edge_index": batch.edge_index, "y": y}
            return
        train = self.split["train"]
        order = train[torch.randperm(len(train)).to(train.device)]
        generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, ())))
        # In turns on a GPU, where to start kernels is what both take time for.
        yield from sampling.prefetch(
            lambda seeds: self.draw(seeds, generator), order.split(self.args.batch_size), self.device,
            thread=self.device.type == "cpu",
        )  # fmt: skip

    def draw(self, seeds, generator):
        blocks = self.args.loader == "dfgnn"
        with self.stages("sample"):
            sample = (self.sampler.sample if blocks else self.sampler.subgraph)(seeds, generator)
        found = {"sample": sample, "x": self.gather(sample.nodes)}
        if blocks:
            edges = [(hop.edge_index, hop.num_dst) for hop in sample.hops]
            return found | {"edge_index": edges, "y": self.labels[seeds]}
        return found | {"edge_index": sample.edge_index, "y": self.of_seeds(sample.nodes, len(seeds))}

    def of_seeds(self, nodes, count):
        return self.labels[nodes].index_fill(0, torch.arange(count, len(nodes), device=nodes.device), -100)

    def gather(self, nodes):
        with self.stages("gather"):
            return self.features[nodes]

    def loss_of(self, batch):
        return F.cross_entropy(self.model(batch["x"], batch["edge_index"]).float(), batch["y"])

    def loss_under_amp(self, batch):
        with self.autocast():
            return self.loss_of(batch)

    def epoch(self):
        total = torch.zeros((), device=self.device)
        for _, batch in zip(range(self.steps), self.batches()):
            total += self.train_on(batch)
        return total / self.steps

    def train_on(self, batch):
        if not self.args.capture:
            return self.optimize(lambda: self.loss_of(batch))
        if self.captured is None:
            self.captured = harness.capture(
                self.loss_under_amp, self.model, self.optimizer, capacities=self.capacities
            )
        return self.captured(batch)


class Full(FullGraph):
    def scores(self):
        # On a random graph there is nothing to learn: no time is spent on evaluation.
        return {"valid": 0.0, "test": 0.0} if "~" in self.args.dataset else super().scores()


def load(args):
    """The data, on the device but for features that are to stay on the host."""
    if "~" in args.dataset:
        from dfgnn.bench.graphs import load as load_twin

        name, _, part = args.dataset.partition("/")
        graph = load_twin(name, args.device)  # has self loops
        edge_index, n = graph.edge_index, graph.num_nodes
        if part:
            edge_index = edge_index[:, torch.rand(edge_index.shape[1], device=args.device) < 1 / int(part)]
        x, y = torch.randn(n, args.width, device=args.device), torch.randint(40, (n,), device=args.device)
        split = {k: torch.arange(i, n, 3, device=args.device) for i, k in enumerate(datasets.SPLITS)}
        data = datasets.Nodes(x=x, edge_index=edge_index.contiguous(), y=y, splits=[split])
    else:
        data = datasets.arxiv(args.root)
        if data.x is None:
            data.x = datasets.structural_features(data.edge_index, len(data.y))
    host = data.x
    data = data.to(args.device)
    on_host = args.host_features and torch.device(args.device).type == "cuda"
    data.rows = sampling.host_rows(host.cpu().contiguous()) if on_host else data.x
    return data


def main():
    parser = harness.parser(__doc__, epochs=500)
    parser.add_argument("--dataset", default="ogbn-arxiv")
    parser.add_argument("--model", choices=LAYERS, default="gat")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--loader", choices=["dfgnn", "subgraph", "pyg"], default="dfgnn")
    parser.add_argument(
        "--fanouts", type=int, nargs="+", default=[5, 10, 15], help="in the order of the layers"
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=0, help="processes of torch_geometric's loader")
    parser.add_argument("--max-steps", type=int, help="steps per epoch at most")
    parser.add_argument(
        "--host-features", action="store_true", help="gather features from pinned host memory"
    )
    args = parser.parse_args()
    harness.set_seed(0)
    data = load(args)

    def make(args, seed):
        model = prepare(Network(args, data.x.shape[1], int(data.y.max()) + 1), args)
        inputs = (data.x, data.edge_index), data.y, data.splits[0]
        task = Sampled(args, seed, model, data) if args.sampled else Full(args, seed, model, *inputs)
        task.optimizer = task.adam(args.lr)
        return task

    harness.main(args, make)


if __name__ == "__main__":
    main()
