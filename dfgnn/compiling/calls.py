"""The functions that a rewritten graph calls in place of what the user wrote.

They take tensors as the user's code had them, and what was found about their dimensions as plain numbers: a
`Spec` is a tensor with the steps that make rows of it (`normal_forms.Rows`). They run while AOTAutograd
traces, where they become dfgnn's operators and views, and as they are where a graph runs without a compiler.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from .. import functional
from ..engine import compiler_graph
from ..engine.compiler_graph import EdgeList, kept
from ..engine.edge_maps import by_edges
from ..graph import in_cuda_graphs
from ..graph.cache import graph_of
from ..runtime import ops as _ops
from ..runtime import torch_internals as internals
from ..runtime.attention_options import EdgeTerm, Projected
from ..runtime.tracing import is_plain
from .operations import found_true

F = TypeVar("F", bound=Callable[..., Tensor])
#: A tensor, and the steps that make rows of it.
Spec: TypeAlias = tuple[Tensor, tuple]
#: Factors or terms, whose product or sum is meant.
Specs: TypeAlias = tuple[Spec, ...]
#: The sizes of rows of messages, the dimensions among them that are heads, and steps on the summed rows.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple]
#: The user's segment sum: the tensor into which it sums, along which dimension, what filled that tensor
#: before (None: other values), and the rows that it sums.
Summed: TypeAlias = tuple[Tensor, int, float | None, Layout]
#: One more score of every softmax: a number, and another that a tensor holds.
Sink: TypeAlias = tuple[float, Tensor | None] | None
#: The user's softmax: weights that multiply its results, its sink, and the probability of dropout.
Softmaxed: TypeAlias = tuple[Specs, Sink, float]


#: On a GPU, the most elements of terms of edges where fewer launches count more than memory: projections are
#: computed ahead up to it, more than in layers (nn/fused/traced.py), as Inductor needs no launches besides
#: the product for it.
MOST_UNFOLDED = 2**26

# ---- edges -------------------------------------------------------------------------------------------------


def edge_pair(first: Tensor, first_row: int, second: Tensor, second_row: int) -> Tensor:
    """`compiler_graph.edge_pair`, or within CUDA graphs, whose replays have to read the given tensors, the
    same in plain operations."""
    given = first, first_row, second, second_row
    if in_cuda_graphs.is_recorded(first):
        return compiler_graph.stacked(*given)
    made = compiler_graph.edge_pair(*given)
    return _made_of(made, first, second)


def segments(offsets: Tensor, count: int) -> Tensor:
    """`compiler_graph.segments`, within CUDA graphs in plain operations."""
    if in_cuda_graphs.is_recorded(offsets):
        return compiler_graph.segments_of(offsets, count)
    return _made_of(compiler_graph.segments(offsets, count), offsets)


def _made_of(made: Tensor, *given: Tensor) -> Tensor:
    """An index with the user's tensors that it is made of (see `_of_edges`)."""
    if is_plain(made):
        found = [y for x in given for y in getattr(x, "_dfgnn_given", (x,))]
        made._dfgnn_given = found  # type: ignore[attr-defined]
    return made


def _of_edges(call: F) -> F:
    """A function of an ``edge_index``, whose backward raises where that was modified since, as PyTorch's
    gathers and sums do."""

    @functools.wraps(call)
    def checked(edge_index: Tensor, *args: Any) -> Tensor:
        out = call(edge_index, *args)
        if out.requires_grad and is_plain(edge_index) and not torch.compiler.is_compiling():
            given = getattr(edge_index, "_dfgnn_given", (edge_index,))
            if not any(map(Tensor.is_inference, given)):
                out.register_hook(functools.partial(_check_unmodified, [(x, x._version) for x in given]))
        return out

    return checked  # type: ignore[return-value]


def _check_unmodified(given: list[tuple[Tensor, int]], grad: Tensor) -> None:
    for x, version in given:
        if x._version != version:
            raise RuntimeError(
                "dfgnn: edge_index: expected the edges of forward, got a tensor that has been modified by an "
                f"inplace operation: it is at version {x._version}, expected version {version}; modify a copy"
            )


