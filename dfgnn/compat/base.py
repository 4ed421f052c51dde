"""``dgl.base``: symbols and names that DGL's functions share."""

from __future__ import annotations

from typing import Any

from ..nn.dgl import DGLError

#: Stands for all nodes, or all edges.
ALL = "__ALL__"
#: Names of the features that :func:`~dfgnn.compat.to_homogeneous`, subgraphs and blocks set.
NTYPE, ETYPE, NID, EID = "_TYPE", "_TYPE", "_ID", "_ID"


def is_all(arg: Any) -> bool:
    """Whether an argument is the symbol for all nodes, or all edges."""
    return isinstance(arg, str) and arg == ALL


def is_internal_column(name: str) -> bool:
    """Whether it is the name of a feature that DGL's functions set."""
    return name in (NTYPE, NID)


__all__ = ["ALL", "EID", "ETYPE", "NID", "NTYPE", "DGLError", "is_all", "is_internal_column"]
