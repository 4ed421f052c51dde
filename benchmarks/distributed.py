"""Training over several processes: a whole graph, one that no GPU holds, small graphs, a killed process.

    torchrun --nproc-per-node 2 benchmarks/distributed.py --json FILE          # GPUs, or gloo without any
    torchrun --nproc-per-node 2 benchmarks/distributed.py --graph er-2000-10 --steps 2 --molhiv none
    torchrun --nproc-per-node 2 benchmarks/distributed.py --sections papers --scale 10000
    python benchmarks/distributed.py --sections death --processes 2
    python benchmarks/distributed.py --plot FILE --picture docs/pictures/distributed-overlap.png

full     three layers of GAT and of a Graph Transformer, 4 heads x 32, on one graph: the time of a training
         step (forward, backward, Adam) of rank 0 alone with the whole graph, and of all with their parts;
         halo rows and bytes, the all-to-all alone, the losses of both, and a step's kernels in time.
molhiv   Data parallelism on batches of ogbg-molhiv: graphs per second of one process and of all, the batch of
         each process being the same; by DistributedDataParallel, and captured as a CUDA graph.
papers   one layer of GAT on a graph of the size of ogbn-papers100M, 128 float32 features per node, of
         which each process makes its part; as many hidden columns as fit (``hidden_size``).
death    processes without a launcher, of which one is killed: how soon the others end, and what they say.
"""

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_data import (
    PAPERS_CLASSES,
    PAPERS_EDGES,
    PAPERS_FEATURES,
    PAPERS_NODES,
    Batches,
    GraphNet,
    power_law_part,
)
from distributed_timeline import plot, timeline
from score import json_files
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dfgnn import Graph, capture
from dfgnn.bench import graphs, report
from dfgnn.distributed import DistributedGraph, average_gradients, watch
from dfgnn.nn import GraphTransformerLayer
from dfgnn.nn.dgl import GATConv

HEADS, WIDTH, CLASSES, LAYERS = 4, 128, 47, 3
SECTIONS = "full", "molhiv", "papers", "death"


class Net(nn.Module):
    """Layers of one kind and a linear classifier."""

    def __init__(self, kind, width=WIDTH):
        super().__init__()
        self.kind = kind
        make = {
            "gat": lambda: GATConv(width, width // HEADS, HEADS, allow_zero_in_degree=True),
            "gt": lambda: GraphTransformerLayer(width, HEADS, norm="layer", allow_zero_in_degree=True),
        }[kind]
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, graph, x):
        for layer in self.layers:
            x = F.elu(layer(graph, x).flatten(1)) if self.kind == "gat" else layer(graph, x)
        return self.head(x)


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def barrier(device):
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    wait(device)


def step_times(step, steps, device, together):
    """Milliseconds of each step on the slowest rank, after two more steps to warm up."""
    times = []
    for k in range(steps + 2):
        barrier(device) if together else wait(device)
        begun = time.perf_counter()
        step()
        wait(device)
        if k >= 2:
            times.append((time.perf_counter() - begun) * 1e3)
    if together:
        every = torch.tensor(times, device=device)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        times = every.tolist()
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "steps": steps}


def reset_memory(device):
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device):
    return torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None


# ---- the whole graph -------------------------------------------------------------------------------------


def trainer(kind, dtype, graph, rows, device, shared):
    """A training step on these rows (features, labels, mask, number of all labelled nodes); gives the loss.

    shared: gradients are averaged over the processes, so that each loss is multiplied by their number."""
    torch.manual_seed(0)
    net = Net(kind).to(device, dtype)
    times = dist.get_world_size() if shared else 1
    if shared:
        net = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    x, labels, mask, count = rows
    chosen = mask.nonzero().squeeze(1)  # once: each x[mask] waits for the device
    targets = labels[chosen]

    def step():
        optimizer.zero_grad(set_to_none=True)
        logits = net(graph, x).index_select(0, chosen)
        loss = F.cross_entropy(logits.float(), targets, reduction="sum") / count
        (loss * times).backward()
        optimizer.step()
        return loss.detach()

    return step


def same_graph(name, device):
    """Rank 0's graph in all processes, because random numbers and sums may differ between GPUs."""
    if dist.get_rank() == 0:
        indptr, indices, _ = graphs.load(name, device).csr()
    sizes = gathered((len(indptr), len(indices)) if dist.get_rank() == 0 else None)[0]
    if dist.get_rank():
        indptr = torch.empty(sizes[0], dtype=torch.int64, device=device)
        indices = torch.empty(sizes[1], dtype=torch.int32, device=device)
    dist.broadcast(indptr, 0)
    dist.broadcast(indices, 0)
    return Graph.from_csr(indptr, indices, validate=False)


