"""Attention of a process's part of a graph: over its own sources while other processes' rows arrive, then
over these (the halo), and an exact merge of both results.

Each call p computes a softmax over some edges of a row: its output out_p, the maximum m_p of its scores, and
s_p, the log of the sum of exp(score - m_p). The results of both merge to

    m = max_p m_p              s = log sum_p exp(m_p - m + s_p)
    out = sum_p w_p out_p      w_p = exp(m_p - m + s_p - s)

Backward computes the weights alpha from the scores and the merged m and s; and delta, the sum over a row of
out times its gradient, from the merged output. So the gradients of both calls are exact without a further
merge, as in ring attention (Liu, Zaharia and Abbeel, arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine import operators
from ..engine.operators import DispatchedCall
from ..runtime.arguments import BackwardResults, EdgeArgs, ForwardResults, Tensors
from ..runtime.eager import top_hooks
from ..runtime.ops import gradients, need_bits
from ._exchange import Exchange, Pending, first_order


class Pair(NamedTuple):
    """The two calls of an attention, over own sources and over the halo's, with the exchange between."""

    own: DispatchedCall
    halo: DispatchedCall
    exchange: Exchange
    num_own_edges: int

    def edges(self, tensors: Tensors, halo: bool) -> dict[str, Tensor | None]:
        """The edge tensors of one of the calls; edges from own sources come first in them."""
        part = slice(self.num_own_edges, None) if halo else slice(0, self.num_own_edges)
        return {
            name: x if x is None or name == "seed" else x[part]
            for name, x in ((name, getattr(tensors, name)) for name in EdgeArgs._fields)
        }

    def tensors(self, tensors: Tensors, value: Tensor | None = None, src: Tensor | None = None) -> Tensors:
        """The tensors of the own call; with the rows that were fetched (value, src), those of the halo's."""
        edges = self.edges(tensors, value is not None)
        ends = {} if value is None else {"value": value, "src": src}
        return Tensors(**{**tensors._asdict(), **ends, **edges})

    def fetch(self, tensors: Tensors) -> list[Pending | None]:
        return [None if x is None else self.exchange.fetch(x) for x in (tensors.value, tensors.src)]

    def forward(self, tensors: Tensors, pending: list[Pending | None]) -> tuple[Merged, list]:
        """The merged results, and the rows that were fetched. Both calls add the bias, which the merge, an
        interpolation, does not change."""
        own = ForwardResults(*self.own.forward(self.tensors(tensors)))
        value, src = (None if x is None else x.wait() for x in pending)
        assert value is not None
        if not len(value):
            return Merged(own.out, own.stats, None, [own]), [value, src]
        halo = ForwardResults(*self.halo.forward(self.tensors(tensors, value, src)))
        return merged(own, halo), [value, src]


class Merged(NamedTuple):
    out: Tensor
    stats: Tensor  # [N_dst, H, 2]: m and s of the merged softmax
    # [N_dst, H] in the accumulation type: w_p of the call over fetched rows, their share of a row's sum of
    # exponentials; None if no rows were fetched.
    weight: Tensor | None
    parts: list[ForwardResults]

    def positive(self, save: bool) -> list[Tensor | None]:
        """positive and positive_mass (csrc/core/params.h) of each call, which backward reads; None unless
        ``save``."""
        return [x if save else None for part in self.parts for x in (part.positive, part.positive_mass)]


