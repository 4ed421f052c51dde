"""The operators of attention and of products along edges, called with named tuples and graphs.

No other module of the engine knows the order of an operator's arguments (csrc/torch/schemas.h). The operators
of attention (csrc/torch/attention.h) exist in two forms. Those of eager calls know a graph and its plan by a
number: an `EagerCall` calls them. Those that go through torch's dispatcher take all tensors of the graph: a
`DispatchedCall` calls them. Both give the same results. z is an edge's score before the LeakyReLU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime import torch_internals as internals
from ..runtime import tracing
from ..runtime.arguments import (
    PLAN_LAYERS,
    SCORES,
    EdgeArgs,
    GraphArgs,
    GraphHandle,
    Numbers,
    Tensors,
    needs_rows,
    ops,
)
from ..runtime.ops import acc_type, call, product_args, total, typed

_BelowAutograd = internals.BelowAutograd

# `autograd` registers gradients for some of these operators. `traced` reads the schemas of others and defines
# operators on traced graphs by them. Fused layers call `sddmm_op` and `spmm_op`.
forward_op, backward_op = ops.attention_forward.default, ops.attention_backward.default
attend_op, attend_backward_op = ops.attend.default, ops.attend_backward.default
gat_op, gat_backward_op = ops.gat.default, ops.gat_backward.default
sddmm_op, spmm_op = ops.sddmm.default, ops.spmm.default

_NONE = (None,) * len(Tensors._fields)


# ---- attention -------------------------------------------------------------------------------------------


class EagerCall(NamedTuple):
    """The arguments of an eager attention call other than its tensors. `run` and `run_backward` get the
    tensors and call the operators."""

    graph: Any
    handle: GraphHandle
    score: str
    numbers: Numbers
    return_attention: bool
    save_positive: bool  # whether to save sums over the edges with z > 0, which backward reads
    heads: int = 0  # H, if tensors of nodes are [N, H * D]; 0 if they are [N, H, D]

    def run(self, tensors):
        """(out, attention or None, what backward needs besides them). tensors: the first fields of `Tensors`,
        up to the last that is not None."""
        try:
            with _BelowAutograd():
                out, saved, attention = attend_op(
                    self.handle.number, self.heads, SCORES[self.score], *tensors, *_NONE[len(tensors) :],
                    *self.numbers, self.return_attention, self.save_positive,
                )  # fmt: skip
        except RuntimeError as error:
            raise typed(error) from None
        return out, attention, (saved,)

    def run_backward(self, grads, tensors, out, attention, saved, need: int):
        """The results of the backward operator. grads: of out, and of the attention or None; saved: as `run`
        gave it; need: see `runtime.ops.need_bits`."""
        try:
            with _BelowAutograd():
                return attend_backward_op(
                    self.handle.number, self.heads, *grads, SCORES[self.score], *tensors, out, *saved,
                    self.save_positive, attention, *self.numbers, need,
                )  # fmt: skip
        except RuntimeError as error:
            raise typed(error) from None

    def dispatched(self, tensors, saved):
        """The same call as a `DispatchedCall`, and what that one saves for backward."""
        other = DispatchedCall(
            self.graph, self.handle.args, self.score, self.numbers, self.return_attention, self.save_positive
        )
        return other, unpacked(saved[0], tensors.value, self.graph.num_dst, self.save_positive)


@dataclass(slots=True, eq=False)
class DispatchedCall:
    """An attention call by the operators that take all tensors of the graph, so that a compiler or a
    transform can record it.

    It is not a tuple, because torch.func would unpack one.
    """

    graph: Any
    graph_args: GraphArgs
    score: str
    numbers: Numbers
    return_attention: bool
    save_positive: bool

    def forward(self, tensors):
        """`ForwardResults`, as a plain tuple. A compiler may record the operator, autograd does not."""
        return call(
            forward_op, SCORES[self.score], *tensors, *self.graph_args, self.graph.num_dst, *self.numbers,
            self.return_attention, self.save_positive,
        )  # fmt: skip

    def backward(self, grads, tensors, saved, need: int, recorded: bool = False):
        """`BackwardResults`, as a plain tuple. saved: out, stats, positive, positive_mass, attention;
        recorded: whether autograd records the operator."""
        args = *grads, SCORES[self.score], *tensors, *saved, *self.graph_args, *self.numbers, need
        return backward_op(*args) if recorded else call(backward_op, *args)

    def run(self, tensors):
        """Does what `EagerCall.run` does."""
        out, stats, positive, positive_mass, attention = self.forward(tensors)
        if not self.save_positive:
            positive = positive_mass = None
        return out, attention if self.return_attention else None, (stats, positive, positive_mass)

    def run_backward(self, grads, tensors, out, attention, saved, need: int):
        return self.backward(grads, tensors, (out, *saved, attention), need)

    def dispatched(self, tensors, saved):
        return self, saved

    def of_heads(self, tensors: dict[str, Tensor | None]) -> DispatchedCall:
        """This call for tensors with another number of heads."""
        edge = EdgeArgs(*(tensors[name] for name in EdgeArgs._fields))
        backward = self.graph_args.rev_indices is not None
        edges = self.return_attention or any(x is not None for x in edge)
        edges = edges or needs_rows(self.score, self.numbers.negative_slope)
        with tracing.untransformed():
            args = graph_args(self.graph, self.score, tensors["value"], edges, backward, "auto")
        return DispatchedCall(
            self.graph, args, self.score, self.numbers, self.return_attention, self.save_positive
        )


def graph_args(graph, score: str, value: Any, edges: bool, backward: bool, schedule: str) -> GraphArgs:
    """The graph as a `DispatchedCall` takes it. edges: as in `plan.choose.plan`."""
    return graph._planner.arguments(
        *value.shape[1:],
        value.dtype,
        PLAN_LAYERS[score],
        schedule=schedule,
        edges=edges,
        backward=backward,
    )


#: What an eager forward saves is one tensor, whose parts begin at multiples of this number of bytes
#: (csrc/torch/checks.h).
SAVED_ALIGN = 256


def unpacked(saved: Tensor, value: Tensor, num_dst: int, positive: bool):
    """stats, positive and positive_mass from the one tensor that an eager forward saved
    (csrc/torch/attention.h)."""
    _, heads, dim = value.shape
    acc, at = acc_type(value.dtype), 0

    def part(shape, dtype):
        nonlocal at
        size = dtype.itemsize * math.prod(shape)
        view = saved[at : at + size].view(dtype).view(shape)
        at += -(-size // SAVED_ALIGN) * SAVED_ALIGN
        return view

    stats = part((num_dst, heads, 2), acc)
    if not positive:
        return stats, None, None
    mass = part((num_dst, heads), acc)
    return stats, part((num_dst, heads, dim), value.dtype), mass


def second_order(handle: GraphHandle, score: int, numbers: Numbers, grads, tensors: Tensors, stats, of, need):
    """The gradients of the backward operator's arguments. grads: grad_out and grad_attention; of: the
    cotangents (gradients) of the backward operator's results; need: the NEED_ bits of those edge
    tensors whose gradients are wanted."""
    return call(
        ops.attend_second_order.default, handle.number, *grads, score, *tensors, stats, *of, *numbers, need
    )


# ---- attention within the autograd function of another computation -----------------------------------------
#
# These functions are called below autograd's dispatch key, so that they need not exclude it. `call` is the
# layer's call, of which they read the attributes handle, heads, score and numbers. Tensors of nodes are rows
# of all heads, [N, H * D].


def attend_rows(call: Any, t: Tensors, positive: bool) -> tuple[Tensor, Tensor]:
    """out, and what else backward needs. positive: as `EagerCall.save_positive`."""
    out, saved, _ = attend_op(
        call.handle.number, call.heads, SCORES[call.score], *t, *call.numbers, False, positive
    )  # fmt: skip
    return out, saved


def attend_rows_backward(
    call: Any, grad: Tensor, t: Tensors, out: Tensor, saved: Tensor, positive: bool, need: int
) -> tuple[Any, ...]:
    """The gradients of value, src, dst, attn (as partial sums), edge_bias, edge_gate, edge_weight, edge_feat.
    need: see `runtime.ops.need_bits`."""
    return attend_backward_op(
        call.handle.number, call.heads, grad, None, SCORES[call.score], *t, out, saved, positive, None,
        *call.numbers, need,
    )  # fmt: skip


# ---- attention with a projection of the edges' features (CUDA only; EdgeAttr in csrc/core/params.h) --------


def attend_projected(handle: GraphHandle, tensors: tuple, numbers: Numbers):
    """out, what backward needs, and per node and head the sum of the edges' features, weighted by the
    attention."""
    return call(
        ops.attend_projected.default, handle.number, *tensors, numbers.scale, numbers.dropout_p
    )  # fmt: skip


def attend_projected_backward(handle: GraphHandle, tensors: tuple, numbers: Numbers, keep_edges: bool):
    """The gradients of value, key and query; the sums of the edges' features, weighted by the scores'
    gradients, from which the projection's gradient is made; and with keep_edges [E, H, 2], the attention and
    the scores' gradients."""
    return call(
        ops.attend_projected_backward.default, handle.number, *tensors, numbers.scale, numbers.dropout_p,
        keep_edges,
    )  # fmt: skip


