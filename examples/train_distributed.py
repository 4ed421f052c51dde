"""Train over several processes: one graph that they share, or batches of graphs, each its own.

    torchrun --nproc-per-node 2 examples/train_distributed.py graph                 # or python ... for one
    torchrun --nproc-per-node 2 examples/train_distributed.py graph --parts parts/  # from files
    torchrun --nproc-per-node 2 examples/train_distributed.py batches --data molhiv --root data
    torchrun --nproc-per-node 2 examples/train_distributed.py batches --shard       # FSDP2

graph     Each process has a part of the graph and of its features. Default: a random graph of communities,
          which are to be found; --parts: a folder that ``python -m dfgnn.distributed.partition`` wrote with
          --nodes x=... y=... train=... (bool).
batches   Data-parallel training on CLUSTER, generated, or on ogbg-molhiv.

Gradients are averaged by DistributedDataParallel; --shard: FSDP2. --checkpoint DIR writes the state after
every epoch, and --resume goes on from the last one, to the result of an uninterrupted run. Prints the loss
and accuracy of each epoch. On GPUs (NCCL) where there are any, else on the CPU (gloo).
"""

import gc
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dfgnn import Graph
from dfgnn.distributed import DistributedGraph, partition, watch
from dfgnn.nn.dgl import GATConv
from dfgnn.runtime.programs import (
    Parser,
    existing_folder,
    folder_to_write,
    interruptible,
    number,
    positive,
)


class Net(nn.Module):
    """GAT layers with residuals and norms, and a linear classifier of nodes, or of graphs by their mean."""

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


# ---- data: a model, and an epoch's batches (inputs of the model, labels, which are trained on) -----------


def one_graph(args, device, rank, world):
    """One graph that the processes share: the same part in every epoch."""
    if args.parts:
        graph = DistributedGraph.from_partition(args.parts, device=device)
        arrays = (partition.load_nodes(args.parts, name, rank) for name in ("x", "y", "train"))
        x, labels, train = (array.to(device) for array in arrays)
        most = labels.max() if len(labels) else labels.new_zeros(())
        dist.all_reduce(most, dist.ReduceOp.MAX)
        classes = int(most) + 1
    else:
        n, classes = args.nodes, 8
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(classes, (n,), generator=generator)
        src, dst = torch.randint(n, (2, 30 * n), generator=generator)
        kept = (labels[src] == labels[dst]) | (torch.rand(len(src), generator=generator) < 0.1)
        edges = torch.stack([torch.cat([src[kept], dst[kept]]), torch.cat([dst[kept], src[kept]])])
        graph = DistributedGraph.from_edge_index(edges.to(device), n, args.partition)
        # One node in ten shows its class.
        shown = (torch.rand(n, 1, generator=generator) < 0.1) * F.one_hot(labels, classes)
        whole = shown + 0.1 * torch.randn(n, classes, generator=generator)
        train = torch.rand(n, generator=generator) < 0.5
        x, labels, train = (graph.scatter(t) for t in (whole, labels, train))
    print(graph)
    batch = (graph, x), labels, train
    return Net(nn.Linear(x.shape[1], args.width), args, classes), lambda epoch: [batch]