def _graph(edge_index: Tensor, num_src: Any, num_dst: Any) -> Any:
    """The graph that dfgnn's functions take."""
    if is_plain(edge_index) and not torch.compiler.is_compiling():
        return graph_of(kept(edge_index), num_src, num_dst)[0]
    return EdgeList(edge_index, num_src, num_dst)


@contextlib.contextmanager
def _ours(x: Tensor):
    """The state in which dfgnn's functions are called: for a compiler where x has no numbers, and without
    autocast, whose casts the graph holds already."""
    with contextlib.ExitStack() as stack:
        if not is_plain(x):
            stack.enter_context(internals.compiling())
        if torch.is_autocast_enabled(x.device.type):
            stack.enter_context(torch.autocast(x.device.type, enabled=False))
        yield


# ---- rows --------------------------------------------------------------------------------------------------


def rows(spec: Spec) -> Tensor:
    """[rows, *shape]: the steps of `normal_forms.Rows` on its tensor."""
    x, steps = spec
    for step, given in steps:
        if step == "move":
            x = x.movedim(given, 0)
        elif step == "shape":
            x = x.reshape(x.shape[0], *given)
        elif step == "constant":  # one row, alike for all
            x = x.reshape(1, *given)
        elif step == "permute":
            x = x.permute(0, *(k + 1 for k in given))
        elif step == "times":
            x = x * given
        elif step == "expand":
            x = x.reshape(x.shape[0], *[1] * (len(given) - x.dim() + 1), *x.shape[1:]).expand(-1, *given)
        else:
            x = x.to(given)
    return x


def product(specs: Sequence[Spec]) -> Tensor:
    return functools.reduce(operator.mul, map(rows, specs))


def total(specs: Sequence[Spec]) -> Tensor:
    return functools.reduce(operator.add, map(rows, specs))


def _order(layout: Layout) -> tuple[list[int], int, int]:
    """(heads and then columns among the dimensions of rows, their sizes)."""
    shape, heads, _ = layout
    columns = [k for k in range(len(shape)) if k not in heads]
    return [*heads, *columns], math.prod(shape[k] for k in heads), math.prod(shape[k] for k in columns)


