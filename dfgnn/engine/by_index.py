"""Softmax and sums over groups of rows, where an index gives the group of each row, on the CPU.

Their operators take no graph (csrc/cpu/by_index.h). The gradient of each function consists of calls of the
others, so that they are differentiable any number of times. `extremes`, maxima and minima over the edges into
each node of a graph, are computed by PyTorch and differentiable once.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..graph.derived import of_graph
from ..runtime import eager, rules, torch_internals
from ..runtime.rules import ByRule, Rule
from . import operators

DTYPES = torch.float32, torch.float64
#: Elements from which PyTorch's `gather` takes 0.7 to 0.9 of the time of its `index_select`.
_LARGE = 1 << 22


def takes_rows(rows: Tensor) -> bool:
    """Whether the functions below can compute with these rows and `Graph.edge_index` as index."""
    return rows.is_cpu and rows.dtype in DTYPES and eager.is_eager(rows)


def takes(rows: Tensor, index: Tensor) -> bool:
    """Whether `softmax` and `sums` can compute with these rows and this index: int64, one for all columns."""
    return (
        rows.dim() > 0
        and takes_rows(rows)
        and index.is_cpu
        and index.dtype == torch.int64
        and index.dim() == 1
        and rows.shape[0] == index.shape[0]
        and eager.is_eager(index)
    )


def takes_of(graph: Any, rows: Any) -> bool:
    """Whether the functions below that take a graph can compute with these rows of nodes or edges. The number
    of rows is not checked."""
    return (
        type(graph) is Graph
        and isinstance(rows, Tensor)
        and rows.dim() > 0
        and takes_rows(rows)
        and graph.device.type == "cpu"
        and graph.edge_mask is None
    )


def softmax(score: Tensor, index: Tensor, num_groups: int, masked: bool = False) -> Tensor:
    """``[E, ...]``: softmax of score over the rows of each group. masked: a group whose scores are all -inf
    gives 0; without it, NaN.

    The caller may modify the result. RuntimeError: a group is out of range.
    """
    flat = score if score.dim() == 2 else _flat(score)
    if torch.is_grad_enabled() and flat.requires_grad:
        out = ByRule.at_once(_Softmax(num_groups, masked), flat, index).clone()
    else:
        out = operators.index_softmax(flat, index, num_groups, masked)
    return out if flat is score else out.view(score.shape)


def sums(rows: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """``[num_groups, ...]``: the sums of the rows ``[E, ...]`` of each group. RuntimeError as `softmax`."""
    flat, shape = rows if rows.dim() == 2 else _flat(rows), (num_groups, *rows.shape[1:])
    if torch.is_grad_enabled() and flat.requires_grad:
        return ByRule.at_once(_Sums(num_groups), flat, index).view(shape)
    return operators.index_sum(flat, index, num_groups).view(shape)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """``[E, ...]``: x[index]. IndexError or RuntimeError: a number is negative or out of range."""
    flat = x if x.dim() == 2 else _flat(x)
    return rules.apply(_Rows(len(x)), flat, index).view(len(index), *x.shape[1:])


def is_few(num_elements: int) -> bool:
    """Whether PyTorch's own operations on a tensor of this size, on the CPU, take less time than the call of
    a kernel from Python; in training, less than autograd takes to call a Python function."""
    return num_elements <= 1 << 13


def sums_of_edges(graph: Graph, rows: Tensor, reverse: bool = False) -> Tensor:
    """``[num_dst, ...]``: the sums of the rows ``[E, ...]`` over the edges into each destination; with
    ``reverse`` ``[num_src, ...]``, out of each source."""
    index = graph.edge_index[0 if reverse else 1]
    num_groups = graph.num_src if reverse else graph.num_dst
    if is_few(rows.numel()):
        return rows.new_zeros(num_groups, *rows.shape[1:]).index_add(0, index, rows)
    return sums(rows, index, num_groups)


def sums_of_sources(graph: Graph, rows: Tensor) -> Tensor:
    """``[num_dst, ...]``: the sums of the sources' rows ``[num_src, ...]`` over the edges into each node."""
    flat = rows if rows.dim() == 2 else _flat(rows)
    rule = _Neighbours(graph, False)
    trains = torch.is_grad_enabled() and flat.requires_grad
    out = ByRule.at_once(rule, flat) if trains else rule.forward(flat)
    return out if flat is rows else out.view(graph.num_dst, *rows.shape[1:])


