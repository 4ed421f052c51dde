"""What the scores and the values of a recognised attention are made of, and the call that computes it.

The forms, the most special first: dot products with terms of the edge, GATv2, GAT, and scores that the rest
of the graph computes. A score and a value consist of terms: rows gathered at the sources or at the
destinations, which dfgnn's operators take at the nodes, and tensors of edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.fx import Node

from . import calls
from .normal_forms import Gather, Index, Sum
from .operations import arguments, found_equal, name, shape
from .products import Product, Products, Rows
from .recognise import WeightedSum


class Call(NamedTuple):
    """The call that computes an attention. args: those behind the ones that all calls share (calls.py)."""

    function: Callable[..., Any]
    args: tuple
    form: str
    src: Index  # the sources


class _Parts(NamedTuple):
    """The terms of a sum by where their rows lie, as specs (calls.py)."""

    src: tuple = ()
    dst: tuple = ()
    edges: tuple = ()


def call_for(forms: Products, w: WeightedSum, may: Callable[[Call], bool] = lambda call: True) -> Call | None:
    """The most specialised call that fits and that `may` allows."""
    return next((call for call in _calls(forms, w) if may(call)), None)


def _calls(forms: Products, w: WeightedSum) -> Iterator[Call]:
    assert w.softmax is not None and w.own is not None
    value = _value(forms, w)
    score = w.softmax.score, w.own.steps
    if value is not None:
        # The heads of a score without permuted dimensions lie as those of the value.
        if not any(step in ("permute", "expand") for step, _ in w.own.steps):
            for form in (_dot, _gatv2, _gat):
                found = form(forms, w, value)
                if found is not None:
                    yield found
        if value.edges:
            args: tuple = ((), (), (score,)), 1.0, value.src, value.edges
            yield Call(calls.gat_attention, args, "score_attention, values at nodes and edges", value.at)
        else:
            args = score, value.src, False
            yield Call(calls.score_attention, args, "score_attention, values at nodes", value.at)
    args = score, tuple((f.node, f.steps) for f in w.values), True
    yield Call(calls.score_attention, args, "score_attention, values at edges", w.sum.at)


# ---- values ------------------------------------------------------------------------------------------------


class _Value(NamedTuple):
    """Values of sources: a product of specs, and terms of edges that are added to it."""

    src: tuple
    edges: tuple
    at: Index
    count: Any  # the number of sources


def _value(forms: Products, w: WeightedSum) -> _Value | None:
    """The values; None if they are not rows of sources, with or without terms of edges."""
    if w.gathered is not None:
        specs = tuple((f.node if f.constant else w.gathered.source, f.steps) for f in w.values)
        return _Value(specs, (), w.gathered.at, _count(w.gathered))
    if len(w.values) != 1:
        return None
    (factor,) = w.values
    terms = _behind(forms.terms(factor.node, factor.dim), factor)
    gathers = [(t, g) for t in terms if (g := _gather(forms, t)) is not None]
    others = [g for _, g in gathers if g.at.key != w.sum.at.key]
    if len(others) != 1 or len(terms) < 2:
        return None
    found = _Value((), (), others[0].at, _count(others[0]))
    parts = _parts(forms, terms, found)
    return found._replace(src=parts.src, edges=parts.edges) if len(parts.src) == 1 else None


def _behind(terms: list[Rows] | None, factor: Rows) -> list[Rows]:
    """Terms of a factor's node with the factor's own steps behind theirs; [] where they are not all rows of
    the same shape."""
    own = factor.steps[1:] if factor.steps[:1] == (("move", factor.dim),) else factor.steps
    return [t._replace(steps=(*t.steps, *own), shape=factor.shape) for t in terms or []]


def _gather(forms: Products, rows: Rows) -> Gather | None:
    found = None if rows.constant else forms.gather(rows.node)
    return found if found is not None and found.dim == rows.dim else None


def _count(gathered: Gather) -> Any:
    """The number of nodes of which rows are gathered."""
    return shape(gathered.source)[gathered.dim]


def _of_destinations(forms: Products, rows: Rows, total: Sum) -> Gather | None:
    """What rows are gathered from, if these are the destinations."""
    found = _gather(forms, rows)
    if found is None or found.at.key != total.at.key:
        return None
    return found if found_equal(_count(found), shape(total.base)[total.dim]) else None


def _parts(forms: Products, terms: list[Rows], value: _Value, total: Sum | None = None) -> _Parts:
    """Terms that are rows of the sources that values come from, of destinations, and of edges."""
    made: dict[str, list] = {"src": [], "dst": [], "edges": []}
    for term in terms:
        gathered = _gather(forms, term)
        of_sources = gathered is not None and gathered.at.key == value.at.key
        if gathered is not None and of_sources and found_equal(_count(gathered), value.count):
            made["src"].append((gathered.source, term.steps))
        elif gathered is not None and total is not None and _of_destinations(forms, term, total) is not None:
            made["dst"].append((gathered.source, term.steps))
        else:
            made["edges"].append((term.node, term.steps))
    return _Parts(*(tuple(made[word]) for word in _Parts._fields))


# ---- scores ------------------------------------------------------------------------------------------------


def _gat(forms: Products, w: WeightedSum, value: _Value) -> Call | None:
    """LeakyReLU of terms of both ends and of edges."""
    assert w.softmax is not None and w.own is not None
    node, dim, slope = w.softmax.score, w.softmax.dim, 1.0
    product = forms.product(node, dim)
    if product is None or len(product.factors) != 1 or product.scale != 1 or product.steps:
        return None
    (factor,) = product.factors
    found = _slope(factor.node)
    if found is not None:
        slope, inner = found
        terms = _behind(forms.terms(inner, factor.dim), factor)
    else:
        terms = forms.terms(node, dim) or []
    parts = _parts(forms, terms, value, w.sum)
    if not parts.src and not parts.dst:
        return None
    own = w.own._replace(dim=dim)
    by_end = tuple(_with_steps(specs, own) for specs in parts)
    form = "gat_attention" + ", with terms of edges" * bool(parts.edges or value.edges)
    return Call(calls.gat_attention, (by_end, slope, value.src, value.edges), form, value.at)


def _with_steps(specs: tuple, own: Rows) -> tuple:
    """Specs of rows of a score with the steps that the softmax's rows take."""
    more = own.steps[1:] if own.steps[:1] == (("move", own.dim),) else own.steps
    return tuple((node, (*steps, *more)) for node, steps in specs)


