"""Makes code that was written for DGL or torch_geometric use dfgnn's layers.

``replace``      replaces layers of a model (accelerate), or a library's names in all modules (patch)
``subclasses``   does so for subclasses of a library's layers
``pieces``       replaces softmax and sums by index, of which scripts build attention themselves
``checkpoints``  converts state dicts between libraries
``explain``      says which path a call takes, and why not a faster one
``profile``      says what a training step waits for, by what ``trace`` reads from torch.profiler's events
"""

from .checkpoints import convert_state_dict
from .explain import AttentionCall, Explanation, explain
from .profile import Profile, profile
from .replace import Report, accelerate, patch, restore

__all__ = [
    "AttentionCall",
    "Explanation",
    "Profile",
    "Report",
    "accelerate",
    "convert_state_dict",
    "explain",
    "patch",
    "profile",
    "restore",
]
