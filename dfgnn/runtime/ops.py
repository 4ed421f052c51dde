"""The operators of the compiled libraries: how they are called, their names, and their fake kernels.

Schemas and kernels are registered by the compiled libraries (csrc/torch). Structure and plans call their
operators by the names given here; those of attention and of products along edges are called by
``engine/operators.py`` alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from . import library as _library
from . import torch_internals as internals
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

ops, aten = torch.ops.dfgnn, torch.ops.aten

# These make CSRs (csrc/torch/cpu_structure.cpp; on GPUs csrc/cuda/graph/structure.h).
coo_to_csr, transpose_csr = ops.coo_to_csr.default, ops.transpose_csr.default
structure, structure_read = ops.structure.default, ops.structure_read.default
degrees = ops.degrees.default
# These make plans (csrc/torch/cpu_structure.cpp, cuda_planning.cpp).
plan_graph, cut_graph = ops.plan_graph.default, ops.cut_graph.default
plan_rows, cut_rows, falls = ops.plan_rows.default, ops.cut_rows.default, ops.falls.default
sharing, tile_counts, tiles = ops.sharing.default, ops.tile_counts.default, ops.tiles.default
plan_windows = ops.plan_windows.default
# Autotuning measures plans by the two operators of attention; the benchmark's baseline is the third.
attention_forward, attention_backward = ops.attention_forward.default, ops.attention_backward.default
gather_sum = ops.gather_sum.default


# ---- operators that are written in Python, so that compilers do not trace them ---------------------------

_python = library.Library("dfgnn", "FRAGMENT")


def python_operator(
    name: str, schema: str, kernel: Any, fake: Any, *tags: torch.Tag, autograd: bool = False
) -> Any:
    """Defines an operator and returns it. kernel: None for one in the compiled libraries, which cannot give
    it tags.  fake: the kernel without values, which makes empty results.  autograd: whether autograd sees it,
    whose code in Python costs compiled code time."""
    _python.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
    if kernel is not None:
        _python.impl(name, kernel, "CompositeExplicitAutograd")
    if not autograd:
        _python.impl(name, library.fallthrough_kernel, "Autograd")
    library.register_fake(f"dfgnn::{name}", fake, lib=_python)
    return operator(name)


def composite_operator(name: str, schema: str, call: Any) -> None:
    """Defines an operator that compilers replace by the operators that ``call`` calls."""
    _python.define(f"{name}{schema}", tags=torch.Tag.pt2_compliant_tag)
    _python.impl(name, call, "CompositeImplicitAutograd")


def operator(name: str) -> Any:
    return getattr(ops, name).default


# ---- calls ---------------------------------------------------------------------------------------------


def on_device(x: torch.Tensor) -> bool:
    """Whether the operators that only a GPU has (planning) can run on x."""
    return x.device.type == "cuda" and _library.has_cuda_library()


def product_args(graph, feat, reverse: bool):
    """The graph arguments of `sddmm` and `spmm`."""
    csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
    shape = dict(num_heads=feat.shape[1], head_dim=feat.shape[2], dtype=feat.dtype)
    plan = graph.plan(**shape, reverse=reverse, layer=None)
    return csr.indices, csr.eids, plan.items, plan.splits, plan.launch


def total(parts: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum of partial sums [count, ...] in this dtype. The GPU's kernels return a single partial sum,
    which is the result."""
    count = parts.shape[0]  # symbolic while a compiler records
    whole = parts[0] if type(count) is int and count == 1 else parts.sum(0)
    return whole if dtype is None or whole.dtype is dtype else whole.to(dtype)


def as_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x.to(dtype)``, without the call if there is nothing to convert: on small graphs its time counts."""
    return x if x.dtype == dtype else x.to(dtype)


def acc_type(dtype: torch.dtype) -> torch.dtype:
    """The accumulation type, in which kernels add up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_AUTOCAST = internals.DispatchKeySet(internals.DispatchKey.AutocastCPU) | internals.DispatchKeySet(
    internals.DispatchKey.AutocastCUDA
)


def call(op, *args):
    """``op(*args)`` below autograd and autocast, unless a compiler is recording. The formula that is
    registered for autograd is written in Python, and costs more than the kernels of a small graph. op:
    an operator, or a function that calls several."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        with internals.BelowAutograd():
            if not internals.is_any_autocast_enabled():
                return op(*args)
            with internals.WithoutDispatchKeys(_AUTOCAST):
                return op(*args)
    except RuntimeError as error:
        raise typed(error) from None


def typed(error: RuntimeError) -> RuntimeError:
    """The error of an operator with its right type: the stable ABI, through which kernels allocate, passes on
    no types (csrc/torch/checks.h)."""
    text = str(error)
    return torch.OutOfMemoryError(text) if "CUDA" in text and "out of memory" in text else error


def need_bits(need: Any) -> int:
    """The bits by which operators know the gradients to compute. need: `Tensors` of bools."""
    bits = NEED_DST if need.dst else 0
    if need.edge_bias:
        bits |= NEED_BIAS
    if need.edge_gate:
        bits |= NEED_GATE
    if need.edge_weight:
        bits |= NEED_WEIGHT
    if need.edge_feat:
        bits |= NEED_FEAT
    return bits


def gradients(need: Any, tensors: Any, grad_out: torch.Tensor, results) -> tuple[torch.Tensor | None, ...]:
    """The backward operator's results as the gradients of `tensors`, in the order and dtypes of Tensors.

    need: Tensors of bools. tensors: the tensors that the operator got.
    """
    value, src, dst, attn, bias, gate, weight, feat = results
    return (
        value,
        src if tensors.src is not None else None,
        dst if need.dst else None,
        total(attn, tensors.attn.dtype) if need.attn else None,
        as_type(bias, tensors.edge_bias.dtype) if need.edge_bias else None,
        per_edge(tensors.edge_gate, gate) if need.edge_gate else None,
        None,  # edge_mask
        per_edge(tensors.edge_weight, weight) if need.edge_weight else None,
        feat if need.edge_feat else None,
        None,  # seed
        grad_out.sum(0) if need.out_bias else None,
    )


def per_edge(x, grad):
    """The gradient of an edge tensor x, from the kernels' [E, H]: summed over heads if x is [E, 1]."""
    return as_type(grad.sum(1, keepdim=True) if x.shape[1] == 1 else grad, x.dtype)


# ---- fake kernels ----------------------------------------------------------------------------------------


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
