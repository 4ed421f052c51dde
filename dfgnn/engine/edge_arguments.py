"""Checks the arguments of dot attention that say what an edge adds to key and value, and sorts them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..runtime.arguments import FEAT_IN_KEY, FEAT_IN_VALUE
from .argument_checks import Checker
from .inputs import EdgeTerms


class EdgeGiven(NamedTuple):
    """The arguments as they were given; the public functions describe them."""

    feat_in: str
    feat: Tensor | None
    feat_value: Tensor | None
    attr: Tensor | None
    proj: Tensor | None
    proj_value: Tensor | None
    proj_bias: Tensor | None
    proj_bias_value: Tensor | None
    bias_after: bool


class EdgeSorted(NamedTuple):
    """How the engine takes the arguments: either as one tensor of features that the attention operators add,
    or as terms that `edge_projection` computes, or not at all."""

    feat: Tensor | None = None  # [E, H, D], the operators' edge_feat
    flags: int = 0  # the bits FEAT_IN_KEY, FEAT_IN_VALUE: what feat is added to
    terms: EdgeTerms | None = None  # the terms that `edge_projection` computes
    key_bias: Tensor | None = None  # [H, D], to be added to the nodes' keys
    value_bias: Tensor | None = None  # [H, D], to be added to the nodes' values


def value_size(check: Checker, given: EdgeGiven, dim: int) -> int | None:
    """The size that a head of values must have: that of keys, if one feature is added to both; None: any."""
    if given.feat_in not in ("key", "value", "both"):
        raise check.error(ValueError, "edge_feat_in", "'key', 'value' or 'both'", repr(given.feat_in))
    has_any = not (given.feat is None and given.attr is None)
    return dim if given.feat_in == "both" and has_any and not _separate(given) else None


def sort_out(check: Checker, given: EdgeGiven, heads: int, dim: int, value_dim: int) -> EdgeSorted:
    """Checks the arguments and sorts them. dim, value_dim: sizes of a head of keys and of values."""
    if all(x is None for x in given[1:-1]):
        return EdgeSorted()
    if _separate(given) and given.feat_in != "both":
        what = "edge_feat_value" if given.feat_value is not None else "edge_proj_value"
        raise check.error(ValueError, "edge_feat_in", f"'both' with {what}", repr(given.feat_in))
    if given.attr is None:
        _refuse(check, "without edge_attr", given, _PROJECTIONS)
        return _features(check, given, heads, dim, value_dim)
    return _projections(check, given, heads, dim, value_dim)


_PROJECTIONS = ("proj", "proj_value", "proj_bias", "proj_bias_value")


def _separate(given: EdgeGiven) -> bool:
    return given.feat_value is not None or given.proj_value is not None


def _refuse(check: Checker, where: str, given: EdgeGiven, names) -> None:
    for name in names:
        x = getattr(given, name)
        if x is not None:
            raise check.error(ValueError, f"edge_{name}", f"None {where}", type(x).__name__)


def _features(check: Checker, given: EdgeGiven, heads: int, dim: int, value_dim: int) -> EdgeSorted:
    num_edges = check.graph.num_edges
    sizes = {"feat": value_dim if given.feat_in == "value" else dim, "feat_value": value_dim}
    for name, size in sizes.items():
        x: Any = getattr(given, name)
        if x is not None:
            check.tensor(f"edge_{name}", x, [(num_edges, heads, size), (num_edges, size)])
            if x.dim() == 2 and heads == 1:
                given = given._replace(**{name: x.unsqueeze(1)})
    key = given.feat if given.feat_in != "value" else None
    value = given.feat_value if _separate(given) else given.feat if given.feat_in != "key" else None
    flags = (FEAT_IN_KEY if key is not None else 0) | (FEAT_IN_VALUE if value is not None else 0)
    one = value if key is None or key is value else key if value is None else None
    if one is None and flags == 0:
        return EdgeSorted()
    if one is not None and one.dim() == 3:
        return EdgeSorted(one, flags)
    if given.bias_after and key is not None:
        what = "edge_feat [E, D]" if key.dim() == 2 else "edge_feat_value and edge_feat"
        raise check.error(ValueError, "bias_after", f"False with {what}", given.bias_after)
    in_value = check.in_use(value)
    in_key = in_value if key is value else check.in_use(key)
    return EdgeSorted(terms=EdgeTerms(in_key, None, in_value, None))


def _projections(check: Checker, given: EdgeGiven, heads: int, dim: int, value_dim: int) -> EdgeSorted:
    attr, proj, proj_value = given.attr, given.proj, given.proj_value
    check.tensor("edge_attr", attr, [(check.graph.num_edges, None)])
    assert attr is not None
    if proj is None and proj_value is None:
        raise check.error(ValueError, "edge_proj", "a tensor, the projection of edge_attr", None)
    first = value_dim if given.feat_in == "value" else dim
    for suffix, size in (("", first), ("_value", value_dim)):
        weight, bias = getattr(given, f"proj{suffix}"), getattr(given, f"proj_bias{suffix}")
        if weight is not None:
            check.tensor(f"edge_proj{suffix}", weight, [(heads * size, attr.shape[1])])
            if bias is not None:
                check.tensor(f"edge_proj_bias{suffix}", bias, [(heads * size,)])
        elif bias is not None:
            what = f"None without edge_proj{suffix}"
            raise check.error(ValueError, f"edge_proj_bias{suffix}", what, type(bias).__name__)
    for name, x in (("edge_feat", given.feat), ("edge_feat_value", given.feat_value)):
        if x is not None:
            raise check.error(ValueError, name, "None with edge_attr", "both")
    if given.bias_after:
        raise check.error(ValueError, "bias_after", "False with edge_attr", given.bias_after)

    def of_heads(x):
        return None if x is None else x.unflatten(0, (heads, -1))

    attr, weight, bias = check.in_use(attr), of_heads(proj), of_heads(given.proj_bias)
    nothing = None, None, None
    key = (attr, weight, bias) if given.feat_in != "value" and weight is not None else nothing
    if proj_value is not None:
        value = attr, of_heads(proj_value), of_heads(given.proj_bias_value)
    else:
        value = (attr, weight, bias) if given.feat_in != "key" else nothing
    # The bias of a projection is the same for all edges, so that it is added to the nodes' keys or values.
    return EdgeSorted(None, 0, EdgeTerms(key[0], key[1], value[0], value[1]), key[2], value[2])