def extremes(graph: Graph, rows: Tensor, of_edges: bool, kind: str) -> Tensor:
    """``[num_dst, ...]``: the "max" or "min" over the edges into each destination of the edges' rows
    (of_edges) or of their sources' rows; -inf or inf without edges. Of equal values, that of the first edge
    in the order of `Graph.csr` gets the gradient. PyTorch computes it as a product with a sparse matrix,
    without a gathered copy of the rows."""
    flat, dtype = rows if rows.dim() == 2 else _flat(rows), rows.dtype
    rule = _Extremes(kind, *of_graph(graph, ("extremes", of_edges, dtype), partial(_matrix, of_edges, dtype)))
    if torch.is_grad_enabled() and flat.requires_grad and not is_few(graph.num_edges * flat.shape[1]):
        out, _ = ByRule.at_once(rule, flat)
    else:
        out = rule.filled(torch.sparse.mm(rule.matrix, flat, f"a{kind}"))
    return out if flat is rows else out.view(graph.num_dst, *rows.shape[1:])


def _matrix(of_edges: bool, dtype: torch.dtype, graph: Graph) -> tuple[Tensor, Tensor, Tensor | None]:
    """A sparse matrix of ones ``[num_dst, R]``: an entry per edge, in the row of its destination and the
    column of the edge (of_edges; R = E) or of its source (R = num_src). Besides it, those columns in the
    order of `Graph.csr`, followed by R, int64 ``[E + 1]``; and which destinations have no edges, bool
    ``[num_dst, 1]``, or None if all have some."""
    csr = graph.csr()
    rows, count = (csr.eids, graph.num_edges) if of_edges else (csr.indices, graph.num_src)
    rows = torch.arange(count) if rows is None else rows.long()
    columns = torch.cat([rows, torch.tensor([count])])
    with warnings.catch_warnings():  # PyTorch warns that sparse CSR tensors are in beta state
        warnings.simplefilter("ignore")
        matrix = torch.sparse_csr_tensor(
            csr.indptr, columns[:-1], torch.ones(len(columns) - 1, dtype=dtype), (graph.num_dst, count),
            check_invariants=False,
        )  # fmt: skip
    empty = csr.indptr.diff() == 0
    return matrix, columns, empty.unsqueeze(1) if bool(empty.any()) else None


def _ends(graph: Graph, reverse: bool) -> tuple[Tensor, Tensor]:
    """(sources, destinations) of the edges, sorted by destination; with ``reverse`` (destinations, sources),
    sorted by source. Both are int32 ``[E]``."""

    def make(graph: Graph) -> tuple[Tensor, Tensor]:
        csr = graph.reverse_csr() if reverse else graph.csr()
        degrees = csr.indptr.diff()
        rows = torch.arange(len(degrees), dtype=torch.int32)
        return csr.indices, rows.repeat_interleave(degrees, output_size=graph.num_edges)

    found: tuple[Tensor, Tensor] = of_graph(graph, ("ends", reverse), make)
    return found


