"""Maps along the edges of a graph (products, sums, gathered rows), each defined once for every path.

An `EdgeMap` says how the map is computed on a Graph, in plain operations, and which shape its result has.
Each map is linear in its tensors, so that its gradients are other maps: they may be differentiated any number
of times. `apply` chooses among the paths; while a compiler records, a map is an operator on a traced graph.

**Products of the edges' features with rows of nodes.** Terms of edges in key and value consist of them.

There are two kinds of features. Those that all heads share, ``[E, d]``, are multiplied by three operators
(csrc/core/edge_terms.h): `edge_dot`, `edge_sum` and `edge_outer`. Each is linear in both arguments, and its
gradients are the other two. Features of each head, ``[E, H, D]``, are rows of sources of the graph that leads
from each edge to its destination; the same three products are sddmm and spmm on it. `dot`,
`total` and `outer` take either kind.

In the docstrings e is an edge into node i, and h a head; acc is the accumulation type of a tensor's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph import Graph, GraphPart, RangedGraph
from ..graph.derived import edges_as_sources
from ..runtime import fake_kernels, rules
from ..runtime import ops as _ops
from ..runtime import torch_internals as internals
from ..runtime.eager import in_plain_operations, transformed
from ..runtime.ops import acc_type
from ..runtime.rules import Rule, rows_at
from . import by_index, compiler_graph, operators
from . import plain as _plain
from .argument_checks import Checker, for_device, refuse_transforms_of_shared_graphs, without_padding
from .compiler_graph import EdgeList, Traced, as_traced


class EdgeMap(NamedTuple):
    """A map along edges. Its functions take (graph, *tensors, *numbers). ``gradients`` has a function for
    each tensor, which takes (graph, grad, *tensors, *numbers), or without ``saves`` (graph, grad,
    *numbers)."""

    name: str  # its operators on traced graphs are edge_<name> and graph_<name>
    tensors: str  # the tensors in these operators' schema
    numbers: str  # the other arguments in that schema: numbers and flags
    run: Callable[..., Tensor]  # computes the map on a Graph
    plain: Callable[..., Tensor]  # computes it in PyTorch's operations, on any graph with an ``edge_index``
    empty: Callable[..., Tensor]  # for a compiler: an uninitialised result, from the graph's sizes
    gradients: tuple[Callable[..., Tensor], ...]  # for each tensor, the function that computes its gradient
    saves: bool = True  # whether the gradients depend on the tensors, which are then saved for backward
    of_edges: bool = False  # whether the result has a row per edge
    #: A function of tensors and numbers: (heads, width, dtype), by which compiled code finds the plan of the
    #: map's operator in csrc/torch/planned.h. None: there is no such operator. plan: `PlanKey.layer`.
    shape: Callable[..., tuple[Any, Any, torch.dtype]] | None = None
    plan: str = compiler_graph.OF_EDGES


@dataclass(slots=True, eq=False)
class _Mapped(Rule):
    """A map on one graph, which may be a traced one."""

    map: EdgeMap
    graph: Any
    numbers: tuple

    def forward(self, *tensors):
        graph = self.graph
        if type(graph) is Traced:
            if self.map.shape is None:
                run = _ops.operator(f"{graph.family}_{self.map.name}")
                return run(*tensors, *graph, *self.numbers)
            shape = self.map.shape(*tensors, *self.numbers)
            # Products of rows have plans for both directions, so that forward and backward share one.
            of_rows = self.map.plan == compiler_graph.OF_ROWS
            key = compiler_graph.PlanKey(*shape, self.map.plan, "auto", True, of_rows)
            return compiler_graph.place_of(graph, key, tensors[0]).call(
                self.map.name, *tensors, *self.numbers
            )
        return self.map.run(graph, *tensors, *self.numbers)

    def saved(self, tensors, result):
        return tensors if self.map.saves else ()

    def gradients(self, need, saved, grad):
        graph, numbers = self.graph, self.numbers
        return tuple(
            gradient(graph, grad, *saved, *numbers) if needed else None
            for gradient, needed in zip(self.map.gradients, need)
        )


def apply(edge_map: EdgeMap, graph: Any, tensors: tuple[Tensor, ...], *numbers: Any) -> Tensor:
    """The map's result. graph: a Graph, an EdgeList or, in gradients, a Traced."""
    graph = compiler_graph.on_meta(compiler_graph.for_compiler(graph), tensors[0])
    plain = in_plain_operations()
    if isinstance(graph, (EdgeList, Traced)) and not plain:
        traced = graph if isinstance(graph, Traced) else as_traced(graph)
        return _ops.operator(f"traced_{edge_map.name}")(*tensors, *traced, *numbers)
    if plain or transformed(*tensors):
        return edge_map.plain(graph, *tensors, *numbers)
    return rules.apply(_Mapped(edge_map, graph, numbers), *tensors)