def full(args, device):
    """Times of one process and of all, for each model and dtype."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = same_graph(args.graph, device)
    n = whole.num_nodes
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(n, WIDTH, generator=generator, device=device)
    labels = torch.randint(CLASSES, (n,), generator=generator, device=device)
    mask = torch.rand(n, generator=generator, device=device) < 0.1
    count = int(mask.sum())
    edge_index = whole.edge_index
    begun = time.perf_counter()
    part = DistributedGraph.from_edge_index(edge_index, n, args.partition)
    wait(device)
    record = {
        "graph": args.graph, "nodes": n, "edges": whole.num_edges, "partition": args.partition,
        "divide_s": time.perf_counter() - begun, "rows": [],
    }  # fmt: skip
    # A new Graph for rank 0, because the old one has cached its edge_index, which takes memory.
    whole = None if rank else Graph.from_csr(*whole.csr()[:2], validate=False)
    del edge_index
    mine = [part.scatter(t) for t in (x, labels, mask)]
    record["parts"] = gathered({"edges": part.num_edges, "nodes": part.num_dst, "halo": part.num_halo})
    for dtype in (torch.float32, torch.bfloat16):
        record[f"exchange_{dtype}"] = exchange(part, dtype, args.steps, device)
    for kind in args.models:
        for dtype in (torch.float32, torch.bfloat16):
            row = {"model": kind, "dtype": str(dtype).removeprefix("torch.")}
            reset_memory(device)
            if rank == 0:
                row["one"] = alone(kind, dtype, whole, (x.to(dtype), labels, mask, count), args.steps, device)
            barrier(device)
            for overlap in (True, False):
                reset_memory(device)
                part.overlap = overlap
                rows = mine[0].to(dtype), *mine[1:], count
                step = trainer(kind, dtype, part, rows, device, shared=True)
                loss = step()
                dist.all_reduce(loss)
                name = "overlapped" if overlap else "at_once"
                row[name] = step_times(step, args.steps, device, together=True)
                row[name]["peak_gb"] = peak_gb(device)
                if rank == 0:
                    row[name]["loss"] = float(loss)
                    row[name]["speedup"] = row["one"]["median"] / row[name]["median"]
                if overlap and device.type == "cuda":
                    row["timeline"] = timeline(step)
                del step, rows
            record["rows"].append(row)
            if rank == 0:
                times = ", ".join(
                    f"{name} {row[name]['median']:.1f} ms ({row[name]['speedup']:.2f} x), loss "
                    f"{row[name]['loss']:.5f}"
                    for name in ("overlapped", "at_once")
                )
                one = row["one"]
                print(f"{kind} {row['dtype']}: one {one['median']:.1f} ms, loss {one['loss']:.5f}")
                print(f"  {world}: {times}")
    return record


def alone(kind, dtype, graph, rows, steps, device):
    """The step times of one process; NaN if the graph does not fit into its memory."""
    try:
        step = trainer(kind, dtype, graph, rows, device, shared=False)
        loss = float(step())
        return {"loss": loss, **step_times(step, steps, device, together=False), "peak_gb": peak_gb(device)}
    except torch.OutOfMemoryError as error:
        return {"failed": str(error)[:200], "median": math.nan, "loss": math.nan}


def gathered(value):
    """All processes' values, in the order of ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def exchange(part, dtype, steps, device):
    """Times of the all-to-all alone, for a layer's rows and for their gradients."""
    x = torch.randn(part.num_src, HEADS, WIDTH // HEADS, device=device).to(dtype)
    back = torch.zeros(part.num_halo, HEADS, WIDTH // HEADS, dtype=dtype, device=device)
    size = x[:1].nbytes if len(x) else 0
    there = step_times(lambda: part._exchange.fetch(x).wait(), steps, device, together=True)
    again = step_times(lambda: part._exchange.give_back(back).wait(), steps, device, together=True)
    sent, received = part._exchange.num_sent * size, part.num_halo * size
    return {
        "fetch": there, "give_back": again, "bytes_sent": sent, "bytes_received": received,
        "gb_per_s": received / there["median"] / 1e6,  # bytes per ms
    }  # fmt: skip


# ---- batches of small graphs -----------------------------------------------------------------------------


def graph_trainer(args, batches, size, how, device):
    """steps(count): that many training steps on batches of this size. how: "one", "all" (the wrapper
    DistributedDataParallel), "one captured" or "all captured" (one all-reduce in the CUDA graph)."""
    torch.manual_seed(0)
    net = GraphNet().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-4, fused=device.type == "cuda")
    if how == "all":
        net = DistributedDataParallel(
            net,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            static_graph=True,
        )

    def loss_of(edge_index, x, of_node, labels):
        return F.binary_cross_entropy_with_logits(net(edge_index, x, of_node, len(labels)), labels)

    def eager(*batch):
        optimizer.zero_grad(set_to_none=True)
        loss_of(*batch).backward()
        optimizer.step()

    step = eager
    if "captured" in how:
        average = {"before_step": lambda: average_gradients(net)} if "all" in how else {}

        def loss_of_dict(b):
            return loss_of(b["edge_index"], b["x"], b["batch"], b["y"])

        captured = capture(loss_of_dict, net, optimizer, capacities=[batches.most(size)], **average)

        def step(*batch):
            captured(dict(zip(("edge_index", "x", "batch", "y"), batch)))

    def steps(count):
        for _ in range(count):
            step(*batches.draw(size))

    return steps


def molhiv(args, device):
    """Graphs per second of data-parallel training: one process and all, eager and captured."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = Batches(args.molhiv, device, rank)
    at_a_time = 20 if device.type == "cuda" else 2
    rows = []
    for size in args.batch:
        row = {"batch_per_process": size}
        for how in ("one", "all", "one captured", "all captured"):
            if "captured" in how and device.type != "cuda":
                continue
            if "one" in how and rank:
                continue
            steps = graph_trainer(args, batches, size, how, device)
            found = step_times(
                lambda steps=steps: steps(at_a_time), max(3, args.steps), device, together="all" in how
            )
            ms = found["median"] / at_a_time
            row[how] = {"step_ms": ms, "graphs_per_s": size * (world if "all" in how else 1) / ms * 1e3}
        barrier(device)
        if rank == 0:
            for kind in ("", " captured"):
                if "all" + kind in row:
                    row["speedup" + kind] = (
                        row["all" + kind]["graphs_per_s"] / row["one" + kind]["graphs_per_s"]
                    )
            print(f"{args.molhiv}, {size} graphs per process: {row}")
        rows.append(row)
    return {"data": args.molhiv, "rows": rows}


# ---- a graph that no GPU holds ---------------------------------------------------------------------------


def hidden_size(part, device):
    """The largest of 64, 32, 16, 8 columns with which float32 rows fit into memory. Own nodes take about 5.5
    rows each (values, two partial results, two more for the gradient of the destinations' term or two
    gradients), halo nodes 3.2 (values, gradients, and one of these in transfer)."""
    if device.type != "cuda":
        return 64
    free = torch.cuda.get_device_properties(device).total_memory * 0.9
    fixed = part.num_dst * PAPERS_FEATURES * 4 + 20 * part.num_edges + 64 * (part.num_dst + part.num_halo)
    rows = 5.5 * part.num_dst + 1.6 * (part.num_halo + part._exchange.num_sent)
    fits = [d for d in (64, 32, 16, 8) if fixed + rows * d * 4 < free]
    return min(gathered(fits[0] if fits else 8))


def papers(args, device):
    """Times of training steps of one GAT layer on a graph of the size of ogbn-papers100M."""
    rank, world = dist.get_rank(), dist.get_world_size()
    n, edges = int(PAPERS_NODES / args.scale), int(PAPERS_EDGES / args.scale)
    reset_memory(device)
    begun = time.perf_counter()
    part = DistributedGraph._from_part(
        "papers", power_law_part(rank, world, n, edges, device), None, not args.at_once, None
    )
    wait(device)
    record = {"scale": args.scale, "total": part.total, "divide_s": time.perf_counter() - begun}
    record["divide_peak_gb"] = peak_gb(device)
    reset_memory(device)
    hidden = hidden_size(part, device)
    record |= {"features": PAPERS_FEATURES, "hidden": hidden, "dtype": "float32"}
    record["parts"] = gathered({"nodes": part.num_dst, "edges": part.num_edges, "halo": part.num_halo})
    if rank == 0:
        print(f"papers100M / {args.scale:g}: {part}, {hidden} hidden columns, {record['divide_s']:.1f} s")
    torch.manual_seed(0)
    layer = GATConv(PAPERS_FEATURES, hidden, 1, allow_zero_in_degree=True).to(device)
    head = nn.Linear(hidden, PAPERS_CLASSES).to(device)
    parameters = [*layer.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(part.num_src, PAPERS_FEATURES, generator=generator, device=device)
    train = torch.randperm(part.num_dst, generator=generator, device=device)[: part.num_dst // 90 + 1]
    labels = torch.randint(PAPERS_CLASSES, train.shape, generator=generator, device=device)
    losses = []

    def step():
        optimizer.zero_grad(set_to_none=True)
        logits = head(layer(part, x).squeeze(1)[train])
        loss = F.cross_entropy(logits, labels) / world
        loss.backward()
        for p in parameters:
            dist.all_reduce(p.grad)
        optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss)

    record["step"] = step_times(step, min(args.steps, 5), device, together=True)
    record["losses"] = [float(loss) for loss in losses]
    record["peak_gb"] = gathered(peak_gb(device))
    if rank == 0:
        print(
            f"  a step {record['step']['median']:.0f} ms, losses {record['losses']}, {record['peak_gb']} GB"
        )
    return record


# ---- a killed process ------------------------------------------------------------------------------------


def victim(rank, count, port, on_gpu, folder, timeout):
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    log = os.open(Path(folder) / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    with watch(timeout=timeout):
        edge_index = torch.randint(1000, (2, 20000), generator=torch.Generator().manual_seed(0))
        part = DistributedGraph.from_edge_index(edge_index.to(device), 1000)
        x = torch.randn(part.num_src, WIDTH, device=device)
        net = DistributedDataParallel(Net("gat").to(device), device_ids=[rank] if on_gpu else None)
        for step in range(10**6):
            net(part, x).sum().backward()
            wait(device)
            if rank == count - 1 and step == 5:
                (Path(folder) / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)


def last_words(path):
    lines = path.read_text().splitlines()
    return next((line for line in lines if "no sign of life" in line), None)


def death(args):
    on_gpu = torch.cuda.is_available()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.processes, store.port, on_gpu, folder, args.timeout)
        processes = [context.Process(target=victim, args=(r, *arguments)) for r in range(args.processes)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        ended = time.time()
        record = {
            "processes": args.processes,
            "backend": "nccl" if on_gpu else "gloo",
            "timeout": args.timeout,
            "seconds": ended - float((Path(folder) / "killed").read_text()),
            "exit_codes": [process.exitcode for process in processes],
            "said": [last_words(Path(folder) / f"stderr-{r}") for r in range(args.processes)],
        }  # fmt: skip
        for process in processes:
            process.kill()
    print(json.dumps(record))
    return record


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", default=["full", "molhiv"], choices=SECTIONS)
    parser.add_argument("--graph", default="products~")
    parser.add_argument("--partition", default="contiguous")
    parser.add_argument("--models", nargs="+", default=["gat", "gt"])
    parser.add_argument("--molhiv", default="ogbg-molhiv", help="or none: rings of the same size")
    parser.add_argument("--batch", nargs="+", type=int, default=[32, 512, 2048], help="graphs per process")
    parser.add_argument("--steps", type=int, default=7, help="measured; two more warm up")
    parser.add_argument("--scale", type=float, default=1.0, help="divides the nodes and edges of papers")
    parser.add_argument("--at-once", action="store_true", help="papers without overlap")
    parser.add_argument("--processes", type=int, default=2, help="of death")
    parser.add_argument("--timeout", type=float, default=20.0, help="of death's watch")
    parser.add_argument("--commit", help="recorded; default: that of the working tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--plot", type=Path, help="draw the timelines of these results instead")
    parser.add_argument("--picture", type=Path, default=Path("overlap.png"))
    args = parser.parse_args(argv)
    if args.plot:
        return plot(args.plot, args.picture)
    if args.sections == ["death"]:
        result = {"death": death(args)}
        rank = 0
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        rank = int(os.environ["RANK"])
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        ids = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group("nccl" if ids else "gloo", timeout=timedelta(seconds=120), **ids)
        result = {"processes": dist.get_world_size()}
        with watch(timeout=30):
            for section in args.sections:
                result[section] = {"full": full, "molhiv": molhiv, "papers": papers}[section](args, device)
        gc.collect()  # of the sections' models, whose reducers have to be freed before the group
        dist.destroy_process_group()
    result = {"environment": report.environment(device, args.commit), **result}
    if rank == 0 and args.json:
        json_files.write_json(args.json, result)
    return None


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