def projection_grad(query, query_sums, grad, grad_sums, scale: float):
    return call(ops.projection_grad.default, query, query_sums, grad, grad_sums, scale)


def merge_parts(own, own_stats, halo, halo_stats):
    """(out, stats, weight) of two calls of attention (distributed/_attention.py); CUDA only."""
    with _BelowAutograd():
        return ops.merge_parts.default(own, own_stats, halo, halo_stats)


# ---- products along edges --------------------------------------------------------------------------------


def sddmm(graph, rows, feat, reverse: bool):
    return call(ops.sddmm.default, rows, feat, *product_args(graph, feat, reverse))


def spmm(graph, weight, feat, reverse: bool):
    num_rows = graph.num_src if reverse else graph.num_dst
    return call(ops.spmm.default, weight, feat, *product_args(graph, feat, reverse), num_rows)


def edge_term_args(graph, heads: int, width: int, dtype: torch.dtype):
    """The graph as `edge_dot`, `edge_sum` and `edge_outer` take it. These operators read no rows of sources,
    so that a plan depends on nothing but the order of the edges."""
    planner = graph._planner
    schedule = planner.edge_schedule
    args = planner.arguments(heads, width, dtype, None, schedule=schedule, edges=True, backward=False)
    return args[:5]


def edge_dot(graph, rows, attr, scale: float):
    args = edge_term_args(graph, rows.shape[1], rows.shape[2], rows.dtype)
    return call(ops.edge_dot.default, rows, attr, *args, scale)