def define(edge_map: EdgeMap) -> EdgeMap:
    """Defines the map's operators on traced graphs."""
    count = len(edge_map.gradients)
    end = count + len(Traced._fields)

    def kernel(*args):
        graph = compiler_graph.find(*args[count:end])
        with internals.BelowAutograd():
            result = edge_map.run(graph, *args[:count], *args[end:]).contiguous()
        return compiler_graph.in_use(graph.edge_mask, result) if edge_map.of_edges else result

    def fake(*args):
        return edge_map.empty(Traced(*args[count:end]), *args[:count], *args[end:])

    def fake_of_plan(plan, num_dst, num_edges, *args):
        return edge_map.empty(Traced(None, 0, 0, num_dst, False, num_edges), *args)

    def call(*args):
        rule = _Mapped(edge_map, args[count], args[count + 1 :])
        return compiler_graph.by_rule(rule, *args[:count])

    schema = f"({edge_map.tensors}, {compiler_graph.TRACED}, {edge_map.numbers}) -> Tensor"
    compiler_graph.define_traced(edge_map.name, schema, call)
    if edge_map.shape is None:
        compiler_graph.define(edge_map.name, schema, kernel, fake)
    else:
        arguments = f"{edge_map.tensors}, {edge_map.numbers}"
        compiler_graph.define_planned(edge_map.name, arguments, "Tensor", fake_of_plan)
    return edge_map


# ---- products along edges, sddmm and spmm, whose gradients are each other ----------------------------------

_SDDMM = define(
    EdgeMap(
        "sddmm", "Tensor rows, Tensor feat", "bool reverse",
        run=operators.sddmm,
        shape=lambda rows, feat, *_: (*feat.shape[1:], feat.dtype),
        plan=compiler_graph.OF_ROWS,
        plain=lambda graph, rows, feat, reverse: _plain.sddmm(_plain.ends_of(graph, reverse), rows, feat),
        empty=lambda graph, rows, feat, reverse: feat.new_empty(graph.num_edges, feat.shape[1]),
        gradients=(
            lambda graph, grad, rows, feat, reverse: spmm(graph, grad, feat, reverse),
            lambda graph, grad, rows, feat, reverse: spmm(graph, grad, rows, not reverse),
        ),
    )
)  # fmt: skip
_SPMM = define(
    EdgeMap(
        "spmm", "Tensor weight, Tensor feat", "bool reverse, SymInt num_rows",
        run=lambda graph, weight, feat, reverse, num_rows: operators.spmm(graph, weight, feat, reverse),
        shape=lambda weight, feat, *_: (*feat.shape[1:], feat.dtype),
        plan=compiler_graph.OF_ROWS,
        plain=lambda graph, weight, feat, reverse, num_rows: _plain.spmm(
            _plain.ends_of(graph, reverse), weight, feat
        ),
        empty=lambda graph, weight, feat, reverse, num_rows: feat.new_empty(num_rows, *feat.shape[1:]),
        gradients=(
            lambda graph, grad, weight, feat, reverse, num_rows: sddmm(graph, grad, feat, reverse),
            lambda graph, grad, weight, feat, reverse, num_rows: spmm(graph, weight, grad, not reverse),
        ),
    )
)  # fmt: skip


def sddmm(graph, rows, feat, reverse: bool = False):
    """<rows[i], feat[j]> of each edge [E, H]. rows belong to destinations, or with ``reverse`` to sources."""
    if isinstance(graph, RangedGraph):
        return graph.sddmm(sddmm, rows, feat, reverse)
    return apply(_SDDMM, *_on_one_graph(graph, rows, feat), reverse)