def many_graphs(args, device, rank, world):
    """Batches of graphs: each process takes its share of an epoch's, in an order that all draw alike."""

    def share(ids, epoch):
        order = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(epoch))]
        return order[rank::world][: len(ids) // world]

    if args.data == "molhiv":
        from datasets import molhiv  # beside this file

        graphs, split = molhiv(args.root, device)

        def batches(epoch):
            for ids in share(split["train"], epoch).split(args.batch):
                data = graphs.batch(ids)
                graph = Graph.from_edge_index(data.edge_index, len(data.x), validate=False).one_shot()
                atoms = data.x + 120 * torch.arange(9, device=device)
                yield (graph, atoms, data.batch, len(ids)), data.y.view(-1).long(), slice(None)

        return Net(nn.EmbeddingBag(9 * 120, args.width, mode="sum"), args, 2), batches
    import cluster

    made = cluster.make_batches(args.batch * args.nodes // 1000, args.batch, seed=0, device=device)

    def batches(epoch):
        chosen = (made[k] for k in share(torch.arange(len(made)), epoch).tolist())
        return (((graph, x), labels, slice(None)) for graph, x, labels in chosen)

    return Net(nn.Embedding(7, args.width), args, 6), batches


# ---- training --------------------------------------------------------------------------------------------


def state_of(model, optimizer, epoch, rank):
    """The state that the rest of the run needs."""
    parameters, moments = get_state_dict(model, optimizer)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0)
    own = {f"generators-{rank}": [torch.get_rng_state(), cuda]}
    return {"model": parameters, "optimizer": moments, "epoch": epoch, **own}


def resume(folder, model, optimizer, rank):
    """The epoch to go on with."""
    there = [int(path.parent.name) for path in folder.glob("*/.metadata")]  # complete ones
    if not there:
        return 0
    state = state_of(model, optimizer, 0, rank)
    dcp.load(state, checkpoint_id=folder / str(max(there)))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    cpu, cuda = state[f"generators-{rank}"]
    torch.set_rng_state(cpu)
    if len(cuda):
        torch.cuda.set_rng_state(cuda)
    return state["epoch"] + 1


def train(args, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same first parameters everywhere
    model, batches = (one_graph if args.mode == "graph" else many_graphs)(args, device, rank, world)
    model = model.to(device)
    if args.shard:
        for module in (*model.layers, model):
            fully_shard(module)
    else:
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    torch.manual_seed(1 + rank)
    loss = count = math.nan
    first = resume(args.checkpoint, model, optimizer, rank) if args.resume else 0
    if args.resume and rank == 0:
        print(
            f"goes on with epoch {first} of {args.checkpoint}"
            if first
            else f"begins anew: {args.checkpoint} is empty"
        )
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
            state = state_of(model, optimizer, epoch, rank)
            dcp.save(state, checkpoint_id=args.checkpoint / str(epoch))
    return loss / count


def main(argv=None):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("mode", choices=["graph", "batches"], help="what the processes share")
    add("--parts", type=existing_folder, metavar="DIR", help="graph: the parts' folder")
    add("--partition", default="contiguous", choices=["contiguous", "metis"], help="who gets which nodes")
    add(
        "--nodes",
        type=positive,
        default=20_000,
        metavar="N",
        help="of the random graph; of CLUSTER one batch per 1000",
    )
    add("--data", choices=["cluster", "molhiv"], default="cluster", help="batches of what")
    add("--root", default="data", metavar="DIR", help="folder of data sets")
    add("--batch", type=positive, default=32, metavar="N", help="graphs per process and step")
    add("--width", type=positive, default=64, metavar="N")
    add("--dropout", type=number(least=0, below=1), default=0.1, metavar="P", help="of the attention")
    add("--lr", type=number(above=0), default=3e-3, metavar="RATE")
    add("--epochs", type=positive, default=20, metavar="N")
    add("--shard", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    add("--checkpoint", type=folder_to_write, metavar="DIR", help="one folder per epoch is written here")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args(argv)
    if args.resume and args.checkpoint is None:
        parser.error("--resume: needs --checkpoint DIR")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if started:
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    # Backward runs in this thread: a process has one GPU, so that another thread gains nothing.
    how = (
        "with --resume the same command goes on" if args.checkpoint else "--checkpoint DIR keeps what is done"
    )
    with interruptible(how), watch(), torch.autograd.set_multithreading_enabled(False):
        loss = train(args, device)
    if started:
        # DistributedDataParallel's reducer has to be freed before the group (docs/guide/several_gpus.md). The
        # model was local to `train`, but is part of reference cycles.
        gc.collect()
        dist.destroy_process_group()
    return loss


if __name__ == "__main__":
    main()
