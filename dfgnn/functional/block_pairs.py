"""Attention within blocks where a number per pair is needed: over the graph of all pairs."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.compiler_graph import EdgeList, is_traced
from ..graph import Graph
from ..graph import cache as graph_cache
from ..runtime import ops as _ops
from ..runtime.rules import rows_at
from ..runtime.tracing import any_batched, without_gradient
from .dot import dot
from .gat import gat
from .pieces import sddmm


def graph_of_pairs(
    offsets: Tensor, key_offsets: Tensor, rows: int, keys: int, num_pairs: int | None = None
) -> Graph:
    """The graph that leads from all keys of a block to each of its queries, a block after the other; cached
    as long as the offsets live. num_pairs: their number, for compilers, where it is known."""
    if is_traced(offsets):
        return cast(Graph, _traced(offsets, key_offsets, rows, keys, num_pairs))
    parts = tuple(map(without_gradient, (offsets, key_offsets)))
    if any_batched(parts):
        raise NotImplementedError("block_attention: torch.func.vmap: expected the same offsets for all")
    parts = parts[:1] if offsets is key_offsets else parts
    return graph_cache.once(parts, ("pairs", rows, keys), lambda: _made(parts[0], parts[-1], rows, keys))


def _made(offsets: Tensor, key_offsets: Tensor, rows: int, keys: int) -> Graph:
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "block_attention: offsets: expected a call with them before a CUDA graph is captured, as "
            "pair_bias, softcap, dropout_p, return_attention and large heads take a graph of the pairs"
        )
    check_offsets(offsets, key_offsets, rows, keys)
    degree, first = _of_rows(offsets, key_offsets, rows)
    indptr = F.pad(degree.cumsum(0), (1, 0))
    _, src = _ends(indptr, first)
    return Graph.from_csr(indptr, src, keys, validate=False)


#: What offsets are, for errors.
MEANING = (
    "rows offsets[b] to offsets[b + 1] - 1 are block b; of blocks of these sizes they are "
    "torch.nn.functional.pad(sizes.cumsum(0), (1, 0)), and batch.bincount() are those of a sorted batch "
    "vector"
)


def check_offsets(offsets: Tensor, key_offsets: Tensor, rows: int, keys: int) -> None:
    """Raises RuntimeError unless the numbers rise, up to the rows; it waits for the device."""
    wrong = wrong_offsets(offsets, key_offsets, rows, keys)
    if wrong is not None:
        raise wrong


def wrong_offsets(offsets: Tensor, key_offsets: Tensor, rows: int, keys: int) -> RuntimeError | None:
    """The error of numbers that do not rise, or exceed the rows, or are a batch vector or sizes of blocks."""
    for name, x, end, whose in (
        ("offsets", offsets, rows, "query"), ("key_offsets", key_offsets, keys, "key")
    ):  # fmt: skip
        where, rise = f"block_attention: {name}: expected numbers", x.diff()
        numbers = x[0], x[-1], rise.clamp(max=0).sum(), x.sum(), (rise > 1).sum().to(x.dtype)
        first, last, fall, total, jumps = torch.stack(numbers).tolist()
        if fall:
            at = int((rise < 0).int().argmax())
            before, after = x[at : at + 2].tolist()
            return RuntimeError(
                f"{where} that never decrease, got {before} before {after} at position {at}; {MEANING}"
            )
        if first < 0 or last > end:
            got = first if first < 0 else last
            return RuntimeError(f"{where} in [0, {end}], got {got}; {whose} has {end} rows: {MEANING}")
        # As rows need not be in a block, these two would pass, with a wrong result.
        if len(x) == end != last and not jumps:
            got = f"{end} that end with {last}, which looks like a batch vector; {MEANING}"
            return RuntimeError(f"{where} of which the last is {end}, the rows of {whose}, got {got}")
        if first > 0 and total == end:
            got = f"{first}, and {end} in all, which looks like sizes of blocks; {MEANING}"
            return RuntimeError(f"{where} of which the first is where block 0 begins, got {got}")
    return None


def _traced(offsets: Tensor, key_offsets: Tensor, rows: int, keys: int, num_pairs: int | None) -> EdgeList:
    """What stands for the graph where offsets have no values."""
    if offsets.is_meta and not torch.compiler.is_compiling():
        return EdgeList(offsets.new_empty(2, num_pairs or 0), keys, rows)
    degree, first = _of_rows(offsets, key_offsets, rows)
    dst, src = _ends(F.pad(degree.cumsum(0), (1, 0)), first, num_pairs)
    return EdgeList(torch.stack([src, dst]), keys, rows)


def _of_rows(offsets: Tensor, key_offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(how many keys each query has; which is the first of them)."""
    node = torch.arange(rows, device=offsets.device)
    # 0 for rows before the first block, and one more than the number of blocks for those behind the last.
    place = torch.searchsorted(offsets.to(torch.int64), node, right=True)
    key_offsets = key_offsets.to(torch.int64)
    return F.pad(key_offsets.diff(), (1, 1))[place], F.pad(key_offsets, (1, 0))[place]


def _ends(indptr: Tensor, first: Tensor, num_pairs: int | None = None) -> tuple[Tensor, Tensor]:
    """(The query, the key) of each pair. indptr: where a query's pairs begin; first: its first key."""
    rows = first.shape[0]
    if num_pairs is None:
        dst = torch.repeat_interleave(torch.arange(rows, device=first.device), indptr.diff())
    else:  # a compiler knows the shape, and a number that is wrong writes nothing out of bounds
        pair = torch.arange(num_pairs, device=first.device)
        dst = torch.searchsorted(indptr[1:].contiguous(), pair, right=True).clamp(max=rows - 1)
    return dst, torch.arange(dst.shape[0], device=first.device) + (first - indptr[:-1])[dst]


def attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    key_bias: Tensor | None,
    pair_bias: Tensor | None,
    softcap: float | None,
    **options: Any,
) -> Any:
    """Attention over the graph of all pairs. key_bias: [M, H], in the dtype of sums; options: as of
    `dot_attention`, and the function's name for errors."""
    if softcap is None:
        bias = pair_bias
        if key_bias is not None:
            bias = rows_at(key_bias, graph.edge_index[0].to(torch.int64))
            bias = bias if pair_bias is None else bias + pair_bias
        return dot(graph, query, key, value, scale=scale, bias=bias, **options)
    acc = _ops.acc_type(query.dtype)
    raw = sddmm(graph, _ops.as_type(query, acc) * (scale / softcap), _ops.as_type(key, acc))
    score = softcap * raw.tanh()
    score = score if pair_bias is None else score + pair_bias
    return gat(graph, value, key_bias, None, negative_slope=1.0, bias=score, **options)
