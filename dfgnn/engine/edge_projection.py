"""Dot attention with a term of the edge in the key and another in the value.

A term is either features of the edge as they are, or their projection: W x_ij of features x in the key,
U y_ij of features y in the value; x and y, and W and U, may be the same tensors. As a projection is linear,
it can change places with the products of attention, so that there is no E x H x D tensor. This is called
folding the projection into the attention:

    q_i . (k_j + W x_ij) = q_i . k_j + (W^T q_i) . x_ij
    sum_j alpha_ij (v_j + U y_ij) = sum_j alpha_ij v_j + U sum_j alpha_ij y_ij

With features of d columns, a node has the rows W^T q_i and sum_j alpha_ij y_ij, both [H, d]; an edge has the
scalars (W^T q_i) . x_ij [H], which the attention takes as an edge bias (`edge_maps`).

`_unfolded` projects per edge, where that is faster. There are three ways to compute the folded form.
`_composed` puts these parts together under autograd, for every option and derivatives of any order.
`_Separate` is one autograd function, with less memory and fewer passes. Its output contains the edges' part,
so that the product of the output and its gradient is all of delta (docs/internals/glossary.md): to compute
delta, backward needs neither the attention nor the output without the edges' part. `_InOne` is for one
projection in both key and value, on CUDA in 16 bits, for heads whose lanes can share the features. The
attention's own kernels compute all products except the gradient of x. Its tensors of edge size are the
features and, in backward, two scalars per edge and head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph import GraphPart
from ..plan.cost import lanes_per_head
from ..runtime import eager as _eager
from ..runtime import ops as _ops
from ..runtime.arguments import (
    BIAS_AFTER,
    FEAT_IN_KEY,
    FEAT_IN_VALUE,
    NEED_BIAS,
    NEED_WEIGHT,
    AttentionInputs,
    EdgeTerms,
    Tensors,
)
from . import compiler_graph as _edges
from . import edge_maps as _terms
from . import operators, paths
from .autograd import FusedFunction
from .paths import attend

# ---- products of nodes' rows with a projection: W^T x, W x and x y^T in the head's notation ---------------


def _onto_features(x: Tensor, proj: Tensor | None) -> Tensor:
    """W^T x: [N, H, D] x [H, D, width] -> [N, H, width], a view whose heads may lie apart; x if there is no
    W."""
    return x if proj is None else _by_head(x, proj).transpose(0, 1)


def _by_head(x: Tensor, w: Tensor) -> Tensor:
    """[N, H, a] x [H, a, b] -> [H, N, b]."""
    if not _splits(x):
        return torch.bmm(x.transpose(0, 1), w)
    chunks = _chunks(x)
    count = chunks.shape[0] // w.shape[0]
    # A factor for each chunk, so that autograd sums the gradient over each chunk by itself.
    products = torch.bmm(chunks, w.expand(count, *w.shape).flatten(0, 1))
    return products.unflatten(0, (count, w.shape[0])).transpose(0, 1).flatten(1, 2)[:, : x.shape[0]]


def _onto_features_beside(x: Tensor, proj: Tensor, y: Tensor, proj_y: Tensor) -> tuple[Tensor, Tensor]:
    """W^T x (W: proj) and U^T y (U: proj_y) as heads [N, 2 H, width]; and U^T y alone, a view of it."""
    (heads, _, width), rows = proj.shape, len(x)
    both = x.new_empty(2 * heads, rows, width)
    torch.bmm(x.transpose(0, 1), proj, out=both[:heads])
    torch.bmm(y.transpose(0, 1), proj_y, out=both[heads:])
    return both.transpose(0, 1), both[heads:].transpose(0, 1)


def _add_projection(out: Tensor, x: Tensor, proj: Tensor | None, factor: float = 1.0) -> None:
    """out += factor W x, in place."""
    if proj is None:
        out.add_(x, alpha=factor)
        return
    out.transpose(0, 1).baddbmm_(x.transpose(0, 1), proj.transpose(1, 2), alpha=factor)


def _with_projection(out: Tensor, x: Tensor, proj: Tensor | None) -> Tensor:
    """out + W x, rounded like `_add_projection`, so that out is the same from `_composed` and `_Separate`."""
    if proj is None:
        return out + x
    if _splits(x):
        both = out.transpose(0, 1) + _by_head(x, proj.transpose(1, 2))
    else:
        both = torch.baddbmm(out.transpose(0, 1), x.transpose(0, 1), proj.transpose(1, 2))
    return both.transpose(0, 1).contiguous()


def _factors(proj: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    """W [H, D, width] as [H, steps, elements], a step being 16 features, in the two orders in which a warp
    whose lanes share a head loads it: `onto` and `back` of EdgeAttr (csrc/core/params.h)."""
    heads, size, width = proj.shape
    columns, steps = 8 * lanes, -(-width // 16)
    group = min(columns, 64)
    full = torch.nn.functional.pad(proj, (0, 16 * steps - width, 0, columns - size))
    onto = full.reshape(heads, columns // 32, 4, 2, 2, 2, steps, 2, 8).permute(0, 6, 1, 3, 8, 2, 4, 7, 5)
    back = full.reshape(heads, columns // group, 8, group // 16, 2, steps, 4, 2, 2)
    back = back.permute(0, 1, 5, 3, 2, 6, 7, 4, 8)
    return onto.reshape(heads, steps, -1), back.reshape(heads, steps, -1)


def _grad_proj(query: Tensor, query_sums: Tensor, grad: Tensor, grad_sums: Tensor, scale: float) -> Tensor:
    """The gradient of a projection that key and value share: sum_i scale query_i query_sums_i^T + grad_i
    grad_sums_i^T, [H, D, width]. query_sums, grad_sums [N, H, width]: the sums of the edges' features,
    weighted by the scores' gradients and by the attention."""
    if query.is_cuda and query.dtype != torch.float64 and len(query):
        return operators.projection_grad(query, query_sums, grad, grad_sums, scale)
    acc = _ops.acc_type(query.dtype)
    of_query = _products_of_rows(query, query_sums).to(acc).mul_(scale)
    return of_query.add_(_products_of_rows(grad, grad_sums)).to(query.dtype)