def _slope(node: Node) -> tuple[float, Node] | None:
    """(slope, x) of a LeakyReLU."""
    given = arguments(node)
    slope = given.get("negative_slope", 0.01)
    if (
        name(node) != "leaky_relu"
        or not isinstance(slope, (int, float))
        or not isinstance(given["input"], Node)
    ):
        return None
    return float(slope), given["input"]


class _Contraction(NamedTuple):
    """scale * sum over the column of a product whose rows have this shape."""

    product: Product
    column: int
    scale: float

    @property
    def layout(self) -> tuple:
        rank = len(self.product.shape)
        return self.product.shape, tuple(k for k in range(rank) if k != self.column), ()

    @property
    def num_heads(self) -> int:
        return math.prod(size for k, size in enumerate(self.product.shape) if k != self.column)


def _contraction(forms: Products, node: Node, dim: int) -> _Contraction | None:
    """What a score is that is a sum over columns, times a number."""
    outer = forms.product(node, dim)
    if outer is None or len(outer.factors) != 1 or outer.steps:
        return None
    (factor,) = outer.factors
    if any(step in ("permute", "expand") for step, _ in factor.steps):
        return None
    total, given = factor.node, arguments(factor.node)
    if name(total) == "einsum":
        return _einsum(forms, total, factor, outer.scale)
    dims = given.get("dim")
    dims = dims[0] if isinstance(dims, (tuple, list)) and len(dims) == 1 else dims
    inner = given.get("input")
    if name(total) != "sum" or not isinstance(dims, int) or given.get("dtype") is not None:
        return None
    column = dims % len(shape(inner))
    place = factor.dim + (not given.get("keepdim", False) and factor.dim >= column)
    product = forms.product(inner, place)  # type: ignore[arg-type]
    if product is None or product.steps or place == column:
        return None
    return _Contraction(product, column - (column > place), outer.scale * product.scale)


