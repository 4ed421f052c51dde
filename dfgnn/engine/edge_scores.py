"""Scores of edges without tensors of E x H x D.

**Scores written in Python** (`edge_scores`) are computed a chunk of edges at a time, forward and backward.

**Scores with the edges' features** (`edge_products`): products of the rows of an edge's two nodes with the
edge's own features, and scores that are their sums.

On the CPU an operator computes scores and products, and another one their gradients
(csrc/core/edge_products.h), without tensors of E x H x D other than these products and gradients. On CUDA,
and while a compiler records or torch.func is active, PyTorch's operations compute them. Eager calls on CUDA
that need the scores alone process a chunk of edges at a time .

**GATv2's scores** of edges whose attributes x_e are projected (`attention`).

    score_e = sum_d a_d L(m_d),    m = u_j + v_i + W x_e  for an edge e = (j -> i) and a head

L is LeakyReLU, d a column of the head, a (``attn``) the attention vector, u (``src``) and v (``dst``) are
rows of nodes, x is ``attr``, W ``proj``, and ``positive`` says where m > 0.

LeakyReLU acts on every column of W x_e, so the projection cannot be folded into the nodes' rows, as that of
dot products is (`edge_projection`). But L(m) = sigma m with a slope sigma that is constant almost everywhere.
Given sigma, of which a byte per column says whether it is 1, scores are linear in each of u, v, x, W and a,
and derivatives of any order consist of two products, each the transpose of the other
(csrc/core/pair_scores.h): scores with given slopes (`_Linear`), and sums over edges of a scalar per edge
times its slopes (`_Sums`). Both compute W x_e, or what W^T is multiplied with, for a block of edges at a
time.

`attention` adds the scores as an edge bias to an attention without other scores, which knows every option.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph, GraphPart
from ..runtime import eager as _eager
from ..runtime import ops as _ops
from ..runtime import rules
from ..runtime.arguments import Numbers
from ..runtime.rules import Rule, rows_at
from ..runtime.tracing import sums_of_rows
from . import compiler_graph, operators, paths
from . import plain as _plain
from .edge_maps import rows_of_destinations, rows_of_sources
from .paths import AttentionInputs, attend

# ---- scores written in Python -----------------------------------------------------------------------------


# Bytes of query and key rows that are gathered for one chunk of edges, unless the user sets its size.
_CHUNK_BYTES = 2**27


def chunk_size(query: Tensor, key: Tensor) -> int:
    """How many edges' query and key rows fill a chunk."""
    row = sum(x[:1].numel() * x.element_size() for x in (query, key))
    return max(_CHUNK_BYTES // max(row, 1), 1)


def edge_scores(graph, score_fn: Callable, chunk: int, query, key, edge_feat, params) -> Tensor:
    """The scores [E, H] by score_fn, differentiable in query, key, edge_feat and params."""
    if isinstance(graph, GraphPart):
        graph, (key,) = graph.gathered(key)
    if isinstance(compiler_graph.for_compiler(graph), compiler_graph.EdgeList):
        # There are no chunks here: the compiler fuses the operations of the score, but the gathered rows of
        # the nodes exist for all edges at a time.
        q = rows_of_destinations(graph, query.flatten(1)).unflatten(1, query.shape[1:])
        k = rows_of_sources(graph, key.flatten(1)).unflatten(1, key.shape[1:])
        return score_fn(q, k, edge_feat, *params).to(query.dtype)
    tensors = query, key, edge_feat, *params
    if _eager.transformed(*tensors):
        return _all_scores(_plain.ends_of(graph, all_in_use=False).edge_index, score_fn, query.dtype, tensors)
    return rules.apply(_EdgeScores(graph, score_fn, chunk, query.device), *tensors)


def _all_scores(edge_index, score_fn, dtype, tensors) -> Tensor:
    """The scores without chunks, in operations that torch differentiates any number of times, in any mode."""
    query, key, edge_feat, *params = tensors
    src, dst = edge_index
    return score_fn(rows_at(query, dst), rows_at(key, src), edge_feat, *params).to(dtype)


def _chunks(graph, chunk: int):
    src, dst = graph.edge_index
    for begin in range(0, graph.num_edges, chunk):
        part = slice(begin, begin + chunk)
        yield part, src[part], dst[part]


class _Surroundings:
    """The states of autocast and of the random number generators, so that backward computes the same score
    again (`again`).

    While a CUDA graph is captured the generators' states cannot be read: backward draws new random numbers.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.generators = None
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self.generators = self._states()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
            if kind != "meta"  # which has no autocast
        ]

    def _states(self):
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.get_rng_state(), cuda

    def drew_nothing(self) -> None:
        """Drops the generators' states if the score drew no random numbers, as most do not."""
        if self.generators is not None:
            pairs = zip(self.generators, self._states())
            if all(then is now or torch.equal(then, now) for then, now in pairs):
                self.generators = None

    @contextlib.contextmanager
    def again(self):
        with contextlib.ExitStack() as stack:
            if self.generators is not None:
                cuda = [self.device] if self.generators[1] is not None else []
                stack.enter_context(torch.random.fork_rng(cuda))
                torch.set_rng_state(self.generators[0])
                if cuda:
                    torch.cuda.set_rng_state(self.generators[1], self.device)
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False))
            yield


