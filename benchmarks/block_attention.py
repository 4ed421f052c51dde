"""Attention within ragged blocks: `dfgnn.functional.block_attention` compared with other ways to compute it.

    python benchmarks/block_attention.py --check            # errors against float64, of every kernel
    python benchmarks/block_attention.py                    # training steps and steps with forces
    python benchmarks/block_attention.py --device cpu --blocks 256x64,256x16-512

A training step is forward and backward of a random cotangent; a step with forces is the gradient of the
square of an energy's gradients. On CUDA both are captured as a graph, too, whose time is the kernels' alone.
Rivals: torch's variable-length attention (16 bits on CUDA), scaled dot-product attention over padded
blocks, FlexAttention with a BlockMask of the blocks (on CUDA; of 16 bits also with its backend FLASH, where
the package flash-attn-4 is installed), for forces plain operations over
padded blocks, as metatrain's PET has them, and over a list of pairs, as deepmd-kit has them, and
torch_geometric's GPSConv without a local layer (--graphs).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from score.json_files import write_json
from torch import Tensor

from dfgnn import functional, reference
from dfgnn.bench.measure import peak_extra
from dfgnn.bench.report import environment, environment_line

BLOCKS = "256x64,2048x8-64,256x16-512,32x256-2048,4096x2-12,1024x1-300,4x4096-8192"
# FlexAttention's mask is made of all pairs of rows.
MOST_OF_FLEX = 2**17
MOST_CAPTURED = 50.0  # ms of a step that is captured: the host is little of what takes longer
RECORDS: list[dict[str, Any]] = []
# Errors up to these, or four times those of plain operations, are right.
ERRORS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def lengths(text: str, seed: int = 0) -> list[int]:
    """The lengths of the blocks that "COUNTxLOW-HIGH" or "COUNTxLENGTH" names."""
    count, span = text.split("x")
    low, _, high = span.partition("-")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(int(low), int(high or low) + 1, (int(count),), generator=generator).tolist()


def offsets_of(sizes: list[int], device: str) -> Tensor:
    return F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(device)


def features(
    rows: int, heads: int, dim: int, dtype: torch.dtype, device: str, count: int = 3, seed: int = 1
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(rows, heads, dim, generator=generator, dtype=torch.float64) for _ in range(count))
    return [x.to(device, dtype).requires_grad_() for x in made]


def padded(sizes: list[int], device: str) -> tuple[Tensor, Tensor]:
    """(slot of each row in [blocks * longest]; bool [blocks, 1, 1, longest]: which slots hold a row)."""
    size, longest = torch.tensor(sizes), max(sizes)
    first = torch.arange(len(sizes)) * longest - (size.cumsum(0) - size)
    slot = torch.arange(int(size.sum())) + first.repeat_interleave(size)
    mask = torch.arange(longest) < size.unsqueeze(1)
    return slot.to(device), mask[:, None, None].to(device)


def dense(x: Tensor, slot: Tensor, mask: Tensor) -> Tensor:
    """Rows [N, H, D] as [blocks, H, longest, D]."""
    blocks, longest = mask.shape[0], mask.shape[-1]
    whole = x.new_zeros(blocks * longest, *x.shape[1:]).index_copy(0, slot, x)
    return whole.view(blocks, longest, *x.shape[1:]).transpose(1, 2)


def ragged(x: Tensor, slot: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1).index_select(0, slot)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, slot: Tensor, mask: Tensor) -> Tensor:
    bias = None
    if len(q) < mask.numel():
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
    out = F.scaled_dot_product_attention(*(dense(x, slot, mask) for x in (q, k, v)), attn_mask=bias)
    return ragged(out, slot)


def by_plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slot: Tensor, mask: Tensor) -> Tensor:
    """Plain operations over padded blocks, with a bias per key: what second derivatives take in metatrain."""
    q, k, v = (dense(x, slot, mask) for x in (q, k, v))
    keys = bias.new_full((mask.numel(),), -math.inf).index_copy(0, slot, bias).view(mask.shape)
    weight = (q @ k.mT / math.sqrt(q.shape[-1]) + keys).softmax(-1)
    return ragged(weight @ v, slot)


def pairs_of(sizes: list[int], device: str) -> tuple[Tensor, Tensor]:
    """The query and the key of each pair."""
    size = torch.tensor(sizes)
    degree, first = (x.repeat_interleave(size) for x in (size, size.cumsum(0) - size))
    query = torch.arange(len(degree)).repeat_interleave(degree)
    key = torch.arange(len(query)) - (degree.cumsum(0) - degree)[query] + first[query]
    return query.to(device), key.to(device)


def by_segments(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A softmax of each query's pairs, whose numbers and rows are stored: deepmd-kit's way over a graph."""
    score = (q[i] * k[j]).sum(-1) / math.sqrt(q.shape[-1]) + bias[j].unsqueeze(1)
    top = score.new_full(q.shape[:2], -math.inf)
    top = top.scatter_reduce(0, i.unsqueeze(1).expand_as(score), score.detach(), "amax")
    weight = (score - top[i]).exp()
    weight = weight / torch.zeros_like(top).index_add(0, i, weight)[i]
    return torch.zeros_like(v).index_add(0, i, weight.unsqueeze(2) * v[j])


