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
`_composed` puts these parts together under autograd, for every option and derivatives of any order; it is
what compilers record. `_Separate` is one autograd function, with less memory and fewer passes. Its output
contains the edges' part, so that the product of the output and its gradient is all of delta
(docs/internals/glossary.md): to compute delta, backward needs neither the attention nor the output without
the edges' part. `_InOne` is for one projection in both key and value, on CUDA in 16 bits, for heads whose
lanes can share the features. The attention's own kernels compute all products except the gradient of x. Its
tensors of edge size are the features and, in backward, two scalars per edge and head.
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
from . import compiler_graph, edge_maps, operators, paths
from .autograd import SeveralOperators
from .paths import attend

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
            rows = edge_maps.onto_features(tensors.dst, terms.key_proj)  # type: ignore[arg-type]
            bias = edge_maps.dot(graph, rows, terms.key, numbers.scale)
            if tensors.edge_gate is not None:
                bias = bias * tensors.edge_gate
            if tensors.edge_bias is not None:
                bias = bias + tensors.edge_bias
            tensors = tensors._replace(edge_bias=bias)
        wanted = inputs.return_attention or terms.value is not None
        out, attention = attend(inputs._replace(tensors=tensors, return_attention=wanted, terms=None))
        if terms.value is not None:
            weight = _ops.as_type(attention, _ops.acc_type(out.dtype))
            sums = edge_maps.total(
                graph, weight, terms.value, _width_of_sums(tensors.value, terms.value_proj)
            )
            out = edge_maps.with_projection(out, sums, terms.value_proj)
            if inputs.return_attention:  # a copy, because the caller may modify it, and backward reads it
                attention = attention.clone()
    return out, attention


class _Separate:
    """Computes the output by the engine's attention and products along edges, if there is a term in the value
    and no gate. Its methods are those that `autograd.SeveralOperators` calls."""

    def __init__(self, inputs: AttentionInputs, terms: EdgeTerms):
        self.graph, self.numbers, self.schedule = inputs.graph, inputs.numbers, inputs.schedule
        # Whether key and value have the same features, the same projection; and whether backward needs the
        # attention, for the gradient of the value's features.
        has_key = terms.key is not None
        self.one_feat = has_key and terms.key is terms.value
        self.one_proj = has_key and terms.key_proj is terms.value_proj
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
            rows = edge_maps.onto_features(g.query, terms.key_proj)
            bias = edge_maps.dot(self.graph, rows, terms.key, self.numbers.scale)
            if g.edge_bias is not None:
                bias = bias + g.edge_bias
        out, stats, _, _, attention = self.engine(g.value).forward(g.tensors(bias))
        sums = edge_maps.total(self.graph, attention, terms.value, _width_of_sums(g.value, terms.value_proj))
        edge_maps.add_projection(out, sums, terms.value_proj)
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
            rows, grad_rows = edge_maps.onto_features_beside(g.query, terms.key_proj, grad, terms.value_proj)
        else:
            grad_rows = edge_maps.onto_features(grad, terms.value_proj)
        gamma = edge_maps.dot(graph, grad_rows, terms.value)  # adds to the gradient of alpha
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
            found["value_proj"] = edge_maps.products_of_rows(grad, sums)
        if need.value_feat:
            found["value_feat"] = edge_maps.outer(graph, attention, grad_rows, terms.value)
        if terms.key is None:
            return found
        score_sums: Any = None
        if need.query or need.key_proj:
            score_sums = edge_maps.total(
                graph, grad_score, terms.key, _width_of_sums(g.query, terms.key_proj)
            )
        if need.query:
            edge_maps.add_projection(grad_query, score_sums, terms.key_proj, scale)
        if need.key_proj and self.one_proj:
            found["key_proj"] = edge_maps.grad_proj(g.query, score_sums, grad, sums, scale)
        elif need.key_proj:
            found["key_proj"] = edge_maps.products_of_rows(g.query, score_sums).mul_(scale)
        if rows is not None:
            # One product over 2 H heads: H for the gradient by way of the key, then H by way of the value.
            weights = torch.cat([grad_score * scale, attention], 1)
            found["key_feat"] = edge_maps.outer(graph, weights, rows, terms.key)
        elif need.key_feat:
            rows = edge_maps.onto_features(g.query, terms.key_proj)
            found["key_feat"] = edge_maps.outer(graph, grad_score, rows, terms.key, scale)
            if self.one_feat:
                found["key_feat"].add_(edge_maps.outer(graph, attention, grad_rows, terms.key))
        return found


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
        value, plan = inputs.tensors.value, ("dot", self.schedule, True, train)
        self.handle = self.graph._planner.handle(*value.shape[1:], value.dtype, *plan)

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
            found["key_proj"] = edge_maps.grad_proj(query, score_sums, grad, sums, scale)
        if need.key_feat:
            attention, grad_score = edges.unbind(-1)
            rows, grad_rows = edge_maps.onto_features(query, proj), edge_maps.onto_features(grad, proj)
            of_key = edge_maps.outer(self.graph, grad_score, rows, feat, scale)
            found["key_feat"] = of_key.add_(edge_maps.outer(self.graph, attention, grad_rows, feat))
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
    width = edge_maps.row_width(proj.shape[2], proj)
    if (size, width) == proj.shape[1:]:
        return proj
    return torch.nn.functional.pad(proj, (0, width - proj.shape[2], 0, size - proj.shape[1]))


