"""Tensors with a row per edge as products and sums of rows.

Such a tensor has its edges along one dimension. `Rows` describes it as steps (views and casts) from a node's
tensor to one whose edges come first, ``[E, *shape]``. Since views of the other dimensions commute with
gathering rows, the same steps make of a gathered tensor's source the rows at nodes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .normal_forms import Forms, adds_dimensions, order_of
from .operations import arguments, name, same, shape, value


class Rows(NamedTuple):
    """A tensor with a row per edge: `steps` applied to the tensor of `node` give ``[E, *shape]``.

    steps: ("move", dim): that dimension becomes the first; ("shape", sizes): reshape of the others;
    ("permute", order): of the others; ("expand", sizes); ("to", dtype). constant: the tensor is alike for all
    edges, and ("constant", sizes) makes one row of it.
    """

    node: Node
    dim: int
    steps: tuple
    shape: tuple[int, ...]
    constant: bool = False
    dropped: tuple[float, Node] | None = None  # the dropout within the steps, and its node

    def then(self, step: tuple, to: tuple[int, ...]) -> Rows:
        return self._replace(steps=(*self.steps, step), shape=to)


class Product(NamedTuple):
    """scale * the product of factors, whose shapes broadcast to `shape`; then `steps` on the rows."""

    factors: tuple[Rows, ...]
    shape: tuple[int, ...]
    scale: float = 1.0
    steps: tuple = ()


class Products(Forms):
    """The normal forms of one graph's nodes; also writes tensors of edges as products of factors."""

    def __init__(self, written: set[Any]):
        super().__init__(written)
        #: The nodes of whose tensors a dropout is part of the product.
        self.softmaxes: set[Node] = set()

    def product(self, node: Any, dim: int) -> Product | None:
        """A tensor with edges along ``dim`` as a product. None if another dimension's size is symbolic."""
        sizes = _static(shape(node), dim)
        if sizes is None or self.is_written(node):
            return None
        called, given = name(node), arguments(node)
        inner = given.get("input")
        if called in ("mul", "div"):
            found = self._multiplied(node, dim, sizes, given)
        elif called in ("contiguous", "clone"):
            found = self.product(inner, dim)
        elif called == "dropout":
            found = self._dropped(node, given, dim)
        elif called in _CASTS and _casts_only(node):
            found = self._cast(node, inner, dim)
        elif called in _VIEWS and isinstance(value(inner), Tensor):
            found = self._viewed(node, dim, sizes, called, given)
        else:
            found = None
        return self._single(node, dim, sizes) if found is None else found

    def _single(self, node: Node, dim: int, sizes: tuple[int, ...]) -> Product:
        steps = (("move", dim),) if dim else ()
        return Product((Rows(node, dim, steps, sizes),), sizes)

    def _multiplied(self, node: Node, dim: int, sizes: tuple[int, ...], given: dict) -> Product | None:
        factors: list[Rows] = []
        scale = 1.0
        x: Any
        operands: Any = given.get("input"), given.get("other")
        if name(node) == "div":
            if (
                given.get("rounding_mode") is not None
                or not isinstance(operands[1], (int, float))
                or operands[1] == 0
            ):
                return None
            operands = operands[0], 1 / operands[1]
        for x in operands:
            if isinstance(x, (int, float)):
                scale *= x
                continue
            if not isinstance(value(x), Tensor) or self.is_written(x) or not value(x).is_floating_point():
                return None
            missing = len(shape(node)) - len(shape(x))
            place = dim - missing
            if place < 0 or same(shape(x)[place], 1):  # alike for all edges
                rest = _static(shape(x), place)
                if rest is None:
                    return None
                padded = (1,) * (missing - (place < 0)) + rest
                steps = (("constant", padded),)
                factors.append(Rows(x, place, steps, padded, True))
                continue
            found = self.product(x, place)
            if found is None:
                return None
            if found.steps:
                found = self._single(x, place, _static(shape(x), place))  # type: ignore[arg-type]
            scale *= found.scale
            padded = (1,) * missing + found.shape
            for factor in found.factors:
                # Missing dimensions lie before the edges', and so before all others.
                own = (1,) * (len(padded) - len(factor.shape)) + factor.shape
                if own != factor.shape:
                    factor = factor.then(("constant" if factor.constant else "shape", own), own)
                factors.append(factor)
        return Product(tuple(factors), sizes, scale)

    def terms(self, node: Node, dim: int) -> list[Rows] | None:
        """A tensor with edges along ``dim`` as a sum of rows of its shape; None if the size of another
        dimension is symbolic."""
        found = self.product(node, dim)
        if found is None or found.steps or found.scale != 1 or len(found.factors) != 1:
            return None if found is None else list(self._single(node, dim, found.shape).factors)
        (factor,) = found.factors
        given = arguments(factor.node)
        adds = name(factor.node) == "add" and given.get("alpha", 1) == 1 and not factor.dropped
        operands = (given.get("input"), given.get("other")) if adds else ()
        if not operands or not all(isinstance(value(x), Tensor) for x in operands):
            return [factor]
        here: Any = _static(shape(factor.node), factor.dim)
        made: list[Rows] = []
        x: Any
        for x in operands:
            place = factor.dim - (len(shape(factor.node)) - len(shape(x)))
            if place < 0 or not same(shape(x)[place], shape(factor.node)[factor.dim]):
                return [factor]
            found_terms = self.terms(x, place)
            if found_terms is None:
                return [factor]
            for term in found_terms:
                if term.shape != here:
                    padded = (1,) * (len(here) - len(term.shape)) + term.shape
                    term = term.then(("shape", padded), padded).then(("expand", here), here)
                made.append(term)
        own = (("move", factor.dim),) if factor.dim else ()
        return [t._replace(steps=(*t.steps, *factor.steps[len(own) :]), shape=factor.shape) for t in made]

    def _dropped(self, node: Node, given: dict, dim: int) -> Product | None:
        p, training = given.get("p", 0.5), given.get("training", True)
        found = self.product(given.get("input"), dim)
        if found is None or not isinstance(p, (int, float)) or not isinstance(training, bool):
            return None
        if not training or p == 0:
            return found
        if len(found.factors) != 1 or found.steps or found.scale != 1 or not p < 1:
            return None
        (factor,) = found.factors
        if factor.node not in self.softmaxes or factor.dropped or factor.shape != found.shape:
            return None
        return found._replace(factors=(factor._replace(dropped=(float(p), node)),))

    def _cast(self, node: Node, inner: Any, dim: int) -> Product | None:
        found = self.product(inner, dim)
        if found is None:
            return None
        dtype = value(node).dtype
        if torch.finfo(dtype).bits >= torch.finfo(value(inner).dtype).bits and not found.steps:
            # A product of wider factors is at least as exact.
            factors = tuple(factor.then(("to", dtype), factor.shape) for factor in found.factors)
            return found._replace(factors=factors)
        return found._replace(steps=(*found.steps, ("to", dtype)))

    def _viewed(self, node: Node, dim: int, sizes: tuple, called: str, given: dict) -> Product | None:
        inner = given["input"]
        view = _view(called, given, shape(inner), shape(node), dim)
        if view is None:
            return None
        place, step = view
        found = self.product(inner, place)
        if found is None:
            return None
        if step is None:
            return found
        if len(found.factors) != 1 or found.steps:
            each = None if found.steps else _of_each(step, found, sizes)
            if each is None:
                return found._replace(steps=(*found.steps, step))
            return found._replace(factors=each, shape=sizes)
        (factor,) = found.factors
        if step[0] == "expand":  # left to the product, in which it makes no difference
            padded = (1,) * (len(sizes) - len(factor.shape)) + factor.shape
            step, sizes_of_factor = ("shape", padded), padded
        elif step[0] == "permute":
            sizes_of_factor = tuple(factor.shape[k] for k in step[1])
        else:
            factor = (
                factor.then(("expand", found.shape), found.shape) if factor.shape != found.shape else factor
            )
            sizes_of_factor = sizes
        return found._replace(factors=(factor.then(step, sizes_of_factor),), shape=sizes)