def by_varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, bounds, bounds, longest, longest)


@cache
def compiled_flex(flash: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if not flash:
        return torch.compile(flex_attention, dynamic=True)
    import flash_attn.cute  # noqa: F401  # else Inductor takes seconds to find that it is missing

    return torch.compile(partial(flex_attention, kernel_options={"BACKEND": "FLASH"}), dynamic=True)


def block_mask(sizes: list[int], device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    block = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)
    rows = len(block)
    return create_block_mask(lambda b, h, i, j: block[i] == block[j], None, None, rows, rows, device=device)


def by_flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, flash: bool = False) -> Tensor:
    rows = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return compiled_flex(flash)(*rows, block_mask=mask).squeeze(0).transpose(0, 1)


def rivals(sizes: list[int], dtype: torch.dtype, device: str) -> dict[str, Callable[..., Tensor]]:
    """{name: attention of query, key and value} of what else computes attention within these blocks."""
    slot, mask = padded(sizes, device)
    found: dict[str, Callable[..., Tensor]] = {"padded SDPA": lambda *x: by_sdpa(*x, slot, mask)}
    if device != "cuda":
        return found
    half = dtype in (torch.bfloat16, torch.float16)
    if half:
        bounds, longest = offsets_of(sizes, device).int(), max(sizes)
        found["varlen"] = lambda *x: by_varlen(*x, bounds, longest)
    if sum(sizes) <= MOST_OF_FLEX:
        blocks = block_mask(sizes, device)
        found["Flex"] = lambda *x: by_flex(*x, blocks)
        if half:
            found["Flex FLASH"] = lambda *x: by_flex(*x, blocks, flash=True)
    return found


def step(call, inputs: list[Tensor], cotangent: Tensor):
    return torch.autograd.grad(call(*inputs), inputs, cotangent)


def step_with_forces(call, inputs: list[Tensor]):
    energy = call(*inputs).square().sum()
    forces = torch.autograd.grad(energy, inputs, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in forces), inputs)


def timed(run: Callable[[], object], device: str) -> float:
    """Milliseconds of a run, with the host's part."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """A replay of ten runs as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(10):
            run()
    return graph.replay