def edge_sum(graph, weight, attr, width: int):
    args = edge_term_args(graph, weight.shape[1], width, attr.dtype)
    return call(ops.edge_sum.default, weight, attr, *args, graph.num_dst, width)


def edge_outer(graph, weight, rows, dim: int, scale: float):
    args = edge_term_args(graph, rows.shape[1], rows.shape[2], rows.dtype)
    return call(ops.edge_outer.default, weight, rows, *args, dim, scale)


def edge_products(graph, query, key, feat, scale: float, with_products: bool):
    """The scores [E, H], and the products [E, H, D] if asked for; CPU only."""
    args = product_args(graph, key, False)
    return call(ops.edge_products.default, query, key, feat, *args, scale, with_products)


def edge_products_backward(graph, grads, rows, cols, feat, scale: float, reverse: bool, need_feat: bool):
    """The gradients of rows, and of feat if needed. grads: of the scores and of the products; reverse: rows
    are sources."""
    args = product_args(graph, cols, reverse)
    return call(
        ops.edge_products_backward.default, *grads, rows, cols, feat, *args, scale, need_feat
    )  # fmt: skip


def pair_scores(graph, src, dst, attn, attr, proj, positive, slope: float):
    """The scores [E, H], and where m > 0 [E, H, D] (empty if `positive` was given, which has this meaning).
    CPU only. m: see `edge_scores`, the module."""
    like = next(x for x in (src, dst, proj) if x is not None)
    heads, dim = like.shape[1:] if positive is None else positive.shape[1:]
    args = _direction(graph, heads, dim, like.dtype, False)
    return call(ops.pair_scores.default, src, dst, attn, attr, proj, positive, *args, heads, dim, slope)


def pair_sums(graph, weight, positive, attr, proj, slope: float):
    """The sums per source and per destination; the gradient of attr, or None without proj; and the gradient
    of proj, or None without attr. CPU only; see `pair_scores._Sums`."""
    _, heads, dim = positive.shape
    rows, of_attr, of_proj = call(
        ops.pair_sums.default, weight, positive, attr, proj,
        *_direction(graph, heads, dim, weight.dtype, False), slope,
    )  # fmt: skip
    cols, _, _ = call(
        ops.pair_sums.default, weight, positive, None, None,
        *_direction(graph, heads, dim, weight.dtype, True), slope,
    )  # fmt: skip
    return cols, rows, None if proj is None else of_attr, None if attr is None else total(of_proj)


def _direction(graph, heads: int, dim: int, dtype, reverse: bool):
    """The graph's `product_args`, and its numbers of rows and columns."""
    csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
    plan = graph.plan(num_heads=heads, head_dim=dim, dtype=dtype, reverse=reverse, layer=None)
    sizes = (graph.num_src, graph.num_dst) if reverse else (graph.num_dst, graph.num_src)
    return csr.indices, csr.eids, plan.items, plan.splits, plan.launch, *sizes


# ---- softmax and sums over groups of rows given by an index (csrc/cpu/by_index.h); eager calls only --------


def index_softmax(score, index, num_groups: int, masked: bool):
    with _BelowAutograd():
        return ops.index_softmax.default(score, index, num_groups, masked)


def index_softmax_backward(result, grad, index, num_groups: int):
    with _BelowAutograd():
        return ops.index_softmax_backward.default(result, grad, index, num_groups)


def index_sum(rows, index, num_groups: int, *source):
    """source: the indices of the rows that are added up; without it all rows, in their order."""
    with _BelowAutograd():
        return ops.index_sum.default(rows, index, num_groups, *source)