def _of_each(step: tuple, found: Product, sizes: tuple[int, ...]) -> tuple[Rows, ...] | None:
    """A view of a product as views of its factors, if it adds or drops dimensions of size 1."""
    if any(factor.constant for factor in found.factors):
        return None
    places = [k for k, size in enumerate(found.shape) if size != 1]
    if step[0] != "shape" or [found.shape[k] for k in places] != [size for size in sizes if size != 1]:
        return None
    made = []
    for factor in found.factors:
        kept = iter(factor.shape[k] for k in places)
        own = tuple(1 if size == 1 else next(kept) for size in sizes)
        made.append(factor.then(("shape", own), own))
    return tuple(made)


_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as"}
_VIEWS = {
    "reshape", "view_as", "flatten", "unflatten", "unsqueeze", "squeeze", "getitem", "transpose", "t",
    "permute", "movedim", "expand", "expand_as",
}  # fmt: skip


def _static(sizes: tuple, dim: int) -> tuple[int, ...] | None:
    """The sizes without that of ``dim``; None if one is symbolic."""
    rest = tuple(size for k, size in enumerate(sizes) if k != dim)
    return rest if all(type(size) is int for size in rest) else None


def _casts_only(node: Node) -> bool:
    given = arguments(node)
    inner = value(given.get("input"))
    plain = "more" not in given and not set(given) & {"memory_format", "layout", "device"}
    if not plain or not isinstance(inner, Tensor) or not inner.is_floating_point():
        return False
    return value(node).is_floating_point() and value(node).device == inner.device


def _view(called: str, given: dict, before: tuple, after: tuple, dim: int) -> tuple[int, tuple | None] | None:
    """Returns (the edges' dimension before the view, the step that the view applies to rows), with None as
    the step if rows do not change. Returns None if the view is no such step. dim: the edges' dimension after
    it."""
    rank = len(before)
    if called in ("transpose", "t", "permute", "movedim"):
        order = order_of(called, given, rank)
        if order is None:
            return None
        here = order[dim]
        own = [k for k in range(rank) if k != here]
        moved = tuple(own.index(k) for k in order if k != here)
        return here, (("permute", moved) if moved != tuple(range(rank - 1)) else None)
    if called == "getitem" and not adds_dimensions(given["index"]):
        return None
    if called in ("expand", "expand_as"):
        here = dim - (len(after) - rank)
        if here < 0 or not same(before[here], after[dim]):
            return None
        rest = _static(after, dim)
        return None if rest is None else (here, ("expand", rest))
    rest = _static(after, dim)
    place: int | None = None
    if rest is None:
        return None
    lead = math.prod(after[:dim])
    for k in range(rank):
        others = _static(before, k)
        if others is None or not same(before[k], after[dim]):
            continue
        if math.prod(before[:k]) == lead and math.prod(others) == math.prod(rest):
            place = k
            break
    if place is None:
        return None
    return place, (("shape", rest) if rest != _static(before, place) else None)