def medians(runs: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """The median times of runs in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 3):
        for name, run in runs.items():
            ms = timed(run, device)
            if round_ >= 3:
                times[name].append(ms)
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


def training(text: str, heads: int, dim: int, dtype: torch.dtype, device: str, rounds: int) -> None:
    sizes = lengths(text)
    offsets = offsets_of(sizes, device)
    *inputs, cotangent = features(sum(sizes), heads, dim, dtype, device, 4)
    cotangent = cotangent.detach()
    ways = {"block": lambda *x: functional.block_attention(*x, offsets), **rivals(sizes, dtype, device)}
    runs = {name: partial(step, way, inputs, cotangent) for name, way in ways.items()}
    report(f"{text} {heads}x{dim} {dtype}", runs, device, rounds)


def graphs(text: str, heads: int, dim: int, dtype: torch.dtype, device: str, rounds: int) -> None:
    """GPSConv's attention and its MLP over a batch of graphs, training."""
    import torch_geometric.nn

    import dfgnn

    sizes = lengths(text)
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)
    x = torch.randn(len(batch), heads * dim, device=device, dtype=dtype, requires_grad=True)
    edges = torch.zeros(2, 0, dtype=torch.int64, device=device)
    theirs = torch_geometric.nn.GPSConv(heads * dim, None, heads=heads, norm="layer_norm").to(device, dtype)
    ours = torch_geometric.nn.GPSConv(heads * dim, None, heads=heads, norm="layer_norm").to(device, dtype)
    dfgnn.accelerate(ours)

    def of(layer: Any) -> Callable[[], object]:
        inputs = [x, *layer.parameters()]  # without a local layer one of the norms is not used
        return lambda: torch.autograd.grad(layer(x, edges, batch).square().sum(), inputs, allow_unused=True)

    runs = {"GPSConv": of(ours), "torch_geometric's": of(theirs)}
    # torch_geometric's waits for the device, which a captured graph cannot.
    report(f"graphs {text} {heads}x{dim} {dtype}", runs, device, rounds, capture=False)


def forces(text: str, heads: int, dim: int, dtype: torch.dtype, device: str, rounds: int) -> None:
    sizes = lengths(text)
    offsets, (slot, mask) = offsets_of(sizes, device), padded(sizes, device)
    inputs = features(sum(sizes), heads, dim, dtype, device)
    inputs.append(torch.randn(sum(sizes), dtype=dtype, device=device, requires_grad=True))
    runs: dict[str, Callable[[], object]] = {
        "block": lambda: step_with_forces(
            lambda q, k, v, b: functional.block_attention(q, k, v, offsets, key_bias=b), inputs
        ),
        "plain": lambda: step_with_forces(lambda *x: by_plain(*x, slot, mask), inputs),
    }
    ends = pairs_of(sizes, device)
    runs["segments"] = lambda: step_with_forces(lambda *x: by_segments(*x, *ends), inputs)
    report(f"forces {text} {heads}x{dim} {dtype}", runs, device, rounds)


def report(
    title: str, runs: dict[str, Callable[[], object]], device: str, rounds: int, capture: bool = True
) -> None:
    """Prints the times, and beside those of rivals their ratio to the time of the first run."""
    parts, memory, graphs, ours = [], {}, {}, next(iter(runs))
    for name, run in list(runs.items()):
        try:
            run()
            memory[name] = peak_extra(run, 0, torch.device(device)) / 2**20
            if device == "cuda" and capture and timed(run, device) < MOST_CAPTURED:
                graphs[name] = captured(run)
        except (RuntimeError, TypeError, ImportError) as error:
            if name == ours:
                raise
            parts.append(f"{name}: {str(error).splitlines()[0][:80]}")
            if name not in memory:
                del runs[name]
    found = medians(runs, device, rounds)
    kernels = {name: ms / 10 for name, ms in medians(graphs, device, rounds).items()}
    shorter: list[dict[str, float]]
    shorter = [{name: float(f"{x:.4g}") for name, x in of.items()} for of in (found, kernels, memory)]
    names = dict(zip(("ms", "captured_ms", "mib"), shorter))
    RECORDS.append({"title": title, "ours": ours, **names, "notes": list(parts)})
    for name, ms in found.items():
        part = f"{name} {ms:.3f} ms, "
        if name in kernels:
            part += f"captured {kernels[name]:.3f}, "
        part += f"{memory[name]:.1f} MiB"
        if name != ours:
            part += f" ({ms / found[ours]:.2f}x"
            part += f", captured {kernels[name] / kernels[ours]:.2f}x)" if name in kernels else ")"
        parts.append(part)
    print(f"{title}: " + "; ".join(parts), flush=True)


