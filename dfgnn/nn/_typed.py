"""Linear maps that differ by the type of a row, and graphs whose sources differ by the type of an edge."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, library, nn

from .. import functional
from ..engine.compiler_graph import of_types
from ..graph import Graph
from ..graph.cache import once
from ..runtime import eager as _eager
from ..runtime import rules, tracing
from ..runtime.ops import python_operator
from ..runtime.rules import Rule
from ..runtime.torch_internals import is_exporting
from ..runtime.tracing import not_compiled
from ._linear import under_autocast

Rows = slice | Tensor  # a set of rows: a range, or their indices without repetition


class Group(NamedTuple):
    """The rows of one type: where a typed map reads them and where it writes them."""

    type: int
    read: Rows
    write: Rows


class Pairs(NamedTuple):
    """(node, type) pairs, in the order of types."""

    #: For each type, the nodes' rows to read and the pairs' rows to write. None: all pairs (j, t) exist.
    groups: list[Group] | None
    num_pairs: int
    #: The graph with an edge from each pair's node to the pair, or None. If given, it gathers the nodes' rows
    #: for all pairs at a time, and the groups read the gathered rows.
    lift: Graph | None = None

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x[j] @ weight[t] of each pair (j, t). x: [N, H, D_in].  weight: [T, H, D_in, D_out].  Returns
        [num_pairs, H, D_out]."""
        if self.groups is None:
            return torch.matmul(x.transpose(0, 1), weight).transpose(1, 2).flatten(0, 1)
        if self.lift is not None:
            x = sum_of_sources(self.lift, x)
        return typed_matmul(x, weight, self.groups, self.num_pairs)


class TypedSources(NamedTuple):
    """A graph whose sources are pairs (source, type of an out-edge): those that occur, or, while a compiler
    records, all. Destinations, edges and their order are those of the graph that it was made from."""

    graph: Graph
    pairs: Pairs


@not_compiled
def groups_of(types: Tensor, num_types: int, name: str = "types") -> list[Group]:
    """The rows of each type that occurs; cached, so that it waits for the device once per tensor of types.

    Raises TypeError and ValueError, which name the argument ``name``: not one integer below ``num_types`` per
    row.
    """
    check_types(types, name)
    types = tracing.unwrapped(types)

    def build() -> list[Group]:
        in_order = bool((types[1:] >= types[:-1]).all())
        order = None if in_order else torch.argsort(types, stable=True)
        present, counts = torch.unique_consecutive(types if in_order else types[order], return_counts=True)
        return _groups(present.tolist(), counts.tolist(), order)

    groups = once((types,), ("groups",), build)
    _check_range(groups, num_types, name)
    return groups


def sum_of_sources(graph: Graph, x: Tensor) -> Tensor:
    """``[num_dst, *]``, sums of x ``[num_src, *]`` over edges. Sums and gradients are added up in a fixed
    order, and so are deterministic."""
    out = functional.spmm(graph, x.new_ones(graph.num_edges), x.flatten(1).unsqueeze(1))
    return out.view(graph.num_dst, *x.shape[1:])