def _products_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """sum_i x_i y_i^T, [H, D, width]."""
    return _in_chunks(x, y) if _splits(x) else torch.bmm(x.permute(1, 2, 0), y.transpose(0, 1))


def _splits(x: Tensor) -> bool:
    """Whether sums over all rows are split. In float32 cuBLAS gives each head's product to one block of
    threads, which takes 1.5 ms for 42,000 rows of 16 heads where the attention takes 0.2."""
    return x.is_cuda and x.dtype == torch.float32


def _in_chunks(x: Tensor, y: Tensor) -> Tensor:
    """`_products_of_rows`, summed over each chunk by itself."""
    products = torch.bmm(_chunks(x).transpose(1, 2), _chunks(y))
    return products.unflatten(0, (products.shape[0] // x.shape[1], x.shape[1])).sum(0)


def _chunks(x: Tensor) -> Tensor:
    """[N, H, a] in chunks of at most 512 rows, the last one with zeros: [chunks H, rows, a]. There is no
    branch on the number of rows, so that compiled code serves all."""
    rows = _edges.smaller(512, x.shape[0])
    count = (x.shape[0] + 511) // 512
    full = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows * count - x.shape[0]))
    return full.view(count, rows, *x.shape[1:]).transpose(1, 2).flatten(0, 1)


# ---- the ways to compute the attention -------------------------------------------------------------------


class _Given(NamedTuple):
    """The tensors of a call, as the autograd function takes them. value_feat and value_proj are None, too, if
    they are the same as those of the key."""

    query: Any
    key: Any
    value: Any
    key_feat: Any
    key_proj: Any
    value_feat: Any
    value_proj: Any
    edge_bias: Any
    edge_mask: Any
    edge_weight: Any
    seed: Any
    out_bias: Any

    def tensors(self, edge_bias: Tensor | None) -> Tensors:
        """The tensors of the engine's attention, with this bias."""
        return Tensors(
            self.value, self.key, self.query, None, edge_bias, None, self.edge_mask, self.edge_weight, None,
            self.seed, self.out_bias,
        )  # fmt: skip


