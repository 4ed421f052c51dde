"""Train over several processes: one graph that they share, or batches of graphs, each its own.

    torchrun --nproc-per-node 2 examples/train_distributed.py graph                 # or python ... for one
    torchrun --nproc-per-node 2 examples/train_distributed.py graph --parts parts/  # from files
    torchrun --nproc-per-node 2 examples/train_distributed.py batches --data molhiv --root data
    torchrun --nproc-per-node 2 examples/train_distributed.py batches --shard       # FSDP2

graph     Each process has a part of the graph and of its features; what edges need of other parts is fetched
          in each layer. Default: a random graph of communities, which are to be found; --parts: a folder that
          ``python -m dfgnn.distributed.partition`` wrote with --nodes x=... y=... train=... (bool).
batches   Data-parallel training on CLUSTER, generated, or on ogbg-molhiv.

Gradients are averaged by DistributedDataParallel, or with --shard parameters and optimizer are divided by
fully_shard (FSDP2). --checkpoint DIR writes the state after every epoch, with the generators of each process;
--resume goes on from the last one, to the result that an uninterrupted run has. Prints the loss and the
accuracy of each epoch. GPUs are used where there are any (NCCL), else the CPU (gloo).
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dfgnn.distributed import DistributedGraph, partition, watch
from dfgnn.nn import GATConv


class Net(nn.Module):
    """GAT layers with residuals and layer norms, and a linear classifier of nodes, or of graphs by their
    mean."""

    def __init__(self, embedding, args, classes, layers=3, heads=4):
        super().__init__()
        self.embedding = embedding
        width, options = args.width, {"attn_drop": args.dropout, "allow_zero_in_degree": True}
        self.layers = nn.ModuleList(GATConv(width, width // heads, heads, **options) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, graph, x, batch=None, size=0):
        x = self.embedding(x)
        for layer, norm in zip(self.layers, self.norms):
            x = x + F.elu(layer(graph, norm(x)).flatten(1))
        if batch is not None:
            count = x.new_zeros(size).index_add(0, batch, x.new_ones(len(x)))
            x = x.new_zeros(size, x.shape[1]).index_add(0, batch, x) / count.unsqueeze(1)
        return self.head(x)


class Atoms(nn.Module):
    """The sum of the embeddings of molhiv's nine integers."""

    def __init__(self, width):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(120, width) for _ in range(9))

    def forward(self, x):
        return sum(table(x[:, k]) for k, table in enumerate(self.tables))


# ---- data: a model, and an epoch's batches (inputs of the model, labels, which are trained on) -----------


def one_graph(args, device, rank, world):
    """The same part in every epoch."""
    if args.parts:
        graph = DistributedGraph.from_partition(args.parts, device=device)
        x, labels, train = (
            partition.load_nodes(args.parts, name, rank).to(device) for name in ("x", "y", "train")
        )
        classes = labels.max() + 1 if len(labels) else labels.new_zeros(())
        dist.all_reduce(classes, dist.ReduceOp.MAX)
        classes = int(classes)
    else:
        n, classes = args.nodes, 8
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(classes, (n,), generator=generator)
        src, dst = torch.randint(n, (2, 30 * n), generator=generator)
        kept = (labels[src] == labels[dst]) | (torch.rand(len(src), generator=generator) < 0.1)
        edges = torch.stack([torch.cat([src[kept], dst[kept]]), torch.cat([dst[kept], src[kept]])])
        graph = DistributedGraph.from_edge_index(edges.to(device), n, args.partition)
        # One node in ten shows its class among the features.
        shown = (torch.rand(n, 1, generator=generator) < 0.1) * F.one_hot(labels, classes)
        whole = shown + 0.1 * torch.randn(n, classes, generator=generator)
        train = torch.rand(n, generator=generator) < 0.5
        x, labels, train = (graph.scatter(t) for t in (whole, labels, train))
    print(graph)
    batch = (graph, x), labels, train
    return Net(nn.Linear(x.shape[1], args.width), args, classes), lambda epoch: [batch]


