"""Fused layers whose edges compete in a softmax: GAT, GATv2 and dot products (see `engine.node`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ...engine import compiler_graph, operators
from ...engine.node import FusedFunction
from ...graph import Graph
from ...runtime import ops as _ops
from ...runtime.arguments import (
    FEAT_IN_KEY,
    FEAT_IN_VALUE,
    NEED_BIAS,
    NEED_DST,
    NEED_FEAT,
    GraphHandle,
    Numbers,
    Tensors,
    needs_rows,
)
from .padding import cut_columns, padding_of
from .projections import EDGE, KEY, QUERY, SKIP, VALUE, Projections, projections_of
from .spec import LayerSpec, LayerTensors, spelled

__all__ = ["attention_layer"]

_FIELDS = LayerTensors._fields
_new = tuple.__new__  # makes a named tuple from all of its fields, without the Python frame of its __new__
_ATTN, _ATTN_DST, _EDGE_ATTR, _ATTN_EDGE, _OUT_BIAS = map(
    _FIELDS.index, ("attn", "attn_dst", "edge_attr", "attn_edge", "out_bias")
)
Rows = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # value, key, query, projected edges


class _Attention(NamedTuple):
    """A call of a fused layer: everything but its tensors. This class is for scores of pairs of rows (GATv2,
    dot products), `_Additive` is for GAT."""

    graph: Graph
    handle: GraphHandle
    score: str
    heads: int
    numbers: Numbers
    projections: Projections
    dtype: torch.dtype  # of the layer's result
    is_out: bool  # whether the operator's result is that of the layer, the bias included
    train: bool

    def forward(self, tensors):
        t = _new(LayerTensors, tensors)
        rows, used = self.projections.forward(t)
        ends = self.ends(rows)
        out, saved = self.run(t, *ends)
        result = out if self.is_out else self.finish(t, out, rows.get(SKIP))
        return result, (*ends, *used, *saved), out

    def ends(self, rows: dict[int, Tensor]) -> Rows:
        """The rows that the operator takes. Where the layer has no projection for the query (or, in dot
        products, for the key) it takes those of the value."""
        value, query, edges = rows[VALUE], rows.get(QUERY), rows.get(EDGE)
        if query is None:
            num_dst = self.graph.num_dst
            query = value if value.shape[0] == num_dst else value[:num_dst]
        if edges is not None:
            edges = edges.view(-1, self.heads, self.projections.size + self.projections.padding)
        return value, rows.get(KEY, value) if self.score == "dot" else None, query, edges

    def run(self, t: LayerTensors, value, key, query, edges):
        """The operator's result, with the bias if `is_out`; and what backward takes besides the rows."""
        attn = None if t.attn is None else self.projections.pad(_ops.as_type(t.attn, t.x.dtype))
        out, saved = operators.attend_rows(self, self.inputs(t, value, key, query, attn, None, edges), False)
        return out, (saved, attn)

    def inputs(self, t: LayerTensors, value, src, dst, attn=None, scores=None, edges=None) -> Tensors:
        """The tensors of the operator. scores: terms of the edges, added to the scores."""
        bias = t.out_bias if self.is_out else None
        return _new(Tensors, (value, src, dst, attn, scores, None, None, None, edges, t.seed, bias))

    def rerun(self, tensors, made):
        return self.run(_new(LayerTensors, tensors), *made[:4])[0]

    def finish(self, t: LayerTensors, out: Tensor, skipped: Tensor | None) -> Tensor:
        """The layer's result, a new tensor, made from the operator's. It is called unless `is_out`."""
        p, more = self.projections, t.out_bias
        if skipped is not None:
            if more is not None:
                skipped = skipped + p.pad(more)
            elif not p.padding and self.dtype is out.dtype:
                return skipped + out if p.skip_is_shared else skipped.add_(out)
            more = skipped
        return cut_columns(out, p.heads, p.size, p.padding, more, self.dtype)

    def backward(self, tensors, grad, made, out, need):
        t, p = _new(LayerTensors, tensors), self.projections
        count = 4 + len(p.groups)
        ends, used, saved = made[:4], made[4:count], made[count:]
        found: list[Tensor | None] = [None] * len(_FIELDS)
        biased = p.shares_sum(t, grad) if p.any_joined and need[_OUT_BIAS] else None
        of_result = grad
        if p.padding or grad.dtype is not t.x.dtype:
            grad = p.pad(_ops.as_type(grad, t.x.dtype))
        grads = self.run_backward(t, ends, grad, out, saved, need, found)
        if need[_OUT_BIAS] and biased is None and found[_OUT_BIAS] is None:
            found[_OUT_BIAS] = of_result.sum(0, dtype=t.out_bias.dtype)
        grads[SKIP] = grads[_OUT_BIAS] = grad
        p.backward(t, grads, used, need, found, biased)
        return found

    def run_backward(self, t: LayerTensors, ends: Rows, grad, out, saved, need, found) -> dict[int, Any]:
        """The gradients of the rows, by the positions of their weights. Other gradients are put into
        ``found``."""
        saved, attn = saved
        edges, bits = ends[3], NEED_DST
        need_edges = edges is not None and (need[_EDGE_ATTR] or need[EDGE] or need[EDGE + 1])
        if need_edges:
            bits |= NEED_FEAT
        value, key, query, of_attn, *_, of_edges = operators.attend_rows_backward(
            self, grad, self.inputs(t, *ends[:3], attn, None, edges), out, saved, False, bits
        )
        # Where the layer has no projection for the key or the query, the value was taken instead (`ends`),
        # whose gradient is then a sum.
        if t.key_weight is None and key is not None:
            value += key
        if t.query_weight is None:
            value[: query.shape[0]] += query
        if need[_ATTN]:
            of_attn = _ops.as_type(_ops.total(of_attn), t.attn.dtype)
            if self.projections.padding:
                of_attn = of_attn[:, : self.projections.size]
            found[_ATTN] = of_attn.reshape(t.attn.shape)
        if need_edges:
            of_edges = compiler_graph.in_use(self.graph.edge_mask, of_edges).flatten(1)
        return {VALUE: value, KEY: key, QUERY: query, EDGE: of_edges if need_edges else None}

    def formula(self, *tensors):
        t, heads = LayerTensors(*tensors), (self.heads, self.projections.size)
        x_dst = t.x if t.x_dst is None else t.x_dst
        features = {"value": t.x, "key": t.x, "query": x_dst, "skip": x_dst, "edge": t.edge_attr}

        def project(name):
            weight, bias, x = getattr(t, name + "_weight"), getattr(t, name + "_bias"), features[name]
            if weight is None:
                return None
            if name == "edge" and self.score == "additive":  # project to the scores' terms, [E, H]
                weight = (t.attn_edge.view(heads[0], 1, -1) @ weight.view(*heads, -1)).squeeze(1)
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

        def attend(*rows):
            by_edge = rows[3]
            rows = [None if x is None else x.unflatten(1, heads) for x in rows[:3]]
            if by_edge is not None and self.score != "additive":
                by_edge = by_edge.unflatten(1, heads)
            out = self.plain_attention(t, *rows, by_edge).flatten(1)
            return out if t.out_bias is None else out + t.out_bias

        return spelled(self.score, project, attend).to(self.dtype)

    def plain_attention(self, t: LayerTensors, value, key, query, edges) -> Tensor:
        """The attention of rows [n, H, D] in plain operations, without the bias."""
        graph, (slope, scale, dropout_p, _) = self.graph, self.numbers
        options: dict[str, Any] = {"dropout_p": dropout_p, "_seed": t.seed}
        if self.score == "additive":
            src, dst = ((value * attn.view(value.shape[1:])).sum(-1) for attn in (t.attn, t.attn_dst))
            if edges is not None:
                options["edge_bias"] = edges
            dst = dst[: graph.num_dst]
            return functional.gat_attention(graph, value, src, dst, negative_slope=slope, **options)
        query = value[: graph.num_dst] if query is None else query
        if self.score == "additive_v2":
            attn = t.attn.view(value.shape[1:]).to(value.dtype)
            return functional.gatv2_attention(graph, value, query, attn, negative_slope=slope, **options)
        key = value if key is None else key
        return functional.dot_attention(graph, query, key, value, scale=scale, edge_feat=edges, **options)


