"""The operators ``torch.ops.dfgnn``: fake kernels, autograd, and how a graph is passed to them.

Schemas and kernels are registered by the compiled libraries (csrc/torch). One pair of operators serves every
score. The forward operator returns what its backward needs (``stats``, and for the additive score
``positive`` and ``positive_mass``) beside ``out`` and ``attention``; only the latter two are differentiable.
It takes the reverse CSR along for backward, which gathers over it.
"""

from typing import NamedTuple

import torch
from torch import library

from . import _library  # loads the operators

ops = torch.ops.dfgnn


def on_device(x: torch.Tensor) -> bool:
    """Whether the operators that only a GPU has (planning) can run on x."""
    return x.device.type == "cuda" and _library.has_cuda_library()


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
    tiles: torch.Tensor | None
    rev_tiles: torch.Tensor | None


class EdgeArgs(NamedTuple):
    """The options on edges, in the order of the schema; each None, or in the user's edge order."""

    bias: torch.Tensor | None  # [E, H]
    gate: torch.Tensor | None  # [E, 1 or H]
    mask: torch.Tensor | None  # bool [E, 1 or H]
    weight: torch.Tensor | None  # [E, 1 or H]
    feat: torch.Tensor | None  # [E, H, D]
    seed: torch.Tensor | None  # int64 [1], of dropout


def graph_args(
    graph, *, num_heads, head_dim, dtype, schedule, layer: str, edges: bool, backward: bool
) -> GraphArgs:
    """edges: edge tensors, dropout or returned attention need edge ids. backward: gradients are wanted.

    Kept beside the plans, and made anew where these are no longer the ones: `Graph.autotune` replaces them.
    """
    plan = graph.plan(num_heads, head_dim, dtype, False, schedule, layer, edges)
    rev_plan = graph.plan(num_heads, head_dim, dtype, True, schedule, layer, edges) if backward else None
    key = ("args", num_heads, head_dim, dtype, schedule, layer, edges, backward)
    found = graph._plans.get(key)
    if found is None or found[0] is not plan or found[1] is not rev_plan:
        csr = graph.csr()
        forward = (csr.indices, csr.eids if edges else None, plan.items, plan.splits, plan.launch)
        if backward:
            rev = graph.reverse_csr(need_eids=edges)
            reverse = (rev.indices, rev.eids, rev_plan.items, rev_plan.splits, rev_plan.launch)
            args = GraphArgs(*forward, *reverse, plan.tiles, rev_plan.tiles)
        else:
            args = GraphArgs(*forward, None, None, None, None, [], plan.tiles, None)
        found = graph._plans[key] = plan, rev_plan, args
    return found[2]


def as_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x.to(dtype)``, of which the call costs a small graph something even where it does nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def _acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _optional(like: torch.Tensor, shape, dtype: torch.dtype, wanted: bool) -> torch.Tensor:
    return like.new_empty(shape if wanted else (0,), dtype=dtype)


# Values of `score`, as in csrc/core/params.h.
SCORES = {"additive": 0, "dot": 1, "additive_v2": 2}
_LAYERS = {"additive": "gat", "dot": "dot", "additive_v2": "gatv2"}  # as plans name them


@library.register_fake("dfgnn::attention_forward")
def _(score, value, src, dst, attn, *rest):
    indices, num_dst, return_attention, save_positive = rest[7], rest[19], rest[-2], rest[-1]
    _, heads, dim = value.shape
    acc = _acc(value.dtype)
    return (
        value.new_empty(num_dst, heads, dim),
        value.new_empty(num_dst, heads, 2, dtype=acc),
        _optional(value, (num_dst, heads, dim), value.dtype, save_positive),
        _optional(value, (num_dst, heads), acc, save_positive),
        _optional(value, (indices.shape[0], heads), acc, return_attention),
    )


# Positions in `flags` and `need` of the operators (csrc/torch/attention.h).
_BIAS_AFTER, _FEAT_IN_KEY, _FEAT_IN_VALUE = 1, 2, 4
_NEED_DST, _NEED_BIAS, _NEED_GATE, _NEED_WEIGHT, _NEED_FEAT = 1, 2, 4, 8, 16