def _einsum(forms: Products, node: Node, factor: Rows, scale: float) -> _Contraction | None:
    """ "ehd,ehd->eh" and the like."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    given, out = equation.replace(" ", "").split("->")
    words = given.split(",")
    if words[0] != words[1] or len(set(words[0])) != len(words[0]):
        return None
    columns = [k for k, letter in enumerate(words[0]) if letter not in out]
    if len(columns) != 1 or out != words[0].replace(words[0][columns[0]], ""):
        return None
    column = columns[0]
    place = factor.dim + (factor.dim >= column)
    products: list[Any] = [forms.product(x, place) for x in operands]  # type: ignore[arg-type]
    if any(p is None or p.steps for p in products) or products[0].shape != products[1].shape:
        return None
    both = Product((*products[0].factors, *products[1].factors), products[0].shape)
    for p in products:
        scale *= p.scale
    return _Contraction(both, column - (column > place), scale)


def _dot(forms: Products, w: WeightedSum, value: _Value) -> Call | None:
    """scale * q_i . (k_j + e) + bias."""
    assert w.softmax is not None and w.own is not None
    terms = forms.terms(w.softmax.score, w.softmax.dim) or []
    dots = [(t, c) for t in terms if (c := _contraction(forms, t.node, t.dim)) is not None]
    heads = math.prod(w.own.shape)
    if len(dots) != 1 or dots[0][1].num_heads != heads:
        return None
    term, found = dots[0]
    if any(step in ("permute", "expand") for step, _ in term.steps):
        return None
    moving = [f for f in found.product.factors if not f.constant]
    queries = [f for f in moving if _of_destinations(forms, f, w.sum) is not None]
    keys = [f for f in moving if f not in queries]
    if len(queries) != 1 or len(keys) != 1 or any(f.shape != found.product.shape for f in moving):
        return None
    (query,), (key,) = queries, keys
    of_key = _parts(forms, _behind(forms.terms(key.node, key.dim), key), value)
    if len(of_key.src) != 1:
        return None
    source = forms.gather(query.node).source  # type: ignore[union-attr]
    constants = tuple((f.node, f.steps) for f in found.product.factors if f.constant)
    own = w.own._replace(dim=w.softmax.dim)
    bias = _with_steps(tuple((t.node, t.steps) for t in terms if t is not term), own)
    value_layout = w.product.shape, w.heads
    ends = ((source, query.steps), *constants), of_key.src, found.layout
    edges = _feature(of_key.edges, found.layout[:2]), _feature(value.edges, value_layout)
    args = ends, found.scale, bias, value.src, edges
    form = "dot_attention" + ", with terms of edges" * bool(of_key.edges or value.edges or bias)
    return Call(calls.dot_attention, args, form, value.at)


def _feature(specs: tuple, layout: tuple) -> tuple:
    """Terms of edges as `calls.dot_attention` takes them: a projection of attributes, where heads come before
    columns, or any."""
    if not specs:
        return ()
    sizes, heads = layout
    ordered = heads == tuple(range(len(heads)))
    if len(specs) == 1 and ordered and name(specs[0][0]) == "linear":
        node, steps = specs[0]
        x, weight, *bias = node.args
        plain = all(step == "shape" for step, _ in steps) and not node.kwargs
        if plain and len(shape(x)) == 2 and shape(node)[1:] == (math.prod(sizes),):
            return "proj", x, weight, bias[0] if bias else None
    return "feat", specs


def _gatv2(forms: Products, w: WeightedSum, value: _Value) -> Call | None:
    """attn . LeakyReLU(x_j + x_i + e), with x_j as the values."""
    assert w.softmax is not None and w.own is not None
    found = _contraction(forms, w.softmax.score, w.softmax.dim)
    if found is None or found.num_heads != math.prod(w.own.shape) or value.edges or len(value.src) != 1:
        return None
    if found.layout[:2] != (w.product.shape, w.heads):
        return None
    moving = [f for f in found.product.factors if not f.constant]
    constants = tuple((f.node, f.steps) for f in found.product.factors if f.constant)
    slope = _slope(moving[0].node) if len(moving) == 1 else None
    if slope is None or not constants:
        return None
    terms = _behind(forms.terms(slope[1], moving[0].dim), moving[0])
    parts = _parts(forms, terms, value, w.sum)
    if len(parts.src) != 1 or len(parts.dst) != 1 or forms.key(parts.src[0][0]) != forms.key(value.src[0][0]):
        return None
    if parts.src[0][1] != value.src[0][1]:
        return None
    args = (parts.src, parts.dst, parts.edges), constants, slope[0], found.scale
    form = "gatv2_attention" + ", with terms of edges" * bool(parts.edges)
    return Call(calls.gatv2_attention, args, form, value.at)