class _Additive(_Attention):
    """GAT: operators compute the scores' terms of sources and destinations from the value. If there are
    attributes of edges, their term is a bias of the scores."""

    __slots__ = ()

    def ends(self, rows: dict[int, Tensor]) -> Rows:
        return rows[VALUE], None, None, None

    def run(self, t: LayerTensors, value, *_):
        if t.edge_attr is None:
            tensors = value, t.attn, t.attn_dst, t.seed, t.out_bias if self.is_out else None
            out, saved = operators.gat(self, tensors, self.train)
            return out, (saved,)
        src, dst = operators.score_terms(value, t.attn, t.attn_dst, self.graph.num_dst)
        # The term of an edge and head, attn . (weight attr), is computed as (attn weight) . attr, so that
        # there is no tensor of E x H x D.
        weight = t.edge_weight.view(self.heads, self.projections.size, -1)
        folded = torch.bmm(t.attn_edge.view(self.heads, 1, -1), weight).squeeze(1)
        scores = t.edge_attr.mm(folded.t())
        out, saved = operators.attend_rows(self, self.inputs(t, value, src, dst, None, scores), self.train)
        return out, (saved, src, dst, scores, folded)

    def run_backward(self, t: LayerTensors, ends: Rows, grad, out, saved, need, found) -> dict[int, Any]:
        value = ends[0]
        if t.edge_attr is None:
            tensors = value, t.attn, t.attn_dst, t.seed, t.out_bias if self.is_out else None
            of_value, *vectors, bias = operators.gat_backward(self, grad, tensors, out, *saved)
            if self.is_out and need[_OUT_BIAS]:
                found[_OUT_BIAS] = bias
        else:
            saved, src, dst, scores, folded = saved
            need_edges = need[_EDGE_ATTR] or need[EDGE] or need[_ATTN_EDGE]
            inputs = self.inputs(t, value, src, dst, None, scores)
            bits = NEED_DST | NEED_BIAS if need_edges else NEED_DST
            weighted, src, dst, _, scores, *_ = operators.attend_rows_backward(
                self, grad, inputs, out, saved, True, bits
            )
            of_value, *vectors = operators.score_terms_backward(src, dst, value, t.attn, t.attn_dst)
            of_value = of_value.add_(weighted)
            if need_edges:
                self.edges_backward(t, scores, folded, need, found)
        for at, vector in zip((_ATTN, _ATTN_DST), vectors):
            found[at] = vector if need[at] else None
        return {VALUE: of_value}

    def edges_backward(self, t: LayerTensors, scores, folded, need, found) -> None:
        """The gradients of the edges' attributes, weight and vector, from those of their terms."""
        scores = _ops.as_type(scores, t.edge_attr.dtype)
        if need[_EDGE_ATTR]:
            found[_EDGE_ATTR] = scores.mm(folded)
        if need[EDGE] or need[_ATTN_EDGE]:
            attn, of_folded = t.attn_edge, scores.t().mm(t.edge_attr)
            found[EDGE] = attn.view(self.heads, -1, 1).mul(of_folded.unsqueeze(1)).flatten(0, 1)
            weight = t.edge_weight.view(self.heads, self.projections.size, -1)
            found[_ATTN_EDGE] = torch.bmm(weight, of_folded.unsqueeze(2)).view(attn.shape)