def _width_of_sums(value: Tensor, proj: Tensor | None) -> int:
    return (value if proj is None else proj).shape[2]


def _composed(inputs: AttentionInputs) -> tuple[Tensor, Any]:
    """(out, attention or None), by operations that autograd records."""
    graph, tensors, terms, numbers = inputs.graph, inputs.tensors, inputs.terms, inputs.numbers
    assert terms is not None
    with _eager.without_autocast(tensors.value):
        if terms.key is not None:
            rows = _onto_features(tensors.dst, terms.key_proj)  # type: ignore[arg-type]
            bias = _terms.dot(graph, rows, terms.key, numbers.scale)
            if tensors.edge_gate is not None:
                bias = bias * tensors.edge_gate
            if tensors.edge_bias is not None:
                bias = bias + tensors.edge_bias
            tensors = tensors._replace(edge_bias=bias)
        wanted = inputs.return_attention or terms.value is not None
        out, attention = attend(inputs._replace(tensors=tensors, return_attention=wanted, terms=None))
        if terms.value is not None:
            weight = _ops.as_type(attention, _ops.acc_type(out.dtype))
            sums = _terms.total(graph, weight, terms.value, _width_of_sums(tensors.value, terms.value_proj))
            out = _with_projection(out, sums, terms.value_proj)
    return out, attention


