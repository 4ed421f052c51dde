"""The scheduler: from the degree distribution of a graph to a plan of work items.

``plans``      the record of a plan, and the feature shape that it is made for
``device``     the device's properties that the cost estimates need
``items``      cuts rows into work items; ``tiles`` cuts them into dense blocks
``direction``  one direction of a graph, and what its plans share
``cost``       estimates what a schedule costs
``choose``     describes the schedules and chooses one
``planner``    caches the plans of a graph; ``handles`` makes new graphs' in one call; ``tuning`` measures
"""

from .choose import parse
from .cost import LEAST_BOUND, sub_warps
from .planner import Planner, alternatives, plan
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
    "padded",
    "parse",
    "plan",
    "sub_warps",
]
