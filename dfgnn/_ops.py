"""The operators ``torch.ops.dfgnn``: fake kernels, autograd, and how a graph is passed to them.

Schemas and kernels are registered by the compiled libraries (csrc/torch). A forward operator returns what its
backward needs (``lse``, and for GAT ``positive``, ``positive_mass``) beside ``out`` and ``attention``; only
the latter two are differentiable. It takes the reverse CSR along for backward, which gathers over it.
"""

from typing import NamedTuple

import torch

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


@torch.library.register_fake("dfgnn::gat_forward")
def _(feat, alpha_src, alpha_dst, edge_bias, edge_weight, seed, out_bias, indices, *rest):
    num_dst, _, _, return_attention, save_positive = rest[-5:]
    _, heads, dim = feat.shape
    acc = _acc(feat.dtype)
    return (
        feat.new_empty(num_dst, heads, dim),
        feat.new_empty(num_dst, heads, dtype=acc),
        _optional(feat, (num_dst, heads, dim), feat.dtype, save_positive),
        _optional(feat, (num_dst, heads), acc, save_positive),
        _optional(feat, (indices.shape[0], heads), acc, return_attention),
    )


@torch.library.register_fake("dfgnn::gat_backward")
def _(grad_out, grad_attention, feat, alpha_src, alpha_dst, *rest):
    edges, heads = rest[9].shape[0], feat.shape[1]
    need_alpha_dst, need_bias, need_weight = rest[-3:]
    acc = _acc(feat.dtype)
    return (
        feat.new_empty(feat.shape),
        alpha_src.new_empty(alpha_src.shape),
        _optional(feat, (grad_out.shape[0], heads), acc, need_alpha_dst),
        _optional(feat, (edges, heads), acc, need_bias),
        _optional(feat, (edges, heads), acc, need_weight),
    )


@torch.library.register_fake("dfgnn::dot_forward")
def _(query, key, value, edge_bias, edge_weight, seed, indices, *rest):
    num_dst, heads, _ = query.shape
    acc = _acc(query.dtype)
    return (
        query.new_empty(num_dst, heads, value.shape[2]),
        query.new_empty(num_dst, heads, dtype=acc),
        _optional(query, (indices.shape[0], heads), acc, rest[-1]),
    )


@torch.library.register_fake("dfgnn::dot_backward")
def _(grad_out, grad_attention, query, key, value, *rest):
    edges, heads = rest[6].shape[0], query.shape[1]
    need_bias, need_weight = rest[-2:]
    acc = _acc(query.dtype)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        _optional(query, (edges, heads), acc, need_bias),
        _optional(query, (edges, heads), acc, need_weight),
    )


@torch.library.register_fake("dfgnn::gather_sum")
def _(feat, indices, items, splits, plan, num_dst):
    return feat.new_empty(num_dst, feat.shape[1])


def _edge_weight_grad(edge_weight, grad):
    """The kernels return [E, H]; a weight shared by the heads sums it."""
    grad = grad.sum(1, keepdim=True) if edge_weight.shape[1] == 1 else grad
    return grad.to(edge_weight.dtype)


def _gat_setup(ctx, inputs, output):
    graph = GraphArgs(*inputs[7:17])
    _, ctx.slope, ctx.dropout_p, ctx.has_attention, ctx.has_positive = inputs[17:]
    out, lse, positive, positive_mass, attention = output
    ctx.plans = graph.plan, graph.rev_plan
    ctx.mark_non_differentiable(lse, positive, positive_mass)
    if not ctx.has_attention:
        ctx.mark_non_differentiable(attention)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], out, lse, positive, positive_mass, attention, *graph[:4], *graph[5:9])


