"""Runs every CUDA kernel on small graphs, for compute-sanitizer (scripts/gpu_check.py starts it):

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python scripts/sanitize_suite.py [K/N]

K/N: every N-th call from the K-th on, so that several processes can share the work.
Results only have to be finite; tests check whether they are right. They are copied to the host, so that
initcheck notices a result that was not written completely.
"""

import itertools
import os
import re
import sys
import time
from functools import wraps
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from attention import function

from dfgnn import Graph, functional
from dfgnn.nn.fused.operator_call import computed
from dfgnn.nn.fused.spec import LayerSpec
from dfgnn.plan import ROW_SCHEDULES
from dfgnn.runtime.arguments import LayerTensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADS = (1, 3, 8)
# Every lane layout of csrc/cuda/launch.cuh in every dtype: heads that are padded to 16 bytes, that take a few
# lanes, a whole warp, several loads per lane, or more than that (300 and up in float64, 600 in float32, 1100
# in 16-bit types).
DIMS = (1, 7, 8, 16, 32, 33, 64, 128, 256, 300, 600, 1100)

# Cases: (score, set of options). "grad": with backward. "edge grad": edge tensors get gradients, too.
CASES = (
    ("gat", set()),
    ("gat", {"bias", "weight"}),
    ("gat", {"grad"}),
    ("gat", {"grad", "no score_dst"}),
    ("gat", {"grad", "dropout", "bias", "shared weight", "out bias"}),
    ("gat", {"grad", "dropout", "bias", "weight", "edge grad", "attention"}),
    ("gat", {"grad", "attention", "no score_dst"}),
    ("dot", set()),
    ("dot", {"attention", "shared weight"}),
    ("dot", {"grad"}),
    ("dot", {"grad", "dropout", "weight"}),
    ("dot", {"grad", "dropout", "bias", "shared weight", "edge grad", "attention"}),
    ("dot", {"grad", "other value size"}),
    ("gat", {"gate", "mask", "feat"}),
    ("gat", {"grad", "gate", "mask", "edge grad"}),
    ("gat", {"grad", "feat", "edge grad", "dropout"}),
    ("gatv2", set()),
    ("gatv2", {"grad", "out bias"}),
    ("gatv2", {"grad", "weight", "dropout"}),
    ("gatv2", {"feat", "attention"}),
    ("gatv2", {"grad", "feat", "gate", "mask", "edge grad", "attention"}),
    ("dot", {"feat", "mask"}),
    ("dot", {"grad", "feat", "edge grad", "out bias"}),
    ("dot", {"grad", "gate", "feat", "bias", "weight", "dropout", "edge grad", "attention"}),
    ("dot", {"projected"}),
    ("dot", {"grad", "projected", "edge grad", "dropout", "out bias"}),
)


def bmm(a, b, out=None):
    """torch.bmm of small matrices without cuBLAS, whose results in 16-bit types initcheck takes for
    unwritten: its kernels store them by bulk copies."""
    product = (a.unsqueeze(-1) * b.unsqueeze(1)).sum(2)
    return product if out is None else out.copy_(product)


_mine = itertools.repeat(True)  # for each call in turn, whether this process (K of N) makes it


def shared(function):
    """A decorator for calls that are distributed over the processes."""

    @wraps(function)
    def turn(*args):
        if next(_mine):
            function(*args)

    return turn


def skewed(device) -> Graph:
    """Super nodes in both directions, rows without edges, duplicates, unsorted edges (so with edge ids)."""
    generator = torch.Generator().manual_seed(0)
    n, many = 70, 2300  # more edges than a work item ever has
    some = torch.randint(n - 6, (2, 200), generator=generator)
    src = torch.cat([torch.arange(many) % (n - 3), torch.full((many,), 5), some[0]])
    dst = torch.cat([torch.full((many,), 3), torch.arange(many) % (n - 6), some[1]])
    order = torch.randperm(len(src), generator=generator)
    return Graph.from_coo(src[order].to(device), dst[order].to(device), num_nodes=n)


def bipartite(device) -> Graph:
    """More sources than destinations, edges sorted: no edge ids."""
    generator = torch.Generator().manual_seed(0)
    dst = torch.randint(40, (400,), generator=generator).sort().values
    src = torch.randint(90, (400,), generator=generator)
    return Graph.from_coo(src.to(device), dst.to(device), num_src=90, num_dst=40)