class _Separate:
    """Computes the output by the engine's attention and products along edges, if there is a term in the value
    and no gate. Its methods are those that `node.FusedFunction` calls."""

    def __init__(self, inputs: AttentionInputs, terms: EdgeTerms):
        self.graph, self.numbers, self.schedule = inputs.graph, inputs.numbers, inputs.schedule
        # Whether key and value have the same features.
        self.one_feat = terms.key is not None and terms.key is terms.value
        # Whether key and value have the same projection.
        self.one_proj = terms.key is not None and terms.key_proj is terms.value_proj
        self.saves_attention = terms.value is not None and terms.value.requires_grad

    def given(self, tensors: Tensors, terms: EdgeTerms) -> _Given:
        value, key, query, _, bias, _, mask, weight, _, seed, out_bias = tensors
        of_value = None if self.one_feat else terms.value, None if self.one_proj else terms.value_proj
        return _Given(
            query, key, value, terms.key, terms.key_proj, *of_value, bias, mask, weight, seed, out_bias
        )

    def terms(self, g: _Given) -> EdgeTerms:
        value = g.key_feat if self.one_feat else g.value_feat
        return EdgeTerms(g.key_feat, g.key_proj, value, g.key_proj if self.one_proj else g.value_proj)

    def engine(self, value: Tensor) -> operators.DispatchedCall:
        """The engine's attention without the edges' terms. It returns the attention weights, too."""
        args = operators.graph_args(self.graph, "dot", value, True, True, self.schedule)
        return operators.DispatchedCall(self.graph, args, "dot", self.numbers, True, False)

    def forward(self, tensors):
        g = _Given(*tensors)
        terms, bias = self.terms(g), g.edge_bias
        if terms.key is not None:
            rows = _onto_features(g.query, terms.key_proj)
            bias = _terms.dot(self.graph, rows, terms.key, self.numbers.scale)
            if g.edge_bias is not None:
                bias = bias + g.edge_bias
        out, stats, _, _, attention = self.engine(g.value).forward(g.tensors(bias))
        sums = _terms.total(self.graph, attention, terms.value, _width_of_sums(g.value, terms.value_proj))
        _add_projection(out, sums, terms.value_proj)
        made = (
            None if bias is g.edge_bias else bias,
            stats,
            None if terms.value_proj is None else sums,
            attention if self.saves_attention else None,
        )
        return out, made, out

    def rerun(self, tensors, made):
        return self.forward(tensors)[0]

    def backward(self, tensors, grad, made, out, need):
        g, need = _Given(*tensors), _Given(*need)
        found = self.gradients(g, need, grad.contiguous(), made, out)
        if need.out_bias:
            found["out_bias"] = grad.sum(0)
        return tuple(found.get(name) if needed else None for name, needed in need._asdict().items())

    def formula(self, *tensors):
        g = _Given(*tensors)
        inputs = AttentionInputs(
            self.graph, "dot", g.tensors(g.edge_bias), self.numbers, False, self.schedule, None, self.terms(g)
        )
        return _composed(inputs)[0]

    def gradients(self, g: _Given, need: _Given, grad, made, out) -> dict[str, Tensor]:
        bias, stats, sums, attention = made
        terms, graph, scale = self.terms(g), self.graph, self.numbers.scale
        assert terms.value is not None
        rows = None
        if self.one_feat and need.key_feat and terms.key_proj is not None and terms.value_proj is not None:
            rows, grad_rows = _onto_features_beside(g.query, terms.key_proj, grad, terms.value_proj)
        else:
            grad_rows = _onto_features(grad, terms.value_proj)
        gamma = _terms.dot(graph, grad_rows, terms.value)  # adds to the gradient of alpha
        bias = g.edge_bias if bias is None else bias
        bits = NEED_BIAS * (bias is not None) | NEED_WEIGHT * need.edge_weight
        grads = self.engine(g.value).backward(
            (grad, gamma), g.tensors(bias), (out, stats, None, None, None), bits
        )
        grad_value, grad_key, grad_query, _, grad_score, _, grad_weight, _ = grads
        found = dict(value=grad_value, key=grad_key, query=grad_query)
        if need.edge_bias:
            found["edge_bias"] = _ops.as_type(grad_score, g.edge_bias.dtype)
        if need.edge_weight:
            found["edge_weight"] = _ops.per_edge(g.edge_weight, grad_weight)
        if need.value_proj:
            found["value_proj"] = _products_of_rows(grad, sums)
        if need.value_feat:
            found["value_feat"] = _terms.outer(graph, attention, grad_rows, terms.value)
        if terms.key is None:
            return found
        score_sums: Any = None
        if need.query or need.key_proj:
            score_sums = _terms.total(graph, grad_score, terms.key, _width_of_sums(g.query, terms.key_proj))
        if need.query:
            _add_projection(grad_query, score_sums, terms.key_proj, scale)
        if need.key_proj and self.one_proj:
            found["key_proj"] = _grad_proj(g.query, score_sums, grad, sums, scale)
        elif need.key_proj:
            found["key_proj"] = _products_of_rows(g.query, score_sums).mul_(scale)
        if rows is not None:
            # One product over 2 H heads: H for the gradient by way of the key, then H by way of the value.
            weights = torch.cat([grad_score * scale, attention], 1)
            found["key_feat"] = _terms.outer(graph, weights, rows, terms.key)
        elif need.key_feat:
            rows = _onto_features(g.query, terms.key_proj)
            found["key_feat"] = _terms.outer(graph, grad_score, rows, terms.key, scale)
            if self.one_feat:
                found["key_feat"].add_(_terms.outer(graph, attention, grad_rows, terms.key))
        return found


def _one_kernel_takes(call: _Separate, value: Tensor, terms: EdgeTerms) -> bool:
    """Whether `_InOne` can carry the call out: the heads for which kernels with features of edges exist
    (kProjects in csrc/cuda/attention/lanes.cuh), at most the features that their lanes hold (FEATS there),
    and no LeakyReLU."""
    if not (call.one_feat and call.one_proj) or terms.key is None or terms.key_proj is None:
        return False
    heads, dim = value.shape[1:]
    lanes, size = lanes_per_head(heads, dim, value.dtype), dim * value.dtype.itemsize
    fits = value.is_cuda and value.dtype.itemsize == 2 and 32 < size <= 16 * lanes
    return fits and terms.key.shape[1] <= max(2 * lanes, 16) and call.numbers.negative_slope == 1