def spmm(graph, weight, feat, reverse: bool = False):
    """sum_j weight_ij feat[j] of each row i: a destination, or with ``reverse`` a source."""
    if isinstance(graph, RangedGraph):
        return graph.spmm(spmm, weight, feat, reverse)
    graph, tensors = _on_one_graph(graph, weight, feat)
    return apply(_SPMM, graph, tensors, reverse, graph.num_src if reverse else graph.num_dst)


def _on_one_graph(graph, first, feat):
    """(graph, tensors): a shared graph is replaced by a Graph, and feat gets the rows of all sources of this
    process's edges."""
    if isinstance(graph, GraphPart):
        refuse_transforms_of_shared_graphs(first, feat)
        graph, (feat,) = graph.gathered(feat)
    return graph, (first, feat)


# ---- rows of the edges' sources or destinations, and sums of edges' rows over nodes -----------------------


def by_edges(graph: Any) -> Any:
    """``edges_as_sources`` of the graph, also while a compiler records."""
    graph = compiler_graph.for_compiler(graph)
    return compiler_graph.by_edges(graph) if isinstance(graph, EdgeList) else edges_as_sources(graph)


def _sum(graph: Graph, rows: Tensor, reverse: bool) -> Tensor:
    if by_index.takes_of(graph, rows):
        return by_index.sums_of_edges(graph, rows, reverse)
    if rows.shape[1:].numel() == 0:
        return rows.new_zeros(graph.num_src if reverse else graph.num_dst, *rows.shape[1:])
    flat = rows.unsqueeze(1) if rows.dim() == 1 else rows.flatten(1)
    (values,) = for_device(Checker("sum_of_edges", graph, "rows", rows), flat.unsqueeze(1))
    one = rows.new_ones(1, 1).expand(len(rows), 1)
    sums = spmm(edges_as_sources(graph, reverse), one, values)
    return without_padding(sums, flat.shape[1]).reshape(-1, *rows.shape[1:])


