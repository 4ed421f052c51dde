"""Attention of a part: over its own sources while the rows of others are on their way, then over these.

The two are softmaxes over parts of a row. With (max, log_sum) of each, their merge is exact:

    max = max_p max_p      log_sum = log sum_p exp(max_p - max + log_sum_p)
    out = sum_p w_p out_p      w_p = exp(max_p - max + log_sum_p - log_sum)

Backward computes alpha from the scores and the statistics of the whole row, and delta = g . out of the whole
row. So each part's gradients are exact once both are given to it, and need no other merge (the scheme of ring
attention: Liu, Zaharia and Abbeel, arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._arguments import NEED_DST, BackwardResults, EdgeArgs, ForwardResults, Tensors
from .._autograd import _Call, _gradients, _need_bits, _top_hooks
from ._exchange import Exchange, Pending


class Pair(NamedTuple):
    """The two calls of an attention."""

    own: _Call
    halo: _Call
    exchange: Exchange
    num_own_edges: int

    def edges(self, tensors: Tensors, halo: bool) -> dict[str, Tensor | None]:
        """The tensors on edges of one of the calls; own ones come first."""
        part = slice(self.num_own_edges, None) if halo else slice(0, self.num_own_edges)
        return {
            name: x if x is None or name == "seed" else x[part]
            for name, x in ((name, getattr(tensors, name)) for name in EdgeArgs._fields)
        }

    def tensors(self, tensors: Tensors, value: Tensor | None = None, src: Tensor | None = None) -> Tensors:
        """Those of the own call, or with the rows that were fetched, of the other."""
        edges = self.edges(tensors, value is not None)
        ends = {} if value is None else {"value": value, "src": src}
        return Tensors(**{**tensors._asdict(), **ends, **edges})

    def fetch(self, tensors: Tensors) -> list[Pending | None]:
        return [None if x is None else self.exchange.fetch(x) for x in (tensors.value, tensors.src)]

    def forward(self, tensors: Tensors, pending: list[Pending | None]) -> tuple[ForwardResults, list]:
        """The merged results, and the rows that were fetched."""
        without_bias = tensors._replace(out_bias=None)
        own = ForwardResults(*self.own.forward(self.tensors(without_bias)))
        value, src = (None if x is None else x.wait() for x in pending)
        assert value is not None
        if len(value):
            own = merged(own, ForwardResults(*self.halo.forward(self.tensors(without_bias, value, src))))
        if tensors.out_bias is not None:
            own.out.add_(tensors.out_bias)
        return own, [value, src]


def merged(a: ForwardResults, b: ForwardResults) -> ForwardResults:
    """Of two parts of each row, written over the first. A row without mass has max = inf and log_sum = 0."""
    empty_a, empty_b = (x.stats[..., 0] == torch.inf for x in (a, b))
    empty_a, empty_b = (e & (x.stats[..., 1] == 0) for e, x in ((empty_a, a), (empty_b, b)))
    max_a = a.stats[..., 0].masked_fill(empty_a, -torch.inf)
    max_b = b.stats[..., 0].masked_fill(empty_b, -torch.inf)
    top = torch.maximum(max_a, max_b)
    mass_a = (max_a - top + a.stats[..., 1]).exp().masked_fill(empty_a, 0)
    mass_b = (max_b - top + b.stats[..., 1]).exp().masked_fill(empty_b, 0)
    mass = mass_a + mass_b
    empty = empty_a & empty_b
    stats = torch.stack([top.masked_fill(empty, torch.inf), mass.log().masked_fill(empty, 0)], -1)
    mass = mass.masked_fill(empty, 1)
    weight_a, weight_b = (mass_a / mass).unsqueeze(-1), (mass_b / mass).unsqueeze(-1)
    out = a.out.mul_(weight_a).addcmul_(b.out, weight_b)
    positive, positive_mass = a.positive, a.positive_mass
    if positive.dim() > 1:
        positive.mul_(weight_a).addcmul_(b.positive, weight_b)
        positive_mass.mul_(weight_a[..., 0]).addcmul_(b.positive_mass, weight_b[..., 0])
    return ForwardResults(out, stats, positive, positive_mass, a.attention)


class Attention(torch.autograd.Function):
    """out of a call on both parts. As in `_autograd._Attention`, it may be modified in place."""

    @staticmethod
    def forward(ctx, pair: Pair, *tensors: Any) -> Tensor:
        named = Tensors(*tensors)
        results, halo = pair.forward(named, pair.fetch(named))
        out = results.out
        if _top_hooks(True) is None:
            ctx.kept, saved = out.detach(), []
        else:
            ctx.kept, saved = None, [out]
        ctx.pair, ctx.version = pair, out._version
        positive = (results.positive, results.positive_mass) if pair.own.save_positive else (None, None)
        ctx.save_for_backward(*tensors, *halo, results.stats, *positive, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        pair: Pair = ctx.pair
        count = len(Tensors._fields)
        found = ctx.saved_tensors
        tensors = Tensors(*found[:count])
        value, src, stats, positive, positive_mass, *kept = found[count:]
        out = kept[0] if kept else ctx.kept
        if out._version != ctx.version:
            there = [None if x is None else Pending(None, x, x, x.dtype, None) for x in (value, src)]
            out = pair.forward(tensors, there)[0].out
        need = Tensors(*ctx.needs_input_grad[1:])
        bits = _need_bits(need)
        grad_out = grad_out.contiguous()
        grads = grad_out, None
        own_saved = halo_saved = out, stats, positive, positive_mass, None
        own_bits = halo_bits = bits
        if positive is not None:
            # It stands for a sum over the whole row, so that one call takes it; without edges it would not.
            without = out, stats, None, None, None
            if pair.num_own_edges:
                halo_saved, halo_bits = without, bits & ~NEED_DST
            else:
                own_saved, own_bits = without, bits & ~NEED_DST
        there = pair.tensors(tensors, value, src)
        halo, pending = None, []
        if len(value):
            halo = BackwardResults(*pair.halo.backward(grads, there, halo_saved, halo_bits))
        if need.value:
            pending.append((0, pair.exchange.give_back(value if halo is None else halo.grad_value)))
        if need.src:
            pending.append((1, pair.exchange.give_back(src if halo is None else halo.grad_src)))
        here = pair.tensors(tensors)
        own = BackwardResults(*pair.own.backward(grads, here, own_saved, own_bits))
        for place, rows in pending:
            pair.exchange.add(own[place], rows.wait())
        found = Tensors(*_gradients(need, here, grad_out, own))
        if halo is not None:
            more = Tensors(*_gradients(need._replace(out_bias=False), there, grad_out, halo))
            found = _joined(found, more, own_bits, halo_bits)
        elif need.dst and own_bits != bits:  # a part without edges
            found = found._replace(dst=torch.zeros_like(tensors.dst))
        return None, *found


def _joined(own: Tensors, halo: Tensors, own_bits: int, halo_bits: int) -> Tensors:
    """The gradients of both calls: those of sources have gone to their owners, those of edges lie end to
    end."""
    found = own._asdict()
    for name in EdgeArgs._fields:
        if found[name] is not None:
            found[name] = torch.cat([found[name], getattr(halo, name)])
    if found["attn"] is not None:
        found["attn"] = found["attn"].add_(halo.attn)
    if own_bits != halo_bits:
        found["dst"] = halo.dst if halo_bits & NEED_DST else own.dst
    elif found["dst"] is not None:
        found["dst"] = found["dst"].add_(halo.dst)
    return Tensors(**found)
