"""Layers with the contracts of the layers of the same names in ``dgl.nn``; DGL need not be installed.

Where it is, each is a subclass of DGL's, so that ``isinstance``, DGL's own models and whatever asks a layer
for DGL's attributes keep working; where it is not, the same class without that base, with the same
attributes, repr, state_dict and pickles. Classes are made at their first use, which imports dgl;
``import dfgnn`` does not.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from ...graph.of_dgl import stands_for_dgl
from .._errors import DGLError

if TYPE_CHECKING:
    from .agnn import AGNNConv
    from .dotgat import DotGatConv
    from .edgegat import EdgeGATConv
    from .egat import EGATConv
    from .gat import GATConv
    from .gatv2 import GATv2Conv
    from .hgt import HGTConv
    from .pooling import GlobalAttentionPooling

__all__ = [
    "AGNNConv",
    "DGLError",
    "DotGatConv",
    "EGATConv",
    "EdgeGATConv",
    "GATConv",
    "GATv2Conv",
    "GlobalAttentionPooling",
    "HGTConv",
]
_lock = threading.RLock()


def __getattr__(name: str) -> type:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = name.removesuffix("Conv").lower() if name.endswith("Conv") else "pooling"
    ours = getattr(importlib.import_module(f".{home}", __name__), name)
    with _lock:
        if name not in globals():
            theirs = getattr(_dgl_layers(), name, None)  # an older DGL may lack this layer
            bases = (ours,) if theirs is None else (ours, theirs)
            globals()[name] = type(name, bases, {"__module__": __name__, "__doc__": ours.__doc__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@functools.cache
def _dgl_layers() -> ModuleType | None:
    """``dgl.nn.pytorch``; None without DGL, and with a warning where it is there and cannot be imported."""
    # Without this variable DGL prints which backend it chooses, and writes the choice to the home directory.
    untold = "DGLBACKEND" not in os.environ
    if untold:
        os.environ["DGLBACKEND"] = "pytorch"
    try:
        if stands_for_dgl(importlib.import_module("dgl")):
            return None
        return importlib.import_module("dgl.nn.pytorch")
    except Exception as error:  # a library that was built for another torch fails in many ways
        if not (isinstance(error, ModuleNotFoundError) and error.name == "dgl"):
            warnings.warn(
                "dgl is installed, but importing it fails, so that dfgnn's layers are no subclasses of "
                f"its own: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
        return None
    finally:
        if untold:
            os.environ.pop("DGLBACKEND", None)