def _flat(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 1 else x.flatten(1)


@dataclass(slots=True, eq=False)
class _Softmax(Rule):
    """Softmax of (score, index)."""

    num_groups: int
    masked: bool

    def forward(self, score, index):
        return operators.index_softmax(score, index, self.num_groups, self.masked)

    def saved(self, tensors, result):
        return result, tensors[1]

    def gradients(self, need, saved, grad):
        result, index = saved
        if not torch.is_grad_enabled():
            return operators.index_softmax_backward(result, grad, index, self.num_groups), None
        return rules.apply(_Gradient(self.num_groups), result, grad, index), None


@dataclass(slots=True, eq=False)
class _OfGroups(Rule):
    """A map of (rows, index)."""

    num_groups: int

    def saved(self, tensors, result):
        return tensors[1:]


class _Gradient(_OfGroups):
    """The gradient of softmax: result * (grad - S(result * grad)). S: the sums over each row's group."""

    __slots__ = ()

    def forward(self, result, grad, index):
        return operators.index_softmax_backward(result, grad, index, self.num_groups)

    def saved(self, tensors, result):
        return tensors

    def gradients(self, need, saved, more):
        result, grad, index = saved

        def of_group(x):
            return rules.apply(_Rows(self.num_groups), rules.apply(_Sums(self.num_groups), x, index), index)

        of_result = of_grad = None
        if need[0]:
            of_result = more * (grad - of_group(result * grad)) - grad * of_group(result * more)
        if need[1]:
            of_grad = rules.apply(self, result, more, index)
        return of_result, of_grad, None


class _Sums(_OfGroups):
    __slots__ = ()

    def forward(self, rows, index):
        return operators.index_sum(rows, index, self.num_groups)

    def gradients(self, need, saved, grad):
        return rules.apply(_Rows(self.num_groups), grad, *saved), None


class _Rows(_OfGroups):
    """x[index]."""

    __slots__ = ()

    def forward(self, x, index):
        # PyTorch's indexing is ten times slower for rows that are not contiguous. Gradients often are not:
        # that of x.sum() is an expanded scalar.
        x = x.contiguous()
        if len(index) * x.shape[1] >= _LARGE and index.dtype == torch.int64:
            return x.gather(0, index.unsqueeze(1).expand(-1, x.shape[1]))
        return x.index_select(0, index)

    def gradients(self, need, saved, grad):
        return rules.apply(_Sums(self.num_groups), grad, *saved), None


@dataclass(slots=True, eq=False)
class _Neighbours(Rule):
    """The sums of neighbours' rows: of sources, or with ``reverse`` of destinations."""

    graph: Graph
    reverse: bool

    def forward(self, rows):
        graph = self.graph
        sources, index = _ends(graph, self.reverse)
        return operators.index_sum(rows, index, graph.num_src if self.reverse else graph.num_dst, sources)

    def saved(self, tensors, result):
        return ()

    def gradients(self, need, saved, grad):
        return (rules.apply(_Neighbours(self.graph, not self.reverse), grad),)


@dataclass(slots=True, eq=False)
class _Extremes(Rule):
    """Computes (the result of `extremes`, the position in `Graph.csr` of the edge that each value comes from,
    or E). matrix, columns, empty: see `_matrix`."""

    kind: str
    matrix: Tensor
    columns: Tensor
    empty: Tensor | None

    def forward(self, rows):
        with torch.enable_grad():  # PyTorch returns the positions only if its argument requires a gradient
            leaf = rows.detach().requires_grad_()
            out, place = torch_internals.extremes_of_neighbours(self.matrix, leaf, f"a{self.kind}")
        return self.filled(out.detach()), place

    def filled(self, out: Tensor) -> Tensor:
        if self.empty is None:
            return out
        return out.masked_fill_(self.empty, -math.inf if self.kind == "max" else math.inf)

    def saved(self, tensors, results):
        return results[1:]

    def gradients(self, need, saved, grad, _):
        if grad is None:
            return (None,)
        (place,) = saved
        row = self.columns.index_select(0, place.flatten()).view(place.shape)
        out = grad.new_zeros(self.matrix.shape[1] + 1, grad.shape[1])
        return (out.scatter_add(0, row, grad)[:-1],)
