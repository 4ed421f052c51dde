"""``dgl.utils``: the functions that layers outside of DGL use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..nn.dgl import DGLError


def expand_as_pair(input_: Any, g: Any = None) -> tuple[Any, Any]:
    """(features of sources, of destinations): a pair is returned unchanged, one tensor (or dictionary) is
    used for both; a block's destinations are the first rows."""
    if isinstance(input_, tuple):
        return input_
    if g is not None and g.is_block:
        if isinstance(input_, Mapping):
            return input_, {kind: x[: g.num_dst_nodes(kind)] for kind, x in input_.items()}
        return input_, input_[: g.num_dst_nodes()]
    return input_, input_


def check_eq_shape(input_: Any) -> None:
    src, dst = expand_as_pair(input_)
    if src.shape[1:] != dst.shape[1:]:
        raise DGLError(
            "features of sources and destinations: expected one shape, "
            f"got {list(src.shape[1:])} and {list(dst.shape[1:])}"
        )
