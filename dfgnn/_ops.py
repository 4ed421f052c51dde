"""The operators ``torch.ops.dfgnn``: fake kernels, autograd, and how a graph is passed to them.

Schemas and kernels are registered by the compiled libraries (csrc/torch). One pair of operators serves every
score. The forward operator returns what its backward needs (``lse``, and for the additive score ``positive``
and ``positive_mass``) beside ``out`` and ``attention``; only the latter two are differentiable. It takes the
reverse CSR along for backward, which gathers over it.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import library

from . import _library  # noqa: F401  (loads the operators)

ops = torch.ops.dfgnn


class GraphArgs(NamedTuple):
    """The graph arguments of an operator, in the order of the schema (csrc/torch/schemas.h)."""

    indices: torch.Tensor
    eids: torch.Tensor | None
    items: torch.Tensor
    splits: torch.Tensor
    plan: list[int]
    rev_indices: torch.Tensor | None
    rev_eids: torch.Tensor | None
    rev_items: torch.Tensor | None
    rev_splits: torch.Tensor | None
    rev_plan: list[int]


class EdgeArgs(NamedTuple):
    """The options on edges, in the order of the schema; each None, or in the user's edge order."""

    bias: torch.Tensor | None  # [E, H]
    gate: torch.Tensor | None  # [E, 1 or H]
    mask: torch.Tensor | None  # bool [E, 1 or H]
    weight: torch.Tensor | None  # [E, 1 or H]
    feat: torch.Tensor | None  # [E, H, D]
    seed: torch.Tensor | None  # int64 [1], of dropout


def graph_args(graph, *, num_heads, head_dim, dtype, schedule, edges: bool, backward: bool) -> GraphArgs:
    """edges: edge tensors, dropout or returned attention need edge ids. backward: gradients are wanted."""
    shape = dict(num_heads=num_heads, head_dim=head_dim, dtype=dtype, schedule=schedule)
    csr, plan = graph.csr(), graph.plan(**shape)
    forward = (csr.indices, csr.eids if edges else None, plan.items, plan.splits, plan.launch)
    if not backward:
        return GraphArgs(*forward, None, None, None, None, [0, 0])
    rev = graph.reverse_csr(need_eids=edges)
    rev_plan = graph.plan(**shape, reverse=True)
    return GraphArgs(
        *forward, rev.indices, rev.eids if edges else None, rev_plan.items, rev_plan.splits, rev_plan.launch
    )


def _acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _optional(like: torch.Tensor, shape, dtype: torch.dtype, wanted: bool) -> torch.Tensor:
    return like.new_empty(shape if wanted else (0,), dtype=dtype)


# Values of `score`, as in csrc/core/params.h.
SCORES = {"additive": 0, "dot": 1, "additive_v2": 2}


@library.register_fake("dfgnn::attention_forward")
def _(score, value, src, dst, attn, *rest):
    indices, num_dst, return_attention, save_positive = rest[7], rest[17], rest[-2], rest[-1]
    _, heads, dim = value.shape
    acc = _acc(value.dtype)
    return (
        value.new_empty(num_dst, heads, dim),
        value.new_empty(num_dst, heads, dtype=acc),
        _optional(value, (num_dst, heads, dim), value.dtype, save_positive),
        _optional(value, (num_dst, heads), acc, save_positive),
        _optional(value, (indices.shape[0], heads), acc, return_attention),
    )


# Positions in `flags` and `need` of the operators (csrc/torch/attention.h).
_BIAS_AFTER, _FEAT_IN_KEY, _FEAT_IN_VALUE = 1, 2, 4
_NEED = {"dst": 1, "bias": 2, "gate": 4, "weight": 8, "feat": 16}


