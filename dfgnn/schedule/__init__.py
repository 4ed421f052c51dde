"""The scheduler: from the degree distribution of a graph to a plan of work items.

``choose`` describes the schedules and takes one; ``tiles`` builds the dense blocks; ``tuning`` measures.
"""

from .choose import (
    LEAST_BOUND,
    ROW_SCHEDULES,
    SCHEDULES,
    Candidate,
    Plan,
    alternatives,
    parse,
    plan,
    sub_warps,
)

__all__ = [
    "LEAST_BOUND",
    "ROW_SCHEDULES",
    "SCHEDULES",
    "Candidate",
    "Plan",
    "alternatives",
    "parse",
    "plan",
    "sub_warps",
]