def _by_head(x: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The values of the rows as ``[rows, H, D]``: heads and columns in the order of the layout."""
    order, heads, columns = _order(layout)
    x = _ops.as_type(x, dtype).expand(-1, *layout[0]).permute(0, *(k + 1 for k in order))
    return x.reshape(x.shape[0], heads, columns)


def _scores(x: Tensor, layout: Layout) -> Tensor:
    """The scores ``[E, H]``, from rows that do not differ along columns."""
    shape, heads, _ = layout
    sizes = [shape[k] if k in heads else 1 for k in range(len(shape))]
    return x.expand(-1, *sizes).reshape(x.shape[0], math.prod(sizes))


def _as_summed(out: Tensor, summed: Summed) -> Tensor:
    """[N, H, D] as the user's segment sum."""
    like, dim, fill, layout = summed
    shape, _, steps = layout
    order, _, _ = _order(layout)
    out = out.reshape(out.shape[0], *(shape[k] for k in order))
    out = out.permute(0, *(order.index(k) + 1 for k in range(len(order))))
    # Contiguous as the user's sum, of which a view may be taken: rows may be padded for a GPU's kernels.
    out = _ops.as_type(rows((out, steps)), like.dtype).movedim(0, dim).contiguous()
    if fill is None:
        return like + out
    return out + fill if fill else out


def _options(layout: Layout, softmax: Softmaxed, value: Tensor) -> dict[str, Any]:
    weights, sink, dropout_p = softmax
    options = dict(dropout_p=dropout_p, **_sink(sink, value, value.shape[1:2]))
    if weights:
        options["weight"] = _known(_scores(product(weights), layout), value)
    return options


def _sink(sink: Sink, like: Tensor, sizes: Sequence[int]) -> dict[str, Any]:
    """The option of the functions that this sink is."""
    if sink is None:
        return {}
    acc, (number, more) = _ops.acc_type(like.dtype), sink
    made = torch.full(sizes, number, dtype=acc, device=like.device)
    return {"sink": made if more is None else made + more}


def _known(x: Tensor, value: Tensor) -> Tensor:
    """An edge tensor in one of the dtypes that go with value's."""
    acc = _ops.acc_type(value.dtype)
    return x if x.dtype in (value.dtype, acc) else x.to(acc)


# ---- attention ---------------------------------------------------------------------------------------------


@_of_edges
def score_attention(
    edge_index: Tensor, summed: Summed, softmax: Softmaxed, score: Spec, value: Specs, at_edges: bool
) -> Tensor:
    """Attention of given scores: the softmax, dropout and sum of the user's code. value: factors, of nodes or
    of edges."""
    like, dim, _, layout = summed
    with _ours(like):
        values = _by_head(product(value), layout, like.dtype)
        num_dst = like.shape[dim]
        graph = _graph(edge_index, num_dst if at_edges else values.shape[0], num_dst)
        graph = by_edges(graph) if at_edges else graph
        scores = _known(_scores(rows(score), layout), values)
        out = functional.score_attention(graph, scores, values, **_options(layout, softmax, values))
        return _as_summed(out, summed)


@_of_edges
def gat_attention(
    edge_index: Tensor, summed: Summed, softmax: Softmaxed,
    terms: tuple[Specs, Specs, Specs], slope: float, value: Specs, value_feat: Specs,
) -> Tensor:  # fmt: skip
    """`score_attention` of LeakyReLU(terms of sources, destinations and edges). value_feat: the value's edge
    terms."""
    like, dim, _, layout = summed
    with _ours(like):
        values = _by_head(product(value), layout, like.dtype)
        graph = _graph(edge_index, values.shape[0], like.shape[dim])
        of_value = _by_head(total(value_feat), layout, like.dtype) if value_feat else None
        src, dst, term = (_known(_scores(total(x), layout), values) if x else None for x in terms)
        out = functional.gat_attention(
            graph, values, src, dst, negative_slope=slope, edge=EdgeTerm(value=of_value, score=term),
            **_options(layout, softmax, values),
        )  # fmt: skip
        return _as_summed(out, summed)


@_of_edges
def gatv2_attention(
    edge_index: Tensor, summed: Summed, softmax: Softmaxed,
    terms: tuple[Specs, Specs, Specs], att: Specs, slope: float, scale: float,
) -> Tensor:  # fmt: skip
    """`score_attention` of scale * att . LeakyReLU(terms of sources, destinations and edges), whose values
    are the sources' terms."""
    like, dim, _, layout = summed
    *of_nodes, of_edges = terms
    with _ours(like):
        src, dst = (_by_head(total(x), layout, like.dtype) for x in of_nodes)
        graph = _graph(edge_index, src.shape[0], like.shape[dim])
        vector = _by_head(product(att), layout, like.dtype)[0]
        out = functional.gatv2_attention(
            graph, dst, src, vector * scale if scale != 1 else vector, negative_slope=slope,
            edge=EdgeTerm(_by_head(total(of_edges), layout, like.dtype)) if of_edges else None,
            **_options(layout, softmax, src),
        )  # fmt: skip
        return _as_summed(out, summed)


@_of_edges
def dot_attention(
    edge_index: Tensor, summed: Summed, softmax: Softmaxed,
    ends: tuple[Specs, Specs, Layout], scale: float, bias: Specs, value: Specs, edges: tuple[tuple, tuple],
) -> Tensor:  # fmt: skip
    """`score_attention` of scale * q . (k + key's edge term) + bias, with values v + value's edge term. ends:
    q, k and their layout. An edge term is (), or ("feat", terms), or ("proj", attributes, weight, bias)."""
    like, dim, _, layout = summed
    *nodes, key_layout = ends
    with _ours(like):
        queries, keys = (_by_head(product(x), key_layout, like.dtype) for x in nodes)
        values = _by_head(product(value), layout, like.dtype)
        graph = _graph(edge_index, keys.shape[0], like.shape[dim])
        edge = _edge_terms(edges, (key_layout, layout), like.dtype, values.shape[1])
        of_edges = _known(_scores(total(bias), layout), values) if bias else None
        if edge is not None and isinstance(edge.key, Tensor) and edge.value is not None and in_scores(*edge):
            rows = queries.index_select(0, edge_index[1])
            of_key = scale * (rows * edge.key).sum(-1, dtype=_ops.acc_type(like.dtype))
            of_edges = of_key if of_edges is None else of_key + of_edges
            edge = EdgeTerm(value=edge.value)
        out = functional.dot_attention(
            graph, queries, keys, values, scale=scale, bias=of_edges, edge=edge,
            **_options(layout, softmax, values),
        )  # fmt: skip
        return _as_summed(out, summed)


def _edge_terms(
    edges: tuple[tuple, tuple], layouts: tuple[Layout, Layout], dtype: torch.dtype, heads: int
) -> EdgeTerm | None:
    """The edges' terms of `functional.dot_attention`, in the key and in the value."""
    key_feat, value_feat = edges
    given = [x for x in edges if x]
    if not given:
        return None
    projected = all(x[0] == "proj" for x in given) and len({id(x[1]) for x in given}) == 1
    projected = projected and all(folds(x[1], heads, x[2].shape[0]) for x in given)
    attr = _ops.as_type(given[0][1], dtype) if projected else None

    def term(x, of: Layout) -> Tensor | Projected:
        if attr is not None:
            _, _, weight, bias = x
            bias = None if bias is None else _ops.as_type(bias, dtype)
            return Projected(attr, _ops.as_type(weight, dtype), bias)
        if x[0] == "proj":
            # Sizes are given: without edges -1 could stand for any.
            sizes = heads, x[2].shape[0] // heads
            return _by_head(torch.nn.functional.linear(*x[1:]).unflatten(1, sizes), (sizes, (0,), ()), dtype)
        return _by_head(total(x[1]), of, dtype)

    key = term(key_feat, layouts[0]) if key_feat else None
    if key is not None and value_feat and _same_terms(key_feat, value_feat):
        return EdgeTerm(key, key)
    return EdgeTerm(key, term(value_feat, layouts[1]) if value_feat else None)


def folds(attr: Tensor, heads: int, width: int) -> bool:
    """Whether `functional.dot_attention` folds the projection of attributes to [E, width] into the attention.
    On a GPU that saves memory, but has more launches, and takes longer where attributes are more than a
    head's columns."""
    if not attr.is_cuda:
        return True
    return attr.shape[1] * heads <= width and found_true(attr.shape[0] * width > MOST_UNFOLDED)


def in_scores(key: Any, value: Any, *_: Any) -> bool:
    """Whether the products of queries with the key's own term of edges are left to the compiler, in kernels
    with what computes the term. On a GPU that has fewer launches than `functional.dot_attention` of two
    different terms, which takes less memory."""
    small = key is not value and key.is_cuda and not is_plain(key)
    return small and found_true(key.numel() <= MOST_UNFOLDED)


def _same_terms(a: tuple, b: tuple) -> bool:
    if a[0] != b[0]:
        return False
    if a[0] == "proj":
        return all(x is y for x, y in zip(a[1:], b[1:]))
    return len(a[1]) == len(b[1]) and all(x[0] is y[0] and x[1] == y[1] for x, y in zip(a[1], b[1]))


# ---- softmax and sums alone -------------------------------------------------------------------------------


@_of_edges
def edge_softmax(edge_index: Tensor, like: Tensor, dim: int, sink: Sink, score: Tensor, dtype: Any) -> Tensor:
    """The user's segment softmax, edges along dim. like: a tensor with a row per segment."""
    with _ours(score):
        by_edge = score.movedim(dim, 0)
        graph = _graph(edge_index, like.shape[dim], like.shape[dim])
        out = functional.edge_softmax(graph, by_edge, **_sink(sink, score, by_edge.shape[1:]))
        return _ops.as_type(out, dtype).movedim(0, dim)


@_of_edges
def weighted_sum(edge_index: Tensor, summed: Summed, weights: Specs, value: Specs) -> Tensor:
    """The user's segment sum of weights of edges times values of sources."""
    like, dim, _, layout = summed
    with _ours(like):
        values = _by_head(product(value), layout, like.dtype)
        graph = _graph(edge_index, values.shape[0], like.shape[dim])
        if weights:
            by_edge = _ops.as_type(_scores(product(weights), layout), like.dtype)
        else:
            by_edge = values.new_ones(edge_index.shape[1])
        return _as_summed(functional.spmm(graph, by_edge, values), summed)


def segment_sum(base: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """``base.index_add(dim, index, src)`` in float32. A compiler adds one number after the other in the given
    dtype, where a sum of ones stops at 256 (bfloat16) or 2,048 (float16)."""
    return base.float().index_add(dim, index, src.float()).to(base.dtype)
