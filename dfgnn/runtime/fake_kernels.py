"""The fake kernels of the compiled libraries' operators: empty results, which tell compilers the shapes.

Operators that are written in Python have theirs next to them (see `python_operator`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from .arguments import (
    NEED_BIAS,
    NEED_DST,
    NEED_FEAT,
    NEED_GATE,
    NEED_WEIGHT,
    SCORES,
    Backward,
    Forward,
    Tensors,
)
from .ops import acc_type


@library.register_fake("dfgnn::attention_forward")
def _(*args):
    a, acc = Forward(*args), acc_type(args[1].dtype)
    made = forward_fake(a.num_dst, a.indices.shape[0], 0, a.value, a.return_attention, a.save_positive)
    return _without_none(a.value, made, (None, None, None, acc, acc))


def _without_none(like: torch.Tensor, made: Any, dtypes: Any) -> tuple[torch.Tensor, ...]:
    """The results with tensors [0] of these dtypes for those that are None, as the operators return them that
    take all tensors of a graph."""
    return tuple(like.new_empty(0, dtype=dtype) if x is None else x for x, dtype in zip(made, dtypes))


def forward_fake(num_dst, num_edges, heads, value, return_attention: bool, save_positive: bool) -> tuple:
    """Empty results of forward, None for those that are not asked for. value: [N, H, D], or if heads is not 0
    [N, heads * D]."""
    acc = acc_type(value.dtype)
    shape = (num_dst, value.shape[1]) if heads else (num_dst, *value.shape[1:])
    heads, dim = (heads, value.shape[1] // heads) if heads else value.shape[1:]
    positive = mass = attention = None
    if save_positive:
        positive = value.new_empty(num_dst, heads, dim)
        mass = value.new_empty(num_dst, heads, dtype=acc)
    if return_attention:
        attention = value.new_empty(num_edges, heads, dtype=acc)
    return value.new_empty(shape), value.new_empty(num_dst, heads, 2, dtype=acc), positive, mass, attention


@library.register_fake("dfgnn::attention_backward")
def _(*args):
    a = Backward(*args)
    acc, t = acc_type(a.value.dtype), Tensors(*(getattr(a, name) for name in Tensors._fields))
    # How many partial sums attn's gradient has depends on the kernels, so that this number is symbolic here.
    parts = library.get_ctx().new_dynamic_size() if a.attn is not None else 0
    attn = a.value.new_empty(parts, *a.value.shape[1:], dtype=acc)
    made = backward_fake(a.indices.shape[0], 0, a.score, t, a.need)
    dst = acc if a.score == SCORES["additive"] else None
    return _without_none(a.value, (*made[:3], attn, *made[4:]), (None, None, dst, acc, acc, acc, acc, None))


def backward_fake(num_edges, heads, score: int, t: Tensors, need: int) -> tuple:
    """Empty results of backward, None for those that are not needed. heads: as in `forward_fake`."""
    heads = heads or t.value.shape[1]
    acc = acc_type(t.value.dtype)

    def like(x: torch.Tensor | None, wanted: bool = True) -> torch.Tensor | None:
        return None if x is None or not wanted else x.new_empty(x.shape)

    def of_edges(x: torch.Tensor | None, bit: int) -> torch.Tensor | None:
        return t.value.new_empty(num_edges, heads, dtype=acc) if x is not None and need & bit else None

    attn = None if t.attn is None else t.value.new_empty(1, heads, t.attn.numel() // heads, dtype=acc)
    return (
        like(t.value), like(t.src), like(t.dst, score != SCORES["additive"] or bool(need & NEED_DST)), attn,
        of_edges(t.edge_bias, NEED_BIAS), of_edges(t.edge_gate, NEED_GATE),
        of_edges(t.edge_weight, NEED_WEIGHT), like(t.edge_feat, bool(need & NEED_FEAT)),
    )  # fmt: skip


def _pair_scores_fake(cols, rows, attn, attr, proj, positive, indices, *rest):
    like = next(x for x in (cols, rows, proj) if x is not None)
    edges, (heads, dim) = indices.shape[0], rest[-3:-1]
    made = like.new_empty(edges if positive is None else 0, heads, dim, dtype=torch.bool)
    return like.new_empty(edges, heads), made


def _pair_sums_fake(weight, positive, attr, proj, indices, *rest):
    num_rows, _, _ = rest[-3:]
    heads, dim = positive.shape[1:]
    attrs = proj.shape[1] if proj is not None else attr.shape[1] if attr is not None else 0
    # The kernel divides the plan's work items into parts, with a partial sum each (pair_parts in
    # csrc/cpu/pair_scores.h), so that their number is symbolic here.
    parts = 0 if attr is None else library.get_ctx().new_dynamic_size()
    return (
        weight.new_empty(num_rows, heads, dim),
        weight.new_empty(0 if proj is None else weight.shape[0], attrs),
        weight.new_empty(parts, heads * dim, attrs),
    )


def edge_dot_fake(rows, num_edges: int):
    return rows.new_empty(num_edges, rows.shape[1], dtype=acc_type(rows.dtype))


def _some_rows(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    return x.new_empty(x.shape[0] if wanted else 0, *x.shape[1:])


# Operator -> its fake kernel: an empty result, from the operator's arguments.
_FAKES: dict[str, Callable[..., Any]] = {
    "sddmm": lambda rows, feat, indices, *rest: feat.new_empty(indices.shape[0], feat.shape[1]),
    "spmm": lambda weight, feat, *rest: feat.new_empty(rest[-1], *feat.shape[1:]),
    "gather_sum": lambda feat, *rest: feat.new_empty(rest[-1], feat.shape[1]),
    "edge_dot": lambda rows, attr, indices, *rest: edge_dot_fake(rows, indices.shape[0]),
    "edge_sum": lambda weight, attr, *rest: attr.new_empty(rest[-2], weight.shape[1], rest[-1]),
    "edge_outer": lambda weight, rows, indices, *rest: rows.new_empty(indices.shape[0], rest[-2]),
    "edge_products": lambda rows, cols, feat, *rest: (
        feat.new_empty(feat.shape[:2], dtype=acc_type(feat.dtype)), _some_rows(feat, rest[-1])
    ),
    "edge_products_backward": lambda weight, edge_weight, rows, cols, feat, *rest: (
        torch.empty_like(rows), _some_rows(feat, rest[-1])
    ),
    "pair_scores": _pair_scores_fake,
    "pair_sums": _pair_sums_fake,
}  # fmt: skip
for _name, _fake in _FAKES.items():
    library.register_fake(f"dfgnn::{_name}", _fake)