@library.register_fake("dfgnn::attention_backward")
def _(grad_out, grad_attention, score, value, src, dst, attn, *rest):
    bias, gate, _, weight, feat = rest[:5]
    indices, need = rest[12], rest[-1]
    acc, edge_heads = _acc(value.dtype), (indices.shape[0], value.shape[1])

    def edge(x, bit):
        return _optional(value, edge_heads, acc, x is not None and bool(need & bit))

    need_dst = dst is not None and (score != 0 or bool(need & _NEED_DST))
    need_feat = feat is not None and bool(need & _NEED_FEAT)
    # How many partial sums of attn's gradient there are, only the kernels know.
    parts = library.get_ctx().new_dynamic_size() if attn is not None else 0
    return (
        torch.empty_like(value),
        torch.empty_like(src) if src is not None else value.new_empty(0),
        torch.empty_like(dst) if need_dst else value.new_empty(0, dtype=acc if score == 0 else None),
        value.new_empty((parts, *value.shape[1:]), dtype=acc),
        edge(bias, _NEED_BIAS),
        edge(gate, _NEED_GATE),
        edge(weight, _NEED_WEIGHT),
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
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        if torch.is_grad_enabled():
            return op(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)
    except RuntimeError as error:
        raise _typed(error) from None


def _typed(error: RuntimeError) -> RuntimeError:
    """The stable ABI, through which kernels allocate, hands on no types of errors (csrc/torch/checks.h)."""
    text = str(error)
    return torch.OutOfMemoryError(text) if "CUDA" in text and "out of memory" in text else error


def _save(ctx, inputs, output):
    out, stats, positive, positive_mass, attention = output
    has_attention, has_positive = inputs[29:]
    ctx.set_materialize_grads(False)
    # The graph's tensors, which nobody may modify, need no check that they were not: that takes time.
    ctx.score, ctx.graph, ctx.numbers = inputs[0], inputs[12:24], inputs[25:29]
    ctx.save_for_backward(
        *inputs[1:12],
        out,
        stats,
        positive if has_positive else None,
        positive_mass if has_positive else None,
        attention if has_attention else None,
    )


def _gradients(ctx, grad_out, grad_attention):
    """Of the operator's arguments up to out_bias."""
    tensors = (saved := ctx.saved_tensors)[:11]
    _, src, _, attn, _, gate, _, weight, *_ = tensors
    out, stats, positive, positive_mass, attention = saved[11:]
    _, _, _, need_dst, need_attn, need_bias, need_gate, _, need_weight, need_feat, _, need_out_bias = (
        ctx.needs_input_grad[:12]
    )
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grad_value, grad_src, grad_dst, grad_attn, grad_bias, grad_gate, grad_weight, grad_feat = _call(
        _backward_op,
        grad_out,
        grad_attention,
        ctx.score,
        *tensors,
        out,
        stats,
        positive,
        positive_mass,
        attention if grad_attention is not None else None,
        *ctx.graph,
        *ctx.numbers,
        _NEED_DST * need_dst
        + _NEED_BIAS * need_bias
        + _NEED_GATE * need_gate
        + _NEED_WEIGHT * need_weight
        + _NEED_FEAT * need_feat,
    )
    return (
        None,
        grad_value,
        grad_src if src is not None else None,
        grad_dst if need_dst else None,
        as_type(grad_attn.sum(0), attn.dtype) if need_attn else None,
        as_type(grad_bias, tensors[4].dtype) if need_bias else None,
        _per_edge_grad(gate, grad_gate) if need_gate else None,
        None,
        _per_edge_grad(weight, grad_weight) if need_weight else None,
        grad_feat if need_feat else None,
        None,
        grad_out.sum(0) if need_out_bias else None,
    )


def _per_edge_grad(x, grad):
    """The kernels return [E, H]; a tensor shared by the heads sums it."""
    return as_type(grad.sum(1, keepdim=True) if x.shape[1] == 1 else grad, x.dtype)


def _setup(ctx, inputs, output):
    out, stats, positive, positive_mass, attention = output
    _save(ctx, inputs, output)
    has_attention = inputs[29]
    ctx.mark_non_differentiable(stats, positive, positive_mass, *(() if has_attention else (attention,)))


def _backward(ctx, grad_out, grad_stats, grad_positive, grad_mass, grad_attention):
    return *_gradients(ctx, grad_out, grad_attention), *[None] * 19


def _no_second_order(ctx, *grads):
    raise NotImplementedError(
        "dfgnn: second-order gradients are not supported; compute the attention with dfgnn.reference instead"
    )


library.register_autograd("dfgnn::attention_forward", _backward, setup_context=_setup)
library.register_autograd("dfgnn::attention_backward", _no_second_order)


class _Attention(torch.autograd.Function):
    """The operator with the same autograd formula, for calls from Python; the registered one serves
    torch.compile and direct callers of ``torch.ops.dfgnn``.

    Takes the arguments behind out_bias as one and returns (out, attention or None): every argument, result
    and saved tensor of a Function costs time.
    """

    @staticmethod
    def forward(ctx, *inputs):
        inputs = *inputs[:-1], *inputs[-1]
        output = _call(_forward_op, *inputs)
        _save(ctx, inputs, output)
        return output[0], output[4] if inputs[29] else None

    @staticmethod
    def backward(ctx, grad_out, grad_attention):
        return *_gradients(ctx, grad_out, grad_attention), None


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
    """(out, attention) of checked arguments; attention means nothing unless asked for."""
    tensors = value, src, dst, attn, *edge, out_bias
    backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    _, num_heads, head_dim = value.shape
    rest = (
        *graph_args(
            graph,
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=value.dtype,
            schedule=schedule,
            edges=return_attention or any(x is not None for x in edge),
            backward=backward,
            layer=_LAYERS[score],
        ),
        graph.num_dst,
        float(slope),
        float(scale),
        float(dropout_p),
        _BIAS_AFTER * bias_after + _FEAT_IN_KEY * feat_in_key + _FEAT_IN_VALUE * feat_in_value,
        return_attention,
        score == "additive" and backward and dst is not None and dst.requires_grad and edge.gate is None,
    )
    if backward and not torch.compiler.is_compiling():
        return _Attention.apply(SCORES[score], *tensors, rest)
    out, _, _, _, attention = _call(_forward_op, SCORES[score], *tensors, *rest)
    return out, attention


def _product_args(graph, feat, reverse: bool):
    csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
    shape = dict(num_heads=feat.shape[1], head_dim=feat.shape[2], dtype=feat.dtype)
    plan = graph.plan(**shape, reverse=reverse, layer=None)
    return csr.indices, csr.eids, plan.items, plan.splits, plan.launch


class _Sddmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, feat, graph, reverse):
        ctx.save_for_backward(rows, feat)
        ctx.graph, ctx.reverse = graph, reverse
        return _call(ops.sddmm.default, rows, feat, *_product_args(graph, feat, reverse))

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
        return _call(ops.spmm.default, weight, feat, *_product_args(graph, feat, reverse), num_rows)

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
