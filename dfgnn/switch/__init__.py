"""Bringing the layers into code that was written for DGL or torch_geometric.

``replace``      layers in place, and names of a library everywhere
``subclasses``   layers that wrap a library's
``pieces``       functions that attention is spelled out of
``checkpoints``  state dicts of one library for the layers of another
"""

from .checkpoints import convert_state_dict
from .replace import Report, accelerate, patch, restore

__all__ = ["Report", "accelerate", "convert_state_dict", "patch", "restore"]
