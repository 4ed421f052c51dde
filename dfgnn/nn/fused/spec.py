"""What a layer consists of, and the layer written once in plain operations.

A layer describes itself by a `LayerSpec`. In eager calls `operator_call` turns it into the operator's
arguments; while a compiler records, `traced` reads it. `spelled` computes the layer operation by operation,
for second derivatives and for compilers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class LayerSpec(NamedTuple):
    """Projections, the terms of the scores, and what follows the attention."""

    #: "additive" (GAT), "additive_v2" (GATv2), "dot", or "gate": no softmax, but a gate per channel.
    score: str
    heads: int
    #: Linear modules, each with H * D columns. ``value`` and ``key`` project the sources, ``query`` and
    #: ``skip`` the destinations. Without key or query, the projection by ``value`` is used. ``skip`` is added
    #: to the attention's result. The query of an additive layer has a term of the score alone.
    value: Any
    key: Any = None
    query: Any = None
    skip: Any = None
    #: Attributes of the edges and the linear module that projects them. In additive layers the product of the
    #: projection and the edges' vector is a term of the score; in other layers the projection is added to
    #: keys, with dot products also to values.
    edges: tuple[Tensor, Any] | None = None
    #: Attention vectors ``[.., H, D]``: those of sources, destinations and edges (additive), or one
    #: (additive_v2).
    vectors: tuple[Tensor, ...] = ()
    bias: Tensor | None = None  # [H * D], added to the result
    negative_slope: float = 1.0
    scale: float = 1.0
    dropout_p: float = 0.0
    #: A tensor or a dtype. The result's dtype is the one to which torch promotes this and the features'.
    wide: Any = None
    mean: bool = False  # in a layer with gates: whether edges are averaged rather than summed


# Score -> the projections in the order in which torch_geometric calls them. The order matters because a lazy
# module draws its parameters at its first call.
_PROJECTIONS = {
    "additive": ("value", "query"),
    "additive_v2": ("value", "query"),
    "dot": ("query", "key", "value"),
    "gate": ("query", "key", "value"),
}


def spelled(
    score: str,
    project: Callable[[str], Any],
    attend: Callable[[Tensor, Any, Any, Any], Tensor],
) -> Tensor:
    """The layer's result ``[num_dst, H * D]`` in plain operations.

    project: returns the rows of the projection of this name, or None if the layer has no such projection.
    attend: returns the result, the bias included, of value, key, query and projected edges.
    """
    edges = project("edge")
    rows: dict[str, Any] = {name: project(name) for name in _PROJECTIONS[score]}
    out = attend(rows["value"], rows.get("key"), rows.get("query"), edges)
    skip = project("skip")
    return out if skip is None else out + skip