@library.register_fake("dfgnn::attention_backward")
def _(grad_out, grad_attention, score, value, src, dst, attn, *rest):
    bias, gate, _, weight, feat = rest[:5]
    indices, need = rest[12], rest[-1]
    acc, edge_heads = _acc(value.dtype), (indices.shape[0], value.shape[1])

    def edge(name, x):
        return _optional(value, edge_heads, acc, x is not None and bool(need & _NEED[name]))

    need_dst = dst is not None and (score != 0 or bool(need & _NEED["dst"]))
    need_feat = feat is not None and bool(need & _NEED["feat"])
    # How many partial sums of attn's gradient there are, only the kernels know.
    parts = library.get_ctx().new_dynamic_size() if attn is not None else 0
    return (
        torch.empty_like(value),
        torch.empty_like(src) if src is not None else value.new_empty(0),
        torch.empty_like(dst) if need_dst else value.new_empty(0, dtype=acc if score == 0 else None),
        value.new_empty((parts, *value.shape[1:]), dtype=acc),
        edge("bias", bias),
        edge("gate", gate),
        edge("weight", weight),
        torch.empty_like(feat) if need_feat else value.new_empty(0),
    )


@library.register_fake("dfgnn::sddmm")
def _(row_feat, feat, indices, *rest):
    return feat.new_empty(indices.shape[0], feat.shape[1])


@library.register_fake("dfgnn::spmm")
def _(weight, feat, *rest):
    return feat.new_empty(rest[-1], *feat.shape[1:])


@library.register_fake("dfgnn::gather_sum")
def _(feat, indices, items, splits, plan, num_dst):
    return feat.new_empty(num_dst, feat.shape[1])


