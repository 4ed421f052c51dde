"""Batches of features on one graph: they have one more leading dimension, which is folded into the heads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from .attention_options import EdgeTerm, Projected, ScoreOptions, table

# The arguments that may have a batch dimension, and how many dimensions they have without it. (mask, weight
# and a tensor of scales may be [E] or [E, H]; with a batch of B they are [B, E, H].)
_DIMS = {
    **dict.fromkeys(("query", "key", "value", "edge_attr"), 3),
    **dict.fromkeys(("score_src", "score_dst", "score", "att", "scale", "out_bias", "gate"), 2),
    **{name: option.dims for name, option in table(ScoreOptions).items() if option.dims},
}
# Those of them whose first dimension without a batch is the heads; the others begin with nodes or edges.
_WITHOUT_NODES = "att", "out_bias", "sink"

F = TypeVar("F", bound=Callable[..., Any])


def fold(x: Tensor, dim: int | None, at: int, batch: int, heads: int) -> Tensor:
    """x with its batch dimension ``dim`` (None: x is repeated) merged into its heads, dimension ``at``."""
    if dim is None:
        x = x.unsqueeze(at).expand(*x.shape[:at], batch, *x.shape[at:])
    else:
        x = x.movedim(dim, at)
        if x.shape[at + 1] != heads:  # size 1, shared by all heads
            x = x.expand(*x.shape[: at + 1], heads, *x.shape[at + 2 :])
    return x.flatten(at, at + 1)


def unfold(x: Tensor, batch: int) -> Tensor:
    """``[N, B * H, ...]`` as ``[B, N, H, ...]``: the inverse of `fold`."""
    return x.unflatten(1, (batch, -1)).movedim(1, 0)


def batched(name: str) -> Callable[[F], F]:
    """A decorator: the function takes a batch if its argument ``name``, ``[N, H, D]``, is 4-dimensional."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        place = list(signature.parameters).index(name)

        @functools.wraps(function)
        def call(*args, **kwargs):
            x = args[place] if len(args) > place else kwargs.get(name)
            if isinstance(x, Tensor) and x.dim() == 4:
                given = signature.bind(*args, **kwargs).arguments
                given |= given.pop("options", {})
                return _over_batch(function, given, *x.shape[:3:2])
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _over_batch(function: Callable, arguments: dict[str, Any], batch: int, heads: int) -> Any:
    score_fn = arguments.get("score_fn")
    if score_fn is not None:  # flex_attention, whose query, key and edge_attr may have any shape
        arguments["score_fn"] = _for_batch(score_fn, batch)
        for name in ("query", "key"):
            arguments[name] = fold(arguments[name], 0, 1, batch, arguments[name].shape[2])
    for name, x in arguments.items():
        if isinstance(x, EdgeTerm):
            arguments[name] = _folded_terms(function.__name__, x, batch, heads)
        if not isinstance(x, Tensor) or score_fn is not None and name in ("query", "key", "edge_attr"):
            continue
        if name in _DIMS:
            arguments[name] = _folded(function.__name__, name, x, batch, heads)
        elif name == "beta" and x.dim() > 1:  # it may be of any shape that broadcasts against [B, N, H, D]
            x = x[(None,) * (4 - x.dim())]
            arguments[name] = fold(x.expand(batch, -1, heads, -1), 0, 1, batch, heads)
    results = function(**arguments)
    if isinstance(results, Tensor):
        return unfold(results, batch)
    return type(results)._make(x if x is None else unfold(x, batch) for x in results)


def _folded_terms(function: str, terms: EdgeTerm, batch: int, heads: int) -> EdgeTerm:
    """The edges' terms with their batch folded into the heads. What key and value share stays one object."""
    done: dict[int, Any] = {}

    def folded(name: str, x: Any) -> Any:
        if id(x) not in done:
            if isinstance(x, Projected):  # alike for the whole batch, as are the edges' attributes
                bias = x.bias if x.bias is None else x.bias.repeat(batch)
                done[id(x)] = Projected(x.attr, x.weight.repeat(batch, 1), bias)
            else:
                done[id(x)] = _folded(function, f"edge.{name}", x, batch, heads, 2 if name == "score" else 3)
        return done[id(x)]

    return EdgeTerm(*(x if x is None else folded(name, x) for name, x in terms._asdict().items()))


def _for_batch(score_fn: Callable, batch: int) -> Callable:
    """A score_fn for queries and keys [E, B * H, ...], into whose heads a batch was folded. It calls the
    user's score_fn once, on [B * E, H, ...], and folds the scores [B * E, H] in the same way."""

    def call(q, k, e, *params):
        rows = len(q)
        q, k = (unfold(x, batch).flatten(0, 1) for x in (q, k))
        e = None if e is None else e.repeat(batch, *[1] * (e.dim() - 1))
        scores = score_fn(q, k, e, *params)
        if not isinstance(scores, Tensor) or scores.dim() != 2:
            return scores  # flex_attention raises the error
        return scores.unflatten(0, (batch, rows)).movedim(0, 1).flatten(1)

    return call


def _folded(function: str, name: str, x: Tensor, batch: int, heads: int, dims: int | None = None) -> Tensor:
    dims = _DIMS[name] if dims is None else dims
    if x.dim() < dims:  # [E], which needs no fold: it is shared by all heads
        return x
    is_batched = x.dim() > dims
    if is_batched and (x.dim() > dims + 1 or len(x) != batch):
        raise ValueError(
            f"{function}: {name}: expected a batch of {batch}, or {dims} dimensions for all of it, "
            f"got {list(x.shape)}"
        )
    return fold(x, 0 if is_batched else None, 0 if name in _WITHOUT_NODES else 1, batch, heads)