def _gat_backward(ctx, grad_out, grad_lse, grad_positive, grad_mass, grad_attention):
    saved = ctx.saved_tensors
    feat, alpha_src, alpha_dst, edge_bias, edge_weight, seed, out_bias = saved[:7]
    out, lse, positive, mass, attention = saved[7:12]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    need = ctx.needs_input_grad
    need_dst, need_bias, need_weight = alpha_dst is not None and need[2], need[3], need[4]
    grad_feat, grad_src, grad_dst, grad_bias, grad_weight = ops.gat_backward(
        grad_out,
        grad_attention,
        feat,
        alpha_src,
        alpha_dst,
        edge_bias,
        edge_weight,
        seed,
        out_bias,
        out,
        lse,
        positive if ctx.has_positive else None,
        mass if ctx.has_positive else None,
        attention if grad_attention is not None else None,
        *saved[12:16],
        ctx.plans[0],
        *saved[16:20],
        ctx.plans[1],
        ctx.slope,
        ctx.dropout_p,
        need_dst,
        need_bias,
        need_weight,
    )
    return (
        grad_feat,
        grad_src,
        grad_dst if need_dst else None,
        grad_bias.to(edge_bias.dtype) if need_bias else None,
        _edge_weight_grad(edge_weight, grad_weight) if need_weight else None,
        None,
        grad_out.sum(0) if need[6] else None,
        *[None] * 15,
    )


def _dot_setup(ctx, inputs, output):
    graph = GraphArgs(*inputs[6:16])
    ctx.scale, ctx.dropout_p, ctx.has_attention = inputs[16:]
    out, lse, attention = output
    ctx.plans = graph.plan, graph.rev_plan
    ctx.mark_non_differentiable(lse)
    if not ctx.has_attention:
        ctx.mark_non_differentiable(attention)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], out, lse, attention, *graph[:4], *graph[5:9])


def _dot_backward(ctx, grad_out, grad_lse, grad_attention):
    saved = ctx.saved_tensors
    query, key, value, edge_bias, edge_weight, seed, out, lse, attention = saved[:9]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    need_bias, need_weight = ctx.needs_input_grad[3:5]
    grad_query, grad_key, grad_value, grad_bias, grad_weight = ops.dot_backward(
        grad_out,
        grad_attention,
        query,
        key,
        value,
        edge_bias,
        edge_weight,
        seed,
        out,
        lse,
        attention if grad_attention is not None else None,
        *saved[9:13],
        ctx.plans[0],
        *saved[13:17],
        ctx.plans[1],
        ctx.scale,
        ctx.dropout_p,
        need_bias,
        need_weight,
    )
    return (
        grad_query,
        grad_key,
        grad_value,
        grad_bias.to(edge_bias.dtype) if need_bias else None,
        _edge_weight_grad(edge_weight, grad_weight) if need_weight else None,
        *[None] * 14,
    )


def _no_second_order(ctx, *grads):
    raise NotImplementedError(
        "dfgnn: second-order gradients are not supported; compute the attention with dfgnn.reference instead"
    )


torch.library.register_autograd("dfgnn::gat_forward", _gat_backward, setup_context=_gat_setup)
torch.library.register_autograd("dfgnn::dot_forward", _dot_backward, setup_context=_dot_setup)
torch.library.register_autograd("dfgnn::gat_backward", _no_second_order)
torch.library.register_autograd("dfgnn::dot_backward", _no_second_order)


def _eager(op, setup, backward):
    """``op`` with the same autograd formula, for calls from Python. The registered one serves torch.compile
    and direct callers of ``torch.ops.dfgnn``, but looks the schema up again in every call, which costs more
    than a small graph's kernels.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = op(*inputs)
            setup(ctx, inputs, output)
            return output

    Eager.backward = staticmethod(backward)
    Eager.__name__ = Eager.__qualname__ = op.name().replace("::", "_")

    def call(*inputs):
        plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        return op(*inputs) if plain else Eager.apply(*inputs)

    return call


gat_forward = _eager(ops.gat_forward.default, _gat_setup, _gat_backward)
dot_forward = _eager(ops.dot_forward.default, _dot_setup, _dot_backward)