def table(path: Path) -> str:
    """The table of docs/performance.md from a file of ``--json``, least gain first. Of each case the best
    rival, in a CUDA graph where our step is in one (a rival that takes too long is called instead)."""
    found = json.loads(path.read_text())
    rows, notes = [], set[str]()
    for case in found["cases"]:
        ours, ms, mib = case["ours"], case["ms"], case["mib"]
        kernels = {**ms, **case["captured_ms"]} if ours in case["captured_ms"] else ms
        best = min((name for name in ms if name != ours), key=kernels.__getitem__)
        gain = kernels[best] / kernels[ours]
        cells = [f"{kernels[best]:.3g}, {best}", f"{kernels[ours]:.3g}", f"{ms[best] / ms[ours]:.2f}"]
        cells += [f"{mib[name]:,.0f}" for name in (best, ours)]
        rows.append((gain, [case["title"].replace("torch.", ""), f"{gain:.2f}", *cells]))
        notes |= set(case["notes"])
    heads = ["blocks", "times as fast", "strongest alternative, ms", "dfgnn, ms", "called from Python"]
    lines = [[*heads, "theirs, MiB", "dfgnn, MiB"], ["---", *["--:"] * 6], *(row for _, row in sorted(rows))]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    parts = [environment_line(found["environment"]), text, *(f"Not measured: {x}." for x in sorted(notes))]
    return "\n\n".join(parts)


def derivatives(module, tensors: list[Tensor | None], offsets, key_offsets, second: bool) -> list[Tensor]:
    """The output, its gradients and, if asked for, those of a linear function of them."""
    q, k, v, bias, sink = tensors
    out = module.block_attention(q, k, v, offsets, key_offsets, key_bias=bias, sink=sink)
    generator = torch.Generator().manual_seed(2)

    def weights(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)

    inputs = [x for x in tensors if x is not None]
    grads = torch.autograd.grad((out * weights(out)).sum(), inputs, create_graph=second)
    if not second:
        return [out, *grads]
    total = sum((x * weights(x)).sum() for x in grads)
    return [out, *grads, *torch.autograd.grad(total, inputs)]


CHECKS = {
    "short": ([3, 0, 1, 63, 64, 65, 5], None),
    "pairs": ([3, 0, 1, 64, 65, 5, 40], [0, 4, 1, 130, 300, 2, 33]),
    "long": ([511, 20, 130, 900], None),
    "few queries": ([1] * 130, [37, 0, 90] * 43 + [5]),
}