def _call(op, *args):
    """Where nothing is recorded, without the registered autograd formula: it is Python and costs more than a
    small graph's kernels."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _setup(ctx, inputs, output):
    graph = GraphArgs(*inputs[12:22])
    out, lse, positive, positive_mass, attention = output
    ctx.score, ctx.numbers = inputs[0], inputs[23:27]
    ctx.has_attention, ctx.has_positive = inputs[27:]
    ctx.plans = graph.plan, graph.rev_plan
    ctx.mark_non_differentiable(lse, positive, positive_mass)
    if not ctx.has_attention:
        ctx.mark_non_differentiable(attention)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[1:12], *output, *graph[:4], *graph[5:9])


def _backward(ctx, grad_out, grad_lse, grad_positive, grad_mass, grad_attention):
    value, src, dst, attn, *edge, out_bias = (saved := ctx.saved_tensors)[:11]
    edge = EdgeArgs(*edge)
    out, lse, positive, mass, attention = saved[11:16]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    need = dict(zip(("value", "src", "dst", "attn", *EdgeArgs._fields, "out_bias"), ctx.needs_input_grad[1:]))
    grad_value, grad_src, grad_dst, grad_attn, grad_bias, grad_gate, grad_weight, grad_feat = _call(
        _backward_op,
        grad_out,
        grad_attention,
        ctx.score,
        *saved[:11],
        out,
        lse,
        positive if ctx.has_positive else None,
        mass if ctx.has_positive else None,
        attention if grad_attention is not None else None,
        *saved[16:20],
        ctx.plans[0],
        *saved[20:24],
        ctx.plans[1],
        *ctx.numbers,
        sum(bit for name, bit in _NEED.items() if need[name]),
    )
    return (
        None,
        grad_value,
        grad_src if src is not None else None,
        grad_dst if need["dst"] else None,
        grad_attn.sum(0).to(attn.dtype) if need["attn"] else None,
        grad_bias.to(edge.bias.dtype) if need["bias"] else None,
        _per_edge_grad(edge.gate, grad_gate) if need["gate"] else None,
        None,
        _per_edge_grad(edge.weight, grad_weight) if need["weight"] else None,
        grad_feat if need["feat"] else None,
        None,
        grad_out.sum(0) if need["out_bias"] else None,
        *[None] * 17,
    )


def _per_edge_grad(x, grad):
    """The kernels return [E, H]; a tensor shared by the heads sums it."""
    return (grad.sum(1, keepdim=True) if x.shape[1] == 1 else grad).to(x.dtype)


def _no_second_order(ctx, *grads):
    raise NotImplementedError(
        "dfgnn: second-order gradients are not supported; compute the attention with dfgnn.reference instead"
    )


library.register_autograd("dfgnn::attention_forward", _backward, setup_context=_setup)
library.register_autograd("dfgnn::attention_backward", _no_second_order)


class _Attention(torch.autograd.Function):
    """The operator with the same autograd formula, for calls from Python; the registered one serves
    torch.compile and direct callers of ``torch.ops.dfgnn``.
    """

    @staticmethod
    def forward(ctx, *inputs):
        output = _call(_forward_op, *inputs)
        _setup(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


_forward_op = ops.attention_forward.default
_backward_op = ops.attention_backward.default


def attention(
    graph,
    score: str,
    value,
    src,
    dst,
    attn,
    edge: EdgeArgs,
    out_bias,
    *,
    slope: float,
    dropout_p: float,
    return_attention: bool,
    schedule: str,
    scale: float = 1.0,
    bias_after: bool = False,
    feat_in_key: bool = False,
    feat_in_value: bool = False,
):
    """(out, attention) of checked arguments; attention is empty unless asked for."""
    wanted = [x is not None and x.requires_grad for x in (value, src, dst, attn, *edge, out_bias)]
    backward = torch.is_grad_enabled() and any(wanted)
    args = graph_args(
        graph,
        num_heads=value.shape[1],
        head_dim=value.shape[2],
        dtype=value.dtype,
        schedule=schedule,
        edges=return_attention or any(x is not None for x in edge),
        backward=backward,
    )
    flags = _BIAS_AFTER * bias_after + _FEAT_IN_KEY * feat_in_key + _FEAT_IN_VALUE * feat_in_value
    eager = backward and not torch.compiler.is_compiling()
    out, _, _, _, attention = (_Attention.apply if eager else partial(_call, _forward_op))(
        SCORES[score],
        value,
        src,
        dst,
        attn,
        *edge,
        out_bias,
        *args,
        graph.num_dst,
        float(slope),
        float(scale),
        float(dropout_p),
        flags,
        return_attention,
        score == "additive" and backward and wanted[2] and edge.gate is None,
    )
    return out, attention


def _product_args(graph, feat, reverse: bool):
    csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
    shape = dict(num_heads=feat.shape[1], head_dim=feat.shape[2], dtype=feat.dtype)
    plan = graph.plan(**shape, reverse=reverse)
    return csr.indices, csr.eids, plan.items, plan.splits, plan.launch


class _Sddmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, feat, graph, reverse):
        ctx.save_for_backward(rows, feat)
        ctx.graph, ctx.reverse = graph, reverse
        return ops.sddmm(rows, feat, *_product_args(graph, feat, reverse))

    @staticmethod
    def backward(ctx, grad):
        rows, feat = ctx.saved_tensors
        need_rows, need_feat = ctx.needs_input_grad[:2]
        return (
            spmm(ctx.graph, grad, feat, ctx.reverse) if need_rows else None,
            spmm(ctx.graph, grad, rows, not ctx.reverse) if need_feat else None,
            None,
            None,
        )


class _Spmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, feat, graph, reverse):
        ctx.save_for_backward(weight, feat)
        ctx.graph, ctx.reverse = graph, reverse
        num_rows = graph.num_src if reverse else graph.num_dst
        return ops.spmm(weight, feat, *_product_args(graph, feat, reverse), num_rows)

    @staticmethod
    def backward(ctx, grad):
        weight, feat = ctx.saved_tensors
        need_weight, need_feat = ctx.needs_input_grad[:2]
        return (
            sddmm(ctx.graph, grad, feat, ctx.reverse) if need_weight else None,
            spmm(ctx.graph, weight, grad, not ctx.reverse) if need_feat else None,
            None,
            None,
        )


def sddmm(graph, rows, feat, reverse: bool = False):
    """<rows[i], feat[j]> of each edge [E, H]; rows are destinations, or with ``reverse`` sources."""
    return _Sddmm.apply(rows, feat, graph, reverse)


def spmm(graph, weight, feat, reverse: bool = False):
    """sum_j weight_ij feat[j] of each row i: a destination, or with ``reverse`` a source."""
    return _Spmm.apply(weight, feat, graph, reverse)
