"""Runs thousands of random steps in one process and checks that memory does not grow:

    python scripts/soak.py --device cuda --steps 10000
    python scripts/soak.py --device cpu --seconds 60

Each step takes a new graph or one of a few that live longer, a dtype, and a function or a layer, with
dropout, returned attention, edge tensors or a following in-place operation. Some steps raise: for bad input
before any kernel, or between forward and backward or in backward; some run no backward, and some replace one
of the longer-lived graphs; with --fresh every step makes its graph. After a warm-up the memory of the host
(resident) and of the device (allocated, and reserved by the allocator) must not grow. Prints a verdict; the
exit status is 1 if memory grows or a result is not finite, 2 if there was too little time to tell.

Matrix products run without oneDNN here, because it caches code for the last 1024 shapes, 50 to 100 kB each:
a plain torch.nn.Linear on inputs of 600 lengths takes 100 MB before its memory stops growing.
"""

import copy
import ctypes
import gc
import math
import pickle
import random
import sys
import time

import torch

from dfgnn import Graph, functional, nn
from dfgnn.runtime.programs import Parser, device, integer, number

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FUNCTIONS = ("gat", "gatv2", "dot", "agnn", "flex", "softmax", "products")
# Growth that is tolerated, between the medians of both halves of the run, so that single peaks do not count.
# On the CPU 1,000 steps with --fresh move the host's median by 0.1 MiB; with a GPU, kernels are loaded at
# their first use and cuBLAS caches its choice for each shape.
HOST_SLACK = {"cpu": 4 << 20, "cuda": 16 << 20}
DEVICE_SLACK, RESERVED_SLACK = 4 << 20, 16 << 20


class Interrupted(Exception):
    """Raised in the middle of a step, as an exception in a user's code is."""


