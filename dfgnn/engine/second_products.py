"""The backward of the backward of attention as products along edges: on GPUs, which have no operator for it.

docs/internals/second_derivatives.md derives the formulas; names here are its names. Sums over the edges are
`sddmm` and `spmm`, whose kernels gather rows; the terms between them are scalars per edge and head, [E, H].
Rows of edges (features, and the columns of GATv2's score, each of which has its own slope) are processed in
chunks of edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..runtime.arguments import BIAS_AFTER, FEAT_IN_KEY, FEAT_IN_VALUE, SCORES, Numbers
from ..runtime.ops import acc_type
from . import plain, products

__all__ = ["CHUNK", "gradients"]

#: Elements of the rows of edges that are processed at a time.
CHUNK = 2**19

Gradients = dict[str, Tensor]


def gradients(
    graph, score: int, numbers: Numbers, primals: dict[str, Any], given: dict[str, Tensor], stats: Tensor
) -> Gradients:
    """The gradients by name, in the accumulators' type, of every head."""
    return _CLASSES[score](graph, numbers, primals, given, stats).gradients()


class _Second:
    """One call. Subclasses know what a score takes of the ends of an edge."""

    # The results of the backward operator whose cotangents these are.
    V: Tensor | None  # of grad_value [N_src, H, D]
    K: Tensor | None  # of grad_src
    Q: Tensor | None  # of grad_dst
    A: Tensor | None  # of grad_attn [H, D]
    B: Tensor | None  # of grad_bias [E, H]
    C: Tensor | None  # of grad_gate [E, H]
    W: Tensor | None  # of grad_weight [E, H]
    F: Tensor | None  # of grad_feat [E, H, D]

    def __init__(
        self, graph, numbers: Numbers, primals: dict[str, Any], given: dict[str, Tensor], stats: Tensor
    ):
        self.graph, self.numbers, self.primals = graph, numbers, primals
        self.src, self.dst = graph.edge_index
        self.heads = primals["value"].shape[1]
        self.acc = acc_type(primals["value"].dtype)
        self.maxima = stats[..., 0].to(self.acc)

        def wide(x: Tensor | None) -> Any:
            return x if x is None else x.to(self.acc)

        self.value, self.key, self.query, self.attn = (
            wide(primals[name]) for name in ("value", "src", "dst", "attn")
        )
        self.feat, self.bias, self.gate, self.weight = (
            wide(primals[name]) for name in ("edge_feat", "edge_bias", "edge_gate", "edge_weight")
        )
        self.grad_out, self.gamma = wide(primals["grad_out"]), wide(primals["grad_attention"])
        for letter, name in zip("VKQABCWF", plain.GRADIENTS.values()):
            setattr(self, letter, wide(given.get(name)))

    # ---- what a score is -------------------------------------------------------------------------

    #: Whether the features of edges are in the key, and in the value.
    in_key = in_value = False

    def first_pass(self) -> tuple[Tensor, Tensor | None]:
        """raw, and t_raw, the cotangent of the gradient of raw."""
        raise NotImplementedError

    def second_pass(self, found: Gradients, of_raw: Tensor, of_t_raw: Tensor) -> None:
        """Adds what raw and t_raw give to the gradients of the tensors that they are made of."""
        raise NotImplementedError

    # ---- products along edges ----------------------------------------------------------------------

    def sddmm(self, rows: Tensor, feat: Tensor) -> Tensor:
        """<rows[i], feat[j]>; rows are destinations'."""
        return products.sddmm(self.graph, _padded(rows), _padded(feat))

    def over_sources(self, weight: Tensor, feat: Tensor) -> Tensor:
        """sum_j weight_ij feat[j] of each destination i."""
        return self._spmm(weight, feat, False)

    def over_destinations(self, weight: Tensor, rows: Tensor) -> Tensor:
        """sum_i weight_ij rows[i] of each source j."""
        return self._spmm(weight, rows, True)

    def _spmm(self, weight: Tensor, feat: Tensor, reverse: bool) -> Tensor:
        return products.spmm(self.graph, weight.contiguous(), _padded(feat), reverse)[..., : feat.shape[2]]

    def sum(self, x: Tensor, reverse: bool = False) -> Tensor:
        """[N, H]: scalars of edges added up by destination, or by source."""
        count = self.graph.num_dst if reverse else self.graph.num_src
        return self._spmm(x, x.new_ones(count, self.heads, 1), reverse).squeeze(2)

    def chunks(self, width: int) -> Iterator[slice]:
        size = max(1, CHUNK // max(1, self.heads * width))
        return (slice(at, at + size) for at in range(0, len(self.dst), size))

    # ---- the formulas ------------------------------------------------------------------------------

    def gradients(self) -> Gradients:
        n = self.numbers
        raw, t_raw = self.first_pass()
        z = raw if self.gate is None else raw * self.gate
        after = bool(n.flags & BIAS_AFTER)
        if self.bias is not None and not after:
            z = z + self.bias
        slope = self.slope(z)
        alpha = self.alpha(z, slope, after)
        mask = self.dropout()
        factor = _product(mask, self.weight)

        p, u = self.sddmm(self.grad_out, self.value), None
        if self.V is not None:
            u = self.sddmm(self.grad_out, self.V)
        if self.in_value:
            p, u = self.with_features(p, u)
        if self.gamma is not None:
            p = p + self.gamma
        fp = p if factor is None else factor * p
        delta = self.sum(alpha * fp)
        ds = alpha * (fp - delta[self.dst])

        t = _plus(_times(t_raw, self.gate), _times(self.C, raw), None if after else self.B)
        t = _plus(_times(t, slope), self.B if after else None)
        centred = None if t is None else t - self.sum(alpha * t)[self.dst]
        moved = _plus(_times(centred, factor), _times(self.W, mask))
        of_alpha = _plus(_times(moved, p), _times(u, factor), None if t is None else -delta[self.dst] * t)
        d = alpha * (of_alpha - self.sum(alpha * of_alpha)[self.dst])
        dz = _times(d, slope)
        dz_first = _times(ds, slope)
        of_raw = _plus(_times(dz, self.gate), _times(self.C, dz_first))
        of_p = _times(moved, alpha)

        found: Gradients = {}
        self.of_values(found, of_p, _times(alpha, factor))
        self.second_pass(found, of_raw, _times(dz_first, self.gate))
        if self.gamma is not None and of_p is not None:
            found["grad_attention"] = of_p
        if self.bias is not None:
            found["edge_bias"] = d if after else dz
        if self.gate is not None:
            found["edge_gate"] = _plus(raw * dz, _times(t_raw, dz_first))
        if self.weight is not None:
            found["edge_weight"] = _times(_plus(_times(centred, p), u), _times(alpha, mask))
        return {name: x for name, x in found.items() if x is not None}

    def slope(self, z: Tensor) -> Tensor | None:
        """LeakyReLU', None where it is 1."""
        if self.numbers.negative_slope == 1:
            return None
        return torch.full_like(z, self.numbers.negative_slope).masked_fill_(z > 0, 1)

    def alpha(self, z: Tensor, slope: Tensor | None, after: bool) -> Tensor:
        """The softmax, relative to the forward pass's maxima and normalised anew."""
        score = _times(z, slope)
        if self.bias is not None and after:
            score = score + self.bias
        mask = self.primals["edge_mask"]
        if mask is not None:
            score = score.masked_fill(~mask, -torch.inf)
        weight = torch.exp(score - self.maxima[self.dst])
        total = self.sum(weight)
        return weight / total.masked_fill_(total == 0, 1)[self.dst]

    def dropout(self) -> Tensor | None:
        seed = self.primals["seed"]
        if seed is None:
            return None
        mask = reference.dropout_mask(seed, len(self.dst), self.heads, self.numbers.dropout_p, seed.device)
        return mask.to(self.acc)

    def with_features(self, p: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """p and u with the features of edges in the value, and their cotangent."""
        p = p.clone()
        if self.F is not None:
            u = torch.zeros_like(p) if u is None else u
        for at in self.chunks(self.value.shape[2]):
            rows = self.grad_out[self.dst[at]]
            p[at] += _dot(rows, self.feat[at])
            if self.F is not None and u is not None:
                u[at] += _dot(rows, self.F[at])
        return p, u

    def of_values(self, found: Gradients, of_p: Tensor | None, a: Tensor) -> None:
        """The gradients that p = g.(v + e) and u = g.(V + F) give; a: the weight of u."""
        to_grad_out = [None if self.V is None else self.over_sources(a, self.V)]
        if of_p is not None:
            to_grad_out.append(self.over_sources(of_p, self.value))
            found["value"] = self.over_destinations(of_p, self.grad_out)
        total = _plus(*to_grad_out)
        if self.in_value and (of_p is not None or self.F is not None):
            total = torch.zeros_like(self.grad_out) if total is None else total
            of_feat = found["edge_feat"] = torch.zeros_like(self.feat)
            for at in self.chunks(self.value.shape[2]):
                row: Any = None
                if of_p is not None:
                    weight = of_p[at].unsqueeze(2)
                    row = weight * self.feat[at]
                    torch.mul(weight, self.grad_out[self.dst[at]], out=of_feat[at])
                if self.F is not None:
                    row = _plus(row, a[at].unsqueeze(2) * self.F[at])
                total.index_add_(0, self.dst[at], row)
        if total is not None:
            found["grad_out"] = total


class _Additive(_Second):
    """GAT: raw = a_src[j] + a_dst[i]."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.in_value = self.feat is not None

    def first_pass(self) -> tuple[Tensor, Tensor | None]:
        raw = self.key[self.src]
        if self.query is not None:
            raw = raw + self.query[self.dst]
        of_src = None if self.K is None else self.K[self.src]
        return raw, _plus(of_src, None if self.Q is None else self.Q[self.dst])

    def second_pass(self, found: Gradients, of_raw: Tensor, of_t_raw: Tensor) -> None:
        found["src"] = self.sum(of_raw, reverse=True)
        if self.query is not None:
            found["dst"] = self.sum(of_raw)


class _Dot(_Second):
    """Dot products: raw = scale q_i.(k_j + e_ij)."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        flags = self.numbers.flags if self.feat is not None else 0
        self.in_key, self.in_value = bool(flags & FEAT_IN_KEY), bool(flags & FEAT_IN_VALUE)

    def first_pass(self) -> tuple[Tensor, Tensor | None]:
        raw = self.sddmm(self.query, self.key)
        t_raw = _plus(
            None if self.Q is None else self.sddmm(self.Q, self.key),
            None if self.K is None else self.sddmm(self.query, self.K),
        )
        if self.in_key:
            raw, t_raw = self._with_features_in_key(raw, t_raw)
        scale = self.numbers.scale
        return raw * scale, None if t_raw is None else t_raw * scale

    def _with_features_in_key(self, raw: Tensor, t_raw: Tensor | None) -> tuple[Tensor, Tensor | None]:
        raw = raw.clone()
        if t_raw is None and not (self.Q is self.F is None):
            t_raw = torch.zeros_like(raw)
        for at in self.chunks(self.key.shape[2]):
            rows = self.query[self.dst[at]]
            raw[at] += _dot(rows, self.feat[at])
            if self.F is not None and t_raw is not None:
                t_raw[at] += _dot(rows, self.F[at])
            if self.Q is not None and t_raw is not None:
                t_raw[at] += _dot(self.Q[self.dst[at]], self.feat[at])
        return raw, t_raw

    def second_pass(self, found: Gradients, of_raw: Tensor, of_t_raw: Tensor) -> None:
        of_raw, of_t_raw = of_raw * self.numbers.scale, of_t_raw * self.numbers.scale
        of_query = _plus(
            self.over_sources(of_raw, self.key),
            None if self.K is None else self.over_sources(of_t_raw, self.K),
        )
        found["src"] = _plus(
            self.over_destinations(of_raw, self.query),
            None if self.Q is None else self.over_destinations(of_t_raw, self.Q),
        )
        found["dst"] = of_query
        if not self.in_key:
            return
        of_feat = found.setdefault("edge_feat", torch.zeros_like(self.feat))
        for at in self.chunks(self.key.shape[2]):
            weight, weight_t, dst = of_raw[at].unsqueeze(2), of_t_raw[at].unsqueeze(2), self.dst[at]
            rows = weight * self.feat[at]
            if self.F is not None:
                rows += weight_t * self.F[at]
            of_query.index_add_(0, dst, rows)
            of_feat[at].addcmul_(weight, self.query[dst])
            if self.Q is not None:
                of_feat[at].addcmul_(weight_t, self.Q[dst])


class _AdditiveV2(_Second):
    """GATv2: raw = attn.LeakyReLU(w), w = v_j + x_i + e_ij, whose every column has a slope of its own."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # The score's LeakyReLU is within: what it gives is not passed through another one.
        self.within, self.numbers = self.numbers.negative_slope, self.numbers._replace(negative_slope=1.0)

    def _columns(self, at: slice) -> tuple[Tensor, Tensor]:
        """w of a chunk of edges, and LeakyReLU' of it."""
        w = self.value[self.src[at]].add_(self.query[self.dst[at]])
        if self.feat is not None:
            w += self.feat[at]
        return w, torch.full_like(w, self.within).masked_fill_(w > 0, 1)

    def _moved(self, at: slice) -> Tensor | None:
        """V_j + X_i + F_ij: how w moves."""
        return _plus(
            None if self.V is None else self.V[self.src[at]],
            None if self.Q is None else self.Q[self.dst[at]],
            None if self.F is None else self.F[at],
        )

    def first_pass(self) -> tuple[Tensor, Tensor | None]:
        raw = self.value.new_empty(len(self.dst), self.heads)
        has_t = not (self.V is self.Q is self.F is self.A is None)
        t_raw = torch.zeros_like(raw) if has_t else None
        for at in self.chunks(self.value.shape[2]):
            w, slopes = self._columns(at)
            leaky = w.mul_(slopes)
            raw[at] = _dot(leaky, self.attn)
            if t_raw is None:
                continue
            if self.A is not None:
                t_raw[at] += _dot(leaky, self.A)
            if (moved := self._moved(at)) is not None:
                t_raw[at] += _dot(slopes.mul_(moved), self.attn)
        return raw, t_raw

    def second_pass(self, found: Gradients, of_raw: Tensor, of_t_raw: Tensor) -> None:
        of_value = found["value"].contiguous() if "value" in found else torch.zeros_like(self.value)
        found["value"] = of_value
        of_query = found["dst"] = torch.zeros_like(self.query)
        of_attn = found["attn"] = torch.zeros_like(self.attn)
        of_feat = None
        if self.feat is not None:
            of_feat = found["edge_feat"] = torch.empty_like(self.feat)
        for at in self.chunks(self.value.shape[2]):
            weight, weight_t = of_raw[at].unsqueeze(2), of_t_raw[at].unsqueeze(2)
            w, slopes = self._columns(at)
            of_attn += (weight * w.mul_(slopes)).sum(0)
            rows = weight * self.attn
            if (moved := self._moved(at)) is not None:
                of_attn += (weight_t * slopes * moved).sum(0)
            if self.A is not None:
                rows = rows.addcmul(weight_t, self.A)
            rows = slopes.mul_(rows)
            of_value.index_add_(0, self.src[at], rows)
            of_query.index_add_(0, self.dst[at], rows)
            if of_feat is not None:
                of_feat[at] = rows


_CLASSES = {SCORES["additive"]: _Additive, SCORES["dot"]: _Dot, SCORES["additive_v2"]: _AdditiveV2}


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def _padded(x: Tensor) -> Tensor:
    """Rows as the products' kernels take them: on CUDA a head is a multiple of 16 bytes."""
    more = -x.shape[2] % (16 // x.element_size()) if x.is_cuda else 0
    return (torch.nn.functional.pad(x, (0, more)) if more else x).contiguous()


def _times(x: Any, factor: Tensor | None) -> Any:
    """x times a factor, where None for x is 0, and for the factor 1."""
    return x if x is None or factor is None else x * factor


def _product(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """The product of two factors, of which None is 1."""
    return y if x is None else _times(x, y)


def _plus(*parts: Tensor | None) -> Any:
    """The sum of what is not None; None of nothing."""
    total = None
    for x in parts:
        if x is not None:
            total = x if total is None else total + x
    return total
