"""The scheduler: from the degree distribution of a graph to a plan of work items.

``plans``      what a plan is, and the feature shape that it is for
``device``     what is known of the device
``items``      rows cut into items, ``tiles`` into dense blocks
``direction``  one direction of a graph, and what its plans share
``cost``       what a schedule costs
``choose``     describes the schedules and takes one
``planner``    keeps the plans of a graph, ``tuning`` measures them
"""

from .choose import parse
from .cost import LEAST_BOUND, sub_warps
from .planner import Planner, alternatives, most_partial_bytes, plan
from .plans import ROW_SCHEDULES, SCHEDULES, Candidate, Plan, Shape, padded

__all__ = [
    "LEAST_BOUND",
    "ROW_SCHEDULES",
    "SCHEDULES",
    "Candidate",
    "Plan",
    "Planner",
    "Shape",
    "alternatives",
    "most_partial_bytes",
    "padded",
    "parse",
    "plan",
    "sub_warps",
]