class _EdgeScores(Rule):
    """Computes all scores from query, key, edge_feat and params; backward computes them again."""

    def __init__(self, graph, score_fn: Callable, chunk: int, device: torch.device):
        self.graph, self.score_fn, self.chunk = graph, score_fn, chunk
        self.surroundings = _Surroundings(device)

    def forward(self, query, key, edge_feat, *params):
        scores = query.new_empty(self.graph.num_edges, query.shape[1])
        for part, src, dst in _chunks(self.graph, self.chunk):
            e = None if edge_feat is None else edge_feat[part]
            scores[part] = self.score_fn(rows_at(query, dst), rows_at(key, src), e, *params)
        self.surroundings.drew_nothing()
        return scores

    def gradients(self, need, saved, grad):
        with self.surroundings.again():
            gradients = _second_order if torch.is_grad_enabled() else _first_order
            return tuple(gradients(self, saved, need, grad))


def _first_order(call, inputs, need, grad):
    query, key, edge_feat, *params = inputs
    # Gradients are added up in float32 at least, because that of a parameter is a sum over all chunks.
    acc = torch.promote_types(query.dtype, torch.float32)
    grads = [torch.zeros_like(x, dtype=acc) if n else None for x, n in zip(inputs, need)]
    for part, src, dst in _chunks(call.graph, call.chunk):
        rows = [
            rows_at(query, dst),
            rows_at(key, src),
            None if edge_feat is None else edge_feat[part],
            *params,
        ]
        rows = [x if x is None else x.detach().requires_grad_(n) for x, n in zip(rows, need)]
        with torch.enable_grad():
            scores = call.score_fn(*rows)
        wanted = [x for x, n in zip(rows, need) if n]
        found = torch.autograd.grad(scores, wanted, grad[part].to(scores.dtype), allow_unused=True)
        found = iter(found)
        for k, n in enumerate(need):
            g = next(found) if n else None
            if g is None:
                continue
            if k < 2:
                grads[k].index_add_(0, dst if k == 0 else src, g.to(acc))
            elif k == 2:
                grads[k][part] = g
            else:
                grads[k] += g
    return (g if g is None else g.to(x.dtype) for g, x in zip(grads, inputs))


def _second_order(call, inputs, need, grad):
    """The gradients again, but differentiable, and with all edges at a time."""
    edge_index = _plain.ends_of(call.graph, all_in_use=False).edge_index
    if call.surroundings.generators is not None and call.graph.num_edges > call.chunk:
        raise NotImplementedError(
            "flex_attention: second derivatives of a random score_fn need chunk_edges >= the number of edges"
        )

    def scores(wanted):
        merged = [wanted.get(k, x) for k, x in enumerate(inputs)]
        return _all_scores(edge_index, call.score_fn, grad.dtype, merged)

    _, pull = torch.func.vjp(scores, {k: x for k, x in enumerate(inputs) if need[k]})
    (found,) = pull(grad)
    return (found.get(k) for k in range(len(inputs)))


def try_out(error: Callable, score_fn: Callable, query, key, edge_feat, params) -> None:
    """Calls score_fn on no edges; raises error(kind, argument, expected, got) if the result is not right."""
    with torch.enable_grad():
        rows = [None if x is None else x.detach()[:0] for x in (query, key, edge_feat)]
        given = (*rows, *(p.detach() for p in params))
        try:
            scores = score_fn(*given)
        except TypeError as reason:
            if _takes(score_fn, given):
                raise
            more = f" and the {len(params)} of params" if params else ""
            wanted = f"a function of q, k and e (None without edge_attr){more}"
            signature = inspect.signature(score_fn)
            takes_more = len(signature.parameters) > len(given)
            hint = "; what it takes beside q, k and e goes into params=[...]" if takes_more else ""
            raise error(TypeError, "score_fn", wanted, f"{signature}{hint}") from reason
    if not isinstance(scores, Tensor):
        raise error(TypeError, "score_fn", "a function that returns a tensor", type(scores).__name__)
    if not scores.is_floating_point():
        raise error(TypeError, "score_fn", "a result of floating-point numbers", scores.dtype)
    if scores.shape != (0, query.shape[1]):
        got = "[edges, " + ", ".join(str(n) for n in scores.shape[1:]) + "]"
        raise error(ValueError, "score_fn", f"a result of shape [edges, {query.shape[1]}]", got)
    if scores.requires_grad:
        raise error(
            ValueError,
            "score_fn",
            "every tensor that requires a gradient among its arguments (`params`)",
            "one that it captures, of which the gradient would be lost; params=[tensor] passes it behind e",
        )


