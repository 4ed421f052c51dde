"""Recognises attention in a graph: segment softmaxes, the weighted sums behind them, and what scores are.

A segment softmax is e / D[index] with e = exp(z) and D the segment sum of e. A number that is subtracted from
all scores of a segment cancels, so that it does not matter whether it is their maximum, with one exception: a
small number eps that is added to D vanishes by rounding if the sum is at least 1, which it is where the
segment's maximum was subtracted. Where nothing was subtracted, eps acts as one more score, log eps, in every
softmax: a sink. Where a number that is the same for all edges was subtracted, as the maximum of all scores,
the sink is log eps plus that number.

The division may also come after the weighted sum, of the segment sums of e v and of e.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .normal_forms import Gather, Index, Sum
from .operations import arguments, name, same, shape, value
from .products import Product, Products, Rows


class Softmax(NamedTuple):
    """node is the softmax of score over the edges of each segment, both with edges along dim."""

    node: Node
    score: Node
    dim: int
    at: Index
    like: Node  # a tensor with a row per segment along dim
    sink: tuple[float, Node | None] | None  # one more score of every softmax, the sum of these
    inner: tuple[Node, ...]  # the nodes that compute it
    maximum: Node | None  # what is subtracted from the score


class Refused(NamedTuple):
    """A softmax that is not rewritten."""

    node: Node
    reason: str


class WeightedSum(NamedTuple):
    """The segment sum of weights times values, whose rows broadcast to ``[E, *product.shape]``.

    node: the sum, or what divides it by the sum of weights. heads: the dimensions of product.shape along
    which weights differ; the others are columns.
    """

    node: Node
    sum: Sum
    product: Product
    softmax: Softmax | None
    own: Rows | None  # the rows of softmax
    weights: tuple[Rows, ...]  # the other factors without columns
    values: tuple[Rows, ...]  # those with columns, or alike for all edges
    gathered: Gather | None  # what the one value with rows of edges is gathered from; None: it is not
    heads: tuple[int, ...]


class Recogniser:
    """All softmaxes and weighted sums of a graph."""

    def __init__(self, nodes: list[Node], forms: Products):
        self.forms = forms
        self.nodes = nodes
        sums = [found for found in map(forms.sum, nodes) if found is not None]
        self.sums: dict[Node, Sum] = {found.node: found for found in sums}
        self.softmaxes: dict[Node, Softmax] = {}
        self.refused: list[Refused] = []
        for node in nodes:
            if name(node) == "div":
                found = self._softmax(node)
                if found is not None:
                    self.softmaxes[node] = found
        forms.softmaxes = set(self.softmaxes)
        divided = {w.sum.node: w for node in nodes if (w := self._divided(node)) is not None}
        of_sums = (divided.get(total.node) or self._weighted(total) for total in sums)
        self.weighted = [found for found in of_sums if found is not None]

    # ---- softmax -----------------------------------------------------------------------------------------

    def _softmax(self, node: Node) -> Softmax | None:
        forms, given = self.forms, arguments(node)
        above: Any
        below: Any
        above, below = given.get("input"), given.get("other")
        if given.get("rounding_mode") is not None or name(above) != "exp" or not isinstance(below, Node):
            return None
        inner = [node, above]
        below, eps, least = self._without_eps(below, inner)
        gathered = forms.gather(below)
        if gathered is None:
            if _is_of_segments(below, above):
                self._refuse(node, "what divides the exponentials is not gathered by an index")
            return None
        inner.append(below)
        source, more, floor = self._without_eps(gathered.source, inner)
        eps, least = eps + more, max(least, floor)
        dim = gathered.dim
        total = self.sums.get(source)
        if total is None or total.fill is None or forms.key(total.src) != forms.key(above):
            return self._refuse(node, "what divides the exponentials is not their own sum over segments")
        if (total.dim, total.at.key) != (dim, gathered.at.key):
            return self._refuse(
                node, "the exponentials are summed by another index than the one that divides"
            )
        if len(shape(node)) != len(shape(above)) or not all(map(same, shape(node), shape(above))):
            return self._refuse(node, "the sum of exponentials has other dimensions than they")
        inner.append(source)
        eps += total.fill
        score, maximum, shift = self._score(above, dim, gathered.at, inner, eps + least)
        if any(map(forms.is_written, (*inner, score))):
            return self._refuse(node, "a tensor of it is written to in place")
        if least > 0 and (maximum is None or eps > 0 or least > 1):
            return self._refuse(node, f"the sum is clamped to {least:g}, which changes the weights")
        if _changes_weights(eps, maximum, above):
            return self._refuse(node, f"{eps:g} is added to the sum, which changes the weights")
        sink = None if eps == 0 or maximum is not None else _sink(eps, shift)
        return Softmax(node, score, dim, gathered.at, source, sink, tuple(inner), maximum)

    def _without_eps(self, node: Any, inner: list[Node]) -> tuple[Any, float, float]:
        """(x, eps, least) if the node is x + eps, where least is 0, or x clamped from below to least, where
        eps is 0. Else (node, 0, 0)."""
        given = arguments(node) if isinstance(node, Node) else {}
        x, number = given.get("input"), given.get("other")
        if name(node) == "add" and given.get("alpha", 1) == 1:
            if isinstance(x, (int, float)):
                x, number = number, x
            if isinstance(x, Node) and isinstance(number, (int, float)):
                inner.append(node)
                return x, float(number), 0.0
        least = given.get("min")
        clamps = name(node) == "clamp_min" or (name(node) == "clamp" and given.get("max") is None)
        if clamps and isinstance(least, (int, float)):
            inner.append(node)
            return x, 0.0, float(least)
        return node, 0.0, 0.0

    def _score(
        self, exp: Node, dim: int, index: Index, inner: list[Node], eps: float
    ) -> tuple[Node, Node | None, Node | float]:
        """(score, maximum, shift) of exp(score - maximum - shift). maximum: the node with the maximum of each
        edge's segment, or None; shift: a number that is subtracted from all scores. Where exp(z) has no such
        form it is (z, None, 0). Without eps, anything that is the same for all edges of a segment cancels and
        may take the place of the maximum."""
        less = arguments(exp)["input"]
        given = arguments(less)
        score: Any
        most: Any
        score, most = given.get("input"), given.get("other")
        if name(less) != "sub" or not isinstance(score, Node) or given.get("alpha", 1) != 1:
            return less, None, 0
        if not all(map(same, shape(less), shape(score))) or len(shape(less)) != len(shape(score)):
            return less, None, 0
        number = not isinstance(most, Node) or (isinstance(value(most), Tensor) and shape(most) == ())
        gathered = self.forms.gather(most)
        alike = number or _is_one(shape(most), len(shape(less)), dim)
        if gathered is not None and (gathered.dim, gathered.at.key) == (dim, index.key):
            alike = True
        elif not alike or (eps > 0 and not number):
            return less, None, 0
        if eps == 0 or number:
            inner.append(less)
            maximum = most if eps == 0 and isinstance(most, Node) else None
            return score, maximum, 0 if eps == 0 else most
        assert gathered is not None
        found = self.forms.maximum(_attached(gathered.source))
        if found is None or found[1] != dim or found[2].key != index.key:
            return less, None, 0
        if self.forms.key(_attached(found[0])) != self.forms.key(_attached(score)):
            return less, None, 0
        inner.append(less)
        return score, most, 0

    def _refuse(self, node: Node, reason: str) -> Any:
        self.refused.append(Refused(node, reason))

    # ---- weighted sums -----------------------------------------------------------------------------------

    def _weighted(
        self, total: Sum, own: Rows | None = None, softmax: Softmax | None = None, node: Node | None = None
    ) -> WeightedSum | None:
        """The weighted sum that ``total`` computes: the segment sum of a product that has a softmax as a
        factor (``softmax``, if it is given), or rows gathered from nodes. None if it is no such sum."""
        product = self.forms.product(total.src, total.dim)
        if product is None:
            return None
        moving = [f for f in product.factors if not f.constant]
        if softmax is None:
            found = next(((f, s) for f in moving if (s := self._softmax_of(f, total)) is not None), None)
            own, softmax = (None, None) if found is None else found
        rest = list(moving)
        if own is not None:
            rest.remove(own)  # once, where it is a factor twice
        rank = range(len(product.shape))
        gathers = {f: g for f in rest if (g := self.forms.gather(f.node)) is not None and g.dim == f.dim}
        if own is not None:
            heads = tuple(k for k in rank if own.shape[k] != 1)
        else:
            scales = [f for f in rest if f not in gathers]
            heads = tuple(k for k in rank if any(f.shape[k] != 1 for f in scales))
            if len(gathers) != 1 or (len(heads) == len(rank) and math.prod(product.shape) > 1):
                return None  # no rows of nodes, or weights that differ in every column
        columns = [k for k in rank if k not in heads]
        weights = [f for f in rest if all(f.shape[k] == 1 for k in columns) and (columns or f not in gathers)]
        if own is None:
            weights = [f for f in weights if f not in gathers]
        values = [f for f in product.factors if f.constant or (f in rest and f not in weights)]
        with_rows = [f for f in values if not f.constant]
        if not with_rows:
            return None
        gathered = gathers.get(with_rows[0]) if len(with_rows) == 1 else None
        node = total.node if node is None else node
        return WeightedSum(node, total, product, softmax, own, tuple(weights), tuple(values), gathered, heads)

    def _softmax_of(self, factor: Rows, total: Sum) -> Softmax | None:
        """The softmax that this factor of a product is, if it is one over the segments of the sum; else
        None."""
        found = self.softmaxes.get(factor.node)
        # Where the index is valid for both, it makes no difference how many segments each has.
        right = found is not None and found.dim == factor.dim and found.at.key == total.at.key
        return found if right else None

    def _divided(self, node: Node) -> WeightedSum | None:
        """The weighted sum if the node divides after it has summed, else None: S(e v) / (S(e) + eps), where S
        is the segment sum and e = exp(z). eps is required, because without it segments that are empty are
        NaN, which dfgnn's attention does not compute."""
        given = arguments(node)
        above, below = given.get("input"), given.get("other")
        total = self.sums.get(above) if isinstance(above, Node) else None
        if name(node) != "div" or total is None or not isinstance(below, Node) or total.fill != 0:
            return None
        if given.get("rounding_mode") is not None or len(above.users) != 1:  # type: ignore[union-attr]
            return None
        inner = [node, total.node]
        divisor, eps, least = self._without_eps(below, inner)
        below_product = self.forms.product(divisor, total.dim - (len(shape(node)) - len(shape(divisor))))
        product = self.forms.product(total.src, total.dim)
        if below_product is None or product is None or len(below_product.factors) != 1 or below_product.steps:
            return None
        (rows,) = below_product.factors
        summed, more, floor = self._without_eps(rows.node, inner)
        eps, least = eps + more, max(least, floor)
        norm = self.sums.get(summed)
        if norm is None or norm.fill != 0 or name(norm.src) != "exp" or below_product.scale != 1:
            return None
        own = next((f for f in product.factors if f.node is norm.src and not f.constant), None)
        if own is None or product.steps or (norm.dim, norm.at.key) != (own.dim, total.at.key):
            return None
        padded = (1,) * (len(product.shape) - len(rows.shape)) + rows.shape
        if padded != own.shape or own.steps != rows.steps or norm.dim != rows.dim:
            return None
        inner += [norm.node, norm.src]
        score, maximum, shift = self._score(norm.src, norm.dim, norm.at, inner, eps + least)
        if least > 0 or eps == 0:
            return self._refuse(node, "rows without edges are 0 divided by 0 in it, and have to stay NaN")
        if _changes_weights(eps, maximum, norm.src):
            return self._refuse(node, f"{eps:g} is added to the sum, which changes the weights")
        sink = None if maximum is not None else _sink(eps, shift)
        softmax = Softmax(norm.src, score, norm.dim, norm.at, norm.node, sink, tuple(inner), maximum)
        return self._weighted(total, own, softmax, node)


