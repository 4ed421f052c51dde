"""Sets of features on one graph: a dimension in front of functions' tensors, which are further heads to the
engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

# The tensors that may have the dimension, and how many they have without it. Of a batch edge_gate, edge_mask
# and edge_weight have three, for [E, H] has two without.
_DIMS = {
    **dict.fromkeys(("feat", "x_src", "x_dst", "query", "key", "value", "edge_feat", "edge_feat_value"), 3),
    **dict.fromkeys(("alpha_src", "alpha_dst", "attn", "out_bias"), 2),
    **dict.fromkeys(("edge_bias", "edge_gate", "edge_mask", "edge_weight", "score"), 2),
    "sink": 1,
}
_WITHOUT_NODES = "attn", "out_bias", "sink"
# Those of projected edge features, which all sets share: they have the heads' rows one after the other.
_PROJECTIONS = "edge_proj", "edge_proj_bias", "edge_proj_value", "edge_proj_bias_value"

F = TypeVar("F", bound=Callable[..., Any])


def fold(x: Tensor, dim: int | None, at: int, batch: int, heads: int) -> Tensor:
    """x with its batch ``dim`` (None: x is repeated) before its heads, dimension ``at``, as more heads."""
    if dim is None:
        x = x.unsqueeze(at).expand(*x.shape[:at], batch, *x.shape[at:])
    else:
        x = x.movedim(dim, at)
        if x.shape[at + 1] != heads:  # one for all heads
            x = x.expand(*x.shape[: at + 1], heads, *x.shape[at + 2 :])
    return x.flatten(at, at + 1)


def unfold(x: Tensor, batch: int) -> Tensor:
    """``[B, N, H, ...]`` of ``[N, B * H, ...]``."""
    return x.unflatten(1, (batch, -1)).movedim(1, 0)


def batched(by: str) -> Callable[[F], F]:
    """A function that takes sets of features where its tensor ``by``, ``[N, H, D]``, has a dimension more."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        place = list(signature.parameters).index(by)

        @functools.wraps(function)
        def call(*args, **kwargs):
            x = args[place] if len(args) > place else kwargs.get(by)
            if isinstance(x, Tensor) and x.dim() == 4:
                given = signature.bind(*args, **kwargs).arguments
                return _over_batch(function, given, *x.shape[:3:2])
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _over_batch(function: Callable, given: dict[str, Any], batch: int, heads: int) -> Any:
    score_fn = given.get("score_fn")
    if score_fn is not None:  # of flex_attention: rows of any form
        given["score_fn"] = _of_sets(score_fn, batch)
        given |= {name: fold(given[name], 0, 1, batch, given[name].shape[2]) for name in ("query", "key")}
    for name, x in given.items():
        if not isinstance(x, Tensor) or score_fn is not None and name in ("query", "key", "edge_feat"):
            continue
        if name in _DIMS:
            given[name] = _folded(function.__name__, name, x, batch, heads)
        elif name in _PROJECTIONS:
            given[name] = x.repeat(batch, *[1] * (x.dim() - 1))
        elif name == "edge_table":
            given[name] = x.repeat(1, batch, 1)
        elif name == "beta" and x.dim() > 1:  # broadcasts against [B, N, H, D]
            x = x[(None,) * (4 - x.dim())]
            given[name] = fold(x.expand(batch, -1, heads, -1), 0, 1, batch, heads)
    found = function(**given)
    if isinstance(found, tuple):
        return tuple(unfold(x, batch) for x in found)
    return unfold(found, batch)


def _of_sets(score_fn: Callable, batch: int) -> Callable:
    """score_fn of rows of all sets as one of rows whose heads are those of all sets."""

    def call(q, k, e, *params):
        rows = len(q)
        q, k = (unfold(x, batch).flatten(0, 1) for x in (q, k))
        e = None if e is None else e.repeat(batch, *[1] * (e.dim() - 1))
        scores = score_fn(q, k, e, *params)
        if not isinstance(scores, Tensor) or scores.dim() != 2:
            return scores  # which is refused
        return scores.unflatten(0, (batch, rows)).movedim(0, 1).flatten(1)

    return call


def _folded(function: str, name: str, x: Tensor, batch: int, heads: int) -> Tensor:
    dims = _DIMS[name]
    if x.dim() < dims:  # [E], alike for all heads
        return x
    own = x.dim() > dims
    if own and (x.dim() > dims + 1 or len(x) != batch):
        raise ValueError(
            f"{function}: {name}: expected a batch of {batch}, or {dims} dimensions for all of it, "
            f"got {list(x.shape)}"
        )
    return fold(x, 0 if own else None, 0 if name in _WITHOUT_NODES else 1, batch, heads)
