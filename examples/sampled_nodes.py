"""Training on sampled neighbourhoods of one graph whose nodes have classes."""

import harness
import torch
import torch.nn.functional as F
from node_classification import FullGraph

from dfgnn import Graph, sampling


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
            sizes = [
                self.sizes_of(self.draw(seeds, generator)["sample"]) for seeds in some.split(args.batch_size)
            ]
            # Samples of the same number of seeds have similar sizes, and unused capacity takes time, too.
            self.capacities = [
                tuple(int(room * max(column)) for column in zip(*sizes)) for room in (1.05, 1.5)
            ]
        if args.loader == "pyg":
            from torch_geometric.data import Data
            from torch_geometric.loader import NeighborLoader

            graph = Data(edge_index=data.edge_index.cpu(), num_nodes=len(data.y))
            self.loader = NeighborLoader(
                graph, args.fanouts[::-1], train.cpu(), batch_size=args.batch_size, shuffle=True,
                num_workers=args.workers, persistent_workers=args.workers > 0,
            )  # fmt: skip

    def can_capture(self):
        return self.args.loader != "pyg" and self.args.impl == "dfgnn" and self.args.amp != "fp16"

    @staticmethod
    def sizes_of(sample):
        """(nodes, edges), or those of each hop in turn and the seeds."""
        if isinstance(sample, sampling.Sample):
            found = [n for hop in sample.hops for n in (hop.num_src, len(hop.edge_ids))]
            return *found, sample.hops[-1].num_dst
        return len(sample.nodes), len(sample.edge_ids)

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
        # No thread on a GPU: sampling and training both spend their time in Python launching kernels, which
        # two threads cannot do at the same time.
        yield from sampling.prefetch(
            lambda seeds: self.draw(seeds, generator), order.split(self.args.batch_size), self.device,
            thread=self.device.type == "cpu",
        )  # fmt: skip

    def draw(self, seeds, generator):
        with self.stages("sample"):
            if self.args.loader == "dfgnn":
                sample = self.sampler.sample(seeds, generator, graphs=not self.args.capture)
            else:
                sample = self.sampler.subgraph(seeds, generator)
        found = {"sample": sample, "x": self.gather(sample.nodes)}
        if self.args.loader == "dfgnn":
            return found | {"y": self.labels[seeds]}
        return found | {"edge_index": sample.edge_index, "y": self.of_seeds(sample.nodes, len(seeds))}

    def of_seeds(self, nodes, count):
        return self.labels[nodes].index_fill(0, torch.arange(count, len(nodes), device=nodes.device), -100)

    def gather(self, nodes):
        with self.stages("gather"):
            return self.features[nodes]

    def loss_of(self, batch):
        edges = batch.get("edge_index")
        if edges is None:
            edges = [(hop.edge_index, hop.num_dst) for hop in batch["sample"].hops]
        return F.cross_entropy(self.model(batch["x"], edges).float(), batch["y"])

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
