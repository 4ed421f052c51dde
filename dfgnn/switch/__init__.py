"""Makes code that was written for DGL or torch_geometric use dfgnn's layers.

``replace``      replaces layers of a model (accelerate), or a library's names in all modules (patch)
``subclasses``   does so for subclasses of a library's layers
``pieces``       replaces softmax and sums by index, of which scripts build attention themselves
``checkpoints``  converts state dicts between libraries
"""

from .checkpoints import convert_state_dict
from .replace import Report, accelerate, patch, restore

__all__ = ["Report", "accelerate", "convert_state_dict", "patch", "restore"]
