"""The backward of the backward of attention, without tensors of E x H x D.

docs/internals/second_derivatives.md derives the formulas. For GAT's score and for dot products every sum
over the edges is a product along edges, `sddmm` or `spmm`, whose kernels gather rows and keep nothing of
them; what lies between are scalars per edge and head, [E, H]. GATv2's score needs the sign of every column of
every edge, so that it is differentiated in plain operations, one block of destinations after the other.

Third derivatives, torch.func and forward mode are plain operations throughout (`plain`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..graph import Graph
from ..runtime import transforms
from ..runtime.arguments import BIAS_AFTER, FEAT_IN_KEY, FEAT_IN_VALUE, SCORES, Numbers
from ..runtime.eager import transformed
from ..runtime.ops import acc_type
from . import plain, products

#: Elements of rows that are gathered at a time: of edges with features, and of a block of destinations.
MOST_GATHERED = 2**22

Gradients = dict[str, Tensor]


def backward_of_backward(
    graph: Any, score: int, numbers: Numbers, primals: dict[str, Any], grads: dict[str, Tensor | None]
) -> Gradients:
    """Gradients, by name, of what the backward operator takes: grad_out, grad_attention and the tensors.

    primals: these and ``stats``, or None.  grads: of the operator's results, None where there is none.
    """
    stats = primals.pop("stats")
    tensors = [x for x in (*primals.values(), *grads.values()) if isinstance(x, Tensor)]
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if type(graph) is not Graph or differentiable or transformed(*tensors):
        return plain.backward_of_backward(plain.ends_of(graph), score, numbers, primals, grads)
    plain.ends_of(graph)  # refuses a graph of fixed capacity
    with torch.no_grad(), transforms.untransformed():
        if score == SCORES["additive_v2"]:
            return _by_blocks(graph, score, numbers, primals, grads)
        return _Second(graph, score, numbers, primals, grads, stats).gradients()


class _Second:
    """One call. Names are those of docs/internals/second_derivatives.md; scalars of edges are [E, H]."""

    def __init__(self, graph, score, numbers, primals, grads, stats):
        self.graph = graph
        self.src, self.dst = graph.edge_index
        self.is_dot = score == SCORES["dot"]
        self.numbers = numbers
        value = primals["value"]
        self.acc = acc_type(value.dtype)
        self.heads = value.shape[1]
        self.primals = primals

        def wide(x: Tensor | None) -> Tensor | None:
            return x if x is None else x.to(self.acc)

        self.value, self.key, self.query = (wide(primals[n]) for n in ("value", "src", "dst"))
        self.feat, self.bias, self.gate, self.weight = (
            wide(primals[n]) for n in ("edge_feat", "edge_bias", "edge_gate", "edge_weight")
        )
        self.grad_out, self.gamma = wide(primals["grad_out"]), wide(primals["grad_attention"])
        self.in_key = self.is_dot and self.feat is not None and bool(numbers.flags & FEAT_IN_KEY)
        self.in_value = self.feat is not None and bool(numbers.flags & FEAT_IN_VALUE)
        names = dict(V="value", K="src", Q="dst", B="bias", G="gate", W="weight", F="feat")
        self.cotangent = {letter: wide(grads.get(f"grad_{name}")) for letter, name in names.items()}
        for letter, name in (("Q", "dst"), ("B", "edge_bias"), ("G", "edge_gate"), ("W", "edge_weight")):
            if primals[name] is None:
                self.cotangent[letter] = None
        if self.feat is None:
            self.cotangent["F"] = None
        self.stats = stats

    # ---- products along edges ------------------------------------------------------------------

    def sddmm(self, rows: Tensor, feat: Tensor) -> Tensor:
        """<rows[i], feat[j]>; rows are destinations'."""
        rows, feat = _padded(rows, feat)
        return products.sddmm(self.graph, rows, feat)

    def over_sources(self, weight: Tensor, feat: Tensor) -> Tensor:
        """sum_j weight_ij feat[j] of each destination i."""
        return self._spmm(weight, feat, False)

    def over_destinations(self, weight: Tensor, rows: Tensor) -> Tensor:
        """sum_i weight_ij rows[i] of each source j."""
        return self._spmm(weight, rows, True)

    def _spmm(self, weight: Tensor, feat: Tensor, reverse: bool) -> Tensor:
        (padded,) = _padded(feat)
        return products.spmm(self.graph, weight.contiguous(), padded, reverse)[..., : feat.shape[2]]

    def sum(self, x: Tensor, reverse: bool = False) -> Tensor:
        """[N, H]: scalars of edges added up by destination, or by source."""
        count = self.graph.num_dst if reverse else self.graph.num_src
        return self._spmm(x, x.new_ones(count, self.heads, 1), reverse).squeeze(2)

    # ---- rows of edges, a chunk at a time ----------------------------------------------------------

    def _chunks(self, width: int):
        size = max(1, MOST_GATHERED // max(1, self.heads * width))
        return (slice(at, at + size) for at in range(0, len(self.dst), size))

    def dot_edges(self, rows: Tensor, feat: Tensor) -> Tensor:
        """<rows[i], feat_ij>."""
        found = [(rows[self.dst[at]] * feat[at]).sum(-1) for at in self._chunks(rows.shape[2])]
        return torch.cat(found) if found else feat.new_zeros(0, self.heads)

    def sum_edges(self, weight: Tensor, feat: Tensor) -> Tensor:
        """sum_j weight_ij feat_ij of each destination i."""
        total = feat.new_zeros(self.graph.num_dst, *feat.shape[1:])
        for at in self._chunks(feat.shape[2]):
            total.index_add_(0, self.dst[at], weight[at, :, None] * feat[at])
        return total

    def add_outer(self, total: Tensor, weight: Tensor, rows: Tensor) -> None:
        """total_ij += weight_ij rows[i]."""
        for at in self._chunks(rows.shape[2]):
            total[at] += weight[at, :, None] * rows[self.dst[at]]

    # ---- the formulas ------------------------------------------------------------------------------

    def gradients(self) -> Gradients:
        if all(x is None for x in self.cotangent.values()):
            return {}
        n, c = self.numbers, self.cotangent
        raw = self.raw()
        z = raw if self.gate is None else raw * self.gate
        after = bool(n.flags & BIAS_AFTER)
        if self.bias is not None and not after:
            z = z + self.bias
        slope = None if n.negative_slope == 1 else torch.full_like(z, n.negative_slope).masked_fill_(z > 0, 1)
        alpha = self.alpha(z, slope, after)
        mask = self.dropout()
        factor = _product(mask, self.weight)

        p = self.sddmm(self.grad_out, self.value)
        if self.in_value:
            p = p + self.dot_edges(self.grad_out, self.feat)
        if self.gamma is not None:
            p = p + self.gamma
        fp = p if factor is None else factor * p
        delta = self.sum(alpha * fp)
        ds = alpha * (fp - delta[self.dst])

        t_raw = self.t_raw()
        t = _plus(_times(t_raw, self.gate), _times(c["G"], raw), None if after else c["B"])
        t = _plus(_times(t, slope), c["B"] if after else None)
        centred = None if t is None else t - self.sum(alpha * t)[self.dst]
        moved = _plus(_times(centred, factor), _times(c["W"], mask))
        u = None
        if c["V"] is not None:
            u = self.sddmm(self.grad_out, c["V"])
        if c["F"] is not None and self.in_value:
            u = _plus(u, self.dot_edges(self.grad_out, c["F"]))

        by_alpha = _plus(_times(moved, p), _times(u, factor), None if t is None else -delta[self.dst] * t)
        assert by_alpha is not None
        d = alpha * (by_alpha - self.sum(alpha * by_alpha)[self.dst])
        dz = _times(d, slope)
        of_raw = _plus(_times(dz, self.gate), _times(c["G"], _times(ds, slope)))
        of_t_raw = _times(_times(ds, slope), self.gate)
        a = _times(alpha, factor)
        of_p = None if moved is None else alpha * moved

        found: Gradients = {}
        if of_p is not None or c["V"] is not None or (c["F"] is not None and self.in_value):
            found["grad_out"] = self.of_grad_out(of_p, a)
        if of_p is not None:
            found["value"] = self.over_destinations(of_p, self.grad_out)
            if self.gamma is not None:
                found["grad_attention"] = of_p
        self.of_ends(found, of_raw, of_t_raw if t_raw is not None else None)
        if self.feat is not None:
            found["edge_feat"] = self.of_feat(of_raw, of_t_raw, of_p)
        if self.bias is not None:
            found["edge_bias"] = d if after else dz
        if self.gate is not None:
            found["edge_gate"] = _plus(raw * dz, _times(t_raw, _times(ds, slope)))
        if self.weight is not None:
            found["edge_weight"] = _times(_plus(_times(centred, p), u), _times(alpha, mask))
        return {name: _like(self.primals[name], x) for name, x in found.items() if x is not None}

    def raw(self) -> Tensor:
        """What the ends of an edge give to its score."""
        if not self.is_dot:
            raw = self.key[self.src]
            return raw if self.query is None else raw + self.query[self.dst]
        raw = self.sddmm(self.query, self.key)
        if self.in_key:
            raw = raw + self.dot_edges(self.query, self.feat)
        return raw * self.numbers.scale

    def alpha(self, z: Tensor, slope: Tensor | None, after: bool) -> Tensor:
        """The softmax, relative to the forward pass's maxima and normalised anew."""
        score = _times(z, slope)
        if self.bias is not None and after:
            score = score + self.bias
        mask = self.primals["edge_mask"]
        if mask is not None:
            score = score.masked_fill(~mask, -torch.inf)
        weight = torch.exp(score - self.stats[..., 0].to(self.acc)[self.dst])
        total = self.sum(weight)
        return weight / total.masked_fill(total == 0, 1)[self.dst]

    def dropout(self) -> Tensor | None:
        seed = self.primals["seed"]
        if seed is None:
            return None
        return reference.dropout_mask(
            seed, len(self.dst), self.heads, self.numbers.dropout_p, seed.device
        ).to(self.acc)

    def t_raw(self) -> Tensor | None:
        """The cotangent of the gradient of `raw`."""
        c = self.cotangent
        if not self.is_dot:
            of_src = None if c["K"] is None else c["K"][self.src]
            return _plus(of_src, None if c["Q"] is None else c["Q"][self.dst])
        parts = []
        if c["Q"] is not None:
            parts.append(self.sddmm(c["Q"], self.key))
            if self.in_key:
                parts.append(self.dot_edges(c["Q"], self.feat))
        if c["K"] is not None:
            parts.append(self.sddmm(self.query, c["K"]))
        if self.in_key and c["F"] is not None:
            parts.append(self.dot_edges(self.query, c["F"]))
        total = _plus(*parts)
        return None if total is None else total * self.numbers.scale

    def of_grad_out(self, of_p: Tensor | None, a: Tensor) -> Tensor:
        parts = []
        if of_p is not None:
            parts.append(self.over_sources(of_p, self.value))
            if self.in_value:
                parts.append(self.sum_edges(of_p, self.feat))
        if self.cotangent["V"] is not None:
            parts.append(self.over_sources(a, self.cotangent["V"]))
        if self.in_value and self.cotangent["F"] is not None:
            parts.append(self.sum_edges(a, self.cotangent["F"]))
        total = _plus(*parts)
        assert total is not None
        return total

    def of_ends(self, found: Gradients, of_raw: Tensor, of_t_raw: Tensor | None) -> None:
        """The gradients of src and dst."""
        if not self.is_dot:
            found["src"] = self.sum(of_raw, reverse=True)
            if self.query is not None:
                found["dst"] = self.sum(of_raw)
            return
        c = self.cotangent
        to_query = [self.over_sources(of_raw, self.key)]
        to_key = [self.over_destinations(of_raw, self.query)]
        if self.in_key:
            to_query.append(self.sum_edges(of_raw, self.feat))
        if of_t_raw is not None:
            if c["K"] is not None:
                to_query.append(self.over_sources(of_t_raw, c["K"]))
            if self.in_key and c["F"] is not None:
                to_query.append(self.sum_edges(of_t_raw, c["F"]))
            if c["Q"] is not None:
                to_key.append(self.over_destinations(of_t_raw, c["Q"]))
        found["dst"] = self.numbers.scale * _plus(*to_query)
        found["src"] = self.numbers.scale * _plus(*to_key)

    def of_feat(self, of_raw: Tensor, of_t_raw: Tensor, of_p: Tensor | None) -> Tensor:
        total = torch.zeros_like(self.feat)
        if self.in_key:
            self.add_outer(total, self.numbers.scale * of_raw, self.query)
            if self.cotangent["Q"] is not None:
                self.add_outer(total, self.numbers.scale * of_t_raw, self.cotangent["Q"])
        if self.in_value and of_p is not None:
            self.add_outer(total, of_p, self.grad_out)
        return total


def _like(primal: Tensor, x: Tensor) -> Tensor:
    """The gradient of a tensor, whose entries may each serve all heads."""
    if x.dim() == 2 and primal.shape[1] == 1 and x.shape[1] > 1:
        x = x.sum(1, keepdim=True)
    return x.to(primal.dtype)


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Rows as the products' kernels take them: on CUDA a head is a multiple of 16 bytes."""
    x = tensors[0]
    more = -x.shape[2] % (16 // x.element_size()) if x.is_cuda else 0
    return [(torch.nn.functional.pad(t, (0, more)) if more else t).contiguous() for t in tensors]


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


# ---- GATv2 -----------------------------------------------------------------------------------------------

_OF_EDGES = "edge_bias", "edge_gate", "edge_mask", "edge_weight", "edge_feat", "grad_attention"


def _by_blocks(
    graph: Graph, score: int, numbers: Numbers, primals: dict[str, Any], grads: dict[str, Tensor | None]
) -> Gradients:
    """`plain.backward_of_backward` of one block of destinations after the other, which share no softmax."""
    has_weight = primals["edge_weight"] is not None
    primals, grads, numbers, mask = _without_dropout(graph, numbers, primals, grads)
    csr = graph.csr()
    src, dst = graph.edge_index
    _, heads, dim = primals["value"].shape
    total: Gradients = {}

    def add(name: str, place: Any, x: Tensor) -> None:
        if name not in total:
            total[name] = torch.zeros_like(primals[name], dtype=acc_type(x.dtype))
        if isinstance(place, Tensor):
            total[name].index_add_(0, place, x.to(total[name].dtype))
        else:
            total[name][place] += x

    for first, last, begin, end in _blocks(csr.indptr, max(MOST_GATHERED // (heads * dim), graph.num_src)):
        edges = torch.arange(begin, end, device=src.device)
        edges = edges if csr.eids is None else csr.eids[begin:end].long()
        sources, local = src[edges].unique(return_inverse=True)
        rows = slice(first, last)
        places: dict[str, Any] = {"value": sources, "dst": rows, "grad_out": rows}
        places |= dict.fromkeys(_OF_EDGES, edges)

        def part(name: str, x: Tensor | None, places=places) -> Tensor | None:
            return x if x is None or name not in places else x[places[name]]

        ends = plain.Ends(torch.stack([local, dst[edges] - first]), last - first)
        found = plain.backward_of_backward(
            ends, score, numbers, {name: part(name, x) for name, x in primals.items()},
            {name: part(plain.GRADIENTS[name], x) for name, x in grads.items()},
        )  # fmt: skip
        for name, x in found.items():
            add(name, places.get(name, slice(None)), x)
    if mask is not None and "edge_weight" in total:
        total["edge_weight"] = total["edge_weight"] * mask
    if not has_weight:
        total.pop("edge_weight", None)
    return {name: _like(primals[name], x) for name, x in total.items()}


def _without_dropout(graph, numbers: Numbers, primals: dict, grads: dict) -> tuple:
    """The call with dropout as a factor of the edges' weights, whose mask goes by places in the whole graph;
    and that mask, or None."""
    seed = primals["seed"]
    if seed is None:
        return primals, grads, numbers, None
    value, weight = primals["value"], primals["edge_weight"]
    heads = value.shape[1]
    mask = reference.dropout_mask(seed, graph.num_edges, heads, numbers.dropout_p, value.device)
    mask = mask.to(acc_type(value.dtype))
    primals = {**primals, "seed": None, "edge_weight": mask if weight is None else mask * weight}
    of_weight = grads.get("grad_weight")
    grads = {**grads, "grad_weight": None if weight is None or of_weight is None else mask * of_weight}
    return primals, grads, numbers._replace(dropout_p=0.0), None if weight is None else mask


def _blocks(indptr: Tensor, most_edges: int):
    """(first row, last row, first edge, last edge) of blocks of at most so many edges, or of one row."""
    bounds = indptr.cpu()
    first, num_rows = 0, len(bounds) - 1
    while first < num_rows:
        limit = bounds[first] + most_edges
        last = max(first + 1, int(torch.searchsorted(bounds, limit, right=True)) - 1)
        if bounds[last] > bounds[first]:
            yield first, last, int(bounds[first]), int(bounds[last])
        first = last