def _changes_weights(eps: float, maximum: Node | None, exponentials: Node) -> bool:
    """Whether eps, added to a sum of exponentials, changes the weights in a way that is no sink. Where the
    maximum was subtracted, the sum is at least 1, and an eps below the rounding of 1 changes nothing."""
    most = math.inf if maximum is None else torch.finfo(value(exponentials).dtype).eps
    return not 0 <= eps <= most or math.isinf(eps)


def _sink(eps: float, shift: Node | float) -> tuple[float, Node | None]:
    """The sink that has the effect of eps where shift is subtracted from all scores."""
    return (math.log(eps), shift) if isinstance(shift, Node) else (math.log(eps) + shift, None)


def _attached(node: Node) -> Node:
    """The node from which ``node`` is made by operations that change no number that matters here: detach,
    copies, and zeros written in place of the maxima of empty segments."""
    while True:
        given = arguments(node)
        if name(node) in ("detach", "clone", "contiguous"):
            node = given["input"]
        elif name(node) == "where" and given["input"] == 0 and name(given["condition"]) == "isinf":
            if arguments(given["condition"])["input"] is not given["other"]:
                return node
            node = given["other"]
        else:
            return node


def _is_one(sizes: tuple, rank: int, dim: int) -> bool:
    """Whether a tensor that broadcasts to this rank has the same values everywhere along dim."""
    place = dim - (rank - len(sizes))
    return place < 0 or same(sizes[place], 1)


def _is_of_segments(node: Node, source: Node) -> bool:
    """Whether operations on segments compute node from source, but written in a way that has no normal
    form."""
    names, found, todo = set(), {node}, [(node, 0)]
    while todo:
        here, depth = todo.pop()
        names.add(name(here))
        for x in here.all_input_nodes if depth < 8 and here is not source else ():
            if x not in found:
                found.add(x)
                todo.append((x, depth + 1))
    return source in found and not names.isdisjoint(_OF_SEGMENTS)


_OF_SEGMENTS = {
    "segment_reduce", "repeat_interleave", "scatter_reduce", "scatter_add", "scatter", "index_add",
    "index_put",
}  # fmt: skip
