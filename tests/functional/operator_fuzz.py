"""Calls torch.ops.dfgnn with arguments that do not fit together; a process of its own, as it might crash.

    python operator_fuzz.py cpu|cuda

Every call starts from a right one and changes one or two arguments. Prints the number of calls.
"""

import random
import re
import sys

import torch

from dfgnn import Graph
from dfgnn.runtime.arguments import ops

HEADS, DIM = 2, 4


def right_calls(device, dtype=torch.float32):
    """Yields right calls (operator, arguments) on a graph with split rows, empty rows and a reverse CSR, with
    features of this dtype and float32 numbers of edges."""
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(30, (2, 900), generator=generator)
    dst[:700] = 3
    dst[dst == 7] = 8
    graph = Graph.from_coo(src.to(device), dst.to(device), num_src=30, num_dst=40)
    heads, dim, edges = HEADS, DIM, graph.num_edges
    q, k, v, x = (torch.randn(n, heads, dim, device=device).to(dtype) for n in (40, 30, 30, 40))
    a, b, attn = (torch.randn(n, heads, device=device) for n in (30, 40, dim))
    attn = attn.t().contiguous().to(dtype)
    options = [torch.randn(edges, heads, device=device) for _ in range(3)]
    mask = torch.rand(edges, heads, device=device) > 0.3
    seed = torch.ones(1, dtype=torch.int64, device=device)
    args = graph._planner.arguments(
        heads, dim, v.dtype, "gat", schedule="natural<=32", edges=True, backward=True
    )
    out_bias = torch.randn(heads, dim, device=device).to(dtype)
    edge = (options[0], options[1], mask, options[2], None, seed, out_bias)
    for score, ends in ((0, (v, a, b, None)), (1, (v, k, q, None)), (2, (v, None, x, attn))):
        numbers = (0.2 if score == 0 else 1.0, 0.5, 0.1, 0)
        forward = (score, *ends, *edge, *args, 40, *numbers, True, score == 0)
        yield ops.attention_forward, forward
        out, stats, positive, mass, attention = ops.attention_forward(*forward)
        saved = (out, stats, positive, mass, attention) if score == 0 else (out, stats, None, None, attention)
        grads = torch.randn_like(out), torch.randn_like(attention)
        backward = (*grads, score, *ends, *edge, *saved, *args, *numbers, 31)
        yield ops.attention_backward, backward
        number = ops.graph_handle(*args)
        flat = [x if x is None or score == 0 and k else x.flatten(1) for k, x in enumerate(ends[:3])]
        rows = *flat, ends[3], *edge
        made, kept, weights = ops.attend(number, heads, score, *rows, *numbers, True, score == 0)
        yield ops.attend, (number, heads, score, *rows, *numbers, True, score == 0)
        past = made, kept, score == 0, weights
        yield (
            ops.attend_backward,
            (number, heads, grads[0].flatten(1), grads[1], score, *rows, *past, *numbers, 31),
        )
        of = [x if x.numel() else None for x in ops.attention_backward(*backward)]
        of[3] = None if of[3] is None else of[3].sum(0)
        yield ops.attend_second_order, (number, *grads, score, *ends, *edge, stats, *of, *numbers, 31)
    edge = (*edge[:1], None, *edge[2:])
    forward = (0, v, a, b, None, *edge, *args, 40, 0.2, 0.5, 0.1, 0, False, True)
    saved = ops.attention_forward(*forward)[:4]
    plain = (grads[0], None, *forward[:12], *saved, None, *args, *forward[25:29], 1)
    yield ops.attention_backward, plain
    vectors = [torch.randn(1, heads, dim, device=device) for _ in range(2)]
    square = Graph.from_coo(src.to(device), dst.clamp(max=29).to(device), num_src=30, num_dst=30)
    args_of_gat = square._planner.arguments(
        heads, dim, v.dtype, "gat", schedule="natural<=32", edges=True, backward=True
    )
    rows, number = v.flatten(1), ops.graph_handle(*args_of_gat)
    yield ops.score_terms, (rows, *vectors, 30)
    yield ops.score_terms_backward, (a, a, rows, *vectors)
    bias = out_bias.flatten()
    out, kept = ops.gat(number, rows, *vectors, seed, bias, 0.2, 0.1, True)
    yield ops.gat, (number, rows, *vectors, seed, bias, 0.2, 0.1, True)
    yield ops.gat_backward, (number, rows, rows, *vectors, seed, bias, out, kept, 0.2, 0.1)
    yield ops.sddmm, (q, k, *args[:5])
    yield ops.spmm, (options[0].to(dtype), v, *args[:5], 40)
    attr = torch.randn(edges, 3, device=device).to(dtype)
    yield ops.edge_dot, (q, attr, *args[:5], 0.5)
    yield ops.edge_sum, (options[0], attr, *args[:5], 40, 4)
    yield ops.edge_outer, (options[0], q, *args[:5], 3, 0.5)
    if device == "cpu":
        feat = torch.randn(edges, heads, dim).to(dtype)
        yield ops.edge_products, (q, k, feat, *args[:5], 0.5, True)
        yield ops.edge_products_backward, (options[0], feat, q, k, feat, *args[:5], 0.5, True)
    if device == "cpu" and dtype == torch.float32:
        dst, src, vector = (torch.randn(n, heads, 4) for n in (len(q), len(k), 1))
        proj = torch.randn(heads * 4, 3)
        scores = (src, dst, vector[0], attr, proj, None, *args[:5], len(q), len(k), heads, 4, 0.2)
        yield ops.pair_scores, scores
        positive = ops.pair_scores(*scores)[1]
        yield ops.pair_sums, (options[0], positive, attr, proj, *args[:5], len(q), len(k), 0.2)
    if device == "cuda":
        csr = graph.csr()
        yield ops.gather_sum, (v.flatten(1).contiguous(), csr.indices, *args[2:5], 40)
        yield ops.plan_rows, (csr.indptr, csr.indices, 30, 2, 32, False)
        yield ops.degrees, (csr.indptr,)
        yield ops.falls, (csr.indptr, csr.indices)
        yield ops.sharing, (csr.indptr, csr.indices, 1, 4096)
        yield ops.tile_counts, (csr.indptr, csr.indices)
        offsets = ops.tile_counts(csr.indptr, csr.indices).cumsum(0)
        chunks = int(offsets[-1])
        yield ops.tiles, (csr.indptr, csr.indices, offsets, chunks)
        yield ops.plan_windows, (offsets, chunks, 40, 2)