def attention_layer(spec: LayerSpec, graph: Graph, t: LayerTensors, dtype: torch.dtype) -> Tensor:
    """The layer's result [num_dst, H * D] in this dtype, from tensors that `eligible` has checked."""
    x, bias, heads, additive = t.x, t.out_bias, spec.heads, spec.score == "additive"
    size = t.value_weight.shape[0] // heads
    padding, has_edges = padding_of(x, size), t.edge_attr is not None
    train = torch.is_grad_enabled() and (
        t.value_weight.requires_grad or any([x is not None and x.requires_grad for x in t])
    )
    is_out = not padding and t.skip_weight is None and dtype is x.dtype
    is_out = is_out and (bias is None or bias.dtype is dtype)
    handle = graph._planner.handle(
        heads,
        size + padding,
        x.dtype,
        operators.PLAN_LAYERS[spec.score],
        "auto",
        spec.dropout_p > 0 or has_edges or (not additive and needs_rows(spec.score, spec.negative_slope)),
        train,
    )
    flags = FEAT_IN_KEY | FEAT_IN_VALUE if has_edges and not additive else 0
    numbers = float(spec.negative_slope), float(spec.scale), float(spec.dropout_p), flags
    projections = projections_of(t, heads, size, padding, not additive)
    call = _new(
        _Additive if additive else _Attention,
        (graph, handle, spec.score, heads, _new(Numbers, numbers), projections, dtype, is_out, train),
    )
    return FusedFunction.at_once(call, *t) if train else _ops.call(call.forward, t)[0]