def local(device) -> Graph:
    """A graph for tiles and source partitions: no edge twice, sorted rows that share their neighbours,
    windows of many columns."""
    generator = torch.Generator().manual_seed(0)
    dst = torch.randint(150, (3000,), generator=generator)
    src = torch.where(dst < 100, dst // 30 * 30 + torch.arange(3000) % 30, torch.arange(3000) % 150)
    edges = torch.stack([dst, src]).unique(dim=1).to(device)
    return Graph.from_coo(edges[1], edges[0], num_nodes=150)


def edgeless(device) -> Graph:
    none = torch.empty(0, dtype=torch.int64, device=device)
    return Graph.from_coo(none, none, num_src=5, num_dst=7)


@shared
def call(graph, score, options, heads, dim, dtype, schedule):
    def tensor(*shape, grad="grad" in options, dtype=dtype):
        return torch.randn(shape).to(graph.device, dtype).requires_grad_(grad)

    edge_grad = "edge grad" in options
    keywords = {"schedule": schedule, "return_attention": "attention" in options}
    place = {"gat": "edge_value", "gatv2": "edge_key", "dot": "edge_both"}[score]
    if "bias" in options:  # in the accumulation type, which kernels also accept
        accumulated = torch.float64 if dtype == torch.float64 else torch.float32
        term = "edge_score" if score == "gat" else "bias"
        keywords[term] = tensor(graph.num_edges, heads, grad=edge_grad, dtype=accumulated)
    if "weight" in options:
        keywords["weight"] = tensor(graph.num_edges, heads, grad=edge_grad)
    if "shared weight" in options:
        keywords["weight"] = tensor(graph.num_edges, grad=edge_grad)
    if "gate" in options:
        keywords["gate"] = tensor(graph.num_edges, grad=edge_grad)
    if "mask" in options:
        keywords["mask"] = torch.rand(graph.num_edges, device=graph.device) < 0.7
    if "feat" in options:
        keywords[place] = tensor(graph.num_edges, heads, dim, grad=edge_grad)
    if "projected" in options:  # with sizes that are no multiple of a load
        keywords["edge_attr"] = tensor(graph.num_edges, dim % 13 + 1, grad=edge_grad)
        keywords[place + "_weight"] = tensor(heads * dim, dim % 13 + 1)
    if "out bias" in options:
        keywords["out_bias"] = tensor(heads, dim)
    if "dropout" in options:
        keywords["dropout_p"] = 0.4
    if score == "gat":
        score_dst = None if "no score_dst" in options else tensor(graph.num_dst, heads)
        inputs = [tensor(graph.num_src, heads, dim), tensor(graph.num_src, heads), score_dst]
    elif score == "gatv2":
        inputs = [tensor(n, heads, dim) for n in (graph.num_dst, graph.num_src)] + [tensor(heads, dim)]
    else:
        value_dim = dim // 2 + 1 if "other value size" in options else dim
        sizes = (graph.num_dst, dim), (graph.num_src, dim), (graph.num_src, value_dim)
        inputs = [tensor(n, heads, d) for n, d in sizes]
    results = function(score)(graph, *inputs, **keywords)

    results = list(results) if isinstance(results, tuple) else [results]
    if "grad" in options:
        leaves = [x for x in (*inputs, *keywords.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
        grads = [torch.randn(x.shape).to(x) for x in results]
        results += torch.autograd.grad(results, leaves, grads)
    for x in results:
        assert x.detach().cpu().isfinite().all(), (score, options, heads, dim, dtype, schedule)


@shared
def gather_sum(graph, width, dtype, schedule):
    csr, plan = graph.csr(), graph.plan(1, width, dtype, schedule=schedule)
    feat = torch.randn(graph.num_src, width).to(graph.device, dtype)
    arguments = csr.indices, plan.items, plan.splits, plan.launch, graph.num_dst
    assert torch.ops.dfgnn.gather_sum(feat, *arguments).cpu().isfinite().all()


def forced(graph) -> int:
    """Calls with schedules that "auto" does not choose here; returns their number."""
    on_gpu, calls = graph.device.type == "cuda", 0
    for dtype in DTYPES[:3]:
        for dim in (8, 16, 32, 64, 128):
            names = ["natural<=32 heads<=1 sources/3", "longest_first<=64 sources/2"] if on_gpu else []
            has_tiles = on_gpu and dtype.itemsize == 2
            names += ["tiles", "tiles<=64"] if has_tiles else ["natural<=32 heads<=1 sources/3"]
            for score, options in (
                ("gat", {"grad"}),
                ("gat", set()),
                ("dot", {"grad"}),
                ("dot", {"grad", "out bias"}),
            ):
                call(graph, score, options, HEADS[calls % len(HEADS)], dim, dtype, names[calls % len(names)])
                calls += 1
                if on_gpu:
                    call(graph.one_shot(), score, options, HEADS[calls % len(HEADS)], dim, dtype, "auto")
                    calls += 1
                if has_tiles:
                    call(graph, score, options, HEADS[calls % len(HEADS)], dim, dtype, "tiles<=64")
                    calls += 1
    return calls


def not_finite(graph) -> int:
    """Calls on tiles with numbers that are not finite, which separate code adds up; returns their number."""
    calls = 0
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (8, 16, 32, 64, 128):
            for attention, shapes in (
                (functional.gat_attention, ((dim,), (), ())),
                (functional.dot_attention, ((dim,), (dim,), (dim,))),
            ):
                spoilt(graph, attention, shapes, dtype)
                calls += 1
    return calls


@shared
def spoilt(graph, attention, shapes, dtype):
    inputs = [torch.randn(graph.num_src, 2, *shape).to(graph.device, dtype) for shape in shapes]
    for x in inputs:
        x[1] = torch.inf
    inputs = [x.requires_grad_() for x in inputs]
    out = attention(graph, *inputs, kernel_options={"schedule": "tiles"})
    results = (out, *torch.autograd.grad(out.sum(), inputs))
    assert not all(x.detach().cpu().isfinite().all() for x in results), (dtype, shapes)


@shared
def products(graph, heads, dim, dtype):
    """sddmm, spmm and their gradients, which are spmm and sddmm again."""
    rows = (torch.randn(graph.num_dst, heads, dim) / dim**0.5).to(graph.device, dtype).requires_grad_()
    feat = torch.randn(graph.num_src, heads, dim).to(graph.device, dtype).requires_grad_()
    out = functional.spmm(graph, functional.sddmm(graph, rows, feat), feat)
    for x in (out, *torch.autograd.grad(out.sum(), (rows, feat))):
        assert x.detach().cpu().isfinite().all(), (heads, dim, dtype)


@shared
def blocks(device, heads, dim, dtype, options):
    """Attention within blocks of many lengths, with rows outside of them, and its two derivatives."""
    offsets = torch.tensor([2, 5, 5, 6, 69, 133, 198, 330]).to(device)
    key_offsets = torch.tensor([0, 4, 9, 9, 40, 170, 171, 300]).to(device) if options else None
    keys = 303 if options else 333
    sizes = (333, heads, dim), (keys, heads, dim), (keys, heads, dim // 2 + 1 if options else dim)
    leaves = [torch.randn(size).to(device, dtype).requires_grad_() for size in sizes]
    more = dict(key_bias=torch.randn(keys, heads), sink=torch.randn(heads)) if options else {}
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    more = {name: x.to(device, accumulated).requires_grad_() for name, x in more.items()}
    leaves += more.values()
    out = functional.block_attention(*leaves[:3], offsets, key_offsets, **more)
    first = torch.autograd.grad(out.square().mean(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().mean() for x in first), leaves)
    for x in (out, *first, *second):
        assert x.detach().cpu().isfinite().all(), (heads, dim, dtype, options)


@shared
def layers(graph, heads, dim, dtype):
    """The operator of a fused GAT layer, which also computes its score terms."""
    x = torch.randn(graph.num_src, 6).to(graph.device, dtype).requires_grad_()
    sizes = (heads * dim, 6), (heads, dim), (heads, dim), (heads * dim,)
    weights = [torch.randn(size).to(graph.device, dtype).requires_grad_() for size in sizes]
    weight, attn_src, attn_dst, bias = weights
    seed = torch.randint(2**62, (1,), device=graph.device)
    given = dict(x=x, value_weight=weight, attn=attn_src, attn_dst=attn_dst, out_bias=bias, seed=seed)
    t = LayerTensors(**{name: given.get(name) for name in LayerTensors._fields})
    spec = LayerSpec("additive", heads, None, negative_slope=0.2, dropout_p=0.3)
    out = computed(spec, graph, t, dtype)
    for result in (out, *torch.autograd.grad(out.mean(), (x, *weights))):
        assert result.detach().cpu().isfinite().all(), (heads, dim, dtype)


def of_capacity(graph) -> int:
    """Calls on a graph of fixed capacity, with these edges and then fewer; returns their number."""
    capacity = graph.num_src + 9, graph.num_dst + 9
    buffer = Graph.with_capacity(capacity, graph.num_edges + 33, device=graph.device)
    for edges in (graph.edge_index, graph.edge_index[:, : graph.num_edges // 2]):
        buffer.copy_(edges, (graph.num_src, graph.num_dst))
        for score in ("gat", "gatv2", "dot"):
            call(buffer, score, {"grad", "bias", "weight", "edge grad"}, 3, 8, torch.float32, "auto")
    return 6


def schedules(graph, heads, dim, dtype) -> list[str]:
    vector = 16 // dtype.itemsize
    padded = -(-dim // vector) * vector
    names = [candidate.schedule for candidate in graph.plan(heads, padded, dtype).candidates]
    return [name for name in names if name != "tiles"]


def run(device="cuda", dims=DIMS) -> int:
    """The number of calls made. Cases, heads and schedules take turns, to keep sanitizers' time short."""
    torch.manual_seed(0)
    graph, others = skewed(device), (bipartite(device), edgeless(device))
    used, calls = set(), 0
    work = [(graph, dtype, dim, 5) for dtype in DTYPES for dim in dims]
    work += [(other, dtype, 8, len(CASES)) for dtype in DTYPES[:2] for other in others]
    turn = 0
    for on, dtype, dim, count in work:
        cases = [CASES[(turn + k) % len(CASES)] for k in range(count)]
        turn += count
        for score, options in cases:
            heads = HEADS[calls % len(HEADS)]
            names = schedules(on, heads, dim, dtype)
            schedule = names[calls // len(HEADS) % len(names)]
            call(on, score, options, heads, dim, dtype, schedule)
            used.add(schedule)
            calls += 1
        products(on, HEADS[calls % len(HEADS)], dim, dtype)
        # `layers` gives the sources' features alone: destinations are then the first sources, so that there
        # must be no more destinations than sources.
        if on.num_dst <= on.num_src:
            layers(on, HEADS[calls % len(HEADS)], dim, dtype)
        vector = 16 // dtype.itemsize
        if device == "cuda" and dtype != torch.float64 and dim % vector == 0:
            for schedule in schedules(on, 1, dim, dtype):
                gather_sum(on, dim, dtype, schedule)
                calls += 1
    for dtype, dim, options in itertools.product(DTYPES, dims, (False, True)):
        if dim in (7, 32, 64) or (dim == 128 and dtype != torch.float64):  # others take a graph of pairs
            blocks(device, HEADS[calls % len(HEADS)], dim, dtype, options)
            calls += 1
    calls += forced(local(device)) + of_capacity(bipartite(device))
    if device == "cuda":
        calls += not_finite(local(device))
        torch.cuda.synchronize()
        assert used == set(ROW_SCHEDULES), f"schedules that were never used: {set(ROW_SCHEDULES) - used}"
        assert all(len(graph.plan(reverse=r).splits) for r in (False, True)), "no row was split"
    return calls


if __name__ == "__main__":
    if len(sys.argv) > 1:
        match = re.fullmatch(r"(\d+)/(\d+)", sys.argv[1])
        part, parts = map(int, match.groups()) if match else (0, 0)
        if not 1 <= part <= parts:
            print(f"sanitize_suite: expected K/N with 1 <= K <= N, got {sys.argv[1]!r}", file=sys.stderr)
            sys.exit(2)
        _mine = itertools.cycle([k == part - 1 for k in range(parts)])
    torch.bmm = bmm
    start = time.perf_counter()
    print(f"{run()} calls in {time.perf_counter() - start:.1f} s", flush=True)
    os._exit(0)  # under initcheck threads of torch's sometimes abort the process at the interpreter's end