def wrong_tensors(x, device):
    yield x[:-1] if x.dim() and x.shape[0] > 1 else x[:0]
    yield torch.cat([x, x[:1]]) if x.dim() else x
    yield x.unsqueeze(0)
    yield x.flatten() if x.dim() > 1 else x[:, None] if x.dim() else x
    yield x.new_zeros(())
    yield x.to(torch.int16 if x.dtype != torch.int16 else torch.int32)
    yield x.new_empty(0)
    if x.shape[-1:] == (4,) and x.dtype == torch.int32 and device == "cpu":  # items, splits
        for column, value in ((0, 10**9), (0, -1), (1, -5), (1, 10**9), (2, 10**9), (3, 10**9), (2, -1)):
            wrong = x.clone()
            wrong[len(x) // 2, column] = value
            if column != 3 or len(x) > 30:  # the last column of splits is a GPU's
                yield wrong


def wrong_values(x, device):
    if isinstance(x, torch.Tensor):
        yield from wrong_tensors(x, device)
    elif isinstance(x, list):
        for k in range(len(x)):
            for value in (-1, x[k] + 1, 2**31, 2**62, -(2**62)):
                if (
                    k > 2 or not 0 <= value < 2**31
                ):  # other values of the first three are right, too: num_slots, packed, heads_per_tile
                    yield [*x[:k], value, *x[k + 1 :]]
        yield from (x[:-1], [*x, 0], [])
    elif isinstance(x, int) and not isinstance(x, bool):
        yield from (-1, 2**31, 2**62, -(2**63))


def main(device):
    random.seed(0)
    calls = 0
    for op, right in right_calls(device):
        op(*right)
        for k, x in enumerate(right):
            for wrong in wrong_values(x, device):
                if unused(op, k, wrong, right):
                    continue
                calls += 1
                try:
                    op(*right[:k], wrong, *right[k + 1 :])
                except RuntimeError as error:
                    # The operator, and what is wrong. A size that a scalar does not have is torch's error.
                    named = re.search(r"dfgnn::\w+: \w+|aoti_torch_get_size", str(error))
                    if device == "cpu" and not named:
                        raise SystemExit(f"{op}: argument {k} = {describe(wrong)}: {error}") from error
                    continue
                raise SystemExit(f"{op}: argument {k} = {describe(wrong)} was taken")
        for what, size in (("heads", HEADS), ("columns", DIM)):
            calls += 1
            try:
                op(*without(op, right, what, size))
            except RuntimeError:
                continue
            if any(isinstance(x, torch.Tensor) and x.dim() > 2 for x in right):
                raise SystemExit(f"{op} was taken without {what}")
    if device == "cuda":
        torch.cuda.synchronize()
    for op, right in right_calls(device):
        op(*right)  # after all the refused calls the right ones still run
    print(calls)


def without(op, right, what, size):
    """The arguments of a call, changed in all tensors and numbers alike so that there are 0 heads, or heads
    with 0 columns."""
    names = [argument.name for argument in op.default._schema.arguments]
    numbers = {"heads": ("heads",), "columns": ("dim", "width")}[what]
    changed = []
    for name, x in zip(names, right):
        if isinstance(x, torch.Tensor) and x.is_floating_point() or name in ("edge_mask", "positive"):
            if x is not None:
                x = x.new_empty([0 if n in (size, HEADS * DIM) else n for n in x.shape])
        elif name in numbers and "attend" not in str(op):
            x = 0
        changed.append(x)
    return changed


def describe(x):
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else x


def unused(op, k, wrong, right):
    """Whether the operator may take the changed argument: it is right, too, or forward only saves it for
    backward."""
    names = [argument.name for argument in op.default._schema.arguments]
    name = names[k]
    if "forward" in str(op) and name.startswith("rev_"):
        return True
    score = right[names.index("score")] if "score" in names else None
    if name in ("attn", "attn_src", "attn_dst", "out_bias") and "dfgnn.attention" not in str(op):
        # A layer's vectors may have dimensions of size 1, and those of a fused layer any shape.
        loose = name in ("attn", "out_bias") and "second" not in str(op) and "pair" not in str(op)
        if loose or wrong.dim() > 2 and wrong.shape[-2:] == (HEADS, DIM):
            return wrong.dtype == right[k].dtype and wrong.numel() == right[k].numel()
    if ".score_terms" in str(op) and name in ("feat", "grad_dst", "num_dst"):
        # There may be fewer destinations than rows, of which they are the first.
        return isinstance(wrong, torch.Tensor) and wrong.shape[1:] == right[k].shape[1:] and len(wrong) > 0
    if name in ("positive", "positive_mass") and score == 0 and right[1] is not None:
        return True  # GAT's backward does not read them if the attention has a gradient, right[1]
    if name in ("items", "splits", "rev_items", "rev_splits") and wrong.shape[1:] == (4,):
        rows = {"items": 40, "rev_items": 30}.get(name, 0)
        if len(wrong) != len(right[k]) and len(wrong) >= rows:
            return (
                wrong.dtype == torch.int32
            )  # rows left out or taken twice are wrong, but nothing is out of range
    if name == "plan" and ".edge_" in str(op) and len(wrong) == len(right[k]):
        # plan[4] is the number of columns, which need only be a valid number.
        return wrong[:4] + wrong[5:] == right[k][:4] + right[k][5:] and 0 <= wrong[4] < 2**31
    if names[0] == "indptr" and name in ("indptr", "indices") and len(wrong.shape) == 1:
        # The values of an indptr are trusted, because to check them the host would wait for the GPU.
        return wrong.dtype == right[k].dtype and (name == "indices" or len(wrong) > 0)
    if isinstance(wrong, torch.Tensor) and isinstance(right[k], torch.Tensor):
        same = wrong.shape == right[k].shape and wrong.dtype == right[k].dtype
        return same and torch.equal(wrong, right[k])
    return False


if __name__ == "__main__":
    main(sys.argv[1])
