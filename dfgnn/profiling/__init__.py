"""Where a training step's time goes, ``dfgnn.profile``, and which path a call takes, ``dfgnn.explain``."""

from .explain import AttentionCall, Explanation, explain
from .report import Comparison, Profile
from .run import profile, profile_accelerated

__all__ = [
    "AttentionCall",
    "Comparison",
    "Explanation",
    "Profile",
    "explain",
    "profile",
    "profile_accelerated",
]