def pairs_of(node: Tensor, types: Tensor, num_nodes: int, with_lift: bool = False) -> tuple[Pairs, Tensor]:
    """The distinct pairs (node[e], types[e]) of the edges e, and the index of each edge's pair. node, types:
    int64 ``[E]``. Waits for the device.

    with_lift: let `Pairs.matmul` gather the rows of all pairs at a time, which takes fewer launches than type
    by type, and more memory.
    """
    step = max(num_nodes, 1)
    pairs, position = torch.unique(types * step + node, return_inverse=True)
    present, counts = torch.unique_consecutive(pairs // step, return_counts=True)
    nodes = pairs % step
    groups = _groups(present.tolist(), counts.tolist(), None)
    if not with_lift:
        return Pairs([Group(t, nodes[at], at) for t, _, at in groups], len(pairs)), position
    indptr = torch.arange(len(pairs) + 1, device=node.device)
    return Pairs(groups, len(pairs), Graph.from_csr(indptr, nodes, num_nodes, validate=False)), position


def typed_sources(graph: Graph, etype: Tensor, num_types: int, name: str = "etype") -> TypedSources:
    """The graph on which attention over edges of several types runs. Keys and values, which depend on the
    type of the edge, are made once per source and type instead of once per edge.

    etype: integers ``[E]`` in the user's edge order. Cached: it waits for the device once per graph and
    tensor. Raises as :func:`groups_of`.
    """
    check_types(etype, name, graph.num_edges)
    if is_recorded(etype):
        typed: Any = of_types(graph, etype, num_types)
        return TypedSources(typed, Pairs(None, typed.num_src))
    return _occurring_sources(graph, etype, num_types, name)


@not_compiled
@torch.inference_mode(False)
@tracing.untransformed()
def _occurring_sources(graph: Graph, etype: Tensor, num_types: int, name: str) -> TypedSources:
    etype = tracing.unwrapped(etype)
    cached: Any = once((etype,), ("typed sources",), weakref.WeakKeyDictionary)
    if graph not in cached:
        csr = graph.csr()
        types = (etype if csr.eids is None else etype[csr.eids]).to(torch.int64)
        pairs, position = pairs_of(csr.indices, types, graph.num_src)
        lifted = Graph.from_csr(csr.indptr, position, pairs.num_pairs, eids=csr.eids, validate=False)
        cached[graph] = TypedSources(lifted, pairs)
    sources = cached[graph]
    _check_range(sources.pairs.groups, num_types, name)
    return sources


def first_types(types: Tensor, count: int) -> Tensor:
    """The first ``count`` types; outside compilers as int64 and the same tensor every time, so that
    `groups_of` finds its groups in the cache."""
    if is_recorded(types):
        return types if count == len(types) else types[:count]
    return _same_first_types(types, count)


@not_compiled
def _same_first_types(types: Tensor, count: int) -> Tensor:
    types = tracing.unwrapped(types)
    if count == len(types) and types.dtype == torch.int64 and not types.is_inference():
        return types
    # A copy, because the entry of the cache lives as long as `types`, which a view would keep alive for ever.
    return once((types,), ("first", count), lambda: types[:count].to(torch.int64, copy=True))


def check_types(types: Tensor, name: str, count: int | None = None) -> None:
    if not isinstance(types, Tensor):
        raise TypeError(f"{name}: expected a tensor of integers, got {type(types).__name__}")
    if types.is_floating_point() or types.is_complex() or types.dtype == torch.bool:
        raise TypeError(f"{name}: expected a tensor of integers, got {types.dtype}")
    if types.dim() != 1 or count not in (None, len(types)):
        size = "any" if count is None else count
        whose = "edge" if name.endswith(("etype", "edge_type")) else "node"
        raise ValueError(f"{name}: expected shape [{size}], a type per {whose}, got {list(types.shape)}")


def _check_range(groups: list[Group], num_types: int, name: str) -> None:
    for end in groups[:1] + groups[-1:]:
        if not 0 <= end.type < num_types:
            got = f"{end.type}; the layer was made for {num_types}"
            raise ValueError(f"{name}: expected types in [0, {num_types}), got {got}")


def _groups(present: list[int], counts: list[int], order: Tensor | None) -> list[Group]:
    groups, begin = [], 0
    for kind, count in zip(present, counts):
        place = slice(begin, begin + count)
        rows: Rows = place if order is None else order[place]
        groups.append(Group(kind, rows, rows))
        begin += count
    return groups


def typed_matmul(x: Tensor, weight: Tensor, groups: list[Group], num_rows: int) -> Tensor:
    """out[write, h] = x[read, h] @ weight[type, h] for each group; the groups write every row once.

    x: [N, H, D_in].  weight: [T, H, D_in, D_out].  Returns [num_rows, H, D_out]. Gathered rows exist for one
    group at a time, in backward too. Differentiable any number of times; deterministic.
    """
    x, weight = under_autocast(x, weight)
    # While a compiler traces backward the grad mode is on, which `rules.apply` would take for create_graph.
    if torch.compiler.is_compiling() or _eager.transformed(x, weight):
        return _plain_matmul(x, weight, groups, num_rows)
    return rules.apply(_TypedMatmul(groups, num_rows), x, weight)


def _plain_matmul(x: Tensor, weight: Tensor, groups: list[Group], num_rows: int) -> Tensor:
    """`typed_matmul` in operations that torch differentiates any number of times, in either mode."""
    parts = [torch.matmul(_take(x, g.read).transpose(0, 1), weight[g.type]).transpose(0, 1) for g in groups]
    if not parts:  # an empty product, so that the gradients are zero, not None
        return torch.matmul(x[:0].transpose(0, 1), weight[0]).transpose(0, 1)
    if len(parts) == 1 and isinstance(groups[0].write, slice):  # the group's rows are all rows
        return parts[0]
    rows = torch.arange(num_rows, device=x.device)
    place = torch.empty_like(rows)
    place[torch.cat([rows[g.write] for g in groups])] = rows
    return torch.cat(parts).index_select(0, place)


@dataclass(slots=True, eq=False)
class _TypedMatmul(Rule):
    """Computes `typed_matmul` of x and weight."""

    groups: list[Group]
    num_rows: int

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(self.num_rows, weight.shape[1], weight.shape[3])
        for t, read, write in self.groups:
            part = _take(x, read).transpose(0, 1)
            if isinstance(write, slice):
                torch.bmm(part, weight[t], out=out[write].transpose(0, 1))
            else:
                out.index_copy_(0, write, torch.bmm(part, weight[t]).transpose(0, 1))
        return out

    def gradients(self, need, saved, grad):
        x, weight = saved
        if torch.is_grad_enabled():  # backward was called with create_graph
            _, pull = torch.func.vjp(lambda *ends: _plain_matmul(*ends, self.groups, len(grad)), x, weight)
            return tuple(g if n else None for g, n in zip(pull(grad), need))
        grad_x = torch.zeros_like(x) if need[0] else None
        of_types: dict[int, Tensor] = {}
        for t, read, write in self.groups:
            part = _take(grad, write).transpose(0, 1)
            if need[1]:
                of_types[t] = _outer_sum(_take(x, read), part)
            if grad_x is None:
                continue
            if isinstance(read, slice):  # no other group reads these rows, so that nothing is to be added
                torch.bmm(part, weight[t].mT, out=grad_x[read].transpose(0, 1))
            else:
                part = torch.bmm(part, weight[t].mT).transpose(0, 1)
                grad_x.index_add_(0, read, part.contiguous())  # contiguous, because index_add_ is slow else
        if not need[1]:
            return grad_x, None
        none = torch.zeros_like(weight[0])
        return grad_x, torch.stack([of_types.get(t, none) for t in range(len(weight))])


_RUN = 1024  # the number of rows of one product in `_outer_sum`


def _outer_sum(x: Tensor, y: Tensor) -> Tensor:
    """sum_r x[r, h] y[h, r]^T: x [R, H, D], y [H, R, K], result [H, D, K].

    On a GPU a product with such small results runs as one thread block per head. So the rows are divided into
    runs of _RUN rows, whose products are computed in parallel and added up.
    """
    rows, heads, dim = x.shape
    if x.device.type == "cpu" or rows < 4 * _RUN:
        return torch.matmul(x.permute(1, 2, 0), y)
    whole = rows // _RUN * _RUN
    runs = x[:whole].reshape(-1, _RUN, heads, dim).permute(0, 2, 3, 1)
    parts = torch.matmul(runs, y[:, :whole].reshape(heads, -1, _RUN, y.shape[2]).transpose(0, 1))
    total = parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
    return (total + torch.matmul(x[whole:].permute(1, 2, 0), y[:, whole:])).to(x.dtype)


def _take(x: Tensor, rows: Rows) -> Tensor:
    # index_select is several times faster than indexing.
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


# ---- the maps as operators, while torch.compile records ---------------------------------------------------
# The types' values are not known then. The operators group the rows by type when they run, as eager calls do.


def is_recorded(types: Tensor | None = None) -> bool:
    """Whether torch.compile records, or these types are on the device meta: they have no values. An exporter
    has the types' values, as it has a graph's."""
    if types is not None and types.is_meta:
        return True
    return torch.compiler.is_dynamo_compiling() and not is_exporting()


def _matmul_of_types(x: Tensor, weight: Tensor, types: Tensor) -> Tensor:
    groups = groups_of(types, len(weight))
    return _TypedMatmul(groups, len(x)).forward(x.unsqueeze(1), weight.unsqueeze(1)).squeeze(1)


def _outer_of_types(x: Tensor, y: Tensor, types: Tensor, num_types: int) -> Tensor:
    found = x.new_zeros(num_types, x.shape[1], y.shape[1])
    for kind, rows, _ in groups_of(types, num_types):
        found[kind] = _outer_sum(_take(x, rows).unsqueeze(1), _take(y, rows).unsqueeze(0)).squeeze(0)
    return found


_matmul = python_operator(
    "typed_matmul",
    "(Tensor x, Tensor weight, Tensor types) -> Tensor",
    _matmul_of_types,
    lambda x, weight, types: x.new_empty(x.shape[0], weight.shape[2]),
    torch.Tag.cudagraph_unsafe,  # for a new tensor of types it waits for the GPU
    autograd=True,
)
_outer = python_operator(
    "typed_outer",
    "(Tensor x, Tensor y, Tensor types, SymInt num_types) -> Tensor",
    _outer_of_types,
    lambda x, y, types, num_types: x.new_empty(num_types, x.shape[1], y.shape[1]),
    torch.Tag.cudagraph_unsafe,
    autograd=True,
)


def _save(ctx, inputs, output):
    first, second, ctx.types, *_ = inputs
    ctx.save_for_backward(first, second)


def _backward_of_matmul(ctx, grad):
    x, weight = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad[:2]
    return (
        _matmul(grad, weight.mT, ctx.types) if need_x else None,
        _outer(x, grad, ctx.types, len(weight)) if need_weight else None,
        None,
    )


library.register_autograd(_matmul, _backward_of_matmul, setup_context=_save)


def typed_linear(x: Tensor, weight: Tensor, types: Tensor, name: str) -> Tensor:
    """x[n, s] @ weight[types[n]], ``[N, S, D_out]``, also while a compiler records.

    x: ``[N, S, D_in]``.  weight: ``[T, D_in, D_out]``.  Raises as :func:`groups_of`, which gets ``name``.
    """
    if is_recorded(types):
        x, weight = under_autocast(x, weight)
        return torch.stack([_matmul(part, weight, types) for part in x.unbind(1)], 1)
    groups = groups_of(types, len(weight), name)
    return typed_matmul(x, weight.unsqueeze(1).expand(-1, x.shape[1], -1, -1), groups, len(x))


class TypedLinear(nn.Module):
    r"""x W_t for a row x of type t: ``dgl.nn.TypedLinear`` without regularizer.

    Args:
        in_size: size of a row.
        out_size: size of a row of the output.
        num_types: number of types.
    """

    def __init__(self, in_size: int, out_size: int, num_types: int):
        super().__init__()
        self.in_size = in_size
        self.out_size = out_size
        self.num_types = num_types
        self.W = nn.Parameter(torch.empty(num_types, in_size, out_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(in_size)."""
        bound = 1 / math.sqrt(self.in_size)
        nn.init.uniform_(self.W, -bound, bound)

    def forward(self, x: Tensor, x_type: Tensor, sorted_by_type: bool = False) -> Tensor:
        """Apply the map.

        Args:
            x: ``[N, *, in_size]``.
            x_type: integers ``[N]``.
            sorted_by_type: has no meaning here; whether the types are sorted is found out once per tensor.

        Returns:
            ``[N, *, out_size]``.

        Raises:
            TypeError, ValueError: ``x_type`` is not as described.
        """
        check_types(x_type, "x_type", len(x))
        rows = x.reshape(len(x), x.shape[1:-1].numel(), x.shape[-1])
        return typed_linear(rows, self.W, x_type, "x_type").view(*x.shape[:-1], self.out_size)

    def extra_repr(self) -> str:
        return f"in_size={self.in_size}, out_size={self.out_size}, num_types={self.num_types}"