def _unfolds(inputs: AttentionInputs) -> bool:
    """Whether projections are computed per edge after all: in ONNX exports, and on the CPU where the
    projected features [E, H, D] are small compared with the rows [N, H, d] that folding makes: E D <= N d for
    one projection, E D <= 2 N d for one that key and value share, 2 E D <= N d for two different ones.

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
    if isinstance(inputs.graph, (GraphPart, compiler_graph.EdgeList)):
        return False
    both = terms.key is not None and terms.value is not None
    shared = both and terms.key is terms.value and terms.key_proj is terms.value_proj
    of_edges = (1 + (both and not shared)) * inputs.graph.num_edges * proj.shape[1]
    return of_edges <= (1 + shared) * len(query) * proj.shape[2]


def _unfolded(inputs: AttentionInputs, terms: EdgeTerms) -> tuple[Tensor, Any]:
    def features(x, proj):
        if proj is None:
            return x
        projected = (x @ proj.flatten(0, 1).t()).unflatten(1, proj.shape[:2])
        # Kernels do not write the gradients of unused edges, which the gradient of proj would add up.
        return compiler_graph.in_use(inputs.graph.edge_mask, projected)

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
    plain = plain or isinstance(graph, (GraphPart, compiler_graph.EdgeList)) or _eager.in_plain_operations()
    plain = plain or torch.compiler.is_compiling() or _differentiates_twice(terms)
    if plain or _eager.transformed(*tensors, *terms):
        return _composed(inputs)
    weights = None
    if inputs.return_attention:  # by a second call: asking for the weights must not change `out`
        alone = terms._replace(value=None, value_proj=None)
        _, weights = _composed(inputs._replace(tensors=tensors._replace(out_bias=None), terms=alone))
    train = _eager.needs_backward((*tensors, *terms))
    edges_learn = any(x is not None and x.requires_grad for x in (tensors.edge_bias, tensors.edge_weight))
    run = _Separate(inputs, terms)
    if not (train and edges_learn) and _one_kernel_takes(run, value, terms):
        run = _InOne(inputs, terms, train)
    if paths.recorder is not None:
        paths.recorder.took("edge projection", paths.describe("dot", value))
    given = run.given(tensors, terms)
    if not train:
        return _ops.call(run.forward, given)[0], weights
    apply = SeveralOperators.at_once if _eager.is_eager(value) else SeveralOperators.apply
    return apply(run, *given), weights
