"""Full-graph attention over several processes, on torch.distributed."""

from ._watch import DeadRankError, watch
from .gradients import average_gradients
from .graph import DistributedGraph

__all__ = ["DeadRankError", "DistributedGraph", "average_gradients", "watch"]