def random_graph(rng, device):
    """Up to 300 nodes; every fifth has a super node; some go through a copy, a pickle or a batch."""
    n, m = rng.randint(1, 300), rng.randint(0, 3000)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    ends = torch.randint(n, (2, m), generator=generator)
    if rng.random() < 0.2:
        ends[rng.randint(0, 1), : m // 2] = n // 2
    graph = Graph.from_edge_index(ends.to(device), n).add_self_loops()
    way = rng.randrange(6)
    if way == 0:
        return pickle.loads(pickle.dumps(graph))
    if way == 1:
        return copy.deepcopy(graph)
    if way == 2:
        return Graph.batch([graph, graph.reverse()])
    return graph.one_shot() if way == 3 else graph


def _leaf(rng, graph, dtype, *shape):
    x = torch.randn(shape, device=graph.device, dtype=torch.float32).to(dtype)
    return x.requires_grad_(rng.random() < 0.8)


def call_function(rng, graph, dtype):
    """Results of one of the functions with options drawn at random."""
    name, heads, dim = rng.choice(FUNCTIONS), rng.choice((1, 3, 8)), rng.choice((1, 7, 16, 33, 64))
    n, num_edges = graph.num_src, graph.num_edges
    x, y, z = (_leaf(rng, graph, dtype, n, heads, dim) for _ in range(3))
    edge = _leaf(rng, graph, dtype, num_edges, heads)
    if name == "softmax":
        return (functional.edge_softmax(graph, edge),)
    if name == "products":
        return functional.sddmm(graph, x, y), functional.spmm(graph, edge, z)
    options = {}
    if rng.random() < 0.4:
        options["dropout_p"] = 0.5
    if rng.random() < 0.4:
        options["return_attention"] = True
    if rng.random() < 0.4:
        options["weight"] = edge
    if rng.random() < 0.3:
        options["mask"] = torch.rand(num_edges, device=graph.device) < 0.7
    if name == "agnn":
        result = functional.agnn_attention(graph, x, **options)
    elif name == "flex":
        result = functional.flex_attention(
            graph, _score, x, y, z, kernel_options={"chunk_edges": 500}, **options
        )
    elif name == "gatv2":
        att = _leaf(rng, graph, dtype, heads, dim)
        result = functional.gatv2_attention(graph, x, y, att, **options)
    else:
        if rng.random() < 0.4:
            options["bias"] = _leaf(rng, graph, dtype, num_edges, heads)
        if name == "dot":
            result = functional.dot_attention(graph, x, y, z, **options)
        else:
            terms = (_leaf(rng, graph, dtype, n, heads) for _ in range(2))
            result = functional.gat_attention(graph, x, *terms, **options)
    return result if isinstance(result, tuple) else (result,)


def _score(q, k, e):
    return (q * k).sum(-1) / q.shape[-1] ** 0.5


def call_layer(rng, graph, dtype, layers):
    """Results of a layer that lives as long as the run, on new features; under autocast for half types."""
    layer = rng.choice(list(layers.values()))
    x = torch.randn(graph.num_src, 16, device=graph.device, requires_grad=rng.random() < 0.8)
    with torch.autocast(graph.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        result = layer(graph, x)
    layer.zero_grad(set_to_none=True)
    return (result,)


def step(rng, graph, layers):
    """One call and, mostly, its backward."""
    dtype = rng.choice(DTYPES)
    if rng.random() < 0.05:
        try:
            functional.sddmm(graph, torch.ones(graph.num_dst + 1, 1, 4, device=graph.device), None)
        except ValueError:
            raise Interrupted from None
        raise AssertionError("bad input was not refused")
    if rng.random() < 0.15:
        with torch.inference_mode():
            results = call_function(rng, graph, dtype)
    elif rng.random() < 0.4:
        results = call_layer(rng, graph, dtype, layers)
    else:
        results = call_function(rng, graph, dtype)
    if rng.random() < 0.05:
        raise Interrupted
    finite = torch.stack([x.detach().isfinite().all() for x in results]).all()
    if results[0].requires_grad:
        out = results[0]
        if rng.random() < 0.3:
            out = out.mul_(0.5)
        elif rng.random() < 0.3:
            out = torch.nn.functional.elu_(out)
        loss = sum(x.float().sum() for x in (out, *results[1:]))
        if rng.random() < 0.1:
            return finite  # a step without backward
        if rng.random() < 0.05:
            out.register_hook(_interrupt)
        loss.backward()
    return finite


def _interrupt(grad):
    raise Interrupted


def host_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def measure(device):
    """(resident bytes of the host, allocated and reserved bytes of the device)."""
    gc.collect()
    if sys.platform == "linux":  # returns memory that malloc holds for reuse, so that it does not count
        ctypes.CDLL(None).malloc_trim(0)
    if device != "cuda":
        return host_bytes(), 0, 0
    torch.cuda.synchronize()
    return host_bytes(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _median(values):
    return sorted(values)[len(values) // 2]


def verdict(samples, device):
    """A text, and whether the samples' second half has no more memory than the first."""
    half, flat, lines = len(samples) // 2, True, []
    limits = {
        "host resident": HOST_SLACK[device],
        "device allocated": DEVICE_SLACK,
        "device reserved": RESERVED_SLACK,
    }
    for (name, slack), *values in zip(limits.items(), *samples):
        before, after = _median(values[:half]), _median(values[half:])
        grows = after - before > slack
        flat &= not grows
        lines.append(
            f"{name:17} {before / 2**20:9.1f} -> {after / 2**20:9.1f} MiB  {'GROWS' if grows else 'flat'}"
        )
    return "\n".join(lines), flat


def made(device):
    """The layers that steps use, by name."""
    chosen = (nn.dgl.GATConv, nn.dgl.GATv2Conv, nn.dgl.DotGatConv, nn.GraphTransformerConv)
    layers = [nn.dgl.AGNNConv(), *(layer(16, 8, 2) for layer in chosen)]
    return {type(layer).__name__: layer.to(device) for layer in layers}


def main(argv=None):
    parser = Parser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, help="where")
    parser.add_argument("--steps", type=integer(100), default=10_000, metavar="N", help="at most")
    parser.add_argument("--seconds", type=number(above=0), help="stop after so many, whatever the steps")
    parser.add_argument("--fresh", action="store_true", help="keep no graph")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of graphs and arguments")
    args = parser.parse_args(argv)
    args.device = torch.device(args.device).type

    torch.backends.mkldnn.enabled = False
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    layers = made(args.device)
    kept = [random_graph(rng, args.device) for _ in range(8)]
    samples, interrupted, done, begin = [], 0, 0, time.monotonic()
    next_sample, interval = begin, (args.seconds or math.inf) / 100
    finite = torch.ones((), dtype=torch.bool, device=args.device)
    every = max(args.steps // 100, 10)
    for done in range(1, args.steps + 1):
        if rng.random() < 0.02:
            kept[rng.randrange(len(kept))] = random_graph(rng, args.device)
        graph = rng.choice(kept) if not args.fresh and rng.random() < 0.6 else random_graph(rng, args.device)
        try:
            finite &= step(rng, graph, layers)
        except Interrupted:
            interrupted += 1
        del graph
        if done % every == 0 or time.monotonic() > next_sample:
            samples.append(measure(args.device))
            next_sample = time.monotonic() + interval
        if args.seconds and time.monotonic() - begin > args.seconds:
            break
    samples = samples[len(samples) // 5 :]  # without the warm-up
    if len(samples) < 8:
        print(f"soak: {done} steps are too few to judge; give it more time\nverdict: none")
        return 2
    text, flat = verdict(samples, args.device)
    took = time.monotonic() - begin
    print(f"soak on {args.device}: {done} steps in {took:.0f} s, {interrupted} interrupted, seed {args.seed}")
    print(text)
    right = bool(finite)
    print(f"results: {'finite' if right else 'NOT FINITE'}")
    print("verdict:", "pass" if flat and right else "FAIL")
    return 0 if flat and right else 1


if __name__ == "__main__":
    sys.exit(main())
