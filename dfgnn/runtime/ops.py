"""The operators of the compiled libraries: how they are called, and their names.

Schemas and kernels are registered by the compiled libraries (csrc/torch). Structure and plans call their
operators by the names given here; those of attention and of products along edges are called by
``engine/operators.py`` alone.
"""

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