def many_graphs(args, device, rank, world):
    """Each process its share of an epoch's batches, in an order that all know."""
    if args.data == "molhiv":
        from datasets import molhiv  # beside this file

        from dfgnn import Graph

        graphs, split = molhiv(args.root, device)
        ids, size = split["train"], args.batch

        def molecules(epoch):
            order = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(epoch))]
            for part in order[rank::world].split(size)[: len(ids) // world // size]:
                data = graphs.batch(part)
                graph = Graph.from_edge_index(data.edge_index, len(data.x), validate=False).one_shot()
                labels = data.y.view(-1).long()
                yield (
                    (graph, data.x, data.batch, len(part)),
                    labels,
                    torch.ones_like(labels, dtype=torch.bool),
                )

        return Net(Atoms(args.width), args, 2), molecules
    import cluster

    made = cluster.make_batches(args.batch * args.nodes // 1000, args.batch, seed=0)
    made = [(g.to(device), x.to(device), y.to(device)) for g, x, y in made]

    def communities(epoch):
        order = torch.randperm(len(made), generator=torch.Generator().manual_seed(epoch))
        for k in order[rank::world][: len(made) // world].tolist():
            graph, x, labels = made[k]
            yield (graph, x), labels, torch.ones_like(labels, dtype=torch.bool)

    return Net(nn.Embedding(7, args.width), args, 6), communities


# ---- training --------------------------------------------------------------------------------------------


def state_of(model, optimizer, epoch, rank, device):
    """What the rest of the run depends on, for torch.distributed.checkpoint."""
    parameters, moments = get_state_dict(model, optimizer)
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    return {"model": parameters, "optimizer": moments, "epoch": epoch, f"generators-{rank}": own}


def resume(folder, model, optimizer, rank, device):
    """The epoch to go on with."""
    there = [int(path.parent.name) for path in folder.glob("*/.metadata")]  # complete ones
    if not there:
        return 0
    state = state_of(model, optimizer, 0, rank, device)
    dcp.load(state, checkpoint_id=folder / str(max(there)))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    own = state[f"generators-{rank}"]
    torch.set_rng_state(own["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"], device)
    return state["epoch"] + 1


def train(args, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same first parameters everywhere
    model, batches = (one_graph if args.mode == "graph" else many_graphs)(args, device, rank, world)
    model = model.to(device)
    if args.shard:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    torch.manual_seed(1 + rank)
    first = resume(args.checkpoint, model, optimizer, rank, device) if args.resume else 0
    for epoch in range(first, args.epochs):
        model.train()
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for inputs, labels, mask in batches(epoch):
            logits, labels = model(*inputs)[mask], labels[mask]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            count = torch.tensor(len(labels), device=device)
            dist.all_reduce(count)  # gradients are averaged over the processes: together the mean over nodes
            optimizer.zero_grad()
            (loss * world / count).backward()
            optimizer.step()
            right = (logits.argmax(1) == labels).sum()
            sums += torch.stack([loss.detach().double(), right.double(), count.double() / world])
        dist.all_reduce(sums)
        loss, right, count = sums.tolist()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss / count:.6f} accuracy {100 * right / count:.1f} %", flush=True)
        if args.checkpoint:
            dcp.save(
                state_of(model, optimizer, epoch, rank, device), checkpoint_id=args.checkpoint / str(epoch)
            )
    return loss / count


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["graph", "batches"])
    parser.add_argument("--parts", type=Path, help="graph: the parts' folder")
    parser.add_argument("--partition", default="contiguous", choices=["contiguous", "metis"])
    parser.add_argument(
        "--nodes", type=int, default=20_000, help="of a random graph; CLUSTER has 1 batch per 1000"
    )
    parser.add_argument("--data", choices=["cluster", "molhiv"], default="cluster", help="batches of what")
    parser.add_argument("--root", default="data", help="folder of data sets")
    parser.add_argument("--batch", type=int, default=32, help="graphs per process and step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1, help="of the attention")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="one folder per epoch is written here")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args(argv)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if started:
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    with watch():
        loss = train(args, device)
    if started:
        dist.destroy_process_group()
    return loss


if __name__ == "__main__":
    main()
