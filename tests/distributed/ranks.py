"""Processes of a gloo group, and what the tests run in them: functions that get the group."""

import contextlib
import multiprocessing as mp
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from attention import SCORE_INPUTS, SCORES, VALUES, function, make_inputs
from graphs import GRAPHS, make_graph  # noqa: F401

from dfgnn import Graph
from dfgnn.distributed import DistributedGraph

LOCALHOST = "127.0.0.1"
GROUPS = ((1, 3), (0, 2, 3))  # further process groups, in which a rank has another number than in the world


def start(target, rank, size, port, *args):
    """A process that calls target(rank, size, port, *args). It is forked from a server that has imported the
    libraries."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["dfgnn.distributed", "dfgnn.nn.pyg", "dgl", "pytest", "torch._dynamo"])
    process = context.Process(target=target, args=(rank, size, port, *args), daemon=True)
    process.start()
    return process


def new_store():
    """A store in the parent process, so that it outlives every rank, as torchrun's does."""
    return dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)


def join(rank, size, port, timeout=30):
    torch.set_num_threads(1)
    store = dist.TCPStore(LOCALHOST, port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )


class Ranks:
    """``size`` processes that wait for calls."""

    def __init__(self, size):
        self.store = new_store()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = mp.Pipe()
            self.processes.append(start(_serve, rank, size, self.store.port, theirs))
            self.pipes.append(ours)

    def run(self, call, *args, ranks=None):
        """What ``call(group, *args)`` returns in each of the ranks; default all. The others wait."""
        ranks = list(range(len(self.pipes))) if ranks is None else list(ranks)
        for rank in ranks:
            self.pipes[rank].send((call, args, tuple(ranks)))
        results = []
        for rank in ranks:
            assert self.pipes[rank].poll(120), f"rank {rank} does not answer"
            results.append(self.pipes[rank].recv())
        failures = [f"rank {rank}:\n{text}" for rank, (text, _) in zip(ranks, results) if text]
        assert not failures, "\n".join(failures)
        return [found for _, found in results]

    def close(self):
        for pipe in self.pipes:  # closing is not enough: workers of other tests may hold a copy open
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _serve(rank, size, port, pipe):
    join(rank, size, port)
    groups = {members: dist.new_group(members) for members in GROUPS}
    groups[tuple(range(size))] = None
    while True:
        order = pipe.recv()
        if order is None:
            return
        call, args, ranks = order
        try:
            torch.manual_seed(0)
            pipe.send((None, call(groups[ranks], *args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


# ---- comparison with one process -------------------------------------------------------------------------

SIDES = {
    "src": ("value", "score_src", "key"),
    "dst": ("score_dst", "query", "out"),
    "edges": ("bias", "edge_score", "weight", "gate", "edge_key", "edge_value", "edge_both", "attention"),
}
SIDE_OF = {name: side for side, names in SIDES.items() for name in names}


def a_partition(kind, num_src, num_dst, count):
    """ "contiguous", or nodes given at random to all ranks but the first, which gets none."""
    if kind == "contiguous":
        return kind
    generator = torch.Generator().manual_seed(count)
    first = min(1, count - 1)
    src, dst = (torch.randint(first, count, (n,), generator=generator) for n in (num_src, num_dst))
    return src if num_src == num_dst else (src, dst)


def both(group, name, kind="contiguous", **options):
    """The graph of that name as a whole, and this rank's part."""
    src, dst, num_src, num_dst = GRAPHS[name]()
    sizes = {"num_nodes": num_src} if num_src == num_dst else {"num_src": num_src, "num_dst": num_dst}
    partition = a_partition(kind, num_src, num_dst, dist.get_world_size(group))
    part = DistributedGraph.from_edge_index(
        torch.stack([src, dst]), partition=partition, group=group, **sizes, **options
    )
    return Graph.from_coo(src, dst, num_src=num_src, num_dst=num_dst), part


def results(attention, graph, inputs, local, **options):
    """Outputs and gradients by name; local(name, x): this process's rows of x."""
    leaves = {name: local(name, x).clone().requires_grad_() for name, x in inputs.items()}
    found = attention(graph, **leaves, **options)
    found = dict(zip(("out", "attention"), found if isinstance(found, tuple) else (found,)))
    value = next(x for name, x in inputs.items() if name in VALUES.values())
    sizes = {"out": value.shape[1:], "attention": value.shape[1:2]}
    loss = value.new_zeros(())
    for name, x in found.items():
        generator = torch.Generator().manual_seed(1)
        rows = options_rows[name]
        weight = torch.randn(rows, *sizes[name], generator=generator).to(value.dtype)
        loss = loss + (x * local(name, weight)).sum()
    loss.backward()
    return {n: x.detach() for n, x in found.items()} | {f"grad_{n}": x.grad for n, x in leaves.items()}


options_rows = {}


def compare_attention(group, graph_name, kind, dtype, limit, cases):
    """The largest relative difference over the cases, (score, edge tensors, options, overlap) each."""
    parts, worst = {}, 0.0
    for score, edges, options, overlap in cases:
        if overlap not in parts:
            parts[overlap] = both(group, graph_name, kind, overlap=overlap)
        graph, part = parts[overlap]
        torch.manual_seed(3)
        inputs = make_inputs(score, graph, 3, 7, dtype, **edges)
        if options.get("out_bias"):
            inputs["out_bias"] = torch.randn(3, 7, dtype=dtype)
        options = {n: x for n, x in options.items() if n != "out_bias"}
        options["generator"] = torch.tensor(
            [5 + dist.get_rank(group)]
        )  # all ranks must take rank 0's seed, 5
        options_rows.update(out=graph.num_dst, attention=graph.num_edges)
        call = function(score)
        expected = results(call, graph, inputs, lambda n, x: x, **{**options, "generator": torch.tensor([5])})

        def local(name, x, part=part):
            return part.scatter(x, SIDE_OF[name]) if name in SIDE_OF else x

        actual = results(call, part, inputs, local, **options)
        for name, x in expected.items():
            plain = name.removeprefix("grad_")
            y = actual[name]
            if plain not in SIDE_OF:  # the gradient of a parameter is the sum over the ranks
                dist.all_reduce(y, group=group)
            x = local(plain, x)
            assert x.shape == y.shape and x.dtype == y.dtype, (score, name, x.shape, y.shape)
            scale = max(expected[name].abs().max().item(), 1.0) if expected[name].numel() else 1.0
            if plain in SCORE_INPUTS:  # terms of the size 3 sqrt(D) cancel, one per destination of a source
                scale = max(scale, 3 * 7**0.5 * graph.num_dst / max(graph.num_src, 1))
            error = (x - y).abs().max().item() / scale if x.numel() else 0.0
            assert error <= limit, (
                f"{graph_name} {score} {edges} {options} overlap={overlap}: {name}: {error}"
            )
            worst = max(worst, error)
    return worst


EDGES = ({}, {"term": True, "weight": "H"}, {"gate": 1, "edge": True})
OPTIONS = ({"out_bias": True}, {"dropout_p": 0.4}, {"return_attention": True, "dropout_p": 0.3})


def all_cases():
    return [
        (score, edges, options, overlap)
        for score in SCORES
        for edges in EDGES
        for options in OPTIONS
        for overlap in ((True, False) if "return_attention" not in options else (True,))
    ]