def merged(own: ForwardResults, halo: ForwardResults) -> Merged:
    """Merges the results of two calls. A row without edges has max = inf and log_sum = 0."""
    if own.out.is_cuda:
        out, stats, weight = operators.merge_parts(own.out, own.stats, halo.out, halo.stats)
        return Merged(out, stats, weight, [own, halo])
    (max_own, sum_own), (max_halo, sum_halo) = own.stats.unbind(-1), halo.stats.unbind(-1)
    no_own = (max_own == torch.inf) & (sum_own == 0)
    no_halo = (max_halo == torch.inf) & (sum_halo == 0)
    max_own, max_halo = max_own.masked_fill(no_own, -torch.inf), max_halo.masked_fill(no_halo, -torch.inf)
    top = torch.maximum(max_own, max_halo)
    mass_own = (max_own - top + sum_own).exp().masked_fill(no_own, 0)
    mass_halo = (max_halo - top + sum_halo).exp().masked_fill(no_halo, 0)
    mass, empty = mass_own + mass_halo, no_own & no_halo
    stats = torch.stack([top.masked_fill(empty, torch.inf), mass.log().masked_fill(empty, 0)], -1)
    weight = mass_halo / mass.masked_fill(empty, 1)
    # lerp is one pass, and exact for weights 0 and 1. The weight is rounded to the features' type, as out is.
    out = torch.lerp(own.out, halo.out, weight.to(own.out.dtype).unsqueeze(-1))
    return Merged(out, stats, weight, [own, halo])


class Attention(torch.autograd.Function):
    """The output of both calls, merged. As with `engine.autograd.Attention`, the user may modify it in place:
    backward then computes it again."""

    @staticmethod
    def forward(ctx, pair: Pair, *tensors: Any) -> Tensor:
        named = Tensors(*tensors)
        results, halo = pair.forward(named, pair.fetch(named))
        out = results.out
        if top_hooks(True) is None:
            ctx.kept, saved = out.detach(), []
        else:
            ctx.kept, saved = None, [out]
        ctx.pair, ctx.version = pair, out._version
        positive = results.positive(pair.own.save_positive)
        ctx.save_for_backward(*tensors, *halo, results.stats, results.weight, *saved, *positive)
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad_out):
        pair: Pair = ctx.pair
        count = len(Tensors._fields)
        saved = ctx.saved_tensors
        tensors = Tensors(*saved[:count])
        value, src, stats, weight, *rest = saved[count:]
        out, positive = (rest[0], rest[1:]) if ctx.kept is None else (ctx.kept, rest)
        if out._version != ctx.version:
            fetched = [None if x is None else Pending(None, x, [], x.dtype, None) for x in (value, src)]
            out = pair.forward(tensors, fetched)[0].out
        need = Tensors(*ctx.needs_input_grad[1:])
        bits = need_bits(need)
        grad_out = grad_out.contiguous()
        grads = grad_out, None
        other = pair.tensors(tensors, value, src)
        halo, pending = None, []
        if len(value):
            halo = BackwardResults(*pair.halo.backward(grads, other, (out, stats, *positive[2:], None), bits))
        if need.value:
            pending.append((0, pair.exchange.give_back(value if halo is None else halo.grad_value)))
        if need.src:
            pending.append((1, pair.exchange.give_back(src if halo is None else halo.grad_src)))
        own_args = pair.tensors(tensors)
        own = BackwardResults(*pair.own.backward(grads, own_args, (out, stats, *positive[:2], None), bits))
        for place, rows in pending:
            pair.exchange.add(own[place], rows.wait())
        saved = Tensors(*gradients(need, own_args, grad_out, own))
        if halo is not None:
            # The gradient of out_bias, the sum of grad_out's rows, is counted once: in that of `own`.
            more = Tensors(*gradients(need._replace(out_bias=False), other, grad_out, halo))
            # Gradients of dst that come from `positive`, which each call has normalised, merge as outputs do.
            saved = _joined(saved, more, weight if pair.own.save_positive else None)
        return None, *saved


def _joined(own: Tensors, halo: Tensors, weight: Tensor | None) -> Tensors:
    """Joins the gradients of both calls. Those of sources are own's, because the halo's were sent to their
    owners; those of edges are concatenated. weight: as in `Merged`, where gradients of dst merge by it."""
    grads = own._asdict()
    for name in EdgeArgs._fields:
        if grads[name] is not None:
            grads[name] = torch.cat([grads[name], getattr(halo, name)])
    if own.attn is not None and halo.attn is not None:
        grads["attn"] = own.attn.add_(halo.attn)
    if own.dst is not None and halo.dst is not None:
        grads["dst"] = own.dst.add_(halo.dst) if weight is None else torch.lerp(own.dst, halo.dst, weight)
    return Tensors(**grads)