class _InOne(_Separate):
    """Computes the output with one projection in key and value, by kernels that take features of edges.
    These kernels give no gradients of edge_bias and edge_weight."""

    def __init__(self, inputs: AttentionInputs, terms: EdgeTerms, train: bool):
        super().__init__(inputs, terms)
        value = inputs.tensors.value
        planner, shape = inputs.graph._planner, value.shape[1:]
        self.handle = planner.handle(*shape, value.dtype, "dot", inputs.schedule, True, train)

    def forward(self, tensors):
        query, key, value, feat, proj, _, _, *options = tensors
        factors = _factors(proj, lanes_per_head(*value.shape[1:], value.dtype))
        given = query, key, value, feat, *factors, *options
        out, saved, sums = operators.attend_projected(self.handle, given, self.numbers)
        return out, (saved, *factors, sums), out

    def gradients(self, g: _Given, need: _Given, grad, made, out) -> dict[str, Tensor]:
        query, key, value, feat, proj, _, _, *options = g
        saved, *factors, sums = made
        scale = self.numbers.scale
        tensors = grad, query, key, value, feat, *factors, *options, out, saved
        *grads, score_sums, edges = operators.attend_projected_backward(
            self.handle, tensors, self.numbers, need.key_feat
        )
        found = dict(zip(("value", "key", "query"), grads))
        if need.key_proj:
            found["key_proj"] = _grad_proj(query, score_sums, grad, sums, scale)
        if need.key_feat:
            attention, grad_score = edges.unbind(-1)
            rows, grad_rows = _onto_features(query, proj), _onto_features(grad, proj)
            of_key = _terms.outer(self.graph, grad_score, rows, feat, scale)
            found["key_feat"] = of_key.add_(_terms.outer(self.graph, attention, grad_rows, feat))
        return found


def _with_width(feat: Tensor | None, rows: Tensor) -> Tensor | None:
    """Features of each head [E, H, D] with zeros up to the head size of the rows, which may be padded."""
    if feat is None or feat.dim() == 2 or feat.shape[2] == rows.shape[2]:
        return feat
    return torch.nn.functional.pad(feat, (0, rows.shape[2] - feat.shape[2]))


def _differentiates_twice(terms: EdgeTerms) -> bool:
    """Whether second derivatives are likely: features of edges that require gradients often depend on
    positions, and a model that predicts forces differentiates by these. `_composed` is recorded by autograd
    once, while `_Separate` computes forward again for second derivatives. The answer does not depend on the
    grad mode, so that the result does not, either. It is False under autocast, which would change the dtype
    of products in the backward of what autograd recorded."""
    feat = terms.key if terms.value is None else terms.value
    learns = feat is not None and feat.requires_grad and not feat.is_cuda
    return learns and not torch.is_autocast_enabled("cpu")


def _padded(proj: Tensor | None, size: int) -> Tensor | None:
    """W with zeros up to heads of this size and, as the device's kernels need, `row_width` features."""
    if proj is None:
        return None
    width = _terms.row_width(proj.shape[2], proj)
    if (size, width) == proj.shape[1:]:
        return proj
    return torch.nn.functional.pad(proj, (0, width - proj.shape[2], 0, size - proj.shape[1]))


def _unfolds(inputs: AttentionInputs) -> bool:
    """Whether projections are computed per edge after all: in ONNX exports, and on the CPU where the
    projected features [E, H, D] are small beside the rows [N, H, d] that folding makes: E D <= N d for one
    projection, E D <= 2 N d for one that key and value share, 2 E D <= N d for two different ones.

    Measured time of projecting per edge, divided by that of folding. A shared projection: 2 heads of 50,
    d = 116, 4 edges per node: 0.84 with N = 900, 0.90 with N = 10,000; 4 heads of 16, d = 32, 20 edges per
    node, N = 500: 1.15. Two projections: 8 heads of 16, d = 128, N = 10,000: 0.83 with 4 edges per node, 1.29
    with 8."""
    query, terms = inputs.tensors.dst, inputs.terms
    assert terms is not None
    proj = terms.key_proj if terms.value_proj is None else terms.value_proj
    if proj is not None and _eager.in_plain_operations():
        return True
    if proj is None or query is None or query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if isinstance(inputs.graph, (GraphPart, _edges.EdgeList)):
        return False
    both = terms.key is not None and terms.value is not None
    shared = both and terms.key is terms.value and terms.key_proj is terms.value_proj
    of_edges = (1 + (both and not shared)) * inputs.graph.num_edges * proj.shape[1]
    return of_edges <= (1 + shared) * len(query) * proj.shape[2]


