"""Checks the argument ``edge``, what edges add to keys, values and scores, and sorts it for the engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..runtime.arguments import FEAT_IN_KEY, FEAT_IN_VALUE, EdgeTerms
from ..runtime.attention_options import EdgeTerm, Projected
from ..runtime.eager import in_autocast
from .argument_checks import Checker

#: The places of an `EdgeTerm`, and what a function that lacks one says about it.
_INSTEAD = {
    "key": "EdgeTerm(score=...) is added to the score of both ends",
    "value": "return_attention=True and spmm over graph.edges_as_sources() add it to the result",
    "score": "bias is added to the score",
}


class EdgeSorted(NamedTuple):
    """How the engine takes the edges' terms of keys and values: either as one tensor of features that the
    attention operators add, or as terms that `edge_projection` computes, or not at all."""

    feat: Tensor | None = None  # [E, H, D], the operators' edge_feat
    flags: int = 0  # the bits FEAT_IN_KEY, FEAT_IN_VALUE: what feat is added to
    terms: EdgeTerms | None = None  # the terms that `edge_projection` computes
    key_bias: Tensor | None = None  # [H, D], to be added to the nodes' keys
    value_bias: Tensor | None = None  # [H, D], to be added to the nodes' values


def given_terms(check: Checker, edge: Any, places: tuple[str, ...]) -> EdgeTerm:
    """The argument, whose other places are None."""
    if not isinstance(edge, EdgeTerm):
        what = " or ".join(f"EdgeTerm({name}=...)" for name in places)
        both = "; EdgeTerm(x, x) adds x to keys and values" if "key" in places and "value" in places else ""
        raise check.error(TypeError, "edge", what, f"{type(edge).__name__}{both}")
    for name, x in edge._asdict().items():
        if x is not None and name not in places:
            raise check.error(ValueError, f"edge.{name}", "None", f"{type(x).__name__}; {_INSTEAD[name]}")
    return _cast(edge, check.dtype)


def _cast(edge: EdgeTerm, dtype: Any) -> EdgeTerm:
    """The terms with projections as autocast would cast the linear layer whose parameters they hold."""
    done: dict[int, Any] = {}

    def cast(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype:
            return done.setdefault(id(x), x.to(dtype))
        return x

    def term(x: Any) -> Any:
        if isinstance(x, Projected) and isinstance(x.attr, Tensor) and in_autocast(x.attr):
            return done.setdefault(id(x), Projected(*map(cast, x)))
        return x

    return EdgeTerm(*map(term, edge))


def check_term(check: Checker, name: str, x: Any, heads: int, size: int | None) -> None:
    """Raises unless x is a term of the edges for heads of this size; None: one number per head."""
    num_edges, where = check.graph.num_edges, f"edge.{name}"
    if isinstance(x, Projected):
        check.tensor(f"{where}.attr", x.attr, [(num_edges, None)])
        rows = heads if size is None else heads * size
        check.tensor(f"{where}.weight", x.weight, [(rows, x.attr.shape[1])])
        if x.bias is not None:
            check.tensor(f"{where}.bias", x.bias, [(rows,)])
    elif not isinstance(x, Tensor):
        raise check.error(TypeError, where, "a tensor or Projected(attr, weight, bias)", type(x).__name__)
    elif size is None:
        check.tensor(where, x, [(num_edges, heads)], (check.dtype, check.acc))
    else:
        check.tensor(where, x, [(num_edges, heads, size), (num_edges, size)])


def projected(check: Checker, x: Tensor | Projected, heads: int, size: int | None) -> Tensor:
    """A term that has been checked, as a tensor [E, H, D], or [E, H] of numbers."""
    if isinstance(x, Projected):
        # In use twice: the attributes of unused edges may be NaN, and kernels do not write their gradients.
        rows = check.in_use(F.linear(check.in_use(x.attr), x.weight, x.bias))
        return rows if size is None else rows.unflatten(1, (heads, size))
    rows = check.in_use(x)
    return rows if size is None or rows.dim() == 3 else rows.unsqueeze(1).expand(-1, heads, -1)


def sort_out(check: Checker, edge: EdgeTerm | None, heads: int, dim: int, value_dim: int) -> EdgeSorted:
    """Checks the terms of keys and values of dot attention and sorts them. dim, value_dim: sizes of a head of
    keys and of values."""
    if edge is None:
        return EdgeSorted()
    key, value, _ = given_terms(check, edge, ("key", "value"))
    for name, x, size in (("key", key, dim), ("value", value, value_dim)):
        if x is not None:
            check_term(check, name, x, heads, size)
    flags = (FEAT_IN_KEY if key is not None else 0) | (FEAT_IN_VALUE if value is not None else 0)
    if not flags:
        return EdgeSorted()
    one = value if key is None or key is value else key if value is None else None
    if isinstance(one, Tensor) and (one.dim() == 3 or heads == 1):
        return EdgeSorted(check.in_use(one if one.dim() == 3 else one.unsqueeze(1)), flags)
    # By identity, so that what key and value share is one tensor for the engine, too.
    feats: dict[Any, Tensor] = {}
    weights: dict[int, Tensor] = {}

    def of_engine(x: Tensor | Projected | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if x is None:
            return None, None, None
        feat, weight, bias = x if isinstance(x, Projected) else (x, None, None)
        which = id(feat), weight is None
        if which not in feats:
            one_head = weight is None and heads == 1 and feat.dim() == 2
            feats[which] = check.in_use(feat.unsqueeze(1) if one_head else feat)
        if weight is None:
            return feats[which], None, bias
        if id(weight) not in weights:
            weights[id(weight)] = weight.unflatten(0, (heads, -1))
        return feats[which], weights[id(weight)], bias

    key_feat, key_proj, key_bias = of_engine(key)
    value_feat, value_proj, value_bias = of_engine(value)
    # The bias of a projection is the same for all edges, so that it is added to the nodes' keys or values.
    biases = (None if b is None else b.unflatten(0, (heads, -1)) for b in (key_bias, value_bias))
    return EdgeSorted(None, 0, EdgeTerms(key_feat, key_proj, value_feat, value_proj), *biases)