def _takes(function: Callable, given: tuple) -> bool:
    """Whether these arguments fit the function, as far as Python can say it."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        return False
    except ValueError:  # it does not tell its arguments
        return True
    return True


# ---- scores and products with the edges' features ---------------------------------------------------------


def edge_products(
    graph, query: Tensor, key: Tensor, feat: Tensor, scale: float, with_products: bool
) -> tuple[Tensor, Tensor | None]:
    """The scores [E, H], from the CPU's operator in the accumulation type, else in the dtype of feat; and the
    products [E, H, D], or None without with_products."""
    if isinstance(graph, GraphPart):
        graph, (key,) = graph.gathered(key)
    fused = feat.device.type == "cpu" and not torch.compiler.is_compiling()
    fused = fused and not _eager.in_plain_operations()
    if fused and not _eager.transformed(query, key, feat):
        results = rules.apply(_EdgeProducts(graph, scale, with_products), query, key, feat)
        return results if with_products else (results, None)
    if with_products:
        ends = rows_of_destinations(graph, query.flatten(1)) * rows_of_sources(graph, key.flatten(1))
        products = ends.view_as(feat) * feat * scale
        return sums_of_rows(products), products

    def score_fn(q, k, e):
        return sums_of_rows(q * k * e) * scale

    chunk = chunk_size(query, key)
    return edge_scores(graph, score_fn, chunk, query, key, feat, ()), None


@dataclass(slots=True, eq=False)
class _EdgeProducts(Rule):
    """Computes the scores, or (scores, products)."""

    graph: Any
    scale: float
    with_products: bool

    def forward(self, query, key, feat):
        results = operators.edge_products(self.graph, query, key, feat, self.scale, self.with_products)
        return tuple(results) if self.with_products else results[0]

    def gradients(self, need, saved, grad, grad_products=None):
        if grad is None and grad_products is None:
            return None, None, None
        if not torch.is_grad_enabled():
            return _fused(self.graph, self.scale, saved, need, grad, grad_products)
        src, dst = _plain.ends_of(self.graph).edge_index

        def formula(query, key, feat):
            acc = _ops.acc_type(feat.dtype)
            products = rows_at(query.to(acc), dst) * rows_at(key.to(acc), src) * feat.to(acc) * self.scale
            return products.sum(2), products

        return rules.recorded_gradients(formula, saved, need, grad, grad_products)


def _fused(graph, scale: float, inputs, need, grad, grad_products) -> tuple[Tensor | None, ...]:
    query, key, feat = inputs
    if grad is None:
        grad = feat.new_zeros(feat.shape[:2], dtype=_ops.acc_type(feat.dtype))
    grads = grad, grad_products
    of_query = of_key = of_feat = None
    if need[0] or need[2]:
        of_query, of_feat = operators.edge_products_backward(
            graph, grads, query, key, feat, scale, False, need[2]
        )
    if need[1]:
        of_key, _ = operators.edge_products_backward(graph, grads, key, query, feat, scale, True, False)
    return of_query if need[0] else None, of_key, of_feat if need[2] else None


# ---- GATv2's scores of edges whose attributes are projected -----------------------------------------------


#: The columns of a head are padded to a multiple of this: the width of the kernels' narrowest vector.
_COLUMNS = 4


@dataclass(slots=True, eq=False)
class _Rule(Rule):
    graph: Graph
    slope: float


class _Scores(_Rule):
    """Computes (scores [E, H], where m > 0 [E, H, D])."""

    __slots__ = ()

    def forward(self, src, dst, attn, attr, proj):
        return operators.pair_scores(self.graph, src, dst, attn, attr, proj, None, self.slope)

    def saved(self, tensors, results):
        return *tensors, results[1]

    def gradients(self, need, saved, grad, _=None):
        src, dst, attn, attr, proj, positive = saved
        if grad is None:
            return (None,) * 5
        shape = attn.shape
        weighted = attn.reshape(-1, 1) * proj if need[3] else None
        attr_given = attr if need[2] or need[4] else None
        of_src, of_dst, of_attr, of_proj = rules.apply(
            _Sums(self.graph, self.slope), grad, positive, attr_given, weighted
        )
        of_attn = None
        if need[2]:
            # The gradient of a is sum_e grad_e sigma_e m_e, with a sum for each term of m: W x_e, u_j, v_i.
            of_attn = (proj * of_proj).sum(1).view(shape)
            of_attn = of_attn + (src * of_src).sum(0) + (dst * of_dst).sum(0)
        return (
            attn * of_src if need[0] else None,
            attn * of_dst if need[1] else None,
            of_attn,
            of_attr,
            attn.reshape(-1, 1) * of_proj if need[4] else None,
        )


class _Linear(_Rule):
    """Computes scores with a = 1 and given slopes. src, dst: [N, H, D]; attr, proj: both or none."""

    __slots__ = ()

    def forward(self, positive, src, dst, attr, proj):
        return operators.pair_scores(self.graph, src, dst, None, attr, proj, positive, self.slope)[0]

    def gradients(self, need, saved, grad):
        positive, _, _, attr, proj = saved
        of_src, of_dst, of_attr, of_proj = rules.apply(
            _Sums(self.graph, self.slope), grad, positive, attr, proj
        )
        return None, of_src, of_dst, of_attr, of_proj


class _Sums(_Rule):
    """Computes, with s_e = weight_e sigma_e [H, D]: the sums of s_e over the edges of each source and of each
    destination, [N, H, D]; W^T s_e of each edge [E, d], or None without W; and sum_e s_e x_e^T [H D, d], or
    None without x."""

    __slots__ = ()

    def forward(self, weight, positive, attr, proj):
        return operators.pair_sums(self.graph, weight, positive, attr, proj, self.slope)

    def gradients(self, need, saved, of_src, of_dst, of_attr, of_proj):
        weight, positive, attr, proj = saved
        call = self.graph, self.slope
        # The gradient of weight_e is sigma_e . (of_src_j + of_dst_i + of_proj x_e + W of_attr_e).
        pairs = [(x, w) for x, w in ((attr, of_proj), (of_attr, proj)) if x is not None and w is not None]
        if not pairs:
            joined = None, None
        else:
            joined = pairs[0] if len(pairs) == 1 else tuple(torch.cat(x, 1) for x in zip(*pairs))
        of_weight = None
        if need[0] and (pairs or of_src is not None or of_dst is not None):
            of_weight = rules.apply(_Linear(*call), positive, of_src, of_dst, *joined)
        of_given: Any = (None, None)
        if of_proj is not None and need[2] or of_attr is not None and need[3]:
            _, _, *of_given = rules.apply(
                _Sums(*call), weight, positive, of_attr if need[3] else None, of_proj if need[2] else None
            )
        return of_weight, None, *of_given


def takes(graph: Any, *tensors: Tensor | None) -> bool:
    """Whether these operators compute the scores: for eager calls on the CPU, in float32 and float64."""
    like = tensors[0]
    assert like is not None
    return (
        like.device.type == "cpu"
        and like.dtype in (torch.float32, torch.float64)
        and type(graph) is Graph
        and graph.edge_mask is None
        and not torch.compiler.is_compiling()
        and not _eager.in_plain_operations()
        and not torch.is_autocast_enabled("cpu")
        and not _eager.transformed(*(x for x in tensors if x is not None))
    )


def attention(inputs: AttentionInputs, attr: Tensor, proj: Tensor) -> tuple[Tensor, Any]:
    """(out, attention) of GATv2 with projected attributes, as of `paths.attend`. attr: [E, d]; proj:
    [H D, d]."""
    tensors, numbers = inputs.tensors, inputs.numbers
    src, dst, attn = tensors.value, tensors.dst, tensors.attn
    assert dst is not None and attn is not None
    heads, dim = attn.shape
    rows, padding = src, -dim % _COLUMNS
    if padding:
        rows, dst, attn = (torch.nn.functional.pad(x, (0, padding)) for x in (src, dst, attn))
        proj = torch.nn.functional.pad(proj.unflatten(0, (heads, dim)), (0, 0, 0, padding)).flatten(0, 1)
    if paths.recorder is not None:
        paths.recorder.took("edge projection", paths.describe("additive_v2", src))
    score, _ = rules.apply(_Scores(inputs.graph, numbers.negative_slope), rows, dst, attn, attr, proj)
    if tensors.edge_gate is not None:
        score = score * tensors.edge_gate
    if tensors.edge_bias is not None:
        score = score + tensors.edge_bias
    ends = src.new_zeros(src.shape[:2])  # additive score terms of 0: the bias is the whole score
    rest = tensors._replace(src=ends, dst=None, attn=None, edge_bias=score, edge_gate=None)
    plain = Numbers(1.0, 1.0, numbers.dropout_p, 0)
    return attend(inputs._replace(score="additive", tensors=rest, numbers=plain))