def _unfolded(inputs: AttentionInputs, terms: EdgeTerms) -> tuple[Tensor, Any]:
    def features(x, proj):
        if x is None:
            return None
        projected = (x @ proj.flatten(0, 1).t()).unflatten(1, proj.shape[:2])
        # Kernels do not write the gradients of unused edges, which the gradient of proj would add up.
        return _edges.in_use(inputs.graph.edge_mask, projected)

    one = terms.key is terms.value and terms.key_proj is terms.value_proj
    with _eager.without_autocast(inputs.tensors.value):
        of_key = features(terms.key, terms.key_proj)
        of_value = of_key if one else features(terms.value, terms.value_proj)
    if of_key is not None and of_value is not None and not one:
        return attention(inputs._replace(terms=EdgeTerms(of_key, None, of_value, None)))
    flags = FEAT_IN_KEY * (of_key is not None) | FEAT_IN_VALUE * (of_value is not None)
    feat, rows = (of_key, inputs.tensors.dst) if of_value is None else (of_value, inputs.tensors.value)
    assert rows is not None
    tensors = inputs.tensors._replace(edge_feat=_with_width(feat, rows))
    numbers = inputs.numbers._replace(flags=inputs.numbers.flags | flags)
    return attend(inputs._replace(tensors=tensors, numbers=numbers, terms=None))


def _for_kernels(terms: EdgeTerms, query: Tensor, value: Tensor) -> EdgeTerms:
    """The terms as the device's kernels take them, for heads that may have been padded."""
    key_feat, key_proj = _with_width(terms.key, query), _padded(terms.key_proj, query.shape[2])
    one_feat, one_proj = terms.value is terms.key, terms.key_proj is terms.value_proj
    return EdgeTerms(
        key_feat,
        key_proj,
        key_feat if one_feat else _with_width(terms.value, value),
        key_proj if one_proj else _padded(terms.value_proj, value.shape[2]),
    )


def attention(inputs: AttentionInputs) -> tuple[Tensor, Any]:
    """(out, attention) of dot attention with terms of the edges; the attention is to be ignored unless
    it was asked for. Heads of the inputs, and features of each head, may have been padded."""
    terms, tensors, graph = inputs.terms, inputs.tensors, inputs.graph
    query, value = tensors.dst, tensors.value
    assert terms is not None and query is not None
    if _unfolds(inputs):
        return _unfolded(inputs, terms)
    terms = _for_kernels(terms, query, value)
    numbers = inputs.numbers._replace(flags=inputs.numbers.flags & BIAS_AFTER)
    inputs = inputs._replace(numbers=numbers, terms=terms)
    plain = tensors.edge_gate is not None or inputs.sink is not None or terms.value is None
    plain = plain or isinstance(graph, (GraphPart, _edges.EdgeList)) or _differentiates_twice(terms)
    recorded = torch.compiler.is_compiling() or _eager.in_plain_operations()
    if plain or recorded or _eager.transformed(*tensors, *terms):
        return _composed(inputs)
    weights = None
    if inputs.return_attention:  # by a second call: asking for the weights must not change `out`
        alone = terms._replace(value=None, value_proj=None)
        _, weights = _composed(inputs._replace(tensors=tensors._replace(out_bias=None), terms=alone))
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, *terms))
    call = _Separate(inputs, terms)
    edges_learn = any(x is not None and x.requires_grad for x in (tensors.edge_bias, tensors.edge_weight))
    if not (train and edges_learn) and _one_kernel_takes(call, value, terms):
        call = _InOne(inputs, terms, train)
    if paths.recorder is not None:
        paths.recorder.took("edge projection", paths.describe("dot", value))
    given = call.given(tensors, terms)
    if not train:
        return _ops.call(call.forward, given)[0], weights
    run = FusedFunction.at_once if _eager.is_eager(value) else FusedFunction.apply
    return run(call, *given), weights