def prepared_sum(graph: Graph, columns: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """`sum_of_edges` of ``[E, columns]`` on a GPU, for one that is called often: all but the operator is done
    here. None where columns need padding. Not differentiable."""
    if not columns or columns * dtype.itemsize % 16:
        return None
    edges = edges_as_sources(graph)
    one = torch.ones(1, 1, dtype=dtype, device=graph.device).expand(graph.num_edges, 1)
    like = one.unsqueeze(2).expand(-1, 1, columns)
    args, spmm_op = _ops.product_args(edges, like, False), _ops.operator("spmm")
    return lambda rows: _ops.call(spmm_op, one, rows.unsqueeze(1), *args, edges.num_dst).squeeze(1)


def _sum_in_tensors(graph: Any, rows: Tensor, reverse: bool) -> Tensor:
    ends, acc = _plain.ends_of(graph, reverse), acc_type(rows.dtype)
    out = rows.new_zeros(ends.num_dst, *rows.shape[1:], dtype=acc)
    return out.index_add(0, ends.edge_index[1], rows.to(acc)).to(rows.dtype)


_SUM = define(
    EdgeMap(
        "edge_rows_sum", "Tensor x", "bool reverse", saves=False,
        run=_sum,
        plain=_sum_in_tensors,
        empty=lambda graph, x, reverse: x.new_empty(
            graph.num_src if reverse else graph.num_dst, *x.shape[1:]
        ),
        gradients=(lambda graph, grad, reverse: _rows(graph, grad, reverse),),
    )
)  # fmt: skip
_ROWS = define(
    EdgeMap(
        "edge_rows", "Tensor x", "bool sources", saves=False,
        run=lambda graph, x, sources: x.index_select(0, graph.edge_index[0 if sources else 1]),
        plain=lambda graph, x, sources: rows_at(x, _plain.ends_of(graph).edge_index[0 if sources else 1]),
        empty=lambda graph, x, sources: x.new_empty(graph.num_edges, *x.shape[1:]),
        gradients=(lambda graph, grad, sources: sum_of_edges(graph, grad.contiguous(), sources),),
        of_edges=True,
    )
)  # fmt: skip


def sum_of_edges(graph: Any, rows: Tensor, reverse: bool = False) -> Tensor:
    """``[N, ...]``: the sums of edges' rows ``[E, ...]`` over the edges into each node, or with ``reverse``
    out of each."""
    recorded = torch.compiler.is_compiling() or in_plain_operations() or rows.is_meta
    if isinstance(graph, Graph) and not recorded:
        return _sum(graph, rows, reverse)  # whose functions are differentiable, so that no rule is needed
    return apply(_SUM, graph, (rows,), reverse)


def _rows(graph: Any, x: Tensor, sources: bool) -> Tensor:
    if by_index.takes_of(graph, x) and by_index.is_few(graph.num_edges * x.shape[1:].numel()):
        return x.index_select(0, graph.edge_index[0 if sources else 1])
    return apply(_ROWS, graph, (x,), sources)


def rows_of_sources(graph: Graph, x: Tensor) -> Tensor:
    """x[j] for every edge j -> i: ``[N_src, ...]`` -> ``[E, ...]``. The gradient is deterministic, unlike
    that of indexing."""
    return _rows(graph, x, True)


def rows_of_destinations(graph: Any, x: Tensor) -> Tensor:
    """x[i] for every edge j -> i: ``[N_dst, ...]`` -> ``[E, ...]``. The gradient is deterministic."""
    return _rows(graph, x, False)


# ---- products of the edges' features with rows of nodes ---------------------------------------------------


# ---- features that heads share ---------------------------------------------------------------------------


def _dot_in_tensors(graph, rows: Tensor, attr: Tensor, scale: float) -> Tensor:
    acc = _ops.acc_type(rows.dtype)
    ends = rows[:, :, : attr.shape[1]].to(acc)[_plain.ends_of(graph).edge_index[1]]
    return torch.einsum("ehc,ec->eh", ends, attr.to(acc)) * scale


def _shared_sum_in_tensors(graph, weight: Tensor, attr: Tensor, width: int) -> Tensor:
    terms = torch.einsum("eh,ec->ehc", weight, attr.to(weight.dtype))
    terms = torch.nn.functional.pad(terms, (0, width - attr.shape[1]))
    found = terms.new_zeros(graph.num_dst, *terms.shape[1:])
    return found.index_add(0, _plain.ends_of(graph).edge_index[1], terms).to(attr.dtype)


def _outer_in_tensors(graph, weight: Tensor, rows: Tensor, dim: int, scale: float) -> Tensor:
    ends = rows[:, :, :dim].to(weight.dtype)[_plain.ends_of(graph).edge_index[1]]
    return (torch.einsum("eh,ehc->ec", weight, ends) * scale).to(rows.dtype)


_DOT = define(
    EdgeMap(
        "edge_dot", "Tensor rows, Tensor attr", "float scale", of_edges=True,
        run=operators.edge_dot,
        shape=lambda rows, attr, scale: (*rows.shape[1:], rows.dtype),
        plain=_dot_in_tensors,
        empty=lambda graph, rows, attr, scale: fake_kernels.edge_dot_fake(rows, graph.num_edges),
        gradients=(
            lambda graph, grad, rows, attr, scale: edge_sum(graph, grad, attr, rows.shape[2]) * scale,
            lambda graph, grad, rows, attr, scale: edge_outer(graph, grad, rows, attr.shape[1], scale),
        ),
    )
)  # fmt: skip
_SHARED_SUM = define(
    EdgeMap(
        "edge_sum", "Tensor weight, Tensor attr", "SymInt width",
        run=operators.edge_sum,
        shape=lambda weight, attr, width: (weight.shape[1], width, attr.dtype),
        plain=_shared_sum_in_tensors,
        empty=lambda graph, weight, attr, width: attr.new_empty(graph.num_dst, weight.shape[1], width),
        gradients=(
            lambda graph, grad, weight, attr, width: edge_dot(graph, grad, attr),
            lambda graph, grad, weight, attr, width: edge_outer(graph, weight, grad, attr.shape[1]),
        ),
    )
)  # fmt: skip
_OUTER = define(
    EdgeMap(
        "edge_outer", "Tensor weight, Tensor rows", "SymInt dim, float scale", of_edges=True,
        run=operators.edge_outer,
        shape=lambda weight, rows, dim, scale: (*rows.shape[1:], rows.dtype),
        plain=_outer_in_tensors,
        empty=lambda graph, weight, rows, dim, scale: rows.new_empty(graph.num_edges, dim),
        gradients=(
            lambda graph, grad, weight, rows, dim, scale: edge_dot(graph, rows, grad, scale),
            lambda graph, grad, weight, rows, dim, scale: edge_sum(graph, weight, grad, rows.shape[2])
            * scale,
        ),
    )
)  # fmt: skip


def _operand(graph):
    """The graph as one Graph. These maps read only destinations and edges, so that no rows of other
    processes' sources are fetched for a shared graph."""
    return graph.as_one() if isinstance(graph, GraphPart) else graph


def edge_dot(graph, rows: Tensor, attr: Tensor, scale: float = 1.0) -> Tensor:
    """[E, H] acc: scale rows[i, h] . attr[e] of each edge e into i. rows: [N, H, width]; attr: [E, d]. Here
    and below, columns of rows beyond the first d are not read."""
    return apply(_DOT, _operand(graph), (rows, attr), scale)


def edge_sum(graph, weight: Tensor, attr: Tensor, width: int) -> Tensor:
    """[N, H, width]: the sum of weight[e, h] attr[e] over the edges e into i; columns beyond d are 0. weight:
    acc."""
    return apply(_SHARED_SUM, _operand(graph), (weight, attr), width)


def edge_outer(graph, weight: Tensor, rows: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    """[E, d]: scale sum_h weight[e, h] rows[i, h] of each edge e into i. weight: acc."""
    return apply(_OUTER, _operand(graph), (weight, rows), dim, scale)


def sum_of_features(graph, attention: Tensor, attr: Tensor) -> Tensor:
    """[N, H, d]: the sum of attention[e, h] attr[e] over the edges e into i. attention: of any dtype."""
    width = row_width(attr.shape[1], attr)
    found = edge_sum(graph, _ops.as_type(attention, _ops.acc_type(attr.dtype)), attr, width)
    return found[:, :, : attr.shape[1]] if width > attr.shape[1] else found


def row_width(size: int, x: Tensor) -> int:
    """The columns of a row of ``size`` features, with padding: CUDA's kernels load 16 bytes at a time."""
    step = 16 // x.dtype.itemsize if x.is_cuda else 1
    return -(-size // step) * step


# ---- features of either kind -----------------------------------------------------------------------------


def dot(graph, rows: Tensor, feat: Tensor, scale: float = 1.0) -> Tensor:
    """[E, H] acc: scale rows[i, h] . feat[e, h] of each edge e into i. feat: [E, d], or [E, H, width]."""
    if feat.dim() == 2:
        return edge_dot(graph, rows, feat, scale)
    found = _ops.as_type(sddmm(by_edges(_operand(graph)), rows.contiguous(), feat), _ops.acc_type(rows.dtype))
    return found if scale == 1 else found * scale


def total(graph, weight: Tensor, feat: Tensor, width: int) -> Tensor:
    """[N, H, width]: the sum of weight[e, h] feat[e, h] over the edges e into i. weight: acc. feat: as in
    `dot`; features of each head have this width."""
    if feat.dim() == 2:
        return edge_sum(graph, weight, feat, width)
    return spmm(by_edges(_operand(graph)), _ops.as_type(weight, feat.dtype), feat)


def outer(graph, weight: Tensor, rows: Tensor, feat: Tensor, scale: float = 1.0) -> Tensor:
    """The gradient of feat in `dot` and `total`, of the shape of feat: scale sum_h weight[e, h] rows[i, h],
    or for features of each head without the sum. weight: acc. For eager calls only."""
    if feat.dim() == 2:
        return edge_outer(graph, weight, rows, feat.shape[1], scale)
    weight = _ops.as_type(weight if scale == 1 else weight * scale, feat.dtype)
    return spmm(edges_as_sources(_operand(graph)), weight, rows.contiguous(), reverse=True)


# ---- products of nodes' rows with a projection: W^T x, W x and x y^T -----------------------------------


def onto_features(x: Tensor, proj: Tensor | None) -> Tensor:
    """W^T x: [N, H, D] x [H, D, width] -> [N, H, width], a view whose heads may lie apart; x if there is no
    W."""
    return x if proj is None else _by_head(x, proj).transpose(0, 1)


def _by_head(x: Tensor, w: Tensor) -> Tensor:
    """[N, H, a] x [H, a, b] -> [H, N, b]."""
    if not (_splits(x) and torch.is_grad_enabled()):
        return torch.bmm(x.transpose(0, 1), w)
    # A factor for each chunk, so that autograd sums the gradient over each chunk by itself. Chunks are
    # copies, which take as long as the products: where autograd does not record, they would serve nothing.
    chunks = _chunks(x)
    count = chunks.shape[0] // w.shape[0]
    products = torch.bmm(chunks, w.expand(count, *w.shape).flatten(0, 1))
    return products.unflatten(0, (count, w.shape[0])).transpose(0, 1).flatten(1, 2)[:, : x.shape[0]]


def onto_features_beside(x: Tensor, proj: Tensor, y: Tensor, proj_y: Tensor) -> tuple[Tensor, Tensor]:
    """W^T x (W: proj) and U^T y (U: proj_y) as heads [N, 2 H, width]; and U^T y alone, a view of it."""
    (heads, _, width), rows = proj.shape, len(x)
    both = x.new_empty(2 * heads, rows, width)
    torch.bmm(x.transpose(0, 1), proj, out=both[:heads])
    torch.bmm(y.transpose(0, 1), proj_y, out=both[heads:])
    return both.transpose(0, 1), both[heads:].transpose(0, 1)


def add_projection(out: Tensor, x: Tensor, proj: Tensor | None, factor: float = 1.0) -> None:
    """out += factor W x, in place."""
    if proj is None:
        out.add_(x, alpha=factor)
        return
    out.transpose(0, 1).baddbmm_(x.transpose(0, 1), proj.transpose(1, 2), alpha=factor)


def with_projection(out: Tensor, x: Tensor, proj: Tensor | None) -> Tensor:
    """out + W x, rounded like `add_projection`, so that out is the same from `_composed` and `_Separate`."""
    if proj is None:
        return out + x
    if _splits(x) and torch.is_grad_enabled():
        both = out.transpose(0, 1) + _by_head(x, proj.transpose(1, 2))
    else:
        both = torch.baddbmm(out.transpose(0, 1), x.transpose(0, 1), proj.transpose(1, 2))
    return both.transpose(0, 1).contiguous()


def grad_proj(query: Tensor, query_sums: Tensor, grad: Tensor, grad_sums: Tensor, scale: float) -> Tensor:
    """The gradient of a projection that key and value share: sum_i scale query_i query_sums_i^T + grad_i
    grad_sums_i^T, [H, D, width]. query_sums, grad_sums [N, H, width]: the sums of the edges' features,
    weighted by the scores' gradients and by the attention."""
    if query.is_cuda and query.dtype != torch.float64 and len(query):
        return operators.projection_grad(query, query_sums, grad, grad_sums, scale)
    acc = _ops.acc_type(query.dtype)
    of_query = products_of_rows(query, query_sums).to(acc).mul_(scale)
    return of_query.add_(products_of_rows(grad, grad_sums)).to(query.dtype)


def products_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """sum_i x_i y_i^T, [H, D, width]."""
    return _in_chunks(x, y) if _splits(x) else torch.bmm(x.permute(1, 2, 0), y.transpose(0, 1))


def _splits(x: Tensor) -> bool:
    """Whether sums over all rows are split. In float32 cuBLAS gives each head's product to one block of
    threads, which takes 1.5 ms for 42,000 rows of 16 heads where the attention takes 0.2."""
    return x.is_cuda and x.dtype == torch.float32


def _in_chunks(x: Tensor, y: Tensor) -> Tensor:
    """`products_of_rows`, summed over each chunk by itself."""
    products = torch.bmm(_chunks(x).transpose(1, 2), _chunks(y))
    return products.unflatten(0, (products.shape[0] // x.shape[1], x.shape[1])).sum(0)


def _chunks(x: Tensor) -> Tensor:
    """[N, H, a] in chunks of at most 512 rows, the last one with zeros: [chunks H, rows, a]. There is no
    branch on the number of rows, so that compiled code serves all."""
    rows = compiler_graph.smaller(512, x.shape[0])
    count = (x.shape[0] + 511) // 512
    full = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows * count - x.shape[0]))
    return full.view(count, rows, *x.shape[1:]).transpose(1, 2).flatten(0, 1)
