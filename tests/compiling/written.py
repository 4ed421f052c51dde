"""Graph attention as people write it: spellings of gathers, sums, softmaxes, scores, values and options."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import scatter as pyg_scatter
from torch_geometric.utils import softmax as pyg_softmax

H, D, A = 3, 5, 4  # heads, columns of a head, attributes of an edge


class Inputs(NamedTuple):
    """N nodes, E edges. m: another number of sources."""

    edge_index: Tensor
    query: Tensor  # [N, H, D]
    key: Tensor  # [M, H, D]
    value: Tensor  # [M, H, D]
    score_dst: Tensor  # [N, H]
    score_src: Tensor  # [M, H]
    feat: Tensor  # [E, H, D]
    other_feat: Tensor  # [E, H, D]
    bias: Tensor  # [E, H]
    gate: Tensor  # [E, H]
    attr: Tensor  # [E, A]
    weight: Tensor  # [H * D, A]
    vector: Tensor  # [1, H, D]

    @property
    def src(self):
        return self.edge_index[0]

    @property
    def dst(self):
        return self.edge_index[1]


def of_tensors(fn):
    """A function of an Inputs as one of its tensors."""
    return lambda *tensors: fn(Inputs(*tensors))


def inputs(
    num_src: int, num_dst: int, num_edges: int, seed: int = 0, dtype=torch.float64, device="cpu"
) -> Inputs:
    make = torch.Generator().manual_seed(seed)

    def rand(*shape):
        made = torch.randn(*shape, generator=make, dtype=torch.float64)
        return made.to(device, dtype).requires_grad_()

    ends = [torch.randint(0, max(count, 1), (num_edges,), generator=make) for count in (num_src, num_dst)]
    return Inputs(
        torch.stack(ends).to(device), rand(num_dst, H, D), rand(num_src, H, D), rand(num_src, H, D),
        rand(num_dst, H), rand(num_src, H), rand(num_edges, H, D), rand(num_edges, H, D), rand(num_edges, H),
        rand(num_edges, H), rand(num_edges, A), rand(H * D, A), rand(1, H, D),
    )  # fmt: skip


# ---- gathers: rows of x along the first dimension ----------------------------------------------------------


def wide(index: Tensor, like: Tensor, dim: int = 0) -> Tensor:
    return index.view([-1 if k == dim else 1 for k in range(like.dim())]).expand_as(like)


GATHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_select": lambda x, i: x.index_select(0, i),
    "torch.index_select": lambda x, i: torch.index_select(x, 0, i),
    "negative dim": lambda x, i: torch.index_select(input=x, dim=-x.dim(), index=i),
    "x[i]": lambda x, i: x[i],
    "x[i, :]": lambda x, i: x[i, :],
    "x[i, ...]": lambda x, i: x[i, ...],
    "gather": lambda x, i: x.gather(0, i.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:])),
    "torch.gather": lambda x, i: (
        torch.gather(x, 0, i[:, None, None].expand(i.shape[0], *x.shape[1:])) if x.dim() == 3 else x[i]
    ),
    "embedding": lambda x, i: F.embedding(i, x.flatten(1)).view(-1, *x.shape[1:]),
    "take_along_dim": lambda x, i: torch.take_along_dim(
        x, i.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:]), 0
    ),
}

# ---- segment sums along the first dimension ----------------------------------------------------------------


def zeros(n, x):
    return torch.zeros(n, *x.shape[1:], dtype=x.dtype, device=x.device)


def _index_add_in_place(x, i, n):
    out = zeros(n, x)
    out.index_add_(0, i, x)
    return out


def _index_put_in_place(x, i, n):
    out = x.new_zeros((n, *x.shape[1:]))
    out.index_put_((i,), x, accumulate=True)
    return out


SUMS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "new_zeros.scatter_add_": lambda x, i, n: x.new_zeros(n, *x.shape[1:]).scatter_add_(0, wide(i, x), x),
    "zeros.scatter_add": lambda x, i, n: zeros(n, x).scatter_add(0, wide(i, x), x),
    "torch.scatter_add": lambda x, i, n: torch.scatter_add(x.new_zeros((n,) + x.shape[1:]), 0, wide(i, x), x),
    "repeated index": lambda x, i, n: zeros(n, x).scatter_add(
        0, i.reshape(-1, *[1] * (x.dim() - 1)).repeat(1, *x.shape[1:]), x
    ),
    "scatter_reduce": lambda x, i, n: x.new_zeros(n, *x.shape[1:]).scatter_reduce(0, wide(i, x), x, "sum"),
    "scatter_reduce_ without self": lambda x, i, n: x.new_zeros(n, *x.shape[1:]).scatter_reduce_(
        0, wide(i, x), x, reduce="sum", include_self=False
    ),
    "index_add": lambda x, i, n: zeros(n, x).index_add(0, i, x),
    "torch.index_add": lambda x, i, n: torch.index_add(x.new_zeros(n, *x.shape[1:]), 0, i, x),
    "index_add_ in place": _index_add_in_place,
    "index_put": lambda x, i, n: x.new_zeros(n, *x.shape[1:]).index_put((i,), x, accumulate=True),
    "index_put_ in place": _index_put_in_place,
    "torch_geometric": lambda x, i, n: pyg_scatter(x, i, 0, n, "sum"),
    "full": lambda x, i, n: torch.full((n, *x.shape[1:]), 0.0, dtype=x.dtype, device=x.device).index_add(
        0, i, x
    ),
}

# ---- segment softmaxes along the first dimension -----------------------------------------------------------


def _maximum(s, i, n):
    return s.new_full((n, *s.shape[1:]), float("-inf")).scatter_reduce(0, wide(i, s), s, "amax")


def _raw(s, i, n):
    e = torch.exp(s - _maximum(s.detach(), i, n)[i])
    return e / zeros(n, s).index_add(0, i, e)[i]


def _not_detached(s, i, n):
    e = (s - _maximum(s, i, n)[i]).exp()
    return e / (e.new_zeros(n, *s.shape[1:]).index_add_(0, i, e)[i] + 1e-16)


def _no_maximum(s, i, n):
    e = s.exp()
    return e / e.new_zeros(n, *s.shape[1:]).index_add_(0, i, e)[i]


def _no_maximum_eps(s, i, n):
    e = s.exp()
    return e / (e.new_zeros(n, *s.shape[1:]).index_add_(0, i, e) + 0.03)[i]


def _overall_maximum(s, i, n):
    e = (s - s.max()).exp()
    return e.div(e.new_zeros(n, *s.shape[1:]).scatter_add_(0, wide(i, s), e).index_select(0, i))


def _overall_maximum_eps(s, i, n):
    e = (s - s.max()).exp()
    return e / (e.new_zeros(n, *s.shape[1:]).index_add_(0, i, e)[i] + 0.01)


def _less_a_number(s, i, n):
    e = (s - 3.0).exp()
    return e / (e.new_zeros(n, *s.shape[1:]).index_add_(0, i, e)[i] + 0.01)


def _as_torch_scatter(s, i, n):
    index = wide(i, s)
    most = s.new_zeros(n, *s.shape[1:]).scatter_reduce(0, index, s, "amax", include_self=False)
    e = (s - most.gather(0, index)).exp_()
    total = torch.zeros_like(most).scatter_add_(0, index, e)
    return e / total.gather(0, index)


# As torch_scatter with its library calls torch.ops.torch_scatter.scatter_max.
_library = torch.library.Library("written", "DEF")
_library.define("scatter_max(Tensor src, Tensor index, int count) -> Tensor")
_library.impl("scatter_max", lambda s, i, n: _maximum(s, i, n), "CompositeExplicitAutograd")
torch.library.register_fake(
    "written::scatter_max", lambda s, i, n: s.new_empty(n, *s.shape[1:]), lib=_library
)


def _maximum_of_a_library(s, i, n):
    e = (s - torch.ops.written.scatter_max(s.detach(), i, n).gather(0, wide(i, s))).exp_()
    return e.div(zeros(n, s).scatter_add_(0, wide(i, s), e).gather(0, wide(i, s)))


def _under_no_grad(s, i, n):
    with torch.no_grad():
        most = _maximum(s, i, n)
    e = (s - most[i]).exp()
    return e / e.new_zeros(n, *s.shape[1:]).index_add_(0, i, e)[i]


def _in_place(s, i, n):
    e = s - _maximum(s.detach(), i, n)[i]
    e.exp_()
    total = e.new_zeros(n, *s.shape[1:]).index_add_(0, i, e)
    return e.div(total[i])


SOFTMAXES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "torch_geometric": lambda s, i, n: pyg_softmax(s, i, num_nodes=n),
    "raw": _raw,
    "not detached": _not_detached,
    "no maximum": _no_maximum,
    "no maximum, eps": _no_maximum_eps,
    "overall maximum": _overall_maximum,
    "overall maximum, eps": _overall_maximum_eps,
    "less a number, eps": _less_a_number,
    "as torch_scatter": _as_torch_scatter,
    "maximum of a library": _maximum_of_a_library,
    "maximum under no_grad": _under_no_grad,
    "in place": _in_place,
}

# ---- scores [E, H] and values [E, H, D] --------------------------------------------------------------------

SCORES: dict[str, tuple[Callable[[Inputs, Callable], Tensor], str]] = {
    "dot": (lambda x, g: (g(x.query, x.dst) * g(x.key, x.src)).sum(-1) / D**0.5, "dot_attention"),
    "dot, key first": (
        lambda x, g: 0.3 * torch.sum(g(x.key, x.src) * g(x.query, x.dst), dim=-1),
        "dot_attention",
    ),
    "dot, keepdim": (
        lambda x, g: (g(x.query, x.dst) * g(x.key, x.src)).sum(dim=[-1], keepdim=True).squeeze(-1),
        "dot_attention",
    ),
    "einsum": (lambda x, g: torch.einsum("ehd,ehd->eh", g(x.query, x.dst), g(x.key, x.src)), "dot_attention"),
    "dot with edge in key": (
        lambda x, g: (g(x.query, x.dst) * (g(x.key, x.src) + x.feat)).sum(-1) / D**0.5,
        "dot_attention, with",
    ),
    "dot with projected edge": (
        lambda x, g: (g(x.query, x.dst) * (g(x.key, x.src) + F.linear(x.attr, x.weight).view(-1, H, D))).sum(
            -1
        ),
        "dot_attention, with",
    ),
    "dot with bias": (
        lambda x, g: (g(x.query, x.dst) * g(x.key, x.src)).sum(-1) * 0.5 + x.bias,
        "dot_attention, with",
    ),
    "dot with a vector": (
        lambda x, g: (g(x.query, x.dst) * g(x.key, x.src) * x.vector).sum(-1),
        "dot_attention",
    ),
    "gat": (lambda x, g: F.leaky_relu(g(x.score_src, x.src) + g(x.score_dst, x.dst), 0.2), "gat_attention"),
    "gat with edge": (
        lambda x, g: F.leaky_relu(g(x.score_src, x.src) + g(x.score_dst, x.dst) + x.bias, negative_slope=0.1),
        "gat_attention, with",
    ),
    "gat of edges and sources": (
        lambda x, g: F.leaky_relu(x.bias + g(x.score_src, x.src)),
        "gat_attention, with",
    ),
    "sum of ends": (lambda x, g: g(x.score_src, x.src) + g(x.score_dst, x.dst), "gat_attention"),
    "gatv2": (
        lambda x, g: (F.leaky_relu(g(x.value, x.src) + g(x.query, x.dst), 0.2) * x.vector).sum(-1),
        "gatv2_attention",
    ),
    "gatv2 with edge": (
        lambda x, g: (x.vector * F.leaky_relu(g(x.query, x.dst) + g(x.value, x.src) + x.feat)).sum(dim=-1),
        "gatv2_attention, with",
    ),
    "gatv2 of other values": (
        lambda x, g: (F.leaky_relu(g(x.key, x.src) + g(x.query, x.dst), 0.2) * x.vector).sum(-1),
        "score_attention",
    ),
    "tanh": (lambda x, g: torch.tanh(g(x.score_src, x.src) + g(x.score_dst, x.dst)) * 2, "score_attention"),
    "of concatenated rows": (
        lambda x, g: torch.cat([g(x.query, x.dst), g(x.key, x.src), x.feat], -1).pow(2).mean(-1),
        "score_attention",
    ),
    "distance": (lambda x, g: -(g(x.query, x.dst) - g(x.key, x.src)).square().sum(-1), "score_attention"),
    "given": (lambda x, g: x.bias, "score_attention"),
    "masked": (lambda x, g: x.bias.masked_fill(x.gate < -1, -1e9), "score_attention"),
    "clamped": (lambda x, g: x.bias.clamp(-1, 1), "score_attention"),
}

VALUES: dict[str, tuple[Callable[[Inputs, Callable], Tensor], str]] = {
    "rows of sources": (lambda x, g: g(x.value, x.src), ""),
    "flat rows, viewed": (lambda x, g: g(x.value.flatten(1), x.src).view(-1, H, D), ""),
    "with edge": (lambda x, g: g(x.value, x.src) + x.feat, "edges"),
    "with another edge": (lambda x, g: x.other_feat + g(x.value, x.src), "edges"),
    "with projected edge": (
        lambda x, g: g(x.value, x.src) + F.linear(x.attr, x.weight).view(-1, H, D),
        "edges",
    ),
    "rows of edges": (lambda x, g: x.feat, "values at edges"),
    "nonlinear": (lambda x, g: torch.relu(g(x.value, x.src) * x.feat), "values at edges"),
    "scaled by a vector": (lambda x, g: g(x.value, x.src) * x.vector, ""),
}


def attention(score, value, softmax, gather, total, combine=None) -> Callable[..., Tensor]:
    """The attention of these parts."""
    combine = combine or (lambda a, v, x: a.unsqueeze(-1) * v)

    def fn(*tensors: Tensor) -> Tensor:
        x = Inputs(*tensors)
        num_dst = x.query.shape[0]
        weights = softmax(score(x, gather), x.dst, num_dst)
        return total(combine(weights, value(x, gather), x), x.dst, num_dst)

    return fn


_S, _V, _P, _G, _T = SCORES["dot"][0], VALUES["rows of sources"][0], _raw, GATHERS["x[i]"], SUMS["index_add"]

COMBINES: dict[str, tuple[Callable[[Tensor, Tensor, Inputs], Tensor], str]] = {
    "a[..., None]": (lambda a, v, x: v * a[..., None], "dot_attention"),
    "a[:, :, None]": (lambda a, v, x: a[:, :, None] * v, "dot_attention"),
    "view": (lambda a, v, x: torch.mul(v, a.view(-1, H, 1)), "dot_attention"),
    "flat afterwards": (lambda a, v, x: (a.unsqueeze(-1) * v).view(-1, H * D), "dot_attention"),
    "flatten": (lambda a, v, x: (a.unsqueeze(-1) * v).flatten(1), "dot_attention"),
    "heads last": (lambda a, v, x: v.transpose(1, 2) * a.unsqueeze(1), "dot_attention"),
    "heads moved afterwards": (lambda a, v, x: (v * a.unsqueeze(2)).permute(0, 2, 1), "dot_attention"),
    "expanded": (lambda a, v, x: a.unsqueeze(-1).expand(-1, -1, D) * v, "dot_attention"),
    "gated": (lambda a, v, x: v * (a * x.gate).unsqueeze(-1), "dot_attention"),
    "gate of all heads": (lambda a, v, x: v * a.unsqueeze(-1) * x.gate[:, :1, None], "dot_attention"),
    "scaled": (lambda a, v, x: 0.5 * (v * a.unsqueeze(-1)) / 3, "dot_attention"),
    "dropout in eval": (lambda a, v, x: v * F.dropout(a, 0.5, False).unsqueeze(-1), "dot_attention"),
    "cast and back": (lambda a, v, x: v * a.to(torch.float64).unsqueeze(-1), "dot_attention"),
    "contiguous": (lambda a, v, x: (v * a.unsqueeze(-1)).contiguous(), "dot_attention"),
}


class Case(NamedTuple):
    name: str
    fn: Callable[..., Any]
    form: str  # how the report's form begins, or contains
    more: bool = False  # another combination of what other cases show


def _one_head(*tensors):
    x = Inputs(*tensors)
    query, key, value = x.query[:, 0], x.key[:, 0], x.value[:, 0]
    score = (query[x.dst] * key[x.src]).sum(-1)
    return SUMS["index_add"](_raw(score, x.dst, len(query)).unsqueeze(-1) * value[x.src], x.dst, len(query))


def _one_head_kept(*tensors):
    x = Inputs(*tensors)
    query, key, value = x.query[:, 0], x.key[:, 0], x.value[:, 0]
    score = (query[x.dst] * key[x.src]).sum(-1, keepdim=True)
    return SUMS["new_zeros.scatter_add_"](_raw(score, x.dst, len(query)) * value[x.src], x.dst, len(query))


def _heads_first(*tensors):
    """[H, E] scores and [H, E, D] messages."""
    x = Inputs(*tensors)
    n, query, key, value = len(x.query), *(t.transpose(0, 1) for t in (x.query, x.key, x.value))
    score = (query[:, x.dst] * key.index_select(1, x.src)).sum(-1)
    most = score.new_zeros(H, n).scatter_reduce(
        1, wide(x.dst, score, 1), score.detach(), "amax", include_self=False
    )
    e = torch.exp(score - most.index_select(1, x.dst))
    a = e / (score.new_zeros(H, n).index_add(1, x.dst, e) + 1e-16)[:, x.dst]
    messages = a.unsqueeze(-1) * value[:, x.src, :]
    return messages.new_zeros(H, n, D).index_add(1, x.dst, messages).transpose(0, 1)


def _rows_and_columns(*tensors):
    """The first row of edge_index as destinations."""
    x = Inputs(*tensors)
    dst, src = x.edge_index.flip(0)
    score = (x.query[dst] * x.key[src]).sum(-1)
    return SUMS["index_add"](_raw(score, dst, len(x.query)).unsqueeze(-1) * x.value[src], dst, len(x.query))


def _weights_returned(*tensors):
    x = Inputs(*tensors)
    n = len(x.query)
    a = _raw(SCORES["dot"][0](x, _G), x.dst, n)
    return SUMS["index_add"](a.unsqueeze(-1) * x.value[x.src], x.dst, n), a


def _weights_kept(*tensors):
    """Detached, as modules keep them for later."""
    x = Inputs(*tensors)
    n = len(x.query)
    a = _raw(SCORES["dot"][0](x, _G), x.dst, n)
    return SUMS["index_add"](a.unsqueeze(-1) * x.value[x.src], x.dst, n), a.sum(-1).detach()


def _viewed(*tensors):
    """Takes a view, which only a contiguous tensor has, of a sum whose columns come before its heads."""
    return attention(_S, _V, _P, _G, _T, COMBINES["heads last"][0])(*tensors).view(-1, D * H)


def _changed_afterwards(*tensors):
    """Adds to a sum in place, directly and through a view, as modules add their bias."""
    x = Inputs(*tensors)
    out = attention(SCORES["gat"][0], _V, _overall_maximum_eps, _G, SUMS["index_add_ in place"])(*tensors)
    out += x.query
    out = out.view(-1, H * D)
    out += x.vector.view(-1)
    first = out[:, :D]
    first *= 2
    return first


def _two_values(*tensors):
    x = Inputs(*tensors)
    n = len(x.query)
    a = _raw(SCORES["dot"][0](x, _G), x.dst, n).unsqueeze(-1)
    return SUMS["index_add"](a * x.value[x.src], x.dst, n), SUMS["index_add"](a * x.key[x.src], x.dst, n)


def _two_layers(*tensors):
    x = Inputs(*tensors)
    first = attention(SCORES["gat"][0], _V, _P, _G, _T)(*tensors)
    if x.query.shape[0] != x.key.shape[0]:
        return first
    return attention(_S, _V, _P, _G, _T)(*x._replace(query=first, key=first * 2, value=first.sin()))


def _onto_a_tensor(*tensors):
    x = Inputs(*tensors)
    a = _raw(SCORES["dot"][0](x, _G), x.dst, len(x.query)).unsqueeze(-1)
    return x.query.clone().index_add_(0, x.dst, a * x.value[x.src])


def _ones_at_first(*tensors):
    x = Inputs(*tensors)
    a = _raw(SCORES["dot"][0](x, _G), x.dst, len(x.query)).unsqueeze(-1)
    return torch.ones_like(x.query).index_add_(0, x.dst, a * x.value[x.src])


def _divided_afterwards(*tensors):
    """Divides after summing, as the first code for graph transformers in DGL does, and code derived from
    it."""
    x = Inputs(*tensors)
    score = (x.query[x.dst] * x.key[x.src] * x.feat).sum(-1, keepdim=True).clamp(-5, 5).exp()
    total = torch.zeros_like(x.query).index_add_(0, x.dst, x.value[x.src] * score)
    norm = score.new_zeros(len(x.query), H, 1).index_add_(0, x.dst, score)
    return total / (norm + 1e-6)


def _divided_afterwards_behind_the_maximum(*tensors):
    x = Inputs(*tensors)
    n = len(x.query)
    e = (x.bias - _maximum(x.bias, x.dst, n)[x.dst]).exp()
    total = SUMS["torch_geometric"](x.value[x.src] * e.unsqueeze(-1), x.dst, n)
    return total / (SUMS["torch_geometric"](e, x.dst, n) + 1e-16).unsqueeze(-1)


def _softmax_alone(*tensors):
    x = Inputs(*tensors)
    return _raw(x.bias, x.dst, len(x.query))


def _in_int32(*tensors):
    x = Inputs(*tensors)
    return attention(_S, _V, _P, _G, _T)(*x._replace(edge_index=x.edge_index.int()))


_PAIRS = {
    ("dot with projected edge", "with projected edge"), ("dot with edge in key", "with edge"),
    ("dot with edge in key", "with another edge"), ("gat", "with edge"), ("gat", "rows of edges"),
    ("dot", "scaled by a vector"), ("dot with projected edge", "with another edge"),
}  # fmt: skip


def cases() -> list[Case]:
    made = []
    for k in range(max(map(len, (GATHERS, SUMS, SOFTMAXES)))):  # each of them once, in a case with the others
        (g, gather), (t, total), (p, softmax) = (
            list(table.items())[k % len(table)] for table in (GATHERS, SUMS, SOFTMAXES)
        )
        made.append(Case(f"{g}; {t}; {p}", attention(_S, _V, softmax, gather, total), "dot_attention"))
    made += [
        Case(f"weights: {k}", attention(_S, _V, _P, _G, _T, c), form) for k, (c, form) in COMBINES.items()
    ]
    of_edges = {"dot", "gat", "dot with projected edge", "dot with edge in key", "given"}
    for (s, (score, form)), (v, (value, where)) in itertools.product(SCORES.items(), VALUES.items()):
        if v != "rows of sources" and s not in of_edges:
            continue
        expected = where if where == "values at edges" or form == "score_attention" else form
        more = v != "rows of sources" and s != "given" and (s, v) not in _PAIRS
        made.append(Case(f"{s}; {v}", attention(score, value, pyg_softmax_of, _G, _T), expected, more))
    for fn, form in (
        (_one_head, "dot_attention"),
        (_one_head_kept, "dot_attention"),
        (_heads_first, "_attention"),
        (_rows_and_columns, "dot_attention"),
        (_weights_returned, "edge_softmax"),
        (_weights_kept, "dot_attention"),
        (_viewed, "dot_attention"),
        (_changed_afterwards, "gat_attention"),
        (_two_values, "dot_attention"),
        (_two_layers, "gat_attention"),
        (_onto_a_tensor, "dot_attention"),
        (_ones_at_first, "dot_attention"),
        (_divided_afterwards, "score_attention"),
        (_divided_afterwards_behind_the_maximum, "score_attention"),
        (_softmax_alone, "edge_softmax"),
        (_in_int32, "dot_attention"),
    ):
        made.append(Case(fn.__name__.strip("_").replace("_", " "), fn, form))
    return made


def pyg_softmax_of(s: Tensor, i: Tensor, n: int) -> Tensor:
    return pyg_softmax(s, i, num_nodes=n)
