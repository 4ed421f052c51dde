"""Full-graph attention over several processes, on torch.distributed."""

from ._watch import DeadRankError, watch
from .graph import DistributedGraph

__all__ = ["DeadRankError", "DistributedGraph", "watch"]
