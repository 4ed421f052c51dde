"""Where the time of a training step goes: ``dfgnn.profile``."""

from .report import Comparison, Profile
from .run import profile, profile_accelerated

__all__ = ["Comparison", "Profile", "profile", "profile_accelerated"]