def errors_of(dtype: torch.dtype, name: str, dim: int, options: bool, device: str) -> list[list[float]]:
    """The errors of out, first and second derivatives against the plain computation in float64, of ours and
    of the plain computation in this dtype: each relative to the result's largest element."""
    sizes, key_sizes = CHECKS[name]
    offsets = offsets_of(sizes, device)
    key_offsets = None if key_sizes is None else offsets_of(key_sizes, device)
    keys, heads, acc = sum(key_sizes or sizes), 3 if options else 1, torch.promote_types(dtype, torch.float32)
    (q,) = features(sum(sizes), heads, dim, dtype, device, 1, seed=3)
    k, v = features(keys, heads, dim, dtype, device, 2)
    bias = sink = None
    if options:
        bias = torch.linspace(-3, 3, keys * heads, dtype=acc, device=device).view(keys, heads)
        bias[keys // 2 :][:9] = -math.inf
        bias.requires_grad_()
        sink = torch.linspace(-1, 1, heads, dtype=acc, device=device).requires_grad_()
    tensors = [q, k, v, bias, sink]

    def of(module: Any, dtype: torch.dtype | None) -> list[Tensor]:
        given = [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
        return derivatives(module, given, offsets, key_offsets, True)

    right = of(reference, torch.float64)
    half = 1 + len(right) // 2
    every = []
    for found in (of(functional, None), of(reference, dtype)):
        errors = [
            float((x.detach().double() - y.detach()).abs().max() / y.detach().abs().max().clamp(min=1e-6))
            for x, y in zip(found, right)
        ]
        every.append([max(part) for part in (errors[:1], errors[1:half], errors[half:])])
    return every


def check(device: str, dims: list[int]) -> bool:
    """Prints the errors of out, of first and of second derivatives, ours and those of plain operations."""
    good = True
    for dtype, allowed in ERRORS.items():
        for name in CHECKS:
            for dim in dims:
                if device == "cuda" and dim > 64 and dtype == torch.float64:
                    continue
                line = []
                for options in (False, True):
                    ours, plain = errors_of(dtype, name, dim, options, device)
                    fine = all(x <= max(4 * y, allowed) for x, y in zip(ours, plain))
                    good = good and fine
                    line.append(" ".join(f"{x:.0e}/{y:.0e}" for x, y in zip(ours, plain)))
                    line += [] if fine else ["BAD"]
                print(f"{str(dtype)[6:]} {name} D={dim}: {' | '.join(line)}", flush=True)
    if device == "cuda":
        good = check_cuda() and good
    return good


def check_cuda() -> bool:
    """Offsets that are wrong read nothing beyond the tensors; a captured step takes offsets that change."""
    q, k, v = features(200, 2, 32, torch.float32, "cuda")
    for bad in ([0, 150, 20, 400], [-7, 3, 10**9, 5], [90, 90, 90, 90]):
        out = functional.block_attention(q, k, v, torch.tensor(bad, device="cuda"))
        torch.autograd.grad(out.sum(), (q, k, v))
    torch.cuda.synchronize()
    offsets = offsets_of([50, 60, 70, 20], "cuda")
    results: list[Tensor] = []

    def run() -> None:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = functional.block_attention(*inputs, offsets)
        results[:] = out.detach(), *torch.autograd.grad(out.square().sum(), inputs)

    replay = captured(run)
    of_graph = list(results)
    offsets.copy_(offsets_of([3, 0, 190, 7], "cuda"))
    replay()
    torch.cuda.synchronize()
    run()
    fine = all(map(torch.equal, of_graph, results))
    print("captured step with other offsets:", "equal" if fine else "BAD")
    return fine


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="errors against float64 instead of times")
    parser.add_argument("--blocks", default=BLOCKS)
    parser.add_argument("--heads", default="8x32,4x64", help="HEADSxCOLUMNS, ...")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--forces", default="512x40-120", help="blocks of the steps with forces; empty: none")
    parser.add_argument("--graphs", default="128x10-500", help="batches for GPSConv; empty: none")
    parser.add_argument("--dims", default="16,32,64,128,7")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="a file for all that is printed")
    parser.add_argument("--commit", help="recorded; default: that of the working tree")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of such a file instead")
    args = parser.parse_args(argv)
    if args.table is not None:
        print(table(args.table))
        return
    print(torch.cuda.get_device_name() if args.device == "cuda" else "CPU", torch.__version__)
    if args.check:
        raise SystemExit(0 if check(args.device, [int(d) for d in args.dims.split(",")]) else 1)
    about = environment(torch.device(args.device), args.commit)

    def keep() -> None:
        write_json(args.json, {"environment": about, "cases": RECORDS})

    for heads, dim in (map(int, shape.split("x")) for shape in args.heads.split(",")):
        for name in args.dtypes.split(","):
            for text in filter(None, args.blocks.split(",")):
                training(text, heads, dim, getattr(torch, name), args.device, args.rounds)
                keep()
        for dtype in (torch.float32, torch.float64):
            for text in filter(None, args.forces.split(",")):
                forces(text, heads, dim, dtype, args.device, args.rounds)
                keep()
        for text in filter(None, args.graphs.split(",")):
            graphs(text, heads, dim, torch.float32, args.device, args.rounds)
            keep()


if __name__ == "__main__":
    main()
